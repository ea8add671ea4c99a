"""Texts from folders, patterns, records, compressed files and datasets."""

import functools
import gzip
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from cs336_basics import files
from cs336_basics.tokenizer import DOCUMENT_END, END_OF_TEXT, Tokenizer
from cs336_systems.config.run import DataConfig
from cs336_systems.training import documents
from cs336_systems.training.documents import Records, find_files, is_plain, read_dataset, read_files, write_documents
from cs336_systems.training.prepare import prepare_data
from tests.systems.preparation import run_config
from tests.training.helpers import make_config

TEXTS = ["the cat sat.\n", "the dog é sat.", "a"]
JOINED = "".join(text + DOCUMENT_END for text in TEXTS)


def lines(texts: list[Any], field: str = "text") -> str:
    return "".join(json.dumps({field: text, "id": 3}) + "\n" for text in texts)


def gather(name: str, output: Path) -> None:
    """Write the text of a file, a folder or a pattern."""
    collect(functools.partial(read_files, find_files(name, "data.train_text"), "text"), output)


def collect(read: Callable[[Any], Records], output: Path, seed: int = 0) -> None:
    write_documents(read, "it", output, {"text_field": "text", "separator": DOCUMENT_END, "seed": seed})


def zstd(text: str) -> bytes:
    return pyarrow.compress(text.encode(), "zstd", asbytes=True)


def write(folder: Path, kind: str) -> Path:
    path = folder / f"in.{kind}"
    plain = "\n" + lines(TEXTS)
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"id": [1, 2, 3], "text": TEXTS}), path, row_group_size=2)
    elif kind == "bom.jsonl":
        path.write_text(plain.lstrip(), encoding="utf-8-sig")
    elif kind.lower().endswith("gz"):
        path.write_bytes(gzip.compress(plain.encode()))
    elif kind.endswith("zst"):
        path.write_bytes(zstd(plain))
    else:
        path.write_text(plain)
    return path


@pytest.mark.parametrize(
    "kind", ["jsonl", "bom.jsonl", "ndjson", "JSONL", "jsonl.gz", "JSONL.GZ", "jsonl.zst", "parquet"]
)
def test_each_record_is_a_document(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path, kind)
    assert not is_plain(str(path))
    gather(str(path), tmp_path / "out.txt")
    assert (tmp_path / "out.txt").read_text() == JOINED


def test_a_folder_and_a_pattern_give_their_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name, text in (("a.TXT", END_OF_TEXT.join(TEXTS[:2])), ("b/1.txt", TEXTS[2])):
        (tmp_path / name).write_text(text)
    (tmp_path / "picture.png").write_bytes(b"\xff")
    for name in (str(tmp_path), f"{tmp_path}/**/*.[tT]*"):
        assert not is_plain(name)
        gather(name, tmp_path / "out")
        assert (tmp_path / "out").read_text() == JOINED


@pytest.mark.parametrize("name", [".", "*.txt", "**/*.txt"])
def test_hidden_files_are_left_out_unless_they_are_named(name: str, tmp_path: Path) -> None:
    folder = tmp_path / ".mine"
    hidden = folder / ".ipynb_checkpoints/a.txt"
    hidden.parent.mkdir(parents=True)
    for path in (folder / "a.txt", folder / "._a.txt", hidden):
        path.write_text("the cat")
    assert find_files(str(folder / name), "data.train_text") == [folder / "a.txt"]
    assert find_files(str(hidden.parent / name), "data.train_text") == [hidden]


@pytest.mark.parametrize(
    "name, message",
    [("none", "data.train_text .*none does not exist"), ("empty", "has no files"), ("*.x", r"\*.x has no files")],
)
def test_no_file_is_an_error_with_the_field(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        find_files(str(tmp_path / name), "data.train_text")


@pytest.mark.parametrize("name", ["a.json", "*", "a.csv.gz", "a.txt.bz2"])
def test_other_formats_are_not_taken_for_text(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for file in ("a.json", "a.csv.gz", "a.txt.bz2", "a.txt"):
        (tmp_path / file).write_text("[]")
    assert not is_plain(str(tmp_path / name))
    with pytest.raises(ValueError, match=r"data.train_text is .*/a\..*: it must be text or one of .jsonl, .ndjson, "):
        find_files(str(tmp_path / name), "data.train_text")
    with caplog.at_level(logging.INFO):
        assert find_files(str(tmp_path), "data.train_text") == [tmp_path / "a.txt"]
    assert caplog.messages[-1] == f"text: 3 files of {tmp_path} are left out: .bz2, .gz, .json"


def test_what_cannot_be_in_the_text_is_replaced(tmp_path: Path) -> None:
    collect(lambda _: [("here", f"half a pair \ud800, a mark{DOCUMENT_END}", 0)], tmp_path / "out")
    assert (tmp_path / "out").read_text() == f"half a pair ?, a mark\n\ufffd{DOCUMENT_END}"


def test_few_bad_records_are_named_and_many_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, out = tmp_path / "in.jsonl", tmp_path / "out.txt"
    path.write_bytes((lines(["good"] * 300) + "{\n" + lines([None])).encode() + b'{"text": "caf\xe9"}\n')
    with caplog.at_level(logging.WARNING):
        gather(str(path), out)
    assert "3 of 303 records have no text in 'text': " in caplog.text
    assert f"{path}, record 301; {path}, record 302; {path}, record 303 (left out)" in caplog.text
    path.write_text(lines(["good"] * 20) + "[]\n")
    with pytest.raises(
        ValueError, match=rf"1 of 21 records have no text in 'text': {path}, record 21 \(data.text_field"
    ):
        gather(str(path), out)


@pytest.mark.parametrize(
    "kind, content",
    [
        ("txt", b"\xff\xfe"),
        ("jsonl.gz", b"no gzip"),
        ("txt.gz", gzip.compress(b"the cat", mtime=0)[:-4]),
        ("txt.gz", gzip.compress(b"the cat", mtime=0)[:12] + b"another block"),
        ("jsonl.zst", b"no zstandard"),
        ("txt.zst", zstd("the cat")[:-1]),
        ("jsonl.zst", zstd(lines(TEXTS * 100_000))[:-1]),
        ("jsonl.zst", zstd(lines(TEXTS)) + zstd(lines(TEXTS))[:-1]),
        ("parquet", b"no Parquet"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_named(kind: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"in.{kind}"
    path.write_bytes(content)
    with pytest.raises(
        ValueError, match=f"{path} cannot be read as {'Parquet' if kind == 'parquet' else 'UTF-8 text'}"
    ):
        gather(str(path), tmp_path / "out.txt")


def test_a_wrong_field_is_named_before_all_is_read(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(lines(["good"] * 5000, field="body"))
    with pytest.raises(ValueError, match=r"^1,000 of 1,000 records have no text in 'text': "):
        gather(str(path), tmp_path / "out.txt")


def test_records_without_any_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    for content in ("", lines([" ", "\n"])):
        path.write_text(content)
        data = dict(source="text", train_text=str(path), data_dir=str(tmp_path / "data"))
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"^data\.train_text {path} has no text: it must have a document"):
                prepare_data(run_config(**data))


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


@pytest.mark.parametrize("are_tokens", [False, True])
@pytest.mark.parametrize("name", ["texts/in.txt", "texts"])
def test_special_tokens_in_a_text_are_text_unless_the_user_says_otherwise(
    name: str, are_tokens: bool, tmp_path: Path
) -> None:
    Tokenizer.train(["a slip of HTML. " * 50], 270).save(tmp_path / "gpt2.json")
    theirs = tmp_path / "theirs.json"
    theirs.write_text((tmp_path / "gpt2.json").read_text().replace(END_OF_TEXT, "</s>"))
    (tmp_path / "texts").mkdir()
    said = "a <s>slip</s> of HTML. " * 40
    (tmp_path / "texts/in.txt").write_text(END_OF_TEXT.join([said] * 8) + END_OF_TEXT)
    data = dict(source="text", train_text=str(tmp_path / name), data_dir=str(tmp_path / "data"), tokenizer=str(theirs))
    prepared = prepare_data(make_config(tmp_path, data=data | dict(special_tokens_in_text=are_tokens)))
    assert prepared.tokenizer is not None
    ids = [*prepared.train.tolist(), *prepared.valid.tolist()]
    assert prepared.tokenizer.decode(ids) == f"{said}</s>" * 8
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
    read = functools.partial(read_dataset, DataConfig(source="hf", hf_path="mine"))
    collect(read, Path("out"))
    assert Path("out").read_text() == "".join(f"document {i}{DOCUMENT_END}" for i in range(200))
    assert "1 of 201 records have no text in 'text': mine, record 201" in caplog.text
    first = read_dataset(DataConfig(source="hf", hf_path="mine/b.jsonl", hf_max_bytes=30))
    assert [text for _, text, _ in first] == ["document 100", "document 101"]


@pytest.mark.parametrize("name", ["saved", "all"])
def test_a_dataset_that_save_to_disk_has_written_is_read(name: str, dataset: Path) -> None:
    import datasets

    saved = datasets.Dataset.from_dict({"text": [f"document {i}" for i in range(5)]})
    saved.save_to_disk("saved", num_shards=2)
    saved.to_json("saved/cache-1.arrow")  # not of the dataset
    datasets.DatasetDict(train=saved, test=saved.select([4])).save_to_disk("all")
    read = functools.partial(read_dataset, DataConfig(source="hf", hf_path=name))
    whole = [*read()]
    assert [text for _, text, _ in whole] == [f"document {i}" for i in range(5)]
    assert [text for _, text, _ in read(whole[2][2])] == ["document 3", "document 4"]
    last = read_dataset(DataConfig(source="hf", hf_path=name, hf_split="test"))
    if name == "all":
        assert [text for _, text, _ in last] == ["document 4"]
    else:
        with pytest.raises(ValueError, match=r"data\.hf_path is 'saved', .*, data\.hf_split 'test': Bad split: test"):
            next(iter(last))


@pytest.mark.parametrize(
    "of, message",
    [
        (dict(text_field="body"), r"data\.text_field is 'body': mine has the columns text, id$"),
        (
            dict(hf_split="test"),
            r"data\.hf_path is 'mine', .*, data\.hf_split 'test': Bad split: test\. Available .*: \['train'\]$",
        ),
        (
            dict(hf_name="en"),
            r"data\.hf_path is 'mine', data\.hf_name 'en', .*: BuilderConfig 'en' not found\. .*\['default'\]$",
        ),
        (dict(hf_path="./yours"), r"data\.hf_path is '\./yours', .*: "),
    ],
)
def test_a_dataset_that_is_not_as_the_user_says_is_named_in_a_line(
    of: dict[str, str], message: str, dataset: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        [*read_dataset(DataConfig(source="hf", **{"hf_path": "mine", **of}))]


def test_a_dataset_that_breaks_off_is_read_on_from_there(
    dataset: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Three times: in a file, at its end, and after Ctrl-C; the record without text is counted once."""
    import datasets

    config = run_config(source="hf", hf_path="mine")
    assert config.data.data_dir == "data/hf/mine"
    load, seen = datasets.load_dataset, list[str]()

    def breaking(error: BaseException, at: str) -> Any:
        def see(row: dict[str, Any]) -> dict[str, Any]:
            if row["text"] == at:
                raise error
            seen.append(row["text"])
            return row

        return lambda *_, **given: load(**given).map(see)

    first = []
    for error, at in (
        (RuntimeError("the network is gone"), "document 50"),
        (OSError("it is gone again"), "document 100"),
        (KeyboardInterrupt(), "document 170"),
    ):
        monkeypatch.setattr(datasets, "load_dataset", breaking(error, at))
        raised = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else ConnectionError
        with pytest.raises(raised) as caught:
            prepare_data(config)
        if raised is ConnectionError:
            message = f"mine could not be read to its end: {error} (run again to go on from there)"
            assert str(caught.value) == message
        assert not Path("data/hf/mine/train.txt").exists()
        first.append(seen[0])
        seen.clear()
    assert first == ["document 0", "document 50", "document 100"]
    caplog.clear()
    with caplog.at_level(logging.INFO):
        monkeypatch.setattr(datasets, "load_dataset", breaking(RuntimeError(), "none"))
        prepare_data(config)
    assert "text: 170 documents are here already" in caplog.messages
    assert "1 of 201 records have no text in 'text': mine, record 201" in caplog.text
    assert Path("data/hf/mine/train.txt").read_text() == "".join(f"document {i}{DOCUMENT_END}" for i in range(200))
    assert not [*Path("data/hf/mine").glob("*.partial*")]
    monkeypatch.setattr(datasets, "load_dataset", None)
    prepare_data(config)  # reads it no more


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "jsonl.gz", "txt"])
def test_files_that_break_off_are_read_on_from_there(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken off after each number of documents; the files before are not opened again."""
    for name in ("a", "b", "c"):
        (tmp_path / "in" / name).mkdir(parents=True)
        if kind == "txt":
            (tmp_path / "in" / name / "in.txt").write_text(END_OF_TEXT.join(TEXTS))
        else:
            write(tmp_path / "in" / name, kind)
    records, opened, left = documents._records, list[str](), 0

    def break_off(file: Path, text_field: str) -> Iterator[Any]:
        nonlocal left
        opened.append(file.parent.name)
        for record in records(file, text_field):
            if not left:
                raise KeyboardInterrupt
            left -= 1
            yield record

    monkeypatch.setattr(documents, "_records", break_off)
    for number in range(9):
        out, left = tmp_path / f"{number}.txt", number
        with pytest.raises(KeyboardInterrupt):
            gather(str(tmp_path / "in"), out)
        left = 9
        opened.clear()
        gather(str(tmp_path / "in"), out)
        assert out.read_text() == JOINED * 3
        assert opened[0] == "aaaabbbcc"[number]


def test_what_a_killed_process_has_saved_is_read_on_and_other_settings_start_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = tmp_path / "in.jsonl", tmp_path / "out"
    path.write_text(lines(TEXTS))
    monkeypatch.setattr(files, "SAVE_EVERY_S", -1)  # saves after each document

    def killed(after: Any) -> Iterator[Any]:
        yield from list(read_files([path], "text", after))[:2]
        (saved,) = tmp_path.glob("*.json")
        note, whole = saved.read_bytes(), (tmp_path / "out.partial").read_bytes()
        yield "x", "of a process that is gone", (0, 3)
        (tmp_path / "left").mkdir()
        (tmp_path / "left" / "out.partial").write_bytes(whole + b"and what was written but not saved")
        (tmp_path / "left" / "out.partial.json").write_bytes(note)

    collect(killed, out)
    read = list[Any]()

    def note(after: Any) -> Any:
        read.append(after)
        assert after or not (tmp_path / "left" / "out.partial.json").exists()  # a kill now leaves none of other inputs
        return read_files([path], "text", after)

    collect(note, tmp_path / "left" / "out")
    assert read == [[0, 2]]
    assert (tmp_path / "left" / "out").read_text() == JOINED
    for seed in (1, 2):
        (tmp_path / "left" / "out.partial").write_text("old")
        inputs = {"text_field": "text", "separator": DOCUMENT_END, "seed": 1}
        (tmp_path / "left" / "out.partial.json").write_text(json.dumps({"inputs": inputs, "size": 99, "state": 3}))
        collect(note, tmp_path / "left" / "out", seed)
        assert read[-1] is None
        assert (tmp_path / "left" / "out").read_text() == JOINED


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
