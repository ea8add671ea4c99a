"""The case `residuals`: the tensors that one TransformerBlock saves for its backward pass, by the part that saves them.

Rows also have the bytes that `accounting.activation_bytes` counts for the eager block. In compiled code the partitioner
decides: it recomputes cheap things in the backward pass instead of keeping them.
"""

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from cs336_basics.model import RotaryEmbedding, TransformerBlock

from ...kernels.attention import get_attention
from ...machine.hardware import autocast, check_precision, requested_gpu_bytes, use_device
from ...planner.accounting import activation_bytes, weight_copy_bytes
from ...training.build import Compiled
from ..case import Case, swept
from ..instruments.saved_tensors import SavedTensors
from ..outcome import each
from ..workload import Workload, numerics

_LISTED = 32  # number of kinds of tensors in a row, the largest first
_PARTS = {"attn.q_proj": "qkv_proj", "attn.k_proj": "qkv_proj", "attn.v_proj": "qkv_proj", "attn.rope": "rope",
          "attn": "attention", "attn.output_proj": "output_proj", "": "compiled"}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ResidualsBench:
    """A block, its input, and its numerics."""

    size: str = swept("xl", sweep=("small", "medium", "large", "xl", "2.7B"), quick="quick")
    """Named size of the model whose block it is."""
    context_length: int = swept(512, sweep=(256, 512, 1024, 2048), quick=16)
    """Tokens per sequence."""
    batch_size: int = swept(4, quick=2)
    """Sequences per batch."""
    precision: Literal["fp32", "bf16", "fp16"] = swept("fp32", "bf16")
    """Autocast type; weights are float32."""
    compile: bool = swept(False, True, quick=False)
    """Use torch.compile."""
    attention: str = swept("naive", "flash_triton", quick=("naive", "flash_torch"))
    """Attention kernel by its registered name."""
    device: str = swept("auto", quick="cpu")
    """auto, cpu, cuda or cuda:N."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", self.workload.device)

    @property
    def workload(self) -> Workload:
        return Workload(**{field.name: getattr(self, field.name) for field in dataclasses.fields(self)})


class BlockBench:
    """The block of a configuration and its input, the same for equal configurations."""

    def __init__(self, config: ResidualsBench) -> None:
        self.config, self.device = config, use_device(config.device)
        check_precision(self.device, config.precision)
        shape = config.workload.shape
        torch.manual_seed(0)
        with self.device:
            rope = RotaryEmbedding(config.context_length, shape.head_size, shape.rope_theta)
            attention = get_attention(config.attention)
            self.block = TransformerBlock(shape.d_model, shape.num_heads, shape.d_ff, rope, attention)
            self.x = torch.randn(config.batch_size, config.context_length, shape.d_model, requires_grad=True)
        if config.compile:
            self.block.forward = Compiled(self.block.forward)  # type: ignore[method-assign]
        self.forward().sum().backward()  # compiles, tunes, and allocates the libraries' workspaces

    def forward(self) -> Tensor:
        with autocast(self.device, self.config.precision):
            return self.block(self.x)

    def saved(self) -> SavedTensors:
        with SavedTensors(self.block, [self.x], named=not self.config.compile) as saved:
            self.forward()
        return saved


def measure(config: ResidualsBench) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration as it ran, and the saved bytes: measured, and counted for the eager block."""
    bench = BlockBench(config)
    block, on_gpu = bench.block, bench.device.type == "cuda"
    metrics: dict[str, Any] = {}
    if on_gpu:  # bytes that a forward pass adds: at its end, and at its peak
        before = requested_gpu_bytes(bench.device)
        torch.cuda.reset_peak_memory_stats(bench.device)
        output = bench.forward()
        metrics["held_bytes"] = requested_gpu_bytes(bench.device) - before
        del output
        metrics["peak_bytes"] = requested_gpu_bytes(bench.device, peak=True) - before
    saved = bench.saved()
    activations = [tensor for tensor in saved.found if tensor.kind == "activation"]
    tensors: list[dict[str, Any]] = []
    for tensor, count in Counter(activations).items():
        operation = tensor.operation or (config.attention if tensor.module else "compiled")
        dtype = str(tensor.dtype).removeprefix("torch.")
        line = {"what": f"{tensor.module} {operation}".strip(), "shape": list(tensor.shape), "dtype": dtype}
        tensors.append({**line, "count": count, "bytes": tensor.bytes})  # the bytes of one of them
    metrics |= {
        "saved_bytes": saved.bytes("activation"),
        "input_bytes": saved.bytes("input"),
        "weight_copy_bytes": saved.bytes("weight copy"),
        "parts": saved.by(lambda tensor: _PARTS.get(tensor.module, tensor.module.split(".")[0])),
        "tensors": sorted(tensors, key=lambda line: -line["count"] * line["bytes"])[:_LISTED],
        "num_tensors": len(activations),
    }
    shape, precision = config.workload.shape, config.precision
    try:  # counted for the eager block, even if a compiled one is measured
        parts = activation_bytes(shape, config.batch_size, config.context_length, precision, config.attention)
    except ValueError:  # an unknown kernel
        pass
    else:
        metrics |= {"counted_parts": parts, "counted_bytes": sum(parts.values())}
        metrics["counted_weight_copy_bytes"] = weight_copy_bytes(shape, precision)
    sizes = {"d_model": block.ln1.weight.shape[0], "d_ff": block.ffn.w1.weight.shape[0]}
    return {**sizes, "num_heads": block.attn.num_heads, "device": str(bench.device)}, metrics


CASE = Case(
    name="residuals",
    config=ResidualsBench,
    variant=numerics,
    rows=each(measure),
    isolated=True,
)
