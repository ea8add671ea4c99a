"""Measure the tiles of `flash_triton` on this GPU and write its table.

`python -m cs336_systems.kernels.attention.tune`, minutes on one GPU; `--head_sizes 64` for one head size.

Every phase (forward, dq, dkv) is timed alone in bfloat16, for each padded head size, through the copy engine and
through pointers, over a short list of tiles that fit a streaming multiprocessor. Candidates are compiled in parallel
processes first. What the table holds is the fastest of each. The tiles for float32 are left as they are: exact products
are unrolled into multiply-adds, of which larger tiles have so many that they take minutes to compile.
"""

import argparse
import itertools
import json
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..launch import Launch
from . import flash_triton as flash
from .flash_triton import Tile

HEAD_SIZES = (16, 32, 64, 128, 256)
LONG, SHORT = 16384, 1024
"""Positions at which the two ways are timed: descriptors are for long sequences, pointers mostly for short ones.

Of the long ones 16 heads; of the short ones 100, 4 x 25 as in xl: where a GPU is not full, tiles matter less.
"""


class Candidate(NamedTuple):
    """One tile for one entry of the table."""

    phase: str
    d: int
    tma: bool
    tile: Tile


def candidates(d: int, tma: bool) -> Iterator[Candidate]:
    """What is worth trying: the rows that a program keeps, those it walks along, warps, stages, how it waits."""
    for phase in _PHASES:
        if phase == "backward":  # both walks with one tile, by pointers
            sizes = () if tma else ((32, 32), (32, 64), (64, 32), (64, 64))
            for (BM, BN), num_warps, num_stages in itertools.product(sizes, (4, 8), (1, 2)):
                yield Candidate(phase, d, tma, Tile(BM, BN, num_warps, num_stages))
            continue
        walked = (32, 64, 128) if d <= 128 else (16, 32, 64)
        for keep, walk, num_stages in itertools.product((64, 128), walked, (2, 3)):
            for num_warps in (4, 8) if keep == 128 or d == 256 else (4,):
                # The accumulators, one or two of keep x d and as many of keep x walk, have to fit the registers.
                products = 2 if phase == "dkv" else 1
                if products * keep * (d + walk) > num_warps * 32 * 255 * 1.25:
                    continue
                BM, BN = (walk, keep) if phase == "dkv" else (keep, walk)
                for together in (False, True) if tma and num_warps == 8 and phase != "dkv" else (False,):
                    yield Candidate(phase, d, tma, Tile(BM, BN, num_warps, num_stages, together))


def _inputs(n: int, d: int) -> dict[str, Tensor]:
    heads = 16 if n == LONG else 100
    q, k, v, do = (torch.randn(1, heads, n, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    o, logsumexp = flash.new_outputs(q)
    dq, dk, dv = flash.new_gradients(q, k, v, True, True)
    vectors = flash.new_vectors(q)
    return dict(q=q, k=k, v=v, do=do, o=o, logsumexp=logsumexp, dq=dq, dk=dk, dv=dv, vectors=vectors)


# What makes a phase's launch, of which tensors, and what else the launch takes.
_PHASES: dict[str, tuple[Callable[..., Launch], tuple[str, ...], tuple[str, ...]]] = {
    "forward": (flash.forward_launch, ("q", "k", "v", "o"), ("logsumexp",)),
    "dq": (flash.dq_launch, ("q", "k", "v", "o", "do", "dq"), ("logsumexp", "vectors")),
    "backward": (flash.backward_launch, ("q", "k", "v", "o", "do", "dq", "dk", "dv"), ("logsumexp",)),
    "dkv": (flash.dkv_launch, ("q", "k", "v", "do", "dk", "dv"), ("vectors",)),
}


def _launch(candidate: Candidate, x: dict[str, Tensor]) -> Callable[[], None]:
    """The candidate's launch on these tensors."""
    make, names, others = _PHASES[candidate.phase]
    launch = make(*(x[name] for name in names), True, candidate.tile, candidate.tma)
    return lambda: launch(*(x[name] for name in (*names, *others)))


def _compile(candidate: Candidate) -> str | None:
    """Launch once, for Triton's cache on disk; what went wrong, if anything (too much shared memory, say)."""
    try:
        _launch(candidate, _inputs(256, candidate.d))()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}".split("\n")[0]
    return None


def measure(entries: list[Candidate], workers: int) -> list[tuple[Candidate, float]]:
    """The candidates that run, with their times in ms, causal, 16 heads of 8192 (half) or 2048 (float) positions."""
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        errors = pool.map(_compile, entries, chunksize=1)
    for candidate, error in zip(entries, errors, strict=True):
        if error is not None:
            print(f"{tuple(candidate.tile)} of {candidate.phase}, head size {candidate.d}, does not run: {error}")
    ran = [candidate for candidate, error in zip(entries, errors, strict=True) if error is None]
    results = []
    for (d, tma), group in itertools.groupby(ran, key=lambda candidate: (candidate.d, candidate.tma)):
        x = _inputs(LONG if tma else SHORT, d)
        for phase in ("forward", "dq"):  # real o, logsumexp and vectors for the phases that read them
            _launch(Candidate(phase, d, False, Tile(32, 32, 4, 1)), x)()
        for candidate in group:
            ms = triton.testing.do_bench(_launch(candidate, x), warmup=5, rep=25, return_mode="median")
            results.append((candidate, ms))
    return results


def fastest(results: list[tuple[Candidate, float]], count: int) -> dict[str, list[tuple[Candidate, float]]]:
    """The fastest few of each entry of the table."""
    entries: dict[str, list[tuple[Candidate, float]]] = {}
    for candidate, ms in sorted(results, key=lambda result: result[1]):
        key = flash.tile_key(candidate.phase, candidate.d, torch.bfloat16, candidate.tma)
        entries.setdefault(key, []).append((candidate, ms))
    return {key: best[:count] for key, best in sorted(entries.items())}


def main() -> None:
    """Measure, print the best few of each entry and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    table = Path(flash.__file__).with_name("flash_triton_tiles.json")
    parser.add_argument("--out", type=Path, default=table, help="the table to write")
    parser.add_argument("--head_sizes", type=int, nargs="+", default=HEAD_SIZES, choices=HEAD_SIZES)
    parser.add_argument("--workers", type=int, default=16, help="processes that compile")
    arguments = parser.parse_args()
    entries = [
        candidate
        for d in arguments.head_sizes
        for tma in (True, False)
        if not tma or torch.cuda.get_device_capability() >= (9, 0)
        for candidate in candidates(d, tma)
    ]
    results = measure(entries, arguments.workers)
    tiles = dict(flash.tile_table())
    for key, best in fastest(results, 3).items():
        print(key, *(f"\n    {ms:.3f} ms {tuple(candidate.tile)}" for candidate, ms in best))
        tiles[key] = best[0][0].tile
    rows = {key: {name: x for name, x in tile._asdict().items() if x is not False} for key, tile in tiles.items()}
    lines = ",\n".join(f'  "{key}": {json.dumps(row)}' for key, row in sorted(rows.items()))
    arguments.out.write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
