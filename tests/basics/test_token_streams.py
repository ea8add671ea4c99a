"""Streams encode as the whole text, for any tokenizer; samples of a text; text files read block by block."""

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as LibraryTokenizer

from cs336_basics import tokenizer as module
from cs336_basics.tokenizer import DOCUMENT_END, END_OF_TEXT, Tokenizer, read_utf8, sample_evenly, split_pieces
from tests.basics.texts import (
    CORPUS,
    GPT2_WORD,
    SPACES,
    WORDS,
    cut_at,
    small_pieces,
    trained,
    utf8_text,
)

# Streams


@settings(max_examples=150, deadline=None)
@given(text=utf8_text, places=st.lists(st.integers(0, 1000), max_size=6), piece_chars=st.integers(1, 12))
@example(text="", places=[0], piece_chars=1)
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


def test_a_long_text_is_cut_into_pieces_and_encodes_as_the_whole():
    text = CORPUS * 400
    assert len(text) > 3 * module._PIECE_CHARS
    blocks = [text[i : i + 50_001] for i in range(0, len(text), 50_001)]
    streamed = list(trained().encode_stream(blocks))
    assert len(streamed) >= 3
    assert [i for ids in streamed for i in ids] == trained().encode(text)
    assert list(trained().encode_stream(blocks, first=2)) == streamed[2:]


def test_pieces_are_cut_as_soon_as_they_may_be():
    words = "one two three\nfour  five\t six " * 50
    pieces = list(split_pieces([words], 20))
    assert "".join(pieces) == words
    assert all(20 <= len(piece) <= 30 for piece in pieces[:-1])  # "  five\t six" is the longest without a safe place
    assert all(piece[0] in " \n" and not before[-1].isspace() for before, piece in pairwise(pieces))


@pytest.mark.parametrize("text", ["猫" * 500, "\n" * 500, "\u00a0x" * 250], ids=["no space", "only space", "nbsp"])
def test_text_without_a_safe_place_stays_whole(text):
    assert list(split_pieces(cut_at(text, [100, 200, 300]), 10)) == [text]


@pytest.mark.parametrize("pieces", [lambda b: split_pieces(b, 50), lambda b: sample_evenly(b, 100, 16_000)])
def test_pieces_and_samples_come_before_the_stream_is_read_to_its_end(pieces):
    read = []

    def blocks() -> Iterator[str]:
        for i in range(1000):
            read.append(i)
            yield "some words here "

    with small_pieces(50):
        next(pieces(blocks()))
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
@settings(max_examples=75, deadline=None)
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


@pytest.mark.parametrize("pre_tokenizer", ["GPT-2", "GPT-4", "Llama"])
@settings(max_examples=100, deadline=None)
@given(documents=st.lists(foreign_text, max_size=4), block=st.integers(1, 40), piece_chars=st.integers(1, 8))
@example(documents=[f"go{END_OF_TEXT}\ngo", "foo<|im|>"], block=3, piece_chars=1)
@pytest.mark.parametrize("separator", [DOCUMENT_END, END_OF_TEXT])
def test_special_tokens_between_separators_are_text(pre_tokenizer, separator, documents, block, piece_chars):
    documents = [document.replace(separator, "") for document in documents]
    library = foreign(pre_tokenizer, "plain", "others")
    literal = LibraryTokenizer.from_str(library.to_str())
    literal.encode_special_tokens = True
    expected = []
    for document in documents:
        expected += [*literal.encode(document, add_special_tokens=False).ids, library.token_to_id(END_OF_TEXT)]
    text = "".join(document + separator for document in documents)
    with small_pieces(piece_chars):
        blocks = [text[i : i + block] for i in range(0, len(text), block)]
        pieces = list(Tokenizer(library).encode_stream(blocks, separator=separator))
        assert [i for ids in pieces for i in ids] == expected
        first = len(pieces) // 2
        assert list(Tokenizer(library).encode_stream(blocks, separator=separator, first=first)) == pieces[first:]


def test_marked_documents_without_a_space_are_cut_between_them():
    assert len(list(split_pieces(["猫が好き。" + DOCUMENT_END] * 100, 50))) > 10


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
@example(text="\ufeffa\r\nb\rc\n\x00", size=3, start=4, length=0)
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
        assert "".join(read_utf8(str(path), first, 10**9)) == "".join(read_utf8(path, first)) == text[start:]
        assert "".join(read_utf8(path, 0, last)) == text[:end]


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


@pytest.mark.parametrize("kind, message", [("none", "does not exist"), ("", "not a regular file"), ("x", "is empty")])
def test_a_file_without_text_is_named(tmp_path, kind, message):
    (tmp_path / "x").touch()
    with pytest.raises((FileNotFoundError, ValueError), match=f"text file {tmp_path / kind} .*{message}"):
        next(read_utf8(tmp_path / kind))


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"x" * 500_000)
    with read_size(100_000):
        blocks = read_utf8(path)
        next(blocks)
        os.truncate(path, 100_000)
        with pytest.raises(ValueError, match=r"text\.txt became shorter"):
            list(blocks)
