"""The profile `kernels`: the time of a forward pass and of a training step, kernel by kernel."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from cs336_basics.files import replaced

from ...config.checks import require, require_at_least
from ...machine.hardware import check_precision, select_device, use_device
from ...planner.accounting import attention_product_flops, softmax_flops
from ..instruments.timing import Stopwatch, wait_for
from ..instruments.trace import named_range, read_trace
from ..outcome import current_gpu_state, failure, free_memory, with_gpu_states
from ..row import Row, append_row
from ..workload import PHASES, Workbench, Workload
from .annotated_attention import SCORES, SOFTMAX, VALUES, annotate_attention
from .kernel_totals import KERNELS_FILE, SPANS, KernelTotal, add_up, busy_ms, kernel_metrics, write_kernels
from .kernel_trace import cpu_kernels, gpu_kernels

logger = logging.getLogger(__name__)
CASE = "profile-kernels"
MODES = ("forward", "train_step")
QUICK: dict[str, Any] = dict(size="quick", context_length=32, batch_size=2, device="cpu")


@dataclass(frozen=True, kw_only=True)
class KernelProfile:
    """A workload to profile in some modes, for `steps` steps after `warmup` others."""

    workload: Workload
    modes: tuple[str, ...] = MODES
    warmup: int = 5
    steps: int = 3

    def __post_init__(self) -> None:
        for mode in self.modes or ("",):
            require(mode in SPANS, "mode", mode, f"one or more of {', '.join(SPANS)}")
        require_at_least(self, "", 1, "warmup", "steps")

    def workload_of(self, mode: str) -> Workload:
        """The workload in one of the modes."""
        return replace(self.workload, mode=mode)  # type: ignore[arg-type]

    def check_device(self) -> torch.device:
        """The device. Raises ValueError if it is not there or does not compute in the precision."""
        try:
            device = select_device(self.workload.device)
            check_precision(device, self.workload.precision)
        except ValueError as error:
            raise ValueError(str(error).replace("train.", "")) from error
        return device


Profiled = tuple[dict[str, Any], dict[str, Any], list[KernelTotal]]
"""The configuration that ran (`Workbench.read_back`), metrics, and the totals of the kernels."""


Tool = Callable[[KernelProfile, str, Path], Profiled]
"""Profiles one mode, and leaves its trace in a folder."""


def measure(
    config: KernelProfile, out: Path, profile: Tool, rows: Path | None = None
) -> Iterator[tuple[Row, list[KernelTotal]]]:
    """Profile mode by mode with a tool; append a row per mode to a file, and yield it with its kernels.

    rows: the file (default: `rows.jsonl` in `out`). A mode that does not fit into memory gives a row of status oom.
    """
    modes = list(dict.fromkeys(config.modes))
    for number, mode in enumerate(modes, 1):
        logger.info("profiling %d of %d: %s of size %s", number, len(modes), mode, config.workload.size)
        given = {"warmup": config.warmup, "steps": config.steps}
        totals: list[KernelTotal] = []
        try:
            if config.workload.device.startswith("cuda"):
                use_device(config.workload.device)  # current_gpu_state reads this device
            before = current_gpu_state()
            ran, metrics, totals = profile(config, mode, out)
            row = Row(case=CASE, variant=mode, config=ran | given, metrics=metrics)
            row = with_gpu_states(row, before, current_gpu_state())
        except Exception as error:
            status, reason = failure(error)
            if status != "oom":
                raise
            asked = asdict(config.workload_of(mode)) | asdict(config.workload.shape) | given
            row = Row(case=CASE, variant=mode, config=asked, status=status, error=reason)
        append_row(rows or out / "rows.jsonl", row)
        free_memory()
        yield row, totals


def profile_alone(config: KernelProfile, profile: Tool, out: Path, rows: Path) -> Row:
    """Profile a configuration with one mode; its trace and `kernels.csv` are written to `out`."""
    ((row, totals),) = measure(config, out, profile, rows)
    write_kernels(out / KERNELS_FILE, {row.variant: totals})
    return row


def warm_bench(config: KernelProfile, mode: str) -> tuple[Workbench, bool]:
    """The workload built and warmed up, and whether its attention has ranges."""
    bench = Workbench(config.workload_of(mode))
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
    laps: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for _ in range(steps):
        bench.step(after=lambda phase: laps[phase].append(watch.lap_ms()))
    return {"wall_ms": step_ms, "phase_wall_ms": {phase: sum(laps[phase]) / steps for phase in bench.phases}}


def attention_operations(workload: Workload) -> dict[str, int]:
    """Operations of a forward pass in each range of naive attention: two dense products, and the softmax."""
    shape, batch, length = workload.shape, workload.batch_size, workload.context_length
    product = attention_product_flops(shape, batch, length)
    return {SCORES: product, SOFTMAX: softmax_flops(shape, batch, length), VALUES: product}


def profile_with_torch(config: KernelProfile, mode: str, out: Path) -> Profiled:
    """Profile one mode with `torch.profiler`; the trace is written to `out`, as `trace_MODE.json.gz`."""
    trace = out / f"trace_{mode}.json.gz"
    trace.unlink(missing_ok=True)  # of an earlier run, which this one may fail to replace
    bench, annotated = warm_bench(config, mode)
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
    ran = bench.read_back() | {"tool": "torch", "attention_ranges": annotated}
    return ran, metrics | kernel_metrics(totals, mode), totals


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
