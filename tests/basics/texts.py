"""Texts for the tests of the tokenizer, and a tokenizer trained on them."""

import contextlib
import functools
from collections.abc import Iterator
from itertools import pairwise

import pytest
import regex
from hypothesis import strategies as st

from cs336_basics import tokenizer as module
from cs336_basics.tokenizer import END_OF_TEXT, Tokenizer, split_pieces

CORPUS = (
    "Once upon a time there was a little cat, and the cat didn't like the rain.\r\n"
    "The cat sat on the mat; the rain fell on the house.  It's 1999, or 2001?\n\n\n"
    f"They'll see.\u00a0We've seen\t\tit.\n{END_OF_TEXT}\n"
    "Über die Brücke ging der Bär — größer als 3½ Häuser. 猫は雨が好きではない。 😀😀 naïve café\u2003end\n"
) * 4

SPACES = [" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u2003", "\u3000", "\x1c", "\x1f", "\x85", "\x0b", "\u2028"]
WORDS = ["cat", "the", "Bär", "猫", "😀", "'s", "'ll", "12", "½", "!?", "_"]
WORDS += ["<|end", "|>", "\x00", "\u200b", END_OF_TEXT]
spaced_text = st.lists(st.sampled_from(SPACES + WORDS), max_size=40).map("".join)
utf8_text = st.one_of(st.text(st.characters(codec="utf-8"), max_size=60), spaced_text)

GPT2_WORD = regex.compile(r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""")


def cut_at(text: str, places: list[int]) -> list[str]:
    """The text in blocks; places that repeat make empty blocks."""
    borders = [0, *sorted(p % (len(text) + 1) for p in places), len(text)]
    return [text[a:b] for a, b in pairwise(borders)]


@functools.cache
def trained(vocab_size: int = 400) -> Tokenizer:
    return Tokenizer.train([CORPUS], vocab_size)


@contextlib.contextmanager
def small_pieces(piece_chars: int) -> Iterator[None]:
    """The tokenizer cuts pieces of so many characters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "split_pieces", functools.partial(split_pieces, piece_chars=piece_chars))
        patch.setattr(module, "_BATCH_CHARS", 3 * piece_chars)
        yield
