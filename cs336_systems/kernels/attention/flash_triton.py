"""FlashAttention-2 in Triton, forward and backward (Dao 2023, FlashAttention-2, Algorithms 1 and 2).

The forward pass walks along the keys for one tile of queries and keeps a running maximum and sum (online softmax). The
backward pass recomputes the probabilities from the logsumexp in two walks: one along the keys for dQ, one along the
queries for dK and dV. That costs two more matrix products than a single walk that adds to dQ with atomics, but gives
the same bits every time.

The kernels and the legend of their names are in `flash_triton_kernels.py`. This module decides what is launched, with
the tiles of `flash_triton_tiles.py`. On Hopper, long sequences of 16-bit numbers with head sizes from 65 to 128 go to
the kernels of `flash_gluon_kernels.py` and `flash_gluon_backward_kernels.py`, which compute the same but overlap the
exponentials with the matrix products.

Not supported: dropout, masks other than causal, fewer key heads than query heads. Infinite keys give NaN gradients
where the length is not a multiple of a tile.
"""

import contextlib
import math
from typing import Any

import torch
import triton
from jaxtyping import Float
from torch import Tensor

from ...machine.hardware import allows_tf32
from ..launch import INTERPRET, Launch, can_use_descriptors, check_device, has_copy_engine
from . import flash_gluon_backward_kernels as gluon_backward
from . import flash_gluon_common as gluon
from . import flash_gluon_kernels as gluon_forward
from .contract import as_4d, check_qkv
from .flash_torch import compiled_backward
from .flash_triton_kernels import PAD, backward_kernel, dkv_kernel, dq_kernel, forward_kernel
from .flash_triton_tiles import (
    Tile,
    choose_tile,
    is_float_apart,
    is_float_of_few_programs,
    padded_head_size,
    tile_key,
    tile_table,
)
from .function import Saved, empty_outputs, flash_function, new_gradients, new_outputs

MAX_HEAD_SIZE = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# What is launched depends on the number of scores, B H N_q N_k.
TMA_FROM_SCORES = 2**27
"""From this many scores on, tensors are moved by descriptors, which make a launch some 30 us longer on the host."""
ONE_LAUNCH_BELOW_SCORES = 2**26
"""Below this many scores the backward pass is one launch, which does more work but waits less for the host."""


# ---------------------------------------------------------------------------------------------------------------------
# Launches
# ---------------------------------------------------------------------------------------------------------------------


def forward_launch(q: Tensor, k: Tensor, v: Tensor, o: Tensor, is_causal: bool, tile: Tile, tma: bool) -> Launch:
    """The launch that takes (q, k, v, o, logsumexp), all but the last of shape (B, H, N, D), and fills the last two."""
    rows = [tile.BM, tile.BN, tile.BN, tile.BM]
    num_programs = triton.cdiv(q.shape[2], tile.BM) * q.shape[0] * q.shape[1]
    blocks = [*_blocks(q, rows, tma), None]
    constants = [*_constants([q, k, v, o], k, is_causal, tile, tma), tile.TOGETHER]
    return Launch(forward_kernel, num_programs, blocks, constants, tile.num_warps, tile.num_stages)


def gluon_forward_launch(q: Tensor, k: Tensor, v: Tensor, o: Tensor, is_causal: bool) -> Launch:
    """`forward_launch` with the Gluon kernel, used where `_use_gluon` says so."""
    rows = [gluon.ROWS, gluon_forward.BN, gluon_forward.BN, gluon.ROWS]
    blocks = [*_blocks(q, rows, True), None]
    return _gluon_launch(gluon_forward.forward_kernel, q, blocks, [*_scalars(q, k, k), is_causal])


def dq_launch(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, dq: Tensor | None, is_causal: bool, tile: Tile, tma: bool
) -> Launch:
    """The launch that takes (q, k, v, o, do, dq, logsumexp, vectors) and fills vectors and dq.

    If dq is None it fills only the vectors, and takes any tensor like q in the place of dq.
    """
    rows = [tile.BM, tile.BN, tile.BN, tile.BM, tile.BM, tile.BM]
    num_programs = _padded_length(q) // tile.BM * q.shape[0] * q.shape[1]
    blocks = [*_blocks(q, rows, tma), None, None]
    constants = _constants([q, k, v, o, do, q if dq is None else dq], k, is_causal, tile, tma)
    constants += [tile.TOGETHER, dq is not None]
    return Launch(dq_kernel, num_programs, blocks, constants, tile.num_warps, tile.num_stages)


def gluon_dq_launch(q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, dq: Tensor, is_causal: bool) -> Launch:
    """`dq_launch` with the Gluon kernel, used where `_use_gluon` says so and dq is needed."""
    rows = [gluon.ROWS, gluon_backward.TILE, gluon_backward.TILE, gluon.ROWS, gluon.ROWS, gluon.ROWS]
    blocks = [*_blocks(q, rows, True), None, None]
    return _gluon_launch(gluon_backward.dq_kernel, q, blocks, [*_scalars(q, k, k), is_causal])


def dkv_launch(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, dk: Tensor, dv: Tensor, is_causal: bool, tile: Tile, tma: bool
) -> Launch:
    """The launch that takes (q, k, v, do, dk, dv, vectors), the last from `dq_launch`, and fills dk and dv."""
    rows = [tile.BM, tile.BN, tile.BN, tile.BM, tile.BN, tile.BN]
    num_programs = triton.cdiv(k.shape[2], tile.BN) * q.shape[0] * q.shape[1]
    blocks = [*_blocks(q, rows, tma), [1, tile.BM] if tma else None]
    constants = _constants([q, k, v, do, dk, dv], q, is_causal, tile, tma)
    return Launch(dkv_kernel, num_programs, blocks, constants, tile.num_warps, tile.num_stages)


def gluon_dkv_launch(q: Tensor, k: Tensor, v: Tensor, do: Tensor, dk: Tensor, dv: Tensor, is_causal: bool) -> Launch:
    """`dkv_launch` with the Gluon kernel, used where `_use_gluon` says so."""
    rows = [gluon_backward.TILE, gluon.ROWS, gluon.ROWS, gluon_backward.TILE, gluon.ROWS, gluon.ROWS]
    blocks = [*_blocks(q, rows, True), [gluon_backward.TILE]]
    return _gluon_launch(gluon_backward.dkv_kernel, k, blocks, [*_scalars(q, k, q), is_causal])


def backward_launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    do: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    is_causal: bool,
    tile: Tile,
    tma: bool = False,
) -> Launch:
    """The launch that takes (q, k, v, o, do, dq, dk, dv, logsumexp) and fills dq, dk and dv."""
    rows = [tile.BM, tile.BN, tile.BN, tile.BM, tile.BM, tile.BM, tile.BN, tile.BN]
    num_blocks = triton.cdiv(q.shape[2], tile.BM) + triton.cdiv(k.shape[2], tile.BN)
    constants = _constants([q, k, v, o, do, dq, dk, dv], q, is_causal, tile, tma)
    num_programs = num_blocks * q.shape[0] * q.shape[1]
    blocks = [*_blocks(q, rows, tma), None]
    return Launch(backward_kernel, num_programs, blocks, constants, tile.num_warps, tile.num_stages)


def _gluon_launch(kernel: Any, own: Tensor, blocks: list[list[int] | None], constants: list[Any]) -> Launch:
    """A launch of a Gluon kernel; the rows of `own` are divided among the programs."""
    num_programs = triton.cdiv(own.shape[2], gluon.GROUPS * gluon.ROWS) * own.shape[0] * own.shape[1]
    return Launch(
        kernel,
        num_programs,
        blocks,
        constants,
        gluon.NUM_WARPS,
        num_stages=1,  # the kernels manage their own stages
        layouts=gluon.LAYOUTS,
        max_registers=gluon.MAX_REGISTERS,
    )


def _blocks(q: Tensor, rows: list[int], tma: bool) -> list[list[int] | None]:
    return [[1, 1, count, padded_head_size(q.shape[-1])] if tma else None for count in rows]


def _constants(operands: list[Tensor], walked: Tensor, is_causal: bool, tile: Tile, tma: bool) -> list[Any]:
    """The arguments that follow the tensors in every kernel; `walked` is one of the two tensors of the inner loop."""
    q, k = operands[:2]
    d = q.shape[-1]
    return [
        *(x.stride() for x in operands),
        *_scalars(q, k, walked),
        tile.BM,
        tile.BN,
        d,
        padded_head_size(d),
        is_causal,
        _move(operands, tile, tma),
        _precision(q),
    ]


def _move(operands: list[Tensor], tile: Tile, tma: bool) -> str:
    """How tiles are moved; see the kernels' legend. Only strides that span gigabytes need far pointers."""
    if tma:
        return "descriptors"
    rows, columns = max(tile.BM, tile.BN) - 1, padded_head_size(operands[0].shape[-1]) - 1
    far = max(rows * x.stride(2) + columns * x.stride(3) for x in operands) >= 2**31
    return "far pointers" if far else "pointers"


def _precision(q: Tensor) -> str:
    """How float32 is multiplied; see the kernels' legend."""
    if q.dtype != torch.float32:
        return "ieee"
    if allows_tf32():
        return "tf32"
    return "ieee" if INTERPRET else "bf16x6"


def _scalars(q: Tensor, k: Tensor, walked: Tensor) -> list[float]:
    return [1 / math.sqrt(q.shape[-1]), q.shape[1], q.shape[2], k.shape[2], _heads_together(walked)]


def _heads_together(walked: Tensor) -> int:
    """The number of heads whose two tensors of the inner loop fit in half of the L2 cache; at least one."""
    if INTERPRET:
        return 2
    head_bytes = 2 * walked.shape[2] * walked.shape[3] * walked.element_size()
    return max(1, torch.cuda.get_device_properties(walked.device).L2_cache_size // 2 // head_bytes)


def _padded_length(q: Tensor) -> int:
    return -(-q.shape[2] // PAD) * PAD  # `triton.cdiv` takes 3 us on the host


def new_vectors(q: Tensor) -> Tensor:
    """An uninitialised buffer for what `dq_launch` passes to `dkv_launch`, for q (B, H, N_q, D)."""
    return torch.empty((2 * q.shape[0] * q.shape[1], _padded_length(q)), dtype=torch.float32, device=q.device)


def _use_tma(q: Tensor, k: Tensor, *others: Tensor) -> bool:
    if _num_scores(q, k) < TMA_FROM_SCORES:
        return False
    if not INTERPRET and (q.dtype == torch.float32 or not has_copy_engine(q.device)):
        return False
    return can_use_descriptors(q, k, *others)


def _use_gluon(q: Tensor, tma: bool) -> bool:
    """Whether to use the Gluon kernels: they need Hopper's matrix instructions, which no later card has."""
    if INTERPRET or not tma or padded_head_size(q.shape[-1]) != gluon.D_PAD:
        return False
    return torch.cuda.get_device_capability(q.device) == (9, 0)


def _num_scores(q: Tensor, k: Tensor) -> int:
    return q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]


_LAUNCHES: dict[tuple[Any, ...], tuple[Launch, ...]] = {}


def _key(is_causal: bool, *tensors: Tensor) -> tuple[Any, ...]:
    """Everything that the choice of a launch depends on."""
    facts = [(x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16) for x in tensors]
    return is_causal, _precision(tensors[0]), *facts


def _remember(key: tuple[Any, ...], *launches: Launch) -> tuple[Launch, ...]:
    if len(_LAUNCHES) >= 4096:  # ever new lengths, as in sampling
        _LAUNCHES.clear()
    _LAUNCHES[key] = launches
    return launches


def _device_guard(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    # The guard itself costs more than this check that there is nothing to do.
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


def _check_served(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> None:
    check_qkv(q, k, v, is_causal, dtypes=DTYPES, max_head_size=MAX_HEAD_SIZE)


def _check(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> None:
    _check_served(q, k, v, is_causal)
    check_device(q, "flash_triton")


def _forward_launch(q: Tensor, k: Tensor, v: Tensor, o: Tensor, is_causal: bool) -> Launch:
    tma = _use_tma(q, k, v, o)
    if _use_gluon(q, tma):
        return gluon_forward_launch(q, k, v, o, is_causal)
    return forward_launch(q, k, v, o, is_causal, choose_tile("forward", q, tma, is_float_apart(q, k, v)), tma)


def _backward_launches(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    do: Tensor,
    dq: Tensor | None,
    dk: Tensor,
    dv: Tensor,
    is_causal: bool,
    need_dkv: bool,
) -> tuple[Launch, ...]:
    gradients = [x for x in (dq, dk, dv) if x is not None]
    tma = _use_tma(q, k, v, o, do, *gradients)
    apart = is_float_apart(q, k, v)
    if dq is not None and need_dkv and not tma and _num_scores(q, k) < ONE_LAUNCH_BELOW_SCORES:
        small = apart or is_float_of_few_programs(q, k)
        if tile_key("backward", q.shape[-1], q.dtype, tma, small) in tile_table():
            return (backward_launch(q, k, v, o, do, dq, dk, dv, is_causal, choose_tile("backward", q, tma, small)),)
    in_gluon = _use_gluon(q, tma)
    if in_gluon and dq is not None:
        first = gluon_dq_launch(q, k, v, o, do, dq, is_causal)
    else:  # without dq only the vectors are filled, and both kernels give the same ones
        first = dq_launch(q, k, v, o, do, dq, is_causal, choose_tile("dq", q, tma, apart), tma)
    if in_gluon:
        return first, gluon_dkv_launch(q, k, v, do, dk, dv, is_causal)
    return first, dkv_launch(q, k, v, do, dk, dv, is_causal, choose_tile("dkv", q, tma, apart), tma)


def flash_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """o and logsumexp; see `flash_triton` for what is accepted."""
    key = _key(is_causal, q, k, v)
    launches = _LAUNCHES.get(key)
    if launches is None:
        _check(q, k, v, is_causal)
        if (outputs := empty_outputs(q, k)) is not None:
            return outputs
    o, logsumexp = new_outputs(q)
    q4, k4, v4, o4 = as_4d(q), as_4d(k), as_4d(v), as_4d(o)
    with _device_guard(q):
        if launches is None:
            launches = _remember(key, _forward_launch(q4, k4, v4, o4, is_causal))
        launches[0](q4, k4, v4, o4, logsumexp)
    return o, logsumexp


def flash_backward(do: Tensor, saved: Saved, need_dq: bool, need_dkv: bool) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv; those that are not needed have no elements."""
    q, k, v, o, logsumexp, is_causal = saved
    dq, dk, dv = new_gradients(q, k, v, need_dq, need_dkv)
    key = (need_dq, need_dkv, logsumexp.data_ptr() % 16, *_key(is_causal, do, q, k, v, o))
    launches = _LAUNCHES.get(key)
    is_new = launches is None
    q4, k4, v4, o4, do4 = as_4d(q), as_4d(k), as_4d(v), as_4d(o), as_4d(do)
    dq4 = as_4d(dq) if need_dq else None
    dk4, dv4 = (as_4d(dk), as_4d(dv)) if need_dkv else (k4, v4)
    with _device_guard(q):
        if launches is None:
            launches = _remember(key, *_backward_launches(q4, k4, v4, o4, do4, dq4, dk4, dv4, is_causal, need_dkv))
        if len(launches) == 1 and dq4 is not None:
            launches[0](q4, k4, v4, o4, do4, dq4, dk4, dv4, logsumexp)
        else:
            vectors = new_vectors(q4)
            others = (q4, k4, v4, do4, dk4, dv4, vectors)
            with launches[1].compiling(*others) if is_new and need_dkv else contextlib.nullcontext():
                launches[0](q4, k4, v4, o4, do4, q4 if dq4 is None else dq4, logsumexp, vectors)
            if need_dkv:
                launches[1](*others)
    return dq, dk, dv


# ---------------------------------------------------------------------------------------------------------------------
# The public functions
# ---------------------------------------------------------------------------------------------------------------------

FlashAttentionTriton = flash_function("flash_triton", flash_forward, flash_backward, _check_served)
FlashAttentionTritonCompiled = flash_function("flash_triton_compiled", flash_forward, compiled_backward, _check_served)
BACKWARDS = {"triton": FlashAttentionTriton, "compiled": FlashAttentionTritonCompiled}


def flash_triton(
    q: Float[Tensor, "... N_q D"],
    k: Float[Tensor, "... N_k D"],
    v: Float[Tensor, "... N_k D"],
    is_causal: bool = False,
    backward: str = "triton",
) -> Float[Tensor, "... N_q D"]:
    """FlashAttention-2 in Triton: softmax(q k^T / sqrt(D)) v without the N_q x N_k scores in memory.

    Runs on a CUDA device of compute capability 8.0 or later, or on a CPU in Triton's interpreter. Accepts float32,
    bfloat16 and float16; D from 1 to 256; any lengths, strides and leading dimensions (more than two are flattened,
    which copies where strides do not allow a view). float32 products follow `torch.get_float32_matmul_precision()`: at
    "highest" each has 24 bits, composed of bfloat16 products. Needs O(N) memory beyond its outputs: two float32 vectors
    in the backward pass, and there a copy of a dO with repeated elements, such as `sum` gives. The same inputs give the
    same bits. `backward`: "triton", or "compiled" for the backward pass of `flash_triton_compiled`.

    Raises ValueError naming the argument that it does not accept.
    """
    if backward not in BACKWARDS:
        raise ValueError(f"backward is {backward!r}: it must be {' or '.join(BACKWARDS)}")
    return BACKWARDS[backward].of(q, k, v, is_causal)


def flash_triton_compiled(
    q: Float[Tensor, "... N_q D"],
    k: Float[Tensor, "... N_k D"],
    v: Float[Tensor, "... N_k D"],
    is_causal: bool = False,
) -> Float[Tensor, "... N_q D"]:
    """The forward pass of `flash_triton` with a backward pass by torch.compile, as the handout first asks for it.

    Accepts what `flash_triton` accepts and saves as little for the backward pass, which holds N_q x N_k scores in
    float32. The backward pass rounds the scores differently from the forward pass: with scores of 1e5 its gradients are
    off by 1e-3, with larger ones by more.
    """
    return FlashAttentionTritonCompiled.of(q, k, v, is_causal)
