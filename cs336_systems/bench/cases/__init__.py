"""The cases that can be measured. A file has its case as CASE; further presets of it are in PRESETS."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the names and the help must not need PyTorch
    from ..case import Case

GROUPS = {
    "Model and training step": {
        "model": ("model", "forward pass, backward pass and training step"),
        "warmup": ("model", "the first steps of a process, one by one"),
        "train-step": ("train_step", "the training loop's step, beside Hugging Face's Llama"),
    },
    "Attention": {
        "attention": ("attention", "plain attention, eager and compiled, and its memory"),
        "flash": ("attention", "all kernels, over lengths, head sizes and dtypes"),
        "kernels": ("attention", "all kernels, at the shapes of published figures"),
        "attention-sweep": ("attention", "the forward pass, by numbers of queries and keys"),
        "leaderboard-2025": ("attention", "kernels, as the 2025 leaderboard times them"),
    },
    "Memory": {
        "residuals": ("residuals", "the tensors that a block saves for its backward pass"),
        "checkpointing": ("checkpointing", "peak memory and time, by which blocks are recomputed"),
    },
    "Precision": {
        "precision-accumulation": ("precision", "the same numbers summed in different dtypes"),
        "autocast-dtypes": ("precision", "dtypes of weights, activations and loss in autocast"),
    },
    "Several GPUs": {
        "ddp": ("ddp", "strategies, beside one GPU alone"),
        "bucket-size": ("bucket_size", "bucketed gradients, by the size of a bucket"),
        "all-reduce": ("all_reduce", "collectives, by size, number of ranks and backend"),
        "overlap-trace": ("ddp", "when a step computes and when it communicates"),
        "optimizer-sharding": ("sharding_memory", "memory and time, with and without ZeRO stage 1"),
        "fsdp-accounting": ("sharding_memory", "memory that FSDP saves, and waits for its gathers"),
        "lm-matrix": ("lm_matrix", "short training runs, kernels x strategies"),
        "leaderboard-2026": ("leaderboard_2026", "a step of the 8B model at 32,768 tokens on two GPUs"),
    },
}
"""Cases by subject: the file of each, and its line in the help."""
CASES = {name: entry for group in GROUPS.values() for name, entry in group.items()}
NAMES = tuple(CASES)


def get_case(name: str) -> "Case":
    """The case of that name. Raises ValueError if there is none."""
    from ..case import load_case

    if name not in NAMES:
        raise ValueError(f"case is {name!r}: it must be one of {', '.join(NAMES)}")
    return load_case(f"{__name__}.{CASES[name][0]}:{name}")
