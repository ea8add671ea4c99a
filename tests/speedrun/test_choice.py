"""The laws give the values in their papers, and the search finds the best of all sizes."""

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from cs336_basics.shape import ModelShape
from cs336_systems.bench.row import Row
from cs336_systems.cli.speedrun.choice import (
    SIZES,
    Candidate,
    Task,
    Trial,
    batch_tokens,
    expected_loss,
    learning_rate,
    run_flops,
    search,
)
from cs336_systems.config.model import ModelConfig
from cs336_systems.planner.accounting import num_parameters

SHAPES = {name: ModelConfig(vocab_size=1000, context_length=256, **shape).shape for name, shape in SIZES.items()}


def test_chinchillas_compute_suits_seventy_billion_parameters() -> None:
    flops = 5.76e23
    best = min((10 ** (9 + i / 100) for i in range(300)), key=lambda n: expected_loss(n, flops / (6 * n)))
    assert best == pytest.approx(70e9, rel=0.1)
    assert expected_loss(1e9, 2e10) == pytest.approx(1.8172 + 482.01 / 1e9**0.3478 + 2085.43 / 2e10**0.3658)


def test_batch_and_learning_rate_are_those_of_deepseeks_models() -> None:
    # DeepSeek LLM 67B: 2 T tokens, batches of 4608 sequences of 4096 tokens, largest learning rate 3.2e-4.
    flops = 6 * 67e9 * 2e12
    assert batch_tokens(flops) == pytest.approx(4608 * 4096, rel=0.15)
    assert learning_rate(flops) == pytest.approx(3.2e-4, rel=0.05)
    assert learning_rate(1e9) == 3e-3


def test_repeated_tokens_and_too_many_parameters_are_worth_less_and_less() -> None:
    def law(parameters: float, tokens: float) -> float:
        return expected_loss(parameters, tokens)

    assert expected_loss(5, 50, 100) == law(5, 50)
    assert expected_loss(5, 400, 100) == pytest.approx(law(5, 100 + 100 * 15.4 * (1 - math.exp(-3 / 15.4))))
    assert expected_loss(5, 1e9, 100) == pytest.approx(law(5, 100 * 16.4))
    assert expected_loss(20, 50, 100) == pytest.approx(law(5 + 5 * 5.3 * (1 - math.exp(-3 / 5.3)), 50))


def test_sizes_grow() -> None:
    parameters = [num_parameters(shape) for shape in SHAPES.values()]
    assert all(1.3 * small < large < 6 * small for small, large in itertools.pairwise(parameters))


def row(status: str, step_s: float = math.nan) -> Row:
    metrics = {"step_ms": {"p50": 1e3 * step_s}}
    return Row(case="speedrun", variant="", config={}, env={}, status=status, metrics=metrics)  # type: ignore[arg-type]


def step_s(trial: Trial) -> float:
    """A machine with the same rate of operations per second at any size."""
    return run_flops(SHAPES[trial.size], trial.sequences * 256) / 1e13


def timed(trial: Trial) -> Row:
    return row("ok", step_s(trial))


def find(measure: Callable[[Trial], Row] = timed, **changes: Any) -> tuple[list[Candidate], list[Trial]]:
    """Search; return the candidates found, with the chosen one last, and the trials made."""
    found: list[Candidate] = []
    tried: list[Trial] = []

    def noted(trial: Trial) -> Row:
        tried.append(trial)
        return measure(trial)

    fields: dict[str, Any] = dict(
        shapes=SHAPES, kernels=("auto",), devices=1, unique_tokens=10**12, seconds=600.0,
        most_sequences=lambda shape: 1 << 20, measure=noted, tell=found.append, is_time_left=lambda step_s: True,
    )  # fmt: skip
    chosen = search(Task(**fields | changes))
    return [*found, chosen], tried


@pytest.mark.parametrize("seconds", [1.0, 60.0, 3600.0, 86400.0])
def test_the_size_is_the_one_that_trying_all_would_find(seconds: float) -> None:
    found, _ = find(seconds=seconds)

    def loss(shape: ModelShape) -> float:
        tokens = seconds * 1e13 / run_flops(shape, 1)
        return expected_loss(num_parameters(shape), tokens)

    assert found[-1].loss == pytest.approx(loss(found[-1].shape))
    assert found[-1].loss <= min(map(loss, SHAPES.values())) + 0.01


def test_more_time_chooses_a_larger_model_and_larger_batches() -> None:
    ends = [find(seconds=seconds)[0][-1] for seconds in (1.0, 600.0, 86400.0)]
    assert len({end.trial.size for end in ends}) == 3
    parameters, sequences = [num_parameters(end.shape) for end in ends], [end.trial.sequences for end in ends]
    assert parameters == sorted(parameters)
    assert sequences == sorted(sequences)
    for end in ends:  # a power of two, the nearest
        assert math.log2(batch_tokens(end.flops) / 256 / end.trial.sequences) == pytest.approx(0, abs=0.8)


def test_little_text_chooses_a_smaller_model() -> None:
    much, little = (find(seconds=86400.0, unique_tokens=unique)[0][-1] for unique in (10**12, 10**6))
    assert num_parameters(little.shape) < num_parameters(much.shape)
    assert little.tokens == 16 * 10**6


def test_a_batch_goes_through_the_model_in_pieces_that_fit() -> None:
    def measure(trial: Trial) -> Row:
        return timed(trial) if trial.sequences // trial.micro_batches <= 4 else row("oom")

    found, tried = find(measure, most_sequences=lambda shape: 24)
    assert {trial.sequences // trial.micro_batches for trial in tried} == {4, 8, 16}
    assert {each.trial.sequences // each.trial.micro_batches for each in found} == {4}
    assert found[-1].trial.micro_batches > 1


def test_a_size_that_does_not_fit_ends_the_search() -> None:
    found, tried = find(seconds=86400.0, most_sequences=lambda shape: 8 if shape.d_model <= 384 else 0)
    assert found[-1].trial.size == "mini"
    assert {trial.size for trial in tried} == {"nano", "micro", "mini"}


def test_the_fastest_kernel_is_taken_and_one_that_fails_is_not() -> None:
    def measure(trial: Trial) -> Row:
        if trial.kernel == "broken":
            return row("error")
        return row("ok", {"auto": 1.0, "fast": 0.5}[trial.kernel] * step_s(trial))

    found, tried = find(measure, kernels=("auto", "broken", "fast"))
    assert found[-1].trial.kernel == "fast"
    assert {trial.kernel for trial in tried} == {"auto", "broken", "fast"}
    assert len(set(tried)) == len(tried), "measured twice"


def test_the_search_stops_when_its_time_is_over() -> None:
    found, tried = find(seconds=86400.0, is_time_left=lambda step_s: False)
    assert [trial.size for trial in tried] == ["nano"]
    assert found[-1].trial.size == "nano"


def test_a_size_whose_steps_would_take_too_long_is_not_tried() -> None:
    asked: list[float] = []
    _, everything = find(seconds=86400.0)
    took = [step_s(trial) for trial in everything]
    _, tried = find(seconds=86400.0, is_time_left=lambda takes: asked.append(takes) or takes < took[2])
    assert tried[:2] == everything[:2]
    assert asked[:2] == pytest.approx(took[1:3])  # the machine of this test is as fast at any size
    assert all(step_s(trial) < took[2] for trial in tried)


def test_the_search_fails_if_no_size_works() -> None:
    with pytest.raises(RuntimeError, match="no model of any size"):
        find(lambda trial: row("oom"))


def test_a_number_of_tokens_suits_a_twentieth_of_parameters() -> None:
    parameters = num_parameters(SHAPES["base"])
    enough, (first, *_) = find(seconds=None, tokens=20.0 * parameters)
    assert enough[-1].trial.size == first.size == "base"
    assert enough[-1].tokens == 20 * parameters
    assert find(seconds=None, tokens=19.9 * parameters)[0][-1].trial.size == "mini"
    assert find(seconds=None, tokens=100.0)[0][-1].trial.size == "nano"


REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "no better": (dict(seconds=60.0), "micro, with .* no better .*law"),
    "largest": (dict(seconds=1e9), "no larger size; the batch is"),
    "memory": (dict(most_sequences=lambda shape: 8 * (shape.d_model <= 256)), "mini cannot be trained here"),
    "time": (dict(is_time_left=lambda step_s: False), "micro .*too long.* no time to time another batch"),
    "given": (dict(shapes={"mini": SHAPES["mini"]}), "size is given"),
    "tokens": (dict(seconds=None, tokens=1e9), "largest size with 20 tokens"),
    "few tokens": (dict(seconds=None, tokens=1e3), "no size with 20 tokens"),
    "kernels": (dict(kernels=("auto", "other")), "fastest"),
}


@pytest.mark.parametrize("reason", REASONS)
def test_the_choice_says_why(reason: str) -> None:
    changes, why = REASONS[reason]
    assert re.search(why, find(**changes)[0][-1].why)


def test_without_a_second_trial_the_batch_is_not_called_the_laws() -> None:
    once = iter([True])
    found, (first, *_) = find(lambda trial: timed(trial) if next(once, False) else row("oom"), seconds=1.0)
    assert found[-1].trial == first
    assert "no other batch works" in found[-1].why
    assert "the batch is" not in found[-1].why


def test_several_cards_share_a_batch() -> None:
    one, two = (find(devices=devices, seconds=None, tokens=1e9)[0][-1] for devices in (1, 2))
    assert one.trial.sequences == 2 * two.trial.sequences
