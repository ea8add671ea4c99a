"""Sentences of the write-up on how long steps of one GPU take: phases, the spread of steps, the first steps."""

from dataclasses import replace

import pytest

from cs336_systems.bench.row import Row
from cs336_systems.report.writeup import timing
from cs336_systems.report.writeup.claims import ClaimError

from .test_writeup import ENV, evidence, row


def step(length: int, ms: float, spread: float, size: str = "small", **phases: float) -> Row:
    metrics = {"step_ms": {"p50": ms, "mean": ms, "std": spread * ms}}
    metrics |= {f"{name}_ms": {"p50": time} for name, time in phases.items()}
    return row("model", metrics=metrics, size=size, context_length=length, mode="train_step", precision="fp32")


def test_phases_are_told_to_add_up_to_what_they_do() -> None:
    rows = [step(512, 50.0, 0.0, forward=20.0, backward=30.0, optimizer=5.0),
            step(256, 50.0, 0.0, forward=20.0, backward=20.0, optimizer=5.0)]  # fmt: skip
    said = timing.times_by_size(evidence(*rows)) or ""
    assert said.endswith("with a synchronization after each: their sum is 0.90 to 1.10 times the step.")


def test_steps_that_differ_are_put_down_to_the_host_where_they_hardly_grow_with_the_tokens() -> None:
    waiting = [step(128, 30.0, 0.08), step(256, 31.0, 0.09), step(512, 60.0, 0.01)]
    said = timing.spread_of_steps(evidence(*waiting)) or ""
    assert said.endswith(
        "Of the other 2, 2 take less than 1.5 times as long for twice the tokens: they wait for the host, whose pace "
        "varies. Settings that take longer have at most 1.0%."
    )
    two = [step(128, 30.0, 0.08, "medium"), step(256, 31.0, 0.09, "medium")]
    more = [step(128, 30.0, 0.07, "large"), *(step(n, n / 10, 0.06, "xl") for n in (256, 512))]
    said = timing.spread_of_steps(evidence(*waiting, *two, *more)) or ""
    assert said.endswith(
        "Of the other 7, 4 take less than 1.5 times as long for twice the tokens: they wait for the host, whose pace "
        "varies. Settings that take longer, 2 of the 7, have at most 6.0%; 1 of the 7 was measured at one length only."
    )
    growing = [step(128, 30.0, 0.08), step(256, 60.0, 0.09), step(512, 120.0, 0.01)]
    assert "wait for the host" not in (timing.spread_of_steps(evidence(*growing)) or "wait for the host")
    alone = [step(128, 30.0, 0.08), step(256, 31.0, 0.01, size="xl")]
    assert "wait for the host" not in (timing.spread_of_steps(evidence(*alone)) or "wait for the host")


def test_a_long_first_step_is_noise_where_later_ones_are_as_long() -> None:
    def warmups(first: float, later: float) -> list[Row]:
        def one(warmup: int, steps: list[float]) -> Row:
            metrics = {"steps_ms": steps, "step_ms": {"p50": 10.0, "mean": 10.1}}
            return row("warmup", f"warmup {warmup}", metrics, size="small", warmup=warmup)

        return [one(0, [40.0, 10.0]), one(1, [first, 10.0, later])]

    noise = timing.warmup_steps(evidence(*warmups(11.4, 11.2))) or ""
    assert noise.endswith(
        "the first measured step takes 1.14 times the median, and the longest of the later ones 1.12 times: what still "
        "differs is noise that all steps have, and no warming up."
    )
    little = timing.warmup_steps(evidence(*warmups(10.06, 10.02))) or ""
    assert little.endswith("and no warming up.")
    settling = timing.warmup_steps(evidence(*warmups(11.4, 10.1))) or ""
    assert settling.endswith("clocks, caches and the allocator's blocks may need more steps to settle.")


def test_that_the_first_step_is_longer_is_claimed_on_a_gpu_alone() -> None:
    def warmups(gpu: str | None) -> list[Row]:
        metrics = {"steps_ms": [9.0, 10.0], "step_ms": {"p50": 10.0, "mean": 10.1}}
        rows = [row("warmup", f"warmup {n}", metrics, size="small", warmup=n) for n in (0, 1)]
        return [replace(each, env={**ENV, "gpu": gpu}) for each in rows]

    assert timing.warmup_steps(evidence(*warmups(None))) is None
    with pytest.raises(ClaimError, match="the first step is longer"):
        timing.warmup_steps(evidence(*warmups("NVIDIA Made-up")))


def test_a_row_that_was_asked_to_be_of_the_cpu_is_not_taken_for_one_of_the_gpu() -> None:
    on_gpu = step(512, 50.0, 0.0)
    on_cpu = [
        replace(each, config=each.config | {"device": "cpu"}) for each in (step(128, 9.0, 0.0), step(256, 9.0, 0.0))
    ]
    assert evidence(*on_cpu, on_gpu).ok("model") == [on_gpu]


def test_one_measured_step_has_no_later_ones() -> None:
    metrics = {"steps_ms": [10.0], "step_ms": {"p50": 10.0, "mean": 10.0}}
    cold = {"steps_ms": [40.0, 10.0], "step_ms": {"p50": 10.0, "mean": 10.1}}
    rows = [row("warmup", f"warmup {n}", m, size="small", warmup=n) for n, m in enumerate((cold, metrics))]
    said = timing.warmup_steps(evidence(*rows)) or ""
    assert said.endswith("mean and median are within 0.0% of each other.")
