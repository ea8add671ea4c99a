"""One optimizer step: batch, forward, backward, synchronize, clip, check, update.

The trainer sees the model as a function from tokens to logits, or to a loss, and the strategy through its contract.
Kernels and parallelism are chosen elsewhere.
"""

import contextlib
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cs336_basics.attention import Documents
from cs336_basics.data import gather_sequences
from cs336_basics.model import TransformerLM
from cs336_basics.nn_utils import cross_entropy

from ..config.checks import is_import_path
from ..config.run import SHARDED, RunConfig
from ..kernels.fp8_linear import Fp8Linear, quantized, weights_rounded_once
from ..machine.hardware import DTYPES, autocast, device_peak_flops, start_copy_to_host, with_index
from ..parallel import comm, failure
from ..parallel.peer_memory import PeerBuffer
from ..planner.accounting import training_flops
from .auto import resolve
from .batches import BatchLoader, Tokens, micro_batch_size
from .build import (
    Compiled,
    build_optimizer,
    masters_of,
    narrow_matrices,
    pack_matrices,
    prepare_model,
    strategy_of,
    wrap_model,
)
from .graph import RecordedStep
from .optimizer import SMALLEST_LOSS_SCALE, GradientScale, learning_rate, set_learning_rate

logger = logging.getLogger(__name__)


class NonFiniteError(RuntimeError):
    """The loss or a gradient was not finite. That step has changed no weight."""


@dataclass
class Position:
    """Progress of a run: steps started, sequences consumed, steps skipped."""

    step: int = 0
    sequences: int = 0
    skipped_steps: int = 0


@dataclass(frozen=True)
class StartedStep:
    """A step that has been launched and whose loss has not been read yet."""

    step: int
    first_sequence: int
    lr: float
    data_wait_s: float
    read_numbers: Callable[[], Tensor]
    """Waits for the step. Returns its loss, its gradient norm and, with several ranks, the share of those that stop."""


class Trainer:
    """One model in training: `train_step` advances it by one optimizer step, `evaluate` measures it.

    Every process has a Trainer of the same configuration, and all call its methods together. They share each batch,
    which has the same sequences as with one process. Losses are means over the tokens of all processes, in nats.
    """

    def __init__(
        self,
        config: RunConfig,
        model: TransformerLM,
        tokens: Tokens,
        device: str | torch.device,
        end_of_text: int | None = None,
    ) -> None:
        self.device = device = with_index(torch.device(device))  # the loader's thread starts on GPU 0: name the GPU
        self.config = config = resolve(config, device)
        self.model = model
        self.context_length = config.model.shape.context_length
        if config.data.documents and end_of_text is None:
            raise ValueError("data.documents is true: it must be false without a tokenizer, which has the end of text")
        self._end_of_text = end_of_text if config.data.documents else None
        config.check_world_size(comm.world_size())
        prepare_model(model, config.train)
        casts = config.train.has_masters and strategy_of(config).strategy.needs_float32  # autocast casts
        masters = narrow_matrices(model, config.train) if config.train.has_masters and not casts else {}
        if config.train.packs and not casts:
            pack_matrices(model)
        self.strategy = wrap_model(config, model)  # called like the model that it wraps
        self.scale: GradientScale | None = None
        """Decides on the device whether the step counts; None if the host decides."""
        fused: dict[str, Any] = {}
        if config.optimizer.implementation == "fused":
            self.scale = GradientScale(device, config.train.max_grad_norm or math.inf, config.train.precision == "fp16")
            fused = dict(factor=self.scale.factor, masters=masters_of(self.strategy, masters))
        self.reads_late = self.scale is not None and device.type != "cpu"
        """Whether the loss of a step is read when the next one has begun. On a CPU a step is over when it returns."""
        self.optimizer = build_optimizer(model, config.optimizer, config.parallel.shard_optimizer, **fused)
        fused.get("masters", {}).clear()  # frees those that a sharded optimizer leaves to other ranks
        if (warmup_steps := config.optimizer.warmup_steps or 0) > config.train.max_steps:
            logger.warning(
                f"optimizer.warmup_steps is {warmup_steps}, more than train.max_steps, {config.train.max_steps}: the "
                "largest learning rate is not reached"
            )
        self.position = Position()
        self.loader = BatchLoader(tokens, self.context_length, config.train.seed, device)
        self._loss = Compiled(cross_entropy) if config.train.compile else cross_entropy
        # Sharded weights are whole only in their block, and torch_ddp broadcasts all buffers.
        strategy = config.parallel.strategy
        each_time = strategy in (*SHARDED, "torch_ddp") or is_import_path(strategy)
        self._fp8 = [] if each_time else [layer for layer in model.modules() if isinstance(layer, Fp8Linear)]
        self._quantize = torch.compile(quantized, dynamic=False) if config.train.compile else quantized
        self.stopping = False
        """Whether any rank has asked to stop, through the argument of `train_steps`."""
        self._recorded: RecordedStep | None = None
        if config.train.cuda_graph:
            self._recorded = RecordedStep(self._compute, self.optimizer.zero_grad)
        self.step_flops = training_flops(config.model.shape, config.train.batch_size, self.context_length)
        self._peak_flops = device_peak_flops(device, config.train.precision)
        self._clock = time.perf_counter()

    def _fp8_weights(self) -> contextlib.AbstractContextManager:
        """The context in which weights do not change, so that FP8 layers round them once."""
        return weights_rounded_once(self._fp8, DTYPES["fp8"], self._quantize)

    def autocast(self, device: torch.device | None = None) -> contextlib.AbstractContextManager:
        """The context in which to call the model, by default on its device."""
        return autocast(device or self.device, self.config.train.precision if self.config.train.has_masters else "fp32")

    def _summed_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The summed loss, from the logits, or chunk by chunk in the head, which then never holds all logits."""
        documents = None if self._end_of_text is None else Documents.from_tokens(inputs, self._end_of_text)
        if self.config.train.loss_chunk_tokens is None:
            return self._loss(self.strategy(inputs, documents=documents), targets, reduction="sum")
        return self.strategy(inputs, targets=targets, documents=documents)

    def train_step(self) -> dict[str, Any]:
        """One optimizer step. Returns its metrics. Raises NonFiniteError instead of making a bad update."""
        return self.finish_step(self.start_step())

    def train_steps(self, last: int, stop: Callable[[], bool] = lambda: False) -> Iterator[dict[str, Any]]:
        """`train_step` up to step `last`, or until `stopping`. Yields the metrics of each step.

        stop: asked in each step. If it returns true on any rank, `stopping` becomes true on all.

        With `reads_late` the host reads the loss of a step while the GPU computes the next one, so the GPU never waits
        for it. A NonFiniteError then comes when the next step has begun, and has perhaps updated the weights.
        """
        started: StartedStep | None = None
        while self.position.step < last and not self.stopping:
            before, started = started, self.start_step(stop)
            if before is not None:
                yield self.finish_step(before)
            if not self.reads_late:
                yield self.finish_step(started)
                started = None
            if comm.world_size() == 1:
                self.stopping = stop()
        if started is not None:
            yield self.finish_step(started)

    def start_step(self, stop: Callable[[], bool] = lambda: False) -> StartedStep:
        """Launch a step. With fused it is complete but for its metrics; otherwise `finish_step` updates the weights."""
        train, position = self.config.train, self.position
        step = position.step + 1
        failure.set_step(step)
        lr = learning_rate(self.config, step)
        set_learning_rate(self.optimizer, lr)
        asked = time.perf_counter()
        first, count = position.sequences, train.batch_size // comm.world_size()
        inputs, targets = self.loader.get(first + comm.rank() * count, count, train.batch_size)
        data_wait_s = time.perf_counter() - asked

        numbers = (self._recorded or self._compute)(inputs, targets)
        if self.scale is not None:
            self._clear_gradients()
        position.step = step
        position.sequences += train.batch_size
        if comm.world_size() > 1:
            own_norm = numbers[1:]  # stays as it is, for `finish_step` to compare with the mean
            numbers = torch.cat((numbers, numbers.new_full((1,), stop()), own_norm))
            comm.mean([numbers[:-1]], "all-reduce of the loss")
        return StartedStep(step, first, lr, data_wait_s, start_copy_to_host(numbers))

    def finish_step(self, started: StartedStep) -> dict[str, Any]:
        """Wait for the loss of a step, update the weights unless the step has done so, and return its metrics."""
        train = self.config.train
        loss, norm, *of_ranks = started.read_numbers().tolist()
        if of_ranks:
            self.stopping, own_norm = of_ranks[0] > 0, of_ranks[1]
        now = time.perf_counter()
        elapsed, self._clock = now - self._clock, now

        updated = math.isfinite(loss) and math.isfinite(norm)
        if not updated:
            self._skip_or_raise(started, loss, norm)
        elif of_ranks and abs(own_norm - norm) > 1e-3 * norm:
            raise ValueError(
                f"parallel.strategy is {self.config.parallel.strategy!r}: it must average gradients, but in step "
                f"{started.step} their norm is {own_norm:.4g} on rank {comm.rank()}, and {norm:.4g} on average"
            )
        if self.scale is None:
            if updated:
                self.optimizer.step()
            self._clear_gradients()
        self.position.skipped_steps += not updated
        mfu = None if self._peak_flops is None else self.step_flops / elapsed / self._peak_flops / comm.world_size()
        return {
            "step": started.step,
            "loss": loss,
            "lr": started.lr,
            "grad_norm": norm,
            "step_ms": elapsed * 1e3,
            "data_wait_ms": started.data_wait_s * 1e3,
            "tokens_per_s": train.batch_size * self.context_length / elapsed,
            "mfu": mfu,
            "memory_bytes": self.peak_memory_bytes(),
            "skipped_steps": self.position.skipped_steps,
        }

    def _compute(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Everything that needs no answer from the host; returns loss and gradient norm, (2,) on the device.

        A fused optimizer updates the weights here, if both are finite. For any other the clipped gradient of the mean
        loss is left in `.grad`: the host reads loss and norm first.
        """
        loss = self._forward_backward(inputs, targets)
        if self.scale is None:
            norm = self.strategy.clip_gradient(self.config.train.max_grad_norm or math.inf)
        else:
            comm.mean([loss], "all-reduce of the loss")
            norm = self.scale.decide(loss, self.strategy)
            self.optimizer.step()
        return torch.stack((loss, norm.to(loss)))

    def _clear_gradients(self) -> None:
        if not self.config.train.cuda_graph:  # a replay overwrites the gradients
            self.strategy.zero_grad()

    def _forward_backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Accumulate the gradient of the mean loss over all micro-batches; return that loss, on the device."""
        total = torch.zeros((), device=self.device)
        micro_batches = list(zip(inputs.split(self.micro_batch), targets.split(self.micro_batch), strict=True))
        with self._fp8_weights():
            for i, (x, y) in enumerate(micro_batches):
                last = i == len(micro_batches) - 1
                with contextlib.nullcontext() if last else self.strategy.no_sync():
                    with self.autocast():
                        loss = self._summed_loss(x, y) / targets.numel()
                    (loss if self.scale is None else self.scale.scaled(loss)).backward()
                total += loss.detach()
        self.strategy.finish_gradient_synchronization()
        return total

    def _skip_or_raise(self, started: StartedStep, loss: float, norm: float) -> None:
        """Skip a step without an update if that is allowed; else raise NonFiniteError with the batch."""
        # A finite loss with infinite gradients means that fp16's loss scale was too large. It has been halved.
        loss_scale = None if self.scale is None else self.scale.loss_scale
        overflow = loss_scale is not None and math.isfinite(loss) and loss_scale >= SMALLEST_LOSS_SCALE
        if not overflow and not self.config.train.skip_nonfinite:
            first, count = started.first_sequence, self.config.train.batch_size
            raise NonFiniteError(
                f"step {started.step}: loss {loss}, gradient norm {norm}, before the update. The batch is sequences "
                f"{first} to {first + count - 1} of the run, at tokens {self.loader.starts(first, count).tolist()} of "
                f"{self.config.data.train_tokens} (--train.skip_nonfinite true skips such steps)"
            )
        logger.warning("step %d skipped: loss %s, gradient norm %s", started.step, loss, norm)

    @torch.no_grad()
    def evaluate(self, tokens: Tokens) -> float:
        """Mean loss in nats over the sequences of `validation_starts`. The ranks share the batches."""
        length, world_size = self.context_length, comm.world_size()
        if self.scale is not None:
            self.optimizer.zero_grad()  # Dynamo compiles no product of a 16-bit weight that has a float32 gradient
        starts = self.validation_starts(len(tokens))
        total = torch.zeros((), device=self.device)
        for i in range(0, len(starts), world_size):
            mine = i + comm.rank()
            # A strategy may need all ranks in every forward pass, so a rank without a batch repeats the last one.
            sequences = gather_sequences(tokens, starts[min(mine, len(starts) - 1)], length).to(self.device)
            with self._fp8_weights(), self.autocast():
                loss = self._summed_loss(sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous())
                loss = loss / (starts.size * length)
            total += loss if mine < len(starts) else 0
        comm.mean([total], "all-reduce of the validation loss")
        return total.item() * world_size  # the sum: each rank has added only its own batches

    @property
    def micro_batch(self) -> int:
        """Sequences that this process takes through the model at once."""
        return micro_batch_size(self.config.train, comm.world_size())

    def validation_starts(self, num_tokens: int) -> npt.NDArray[np.int64]:
        """Starts of the validation sequences, back to back, (batches, sequences); the same for any number of ranks.

        If there is a whole batch of all ranks, the rest is left out, so that a compiled model sees one shape.
        """
        count = min(self.config.train.validation_sequences, (num_tokens - 1) // self.context_length)
        together = min(count, self.micro_batch * comm.world_size())
        starts = np.arange(count - count % together) * self.context_length
        size = max(n for n in range(1, self.micro_batch + 1) if starts.size % n == 0)  # batches of one size
        return starts.reshape(-1, size)

    def reset_clock(self) -> None:
        """Time the next step from here. Work since the last step does not count."""
        self._clock = time.perf_counter()

    def close(self) -> None:
        """Drop the recorded step and stop the background thread. No step may follow."""
        if self._recorded is not None:
            self._recorded.close()
            self._recorded = None  # it refers to this trainer, which should be free when its last user drops it
        self.loader.close()

    def peak_memory_bytes(self) -> int:
        """Peak memory of the GPU's allocator and memory that GPUs share, or on other devices of the process.

        0 where the system does not tell.
        """
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) + PeerBuffer.held_bytes
        try:
            import resource
        except ImportError:  # not on Unix
            return 0
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
