"""The case `attention`: time and memory of plain attention without heads, eager and compiled.

These are the handout's pytorch_attention and torch_compile: batch 8, 100 forward and 100 backward passes in float32.
The handout leaves the mask open; here it is causal, as in a language model, unless `is_causal` says otherwise.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ...config.checks import check_types, require
from ...kernels.attention import get_attention
from ...kernels.attention.contract import attention_flops
from ...machine.hardware import DTYPES, use_device
from ...planner.accounting import naive_attention_bytes
from ...training.metrics import summarise
from ..attention import WORKS, check_kernel, check_sizes, resolve_device
from ..case import Case, swept
from ..instruments.timing import Stopwatch
from ..outcome import each
from ..row import Row


@dataclass(frozen=True, kw_only=True)
class AttentionBench:
    """Attention at a length and a head size."""

    kernel: str = swept("naive", also="kernels")
    """Attention kernel by its registered name."""
    batch_size: int = swept(8, quick=2)
    """Sequences per batch, with one head each."""
    head_size: int = swept(16, 32, 64, 128, quick=(8, 16))
    """Length of each query, key and value vector."""
    length: int = swept(
        256, 1024, 4096, 8192, 16384, sweep=(256, 1024, 4096, 8192, 16384, 32768, 65536), quick=(16, 32)
    )
    """Number of queries and of keys; --sweep adds 32,768, which fills a GPU of 140 GB, and 65,536, which does not."""
    compile: bool = swept(False, True, quick=False)
    """Use torch.compile."""
    is_causal: bool = swept(True, sweep=(True, False))
    """Whether query i sees only the keys up to i."""
    dtype: Literal["bf16", "fp16", "fp32"] = swept("fp32")
    """Type of q, k and v."""
    device: str = swept("auto", quick="cpu")
    """auto, cpu, cuda or cuda:N; auto takes the GPU if there is one."""
    warmup: int = swept(10, quick=1)
    """Passes before the measured ones."""
    repeats: int = swept(100, quick=3)
    """Number of measured forward passes, and of backward passes."""

    def __post_init__(self) -> None:
        check_types(self, "")
        check_kernel(self.kernel)
        check_sizes(self, "batch_size", "length", "head_size")
        for name, least in (("warmup", 0), ("repeats", 1)):
            require(getattr(self, name) >= least, name, getattr(self, name), f"at least {least}")
        object.__setattr__(self, "device", resolve_device(self.device))


def measure_one(config: AttentionBench) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration as it ran, and its metrics."""
    device = use_device(config.device)
    held = _held_bytes(device)
    attention: Any = get_attention(config.kernel)
    if config.compile:
        torch._dynamo.reset()  # otherwise the next size would be compiled for all sizes
        attention = torch.compile(attention, dynamic=False)
    times, shape, in_use = _time_passes(attention, config, Stopwatch(device))
    metrics: dict[str, Any] = {}
    for name, laps in times.items():
        flops = attention_flops(shape, shape[-2], config.is_causal, WORKS[name])
        metrics[f"{name}_ms"] = summarise(laps)
        metrics[f"{name}_tflops"] = flops / metrics[f"{name}_ms"]["p50"] / 1e9
    if device.type == "cuda":
        metrics["memory_before_backward_bytes"] = in_use - held
        metrics["peak_memory_bytes"] = torch.cuda.max_memory_allocated(device) - held
    ran = dict(zip(("batch_size", "length", "head_size"), shape, strict=True))
    ran |= {"compile": hasattr(attention, "_torchdynamo_orig_callable"), "repeats": len(times["forward"])}
    return {**ran, "device": str(device)}, metrics | {"timer": Stopwatch.METHOD}


def _time_passes(
    attention: Any, config: AttentionBench, watch: Stopwatch
) -> tuple[dict[str, list[float]], torch.Size, int]:
    """Times of forward and backward passes in ms, the output's shape, and the GPU's bytes in use between the two."""
    torch.manual_seed(0)
    shape, dtype = (config.batch_size, config.length, config.head_size), DTYPES[config.dtype]
    q, k, v = (torch.randn(shape, device=config.device, dtype=dtype, requires_grad=True) for _ in range(3))
    do = torch.randn(shape, device=config.device, dtype=dtype)
    times: dict[str, list[float]] = {"forward": [], "backward": []}
    in_use, o = 0, q
    for i in range(config.warmup + config.repeats):
        del o  # and with it what its forward pass has saved
        q.grad = k.grad = v.grad = None
        watch.lap_ms()
        o = attention(q, k, v, config.is_causal)
        forward_ms = watch.lap_ms()
        if o.is_cuda:
            in_use = torch.cuda.memory_allocated(o.device)
        watch.lap_ms()
        o.backward(do)
        backward_ms = watch.lap_ms()
        if i >= config.warmup:
            times["forward"].append(forward_ms)
            times["backward"].append(backward_ms)
    return times, o.shape, in_use


def _held_bytes(device: torch.device) -> int:
    """Bytes that a GPU's allocator holds from before, and for cuBLAS: a workspace per thread from its first product."""
    if device.type != "cuda":
        return 0
    x = torch.ones(2, 2, device=device, requires_grad=True)
    (x @ x).sum().backward()
    del x
    return torch.cuda.memory_allocated(device)


def variant(config: AttentionBench) -> str:
    """The kernel, and how it runs."""
    return f"{config.kernel} {'compiled' if config.compile else 'eager'}"


def measure(configs: Sequence[AttentionBench]) -> Iterable[Row]:
    """Rows, each with the memory that eager attention needs by count, even if there was not enough."""
    for row in each("attention", variant, measure_one)(configs):
        if row.config["kernel"] == "naive":
            length, on_gpu = row.config["length"], row.config["device"] != "cpu"
            sizes = {name: row.config[name] for name in ("head_size", "is_causal")}
            counted = naive_attention_bytes(row.config["batch_size"], length, length, **sizes, on_gpu=on_gpu)
            row = replace(row, metrics={**row.metrics, "counted_bytes": counted})
        yield row


CASE = Case(
    name="attention",
    about="Plain attention, eager and compiled: 100 forward and 100 backward passes, and the memory between them.",
    module=__name__,
    config=AttentionBench,
    variant=variant,
    measure=measure,
)
