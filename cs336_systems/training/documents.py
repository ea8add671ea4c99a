"""The user's files as documents: text files, JSON lines and Parquet, one or many, compressed or not."""

import contextlib
import gzip
import importlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cs336_basics.files import replaced
from cs336_basics.tokenizer import END_OF_TEXT

logger = logging.getLogger(__name__)

_TEXT, _RECORDS = (".txt", ".md"), (".jsonl", ".ndjson", ".parquet")
_COMPRESSED = (".gz", ".zst")
_MOST_BAD = 0.01
"""The largest share of records that may be without text."""
_SHOWN = 3
"""Bad records that are named."""


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


def write_documents(files: list[Path], text_field: str, output: Path) -> None:
    """Write the documents of all files into one text, with `<|endoftext|>` between them.

    Raises ValueError naming file and line if over a hundredth of the records have no text.
    """
    count, bad = 0, list[str]()
    with replaced(output) as beside, beside.open("w", encoding="utf-8") as text:
        for file in files:
            for where, document in _records(file, text_field):
                if document is None:
                    bad.append(f"{file}, record {where}")
                elif document.strip():
                    text.write(f"{END_OF_TEXT}\n{document}" if count else document)
                    count += 1
        if bad:
            named = "; ".join(bad[:_SHOWN]) + ("; ..." if len(bad) > _SHOWN else "")
            message = f"{len(bad):,} of {count + len(bad):,} records have no text in {text_field!r}: {named}"
            if len(bad) > _MOST_BAD * (count + len(bad)):
                raise ValueError(f"{message} (data.text_field names the field)")
            logger.warning("text: %s", message)
    logger.info("text: %s documents of %s files in %s", f"{count:,}", f"{len(files):,}", output)


def _is_pattern(path: Path) -> bool:
    return not path.exists() and any(character in str(path) for character in "*?[")


def _kind(file: Path) -> str:
    return Path(file.stem).suffix if file.suffix in _COMPRESSED else file.suffix


def _records(file: Path, text_field: str) -> Iterator[tuple[int, str | None]]:
    """Number and text of each record, from 1; None where there is no text. A text file is one record."""
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
                yield 1, opened.read()
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


def _package(module: str, file: Path) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ValueError(f"{file} needs the package {package}: pip install {package}") from error
