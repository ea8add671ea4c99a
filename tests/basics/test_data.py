"""Token files, batches, the resumable sampler, and the unigram and bigram baselines."""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import re
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cs336_basics.data import (
    TokenFileInfo,
    bigram_model_loss,
    count_starts,
    divergence_of_kind,
    gather_sequences,
    get_batch,
    has_sidecar,
    load_tokens,
    read_info,
    sequence_starts,
    sidecar_path,
    unigram_bigram_entropy,
    write_tokens,
)

BLOCK = 1 << 24  # load_tokens checks this many IDs at a time


# Writing and reading


def write(path, chunks, vocab_size, inputs=None, **of):
    """Write lists of tokens, after those that are there already."""
    return write_tokens(path, lambda first: islice(chunks, first, None), vocab_size, inputs=inputs or {}, **of)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), vocab_size=st.sampled_from([1, 257, 65_536, 65_537, 1 << 32]))
def test_tokens_come_back_exactly(tmp_path, data, vocab_size):
    chunks = data.draw(st.lists(st.lists(st.integers(0, vocab_size - 1), max_size=10), max_size=6))
    flat = [i for chunk in chunks for i in chunk]
    path = tmp_path / "t.npy"
    info = write(path, chunks, vocab_size, source="here")
    loaded = load_tokens(path, vocab_size)
    assert loaded.tolist() == flat
    assert loaded.dtype == (np.uint16 if vocab_size <= 65_536 else np.uint32)
    assert info.count == len(flat)


@pytest.mark.parametrize("count", [1, 9, 10, 99, 12_345])
def test_the_file_is_a_plain_npy_array_as_numpy_writes_it(tmp_path, count):
    tokens = np.arange(count, dtype=np.uint16)
    write(tmp_path / "ours.npy", np.array_split(tokens, 3), 65_536, source="")
    np.save(tmp_path / "numpys.npy", tokens)
    loaded = np.load(tmp_path / "ours.npy", allow_pickle=False)
    assert loaded.dtype == np.uint16
    assert np.array_equal(loaded, tokens)
    assert (tmp_path / "ours.npy").read_bytes() == (tmp_path / "numpys.npy").read_bytes()


def test_the_sidecar_describes_the_file(tmp_path):
    path = tmp_path / "train.npy"
    for n in (5, 4):  # the second time over the first
        info = write(path, [range(1, n), [n]], 300, tokenizer_sha256="ab12", source="text.txt")
    expected = {
        "count": 4,
        "vocab_size": 300,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "tokenizer_sha256": "ab12",
        "source": "text.txt",
    }
    assert sorted(p.name for p in tmp_path.iterdir()) == ["train.json", "train.npy"]
    assert json.loads(sidecar_path(path).read_text()) == expected
    assert read_info(path) == info == TokenFileInfo(**expected)


def test_a_stream_that_breaks_leaves_the_old_files_as_they_were(tmp_path):
    path = tmp_path / "t.npy"
    write(path, [[1, 2, 3]], 10, source="old")
    before = path.read_bytes(), sidecar_path(path).read_bytes()
    with pytest.raises(ZeroDivisionError):
        write(path, ([1 // n] for n in (1, 0)), 10, source="new")
    assert (path.read_bytes(), sidecar_path(path).read_bytes()) == before


@pytest.mark.parametrize("vocab_size", [300, 70_000])
def test_a_stream_that_breaks_is_written_on_from_there_and_only_with_equal_inputs(tmp_path, vocab_size):
    chunks = [[1, 2, 3], [], [299], list(range(100)), [5]]
    write(tmp_path / "whole.npy", chunks, vocab_size, source="")
    for length in range(len(chunks)):
        path = tmp_path / "t.npy"
        with pytest.raises(ZeroDivisionError):
            write(path, (chunk if i < length else 1 // 0 for i, chunk in enumerate(chunks)), vocab_size, source="")
        with (tmp_path / "t.npy.partial").open("ab") as file:
            file.write(b"what a killed process wrote")
        rest = [*"not again"][:length] + chunks[length:]
        write(path, rest, vocab_size, source="")
        assert path.read_bytes() == (tmp_path / "whole.npy").read_bytes()
        with pytest.raises(ZeroDivisionError):
            write(path, ([1 // n] for n in (1, 0)), vocab_size, source="")
        write(path, chunks, vocab_size, {"other": 1}, source="")
        assert path.read_bytes() == (tmp_path / "whole.npy").read_bytes()
    assert not [*tmp_path.glob("*.partial*")]


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        ([1, 70_000], "token ID 70000 for .*: it must be from 0 to 299"),
        (np.array([300], dtype=np.uint16), "token ID 300"),
        (np.array([1, -1]), "token ID -1"),
    ],
)
def test_a_wrong_token_id_is_refused_and_leaves_no_file(tmp_path, chunk, message):
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "t.npy", [[1, 2], chunk], 300, source="")
    assert not (tmp_path / "t.npy").exists()


# Loading and its errors


@pytest.mark.parametrize("keep", [0, 5, 60, 127, 128, 129, -1])
def test_a_truncated_token_file_is_named(tmp_path, keep):
    path = tmp_path / "cut.npy"
    np.save(path, np.arange(100, dtype=np.uint16))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"token file .*cut\.npy is truncated or not a \.npy array"):
        load_tokens(path, 100)


@pytest.mark.parametrize(
    "write",
    [
        lambda file: file.write(b"hello, world"),
        lambda file: file.write(b"\x80\x04K\x01."),
        lambda file: np.savez(file, np.arange(3, dtype=np.uint16)),
        lambda file: np.save(file, np.array([{}, None], dtype=object), allow_pickle=True),
    ],
    ids=["text", "pickle", "archive", "objects"],
)
def test_a_file_that_is_no_array_of_numbers_is_named(tmp_path, write):
    with (tmp_path / "other.npy").open("wb") as file:
        write(file)
    with pytest.raises(ValueError, match=r"token file .*other\.npy is truncated or not a \.npy array"):
        load_tokens(tmp_path / "other.npy", 100)


@pytest.mark.parametrize(
    "array",
    [
        *(np.ones(3, dtype) for dtype in (np.float32, np.int64, np.int16, np.uint8, np.uint64, ">u2", bool)),
        *(np.ones(shape, np.uint16) for shape in ((2, 3), (), (1, 1, 4))),
    ],
    ids=lambda array: f"{array.dtype}-{array.shape}",
)
def test_an_array_of_another_type_or_shape_is_refused(tmp_path, array):
    np.save(tmp_path / "t.npy", array)
    with pytest.raises(ValueError, match=r"t\.npy holds .* one-dimensional array of uint16 or uint32"):
        load_tokens(tmp_path / "t.npy", 100)


@pytest.mark.parametrize("function", [lambda path: load_tokens(path, 10), read_info])
def test_a_missing_file_is_named(tmp_path, function):
    with pytest.raises(FileNotFoundError, match=r"token file .*none\.npy (does not exist|has no sidecar .*none\.json)"):
        function(tmp_path / "none.npy")


@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("wrong", [10, 11, 65_535])
def test_the_first_id_outside_the_vocabulary_is_named_with_its_offset(tmp_path, offset, wrong):
    tokens = np.full(5, 9, dtype=np.uint16)
    tokens[offset:] = wrong
    np.save(tmp_path / "t.npy", tokens)
    with pytest.raises(
        ValueError, match=rf"t\.npy has ID {wrong} at offset {offset}: IDs must be below .* size of 10$"
    ):
        load_tokens(tmp_path / "t.npy", 10)


@pytest.mark.parametrize("offset", [BLOCK - 1, BLOCK, BLOCK + 9])
def test_a_wrong_id_is_found_in_every_block(tmp_path, offset):
    # The file is sparse: only the wrong ID takes room on the disk.
    tokens = np.lib.format.open_memmap(tmp_path / "t.npy", mode="w+", dtype=np.uint16, shape=(BLOCK + 10,))
    tokens[offset] = 500
    tokens.flush()
    with pytest.raises(ValueError, match=rf"ID 500 at offset {offset}:"):
        load_tokens(tmp_path / "t.npy", 500)
    loaded = load_tokens(str(tmp_path / "t.npy"), 501)
    assert (len(loaded), type(loaded), loaded.flags.writeable) == (BLOCK + 10, np.memmap, False)


@pytest.mark.parametrize("count", [0, 2, 4])
def test_a_count_that_differs_from_the_sidecars_is_refused(tmp_path, count):
    path = tmp_path / "t.npy"
    write(path, [[1, 2, 3]], 10, source="")
    np.save(path, np.ones(count, dtype=np.uint16))
    with pytest.raises(ValueError, match=rf"t\.npy holds {count} tokens but its sidecar says 3"):
        load_tokens(path, 10)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000, b"[]", b'{"tokenizer_sha256": "", "count"'])
def test_a_sidecar_that_is_no_object_is_named(tmp_path, content):
    check_sidecar_refused(tmp_path / "t.npy", content)


@pytest.mark.parametrize("change", [{"other": 1}, {"count": None}])
def test_a_field_that_a_sidecar_lacks_or_has_too_many_is_named(tmp_path, change):
    info = dataclasses.asdict(write(tmp_path / "t.npy", [[1, 2, 3]], 10, source="")) | change
    content = {name: value for name, value in info.items() if value is not None}
    assert f"'{next(iter(change))}'" in check_sidecar_refused(tmp_path / "t.npy", json.dumps(content).encode())


def check_sidecar_refused(path, content):
    """Reading the sidecar is an error; `load_tokens` raises it too if the file counts as a sidecar."""
    write(path, [[1, 2, 3]], 10, source="")
    sidecar_path(path).write_bytes(content)
    names = "count, vocab_size, sha256, tokenizer_sha256, source"
    with pytest.raises(ValueError, match=rf"^token sidecar .*t\.json must be a JSON object with {names}: .") as caught:
        read_info(path)
    assert has_sidecar(path) == (b"tokenizer_sha256" in content)
    if has_sidecar(path):
        with pytest.raises(ValueError, match=re.escape(str(caught.value))):
            load_tokens(path, 10)
    else:
        assert load_tokens(path, 10).tolist() == [1, 2, 3]
    return str(caught.value)


# Batches


def test_batches_are_pieces_of_the_tokens_and_targets_are_one_on():
    tokens = np.random.default_rng(0).permutation(1000).astype(np.uint16)  # so that a place is known by its token
    place = {int(t): i for i, t in enumerate(tokens)}
    inputs, targets = get_batch(tokens, 50, 8, rng=np.random.default_rng(1))
    assert inputs.shape == targets.shape == (50, 8)
    assert inputs.dtype == targets.dtype == torch.int64
    for x, y in zip(inputs.tolist(), targets.tolist(), strict=True):
        start = place[x[0]]
        assert x == tokens[start : start + 8].tolist()
        assert y == tokens[start + 1 : start + 9].tolist()


def test_batches_start_everywhere_up_to_the_last_place():
    inputs, targets = get_batch(np.arange(12, dtype=np.uint16), 1000, 4, rng=np.random.default_rng(0))
    assert set(inputs[:, 0].tolist()) == set(range(8))
    assert targets[:, -1].max() == 11


def test_batches_repeat_with_the_generator_and_change_without():
    tokens = np.arange(10_000, dtype=np.uint16)
    one, two = (get_batch(tokens, 16, 4, rng=np.random.default_rng(3))[0] for _ in range(2))
    assert torch.equal(one, two)
    assert not torch.equal(get_batch(tokens, 16, 4)[0], get_batch(tokens, 16, 4)[0])


def test_as_many_tokens_as_one_sequence_needs_are_one_place():
    tokens = np.arange(5, dtype=np.uint16)
    assert count_starts(tokens, 4) == 1
    inputs, targets = get_batch(tokens, 3, 4)
    assert inputs.tolist() == [[0, 1, 2, 3]] * 3
    assert targets.tolist() == [[1, 2, 3, 4]] * 3


@pytest.mark.parametrize("count", [0, 1, 4])
def test_too_few_tokens_for_a_sequence_are_refused(count):
    tokens = np.zeros(count, dtype=np.uint16)
    message = rf"{count} tokens are too few for context_length 4: at least 5 are needed"
    for function in (lambda: count_starts(tokens, 4), lambda: get_batch(tokens, 1, 4)):
        with pytest.raises(ValueError, match=message):
            function()


def test_sequences_are_gathered_in_the_order_of_their_starts():
    tokens = np.arange(20, dtype=np.uint32) * 10
    both = gather_sequences(tokens, np.array([17, 0, 3, 3]), 2)
    assert both.tolist() == [[170, 180, 190], [0, 10, 20], [30, 40, 50], [30, 40, 50]]


# The sampler


def reference_starts(seed: int, first: int, count: int, num_starts: int) -> list[int]:
    """SplitMix64 in Python's own integers."""
    mask = (1 << 64) - 1

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    gamma = 0x9E3779B97F4A7C15
    return [mix((mix(seed & mask) + k * gamma) & mask) % num_starts for k in range(first + 1, first + count + 1)]


def test_seed_zero_gives_the_published_outputs_of_splitmix64():
    # The mix of 0 is 0, so this is the generator started from 0: Vigna's reference gives these three first.
    outputs = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    num_starts = (1 << 63) - 1
    assert sequence_starts(0, 0, 3, num_starts).tolist() == [z % num_starts for z in outputs]


@given(
    seed=st.integers(-(1 << 63), (1 << 63) - 1),
    first=st.integers(0, 1 << 50),
    count=st.integers(0, 20),
    num_starts=st.integers(1, 1 << 48),
)
def test_starts_equal_splitmix64_in_python_integers(seed, first, count, num_starts):
    assert sequence_starts(seed, first, count, num_starts).tolist() == reference_starts(seed, first, count, num_starts)


# Entropy


@pytest.mark.parametrize(
    "tokens, unigram, bigram",
    [
        ([], 0.0, 0.0),
        ([7], 0.0, 0.0),
        ([3, 3, 3, 3], 0.0, 0.0),
        ([0, 1, 0, 1, 0, 1, 0, 1], math.log(2), 0.0),
        # Pairs 00 01 11 10 once each: the token before says nothing. Unigram: 0 three times of five.
        ([0, 0, 1, 1, 0], -(0.6 * math.log(0.6) + 0.4 * math.log(0.4)), math.log(2)),
        # After 5 comes 6 or 7 once each, after 6 and 7 comes 5: of four places, two have a choice of two.
        ([5, 6, 5, 7, 5], -(0.6 * math.log(0.6) + 0.4 * math.log(0.2)), 0.5 * math.log(2)),
        # The same with the largest IDs: their pairs do not collide.
        ([65_535, 0, 65_535, 65_534, 65_535], -(0.6 * math.log(0.6) + 0.4 * math.log(0.2)), 0.5 * math.log(2)),
        (list(range(8)), math.log(8), 0.0),
    ],
)
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_entropies_worked_out_by_hand(tokens, unigram, bigram, dtype):
    assert unigram_bigram_entropy(np.array(tokens, dtype=dtype)) == pytest.approx((unigram, bigram), abs=1e-12)


def test_only_the_first_max_tokens_count():
    tokens = np.array([0, 1] * 10 + [2, 3, 4, 5] * 10, dtype=np.uint16)
    assert unigram_bigram_entropy(tokens, max_tokens=20) == pytest.approx((math.log(2), 0.0), abs=1e-12)


# The bigram model


def reference_bigram_loss(train: list[int], valid: list[int], vocab_size: int) -> float:
    """Witten-Bell smoothing by counting in lists."""

    def unigram(b: int) -> float:
        return (train.count(b) + 1) / (len(train) + vocab_size)

    def probability(a: int, b: int) -> float:
        after = [y for x, y in itertools.pairwise(train) if x == a]
        if not after:
            return unigram(b)
        different = len(set(after))
        return (after.count(b) + different * unigram(b)) / (len(after) + different)

    if vocab_size < 10:
        assert all(math.isclose(sum(probability(a, b) for b in range(vocab_size)), 1) for a in range(vocab_size))
    losses = [-math.log(probability(a, b)) for a, b in itertools.pairwise(valid)]
    return sum(losses) / len(losses)


small_tokens = st.lists(st.integers(0, 5), min_size=2, max_size=30)


@settings(max_examples=200, deadline=None)
@given(train=small_tokens, valid=small_tokens)
def test_the_bigram_model_equals_counting_in_lists(train, valid):
    loss = bigram_model_loss(np.array(train, dtype=np.uint16), np.array(valid, dtype=np.uint16), 6)
    assert loss == pytest.approx(reference_bigram_loss(train, valid, 6), rel=1e-12)


def test_the_bigram_model_does_not_mix_up_pairs_of_a_large_vocabulary():
    train = np.array([69_999, 0, 69_999, 1, 69_998, 69_999] * 3, dtype=np.uint32)
    expected = reference_bigram_loss(train.tolist(), train.tolist(), 70_000)
    assert bigram_model_loss(train, train, 70_000) == pytest.approx(expected, rel=1e-12)


def test_the_bigram_model_uses_the_first_max_tokens_of_both_texts():
    train, valid = (np.random.default_rng(seed).integers(0, 3, 300) for seed in (0, 1))
    expected = bigram_model_loss(train[:100], valid[:100], 3)
    assert bigram_model_loss(train, valid, 3, max_tokens=100) == expected
    assert bigram_model_loss(train, valid, 3) != expected


# Another kind of text


def test_the_divergence_of_kinds_is_jensen_and_shannons():
    train = np.array([0, 0, 0, 1] * 8 * 3, dtype=np.uint16)
    valid = np.array([0, 1, 2, 2], dtype=np.uint16)
    found, usual = divergence_of_kind(train, valid, 3)
    p, q = {0: 0.75, 1: 0.25, 2: 0.0}, {0: 0.25, 1: 0.25, 2: 0.5}
    middle = {i: (p[i] + q[i]) / 2 for i in p}
    entropy = {name: -sum(x * math.log(x) for x in r.values() if x) for name, r in (("p", p), ("q", q), ("m", middle))}
    assert found == pytest.approx(entropy["m"] - (entropy["p"] + entropy["q"]) / 2, rel=1e-12)
    assert usual == pytest.approx(0, abs=1e-12)
    assert divergence_of_kind(train, np.full(4, 2, dtype=np.uint16), 3)[0] == pytest.approx(math.log(2), rel=1e-12)


def test_parts_of_one_text_differ_among_themselves_as_from_its_validation_part():
    rng = np.random.default_rng(0)
    draw = functools.partial(rng.choice, 1000, p=np.arange(1, 1001) / 500_500)
    train, valid = draw(80_000), draw(10_000)
    found, usual = divergence_of_kind(train, valid, 1000)
    assert 0 < found < 1.2 * usual
    assert divergence_of_kind(train, rng.integers(0, 1000, 10_000), 1000)[0] > 2 * usual


@pytest.mark.parametrize("counts", [(1, 1), (7, 100), (100, 0)])
def test_texts_too_short_to_be_compared_do_not_differ(counts):
    assert divergence_of_kind(*(np.zeros(count, dtype=np.uint16) for count in counts), 3) == (0.0, 0.0)
