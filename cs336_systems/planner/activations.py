"""Activations that the forward pass saves for the backward pass: of one block, and of all blocks."""

import math
from dataclasses import replace

from .accounting import (
    SMALLEST_OFFLOADED,
    activation_bytes,
    attention_output_bytes,
    best_group,
    block_bytes,
    checkpointed_activation_bytes,
    naive_attention_bytes,
    residual_bytes,
    segments,
    widths,
)
from .job import Job
from .working import Section, Term, total


def block_parts(job: Job) -> dict[str, int]:
    """Bytes that one block saves for backward by part, including its input and excluding its weights.

    Eager: `accounting.activation_bytes`, and the input, which the first norm keeps if it is float32. Compiled: the
    tensors that torch.compile's partitioner keeps. It recomputes elementwise results unless a product reads them
    (counted with saved-tensor hooks; T = B N tokens, c bytes per number, Q and K as in `activation_bytes`):

        input, 1/rms twice             4 T d + 8 T
        both norms, output projection  3 c T d
        norms of q and k, if any: their inputs and 1/rms                     c T (Q + K) + 4 T (H + H_kv)
        attention   flash: q, k, v, o, o by tokens, logsumexp                c T (3 Q + 2 K) + 4 T H
                    naive: q, k, v, o by tokens, softmax, mask, max and sum  4 c T Q + 4 B H N^2 + N^2 + 8 T H
        ffn: w1 x, w3 x, their product                                       3 c T d_ff

    A 16-bit input is 2 T d. With a memory budget below 1 the partitioner keeps at most that share of everything but the
    input. It first drops all tensors that need no product to recompute: c T d of each norm, the product in ffn, and o
    by tokens where o is kept. With FP8 it drops them at any budget, because products read what is rounded from them,
    and rounding needs no product either. The share is then of what is left.
    """
    s, c, t, (of_q, of_k) = job.shape, job.number_bytes, job.tokens, widths(job.shape)
    length, d = s.context_length, s.d_model
    if not job.compile:
        is_narrow = job.residual_number_bytes == 2
        parts = activation_bytes(s, job.batch_size, length, job.precision, job.kernel, is_narrow)
        # If the input is 16-bit, the first norm keeps a float32 copy, and nothing keeps the input itself.
        entry = 0 if is_narrow else residual_bytes(s, job.batch_size, length)
        return {"input": entry, **parts}
    inside = c * t * (3 * of_q + 2 * of_k) + 4 * t * s.num_heads
    if job.holds_scores:
        scores = 4 * job.batch_size * s.num_heads * length * length + length * length
        inside = 4 * c * t * of_q + scores + 8 * t * s.num_heads
    inside += s.qk_norm * (c * t * (of_q + of_k) + 4 * t * (s.num_heads + s.kv_heads))
    entry, budget = job.residual_number_bytes * t * d + 8 * t, job.compile_memory_budget
    rest = {"norms, output_proj": 3 * c * t * d, "attention": inside, "ffn": 3 * c * t * s.d_ff}
    inside -= 0 if job.holds_scores else c * t * of_q
    of_products = {"norms, output_proj": c * t * d, "attention": inside, "ffn": 2 * c * t * s.d_ff}
    most = int(budget * sum((of_products if job.precision == "fp8" else rest).values()))
    if job.recomputes_elementwise:
        rest = of_products
    if sum(rest.values()) > most:
        rest = {"within the budget": most}
    return {"input": entry, **rest}


def kept_blocks(job: Job) -> tuple[int, int, int]:
    """How many blocks keep all their activations, how many inputs are kept, how many blocks are recomputed at once."""
    found = segments(job.checkpointing, job.shape.num_layers)
    recomputed = [count for count, is_checkpointed in found if is_checkpointed]
    return job.shape.num_layers - sum(recomputed), len(recomputed), max(recomputed, default=0)


def kept_bytes(job: Job) -> list[int]:
    """What each block keeps at the end of the forward pass, wherever that is: all of it, S, or its input, I.

    A block that keeps attention's outputs keeps O = `attention_output_bytes` beside I. A group keeps the input of its
    first block.
    """
    whole = sum(block_parts(job).values())
    entry = residual_bytes(job.shape, job.batch_size, job.shape.context_length, job.residual_number_bytes)
    if job.keeps_attention:
        entry += attention_output_bytes(job.shape, job.tokens, job.number_bytes)
    kept = []
    for count, is_checkpointed in segments(job.checkpointing, job.shape.num_layers):
        kept += [entry, *[0] * (count - 1)] if is_checkpointed else [whole]
    return kept


def offloaded_bytes(job: Job) -> list[int]:
    """What each offloaded block has in host memory: what it keeps, without tensors below SMALLEST_OFFLOADED.

    These may be 1/rms of each norm, 4 T bytes; logsumexp, 4 T H, or naive attention's mask, N_ctx^2, with maximum and
    sum, 4 T H each, if it is compiled. All other tensors are assumed to be larger.
    """
    s, t, whole = job.shape, job.tokens, sum(block_parts(job).values())
    of_heads, mask = 4 * t * s.num_heads, s.context_length**2
    of_attention = [mask, *([of_heads] * 2 * job.compile)] if job.holds_scores else [of_heads]
    of_norms = [4 * t, 4 * t, *([of_heads, 4 * t * s.kv_heads] * s.qk_norm)]
    found = []
    for nbytes in kept_bytes(job)[: job.offloaded_blocks]:
        tensors = [*of_norms, *of_attention] if nbytes == whole else [of_heads] * job.keeps_attention
        found.append(max(0, nbytes - sum(size for size in tensors if size < SMALLEST_OFFLOADED)))
    return found


def saved_bytes(job: Job) -> tuple[int, int]:
    """Activations of the blocks at the end of the forward pass, and the most that backward recomputes beside them.

    L S without checkpointing, (L - n) S + n I and S, or n I and K S, by `kept_bytes`, without what is in host memory.
    The input of the first recomputed block is already in memory. With the policy first, the last blocks free their S
    before any block is recomputed. The compiled code of a block that keeps attention's outputs has no memory budget.
    """
    parts = block_parts(job)
    whole = sum(parts.values())
    kept, _, again = kept_blocks(job)
    if job.checkpointing and job.checkpointing[0] == "first" and kept:
        again = 0
    held = sum(kept_bytes(job)) - sum(offloaded_bytes(job))
    if not job.keeps_attention:
        return held, max(0, again * whole - parts["input"] * (again > 0))
    outputs = attention_output_bytes(job.shape, job.tokens, job.number_bytes)
    in_block = sum(block_parts(replace(job, compile_memory_budget=1.0)).values()) - parts["input"] - outputs
    return held, again * in_block


def activation_sections(job: Job) -> list[Section]:
    """The size of one residual-stream activation, and the activations of a block, part by part."""
    s = job.shape
    b, n, d = job.batch_size, s.context_length, s.d_model
    single, own = (residual_bytes(s, b, n, size) for size in (4, job.number_bytes))
    stream = (
        Term("in single precision", f"B N d x 4 = {b} x {n} x {d} x 4", single),
        Term("the same in MB of 1024^2", f"{single:,} / 1024^2", single / 2**20, "MB"),
        *([Term(f"in {job.computing}", f"B N d x {job.number_bytes}", own)] if own != single else []),
    )
    terms = [Term(name, "", size) for name, size in block_parts(job).items()]
    scores = 4 * b * s.num_heads * n * n
    note = f"one matrix of attention scores, float32: 4 B H N^2 = 4 x {b} x {s.num_heads} x {n}^2 = {scores:,} bytes"
    how = f"{job.precision}, {'compiled' if job.compile else 'eager'}, attention {job.attention}"
    each = Section(f"Saved by a block for backward ({how})", (*terms, total("a block", terms)), (note,))
    return [Section("One activation of the residual stream", stream), each]


def attention_sections(batch_size: int, length: int, head_size: int) -> list[Section]:
    """Memory of plain attention on a GPU, term by term: float32, causal, without a head dimension."""
    b, n, d = batch_size, length, head_size
    workings = {
        "scores": f"S = 4 B N^2 = 4 x {b} x {n}^2",
        "masked_scores": "S",
        "softmax": "S",
        "masks": f"2 M = 2 N^2 = 2 x {n}^2",
        "saved_for_backward": "S + M + 12 B N D: softmax, a mask, q / sqrt(D), k and v",
        "forward_peak": "2 S + 2 M + 4 B N D",
        "backward_peak": "4 S + M + 8 B N D",
    }
    counted = naive_attention_bytes(b, n, n, d, is_causal=True, on_gpu=True)
    terms = tuple(Term(name.replace("_", " "), workings[name], size) for name, size in counted.items())
    return [Section(f"Plain attention, float32, causal, batch {b}, length {n}, head size {d}", terms)]


def counted_activations(job: Job, on_gpu: bool = True) -> tuple[int, int]:
    """`accounting.checkpointed_activation_bytes` of a job: at the end of its forward pass, and at the peak.

    Raises ValueError for compiled blocks and for an unknown kernel.
    """
    if job.compile:
        raise ValueError("no prediction for the case checkpointing with compiled blocks")
    how = (job.shape, job.batch_size, job.shape.context_length, job.precision, job.kernel, job.checkpointing)
    return checkpointed_activation_bytes(*how, on_gpu, job.keeps_attention)


def checkpointing_sections(job: Job) -> list[Section]:
    """The peak of forward and backward by the size of the checkpointed group, and the best size.

    Counted by `accounting.checkpointed_activation_bytes`, for an eager model without weights and their gradients.
    """
    s = job.shape
    how = (s, job.batch_size, s.context_length, job.precision, job.kernel)
    layers, entry = s.num_layers, residual_bytes(*how[:3])
    whole = block_bytes(*how)
    peaks = {k: checkpointed_activation_bytes(*how, ("groups", k), on_gpu=True)[1] for k in range(1, layers + 1)}
    best = min(peaks, key=lambda k: peaks[k])
    _, peak = checkpointed_activation_bytes(*how, on_gpu=True)
    terms = [Term("none", f"L A = {layers} x {whole:,}, and the head", peak)]
    for k in sorted({1, 2, 4, 8, round(math.sqrt(layers)), best, layers} & set(peaks)):
        working = f"ceil(L/K) I + K A = {-(-layers // k)} x {entry:,} + {k} x {whole:,}, and the rest"
        terms.append(Term(f"groups_{k}", working, peaks[k]))
    calculus = f"sqrt(L I / A) = sqrt({layers} x {entry:,} / {whole:,}), at least 1"
    found = (
        Term("least memory", "by trying every K", best, "blocks a group"),
        Term("by calculus", calculus, best_group(*how), "blocks a group"),
        Term("if A were I", f"sqrt(L) = sqrt({layers})", math.sqrt(layers), "blocks a group"),
        Term("more operations", "the forward pass of the blocks again: 1 of 3", 1 / 3, "share"),
    )
    notes = ["Chen et al. 2016, section 4: L / K inputs of I bytes stay, and one group holds K blocks of A bytes"]
    if job.precision != "fp32":
        notes += [
            "as in cs336 bench checkpointing, weights and residual stream are float32, and autocast keeps a copy of",
            "every weight until the loss is computed; cs336 plan memory counts the 16-bit matrices of cs336 train",
        ]
    return [Section("Peak of forward and backward by group", tuple(terms)), Section("Group size", found, tuple(notes))]
