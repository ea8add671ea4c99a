"""The training loop: forward, backward, synchronize, step; and what has to be right around it.

It knows the model only as a function from tokens to logits, or to a loss, and the strategy only by its contract, so
kernels and parallelism are chosen elsewhere.
"""

import contextlib
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cs336_basics.data import count_starts, gather_sequences, sequence_starts
from cs336_basics.model import TransformerLM
from cs336_basics.nn_utils import cross_entropy
from cs336_basics.optimizer import get_cosine_lr

from ..config.run import RunConfig
from ..machine.hardware import autocast, device_peak_flops, to_host, use_device_in_thread, with_index
from ..parallel import comm, failure
from ..parallel.ranks import launched
from ..planner.accounting import training_flops
from .build import build_optimizer, compiled, prepare_model, wrap_model
from .graph import RecordedStep

logger = logging.getLogger(__name__)

Tokens = npt.NDArray[np.unsignedinteger]
_SMALLEST_LOSS_SCALE = 2.0**-10


class NonFiniteError(RuntimeError):
    """The loss or a gradient was not finite; the weights are still those of the step before."""


class StopRequest:
    """While active, SIGINT, SIGTERM or SIGHUP asks the loop to stop after its step; a SIGINT after that interrupts.

    An error that ends one of several processes is left for the launcher meanwhile, because that sends SIGTERM as soon
    as another process is gone, and outside of this the signal ends a process at once, with nothing said.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # only there may handlers be set
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, Exception) and launched():
            failure.leave_failure(error)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def wanted(self) -> bool:
        """Whether a signal has come."""
        return self.signal is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number).name
        # The process that has launched this one sends SIGTERM whichever signal it got; it says at the end which.
        told = "" if failure.OWN_LAUNCH in os.environ else f"{self.signal}: "
        # Not by print or log: a signal can interrupt one of them, and they are not reentrant.
        if comm.rank() == 0:
            with contextlib.suppress(OSError):
                os.write(1, f"{told}stopping after this step, which is then saved and validated\n".encode())


class BatchLoader:
    """Batches of a run by their first sequence; a background thread prepares the next one."""

    def __init__(self, tokens: Tokens, context_length: int, seed: int, device: torch.device) -> None:
        self._tokens, self._context_length, self._seed, self._device = tokens, context_length, seed, device
        self._num_starts = count_starts(tokens, context_length)
        self._pool = ThreadPoolExecutor(1, "batches", initializer=use_device_in_thread, initargs=(device,))
        self._next: tuple[tuple[int, int], Future[tuple[Tensor, Tensor]]] | None = None

    def starts(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Where in the token file sequences first .. first+count-1 of the run begin."""
        return sequence_starts(self._seed, first, count, self._num_starts)

    def _prepare(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        both = gather_sequences(self._tokens, self.starts(first, count), self._context_length)
        if self._device.type == "cuda":
            # From pinned, contiguous memory the copy waits in the GPU's queue, and this thread does not wait.
            both = both.pin_memory().to(self._device, non_blocking=True)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def get(self, first: int, count: int, stride: int | None = None) -> tuple[Tensor, Tensor]:
        """Inputs and targets (count, T) of sequences first .. first+count-1, on the device.

        Also starts to prepare the following batch, which begins `stride` sequences later (default: count).
        """
        if self._next is None or self._next[0] != (first, count):
            self._next = (first, count), self._pool.submit(self._prepare, first, count)
        batch = self._next[1].result()
        after = first + (stride or count), count
        self._next = after, self._pool.submit(self._prepare, *after)
        return batch

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def validation_starts(num_tokens: int, length: int, wanted: int, micro_batch: int) -> npt.NDArray[np.int64]:
    """Where the sequences of a validation start: up to `wanted`, back to back from the beginning, (batches, B).

    Only whole micro-batches, if there is one, so that a compiled model sees one shape.
    """
    count = min(wanted, (num_tokens - 1) // length)
    micro_batch = min(count, micro_batch)
    return (np.arange(count - count % micro_batch) * length).reshape(-1, micro_batch)


@dataclass
class Position:
    """Where a run is: steps done, sequences consumed, steps skipped."""

    step: int = 0
    sequences: int = 0
    skipped_steps: int = 0


class Trainer:
    """One model in training: `train_step` advances it by one optimizer step, `evaluate` measures it.

    With several processes, each has a Trainer of the same configuration, and all call its methods together. They share
    each batch, whose sequences are the same as with one process. All losses are means over the tokens of all processes,
    in nats.
    """

    def __init__(self, config: RunConfig, model: TransformerLM, tokens: Tokens, device: str | torch.device) -> None:
        self.config, self.model = config, model
        self.device = device = with_index(torch.device(device))  # for the loader's thread, which begins on GPU 0
        self.context_length = config.model.shape.context_length
        config.check_world_size(comm.world_size())
        prepare_model(model, config.train)
        self.strategy = wrap_model(config, model)
        self.optimizer = build_optimizer(model, config.optimizer, config.parallel.shard_optimizer)
        if (config.optimizer.warmup_steps or 0) > config.train.max_steps:
            logger.warning(
                "optimizer.warmup_steps is %d, more than train.max_steps, %d: the largest learning rate is not reached",
                config.optimizer.warmup_steps,
                config.train.max_steps,
            )
        self.position = Position()
        self.loader = BatchLoader(tokens, self.context_length, config.train.seed, device)
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.train.precision == "fp16")
        self._loss = compiled(cross_entropy) if config.train.compile else cross_entropy
        self.stopping = False
        """Whether any rank has asked to stop, through `train_step`'s argument."""
        self._recorded = RecordedStep(self._gradients, self.optimizer.zero_grad) if config.train.cuda_graph else None
        self._flops = training_flops(config.model.shape, config.train.batch_size, self.context_length)
        self._peak = device_peak_flops(device, config.train.precision)
        self._clock = time.perf_counter()

    def _autocast(self) -> contextlib.AbstractContextManager:
        train = self.config.train
        return autocast(self.device, train.precision if train.weight_dtype == "fp32" else "fp32")

    def _sum_of_losses(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The model's summed loss, from its logits or from the head itself, which then never holds all logits."""
        if self.config.train.loss_chunk_tokens is None:
            return self._loss(self.strategy(inputs), targets, reduction="sum")
        return self.strategy(inputs, targets=targets)

    def learning_rate(self, step: int) -> float:
        """The learning rate of step 1, 2, ...; that of optimizer.cosine_steps and later is min_lr, after a warm-up."""
        return get_cosine_lr(step, *self.config.schedule.values())

    def train_step(self, stop: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        """One optimizer step. Returns its metrics; raises NonFiniteError before the update would be made.

        `stop` is asked late in the step whether to stop after it; if it says so on any rank, `stopping` is true on all.
        """
        train, position = self.config.train, self.position
        step = position.step + 1
        failure.set_step(step)
        lr = self.learning_rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        waiting = time.perf_counter()
        count = train.batch_size // comm.world_size()
        inputs, targets = self.loader.get(position.sequences + comm.rank() * count, count, train.batch_size)
        data_wait = time.perf_counter() - waiting

        loss_and_norm = (self._recorded or self._gradients)(inputs, targets)
        if comm.world_size() > 1:
            loss_and_norm = self._over_ranks(loss_and_norm, stop)
        # Here a step waits for the device (as for unused parameters and float16's scaler): whether to update must be
        # known before the update.
        loss_value, norm_value, *others_stop = to_host(loss_and_norm).tolist()
        self.stopping = any(others_stop) if others_stop else stop()
        now = time.perf_counter()
        elapsed, self._clock = now - self._clock, now

        updated = self._update(step, loss_value, norm_value)
        if not train.cuda_graph:
            self.strategy.zero_grad()
        position.step = step
        position.sequences += train.batch_size
        position.skipped_steps += not updated
        return {
            "step": step,
            "loss": loss_value,
            "lr": lr,
            "grad_norm": norm_value,
            "step_ms": elapsed * 1e3,
            "data_wait_ms": data_wait * 1e3,
            "tokens_per_s": train.batch_size * self.context_length / elapsed,
            "mfu": None if self._peak is None else self._flops / elapsed / self._peak / comm.world_size(),
            "memory_bytes": self.memory_bytes(),
            "skipped_steps": position.skipped_steps,
        }

    def _gradients(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Leave the clipped gradient of the mean loss in `.grad`; return loss and norm, (2,) on the device."""
        loss = self._forward_backward(inputs, targets)
        self.scaler.unscale_(self.optimizer)
        norm = self.strategy.clip_gradient(self.config.train.max_grad_norm or math.inf)
        return torch.stack((loss, norm.to(loss)))

    def _over_ranks(self, loss_and_norm: Tensor, stop: Callable[[], bool]) -> Tensor:
        """Means of loss, norm and wish to stop, (3,); the norm is equal on all ranks, and they share batches evenly."""
        loss, norm = loss_and_norm
        facts = torch.stack((loss, norm, torch.full_like(loss, stop())))
        comm.mean([facts], "all-reduce of the loss")
        return facts

    def _forward_backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Accumulate the gradient of the mean loss over all micro-batches; return that loss, on the device."""
        total = torch.zeros((), device=self.device)
        pieces = list(zip(inputs.split(self.micro_batch), targets.split(self.micro_batch), strict=True))
        for i, (x, y) in enumerate(pieces):
            last = i == len(pieces) - 1
            with contextlib.nullcontext() if last else self.strategy.no_sync():
                with self._autocast():
                    loss = self._sum_of_losses(x, y) / targets.numel()
                self.scaler.scale(loss).backward()
            total += loss.detach()
        self.strategy.finish_gradient_synchronization()
        return total

    def _update(self, step: int, loss: float, norm: float) -> bool:
        """Step the optimizer if loss and gradients are finite; otherwise skip or raise. Returns whether it stepped."""
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            self.scaler.step(self.optimizer)
        else:
            self._skip_or_raise(step, loss, norm)
            self._tell_scaler_of_overflow()
        self.scaler.update()  # after an overflow: halves the loss scale
        return finite

    def _tell_scaler_of_overflow(self) -> None:
        """Do so on every rank: with sharded weights, not every rank has met the values that are not finite."""
        if self.scaler.is_enabled():
            for found in self.scaler._per_optimizer_states[id(self.optimizer)]["found_inf_per_device"].values():
                found.fill_(1.0)

    def _skip_or_raise(self, step: int, loss: float, norm: float) -> None:
        # Infinite gradients of a finite loss are how fp16 says that the loss scale is too large.
        overflow = self.scaler.is_enabled() and math.isfinite(loss) and self.scaler.get_scale() > _SMALLEST_LOSS_SCALE
        if overflow or self.config.train.skip_nonfinite:
            logger.warning("step %d skipped: loss %s, gradient norm %s", step, loss, norm)
            return
        first, count = self.position.sequences, self.config.train.batch_size
        raise NonFiniteError(
            f"step {step}: loss {loss}, gradient norm {norm}, before the update. The batch is sequences {first} to "
            f"{first + count - 1} of the run, at tokens {self.loader.starts(first, count).tolist()} of "
            f"{self.config.data.train_tokens} (--train.skip_nonfinite true skips such steps)"
        )

    @torch.no_grad()
    def evaluate(self, tokens: Tokens) -> float:
        """Mean loss over the sequences of `validation_starts`, whose batches the ranks share."""
        length, world_size = self.context_length, comm.world_size()
        starts = self.validation_starts(len(tokens))
        total = torch.zeros((), device=self.device)
        for i in range(0, len(starts), world_size):
            mine = i + comm.rank()
            # A strategy may need all ranks in every forward pass, so a rank without a batch repeats the last one.
            both = gather_sequences(tokens, starts[min(mine, len(starts) - 1)], length).to(self.device)
            with self._autocast():
                loss = self._sum_of_losses(both[:, :-1].contiguous(), both[:, 1:].contiguous())
                loss = loss / (starts.size * length)
            total += loss if mine < len(starts) else 0
        comm.mean([total], "all-reduce of the validation loss")
        return total.item() * world_size

    @property
    def micro_batch(self) -> int:
        """Number of sequences that this process takes through the model at once."""
        train = self.config.train
        return train.batch_size // train.gradient_accumulation_steps // comm.world_size()

    def validation_starts(self, num_tokens: int) -> npt.NDArray[np.int64]:
        """Where the sequences of a validation start in so many tokens, (batches, B): those of a single process."""
        micro_batch = self.micro_batch * comm.world_size()
        starts = validation_starts(num_tokens, self.context_length, self.config.train.validation_sequences, micro_batch)
        return starts if starts.size % self.micro_batch else starts.reshape(-1, self.micro_batch)

    def reset_clock(self) -> None:
        """Time the next step from here, so that what was done since the last one does not count."""
        self._clock = time.perf_counter()

    def close(self) -> None:
        """Drop the recorded step, and stop the background thread. There are no steps afterwards."""
        if self._recorded is not None:
            self._recorded.close()
        self.loader.close()

    def memory_bytes(self) -> int:
        """Peak memory: of the GPU's allocator, or of the process on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
