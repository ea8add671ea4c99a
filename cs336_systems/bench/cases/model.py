"""The case `model`: a language model's forward pass, backward pass and training step, at named sizes and lengths."""

from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

from ...config.checks import require_at_least
from ...machine.garbage import objects_set_aside
from ...machine.hardware import device_peak_flops
from ...planner.accounting import forward_flops, training_flops
from ...training.metrics import summarise
from ..case import Case, swept
from ..instruments.timing import Stopwatch
from ..outcome import each
from ..workload import Workbench, Workload


@dataclass(frozen=True, kw_only=True)
class ModelBench(Workload):
    """A workload, and how often it is repeated."""

    size: str = swept("small", sweep=("small", "medium", "large", "xl", "2.7B", "10B"), quick="quick")
    """Named size of the model: small, medium, large, xl, 2.7B, 10B or 8B; quick for a tiny one."""
    context_length: int = swept(256, sweep=(128, 256, 512, 1024), quick=16)
    """Tokens per sequence."""
    mode: Literal["forward", "forward_backward", "train_step"] = swept("forward", "forward_backward", "train_step")
    """forward: only the loss, without gradients. train_step: with the optimizer step."""
    precision: Literal["fp32", "bf16", "fp16"] = swept("fp32", sweep=("fp32", "bf16"))
    """Autocast type; weights are float32."""
    compile: bool = swept(False, sweep=(False, True))
    """Use torch.compile, block by block."""
    attention: str = swept("naive", sweep=("naive", "flash_triton", "sdpa"))
    """Attention kernel by its registered name."""
    device: str = swept("auto", quick="cpu")
    """auto, cpu, cuda or cuda:N."""
    warmup: int = swept(5, quick=1)
    """Steps before the measured ones."""
    steps: int = swept(10, quick=2)
    """Measured steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("warmup", 0), ("steps", 1)):
            require_at_least(self, "", least, name)

    def workload(self) -> Workload:
        """The workload that is repeated."""
        return Workload(**{field.name: getattr(self, field.name) for field in fields(Workload)})


def measure(config: ModelBench) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration as it ran, and its metrics.

    Steps are timed twice: as a whole (`step_ms`), and phase by phase. The host waits for the device after each phase
    and cannot run ahead, so the phases may add up to more than a step.
    """
    bench = Workbench(config.workload())
    for _ in range(config.warmup):
        bench.step()
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(bench.device)
    metrics = time_steps(bench, config.steps)
    metrics |= _rates(config, bench.device, metrics["step_ms"]["p50"])
    if bench.device.type == "cuda":
        metrics["peak_memory_bytes"] = torch.cuda.max_memory_allocated(bench.device)
    phases = _time_phases(bench, config.steps)
    return {**bench.read_back(), "warmup": config.warmup, "steps": len(metrics["steps_ms"])}, metrics | phases


def time_steps(bench: Workbench, steps: int) -> dict[str, Any]:
    """The times of whole steps, in the form of a row."""
    steps_ms = []
    with objects_set_aside():
        watch = Stopwatch(bench.device)
        for _ in range(steps):
            bench.step()
            steps_ms.append(watch.lap_ms())
    return {"step_ms": summarise(steps_ms), "steps_ms": steps_ms, "timer": Stopwatch.METHOD}


def _rates(config: ModelBench, device: torch.device, step_ms: float) -> dict[str, Any]:
    """The rates of tokens and operations that a step time means."""
    count = forward_flops if config.mode == "forward" else training_flops
    flops = count(config.shape, config.batch_size, config.context_length) / step_ms * 1e3
    peak = device_peak_flops(device, config.precision)
    return {
        "tokens_per_s": config.batch_size * config.context_length / step_ms * 1e3,
        "tflops": flops / 1e12,
        "mfu": None if peak is None else flops / peak,
    }


def _time_phases(bench: Workbench, steps: int) -> dict[str, dict[str, float]]:
    times: dict[str, list[float]] = {phase: [] for phase in bench.phases}
    with objects_set_aside():
        watch = Stopwatch(bench.device)
        for _ in range(steps):
            loss = bench.forward()
            times["forward"].append(watch.lap_ms())
            if "backward" in times:
                bench.backward(loss)
                times["backward"].append(watch.lap_ms())
                bench.optimizer_step()
                lap_ms = watch.lap_ms()  # also without an optimizer, so that the next phase does not include clearing
                if "optimizer" in times:
                    times["optimizer"].append(lap_ms)
    return {f"{phase}_ms": summarise(laps) for phase, laps in times.items()}


def variant(config: ModelBench) -> str:
    """What the model does, and how: "train_step bf16 compiled naive"."""
    compiled = "compiled " if config.compile else ""
    return f"{config.mode} {config.precision} {compiled}{config.attention}"


CASE = Case(
    name="model",
    about="A language model's forward pass, backward pass and training step.",
    module=__name__,
    config=ModelBench,
    variant=variant,
    measure=each("model", variant, measure),
    isolated=True,
)
