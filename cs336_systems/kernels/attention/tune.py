"""Measure the tiles of `flash_triton` on this GPU and write its table.

`python -m cs336_systems.kernels.attention.tune`, minutes on one GPU; `--head_sizes 64 --kinds float` for a part of it.

Each phase (forward, dq, dkv) is timed alone for each padded head size, in bfloat16 through TMA, in bfloat16 through
pointers, and in float32, over a short list of tiles that fit a streaming multiprocessor. The candidates include the
tiles of the present table. They are first compiled in parallel processes. The new table holds the fastest tile of
each entry, except tiles that take long to compile: a float32 product is six products, all unrolled. A backward pass in
one launch has no entry if no tile compiles fast enough, or if it takes much longer than two launches. Any other phase
keeps the tile it has.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import triton

from . import flash_triton as flash
from .flash_triton import Tensors
from .flash_triton_tiles import Tile, tile_key, tile_table

HEAD_SIZES = (16, 32, 64, 128, 256)
_PHASES = ("forward", "dq", "backward", "dkv")
COMPILE_S = 6.0
"""The longest time for compiling a tile of the table in float32, while others compile too.

The first call of both passes waits for two compilations in a row: twelve seconds at most.
"""
MOST_IN_ONE_LAUNCH = 1.5
"""A single launch for dQ, dK and dV may take this many times as long on the GPU, because it saves time on the host."""


class Kind(NamedTuple):
    """A kind of `tile_key`, and the batch on which it is timed.

    Descriptors are for long sequences, pointers mostly for short ones. Pointers are timed with 100 heads, 4 x 25 as in
    xl, because tiles matter less on a GPU that is not full.
    """

    dtype: torch.dtype
    tma: bool
    heads: int
    positions: int


KINDS = {
    "half-tma": Kind(torch.bfloat16, True, 16, 16384),
    "half": Kind(torch.bfloat16, False, 100, 1024),
    "float": Kind(torch.float32, False, 16, 4096),
}


class Candidate(NamedTuple):
    """One tile for one entry of the table."""

    phase: str
    d: int
    kind: str
    tile: Tile

    @property
    def key(self) -> str:
        """The entry's key."""
        return tile_key(self.phase, self.d, KINDS[self.kind].dtype, KINDS[self.kind].tma)


def candidates(d: int, kind: str) -> list[Candidate]:
    """The tiles to try, including the tiles of the table."""
    tried, table = list(_candidates(d, kind)), tile_table()
    present = [each._replace(tile=table[each.key]) for each in tried if each.key in table]
    return list(dict.fromkeys([*tried, *present]))


def _candidates(d: int, kind: str) -> Iterator[Candidate]:
    """Combinations of the rows that a program keeps, the rows of a step of its loop, warps, stages, and TOGETHER."""
    tma, is_float = KINDS[kind].tma, kind == "float"
    for phase in _PHASES:
        if phase == "backward":  # dQ, dK and dV with one tile, by pointers
            sizes = () if tma else ((32, 32), (32, 64), (64, 32), (64, 64))
            for (BM, BN), num_warps, num_stages in itertools.product(sizes, (4, 8), (1,) if is_float else (1, 2)):
                yield Candidate(phase, d, kind, Tile(BM, BN, num_warps, num_stages))
            continue
        steps: tuple[int, ...] = (32, 64, 128) if d <= 128 else (16, 32, 64)
        kept: tuple[int, ...] = (64, 128)
        stages: tuple[int, ...] = (2, 3)
        if is_float:  # needs more room, and takes longer to compile
            steps, stages = steps[:2], (2,) if d <= 128 else (1,)
            kept = (64, 128) if d <= 64 else (32, 64, 128) if d == 128 else (32, 64)
        for keep, step, num_stages in itertools.product(kept, steps, stages):
            for num_warps in (4, 8) if keep == 128 or d == 256 or is_float else (4,):
                # The accumulators, one or two of keep x d and as many of keep x step, must fit in the registers.
                products = 2 if phase == "dkv" else 1
                if products * keep * (d + step) > num_warps * 32 * 255 * 1.25:
                    continue
                BM, BN = (step, keep) if phase == "dkv" else (keep, step)
                for together in (False, True) if tma and num_warps == 8 and phase != "dkv" else (False,):
                    yield Candidate(phase, d, kind, Tile(BM, BN, num_warps, num_stages, together))


def _inputs(heads: int, n: int, d: int, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    """The tensors of all phases by the names of the kernels' parameters: the tiled ones, and L and VECTORS."""
    tiled = ("q_", "k_", "v_", "o_", "do_", "dq_", "dk_", "dv_")
    x = {name: torch.randn(1, heads, n, d, device="cuda", dtype=dtype) for name in tiled}
    return x, {"L": flash.new_outputs(x["q_"])[1], "VECTORS": flash.new_vectors(x["q_"])}


def _launch(candidate: Candidate, x: Tensors, vectors: Tensors) -> Callable[[], None]:
    """The candidate's launch on these tensors."""
    launch = flash.triton_launch(candidate.phase, x, True, candidate.tile, KINDS[candidate.kind].tma)
    return lambda: launch(x | vectors)


def _compile(candidate: Candidate) -> str | None:
    """Launch once to fill Triton's cache on disk. Returns the error, if any (for example, too much shared memory)."""
    try:
        x = _inputs(100, 256, candidate.d, KINDS[candidate.kind].dtype)
        begun = time.perf_counter()
        _launch(candidate, *x)()
        torch.cuda.synchronize()
        took = time.perf_counter() - begun
    except Exception as error:
        return f"{type(error).__name__}: {error}".split("\n")[0]
    return f"{took:.0f} s to compile" if candidate.kind == "float" and took > COMPILE_S else None


def measure(entries: list[Candidate], workers: int) -> Iterator[dict[str, list[tuple[float, Tile]]]]:
    """For each head size and kind: by the table's key, (ms, tile) of the tiles that run, fastest first."""
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for (d, kind), group in itertools.groupby(entries, key=lambda candidate: (candidate.d, candidate.kind)):
            tried = list(group)
            ran = []
            for candidate, error in zip(tried, pool.map(_compile, tried, chunksize=1), strict=True):
                if error is None:
                    ran.append(candidate)
                else:
                    print(f"{tuple(candidate.tile)} of {candidate.phase}, head size {d}, is left out: {error}")
            x = _inputs(KINDS[kind].heads, KINDS[kind].positions, d, KINDS[kind].dtype)
            for phase in ("forward", "dq"):  # real o_, L and VECTORS for the phases that read them
                entry = next(each for each in tried if each.phase == phase)
                _launch(entry._replace(tile=tile_table()[entry.key]), *x)()
            found: dict[str, list[tuple[float, Tile]]] = {candidate.key: [] for candidate in tried}
            for candidate in ran:
                ms = triton.testing.do_bench(_launch(candidate, *x), warmup=5, rep=25, return_mode="median")
                found[candidate.key].append((ms, candidate.tile))
            yield {key: sorted(times) for key, times in found.items()}


def write_table(tiles: dict[str, Tile], file: Path) -> None:
    """Write tiles by their keys, one per line."""
    rows = {key: {name: x for name, x in tile._asdict().items() if x is not False} for key, tile in tiles.items()}
    lines = ",\n".join(f'  "{key}": {json.dumps(row)}' for key, row in sorted(rows.items()))
    file.write_text("{\n" + lines + "\n}\n")


def main() -> None:
    """Measure, print the best few of each entry and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    table = Path(flash.__file__).with_name("flash_triton_tiles.json")
    parser.add_argument("--out", type=Path, default=table, help="the table to write")
    parser.add_argument("--head_sizes", type=int, nargs="+", default=HEAD_SIZES, choices=HEAD_SIZES)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--workers", type=int, default=16, help="processes that compile")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("tiles are measured on a CUDA GPU, and there is none")
    entries = [
        candidate
        for d in arguments.head_sizes
        for kind in arguments.kinds
        if not KINDS[kind].tma or torch.cuda.get_device_capability() >= (9, 0)
        for candidate in candidates(d, kind)
    ]
    with tempfile.TemporaryDirectory(prefix="cs336-") as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # empty, because compile times are measured
        update_table(measure(entries, arguments.workers), arguments.out)


def update_table(measured: Iterator[dict[str, list[tuple[float, Tile]]]], file: Path) -> None:
    """Print the results of `measure` and write them into the table, after each head size."""
    tiles = dict(tile_table())
    for found in measured:
        fastest = {key: times[0][0] for key, times in found.items() if times}
        for key, times in found.items():
            print(key, *(f"\n    {ms:.3f} ms {tuple(tile)}" for ms, tile in times[:3]), flush=True)
            apart = [fastest.get(key.replace("backward", phase), math.inf) for phase in ("dq", "dkv")]
            is_slow = fastest.get(key, math.inf) > MOST_IN_ONE_LAUNCH * sum(apart)
            if key.startswith("backward") and (is_slow or not times):
                tiles.pop(key, None)
            elif times:
                tiles[key] = times[0][1]
        write_table(tiles, file)


if __name__ == "__main__":
    main()
