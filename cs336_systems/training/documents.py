"""The user's documents: text files, JSON lines and Parquet, one or many, compressed or not, and Hugging Face datasets.

`<|endoftext|>` separates documents in text files. A record is one document, in which it is text like any other.
"""

import contextlib
import gzip
import importlib
import io
import itertools
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from cs336_basics.files import continued
from cs336_basics.tokenizer import documents_of

from ..config.data import DataConfig

logger = logging.getLogger(__name__)

_TEXT, _RECORDS = (".txt", ".md"), (".jsonl", ".ndjson", ".parquet")
_COMPRESSED = (".gz", ".zst")
_UNREADABLE = (".json", ".csv", ".tsv", ".bz2", ".xz", ".zip")
"""Formats that would be taken for text."""
_MOST_BAD = 0.01
"""The largest share of records that may be without text."""
_SHOWN = 3
"""Bad records that are named."""
_HOPELESS = 1000
"""If so many records come before the first text, the rest is not read."""

Records = Iterable[tuple[str, str | None, Any]]
"""The place of each record, its text, None if it has none, and the position from which reading goes on after it."""


def is_plain(name: str) -> bool:
    """Whether a name is of one file that is text as it is, with `<|endoftext|>` between its documents."""
    path = Path(name)
    others = *_RECORDS, *_COMPRESSED, *_UNREADABLE
    return not path.is_dir() and not _is_pattern(path) and path.suffix.lower() not in others


def find_files(name: str, field: str) -> list[Path]:
    """The files that a name means: the file itself, those in a folder and below it, or those that match a pattern.

    Hidden ones are left out, such as a Mac's ._a.txt and Jupyter's .ipynb_checkpoints, unless the name has them.
    In a folder only texts and records count; the log names the suffixes of the others.
    Raises FileNotFoundError or ValueError with the configuration's field if there is none, and for other formats.
    """
    path, kinds = Path(name), ", ".join((*_TEXT, *_RECORDS))
    if path.is_file():
        found = [path]
    elif path.is_dir():
        files = [file for file in path.rglob("*") if file.is_file() and not _is_hidden(file, path)]
        found = [file for file in files if _kind(file) in (*_TEXT, *_RECORDS)]
        if others := sorted({file.suffix for file in files if file not in found}):
            logger.info("text: %s files of %s are left out: %s", len(files) - len(found), name, ", ".join(others))
    elif _is_pattern(path):
        root = Path(path.anchor)
        found = [*root.glob(str(path.relative_to(root)))]
    else:
        raise FileNotFoundError(f"{field} {name} does not exist")
    found = sorted(file for file in found if file.is_file() and not _is_hidden(file, path))
    if not found:
        raise ValueError(f"{field} {name} has no files: it must have some of {kinds}, also compressed")
    if wrong := [file for file in found if _kind(file) in _UNREADABLE]:
        accepted = f"text or one of {', '.join(_RECORDS)}, also as {' or '.join(_COMPRESSED)}"
        raise ValueError(f"{field} is {wrong[0]}: it must be {accepted}")
    return found


def write_documents(read: Callable[[Any], Records], name: str, output: Path, inputs: dict[str, Any]) -> None:
    """Write documents into one text, each with `inputs["separator"]` after it.

    read: gives the records after a position, None for all. If it breaks off, the next call with equal inputs goes on
    there. name: what messages call the records. Raises ValueError if there is no text, and naming the first bad records
    if over a hundredth have none in their field `inputs["text_field"]`.
    """
    with continued(output, inputs) as text:
        count, bad, named, done = text.state or (0, 0, [], None)
        if text.state is not None:
            logger.info("text: %s documents are here already", f"{count:,}")
        for where, document, position in read(done):
            if document is None:
                bad, named = bad + 1, [*named, where][:_SHOWN]
            elif document.strip():
                text.file.write((as_unicode(document) + inputs["separator"]).encode())
                count += 1
            if text.mark((count, bad, named, position)):
                logger.info("text: %s documents so far, %.2f GB", f"{count:,}", text.file.tell() / 1e9)
            if bad == _HOPELESS and not count:
                break
        if bad:
            message = f"{bad:,} of {count + bad:,} records have no text in {inputs['text_field']!r}: {'; '.join(named)}"
            message += "; ..." if bad > _SHOWN else ""
            if bad > _MOST_BAD * (count + bad):
                raise ValueError(f"{message} (data.text_field names the field)")
            logger.warning("text: %s (left out)", message)
        if not count:
            raise ValueError(f"{name} has no text: it must have a document of more than white space")
    logger.info("text: %s documents in %s", f"{count:,}", output)


def as_unicode(document: str) -> str:
    """A document without U+FFFF, which separates documents. Half of a surrogate pair becomes a question mark."""
    return document.replace("\uffff", "\ufffd").encode(errors="replace").decode()


def read_files(files: list[Path], text_field: str, after: Any = None) -> Records:
    """The documents of text files and the records of others, those after a position: a file and a record in it."""
    first, done = after or (0, 0)
    for number, file in enumerate(files[first:], first):
        for where, text in _records(file, text_field):
            if number > first or where > done:
                yield f"{file}, record {where}", text, (number, where)


def read_dataset(data: DataConfig, after: Any = None) -> Records:
    """The records of the dataset `data.hf_path`, read while it is downloaded, up to `data.hf_max_bytes` of text.

    after: a position, from which it is read without downloading the dataset's earlier files again.

    Raises ValueError naming the field if there is no such dataset or column, and ConnectionError if the download fails.
    """
    datasets = _package("datasets", f"data.source {data.source!r}")
    name, path = str(data.hf_path), Path(str(data.hf_path))
    where = dict(path=str(path.resolve().parent), data_files=path.name) if path.is_file() else dict(path=name)
    if (path / "state.json").is_file():  # of save_to_disk, whose folder load_dataset does not take by itself
        where = dict(path="arrow", data_files=str(path / "data-*.arrow"))
    done, size, state = after or (0, 0, None)
    try:
        rows = datasets.load_dataset(**where, name=data.hf_name, split=data.hf_split, streaming=True)
        if state is not None:
            rows.load_state_dict(state)
        remaining = iter(rows)
        first = [*itertools.islice(remaining, 1)]
    except Exception as error:  # the errors of a network have no common base
        kind = ValueError if isinstance(error, ValueError | FileNotFoundError) else ConnectionError
        reason = " ".join(str(error).split())
        given = f"data.hf_path is {name!r}, data.hf_name {data.hf_name!r}, data.hf_split {data.hf_split!r}"
        raise kind(f"{given}: {reason}") from error
    if first and data.text_field not in first[0]:
        raise ValueError(f"data.text_field is {data.text_field!r}: {name} has the columns {', '.join(first[0])}")
    try:
        for i, row in enumerate(itertools.chain(first, remaining), done + 1):
            text = row[data.text_field] if isinstance(row[data.text_field], str) else None
            size += len((text or "").encode(errors="replace"))
            if data.hf_max_bytes is not None and size > data.hf_max_bytes:
                return
            yield f"{name}, record {i}", text, (i, size, rows.state_dict())
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConnectionError(
            f"{name} could not be read to its end: {reason} (run again to go on from there)"
        ) from error


def _is_pattern(path: Path) -> bool:
    return not path.exists() and any(character in str(path) for character in "*?[")


def _is_hidden(file: Path, path: Path) -> bool:
    """Whether a part of a file's name begins with a dot, and is not in the path that the user gave."""
    return any(part.startswith(".") for part in {*file.parts} - {*path.parts})


def _kind(file: Path) -> str:
    """The suffix in small letters, without that of a compression."""
    name = Path(file.name.lower())
    return Path(name.stem).suffix if name.suffix in _COMPRESSED else name.suffix


def _records(file: Path, text_field: str) -> Iterator[tuple[int, str | None]]:
    """Number and text of each record or document of a text, from 1; None where there is no text."""
    if _kind(file) == ".parquet":
        parquet: Any = _package("pyarrow.parquet", file)
        with _naming(file, "Parquet"):
            table = parquet.ParquetFile(file)
        if text_field not in table.schema_arrow.names:
            columns = ", ".join(table.schema_arrow.names)
            raise ValueError(f"data.text_field is {text_field!r}: {file} has the columns {columns}")
        with _naming(file, "Parquet"):
            texts = (value for batch in table.iter_batches(columns=[text_field]) for value in batch[0].to_pylist())
            yield from ((i, value if isinstance(value, str) else None) for i, value in enumerate(texts, 1))
        return
    with _naming(file, "UTF-8 text"), _open(file) as opened:
        if _kind(file) not in _RECORDS:
            text = io.TextIOWrapper(opened, encoding="utf-8-sig")
            yield from enumerate(documents_of(iter(lambda: text.read(1 << 20), "")), 1)
            return
        for i, line in enumerate(opened, 1):
            if line.strip():
                yield i, _text_of(line, text_field)


@contextlib.contextmanager
def _naming(file: Path, kind: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # those of gzip and pyarrow have no common base
        raise ValueError(f"{file} cannot be read as {kind}: {error}") from error


def _open(file: Path) -> Any:
    """The bytes of a text. A compressed one that breaks off raises an error when it is read to there."""
    if file.suffix.lower() == ".gz":
        return gzip.open(file)
    if file.suffix.lower() == ".zst":
        return io.BufferedReader(_package("pyarrow", file).input_stream(str(file), compression="zstd"))
    return file.open("rb")


def _text_of(line: bytes, text_field: str) -> str | None:
    try:
        record = json.loads(line)  # may begin with a byte-order mark, as on Windows
    except (ValueError, RecursionError):
        return None
    text = record.get(text_field) if isinstance(record, dict) else None
    return text if isinstance(text, str) else None


def _package(module: str, what: object) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ValueError(f"{what} needs the package {package}: pip install {package}") from error
