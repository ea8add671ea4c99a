"""The tokenizer: exact round trips, an independent GPT-2 byte-level BPE, training and files."""

import errno
import functools
import json
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import processors

from cs336_basics.tokenizer import END_OF_TEXT, MIN_VOCAB_SIZE, Tokenizer
from tests.basics.texts import CORPUS, GPT2_WORD, small_pieces, spaced_text, trained, utf8_text

# Round trip


@pytest.mark.parametrize("vocab_size", [MIN_VOCAB_SIZE, 400])
@settings(max_examples=150, deadline=None)
@given(text=utf8_text)
@example(text="")
@example(text=END_OF_TEXT)
@example(text=END_OF_TEXT * 3)
@example(text=f"one{END_OF_TEXT}two {END_OF_TEXT} three\n{END_OF_TEXT}\n")
@example(text="".join(map(chr, range(0x20))) + "\x7f\x80\x85\x9f")
@example(text=" " * 50 + "\n" * 50 + "\t \r\n \u00a0\u2003\x1c\x85 x   ")
@example(text="👩‍👩‍👧‍👦 e\u0301 \ufeff \ufffd \U0010ffff 🏳️‍🌈")
def test_any_utf8_text_comes_back_exactly(vocab_size, text):
    tokenizer = trained(vocab_size)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_every_byte_has_a_token():
    """Each code point below 0x800, and one of every lead byte above, through the tokenizer without merges."""
    text = "".join(map(chr, [*range(0x800), *(c for c in range(0x800, 0x110000, 0xFFF) if not 0xD800 <= c < 0xE000)]))
    tokenizer = trained(MIN_VOCAB_SIZE)
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_an_unfinished_character_decodes_to_the_replacement_character():
    tokenizer = trained(MIN_VOCAB_SIZE)
    ids = tokenizer.encode("a猫b")
    assert tokenizer.decode(ids[:2]) == "a\ufffd"


# The special token


def test_the_special_token_has_one_id_of_its_own_inside_the_vocabulary():
    tokenizer = trained()
    end = tokenizer.end_of_text_id
    assert 0 <= end < tokenizer.vocab_size
    assert tokenizer.encode(END_OF_TEXT) == [end]
    assert tokenizer.decode([end]) == END_OF_TEXT
    a, b = tokenizer.encode("the cat"), tokenizer.encode(" sat.")
    assert end not in a + b
    assert tokenizer.encode(f"the cat{END_OF_TEXT} sat.{END_OF_TEXT}") == [*a, end, *b, end]


@pytest.mark.parametrize("text", ["<|endoftext|", "|endoftext|>", "<|ENDOFTEXT|>", "<| endoftext |>"])
def test_text_that_resembles_the_special_token_stays_text(text):
    assert trained().end_of_text_id not in trained().encode(text)


def test_the_special_token_teaches_no_merges():
    """With and without it between the documents, the same merges are learnt."""
    documents = ["the cat sat\n", "on the mat\n"] * 20
    merges = [
        json.loads(Tokenizer.train([separator.join(documents)], 300)._tokenizer.to_str())["model"]["merges"]
        for separator in (END_OF_TEXT, "")
    ]
    assert merges[0] == merges[1]
    assert len(merges[0]) > 5


# The same, worked out independently


@functools.cache
def byte_characters() -> dict[int, str]:
    """GPT-2's printable stand-in for every byte: itself where it is visible Latin-1, else the next from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [b for b in range(256) if b not in visible]
    return {b: chr(b) for b in visible} | {b: chr(0x100 + n) for n, b in enumerate(hidden)}


def words_of(text: str) -> list[tuple[str, ...]]:
    return [tuple(byte_characters()[b] for b in word.encode()) for word in GPT2_WORD.findall(text)]


def merge(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    out: list[str] = []
    for symbol in word:
        if out and (out[-1], symbol) == pair:
            out[-1] += symbol
        else:
            out.append(symbol)
    return tuple(out)


def model_of(tokenizer: Tokenizer) -> tuple[dict[str, int], list[tuple[str, str]]]:
    model = json.loads(tokenizer._tokenizer.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def reference_encode(tokenizer: Tokenizer, text: str) -> list[int]:
    vocabulary, merges = model_of(tokenizer)
    ids: list[int] = []
    for n, document in enumerate(text.split(END_OF_TEXT)):
        ids += [tokenizer.end_of_text_id] if n else []
        for word in words_of(document):
            for pair in merges:
                word = merge(word, pair)
            ids += [vocabulary[symbol] for symbol in word]
    return ids


# Assigned long ago, so that letters and numbers are the same in every version of Unicode.
old_text = st.one_of(spaced_text, st.text(st.characters(max_codepoint=0x24F), max_size=40), st.just(CORPUS))


@settings(max_examples=150, deadline=None)
@given(text=old_text)
def test_encoding_equals_an_independent_gpt2_byte_level_bpe(text):
    assert trained().encode(text) == reference_encode(trained(), text)


def test_training_merges_a_most_frequent_pair_every_time():
    words = Counter(word for document in CORPUS.split(END_OF_TEXT) for word in words_of(document))
    vocabulary, merges = model_of(trained())
    assert len(merges) == 400 - MIN_VOCAB_SIZE
    assert len(vocabulary) == trained().vocab_size == 400
    for pair in merges:
        counts: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for neighbours in pairwise(word):
                counts[neighbours] += count
        assert counts[pair] == max(counts.values()), pair
        words = Counter({merge(word, pair): count for word, count in words.items()})


# Training


def test_training_in_another_process_on_one_thread_gives_the_same():
    program = (
        "import sys; from cs336_basics.tokenizer import Tokenizer;"
        "print(Tokenizer.train([sys.stdin.buffer.read().decode()], 400).sha256)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        input=CORPUS.encode(),
        capture_output=True,
        check=True,
        env=os.environ | {"RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "7"},
        cwd=Path(__file__).parents[2],
    )
    assert result.stdout.decode().strip() == trained().sha256


@pytest.mark.parametrize("block, piece", [(1, 1), (7, 50), (100, 1), (10_000, 50)])
def test_training_does_not_depend_on_blocks_and_pieces(block, piece):
    with small_pieces(piece):
        blocks = (CORPUS[i : i + block] for i in range(0, len(CORPUS), block))
        assert Tokenizer.train(blocks, 400).sha256 == trained().sha256


def test_text_that_runs_out_of_pairs_gives_a_smaller_vocabulary():
    tokenizer = Tokenizer.train(["ab ab ab"], 1000)
    # "ab", " a" and " ab": one after another, the pairs of " ab" and "ab".
    assert MIN_VOCAB_SIZE < tokenizer.vocab_size <= MIN_VOCAB_SIZE + 3
    assert tokenizer.decode(tokenizer.encode("ab 猫")) == "ab 猫"


@pytest.mark.parametrize("vocab_size", [256, 1, 0, -5])
def test_a_vocabulary_too_small_for_the_bytes_is_refused(vocab_size):
    with pytest.raises(ValueError, match=f"vocab_size is {vocab_size}: it must be at least 257"):
        Tokenizer.train([CORPUS], vocab_size)


# Files


def test_a_saved_tokenizer_loads_as_the_same(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text("old")
    trained().save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer.json"]
    loaded = Tokenizer.load(str(path))
    assert loaded.sha256 == trained().sha256 != trained(MIN_VOCAB_SIZE).sha256
    assert loaded.vocab_size == 400
    assert loaded.end_of_text_id == trained().end_of_text_id
    assert loaded.encode(CORPUS) == trained().encode(CORPUS)


def test_the_saved_file_is_the_librarys_own_format(tmp_path):
    from transformers import PreTrainedTokenizerFast

    trained().save(tmp_path / "tokenizer.json")
    other = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert other(CORPUS)["input_ids"] == trained().encode(CORPUS)


@pytest.mark.parametrize(
    "error, message",
    [(KeyboardInterrupt(), None), (OSError(errno.ENOSPC, "No space left"), r"No space left: '.*tokenizer\.json'")],
)
def test_a_save_that_fails_names_the_file_and_leaves_the_old_one(tmp_path, monkeypatch, error, message):
    path = tmp_path / "tokenizer.json"
    trained(MIN_VOCAB_SIZE).save(path)
    before = path.read_bytes()

    def fail(self, text, encoding):
        self.write_bytes(b"{")
        raise error

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(type(error), match=message):
        trained().save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer.json"]
    assert path.read_bytes() == before


def test_loading_a_missing_file_names_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer file .*none\.json does not exist"):
        Tokenizer.load(tmp_path / "none.json")


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"[1, 2]", b"\xff\xfe\x00", b'{"model": {"type": "BPE"}}'])
def test_loading_a_corrupt_file_names_it(tmp_path, content):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"tokenizer file .*bad\.json cannot be loaded: ."):
        Tokenizer.load(path)


def test_loading_a_tokenizer_without_the_special_token_names_the_file_and_the_token(tmp_path):
    content = json.loads(trained()._tokenizer.to_str())
    content["added_tokens"] = []
    content["model"]["vocab"]["<|other|>"] = content["model"]["vocab"].pop(END_OF_TEXT)
    path = tmp_path / "other.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"other\.json cannot be loaded: the tokenizer has no token <\|endoftext\|>"):
        Tokenizer.load(path)


# State of other programs in a file


def call_in_transformers(folder: Path, **options: object) -> Path:
    """A tokenizer.json as transformers saves it after a call with these options."""
    from transformers import PreTrainedTokenizerFast

    names = dict(eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)
    theirs = PreTrainedTokenizerFast(tokenizer_object=LibraryTokenizer.from_str(trained()._tokenizer.to_str()), **names)
    if options:
        theirs([CORPUS, "the cat"], **options)
    theirs.save_pretrained(folder)
    return folder / "tokenizer.json"


@pytest.mark.parametrize(
    "options",
    [
        dict(truncation=True, max_length=16),
        dict(padding=True),
        dict(truncation=True, max_length=16, padding="max_length"),
        dict(padding=True, pad_to_multiple_of=64),
    ],
    ids=str,
)
def test_a_call_of_transformers_before_a_file_was_saved_changes_nothing(tmp_path, options):
    path = call_in_transformers(tmp_path, **options)
    state = json.loads(path.read_text())
    assert state["truncation"] or state["padding"]
    loaded = Tokenizer.load(path)
    for text in (CORPUS, "the cat", ""):
        assert loaded.encode(text) == trained().encode(text)
    assert [i for ids in loaded.encode_stream([CORPUS]) for i in ids] == trained().encode(CORPUS)
    assert loaded.sha256 == Tokenizer.load(call_in_transformers(tmp_path)).sha256
    loaded.save(path)
    state = json.loads(path.read_text())
    assert (state["truncation"], state["padding"]) == (None, None)


def test_tokens_that_a_file_adds_around_a_text_are_not_added():
    library = LibraryTokenizer.from_str(trained()._tokenizer.to_str())
    library.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A {END_OF_TEXT}", special_tokens=[(END_OF_TEXT, trained().end_of_text_id)]
    )
    assert library.encode("the cat").ids[0] == trained().end_of_text_id
    tokenizer = Tokenizer(library)
    assert tokenizer.encode("the cat") == trained().encode("the cat")
    assert list(tokenizer.encode_stream(["the cat"])) == [trained().encode("the cat")]


def test_a_prompt_has_the_token_that_begins_a_text_once():
    library = LibraryTokenizer.from_str(trained()._tokenizer.to_str())
    begin = (END_OF_TEXT, trained().end_of_text_id)
    library.post_processor = processors.TemplateProcessing(single=f"{END_OF_TEXT} $A", special_tokens=[begin])
    for prompt in ("the cat", f"{END_OF_TEXT}the cat"):
        assert Tokenizer(library).encode_prompt(prompt) == trained().encode(f"{END_OF_TEXT}the cat")


@pytest.mark.parametrize("begin", ["<s>", END_OF_TEXT])
def test_the_token_that_begins_a_text_stands_between_texts(begin: str):
    library = LibraryTokenizer.from_str(trained()._tokenizer.to_str())
    library.add_special_tokens([begin])
    library.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, library.token_to_id(begin))]
    )
    tokenizer, end = Tokenizer(library), trained().end_of_text_id
    assert tokenizer.text_start_id == library.token_to_id(begin)
    between = [end] if begin == END_OF_TEXT else [end, library.token_to_id(begin)]
    streamed = [i for ids in tokenizer.encode_stream([f"the{END_OF_TEXT}cat"], separator=END_OF_TEXT) for i in ids]
    assert streamed == [*between[1:], *trained().encode("the"), *between, *trained().encode("cat")]


def changed_file(folder: Path, change: dict, added: dict) -> Path:
    content = json.loads(trained()._tokenizer.to_str())
    content["model"] |= change
    content["added_tokens"] = [content["added_tokens"][0] | added] if added is not None else []
    path = folder / "changed.json"
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    "change, added, message",
    [
        ({"dropout": 0.1}, {}, "model.dropout is 0.1: it must be null"),
        ({}, {"single_word": True}, "does not find <|endoftext|> in a text: it must be in added_tokens"),
        ({}, None, "does not find <|endoftext|> in a text: it must be in added_tokens"),
    ],
    ids=["dropout", "only between words", "only in the vocabulary"],
)
def test_a_tokenizer_that_cannot_be_right_is_refused_by_name(tmp_path, change, added, message):
    with pytest.raises(ValueError, match=r"changed\.json cannot be loaded: ") as caught:
        Tokenizer.load(changed_file(tmp_path, change, added))
    assert message in str(caught.value)
