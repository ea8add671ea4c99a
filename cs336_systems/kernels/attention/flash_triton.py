"""FlashAttention-2 in Triton, forward and backward (Dao 2023, FlashAttention-2, Algorithms 1 and 2), made fast.

`flash_triton_simple.py` is the version to read first. The forward pass loops over the keys for one tile of queries and
keeps a running maximum and sum (online softmax). Triton's backward pass recomputes the probabilities from the logsumexp
twice: a loop over the keys gives dQ, a loop over the queries gives dK and dV. That costs two more matrix products than
a single loop that adds to dQ in memory, but gives the same bits every time.

The kernels and the legend of their names are in `flash_triton_kernels.py`. This module chooses the kernels, with the
tiles of `flash_triton_tiles.py`, and launches them. On Hopper, sequences of 16-bit numbers with head sizes from 33 to
128 go to the kernels of `flash_gluon_kernels.py` and `flash_gluon_backward_kernels.py`, if they are long or recorded as
a CUDA graph. These overlap the exponentials with the matrix products, and their backward pass is the single loop.

Windows and documents are a band beside the diagonal: tiles outside of it are skipped.

Not supported: dropout and other masks. Infinite keys give NaN gradients where the length is not a multiple of a tile.
"""

import contextlib
import math
from typing import Any

import torch
import triton
from jaxtyping import Float
from torch import Tensor

from cs336_basics.attention import Documents

from ...machine.hardware import allows_tf32
from .. import recording
from ..launch import INTERPRET, Launch, check_device, has_tma
from . import flash_gluon_backward_kernels as gluon_backward
from . import flash_gluon_common as gluon
from . import flash_gluon_kernels as gluon_forward
from . import flash_gluon_sums_kernels as gluon_sums
from .contract import Band, as_4d, band_of, can_use_tma, check_qkv, group_size, heads_in_cache, heads_on_hopper
from .flash_torch import compiled_backward
from .flash_triton_kernels import PAD, backward_kernel, dkv_kernel, dq_kernel, forward_kernel
from .flash_triton_tiles import (
    Tile,
    choose_tile,
    is_faster_with_small_tiles,
    needs_small_tiles,
    padded_head_size,
    tile_key,
    tile_table,
)
from .function import Saved, empty_outputs, flash_function, new_gradients, new_outputs

MAX_HEAD_SIZE = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The choice of kernels depends on the number of scores, B H N_q N_k.
TMA_FROM_SCORES = 2**27
"""From this many scores on, TMA moves the tensors. Its descriptors make a launch some 30 us longer on the host.

The Gluon kernels, which need TMA, serve any number of scores in a recording (`kernels.recording`): a replay makes no
launches.
"""
ONE_LAUNCH_BELOW_SCORES = 2**26
"""Below this many scores the backward pass is one launch, which does more work but waits less for the host."""

Tensors = dict[str, Tensor]
"""Tensors by the names of the kernels' parameters. Tensors that are moved tile by tile (q_, k_, v_, o_, do_, dq_, dk_,
dv_) are 4-D."""


def flash_triton(
    q: Float[Tensor, "... N_q D"],
    k: Float[Tensor, "... N_k D"],
    v: Float[Tensor, "... N_k D"],
    is_causal: bool = False,
    *,
    window: int | None = None,
    documents: Documents | None = None,
    deterministic: bool = False,
) -> Float[Tensor, "... N_q D"]:
    """FlashAttention-2 in Triton: softmax(q k^T / sqrt(D)) v without the N_q x N_k scores in memory.

    Runs on a CUDA device of compute capability 8.0 or later, or on a CPU in Triton's interpreter. Accepts float32,
    bfloat16 and float16; D from 1 to 256; fewer heads in k and v; any lengths, strides and leading dimensions (more
    than two are flattened, which copies where strides do not allow a view). float32 products follow
    `torch.get_float32_matmul_precision()`: at "highest" each product has 24 bits of precision, as a sum of bfloat16
    products. Beyond its outputs, the backward pass needs two float32 numbers per query and head. On Hopper, for long
    sequences and in recordings, it also needs dQ in float32. A dO that is expanded or whose columns are not adjacent is
    copied.

    deterministic: the same inputs give the same bits of dQ every time; so does PyTorch's
    `torch.use_deterministic_algorithms(True)`. It matters on Hopper for long sequences and in recordings, where
    programs otherwise add to dQ in any order, which is faster. All else is always deterministic.

    Raises ValueError naming the argument that it does not accept.
    """
    band = band_of(window, documents)
    if deterministic or torch.are_deterministic_algorithms_enabled():
        return FlashAttentionTritonDeterministic.call(q, k, v, is_causal, band)
    return FlashAttentionTriton.call(q, k, v, is_causal, band)


def flash_triton_compiled(
    q: Float[Tensor, "... N_q D"],
    k: Float[Tensor, "... N_k D"],
    v: Float[Tensor, "... N_k D"],
    is_causal: bool = False,
    *,
    window: int | None = None,
    documents: Documents | None = None,
) -> Float[Tensor, "... N_q D"]:
    """The forward pass of `flash_triton` with a backward pass by torch.compile, as the handout first asks for it.

    Accepts the same inputs as `flash_triton` and saves as little for the backward pass, but that pass holds N_q x N_k
    scores in float32. It rounds the scores differently from the forward pass: with scores of 1e5 its gradients are off
    by 1e-3, with larger scores by more.
    """
    return FlashAttentionTritonCompiled.call(q, k, v, is_causal, band_of(window, documents))


# ---------------------------------------------------------------------------------------------------------------------
# The two passes
# ---------------------------------------------------------------------------------------------------------------------

_LAUNCHES: dict[tuple[Any, ...], tuple[Launch, ...]] = {}  # by `_key`: choosing them takes the host long
_NO_CONTEXT = contextlib.nullcontext()  # made once, because every call needs it


def flash_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, band: Band | None = None) -> tuple[Tensor, Tensor]:
    """o and logsumexp; see `flash_triton` for the inputs it accepts."""
    key = _key(is_causal, band, q, k, v)
    launches = _LAUNCHES.get(key)
    if launches is None:
        _check_supported(q, k, v, is_causal)
        check_device(q, "flash_triton")
        if (outputs := empty_outputs(q, k)) is not None:
            return outputs
    o, logsumexp = new_outputs(q)
    tensors = {"q_": as_4d(q), "k_": as_4d(k), "v_": as_4d(v), "o_": as_4d(o)}
    with _device_guard(q):
        if launches is None:  # planned from the 4-D tensors alone
            launches = _cache_launches(key, _forward_launch(tensors, is_causal, band))
        tensors["L"] = logsumexp
        _add_documents(tensors, band)
        if "COUNTER" in launches[0].tensors:
            tensors["COUNTER"] = torch.zeros(1, dtype=torch.int32, device=q.device)
        launches[0](tensors)
    return o, logsumexp


def flash_backward(
    do: Tensor, saved: Saved, need_dq: bool, need_dkv: bool, deterministic: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv; those that are not needed have no elements."""
    q, k, v, o, logsumexp, is_causal, band = saved
    dq, dk, dv = new_gradients(q, k, v, need_dq, need_dkv)
    key = (need_dq, need_dkv, deterministic, logsumexp.data_ptr() % 16, *_key(is_causal, band, do, q, k, v, o))
    launches = _LAUNCHES.get(key)
    tensors = {"q_": as_4d(q), "k_": as_4d(k), "v_": as_4d(v), "o_": as_4d(o), "do_": as_4d(do)}
    tensors["dq_"] = as_4d(dq) if need_dq else tensors["q_"]  # a placeholder, which the kernel does not write to
    tensors["dk_"], tensors["dv_"] = (as_4d(dk), as_4d(dv)) if need_dkv else (tensors["k_"], tensors["v_"])
    with _device_guard(q):
        is_new = launches is None
        if launches is None:  # planned from the 4-D tensors alone
            planned = _backward_launches(tensors, is_causal, band, need_dq, need_dkv, deterministic)
            launches = _cache_launches(key, *planned)
        tensors["L"] = logsumexp
        _add_documents(tensors, band)
        if "VECTORS" in launches[0].tensors:
            tensors["VECTORS"] = new_vectors(tensors["q_"])
        if "INITIAL" in launches[0].tensors:
            tensors["INITIAL"], tensors["DQ"] = new_vectors(tensors["q_"]), new_sums(tensors["q_"])
            tensors["COUNTER"] = torch.empty(1 + tensors["DQ"].numel() // 4096, dtype=torch.int32, device=q.device)
        with launches[1].compiling(tensors) if is_new and len(launches) > 1 else _NO_CONTEXT:
            launches[0](tensors)
        for launch in launches[1:]:
            launch(tensors)
    return dq, dk, dv


def deterministic_backward(do: Tensor, saved: Saved, need_dq: bool, need_dkv: bool) -> tuple[Tensor, Tensor, Tensor]:
    """`flash_backward` that gives the same bits every time."""
    return flash_backward(do, saved, need_dq, need_dkv, deterministic=True)


def new_vectors(q: Tensor) -> Tensor:
    """An uninitialised buffer for VECTORS or INITIAL, two numbers for each row of q (B, H, N_q, D)."""
    return torch.empty((2 * q.shape[0] * q.shape[1], _padded_length(q)), dtype=torch.float32, device=q.device)


def new_sums(q: Tensor) -> Tensor:
    """An uninitialised buffer for DQ, the float32 sums of `gradients_kernel`, for q (B, H, N_q, D)."""
    numbers = q.shape[0] * q.shape[1] * _padded_length(q) * padded_head_size(q.shape[3])
    return torch.empty((numbers // 32, 32), dtype=torch.float32, device=q.device)


def _padded_length(q: Tensor) -> int:
    return -(-q.shape[2] // PAD) * PAD  # `triton.cdiv` takes 3 us on the host


def _add_documents(tensors: Tensors, band: Band | None) -> None:
    """Add DOCUMENT_STARTS and DOCUMENT_ENDS. Without documents they are L, and no kernel reads them."""
    starts, ends = (None, None) if band is None else band[1:]
    tensors["DOCUMENT_STARTS"] = tensors["L"] if starts is None else starts.contiguous()
    tensors["DOCUMENT_ENDS"] = tensors["L"] if ends is None else ends.contiguous()


def _key(is_causal: bool, band: Band | None, *tensors: Tensor) -> tuple[Any, ...]:
    """Everything that the choice of a launch depends on."""
    facts: list[Any] = [(x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16) for x in tensors]
    if band is not None:
        facts.append((band.window, *(None if x is None else x.data_ptr() % 16 for x in band[1:])))
    return is_causal, recording.is_on, _precision(tensors[0]), *facts


def _cache_launches(key: tuple[Any, ...], *launches: Launch) -> tuple[Launch, ...]:
    if len(_LAUNCHES) >= 4096:  # sampling has ever new lengths
        _LAUNCHES.clear()
    _LAUNCHES[key] = launches
    return launches


def _device_guard(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    # The guard takes longer than this check, which usually finds nothing to do.
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return _NO_CONTEXT
    return torch.cuda.device(x.device)


def _check_supported(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> None:
    check_qkv(q, k, v, is_causal, dtypes=DTYPES, max_head_size=MAX_HEAD_SIZE)


# ---------------------------------------------------------------------------------------------------------------------
# The choice of kernels
# ---------------------------------------------------------------------------------------------------------------------


def _forward_launch(tensors: Tensors, is_causal: bool, band: Band | None) -> Launch:
    q, k, v = tensors["q_"], tensors["k_"], tensors["v_"]
    if _use_gluon(tensors):
        return gluon_launch("forward", tensors, is_causal, band)
    tma = _use_tma(tensors)
    tile = choose_tile("forward", q, tma, needs_small_tiles(q, k, v))
    return triton_launch("forward", tensors, is_causal, tile, tma, band=band)


def _backward_launches(
    tensors: Tensors, is_causal: bool, band: Band | None, need_dq: bool, need_dkv: bool, deterministic: bool
) -> tuple[Launch, ...]:
    q, k, v = tensors["q_"], tensors["k_"], tensors["v_"]
    if need_dq and need_dkv and _use_gluon(tensors):
        return (
            gluon_launch("prepare", tensors, is_causal),
            gluon_launch("gradients", tensors, is_causal, band, deterministic),
            gluon_launch("finish", tensors, is_causal),
        )
    tma, small = _use_tma(tensors), needs_small_tiles(q, k, v)
    if need_dq and need_dkv and not tma and _num_scores(q, k) < ONE_LAUNCH_BELOW_SCORES:
        one_launch_small = small or is_faster_with_small_tiles(q, k)
        if tile_key("backward", q.shape[-1], q.dtype, tma, one_launch_small) in tile_table():
            tile = choose_tile("backward", q, tma, one_launch_small)
            return (triton_launch("backward", tensors, is_causal, tile, tma, band=band),)
    first = triton_launch("dq", tensors, is_causal, choose_tile("dq", q, tma, small), tma, need_dq, band)
    if not need_dkv:
        return (first,)
    return first, triton_launch("dkv", tensors, is_causal, choose_tile("dkv", q, tma, small), tma, band=band)


def _use_gluon(tensors: Tensors) -> bool:
    """Whether the Gluon kernels are faster and can serve the tensors."""
    has_many_scores = _num_scores(tensors["q_"], tensors["k_"]) >= TMA_FROM_SCORES
    return (recording.is_on or has_many_scores) and _is_for_gluon(tensors["q_"]) and _can_use_tma(tensors)


def _is_for_gluon(q: Tensor) -> bool:
    """The Gluon kernels need some head sizes, and Hopper's matrix instructions, which no later card has."""
    if INTERPRET or padded_head_size(q.shape[-1]) not in gluon.HEAD_SIZES:
        return False
    return torch.cuda.get_device_capability(q.device) == (9, 0)


def _use_tma(tensors: Tensors) -> bool:
    """Whether TMA moves the tensors of the Triton kernels."""
    return _num_scores(tensors["q_"], tensors["k_"]) >= TMA_FROM_SCORES and _can_use_tma(tensors)


def _can_use_tma(tensors: Tensors) -> bool:
    q = tensors["q_"]
    if not INTERPRET and (q.dtype == torch.float32 or not has_tma(q.device)):
        return False
    return can_use_tma(*tensors.values())


def _num_scores(q: Tensor, k: Tensor) -> int:
    return q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]


# ---------------------------------------------------------------------------------------------------------------------
# Launches
# ---------------------------------------------------------------------------------------------------------------------


def triton_launch(
    phase: str,
    tensors: Tensors,
    is_causal: bool,
    tile: Tile,
    tma: bool,
    need_dq: bool = True,
    band: Band | None = None,
) -> Launch:
    """The launch of a Triton kernel for tensors like these, all of them 4-D.

    phase is "forward" (fills o_ and L), "dq" (fills VECTORS and, if needed, dq_), "dkv" (reads VECTORS, fills dk_ and
    dv_) or "backward" (fills dq_, dk_ and dv_). tma: TMA moves the tiles.
    """
    q, k = tensors["q_"], tensors["k_"]
    query_tiles, key_tiles = triton.cdiv(q.shape[2], tile.BM), triton.cdiv(k.shape[2], tile.BN)
    q_heads, k_heads = q.shape[0] * q.shape[1], k.shape[0] * k.shape[1]
    kernel, programs, heads = {
        "forward": (forward_kernel, query_tiles * q_heads, _heads_together(q, k, 2)),
        "dq": (dq_kernel, _padded_length(q) // tile.BM * q_heads, _heads_together(q, k, 2)),
        "dkv": (dkv_kernel, key_tiles * k_heads, _heads_together(k, q, 2)),
        "backward": (backward_kernel, query_tiles * q_heads + key_tiles * k_heads, 1),
    }[phase]
    constants = dict(
        {f"{name}strides": tensor.stride() for name, tensor in tensors.items()},
        **_scalars(q, k, heads, band),
        BM=tile.BM,
        BN=tile.BN,
        D=q.shape[3],
        D_PAD=padded_head_size(q.shape[3]),
        G=group_size(q, k),
        CAUSAL=is_causal,
        BAND=_kind(band),
        MOVE=_move(tensors, tile, tma),
        PRECISION=_precision(q),
        TOGETHER=tile.TOGETHER,
        NEED_DQ=need_dq,
    )
    blocks = _blocks(q, tile.BM, tile.BN, [1, tile.BM] if phase == "dkv" else None) if tma else {}
    return Launch(kernel, programs, constants, blocks, tile.num_warps, tile.num_stages)


def gluon_launch(
    phase: str, tensors: Tensors, is_causal: bool, band: Band | None = None, is_ordered: bool = False
) -> Launch:
    """The launch of a kernel of the Gluon modules, where `_use_gluon` says so, for tensors like these, all of them 4-D.

    phase is "forward" (counts in COUNTER, fills o_ and L), "prepare" (fills INITIAL, DQ and COUNTER), "gradients"
    (reads INITIAL, counts in COUNTER, fills dk_ and dv_, adds to DQ) or "finish" (reads DQ, fills dq_). is_ordered:
    "gradients" adds in the same order every time.
    """
    q, k = tensors["q_"], tensors["k_"]
    d_pad = padded_head_size(q.shape[3])
    if phase in ("prepare", "finish"):
        constants = dict(
            {f"{name}strides": tensor.stride() for name, tensor in tensors.items()},
            **_scalars(q, k, 1, band),
            D=q.shape[3],
            D_PAD=d_pad,
        )
        kernel = gluon_sums.prepare_kernel if phase == "prepare" else gluon_sums.finish_kernel
        return Launch(kernel, _padded_length(q) // 64 * q.shape[0] * q.shape[1], constants, {}, 4, num_stages=1)
    rows, groups, more = gluon.ROWS, gluon.GROUPS, {}
    if phase == "forward":
        groups = gluon_forward.groups(d_pad, band is not None)
        more = dict(GROUPS=groups)
        kernel, tiled, looped_over, blocks = gluon_forward.forward_kernel, q, k, _blocks(q, rows, gluon_forward.BN)
    else:
        kernel, tiled, looped_over = gluon_backward.gradients_kernel, k, q
        queries = gluon_backward.queries_of_a_tile(d_pad)
        blocks = _blocks(q, queries, rows) | {name: [1, 1, groups * rows, d_pad] for name in ("k_", "v_")}
        blocks |= {"INITIAL": [queries], "DQ": gluon_backward.DQ_BLOCK}
        more = dict(ORDERED=is_ordered)
    tiles = triton.cdiv(tiled.shape[2], groups * rows) * tiled.shape[0] * tiled.shape[1]
    heads = _heads_together(tiled, looped_over, 8)
    if not is_ordered:  # programs that add in turn are far apart, so more heads do not fit into the cache
        heads = heads_on_hopper(heads, is_causal)
    scalars = _scalars(q, k, heads, band)
    return Launch(
        kernel,
        min(tiles, _num_multiprocessors(q)),
        dict(D_PAD=d_pad, G=group_size(q, k), CAUSAL=is_causal, BAND=_kind(band), TILES=tiles, **more, **scalars),
        blocks,
        gluon.NUM_WARPS,
        num_stages=1,  # the kernels manage their own stages
        layouts=gluon.LAYOUTS,
        max_registers=gluon.MAX_REGISTERS[groups],
    )


def _blocks(q: Tensor, BM: int, BN: int, vectors: list[int] | None = None) -> dict[str, list[int]]:
    """The block in which TMA moves each tensor: BM queries or BN keys, with all columns."""
    d_pad = padded_head_size(q.shape[3])
    blocks = {name: [1, 1, BM, d_pad] for name in ("q_", "o_", "do_", "dq_")}
    blocks |= {name: [1, 1, BN, d_pad] for name in ("k_", "v_", "dk_", "dv_")}
    return blocks if vectors is None else {**blocks, "VECTORS": vectors}


def _scalars(q: Tensor, k: Tensor, heads: int, band: Band | None) -> dict[str, float]:
    n_q, n_k = q.shape[2], k.shape[2]
    window = n_k if band is None else min(band.window or n_k, n_k)
    return dict(scale=1 / math.sqrt(q.shape[3]), H=q.shape[1], N_q=n_q, N_k=n_k, WINDOW=window, HEADS=heads)


def _kind(band: Band | None) -> str:
    """BAND; see the kernels' legend."""
    if band is None:
        return "none"
    return "window" if band.starts is None else "documents"


def _heads_together(tiled: Tensor, looped_over: Tensor, parts: int) -> int:
    """How many heads fit in a part of the L2 cache (`heads_in_cache`); at least one.

    The parts of 2 for the Triton kernels and 8 for the Gluon kernels were measured.
    """
    if INTERPRET:
        return 2
    cache_bytes = torch.cuda.get_device_properties(looped_over.device).L2_cache_size
    return max(1, heads_in_cache(tiled, looped_over, cache_bytes // parts))


def _num_multiprocessors(x: Tensor) -> int:
    return 2 if INTERPRET else torch.cuda.get_device_properties(x.device).multi_processor_count


def _move(tensors: Tensors, tile: Tile, tma: bool) -> str:
    """How tiles are moved; see the kernels' legend. Only strides that span gigabytes need far pointers."""
    if tma:
        return "descriptors"
    rows, columns = max(tile.BM, tile.BN) - 1, padded_head_size(tensors["q_"].shape[3]) - 1
    far = max(rows * tensor.stride(2) + columns * tensor.stride(3) for tensor in tensors.values()) >= 2**31
    return "far pointers" if far else "pointers"


def _precision(q: Tensor) -> str:
    """How float32 is multiplied; see the kernels' legend."""
    if q.dtype != torch.float32:
        return "ieee"
    if allows_tf32():
        return "tf32"
    return "ieee" if INTERPRET else "bf16x6"


FlashAttentionTriton = flash_function("flash_triton", flash_forward, flash_backward, _check_supported)
FlashAttentionTritonDeterministic = flash_function(
    "flash_triton_deterministic", flash_forward, deterministic_backward, _check_supported
)
FlashAttentionTritonCompiled = flash_function(
    "flash_triton_compiled", flash_forward, compiled_backward, _check_supported
)
