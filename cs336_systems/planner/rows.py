"""Facts that the planner reads from measured rows: the job, the card, times of all-reduces, overheads of buckets."""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cs336_basics.shape import ModelShape

from ..config.model import SHAPE_FIELDS, ModelConfig
from ..config.run import ParallelConfig
from ..machine.peaks import known_name
from .accounting import bytes_of_kinds, sizes_of
from .cards import CARDS, Card
from .job import ALIASES, Job
from .working import MIB

ON_RANKS = ("ddp", "bucket-size", "overlap-trace", "optimizer-sharding", "fsdp-accounting")
"""Cases whose rows are training steps on several GPUs: config has run and devices."""
WORKLOADS = ("model", "checkpointing", "profile-memory")
"""Cases whose rows measure one GPU and a step or a part of it: config has mode."""


UNUSABLE = (KeyError, ValueError, TypeError, AttributeError, IndexError, ArithmeticError, MemoryError, StopIteration)
"""Errors of a row that lacks a field, has an impossible value, or has no prediction: rows may come from anywhere."""


def reason(error: Exception) -> str:
    """Why a row cannot be used, in words: `error` is one of UNUSABLE."""
    if isinstance(error, KeyError):
        return f"there is no {error}"
    return str(error) if isinstance(error, ValueError) else f"there is an impossible value: {error}"


@contextlib.contextmanager
def naming(place: str) -> Iterator[None]:
    """Turn an error of UNUSABLE inside into a ValueError that begins with the place, such as the name of the file."""
    try:
        yield
    except UNUSABLE as error:
        raise ValueError(f"{place}: {reason(error)}") from error


Measured = Any
"""A `bench.row.Row`, or an object with its attributes; the class itself would bring PyTorch."""


def job_of(row: Measured) -> Job:
    """The job that ran. Raises ValueError with the reason for a row without a prediction."""
    if row.case in (*ON_RANKS, "train-step", "leaderboard-2026"):
        return training_job(row.case, row.variant, row.config)
    if is_forward(row):
        raise ValueError("no prediction for a forward pass alone")
    if row.case in WORKLOADS:
        return workload_job(row.config)
    raise ValueError(f"no prediction for the case {row.case}")


def training_job(case: str, variant: str, config: Mapping[str, Any]) -> Job:
    """The job of a training step, from the configuration in its row. Raises ValueError for one without a prediction."""
    run = config.get("run", config)
    train, parallel = run["train"], dict(run.get("parallel", {}))
    alone = case == "train-step" or variant.startswith("alone")
    world_size = 1 if alone else config["devices"]
    batch, rest = divmod(train["batch_size"], world_size)
    if rest or train["gradient_accumulation_steps"] != 1:
        raise ValueError("no prediction for uneven batches and for accumulation")
    sharing: dict[str, Any] = {}
    if not alone:
        names = ("strategy", "bucket_size_mb", "shard_optimizer", "reshard_after_forward")  # older rows lack some
        chosen = ParallelConfig(**{name: parallel[name] for name in names if name in parallel}).resolved(world_size)
        bucket_size_mb = chosen.bucket_size_mb
        if parallel.get("nccl_max_ctas"):
            raise ValueError("no prediction for a limited number of NCCL's thread blocks")
        if chosen.strategy == "overlap" and "nccl_max_ctas" not in parallel:
            bucket_size_mb = None  # in rows from before that field existed, it ignored the size
        sharing = dict(
            strategy=ALIASES.get(chosen.strategy, chosen.strategy),
            world_size=world_size,
            shard_optimizer=bool(chosen.shard_optimizer),
            reshard_after_forward=chosen.reshard_after_forward,
            bucket_size_mb=bucket_size_mb,
            grad_dtype=parallel["grad_dtype"],
            copy_engines=parallel.get("copy_engines", False),  # NCCL sent, before that field existed
        )
    return Job(
        shape=ModelConfig(**run["model"]).shape,
        batch_size=batch,
        precision=train["precision"],
        attention=run["model"]["attention"],
        weight_dtype=train.get("weight_dtype", "fp32"),  # older rows lack some fields
        activation_checkpointing=train.get("activation_checkpointing", "none"),
        activation_offload=train.get("activation_offload", "none"),
        loss_chunk_tokens=train.get("loss_chunk_tokens"),
        compile=train["compile"],
        compile_memory_budget=train.get("compile_memory_budget", 1.0),
        cuda_graph=train["cuda_graph"],
        fused=_is_fused(run),
        muon=run.get("optimizer", {}).get("name") == "muon",
        **sharing,
    )


def gradient_bytes_of(run: Mapping[str, Any]) -> int:
    """Bytes of the gradients of a run that is not sharded, from the configuration in its row."""
    train, names = run.get("train", {}), ("precision", "weight_dtype", "loss_chunk_tokens")
    how = {name: train[name] for name in names if name in train}
    job = Job(shape=ModelConfig(**run["model"]).shape, fused=_is_fused(run), **how)
    return bytes_of_kinds(job.shape, sizes_of(job.gradient_dtypes))[2]


def _is_fused(run: Mapping[str, Any]) -> bool:
    return run.get("optimizer", {}).get("implementation") == "fused"


def is_forward(row: Measured) -> bool:
    """Whether a row measures a forward pass alone, without gradients."""
    return row.case in WORKLOADS and row.config["mode"] == "forward"


def workload_job(config: Mapping[str, Any]) -> Job:
    """The job of a row of WORKLOADS, for any part of a step. Raises ValueError for one without a prediction."""
    has_optimizer = config["mode"] == "train_step"
    if has_optimizer and config.get("optimizer", "torch_fused") != "torch_fused":
        raise ValueError(f"no prediction for the optimizer {config['optimizer']}")
    shape = ModelShape(**{name: config[name] for name in SHAPE_FIELDS})
    same = ("batch_size", "precision", "attention", "activation_checkpointing", "compile")
    return Job(shape=shape, **{name: config[name] for name in same}, optimizer=has_optimizer, clip=False)


def is_of_cpu(row: Measured) -> bool:
    """Whether a row was measured on the CPU, because there was no GPU or because the CPU was requested."""
    return not row.env.get("gpu") or row.config.get("device") == "cpu"


def card_of(row: Measured) -> Card | None:
    """The card of a row, if it is known."""
    return card_by_name(str(row.env.get("gpu") or ""))


def card_by_name(gpu: str) -> Card | None:
    """The card of a GPU by the name its driver gives, if it is known."""
    return CARDS.get(known_name(gpu) or "")


def transfer_points(rows: Iterable[Measured], world_size: int) -> tuple[list[float], list[float]]:
    """Bytes and seconds of measured all-reduces over world_size ranks: with NCCL if there are any, or any backend.

    Reads rows of the case all-reduce, except for other collectives: config bytes, world_size, backend; metrics
    time_ms. Raises ValueError if there are none.
    """
    found = [
        row
        for row in rows
        if (row.case, row.status) == ("all-reduce", "ok")
        and row.config.get("world_size") == world_size
        and row.config.get("collective", "all-reduce") == "all-reduce"
    ]
    if not found:
        raise ValueError(f"world_size is {world_size}: the row file has no all-reduce over so many ranks")
    chosen = [row for row in found if row.config.get("backend") == "nccl"] or found
    return [float(row.config["bytes"]) for row in chosen], [row.metrics["time_ms"]["p50"] / 1e3 for row in chosen]


def overheads_beside(
    rows: Iterable[Measured], nbytes: float, world_size: int
) -> tuple[list[tuple[str, float, float]], str]:
    """`measured_overheads` of steps with nbytes of gradients on world_size GPUs, and a note on the rows left out.

    Raises ValueError with the file's rows and the wanted ones if it has no such steps.
    """
    by_kind: dict[str, list[Measured]] = {}
    wanted = f"{nbytes / 1e9:.4g} GB of gradients on {world_size} GPUs"
    for row in rows:
        kind = row.case
        if kind in ("ddp", "bucket-size"):
            sent, ranks = gradient_bytes_of(row.config["run"]), row.config["devices"]
            is_wanted = math.isclose(sent, nbytes, rel_tol=0.01) and ranks == world_size
            kind = wanted if is_wanted else f"{kind} of {sent / 1e9:.4g} GB on {ranks} GPUs"
        by_kind.setdefault(kind, []).append(row)
    there = {kind: f"{len(rows)} rows of {kind}" for kind, rows in by_kind.items()}
    found = measured_overheads(by_kind.get(wanted, []))
    if not found:
        accepted = f"rows of ddp or bucket-size with {wanted}, with buckets and alone"
        raise ValueError(f"it has {', '.join(there.values()) or 'no rows'}: it must have {accepted}")
    others = ", ".join(text for kind, text in there.items() if kind != wanted)
    return found, f"left out of the measured rows: {others}" if others else ""


def measured_overheads(rows: Iterable[Measured]) -> list[tuple[str, float, float]]:
    """How a step ran, bytes of a bucket, and seconds more than the step on one GPU, from rows of ddp and bucket-size.

    A variant is `bucketed:SIZE`, with `+graph` or ` compiled` behind it; its step on one GPU is `alone` with the same.
    """
    done = {row.variant: row for row in rows if row.case in ("ddp", "bucket-size") and row.status == "ok"}
    found = []
    for variant, row in done.items():
        name, _, compiled = variant.partition(" ")
        strategy, _, option = name.partition("+")
        kind, _, size = strategy.partition(":")
        alone = " ".join(filter(None, ("alone" + ("+graph" if option else ""), compiled)))
        if kind != "bucketed" or option not in ("", "graph") or not size or alone not in done:
            continue
        how = " ".join(filter(None, (compiled or "eager", "CUDA graph" if option else "")))
        added = row.metrics["step_ms"]["p50"] - done[alone].metrics["step_ms"]["p50"]
        found.append((how, float(size) * MIB, added / 1e3))
    return found
