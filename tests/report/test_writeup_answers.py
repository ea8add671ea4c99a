"""Sentences of the write-up that speak of several files of rows, and what they say where rows are few or disagree."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cs336_systems.bench.case import Row, append_row
from cs336_systems.report.writeup import claims, memory
from cs336_systems.report.writeup.build import find_rows
from cs336_systems.report.writeup.problem import RowFile, evidence_of
from cs336_systems.report.writeup.problems import PROBLEMS

from .test_writeup import ENV, evidence, of_ddp, recorded, row


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


H200 = {**ENV, "gpu": "NVIDIA H200"}


def of_model(length: int, mode: str, precision: str, gib: float, **more: Any) -> Row:
    made = row("model", metrics={"peak_memory_bytes": gib * 2**30}, size="2.7B", context_length=length, mode=mode,
               precision=precision)  # fmt: skip
    return replace(made, env=H200, **more)


def test_the_step_that_is_told_is_the_one_that_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = {"ms": [0.0, 1.0], "in_use": {"activations": [1, 2]}, "phases": {"optimizer": [0.0, 1.0]}}
    rows = [recorded(mode, peak << 30, length=length, timeline=timeline)
            for mode, peak, length in (("forward", 7, 128), ("train_step", 9, 128), ("forward", 8, 512),
                                       ("train_step", 20, 512))]  # fmt: skip
    failed = replace(recorded("train_step", 99 << 30, length=2048, timeline=timeline), status="oom")
    drawn: list[Row] = []
    monkeypatch.setattr(memory, "draw_timeline", lambda each, path: drawn.append(each))
    for _, draw in next(each for each in PROBLEMS if each.name == "memory_profiling").exhibits[0].pictures:
        draw([RowFile(tmp_path / "rows.jsonl", [*rows, failed])], tmp_path / "out.png")
    assert [(each.variant, each.config["context_length"]) for each in drawn] == [("forward", 512), ("train_step", 512)]
    said = memory.memory_over_time(evidence(*rows, failed)) or ""
    assert said.startswith("(a) A train step of 2.7B, 512 tokens, fp32 peaks at 20 GiB")
    assert "keeps nothing for later: it peaks at 8 GiB" in said


def test_peaks_by_precision_are_of_either_case_and_told_at_each_length() -> None:
    rows = [of_model(512, "forward", "fp32", 13.2), of_model(512, "forward", "bf16", 19.3)]
    rows += [of_model(128, "train_step", "fp32", 51.3), of_model(128, "train_step", "bf16", 51.1)]
    rows += [of_model(1024, "train_step", "fp32", 88.0), of_model(1024, "train_step", "bf16", 84.4)]
    of_profiler = [replace(recorded(mode, 51 << 30, precision=p), env=H200)
                   for mode, p in (("forward", "fp32"), ("train_step", "fp32"), ("train_step", "bf16"))]  # fmt: skip
    said = memory.memory_by_precision(evidence(*rows, *of_profiler)) or ""
    assert "a forward pass goes from 13.2 GiB to 19.3 GiB, +46%, at 512 tokens" in said
    assert "from 51 GiB to 51 GiB, no change, at 128 tokens and from 88 GiB to 84.4 GiB, -4%, at 1024 tokens" in said
    assert "the copies, which are kept until the loss is there, are 6.3 GiB" in said
    assert "is less by 1.25 GiB at 128 tokens and 10 GiB at 1024 tokens; at 128 tokens the step peaks at" in said
    other = memory.memory_by_precision(evidence(*rows[:-1], of_model(1024, "train_step", "bf16", 95.0))) or ""
    assert "1024 tokens" in other
    assert "10 GiB at 1024" not in other  # which the planner does not have


def test_a_step_that_the_card_has_no_memory_for_is_said_and_a_length_without_a_forward_pass() -> None:
    rows = [of_model(128, mode, "fp32", 40.0) for mode in ("forward", "train_step")]
    said = memory.peaks_by_length(evidence(*rows))
    assert "counts 171 GiB at 2048 tokens: it does not fit in the card's 139 GiB (H200)." in said
    assert said.endswith("A forward pass at 2048 tokens is not measured yet.")
    failed = of_model(2048, "train_step", "bf16", 0.0, status="oom", metrics={})
    assert "in bf16, for which it counts 158 GiB at 2048 tokens, it was measured and is out of memory." in (
        memory.peaks_by_length(evidence(*rows, failed))
    )
