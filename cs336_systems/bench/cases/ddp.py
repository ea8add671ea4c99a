"""The case `ddp`: a training step on several GPUs, strategy by strategy, beside one GPU alone.

One launch measures all variants, so that they have the same machine, and where its host is not steady they take turns.
A step is the training loop's own, with clipping and the all-reduce of the loss, on random tokens. `alone` is the same
on each GPU without any communication: the rest is what data parallelism adds.
"""

import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ...config import DataConfig, OptimizerConfig, ParallelConfig, RunConfig, TrainConfig
from ...fields import check_types, require_at_least
from ...hardware import select_device
from ...training.launch import check_devices, run_processes
from ..case import Row, read_rows
from ..outcome import failed
from ..sweep import Case, as_json, swept
from ..worker import SCRATCH
from ..workload import Workload

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
_PROGRAM = ["-m", "cs336_systems.bench.ranks"]


@dataclass(frozen=True, kw_only=True)
class DDPBench:
    """A strategy, what it trains, and on how many processes."""

    variant: str = swept(*VARIANTS, quick=(ALONE, "naive", "bucketed:0.01", "fsdp"))
    """alone, or STRATEGY[:BUCKET_MB], with +zero1 (sharded optimizer), +bf16 (gradients travel in it), +graph."""
    compile: bool = swept(False, True, quick=False)
    """Blocks compiled."""
    devices: int = swept(2)
    """Processes, one a GPU."""
    size: str = swept("xl", sweep=("small", "medium", "large", "xl"), quick="quick")
    """Named size of the model; quick is a tiny one."""
    context_length: int = swept(512, quick=16)
    """Tokens a sequence."""
    batch_size: int = swept(4, quick=2)
    """Sequences a process."""
    precision: Literal["fp32", "bf16", "fp16"] = swept("bf16", quick="fp32")
    """Autocast type."""
    device: str = swept("auto", quick="cpu")
    """auto, cpu or cuda."""
    warmup: int = swept(5, quick=1)
    """Steps before the measured ones, in each round."""
    steps: int = swept(10, quick=2)
    """Measured steps a round."""
    rounds: int = swept(1)
    """How often the variants take turns, each built anew."""
    traces: str = swept("")
    """Folder for what ran when in one step of each variant."""

    def __post_init__(self) -> None:
        check_types(self, "")
        require_at_least(self, "", 1, "devices", "batch_size", "warmup", "steps", "rounds")
        try:
            self.run_config()
            check_devices(self.device, self.devices)
            object.__setattr__(self, "device", select_device(self.device).type)
        except ValueError as error:
            message = str(error)
            for group in ("model.", "train.", "parallel."):
                message = message.removeprefix(group)
            raise ValueError(message) from error

    def run_config(self) -> RunConfig:
        """The run whose steps are measured. Raises ValueError for a variant that is none."""
        strategy, _, options = self.variant.partition("+")
        name, _, bucket = strategy.partition(":")
        chosen = set(options.split("+")) - {""}
        if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?|", bucket) or not chosen <= {"zero1", "bf16", "graph"}:
            raise ValueError(
                f"variant is {self.variant!r}: it must be alone or STRATEGY[:BUCKET_MB], with +zero1, +bf16 or +graph"
            )
        parallel: dict[str, Any] = {}
        if name != ALONE:
            parallel = dict(devices=self.devices, strategy=name, shard_optimizer="zero1" in chosen)
            parallel |= dict(grad_dtype="bf16") if "bf16" in chosen else {}
            parallel |= dict(bucket_size_mb=float(bucket)) if bucket else {}
        model = Workload(
            size=self.size, context_length=self.context_length, attention="auto", device="cpu"
        ).model_config
        return RunConfig(
            model=model,
            data=DataConfig(source="random"),
            optimizer=OptimizerConfig(implementation="torch_fused"),
            train=TrainConfig(
                batch_size=self.batch_size * (1 if name == ALONE else self.devices),
                compile=self.compile,
                precision=self.precision,
                device=self.device,
                cuda_graph="graph" in chosen,
            ),
            parallel=ParallelConfig(**parallel),
        )

    @property
    def is_alone(self) -> bool:
        """Whether nothing is sent."""
        return self.variant.partition("+")[0] == ALONE


def name_of(config: DDPBench) -> str:
    """The variant, and whether it is compiled."""
    return f"{config.variant} compiled" if config.compile else config.variant


def measure(configs: Sequence[DDPBench]) -> Iterator[Row]:
    """A row each, in one launch of processes; where one of them ends it, the others in another."""
    left = list(configs)
    while left:
        with tempfile.TemporaryDirectory(prefix="cs336-", dir=os.environ.get(SCRATCH)) as folder:
            place = Path(folder)
            (place / "configs.json").write_text(json.dumps([asdict(config) for config in left]))
            try:
                for row in _launch(left[0].devices, place):
                    left.remove(next(config for config in left if name_of(config) == row.variant))
                    yield row
                return
            except Exception as error:  # whatever the first rank to fail has raised
                at_work = (place / "at_work").read_text() if (place / "at_work").exists() else ""
                culprit = next((config for config in left if name_of(config) == at_work), left[0])
                left.remove(culprit)
                yield failed("ddp", name_of(culprit), as_json(culprit), error)


def _launch(devices: int, folder: Path) -> Iterator[Row]:
    """Rows as rank 0 writes them. Raises what the first process to fail raised."""
    rows = folder / "rows.jsonl"
    rows.touch()
    seen = 0
    with ThreadPoolExecutor(1) as pool:
        launch = pool.submit(run_processes, [*_PROGRAM, str(folder)], devices, folder)
        while True:
            is_over = launch.done()  # asked before reading, so that the last row is read
            new = read_rows(rows)[seen:]
            seen += len(new)
            yield from new
            if is_over:
                launch.result()
                return
            wait([launch], timeout=0.2)


CASE = Case(
    name="ddp",
    about="A training step on several GPUs, strategy by strategy, beside one GPU alone.",
    module=__name__,
    config=DDPBench,
    variant=name_of,
    measure=measure,
    together=("variant", "compile"),
)
