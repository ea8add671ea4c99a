"""A memory history on a CPU, where PyTorch's allocator keeps none: the storages of tensors as they come and go.

What an operator uses inside and gives back before it returns is not seen; on a GPU the allocator sees it.
"""

import pickle
import sys
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_MOST_FRAMES = 40


class StorageRecorder(TorchDispatchMode):
    """While entered, notes each storage that an operator returns, and when it is freed; `save` writes a snapshot.

    `held` are tensors that were there before. The snapshot has the form of those of the GPU's allocator.
    """

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()
        self._events: list[dict[str, Any]] = []
        self._alive: dict[int, tuple[int, list[dict[str, Any]]]] = {}
        self._finalizers: list[weakref.finalize] = []
        for tensor in held:
            self._watch(tensor.untyped_storage(), [])

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu":
                storage = leaf.untyped_storage()
                if storage.nbytes() and storage.data_ptr() not in self._alive:
                    frames = _stack(sys._getframe(1))
                    self._note("alloc", storage.data_ptr(), storage.nbytes(), frames)
                    self._watch(storage, frames)
        return out

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for finalizer in self._finalizers:
            finalizer.detach()

    def save(self, path: Path) -> None:
        """Write what was seen as a snapshot: one trace, and a segment for each storage that is alive."""
        segments = []
        for address, (size, frames) in self._alive.items():
            block = dict(address=address, size=size, requested_size=size, state="active_allocated", frames=frames)
            facts: dict[str, Any] = dict(
                address=address, total_size=size, allocated_size=size, active_size=size, requested_size=size
            )
            facts |= dict(device=0, stream=0, segment_type="large", segment_pool_id=(0, 0), is_expandable=False)
            segments.append({**facts, "frames": frames, "blocks": [block]})
        with path.open("wb") as file:
            pickle.dump({"segments": segments, "device_traces": [self._events]}, file)

    def _watch(self, storage: torch.UntypedStorage, frames: list[dict[str, Any]]) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if size and address not in self._alive:
            self._alive[address] = size, frames
            self._finalizers.append(weakref.finalize(storage, self._freed, address))
            self._finalizers[-1].atexit = False

    def _freed(self, address: int) -> None:
        size, _ = self._alive.pop(address)
        for action in ("free_requested", "free_completed"):
            self._note(action, address, size, [])

    def _note(self, action: str, address: int, size: int, frames: list[dict[str, Any]]) -> None:
        event = dict(action=action, addr=address, size=size, stream=0, time_us=time.time_ns() // 1000)
        self._events.append({**event, "frames": frames})


def _stack(frame: FrameType | None) -> list[dict[str, Any]]:
    """The Python frames from one outward, as a snapshot has them."""
    frames: list[dict[str, Any]] = []
    while frame is not None and len(frames) < _MOST_FRAMES:
        code = frame.f_code
        frames.append({"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name})
        frame = frame.f_back
    return frames
