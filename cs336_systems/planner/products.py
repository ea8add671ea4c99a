"""The products of a step with weights: their sizes, and the time that a card takes for them."""

from collections.abc import Iterator

from .accounting import block_matrices, widths
from .cards import Card
from .job import Job

# Rows and columns of the result that one multiprocessor computes at a time, and the share of its rate that is left:
# smaller tiles load each operand more often. In float32, where products take over ten times as long, libraries choose
# smaller tiles for results that few large ones would cover. The shares are assumed; see docs/log.md, Planner.
_LARGE = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 1.0))
TILES = {1: _LARGE, 2: _LARGE, 4: (*_LARGE, (128, 64, 0.95), (64, 128, 0.95), (64, 64, 0.85))}


def products(job: Job) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """Counts and sizes M, N, K of the products (M x K) (K x N) with weights in a forward pass, without attention."""
    s, t, (of_q, of_k) = job.shape, job.tokens, widths(job.shape)
    if job.packs:
        yield s.num_layers, (t, of_q + 2 * of_k, s.d_model)
        yield s.num_layers, (t, 2 * s.d_ff, s.d_model)
    else:
        yield s.num_layers, (t, of_q, s.d_model)
        yield 2 * s.num_layers, (t, of_k, s.d_model)
        yield 2 * s.num_layers, (t, s.d_ff, s.d_model)
    yield s.num_layers, (t, s.d_model, of_q)
    yield s.num_layers, (t, s.d_model, s.d_ff)
    yield 1, (t, s.vocab_size, s.d_model)


def gradients_of(m: int, n: int, k: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """The products for the gradients of (M x K) (K x N): input (M x N) (N x K), weight (N x M) (M x K)."""
    return (m, k, n), (n, k, m)


def rounded_up(m: int, n: int, multiprocessors: int, number_bytes: int = 2) -> float:
    """How many times longer a product takes than one with as many operations that fills the card, for the best tile.

    The parts of tiles that extend beyond the result compute nothing useful (tile quantization), and multiprocessors
    process tiles in waves, of which the last may be nearly empty (wave quantization); NVIDIA, "Matrix Multiplication
    Background User's Guide".
    """
    times = []
    for rows, columns, share in TILES[number_bytes]:
        tiles = -(-m // rows) * -(-n // columns)
        waves = -(-tiles // multiprocessors)
        times.append(waves * multiprocessors * rows * columns / (m * n) / share)
    return min(times)


def product_seconds(m: int, n: int, k: int, number_bytes: int, card: Card) -> float:
    """The longer of 2 M N K operations, rounded up, and c (M K + K N + M N) bytes (roofline, Williams et al. 2009).

    number_bytes: c. 1 is for FP8 inputs and 16-bit results, at twice the rate of 16-bit inputs.
    """
    rate = {1: 2 * card.matmul, 2: card.matmul, 4: card.matmul_fp32}[number_bytes]
    operations = 2 * m * n * k / rate * rounded_up(m, n, card.multiprocessors, number_bytes)
    return max(operations, (number_bytes * (m * k + k * n) + max(2, number_bytes) * m * n) / card.bandwidth)


def products_seconds(job: Job, card: Card) -> tuple[float, float]:
    """Seconds of all products with weights, in the forward pass and in the backward pass.

    With FP8, those of the blocks are FP8 products.
    """
    forward = backward = 0.0
    *blocks, head = products(job)
    narrow = 1 if job.precision == "fp8" else job.number_bytes
    for (count, sizes), size in (*((each, narrow) for each in blocks), (head, job.number_bytes)):
        of_input, of_weight = gradients_of(*sizes)
        forward += count * product_seconds(*sizes, size, card)
        backward += count * product_seconds(*of_input, size, card)
        backward += count * product_seconds(*of_weight, size, card)
    return forward, backward


def rounding_bytes(job: Job) -> tuple[int, int]:
    """Bytes that rounding to FP8 reads and writes in all layers: in a forward pass, and the rest of a step.

    A tensor is read for its largest number, read again and written: 5 bytes a number. A forward pass rounds the inputs
    of products (q, k and v share one, and so do w1 and w3), and the weights if they are not kept. The rest are the
    gradients of outputs, and the weights again, which are also transposed, 2 bytes more. For the gradients of weights,
    inputs and gradients of outputs are rounded again, transposed. Their scales are known: 3 bytes a number.
    """
    if job.precision != "fp8":
        return 0, 0
    s, t, (of_q, of_k) = job.shape, job.tokens, widths(job.shape)
    weights, inputs = block_matrices(s), t * (2 * s.d_model + of_q + s.d_ff)
    outputs = t * (of_q + 2 * of_k + 2 * s.d_model + 2 * s.d_ff)
    forward = 5 * (inputs + (0 if job.rounds_weights_once else weights))
    return s.num_layers * forward, s.num_layers * (5 * outputs + 3 * (inputs + outputs) + 7 * weights)
