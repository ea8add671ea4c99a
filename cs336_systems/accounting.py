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
