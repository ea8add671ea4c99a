"""Kernel times in numbers: totals per kernel, shares per class, and the parts of attention."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..instruments.trace import length, merge
from .kernel_trace import ATTENTION_RANGES, OUTSIDE, Kernel

# The first pattern found in the name of a kernel, or of an operator on a CPU, decides the class. They know the names
# of PyTorch, cuBLAS, cuDNN, CUTLASS, NCCL, Triton, TorchInductor and this project's own kernels.
_PATTERNS: tuple[tuple[str, str], ...] = (
    # The prefix of a TorchInductor kernel names the kind of its loop, the rest the operators that it comes from or
    # stands beside. A reduction fused around a softmax counts as the softmax.
    ("attention", r"^triton_tem_\w*flex"),
    ("softmax", r"^triton_(red|per)_fused\w*softmax"),
    ("elementwise", r"^triton_poi_"),
    ("reduction", r"^triton_(red|per)_"),
    ("matmul", r"^triton_(tem|mm)_"),
    ("communication", r"nccl|PtoP|^c10d::|all_reduce|all_gather|reduce_scatter"),
    ("optimizer", r"multi_tensor_apply|fused_adam|FusedAdam|_foreach_|distributed_fused"),
    ("attention", r"flash|fmha|sdpa|scaled_dot_product|efficient_attention|flex_attention|(?i:attention)|::mha_"),
    # This project's Triton and CUDA kernels; \b, because others have _forward_kernel in their names.
    ("attention", r"\b(hopper_)?(forward|backward|dq|dkv|prepare|gradients|finish)_kernel\b"),
    ("attention", r"\b(row_statistics|key_gradients|query_gradients)\b"),
    ("softmax", r"(?i:softmax)"),
    ("matmul", r"cutlass|(?i:gemm)|(?i:gemv)|cublas|nvjet|xmma|wgmma|(?i:splitk)|mkldnn::_linear|mkl::_mkl_linear"),
    ("matmul", r"^aten::(mm|bmm|addmm|baddbmm|addbmm|addmv|mv|dot|linear|matmul|einsum)$"),
    ("copy", r"(?i:memcpy)|(?i:memset)|copy_kernel|CatArray|FillFunctor|_copy_from"),
    ("copy", r"^aten::(copy_|cat|stack|clone|contiguous|to|_to_copy|fill_|zero_|zeros|zeros_like|ones|full)$"),
    ("reduction", r"reduce_kernel|DeviceReduce|(?i:layer_?norm)|(?i:rms_?norm)|segmented_reduce"),
    ("reduction", r"^aten::(sum|mean|amax|amin|max|min|argmax|logsumexp|norm|linalg_vector_norm|var|prod|cumsum)$"),
    ("elementwise", r"elementwise|triu_tril|tril_kernel|triu_kernel"),
    (
        "elementwise",
        r"^aten::(add|sub|rsub|mul|div|neg|pow|square|sqrt|rsqrt|exp|log|silu|sigmoid|tanh|abs|where|masked_fill|"
        r"bitwise_not|logical_not|tril|triu|lt|le|gt|ge|eq|ne|clamp|maximum|minimum|reciprocal|lerp|addcmul|addcdiv|"
        r"silu_backward)_?$",
    ),
)
CLASSES = ("matmul", "attention", "softmax", "reduction", "elementwise", "copy", "communication", "optimizer", "other")
TOP = 10
SPANS: dict[str, dict[str, tuple[str, ...]]] = {
    "forward": {"inference": ("forward", OUTSIDE)},
    "forward_backward": {
        "forward": ("forward",),
        "backward": ("backward",),
        "forward + backward": ("forward", "backward", OUTSIDE),
    },
    "train_step": {
        "forward": ("forward",),
        "backward": ("backward",),
        "optimizer": ("optimizer",),
        "forward + backward": ("forward", "backward"),
        "training step": ("forward", "backward", "optimizer", OUTSIDE),
    },
}
"""For each mode the spans of a step, and the phases that count in each span."""


def kernel_class(name: str, phase: str = "") -> str:
    """The class of a kernel, one of CLASSES. In the phase `optimizer`, everything but communication is optimizer."""
    for found, pattern in _PATTERNS:
        if re.search(pattern, name):
            return "optimizer" if phase == "optimizer" and found != "communication" else found
    return "optimizer" if phase == "optimizer" else "other"


@dataclass(frozen=True)
class KernelTotal:
    """All calls of one kernel in one phase and range of attention: calls per step, and their time per step."""

    name: str
    phase: str
    part: str | None
    calls: float
    ms: float

    @property
    def kind(self) -> str:
        return kernel_class(self.name, self.phase)


def add_up(kernels: Iterable[Kernel], steps: int) -> list[KernelTotal]:
    """The totals per step of the kernels of `steps` steps, the longest first."""
    found: dict[tuple[str, str, str | None], list[float]] = {}
    for kernel in kernels:
        found.setdefault((kernel.name, kernel.phase, kernel.part), []).append(kernel.duration_us)
    totals = [KernelTotal(*key, len(times) / steps, sum(times) / 1e3 / steps) for key, times in found.items()]
    return sorted(totals, key=lambda total: -total.ms)


def busy_ms(kernels: Iterable[Kernel], steps: int) -> float:
    """Time of a step during which at least one kernel was running; overlaps on several streams count once."""
    return length(merge((k.start_us, k.start_us + k.duration_us) for k in kernels)) / 1e3 / steps


def span_metrics(totals: Iterable[KernelTotal], phases: Sequence[str]) -> dict[str, Any]:
    """Kernel time of some phases together, its classes in ms and as shares of 1, and the kernels with the most time."""
    chosen = [total for total in totals if total.phase in phases]
    whole = sum(total.ms for total in chosen)
    of_class = {cls: sum(total.ms for total in chosen if total.kind == cls) for cls in CLASSES}
    by_kernel: dict[tuple[str, str], list[float]] = {}
    for total in chosen:
        sums = by_kernel.setdefault((total.name, total.kind), [0.0, 0.0])
        sums[0] += total.calls
        sums[1] += total.ms
    longest = sorted(by_kernel.items(), key=lambda item: -item[1][1])[:TOP]
    return {
        "kernel_ms": whole,
        "class_ms": of_class,
        "share": {cls: ms / whole if whole else 0.0 for cls, ms in of_class.items()},
        "top": [
            {"kernel": name, "class": kind, "calls": calls, "ms": ms, "share": ms / whole if whole else 0.0}
            for (name, kind), (calls, ms) in longest
        ],
    }


def kernel_metrics(totals: Sequence[KernelTotal], mode: str) -> dict[str, Any]:
    """All numbers that follow from the kernels of a step in this mode.

    `attention` has the time inside attention in ms, by range, phase and class. It is empty without such ranges.
    """
    attention: dict[str, dict[str, dict[str, float]]] = {}
    for total in totals:
        if total.part in ATTENTION_RANGES:
            of_class = attention.setdefault(total.part, {}).setdefault(total.phase, {})
            of_class[total.kind] = of_class.get(total.kind, 0.0) + total.ms
    return {
        "spans": {name: span_metrics(totals, phases) for name, phases in SPANS[mode].items()},
        "outside_ms": sum(total.ms for total in totals if total.phase == OUTSIDE),
        "attention": attention,
    }
