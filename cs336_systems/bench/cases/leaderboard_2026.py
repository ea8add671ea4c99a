"""The case `leaderboard-2026`: a training step of the 8B model at 32,768 tokens, one sequence on each of two GPUs.

The step is the training loop's: batch, forward, loss, backward, gradient norm and clipping, fused AdamW. It fits
because weights, gradients and optimizer state are sharded, the loss never holds the logits of all tokens, and
activations are recomputed: cheap ones in every block (compile_memory_budget), all of them in the first blocks.
"""

import functools
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint

from ...config.checks import check_types, require_at_least, without_groups
from ...config.run import ParallelConfig, RunConfig
from ...kernels.attention import get_attention
from ...machine.hardware import DTYPE_NAMES, device_peak_flops, select_device
from ...parallel import comm
from ...planner.accounting import training_flops
from ...training.launch import check_devices
from ...training.loop import Trainer
from ...training.optimizer import LOWER_HALF, MASTER
from ..case import Case, row_config, swept
from ..outcome import measured
from ..ranks import launched
from ..row import Row
from ..turns import StepBench, measure_in_turns
from ..workload import is_compiled, model_of, random_run, wrapped

TIMER = (
    "median and mean of {steps} calls of Trainer.train_step (batch, forward, loss, backward, gradient norm, clipping, "
    "AdamW), each from where the host has read one step's loss to where it has the next one's, after {warmup} to warm "
    "up; of the rank whose median is largest. The steps take seconds, so no cache is flushed between them as do_bench "
    "does"
)


@dataclass(frozen=True, kw_only=True)
class Leaderboard2026Bench(StepBench):
    """A strategy, and the settings that make its step fit."""

    strategy: Literal["fsdp", "torch_fsdp"] = swept("fsdp", sweep=("fsdp", "torch_fsdp"), quick=("fsdp", "torch_fsdp"))
    """fsdp: this project's. torch_fsdp: PyTorch's fully_shard with the same settings."""
    size: str = swept("8B", sweep=("xl", "2.7B", "8B"), quick="quick")
    """Named size of the model; quick is a tiny one."""
    context_length: int = swept(32_768, quick=16)
    """Tokens per sequence."""
    devices: int = swept(2)
    """Number of processes, one per GPU."""
    batch_size: int = swept(1)
    """Sequences per process."""
    precision: Literal["fp32", "bf16", "fp8"] = swept("bf16")
    """Type of computation, and of weights and gradients in transfers; fp8 is bf16 with FP8 products."""
    weight_dtype: Literal["fp32", "bf16"] = swept("bf16", sweep=("bf16", "fp32"))
    """Type in which weights are kept and updated, and of AdamW's moments."""
    attention: str = swept("sdpa", sweep=("sdpa", "sdpa_cudnn", "flash_triton"))
    """Attention kernel by its registered name."""
    activation_checkpointing: str = swept(
        "first_2", sweep=("none", "first_2", "first_4", "first_6", "first_12", "block"), quick="first_1"
    )
    """none; block; first_K: the first K blocks; every_K: every K-th block; groups_K: K blocks together;
    first_K_but_attention, and so on: attention's outputs are kept too."""
    compile: bool = swept(True, sweep=(True, False), quick=False)
    """Compile the blocks and the loss of a chunk."""
    compile_memory_budget: float = swept(0.75, sweep=(1.0, 0.75), quick=1.0)
    """Share of a block's activations that compiled code may keep."""
    loss_chunk_tokens: int = swept(4096, sweep=(2048, 4096, 8192), quick=5)
    """Number of tokens whose logits are in memory at a time."""
    device: str = swept("auto", quick="cpu")
    """auto, cpu or cuda."""
    warmup: int = swept(3, quick=1)
    """Steps before the measured ones; they include compilation."""
    steps: int = swept(10, quick=2)
    """Measured steps."""

    step_timeout_s = 600.0  # the first step compiles

    def __post_init__(self) -> None:
        check_types(self, "")
        require_at_least(self, "", 1, "devices", "batch_size", "warmup", "steps")
        with without_groups():
            self.run_config()
            get_attention(self.attention)
            check_devices(self.device, self.devices)
            object.__setattr__(self, "device", select_device(self.device).type)

    def run_config(self) -> RunConfig:
        model = model_of(self.size, context_length=self.context_length, attention=self.attention)
        names = ("precision", "weight_dtype", "activation_checkpointing", "compile", "compile_memory_budget",
                 "loss_chunk_tokens", "device")  # fmt: skip
        parallel = ParallelConfig(devices=self.devices, strategy=self.strategy, step_timeout_s=self.step_timeout_s)
        train = {name: getattr(self, name) for name in names}
        return random_run(model, parallel, batch_size=self.batch_size * self.devices, **train)

    def look(self, is_first: bool, trainer: Trainer) -> dict[str, Any]:
        return {"ran": read_back(trainer)}

    def row(self, metrics: dict[str, Any]) -> Row:
        """The row; its fields are read back from the trainer.

        Rates are of the median step: tokens/s of all GPUs; TFLOP/s and MFU per GPU, without recomputation.
        """
        run, seconds = self.run_config(), metrics["step_ms"]["p50"] / 1e3
        ran = {**metrics.pop("ran"), "run": run.to_dict()}
        flops = training_flops(run.model.shape, self.batch_size, self.context_length)
        peak = device_peak_flops(torch.device(self.device), self.precision)
        metrics |= dict(
            timer=TIMER.format(steps=self.steps, warmup=self.warmup),
            tokens_per_s=self.batch_size * self.devices * self.context_length / seconds,
            tflops=flops / seconds / 1e12,
            mfu=flops / seconds / peak if peak else None,
        )
        return measured("leaderboard-2026", variant(self), row_config(self), ran, metrics)


def variant(config: Leaderboard2026Bench) -> str:
    """The strategy and the settings that trade memory for time: "fsdp first_2 budget 0.75"."""
    how = [config.strategy, config.activation_checkpointing, f"budget {config.compile_memory_budget:g}"]
    return " ".join(how if config.compile else [*how[:2], "eager"])


def read_back(trainer: Trainer) -> dict[str, Any]:
    """Fields and the number of checkpointed blocks, read from model, strategy and loader."""
    blocks: list[Any] = list(trainer.model.layers)
    strategies = {"FSDP": "fsdp", "TorchFSDP": "torch_fsdp"}
    # A 16-bit weight with a master counts as float32.
    state = trainer.optimizer.state
    (dtype,) = {
        torch.float32 if {MASTER, LOWER_HALF} & state[p].keys() else p.dtype for p in trainer.model.parameters()
    }
    loss = trainer.model.lm_head.loss
    return dict(
        strategy=strategies.get(type(trainer.strategy).__name__),
        devices=comm.world_size(),
        batch_size=trainer.micro_batch,
        context_length=trainer.context_length,
        weight_dtype=DTYPE_NAMES.get(dtype, str(dtype)),
        compile=is_compiled(blocks[0]),
        loss_chunk_tokens=loss.keywords["chunk_tokens"] if isinstance(loss, functools.partial) else None,
        device=trainer.device.type,
        num_layers=len(blocks),
        checkpointed_blocks=sum(checkpoint in wrapped(block.forward) for block in blocks),
    )


CASE = Case(
    name="leaderboard-2026",
    config=Leaderboard2026Bench,
    variant=variant,
    rows=launched,
    measure_on_rank=measure_in_turns,
)
