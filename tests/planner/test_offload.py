"""Activations in host memory: bytes on both sides, the window of copies, waits, and the plan's line."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cs336_systems.config.model import ModelConfig
from cs336_systems.planner.accounting import offload_window
from cs336_systems.planner.activations import block_parts, kept_bytes, offloaded_bytes, saved_bytes
from cs336_systems.planner.cards import CARDS, get_card
from cs336_systems.planner.job import Job
from cs336_systems.planner.memory import moments, peak_bytes
from cs336_systems.planner.offload import largest_offload, offload_note, smallest_offload
from cs336_systems.planner.step import EXPOSED_COPIES, step_terms, waiting_seconds

XL = ModelConfig(size="xl", context_length=1024).shape


def job(offload: str = "none", **given: Any) -> Job:
    """xl, 48 blocks, 16 x 1024 tokens: T d = 26,214,400."""
    how: dict[str, Any] = dict(shape=XL, batch_size=16, compile=True, fused=True, activation_offload=offload)
    return Job(**how | given)


def test_bytes_move_from_the_device_to_the_host() -> None:
    """A compiled block of bf16 keeps 2 T d + 8 T, 9 c T d + 3 c T d_ff less ... and 4 T H of logsumexp."""
    td, tokens, heads = 26_214_400, 16 * 1024, 25
    whole = (2 + 3 * 2 + 5 * 2) * td + 3 * 2 * 4 * td + 8 * tokens + 4 * tokens * heads
    assert sum(block_parts(job()).values()) == whole
    small = 8 * tokens  # 1/rms of both norms, 64 KiB each; logsumexp has 1.6 MB
    assert offloaded_bytes(job("first_3")) == [whole - small] * 3
    assert saved_bytes(job("first_3")) == (45 * whole + 3 * small, 0)
    one_sequence = job("first_1", batch_size=1)  # logsumexp of 100 KiB stays too
    assert offloaded_bytes(one_sequence) == [kept_bytes(one_sequence)[0] - 8 * 1024 - 4 * 1024 * heads]


@pytest.mark.parametrize(
    "policy, expected",
    [("block", [2, 2, 2, 2]), ("every_3", [2, None, None, 2]), ("groups_4", [2, 0, 0, 0]),
     ("first_1", [2, None, None, None])],
)  # fmt: skip
def test_a_checkpointed_block_has_its_input_in_host_memory(policy: str, expected: list[int | None]) -> None:
    plan = job("first_4", activation_checkpointing=policy)
    whole = sum(block_parts(plan).values()) - 8 * 16 * 1024
    assert offloaded_bytes(plan) == [whole if factor is None else factor * 26_214_400 for factor in expected]
    outputs = 2 * 26_214_400 + 4 * 16 * 1024 * 25
    if policy != "groups_4":
        kept = offloaded_bytes(replace(plan, activation_checkpointing=f"{policy}_but_attention"))
        assert kept == [
            before + (outputs if factor else 0) for before, factor in zip(offloaded_bytes(plan), expected, strict=True)
        ]


def test_no_moment_has_more_blocks_on_the_device_than_the_loss() -> None:
    """first_9 of 48: 39 blocks, while gradients of 9 blocks arrive."""
    before, after = moments(job()), moments(job("first_9"))
    moved = sum(offloaded_bytes(job("first_9")))
    for when in ("the loss", "backward of the loss", "backward of the last block"):
        assert sum(t.value for t in before[when]) - sum(t.value for t in after[when]) == moved
    terms = {term.name: term for term in after["backward of block 39"]}
    whole = sum(block_parts(job()).values())
    assert terms["activations"].value == 39 * whole
    assert terms["gradients"].working.startswith("9 blocks x ")
    assert terms["gradients"].value == pytest.approx(9 * 2 * 40_960_000, rel=0.03)
    assert peak_bytes(job()) - peak_bytes(job("first_9")) == pytest.approx(moved, rel=0.02)


def test_all_but_the_last_block_leave_two_on_the_device() -> None:
    last = moments(job("first_47"))["backward of the last block"]
    assert last[-1].name == "prefetched"
    assert last[-1].value == offloaded_bytes(job("first_47"))[-1]
    assert next(term.value for term in last if term.name == "activations") < 1.01 * kept_bytes(job())[0]
    assert "backward of block 2" in moments(job("first_47"))


@pytest.mark.parametrize(
    "count, layers, group, window",
    [(1, 2, 1, 1), (1, 8, 1, 6), (6, 8, 1, 1), (7, 8, 1, 1), (2, 8, 2, 4), (4, 8, 2, 2), (6, 8, 2, 2), (4, 5, 2, 2)],
)
def test_a_copy_lasts_as_long_as_memory_allows(count: int, layers: int, group: int, window: int) -> None:
    assert offload_window(count, layers, group) == window
    assert count - group + window < layers  # the block that waits for the last copy exists


@pytest.mark.parametrize(
    "copies, window, forward, backward, expected",
    [
        # Six blocks of 1 s forward and 2 s backward. Copies that fit between their neighbours are hidden.
        ([1.0] * 3, 2, 1, 2, 0),
        ([1.0], 4, 1, 2, 0),
        # The copy of block 0 lasts until 1 + 5 s and may until the end of block 4, 5 s: a second. Its way back begins
        # before the backward pass of block 4 and has 8 s.
        ([5.0], 4, 1, 2, 1),
        # With window 1 both wait: 5 - 1 forward, 5 - 2 backward.
        ([5.0], 1, 1, 2, 4 + 3),
        # Three copies of 2 s, window 2: done at 3, 5, 7 s; blocks 2, 3 and 4 end at 3, 4 -> 5, 6 -> 7. On the way back,
        # begun before blocks 4, 3 and 2, each copy has four seconds.
        ([2.0] * 3, 2, 1, 2, 2),
        ([], 5, 1, 2, 0),
    ],
)
def test_waits_by_hand(copies: list[float], window: int, forward: float, backward: float, expected: float) -> None:
    assert waiting_seconds(copies, 6, window, forward, backward) == pytest.approx(expected)


def test_the_step_waits_for_a_slow_link_and_not_for_a_fast_one() -> None:
    def waits(plan: Job, **ceilings: float) -> float:
        terms = {term.name: term.value for term in step_terms(plan, get_card("H100", **ceilings))}
        assert terms["step"] == pytest.approx(sum(terms.values()) - terms["step"])
        return terms[EXPOSED_COPIES]

    assert waits(job("first_9"), host_link=1e15) == 0
    assert waits(job("first_9"), host_link=1e9) > waits(job("first_9"), host_link=10e9) > waits(job("first_9")) > 0
    assert waits(job("first_40", activation_checkpointing="block")) == 0
    assert EXPOSED_COPIES not in {term.name for term in step_terms(job(), CARDS["H100"])}


@pytest.mark.parametrize("policy, step", [("none", 1), ("block", 1), ("groups_4", 4)])
def test_the_smallest_number_of_blocks_that_fits(policy: str, step: int) -> None:
    plan = job(activation_checkpointing=policy)
    assert largest_offload(plan) == f"first_{47 // step * step}"
    offloads = ["none", *(f"first_{count}" for count in range(step, 48, step))]
    peaks = {offload: peak_bytes(replace(plan, activation_offload=offload)) for offload in offloads}
    for limit in peaks.values():
        assert smallest_offload(plan, limit / 0.9 + 1) == next(each for each in offloads if peaks[each] <= limit)
    assert smallest_offload(plan, min(peaks.values()) / 0.9 - 1) is None


@pytest.mark.parametrize(
    "offload, given, accepted",
    [
        ("first_48", {}, "K below 48, because the backward pass begins with the last block"),
        ("first_2", {"activation_checkpointing": "groups_4"}, "K a multiple of 4, with activation_checkpointing"),
        ("block", {}, "none, auto or first_K"),
    ],
)  # fmt: skip
def test_impossible_numbers_are_named(offload: str, given: dict[str, Any], accepted: str) -> None:
    with pytest.raises(ValueError, match=rf"^activation_offload is '{offload}': it must be .*{accepted}"):
        job(offload, **given)


def test_the_line_of_the_plan() -> None:
    card, hidden = CARDS["H100"], job("first_40", activation_checkpointing="block")
    needed = f"{40 * 2 * 26_214_400 / 2**30:.2f} GiB of pinned host memory a GPU"
    assert offload_note(hidden, None) == f"activation_offload first_40: {needed}"
    assert offload_note(hidden, card) == f"activation_offload first_40: {needed}; a link of 53.5 GB/s hides the copies"
    four = job("first_40", activation_checkpointing="block", strategy="fsdp", world_size=4)
    short = offload_note(four, None, 4 * 40 * 2 * 26_214_400 - 1)
    assert ", which does not fit: 7.81 GiB for 4, and there are 7.81 GiB" in short
    assert "too slow to hide the copies: the step waits " in offload_note(job("first_9"), card)


def test_the_command_decides_auto_for_the_card(cs336: Callable[..., tuple[int, str, str]]) -> None:
    words = "--size xl --batch_size 16 --context_length 1024 --compile --activation_offload auto"
    for command in ("memory", "step"):
        code, out, _ = cs336("plan", command, *words.split(), "--card", "H100")
        lines = out.splitlines()
        assert code == 0
        assert "activation_offload first_3" in lines[2]
        assert lines[3].startswith("  H100 of 79 GiB, fits: ")
        assert lines[4].startswith("  activation_offload first_3: 3.08 GiB of pinned host memory a GPU; a link of")
        assert "activation_offload" not in cs336("plan", command, *words.split(), "--card", "H200")[1]
    small = ("--card", "H100", "--host_memory_gib", "2")
    assert (
        "which does not fit: 3.08 GiB for 1, and there are 2.00 GiB"
        in cs336("plan", "memory", *words.split(), *small)[1]
    )
    fast = ("--card", "H100", "--host_link_gb_s", "1000")
    assert "a link of 1e+03 GB/s hides the copies" in cs336("plan", "step", *words.split(), *fast)[1]
    code, _, error = cs336("plan", "memory", *words.split(), "--memory_gib", "30")
    assert code == 0
    assert error == ""
