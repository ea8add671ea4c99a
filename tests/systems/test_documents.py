"""Texts from folders, patterns, records, compressed files and datasets."""

import gzip
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from cs336_basics.tokenizer import DOCUMENT_END, END_OF_TEXT
from cs336_systems.config.run import DataConfig
from cs336_systems.training import documents
from cs336_systems.training.documents import find_files, is_plain, read_dataset, read_files, write_documents
from cs336_systems.training.prepare import prepare_data
from tests.systems.preparation import run_config
from tests.training.helpers import make_config

TEXTS = ["the cat sat.\n", "the dog é sat.", "a"]
JOINED = "".join(text + DOCUMENT_END for text in TEXTS)


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
    write_documents(read_files(find_files(str(path), "data.train_text"), "text"), "text", tmp_path / "out.txt")
    assert (tmp_path / "out.txt").read_text() == JOINED


def test_a_folder_and_a_pattern_give_their_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name, text in (("a.txt", END_OF_TEXT.join(TEXTS[:2])), ("b/1.txt", TEXTS[2])):
        (tmp_path / name).write_text(text)
    (tmp_path / "picture.png").write_bytes(b"\xff")
    for name in (str(tmp_path), f"{tmp_path}/**/*.txt"):
        assert not is_plain(name)
        write_documents(read_files(find_files(name, "data.train_text"), "text"), "text", tmp_path / "out")
        assert (tmp_path / "out").read_text() == JOINED


@pytest.mark.parametrize(
    "name, message",
    [("none", "data.train_text .*none does not exist"), ("empty", "has no files"), ("*.x", r"\*.x has no files")],
)
def test_no_file_is_an_error_with_the_field(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        find_files(str(tmp_path / name), "data.train_text")


def test_what_cannot_be_in_the_text_is_replaced(tmp_path: Path) -> None:
    write_documents([("here", f"half a pair \ud800, a mark{DOCUMENT_END}")], "text", tmp_path / "out")
    assert (tmp_path / "out").read_text() == f"half a pair ?, a mark\n\ufffd{DOCUMENT_END}"


def test_few_bad_records_are_named_and_many_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, out = tmp_path / "in.jsonl", tmp_path / "out.txt"
    path.write_text(lines(["good"] * 200) + "{\n" + lines([None]))
    with caplog.at_level(logging.WARNING):
        write_documents(read_files([path], "text"), "text", out)
    assert "2 of 202 records have no text in 'text': " in caplog.text
    assert f"{path}, record 201; {path}, record 202" in caplog.text
    path.write_text(lines(["good"] * 20) + "[]\n")
    with pytest.raises(
        ValueError, match=rf"1 of 21 records have no text in 'text': {path}, record 21 \(data.text_field"
    ):
        write_documents(read_files([path], "text"), "text", out)


@pytest.mark.parametrize("kind, content", [("txt", b"\xff\xfe"), ("jsonl.gz", b"no gzip"), ("txt.gz", b"")])
def test_a_file_that_is_not_what_its_name_says_is_named(kind: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"in.{kind}"
    path.write_bytes(content if content else gzip.compress(b"the cat")[:-4])
    with pytest.raises(ValueError, match=f"{path} cannot be read as UTF-8 text"):
        write_documents(read_files([path], "text"), "text", tmp_path / "out.txt")


def test_a_missing_column_and_a_missing_package_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "parquet")
    with pytest.raises(ValueError, match=r"data\.text_field is 'body': .* has the columns id, text"):
        [*read_files([path], "body")]

    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(documents.importlib, "import_module", missing)
    with pytest.raises(ValueError, match=r"needs the package pyarrow: pip install pyarrow"):
        [*read_files([path], "text")]


@pytest.mark.parametrize("are_tokens", [False, True])
def test_special_tokens_in_records_are_text_unless_the_user_says_otherwise(are_tokens: bool, tmp_path: Path) -> None:
    said = f"a tag {END_OF_TEXT} of HTML. " * 40
    path = tmp_path / "in.jsonl"
    path.write_text(lines([said] * 8))
    data = dict(source="text", train_text=str(path), data_dir=str(tmp_path / "data"), special_tokens_in_text=are_tokens)
    prepared = prepare_data(make_config(tmp_path, data=data))
    assert prepared.tokenizer is not None
    ids = [*prepared.train.tolist(), *prepared.valid.tolist()]
    assert prepared.tokenizer.decode(ids) == f"{said}{END_OF_TEXT}" * 8
    assert ids.count(prepared.tokenizer.end_of_text_id) == (8 * 41 if are_tokens else 8)


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset of two files, with a record without text among its 201."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.jsonl").write_text(lines([f"document {i}" for i in range(100)]))
    (tmp_path / "mine" / "b.jsonl").write_text(lines([*(f"document {i}" for i in range(100, 200)), None]))
    return tmp_path / "mine"


def test_a_dataset_is_read_in_order_up_to_a_number_of_bytes(dataset: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_documents(read_dataset(DataConfig(source="hf", hf_path="mine")), "text", Path("out"))
    assert Path("out").read_text() == "".join(f"document {i}{DOCUMENT_END}" for i in range(200))
    assert "1 of 201 records have no text in 'text': mine, record 201" in caplog.text
    first = read_dataset(DataConfig(source="hf", hf_path="mine/b.jsonl", hf_max_bytes=30))
    assert [text for _, text in first] == ["document 100", "document 101"]


@pytest.mark.parametrize(
    "of, message",
    [
        (dict(text_field="body"), r"data\.text_field is 'body': mine has the columns text, id$"),
        (dict(hf_split="test"), r"data\.hf_path is 'mine': Bad split: test\. Available splits: \['train'\]$"),
        (dict(hf_name="en"), r"data\.hf_path is 'mine': BuilderConfig 'en' not found\. Available: \['default'\]$"),
        (dict(hf_path="./yours"), r"data\.hf_path is '\./yours': "),
    ],
)
def test_a_dataset_that_is_not_as_the_user_says_is_named_in_a_line(
    of: dict[str, str], message: str, dataset: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        [*read_dataset(DataConfig(source="hf", **{"hf_path": "mine", **of}))]


def test_a_dataset_that_breaks_off_leaves_no_text_and_is_read_again(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    config = run_config(source="hf", hf_path="mine")
    assert config.data.data_dir == "data/hf/mine"

    def break_off(*_: Any, **__: Any) -> Iterator[Any]:
        yield {"text": "document 0"}
        raise RuntimeError("the network is gone")

    class Broken:
        __iter__ = break_off

    with monkeypatch.context() as patch:
        patch.setattr(datasets, "load_dataset", lambda *_, **__: Broken())
        with pytest.raises(ConnectionError, match="mine could not be read to its end: the network is gone"):
            prepare_data(config)
    assert not [*Path("data/hf/mine").glob("*.txt")]
    prepared = prepare_data(config)
    assert prepared.tokenizer is not None
    assert prepared.train.tolist().count(prepared.tokenizer.end_of_text_id) == pytest.approx(180, abs=2)
    monkeypatch.setattr(datasets, "load_dataset", None)
    prepare_data(config)  # reads it no more


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
