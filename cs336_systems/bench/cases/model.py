"""Steps of a language model at named sizes and lengths: the cases `model` and `warmup`.

`warmup` measures the first steps of a process, after none, one, two or five warm-up steps.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from ...config.checks import require_at_least
from ...machine.garbage import gc_frozen
from ...machine.hardware import device_peak_flops
from ...planner.accounting import forward_flops, training_flops
from ...training.metrics import summarise
from ..case import Case, swept
from ..instruments.timing import Stopwatch
from ..outcome import each
from ..workload import Workbench, Workload, numerics


@dataclass(frozen=True, kw_only=True)
class ModelBench(Workload):
    """A workload and its numbers of steps. `Workload` explains the inherited fields."""

    size: str = swept("small", sweep=("small", "medium", "large", "xl", "2.7B", "10B"), quick="quick")
    context_length: int = swept(256, sweep=(128, 256, 512, 1024), quick=16)
    mode: Literal["forward", "forward_backward", "train_step"] = swept("forward", "forward_backward", "train_step")
    precision: Literal["fp32", "bf16", "fp16"] = swept("fp32", sweep=("fp32", "bf16"))
    compile: bool = swept(False, sweep=(False, True))
    attention: str = swept("naive", sweep=("naive", "flash_triton", "sdpa"))
    device: str = swept("auto", quick="cpu")
    warmup: int = swept(5, quick=1)
    """Steps before the measured ones."""
    steps: int = swept(10, quick=2)
    """Measured steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("warmup", 0), ("steps", 1)):
            require_at_least(self, "", least, name)


def measure(config: ModelBench) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration as it ran, and its metrics.

    Steps are timed as a whole (`step_ms`), then phase by phase. The host waits for the device after each phase and
    cannot run ahead, so the phases may add up to more than a step.
    """
    bench = Workbench(config)
    for _ in range(config.warmup):
        bench.step()
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(bench.device)
    metrics = time_steps(bench, config.steps)
    step_ms = metrics["step_ms"]["p50"]
    count = forward_flops if config.mode == "forward" else training_flops
    flops = count(config.shape, config.batch_size, config.context_length) / step_ms * 1e3
    peak = device_peak_flops(bench.device, config.precision)
    metrics["tokens_per_s"] = config.batch_size * config.context_length / step_ms * 1e3
    metrics |= {"tflops": flops / 1e12, "mfu": None if peak is None else flops / peak}
    if bench.device.type == "cuda":
        metrics["peak_memory_bytes"] = torch.cuda.max_memory_allocated(bench.device)
    with gc_frozen():
        metrics |= {f"{phase}_ms": summarise(times) for phase, times in bench.time_phases(config.steps).items()}
    return {**bench.read_back(), "steps": len(metrics["steps_ms"])}, metrics


def time_steps(bench: Workbench, steps: int) -> dict[str, Any]:
    """Metrics of whole steps: their times in ms."""
    steps_ms = []
    with gc_frozen():
        watch = Stopwatch(bench.device)
        for _ in range(steps):
            bench.step()
            steps_ms.append(watch.lap_ms())
    return {"step_ms": summarise(steps_ms), "steps_ms": steps_ms, "timer": Stopwatch.METHOD}


@dataclass(frozen=True, kw_only=True)
class WarmupBench(ModelBench):
    """A workload after some warm-up steps."""

    mode: Literal["forward", "forward_backward", "train_step"] = swept(
        "forward_backward", sweep=("forward", "forward_backward", "train_step")
    )
    warmup: int = swept(0, 1, 2, 5, quick=(0, 1))


CASE = Case(
    name="model",
    config=ModelBench,
    variant=lambda config: " ".join((config.mode, numerics(config))),
    rows=each(measure),
    isolated=True,
)
WARMUP = Case(
    name="warmup",
    config=WarmupBench,
    variant=lambda config: f"{config.warmup} warm-up steps",
    rows=each(measure),
    isolated=True,
)
PRESETS = {WARMUP.name: WARMUP}
