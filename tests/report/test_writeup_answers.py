"""Sentences of the write-up that speak of several files of rows, and what they say where rows are few or disagree."""

from dataclasses import replace
from pathlib import Path

from cs336_systems.bench.case import Row, append_row
from cs336_systems.report.writeup import claims
from cs336_systems.report.writeup.build import find_rows
from cs336_systems.report.writeup.problem import evidence_of

from .test_writeup import of_ddp


def with_commit(rows: list[Row], commit: str) -> list[Row]:
    return [replace(each, env={**each.env, "commit": commit}) for each in rows]


def test_of_two_files_of_one_day_that_in_the_upper_folder_is_the_later_one(tmp_path: Path) -> None:
    current, earlier = of_ddp(alone=100.0), with_commit(of_ddp(alone=200.0), "def5678")
    for folder, rows in (("strategies", current), ("strategies/earlier", earlier)):
        append_row(tmp_path / folder / "ddp.jsonl", rows[0])
    e = evidence_of("made_up", find_rows(tmp_path))
    assert [claims.p50(run[0]) for run in e.runs("ddp")] == [200.0, 100.0]
    assert [claims.p50(row) for row in e.ok("ddp")] == [100.0]
    append_row(tmp_path / "strategies/earlier/again/ddp.jsonl", of_ddp("2026-01-02", alone=300.0)[0])
    assert [claims.p50(row) for row in evidence_of("made_up", find_rows(tmp_path)).ok("ddp")] == [300.0]
