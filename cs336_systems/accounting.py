"""Counting a model: parameters, floating-point operations, memory. Pure functions, the formula in each docstring.

One multiply and one add count as two operations, as in the handout and in the papers cited.
"""

from cs336_basics.shape import ModelShape


def num_parameters(shape: ModelShape) -> int:
    """All parameters: 2 V d (embedding and untied head) + L (4 d^2 + 3 d d_ff + 2 d) + d.

    Four attention projections, three feed-forward matrices and two norms a block, and the last norm.
    """
    d = shape.d_model
    block = 4 * d * d + 3 * d * shape.d_ff + 2 * d
    return 2 * shape.vocab_size * d + shape.num_layers * block + d


def matmul_parameters(shape: ModelShape) -> int:
    """Parameters that a token is multiplied with: all but the embedding, which is looked up, and the norms.

    V d + L (4 d^2 + 3 d d_ff).
    """
    d = shape.d_model
    return shape.vocab_size * d + shape.num_layers * (4 * d * d + 3 * d * shape.d_ff)


def forward_flops(shape: ModelShape, num_sequences: int, length: int) -> int:
    """Matrix-product operations of one forward pass over num_sequences sequences of `length` tokens.

    2 N T for the weights (N from `matmul_parameters`, T tokens), and per layer 4 length^2 d / 2 a sequence for causal
    attention: scores and values take 2 length^2 d each (Kaplan et al. 2020, table 1), of which the mask leaves half.
    """
    weights = 2 * matmul_parameters(shape) * num_sequences * length
    attention = shape.num_layers * num_sequences * 2 * length * length * shape.d_model
    return weights + attention


def attention_product_flops(shape: ModelShape, num_sequences: int, length: int) -> int:
    """Operations of one of naive attention's two products, Q K^T or P V, in all layers of a forward pass: 2 N^2 d each.

    N is the length, d is d_model, heads together. Dense: naive attention computes what the mask then throws away.
    """
    return shape.num_layers * num_sequences * 2 * length * length * shape.d_model


def softmax_flops(shape: ModelShape, num_sequences: int, length: int) -> int:
    """Operations of the softmax of all scores in a forward pass: about 5 a score, N^2 scores a head.

    The running maximum, the subtraction of it, the exponential, the sum and the division count as one each. Dense.
    """
    return 5 * shape.num_layers * num_sequences * shape.num_heads * length * length


def training_flops(shape: ModelShape, num_sequences: int, length: int) -> int:
    """Matrix-product operations of a forward and a backward pass: 3 times the forward's.

    Each product has two gradients of the same cost. What a kernel or checkpointing recomputes is not counted, so that
    the MFU made from this counts useful work only (Chowdhery et al. 2022, PaLM, appendix B).
    """
    return 3 * forward_flops(shape, num_sequences, length)


def least_training_bytes(
    shape: ModelShape, batch_size: int, micro_batch: int, weight_parts: int = 1, state_parts: int = 1
) -> int:
    """Memory that no training step of a process does without: 8 N / w + 8 N / s + 4 T d / H + 8 B T + 2 b T V.

    A float32 weight and its gradient a parameter, divided into w parts; AdamW's two moments, divided into s; the rotary
    tables; token IDs of the process's batch of B; logits of its micro-batch of b, in the smallest type there is for
    them. The other activations are not counted.
    """
    length, n = shape.context_length, num_parameters(shape)
    rotary = 4 * length * (shape.d_model // shape.num_heads)
    state = 8 * n // weight_parts + 8 * n // state_parts
    return state + rotary + 8 * batch_size * length + 2 * micro_batch * length * shape.vocab_size


def naive_attention_bytes(batch: int, n_q: int, n_k: int, head_size: int, is_causal: bool) -> dict[str, int]:
    """Memory that plain attention holds in float32, term by term, besides q, k, v, o and their gradients.

    S = 4 B N_q N_k is a matrix of scores, B sequences times heads; M = N_q N_k a mask, 0 if not causal.

    - scores S; masked_scores S, if causal; softmax S; masks 2 M: of what is visible, and of what is not
    - saved_for_backward: S + M + 4 B D (N_q + 2 N_k), for the softmax's output, a mask, q / sqrt(D), k and v
    - forward_peak: 2 S + 2 M + 4 B D N_q, two matrices of scores at a time
    - backward_peak: 3 S + M + 4 B D (N_q + N_k), for the softmax's output, its gradient, that of the scores, and dV

    Quadratic in the length: what FlashAttention does not hold. Inputs of another type are copied to float32 besides.
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
        "backward_peak": 3 * scores + mask + queries + keys,
    }
