"""Reports write into folders that hold other files and earlier files of a report."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cs336_systems.bench.row import append_row
from cs336_systems.cli.main import main
from cs336_systems.cli.report import make_report
from cs336_systems.report.outputs import RECORD, write_into
from tests.report.test_headline import ATTENTION, TRAINING, file_of
from tests.report.test_views import ROWS


def writes(**texts: str) -> Callable[[Path], list[Path]]:
    """Write Markdown files by their stems."""

    def make(folder: Path) -> list[Path]:
        for name, text in texts.items():
            (folder / f"{name}.md").write_text(text)
        return [folder / f"{name}.md" for name in texts]

    return make


def texts_in(folder: Path) -> dict[str, str]:
    return {path.stem: path.read_text() for path in folder.iterdir() if path.name != RECORD}


def test_a_report_replaces_only_its_own_files(tmp_path: Path) -> None:
    (tmp_path / "mine.md").write_text("mine")
    assert write_into(tmp_path, writes(a="1", b="1")) == [tmp_path / "a.md", tmp_path / "b.md"]
    assert write_into(tmp_path, writes(a="2", c="2")) == [tmp_path / "a.md", tmp_path / "c.md"]
    assert texts_in(tmp_path) == {"mine": "mine", "a": "2", "b": "1", "c": "2"}


def test_nothing_is_written_if_a_file_is_not_the_reports_own(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("mine")
    before = texts_in(tmp_path)
    with pytest.raises(ValueError, match=rf"^out is '{tmp_path}': its b\.md was not written by a report, .*; move it"):
        write_into(tmp_path, writes(a="1", b="1"))
    assert texts_in(tmp_path) == before


def test_a_changed_file_is_not_replaced(tmp_path: Path) -> None:
    write_into(tmp_path, writes(a="1", b="1"))
    (tmp_path / "b.md").write_text("1, and what I think of it")
    with pytest.raises(ValueError, match=r"its b\.md was not written by a report, or was changed since"):
        write_into(tmp_path, writes(a="2", b="2"))
    write_into(tmp_path, writes(a="2"))
    assert texts_in(tmp_path) == {"a": "2", "b": "1, and what I think of it"}
    (tmp_path / "b.md").unlink()
    write_into(tmp_path, writes(a="3", b="3"))
    assert texts_in(tmp_path) == {"a": "3", "b": "3"}


def test_a_failing_report_changes_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> list[Path]:
        writes(a="2")(folder)
        raise ValueError("no row")

    write_into(tmp_path, writes(a="1"))
    with pytest.raises(ValueError, match="no row"):
        write_into(tmp_path, fail)
    assert texts_in(tmp_path) == {"a": "1"}


@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize("name", ["model.md", "model.csv", "model-step.png"])
def test_report_tables_replaces_no_file_of_the_user(tmp_path: Path, name: str) -> None:
    for row in ROWS:
        append_row(tmp_path / "rows.jsonl", row)
    command, out = ["tables", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "out")], tmp_path / "out"
    assert make_report(command) == make_report(command)
    (out / name).write_text("mine")
    with pytest.raises(ValueError, match=rf"its {name.replace('.', '[.]')} was not written by a report"):
        make_report(command)
    assert (out / name).read_text() == "mine"


def test_bench_replaces_no_file_of_the_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command, table = ["bench", "precision-accumulation", "--quick", "--out", str(tmp_path)], "precision-accumulation.md"
    for _ in range(2):
        with pytest.raises(SystemExit, match=r"^0$"):
            main(command)
    (tmp_path / table).write_text("mine")
    with pytest.raises(SystemExit, match=r"^2$"):
        main(command)
    assert f"its {table} was not written by a report" in capsys.readouterr().err
    assert (tmp_path / table).read_text() == "mine"


@pytest.mark.parametrize("name", ["writeup.md", "writeup.html", "writeup.pdf"])
def test_report_writeup_replaces_no_file_of_the_user(tmp_path: Path, name: str) -> None:
    if name == "writeup.pdf":
        pytest.importorskip("typst", reason="pip install '.[report]'")
    (tmp_path / "results").mkdir()
    (tmp_path / name).write_text("mine")
    with pytest.raises(ValueError, match=rf"its {name.replace('.', '[.]')} was not written by a report"):
        make_report(["writeup", "--results", str(tmp_path / "results"), "--out", str(tmp_path)])
    assert {path.name for path in tmp_path.iterdir()} == {"results", name}
    assert (tmp_path / name).read_text() == "mine"


@pytest.mark.usefixtures("unrendered")
def test_pictures_are_replaced_without_the_record(tmp_path: Path) -> None:
    """The folder docs/ has no record in a new clone."""
    command = [
        "headline",
        str(file_of([*ATTENTION, *TRAINING], tmp_path / "rows.jsonl")),
        "--out",
        str(tmp_path / "out"),
    ]
    make_report(command)
    (tmp_path / "out" / RECORD).unlink()
    make_report(command)
