"""The case `checkpointing`: peak memory and time of a step by the number of blocks that are checkpointed together.

A group of K blocks keeps only its input; the backward pass has one whole group in memory at a time. Blocks may also
keep attention's outputs, which are small for the time that they take. Rows have the measured memory beside the count of
`accounting.checkpointed_activation_bytes`.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from cs336_basics.shape import ModelShape

from ...config.checks import BUT_ATTENTION, require_at_least
from ...machine.hardware import requested_gpu_bytes, select_device
from ...planner.accounting import best_group
from ...planner.activations import counted_activations
from ..case import Case, swept
from ..instruments.live_bytes import LiveBytes
from ..outcome import each
from ..row import Row
from ..workload import Workbench, numerics
from .model import ModelBench, time_steps


@dataclass(frozen=True, kw_only=True)
class CheckpointingBench(ModelBench):
    """A workload whose blocks are checkpointed; otherwise as in the case `model`."""

    size: str = swept("xl", sweep=("small", "medium", "large", "xl", "2.7B"), quick="quick")
    num_layers: int | None = swept(None, quick=8)
    """Number of blocks (default: the size's)."""
    context_length: int = swept(1024, sweep=(256, 512, 1024, 2048), quick=16)
    batch_size: int = swept(4, quick=2)
    mode: Literal["forward_backward", "train_step"] = swept("forward_backward")
    """train_step: the time includes the optimizer step; memory is that of forward and backward."""
    precision: Literal["fp32", "bf16", "fp16"] = swept("bf16", sweep=("fp32", "bf16"), quick="fp32")
    attention: str = swept("flash_triton", sweep=("naive", "flash_triton"), quick="flash_torch")
    activation_checkpointing: str = swept(
        "none", "block", "block_but_attention", "every_2", "every_4",
        *(f"groups_{k}" for k in (2, 3, 4, 6, 8, 12, 16, 24, 48)),
        quick=("none", "block", "block_but_attention", "every_2", "groups_2", "groups_3", "groups_4", "groups_8"),
    )  # fmt: skip
    """none; block: groups of one; first_K: the first K blocks; every_K: every K-th; groups_K: K blocks together;
    block_but_attention, and so on: attention's outputs are kept too."""
    warmup: int = swept(3, quick=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, "", 1, "num_layers")
        object.__setattr__(self, "num_layers", self.shape.num_layers)

    def check_checkpointed(self) -> None:
        """Do nothing: the case checks, because some of the default groups are too large for a small model."""

    def check_blocks(self) -> None:
        super().check_checkpointed()

    @property
    def shape(self) -> ModelShape:
        shape = super().shape
        return dataclasses.replace(shape, num_layers=self.num_layers or shape.num_layers)


def measure(config: CheckpointingBench) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration as it ran; the time of a step, and the memory of a forward and a backward pass.

    Memory is counted beyond weights and gradients: `held_bytes` after forward, `peak_bytes` until backward ends.
    """
    bench = Workbench(config)
    for _ in range(config.warmup):
        bench.step()
    metrics = time_steps(bench, config.steps)
    # Allocate the gradients now, so that they are not part of the memory of a pass.
    bench.backward(bench.forward())
    bench.model.zero_grad(set_to_none=False)
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(bench.device)
        before = requested_gpu_bytes(bench.device)
        loss = bench.forward()
        metrics["held_bytes"] = requested_gpu_bytes(bench.device) - before
        bench.backward(loss)
        metrics["peak_bytes"] = requested_gpu_bytes(bench.device, peak=True) - before
        metrics["peak_memory_bytes"] = torch.cuda.max_memory_allocated(bench.device)
    elif not config.compile:
        with LiveBytes() as live:
            loss = bench.forward()
            metrics["held_bytes"] = live.now
            bench.backward(loss)
        metrics["peak_bytes"] = live.peak
    return bench.read_back(), metrics


def _counted(config: CheckpointingBench) -> dict[str, Any]:
    """The memory counted for eager blocks; {} for compiled blocks and for an unknown kernel."""
    try:
        held, peak = counted_activations(config.job, on_gpu=select_device(config.device).type == "cuda")
    except ValueError:
        return {}
    how = (config.shape, config.batch_size, config.context_length, config.precision, config.attention)
    return {"predicted_held_bytes": held, "predicted_bytes": peak, "best_group": best_group(*how)}


def measure_all(case: Case, configs: Sequence[CheckpointingBench]) -> Iterable[Row]:
    """Rows, each with its policy, its K (null without checkpointing) and the counted memory, even after an oom."""
    for config in configs:
        kind, k = config.train_config.checkpointed or ("none", None)
        kept = BUT_ATTENTION if config.train_config.keeps_attention else ""
        policy = {"policy": "groups" if (kind, k, kept) == ("every", 1, "") else kind + kept, "K": k}
        for row in each(measure)(case, [config]):
            yield replace(row, config={**row.config, **policy}, metrics={**row.metrics, **_counted(config)})


CASE = Case(
    name="checkpointing",
    config=CheckpointingBench,
    variant=lambda config: f"{config.activation_checkpointing} {numerics(config)}",
    rows=measure_all,
    isolated=True,
    check=CheckpointingBench.check_blocks,
)
