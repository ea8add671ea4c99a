"""The tile sizes of the kernels of `flash_triton_kernels.py`: measured for large cards, small for other cards."""

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..launch import INTERPRET


class Tile(NamedTuple):
    """How one phase divides its work: queries and keys per tile, and the compiler's settings for a program."""

    BM: int
    BN: int
    num_warps: int
    num_stages: int
    TOGETHER: bool = False
    """For the phases that loop over the keys; see the kernels' legend."""


@functools.cache
def tile_table() -> dict[str, Tile]:
    """The measured tiles, by `tile_key`. `tune.py` next to this module measures them again."""
    rows = json.loads(Path(__file__).with_name("flash_triton_tiles.json").read_text())
    return {key: Tile(**tile) for key, tile in rows.items()}


def tile_key(phase: str, d: int, dtype: torch.dtype, tma: bool, small: bool = False) -> str:
    """A tile's key: the phase (forward, dq, dkv, or backward for the last two), the padded head size, and a kind.

    The kinds are float, half, half-tma for 16-bit tensors moved by TMA, and float-small. The last has small tiles for
    float32, which are not tuned. It has a backward pass in one launch at every head size.
    """
    kind = "float-small" if small else "float" if dtype == torch.float32 else "half-tma" if tma else "half"
    return f"{phase}-{padded_head_size(d)}-{kind}"


def padded_head_size(d: int) -> int:
    """The number of columns of a tile: d rounded up to a power of two, and at least 16 for the matrix instructions."""
    return max(16, triton.next_power_of_2(d))


def choose_tile(phase: str, q: Tensor, tma: bool, small: bool) -> Tile:
    """The tile of a phase for tensors like q (B, H, N, D) on their device; `tma` and `small` as in `tile_key`."""
    if INTERPRET:  # small, so that a short test has several tiles, whole and partial
        return Tile(BM=64, BN=32, num_warps=4, num_stages=1, TOGETHER=tma)  # so that tests reach both values
    properties: Any = torch.cuda.get_device_properties(q.device)
    if properties.shared_memory_per_block_optin < 160 * 1024 and not small:
        # The table is for the larger cards; these tiles fit all cards.
        if q.dtype != torch.float32:
            return Tile(BM=32, BN=32, num_warps=4, num_stages=2)
        rows = 32 if padded_head_size(q.shape[-1]) <= 128 else 16
        return Tile(BM=rows, BN=rows, num_warps=4, num_stages=1)
    return tile_table()[tile_key(phase, q.shape[-1], q.dtype, tma, small)]


def needs_small_tiles(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether they are float32 and the columns of one are not adjacent in memory.

    With the tuned tiles, Triton 3.6 generates kernels for Hopper that read beyond the tensors at head sizes 32 and 64.
    The other tensors need no check: outputs and gradients have the memory layouts of q, k and v, and dO is made
    contiguous.
    """
    return q.dtype == torch.float32 and any(x.stride(-1) != 1 for x in (q, k, v))


def is_faster_with_small_tiles(q: Tensor, k: Tensor) -> bool:
    """Whether the tuned tiles of float32 are so few that small tiles, in one launch, take less time.

    The two take equal time at about a third of the multiprocessors, measured with one head (docs/log.md). False if the
    tuned tiles also have a backward pass in one launch, and at head size 256, where one launch takes long to compile
    and all tiles are small.
    """
    d = q.shape[-1]
    has_both = tile_key("backward", d, q.dtype, False) in tile_table()
    if INTERPRET or q.dtype != torch.float32 or has_both or padded_head_size(d) == 256:
        return False
    longest = max(q.shape[2], k.shape[2])
    programs = triton.cdiv(longest, choose_tile("dq", q, False, False).BM) * q.shape[0] * q.shape[1]
    return 3 * programs <= torch.cuda.get_device_properties(q.device).multi_processor_count
