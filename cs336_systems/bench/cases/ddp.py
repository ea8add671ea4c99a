"""A training step on several GPUs, strategy by strategy: the cases `ddp`, beside one GPU alone, and `overlap-trace`.

One launch measures all variants, so that they run on the same machine. A step is the training loop's, on random tokens.
With precision bf16 the gradients of matrices are sent in bfloat16, by `torch_ddp` in float32. `alone` is the same step
on each GPU without any communication. One more step is profiled: how long it communicates, and how much of that
overlaps with compute.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ...config.checks import check_types, is_import_path, require, require_at_least, without_groups
from ...config.model import ModelConfig
from ...config.run import SHARDED, STRATEGIES, ParallelConfig, RunConfig
from ...machine.hardware import select_device
from ...parallel import get_strategy
from ...training.launch import check_devices
from ...training.loop import Trainer
from ..case import Case, row_config, swept
from ..instruments.streams import record_step, totals
from ..outcome import measured
from ..ranks import launched
from ..row import Row
from ..turns import StepBench, measure_in_turns
from ..workload import model_of, random_run

ALONE = "alone"
_OF_SEVERAL = tuple(strategy for strategy in STRATEGIES if strategy != "none")
VARIANTS = (
    ALONE, "naive", "flat", "overlap", "overlap:100", "bucketed:1", "bucketed:10", "bucketed:100", "bucketed:1000",
    "torch_ddp", "overlap+zero1", "fsdp", "torch_fsdp", "alone+graph", "overlap:100+graph", "bucketed:100+graph",
    "fsdp+graph", "fsdp+zero2+graph",
)  # fmt: skip
OPTIONS: tuple[str, ...] = ("zero1", "zero2", "bf16", "graph")
"""Options that may follow the strategy of a variant."""


@dataclass(frozen=True, kw_only=True)
class DDPBench(StepBench):
    """A strategy, a model, and a number of processes."""

    variant: str = swept(*VARIANTS, quick=(ALONE, "naive", "bucketed:0.01", "fsdp"))
    """alone, or STRATEGY[:BUCKET_MB], with +zero1 (sharded optimizer), +zero2 (fsdp gathers weights once), +bf16
    (gradients are sent in it), +graph (CUDA graph)."""
    compile: bool = swept(False, True, quick=False)
    """Compile the blocks."""
    devices: int = swept(2)
    """Number of processes, one per GPU."""
    size: str = swept("xl", sweep=("small", "medium", "large", "xl", "2.7B"), quick="quick")
    """Named size of the model; quick is a tiny one."""
    context_length: int = swept(512, quick=16)
    """Tokens per sequence."""
    batch_size: int = swept(4, quick=2)
    """Sequences per process."""
    precision: Literal["fp32", "bf16", "fp16", "fp8"] = swept("bf16", quick="fp32")
    """Type of computation; fp8 as in training."""
    nccl_max_ctas: int | None = swept(None)
    """Thread blocks per GPU that NCCL may use for sending (default: NCCL's choice)."""
    copy_engines: bool = swept(True)
    """Whether copy engines send, where they can; false: NCCL does."""
    device: str = swept("auto", quick="cpu")
    """auto, cpu or cuda."""
    warmup: int = swept(5, quick=1)
    steps: int = swept(10, quick=2)
    rounds: int = swept(1)
    """Number of rounds in which the variants take turns, each built anew."""
    built_once: bool = swept(False)
    """Build all variants before the first round and keep them, so that many short rounds (--rounds 20 --steps 5) see
    the host at the same pace. This needs the memory of all variants together, and memory is not measured."""
    traces: str = swept("")
    """Folder for files with the streams of each variant's profiled step."""

    case = "ddp"
    options = OPTIONS

    def __post_init__(self) -> None:
        check_types(self, "")
        require_at_least(self, "", 1, "devices", "batch_size", "warmup", "steps", "rounds", "nccl_max_ctas")
        with without_groups():
            run = self.run_config()
            check_devices(self.device, self.devices)
            object.__setattr__(self, "device", select_device(self.device).type)
        on_gpu = self.device == "cuda"
        require(on_gpu or not run.train.cuda_graph, "variant", self.variant, "without +graph where there is no GPU")
        ctas = self.nccl_max_ctas
        require(on_gpu or ctas is None, "nccl_max_ctas", ctas, "left out with device 'cpu', where NCCL does not send")

    def run_config(self) -> RunConfig:
        name, bucket, chosen = self._parts()
        parallel: dict[str, Any] = {}
        if name != ALONE:
            parallel = dict(devices=self.devices, strategy=name, shard_optimizer="zero1" in chosen)
            parallel |= dict(reshard_after_forward=False) if "zero2" in chosen else {}
            parallel |= dict(grad_dtype="bf16") if "bf16" in chosen else {}
            parallel |= dict(bucket_size_mb=float(bucket)) if bucket else {}
            parallel |= dict(nccl_max_ctas=self.nccl_max_ctas, copy_engines=self.copy_engines)
        return random_run(
            self.model,
            ParallelConfig(**parallel),
            batch_size=self.batch_size * (1 if name == ALONE else self.devices),
            compile=self.compile,
            precision=self.precision,
            device=self.device,
            cuda_graph="graph" in chosen,
        )

    def _parts(self) -> tuple[str, str | None, list[str]]:
        """The strategy, bucket size and options of the variant. Raises ValueError for a part without a meaning."""
        parts = re.fullmatch(r"([\w.]+:[^\W\d]\w*|\w+)(?::(\d{1,9}(?:\.\d{1,9})?))?((?:\+\w+)*)", self.variant)
        name, bucket, options = parts.groups() if parts else ("", None, "")
        chosen = options.split("+")[1:]
        is_own = is_import_path(name) and name.partition(":")[0] not in (ALONE, *_OF_SEVERAL)  # not overlap:x
        is_known = name in (ALONE, *_OF_SEVERAL) or is_own
        taken = _options_of(name) if is_known and name != ALONE else ()
        impossible = {
            "zero1": name == ALONE or name in SHARDED,  # it shards the optimizer's state anyway
            "zero2": is_known and "reshard_after_forward" not in taken,  # it does not gather weights
            "bf16": name == ALONE,
        }
        accepted = [option for option in self.options if not impossible.get(option)]
        takes_bucket = "bucket_size_mb" in taken and float(bucket or 1) > 0
        is_right = is_known and (takes_bucket or bucket is None)
        if not is_right or not set(chosen) <= set(accepted) or len(set(chosen)) < len(chosen):
            others = [*_OF_SEVERAL, *([name] if is_own else [])]
            without = [ALONE, *(other for other in others if "bucket_size_mb" not in _options_of(other))]
            raise ValueError(
                f"variant is {self.variant!r}: it must be {ALONE}, one of {', '.join(_OF_SEVERAL)} or module:Class; "
                f"then :BUCKET_MB, a number above 0, but not after {', '.join(without)}; "
                f"then {name if is_known else 'a strategy'} may have +{', +'.join(accepted)}, each once"
            )
        return name, bucket, chosen

    @property
    def model(self) -> ModelConfig:
        return model_of(self.size, context_length=self.context_length)

    @property
    def is_alone(self) -> bool:
        return self.variant.partition("+")[0] == ALONE

    def look(self, is_first: bool, trainer: Trainer) -> dict[str, Any]:
        """How one more step computes and communicates on the first rank; alone is profiled only for `traces`."""
        file = Path(self.traces, re.sub(r"\W", "-", name_of(self)) + ".json") if self.traces else None
        if self.is_alone and file is None:
            return {}
        streams = record_step(trainer.train_step, is_first, trainer.device, file)
        return {} if self.is_alone or not is_first else totals(streams)

    def row(self, metrics: dict[str, Any], **ran: Any) -> Row:
        """The row of the metrics, with the whole configuration of the run whose steps were measured, and `ran`."""
        ran = {"run": self.run_config().to_dict(), **ran}
        return measured(self.case, name_of(self), row_config(self), ran, metrics)


def _options_of(strategy: str) -> tuple[str, ...]:
    """The options of a strategy. Raises ValueError naming the variant if it cannot be imported."""
    with without_groups({"parallel.strategy": "variant"}):
        return get_strategy(strategy).options


def name_of(config: DDPBench) -> str:
    """The variant, NCCL's limit if any, whether it alone sends, and whether blocks are compiled."""
    ctas = "" if config.nccl_max_ctas is None or config.is_alone else f"+ctas{config.nccl_max_ctas}"
    nccl = "" if config.copy_engines or config.is_alone else "+nccl"
    return f"{config.variant}{ctas}{nccl}{' compiled' if config.compile else ''}"


def strategies_case(config: type[DDPBench], on_rank: Any = measure_in_turns) -> Case:
    """The case that measures variants and compiled blocks in one launch."""
    return Case(
        name=config.case,
        config=config,
        variant=name_of,
        rows=launched,
        measure_on_rank=on_rank,
        together=("variant", "compile"),
    )


@dataclass(frozen=True, kw_only=True)
class OverlapTrace(DDPBench):
    """A strategy whose step is traced; otherwise as in the case `ddp`.

    This is the handout's ddp_overlap_individual_parameters_benchmarking, part (b). One more step is profiled on the
    first rank, and drawn.
    """

    variant: str = swept("naive", "overlap", quick=("naive", "overlap"))
    """STRATEGY[:BUCKET_MB], with +zero1 (sharded optimizer), +bf16 (gradients are sent in it), +graph."""
    compile: bool = swept(False, sweep=(False, True))
    traces: str = swept("runs/bench/overlap-trace", beside="overlap-trace")
    """Folder for files with the streams of each variant's step, from which the picture and the page are drawn
    (default: overlap-trace, beside the rows)."""
    profiler: Literal["torch", "nsys"] = swept("torch")
    """torch; nsys: leave the step to Nsight Systems, which records it if it runs the command."""

    case = "overlap-trace"
    every_round = False  # the step is traced in the last one

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.traces != "", "traces", self.traces, "a folder")
        on_gpu = self.device == "cuda"
        require(self.profiler == "torch" or on_gpu, "profiler", self.profiler, f"torch with device {self.device!r}")

    def look(self, is_first: bool, trainer: Trainer) -> dict[str, Any]:
        """The times of the step's streams, and the file with everything; nothing with nsys."""
        if self.profiler == "nsys":
            _step_for_nsys(trainer, is_first)
            return {}
        stem = re.sub(r"\W+", "-", f"{self.size} {self.context_length} {name_of(self)}")
        file = Path(self.traces, f"{stem}.json")
        streams = record_step(trainer.train_step, is_first, trainer.device, file, named=True)
        return totals(streams) | {"streams": str(file)} if is_first else {}


def _step_for_nsys(trainer: Trainer, is_first: bool) -> None:
    """Do two steps; mark the second for Nsight Systems, with operators and transfers as ranges."""
    trainer.train_step()
    if not is_first:
        trainer.train_step()
        return
    torch.cuda.synchronize(trainer.device)
    torch.cuda.profiler.start()
    with torch.autograd.profiler.emit_nvtx():
        trainer.train_step()
    torch.cuda.synchronize(trainer.device)
    torch.cuda.profiler.stop()


CASE = strategies_case(DDPBench)
OVERLAP_TRACE = strategies_case(OverlapTrace)
PRESETS = {OVERLAP_TRACE.name: OVERLAP_TRACE}
