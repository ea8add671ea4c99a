"""The cases that can be measured. A file has its case as CASE; further presets of it are in PRESETS."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the names must not need PyTorch
    from ..case import Case

FILES = {
    "model": "model",
    "warmup": "model:warmup",
    "train-step": "train_step",
    "precision-accumulation": "precision_accumulation",
    "autocast-dtypes": "autocast_dtypes",
    "attention": "attention:attention",
    "flash": "attention:flash",
    "kernels": "attention:kernels",
    "leaderboard-2025": "attention:leaderboard-2025",
    "leaderboard-2026": "leaderboard_2026",
    "attention-sweep": "attention:attention-sweep",
    "residuals": "residuals",
    "checkpointing": "checkpointing",
    "ddp": "ddp",
    "lm-matrix": "lm_matrix",
    "all-reduce": "all_reduce",
    "bucket-size": "bucket_size",
    "overlap-trace": "overlap_trace",
    "optimizer-sharding": "sharding_memory",
    "fsdp-accounting": "sharding_memory:fsdp-accounting",
}
NAMES = tuple(FILES)


def get_case(name: str) -> "Case":
    """The case of that name. Raises ValueError if there is none."""
    from ..case import load_case

    if name not in NAMES:
        raise ValueError(f"case is {name!r}: it must be one of {', '.join(NAMES)}")
    return load_case(f"{__name__}.{FILES[name]}")
