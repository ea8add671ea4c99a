"""Documents whose numbers are filled in by commands."""

import contextlib
import errno
import json
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from cs336_systems.bench import row as case
from cs336_systems.bench.row import Row, append_row, read_rows
from cs336_systems.report.documents import fill_blocks, update_document, update_documents
from cs336_systems.report.markdown import markdown_table
from cs336_systems.report.run_folders import plot_runs, runs_table, summary_block
from cs336_systems.report.views import rows_table

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "results/cpu/demo"
TEXT = """before
<!-- cs336 report runs 'a b' c -->
old
<!-- end -->
between
<!-- cs336 report rows d -->
<!-- end -->
after
"""


def test_blocks_are_replaced_and_nothing_else_is() -> None:
    asked: list[Sequence[str]] = []

    def make(arguments: Sequence[str]) -> str:
        asked.append(arguments)
        return f"table {len(asked)}"

    filled = fill_blocks(TEXT, make)
    assert asked == [["runs", "a b", "c"], ["rows", "d"]]
    assert filled.replace("\ntable 1\n\n", "old\n").replace("\ntable 2\n\n", "") == TEXT
    assert fill_blocks(filled, lambda arguments: "table 1" if arguments[0] == "runs" else "table 2") == filled


def test_what_a_block_is_filled_with_cannot_be_a_command(tmp_path: Path) -> None:
    document = tmp_path / "d.md"
    document.write_text(TEXT)
    for text in ("x <!-- end -->", "x <!-- cs336 report runs a --> y"):
        with pytest.raises(ValueError, match=r"`cs336 report runs 'a b' c` gives text with a comment"):
            update_document(document, lambda _, text=text: text)
    assert document.read_text() == TEXT


def test_the_text_of_a_failure_is_one_line_that_means_nothing_but_itself(tmp_path: Path) -> None:
    error = "out of *luck*\n\n1. ![x](/etc/passwd) <!-- end -->\n```\n\x1b]0;\ud800" + "long " * 200
    path = tmp_path / "rows.jsonl"
    append_row(path, Row(case="model", variant="v", config={"size": "a<b"}, env={}, status="error", error=error))
    *_, failure = rows_table(read_rows(path)).splitlines()
    escaped = r"- failed: out of \*luck\* 1. \!\[x\](/etc/passwd) \<\!-- end --\> \`\`\` ?\]0;?long long "
    assert failure.startswith(escaped)
    assert failure.endswith("...")
    assert len(failure) < 600
    assert r"size a\<b" in rows_table(read_rows(path))


def test_update_says_whether_it_changed_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_text(TEXT)
    assert update_document(path, lambda arguments: "x")
    assert not update_document(path, lambda arguments: "x")
    with pytest.raises(FileNotFoundError, match=r"b\.md does not exist"):
        update_document(tmp_path / "b.md", lambda arguments: "x")


def test_a_document_that_cannot_be_filled_does_not_hide_what_became_of_the_others(tmp_path: Path) -> None:
    a, b, c, gone = (tmp_path / name for name in ("a.md", "b.md", "c.md", "gone.md"))
    for path, text in ((a, TEXT), (b, TEXT.replace("<!-- end -->", "")), (c, "no blocks")):
        path.write_text(text)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        update_documents([a, b, gone, c], lambda arguments: "x")
    told = str(caught.value).split("; ")
    assert (told[0], told[3]) == (f"{a}: made again", f"{c}: up to date")
    assert told[1].startswith(f"document {b}: the block of `cs336 report runs ")
    assert told[2] == f"document {gone} does not exist"
    assert not update_document(a, lambda arguments: "x")
    assert update_documents([a, c], lambda arguments: "y") == [f"{a}: made again", f"{c}: up to date"]


@pytest.mark.parametrize("command", ["update a.md", "writeup --measure", "rows --help", "runs --measure", ""])
def test_a_block_that_no_text_fills_is_named(tmp_path: Path, command: str) -> None:
    (tmp_path / "a.md").write_text(TEXT.replace("rows d", command))
    with pytest.raises(ValueError, match=rf"a\.md: a block is of `cs336 report {command}`, which is no text"):
        update_document(tmp_path / "a.md", lambda arguments: "x")


def test_a_file_that_a_block_is_of_and_that_is_not_there_is_named_with_the_document(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(TEXT)

    def make(arguments: Sequence[str]) -> str:
        raise FileNotFoundError("row file d does not exist")

    with pytest.raises(ValueError, match=r"document .*a\.md: row file d does not exist"):
        update_document(tmp_path / "a.md", make)


@pytest.mark.parametrize("command", ["runs 'a b' c", "rows d"])
def test_a_block_without_an_end_is_named_and_nothing_is_lost(tmp_path: Path, command: str) -> None:
    begin = TEXT.index(command)
    cut = TEXT[:begin] + TEXT[begin:].replace("<!-- end -->\n", "", 1)
    (tmp_path / "a.md").write_text(cut)
    with pytest.raises(ValueError, match=rf"a\.md: the block of `cs336 report {command}` has no <!-- end -->"):
        update_document(tmp_path / "a.md", lambda arguments: "x")
    assert (tmp_path / "a.md").read_text() == cut


def test_a_full_disk_leaves_the_document_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "a.md").write_text(TEXT)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        update_document(tmp_path / "a.md", lambda arguments: "x")
    assert [path.name for path in tmp_path.iterdir()] == ["a.md"]
    assert (tmp_path / "a.md").read_text() == TEXT


def test_line_endings_mode_and_links_are_kept(tmp_path: Path) -> None:
    target, link = tmp_path / "a.md", tmp_path / "link.md"
    target.write_bytes(TEXT.replace("\n", "\r\n").encode())
    target.chmod(0o640)
    link.symlink_to(target)
    assert update_document(link, lambda arguments: "x\ny")
    assert target.read_bytes() == fill_blocks(TEXT, lambda arguments: "x\ny").replace("\n", "\r\n").encode()
    assert target.stat().st_mode & 0o777 == 0o640
    assert link.is_symlink()


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    rows = [Row(case="c", variant=v, config={"a": [1, None]}, metrics={"x": 0.1}, env={"gpu": None}) for v in "ab"]
    for row in rows:
        append_row(tmp_path / "deep" / "rows.jsonl", row)
    assert read_rows(tmp_path / "deep" / "rows.jsonl") == rows


ROW = Row(case="c", variant="v", config={}, env={})


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


def test_a_row_takes_the_place_of_another_and_of_half_a_line(tmp_path: Path) -> None:
    path, again = tmp_path / "rows.jsonl", replace(ROW, metrics={"x": 1.0})
    other = replace(ROW, variant="other")
    for row in (ROW, other):
        append_row(path, row)
    with path.open("a") as file:
        file.write('{"case": "c')
    append_row(path, again, instead_of=ROW)
    assert read_rows(path) == [again, other]
    append_row(path, ROW, instead_of=ROW)  # which is not there any more
    assert read_rows(path) == [again, other, ROW]


def test_a_file_that_another_process_replaces_while_this_one_waits_loses_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, more, lock = tmp_path / "rows.jsonl", replace(ROW, metrics={"x": 1.0}), case._locked
    append_row(path, ROW)

    @contextlib.contextmanager
    def locked(file: Any) -> Iterator[None]:
        with lock(file):
            monkeypatch.setattr(case, "_locked", lock)
            append_row(path, more, instead_of=ROW)  # as by a process that had the lock before: of the other file
            yield

    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    monkeypatch.setattr(case, "_locked", locked)
    append_row(path, ROW)
    assert read_rows(path) == [more, ROW]


def test_a_row_begins_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(asdict(ROW)))
    append_row(path, ROW)
    assert read_rows(path) == [ROW, ROW]


@pytest.mark.parametrize("left", ["{", '{"ca', '{"case": "m'])
def test_however_little_of_a_row_was_written_the_next_one_takes_its_place(tmp_path: Path, left: str) -> None:
    path = tmp_path / "rows.jsonl"
    append_row(path, ROW)
    with path.open("a") as file:
        file.write(left)
    append_row(path, ROW)
    assert path.read_text() == f"{json.dumps(asdict(ROW))}\n" * 2


def test_a_last_line_that_was_cut_short_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    line = json.dumps(asdict(ROW))
    (tmp_path / "rows.jsonl").write_text(f"{line}\n{line[:-5]}")
    with caplog.at_level(logging.WARNING, logger=case.__name__):
        assert read_rows(tmp_path / "rows.jsonl") == [ROW]
    assert "rows.jsonl, line 2 was cut short" in caplog.text


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "is not JSON"),
        ("", "is not JSON"),
        ("[]", "must be an object"),
        ("{}", "has no case"),
        (json.dumps({**asdict(ROW), "more": 1}), "has 'more'"),
        (json.dumps({**asdict(ROW), "variant": None}), "variant of a row is None"),
        (json.dumps({**asdict(ROW), "variant": "a\nb"}), "variant of a row is .* a line of printable text"),
        (json.dumps({**asdict(ROW), "variant": "\ud800"}), "variant of a row is .* a line of printable text"),
        (json.dumps({**asdict(ROW), "env": {"gpu": "a\n\nb"}}), "env.gpu of a row is .* a line of printable text"),
        (json.dumps({**asdict(ROW), "env": {"commit": "\x1b"}}), "env.commit of a row is .* a line of printable text"),
        (json.dumps({**asdict(ROW), "config": []}), r"config of a row is \[\]"),
        (json.dumps({**asdict(ROW), "metrics": "fast"}), "metrics of a row is 'fast'"),
        (json.dumps({**asdict(ROW), "metrics": {"step_ms": "abc"}}), "metrics.step_ms 'abc': it must be an obj"),
        (json.dumps({**asdict(ROW), "metrics": {"step_ms": 3.0}}), "metrics.step_ms 3.0: it must be an object"),
        (
            json.dumps({**asdict(ROW), "metrics": {"step_ms": {"p50": 1.0, "p80": "abc"}}}),
            "metrics.step_ms.p80 'abc': it must be a number",
        ),
        (
            json.dumps({**asdict(ROW), "metrics": {"step_ms": {"p50": None}}}),
            "metrics.step_ms.p50 None: it must be a number",
        ),
        (json.dumps({**asdict(ROW), "metrics": {"steps_ms": [1, "a"]}}), "metrics.steps_ms.1 'a': it must be a num"),
        (json.dumps({**asdict(ROW), "metrics": {"steps_ms": {}}}), "metrics.steps_ms {}: it must be a list of numb"),
        (json.dumps({**asdict(ROW), "metrics": {"spread_ms": True}}), "metrics.spread_ms True: it must be a number"),
        (json.dumps({**asdict(ROW), "metrics": {"timer": 3}}), "metrics.timer 3: it must be a string"),
        (json.dumps({**asdict(ROW), "metrics": {"spans": []}}), r"metrics.spans \[\]: it must be an object"),
        (json.dumps({**asdict(ROW), "metrics": {"gathers": 1}}), "metrics.gathers 1: it must be a list"),
        (json.dumps({**asdict(ROW), "status": "fine"}), "variant 'v' is 'fine': it must be one of ok, oom, error"),
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(asdict(ROW))}\n{line}\n")
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line 2.*{message}"):
        read_rows(tmp_path / "rows.jsonl")


def test_a_metric_that_is_not_known_may_be_null_and_a_failed_row_need_not_be_finite(tmp_path: Path) -> None:
    rows = [replace(ROW, metrics={"mfu": None, "step_ms": None, "overlapped": 1, "streams": "file"}),
            replace(ROW, status="error", metrics={"first_loss": float("inf"), "streams": 2})]  # fmt: skip
    for row in rows:
        append_row(tmp_path / "rows.jsonl", row)
    assert read_rows(tmp_path / "rows.jsonl") == rows


def test_every_metric_that_was_ever_measured_is_of_its_type() -> None:
    files = [path for path in (ROOT / "results").rglob("*.jsonl") if path.name != "metrics.jsonl"]
    assert sum(len(read_rows(path)) for path in files) > 1000


def test_a_row_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder"):
        read_rows(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"row file .*no\.jsonl does not exist"):
        read_rows(tmp_path / "no.jsonl")


@pytest.mark.parametrize(
    "row, message",
    [
        (dict(case="train-step", config={}), r"'train-step', variant 'v' has no metrics that its table shows"),
        (dict(case="train-step", config={}, metrics={"mfu": "high"}), r"metrics\.mfu 'high': it must be a number"),
        (dict(case="kernels", config={}), r"'kernels', variant 'v' has no config\.shape"),
        (dict(case="kernels", config={"shape": 3}), r"config\.shape 3"),
        (dict(case="kernels", config={"shape": [1, 1, 8, 8]}), r"has no metrics\.forward_ms\.p50"),
        (
            dict(case="kernels", config={"shape": [1, 1, 8, 8]}, metrics={"forward_ms": {"p50": "fast"}}),
            r"metrics\.forward_ms\.p50 'fast': it must be a number",
        ),
    ],
)
def test_a_row_without_what_its_table_shows_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rows_table([Row(variant="v", env={}, **row)])


def test_a_row_of_an_unknown_case_is_refused(tmp_path: Path) -> None:
    append_row(tmp_path / "rows.jsonl", Row(case="other", variant="v", config={}, env={}))
    with pytest.raises(ValueError, match="case 'other'"):
        rows_table(read_rows(tmp_path / "rows.jsonl"))


def test_markdown_table_has_one_rule_cell_a_column() -> None:
    assert markdown_table(["a", "b"], [["1", "2|3"]]) == "| a | b |\n| --- | ---: |\n| 1 | 2\\|3 |"


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
        runs_table([tmp_path / "nowhere"])
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
        runs_table([tmp_path])


def test_a_run_that_is_not_finished_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun/config.json").write_text("{}")
    assert len(runs_table([tmp_path / "begun", DEMO]).splitlines()) == 3
    assert runs_table([tmp_path / "begun"]) == "none of these runs is finished"


def test_runs_without_metrics_are_not_drawn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As one has none between its config.json and its first step, or once only its result was kept."""
    begun, done = tmp_path / "begun", tmp_path / "done"
    begun.mkdir()
    shutil.copytree(DEMO, done)
    plot_runs([begun, done], tmp_path / "both.png")
    assert caplog.messages == [f"{begun} has no metrics.jsonl, not drawn"]
    plot_runs([done], tmp_path / "one.png")
    assert (tmp_path / "both.png").read_bytes() == (tmp_path / "one.png").read_bytes()
    with pytest.raises(ValueError, match=r"none of these runs has a metrics\.jsonl"):
        plot_runs([begun], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_a_metric_of_a_run_that_is_no_number_is_named(tmp_path: Path) -> None:
    shutil.copytree(DEMO, tmp_path / "run")
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": "abc"}\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"run/metrics\.jsonl, line 2: loss is 'abc': it must be a number or null"):
        plot_runs([tmp_path / "run"], tmp_path / "run.png")


@pytest.mark.parametrize("content", ["{}", "[]", "not JSON", '{"model": 3}', '{"model": {"size": "huge"}}'])
@pytest.mark.parametrize("name", ["config.json", "result.json"])
def test_a_damaged_file_of_a_run_is_named(tmp_path: Path, name: str, content: str) -> None:
    for file in ("config.json", "result.json"):
        (tmp_path / file).write_text((DEMO / file).read_text())
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        runs_table([tmp_path])
    if name == "result.json":
        with pytest.raises(ValueError, match=r"result\.json"):
            summary_block(tmp_path)


def test_half_a_row_that_a_killed_process_left_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append_row(path, ROW)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    append_row(path, ROW)
    assert path.read_bytes() == 2 * whole
