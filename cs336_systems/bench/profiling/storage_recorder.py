"""A memory history on a CPU, where PyTorch's allocator keeps none: the storages of tensors as they come and go.

Temporaries inside an operator are not seen; on a GPU the allocator sees them.
"""

import pickle
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from cs336_basics.files import replaced

from ..instruments.live_bytes import StorageFollower

_MOST_FRAMES = 40


class StorageRecorder(StorageFollower):
    """While entered, notes each storage that an operator makes, and when it is freed.

    `held` are tensors that existed before. `save` writes a snapshot in the format of the GPU's allocator.
    """

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()
        self._events: list[dict[str, Any]] = []
        self._alive: dict[int, tuple[int, list[dict[str, Any]]]] = {}
        for storage in (tensor.untyped_storage() for tensor in held):
            if self.is_new(storage):
                self._alive[storage.data_ptr()] = storage.nbytes(), []
                self.follow(storage)

    def made(self, storage: torch.UntypedStorage) -> None:
        address, size, frames = storage.data_ptr(), storage.nbytes(), _stack_at_operator()
        self._note("alloc", address, size, frames)
        self._alive[address] = size, frames

    def freed(self, address: int) -> None:
        size, _ = self._alive.pop(address)
        for action in ("free_requested", "free_completed"):
            self._note(action, address, size, [])

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.stop()

    def save(self, path: Path) -> None:
        segments = []
        for address, (size, frames) in self._alive.items():
            block = dict(address=address, size=size, requested_size=size, state="active_allocated", frames=frames)
            facts: dict[str, Any] = dict(
                address=address, total_size=size, allocated_size=size, active_size=size, requested_size=size
            )
            facts |= dict(device=0, stream=0, segment_type="large", segment_pool_id=(0, 0), is_expandable=False)
            segments.append({**facts, "frames": frames, "blocks": [block]})
        with replaced(path) as beside, beside.open("wb") as file:
            pickle.dump({"segments": segments, "device_traces": [self._events]}, file)

    def _note(self, action: str, address: int, size: int, frames: list[dict[str, Any]]) -> None:
        event = dict(action=action, addr=address, size=size, stream=0, time_us=time.time_ns() // 1000)
        self._events.append({**event, "frames": frames})


def _stack_at_operator() -> list[dict[str, Any]]:
    """The Python frames from the caller of the followed operator outward, in the format of a snapshot."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not StorageFollower.__torch_dispatch__.__code__:
        frame = frame.f_back
    frames: list[dict[str, Any]] = []
    while frame is not None and (frame := frame.f_back) is not None and len(frames) < _MOST_FRAMES:
        code = frame.f_code
        frames.append({"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name})
    return frames
