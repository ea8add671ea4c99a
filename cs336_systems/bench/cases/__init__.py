"""The cases that can be measured: one file per case, named after it, with the case as CASE."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the names must not need PyTorch
    from ..case import Case

NAMES = (
    "model",
    "warmup",
    "train-step",
    "precision-accumulation",
    "autocast-dtypes",
    "attention",
    "flash",
    "kernels",
    "leaderboard-2025",
    "leaderboard-2026",
    "attention-sweep",
    "residuals",
    "checkpointing",
    "ddp",
    "lm-matrix",
    "all-reduce",
    "bucket-size",
    "overlap-trace",
    "optimizer-sharding",
    "fsdp-accounting",
)


def get_case(name: str) -> "Case":
    """The case of that name. Raises ValueError if there is none."""
    if name not in NAMES:
        raise ValueError(f"case is {name!r}: it must be one of {', '.join(NAMES)}")
    return import_module(f".{name.replace('-', '_')}", __package__).CASE
