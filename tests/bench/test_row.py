"""Row files: rows that are whole or absent, and errors that name file and line."""

import errno
import json
import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from cs336_systems.bench import row as row_module
from cs336_systems.bench.row import Row, append_row, read_rows

ROOT = Path(__file__).parents[2]
ROW = Row(case="c", variant="v", config={}, env={})


def test_rows_survive_writing_and_reading(tmp_path: Path) -> None:
    rows = [Row(case="c", variant=v, config={"a": [1, None]}, metrics={"x": 0.1}, env={"gpu": None}) for v in "ab"]
    for row in rows:
        append_row(tmp_path / "deep" / "rows.jsonl", row)
    assert read_rows(tmp_path / "deep" / "rows.jsonl") == rows


def test_a_row_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FullDisk:
        """A file that takes three bytes."""

        def __init__(self, file: Any) -> None:
            self.file, self.room = file, 3

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def __enter__(self) -> "FullDisk":
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, data: bytes) -> int:
            if not self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            done, self.room = self.file.write(data[: self.room]), 0
            return int(done)

    path, real = tmp_path / "rows.jsonl", Path.open
    append_row(path, ROW)
    monkeypatch.setattr(Path, "open", lambda self, *a, **k: FullDisk(real(self, *a, **k)))
    with pytest.raises(OSError, match="No space left"):
        append_row(path, ROW)
    monkeypatch.undo()
    append_row(path, ROW)
    assert read_rows(path) == [ROW, ROW]


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


def test_a_row_begins_on_a_new_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(asdict(ROW)))
    append_row(path, ROW)
    assert read_rows(path) == [ROW, ROW]


@pytest.mark.parametrize("left", ["{", '{"ca', '{"case": "m', json.dumps(asdict(ROW))[:50]])
def test_a_row_replaces_the_beginning_left_by_a_killed_process(tmp_path: Path, left: str) -> None:
    path = tmp_path / "rows.jsonl"
    append_row(path, ROW)
    with path.open("a") as file:
        file.write(left)
    append_row(path, ROW)
    assert path.read_text() == f"{json.dumps(asdict(ROW))}\n" * 2


def test_an_incomplete_last_line_is_skipped_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    line = json.dumps(asdict(ROW))
    (tmp_path / "rows.jsonl").write_text(f"{line}\n{line[:-5]}")
    with caplog.at_level(logging.WARNING, logger=row_module.__name__):
        assert read_rows(tmp_path / "rows.jsonl") == [ROW]
    assert "rows.jsonl, line 2 was cut short" in caplog.text


@pytest.mark.parametrize(
    "line, message", [("{", "is not JSON"), ("", "is not JSON"), ("[]", "must be an object"), ("{}", "has no case")]
)
def test_a_line_that_is_not_a_row_is_refused(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(asdict(ROW))}\n{line}\n")
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line 2.*{message}"):
        read_rows(tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"more": 1}, "has 'more'"),
        ({"variant": None}, "variant .* None"),
        ({"variant": "a\nb"}, "variant .* a line of printable text"),
        ({"variant": "\ud800"}, "variant .* a line of printable text"),
        ({"env": {"gpu": "a\n\nb"}}, "env.gpu .* a line of printable text"),
        ({"env": {"commit": "\x1b"}}, "env.commit .* a line of printable text"),
        ({"config": []}, r"config .* \[\]"),
        ({"metrics": "fast"}, "metrics .* 'fast'"),
        ({"metrics": {"step_ms": "abc"}}, "metrics.step_ms 'abc': .* an object"),
        ({"metrics": {"step_ms": 3.0}}, "metrics.step_ms 3.0: .* an object"),
        ({"metrics": {"step_ms": {"p50": 1.0, "p80": "abc"}}}, "metrics.step_ms.p80 'abc': .* a number"),
        ({"metrics": {"step_ms": {"p50": None}}}, "metrics.step_ms.p50 None: .* a number"),
        ({"metrics": {"steps_ms": [1, "a"]}}, "metrics.steps_ms.1 'a': .* a number"),
        ({"metrics": {"steps_ms": {}}}, "metrics.steps_ms {}: .* a list of numbers"),
        ({"metrics": {"spread_ms": True}}, "metrics.spread_ms True: .* a number"),
        ({"metrics": {"timer": 3}}, "metrics.timer 3: .* a string"),
        ({"metrics": {"spans": []}}, r"metrics.spans \[\]: .* an object"),
        ({"metrics": {"gathers": 1}}, "metrics.gathers 1: .* a list"),
        ({"status": "fine"}, "status .*'v' .*'fine': .* ok, oom, error"),
    ],
)
def test_a_row_with_an_invalid_field_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    lines = [json.dumps(asdict(ROW)), json.dumps(asdict(ROW) | changes)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
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
