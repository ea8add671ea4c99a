"""Blocks of documents that commands fill."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from cs336_systems.report.documents import fill_blocks, update_document, update_documents

TEXT = """before
<!-- cs336 report runs 'a b' c -->
old
<!-- end -->
between
<!-- cs336 report rows d -->
<!-- end -->
after
"""


def test_only_the_bodies_of_blocks_change() -> None:
    asked: list[Sequence[str]] = []

    def make(arguments: Sequence[str]) -> str:
        asked.append(arguments)
        return f"table {len(asked)}"

    filled = fill_blocks(TEXT, make)
    assert asked == [["runs", "a b", "c"], ["rows", "d"]]
    assert filled.replace("\ntable 1\n\n", "old\n").replace("\ntable 2\n\n", "") == TEXT
    assert fill_blocks(filled, lambda arguments: "table 1" if arguments[0] == "runs" else "table 2") == filled


def test_update_returns_whether_the_file_changed(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_text(TEXT)
    assert update_document(path, lambda arguments: "x")
    assert not update_document(path, lambda arguments: "x")
    with pytest.raises(FileNotFoundError, match=r"b\.md does not exist"):
        update_document(tmp_path / "b.md", lambda arguments: "x")


def test_a_document_that_cannot_be_filled_does_not_stop_the_others(tmp_path: Path) -> None:
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


def test_a_missing_row_file_is_named_with_the_document(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(TEXT)

    def make(arguments: Sequence[str]) -> str:
        raise FileNotFoundError("row file d does not exist")

    with pytest.raises(ValueError, match=r"document .*a\.md: row file d does not exist"):
        update_document(tmp_path / "a.md", make)


@pytest.mark.parametrize("command", ["runs 'a b' c", "rows d"])
def test_a_block_without_an_end_leaves_the_document_unchanged(tmp_path: Path, command: str) -> None:
    begin = TEXT.index(command)
    cut = TEXT[:begin] + TEXT[begin:].replace("<!-- end -->\n", "", 1)
    (tmp_path / "a.md").write_text(cut)
    with pytest.raises(ValueError, match=rf"a\.md: the block of `cs336 report {command}` has no <!-- end -->"):
        update_document(tmp_path / "a.md", lambda arguments: "x")
    assert (tmp_path / "a.md").read_text() == cut


def test_a_full_disk_leaves_the_document_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
