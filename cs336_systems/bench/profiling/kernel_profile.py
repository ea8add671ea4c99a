"""The profile `kernels`: the time of a forward pass and of a training step, kernel by kernel."""

import math
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from cs336_basics.attention import visible_keys, without_autocast
from cs336_basics.files import replaced

from ...config.checks import require_at_least, without_groups
from ...machine.hardware import check_precision, select_device
from ...planner.accounting import PLAIN_ATTENTION, attention_product_flops, softmax_flops
from ..case import Case, swept
from ..instruments.timing import Stopwatch, wait_for
from ..instruments.trace import named_range, read_trace
from ..outcome import Found, each
from ..workload import Workbench, Workload
from .kernel_totals import add_up, busy_ms, kernel_metrics
from .kernel_trace import SCORES, SOFTMAX, VALUES, cpu_kernels, gpu_kernels


@dataclass(frozen=True, kw_only=True)
class KernelProfile(Workload):
    """A workload, and how its kernels are profiled. `Workload` explains the inherited fields."""

    size: str = swept("small", quick="quick")
    context_length: int = swept(512, quick=32)
    batch_size: int = swept(4, quick=2)
    mode: Literal["forward", "forward_backward", "train_step"] = swept("forward", "train_step", also="modes")
    device: str = swept("auto", quick="cpu")
    warmup: int = swept(5, quick=1)
    """Steps before the profiled ones."""
    steps: int = swept(3, quick=1)
    """Profiled steps."""
    tool: Literal["torch", "nsys"] = "torch"
    """torch (torch.profiler) or nsys (Nsight Systems)."""
    folder: str = swept(".", beside=".")
    """Folder of the trace."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, "", 1, "warmup", "steps")

    def check(self) -> None:
        """Raise ValueError if the device does not compute in the precision, or the tool does not see it."""
        device = select_device(self.device)
        with without_groups():
            check_precision(device, self.precision)
        if self.tool == "nsys":
            from .nsys import check_nsys

            check_nsys(device)


def profile(config: KernelProfile) -> Found:
    """Profile with the configuration's tool; return the configuration as it ran, and metrics."""
    from .nsys import profile_with_nsys

    Path(config.folder).mkdir(parents=True, exist_ok=True)
    return profile_with_torch(config) if config.tool == "torch" else profile_with_nsys(config)


def annotated_attention(
    q: Float[Tensor, "... queries d"],
    k: Float[Tensor, "... keys d"],
    v: Float[Tensor, "... keys d"],
    is_causal: bool = False,
) -> Float[Tensor, "... queries d"]:
    """`cs336_basics.attention.scaled_dot_product_attention`, operation by operation, each part in a named range."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    with without_autocast(q.device.type):
        with named_range(SCORES):
            scores = (q.to(dtype) / math.sqrt(q.shape[-1])) @ k.to(dtype).mT
            if is_causal:
                scores = scores.masked_fill(~visible_keys(q.shape[-2], k.shape[-2], q.device), float("-inf"))
        with named_range(SOFTMAX):
            weights = scores.softmax(dim=-1)
        with named_range(VALUES):
            return (weights @ v.to(dtype)).to(q.dtype)


def annotate_attention(bench: Workbench) -> bool:
    """Give the model annotated attention. False and no change if its attention is another kernel or compiled.

    A range inside a compiled function would break its graph.
    """
    if bench.config.attention not in PLAIN_ATTENTION or bench.config.compile:
        return False
    blocks: list[Any] = list(bench.model.layers)
    for block in blocks:
        block.attn.attention = annotated_attention
    return True


def warm_bench(config: KernelProfile) -> tuple[Workbench, bool]:
    """The workload built and warmed up, and whether its attention has ranges."""
    bench = Workbench(config)
    annotated = annotate_attention(bench)
    with named_range("warm-up"):
        for _ in range(config.warmup):
            bench.step()
        wait_for(bench.device)
    return bench, annotated


def wall_times(bench: Workbench, steps: int) -> dict[str, Any]:
    """Without a profiler: the time of a step in ms by the host's clock, and of each phase, with a wait after each."""
    watch = Stopwatch(bench.device)
    for _ in range(steps):
        bench.step()
    step_ms = watch.lap_ms() / steps
    phases = {phase: sum(times) / steps for phase, times in bench.time_phases(steps).items()}
    return {"wall_ms": step_ms, "phase_wall_ms": phases}


def attention_operations(workload: Workload) -> dict[str, int]:
    """Operations of a forward pass in each range of naive attention: two dense products, and the softmax."""
    shape, batch, length = workload.shape, workload.batch_size, workload.context_length
    product = attention_product_flops(shape, batch, length)
    return {SCORES: product, SOFTMAX: softmax_flops(shape, batch, length), VALUES: product}


def profile_with_torch(config: KernelProfile) -> Found:
    """Profile with `torch.profiler`; the trace is `trace_MODE.json.gz` in the folder."""
    trace = Path(config.folder, f"trace_{config.mode}.json.gz")
    trace.unlink(missing_ok=True)  # of an earlier run, which this one may fail to replace
    bench, annotated = warm_bench(config)
    times = wall_times(bench, config.steps)
    profiled_ms = _record(bench, config.steps, trace)
    events = read_trace(trace)
    on_gpu = bench.device.type == "cuda"
    kernels = gpu_kernels(events) if on_gpu else cpu_kernels(events)
    totals = add_up(kernels, config.steps)
    metrics = times | {
        "profiled_wall_ms": profiled_ms,
        "kernel_ms": sum(total.ms for total in totals),
        "busy_ms": busy_ms(kernels, config.steps) if on_gpu else None,
        "streams": len({kernel.stream for kernel in kernels}),
        "attention_operations": attention_operations(bench.config),
    }
    return bench.read_back() | {"attention_ranges": annotated}, metrics | kernel_metrics(totals, config.mode)


def _record(bench: Workbench, steps: int, trace: Path) -> float:
    """Write the trace of some steps; return the time of a step in ms, under the profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if bench.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    # In its first step the profiler sets itself up; that step is not recorded.
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=steps, repeat=1)
    times = []
    with torch.profiler.profile(activities=activities, schedule=schedule) as profiler:
        for _ in range(steps + 1):
            watch = Stopwatch(bench.device)
            bench.step()
            # Wait, because a kernel still running when recording begins would have no launch.
            times.append(watch.lap_ms())
            profiler.step()
    with replaced(trace) as beside:
        profiler.export_chrome_trace(str(beside))
    return sum(times[1:]) / steps


CASE = Case(
    name="profile-kernels",
    config=KernelProfile,
    variant=attrgetter("mode"),
    rows=each(profile),
    isolated=True,
    check=KernelProfile.check,
)
