"""The texts of a run: where they are cut, which part trains the tokenizer, and texts that look wrong."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from cs336_basics.stories import stories
from cs336_basics.tokenizer import END_OF_TEXT, Tokenizer, sample_evenly
from cs336_systems.config.run import DataConfig, RunConfig
from cs336_systems.training import texts as sources
from cs336_systems.training.prepare import prepare_data
from cs336_systems.training.texts import find_split, find_texts
from tests.systems.preparation import (
    TEXT,
    TOKENIZER,
    TRAIN,
    VALID,
    random_config,
    run_config,
    stories_config,
    text_config,
    two_texts_config,
)

# Many texts in one file


def said_another_kind(text: str, caplog: pytest.LogCaptureFixture) -> bool:
    Path("input.txt").write_text(text)
    caplog.clear()
    prepare_data(text_config())
    return any("another kind of text" in message for message in caplog.messages)


CODE = "".join(path.read_text() for path in sorted(Path(sources.__file__).parents[1].rglob("*.py")))


def test_a_validation_part_of_another_kind_is_warned_of(two_texts: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Code, generated stories and this repository's documents: each by itself, and with a last tenth of another."""
    many_stories = "".join(stories(0, 300_000))
    documents = "".join(path.read_text() for path in sorted(Path(__file__).parents[2].glob("docs/*.md")))
    texts = {"code": CODE[:300_000], "stories": many_stories, "documents": documents[:300_000]}
    for (name, text), other in zip(texts.items(), [documents, CODE, many_stories], strict=True):
        assert not said_another_kind(text, caplog), name
        assert said_another_kind(text[:270_000] + other[:30_000], caplog), name


@pytest.mark.parametrize("length", [1_000, 3_000, 10_000])
def test_short_texts_are_not_of_another_kind_by_chance(
    two_texts: Path, caplog: pytest.LogCaptureFixture, length: int
) -> None:
    for seed in range(4):
        Path("input.txt").write_text("".join(stories(seed, 10_000))[:length])
        Path("valid.txt").write_text("".join(stories(seed + 100, 10_000))[: length // 10])
        prepare_data(two_texts_config(vocab_size=257))
    assert not any("another kind of text" in message for message in caplog.messages)


# A text that is longer than the tokenizer is to be trained on

LONG_TEXT = "".join(stories(2, 300_000))


def test_the_tokenizer_of_a_long_text_is_trained_on_a_sample_and_that_is_said(
    two_texts: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Path("input.txt").write_text(LONG_TEXT)
    with caplog.at_level(logging.INFO, "cs336_systems"):
        data = prepare_data(two_texts_config(tokenizer_sample_bytes=1 << 17))
    assert any(f"sample of 131,072 of the text's {len(LONG_TEXT):,} bytes" in message for message in caplog.messages)
    assert data.tokenizer is not None
    assert data.tokenizer.sha256 == Tokenizer.train(sample_evenly([LONG_TEXT], 1 << 17, len(LONG_TEXT)), 300).sha256
    assert data.tokenizer.decode(data.train) == LONG_TEXT


def test_the_sample_is_of_the_text_to_train_on_alone(two_texts: Path) -> None:
    Path("input.txt").write_text(LONG_TEXT)
    config = text_config(tokenizer_sample_bytes=1 << 17, valid_fraction=0.5)
    train, _ = find_texts(config)
    assert len("".join(train.blocks())) == train.size < len(LONG_TEXT) * 0.51
    data = prepare_data(config)
    assert data.tokenizer is not None
    assert data.tokenizer.sha256 == Tokenizer.train(sample_evenly(train.blocks(), 1 << 17, train.size), 300).sha256


def test_a_text_no_longer_than_the_sample_is_used_whole(two_texts: Path, caplog: pytest.LogCaptureFixture) -> None:
    Path("input.txt").write_text(LONG_TEXT)
    with caplog.at_level(logging.INFO, "cs336_systems"):
        data = prepare_data(two_texts_config(tokenizer_sample_bytes=len(LONG_TEXT)))
    assert not any("sample" in message for message in caplog.messages)
    assert data.tokenizer is not None
    assert data.tokenizer.sha256 == Tokenizer.train([LONG_TEXT], 300).sha256


def test_another_size_of_sample_redoes_the_tokenizer_of_a_longer_text_only(
    stages: Any, caplog: pytest.LogCaptureFixture
) -> None:
    Path("input.txt").write_text(LONG_TEXT)
    whole, half, quarter = (two_texts_config(tokenizer_sample_bytes=n) for n in (1 << 28, 1 << 18, 1 << 17))
    assert stages(whole) == ({TOKENIZER, TRAIN, VALID}, set())
    stamp = json.loads(Path("d/tokenizer.json.stamp.json").read_text())
    assert stages(two_texts_config(tokenizer_sample_bytes=len(LONG_TEXT))) == (set(), {TOKENIZER, TRAIN, VALID})
    for config, size in ((half, 1 << 18), (quarter, 1 << 17)):
        assert TOKENIZER in stages(config)[0]
        assert "because the text, the tokenizer or a setting changed, or the file is damaged" in caplog.text
        expected = stamp["inputs"] | {"sample_bytes": size}
        assert json.loads(Path("d/tokenizer.json.stamp.json").read_text())["inputs"] == expected
        assert stages(config) == (set(), {TOKENIZER, TRAIN, VALID})


def test_a_sample_has_room_for_a_piece_of_text() -> None:
    with pytest.raises(ValueError, match=r"^data\.tokenizer_sample_bytes is 65535: it must be at least 65536$"):
        DataConfig(tokenizer_sample_bytes=65_535)
    assert DataConfig(tokenizer_sample_bytes=65_536).tokenizer_sample_bytes == 65_536


# Where a text is cut


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
def test_a_text_with_a_few_bytes_to_validate_is_cut_in_two(scratch: Path, text: str, fraction: float) -> None:
    train, valid = check_split(scratch, text, fraction)
    assume(len(text.encode()) * fraction > 5)
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
def test_stories_are_cut_between_stories(two_texts: Path, fraction: float) -> None:
    train, valid = find_texts(stories_config(valid_fraction=fraction))
    assert "".join(train.blocks()).endswith(f"{END_OF_TEXT}\n")
    assert "".join(valid.blocks()).endswith(f"{END_OF_TEXT}\n")


# Sources that are made


def made_by(config: RunConfig, folder: str) -> tuple[np.ndarray, np.ndarray]:
    data = prepare_data(config)
    return np.array(data.train), np.array(data.valid)


@pytest.mark.parametrize("make", [stories_config, random_config], ids=["stories", "random"])
def test_the_same_seed_gives_the_same_tokens_and_another_gives_others(two_texts: Path, make: Any) -> None:
    first, again, other = (
        made_by(make(seed=seed, data_dir=name), name) for seed, name in ((3, "a"), (3, "b"), (4, "c"))
    )
    for i in (0, 1):
        assert np.array_equal(first[i], again[i])
        assert not np.array_equal(first[i], other[i])


def test_random_tokens_fill_the_vocabulary_and_differ_between_the_splits(two_texts: Path) -> None:
    train, valid = made_by(random_config(random_tokens=50_000), "d")
    assert (len(train), len(valid)) == (50_000, 5_000)
    assert set(train.tolist()) == set(range(300))
    assert not np.array_equal(train[:5000], valid)


def test_random_tokens_are_never_too_few_for_a_sequence(two_texts: Path) -> None:
    train, valid = made_by(random_config(random_tokens=2), "d")
    assert len(train) == len(valid) == 34


# NUL characters


@pytest.mark.parametrize("place, count", [(0, 1), (5_000, 1), (5_000, 50_000), (1_100_000, 50_000)])
def test_nul_characters_are_text_wherever_they_are(two_texts: Path, place: int, count: int) -> None:
    text = TEXT * (1 + place // len(TEXT))
    text = text[:place] + "\0" * count + text[place:]
    Path("input.txt").write_text(text)
    data = prepare_data(text_config())
    assert data.tokenizer is not None
    assert data.tokenizer.decode(data.train) + data.tokenizer.decode(data.valid) == text


@pytest.mark.parametrize(
    "encoding, place", [("utf-16-le", 1), ("utf-16-be", 0), ("utf-32-le", 1), ("utf-32-be", 0), ("utf-16", 0)]
)
def test_a_text_in_utf_16_is_refused_with_the_place(two_texts: Path, encoding: str, place: int) -> None:
    Path("input.txt").write_bytes(TEXT.encode(encoding))
    with pytest.raises(ValueError, match=rf"^data\.train_text input\.txt must be UTF-8 text: .* byte {place}\b"):
        prepare_data(text_config())


# Memory and speed

GIGABYTE = 1_000_000_000


def write_gigabyte(path: Path, exponent: float) -> None:
    """Stories in which every fifth word is from an endless vocabulary whose frequencies fall with the exponent."""
    rng = np.random.default_rng(0)
    words = "".join(stories(0, 8_000_000)).split(" ")
    letters = str.maketrans("0123456789", "abcdefghij")
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < GIGABYTE:
            drawn = rng.zipf(exponent, len(words[::5])).tolist()
            words[::5] = [str(rank).translate(letters) for rank in drawn]
            file.write(" ".join(words))


PREPARE_AND_MEASURE = """
import resource, sys
from cs336_systems.config.run import DataConfig, ModelConfig, RunConfig
from cs336_systems.training.prepare import prepare_data

model = ModelConfig(vocab_size=10_000, d_model=32, d_ff=64, num_layers=1, num_heads=2)
prepare_data(RunConfig(model=model, data=DataConfig(source="text", train_text="text.txt", valid_fraction=0.01)))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("exponent", [1.3, 1.2], ids=["0.8 million words, like English", "2.3 million, like the web"])
def test_a_gigabyte_needs_less_than_2_gb_of_memory(folder: Path, exponent: float) -> None:
    write_gigabyte(folder / "text.txt", exponent)
    done = subprocess.run([sys.executable, "-c", PREPARE_AND_MEASURE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) < 2e9
