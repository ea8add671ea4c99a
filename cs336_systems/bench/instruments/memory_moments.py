"""The parts of a step's memory at the moments that the handout asks for, and the time of a step, for any strategy.

On a GPU the allocator gives the numbers; on a CPU the storages that operators make are counted, to the byte.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from ...parallel import comm
from ...parallel.ranks import alone
from ...planner.memory import part_bytes
from ...planner.rows import training_job
from ...training.loop import Trainer
from ...training.metrics import summarise
from ..case import row_config
from ..cases.ddp import DDPBench, name_of, what_ran
from ..outcome import free_memory, measured
from ..row import Row
from ..turns import Look, build_trainer, time_steps
from .live_bytes import StorageFollower

INITIALISED, FORWARD, BEFORE, AFTER = "initialised", "end of forward", "before the step", "after the step"
MOMENTS = (INITIALISED, FORWARD, BEFORE, AFTER)
PARTS = ("parameters", "gradients", "optimizer_state", "activations", "gathered", "other")


class Meter(Protocol):
    """Memory in use, and the most of it since `restart`."""

    def live_bytes(self) -> int: ...
    def peak_bytes(self) -> int: ...
    def restart(self) -> None: ...


class StorageMeter(StorageFollower):
    """For a CPU: all storages made while it is active, each at its current size, because FSDP resizes its storages."""

    def __init__(self) -> None:
        super().__init__()
        self._peak = 0

    def made(self, storage: torch.UntypedStorage) -> int:
        """Update the peak."""
        self._peak = max(self._peak, self.live_bytes() + storage.nbytes())
        return 0

    def freed(self, number: int) -> None:
        """Nothing to do: it is no longer followed."""

    def live_bytes(self) -> int:
        """Bytes of the storages alive."""
        storages = (reference() for reference in list(self._followed.values()))
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def peak_bytes(self) -> int:
        """Most bytes alive when a storage was made, or now."""
        return max(self._peak, self.live_bytes())

    def restart(self) -> None:
        """Forget the peak."""
        self._peak = 0


class _AllocatorMeter:
    """For a GPU: memory beyond what was allocated before."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._before = device, torch.cuda.memory_allocated(device)
        self.restart()

    def live_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._before

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._before

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


def parts_of(trainer: Trainer) -> dict[str, int]:
    """Bytes of what the training loop itself holds now; a storage that several tensors share counts once.

    gathered: FSDP's whole weights. Buckets count as gradients, because gradients are views of them.
    """
    counted: set[int] = set()

    def size(tensors: Iterable[Tensor | None]) -> int:
        total = 0
        for tensor in tensors:
            storage = None if tensor is None else getattr(tensor, "_local_tensor", tensor).untyped_storage()
            if storage is not None and storage.nbytes() and storage.data_ptr() not in counted:
                counted.add(storage.data_ptr())
                total += storage.nbytes()
        return total

    parameters = list(trainer.strategy.module.parameters())
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    return {
        "parameters": size(p.detach() for p in parameters),
        "gradients": size(p.grad for p in parameters),
        "optimizer_state": size(value for value in states if isinstance(value, Tensor)),
        "gathered": trainer.strategy.gathered_bytes(),
    }


class Moments:
    """Records of a trainer's memory: INITIALISED at once, the other moments by `note` around one step."""

    def __init__(self, trainer: Trainer, meter: Meter) -> None:
        self.found: dict[str, dict[str, Any]] = {}
        self._trainer, self._meter, self._at_start = trainer, meter, 0
        self._note(INITIALISED)

    @contextlib.contextmanager
    def note(self) -> Iterator[None]:
        """While active, record a step. Each peak is since the moment before; that of the first is since the start."""
        strategy, optimizer = self._trainer.strategy, self._trainer.optimizer
        with ExitStack() as stack:
            for handle in (
                strategy.register_forward_pre_hook(lambda *_: self._begin()),
                strategy.register_forward_hook(lambda *_: self._note(FORWARD)),
                optimizer.register_step_pre_hook(lambda *_: self._note(BEFORE)),
                optimizer.register_step_post_hook(lambda *_: self._note(AFTER)),
            ):
                stack.callback(handle.remove)
            self._meter.restart()
            yield

    def _begin(self) -> None:
        self._at_start = self._meter.live_bytes() - self._trainer.strategy.gathered_bytes()

    def _note(self, name: str) -> None:
        live, parts = self._meter.live_bytes(), parts_of(self._trainer)
        activations = live - parts["gathered"] - self._at_start if name == FORWARD else 0
        parts |= {"activations": activations}
        parts["other"] = live - sum(parts.values())
        ordered = {part: parts[part] for part in PARTS}
        self.found[name] = {"live_bytes": live, "peak_bytes": self._meter.peak_bytes(), "parts": ordered}
        self._meter.restart()


def measure_memory(
    config: DDPBench, device: torch.device, looking: Callable[[Trainer], dict[str, Any]] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """On this rank: memory by moment in the step after the warm-up, the times of more steps, what `looking` returns."""
    on_gpu = device.type == "cuda"
    counter = StorageMeter()
    meter: Meter = _AllocatorMeter(device) if on_gpu else counter
    with ExitStack() as stack:
        with nullcontext() if on_gpu else counter:  # it slows each operator, so it is off while steps are timed
            trainer = stack.enter_context(closing(build_trainer(config.run_config(), device)))
            moments = Moments(trainer, meter)
            for _ in range(config.warmup):
                trainer.train_step()
            with moments.note():
                trainer.train_step()
        counter.stop()
        times = time_steps(trainer, config.steps)
        seen = {} if looking is None else looking(trainer)
    return {"moments": moments.found, "steps_ms": times, "step_ms": summarise(times)}, seen


def fullest(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combine what the ranks measured: the memory of the rank that has most, the times of the slowest rank."""

    def peak(rank: dict[str, Any]) -> int:
        return max(moment["peak_bytes"] for moment in rank["moments"].values())

    medians = [rank["step_ms"]["p50"] for rank in ranks]
    slowest, full = ranks[medians.index(max(medians))], max(ranks, key=peak)
    states = [rank["moments"][AFTER]["parts"]["optimizer_state"] for rank in ranks]
    return {
        "moments": full["moments"],
        "peak_memory_bytes": peak(full),
        "ranks": {"peak_bytes": [peak(rank) for rank in ranks], "optimizer_state_bytes": states},
        "step_ms": slowest["step_ms"],
        "steps_ms": slowest["steps_ms"],
        "spread_ms": max(medians) - min(medians),
    }


def rows_of_memory(
    case: str,
    configs: Sequence[DDPBench],
    device: torch.device,
    at_work: Callable[[Any], None],
    look: Look | None = None,
) -> Iterator[Row]:
    """A row per configuration, the same on all ranks, with the planner's prediction, if there is one."""
    is_first = comm.rank() == 0  # asked here, because inside `alone` every rank is 0
    for config in configs:
        at_work(config)
        free_memory()
        together: AbstractContextManager = alone() if config.is_alone else nullcontext()
        with together:
            looking = None if look is None else functools.partial(look, config, is_first)
            found, seen = measure_memory(config, device, looking)
        everyone = comm.gather_objects((found, seen), "what was measured")
        metrics = fullest([each for each, _ in everyone]) | everyone[0][1]
        what, asked = what_ran(config), row_config(config)
        metrics |= _predicted(case, config, {**asked, **what}, device)
        yield measured(case, name_of(config), asked, what, metrics)


def _predicted(case: str, config: DDPBench, ran: dict[str, Any], device: torch.device) -> dict[str, dict[str, float]]:
    """What a row says of a prediction: nothing where there is none, of which `cs336 plan check` tells the reason."""
    try:
        parts = part_bytes(training_job(case, config.variant, ran))
    except ValueError:  # a strategy that the planner does not know, or an option
        return {}
    if device.type != "cuda":
        del parts["peak"]  # most of it would be a GPU's workspaces
    return {"predicted": parts}
