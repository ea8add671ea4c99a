"""The case `lm-matrix`: short training runs of attention kernels x parallel strategies on token files.

The processes of a run share the batch that one process would see, so all strategies of a kernel reach the same loss;
another loss is an error. Training amplifies rounding: two runs of one process with a non-deterministic kernel soon
differ by 0.01 nats. So the first gradient norms, which rounding has hardly changed, are compared more closely.
"""

import dataclasses
import functools
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cs336_basics.data import load_tokens
from cs336_basics.tokenizer import check_vocab_size

from ...config.checks import check_types, require, require_at_least, without_groups
from ...config.model import SIZE_FIELDS, ModelConfig
from ...config.run import DataConfig, OptimizerConfig, ParallelConfig, RunConfig, TrainConfig
from ...kernels.attention import get_attention
from ...machine.hardware import select_device
from ...parallel import get_strategy
from ...training.folder import CONFIG
from ...training.launch import check_devices, launch
from ...training.metrics import METRICS_FILE, read_metrics
from ...training.prepare import prepare_data
from ..case import Case, swept
from ..outcome import attempt
from ..row import Row
from ..worker import SCRATCH
from ..workload import QUICK_SIZE, model_of

ALONE = "none"
FIRST_STEPS = 5
NORM_TOLERANCE = 0.01
"""Largest relative difference of the first gradient norms; rounding in bf16 caused 0.003."""
_NORMS = "first_grad_norms"
_NAMES = {"model.attention": "kernel", "data.train_tokens": "train_path", "data.valid_tokens": "val_path"}
"""This case's names for the fields of a run."""


@dataclass(frozen=True, kw_only=True)
class LMMatrixBench:
    """A kernel, a strategy, and the run to measure them with."""

    kernel: str = swept("naive", "vectorized_torch", "flash_triton", "sdpa", quick="sdpa", also="kernels")
    """Attention kernel by its registered name."""
    strategy: str = swept(
        ALONE, "naive", "flashddp", "torch_ddp",
        sweep=(ALONE, "naive", "flat", "overlap", "flashddp", "fsdp", "torch_ddp", "torch_fsdp"),
        quick=(ALONE, "flashddp"), also="strategies",
    )  # fmt: skip
    """none (one process), or the strategy of several processes; flashddp is bucketed."""
    devices: int = swept(2)
    """Number of processes of a strategy, one per GPU."""
    train_path: str | None = swept(None)
    """Token file (.npy) to train on (default: generated stories)."""
    val_path: str | None = swept(None)
    """Token file to validate on; give both or neither."""
    epochs: int = swept(1)
    """Train on this many times the tokens of the training file. Sequences start anywhere in it."""
    max_steps: int | None = swept(None, quick=8)
    """Maximum number of steps (default: all of the epochs)."""
    size: str | None = swept("small", sweep=("small", "medium", "large"), quick=QUICK_SIZE)
    """Named size of the model unless d_model and so on are given; quick is a tiny one."""
    vocab_size: int | None = swept(None)
    """Size of the vocabulary (default: the size's, else 10,000)."""
    context_length: int = swept(512, quick=16)
    """Tokens per sequence."""
    d_model: int | None = swept(None)
    """Width of the residual stream; give it with d_ff, num_layers and num_heads, and without a size."""
    d_ff: int | None = swept(None)
    """Width of the feed-forward layer."""
    num_layers: int | None = swept(None)
    """Number of Transformer blocks."""
    num_heads: int | None = swept(None)
    """Number of attention heads."""
    batch_size: int = swept(16, quick=4)
    """Sequences per step, over all processes."""
    precision: Literal["fp32", "bf16", "fp16"] = swept("bf16", sweep=("fp32", "bf16"), quick="fp32")
    """Autocast type."""
    compile: bool = swept(False, sweep=(False, True))
    """Compile the blocks."""
    lr: float = swept(1e-3)
    """Peak learning rate."""
    seed: int = swept(0)
    """Seed of the weights and of the data order."""
    tolerance: float = swept(0.02, quick=1e-3)
    """Largest difference of a strategy's final losses from those of none, in nats."""
    device: str = swept("auto", quick="cpu")
    """auto, cpu or cuda."""

    def __post_init__(self) -> None:
        check_types(self, "")
        require_at_least(self, "", 1, "devices", "epochs", "max_steps", "batch_size", "context_length")
        require(0 < self.tolerance < math.inf, "tolerance", self.tolerance, "above 0 and finite")
        both = (self.train_path is None) == (self.val_path is None)
        require(both, "val_path", self.val_path, "given if, and only if, train_path is given")
        for name in ("train_path", "val_path"):
            path = getattr(self, name)
            require(path is None or Path(path).is_file(), name, path, "a token file")
        if any(getattr(self, name) is not None for name in SIZE_FIELDS):
            object.__setattr__(self, "size", None)
        with without_groups(_NAMES):
            config = self.run_config(Path("unused"))
            get_attention(self.kernel)
            get_strategy(config.resolved_for(config.parallel.devices).parallel.strategy)
            check_devices(self.device, 1 if self.strategy == ALONE else self.devices)
            object.__setattr__(self, "device", select_device(self.device).type)
        if self.train_path is None:
            check_vocab_size(self.model_config().shape.vocab_size)

    def model_config(self) -> ModelConfig:
        shape = {name: value for name in SIZE_FIELDS if (value := getattr(self, name)) is not None}
        how = dict(context_length=self.context_length, attention=self.kernel)
        return model_of(self.size, self.vocab_size, **shape, **how)

    def run_config(self, folder: Path, files: tuple[str, str] | None = None, steps: int = 1) -> RunConfig:
        """The run of `steps` steps, which writes into the folder. Raises ValueError for an impossible one."""
        files = files or (self.train_path or "train", self.val_path or "valid")
        devices = 1 if self.strategy == ALONE else self.devices
        return RunConfig(
            model=self.model_config(),
            run_dir=str(folder / f"{self.kernel}-{self.strategy}"),
            skip_data=True,
            # A run on random tokens samples no text at the end.
            data=DataConfig(source="random", train_tokens=files[0], valid_tokens=files[1]),
            optimizer=OptimizerConfig(implementation="torch_fused", lr=self.lr),
            train=TrainConfig(
                max_steps=steps,
                batch_size=self.batch_size,
                device=self.device,
                precision=self.precision,
                compile=self.compile,
                cuda_graph=False,
                validation_interval=0,
                seed=self.seed,
            ),
            parallel=ParallelConfig(devices=devices, strategy=self.strategy),
        )


def measure(case: Case, configs: Sequence[LMMatrixBench]) -> Iterator[Row]:
    """Yield the rows of a kernel's strategies, `none` first; each is compared with the first that has a loss.

    If `none` is not among them (because a resumed command has its row), it is trained without a row: strategies that
    are compared only with each other cannot be found wrong.
    """
    with tempfile.TemporaryDirectory(prefix="cs336-", dir=os.environ.get(SCRATCH)) as folder:
        reference: Row | None = None
        ordered = sorted(configs, key=lambda config: config.strategy != ALONE)
        if ordered[0].strategy != ALONE:
            ordered.insert(0, dataclasses.replace(ordered[0], strategy=ALONE))
        for config in ordered:
            train = functools.partial(train_once, config, Path(folder))
            row = attempt(case, config, train)
            if row.status == "ok":
                reference = reference or row
                row = compared(row, reference, config.tolerance)
            if config in configs:
                yield row


def train_once(config: LMMatrixBench, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train, then delete the run; return the configuration as it ran, and losses, times, throughput and memory."""
    model = config.model_config()
    if config.train_path is not None and config.val_path is not None:
        files = config.train_path, config.val_path
    else:  # generated stories, made once in the folder
        chars = 10_000 if config.size == QUICK_SIZE else 4_000_000
        data = DataConfig(source="stories", data_dir=str(folder / "data"), story_chars=chars)
        prepare_data(RunConfig(model=model, data=data))
        files = str(data.train_tokens), str(data.valid_tokens)
    count, _ = (len(load_tokens(path, model.shape.vocab_size)) for path in files)
    epoch_steps = max(1, count // (config.batch_size * config.context_length))
    steps = min(config.epochs * epoch_steps, config.max_steps or config.epochs * epoch_steps)
    run = config.run_config(folder, files, steps)
    try:
        with without_groups(_NAMES):
            result = launch(run)  # one process too, so that each run has its own memory
        if result.interrupted is not None:
            raise RuntimeError(f"the run was stopped by {result.interrupted} at step {result.step} of {steps}")
        ran = json.loads((Path(str(run.run_dir)) / CONFIG).read_text())
        rows = [row for row in read_metrics(Path(str(run.run_dir)) / METRICS_FILE) if "step_ms" in row]
    finally:
        shutil.rmtree(str(run.run_dir), ignore_errors=True)  # its checkpoint is several times as large as the model
    times = [row["step_ms"] / 1e3 for row in rows]
    names = ("batch_size", "precision", "compile", "seed")
    fields = {name: ran["train"][name] for name in names} | {"devices": config.devices}
    fields |= {"kernel": ran["model"]["attention"], "strategy": ran["parallel"]["strategy"]}
    return {**fields, "context_length": ran["model"]["context_length"], "run": ran}, {
        "final_loss": result.valid_loss,
        "train_loss": result.train_loss,
        _NORMS: [row["grad_norm"] for row in rows[:FIRST_STEPS]],
        "steps": result.step,
        "train_tokens": count,
        "step_ms": result.step_ms,
        "tokens_per_s": result.tokens_per_s,
        "epoch_s": sum(times) / len(times) * epoch_steps,
        "startup_s": result.startup_s,
        "peak_memory_bytes": result.peak_memory_bytes,
        "mfu": result.mfu,
    }


def compared(row: Row, reference: Row, tolerance: float) -> Row:
    """The row, with status error if its losses or norms differ from the reference, another strategy's row.

    Steps without a norm, in which float16 overflowed because its scale was still too large, are not compared.
    """
    own, theirs = row.metrics, reference.metrics
    norms = {f"gradient norm of step {step}": pair
             for step, pair in enumerate(zip(own[_NORMS], theirs[_NORMS], strict=True), start=1)
             if None not in pair}  # fmt: skip
    values = [(name, mine, other, NORM_TOLERANCE * other) for name, (mine, other) in norms.items()]
    values += [(name, own[name], theirs[name], tolerance) for name in ("final_loss", "train_loss")]
    metrics = own | {
        "loss_difference": abs(own["final_loss"] - theirs["final_loss"]),
        "norm_difference": max((abs(mine / other - 1) for mine, other in norms.values() if other), default=0.0),
    }
    for name, mine, other, allowed in values:
        if not abs(mine - other) <= allowed:
            message = (
                f"{name} is {mine:.6g} with strategy {row.config['strategy']}, and {other:.6g} with "
                f"{reference.config['strategy']}: they must be within {allowed:.3g}"
            )
            return dataclasses.replace(row, status="error", error=message, metrics=metrics)
    return dataclasses.replace(row, metrics=metrics)


CASE = Case(
    name="lm-matrix",
    config=LMMatrixBench,
    variant=lambda config: f"{config.kernel} {config.strategy}",
    rows=measure,
    together=("strategy",),
)
