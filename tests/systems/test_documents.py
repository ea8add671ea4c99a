"""Texts from folders, patterns, records and compressed files."""

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from cs336_basics.tokenizer import END_OF_TEXT
from cs336_systems.training import documents
from cs336_systems.training.documents import find_files, is_plain, write_documents
from cs336_systems.training.prepare import prepare_data
from tests.training.helpers import make_config

TEXTS = ["the cat sat.\n", "the dog é sat.", "a"]
JOINED = f"{END_OF_TEXT}\n".join(TEXTS)


def lines(texts: list[Any], field: str = "text") -> str:
    return "".join(json.dumps({field: text, "id": 3}) + "\n" for text in texts)


def write(folder: Path, kind: str) -> Path:
    path = folder / f"in.{kind}"
    plain = "\n" + lines(TEXTS)
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"id": [1, 2, 3], "text": TEXTS}), path, row_group_size=2)
    elif kind.endswith("gz"):
        path.write_bytes(gzip.compress(plain.encode()))
    elif kind.endswith("zst"):
        path.write_bytes(zstandard.compress(plain.encode()))
    else:
        path.write_text(plain)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "ndjson", "jsonl.gz", "jsonl.zst", "parquet"])
def test_each_record_is_a_document(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path, kind)
    assert not is_plain(str(path))
    write_documents(find_files(str(path), "data.train_text"), "text", tmp_path / "out.txt")
    assert (tmp_path / "out.txt").read_text() == JOINED


def test_a_folder_and_a_pattern_give_their_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name, text in zip(("a.txt", "b/1.txt", "b/2.txt"), TEXTS, strict=True):
        (tmp_path / name).write_text(text)
    (tmp_path / "picture.png").write_bytes(b"\xff")
    for name in (str(tmp_path), f"{tmp_path}/**/*.txt"):
        assert not is_plain(name)
        write_documents(find_files(name, "data.train_text"), "text", tmp_path / "out")
        assert (tmp_path / "out").read_text() == JOINED


@pytest.mark.parametrize(
    "name, message",
    [("none", "data.train_text .*none does not exist"), ("empty", "has no files"), ("*.x", r"\*.x has no files")],
)
def test_no_file_is_an_error_with_the_field(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        find_files(str(tmp_path / name), "data.train_text")


def test_few_bad_records_are_named_and_many_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, out = tmp_path / "in.jsonl", tmp_path / "out.txt"
    path.write_text(lines(["good"] * 200) + "{\n" + lines([None]))
    with caplog.at_level(logging.WARNING):
        write_documents([path], "text", out)
    assert "2 of 202 records have no text in 'text': " in caplog.text
    assert f"{path}, record 201; {path}, record 202" in caplog.text
    path.write_text(lines(["good"] * 20) + "[]\n")
    with pytest.raises(
        ValueError, match=rf"1 of 21 records have no text in 'text': {path}, record 21 \(data.text_field"
    ):
        write_documents([path], "text", out)


@pytest.mark.parametrize("kind, content", [("txt", b"\xff\xfe"), ("jsonl.gz", b"no gzip"), ("txt.gz", b"")])
def test_a_file_that_is_not_what_its_name_says_is_named(kind: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"in.{kind}"
    path.write_bytes(content if content else gzip.compress(b"the cat")[:-4])
    with pytest.raises(ValueError, match=f"{path} cannot be read as UTF-8 text"):
        write_documents([path], "text", tmp_path / "out.txt")


def test_a_missing_column_and_a_missing_package_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "parquet")
    with pytest.raises(ValueError, match=r"data\.text_field is 'body': .* has the columns id, text"):
        write_documents([path], "body", tmp_path / "out.txt")

    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(documents.importlib, "import_module", missing)
    with pytest.raises(ValueError, match=r"needs the package pyarrow: pip install pyarrow"):
        write_documents([path], "text", tmp_path / "out.txt")


def test_a_run_is_prepared_from_records_and_again_only_after_a_change(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(lines(["the cat sat on the mat. " * 40] * 8, "body"))
    data = dict(source="text", train_text=str(path), text_field="body", data_dir=str(tmp_path / "data"))
    config = make_config(tmp_path, data=data)
    first = prepare_data(config)
    made = (tmp_path / "data" / "train.txt").stat().st_mtime_ns
    assert first.tokenizer is not None
    assert first.tokenizer.end_of_text_id in first.train.tolist()
    prepare_data(config)
    assert (tmp_path / "data" / "train.txt").stat().st_mtime_ns == made
    path.write_text(lines(["a dog sat on the mat. " * 40] * 8, "body"))
    assert prepare_data(config).train_sha256 != first.train_sha256
