"""Text to token files: each stage runs when it must and only then, whatever happened to the files in between."""

import dataclasses
import functools
import hashlib
import json
import logging
import multiprocessing
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cs336_basics.data import read_info
from cs336_basics.tokenizer import Tokenizer
from cs336_systems.config.run import RunConfig
from cs336_systems.training import prepare
from cs336_systems.training.prepare import prepare_data
from cs336_systems.training.texts import find_texts
from tests.systems.preparation import (
    ALL,
    STORIES,
    TEXT,
    TOKENIZER,
    TRAIN,
    VALID,
    VALID_TEXT,
    contents,
    random_config,
    run_config,
    stories_config,
    text_config,
    two_texts_config,
)
from tests.training.helpers import largest_file

# Stages that run


@pytest.mark.parametrize(
    "config, outputs",
    [
        (text_config(), {TOKENIZER, TRAIN, VALID}),
        (two_texts_config(), {TOKENIZER, TRAIN, VALID}),
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


def test_the_tokens_decode_to_the_text_that_was_given(two_texts: Path) -> None:
    data = prepare_data(text_config())
    assert data.tokenizer is not None
    assert data.tokenizer.decode(data.train) + data.tokenizer.decode(data.valid) == TEXT
    assert len(data.valid) > 16


def test_a_text_for_validation_is_used_whole_and_leaves_the_other_whole(two_texts: Path) -> None:
    data = prepare_data(two_texts_config())
    assert data.tokenizer is not None
    assert data.tokenizer.decode(data.train) == TEXT
    assert data.tokenizer.decode(data.valid) == VALID_TEXT


def test_the_tokenizer_has_seen_nothing_of_the_validation_text(two_texts: Path) -> None:
    train, _ = find_texts(text_config())
    expected = Tokenizer.train(train.blocks(), 300)
    data = prepare_data(text_config())
    assert data.tokenizer is not None
    assert data.tokenizer.sha256 == expected.sha256


def test_a_sidecar_describes_the_tokens(two_texts: Path) -> None:
    data = prepare_data(text_config())
    assert data.tokenizer is not None
    info = read_info("d/train.npy")
    assert (info.count, info.vocab_size, info.source) == (len(data.train), 300, "input.txt")
    assert info.tokenizer_sha256 == data.tokenizer.sha256
    assert info.sha256 == data.train_sha256 == hashlib.sha256(Path("d/train.npy").read_bytes()).hexdigest()


def test_files_can_be_put_elsewhere(two_texts: Path) -> None:
    config = text_config(tokenizer="a/tok.json", train_tokens="b/x.npy", valid_tokens="c/y.npy")
    prepare_data(config)
    assert {str(p) for p in Path().rglob("*") if p.is_file()} >= {"a/tok.json", "b/x.npy", "c/y.npy"}
    assert not Path("d").exists()


def test_token_files_that_differ_only_in_their_suffix_do_not_share_a_sidecar(two_texts: Path) -> None:
    data = prepare_data(text_config(train_tokens="d/tokens.train", valid_tokens="d/tokens.valid"))
    assert len(data.train) > len(data.valid)


def test_a_text_with_fewer_words_than_the_vocabulary_is_said_and_used(
    two_texts: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Path("input.txt").write_text("a b c d e f g h i j k l m n o p\n" * 30)
    data = prepare_data(text_config())
    assert data.tokenizer is not None
    assert data.tokenizer.vocab_size < 300
    assert any(f"a vocabulary of {data.tokenizer.vocab_size}, not 300" in message for message in caplog.messages)


# A tokenizer of one's own

SAID_BYTES = re.compile(r"tokens: (\S+) has ([\d,]+) tokens, ([\d.]+) bytes a token")


def test_bytes_per_token_are_said_and_usual_for_ones_own_tokenizer(
    two_texts: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cs336_systems")
    data = prepare_data(two_texts_config())
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
    two_texts: Path, caplog: pytest.LogCaptureFixture, name: str, text: str, is_far: bool
) -> None:
    caplog.set_level(logging.INFO, "cs336_systems")
    Tokenizer.train([("x" * 64 + "\n") * 2000], 300).save("brought.json")
    Path("input.txt").write_text(text)
    prepare_data(text_config(tokenizer="brought.json"))
    assert any("far from the usual" in message for message in caplog.messages) == is_far


# A full disk


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
    two_texts: Path, config: RunConfig, again: list[str], room: int, named: str
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


@pytest.mark.parametrize(
    "make, change, made",
    [
        (text_config, dict(vocab_size=310), {TOKENIZER, TRAIN, VALID}),
        (text_config, dict(valid_fraction=0.5), {TOKENIZER, TRAIN, VALID}),
        (stories_config, dict(vocab_size=310), {TOKENIZER, TRAIN, VALID}),
        (stories_config, dict(seed=1), ALL),
        (stories_config, dict(story_chars=20_000), ALL),
        (random_config, dict(seed=1), {TRAIN, VALID}),
        (random_config, dict(random_tokens=2000), {TRAIN, VALID}),
        (random_config, dict(vocab_size=299), {TRAIN, VALID}),
    ],
)
def test_a_changed_field_redoes_all_that_depends_on_it(stages: Any, make: Any, change: Any, made: set[str]) -> None:
    stages(make())
    expected = made, {STORIES} - made if make is stories_config else set()
    assert stages(make(**change)) == expected


@pytest.mark.parametrize(
    "make, name, text, made",
    [
        (text_config, "input.txt", TEXT, set()),  # only touched
        (text_config, "input.txt", TEXT + "More.\n", {TOKENIZER, TRAIN, VALID}),
        (two_texts_config, "valid.txt", VALID_TEXT + "More.\n", {VALID}),
    ],
)
def test_a_changed_text_redoes_all_that_is_made_from_it(
    stages: Any, make: Any, name: str, text: str, made: set[str]
) -> None:
    stages(make())
    Path(name).write_text(text)
    assert stages(make()) == (made, {TOKENIZER, TRAIN, VALID} - made)


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


def test_tokens_that_broke_off_are_made_on_from_there(
    stages: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Path("input.txt").write_text(TEXT * 60)  # some pieces
    stages(text_config())
    whole = contents()
    Path("d/train.npy").unlink()
    encode, asked = Tokenizer.encode_stream, list[int]()

    def break_off(*arguments: Any) -> Iterator[list[int]]:
        asked.append(arguments[-1])
        for number, ids in enumerate(encode(*arguments)):
            if number == 2:
                raise OSError("No space left on device")
            yield ids

    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "encode_stream", break_off)
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):
                prepare_data(text_config())
            assert not Path("d/train.npy").exists()
    assert stages(text_config()) == ({TRAIN}, {TOKENIZER, VALID})
    assert asked == [0, 2]
    assert "tokens: 4 pieces of the text are here already" in caplog.messages
    assert {name: content for name, (content, _) in contents().items()} == {n: c for n, (c, _) in whole.items()}


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


def test_runs_that_prepare_the_same_folder_at_once_each_get_their_own_data(two_texts: Path) -> None:
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


# Files of others


@pytest.mark.parametrize("name", ["train.json", "valid.json"])
def test_a_file_that_was_not_made_here_is_not_replaced_by_a_sidecar(two_texts: Path, name: str) -> None:
    Path("d").mkdir()
    Path("d", name).write_text('{"precious": 1}')
    with pytest.raises(ValueError, match=rf"^d/{name} is your own file, in the place of the sidecar of d/\w+\.npy"):
        prepare_data(text_config())
    assert Path("d", name).read_text() == '{"precious": 1}'


def test_the_text_itself_is_not_replaced_by_a_sidecar(two_texts: Path) -> None:
    Path("d").mkdir()
    Path("d/train.json").write_text(TEXT)
    with pytest.raises(ValueError, match=r"^data\.train_text is d/train\.json: it must be text or one of "):
        prepare_data(text_config(train_text="d/train.json"))
    assert Path("d/train.json").read_text() == TEXT


def test_another_text_leaves_the_files_of_the_first_by_default(two_texts: Path) -> None:
    prepare_data(text_config(data_dir=None))
    before = contents("data/text/input.txt")
    prepare_data(text_config(data_dir=None, train_text="valid.txt"))
    assert contents("data/text/input.txt") == before
    assert contents("data/text/valid.txt").keys().isdisjoint(before)


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


def test_random_tokens_have_the_tokenizer_that_is_named(two_texts: Path) -> None:
    Tokenizer.train([TEXT], 280).save("mine.json")
    prepare_data(text_config())  # leaves a tokenizer in data_dir
    assert prepare_data(random_config()).tokenizer is None
    assert prepare_data(random_config(tokenizer="mine.json")).tokenizer is not None
