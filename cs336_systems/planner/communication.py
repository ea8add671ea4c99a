"""The cost of communication: collectives by the alpha-beta model, a strategy's transfers, the best bucket size."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .accounting import NUMBER_BYTES, block_matrices, bytes_of_kinds, num_parameters, sizes_of, tensors, widths
from .cards import Card
from .job import Job
from .working import MIB, Section, Term, as_factor


def ring_seconds(kind: str, nbytes: float, world_size: int, alpha_s: float, beta: float) -> float:
    """Seconds of a ring collective over w ranks: nbytes in the whole tensor, alpha s per step, beta bytes/s per link.

    all-gather and reduce-scatter: (w - 1) (alpha + nbytes / (w beta)): w - 1 steps send a w-th of the tensor each.
    all-reduce: a reduce-scatter and an all-gather, so twice that (Thakur et al. 2005, "Optimization of Collective
    Communication Operations in MPICH", sections 3.1 and 4; Patarasuk & Yuan 2009 show that its bandwidth term is the
    least possible). alternate all-reduce, from the 2026 handout: (w - 1) (alpha + nbytes / beta), because each step
    sends on a rank's whole tensor. A single rank takes no time.
    """
    w = world_size
    steps_and_share = {
        "all-gather": (w - 1, 1 / w),
        "reduce-scatter": (w - 1, 1 / w),
        "all-reduce": (2 * (w - 1), 1 / w),
        "alternate all-reduce": (w - 1, 1.0),
    }
    steps, share = steps_and_share[kind]
    return steps * (alpha_s + nbytes * share / beta)


def collective_seconds(kind: str, nbytes: float, world_size: int, card: Card) -> float:
    """`ring_seconds` over GPUs of a card whose all-reduce between two GPUs takes o + bytes / w: beta is w.

    An all-reduce over more GPUs has latency o as well: NCCL does not send small tensors round a ring, and for 1 MB four
    H200 take no longer than two (results/h200/all-reduce.jsonl). A gather or a scatter has latency o / 2 per step of
    its ring, but at most o: a gather can be done as an all-reduce of each rank's part amid zeros, and a scatter as an
    all-reduce of which each rank keeps its part (Träff, Gropp & Thakur 2010, "Self-Consistent MPI Performance
    Guidelines"). The mean error over the measured rows is 17.4 %.
    """
    latency_s = min(ring_seconds(kind, 0, world_size, card.latency_s / 2, card.link), card.latency_s)
    return latency_s + ring_seconds(kind, nbytes, world_size, 0, card.link)


@dataclass(frozen=True)
class Sent:
    """A strategy's transfers in a step: time of the bytes, overhead of the calls, time of the last call's bytes."""

    seconds: float
    overhead_s: float
    last_seconds: float
    calls: int
    bytes_a_gpu: float
    working: str


def sent(job: Job, card: Card) -> Sent:
    """The transfers of a step, by `collective_seconds`, with the time of bytes and the overhead of calls separate.

    Data parallelism all-reduces all gradients. FSDP gathers weights forward and, unless they stay whole, backward, and
    reduce-scatters gradients, in the dtype of computation unless grad_dtype is another.
    """
    w = job.world_size
    if job.is_sharded:
        gathered, last = job.weight_passes
        kind, times = "all-gather", gathered + last
        units, n = job.shape.num_layers + 2 - job.shape.tie_embeddings, num_parameters(job.shape)
        calls, passes = (gathered + 1) * units, times
        formula, filled, nbytes = f"{job.number_bytes} N", f"{job.number_bytes} x {n:,}", job.number_bytes * n
    else:  # an all-reduce sends every byte twice
        kind, times, units = "all-reduce", 2, num_calls(job)
        calls, passes, last = units, 1, 1
        formula, filled, nbytes = bytes_of_kinds(job.shape, sizes_of(job.sent_dtypes))
        formula, filled = as_factor(formula), as_factor(filled)
    one = ring_seconds(kind, nbytes, w, 0, card.link)
    working = f"{times:g} x {formula} (w - 1) / w = {times:g} x {filled} x {w - 1} / {w}"
    overhead_s = calls * collective_seconds(kind, 0, w, card)
    return Sent(passes * one, overhead_s, last * one / units, calls, times * ((w - 1) / w) * nbytes, working)


def num_calls(job: Job) -> int:
    """All-reduces of gradients in a step: one for each type of them, one per parameter, or one per bucket of a type."""
    s, d, types, (of_q, of_k) = job.shape, job.shape.d_model, job.gradient_dtypes, widths(job.shape)
    norm, wide, query, key = ("others", d), *(("blocks", d * width) for width in (s.d_ff, of_q, of_k))
    of_heads = [("others", s.head_size)] * 2 * s.qk_norm
    block = [norm, query, key, key, query, *of_heads, norm, *[wide] * 3]
    head = [] if s.tie_embeddings else [("head", s.vocab_size * d)]
    gradients = [("others", s.vocab_size * d), *block * s.num_layers, norm, *head]
    if job.strategy == "flat":
        return len(set(types.values()))
    if job.bucket_size_mb is None or job.strategy in ("naive", "individual"):
        return len(gradients)
    most, calls = job.bucket_size_mb * MIB, 0
    filled: dict[str, int] = {}
    for kind, numel in reversed(gradients):
        size, so_far = NUMBER_BYTES[types[kind]] * numel, filled.get(types[kind])
        is_new = so_far is None or so_far + size > most
        calls, filled[types[kind]] = calls + is_new, size + (0 if is_new or so_far is None else so_far)
    return calls


def inbox_term(job: Job) -> Term:
    """Where other ranks write gradients: FSDP's largest unit without this rank's part, or the largest bucket."""
    s, w, sent = job.shape, job.world_size, sizes_of(job.sent_dtypes)
    if job.is_sharded:
        by_copies = job.weight_dtypes["head"] == job.computing and s.vocab_size % w == 0
        head = s.vocab_size * s.d_model if by_copies else 0  # else NCCL sends it
        b, most = job.number_bytes * job.weight_passes[1], max(block_matrices(s), head)
        return Term("incoming gradients", f"{b:g} x {most:,} x {w - 1} / {w}", b * most * (w - 1) / w)
    sizes = [(count, sent[kind] * rows * columns) for kind, count, rows, columns in tensors(s)]
    widened = max(sent[kind] / size for kind, size in sizes_of(job.gradient_dtypes).items())
    bucket_bytes = 0 if job.strategy == "individual" else (job.bucket_size_mb or 0) * MIB * widened
    bucket = max(bucket_bytes, *(nbytes for _, nbytes in sizes))
    value = min(bucket, sum(count * nbytes for count, nbytes in sizes))
    return Term("incoming gradients", "the largest bucket or gradient", value)


def added_seconds(nbytes: float, bandwidth: float, overhead_s: float, num_buckets: float) -> float:
    """Seconds that communication takes after the backward pass: s / (w n) + o n. The handout's model of DDP in buckets.

    s bytes of gradients are sent in n buckets of s / n bytes; an all-reduce takes o + bytes / w. Computing the
    gradients of a bucket takes as long as sending its bytes, t = s / (w n). The first bucket is ready after t; from
    then on each takes t + o to send. So sending ends at t + n (t + o), and computing at n t: t + n o remain.
    """
    return nbytes / (bandwidth * num_buckets) + overhead_s * num_buckets


def best_num_buckets(nbytes: float, bandwidth: float, overhead_s: float) -> float:
    """The n that minimises s / (w n) + o n, at least 1: its derivative -s / (w n^2) + o is 0 at n = sqrt(s / (w o)).

    A bucket then has s / n = sqrt(s w o) bytes, and 2 sqrt(s o / w) is added. Without overhead n is infinite.
    """
    return max(1.0, math.sqrt(nbytes / (bandwidth * overhead_s))) if overhead_s else math.inf


def best_bucket_bytes(nbytes: float, bandwidth: float, overhead_s: float) -> float:
    """The bucket size that adds least time, s / n* = sqrt(s w o); 0 if a call costs nothing."""
    return nbytes / best_num_buckets(nbytes, bandwidth, overhead_s)


def bucket_overhead(nbytes: float, bandwidth: float, overhead_s: float, bucket_bytes: float) -> float:
    """`added_seconds` for buckets of this size: n = s / size, rounded up."""
    return added_seconds(nbytes, bandwidth, overhead_s, max(1, math.ceil(nbytes / bucket_bytes)))


def all_reduce_cost(card: Card, world_size: int) -> tuple[float, float]:
    """Overhead o in s and bandwidth w in bytes/s of an all-reduce over world_size GPUs, from the numbers for two.

    As in `collective_seconds`: a ring sends 2 (world_size - 1) / world_size bytes per byte, and a call over more GPUs
    has the same overhead.
    """
    return card.latency_s, card.link * world_size / (2 * (world_size - 1))


def overhead_sections(
    nbytes: float,
    bandwidth: float,
    overhead_s: float,
    measured: Sequence[tuple[str, float, float]] = (),
    gradients: str = "4 N",
) -> list[Section]:
    """The best number of buckets, the time that some bucket sizes add, and measured times.

    measured: how a step ran, bytes of a bucket, seconds added. gradients: the formula of s.
    """
    best = best_num_buckets(nbytes, bandwidth, overhead_s)
    size = best_bucket_bytes(nbytes, bandwidth, overhead_s)
    given = (
        Term("s, gradients", gradients, nbytes),
        Term("w, all-reduce", "bytes/s of a large one", bandwidth, "bytes/s"),
        Term("o, a call", "time of a call, without its bytes", overhead_s, "s"),
    )
    added = added_seconds(nbytes, bandwidth, overhead_s, best) if math.isfinite(best) else 0.0
    optimum = (
        Term("buckets", "n* = sqrt(s / (w o)), at least 1", best, ""),
        Term("bytes a bucket", f"s / n* = sqrt(s w o) = {size / MIB:.4g} MiB", size),
        Term("added", "s / (w n*) + o n* = 2 sqrt(s o / w)", added, "s"),
    )
    rows = []
    for mib in (1, 10, 25, 100, 1000):
        count = max(1, math.ceil(nbytes / (mib * MIB)))
        working = f"n = {count}: {nbytes / (bandwidth * count) * 1e3:.4g} ms + {overhead_s * count * 1e3:.4g} ms"
        rows.append(Term(f"{mib} MiB", working, bucket_overhead(nbytes, bandwidth, overhead_s, mib * MIB), "s"))
    assumed = "assumed: computing a bucket's gradients takes as long as sending them"
    fewer = "a gradient larger than a bucket travels by itself, so a real model has fewer small buckets than this"
    sections = [
        Section("Given", given),
        Section("Optimum", optimum, (assumed,)),
        Section("Added by size", tuple(rows), (fewer,)),
    ]
    if measured:
        found = (Term(f"{size / MIB:g} MiB", how, added, "s") for how, size, added in measured)
        more = (
            "the model counts transfers after the backward pass; during it, transfers take memory bandwidth and",
            "multiprocessors from the products beside them, and an eager step waits for the host at every call",
        )
        sections.append(Section("Measured", tuple(found), more))
    return sections


def collective_section(nbytes: float, world_size: int, card: Card) -> Section:
    """The collectives on a tensor by `collective_seconds`, and the alternate all-reduce, which sends whole tensors."""
    k, o, beta = world_size, card.latency_s, card.link
    alpha, step_s = min(o, (k - 1) * o / 2), nbytes / (k * beta)
    gather = f"min(o, (k - 1) o / 2) + (k - 1) s / (k beta) = {_ms(alpha)} + {k - 1} x {_ms(step_s)}"
    terms = [
        Term("beta, a link", "w 2 (k - 1) / k", beta, "bytes/s"),
        Term("all-gather", gather, collective_seconds("all-gather", nbytes, k, card), "s"),
        Term("reduce-scatter", gather, collective_seconds("reduce-scatter", nbytes, k, card), "s"),
        Term("all-reduce", f"o + 2 (k - 1) s / (k beta) = {_ms(o)} + {2 * (k - 1)} x {_ms(step_s)}",
             collective_seconds("all-reduce", nbytes, k, card), "s"),
        Term("alternate all-reduce", f"(k - 1) (o / 2 + s / beta) = {k - 1} x ({_ms(o / 2)} + {_ms(nbytes / beta)})",
             ring_seconds("alternate all-reduce", nbytes, k, o / 2, beta), "s"),
    ]  # fmt: skip
    notes = (
        "a step of a ring takes o / 2 beside its bytes; an all-reduce over two GPUs has two steps; over more GPUs it",
        "takes o as well, as measured, and a gather or a scatter no more than that",
    )
    return Section(f"Collectives of s = {nbytes:,.0f} bytes over k = {k} GPUs, in rings", tuple(terms), notes)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"
