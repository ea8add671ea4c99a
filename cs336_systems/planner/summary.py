"""A plan in short: its assumptions and verdict in words, and its main numbers under stable names."""

from dataclasses import asdict
from typing import Any

from .cards import Card
from .job import Job
from .memory import RESERVE, largest_batch, peak, peak_bytes, verdict
from .step import step_sections
from .working import GIB, Section, show


def planned(job: Job, size: str | None, card: str, memory_gib: float) -> dict[str, Any]:
    """All assumptions: the model's size and shape, the step, the GPUs and their memory."""
    given = {"size": size, **asdict(job.shape), **asdict(job)}
    del given["shape"]
    return {**given, "card": card, "card_memory_bytes": round(memory_gib * GIB)}


def planned_section(job: Job, size: str | None, card: str, memory_gib: float) -> Section:
    """The assumptions in words, and whether the peak fits."""
    s = job.shape
    model = (
        f"{size or 'own shape'}: d_model {s.d_model:,}, d_ff {s.d_ff:,}, {s.num_layers:,} blocks, "
        f"{s.num_heads:,} heads, a vocabulary of {s.vocab_size:,}"
    )
    tokens = f"{job.batch_size:,} x {s.context_length:,} tokens a GPU and step"
    types = f"precision {job.precision}, weights {job.weight_dtype}, attention {job.attention}"
    execution = ["compiled" if job.compile else "eager"]
    if job.compile_memory_budget < 1:
        execution.append(f"memory budget {job.compile_memory_budget:g}")
    if job.cuda_graph:
        execution.append("recorded as a CUDA graph")
    if job.loss_chunk_tokens:
        execution.append(f"loss of {job.loss_chunk_tokens:,} tokens at a time")
    execution.append(f"activation checkpointing {job.activation_checkpointing}")
    gpus = [f"{job.world_size:,} x {card} of {memory_gib:g} GiB", f"strategy {job.strategy}"]
    if job.bucket_size_mb is not None:
        gpus.append(f"{job.bucket_size_mb:g} MiB of gradients at a time")
    if job.shard_optimizer:
        gpus.append("optimizer state sharded")
    if not job.reshard_after_forward:
        gpus.append("weights kept whole for the backward pass")
    if job.grad_dtype != "same":
        gpus.append(f"gradients sent in {job.grad_dtype}")
    needed, usable = peak_bytes(job), f"{(1 - RESERVE) * memory_gib:.4g} GiB"
    found = verdict(needed, memory_gib * GIB)
    why = {
        "fits": f"is within {usable}, {1 - RESERVE:.0%} of the card's memory",
        "may not fit": f"is above {usable}; the other {RESERVE:.0%} are for the CUDA context and fragmentation",
        "does not fit": "is above the card's memory",
    }
    fit = f"{found}: the peak of {show(needed, 'bytes')} {why[found]}"
    return Section("Planned", (), (model, f"{tokens}, {types}", ", ".join(execution), ", ".join(gpus), fit))


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
    """The time of a step, its rates, and `memory_summary`."""
    _, time, rates = step_sections(job, card)
    found = {term.name: term.value for term in rates.terms}
    return {
        "step_s": time.value("step"),
        "tokens_per_s": found["tokens/s a GPU"],
        "flops_per_s": found["rate"],
        "mfu": found.get("MFU"),
        **memory_summary(job, card.memory_gib),
    }
