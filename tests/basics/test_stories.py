"""The story generator: a pure function of its seed, and stories that keep their facts to the end."""

import hashlib
import itertools
import random
import re

import pytest

from cs336_basics.stories import stories, story

END = "<|endoftext|>"


def text_of(seed: int, min_chars: int) -> str:
    return "".join(stories(seed, min_chars))


@pytest.fixture(scope="module")
def many() -> list[str]:
    """The words of 1000 stories, one line each."""
    return [" ".join(story(random.Random(seed)).split()) for seed in range(1000)]


# The text


def test_the_text_of_seed_zero_never_changes():
    state = random.getstate()
    digest = hashlib.sha256(text_of(0, 10_000)[:10_000].encode()).hexdigest()
    assert digest == "04480a02d962231dc0dc3df972e23a54ee088bd58966d97f29ea436eb621ce83"
    assert random.getstate() == state  # the global generator is not touched


def test_different_seeds_give_different_stories():
    assert len({text_of(seed, 1) for seed in range(20)}) == 20


@pytest.mark.parametrize("seed", [0, 7])
def test_a_longer_text_begins_with_the_shorter_one(seed):
    texts = [text_of(seed, chars) for chars in (1, 1000, 2000, 30_000)]
    for shorter, longer in itertools.pairwise(texts):
        assert len(shorter) < len(longer)
        assert longer.startswith(shorter)


@pytest.mark.parametrize("min_chars", [0, 1, 100, 10_000])
def test_the_text_is_as_long_as_asked_and_at_most_one_story_longer(min_chars):
    parts = list(stories(0, min_chars))
    assert sum(map(len, parts)) >= min_chars
    assert sum(map(len, parts[:-1])) < max(min_chars, 1)


def test_every_story_ends_with_the_end_of_text_on_its_own_line():
    parts = list(stories(0, 50_000))
    assert len(parts) > 50
    for part in parts:
        assert part.endswith(f"\n{END}\n")
        assert part.count(END) == 1


def test_stories_have_60_to_150_words_on_two_lines(many):
    lengths = [len(text.split()) for text in many]
    assert min(lengths) >= 60
    assert max(lengths) <= 150
    assert all(len(story(random.Random(seed)).splitlines()) == 2 for seed in range(100))


def test_the_text_is_plain_ascii_and_varied():
    parts = list(stories(0, 200_000))
    text = "".join(parts)
    assert text.isascii()
    assert len(set(parts)) == len(parts)
    assert len(set(re.findall(r"[A-Za-z]+", text))) > 150


# The facts


def only(pattern: str, text: str) -> tuple[str, ...]:
    """The groups of a pattern that must be in a text exactly once."""
    found = [match.groups() for match in re.finditer(pattern, text)]
    assert len(found) == 1, (pattern, text)
    return found[0]


def test_the_toy_that_is_had_is_the_toy_that_is_lost_and_found(many):
    for text in many:
        colour, toy = only(r"\bhad a (\w+) (\w+), and", text)
        assert only(r"\bthe (\w+) was (?:gone|lost)[!.]", text) == (toy,)
        assert only(r'"I lost my (\w+) (\w+),"', text) == (colour, toy)
        assert only(r"but the (\w+) was not there", text) == (toy,)
        assert only(r"and there was the (\w+) (\w+)!", text) == (colour, toy)
        assert all(packed == toy for packed in re.findall(r"put (?:her|his) (\w+) in a bag", text))
    assert len({only(r"\bhad a (\w+ \w+), and", text) for text in many}) > 50


def test_the_child_keeps_name_and_pronoun(many):
    for text in many:
        kind, name = only(r"there was a \w+ (girl|boy) named (\w+)\.", text)
        they, their, wrong = ("she", "her", ("he", "his")) if kind == "girl" else ("he", "his", ("she", "her"))
        assert only(r"(\w+) had a \w+ \w+, and (\w+) took it", text) == (name, they)
        assert only(r'"Why do you cry, (\w+)\?"', text) == (name,)
        assert only(r'my \w+ \w+," said (\w+)\.', text) == (name,)
        assert only(r'"Thank you, \w+!" said (\w+)\. (\w+) was', text) == (name, they.capitalize())
        words = set(re.findall(r"[a-z]+", text.lower()))
        assert not words & set(wrong)
        assert f"put {their} " in text or " in a bag " not in text
