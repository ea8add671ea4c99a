"""Tables and pictures in print: every line of a table fits its page, and its text is not small."""

import re
from pathlib import Path

import pytest

from cs336_systems.report.markdown import markdown_table
from cs336_systems.report.writeup.typeset import to_typst, write_pdf


def table_of(columns: int, rows: int) -> str:
    names = ["size", "kernel", *(f"in use before backward {i} (GiB)" for i in range(columns - 2))]
    return markdown_table(names, [["2.7B", "flash_triton", *["1361.26"] * (columns - 2)]] * rows, left=2)


def sizes_of(text: str, tmp_path: Path) -> list[float]:
    """The sizes of text in points that the document's tables fit its page at, asked of typst."""
    typst = pytest.importorskip("typst")
    source = to_typst("T", text).replace(
        "drawn(if fits == none", "[#metadata(repr(fits)) <size>]; drawn(if fits == none"
    )
    found = typst.query(source.encode(), "<size>", field="value", root=str(tmp_path))
    return [float(each) for each in re.findall(r"([\d.]+)pt|none", str(found)) if each]


@pytest.mark.parametrize("columns", [4, 12, 14])
def test_a_wide_table_of_numbers_is_readable_in_print(columns: int, tmp_path: Path) -> None:
    (size,) = sizes_of(table_of(columns, 3), tmp_path)
    assert size >= 6.5


def test_long_names_of_columns_are_broken_into_lines_where_there_are_many() -> None:
    assert 'table.header([#"in use before backward 0 (GiB)"' not in to_typst("T", table_of(12, 1))
    assert '[#"in use";#linebreak();#"before";#linebreak();#"backward";#linebreak();#"0 (GiB)";]' in to_typst(
        "T", table_of(12, 1)
    )
    assert '[#"in use before backward 0 (GiB)";]' in to_typst("T", table_of(4, 1))


def test_only_columns_of_numbers_are_aligned_to_the_right() -> None:
    made = to_typst("T", markdown_table(["a", "b", "c"], [["1 MB", "float32", "1.5"], ["x", "-", "-"]]))
    assert "align: (left, left, right,)" in made


def test_a_short_table_stays_on_its_page_with_the_line_above_it_and_a_long_one_is_divided(tmp_path: Path) -> None:
    pytest.importorskip("typst")
    short, long = (to_typst("T", f"NVIDIA:\n\n{table_of(4, rows)}") for rows in (24, 25))
    assert '#block(sticky: true)[#"NVIDIA:";]' in short
    assert "whole: true" in short
    assert "whole: false" in long
    write_pdf(long, tmp_path, tmp_path / "long.pdf")
    assert (tmp_path / "long.pdf").read_bytes().startswith(b"%PDF-")


def test_options_of_commands_are_not_broken_and_their_text_stays_as_it_is() -> None:
    made = to_typst("T", "`cs336 bench ddp --size a--b --out_dir x`")
    assert '#raw("cs336 bench ddp ");#box(raw("--size"));#raw(" a--b ");#box(raw("--out_dir"));#raw(" x");' in made
