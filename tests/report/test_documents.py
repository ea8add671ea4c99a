"""Documents whose numbers are filled in by commands."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from cs336_systems.bench.case import Row, append_row, read_rows
from cs336_systems.report.documents import fill_blocks, update_document
from cs336_systems.report.tables import markdown_table, rows_table, runs_table

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


def test_update_says_whether_it_changed_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_text(TEXT)
    assert update_document(path, lambda arguments: "x")
    assert not update_document(path, lambda arguments: "x")
    with pytest.raises(FileNotFoundError, match=r"b\.md does not exist"):
        update_document(tmp_path / "b.md", lambda arguments: "x")


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    rows = [Row(case="c", variant=v, config={"a": [1, None]}, metrics={"x": 0.1}, env={"gpu": None}) for v in "ab"]
    for row in rows:
        append_row(tmp_path / "deep" / "rows.jsonl", row)
    assert read_rows(tmp_path / "deep" / "rows.jsonl") == rows


def test_a_row_of_an_unknown_case_is_refused(tmp_path: Path) -> None:
    append_row(tmp_path / "rows.jsonl", Row(case="other", variant="v", config={}, env={}))
    with pytest.raises(ValueError, match="case 'other'"):
        rows_table(read_rows(tmp_path / "rows.jsonl"))


def test_train_step_rows_become_a_table(tmp_path: Path) -> None:
    row = Row(
        case="train-step",
        variant="cs336",
        config={"model": {"size": "xl", "context_length": 512}, "train": {"batch_size": 4}},
        metrics={
            "step_ms": {"mean": 12.34},
            "tokens_per_s": 165_964.2,
            "mfu": None,
            "peak_memory_bytes": 3 << 30,
            "startup_s": 9.96,
        },
        env={},
    )
    append_row(tmp_path / "rows.jsonl", row)
    cells = [
        cell.strip() for cell in rows_table(read_rows(tmp_path / "rows.jsonl")).splitlines()[2].strip("|").split("|")
    ]
    assert cells == ["xl, 4 x 512", "cs336", "12.3", "165,964", "n/a", "3.0", "10.0", "n/a"]


def test_markdown_table_has_one_rule_cell_a_column() -> None:
    assert markdown_table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | ---: |\n| 1 | 2 |"


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
        runs_table([tmp_path / "nowhere"])


def test_a_run_that_is_not_finished_is_left_out(tmp_path: Path) -> None:
    assert len(runs_table([tmp_path]).splitlines()) == 2
