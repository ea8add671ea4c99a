"""The texts of a run: the user's files, generated stories or the downloaded TinyStories, split for validation."""

import functools
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cs336_basics import stories
from cs336_basics.files import replaced, sha256_of_file
from cs336_basics.tokenizer import DOCUMENT_END, END_OF_TEXT, read_utf8

from ..config.data import DataConfig
from ..config.run import RunConfig
from .documents import Records, find_files, is_plain, read_dataset, read_files, write_documents
from .stages import one_at_a_time, run_stage

logger = logging.getLogger(__name__)

# roneneldan/TinyStories, the GPT-4 version (Eldan & Li 2023), at a fixed revision.
TINYSTORIES_REPOSITORY = "roneneldan/TinyStories"
TINYSTORIES_REVISION = "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64"
TINYSTORIES_SHA256 = {
    "TinyStoriesV2-GPT4-train.txt": "6418d412de72888f52b5142c761ac21a582f7d1166f0bfbdb5f03ccfdec90443",
    "TinyStoriesV2-GPT4-valid.txt": "6874bae9a4c1a4e7edcf0e53b86c17817e9cf881fc75ff2368da457b80c0585d",
}


@dataclass(frozen=True)
class TextSpan:
    """Bytes `start` to `end` of a text file (None: to its end), with the hash of the whole file.

    name: what messages call the file, such as the field that names it. separator: stands between its documents.
    special_tokens: whether those in it are tokens; otherwise they are text, but for the separator.
    """

    path: Path
    sha256: str
    start: int = 0
    end: int | None = None
    name: str = "text file"
    separator: str = END_OF_TEXT
    special_tokens: bool = False

    def blocks(self) -> Iterator[str]:
        """The text, in pieces of about a megabyte."""
        return read_utf8(self.path, self.start, self.end, self.name)

    @property
    def size(self) -> int:
        """Number of bytes."""
        return (self.path.stat().st_size if self.end is None else self.end) - self.start

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Identifies the text in a stage's stamp."""
        return {"sha256": self.sha256, "start": self.start, "end": self.end}


def find_texts(config: RunConfig) -> tuple[TextSpan, TextSpan]:
    """The texts to train and to validate on. Downloads or generates them if necessary."""
    data = config.data
    folder = Path(str(data.data_dir))
    if data.source == "tinystories":
        train, valid = (fetch_tinystories(name, folder) for name in TINYSTORIES_SHA256)
        return train, valid
    text_path = folder / "stories.txt"
    if data.source == "stories":
        generator = sha256_of_file(str(stories.__file__))
        inputs = {"story_chars": data.story_chars, "seed": data.seed, "generator": generator}

        def write_stories() -> None:
            with replaced(text_path) as beside, beside.open("w", encoding="utf-8") as file:
                file.writelines(stories.stories(data.seed, data.story_chars))

        run_stage(data, "text", text_path, inputs, write_stories)
        whole = _whole_text(text_path, "text file")
    elif data.source == "hf":
        whole = _dataset(data, folder / "train.txt")
    else:
        whole = _users_text(data, str(data.train_text), "data.train_text", folder / "train.txt")
    if data.valid_text is not None:
        return whole, _users_text(data, data.valid_text, "data.valid_text", folder / "valid.txt")
    cut = find_split(whole.path, data.valid_fraction, whole.separator)
    return replace(whole, end=cut), replace(whole, start=cut)


def _users_text(data: DataConfig, name: str, field: str, output: Path) -> TextSpan:
    """The user's text: the file itself, or one made of several files or of records."""
    if is_plain(name):
        return _whole_text(Path(name), field, special_tokens=data.special_tokens_in_text)
    files = find_files(name, field)
    inputs = {"files": _hashes(files)}
    return _gathered(data, inputs, functools.partial(read_files, files, data.text_field), field, name, output)


def _dataset(data: DataConfig, output: Path) -> TextSpan:
    """The text of a Hugging Face dataset. One from the Hub is read once; it is not asked whether it has changed."""
    path = Path(str(data.hf_path))
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    inputs = {name: getattr(data, name) for name in ("hf_path", "hf_name", "hf_split", "hf_max_bytes")}
    inputs["files"] = _hashes(files)  # none of a dataset from the Hub
    return _gathered(data, inputs, functools.partial(read_dataset, data), "data.hf_path", str(path), output)


def _hashes(files: list[Path]) -> list[list[str]]:
    return [[str(file), sha256_of_file(file)] for file in files]


def _gathered(
    data: DataConfig, inputs: dict[str, Any], read: Callable[[Any], Records], field: str, name: str, output: Path
) -> TextSpan:
    """A text that a stage makes of documents."""
    separator = END_OF_TEXT if data.special_tokens_in_text else DOCUMENT_END
    inputs |= {"text_field": data.text_field, "separator": separator}
    run_stage(data, "text", output, inputs, lambda: write_documents(read, f"{field} {name}", output, inputs))
    return _whole_text(output, field, separator, data.special_tokens_in_text)


def _whole_text(path: Path, name: str, separator: str = END_OF_TEXT, special_tokens: bool = False) -> TextSpan:
    first = next(read_utf8(path, name=name))  # raises at once if the file is missing, empty or not UTF-8
    beginning = first[:1024]
    if beginning.count("\0") > len(beginning) // 4:  # UTF-16 has one beside every ASCII character
        offset = len(beginning[: beginning.index("\0")].encode())
        raise ValueError(f"{name} {path} must be UTF-8 text: NUL bytes, from byte {offset} on, look like UTF-16")
    return TextSpan(path, sha256_of_file(path), name=name, separator=separator, special_tokens=special_tokens)


def find_split(path: Path, valid_fraction: float, separator: str = END_OF_TEXT) -> int:
    """The byte at which a text is split, so that about its last valid_fraction is for validation.

    Within the megabyte after the exact place, the split goes behind a separator and the end of its line. If there is
    none, it goes behind a line, and if there is no line either, between two characters.
    """
    size = path.stat().st_size
    wanted = max(1, int(size * (1 - valid_fraction)))
    with path.open("rb") as file:
        file.seek(wanted)
        following = file.read(1 << 20).removesuffix(separator.encode())  # nothing may follow the last one
    for mark in (re.escape(separator.encode()) + rb"(?:\r\n|\r|\n)?", rb"\n"):
        found = re.search(mark, following)
        if found is not None and found.end() < len(following):
            return wanted + found.end()
    # Bytes 10xxxxxx continue a character.
    return wanted + next((i for i, byte in enumerate(following) if byte & 0xC0 != 0x80), len(following))


def fetch_tinystories(name: str, folder: Path, endpoint: str | None = None) -> TextSpan:
    """Download one file of TinyStories at the pinned revision, unless it is there.

    An interrupted download is kept as NAME.partial, and the next call asks for the rest. Raises ConnectionError if the
    file cannot be fetched. Raises ValueError if its hash is wrong, after removing it.
    """
    path, expected = folder / name, TINYSTORIES_SHA256[name]
    if not path.is_file():
        # Not the token files' lock: that may be in another folder, and this process may hold it.
        with one_at_a_time(folder, ".fetch.lock"):
            if not path.is_file():  # the process that had the lock may have made it
                _fetch(path, expected, endpoint)
                return TextSpan(path, expected)
    found = sha256_of_file(path)
    if found != expected:
        raise ValueError(f"{path} has SHA-256 {found}, not {expected}: remove it to have it fetched")
    return TextSpan(path, found)


def _fetch(path: Path, expected: str, endpoint: str | None) -> None:
    from huggingface_hub import hf_hub_url

    of = dict(repo_id=TINYSTORIES_REPOSITORY, filename=path.name, repo_type="dataset", revision=TINYSTORIES_REVISION)
    partial = path.with_name(f"{path.name}.partial")
    logger.info("text: fetching %s of %s", path.name, TINYSTORIES_REPOSITORY)
    try:
        _download(hf_hub_url(**of, endpoint=endpoint), partial)
    except Exception as error:  # the library's network errors have no common base
        reason = " ".join(str(error).split())
        raise ConnectionError(
            f"{path.name} of {TINYSTORIES_REPOSITORY} could not be fetched: {reason} (without a network, copy the file "
            f"to {path}, or take --data.source stories, a text that is generated here)"
        ) from error
    found = sha256_of_file(partial)
    if found != expected:
        partial.unlink()
        raise ValueError(
            f"{path} as fetched has SHA-256 {found}, not {expected}: it was removed, run again to fetch it anew"
        )
    os.replace(partial, path)


def _download(url: str, partial: Path) -> None:
    """Fetch a URL into a file that may hold its beginning. If the server sends the whole, the file starts anew.

    Not `hf_hub_download`, because another process does not find its partial files.
    """
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    headers = build_hf_headers() | {"accept-encoding": "identity"}  # a range of compressed bytes would be useless
    with partial.open("ab") as file:
        if there := file.tell():
            logger.info("text: %s bytes of it are here already", f"{there:,}")
        try:
            http_get(url, file, headers=headers, displayed_filename=partial.stem, resume_size=there)
        except HfHubHTTPError as error:
            if error.response.status_code != 416:  # Range Not Satisfiable: nothing is left, and the hash tells the rest
                raise
