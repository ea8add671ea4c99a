"""The user's documents: text files, JSON lines and Parquet, one or many, compressed or not, and Hugging Face datasets.

`<|endoftext|>` separates documents in text files. A record is one document, in which it is text like any other.
"""

import contextlib
import gzip
import importlib
import json
import logging
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cs336_basics.files import replaced
from cs336_basics.tokenizer import DOCUMENT_END, documents_of

from ..config.data import DataConfig

logger = logging.getLogger(__name__)

_TEXT, _RECORDS = (".txt", ".md"), (".jsonl", ".ndjson", ".parquet")
_COMPRESSED = (".gz", ".zst")
_MOST_BAD = 0.01
"""The largest share of records that may be without text."""
_SHOWN = 3
"""Bad records that are named."""
_PROGRESS_S = 10
"""Time between two lines of progress."""

Records = Iterable[tuple[str, str | None]]
"""The place of each record and its text, None if it has none."""


def is_plain(name: str) -> bool:
    """Whether a name is of one file that is text as it is, with `<|endoftext|>` between its documents."""
    path = Path(name)
    return not path.is_dir() and not _is_pattern(path) and path.suffix not in (*_RECORDS, *_COMPRESSED)


def find_files(name: str, field: str) -> list[Path]:
    """The files that a name means: the file itself, those in a folder and below it, or those that match a pattern.

    Raises FileNotFoundError or ValueError with the configuration's field if there is none.
    """
    path = Path(name)
    if path.is_file():
        return [path]
    if path.is_dir():
        found = [file for file in sorted(path.rglob("*")) if file.is_file() and _kind(file) in (*_TEXT, *_RECORDS)]
    elif _is_pattern(path):
        root = Path(path.anchor)
        found = sorted(file for file in root.glob(str(path.relative_to(root))) if file.is_file())
    else:
        raise FileNotFoundError(f"{field} {name} does not exist")
    if not found:
        kinds = ", ".join((*_TEXT, *_RECORDS))
        raise ValueError(f"{field} {name} has no files: it must have some of {kinds}, also compressed")
    return found


def write_documents(records: Records, text_field: str, output: Path, separator: str = DOCUMENT_END) -> None:
    """Write documents into one text, each with the separator after it.

    Raises ValueError naming the first bad records if over a hundredth have no text.
    """
    count, bad, said = 0, list[str](), time.monotonic()
    # What is no Unicode, half of a surrogate pair, becomes a question mark.
    with replaced(output) as beside, beside.open("w", encoding="utf-8", errors="replace") as text:
        for where, document in records:
            if document is None:
                bad.append(where)
            elif document.strip():
                text.write(document.replace("\uffff", "\ufffd") + separator)
                count += 1
            if time.monotonic() > said + _PROGRESS_S:
                said = time.monotonic()
                logger.info("text: %s documents so far, %.2f GB", f"{count:,}", text.tell() / 1e9)
        if bad:
            named = "; ".join(bad[:_SHOWN]) + ("; ..." if len(bad) > _SHOWN else "")
            message = f"{len(bad):,} of {count + len(bad):,} records have no text in {text_field!r}: {named}"
            if len(bad) > _MOST_BAD * (count + len(bad)):
                raise ValueError(f"{message} (data.text_field names the field)")
            logger.warning("text: %s", message)
    logger.info("text: %s documents in %s", f"{count:,}", output)


def read_files(files: list[Path], text_field: str) -> Records:
    """The documents of text files, and the records of others."""
    for file in files:
        for where, text in _records(file, text_field):
            yield f"{file}, record {where}", text


def read_dataset(data: DataConfig) -> Records:
    """The records of the dataset `data.hf_path`, read while it is downloaded, up to `data.hf_max_bytes` of text.

    Raises ValueError naming the field if there is no such dataset or column, and ConnectionError if the download fails.
    """
    datasets = _package("datasets", f"data.source {data.source!r}")
    name, path = str(data.hf_path), Path(str(data.hf_path))
    where = dict(path=str(path.resolve().parent), data_files=path.name) if path.is_file() else dict(path=name)
    try:
        rows = datasets.load_dataset(**where, name=data.hf_name, split=data.hf_split, streaming=True)
        columns = list(next(iter(rows), [data.text_field]))
    except Exception as error:  # the errors of a network have no common base
        kind = ValueError if isinstance(error, ValueError | FileNotFoundError) else ConnectionError
        raise kind(f"data.hf_path is {name!r}: {' '.join(str(error).split())}") from error
    if data.text_field not in columns:
        raise ValueError(f"data.text_field is {data.text_field!r}: {name} has the columns {', '.join(columns)}")
    left = math.inf if data.hf_max_bytes is None else data.hf_max_bytes
    try:
        for i, row in enumerate(rows, 1):
            text = row[data.text_field] if isinstance(row[data.text_field], str) else None
            left -= len((text or "").encode(errors="replace"))
            if left < 0:
                return
            yield f"{name}, record {i}", text
    except Exception as error:
        raise ConnectionError(f"{name} could not be read to its end: {' '.join(str(error).split())}") from error


def _is_pattern(path: Path) -> bool:
    return not path.exists() and any(character in str(path) for character in "*?[")


def _kind(file: Path) -> str:
    return Path(file.stem).suffix if file.suffix in _COMPRESSED else file.suffix


def _records(file: Path, text_field: str) -> Iterator[tuple[int, str | None]]:
    """Number and text of each record or document of a text, from 1; None where there is no text."""
    if _kind(file) == ".parquet":
        parquet: Any = _package("pyarrow.parquet", file)
        table = parquet.ParquetFile(file)
        if text_field not in table.schema_arrow.names:
            columns = ", ".join(table.schema_arrow.names)
            raise ValueError(f"data.text_field is {text_field!r}: {file} has the columns {columns}")
        texts = (value for batch in table.iter_batches(columns=[text_field]) for value in batch[0].to_pylist())
        yield from ((i, value if isinstance(value, str) else None) for i, value in enumerate(texts, 1))
        return
    try:
        with contextlib.ExitStack() as stack:
            opened: Any = stack.enter_context(_open(file))
            if _kind(file) not in _RECORDS:
                yield from enumerate(documents_of(iter(lambda: opened.read(1 << 20), "")), 1)
                return
            for i, line in enumerate(opened, 1):
                if line.strip():
                    yield i, _text_of(line, text_field)
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{file} cannot be read as UTF-8 text: {error}") from error


def _open(file: Path) -> Any:
    if file.suffix == ".gz":
        return gzip.open(file, "rt", encoding="utf-8")
    if file.suffix == ".zst":
        return _package("zstandard", file).open(file, "rt", encoding="utf-8")
    return file.open(encoding="utf-8")


def _text_of(line: str, text_field: str) -> str | None:
    try:
        record = json.loads(line)
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
