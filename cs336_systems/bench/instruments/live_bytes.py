"""Follows tensor storages on a CPU and counts the bytes alive, as the allocator does on a GPU."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageFollower(TorchDispatchMode):
    """While active, follows the storages that eager operations make, backward passes included, until they are freed.

    Earlier storages, empty ones and temporaries inside an operation do not count. Subclasses define `made` and `freed`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._followed: dict[int, weakref.ref] = {}

    def made(self, storage: torch.UntypedStorage) -> None:
        """Called for each new storage."""

    def freed(self, address: int) -> None:
        """Called when a storage is freed, with its address from when it was made."""

    def follow(self, storage: torch.UntypedStorage) -> None:
        """Call `freed` when the storage is freed."""
        key, address = storage._cdata, storage.data_ptr()

        def gone(_: Any) -> None:
            self._followed.pop(key, None)
            self.freed(address)

        self._followed[key] = weakref.ref(storage, gone)

    def is_new(self, storage: torch.UntypedStorage) -> bool:
        """Whether the storage occupies main memory and is not followed yet."""
        return storage._cdata not in self._followed and storage.nbytes() > 0 and storage.device.type == "cpu"

    def stop(self) -> None:
        """Stop following. Without this call, storages are followed until they are freed."""
        self._followed.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **kwargs)
        for tensor in (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and self.is_new(storage):  # otherwise a view or an in-place result
                self.made(storage)
                self.follow(storage)
        return result


class LiveBytes(StorageFollower):
    """Bytes of the storages that operations make while it is active, each at its current size: FSDP resizes some."""

    def __init__(self) -> None:
        super().__init__()
        self._peak = 0

    @property
    def now(self) -> int:
        storages = (reference() for reference in list(self._followed.values()))
        return sum(storage.nbytes() for storage in storages if storage is not None)

    @property
    def peak(self) -> int:
        """Most bytes alive when a storage was made, or now."""
        return max(self._peak, self.now)

    def restart(self) -> None:
        self._peak = 0

    def made(self, storage: torch.UntypedStorage) -> None:
        self._peak = max(self._peak, self.now + storage.nbytes())
