"""The matrix products of a step on a card: their time after rounding to tiles and waves, and by their bytes."""

from collections.abc import Iterator

from .cards import Card
from .job import Job

# Rows and columns of the result that one multiprocessor computes at a time, and the share of its rate that is left:
# smaller tiles load each operand more often. In float32, where products take over ten times as long, libraries choose
# smaller tiles for results that few large ones would cover. The shares are assumed; docs/log.md has the outcome.
_LARGE = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 1.0))
TILES = {2: _LARGE, 4: (*_LARGE, (128, 64, 0.95), (64, 128, 0.95), (64, 64, 0.85))}


def products(job: Job) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """Counts and sizes M, N, K of the products (M x K) (K x N) with weights in a forward pass, without attention."""
    s, t = job.shape, job.tokens
    yield 4 * s.num_layers, (t, s.d_model, s.d_model)
    yield 2 * s.num_layers, (t, s.d_ff, s.d_model)
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
    """The longer of 2 M N K operations, rounded up, and c (M K + K N + M N) bytes (roofline, Williams et al. 2009)."""
    rate = card.matmul if number_bytes == 2 else card.matmul_fp32
    operations = 2 * m * n * k / rate * rounded_up(m, n, card.multiprocessors, number_bytes)
    return max(operations, number_bytes * (m * k + k * n + m * n) / card.bandwidth)


def products_seconds(job: Job, card: Card) -> tuple[float, float]:
    """Seconds of all products with weights, in the forward pass and in the backward pass."""
    forward = backward = 0.0
    for count, sizes in products(job):
        forward += count * product_seconds(*sizes, job.number_bytes, card)
        backward += count * sum(product_seconds(*g, job.number_bytes, card) for g in gradients_of(*sizes))
    return forward, backward
