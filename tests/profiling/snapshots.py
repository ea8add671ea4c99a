"""Snapshots made by hand, for tests: as the allocator would write them."""

import pickle
from pathlib import Path
from typing import Any

from cs336_systems.bench.profiling.phases import Held, Phases

HERE = "/src/cs336_basics/model.py"
TORCH = "/env/lib/python3.11/site-packages/torch/nn/functional.py"


def frames(line: int, function: str = "forward", file: str = HERE) -> list[dict[str, Any]]:
    """A stack whose innermost line is PyTorch's."""
    return [
        dict(filename=TORCH, line=1, name="linear"),
        dict(filename=file, line=line, name=function),
        dict(filename="/src/main.py", line=9, name="main"),
    ]


class Trace:
    """A trace written event by event, 10 us apart from `start_us` on, and the snapshot that goes with it."""

    def __init__(self, start_us: int = 1_000_000) -> None:
        self.events: list[dict[str, Any]] = []
        self.next_us = start_us

    def note(self, action: str, addr: int, size: int, **more: Any) -> "Trace":
        self.events.append({"action": action, "addr": addr, "size": size, "stream": 0, "time_us": self.next_us, **more})
        self.next_us += 10
        return self

    def alloc(self, addr: int, size: int, line: int = 1, stream: int = 0) -> "Trace":
        return self.note("alloc", addr, size, frames=frames(line), stream=stream)

    def free(self, addr: int, size: int, stream: int = 0) -> "Trace":
        self.note("free_requested", addr, size, frames=[], stream=stream)
        return self.note("free_completed", addr, size, frames=[], stream=stream)

    def mark(self) -> "Trace":
        stack = frames(5, "mark_boundary", "/src/cs336_systems/bench/profiling/recording.py")
        self.note("alloc", 0xFFFF, 1, frames=stack)
        return self.free(0xFFFF, 1)

    def snapshot(self, *blocks: tuple[int, int], state: str = "active_allocated") -> dict[str, Any]:
        """With blocks (address, requested size) in use at the end."""
        made = [
            dict(address=address, size=-(-size // 512) * 512, requested_size=size, state=state, frames=[])
            for address, size in blocks
        ]
        segment = dict(address=blocks[0][0] if blocks else 0, total_size=1 << 20, stream=0, device=0, blocks=made)
        return {"segments": [segment], "device_traces": [self.events]}


def save(path: Path, content: Any) -> Path:
    path.write_bytes(pickle.dumps(content))
    return path


def one_step() -> tuple[dict[str, Any], Phases]:
    """A whole step. In use before: weight w (1000), its state s (2000), an input i (50).

    moment  event            in use after it       phase
    0       -                3050
    1..3    marker           3050                  forward from 1
    4       a = 400          3450
    5       t = 700          4150
    6, 7    free t           3450 (at 7)
    8       b = 300          3750
    9..11   marker           3750                  backward from 9
    12      g = 1000         4750
    13      t = 600, where   5350                  the peak
            t was before
    14, 15  free a           4950 (at 15)
    16, 17  free t           4350 (at 17)
    18, 19  free b           4050 (at 19)
    20..22  marker           4050                  optimizer from 20
    23      u = 900          4950
    24, 25  free u           4050 (at 25)
    26, 27  free g           3050 (at 27)
    28..30  marker           3050                  ends at 28
    """
    w, s, i, a, t, b, g, u = (0x10000 * k for k in range(1, 9))
    trace = Trace().mark().alloc(a, 400, 11).alloc(t, 700, 12).free(t, 700).alloc(b, 300, 13).mark()
    trace.alloc(g, 1000, 14).alloc(t, 600, 15).free(a, 400).free(t, 600).free(b, 300).mark()
    trace.alloc(u, 900, 16).free(u, 900).free(g, 1000).mark()
    held = []
    for boundary in range(4):
        held.append(Held(boundary=boundary, address=w, category="parameters", name="w"))
        held.append(Held(boundary=boundary, address=s, category="optimizer state", name="exp_avg of w"))
        held.append(Held(boundary=boundary, address=i, category="other", name="inputs"))
    held.append(Held(boundary=2, address=g, category="gradients", name="gradient of w"))
    phases = Phases(
        names=("forward", "backward", "optimizer"),
        boundaries_us=(1_000_000, 1_000_080, 1_000_190, 1_000_270),
        held=tuple(held),
        config=dict(size="hand-made", mode="train_step", batch_size=2, context_length=3),
    )
    return trace.snapshot((w, 1000), (s, 2000), (i, 50)), phases
