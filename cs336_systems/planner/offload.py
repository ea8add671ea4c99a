"""Activations in host memory: the smallest number of blocks that makes a step fit, and what that costs."""

from dataclasses import replace

from .activations import offloaded_bytes
from .cards import Card
from .job import Job
from .memory import RESERVE, peak_bytes
from .step import EXPOSED_COPIES, step_terms
from .working import show

NOTICEABLE = 0.01
"""Share of a step from which on a wait for host memory is reported."""


def smallest_offload(job: Job, memory_bytes: float) -> str | None:
    """The policy with the smallest K whose peak leaves RESERVE of the memory, or none. None if no K does."""
    for offload in _policies(job):
        if peak_bytes(replace(job, activation_offload=offload)) <= (1 - RESERVE) * memory_bytes:
            return offload
    return None


def largest_offload(job: Job) -> str:
    """The policy with the largest K."""
    return _policies(job)[-1]


def _policies(job: Job) -> list[str]:
    policy, k = job.checkpointing or ("none", 1)
    step = k if policy == "groups" else 1
    return ["none", *(f"first_{count}" for count in range(step, job.shape.num_layers, step))]


def host_bytes(job: Job) -> int:
    """Pinned host memory of one process."""
    return sum(offloaded_bytes(job))


def offload_note(job: Job, card: Card | None, host_memory_bytes: float | None = None) -> str:
    """What offloading takes: host memory and, for a known card, the part of the copies that is not hidden.

    host_memory_bytes: main memory for all GPUs, to compare with.
    """
    if not job.offloaded_blocks:
        return "activation_offload none: the step fits without it"
    needed, count = host_bytes(job), job.world_size
    note = f"activation_offload {job.activation_offload}: {show(needed, 'bytes')} of pinned host memory a GPU"
    if host_memory_bytes is not None and count * needed > host_memory_bytes:
        there = show(host_memory_bytes, "bytes")
        note += f", which does not fit: {show(count * needed, 'bytes')} for {count}, and there are {there}"
    if card is None or job.why_no_time:
        return note
    terms = {term.name: term.value for term in step_terms(job, card)}
    waits, step, link = terms[EXPOSED_COPIES], terms["step"], f"a link of {card.host_link / 1e9:.3g} GB/s"
    if waits <= NOTICEABLE * step:
        return f"{note}; {link} hides the copies"
    return f"{note}; {link} is too slow to hide the copies: the step waits {show(waits, 's')}, {waits / step:.0%} of it"
