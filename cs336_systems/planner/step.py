"""The time of a training step, part by part: a roofline, as good kernels would take on a card that is kept busy.

Products are bound by operations, everything else by the bytes it reads and writes (Williams et al. 2009). Launch
overhead on the host is not included, so an eager step may take longer; one recorded as a CUDA graph does not.
"""

from .accounting import (
    KINDS,
    NUMBER_BYTES,
    attention_product_flops,
    block_formula,
    block_matrices,
    bytes_of_kinds,
    matmul_parameters,
    num_parameters,
    sizes_of,
    tensors,
    training_flops,
    widths,
)
from .activations import kept_blocks, offloaded_bytes
from .cards import Card
from .communication import sent
from .job import IN_BUCKETS, OVERLAPPED, Job
from .memory import in_blocks, over, parameter_bytes
from .products import gradients_of, product_seconds, products_seconds, rounding_bytes
from .working import Section, Term, as_factor, total

# Kernels per block, forward and backward, and the time from the end of one to the start of the next within a CUDA
# graph: for xl at 512 tokens, 83.1 ms, of which kernels ran for 78.9 (results/h200/ddp-streams).
KERNELS = {True: 45, False: 130}
GAP_S = 1.7e-6
EXPOSED_COPIES = "waiting for host memory"
"""The name of the term of offloaded activations."""
# Share of the copy bandwidth that eager elementwise kernels reach under autocast, where they mix types and the rotary
# ones read every other number: 0.54, 0.54, 0.57 and 0.54 in the forward and backward passes of
# results/h200/profile-kernels and 2.7B/profile-kernels, without attention.
MIXED_RATE = 0.55
# NCCL's thread blocks, each of which keeps a multiprocessor from computing while it sends (assumed: its usual number of
# channels over NVLink), and how often a byte that it sends passes memory: read and sent, received, reduced, received. A
# copy engine takes no multiprocessor. It reads a byte and writes it. The mean of gradients reads what came and what
# this rank has, and writes the mean.
CHANNELS = 24
PASSES = 4
COPY_PASSES = 2
MEAN_PASSES = 3

# Plain attention. The share of the rate of large products that products of heads of 64 and 80 reach (eager: 32 of 50
# TFLOP/s), and how often the scores pass through memory, forward and backward. Eager: from the kernels in
# results/h200/profile-kernels and 2.7B/profile-kernels. Compiled: a product writes or reads the scores, each fused
# kernel reads and writes them, and the rate is taken from the forward passes in results/h200/compiled.
SCORES_RATE = {False: 0.64, True: 0.8}
SCORES_PASSES = {False: (10, 13), True: (4, 7)}


def elementwise_bytes(job: Job) -> tuple[int, int]:
    """Bytes that a block's elementwise operations read and write: forward and backward.

    T tokens, c bytes per number, Q and K numbers in a token's queries and keys (`widths`). Compiled, everything between
    two products is one kernel, which reads its inputs and writes the inputs of the products and of the backward pass:

        forward    ln1 4 + c; sum and ln2 4 + 2 c; sum 8 + 2 c                                (16 + 5 c) T d
                   rotary of q and k; o by tokens                                             2 c T (Q + K) + 2 c T Q
                   silu(w1 x) w3 x                                                            3 c T d_ff
        backward   gradients of sums and norms 40, their casts and the rest 10 c              (40 + 10 c) T d
                   rotary, and norms of q and k; o by tokens                    2 c (or 3 c) T (Q + K) + 2 c T Q
                   of w1 x and w3 x                                                           5 c T d_ff
        again      with FP8 or a memory budget below 1, norms and silu(w1 x) w3 x             4 c T d + 3 c T d_ff
                   and o by tokens, unless scores are kept                                    2 c T Q

    The 16 and the 40 are for a float32 residual stream, and half of that for a 16-bit one.

    Eager, each operation is a kernel: a norm reads and writes 28 bytes per number, its casts 4 + c for each product
    that reads it (five), rotary 32 + 3 c each for q and k, and norms of them 28, sums 8 + c, silu and the product 5 c
    of d_ff; backward twice as much.
    """
    numbers, factors = _widths_by_name(job), _elementwise_factors(job)
    forward, backward = (sum(of_pass[name] * job.tokens * numbers[name] for name in numbers) for of_pass in factors)
    return forward, backward


def _widths_by_name(job: Job) -> dict[str, int]:
    """Numbers per token in the tensors of `elementwise_bytes`."""
    (of_q, of_k), s = widths(job.shape), job.shape
    own = {} if of_q == of_k == s.d_model else {"H D": of_q, "H_kv D": of_k}
    return {"d": s.d_model, **own, "d_ff": s.d_ff}


def _elementwise_factors(job: Job) -> tuple[dict[str, int], dict[str, int]]:
    """The factor of T and each width in `elementwise_bytes`, forward and backward."""
    c, norms = job.number_bytes, job.shape.qk_norm
    if job.compile:
        r, again, o_again = job.residual_number_bytes, job.recomputes_elementwise, 0 if job.holds_scores else 2
        forward = {"d": 4 * r + 5 * c, "H D": 4 * c, "H_kv D": 2 * c, "d_ff": 3 * c}
        backward = {"d": 10 * r + (10 + 4 * again) * c, "H D": (4 + norms + o_again * again) * c,
                    "H_kv D": (2 + norms) * c, "d_ff": (5 + 3 * again) * c}  # fmt: skip
    else:
        casts, of_heads = 5 * (4 + c) if c < 4 else 0, 32 + 3 * c + 28 * norms
        forward = {"d": 2 * 28 + casts + 2 * (8 + c), "H D": of_heads + 2 * c, "H_kv D": of_heads, "d_ff": 5 * c}
        backward = {name: 2 * factor for name, factor in forward.items()}
    for of_pass in (forward, backward):
        if "H D" not in _widths_by_name(job):
            of_pass["d"] += of_pass.pop("H D") + of_pass.pop("H_kv D")
    return forward, backward


def attention_seconds(job: Job, card: Card) -> tuple[float, float, str]:
    """Seconds of attention itself in all layers, forward and backward, and the working.

    flash: 2 L B N^2 d operations forward, the visible half, and 2.5 times as many backward (Dao 2023,
    FlashAttention-2, section 4.1), at the card's 16-bit rate for the length. In float32 attention is assumed to be
    slower by the same factor as products. naive: float32 products of all scores, 4 L B N^2 d and twice that, which do
    not reach the rate of large products, and SCORES_PASSES over the scores, 4 B H N^2 bytes. Compiled, everything
    between two products is one kernel.

    Raises ValueError for flash attention in a window and for kernels whose rate is not measured.
    """
    if job.why_no_time:
        raise ValueError(f"no prediction for the time: {job.why_no_time}")
    s, n = job.shape, job.shape.context_length
    flops = attention_product_flops(s, job.batch_size, n)
    if not job.holds_scores:
        rate = card.attention_rate(n) * (card.matmul_fp32 / card.matmul if job.number_bytes == 4 else 1)
        working = f"{3.5 * flops / 1e12:.4g} TFLOP / {rate / 1e12:.4g} TFLOP/s"
        return flops / rate, 2.5 * flops / rate, working
    scores, rate = 4 * s.num_layers * job.batch_size * s.num_heads * n * n, SCORES_RATE[job.compile] * card.matmul_fp32
    forward, backward = SCORES_PASSES[job.compile]
    of_scores = f"{forward + backward} passes over {scores / 1e9:.4g} GB of scores / {card.bandwidth / 1e12:g} TB/s"
    working = f"{6 * flops / 1e12:.4g} TFLOP in float32 / {rate / 1e12:.4g} TFLOP/s + {of_scores}"
    pass_s = scores / card.bandwidth
    return 2 * flops / rate + forward * pass_s, 4 * flops / rate + backward * pass_s, working


def compute_terms(job: Job, card: Card) -> list[Term]:
    """Forward and backward passes, without communication."""
    s, layers, nm = job.shape, job.shape.num_layers, matmul_parameters(job.shape)
    forward, backward = products_seconds(job, card)
    attention_forward, attention_backward, attention_working = attention_seconds(job, card)
    # In float32, types are not mixed.
    rate = card.bandwidth * (MIXED_RATE if job.number_bytes < 4 and not job.compile else 1)
    small = [layers * size / rate for size in elementwise_bytes(job)]
    w, rounding = job.weight_parts, rounding_bytes(job)
    cast = nm if NUMBER_BYTES[job.weight_dtypes["blocks"]] == 4 else job.casts_head * s.vocab_size * s.d_model
    casts = 12 * cast / w if job.number_bytes == 2 else 0
    loss_numbers = (4 if job.compile else 40) * job.number_bytes // 2
    loss, loss_formula = loss_numbers * job.tokens * s.vocab_size, f"{loss_numbers} T V"
    if job.loss_chunk_tokens:  # each chunk's weight gradient is written, then added to the previous ones
        chunks = -(-job.tokens // job.loss_chunk_tokens)
        loss, loss_formula = loss + chunks * 16 * s.vocab_size * s.d_model, f"{loss_formula} + {chunks} x 16 V d"
    operations, elementwise = 2 * nm * job.tokens, layers * sum(elementwise_bytes(job))
    terms = [
        Term("products, forward", f"2 N_m T = {operations / 1e12:.4g} TFLOP, in tiles and waves", forward, "s"),
        Term("products, backward", f"4 N_m T = {2 * operations / 1e12:.4g} TFLOP, in tiles and waves", backward, "s"),
        Term("attention", attention_working, attention_forward + attention_backward, "s"),
        Term("elementwise", _by_rate(elementwise, rate), sum(small), "s"),
        _through_memory("casts of weights and gradients", f"12 {'N_m' if cast == nm else 'V d'}{over(w)}", casts, card),
        _through_memory("loss", loss_formula, loss, card),
    ]
    if sum(rounding):
        terms.append(_through_memory("rounding to FP8", "5 or 3 bytes a number, 7 a weight", sum(rounding), card))
    recomputed = layers - kept_blocks(job)[0]
    if recomputed:
        again = small[0] + rounding[0] / card.bandwidth
        once = {"products": forward, "attention": attention_forward, "elementwise": again}
        if job.keeps_attention:
            del once["attention"]
        a_pass = " + ".join(f"{seconds * 1e3:.4g}" for seconds in once.values())
        working = f"{recomputed} / {layers} blocks x ({a_pass}) ms of {', '.join(once)}"
        terms.append(Term("forward again", working, recomputed / layers * sum(once.values()), "s"))
    if job.offloaded_blocks:
        terms.append(offload_term(job, card, sum(term.value for term in terms if term.name == "forward again")))
    kernels = KERNELS[job.compile] * layers
    return [*terms, Term("between kernels", f"{kernels} x {GAP_S * 1e6:g} us", kernels * GAP_S, "s")]


def offload_term(job: Job, card: Card, again_s: float) -> Term:
    """Seconds for which the GPU waits for copies of activations to and from host memory.

    again_s: seconds of recomputation in all layers, which is part of the backward pass.
    """
    s, head, sizes = job.shape, (job.tokens, job.shape.vocab_size, job.shape.d_model), offloaded_bytes(job)
    rate = card.bandwidth * (MIXED_RATE if job.number_bytes < 4 and not job.compile else 1)
    of_head = [head], gradients_of(*head)
    each = zip(
        products_seconds(job, card), of_head, attention_seconds(job, card)[:2], elementwise_bytes(job), strict=True
    )
    forward, backward = (
        (products - sum(product_seconds(*sides, job.number_bytes, card) for sides in heads) + attention) / s.num_layers
        + elementwise / rate
        for products, heads, attention, elementwise in each
    )
    backward += again_s / s.num_layers
    copies = [size / card.host_link for size in sizes]
    waits = waiting_seconds(copies, s.num_layers, job.offload_window, forward, backward)
    working = (
        f"{sum(sizes) / 1e9:.4g} GB each way / {card.host_link / 1e9:.4g} GB/s, of a block {max(copies) * 1e3:.4g} ms; "
        f"a block takes {forward * 1e3:.4g} ms forward and {backward * 1e3:.4g} ms backward"
    )
    return Term(EXPOSED_COPIES, working, waits, "s")


def waiting_seconds(copies: list[float], layers: int, window: int, forward: float, backward: float) -> float:
    """Seconds that blocks wait for copies which take so long, one after another, by `accounting.offload_window`.

    forward, backward: seconds of a block.
    """
    now, link, waited = 0.0, 0.0, 0.0
    done: dict[int, float] = {}
    for i in range(layers):  # after block i its copy starts, and that of block i - w has to be done
        now += forward
        if i < len(copies):
            done[i] = link = max(now, link) + copies[i]
        late = max(0.0, done.get(i - window, 0.0) - now)
        now, waited = now + late, waited + late
    done = {}
    for i in reversed(range(layers)):  # before block i the copy of block i - w starts, and its own has to be done
        if 0 <= i - window < len(copies):
            done[i - window] = link = max(now, link) + copies[i - window]
        late = max(0.0, done.get(i, 0.0) - now)
        now, waited = now + late + backward, waited + late
    return waited


def _by_rate(nbytes: float, rate: float) -> str:
    return f"{nbytes / 1e9:.4g} GB / {rate / 1e12:.4g} TB/s"


def _through_memory(name: str, formula: str, nbytes: float, card: Card) -> Term:
    """The time that bytes take to pass through memory."""
    working = f"{formula} = {_by_rate(nbytes, card.bandwidth)}" if nbytes else "none"
    return Term(name, working, nbytes / card.bandwidth, "s")


def communication_terms(job: Job, card: Card, backward_s: float) -> list[Term]:
    """The cost of sharing the work: exposed communication, interference of the rest, copies.

    Transfers that do not overlap (naive, flat, fsdp_simple) are fully exposed. During the backward pass, the last
    bucket, the overhead of every call (as in `communication.added_seconds`) and any time beyond the backward pass are
    exposed. Hidden transfers take memory bandwidth from the backward pass: NCCL's for PASSES times their bytes, those
    of copy engines for COPY_PASSES times, and for MEAN_PASSES more if they are gradients. NCCL's take CHANNELS
    multiprocessors as well. Gradients that are sent in another dtype are cast to it and back.
    """
    if job.world_size == 1:
        return []
    all_sent = sent(job, card)
    time, last = all_sent.seconds, all_sent.last_seconds
    left, hidden = time, 0.0
    if job.strategy in OVERLAPPED:
        left, hidden = last + max(0.0, time - last - backward_s), min(time - last, backward_s)
    a_call_us = all_sent.overhead_s / all_sent.calls * 1e6
    working = f"{left * 1e3:.4g} of {time * 1e3:.4g} ms of bytes + {all_sent.calls} calls x {a_call_us:.4g} us"
    by_nccl, passes = hidden, float(PASSES)
    if job.sends_by_copies:
        gathered, reduced = job.weight_passes if job.is_sharded else (1, 1)
        by_nccl, passes = 0.0, COPY_PASSES + MEAN_PASSES * reduced / (gathered + reduced)
    interference = by_nccl * CHANNELS / card.multiprocessors + passes * all_sent.bytes_a_gpu / card.bandwidth
    own, cast = sizes_of(job.gradient_dtypes), job.cast_to_send
    times = {"flat": 4, **dict.fromkeys(IN_BUCKETS, 2 if job.cuda_graph else 4)}.get(job.strategy, 0)
    copies = {
        kind: times * own[kind] + (2 * (cast[kind] + own[kind]) if cast[kind] and not job.is_sharded else 0)
        for kind in KINDS
    }
    formula, _, nbytes = bytes_of_kinds(job.shape, copies)
    passing = f"{_by_rate(passes * all_sent.bytes_a_gpu, card.bandwidth)}, {passes:.3g} passes"
    costs = f"{by_nccl * 1e3:.4g} ms x {CHANNELS} / {card.multiprocessors} multiprocessors + {passing}"
    terms = [
        Term("communication exposed", working, left + all_sent.overhead_s, "s"),
        Term("cost of hiding the rest", costs if hidden else "none", interference if hidden else 0, "s"),
        _through_memory("copies of gradients", formula, nbytes, card),
    ]
    if job.shard_optimizer:
        weights, _, nbytes = bytes_of_kinds(job.shape, sizes_of(job.weight_dtypes))
        share = nbytes * (job.world_size - 1) / job.world_size
        formula = f"{as_factor(weights)} ({job.world_size} - 1) / {job.world_size}"
        working = f"{formula} = {share / 1e9:.4g} GB / {card.link / 1e9:.4g} GB/s"
        terms.append(Term("sending weights", working, share / card.link, "s"))
    return terms


def step_terms(job: Job, card: Card) -> list[Term]:
    """All parts of a step, and their total.

    Clipping reads gradients and scales them, 4 N and 8 N bytes. AdamW in one kernel reads weight, gradient and two
    moments and writes all but the gradient, 28 N bytes. With bfloat16 weights all of them are half as many. The
    optimizer `fused` clips in the same kernel: only the norm is read before. Of a float16 matrix it reads the gradient
    and writes the weight, 2 + 2 bytes in place of the 4 of a float32 gradient. A bfloat16 matrix is half of its master,
    so 2 bytes fewer are written. Muon reads gradient and momentum and writes momentum and direction, 4 + 8 + 2 bytes
    for each number of a matrix. It reads the direction for its norm and divides by that, 2 + 4. It reads the update and
    weight and writes the weight, 2 + 8. That is 30, or 28, besides products.
    """
    terms = compute_terms(job, card)
    terms += communication_terms(job, card, backward_s=sum(term.value for term in terms) * 2 / 3)
    w, parts = job.weight_parts, job.state_parts
    if job.clip:
        passes = 1 if job.fused else 3
        read = {kind: passes * size for kind, size in sizes_of(job.gradient_dtypes).items()}
        formula, _, nbytes = bytes_of_kinds(job.shape, read)
        formula = f"{as_factor(formula)}{over(w)}" if w > 1 else formula
        terms.append(_through_memory("gradient norm and clipping", formula, nbytes / w, card))
    if job.optimizer:
        formula, _, update = _optimizer_bytes(job)
        terms.append(_through_memory("optimizer", formula, update, card))
    if job.optimizer and job.muon:
        seconds = orthogonalization_seconds(job, card)
        working = f"products of 5 (4 m^2 n + 2 m^3) operations for m x n{over(parts)}, in tiles and waves, and copies"
        terms.append(Term("orthogonalization", working, seconds, "s"))
    return [*terms, total("step", terms)]


def _optimizer_bytes(job: Job) -> tuple[str, str, float]:
    """Bytes that the optimizer reads and writes on a GPU: formula, working, value."""
    parts = job.state_parts
    sizes = dict.fromkeys(KINDS, 7 * job.weight_bytes) | ({"blocks": 30} if job.muon else {})
    if job.master_bytes == 2:  # halves: 2 + 2 bytes read and 2 + 2 written, in place of 4 + 4 + 2
        sizes |= {kind: sizes[kind] - 2 for kind in ("blocks", "head")}
    formula, filled, nbytes = bytes_of_kinds(job.shape, sizes)
    if parts > 1:
        formula, filled = as_factor(formula), as_factor(filled)
    return f"{formula}{over(parts)}", f"{filled}{over(parts)}", nbytes / parts


def orthogonalization_seconds(job: Job, card: Card) -> float:
    """Seconds of Muon's products for the matrices that a GPU owns, or for all if no state is sharded.

    In each of five steps there are the Gram matrix, its square and the update. To the last two a matrix of their size
    is added, which is copied first: 4 (m^2 + m n) bytes.
    """
    seconds = 0.0
    for kind, count, *sides in tensors(job.shape):
        m, n = sorted(sides)
        if kind == "blocks":
            products = sum(product_seconds(*sizes, 2, card) for sizes in ((m, m, n), (m, m, m), (m, n, m)))
            seconds += 5 * count * (products + 4 * (m * m + m * n) / card.bandwidth)
    return seconds / job.state_parts


def step_seconds(job: Job, card: Card) -> float:
    """The time of a step."""
    return step_terms(job, card)[-1].value


def step_sections(job: Job, card: Card) -> list[Section]:
    """Operations, bytes, time by part and MFU, if there is a prediction of the time."""
    s, t = job.shape, job.tokens
    n, nm, flops = num_parameters(s), matmul_parameters(s), training_flops(s, job.batch_size, s.context_length)
    d, layers = s.d_model, s.num_layers
    own, own_filled, own_bytes = bytes_of_kinds(s, sizes_of(job.gradient_dtypes))
    norms, block = 2 * d + 2 * s.head_size * s.qk_norm, block_formula(s)
    two = ("", "") if s.tie_embeddings else ("2 ", "2 x ")
    gradients = parameter_bytes(s, sizes_of(job.gradient_dtypes))
    update, update_filled, update_bytes = _optimizer_bytes(job)
    all_parameters = (
        f"{two[0]}V d + L ({block} + 2 d{' + 2 D' * s.qk_norm}) + d = "
        f"{two[1]}{s.vocab_size:,} x {d:,} + {layers} x {block_matrices(s) + norms:,} + {d:,}"
    )
    outside = "norms" if s.tie_embeddings else "embedding and norms"
    factors = {name: sum(of_pass[name] for of_pass in _elementwise_factors(job)) for name in _widths_by_name(job)}
    letters = " + ".join(f"{factor} T {name}" for name, factor in factors.items())
    filled = " + ".join(f"{factors[name]} x {t * width:,}" for name, width in _widths_by_name(job).items())
    elementwise = f"L ({letters}) = {layers} x ({filled}), forward and backward"
    of_q, length, b = widths(s)[0], s.context_length, job.batch_size
    attention, attention_filled = "2 L B N_ctx^2", f"2 x {layers} x {b} x {length}^2"
    if (windowed := s.num_windowed) and (window := min(s.window or length, length)) < length:
        attention = "2 B (L_full N_ctx^2 + L_windowed w (2 N_ctx - w))"
        of_windows = f"{windowed} x {window} x (2 x {length} - {window})"
        attention_filled = f"2 x {b} x ({layers - windowed} x {length}^2 + {of_windows})"
    attention, attention_filled = f"{attention} {'d' if of_q == d else 'H D'}", f"{attention_filled} x {of_q}"
    counts = [
        Term("N, parameters", all_parameters, n, ""),
        Term("N_m, in products", f"without {outside}: V d + L ({block}) = N - {n - nm:,}", nm, ""),
        Term("operations", f"3 (2 N_m T + {attention}) = 3 (2 x {nm:,} x {t:,} + {attention_filled})", flops, "FLOP"),
        Term("bytes of the optimizer", f"{update} = {update_filled}", update_bytes),
        Term("bytes of elementwise", elementwise, layers * sum(elementwise_bytes(job))),
        Term("gradients", f"{own} = {own_filled}{in_blocks(gradients, own_bytes)}", gradients),
    ]  # fmt: skip
    if job.world_size > 1:
        all_sent = sent(job, card)
        counts.append(Term("sent by a GPU", all_sent.working, all_sent.bytes_a_gpu))
    if job.why_no_time:
        return [Section("Counts of a step, a GPU", tuple(counts), (f"no time: {job.why_no_time}",))]
    terms = step_terms(job, card)
    step = terms[-1].value
    rates = [
        Term("tokens/s a GPU", f"{t:,} / {step * 1e3:.4g} ms", t / step, ""),
        Term("rate", f"{flops / 1e12:.4g} TFLOP / {step * 1e3:.4g} ms", flops / step, "FLOP/s"),
    ]
    if (peak := card.peak(job.computing)) is not None:
        of_peak = f"of the datasheet's {peak / 1e12:g} TFLOP/s in {job.computing}"
        rates.append(Term("MFU", of_peak, flops / step / peak, "share"))
    time = Section(f"Time on {card.name}, {job.world_size} GPU{'s' * (job.world_size > 1)}", tuple(terms))
    return [Section("Counts of a step, a GPU", tuple(counts)), time, Section("Rates", tuple(rates))]
