"""The tokenizer: exact round trips, streams that encode as the whole, and an independent GPT-2 byte-level BPE."""

import contextlib
import errno
import functools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as LibraryTokenizer

from cs336_basics import tokenizer as module
from cs336_basics.tokenizer import END_OF_TEXT, MIN_VOCAB_SIZE, Tokenizer, read_utf8, sample_evenly, split_pieces

CORPUS = (
    "Once upon a time there was a little cat, and the cat didn't like the rain.\r\n"
    "The cat sat on the mat; the rain fell on the house.  It's 1999, or 2001?\n\n\n"
    f"They'll see.\u00a0We've seen\t\tit.\n{END_OF_TEXT}\n"
    "Über die Brücke ging der Bär — größer als 3½ Häuser. 猫は雨が好きではない。 😀😀 naïve café\u2003end\n"
) * 4

SPACES = [" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u2003", "\u3000", "\x1c", "\x1f", "\x85", "\x0b", "\u2028"]
WORDS = [
    "cat",
    "the",
    "Bär",
    "猫",
    "😀",
    "'s",
    "'ll",
    "12",
    "½",
    "!?",
    "_",
    END_OF_TEXT,
    "<|end",
    "|>",
    "\x00",
    "\u200b",
]
spaced_text = st.lists(st.sampled_from(SPACES + WORDS), max_size=40).map("".join)
utf8_text = st.one_of(st.text(st.characters(codec="utf-8"), max_size=60), spaced_text)


def cut_at(text: str, places: list[int]) -> list[str]:
    """The text in blocks; places that repeat make empty blocks."""
    borders = [0, *sorted(p % (len(text) + 1) for p in places), len(text)]
    return [text[a:b] for a, b in pairwise(borders)]


@functools.cache
def trained(vocab_size: int = 400) -> Tokenizer:
    return Tokenizer.train([CORPUS], vocab_size)


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


# Streams


def small_pieces(piece_chars: int) -> contextlib.AbstractContextManager:
    @contextlib.contextmanager
    def patched() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "split_pieces", functools.partial(split_pieces, piece_chars=piece_chars))
            patch.setattr(module, "_BATCH_CHARS", 3 * piece_chars)
            yield

    return patched()


@settings(max_examples=400, deadline=None)
@given(text=spaced_text, places=st.lists(st.integers(0, 1000), max_size=6), piece_chars=st.integers(1, 12))
@example(text="a  \u00a0 b\x1c c \x85d", places=[3], piece_chars=1)
@example(text=f"a {END_OF_TEXT} b", places=[6], piece_chars=1)
def test_a_stream_in_any_blocks_encodes_as_the_whole(text, places, piece_chars):
    tokenizer, blocks = trained(), cut_at(text, places)
    pieces = list(split_pieces(blocks, piece_chars))
    assert "".join(pieces) == text
    whole = tokenizer.encode(text)
    assert [i for piece in pieces for i in tokenizer.encode(piece)] == whole
    assert [i for ids in tokenizer.encode_stream(blocks) for i in ids] == whole
    with small_pieces(piece_chars):
        assert [i for ids in tokenizer.encode_stream(iter(blocks)) for i in ids] == whole


@settings(max_examples=150, deadline=None)
@given(text=utf8_text, places=st.lists(st.integers(0, 1000), max_size=6), piece_chars=st.integers(1, 12))
def test_a_stream_of_any_text_encodes_as_the_whole(text, places, piece_chars):
    tokenizer, blocks = trained(), cut_at(text, places)
    with small_pieces(piece_chars):
        assert [i for ids in tokenizer.encode_stream(blocks) for i in ids] == tokenizer.encode(text)


def test_a_long_text_is_cut_into_pieces_and_encodes_as_the_whole():
    text = CORPUS * 400
    assert len(text) > 3 * module._PIECE_CHARS
    blocks = [text[i : i + 50_001] for i in range(0, len(text), 50_001)]
    streamed = list(trained().encode_stream(blocks))
    assert len(streamed) >= 3
    assert [i for ids in streamed for i in ids] == trained().encode(text)


def test_pieces_are_cut_as_soon_as_they_may_be():
    words = "one two three\nfour  five\t six " * 50
    pieces = list(split_pieces([words], 20))
    assert "".join(pieces) == words
    assert all(20 <= len(piece) <= 30 for piece in pieces[:-1])  # "  five\t six" is the longest without a safe place
    assert all(piece[0] in " \n" and not before[-1].isspace() for before, piece in pairwise(pieces))


@pytest.mark.parametrize("text", ["猫" * 500, "\n" * 500, "\u00a0x" * 250], ids=["no space", "only space", "nbsp"])
def test_text_without_a_safe_place_stays_whole(text):
    assert list(split_pieces(cut_at(text, [100, 200, 300]), 10)) == [text]


def test_a_stream_of_nothing_is_nothing():
    assert list(trained().encode_stream([])) == []
    assert [i for ids in trained().encode_stream(["", ""]) for i in ids] == []


def test_pieces_come_before_the_stream_is_read_to_its_end():
    read = []

    def blocks() -> Iterator[str]:
        for i in range(100):
            read.append(i)
            yield "some words here "

    next(split_pieces(blocks(), 50))
    assert len(read) < 10


# Streams for the tokenizers of others

# Of the kind that GPT-4 and its relatives have: it joins newlines to punctuation, and takes digits by threes.
GPT4_WORD = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
GPT4 = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(GPT4_WORD), "isolated"), BYTES])
PRE_TOKENIZERS = {
    "GPT-2": (GPT2, None),
    "GPT-2 with a space in front": (pre_tokenizers.ByteLevel(add_prefix_space=True), None),
    "GPT-2, NFC": (GPT2, normalizers.NFC()),
    "GPT-2, digits": (pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]), None),
    "GPT-4": (GPT4, None),
    "Llama": (None, normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])),
    "Metaspace": (pre_tokenizers.Metaspace(), None),
    "Metaspace at the start": (pre_tokenizers.Metaspace(prepend_scheme="first"), None),
    "white space": (pre_tokenizers.Whitespace(), normalizers.Sequence([normalizers.Strip(), normalizers.Lowercase()])),
    "BERT": (pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer()),
    "five characters": (pre_tokenizers.FixedLength(5), None),
    "scripts": (pre_tokenizers.UnicodeScripts(), normalizers.NFKD()),
    "none": (None, None),
}
END_TOKENS = {
    "plain": {},
    "eats white space behind it": dict(rstrip=True),
    "eats white space before it": dict(lstrip=True),
    "found after normalizing": dict(normalized=True),
}
OTHER_TOKENS = {
    "no others": [],
    "others": [
        AddedToken("<|im|>", rstrip=True, special=True),
        AddedToken("foo", single_word=True),
        AddedToken("  ", normalized=False),
        AddedToken("B00e4r", normalized=True),
    ],
    "one with a space inside": [AddedToken("new york")],
    "one that reaches into it": [AddedToken("x<|")],
}


@functools.cache
def foreign(pre_tokenizer: str, end: str = "plain", others: str = "no others") -> LibraryTokenizer | None:
    """A tokenizer as others make them; None where it does not find its END_OF_TEXT in a text."""
    tokenizer = LibraryTokenizer(models.BPE(unk_token="<unk>"))
    words, normalizer = PRE_TOKENIZERS[pre_tokenizer]
    if words is not None:
        tokenizer.pre_tokenizer = words
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([CORPUS + " go.\n go. 123 12345 foo_bar new york x " * 20], trainer)
    tokenizer.add_tokens([AddedToken(END_OF_TEXT, special=True, **{"normalized": False, **END_TOKENS[end]})])
    tokenizer.add_tokens(OTHER_TOKENS[others])
    ids = tokenizer.encode(f"a{END_OF_TEXT}a", add_special_tokens=False).ids
    return tokenizer if tokenizer.token_to_id(END_OF_TEXT) in ids else None


foreign_text = st.lists(
    st.sampled_from(SPACES + WORDS)
    | st.sampled_from(
        [".", "go", "x", "12345", "e\u0301", "\u0301", "\ufb01", "A", f"{END_OF_TEXT}\n", f" {END_OF_TEXT}"]
    )
    | st.sampled_from(["<|", "x<|", "<|im|>", "foo", "foo_", "new york", " york", ">"]),
    max_size=30,
).map("".join)


@pytest.mark.parametrize("pre_tokenizer", PRE_TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(
    end=st.sampled_from(list(END_TOKENS)),
    others=st.sampled_from(list(OTHER_TOKENS)),
    text=foreign_text,
    block=st.integers(1, 40),
    piece_chars=st.integers(1, 8),
)
@example(end="plain", others="no others", text="go.\n" * 10, block=40, piece_chars=1)
@example(end="plain", others="others", text=f"a <|im|> b{END_OF_TEXT} a", block=40, piece_chars=1)
def test_a_stream_encodes_as_the_whole_for_the_tokenizers_of_others(
    pre_tokenizer, end, others, text, block, piece_chars
):
    assume((end, others) != ("eats white space before it", "others"))  # between two that want it, the library panics
    library = foreign(pre_tokenizer, end, others)
    assume(library is not None)
    whole = library.encode(text, add_special_tokens=False).ids
    with small_pieces(piece_chars):
        streamed = Tokenizer(library).encode_stream(text[i : i + block] for i in range(0, len(text), block))
        assert [i for ids in streamed for i in ids] == whole


@pytest.mark.parametrize("text", ["go.\n" * 60_000, f"1234.{END_OF_TEXT}\n" * 60_000], ids=["one", "documents"])
def test_a_long_text_for_gpt_4s_words_encodes_as_the_whole(text):
    tokenizer = Tokenizer(foreign("GPT-4"))
    streamed = list(tokenizer.encode_stream([text[i : i + 50_001] for i in range(0, len(text), 50_001)]))
    assert [i for ids in streamed for i in ids] == tokenizer.encode(text)
    assert (len(streamed) > 3) == (END_OF_TEXT in text)  # cut between documents, where there are any


def test_a_document_too_long_to_be_encoded_whole_is_refused_before_it_is_read_to_its_end(monkeypatch):
    monkeypatch.setattr(module, "_LONGEST_PIECE", 200_000)
    read = []

    def blocks(text: str) -> Iterator[str]:
        for i in range(100):
            read.append(i)
            yield text

    tokenizer = Tokenizer(foreign("GPT-4"))
    with pytest.raises(
        ValueError, match=r"^text file x has more than 200,000 characters .*: put <\|endoftext\|> between"
    ):
        list(tokenizer.encode_stream(blocks("go. " * 5_000), "text file x"))
    assert len(read) == 11
    assert sum(map(len, tokenizer.encode_stream(blocks("go. " * 5_000 + END_OF_TEXT)))) > 100 * 5_000
    assert sum(map(len, Tokenizer(foreign("GPT-2")).encode_stream(blocks("go. " * 5_000)))) > 100 * 5_000


# A sample of a long text


def numbered(count: int) -> str:
    """Words of eight bytes, so that a piece of a hundred characters has fifteen of them."""
    return "".join(f"ñ{i:05}\n" for i in range(count))


@pytest.mark.parametrize("share", [0.001, 0.1, 0.25, 0.6, 0.999])
def test_a_sample_is_spread_evenly_over_the_text(share):
    text = numbered(20_000)
    size = len(text.encode())
    with small_pieces(100):
        sample = list(sample_evenly([text], int(size * share), size))
    numbers = [int(word[1:]) for word in "".join(sample).split()]
    assert numbers == sorted(set(numbers))
    for end in range(200, 20_001, 200):  # up to every hundredth of the text there is its share of the sample
        assert abs(sum(n < end for n in numbers) - end * share) <= 15


@pytest.mark.parametrize("size", [7, 100, 10_000])
def test_a_sample_does_not_depend_on_the_blocks(size):
    text = numbered(2000)
    blocks = (text[i : i + size] for i in range(0, len(text), size))
    with small_pieces(100):
        whole = list(sample_evenly([text], 5000, len(text.encode())))
        assert list(sample_evenly(blocks, 5000, len(text.encode()))) == whole
    assert len(whole) > 10


def test_a_sample_as_large_as_the_text_is_the_text():
    text = numbered(2000)
    size = len(text.encode())
    with small_pieces(100):
        assert "".join(sample_evenly([text], size, size)) == text


@settings(max_examples=150, deadline=None)
@given(text=utf8_text, piece=st.integers(1, 8), share=st.floats(0.01, 1))
def test_a_sample_consists_of_whole_words_of_the_text(text, piece, share):
    """Side by side they are the same words to the tokenizer as apart, and each is one of the text's own."""
    size = len(text.encode())
    with small_pieces(piece):
        pieces = list(split_pieces([text]))
        sample = list(sample_evenly([text], int(size * share), size))
    words = Counter(GPT2_WORD.findall("".join(sample)))
    assert words == Counter(word for taken in sample for word in GPT2_WORD.findall(taken))
    if all(len(piece_) <= 2 * piece for piece_ in pieces):  # else there were words too long to be kept whole
        assert words <= Counter(GPT2_WORD.findall(text))


def test_a_sample_of_text_without_a_place_to_cut_is_no_larger_for_that():
    text = "猫" * 300_000
    size = len(text.encode())
    taken = sum(len(part.encode()) for part in sample_evenly([text], size // 10, size))
    assert abs(taken - size // 10) <= 3 * 1024


def test_a_sample_is_taken_while_the_text_is_read():
    read = []

    def blocks() -> Iterator[str]:
        for i in range(1000):
            read.append(i)
            yield "some words here "

    with small_pieces(50):
        next(sample_evenly(blocks(), 100, 16_000))
    assert len(read) < 10


# The same, worked out independently

GPT2_WORD = regex.compile(r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""")


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


def test_training_is_deterministic():
    assert len({Tokenizer.train([CORPUS], 400).sha256 for _ in range(5)}) == 1


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


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
def test_training_does_not_depend_on_the_blocks(size):
    blocks = (CORPUS[i : i + size] for i in range(0, len(CORPUS), size))
    assert Tokenizer.train(blocks, 400).sha256 == trained().sha256


@pytest.mark.parametrize("piece_chars", [1, 50])
def test_training_does_not_depend_on_the_pieces(piece_chars):
    with small_pieces(piece_chars):
        assert Tokenizer.train([CORPUS], 400).sha256 == trained().sha256


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
    trained().save(path)
    loaded = Tokenizer.load(path)
    assert loaded.sha256 == trained().sha256 != trained(MIN_VOCAB_SIZE).sha256
    assert loaded.vocab_size == 400
    assert loaded.end_of_text_id == trained().end_of_text_id
    assert loaded.encode(CORPUS) == trained().encode(CORPUS)


def test_the_saved_file_is_the_librarys_own_format(tmp_path):
    from transformers import PreTrainedTokenizerFast

    trained().save(tmp_path / "tokenizer.json")
    other = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert other(CORPUS)["input_ids"] == trained().encode(CORPUS)


def test_saving_replaces_the_file_and_leaves_nothing_beside(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text("old")
    trained().save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer.json"]
    assert Tokenizer.load(str(path)).vocab_size == 400


def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.json"
    trained(MIN_VOCAB_SIZE).save(path)
    before = path.read_bytes()

    def interrupted(source, target):
        assert Path(source).read_bytes() != before  # the new one is written in full by now
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trained().save(path)
    assert path.read_bytes() == before


def test_a_full_disk_names_the_file_and_leaves_nothing_beside_it(tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.json"
    trained(MIN_VOCAB_SIZE).save(path)
    before = path.read_bytes()

    def full(self, text, encoding):
        self.write_bytes(b"{")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*tokenizer\.json'"):
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


def test_loading_half_a_file_names_it(tmp_path):
    path = tmp_path / "half.json"
    trained().save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"half\.json cannot be loaded"):
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


def test_a_dropout_of_0_is_none(tmp_path):
    assert Tokenizer.load(changed_file(tmp_path, {"dropout": 0.0}, {})).encode(CORPUS) == trained().encode(CORPUS)


# Text files


@contextlib.contextmanager
def read_size(size: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_READ_BYTES", size)
        yield


fixture_is_safe = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@fixture_is_safe
@given(text=utf8_text, size=st.integers(1, 7), start=st.integers(0, 60), length=st.integers(0, 60))
@example(text="a猫😀é" * 3, size=1, start=0, length=60)
def test_spans_of_a_file_are_read_at_any_block_size(tmp_path, text, size, start, length):
    assume(text)
    path = tmp_path / "text.txt"
    path.write_bytes(text.encode())
    start, end = min(start, len(text)), min(start + length, len(text))
    first, last = len(text[:start].encode()), len(text[:end].encode())  # whole characters
    with read_size(size):
        blocks = list(read_utf8(path))
        assert "".join(blocks) == text
        assert len(blocks) >= len(text.encode()) / (size + 3)
        assert "".join(read_utf8(path, first, last)) == text[start:end]
        assert "".join(read_utf8(path, first)) == text[start:]
        assert "".join(read_utf8(path, 0, last)) == text[:end]


def test_two_spans_join_to_the_whole_and_an_end_beyond_the_file_is_its_end(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(CORPUS.encode())
    cut = CORPUS.encode().index("猫".encode())
    assert "".join(read_utf8(path, 0, cut)) + "".join(read_utf8(str(path), cut, 10**9)) == CORPUS
    assert list(read_utf8(path, cut, cut)) == []


@pytest.mark.parametrize("text", ["\ufeffbom", "a\r\nb\rc\n", "\x00"])
def test_no_character_is_translated(tmp_path, text):
    path = tmp_path / "text.txt"
    path.write_bytes(text.encode())
    assert "".join(read_utf8(path)) == text


@fixture_is_safe
@given(
    data=st.one_of(
        st.binary(min_size=1, max_size=30),
        st.lists(st.sampled_from([b"a", "é".encode(), "😀".encode(), b"\xf0\x9f", b"\xed\xa0\x80", b"\xc0"]))
        .map(b"".join)
        .filter(bool),
    ),
    size=st.integers(1, 7),
)
def test_the_first_wrong_byte_is_named(tmp_path, data, size):
    path = tmp_path / "text.txt"
    path.write_bytes(data)
    try:
        expected, offset = data.decode(), None
    except UnicodeDecodeError as error:
        expected, offset = "", error.start
    with read_size(size):
        if offset is None:
            assert "".join(read_utf8(path)) == expected
        else:
            with pytest.raises(ValueError, match=rf"text\.txt must be UTF-8 text: .* at byte {offset}$"):
                list(read_utf8(path))


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_a_wrong_byte_in_a_span_is_named_by_its_place_in_the_file(tmp_path, size):
    path = tmp_path / "text.txt"
    path.write_bytes("猫猫".encode() + b"ab\xffcd")
    with read_size(size):
        with pytest.raises(ValueError, match=r"at byte 8$"):
            list(read_utf8(path, 3))
        assert list(read_utf8(path, 6, 8)) != []
        with pytest.raises(ValueError, match=r"at byte 4$"):  # starts inside a character
            list(read_utf8(path, 4, 8))
        with pytest.raises(ValueError, match=r"unexpected end of data at byte 3$"):  # ends inside one
            list(read_utf8(path, 0, 5))


def test_a_missing_text_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"text file .*none\.txt does not exist"):
        next(read_utf8(tmp_path / "none.txt"))


def test_a_directory_is_no_text_file(tmp_path):
    with pytest.raises(ValueError, match="is not a regular file"):
        next(read_utf8(tmp_path))


def test_an_empty_text_file_is_refused(tmp_path):
    path = tmp_path / "empty.txt"
    path.touch()
    with pytest.raises(ValueError, match=r"empty\.txt is empty"):
        next(read_utf8(path))


def test_a_text_file_that_stops_being_readable_is_named(tmp_path, monkeypatch):
    path = tmp_path / "failing.txt"
    path.write_text("a" * 3_000_000)
    blocks = read_utf8(path)
    next(blocks)

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(blocks.gi_frame.f_locals["file"], "read", fail)
    with pytest.raises(ValueError, match=r"failing\.txt cannot be read: Input/output error"):
        next(blocks)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_an_unreadable_text_file_is_refused(tmp_path):
    path = tmp_path / "secret.txt"
    path.write_text("x")
    path.chmod(0)
    with pytest.raises(ValueError, match=r"secret\.txt cannot be read: Permission denied"):
        next(read_utf8(path))


def test_a_refused_permission_is_told_with_the_file(tmp_path, monkeypatch):
    path = tmp_path / "secret.txt"
    path.write_text("x")

    def refuse(self, mode):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=r"secret\.txt cannot be read: Permission denied"):
        next(read_utf8(path))


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"x" * 500_000)
    with read_size(100_000):
        blocks = read_utf8(path)
        next(blocks)
        os.truncate(path, 100_000)
        with pytest.raises(ValueError, match=r"text\.txt became shorter"):
            list(blocks)
