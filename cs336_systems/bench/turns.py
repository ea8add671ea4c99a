"""Times training steps of several strategies on all ranks, in rounds, so that a changing host affects all of them."""

import abc
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from cs336_basics.data import token_dtype
from cs336_basics.model import TransformerLM

from ..config.run import RunConfig
from ..kernels.attention import get_attention
from ..machine.garbage import gc_frozen
from ..machine.hardware import check_precision
from ..parallel import comm
from ..parallel.ranks import alone
from ..training.loop import Trainer
from ..training.metrics import summarise
from ..training.preflight import memory_shortage
from .instruments.timing import wait_for
from .outcome import free_memory
from .row import Row


class StepBench(abc.ABC):
    """A configuration, a frozen dataclass, whose training steps are timed; it redeclares the fields that it varies."""

    warmup: int
    """Steps before the measured ones, in each round."""
    steps: int
    """Measured steps per round."""
    rounds: int = 1
    """Number of rounds in which the configurations take turns."""
    built_once: bool = False
    """Build all configurations before the first round and keep them."""

    every_round = True
    """Whether rounds before the last one have rows too."""

    @property
    def is_alone(self) -> bool:
        """Whether each process trains without communication."""
        return False

    @abc.abstractmethod
    def run_config(self) -> RunConfig:
        """The run whose steps are measured. Raises ValueError for an impossible one."""

    def look(self, is_first: bool, trainer: Trainer) -> dict[str, Any]:
        """Further metrics of a trainer, in the last round. Those of the first rank count."""
        return {}

    @abc.abstractmethod
    def row(self, metrics: dict[str, Any]) -> Row:
        """The row of the metrics."""


def check_host_memory(run: RunConfig, device: torch.device) -> None:
    """Raise MemoryError for a CPU run that exceeds this machine's memory: the system would kill it silently."""
    if device.type == "cpu" and (shortage := memory_shortage(run, device)):
        raise MemoryError(shortage)


def build_trainer(run: RunConfig, device: torch.device) -> Trainer:
    """The training loop of a run on random weights and tokens, the same on all ranks. Raises MemoryError on a CPU."""
    check_precision(device, run.train.precision)
    check_host_memory(run, device)
    shape = run.model.shape
    tokens = np.random.default_rng(0).integers(0, shape.vocab_size, 1 << 20).astype(token_dtype(shape.vocab_size))
    torch.manual_seed(run.train.seed)
    with device:
        model = TransformerLM(**dataclasses.asdict(shape), attention=get_attention(run.model.attention))
    return Trainer(run, model, tokens, device, end_of_text=0)  # where data.documents is true, token 0 ends one


def time_steps(trainer: Trainer, steps: int) -> list[float]:
    """Step times in ms as the loop measures them, after an untimed step that all ranks start together.

    One more step follows: a step ends when its loss is read, and where the loop reads late, that is after the host has
    launched the next one.
    """
    with gc_frozen():
        comm.barrier("start of the measurement")
        trainer.reset_clock()
        rows = trainer.train_steps(trainer.position.step + steps + 2)
        return [row["step_ms"] for row in rows][1:-1]


def measure_in_turns(
    configs: Sequence[StepBench], device: torch.device, at_work: Callable[[Any], None]
) -> Iterator[Row]:
    """Yield a row of each configuration after each round, of the slowest rank so far, the same on all ranks.

    Before the last round, its `rounds` is the number so far. With `built_once`, all trainers are built before the first
    round and kept, so the metrics lack memory; otherwise each round builds each trainer anew.
    """
    built_once = configs[0].built_once
    is_first = comm.rank() == 0  # asked here, because inside `alone` every rank is 0
    everything: dict[StepBench, list[dict[str, Any]]] = {config: [] for config in configs}
    held: dict[StepBench, tuple[Trainer, dict[str, Any]]] = {}
    with ExitStack() as stack:
        for config in configs if built_once else ():
            at_work(config)
            with alone() if config.is_alone else nullcontext():
                held[config] = stack.enter_context(_built(config, device))
        for round_ in range(1, configs[0].rounds + 1):
            is_last = round_ == configs[0].rounds
            for config in configs:
                at_work(config)
                building = nullcontext(held[config]) if built_once else _built(config, device)
                with alone() if config.is_alone else nullcontext(), building as (trainer, start):
                    found = {"steps_ms": time_steps(trainer, config.steps), **start}
                    if not built_once:
                        found["peak_memory_bytes"] = trainer.peak_memory_bytes()
                    everything[config].append(found)
                    seen = config.look(is_first, trainer) if is_last else {}
                del building, trainer
                free_memory()
                ranks = comm.all_gather_objects((merged(everything[config]), seen), "the measurements")
                if is_last or config.every_round:
                    so_far: Any = config if is_last else dataclasses.replace(config, rounds=round_)  # type: ignore[type-var]
                    yield so_far.row(slowest([metrics for metrics, _ in ranks]) | ranks[0][1])


@contextmanager
def _built(config: StepBench, device: torch.device) -> Iterator[tuple[Trainer, dict[str, Any]]]:
    """A configuration's trainer after its warm-up, with measurements of the start.

    held_before_bytes: memory that an earlier variant still held; part of the peak if it stays.
    """
    on_gpu = device.type == "cuda"
    free_memory()
    held = torch.cuda.memory_allocated(device) if on_gpu else 0
    with closing(build_trainer(config.run_config(), device)) as trainer:
        free_memory()  # the initial weights, unsharded, and an earlier variant that was released late
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        started = time.perf_counter()
        start = {"first_loss": trainer.train_step()["loss"]}
        wait_for(device)
        start["startup_s"] = time.perf_counter() - started
        for _ in range(config.warmup - 1):
            trainer.train_step()
        yield trainer, start if config.built_once else start | {"held_before_bytes": held}


def merged(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combine one rank's measurements over its rounds."""
    times = [time for each in rounds for time in each["steps_ms"]]
    first = {"first_loss": rounds[0]["first_loss"], "startup_s": max(each["startup_s"] for each in rounds)}
    return {"step_ms": summarise(times), "steps_ms": times, **first, **_largest_memory(rounds)}


def slowest(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combine the ranks: the times of the slowest, the largest memory, and the spread of the medians."""
    medians = [metrics["step_ms"]["p50"] for metrics in ranks]
    times = max(ranks, key=lambda metrics: metrics["step_ms"]["p50"])
    return {**times, "spread_ms": max(medians) - min(medians), **_largest_memory(ranks)}


def _largest_memory(found: Sequence[dict[str, Any]]) -> dict[str, int]:
    """The largest memory of ranks or rounds; {} if it was not measured."""
    names = ("peak_memory_bytes", "held_before_bytes")
    return {name: max(each[name] for each in found) for name in names if name in found[0]}
