"""Memory of a training step on one GPU: what is always there, what comes and goes, and when the peak is.

Weights, gradients and AdamW's two moments are float32: 4 + 4 + 8 bytes per parameter (Rajbhandari et al. 2020, ZeRO,
section 3.1, count mixed precision with float16 weights in the same way), or half of that in bfloat16. The peak is at
one of a few moments, because between them, block by block, activations are freed and gradients appear at a steady pace.
"""

from collections.abc import Iterator
from dataclasses import replace

from cs336_basics.shape import ModelShape

from .accounting import (
    NUMBER_BYTES,
    PLAIN_ATTENTION,
    block_matrices,
    gradient_bytes,
    head_bytes,
    num_parameters,
    weight_copy_bytes,
)
from .activations import block_parts, kept_blocks, saved_bytes
from .allocator import allocated_bytes
from .job import IN_BUCKETS, Job
from .working import GIB, MIB, Section, Term, show, total

# cuBLAS's workspace on Hopper (getChosenWorkspaceSize in aten/src/ATen/cuda/CublasHandlePool.cpp), for each thread that
# computes. A step has two: autograd's and the one that calls it.
WORKSPACE = 32 * MIB
LARGEST_BATCH = 1 << 20
# Share of a card's memory that is reserved for what is not counted: the CUDA context, and what the allocator holds and
# cannot use. The 8B step without recomputation ran out of memory with 125.0 GiB allocated, and 11.78 of the 139.8 GiB
# of an H200, 8.4 %, reserved and unusable (results/h200/leaderboard-2026.jsonl, `fsdp none budget 0.75`).
RESERVE = 0.1


def tensors(shape: ModelShape) -> Iterator[tuple[int, int, int]]:
    """The parameters by size: how many there are, rows and columns; a norm's weight is one row."""
    d, layers = shape.d_model, shape.num_layers
    yield 2, shape.vocab_size, d
    yield 4 * layers, d, d
    yield 3 * layers, d, shape.d_ff
    yield 2 * layers + 1, 1, d


def parameter_bytes(shape: ModelShape, number_bytes: int, parts: int = 1) -> float:
    """Memory of one tensor per parameter, as the allocator gives it; matrices are divided into parts by rows."""
    sizes = ((count, -(-rows // parts) * columns) for count, rows, columns in tensors(shape))
    return sum(count * allocated_bytes(number_bytes * numel) for count, numel in sizes)


def constant_terms(job: Job) -> list[Term]:
    """What is always there from the first step on: weights, optimizer state, gradients that stay, and small tensors."""
    s, n = job.shape, num_parameters(job.shape)
    w = job.world_size if job.is_sharded else 1
    # The sharded optimizer packs weights into large tensors, so the allocator adds nothing.
    packed = job.shard_optimizer and job.world_size > 1
    b = job.weight_bytes
    weights = b * n if packed else parameter_bytes(s, b, w)
    terms = [_of_all_weights("weights", b, job, w, weights)]
    if job.optimizer:
        state = 2 * parameter_bytes(s, b, w) / (job.state_parts / w)
        terms.append(_of_all_weights("optimizer state", 2 * b, job, job.state_parts, state))
    if job.strategy in IN_BUCKETS:
        buckets = _buckets(job)
        working = f"{b} N = {b} x {n:,}{in_blocks(buckets, b * n)}, in buckets of {job.bucket_size_mb:g} MiB"
        terms.append(Term("gradients in buckets", working, buckets))
    length, half = s.context_length, s.d_model // s.num_heads // 2
    small = 8 * length * half + 16 * job.tokens
    terms.append(
        Term("rotary tables, tokens", f"4 N_ctx d_head + 16 T = 4 x {length} x {2 * half} + 16 x {job.tokens:,}", small)
    )
    return [*terms, Term("workspace", "of cuBLAS, 32 MiB for each of two threads", 2 * WORKSPACE)]


def over(parts: int) -> str:
    """The end of a formula that is divided into parts."""
    return f" / {parts}" if parts > 1 else ""


def in_blocks(allocated: float, nbytes: float) -> str:
    """The end of a formula of bytes if the allocator's blocks are noticeably larger."""
    more = allocated / nbytes - 1
    return f", + {more:.1%} of the allocator's blocks" if more >= 0.0005 else ""


def _of_all_weights(name: str, number_bytes: int, job: Job, parts: int, value: float) -> Term:
    """A term of number_bytes per parameter, divided into parts, with what the allocator's blocks add."""
    n = num_parameters(job.shape)
    formula = f"{number_bytes} N{over(parts)} = {number_bytes} x {n:,}{over(parts)}"
    return Term(name, formula + in_blocks(value, number_bytes * n / parts), value)


def _buckets(job: Job) -> float:
    """Flat tensors of up to bucket_size_mb; a larger gradient is a bucket of its own."""
    most, sizes = (job.bucket_size_mb or 0) * MIB, [(n, job.weight_bytes * r * c) for n, r, c in tensors(job.shape)]
    alone = [(count, nbytes) for count, nbytes in sizes if nbytes > most / 2]
    together = sum(count * nbytes for count, nbytes in sizes if 2 * nbytes <= most)
    return together + sum(count * allocated_bytes(nbytes) for count, nbytes in alone)


def gradient_term(job: Job) -> Term:
    """All gradients of this GPU's weights, unless buckets already hold them."""
    if job.strategy in IN_BUCKETS:
        return Term("gradients", "in their buckets", 0)
    w = job.world_size if job.is_sharded else 1
    b = job.weight_bytes
    return _of_all_weights("gradients", b, job, w, parameter_bytes(job.shape, b, w))


def copy_terms(job: Job) -> tuple[Term, Term]:
    """Autocast's copies of weights: at the end of the forward pass, and those that backward still needs.

    Autocast casts each weight once and keeps the copy until its context ends, after the loss. The graph keeps the
    copies of blocks that are not checkpointed until their backward. Compiled code casts by itself and keeps only the
    latter. There are no copies if a strategy gathers weights in the dtype of computation, or if they have it already.
    """
    s = job.shape
    if job.precision == "fp32" or job.computes_narrow:
        nothing = Term("weight copies", "none", 0)
        return nothing, nothing
    rounding = parameter_bytes(s, 2) / (2 * num_parameters(s))
    a_block = weight_copy_bytes(s, job.precision) * rounding
    head = 0 if job.loss_chunk_tokens else 2 * s.vocab_size * s.d_model  # in chunks the loss casts by itself
    kept = kept_blocks(job)[0]
    cached = kept if job.compile else s.num_layers

    def copies(blocks: int) -> Term:
        numbers = block_matrices(s)
        formula = "2 (4 d^2 + 3 d d_ff) L" + (" + 2 V d" if head else "")
        working = f"{formula} = 2 x {numbers:,} x {blocks}" + (f" + {head:,}" if head else "")
        value, exact = blocks * a_block + head, 2 * numbers * blocks + head
        return Term("weight copies", working + in_blocks(value, exact) if exact else "none", value)

    return copies(cached), copies(kept)


def head_term(job: Job) -> Term:
    """What the last norm and the head save, without the weight's copy and the logits."""
    s, t, c = job.shape, job.tokens, job.number_bytes
    if job.compile:
        r = job.residual_number_bytes
        return Term("last norm, head", _last_norm(job, r + c), (r + c) * t * s.d_model + 8 * t)
    copy = 0 if job.precision == "fp32" else c * s.vocab_size * s.d_model
    saved = head_bytes(s, job.batch_size, s.context_length, job.precision) - 4 * t * s.vocab_size - copy
    return Term("last norm, head", _last_norm(job, 8 + c), saved)


def _last_norm(job: Job, number_bytes: int) -> str:
    t, d = job.tokens, job.shape.d_model
    return f"{number_bytes} T d + 8 T = {number_bytes} x {t * d:,} + 8 x {t:,}"


def logits_terms(job: Job) -> tuple[Term, Term, Term]:
    """Logits when the loss is computed, at the peak of the loss's backward pass, and after it: T V numbers each.

    The training loop holds the logits until the step ends, c T V. Eager cross-entropy converts them to float32 (4 T V,
    unless they are), which `gather` and `logsumexp` save; logsumexp's exponentials are 4 T V more. Its backward pass
    holds three float32 tensors, grad * (x - result).exp(). Compiled, one kernel writes the gradient, c T V, and a
    float32 copy of it, 4 T V: the gradient of `gather` is scattered into zeros, which are in memory.

    In chunks of C tokens (`kernels.linear_cross_entropy`) there are C V logits and their gradient, 2 c C V, and in
    eager mode three or so float32 tensors between them. For the weight there are a float32 gradient and what is added
    to it, 8 V d, and a copy in the dtype of computation. The gradient, V d numbers, stays until its own backward.
    """
    c, numbers = job.number_bytes, job.tokens * job.shape.vocab_size
    if job.loss_chunk_tokens is not None:
        return _chunk_terms(job)
    wide = 0 if job.compile or c == 4 else 4
    forward, backward = (0, 4 + c) if job.compile else (4, 12)
    at_loss, in_backward = c + wide + forward, c + wide + backward
    return (
        Term("logits and loss", f"{at_loss} T V = {at_loss} x {numbers:,}", at_loss * numbers),
        Term("logits and loss", f"{in_backward} T V = {in_backward} x {numbers:,}", in_backward * numbers),
        Term("logits", f"{c} T V = {c} x {numbers:,}", c * numbers),
    )


def _chunk_terms(job: Job) -> tuple[Term, Term, Term]:
    s, c = job.shape, job.number_bytes
    numbers, weight = job.logits_tokens * s.vocab_size, s.vocab_size * s.d_model
    logits = (2 * c if job.compile else 2 * c + 5 + (4 if c < 4 else 0)) * numbers
    products = c * numbers + (0 if c == 4 else 4) * weight  # the product is a tensor of its own, then added
    copy = 0 if c == 4 or job.computes_narrow else c
    stays = (2 if job.computes_narrow else 4) * weight
    working = f"max({logits:,}, {products:,}) of {job.logits_tokens:,} tokens + {4 + copy} V d, V d = {weight:,}"
    return (
        Term("logits and loss", working, max(logits, products) + (4 + copy) * weight),
        Term("gradient of the head", f"{stays // weight} V d = {stays // weight} x {weight:,}", stays),
        Term("logits", "none", 0),
    )


def unit_terms(job: Job) -> dict[str, Term]:
    """FSDP's gathered units and their gradients, by moment: c P bytes per block of P parameters, c V d per embedding.

    At the loss only the head is gathered; in its backward pass the last block is too. In the backward pass at most two
    blocks are gathered and have gradients, of which c P / w bytes each have arrived. The head's are freed first, the
    embedding's at the end. If weights stay whole for the backward pass, all L blocks are gathered when it begins.
    """
    s, w, c, layers = job.shape, job.world_size, job.number_bytes, job.shape.num_layers
    p, e = block_matrices(s), s.vocab_size * s.d_model
    if not job.is_sharded:
        nothing = Term("whole units", "none", 0)
        return dict.fromkeys(("loss", "loss_backward", "last_backward", "backward", "end"), nothing)
    two = Term("whole units, gradients", f"(4 + 2 / {w}) {c} P, P = {p:,}", (4 + 2 / w) * c * p)
    found = {
        "loss": Term("whole units", f"{c} V d = {c} x {e:,}", c * e),
        "loss_backward": Term("whole units", f"{c} (V d + P) = {c} x ({e:,} + {p:,})", c * (e + p)),
        "last_backward": two,
        "backward": two,
        "end": Term("whole units, gradients", f"(1 + 1 / {w}) {c} V d, V d = {e:,}", (1 + 1 / w) * c * e),
    }
    if not job.reshard_after_forward:
        whole = Term("whole units", f"{c} (V d + P L) = {c} x ({e:,} + {p:,} x {layers})", c * (e + p * layers))
        working = f"({layers} + 2 + 2 / {w}) {c} P, P = {p:,}"
        last = Term("whole units, gradients", working, (layers + 2 + 2 / w) * c * p)
        found |= {"loss": whole, "loss_backward": whole, "last_backward": last}
    return found


def block_term(job: Job) -> Term:
    """What the backward pass of a block needs for itself: `accounting.gradient_bytes`, and a matrix's gradient.

    That gradient is computed in the dtype of computation and then cast to float32: (c + 4) d d_ff under autocast.
    """
    s, c = job.shape, job.number_bytes
    wide = 0 if c == 4 or job.computes_narrow else c + 4
    r, td, factors = job.residual_number_bytes, job.tokens * s.d_model, 2 * c * job.tokens * s.d_ff
    beyond = gradient_bytes(s, job.batch_size, s.context_length, job.precision, job.kernel, on_gpu=True) - 4 * td
    what, value = f"{r} T d + {2 * c} T d_ff", f"{r * td:,} + {beyond:,}"
    if beyond != factors:
        scores = 12 if job.kernel in PLAIN_ATTENTION else 8
        what = f"{r} T d + {scores} B H N_ctx^2 less what is gone"
    matrix = wide * s.d_model * s.d_ff
    working = f"{what} + {wide} d d_ff = {value} + {matrix:,}" if wide else f"{what} = {value}"
    return Term("gradients in a block", working, r * td + beyond + matrix)


def moments(job: Job) -> dict[str, list[Term]]:
    """What is in memory at each of the moments at which the peak may be."""
    constant, grads = constant_terms(job), gradient_term(job)
    cached, held = copy_terms(job)
    logits = logits_terms(job)
    units = unit_terms(job)
    saved, again = saved_bytes(job)
    kept, inputs, at_once = kept_blocks(job)
    copies = 0 if job.computes_narrow else at_once * weight_copy_bytes(job.shape, job.precision)
    entry = f" and {inputs} inputs of blocks" if inputs else ""
    whole = sum(block_parts(job).values())
    activations = Term("activations", f"{kept} blocks x {whole:,}{entry}", saved)
    working = f"{job.activation_checkpointing}: {again:,}, and {copies:,} of weights' copies"
    recomputed = Term("made again", working, again + copies)
    one = Term("activations", "the first block's", whole)
    first = [activations, head_term(job)]
    in_buckets = job.strategy in IN_BUCKETS
    b, e, n = job.weight_bytes, job.shape.vocab_size * job.shape.d_model, num_parameters(job.shape)
    head_grad = (
        units["end"]
        if job.is_sharded
        else Term("gradient of the head", f"{b} V d = {b} x {e:,}", 0 if in_buckets else b * e)
    )
    block = block_term(job)
    found = {
        "the loss": [*constant, *first, cached, logits[0], units["loss"]],
        "backward of the loss": [*constant, *first, held, logits[1], units["loss_backward"]],
        "backward of the last block": [
            *(*constant, activations, recomputed, held, logits[2], head_grad, block, units["last_backward"])
        ],
        "backward of the first block": [*constant, one, logits[2], grads, block, units["backward"]],
    }
    if job.strategy == "flat" and job.world_size > 1:
        flat = Term("all gradients flat", f"{b} N = {b} x {n:,}", b * n)
        found["gradients flattened"] = [*constant, logits[2], grads, flat]
    is_copied = job.sent_dtype != job.weight_dtype and not job.is_sharded and job.strategy not in ("none", "naive")
    wire = NUMBER_BYTES[job.sent_dtype] if is_copied else 0
    sent = Term("gradients on their way", f"{wire} N = {wire} x {n:,}", wire * n)
    found["the end of backward"] = [*constant, logits[2], grads, units["end"], sent]
    return found


def peak(job: Job) -> tuple[str, float]:
    """The moment of peak memory, and its bytes."""
    sums = {name: sum(term.value for term in terms) for name, terms in moments(job).items()}
    return max(sums.items(), key=lambda each: each[1])


def peak_bytes(job: Job) -> float:
    """Memory at the peak."""
    return peak(job)[1]


def part_bytes(job: Job) -> dict[str, float]:
    """The parts that stay from step to step, what the forward pass leaves behind before the loss, and the peak.

    Buckets count as gradients; copies of weights and logits count as what the forward pass leaves.
    """
    constant = {term.name: term.value for term in constant_terms(job)}
    left = (head_term(job), copy_terms(job)[0], logits_terms(job)[2])
    return {
        "parameters": constant["weights"],
        "gradients": constant.get("gradients in buckets", 0) + gradient_term(job).value,
        "optimizer_state": constant.get("optimizer state", 0),
        "activations": saved_bytes(job)[0] + sum(term.value for term in left),
        "peak": peak_bytes(job),
    }


def verdict(needed_bytes: float, memory_bytes: float) -> str:
    """Whether a peak fits into a card's memory: fits, may not fit (it needs part of RESERVE), or does not fit."""
    if needed_bytes > memory_bytes:
        return "does not fit"
    return "fits" if needed_bytes <= (1 - RESERVE) * memory_bytes else "may not fit"


def largest_batch(job: Job, memory_bytes: float) -> int:
    """The most sequences per GPU whose step fits into this memory, 0 if not even one does; at most 2^20."""

    def fits(batch_size: int) -> bool:
        return peak_bytes(replace(job, batch_size=batch_size)) <= memory_bytes

    low, high = 0, 1
    while high <= LARGEST_BATCH and fits(high):
        low, high = high, min(2 * high, LARGEST_BATCH + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _rounding(job: Job) -> str:
    """Why terms of all weights are larger than their formulas."""
    b, parts = job.weight_bytes, job.world_size if job.is_sharded else 1
    more = constant_terms(job)[0].value * parts / (b * num_parameters(job.shape)) - 1
    return (
        f"tensors are counted in blocks of PyTorch's allocator: {'float32' if b == 4 else 'bfloat16'} weights take "
        f"{more:.1%} more than {b} N{over(parts)} bytes"
    )


def memory_sections(job: Job, memory_gib: float | None = None) -> list[Section]:
    """The parts at the moment of the peak, all moments, and the largest batch that fits a card."""
    at = moments(job)
    sums = {name: sum(term.value for term in terms) for name, terms in at.items()}
    when = max(sums, key=lambda name: sums[name])
    terms = [term for term in at[when] if term.value]
    sections = [
        Section(f"Memory of a GPU at its peak, {when}", (*terms, total("peak", terms)), (_rounding(job),)),
        Section("At each moment", tuple(Term(name, "", value) for name, value in sums.items())),
    ]
    if memory_gib is not None:
        usable = (1 - RESERVE) * memory_gib
        batch = largest_batch(job, usable * GIB)
        peak = show(peak_bytes(replace(job, batch_size=max(1, batch))), "bytes")
        working = f"{peak} at its peak, of {usable:.4g} GiB" if batch else f"one takes {peak}, of {usable:.4g} GiB"
        note = (
            f"of {memory_gib:g} GiB {RESERVE:.0%} are kept back for what is not counted: the CUDA context, and what "
            "the allocator holds and cannot use (fragmentation)"
        )
        sections.append(Section("Largest batch that fits", (Term("sequences a GPU", working, batch, ""),), (note,)))
    return sections
