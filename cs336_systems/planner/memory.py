"""Memory of a training step on one GPU: the constant part, the activations and gradients, and the moment of the peak.

Weights, gradients and AdamW's two moments are float32: 4 + 4 + 8 bytes per parameter, or half of that in bfloat16. A
16-bit matrix with a float32 master takes 2 + 2 + 4 + 8 (Rajbhandari et al. 2020, ZeRO, section 3.1), and 2 less in
bfloat16, because the weight is the master's upper half. The peak is at one of a few moments, because between them
activations are freed and gradients appear steadily, block by block.
"""

from collections.abc import Mapping
from dataclasses import replace

from cs336_basics.shape import ModelShape

from .accounting import (
    KINDS,
    NUMBER_BYTES,
    PLAIN_ATTENTION,
    block_formula,
    block_matrices,
    bytes_of_kinds,
    gradient_bytes,
    head_bytes,
    num_parameters,
    sizes_of,
    tensors,
    weight_copy_bytes,
)
from .activations import block_parts, kept_blocks, kept_bytes, offloaded_bytes, saved_bytes
from .communication import inbox_term
from .job import IN_BUCKETS, Job
from .working import GIB, MIB, Section, Term, as_factor, show, total

# cuBLAS's workspace on Hopper (getChosenWorkspaceSize in aten/src/ATen/cuda/CublasHandlePool.cpp), for each thread that
# computes. A step has two: its caller and autograd's.
WORKSPACE = 32 * MIB
MASTERS = {2: "lower halves of masters", 4: "masters"}
"""What the optimizer keeps of masters, by its bytes per number."""
LARGEST_BATCH = 1 << 20
# Share of a card's memory that is reserved for the CUDA context and for fragmentation, which are not counted. The 8B
# step without recomputation ran out of memory with 125.0 GiB allocated, and 11.78 of the 139.8 GiB of an H200, 8.4 %,
# reserved and unusable (results/h200/leaderboard-2026.jsonl, `fsdp none budget 0.75`).
RESERVE = 0.1
# Constants of c10/cuda/CUDACachingAllocator.cpp.
_SMALLEST = 512  # kMinBlockSize
_SMALL = MIB  # kSmallSize: up to this size, tensors are cut from 2 MiB segments
_SEGMENT = 20 * MIB  # kLargeBuffer: segments for tensors below _LARGE
_LARGE = 10 * MIB  # kMinLargeAlloc: from this size on, a tensor has a segment of its own
_ROUND = 2 * MIB  # kRoundLarge: such a segment is rounded up to a multiple of this


def allocated_bytes(nbytes: float) -> float:
    """Bytes that a fresh tensor takes, on average over equal tensors.

    A tensor takes its size rounded up to 512 bytes, plus the rest of its segment if that is at most 1 MiB: only a
    larger rest is split off (`should_split`). From 10 MiB on, the segment is the tensor's own, rounded up to 2 MiB.
    Below that it has 20 MiB, and the last tensor that fits gets the rest.

    A tensor in reused memory may get up to 1 MiB more. That is not counted. In segments that grow, which runs have by
    default (`use_device`), tensors have no rest: peaks are up to 3 % lower.
    """
    size = -(-int(nbytes) // _SMALLEST) * _SMALLEST
    if size <= _SMALL:
        return size
    if size >= _LARGE:
        rest = -size % _ROUND
        return size + (rest if rest <= _SMALL else 0)
    fit = _SEGMENT // size
    rest = _SEGMENT - fit * size
    return size + (rest / fit if rest <= _SMALL else 0)


def parameter_bytes(shape: ModelShape, sizes: Mapping[str, int], parts: int = 1) -> float:
    """Allocated memory of one tensor per parameter, with so many bytes per number of each of KINDS.

    Matrices are divided into parts by rows.
    """
    return sum(
        count * allocated_bytes(sizes[kind] * -(-rows // parts) * columns)
        for kind, count, rows, columns in tensors(shape)
    )


def constant_terms(job: Job) -> list[Term]:
    """Memory in use from the first step on: weights, optimizer state, gradients in buckets, and small tensors."""
    s, w, b = job.shape, job.weight_parts, job.weight_bytes
    weights, gradients = sizes_of(job.weight_dtypes), sizes_of(job.gradient_dtypes)
    # The sharded optimizer packs weights into large tensors, so the allocator adds nothing.
    packed = job.shard_optimizer and job.world_size > 1
    value = bytes_of_kinds(s, weights)[2] if packed else parameter_bytes(s, weights, w)
    terms = [_of_all_weights("weights", weights, job, w, value)]
    if job.rounds_weights_once:
        once = {"blocks": 1, "head": 0, "others": 0}
        terms.append(_of_all_weights("weights in FP8", once, job, 1, parameter_bytes(s, once)))
    if job.optimizer:
        if job.has_masters:
            masters = {"blocks": job.master_bytes, "head": job.master_bytes, "others": 0}
            value = parameter_bytes(s, masters, w) / (job.state_parts / w)
            terms.append(_of_all_weights(MASTERS[job.master_bytes], masters, job, job.state_parts, value))
        second = dict.fromkeys(KINDS, b) | ({"blocks": 0} if job.muon else {})
        both = {kind: b + size for kind, size in second.items()}
        state = sum(parameter_bytes(s, moment, w) for moment in (dict.fromkeys(KINDS, b), second))
        terms.append(_of_all_weights("optimizer state", both, job, job.state_parts, state / (job.state_parts / w)))
    if job.strategy in IN_BUCKETS:  # flat tensors of up to bucket_size_mb; a larger gradient is a bucket of its own
        most = (job.bucket_size_mb or 0) * MIB
        each = [(count, gradients[kind] * r * c) for kind, count, r, c in tensors(s)]
        together = sum(count * nbytes for count, nbytes in each if 2 * nbytes <= most)
        buckets = together + sum(count * allocated_bytes(nbytes) for count, nbytes in each if nbytes > most / 2)
        term = _of_all_weights("gradients in buckets", gradients, job, 1, buckets)
        terms.append(replace(term, working=f"{term.working}, in buckets of {job.bucket_size_mb:g} MiB"))
    if job.sends_by_copies:
        terms.append(inbox_term(job))
    length, size = s.context_length, s.head_size
    working = f"4 N_ctx d_head + 16 T = 4 x {length} x {size} + 16 x {job.tokens:,}"
    terms.append(Term("rotary tables, tokens", working, 4 * length * size + 16 * job.tokens))
    return [*terms, Term("workspace", "of cuBLAS, 32 MiB for each of two threads", 2 * WORKSPACE)]


def over(parts: int) -> str:
    """The end of a formula that is divided into parts."""
    return f" / {parts}" if parts > 1 else ""


def in_blocks(allocated: float, nbytes: float) -> str:
    """The end of a formula of bytes if the allocator's blocks are noticeably larger."""
    more = allocated / nbytes - 1 if nbytes else 0
    return f", + {more:.1%} for the allocator's blocks" if more >= 0.0005 else ""


def _of_all_weights(name: str, sizes: Mapping[str, int], job: Job, parts: int, value: float) -> Term:
    """A term of so many bytes per parameter of each kind, divided into parts."""
    formula, filled, exact = bytes_of_kinds(job.shape, sizes)
    if parts > 1:
        formula, filled = as_factor(formula), as_factor(filled)
    return Term(name, f"{formula}{over(parts)} = {filled}{over(parts)}{in_blocks(value, exact / parts)}", value)


def gradient_term(job: Job) -> Term:
    """All gradients of this GPU's weights, unless buckets already hold them."""
    if job.strategy in IN_BUCKETS:
        return Term("gradients", "in their buckets", 0)
    sizes = sizes_of(job.gradient_dtypes)
    value = parameter_bytes(job.shape, sizes, job.weight_parts)
    return _of_all_weights("gradients", sizes, job, job.weight_parts, value)


def copy_terms(job: Job) -> tuple[Term, Term]:
    """Autocast's copies of weights: at the end of the forward pass, and during the backward pass.

    Autocast casts each weight once and keeps the copy until its context ends, after the loss. The graph keeps the
    copies of blocks that are not checkpointed until their backward. Compiled code casts by itself and keeps only the
    latter. There are no copies if the weights, or the gathered weights of a strategy, have the dtype of computation;
    a tied head has one beside 16-bit matrices.
    """
    s = job.shape
    if not job.casts_head:
        nothing = Term("weight copies", "none", 0)
        return nothing, nothing
    rounding = parameter_bytes(s, dict.fromkeys(KINDS, 2)) / (2 * num_parameters(s))
    a_block, numbers = weight_copy_bytes(s, job.precision) * rounding, block_matrices(s)
    head = 0 if job.loss_chunk_tokens else 2 * s.vocab_size * s.d_model  # in chunks the loss casts by itself
    if not job.casts_weights:
        of_head = Term("weight copies", f"2 V d = {head:,}", head)
        return of_head, of_head

    def copies(blocks: int) -> Term:
        formula = f"2 ({block_formula(s)}) L" + (" + 2 V d" if head else "")
        working = f"{formula} = 2 x {numbers:,} x {blocks}" + (f" + {head:,}" if head else "")
        value, exact = blocks * a_block + head, 2 * numbers * blocks + head
        return Term("weight copies", working + in_blocks(value, exact) if exact else "none", value)

    kept = kept_blocks(job)[0]
    return copies(kept if job.compile else s.num_layers), copies(kept)


def head_term(job: Job) -> Term:
    """Activations of the last norm and the head, without the copy of the weight and the logits."""
    s, t, c = job.shape, job.tokens, job.number_bytes
    factor = job.residual_number_bytes + c if job.compile else 8 + c
    working = f"{factor} T d + 8 T = {factor} x {t * s.d_model:,} + 8 x {t:,}"
    if job.compile:
        return Term("last norm, head", working, factor * t * s.d_model + 8 * t)
    copy = 0 if job.precision == "fp32" else c * s.vocab_size * s.d_model
    saved = head_bytes(s, job.batch_size, s.context_length, job.precision) - 4 * t * s.vocab_size - copy
    return Term("last norm, head", working, saved)


def logits_terms(job: Job) -> tuple[Term, Term, Term]:
    """Logits when the loss is computed, at the peak of the loss's backward pass, and after it: T V numbers each.

    The training loop holds the logits until the step ends, c T V. Eager cross-entropy converts them to float32 (4 T V,
    unless they are), which `gather` and `logsumexp` save; logsumexp's exponentials are 4 T V more. Its backward pass
    holds three float32 tensors, grad * (x - result).exp(). Compiled, one kernel writes the gradient, c T V, and a
    float32 copy of it, 4 T V: the gradient of `gather` is scattered into zeros, which are in memory.

    In chunks of C tokens (`kernels.linear_cross_entropy`) there are C V logits and their gradient, 2 c C V, and in
    eager mode about three float32 tensors between them. The weight has a float32 gradient and a product that is added
    to it, 8 V d, and a copy in the dtype of computation. The gradient, V d numbers, stays until its own backward.
    """
    s, c, numbers = job.shape, job.number_bytes, job.tokens * job.shape.vocab_size
    if job.loss_chunk_tokens is not None:
        numbers, weight = job.logits_tokens * s.vocab_size, s.vocab_size * s.d_model
        logits = (2 * c if job.compile else 2 * c + 5 + (4 if c < 4 else 0)) * numbers
        products = c * numbers + (0 if c == 4 else 4) * weight  # the product is a separate tensor, then added
        copy = c if job.casts_head else 0
        stays = 2 if job.computes_narrow else 4
        working = f"max({logits:,}, {products:,}) of {job.logits_tokens:,} tokens + {4 + copy} V d, V d = {weight:,}"
        return (
            Term("logits and loss", working, max(logits, products) + (4 + copy) * weight),
            Term("gradient of the head", f"{stays} V d = {stays} x {weight:,}", stays * weight),
            Term("logits", "none", 0),
        )
    wide = 0 if job.compile or c == 4 else 4
    forward, backward = (0, 4 + c) if job.compile else (4, 12)
    at_loss, in_backward = c + wide + forward, c + wide + backward
    return (
        Term("logits and loss", f"{at_loss} T V = {at_loss} x {numbers:,}", at_loss * numbers),
        Term("logits and loss", f"{in_backward} T V = {in_backward} x {numbers:,}", in_backward * numbers),
        Term("logits", f"{c} T V = {c} x {numbers:,}", c * numbers),
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
    """Temporaries of a block's backward pass: `accounting.gradient_bytes`, and a matrix's gradient.

    That gradient is computed in the dtype of computation and then cast to that of a float32 weight: (c + 4) d d_ff.
    """
    s, c = job.shape, job.number_bytes
    wide = c + 4 if job.casts_weights else 0
    r, td, factors = job.residual_number_bytes, job.tokens * s.d_model, 2 * c * job.tokens * s.d_ff
    beyond = gradient_bytes(s, job.batch_size, s.context_length, job.precision, job.kernel, on_gpu=True) - 4 * td
    formula, value = f"{r} T d + {2 * c} T d_ff", f"{r * td:,} + {beyond:,}"
    if beyond != factors:
        scores = 12 if job.kernel in PLAIN_ATTENTION else 8
        formula = f"{r} T d + {scores} B H N_ctx^2 less freed activations"
    matrix = wide * s.d_model * s.d_ff
    working = f"{formula} + {wide} d d_ff = {value} + {matrix:,}" if wide else f"{formula} = {value}"
    return Term("gradients in a block", working, r * td + beyond + matrix)


def moments(job: Job) -> dict[str, list[Term]]:
    """The memory in use at each moment at which the peak may be."""
    constant, grads = constant_terms(job), gradient_term(job)
    cached, held = copy_terms(job)
    at_loss, in_backward, after_loss = logits_terms(job)
    units, block = unit_terms(job), block_term(job)
    saved, again = saved_bytes(job)
    kept, inputs, at_once = kept_blocks(job)
    whole = sum(block_parts(job).values())
    entry = f" and {inputs} inputs of blocks" if inputs else ""
    entry += ", each with attention's output and logsumexp" if job.keeps_attention else ""
    in_host_memory = offloaded_bytes(job)
    entry += f", less {sum(in_host_memory):,} in host memory" if in_host_memory else ""
    activations = Term("activations", f"{kept} blocks x {whole:,}{entry}", saved)
    copies = at_once * weight_copy_bytes(job.shape, job.precision) if job.casts_weights else 0
    working = f"{job.activation_checkpointing}: {again:,}, and {copies:,} of weights' copies"
    recomputed = Term("recomputed", working, again + copies)
    one = Term("activations", "of the first block", whole)
    gradients, b = sizes_of(job.gradient_dtypes), NUMBER_BYTES[job.gradient_dtypes["head"]]
    e = job.shape.vocab_size * job.shape.d_model
    in_bucket = job.strategy in IN_BUCKETS and not job.shape.tie_embeddings  # a tied one waits for the embedding's
    head_grad = Term("gradient of the head", f"{b} V d = {b} x {e:,}", 0 if in_bucket else b * e)
    if job.is_sharded:
        head_grad = units["end"]
    start = [*constant, activations]
    found = {
        "the loss": [*start, head_term(job), cached, at_loss, units["loss"]],
        "backward of the loss": [*start, head_term(job), held, in_backward, units["loss_backward"]],
        "backward of the last block": [
            *(*start, recomputed, held, after_loss, head_grad, block, units["last_backward"])
        ],
        "backward of the first block": [*constant, one, after_loss, grads, block, units["backward"]],
    }
    if in_host_memory:  # the last block before whose backward pass something is copied back has most gradients
        last, layers, window = job.shape.num_layers - 1, job.shape.num_layers, job.offload_window
        here = sum(kept_bytes(job)[:window]) + max(1, at_once) * whole
        of_blocks = parameter_bytes(job.shape, gradients | {"head": 0, "others": 0}, job.weight_parts) / layers
        working = f"{last - window} blocks x {of_blocks:,.0f}"
        found[f"backward of block {window + 1}"] = [
            *(*constant, Term("activations", f"of the first {window + 1} blocks", here), after_loss, head_grad),
            Term("gradients", working, 0 if job.strategy in IN_BUCKETS else (last - window) * of_blocks),
            *(block, units["backward"]),
        ]
        if (first_back := last - window) < len(in_host_memory):  # before the last block has freed its own
            ahead = Term("prefetched", f"block {first_back + 1}, from host memory", in_host_memory[first_back])
            found["backward of the last block"].append(ahead)
    if job.strategy == "flat" and job.world_size > 1:
        flat = _of_all_weights("all gradients flat", gradients, job, 1, bytes_of_kinds(job.shape, gradients)[2])
        found["gradients flattened"] = [*constant, after_loss, grads, flat]
    cast = dict.fromkeys(KINDS, 0) if job.is_sharded or job.strategy in ("none", "naive") else job.cast_to_send
    sent = _of_all_weights("gradients in transit", cast, job, 1, bytes_of_kinds(job.shape, cast)[2])
    found["the end of backward"] = [*constant, after_loss, grads, units["end"], sent]
    if job.shape.tie_embeddings:  # autograd adds it to the head's, in place unless that is a transposed view
        number = job.number_bytes if job.is_sharded else b
        more = number if job.casts_head or job.loss_chunk_tokens else 2 * number
        own = Term("gradient of the embedding", f"{more} V d = {more} x {e:,}", more * e)
        waiting = Term("gradient of the head", f"{number} V d = {number} x {e:,}", number * e)
        found["backward of the first block"] += [waiting] if job.is_sharded or job.strategy in IN_BUCKETS else []
        found["the end of backward"] += [waiting, own] if job.strategy in IN_BUCKETS else [own]
    return found


def peak_bytes(job: Job) -> float:
    """Memory at the peak."""
    return max(sum(term.value for term in terms) for terms in moments(job).values())


def part_bytes(job: Job) -> dict[str, float]:
    """Weights, gradients and optimizer state, the activations at the end of the forward pass, and the peak.

    Buckets count as gradients; copies of weights and logits count as activations.
    """
    constant = {term.name: term.value for term in constant_terms(job)}
    left = (head_term(job), copy_terms(job)[0], logits_terms(job)[2])
    return {
        "parameters": constant["weights"],
        "gradients": constant.get("gradients in buckets", 0) + gradient_term(job).value,
        "optimizer_state": sum(constant.get(name, 0) for name in ("optimizer state", *MASTERS.values())),
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


def memory_sections(job: Job, memory_gib: float | None = None) -> list[Section]:
    """The terms at the moment of the peak, the sum at each moment, and the largest batch that fits a card."""
    at = moments(job)
    sums = {name: sum(term.value for term in terms) for name, terms in at.items()}
    when = max(sums, key=sums.__getitem__)
    terms = [term for term in at[when] if term.value]
    formula, _, exact = bytes_of_kinds(job.shape, sizes_of(job.weight_dtypes))
    more, types = terms[0].value * job.weight_parts / exact - 1, " and ".join(dict.fromkeys(job.weight_dtypes.values()))
    rounding = (
        f"tensors are counted in blocks of PyTorch's allocator: {types} weights take "
        f"{more:.1%} more than {as_factor(formula)}{over(job.weight_parts)} bytes"
    )
    sections = [
        Section(f"Memory of a GPU at its peak, {when}", (*terms, total("peak", terms)), (rounding,)),
        Section("At each moment", tuple(Term(name, "", value) for name, value in sums.items())),
    ]
    if memory_gib is not None:
        usable = (1 - RESERVE) * memory_gib
        batch = largest_batch(job, usable * GIB)
        needed = show(peak_bytes(replace(job, batch_size=max(1, batch))), "bytes")
        working = f"{needed} at its peak, of {usable:.4g} GiB" if batch else f"one takes {needed}, of {usable:.4g} GiB"
        note = f"{RESERVE:.0%} of {memory_gib:g} GiB is kept back for the CUDA context and fragmentation"
        sections.append(Section("Largest batch that fits", (Term("sequences a GPU", working, batch, ""),), (note,)))
    return sections
