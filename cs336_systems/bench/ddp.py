"""The case `ddp`: a training step on several GPUs, strategy by strategy, beside one GPU alone.

One launch measures all variants, one after the other, so that they have the same machine. A step is the training
loop's own, with clipping and the all-reduce of the loss, on random tokens. `alone` is the same on each GPU without any
communication: the rest is what data parallelism adds.
"""

import dataclasses
import gc
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from cs336_basics.data import token_dtype
from cs336_basics.model import TransformerLM

from ..config import DataConfig, OptimizerConfig, ParallelConfig, RunConfig, TrainConfig
from ..kernels.attention import get_attention
from ..model_config import ModelConfig
from ..parallel import comm
from ..training.launch import check_devices, one_of_several, run_processes, use_device_of_rank
from ..training.loop import Trainer
from ..training.metrics import summarise
from .case import Row, append_row, read_rows
from .streams import record_step

CASE = "ddp"
ALONE = "alone"
VARIANTS = (
    ALONE,
    "naive",
    "flat",
    "overlap",
    "bucketed:1",
    "bucketed:10",
    "bucketed:100",
    "bucketed:1000",
    "torch_ddp",
    "overlap+zero1",
    "fsdp",
    "torch_fsdp",
)
TRACED = ("naive", "bucketed:100", "naive+graph compiled", "bucketed:100+graph compiled")
QUICK: dict[str, Any] = dict(
    size="quick", context_length=16, batch_size=2, precision="fp32", device="cpu", compile=(False,), warmup=1, steps=2
)
_QUICK_MODEL: dict[str, Any] = dict(vocab_size=300, d_model=32, d_ff=64, num_layers=2, num_heads=2)


@dataclass(frozen=True, kw_only=True)
class DDPBench:
    """What to measure: each variant, eager and compiled."""

    devices: int = 2
    """Processes, one a GPU."""
    size: str = "xl"
    """Named size of the model; quick is a tiny one."""
    context_length: int = 512
    """Tokens a sequence."""
    batch_size: int = 4
    """Sequences a process."""
    variants: tuple[str, ...] = VARIANTS
    """alone, or STRATEGY[:BUCKET_MB], with +zero1 (sharded optimizer), +bf16 (gradients travel in it), +graph."""
    compile: tuple[bool, ...] = (False, True)
    """Eager, compiled or both."""
    precision: str = "bf16"
    """bf16 or fp32."""
    device: str = "auto"
    """auto, cpu or cuda."""
    warmup: int = 5
    """Steps before the measured ones."""
    steps: int = 10
    """Measured steps."""
    traces: str | None = None
    """Folder for what ran when in one step of some variants."""

    def __post_init__(self) -> None:
        for name, least in (("devices", 1), ("warmup", 1), ("steps", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least {least}")
        for variant in self.variants:
            self.run_config(variant, False)

    def run_config(self, variant: str, compiled: bool) -> RunConfig:
        """The run whose steps are measured. Raises ValueError for a variant that is none."""
        strategy, _, options = variant.partition("+")
        name, _, bucket = strategy.partition(":")
        chosen = set(options.split("+")) - {""}
        if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?|", bucket) or not chosen <= {"zero1", "bf16", "graph"}:
            raise ValueError(
                f"variants has {variant!r}: each must be alone or STRATEGY[:BUCKET_MB], with +zero1, +bf16 or +graph"
            )
        parallel: dict[str, Any] = {}
        if name != ALONE:
            parallel = dict(devices=self.devices, strategy=name, shard_optimizer="zero1" in chosen)
            parallel |= dict(grad_dtype="bf16") if "bf16" in chosen else {}
            parallel |= dict(bucket_size_mb=float(bucket)) if bucket else {}
        model = _QUICK_MODEL if self.size == "quick" else dict(size=self.size)
        return RunConfig(
            model=ModelConfig(context_length=self.context_length, **model),
            data=DataConfig(source="random"),
            optimizer=OptimizerConfig(implementation="torch_fused"),
            train=TrainConfig(
                batch_size=self.batch_size * (1 if name == ALONE else self.devices),
                compile=compiled,
                precision=self.precision,  # type: ignore[arg-type]
                device=self.device,
                cuda_graph="graph" in chosen,
            ),
            parallel=ParallelConfig(**parallel),
        )

    def facts(self, run: RunConfig) -> dict[str, Any]:
        """What a row says of how it was measured."""
        return {**run.to_dict(), "devices": self.devices, "warmup": self.warmup, "steps": self.steps}


def measure(config: DDPBench, path: Path) -> Iterator[Row]:
    """Append one row a variant to the file, and yield them all at the end."""
    check_devices(config.device, config.devices)
    before = len(read_rows(path))
    for compiled in config.compile:
        left = list(config.variants)
        while left:
            measured = len(read_rows(path))
            try:
                _launch(dataclasses.replace(config, variants=tuple(left), compile=(compiled,)), path)
            except RuntimeError as error:  # the variants after it are wanted all the same, in a new launch
                left = left[len(read_rows(path)) - measured :]
                append_row(path, _failed(config, left.pop(0), compiled, str(error)))
            else:
                break
    yield from read_rows(path)[before:]


def _launch(config: DDPBench, path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="cs336-") as folder:
        file = Path(folder) / "bench.json"
        file.write_text(json.dumps(asdict(config)))
        program = ["-m", "cs336_systems.bench.ddp", str(file), str(path.resolve())]
        run_processes(program, config.devices, Path(folder))


def _failed(config: DDPBench, variant: str, compiled: bool, message: str) -> Row:
    status: Literal["oom", "error"] = "oom" if "out of memory" in message else "error"
    facts = config.facts(config.run_config(variant, compiled))
    return Row(case=CASE, variant=_name(variant, compiled), config=facts, status=status, error=message)


def _name(variant: str, compiled: bool) -> str:
    return f"{variant} compiled" if compiled else variant


def measure_on_rank(config: DDPBench, device: torch.device) -> Iterator[Row]:
    """Measure every variant together with the other ranks; the rows are the same on all."""
    for compiled in config.compile:
        for variant in config.variants:
            run, name = config.run_config(variant, compiled), _name(variant, compiled)
            trace = Path(config.traces, re.sub(r"\W", "-", name)) if config.traces and name in TRACED else None
            with comm.alone() if _is_alone(variant) else nullcontext():
                metrics = _measure_variant(config, run, device, trace)
            _free(device)
            everyone = comm.gather_objects(metrics, "what was measured")
            yield Row(case=CASE, variant=name, config=config.facts(run), metrics=_slowest(everyone))


def _is_alone(variant: str) -> bool:
    return variant.partition("+")[0] == ALONE


def _measure_variant(config: DDPBench, run: RunConfig, device: torch.device, trace: Path | None) -> dict[str, Any]:
    shape, held = run.model.shape, 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)  # by a variant before, should it not have given back all
    tokens = np.random.default_rng(0).integers(0, shape.vocab_size, 1 << 20).astype(token_dtype(shape.vocab_size))
    torch.manual_seed(0)
    with device:
        model = TransformerLM(**asdict(shape), attention=get_attention(run.model.attention))
    with closing(Trainer(run, model, tokens, device)) as trainer:
        for _ in range(config.warmup):
            trainer.train_step()
        comm.barrier("start of the measurement")
        trainer.reset_clock()
        times = [trainer.train_step()["step_ms"] for _ in range(config.steps + 1)][1:]
        peak = trainer.memory_bytes() - held
        if trace is not None:
            record_step(trainer.train_step, trace.with_suffix(".json") if comm.rank() == 0 else None, device)
    return {"step_ms": summarise(times), "peak_memory_bytes": peak, "held_before_bytes": held}


def _free(device: torch.device) -> None:
    """Give back what the variant before has held, compiled code's references too."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _slowest(everyone: list[dict[str, Any]]) -> dict[str, Any]:
    """The times of the rank that took longest, the largest memory, and how far apart the ranks were."""
    medians = [metrics["step_ms"]["p50"] for metrics in everyone]
    return {
        "step_ms": max((metrics["step_ms"] for metrics in everyone), key=lambda times: times["p50"]),
        "spread_ms": max(medians) - min(medians),
        "peak_memory_bytes": max(metrics["peak_memory_bytes"] for metrics in everyone),
        "held_before_bytes": max(metrics["held_before_bytes"] for metrics in everyone),
    }


def main() -> None:
    """What each process does: `BENCH_FILE ROW_FILE PARENT`."""
    bench_file, row_file, parent = sys.argv[1:]
    fields: dict[str, Any] = json.loads(Path(bench_file).read_text())
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    config = DDPBench(**fields)
    with one_of_several(parent):
        device = use_device_of_rank(config.device)
        with comm.process_group(device):
            for row in measure_on_rank(config, device):
                if comm.rank() == 0:
                    append_row(Path(row_file), row)


if __name__ == "__main__":
    main()
