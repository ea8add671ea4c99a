"""Text to token files: each stage done when it must be and only then, whatever happened to the files in between."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from cs336_basics.data import read_info
from cs336_basics.stories import stories
from cs336_basics.tokenizer import END_OF_TEXT, Tokenizer, sample_evenly
from cs336_systems.config.run import DataConfig, ModelConfig, RunConfig
from cs336_systems.training import prepare
from cs336_systems.training import texts as sources
from cs336_systems.training.prepare import prepare_data
from cs336_systems.training.texts import fetch_tinystories, find_split, find_texts
from tests.distributed import wait_until
from tests.training.helpers import largest_file

TEXT = "".join(stories(0, 10_000))
VALID_TEXT = "".join(stories(1, 10_000))


def run_config(vocab_size: int = 300, skip_data: bool = False, **data: Any) -> RunConfig:
    model = ModelConfig(vocab_size=vocab_size, context_length=16, d_model=32, d_ff=64, num_layers=1, num_heads=2)
    return RunConfig(model=model, skip_data=skip_data, data=DataConfig(**data))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("input.txt").write_text(TEXT)
    Path("valid.txt").write_text(VALID_TEXT)
    return tmp_path


text_config = functools.partial(run_config, source="text", data_dir="d", train_text="input.txt")
two_texts = functools.partial(text_config, valid_text="valid.txt")
stories_config = functools.partial(run_config, source="stories", data_dir="d", story_chars=10_000)
random_config = functools.partial(run_config, source="random", data_dir="d", random_tokens=1000)

TOKENIZER, TRAIN, VALID, STORIES = "tokenizer.json", "train.npy", "valid.npy", "stories.txt"


@pytest.fixture
def stages(folder: Path, caplog: pytest.LogCaptureFixture) -> Callable[[RunConfig], tuple[set[str], set[str]]]:
    """Prepares a configuration's data; the names of the files that the log says were made, and those skipped."""

    def prepare_and_read_log(config: RunConfig) -> tuple[set[str], set[str]]:
        caplog.clear()
        with caplog.at_level(logging.INFO, "cs336_systems"):
            prepare_data(config)
        assert list(folder.rglob("writing-*")) == []
        made = [re.fullmatch(r"\w+: making (\S+), (which|because) .*", message) for message in caplog.messages]
        skipped = [re.fullmatch(r"\w+: (.*) is up to date, skipped", message) for message in caplog.messages]
        return {Path(m[1]).name for m in made if m}, {Path(m[1]).name for m in skipped if m}

    return prepare_and_read_log


def contents(folder: str = "d") -> dict[str, tuple[bytes, int]]:
    """Every file with its bytes and the time it was written."""
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(Path(folder).iterdir()) if p.is_file()}


# Stages that run


@pytest.mark.parametrize(
    "config, outputs",
    [
        (text_config(), {TOKENIZER, TRAIN, VALID}),
        (two_texts(), {TOKENIZER, TRAIN, VALID}),
        (stories_config(), {STORIES, TOKENIZER, TRAIN, VALID}),
        (random_config(), {TRAIN, VALID}),
    ],
    ids=["text", "two texts", "stories", "random"],
)
def test_a_second_run_skips_every_stage_and_touches_no_file(stages: Any, config: RunConfig, outputs: set[str]) -> None:
    assert stages(config) == (outputs, set())
    before = contents()
    assert stages(config) == (set(), outputs)
    assert contents() == before


def test_the_log_says_why_a_file_is_made(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cs336_systems")
    for tokenizer, vocab_size, why in (
        ("d/mistyped.json", 300, "which does not exist"),
        ("d/mistyped.json", 290, "because the text or its settings changed, or the file is damaged"),
    ):
        caplog.clear()
        prepare_data(text_config(vocab_size=vocab_size, tokenizer=tokenizer))
        assert f"tokenizer: making {tokenizer}, {why}" in caplog.messages


def test_the_tokens_decode_to_the_text_that_was_given(folder: Path) -> None:
    data = prepare_data(text_config())
    assert data.tokenizer is not None
    assert data.tokenizer.decode(data.train) + data.tokenizer.decode(data.valid) == TEXT
    assert len(data.valid) > 16


def test_a_text_for_validation_is_used_whole_and_leaves_the_other_whole(folder: Path) -> None:
    data = prepare_data(two_texts())
    assert data.tokenizer is not None
    assert data.tokenizer.decode(data.train) == TEXT
    assert data.tokenizer.decode(data.valid) == VALID_TEXT


def test_the_tokenizer_has_seen_nothing_of_the_validation_text(folder: Path) -> None:
    train, _ = find_texts(text_config())
    expected = Tokenizer.train(train.blocks(), 300)
    data = prepare_data(text_config())
    assert data.tokenizer is not None
    assert data.tokenizer.sha256 == expected.sha256


def test_a_sidecar_describes_the_tokens(folder: Path) -> None:
    data = prepare_data(text_config())
    assert data.tokenizer is not None
    info = read_info("d/train.npy")
    assert (info.count, info.vocab_size, info.source) == (len(data.train), 300, "input.txt")
    assert info.tokenizer_sha256 == data.tokenizer.sha256
    assert info.sha256 == data.train_sha256 == hashlib.sha256(Path("d/train.npy").read_bytes()).hexdigest()


def test_files_can_be_put_elsewhere(folder: Path) -> None:
    config = text_config(tokenizer="a/tok.json", train_tokens="b/x.npy", valid_tokens="c/y.npy")
    prepare_data(config)
    assert {str(p) for p in Path().rglob("*") if p.is_file()} >= {"a/tok.json", "b/x.npy", "c/y.npy"}
    assert not Path("d").exists()


def test_token_files_that_differ_only_in_their_suffix_do_not_share_a_sidecar(folder: Path) -> None:
    data = prepare_data(text_config(train_tokens="d/tokens.train", valid_tokens="d/tokens.valid"))
    assert len(data.train) > len(data.valid)


def test_a_text_with_fewer_words_than_the_vocabulary_is_said_and_used(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Path("input.txt").write_text("a b c d e f g h i j k l m n o p\n" * 30)
    data = prepare_data(text_config())
    assert data.tokenizer is not None
    assert data.tokenizer.vocab_size < 300
    assert any(f"a vocabulary of {data.tokenizer.vocab_size}, not 300" in message for message in caplog.messages)


# A tokenizer of one's own

SAID_BYTES = re.compile(r"tokens: (\S+) has ([\d,]+) tokens, ([\d.]+) bytes a token")


def test_bytes_per_token_are_said_and_usual_for_ones_own_tokenizer(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cs336_systems")
    data = prepare_data(two_texts())
    found = [match.groups() for match in map(SAID_BYTES.fullmatch, caplog.messages) if match]
    sizes = {"d/train.npy": (len(data.train), len(TEXT)), "d/valid.npy": (len(data.valid), len(VALID_TEXT))}
    assert found == [(path, f"{count:,}", f"{size / count:.1f}") for path, (count, size) in sizes.items()]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    "name, text, is_far",
    [
        ("stories", TEXT, False),
        ("bytes", "\u732b\u306f\u96e8\u304c\u597d\u304d\n" * 200, False),
        ("one word", ("x" * 64 + "\n") * 2000, True),
    ],
)
def test_far_more_bytes_per_token_than_a_text_has_are_warned_of(
    folder: Path, caplog: pytest.LogCaptureFixture, name: str, text: str, is_far: bool
) -> None:
    caplog.set_level(logging.INFO, "cs336_systems")
    Tokenizer.train([("x" * 64 + "\n") * 2000], 300).save("brought.json")
    Path("input.txt").write_text(text)
    prepare_data(text_config(tokenizer="brought.json"))
    assert any("far from the usual" in message for message in caplog.messages) == is_far


def test_a_file_that_transformers_saved_after_a_call_gives_the_whole_text(folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    Tokenizer.train([TEXT], 300).save("plain.json")
    names = dict(eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)
    theirs = PreTrainedTokenizerFast(tokenizer_file="plain.json", **names)
    theirs(TEXT, truncation=True, max_length=128, padding="max_length")
    theirs.save_pretrained("saved")
    plain = prepare_data(text_config(tokenizer="plain.json"))
    saved = prepare_data(text_config(tokenizer="saved/tokenizer.json", data_dir="e"))
    assert np.array_equal(plain.train, saved.train)
    assert saved.tokenizer is not None
    assert saved.tokenizer.decode(saved.train) + saved.tokenizer.decode(saved.valid) == TEXT


# Many texts in one file


def said_another_kind(text: str, caplog: pytest.LogCaptureFixture, vocab_size: int) -> bool:
    Path("input.txt").write_text(text)
    caplog.clear()
    prepare_data(text_config(vocab_size=vocab_size))
    return any("another kind of text" in message for message in caplog.messages)


CODE = "".join(path.read_text() for path in sorted(Path(sources.__file__).parents[1].rglob("*.py")))


@pytest.mark.parametrize("vocab_size", [300, 2000])
def test_a_validation_part_of_another_kind_is_warned_of(
    folder: Path, caplog: pytest.LogCaptureFixture, vocab_size: int
) -> None:
    """Code, generated stories and this repository's documents: each by itself, and with a last tenth of another."""
    many_stories = "".join(stories(0, 300_000))
    documents = "".join(path.read_text() for path in sorted(Path(__file__).parents[2].glob("docs/*.md")))
    texts = {"code": CODE[:300_000], "stories": many_stories, "documents": documents[:300_000]}
    for name, text in texts.items():
        assert not said_another_kind(text, caplog, vocab_size), name
        for other in texts.values():
            if other != text:
                assert said_another_kind(text[:270_000] + other[:30_000], caplog, vocab_size), name


@pytest.mark.parametrize("length", [1_000, 3_000, 10_000])
def test_short_texts_are_not_of_another_kind_by_chance(
    folder: Path, caplog: pytest.LogCaptureFixture, length: int
) -> None:
    for seed in range(10):
        Path("input.txt").write_text("".join(stories(seed, 10_000))[:length])
        Path("valid.txt").write_text("".join(stories(seed + 100, 10_000))[: length // 10])
        prepare_data(two_texts(vocab_size=257))
    assert not any("another kind of text" in message for message in caplog.messages)


# A text that is longer than the tokenizer is to be trained on

LONG_TEXT = "".join(stories(2, 400_000))


def test_the_tokenizer_of_a_long_text_is_trained_on_a_sample_and_that_is_said(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Path("input.txt").write_text(LONG_TEXT)
    with caplog.at_level(logging.INFO, "cs336_systems"):
        data = prepare_data(two_texts(tokenizer_sample_bytes=1 << 17))
    assert any(f"sample of 131,072 of the text's {len(LONG_TEXT):,} bytes" in message for message in caplog.messages)
    assert data.tokenizer is not None
    assert data.tokenizer.sha256 == Tokenizer.train(sample_evenly([LONG_TEXT], 1 << 17, len(LONG_TEXT)), 300).sha256
    assert data.tokenizer.decode(data.train) == LONG_TEXT


def test_the_sample_is_of_the_text_to_train_on_alone(folder: Path) -> None:
    Path("input.txt").write_text(LONG_TEXT)
    config = text_config(tokenizer_sample_bytes=1 << 17, valid_fraction=0.5)
    train, _ = find_texts(config)
    assert len("".join(train.blocks())) == train.size < len(LONG_TEXT) * 0.51
    data = prepare_data(config)
    assert data.tokenizer is not None
    assert data.tokenizer.sha256 == Tokenizer.train(sample_evenly(train.blocks(), 1 << 17, train.size), 300).sha256


def test_a_text_no_longer_than_the_sample_is_used_whole(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    Path("input.txt").write_text(LONG_TEXT)
    with caplog.at_level(logging.INFO, "cs336_systems"):
        data = prepare_data(two_texts(tokenizer_sample_bytes=len(LONG_TEXT)))
    assert not any("sample" in message for message in caplog.messages)
    assert data.tokenizer is not None
    assert data.tokenizer.sha256 == Tokenizer.train([LONG_TEXT], 300).sha256


def test_another_size_of_sample_redoes_the_tokenizer_of_a_longer_text_only(stages: Any) -> None:
    Path("input.txt").write_text(LONG_TEXT)
    whole, half, quarter = (two_texts(tokenizer_sample_bytes=n) for n in (1 << 28, 1 << 18, 1 << 17))
    assert stages(whole) == ({TOKENIZER, TRAIN, VALID}, set())
    stamp = json.loads(Path("d/tokenizer.json.stamp.json").read_text())
    assert stages(two_texts(tokenizer_sample_bytes=len(LONG_TEXT))) == (set(), {TOKENIZER, TRAIN, VALID})
    for config, size in ((half, 1 << 18), (quarter, 1 << 17)):
        assert TOKENIZER in stages(config)[0]
        expected = stamp["inputs"] | {"sample_bytes": size}
        assert json.loads(Path("d/tokenizer.json.stamp.json").read_text())["inputs"] == expected
        assert stages(config) == (set(), {TOKENIZER, TRAIN, VALID})


def test_a_sample_has_room_for_a_piece_of_text() -> None:
    with pytest.raises(ValueError, match=r"^data\.tokenizer_sample_bytes is 65535: it must be at least 65536$"):
        DataConfig(tokenizer_sample_bytes=65_535)
    assert DataConfig(tokenizer_sample_bytes=65_536).tokenizer_sample_bytes == 65_536


# A disk that is too small


STORIES_NEED = 10_000 + 2 * 10_000  # the text, and a token of two bytes for every character
RANDOM_NEED = 2 * (1000 + 100)


@pytest.mark.parametrize(
    "make, field, value, need",
    [
        (stories_config, "story_chars", 10_000, STORIES_NEED),
        (random_config, "random_tokens", 1000, RANDOM_NEED),
        (functools.partial(random_config, vocab_size=1 << 17), "random_tokens", 1000, 2 * RANDOM_NEED),
        (functools.partial(stories_config, story_chars=10**18), "story_chars", 10**18, 3 * 10**18),
    ],
    ids=["stories", "random", "tokens of four bytes", "an exabyte"],
)
def test_data_too_large_for_the_disk_is_refused_before_it_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, make: Any, field: str, value: int, need: int
) -> None:
    real = shutil.disk_usage
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=need - 1))
        message = rf"^data\.{field} is {value}: .* {need:,} bytes, .* has {need - 1:,} bytes free$"
        with pytest.raises(ValueError, match=message):
            prepare_data(make())
    assert [path.name for path in Path("d").iterdir()] == [".lock"]
    if value < 10**9:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=need))
        prepare_data(make())
        written = sum(path.stat().st_size for path in Path("d").iterdir() if path.suffix in (".txt", ".npy"))
        assert written < need + 2000  # the headers, and the story that goes over the number of characters


def test_a_full_disk_does_not_matter_where_nothing_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for config in (stories_config(), random_config(data_dir="e")):
        prepare_data(config)
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda path: pytest.fail("nothing has to be written"))
            prepare_data(config)


def test_a_refused_size_leaves_the_files_of_the_run_before_as_they_are(
    stages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for config, name in ((stories_config, "story_chars"), (random_config, "random_tokens")):
        stages(config())
        before = contents()
        with pytest.raises(ValueError, match=rf"^data\.{name} is {10**18}: .* bytes free$"):
            prepare_data(config(**{name: 10**18}))
        assert contents() == before
        shutil.rmtree("d")


def test_each_disk_needs_room_only_for_its_own_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text here, tokens there: neither disk needs room for both."""
    config = stories_config(train_tokens="there/a.npy", valid_tokens="there/b.npy", valid_fraction=0.5)
    real_stat = Path.stat

    def stat(path: Path, **options: Any) -> os.stat_result:
        found = real_stat(path, **options)
        return os.stat_result([*found[:2], 99, *found[3:]]) if path.name == "there" else found

    real = shutil.disk_usage
    free = {"d": 10_000, "there": 20_000}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=free[Path(path).name]))
    monkeypatch.setattr(Path, "stat", stat)
    for short in free:
        free[short] -= 1
        with pytest.raises(ValueError, match=f" the disk of {short} has {free[short]:,} bytes free$"):
            prepare_data(config)
        free[short] += 1
    prepare_data(config)


@pytest.mark.parametrize(
    "config, again, room, named",
    [
        (stories_config(), [], 8192, "d/stories.txt"),
        (text_config(), [], 4096, "d/tokenizer.json"),
        (text_config(), [TRAIN], 4096, "d/train.npy"),
        (random_config(), [], 1024, "d/train.npy"),
        (random_config(), [VALID], 64, "d/valid.npy"),
        (random_config(), [], 32, "d/train.npy.stamp.json"),
    ],
    ids=["text", "tokenizer", "tokens", "random tokens", "an array's header", "a stamp"],
)
def test_a_file_for_which_there_is_no_room_is_named(
    folder: Path, config: RunConfig, again: list[str], room: int, named: str
) -> None:
    """By a limit on the size of files, which fails as a full disk does; `again` are the only files to be made."""
    if again:
        prepare_data(config)
    for name in again:
        Path("d", name).unlink()
    with pytest.raises(OSError, match=rf"\] File too large: '{re.escape(named)}'$"), largest_file(room):
        prepare_data(config)
    assert not list(Path("d").glob("writing-*"))
    prepare_data(config)


# Stages that run again


def test_a_changed_text_redoes_everything_made_from_it(stages: Any) -> None:
    stages(text_config())
    Path("input.txt").write_text(TEXT + "More.\n")
    assert stages(text_config()) == ({TOKENIZER, TRAIN, VALID}, set())


def test_a_changed_validation_text_redoes_its_tokens_only(stages: Any) -> None:
    stages(two_texts())
    Path("valid.txt").write_text(VALID_TEXT + "More.\n")
    assert stages(two_texts()) == ({VALID}, {TOKENIZER, TRAIN})


def test_a_text_that_was_only_touched_redoes_nothing(stages: Any) -> None:
    stages(text_config())
    os.utime("input.txt", (1, 1))
    assert stages(text_config()) == (set(), {TOKENIZER, TRAIN, VALID})


def test_a_changed_vocabulary_redoes_tokenizer_and_tokens_but_not_the_text(stages: Any) -> None:
    stages(stories_config())
    assert stages(stories_config(vocab_size=310)) == ({TOKENIZER, TRAIN, VALID}, {STORIES})


def test_a_changed_split_redoes_everything_made_from_it(stages: Any) -> None:
    stages(text_config())
    assert stages(text_config(valid_fraction=0.5)) == ({TOKENIZER, TRAIN, VALID}, set())


@pytest.mark.parametrize("change", [dict(seed=1), dict(story_chars=20_000)])
def test_other_stories_redo_everything(stages: Any, change: dict[str, int]) -> None:
    stages(stories_config())
    assert stages(stories_config(**change)) == ({STORIES, TOKENIZER, TRAIN, VALID}, set())


@pytest.mark.parametrize("change", [dict(seed=1), dict(random_tokens=2000), dict(vocab_size=299)])
def test_other_random_tokens_redo_both_files(stages: Any, change: dict[str, int]) -> None:
    stages(random_config())
    assert stages(random_config(**change)) == ({TRAIN, VALID}, set())


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [flip_a_byte, cut_short, remove])
@pytest.mark.parametrize("name", [STORIES, TOKENIZER, TRAIN, VALID])
def test_a_damaged_output_is_made_again_alone_and_the_same(
    stages: Any, name: str, damage: Callable[[Path], None]
) -> None:
    stages(stories_config())
    before = {file: content for file, (content, _) in contents().items()}
    damage(Path("d") / name)
    assert stages(stories_config()) == ({name}, {STORIES, TOKENIZER, TRAIN, VALID} - {name})
    assert {file: content for file, (content, _) in contents().items()} == before


@pytest.mark.parametrize("stamp", [b"", b"{", b"\xff", b"{}", b"null", b"[]", b'"text"'])
def test_an_output_whose_stamp_is_broken_is_made_again(stages: Any, stamp: bytes) -> None:
    stages(stories_config())
    Path("d/train.npy.stamp.json").write_bytes(stamp)
    assert stages(stories_config()) == ({TRAIN}, {STORIES, TOKENIZER, VALID})


def test_files_without_a_stamp_are_used_as_they_are_and_never_written_over(stages: Any) -> None:
    brought = Tokenizer.train([VALID_TEXT], 280)
    Path("d").mkdir()
    brought.save("d/tokenizer.json")
    np.save("d/valid.npy", np.arange(100, dtype=np.uint16))
    before = contents()
    assert stages(text_config()) == ({TRAIN}, set())
    data = prepare_data(text_config())
    assert data.tokenizer is not None
    assert data.tokenizer.sha256 == brought.sha256
    assert np.array_equal(data.valid, np.arange(100))
    assert {name: found for name, found in contents().items() if name in before} == before


@pytest.mark.parametrize("sidecar", [None, "", "{}", "wrong count"])
def test_tokens_whose_sidecar_is_lost_or_broken_are_made_again(stages: Any, sidecar: str | None) -> None:
    stages(stories_config())
    path = Path("d/train.json")
    before = path.read_text()
    if sidecar is None:
        path.unlink()
    else:
        path.write_text(json.dumps(json.loads(before) | {"count": 5}) if sidecar == "wrong count" else sidecar)
    stages(stories_config())
    assert path.read_text() == before


def test_a_run_that_broke_off_while_encoding_leaves_nothing_that_passes_for_whole(
    stages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = Tokenizer.encode_stream

    def break_off(*arguments: Any) -> Iterator[list[int]]:
        yield next(iter(encode(*arguments)))
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "encode_stream", break_off)
        with pytest.raises(OSError, match="No space left"):
            prepare_data(text_config())
    assert not Path("d/train.npy").exists()
    assert stages(text_config()) == ({TRAIN, VALID}, {TOKENIZER})


def test_a_run_that_broke_off_over_older_tokens_does_not_leave_them_as_up_to_date(
    stages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages(text_config())

    def break_off(*_: Any) -> None:
        raise KeyboardInterrupt

    Path("input.txt").write_text(VALID_TEXT)
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "write_tokens", break_off)
        patch.setattr(Tokenizer, "save", break_off)
        with pytest.raises(KeyboardInterrupt):
            prepare_data(text_config())
    made, skipped = stages(text_config())
    assert (made, skipped) == ({TOKENIZER, TRAIN, VALID}, set())
    assert prepare_data(text_config()).tokenizer.decode(np.load("d/train.npy")) in VALID_TEXT  # type: ignore[union-attr]


def prepare_and_tell(vocab_size: int, results: Any) -> None:
    data = prepare_data(dataclasses.replace(text_config(), model=run_config(vocab_size=vocab_size).model))
    assert data.tokenizer is not None
    text = data.tokenizer.decode(data.train)
    results.put((vocab_size, data.tokenizer.vocab_size, text in TEXT, text[:20] == TEXT[:20]))


def test_runs_that_prepare_the_same_folder_at_once_each_get_their_own_data(folder: Path) -> None:
    """The later process waits, then makes its own files. The earlier one keeps the files that it has mapped."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    sizes = (290, 280, 270)
    processes = [context.Process(target=prepare_and_tell, args=(size, results)) for size in sizes]
    for process in processes:
        process.start()
    found = sorted(results.get(timeout=60) for _ in sizes)
    for process in processes:
        process.join(timeout=60)
    assert found == [(size, size, True, True) for size in sorted(sizes)]


# Where a text is cut


def test_the_cut_is_after_the_first_document_that_ends_behind_the_wanted_byte(tmp_path: Path) -> None:
    document = f"line one\nline two\n{END_OF_TEXT}\n"
    (tmp_path / "t").write_text(document * 10)
    for fraction, expected in ((0.19, 9), (0.25, 8), (0.55, 5), (0.95, 1)):
        assert find_split(tmp_path / "t", fraction) == expected * len(document)


def test_without_documents_the_cut_is_after_a_line(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("0123456789\n" * 100)
    assert find_split(tmp_path / "t", 0.5) == 50 * 11 + 11
    assert find_split(tmp_path / "t", 0.497) == 51 * 11


def test_without_lines_the_cut_is_at_a_character(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("é" * 50)
    assert find_split(tmp_path / "t", 0.49) == 52  # byte 51 is the second of a character
    (tmp_path / "t").write_text("x" * 100)
    assert find_split(tmp_path / "t", 0.49) == 51


@pytest.mark.parametrize("line_end", ["", "\n", "\r\n", "\r", " "])
def test_the_cut_is_behind_the_end_of_a_document_whatever_ends_its_line(tmp_path: Path, line_end: str) -> None:
    document = f"line one{line_end}line two{line_end}{END_OF_TEXT}{line_end}"
    (tmp_path / "t").write_bytes((document * 10).encode())
    before = "" if line_end == " " else line_end  # a space begins the next document
    for fraction, expected in ((0.19, 9), (0.25, 8), (0.55, 5)):
        assert find_split(tmp_path / "t", fraction) == expected * len(document) - len(line_end) + len(before)


@pytest.mark.parametrize("end", ["\n", f"{END_OF_TEXT}\n", END_OF_TEXT, f"{END_OF_TEXT}\r\n", "\r\n"])
def test_the_end_of_the_text_is_no_place_to_cut(tmp_path: Path, end: str) -> None:
    (tmp_path / "t").write_text("x" * 1000 + end)
    assert find_split(tmp_path / "t", 0.1) == int((1000 + len(end)) * 0.9)


def test_a_document_behind_the_first_megabyte_is_not_looked_for(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("x" * 3_000_000 + f"\n{END_OF_TEXT}\n" + "y" * 100)
    assert find_split(tmp_path / "t", 0.5) == int((tmp_path / "t").stat().st_size * 0.5)


texts = st.text(st.sampled_from("ab \nß語🙂"), min_size=1, max_size=60) | st.text(min_size=1)
ends = st.sampled_from(["\n", "\r\n", "\r", ""]).map(END_OF_TEXT.__add__)
documents = st.lists(texts | ends, min_size=1, max_size=6).map("".join)
fractions = st.floats(0, 1, exclude_min=True, exclude_max=True)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("split") / "text.txt"


def check_split(path: Path, text: str, fraction: float) -> tuple[bytes, bytes]:
    encoded = text.encode()
    path.write_bytes(encoded)
    cut = find_split(path, fraction)
    assert 0 < cut <= len(encoded)
    train, valid = encoded[:cut], encoded[cut:]
    assert train.decode() + valid.decode() == text  # each decodes by itself: the cut is between characters
    return train, valid


@given(text=documents, fraction=fractions)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_text_is_cut_between_characters(scratch: Path, text: str, fraction: float) -> None:
    check_split(scratch, text, fraction)


@given(text=documents, fraction=fractions)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_text_with_a_few_bytes_to_validate_is_cut_in_two(scratch: Path, text: str, fraction: float) -> None:
    assume(len(text.encode()) * fraction > 5)
    train, valid = check_split(scratch, text, fraction)
    assert train
    assert valid
    assert len(train) >= int(len(text.encode()) * (1 - fraction))


@given(text=documents, fraction=st.floats(0.05, 0.95))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_train_and_validation_text_do_not_overlap_and_cover_the_file(scratch: Path, text: str, fraction: float) -> None:
    assume(len(text.encode()) * fraction > 5 and text.count("\0") < len(text) / 4)
    scratch.write_bytes(text.encode())
    config = run_config(source="text", train_text=str(scratch), valid_fraction=fraction)
    train, valid = find_texts(config)
    assert (train.start, train.end, valid.end) == (0, valid.start, None)
    assert "".join(train.blocks()) + "".join(valid.blocks()) == text


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.999])
def test_stories_are_cut_between_stories(folder: Path, fraction: float) -> None:
    train, valid = find_texts(stories_config(valid_fraction=fraction))
    assert "".join(train.blocks()).endswith(f"{END_OF_TEXT}\n")
    assert "".join(valid.blocks()).endswith(f"{END_OF_TEXT}\n")


# Sources that are made


def made_by(config: RunConfig, folder: str) -> tuple[np.ndarray, np.ndarray]:
    data = prepare_data(config)
    return np.array(data.train), np.array(data.valid)


@pytest.mark.parametrize("make", [stories_config, random_config], ids=["stories", "random"])
def test_the_same_seed_gives_the_same_tokens_and_another_gives_others(folder: Path, make: Any) -> None:
    first, again, other = (
        made_by(make(seed=seed, data_dir=name), name) for seed, name in ((3, "a"), (3, "b"), (4, "c"))
    )
    for i in (0, 1):
        assert np.array_equal(first[i], again[i])
        assert not np.array_equal(first[i], other[i])


def test_random_tokens_fill_the_vocabulary_and_differ_between_the_splits(folder: Path) -> None:
    train, valid = made_by(random_config(random_tokens=50_000), "d")
    assert (len(train), len(valid)) == (50_000, 5_000)
    assert set(train.tolist()) == set(range(300))
    assert not np.array_equal(train[:5000], valid)


def test_random_tokens_are_never_too_few_for_a_sequence(folder: Path) -> None:
    train, valid = made_by(random_config(random_tokens=2), "d")
    assert len(train) == len(valid) == 34


def test_random_tokens_have_no_tokenizer_even_beside_one(folder: Path) -> None:
    prepare_data(text_config())
    assert prepare_data(random_config()).tokenizer is None


# Token files as they are

NO_TOKENIZER = "data: no tokenizer is known for {}, so no text will be sampled: give --data.tokenizer"


def test_skip_data_takes_files_given_by_path_and_needs_no_tokenizer(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids = np.arange(100, dtype=np.uint16)
    np.save("x.npy", ids)
    np.save("y.npy", ids[::-1].astype(np.uint32))
    with caplog.at_level(logging.INFO, "cs336_systems"):
        data = prepare_data(run_config(skip_data=True, train_tokens="x.npy", valid_tokens="y.npy"))
    assert np.array_equal(data.train, ids)
    assert np.array_equal(data.valid, ids[::-1])
    assert data.tokenizer is None
    assert caplog.messages == ["data: as it is (--skip_data)", NO_TOKENIZER.format("x.npy")]
    assert {p.name for p in folder.iterdir()} == {"input.txt", "valid.txt", "x.npy", "y.npy"}


@pytest.fixture
def own_tokens(folder: Path) -> dict[str, str]:
    """Token files without a sidecar, beside the data of an earlier run that have nothing to do with them."""
    prepare_data(text_config())
    for name in ("x.npy", "y.npy"):
        np.save(name, np.arange(100, dtype=np.uint16))
    return dict(train_tokens="x.npy", valid_tokens="y.npy")


@pytest.mark.parametrize("skip_data", [True, False])
def test_token_files_of_ones_own_have_the_tokenizer_that_is_named_or_none(
    own_tokens: dict[str, str], caplog: pytest.LogCaptureFixture, skip_data: bool
) -> None:
    before = contents()
    # A text that has changed would have the tokenizer made again, if that were of any use here.
    config = functools.partial(text_config, train_text="valid.txt", skip_data=skip_data, **own_tokens)
    assert prepare_data(config()).tokenizer is None
    assert NO_TOKENIZER.format("x.npy") in caplog.messages
    caplog.clear()
    named = prepare_data(config(tokenizer="d/tokenizer.json"))
    assert named.tokenizer is not None
    assert named.tokenizer.sha256 == Tokenizer.load("d/tokenizer.json").sha256
    assert NO_TOKENIZER.format("x.npy") not in caplog.messages
    assert np.array_equal(named.train, np.arange(100))
    assert contents() == before


def test_a_tokenizer_that_is_named_and_not_there_is_refused(own_tokens: dict[str, str]) -> None:
    with pytest.raises(FileNotFoundError, match=r"^data\.tokenizer z\.json does not exist: "):
        prepare_data(text_config(tokenizer="z.json", **own_tokens))
    assert not Path("z.json").exists()


@pytest.mark.parametrize("skip_data", [True, False])
def test_tokens_of_ones_own_are_not_validated_on_those_of_another_tokenizer(
    own_tokens: dict[str, str], skip_data: bool
) -> None:
    with pytest.raises(ValueError, match=r"x\.npy and d/valid\.npy are not known to be of one tokenizer"):
        prepare_data(text_config(skip_data=skip_data, train_tokens="x.npy"))


def test_token_files_elsewhere_that_were_made_here_keep_their_tokenizer(folder: Path) -> None:
    elsewhere = dict(train_tokens="there/x.npy", valid_tokens="there/y.npy")
    made = prepare_data(text_config(**elsewhere)).tokenizer
    for skip_data in (False, True):
        found = prepare_data(text_config(skip_data=skip_data, **elsewhere)).tokenizer
        assert made is not None
        assert found is not None
        assert found.sha256 == made.sha256
    Tokenizer.train([VALID_TEXT], 290).save("d/tokenizer.json")
    assert prepare_data(text_config(skip_data=True, **elsewhere)).tokenizer is None


def test_token_files_of_a_text_are_used_without_the_text(own_tokens: dict[str, str]) -> None:
    assert len(prepare_data(run_config(source="text", skip_data=True, **own_tokens)).train) == 100
    made = prepare_data(run_config(source="text", skip_data=True, data_dir="d"))
    assert made.tokenizer is not None


def test_skip_data_takes_the_files_and_the_tokenizer_of_a_run_before(folder: Path) -> None:
    made = prepare_data(text_config())
    before = contents()
    Path("input.txt").unlink()
    taken = prepare_data(text_config(skip_data=True))
    assert np.array_equal(taken.train, made.train)
    assert taken.train_sha256 == made.train_sha256
    assert made.tokenizer is not None
    assert taken.tokenizer is not None
    assert taken.tokenizer.sha256 == made.tokenizer.sha256
    assert contents() == before


@pytest.mark.parametrize("missing", ["train_tokens", "valid_tokens"])
def test_skip_data_names_the_file_that_is_missing(folder: Path, missing: str) -> None:
    prepare_data(text_config())
    name = missing.removesuffix("_tokens")
    Path(f"d/{name}.npy").unlink()
    with pytest.raises(FileNotFoundError, match=rf"^data\.{missing} d/{name}\.npy does not exist, and --skip_data"):
        prepare_data(text_config(skip_data=True))


@pytest.mark.parametrize("name", ["tokenizer", "train_tokens", "valid_tokens"])
def test_a_folder_where_a_file_of_the_data_goes_is_refused(folder: Path, name: str) -> None:
    Path("there").mkdir()
    with pytest.raises(ValueError, match=rf"^data\.{name} there is a folder: it must be a file, or a name"):
        prepare_data(text_config(**{name: "there"}))
    assert not Path("d").exists()
    assert not list(Path("there").iterdir())


def test_skip_data_refuses_tokens_that_another_tokenizer_made(folder: Path) -> None:
    # The sidecar knows its tokenizer: with another the text that is sampled would be nonsense.
    prepare_data(text_config())
    Tokenizer.train([VALID_TEXT], 290).save("other.json")
    with pytest.raises(ValueError, match=r"d/train\.npy.*tokenizer"):
        prepare_data(text_config(skip_data=True, tokenizer="other.json"))


# TinyStories, from a server that answers as huggingface.co does

REVISION = "0123456789abcdef0123456789abcdef01234567"
TRAIN_FILE, VALID_FILE = sources.TINYSTORIES_SHA256
SERVED = {TRAIN_FILE: (TEXT * 20).encode(), VALID_FILE: VALID_TEXT.encode()}


class Hub(ThreadingHTTPServer):
    """A small Hub: files by name, every request in `requests`.

    Once each: a body cut off after `break_after` bytes, and one that waits for `go_on` after `stall_after` bytes.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.files = dict(SERVED)
        self.requests: list[tuple[str, str, str | None]] = []
        self.knows_ranges = True
        self.break_after: int | None = None
        self.stall_after: int | None = None
        self.go_on = threading.Event()
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"

    def ranges(self) -> list[str | None]:
        """The Range header of every GET of a file."""
        return [range_ for method, name, range_ in self.requests if method == "GET" and name in SERVED]


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_HEAD(self) -> None:
        self._answer(send_body=False)

    def do_GET(self) -> None:
        self._answer(send_body=True)

    def _answer(self, send_body: bool) -> None:
        hub = self.server
        prefix, _, name = urlsplit(self.path).path.rpartition("/")  # a proxy is sent the whole URL
        hub.requests.append((self.command, name, self.headers.get("Range")))
        body = hub.files.get(name)
        if body is None or prefix != f"/datasets/roneneldan/TinyStories/resolve/{REVISION}":
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "") if hub.knows_ranges else None
        start = int(wanted[1]) if wanted else 0
        if wanted and start >= len(body):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(body)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("X-Repo-Commit", REVISION)
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        if not send_body:
            return
        if hub.break_after is not None:
            self.wfile.write(body[start : start + hub.break_after])
            hub.break_after = None
            self.close_connection = True
        elif hub.stall_after is not None:
            middle = start + hub.stall_after
            hub.stall_after = None
            self.wfile.write(body[start:middle])
            hub.go_on.wait(60)
            with contextlib.suppress(OSError):  # nobody may be there any more
                self.wfile.write(body[middle:])
        else:
            self.wfile.write(body[start:])


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub without the proxies, the cache and the settings of this machine."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 12)  # less than the files that are served
    monkeypatch.setattr(sources, "TINYSTORIES_REVISION", REVISION)
    hashes = {name: hashlib.sha256(body).hexdigest() for name, body in SERVED.items()}
    monkeypatch.setattr(sources, "TINYSTORIES_SHA256", hashes)


@pytest.fixture
def hub(library: None) -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_tinystories_are_fetched_as_they_are_served(hub: Hub, tmp_path: Path) -> None:
    span = fetch_tinystories(TRAIN_FILE, tmp_path / "new" / "folder", hub.endpoint)
    assert span.path == tmp_path / "new" / "folder" / TRAIN_FILE
    assert span.path.read_bytes() == SERVED[TRAIN_FILE]
    assert "".join(span.blocks()) == TEXT * 20
    assert hub.ranges() == [None]


def test_tinystories_that_are_there_make_no_request(hub: Hub, tmp_path: Path) -> None:
    first = fetch_tinystories(TRAIN_FILE, tmp_path, hub.endpoint)
    hub.requests.clear()
    assert fetch_tinystories(TRAIN_FILE, tmp_path, hub.endpoint) == first
    assert hub.requests == []


def test_a_file_brought_by_hand_makes_no_request(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / VALID_FILE).write_bytes(SERVED[VALID_FILE])
    assert fetch_tinystories(VALID_FILE, tmp_path, hub.endpoint).path == tmp_path / VALID_FILE
    assert hub.requests == []


def test_a_download_whose_connection_broke_goes_on_where_it_stopped(hub: Hub, tmp_path: Path) -> None:
    hub.break_after = 20_000
    span = fetch_tinystories(TRAIN_FILE, tmp_path, hub.endpoint)
    assert span.path.read_bytes() == SERVED[TRAIN_FILE]
    first, second = hub.ranges()
    assert first is None
    assert second is not None
    resumed_at = int(second.removeprefix("bytes=").removesuffix("-"))
    assert 0 < resumed_at <= 20_000


def test_a_file_with_a_wrong_hash_is_removed_and_fetched_anew(hub: Hub, tmp_path: Path) -> None:
    hub.files[TRAIN_FILE] = b"something else"
    with pytest.raises(ValueError, match=r"has SHA-256 \w{64}, not \w{64}: it was removed, run again") as caught:
        fetch_tinystories(TRAIN_FILE, tmp_path, hub.endpoint)
    assert str(tmp_path / TRAIN_FILE) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / TRAIN_FILE).exists()

    hub.files[TRAIN_FILE] = SERVED[TRAIN_FILE]
    assert fetch_tinystories(TRAIN_FILE, tmp_path, hub.endpoint).path.read_bytes() == SERVED[TRAIN_FILE]


# A download that goes on


FETCH = """
import logging, sys
from pathlib import Path
from huggingface_hub import constants
from cs336_systems.training import texts

name, revision, sha256, folder = sys.argv[1:]
logging.basicConfig(level=logging.INFO, format="%(message)s")
constants.DOWNLOAD_CHUNK_SIZE = 1 << 12
texts.TINYSTORIES_REVISION, texts.TINYSTORIES_SHA256 = revision, {name: sha256}
texts.fetch_tinystories(name, Path(folder))
"""


@pytest.fixture
def fetching(hub: Hub, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a process that fetches the training file into `folder`."""
    started: list[subprocess.Popen[str]] = []

    def start(**environment: str) -> subprocess.Popen[str]:
        kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        kept |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.endpoint}
        kept |= {"HF_HUB_DOWNLOAD_TIMEOUT": "60"} | environment  # the second process may be slow to start
        sha256 = hashlib.sha256(SERVED[TRAIN_FILE]).hexdigest()
        arguments = [TRAIN_FILE, REVISION, sha256, str(tmp_path / "folder")]
        started.append(
            subprocess.Popen([sys.executable, "-c", FETCH, *arguments], env=kept, stderr=subprocess.PIPE, text=True)
        )
        return started[-1]

    yield start
    hub.go_on.set()
    for process in started:
        process.kill()
        process.communicate()


def test_a_download_whose_process_was_killed_goes_on_in_another_one(hub: Hub, fetching: Any, tmp_path: Path) -> None:
    partial = tmp_path / "folder" / f"{TRAIN_FILE}.partial"
    hub.stall_after = 100_000
    process = fetching()
    wait_until(lambda: partial.is_file() and partial.stat().st_size > 50_000)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    here = partial.stat().st_size
    assert SERVED[TRAIN_FILE].startswith(partial.read_bytes())

    second = fetching()
    errors = second.communicate(timeout=60)[1]
    assert second.returncode == 0, errors
    assert f"text: {here:,} bytes of it are here already" in errors
    assert hub.ranges() == [None, f"bytes={here}-"]
    assert (tmp_path / "folder" / TRAIN_FILE).read_bytes() == SERVED[TRAIN_FILE]
    assert not partial.exists()


def test_two_processes_that_fetch_a_file_at_once_fetch_it_once(hub: Hub, fetching: Any, tmp_path: Path) -> None:
    hub.stall_after = 100_000
    first = fetching()
    wait_until(lambda: hub.ranges() == [None])
    second = fetching()
    assert second.stderr is not None
    assert second.stderr.readline().startswith("data: waiting for another process")
    hub.go_on.set()
    assert [first.wait(60), second.wait(60)] == [0, 0]
    assert hub.ranges() == [None]
    assert (tmp_path / "folder" / TRAIN_FILE).read_bytes() == SERVED[TRAIN_FILE]


def test_the_download_goes_through_a_proxy(hub: Hub, fetching: Any, tmp_path: Path) -> None:
    process = fetching(HF_ENDPOINT="http://hub.invalid", http_proxy=hub.endpoint)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 0, errors
    assert (tmp_path / "folder" / TRAIN_FILE).read_bytes() == SERVED[TRAIN_FILE]


def left_over(folder: Path, content: bytes) -> Path:
    """The file of a download that broke off."""
    partial = folder / f"{TRAIN_FILE}.partial"
    partial.write_bytes(content)
    return partial


def test_a_server_that_knows_no_ranges_is_asked_for_all_of_it(hub: Hub, tmp_path: Path) -> None:
    hub.knows_ranges = False
    left_over(tmp_path, SERVED[TRAIN_FILE][:1000])
    assert fetch_tinystories(TRAIN_FILE, tmp_path, hub.endpoint).path.read_bytes() == SERVED[TRAIN_FILE]
    assert hub.ranges() == ["bytes=1000-"]


def test_a_download_that_only_lacks_its_name_is_given_it(hub: Hub, tmp_path: Path) -> None:
    partial = left_over(tmp_path, SERVED[TRAIN_FILE])
    assert fetch_tinystories(TRAIN_FILE, tmp_path, hub.endpoint).path.read_bytes() == SERVED[TRAIN_FILE]
    assert hub.ranges() == [f"bytes={len(SERVED[TRAIN_FILE])}-"]
    assert not partial.exists()


@pytest.mark.parametrize("extra", [0, 1000], ids=["as long", "longer"])
def test_a_partial_file_that_cannot_be_the_beginning_is_fetched_anew(hub: Hub, tmp_path: Path, extra: int) -> None:
    size = len(SERVED[TRAIN_FILE]) + extra
    left_over(tmp_path, b"x" * size)
    assert fetch_tinystories(TRAIN_FILE, tmp_path, hub.endpoint).path.read_bytes() == SERVED[TRAIN_FILE]
    assert hub.ranges() == [f"bytes={size}-", None]


def test_a_partial_file_of_something_else_is_removed_and_said_in_one_line(hub: Hub, tmp_path: Path) -> None:
    partial = left_over(tmp_path, b"x" * 1000)
    with pytest.raises(ValueError, match=r"has SHA-256 \w{64}, not \w{64}: it was removed, run again") as caught:
        fetch_tinystories(TRAIN_FILE, tmp_path, hub.endpoint)
    assert "\n" not in str(caught.value)
    assert not partial.exists()
    assert fetch_tinystories(TRAIN_FILE, tmp_path, hub.endpoint).path.read_bytes() == SERVED[TRAIN_FILE]


def test_a_download_that_fails_keeps_its_partial_file(hub: Hub, no_waiting: None, tmp_path: Path) -> None:
    partial = left_over(tmp_path, SERVED[TRAIN_FILE][:1000])
    body = hub.files.pop(TRAIN_FILE)
    the_connection_error(tmp_path, hub.endpoint)
    assert partial.read_bytes() == body[:1000]


@pytest.mark.parametrize("content, requests", [(SERVED[TRAIN_FILE], 0), (b"damaged", 1)])
def test_a_copy_in_the_librarys_cache_is_taken_if_it_is_right(
    hub: Hub, tmp_path: Path, content: bytes, requests: int
) -> None:
    repository = tmp_path / "cache" / "datasets--roneneldan--TinyStories"
    (repository / "snapshots" / REVISION).mkdir(parents=True)
    (repository / "snapshots" / REVISION / TRAIN_FILE).write_bytes(content)
    assert fetch_tinystories(TRAIN_FILE, tmp_path / "d", hub.endpoint).path.read_bytes() == SERVED[TRAIN_FILE]
    assert len(hub.requests) == requests


def test_offline_nothing_is_asked_for(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in the_connection_error(tmp_path, hub.endpoint)
    assert hub.requests == []


def the_connection_error(folder: Path, endpoint: str) -> str:
    told: list[logging.LogRecord] = []
    library, listener = logging.getLogger("huggingface_hub"), logging.Handler()
    listener.emit = told.append  # type: ignore[method-assign]
    library.addHandler(listener)
    with pytest.raises(ConnectionError) as caught:
        fetch_tinystories(TRAIN_FILE, folder, endpoint)
    library.removeHandler(listener)
    assert told == []
    assert library.isEnabledFor(logging.WARNING)
    message = str(caught.value)
    assert message.startswith(f"{TRAIN_FILE} of roneneldan/TinyStories could not be fetched: ")
    instead = f"copy the file to {folder / TRAIN_FILE}, or take --data.source stories, a text that is generated here"
    assert message.endswith(f"(without a network, {instead})")
    assert "\n" not in message
    assert not (folder / TRAIN_FILE).exists()
    return message


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's retries, without the pauses between them."""
    from huggingface_hub.utils import _http

    monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)


def test_a_server_that_is_down_is_one_clear_line(library: None, no_waiting: None, tmp_path: Path) -> None:
    with socket.socket() as taken:  # bound but not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        the_connection_error(tmp_path, f"http://127.0.0.1:{taken.getsockname()[1]}")


def test_a_file_that_is_not_on_the_server_is_said(hub: Hub, no_waiting: None, tmp_path: Path) -> None:
    del hub.files[TRAIN_FILE]
    assert "404" in the_connection_error(tmp_path, hub.endpoint)


def test_tinystories_are_prepared_whole_for_training_and_validation(
    hub: Hub, stages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "fetch_tinystories", functools.partial(fetch_tinystories, endpoint=hub.endpoint))
    config = run_config(source="tinystories", data_dir="d")
    assert stages(config) == ({TOKENIZER, TRAIN, VALID}, set())
    data = prepare_data(config)
    assert data.tokenizer is not None
    assert data.tokenizer.decode(data.train).encode() == SERVED[TRAIN_FILE]
    assert data.tokenizer.decode(data.valid).encode() == SERVED[VALID_FILE]
    hub.requests.clear()
    assert stages(config) == (set(), {TOKENIZER, TRAIN, VALID})
    assert hub.requests == []


# Memory and speed

GIGABYTE = 1_000_000_000
ALPHABETS = (
    "abcdefghijklmnopqrstuvwxyz",
    "абвгдежзиклмнопрстуфхцчшэюя",
    "αβγδεζηθικλμνξοπρστυφχψω",
    "的一是不了人我在有他这中大来上",
)


def spell(rank: int) -> str:
    """A word of its own for every number, in one of several alphabets."""
    rank, alphabet = divmod(rank, 8)
    letters = ALPHABETS[alphabet] if alphabet < len(ALPHABETS) else ALPHABETS[0]
    word = ""
    while rank or not word:
        rank, letter = divmod(rank, len(letters))
        word += letters[letter]
    return word


def write_gigabyte(path: Path, exponent: float | None) -> None:
    """Stories; with an exponent every fifth word is drawn from an endless vocabulary whose frequencies fall with it."""
    text = "".join(stories(0, 8_000_000))
    with path.open("w", encoding="utf-8") as file:
        rng = np.random.default_rng(0)
        spelled = functools.lru_cache(1 << 18)(spell)
        while file.tell() < GIGABYTE:
            if exponent is None:
                file.write(text)
            else:
                words = text.split(" ")
                words[::5] = map(spelled, rng.zipf(exponent, len(words[::5])).tolist())
                file.write(" ".join(words))


PREPARE_AND_MEASURE = """
import itertools, json, resource, sys, time
from cs336_basics.tokenizer import read_utf8, split_pieces
from cs336_systems.config.run import DataConfig, ModelConfig, RunConfig
from cs336_systems.training.prepare import prepare_data

start = time.perf_counter()
model = ModelConfig(vocab_size=10_000, d_model=32, d_ff=64, num_layers=1, num_heads=2)
text = "text.txt"
data = prepare_data(RunConfig(model=model, data=DataConfig(source="text", train_text=text, valid_fraction=0.01)))
seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

blocks = list(itertools.islice(read_utf8(text), 16))
pieces = list(split_pieces(blocks))
batches = [pieces[i : i + 64] for i in range(0, len(pieces), 64)]  # 4 MB: in one call the library is slower
library = data.tokenizer._tokenizer
ways = {
    "own": lambda: list(data.tokenizer.encode_stream(blocks)),
    "library": lambda: [[e.ids for e in library.encode_batch(b, add_special_tokens=False)] for b in batches],
    "library fast": lambda: [[e.ids for e in library.encode_batch_fast(b, add_special_tokens=False)] for b in batches],
}
times = {name: [] for name in ways}
for _ in range(5):
    for name, encode in ways.items():
        start = time.perf_counter()
        encode()
        times[name].append(time.perf_counter() - start)
size = sum(len(block.encode()) for block in blocks)
print(json.dumps({
    "seconds": seconds, "peak": peak, "vocab": data.tokenizer.vocab_size, "tokens": len(data.train) + len(data.valid),
    "rates": {name: size / min(taken) for name, taken in times.items()},
}))
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "exponent",
    [
        pytest.param(None, id="stories: 1 thousand different words"),
        pytest.param(1.3, id="and random words: 0.8 million, like English"),
        pytest.param(1.2, id="and random words: 2.3 million, like the web"),
    ],
)
def test_a_gigabyte_needs_less_than_2_gb_of_memory_and_encodes_as_fast_as_the_library(
    folder: Path, exponent: float | None
) -> None:
    write_gigabyte(folder / "text.txt", exponent)
    done = subprocess.run([sys.executable, "-c", PREPARE_AND_MEASURE], capture_output=True, text=True)
    (folder / "text.txt").unlink()
    shutil.rmtree(folder / "data", ignore_errors=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rates = found["rates"]
    print(
        f"prepared in {found['seconds']:.0f} s, {found['tokens']:,} tokens, peak memory {found['peak'] / 1e9:.2f} GB, "
        + ", ".join(f"{name} {rate / 1e6:.1f} MB/s" for name, rate in rates.items())
    )
    assert found["vocab"] == 10_000 or exponent is None  # stories have too few words
    assert found["peak"] < 2e9
    assert rates["own"] > 0.9 * rates["library"]


# Files of others


@pytest.mark.parametrize("name", ["train.json", "valid.json"])
def test_a_file_that_was_not_made_here_is_not_replaced_by_a_sidecar(folder: Path, name: str) -> None:
    Path("d").mkdir()
    Path("d", name).write_text('{"precious": 1}')
    with pytest.raises(ValueError, match=rf"^d/{name} was not made here, but is to be written beside d/\w+\.npy: move"):
        prepare_data(text_config())
    assert Path("d", name).read_text() == '{"precious": 1}'


def test_the_text_itself_is_not_replaced_by_a_sidecar(folder: Path) -> None:
    Path("d").mkdir()
    Path("d/train.json").write_text(TEXT)
    with pytest.raises(ValueError, match=r"^d/train\.json was not made here"):
        prepare_data(text_config(train_text="d/train.json"))
    assert Path("d/train.json").read_text() == TEXT


def test_a_tokenizer_in_another_runs_data_is_used_as_it_is(stages: Any) -> None:
    stages(text_config())
    before = contents()
    other = functools.partial(text_config, train_text="valid.txt", data_dir="e")
    assert stages(other(tokenizer="d/tokenizer.json")) == ({TRAIN, VALID}, set())
    assert {name: found for name, found in contents().items() if name in before} == before
    assert read_info("e/train.npy").tokenizer_sha256 == Tokenizer.load("d/tokenizer.json").sha256


def test_token_files_in_another_runs_data_are_used_as_they_are(stages: Any) -> None:
    stages(text_config())
    before = contents()
    tokens = dict(train_tokens="d/train.npy", valid_tokens="d/valid.npy", data_dir="e")
    assert stages(stories_config(**tokens)) == (set(), set())
    assert prepare_data(stories_config(**tokens)).tokenizer is None  # none is named, and there is none in e
    assert contents() == before


def test_an_unfinished_file_outside_of_data_dir_is_made_again(stages: Any) -> None:
    outside = text_config(train_tokens="x/t.npy", tokenizer="x/tokenizer.json")
    stages(outside)
    Path("x/t.npy.stamp.json").write_text('{"inputs": null, "sha256": null}')
    made, _ = stages(outside)
    assert made == {"t.npy"}


@pytest.mark.parametrize("name", ["train_tokens", "valid_tokens"])
def test_a_tokenizer_made_here_does_not_vouch_for_one_token_file_of_ones_own(folder: Path, name: str) -> None:
    np.save("own.npy", np.arange(100, dtype=np.uint16))
    with pytest.raises(ValueError, match="are not known to be of one tokenizer"):
        prepare_data(text_config(**{name: "own.npy"}))


def test_random_tokens_have_the_tokenizer_that_is_named(folder: Path) -> None:
    Tokenizer.train([TEXT], 280).save("mine.json")
    assert prepare_data(random_config()).tokenizer is None
    assert prepare_data(random_config(tokenizer="mine.json")).tokenizer is not None


def test_one_file_has_one_field_however_it_is_spelled(folder: Path) -> None:
    Path("link.npy").symlink_to("a.npy")
    for other in ("a.npy", "./a.npy", str(folder / "a.npy"), "link.npy"):
        with pytest.raises(
            ValueError, match=r"^data\.train_tokens is '.*': it must be another file than data\.tokenizer$"
        ):
            text_config(tokenizer="a.npy", train_tokens=other)


# Token files of one's own


def test_two_token_files_of_ones_own_need_no_text(own_tokens: dict[str, str]) -> None:
    data = prepare_data(run_config(source="text", **own_tokens))
    assert np.array_equal(data.train, np.arange(100))
    Path("mine").mkdir()
    for name in ("train", "valid"):
        shutil.copy("x.npy", f"mine/{name}.npy")
    assert len(prepare_data(run_config(source="text", data_dir="mine")).train) == 100


@pytest.mark.parametrize("train_text", [None, ""])
@pytest.mark.parametrize("name", [None, "train_tokens", "valid_tokens"])
def test_a_text_is_needed_where_tokens_are_to_be_made(
    own_tokens: dict[str, str], train_text: str | None, name: str | None
) -> None:
    given = {} if name is None else {name: "x.npy"}
    with pytest.raises(ValueError, match=r"^data\.train_text is (null|''): it must be a path, because data\.source is"):
        prepare_data(run_config(source="text", data_dir="new", train_text=train_text, **given))
    assert not Path("new").exists()


@pytest.mark.parametrize("skip_data", [True, False])
@pytest.mark.parametrize("again", ["x.npy", "link.npy"])
def test_one_token_file_for_both_is_used_and_that_is_said(
    own_tokens: dict[str, str], caplog: pytest.LogCaptureFixture, again: str, skip_data: bool
) -> None:
    Path("link.npy").symlink_to("x.npy")
    data = prepare_data(run_config(skip_data=skip_data, train_tokens="x.npy", valid_tokens=again))
    assert np.array_equal(data.train, data.valid)
    assert any("validation is on the training tokens" in message for message in caplog.messages)


@pytest.mark.parametrize("config", [text_config, stories_config, random_config])
def test_one_token_file_for_both_is_not_made(folder: Path, config: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^data\.valid_tokens is 'x\.npy': it must be another file than data\.train_tok"
    ):
        prepare_data(config(train_tokens="x.npy", valid_tokens="x.npy"))
    assert not Path("d").exists()


@pytest.mark.parametrize(
    "content", ['[{"text": "a"}]', '{"text": "a"}\n{"text": "b"}\n', '{"count": 3, "sha256": "0"}', ""]
)
def test_a_file_of_another_kind_under_the_name_of_a_sidecar_is_ignored_and_said(
    own_tokens: dict[str, str], caplog: pytest.LogCaptureFixture, content: str
) -> None:
    Path("x.json").write_text(content)
    with caplog.at_level(logging.INFO, "cs336_systems"):
        data = prepare_data(run_config(source="text", **own_tokens))
    assert np.array_equal(data.train, np.arange(100))
    assert "data: x.json is no sidecar of x.npy, ignored" in caplog.messages
    assert Path("x.json").read_text() == content


# NUL characters


@pytest.mark.parametrize("place, count", [(0, 1), (5_000, 1), (2_500_000, 1), (5_000, 50_000), (2_500_000, 50_000)])
def test_nul_characters_are_text_wherever_they_are(folder: Path, place: int, count: int) -> None:
    text = TEXT * (1 + place // len(TEXT))
    text = text[:place] + "\0" * count + text[place:]
    Path("input.txt").write_text(text)
    data = prepare_data(text_config())
    assert data.tokenizer is not None
    assert data.tokenizer.decode(data.train) + data.tokenizer.decode(data.valid) == text


@pytest.mark.parametrize(
    "encoding, place", [("utf-16-le", 1), ("utf-16-be", 0), ("utf-32-le", 1), ("utf-32-be", 0), ("utf-16", 0)]
)
def test_a_text_in_utf_16_is_refused_with_the_place(folder: Path, encoding: str, place: int) -> None:
    Path("input.txt").write_bytes(TEXT.encode(encoding))
    with pytest.raises(ValueError, match=rf"^text file input\.txt must be UTF-8 text: .* byte {place}\b"):
        prepare_data(text_config())
