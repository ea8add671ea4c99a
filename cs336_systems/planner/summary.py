"""What is planned and the result, in short: the lines that come first, and the same values under stable names."""

from dataclasses import asdict
from typing import Any

from .cards import Card
from .job import Job
from .memory import RESERVE, largest_batch, peak, peak_bytes, verdict
from .step import step_sections
from .working import GIB, Section, show


def planned(job: Job, size: str | None, card: str, memory_gib: float) -> dict[str, Any]:
    """All that is assumed: the model's size and shape, the step, the GPUs and their memory."""
    given = {"size": size, **asdict(job.shape), **asdict(job)}
    del given["shape"]
    return {**given, "card": card, "card_memory_bytes": round(memory_gib * GIB)}


def planned_section(job: Job, size: str | None, card: str, memory_gib: float) -> Section:
    """What is assumed, in words, and whether the peak fits."""
    s = job.shape
    model = (
        f"{size or 'own shape'}: d_model {s.d_model:,}, d_ff {s.d_ff:,}, {s.num_layers:,} blocks, "
        f"{s.num_heads:,} heads, a vocabulary of {s.vocab_size:,}"
    )
    tokens = f"{job.batch_size:,} x {s.context_length:,} tokens a GPU and step"
    types = f"precision {job.precision}, weights {job.weight_dtype}, attention {job.attention}"
    gpus = f"{job.world_size:,} x {card} of {memory_gib:g} GiB{_sharing(job)}"
    lines = (model, f"{tokens}, {types}", f"{_execution(job)}, activation checkpointing {job.activation_checkpointing}")
    return Section("Planned", (), (*lines, gpus, _fit(job, memory_gib)))


def _execution(job: Job) -> str:
    words = ["compiled" if job.compile else "eager"]
    if job.compile_memory_budget < 1:
        words.append(f"memory budget {job.compile_memory_budget:g}")
    if job.cuda_graph:
        words.append("recorded as a CUDA graph")
    if job.loss_chunk_tokens:
        words.append(f"loss of {job.loss_chunk_tokens:,} tokens at a time")
    return ", ".join(words)


def _sharing(job: Job) -> str:
    words = [f", strategy {job.strategy}"]
    if job.bucket_size_mb is not None:
        words.append(f"{job.bucket_size_mb:g} MiB of gradients at a time")
    if job.shard_optimizer:
        words.append("optimizer state sharded")
    if not job.reshard_after_forward:
        words.append("weights kept whole for the backward pass")
    if job.grad_dtype != "same":
        words.append(f"gradients sent in {job.grad_dtype}")
    return ", ".join(words)


def _fit(job: Job, memory_gib: float) -> str:
    needed, memory = peak_bytes(job), memory_gib * GIB
    found, kept = verdict(needed, memory), f"{(1 - RESERVE) * memory_gib:.4g}"
    why = {
        "fits": f"is within {kept} GiB, {1 - RESERVE:.0%} of the card's memory",
        "may not fit": f"is above {kept} GiB; the other {RESERVE:.0%} are for the CUDA context and fragmentation",
        "does not fit": "is above the card's memory",
    }
    return f"{found}: the peak of {show(needed, 'bytes')} {why[found]}"


def memory_summary(job: Job, memory_gib: float) -> dict[str, Any]:
    """The peak, whether it fits, and the largest batch that does."""
    when, needed = peak(job)
    memory = memory_gib * GIB
    found = verdict(needed, memory)
    return {
        "peak_bytes": round(needed),
        "peak_moment": when,
        "card_memory_bytes": round(memory),
        "usable_bytes": round((1 - RESERVE) * memory),
        "fits": found == "fits",
        "verdict": found,
        "largest_batch": largest_batch(job, (1 - RESERVE) * memory),
    }


def step_summary(job: Job, card: Card) -> dict[str, Any]:
    """The time of a step and its rates, and what `memory_summary` says."""
    _, time, rates = step_sections(job, card)
    found = {term.name: term.value for term in rates.terms}
    names = {"tokens_per_s": "tokens/s a GPU", "flops_per_s": "rate", "mfu": "MFU"}
    values = {name: found.get(theirs) for name, theirs in names.items()}
    return {"step_s": time.value("step"), **values, **memory_summary(job, card.memory_gib)}
