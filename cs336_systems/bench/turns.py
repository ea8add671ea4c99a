"""Training steps of several strategies on all ranks together, timed; where the host is not steady, they take turns."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from cs336_basics.data import token_dtype
from cs336_basics.model import TransformerLM

from ..config import RunConfig
from ..garbage import objects_set_aside
from ..kernels.attention import get_attention
from ..parallel import comm
from ..training.loop import Trainer
from ..training.metrics import summarise
from .outcome import free_memory
from .timing import wait_for


class StepBench(Protocol):
    """What is asked of a configuration: a frozen dataclass."""

    @property
    def warmup(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def rounds(self) -> int: ...
    @property
    def is_alone(self) -> bool: ...
    def run_config(self) -> RunConfig: ...


Config = TypeVar("Config", bound=StepBench)
Look = Callable[[Any, bool, Trainer], dict[str, Any]]
"""Looks at a step of a configuration: called with it, whether this is the first rank, and what does its steps."""


def build_trainer(run: RunConfig, device: torch.device) -> Trainer:
    """The training loop of a run, on random weights and tokens, which are the same on all ranks."""
    shape = run.model.shape
    tokens = np.random.default_rng(0).integers(0, shape.vocab_size, 1 << 20).astype(token_dtype(shape.vocab_size))
    torch.manual_seed(run.train.seed)
    with device:
        model = TransformerLM(**dataclasses.asdict(shape), attention=get_attention(run.model.attention))
    return Trainer(run, model, tokens, device)


def time_steps(trainer: Trainer, steps: int) -> list[float]:
    """The times of steps in ms, as the loop measures them, after a step that all ranks begin together."""
    with objects_set_aside():
        comm.barrier("start of the measurement")
        trainer.reset_clock()
        return [trainer.train_step()["step_ms"] for _ in range(steps + 1)][1:]


def measure_in_turns(
    configs: Sequence[Config],
    device: torch.device,
    at_work: Callable[[Any], None],
    look: Look | None = None,
) -> Iterator[tuple[Config, dict[str, Any]]]:
    """Each configuration after each of its rounds, with the metrics so far: those of the slowest rank, the same on all.

    Before its last round it is the configuration of so many rounds. look: called in the last round; what it returns on
    the first rank is among the metrics.
    """
    is_first = comm.rank() == 0  # asked here: alone, each is its own first
    everything: dict[Config, list[dict[str, Any]]] = {config: [] for config in configs}
    for round_ in range(1, configs[0].rounds + 1):
        is_last = round_ == configs[0].rounds
        for config in configs:
            at_work(config)
            looking = functools.partial(look, config, is_first) if look is not None and is_last else None
            with comm.alone() if config.is_alone else nullcontext():
                found, seen = _measure(config, device, looking)
            everything[config].append(found)
            free_memory()  # what the variant before has held, compiled code's references too
            ranks = comm.gather_objects((merged(everything[config]), seen), "what was measured")
            so_far: Any = config
            yield (
                config if is_last else dataclasses.replace(so_far, rounds=round_),
                slowest([metrics for metrics, _ in ranks]) | ranks[0][1],
            )


def _measure(
    config: StepBench, device: torch.device, look: Callable[[Trainer], dict[str, Any]] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Times and memory of a round, and what `look` has returned."""
    on_gpu = device.type == "cuda"
    free_memory()
    held = torch.cuda.memory_allocated(device) if on_gpu else 0  # by a variant before; in the peak, where it stays
    with closing(build_trainer(config.run_config(), device)) as trainer:
        free_memory()  # of weights as they were drawn, whole, and of a variant before that gave back late
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        started = time.perf_counter()
        first_loss = trainer.train_step()["loss"]
        wait_for(device)
        startup_s = time.perf_counter() - started
        for _ in range(config.warmup - 1):
            trainer.train_step()
        times = time_steps(trainer, config.steps)
        memory = {"peak_memory_bytes": trainer.memory_bytes(), "held_before_bytes": held}
        found = {"steps_ms": times, **memory, "first_loss": first_loss, "startup_s": startup_s}
        return found, {} if look is None else look(trainer)


def merged(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What one rank has measured, over its rounds."""
    times = [time for each in rounds for time in each["steps_ms"]]
    memory = {name: max(each[name] for each in rounds) for name in ("peak_memory_bytes", "held_before_bytes")}
    first = {"first_loss": rounds[0]["first_loss"], "startup_s": max(each["startup_s"] for each in rounds)}
    return {"step_ms": summarise(times), "steps_ms": times, **first, **memory}


def slowest(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The times of the rank that took longest, the largest memory, and how far apart the ranks were."""
    medians = [metrics["step_ms"]["p50"] for metrics in ranks]
    times = max(ranks, key=lambda metrics: metrics["step_ms"]["p50"])
    memory = {name: max(each[name] for each in ranks) for name in ("peak_memory_bytes", "held_before_bytes")}
    return {**times, "spread_ms": max(medians) - min(medians), **memory}
