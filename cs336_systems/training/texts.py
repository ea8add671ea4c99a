"""Texts to train on: parts of files, where one may be split, and TinyStories, fetched."""

import contextlib
import fcntl
import functools
import logging
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cs336_basics.data import sha256_of_file
from cs336_basics.tokenizer import END_OF_TEXT, read_utf8

logger = logging.getLogger(__name__)

# roneneldan/TinyStories, the GPT-4 version (Eldan & Li 2023), at a fixed revision.
TINYSTORIES_REPOSITORY = "roneneldan/TinyStories"
TINYSTORIES_REVISION = "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64"
TINYSTORIES_SHA256 = {
    "TinyStoriesV2-GPT4-train.txt": "6418d412de72888f52b5142c761ac21a582f7d1166f0bfbdb5f03ccfdec90443",
    "TinyStoriesV2-GPT4-valid.txt": "6874bae9a4c1a4e7edcf0e53b86c17817e9cf881fc75ff2368da457b80c0585d",
}

_DOCUMENT_END = re.compile(re.escape(END_OF_TEXT.encode()) + rb"(?:\r\n|\r|\n)?")
_LINE_END = re.compile(rb"\n")


@dataclass(frozen=True)
class TextSpan:
    """Bytes start to end of a text file (end None: to its end), known by the hash of the whole file."""

    path: Path
    sha256: str
    start: int = 0
    end: int | None = None

    def blocks(self) -> Iterator[str]:
        """The text, in pieces of about a megabyte."""
        return read_utf8(self.path, self.start, self.end)

    @property
    def size(self) -> int:
        """Number of bytes."""
        return (self.path.stat().st_size if self.end is None else self.end) - self.start

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What identifies the text."""
        return {"sha256": self.sha256, "start": self.start, "end": self.end}


@contextlib.contextmanager
def one_at_a_time(folder: Path, lock: str = ".lock") -> Iterator[None]:
    """Wait until no other process makes files in the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened = (folder / lock).open("a")
    except OSError as error:
        raise ValueError(
            f"data.data_dir {folder} cannot be written to: {error.strerror} (with --skip_data, token files that are "
            "there are used as they are)"
        ) from error
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("data: waiting for another process that makes files in %s", folder)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def find_split(path: Path, valid_fraction: float) -> int:
    """The byte where the last valid_fraction of a text begins.

    It is after an `<|endoftext|>` and the end of its line, or else after a line, or else at a character: the first of
    these, in that order, that is found within the megabyte from there on.
    """
    size = path.stat().st_size
    wanted = max(1, int(size * (1 - valid_fraction)))
    with path.open("rb") as file:
        file.seek(wanted)
        following = file.read(1 << 20)
    for mark in (_DOCUMENT_END, _LINE_END):
        found = mark.search(following)
        if found is not None and found.end() < len(following):
            return wanted + found.end()
    # Bytes 10xxxxxx continue a character.
    return wanted + next((i for i, byte in enumerate(following) if byte & 0xC0 != 0x80), len(following))


def fetch_tinystories(name: str, folder: Path, endpoint: str | None = None) -> TextSpan:
    """Download one file of TinyStories at the pinned revision, unless it is there.

    What came before a download broke off, whatever ended it, is kept as NAME.partial, and the next call asks for the
    rest. Raises ConnectionError if the file cannot be fetched, and ValueError if the content has another hash than it
    should; what was fetched is then removed.
    """
    path, expected = folder / name, TINYSTORIES_SHA256[name]
    if not path.is_file():
        # A lock of its own: the one of the token files need not be in this folder, and may be held by this process.
        with one_at_a_time(folder, ".fetch.lock"):
            if not path.is_file():  # as it may be by now, made by the process that had the lock
                _fetch(path, expected, endpoint)
                return TextSpan(path, expected)
    found = sha256_of_file(path)
    if found != expected:
        raise ValueError(f"{path} has SHA-256 {found}, not {expected}: remove it to have it fetched")
    return TextSpan(path, found)


def _fetch(path: Path, expected: str, endpoint: str | None) -> None:
    from huggingface_hub import hf_hub_url, try_to_load_from_cache

    of = dict(repo_id=TINYSTORIES_REPOSITORY, filename=path.name, repo_type="dataset", revision=TINYSTORIES_REVISION)
    partial = path.with_name(f"{path.name}.partial")
    logger.info("text: fetching %s of %s", path.name, TINYSTORIES_REPOSITORY)
    library = logging.getLogger("huggingface_hub")  # which would tell of every attempt
    level = library.level
    library.setLevel(logging.CRITICAL)
    try:
        cached = try_to_load_from_cache(**of)
        if isinstance(cached, str) and sha256_of_file(cached) == expected:
            shutil.copyfile(cached, partial)
        else:
            _download(hf_hub_url(**of, endpoint=endpoint), partial, expected)
    except Exception as error:  # the library's network errors have no common base
        reason = " ".join(str(error).split())
        raise ConnectionError(
            f"{path.name} of {TINYSTORIES_REPOSITORY} could not be fetched: {reason} (without a network, copy the file "
            f"to {path}, or take --data.source stories, a text that is generated here)"
        ) from error
    finally:
        library.setLevel(level)
    found = sha256_of_file(partial)
    if found != expected:
        partial.unlink()
        raise ValueError(
            f"{path} as fetched has SHA-256 {found}, not {expected}: it was removed, run again to fetch it anew"
        )
    os.replace(partial, path)


def _download(url: str, partial: Path, expected: str) -> None:
    """Fetch a URL into a file that may hold the beginning of it. If the server answers with the whole, it starts anew.

    `hf_hub_download` would do, except that no other process finds its partial files again.
    """
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    headers = build_hf_headers() | {"accept-encoding": "identity"}  # a range of compressed bytes would be no use
    get = functools.partial(http_get, url, headers=headers, displayed_filename=partial.stem)
    with partial.open("ab") as file:
        if there := file.tell():
            logger.info("text: %s bytes of it are here already", f"{there:,}")
        try:
            get(file, resume_size=there)
        except HfHubHTTPError as error:
            if there == 0 or error.response.status_code != 416:
                raise
            # Range Not Satisfiable: nothing follows, because the file is whole or because it is something else.
            if sha256_of_file(partial) != expected:
                logger.warning("text: %s is not the beginning of the file, which is fetched anew", partial)
                file.seek(0)
                file.truncate()
                get(file)
