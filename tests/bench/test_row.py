"""Row files: rows that are whole or absent, and errors that name file and line."""

import json
import logging
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from cs336_systems.bench import row as row_module
from cs336_systems.bench.row import Row, append_row, read_rows
from tests.training.helpers import largest_file

ROOT = Path(__file__).parents[2]
ROW = Row(case="c", variant="v", config={}, env={})


def test_rows_survive_writing_and_reading(tmp_path: Path) -> None:
    rows = [Row(case="c", variant=v, config={"a": [1, None]}, metrics={"x": 0.1}, env={"gpu": None}) for v in "ab"]
    for row in rows:
        append_row(tmp_path / "deep" / "rows.jsonl", row)
    assert read_rows(tmp_path / "deep" / "rows.jsonl") == rows


def test_a_row_that_cannot_be_written_leaves_nothing_and_its_file_is_named(tmp_path: Path) -> None:
    path, row = tmp_path / "rows.jsonl", replace(ROW, config={"long": "x" * 900})
    append_row(path, row)
    with largest_file(1024), pytest.raises(OSError, match=re.escape(str(path))):
        append_row(path, row)
    assert read_rows(path) == [row]
    append_row(path, row)
    assert read_rows(path) == [row, row]


def test_a_row_replaces_another_row_and_an_incomplete_line(tmp_path: Path) -> None:
    path, again = tmp_path / "rows.jsonl", replace(ROW, metrics={"x": 1.0})
    other = replace(ROW, variant="other")
    for row in (ROW, other):
        append_row(path, row)
    with path.open("a") as file:
        file.write('{"case": "c')
    append_row(path, again, instead_of=ROW)
    assert read_rows(path) == [again, other]
    append_row(path, ROW, instead_of=ROW)  # is no longer there
    assert read_rows(path) == [again, other, ROW]


def test_a_row_begins_on_a_new_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(asdict(ROW)))
    append_row(path, ROW)
    assert read_rows(path) == [ROW, ROW]


def test_no_row_is_lost_if_another_process_replaces_the_file_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcntl = pytest.importorskip("fcntl")
    path, more = tmp_path / "rows.jsonl", replace(ROW, metrics={"x": 1.0})
    append_row(path, ROW)

    def flock(*_: Any) -> None:
        """Return the lock late: the process that held it has replaced the file."""
        monkeypatch.setattr(fcntl, "flock", lambda *_: None)
        append_row(path, more, instead_of=ROW)

    monkeypatch.setattr(fcntl, "flock", flock)
    append_row(path, ROW)
    assert read_rows(path) == [more, ROW]


@pytest.mark.parametrize("left", ["{", '{"ca', '{"case": "m', json.dumps(asdict(ROW))[:50]])
def test_a_row_replaces_the_beginning_left_by_a_killed_process(tmp_path: Path, left: str) -> None:
    path = tmp_path / "rows.jsonl"
    append_row(path, ROW)
    with path.open("a") as file:
        file.write(left)
    append_row(path, ROW)
    assert path.read_text() == f"{json.dumps(asdict(ROW))}\n" * 2


def test_an_incomplete_last_line_is_skipped_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    line = json.dumps(asdict(ROW))
    (tmp_path / "rows.jsonl").write_text(f"{line}\n{line[:-5]}")
    with caplog.at_level(logging.WARNING, logger=row_module.__name__):
        assert read_rows(tmp_path / "rows.jsonl") == read_rows(tmp_path / "rows.jsonl") == [ROW]
    assert caplog.text.count("rows.jsonl, line 2 was cut short") == 1


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "is not JSON"),
        ("", "is not JSON"),
        ("[]", "must be an object"),
        ("{}", "with exactly case, variant, "),
        (json.dumps(asdict(ROW) | {"more": 1}), "with exactly case, variant, "),
        (json.dumps(asdict(ROW) | {"variant": None}), "variant is null: it must be text"),
        (json.dumps(asdict(ROW) | {"config": None}), "config is null: it must be an object"),
        (json.dumps(asdict(ROW) | {"status": "fine"}), "status is 'fine': .* ok, oom, error"),
        (json.dumps(asdict(ROW) | {"metrics": {"step_ms": {"p50": float("nan")}}}), "metrics.step_ms.p50 is nan"),
    ],
)
def test_a_line_that_is_not_a_row_is_refused(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(asdict(ROW))}\n{line}\n")
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line 2.*{message}"):
        read_rows(tmp_path / "rows.jsonl")


def test_metrics_may_be_null_and_infinite_in_failed_rows(tmp_path: Path) -> None:
    rows = [replace(ROW, metrics={"mfu": None, "step_ms": None, "overlapped": 1, "streams": "file"}),
            replace(ROW, status="error", metrics={"first_loss": float("inf"), "streams": 2})]  # fmt: skip
    for row in rows:
        append_row(tmp_path / "rows.jsonl", row)
    assert read_rows(tmp_path / "rows.jsonl") == rows


def test_all_committed_rows_are_valid() -> None:
    files = [path for path in (ROOT / "results").rglob("*.jsonl") if path.name != "metrics.jsonl"]
    assert sum(len(read_rows(path)) for path in files) > 1000


def test_a_missing_row_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder"):
        read_rows(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"row file .*no\.jsonl does not exist"):
        read_rows(tmp_path / "no.jsonl")
