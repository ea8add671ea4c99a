"""Counts of a model: parameters, floating-point operations, memory. Pure functions, each with its formula.

One multiply and one add count as two operations, as in the handout and in the papers cited.
"""

import math
from collections.abc import Iterator, Mapping

from cs336_basics.shape import ModelShape

NUMBER_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}  # fp8: but for the inputs of products, which have 1
PLAIN_ATTENTION = ("naive", "scaled_dot_prod_attention")
"""Attention kernels that keep all scores in memory, by registered name."""
FLASH_ATTENTION = ("auto", "sdpa", "sdpa_flash", "sdpa_cudnn", "flash_torch", "flash_triton", "flash_triton_simple",
                   "flash_triton_compiled", "flash_cuda", "flash_attention_triton")  # fmt: skip
"""Attention kernels that keep no scores for the backward pass."""


def widths(shape: ModelShape) -> tuple[int, int]:
    """Numbers in a token's queries, H D, and in its keys, H_kv D: d and d in the handout's model."""
    return shape.num_heads * shape.head_size, shape.kv_heads * shape.head_size


def tensors(shape: ModelShape) -> Iterator[tuple[str, int, int, int]]:
    """Kind, count, rows and columns of the parameters of each size; a norm's weight is one row.

    A tied head has the embedding's weight, which stays float32 as an embedding does (`training.build`).
    """
    (of_q, of_k), d, layers = widths(shape), shape.d_model, shape.num_layers
    if not shape.tie_embeddings:
        yield "head", 1, shape.vocab_size, d
    yield "others", 1, shape.vocab_size, d
    yield "blocks", layers, of_q, d
    yield "blocks", 2 * layers, of_k, d
    yield "blocks", layers, d, of_q
    yield "blocks", 3 * layers, d, shape.d_ff
    yield "others", 2 * layers + 1, 1, d
    if shape.qk_norm:
        yield "others", 2 * layers, 1, shape.head_size


def num_parameters(shape: ModelShape) -> int:
    """All parameters: 2 V d (embedding and untied head) + L (P + 2 d) + d.

    A block has P numbers in matrices, and two norms; one more norm precedes the head. A tied head adds nothing. Norms
    of queries and keys add 2 D a block.
    """
    return sum(count * rows * columns for _, count, rows, columns in tensors(shape))


def block_matrices(shape: ModelShape) -> int:
    """Parameters in a block's seven matrices, without its norms: P = 2 d D (H + H_kv) + 3 d d_ff.

    That is 4 d^2 + 3 d d_ff where the heads divide d and keys have as many as queries.
    """
    heads = shape.num_heads + shape.kv_heads
    return 2 * shape.d_model * shape.head_size * heads + 3 * shape.d_model * shape.d_ff


def block_formula(shape: ModelShape) -> str:
    """P in letters."""
    is_square = widths(shape) == (shape.d_model, shape.d_model)
    return f"{'4 d^2' if is_square else '2 d D (H + H_kv)'} + 3 d d_ff"


def matmul_parameters(shape: ModelShape) -> int:
    """Parameters in matrix products: V d + L P. Excludes norms, and the embedding: it is a look-up."""
    return shape.vocab_size * shape.d_model + shape.num_layers * block_matrices(shape)


SMALLEST_OFFLOADED = 2**20
"""Bytes of the smallest tensor that `train.activation_offload` copies to host memory."""
KINDS = ("blocks", "head", "others")
"""Kinds of parameters: the blocks' matrices, the head's, and the embedding and norms. A tied head is an embedding."""
_NAMES = {
    KINDS: "N",
    ("blocks", "head"): "N_m",
    ("others",): "(N - N_m)",
    ("blocks",): "P L",
    ("head", "others"): "(N - P L)",
    ("head",): "V d",
}
_NAMES_IF_TIED = {("blocks", "others"): "N", ("blocks",): "P L", ("others",): "(N - P L)"}


def sizes_of(dtypes: Mapping[str, str]) -> dict[str, int]:
    """Bytes per number, by kind of parameter."""
    return {kind: NUMBER_BYTES[dtype] for kind, dtype in dtypes.items()}


def bytes_of_kinds(shape: ModelShape, sizes: Mapping[str, int]) -> tuple[str, str, int]:
    """Bytes of one tensor per parameter, with so many bytes per number of each of KINDS: formula, working, value."""
    counts: dict[str, int] = {}
    for kind, count, rows, columns in tensors(shape):
        counts[kind] = counts.get(kind, 0) + count * rows * columns
    names = _NAMES_IF_TIED if shape.tie_embeddings else _NAMES
    by_size: dict[int, tuple[str, ...]] = {}
    for kind in KINDS:
        if kind in counts and (sizes[kind] or not any(sizes[each] for each in counts)):
            by_size[sizes[kind]] = (*by_size.get(sizes[kind], ()), kind)
    formula = " + ".join(f"{size} {names[kinds]}" for size, kinds in by_size.items())
    filled = " + ".join(f"{size} x {sum(counts[kind] for kind in kinds):,}" for size, kinds in by_size.items())
    return formula, filled, sum(sizes[kind] * count for kind, count in counts.items())


def forward_flops(shape: ModelShape, num_sequences: int, length: int) -> int:
    """Matrix-product operations of one forward pass over num_sequences sequences of `length` tokens.

    2 N T for the weights (N from `matmul_parameters`, T tokens), plus 4 length^2 H D / 2 per layer and sequence for
    causal attention: scores and values take 2 length^2 H D each (Kaplan et al. 2020, table 1); the mask leaves half. A
    window of w keys leaves w length - w^2 / 2 scores. Documents, which leave fewer, are not considered.
    """
    window = min(shape.window or length, length)
    full, windowed = shape.num_layers - shape.num_windowed, shape.num_windowed
    twice_the_scores = full * length * length + windowed * window * (2 * length - window)
    attention = 2 * twice_the_scores * num_sequences * shape.num_heads * shape.head_size
    return 2 * matmul_parameters(shape) * num_sequences * length + attention


def attention_product_flops(shape: ModelShape, num_sequences: int, length: int) -> int:
    """Operations of one of naive attention's two products, Q K^T or P V: 2 N^2 H D per layer and sequence.

    N is the length, H D the width of all heads. Dense: naive attention computes the masked scores too.
    """
    return shape.num_layers * num_sequences * 2 * length * length * shape.num_heads * shape.head_size


def softmax_flops(shape: ModelShape, num_sequences: int, length: int) -> int:
    """Operations of the softmax of all scores in a forward pass: about 5 per score, N^2 scores per head.

    The running maximum, its subtraction, the exponential, the sum and the division count as one each. Dense.
    """
    return 5 * shape.num_layers * num_sequences * shape.num_heads * length * length


def training_flops(shape: ModelShape, num_sequences: int, length: int) -> int:
    """Matrix-product operations of a forward and a backward pass: 3 times the forward pass.

    Each product has two gradients of the same cost. Recomputation in a kernel or by checkpointing is not counted, so
    an MFU based on this counts useful work only (Chowdhery et al. 2022, PaLM, appendix B).
    """
    return 3 * forward_flops(shape, num_sequences, length)


def orthogonalization_flops(rows: int, columns: int) -> int:
    """Operations of Muon's five steps of Newton-Schulz: 5 (4 m^2 n + 2 m^3), where m is the smaller side.

    A step has two products of m^2 n, the Gram matrix and the update, and the square of the Gram matrix, m^3.
    """
    m, n = sorted((rows, columns))
    return 5 * (4 * m * m * n + 2 * m**3)


def least_training_bytes(
    shape: ModelShape,
    batch_size: int,
    micro_batch: int,
    weight_parts: int = 1,
    state_parts: int = 1,
    weight_bytes: int = 4,
    master_bytes: int = 0,
    loss_chunk_tokens: int | None = None,
    muon: bool = False,
) -> int:
    """A lower bound on the memory of a process: 2 W N / w + 2 W N / s + 4 T d / H + 8 B T + 2 C V.

    The terms are: weights and gradients of W bytes per parameter, divided into w parts; AdamW's two moments, divided
    into s parts; the rotary tables; token IDs of the batch of B sequences; 16-bit logits of C tokens, which are the
    micro-batch or one chunk of it. Other activations are not counted.

    master_bytes: bytes M that the optimizer keeps of a master, 0 without. With them the N_m parameters in products have
    16-bit weights and gradients: 4 N_m / w less, M N_m / s more. muon: blocks have one moment, 4 P L / s less.
    """
    length, n = shape.context_length, num_parameters(shape)
    rotary = 4 * length * shape.head_size
    in_products = matmul_parameters(shape) - shape.tie_embeddings * shape.vocab_size * shape.d_model
    narrow = 4 * in_products if master_bytes else 0
    moments = 2 * weight_bytes * n - 4 * muon * shape.num_layers * block_matrices(shape)
    state = (2 * weight_bytes * n - narrow) // weight_parts + (moments + master_bytes * in_products) // state_parts
    tokens = micro_batch * length
    if loss_chunk_tokens is not None:
        tokens = -(-tokens // -(-tokens // loss_chunk_tokens))  # chunks have equal sizes, up to rounding
    return state + rotary + 8 * batch_size * length + 2 * tokens * shape.vocab_size


def naive_attention_bytes(
    batch: int, n_q: int, n_k: int, head_size: int, is_causal: bool, on_gpu: bool = False
) -> dict[str, int]:
    """Memory of plain attention in float32, term by term, besides q, k, v, o and their gradients.

    S = 4 B N_q N_k is a matrix of scores, B sequences times heads; M = N_q N_k is a mask, 0 if not causal.

    - scores S; masked_scores S, if causal; softmax S; masks 2 M: one of the visible pairs, one of the hidden pairs
    - saved_for_backward: S + M + 4 B D (N_q + 2 N_k), for the softmax's output, a mask, q / sqrt(D), k and v
    - forward_peak: 2 S + 2 M + 4 B D N_q, two matrices of scores at a time
    - backward_peak: 3 S + M + 4 B D (N_q + N_k), for the softmax's output, the gradients of softmax and scores, and dV.
      One S more on a GPU, where PyTorch's softmax_backward_cuda keeps the product of output and gradient

    This is quadratic in the length, which FlashAttention avoids. Inputs of another dtype are also copied to float32.
    """
    scores, mask = 4 * batch * n_q * n_k, n_q * n_k if is_causal else 0
    queries, keys = 4 * batch * n_q * head_size, 4 * batch * n_k * head_size
    return {
        "scores": scores,
        "masked_scores": scores if is_causal else 0,
        "softmax": scores,
        "masks": 2 * mask,
        "saved_for_backward": scores + mask + queries + 2 * keys,
        "forward_peak": 2 * scores + 2 * mask + queries,
        "backward_peak": (4 if on_gpu else 3) * scores + mask + queries + keys,
    }


def residual_bytes(shape: ModelShape, batch_size: int, length: int, number_bytes: int = 4) -> int:
    """The residual stream between two blocks: 4 T d, T = B N tokens. Autocast leaves it in float32.

    number_bytes: 2 where it is 16-bit (`Job.residual_number_bytes`).
    """
    return number_bytes * batch_size * length * shape.d_model


def weight_copy_bytes(shape: ModelShape, precision: str) -> int:
    """Autocast's 16-bit copies of a block's matrices, which backward needs: 2 P; 0 in float32."""
    return 0 if precision == "fp32" else 2 * block_matrices(shape)


def activation_bytes(
    shape: ModelShape,
    batch_size: int,
    length: int,
    precision: str = "fp32",
    attention: str = "naive",
    has_narrow_residual: bool = False,
) -> dict[str, int]:
    """Bytes that an eager TransformerBlock saves for backward besides its input and weights, by part.

    T = B N tokens, c bytes per number (4 in float32, 2 under autocast), Q and K numbers in a token's queries and keys,
    which are both d in the handout's model (`widths`). Norms save 1/rms and x/rms in float32. Their
    output is float32 too, and autocast copies a float32 tensor once for each product that reads it.

        ln1          4 T + 4 T d
        qkv_proj     4 T d, three times 2 T d under autocast
        qk_norm      8 T (Q + K) + 4 T (H + H_kv), including its inputs, if there is one
        attention    naive: q, k, v in float32, mask, softmax 12 T Q + N^2 + 4 B H N^2, with k and v for each query head
                     flash: q, k, v, o, logsumexp             2 c T (Q + K) + 4 T H
        output_proj  c T Q
        ln2          8 T d + 4 T, including its own input, the residual stream between attention and ffn
        ffn          4 T d, twice 2 T d under autocast; w1 x, silu(w1 x), w3 x, their product 4 c T d_ff

    has_narrow_residual: the residual stream is 16-bit. Norms convert it to float32: 4 T d more in ln1, no change in
    ln2. Their output is one tensor for all products that read it, 2 T d.

    Korthikanti et al. 2022, "Reducing Activation Recomputation", count another block in this way. A GPU's own kernels
    may save o as the output projection reads it, c T Q less, and any kernel does at N = 1. Raises ValueError for an
    unknown kernel.
    """
    (of_q, of_k), tokens, c, d = widths(shape), batch_size * length, NUMBER_BYTES[precision], shape.d_model
    if attention in PLAIN_ATTENTION:
        inside = 12 * tokens * of_q + length * length + 4 * batch_size * shape.num_heads * length * length
    elif attention in FLASH_ATTENTION:
        inside = 2 * c * tokens * (of_q + of_k) + 4 * tokens * shape.num_heads
    else:
        raise ValueError(
            f"attention is {attention!r}: it must be one of {', '.join(PLAIN_ATTENTION + FLASH_ATTENTION)}"
        )
    read = 2 * tokens * d if has_narrow_residual else 4 * tokens * d  # by w1 and w3
    norms = 8 * tokens * (of_q + of_k) + 4 * tokens * (shape.num_heads + shape.kv_heads)
    return {
        "ln1": 4 * tokens + (8 if has_narrow_residual else 4) * tokens * d,
        "qkv_proj": read if c == 4 or has_narrow_residual else 3 * 2 * tokens * d,
        **({"qk_norm": norms} if shape.qk_norm else {}),
        "attention": inside,
        "output_proj": c * tokens * of_q,
        "ln2": 4 * tokens + 8 * tokens * d,
        "ffn": read + 4 * c * tokens * shape.d_ff,
    }


def attention_output_bytes(shape: ModelShape, tokens: int, number_bytes: int) -> int:
    """Attention's output and logsumexp in a block, which a flash kernel's backward pass reads: c T Q + 4 T H."""
    return number_bytes * tokens * widths(shape)[0] + 4 * tokens * shape.num_heads


def block_bytes(
    shape: ModelShape, batch_size: int, length: int, precision: str = "fp32", attention: str = "naive"
) -> int:
    """Bytes that a block keeps for its backward pass: its input, activations and copies of its weights."""
    saved = sum(activation_bytes(shape, batch_size, length, precision, attention).values())
    return residual_bytes(shape, batch_size, length) + saved + weight_copy_bytes(shape, precision)


def head_bytes(shape: ModelShape, batch_size: int, length: int, precision: str = "fp32") -> int:
    """Bytes that the last norm, the head and the loss save: 8 T d + 4 T, c T d (+ 2 V d if autocast), 4 T V + 4 T.

    T tokens, c bytes per number. The loss reads the logits in float32, for any dtype of computation.
    """
    tokens, c, d, vocab = batch_size * length, NUMBER_BYTES[precision], shape.d_model, shape.vocab_size
    copy = 0 if precision == "fp32" else c * vocab * d
    return 8 * tokens * d + 4 * tokens + c * tokens * d + copy + 4 * tokens * vocab + 4 * tokens


def gradient_bytes(
    shape: ModelShape,
    batch_size: int,
    length: int,
    precision: str = "fp32",
    attention: str = "naive",
    on_gpu: bool = False,
) -> int:
    """Peak memory of a block's backward pass beyond its saved activations.

    This is the gradient of the residual stream, 4 T d, and the larger of:

    - the gradients of the feed-forward layer's two factors and of their product, once one saved tensor is freed:
      2 c T d_ff
    - with all scores in memory, the gradients of softmax and scores, 8 B H N^2, once everything saved after them is
      freed; on a GPU 12 B H N^2, see `naive_attention_bytes`. If only the backward pass holds scores, these are the
      softmax and the gradient of the scores, 8 B H N^2

    Gradients of weights are not counted: with fewer than 2 d / c tokens the gradient of the last product's weight,
    4 d d_ff bytes, is larger than the gradients of the factors.
    """
    tokens, c = batch_size * length, NUMBER_BYTES[precision]
    saved = activation_bytes(shape, batch_size, length, precision, attention)
    beyond = 2 * c * tokens * shape.d_ff
    if attention in (*PLAIN_ATTENTION, "flash_triton_compiled"):  # their backward pass holds scores
        matrices = 3 if on_gpu and attention in PLAIN_ATTENTION else 2
        scores = matrices * 4 * batch_size * shape.num_heads * length * length
        beyond = max(beyond, scores - saved["ffn"] - saved["ln2"] - saved["output_proj"])
    return residual_bytes(shape, batch_size, length) + beyond


def checkpointed_activation_bytes(
    shape: ModelShape,
    batch_size: int,
    length: int,
    precision: str = "fp32",
    attention: str = "naive",
    checkpointed: tuple[str, int] | None = None,
    on_gpu: bool = False,
    keeps_attention: bool = False,
) -> tuple[int, int]:
    """Memory of an eager model at the end of its forward pass, and at the peak of forward and backward, in bytes.

    checkpointed: as in `TrainConfig.checkpointed`. Groups of K of L blocks keep L / K inputs (I bytes each) and hold
    one whole group at a time (A bytes per block): about (L / K) I + K A, which is least at K = `best_group` (Chen et
    al. 2016, "Training Deep Nets with Sublinear Memory Cost"). In detail the peak is the largest of

        forward       everything kept, autocast's copies of checkpointed blocks' weights, which last until then, and
                      the T V float32 numbers of logsumexp's temporary
        loss          everything kept, and three tensors of T V float32 numbers
        each segment  everything kept up to it, its recomputed activations, and `gradient_bytes`

    Weights and their gradients are not counted, nor are the temporaries of other operations. keeps_attention: a
    checkpointed block keeps `attention_output_bytes` beside its input.
    """
    how = (shape, batch_size, length, precision, attention)
    entry, block, gradients = residual_bytes(*how[:3]), block_bytes(*how), gradient_bytes(*how, on_gpu)
    if keeps_attention:
        entry += attention_output_bytes(shape, batch_size * length, NUMBER_BYTES[precision])
    kept, copies, peaks = 0, 0, []
    for count, is_checkpointed in segments(checkpointed, shape.num_layers):
        kept += entry if is_checkpointed else count * block
        again = count * block - entry if is_checkpointed else 0
        copies += count * weight_copy_bytes(shape, precision) if is_checkpointed else 0
        peaks.append(kept + again + gradients)
    held = kept + head_bytes(*how[:4])
    logits = batch_size * length * shape.vocab_size
    narrow = 0 if precision == "fp32" else 2 * logits
    return held, max(held + copies + narrow + 4 * logits, held + 12 * logits, *peaks)


def segments(checkpointed: tuple[str, int] | None, layers: int) -> list[tuple[int, bool]]:
    """Blocks that are kept or recomputed together: how many, and whether they are checkpointed (Chen et al. 2016).

    checkpointed: first K or every K-th block by itself, groups of K blocks, or none.
    """
    policy, k = checkpointed or ("first", 0)
    if policy == "groups":
        return [(min(k, layers - first), True) for first in range(0, layers, k)]
    return [(1, i < k if policy == "first" else i % k == 0) for i in range(layers)]


def offload_window(count: int, num_layers: int, group: int = 1) -> int:
    """Number of blocks that run while an offloaded block is copied, forward or backward.

    The copy of block i to host memory ends at the latest with the forward pass of block i + w, and the copy back begins
    with the backward pass of block i + w. So w + 1 blocks are on the GPU. With w = L - K - 1 for the first K of L
    blocks, that is as many as at the end of the forward pass, and the copies have as much time as it allows. At
    least one block, or one group of checkpointed blocks, runs meanwhile.
    """
    return max(1, (num_layers - count - 1) // group) * group


def best_group(
    shape: ModelShape, batch_size: int, length: int, precision: str = "fp32", attention: str = "naive"
) -> float:
    """The group size K at which (L / K) I + K A is least: K = sqrt(L I / A), from 1 to L."""
    ratio = residual_bytes(shape, batch_size, length) / block_bytes(shape, batch_size, length, precision, attention)
    return min(max(1.0, math.sqrt(shape.num_layers * ratio)), shape.num_layers)
