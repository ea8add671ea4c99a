"""The parts of a step's memory at the moments that the handout asks for, and the time of a step, for any strategy.

On a GPU the allocator gives the numbers. On a CPU the storages that operators make are counted, to the byte.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext
from typing import Any

import torch
from torch import Tensor

from ...parallel.peer_memory import PeerBuffer
from ...training.loop import Trainer
from ...training.metrics import summarise
from ..turns import StepBench, build_trainer, time_steps
from .live_bytes import LiveBytes

INITIALISED, FORWARD, BEFORE, AFTER = "initialised", "end of forward", "before the step", "after the step"
MOMENTS = (INITIALISED, FORWARD, BEFORE, AFTER)
PARTS = ("parameters", "gradients", "optimizer_state", "activations", "gathered", "other")


class _AllocatedBytes:
    """As LiveBytes, for a GPU: memory beyond the bytes allocated when this was made."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._before = device, torch.cuda.memory_allocated(device)
        self.restart()

    @property
    def now(self) -> int:
        return torch.cuda.memory_allocated(self._device) + PeerBuffer.held_bytes - self._before

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) + PeerBuffer.held_bytes - self._before

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


def parts_of(trainer: Trainer) -> dict[str, int]:
    """Bytes that the training loop holds now; a storage shared by several tensors counts once.

    gathered: FSDP's unsharded weights. Buckets count as gradients, because gradients are views of them.
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
    """A trainer's memory by moment: INITIALISED at once, the others in a step inside `note`."""

    def __init__(self, trainer: Trainer, meter: LiveBytes | _AllocatedBytes) -> None:
        self.found: dict[str, dict[str, Any]] = {}
        self._trainer, self._meter, self._at_start = trainer, meter, 0
        self._note(INITIALISED)

    @contextlib.contextmanager
    def note(self) -> Iterator[None]:
        """While active, record a step. A moment's peak counts from the moment before it."""
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
        self._at_start = self._meter.now - self._trainer.strategy.gathered_bytes()

    def _note(self, name: str) -> None:
        live, parts = self._meter.now, parts_of(self._trainer)
        activations = live - parts["gathered"] - self._at_start if name == FORWARD else 0
        parts |= {"activations": activations}
        parts["other"] = live - sum(parts.values())
        ordered = {part: parts[part] for part in PARTS}
        self.found[name] = {"live_bytes": live, "peak_bytes": self._meter.peak, "parts": ordered}
        self._meter.restart()


def measure_memory(
    config: StepBench, device: torch.device, look: Callable[[Trainer], dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """This rank's memory by moment in the step after the warm-up, times of more steps, and the result of `look`."""
    on_gpu = device.type == "cuda"
    counter = LiveBytes()
    meter: LiveBytes | _AllocatedBytes = _AllocatedBytes(device) if on_gpu else counter
    with ExitStack() as stack:
        with nullcontext() if on_gpu else counter:  # off while steps are timed, because it slows each operator
            trainer = stack.enter_context(closing(build_trainer(config.run_config(), device)))
            moments = Moments(trainer, meter)
            for _ in range(config.warmup):
                trainer.train_step()
            with moments.note():
                trainer.train_step()
        counter.stop()
        times = time_steps(trainer, config.steps)
        seen = look(trainer)
    return {"moments": moments.found, "steps_ms": times, "step_ms": summarise(times)}, seen


def fullest(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combine the ranks: the memory of the rank with the highest peak, the times of the slowest rank."""

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
