"""Sampling: against a model whose answers are known, against brute force, and against decoding without a cache."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cs336_basics.generate import filter_logits, generate
from cs336_basics.model import TransformerLM
from cs336_systems.bench.instruments.live_bytes import LiveBytes

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB = 13
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [12, 0]]


def small_lm(seed: int = 0, context_length: int = 24) -> TransformerLM:
    torch.manual_seed(seed)
    return TransformerLM(VOCAB, context_length, d_model=16, num_layers=2, num_heads=2, d_ff=32)


def counting_lm(context_length: int = 16) -> TransformerLM:
    """After token t it is nearly certain of t + 1, after 9 of 0: no layers, and embeddings that are one-hot."""
    model = TransformerLM(10, context_length, d_model=10, num_layers=0, num_heads=1, d_ff=1)
    with torch.no_grad():
        model.token_embeddings.weight.copy_(torch.eye(10))
        model.lm_head.weight.copy_(20 * torch.eye(10).roll(1, dims=0))
    return model


# Decoding


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_counts_counts_on(temperature):
    result = generate(counting_lm(), [[3], [8, 9, 0], [0, 5, 5, 7]], 5, temperature=temperature)
    assert result == [[4, 5, 6, 7, 8], [1, 2, 3, 4, 5], [8, 9, 0, 1, 2]]


def decode_plainly(model: TransformerLM, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding as one would first write it, without a cache."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([tokens]))[0, -1].tolist()
        tokens.append(max(range(len(logits)), key=logits.__getitem__))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("seed", range(3))
def test_greedy_rows_of_a_batch_equal_plain_decoding_of_each_prompt_alone(seed):
    model = small_lm(seed)
    result = generate(model, PROMPTS, 12, temperature=0)
    assert result == [decode_plainly(model, prompt, 12) for prompt in PROMPTS]
    assert result == [generate(model, [prompt], 12, temperature=0)[0] for prompt in PROMPTS]


def test_the_cache_has_room_for_the_new_tokens_and_not_for_the_whole_context() -> None:
    model = TransformerLM(9, 1 << 16, 8, 2, 1, 8)  # whose whole context takes 8 MiB of keys and values
    with LiveBytes() as live:
        assert len(generate(model, [[1, 2]], 4)[0]) == 4
    assert live.peak < 1 << 20


def test_the_cache_reads_every_position_once():
    model, lengths = small_lm(), []
    model.token_embeddings.register_forward_pre_hook(lambda module, inputs: lengths.append(inputs[0].shape[1]))
    generate(model, PROMPTS, 5, temperature=0)
    assert lengths == [1] * (7 + 5 - 1)  # the shortest prompt has one token, the longest row twelve
    lengths.clear()
    generate(model, [[1, 2, 3], [4, 5, 6]], 4, temperature=0)
    assert lengths == [3, 1, 1, 1]


# The stop token


def test_a_row_ends_before_its_stop_token_and_the_others_go_on():
    result = generate(counting_lm(), [[1], [6], [3, 4, 4], [4]], 6, temperature=0, stop_tokens=[5])
    assert result == [[2, 3, 4], [7, 8, 9, 0, 1, 2], [], []]


def test_a_stop_token_in_a_prompt_or_predicted_inside_one_ends_nothing():
    # At position 1 the second row would sample the stop token, but its prompt goes on with another.
    result = generate(counting_lm(), [[0], [4, 2, 5, 6], [5, 5]], 4, temperature=0, stop_tokens=[5])
    assert result == [[1, 2, 3, 4], [7, 8, 9, 0], [6, 7, 8, 9]]


def test_a_stop_token_beyond_the_end_of_its_row_does_not_lengthen_it():
    # Row 0 ends at position 3; it would come to the stop token at position 5 while row 1 is still going.
    assert generate(counting_lm(), [[0], [6, 6, 6, 6]], 2, temperature=0, stop_tokens=[5]) == [[1, 2], [7, 8]]


@pytest.mark.parametrize("seed", range(3))
def test_a_stop_token_cuts_the_sampled_rows_and_changes_nothing_else(seed):
    model = small_lm()
    free = generate(model, PROMPTS, 15, seed=seed)
    for stop in range(VOCAB):
        expected = [row[: row.index(stop)] if stop in row else row for row in free]
        assert generate(model, PROMPTS, 15, seed=seed, stop_tokens=[stop]) == expected


def test_decoding_ends_when_every_row_has_stopped():
    model, calls = counting_lm(), []
    model.token_embeddings.register_forward_pre_hook(lambda module, inputs: calls.append(1))
    assert generate(model, [[1], [3]], temperature=0, stop_tokens=[5]) == [[2, 3, 4], [4]]
    assert len(calls) == 4


# Limits


def test_without_a_limit_every_row_fills_the_context():
    model = counting_lm(context_length=7)
    result = generate(model, [[0], [1, 2, 3], [0] * 7], temperature=0)
    assert result == [[1, 2, 3, 4, 5, 6], [4, 5, 6, 7], []]


@pytest.mark.parametrize("limit", [dict(temperature=-1.0), dict(top_k=0), dict(top_p=0.0), dict(top_p=1.5)], ids=str)
def test_impossible_limits_are_named(limit):
    (name, value), *_ = limit.items()
    with pytest.raises(ValueError, match=f"{name} (is )?{value}.*: they must be at least 0, "):
        generate(small_lm(), PROMPTS, 1, **limit)


@pytest.mark.parametrize("count", [0, 17])  # 24 positions, and the longest prompt has 7
def test_as_many_new_tokens_as_fit_are_accepted(count):
    assert [len(row) for row in generate(small_lm(), PROMPTS, count)] == [count] * 4


@pytest.mark.parametrize(
    "prompts, max_new_tokens, message",
    [
        (PROMPTS, 18, "max_new_tokens is 18: it must be from 0 to 17, .*context_length of 24"),
        (PROMPTS, -1, "max_new_tokens is -1: it must be from 0"),
        ([], 1, "prompts: at least one is needed"),
        ([[1], []], 1, "prompts: .* each of at least one token"),
        ([[1], [2, -1]], 1, "prompt token -1: it must be from 0 to 12"),
        ([[1], [2, VOCAB]], 1, "prompt token 13"),
        *(([[1], [2] * 25], count, "prompt of 25 tokens: .* context_length is 24") for count in (None, 0, 1)),
    ],
)
def test_prompts_and_lengths_that_do_not_fit_are_named(prompts, max_new_tokens, message):
    with pytest.raises(ValueError, match=message):
        generate(small_lm(), prompts, max_new_tokens)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_of_a_row_that_are_not_finite_are_an_error(value, temperature):
    model = small_lm()
    model.lm_head.register_forward_hook(lambda module, inputs, logits: logits.index_fill(0, torch.tensor(1), value))
    with pytest.raises(ValueError, match="the model's logits are not finite"):
        generate(model, PROMPTS, 1, temperature=temperature)


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_token_may_be_ruled_out_by_an_infinite_logit(temperature):
    model = small_lm()
    model.lm_head.register_forward_hook(
        lambda module, inputs, logits: logits.index_fill(-1, torch.tensor(3), -math.inf)
    )
    assert not any(3 in row for row in generate(model, PROMPTS, 15, temperature=temperature))


# Chance


def test_the_seed_alone_decides_the_tokens():
    model = small_lm()
    torch.manual_seed(1)
    first = generate(model, PROMPTS, 15, seed=5)
    torch.manual_seed(2)
    assert generate(model, PROMPTS, 15, seed=5) == first
    assert generate(model, PROMPTS, 15, seed=6) != first


def test_sampling_leaves_the_global_generator_and_the_gradients_alone():
    model, state = small_lm(), torch.get_rng_state()
    generate(model, PROMPTS, 3)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    "options",
    [dict(), dict(temperature=0.5), dict(temperature=2.0, top_k=5), dict(top_p=0.7)],
    ids=str,
)
def test_sampled_frequencies_follow_the_distribution(options):
    model, draws = small_lm(), 20_000
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3]]))[0, -1].double() / options.get("temperature", 1.0)
    p = logits.softmax(-1)
    order = p.argsort(descending=True).tolist()
    kept = order[: options.get("top_k", VOCAB)]
    if "top_p" in options:
        kept = order[: next(n for n in range(1, VOCAB + 1) if p[order[:n]].sum() >= options["top_p"])]
        assert 1 < len(kept) < VOCAB
    expected = torch.zeros_like(p)
    expected[kept] = draws * p[kept] / p[kept].sum()

    rows = generate(model, [[1, 2, 3]] * draws, 1, seed=0, **options)
    counts = torch.bincount(torch.tensor(rows).flatten(), minlength=VOCAB).double()
    assert (counts[expected == 0] == 0).all()
    chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    degrees = len(kept) - 1
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees)


def test_rows_of_one_prompt_are_sampled_apart():
    assert len({tuple(row) for row in generate(small_lm(), [[1]] * 20, 10)}) == 20


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-45])
def test_the_smallest_temperatures_take_the_likeliest_token(temperature):
    model = small_lm()
    assert generate(model, [[1, 2, 3]], 12, temperature=temperature) == generate(model, [[1, 2, 3]], 12, temperature=0)


# The filter


def brute_force_values(logits: list[float], temperature: float, top_k: int | None, top_p: float | None) -> list[float]:
    """The logits that stay, largest first. Which of equal ones stays at the border of top_p is left open."""
    values = sorted((x / temperature for x in logits), reverse=True)
    if top_k is not None and top_k < len(values):
        values = [x for x in values if x >= values[top_k - 1]]
    if top_p is not None:
        weights = [math.exp(x - values[0]) for x in values]
        for n in range(1, len(values) + 1):
            reached = sum(weights[:n]) / sum(weights)
            assume(n == len(values) or abs(reached - top_p) > 1e-5)  # else rounding decides
            if reached >= top_p:
                return values[:n]
    return values


@settings(max_examples=400, deadline=None)
@given(
    logits=st.lists(st.integers(-24, 24).map(lambda n: n / 4), min_size=1, max_size=9),  # ties are common
    temperature=st.sampled_from([0.25, 0.5, 1.0, 2.0]),
    top_k=st.none() | st.integers(1, 12),
    top_p=st.none() | st.floats(0.001, 0.999) | st.just(1.0),
)
def test_the_filter_equals_brute_force(logits, temperature, top_k, top_p):
    result = filter_logits(torch.tensor(logits), temperature, top_k, top_p)
    kept = result > -math.inf
    assert sorted(result[kept].tolist(), reverse=True) == brute_force_values(logits, temperature, top_k, top_p)
    assert torch.equal(result[kept], (torch.tensor(logits) / temperature)[kept])


@pytest.mark.parametrize(
    "options, kept",
    [
        (dict(top_k=3), [0, 1, 2, 3]),  # a tie with the third stays
        (dict(top_p=0.39), [1]),
        (dict(top_p=0.41), [1, 3]),
        (dict(top_p=1e-9), [1]),
        (dict(top_p=1.0), [0, 1, 2, 3, 4]),
        (dict(top_k=2, top_p=0.58), [1, 3]),  # 0.4 of the 0.7 that top_k leaves is 0.571
        (dict(top_k=2, top_p=0.56), [1]),
    ],
    ids=str,
)
def test_the_filter_worked_out_by_hand_for_each_row(options, kept):
    logits = torch.tensor([0.135, 0.4, 0.135, 0.3, 0.03]).log()
    result = filter_logits(torch.stack((logits, -logits)), **options)[0]
    assert (result > -math.inf).nonzero().flatten().tolist() == kept
    assert torch.equal(result[kept], logits[kept])


def test_the_filter_of_bfloat16_computes_in_float32():
    logits = torch.tensor([0.0, 1.0, 2.0]).bfloat16()
    result = filter_logits(logits, 0.7)
    assert torch.equal(result, logits.float() / 0.7)
