"""Atomic writes: a failed write leaves the old file unchanged."""

import errno
import os
from pathlib import Path

import pytest

from cs336_systems.machine.files import write_figure, write_whole


def full(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_the_old_file_and_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_whole(tmp_path / "new" / "a.md", "before")
    monkeypatch.setattr(os, "fsync", full)
    for name in ("a.md", "b.md"):
        with pytest.raises(OSError, match=rf"No space left on device: '.*{name}'"):
            write_whole(path.with_name(name), "after")
    assert [each.name for each in path.parent.iterdir()] == ["a.md"]
    assert path.read_text() == "before"


def test_an_interrupt_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    path = write_whole(tmp_path / "a.md", "before")
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "after")
    assert [each.name for each in tmp_path.iterdir()] == ["a.md"]
    assert path.read_text() == "before"


def test_mode_and_links_are_kept_and_text_is_utf_8(tmp_path: Path) -> None:
    target, link = tmp_path / "a.md", tmp_path / "link.md"
    target.write_text("before")
    target.chmod(0o640)
    link.symlink_to(target)
    assert write_whole(link, "\u00e9") == link
    assert link.is_symlink()
    assert target.read_bytes() == "\u00e9".encode()
    assert target.stat().st_mode & 0o777 == 0o640


def test_a_file_as_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError) as caught:  # noqa: PT011
        write_whole(tmp_path / "file" / "c", "x")
    assert caught.value.filename == str(tmp_path / "file" / "c")


def test_a_new_file_has_the_mode_that_others_have(tmp_path: Path) -> None:
    (tmp_path / "theirs").touch()
    ours = write_whole(tmp_path / "ours", "x")
    assert ours.stat().st_mode == (tmp_path / "theirs").stat().st_mode


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=str(tmp_path)):
        write_whole(tmp_path, "x")
    assert list(tmp_path.parent.glob(f"{tmp_path.name}*")) == [tmp_path]


def test_a_picture_bears_its_metadata(tmp_path: Path) -> None:
    from matplotlib.figure import Figure
    from PIL import Image

    with Image.open(write_figure(Figure(), tmp_path / "a.png", Drawn="x")) as image:
        assert image.info["Drawn"] == "x"
