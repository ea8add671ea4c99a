"""Follows tensor storages on a CPU and counts the bytes alive, which on a GPU the allocator does."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageFollower(TorchDispatchMode):
    """While active, follows the storages of tensors that operations make, from their first tensor to their last.

    Storages that existed before do not count, nor do temporaries inside an operation or empty storages. Only eager
    operations are seen, backward passes included. Subclasses say what to do in `made` and `freed`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._followed: dict[int, weakref.ref] = {}

    def made(self, storage: torch.UntypedStorage) -> int:
        """Called for each storage; returns the number with which `freed` will be called."""
        raise NotImplementedError

    def freed(self, number: int) -> None:
        """Called when the last tensor of a storage is gone, with what `made` returned or `follow` was given."""
        raise NotImplementedError

    def follow(self, storage: torch.UntypedStorage, number: int) -> None:
        """Have `freed` called with this number when the storage is gone."""
        key = storage._cdata

        def gone(_: Any) -> None:
            self._followed.pop(key, None)
            self.freed(number)

        self._followed[key] = weakref.ref(storage, gone)

    def is_new(self, storage: torch.UntypedStorage) -> bool:
        """Whether it occupies main memory and is not followed yet."""
        return storage._cdata not in self._followed and storage.nbytes() > 0 and storage.device.type == "cpu"

    def stop(self) -> None:
        """Follow no storage any more; without this call, those made so far are followed to their end."""
        self._followed.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and self.is_new(storage):  # else a view, or written in place
                self.follow(storage, self.made(storage))
        return result


class LiveBytes(StorageFollower):
    """Bytes of the storages that operations make while it is active: alive now, and at the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        """Bytes alive now."""
        self.peak = 0
        """Most bytes alive at one time."""

    def made(self, storage: torch.UntypedStorage) -> int:
        """Count it; `freed` gets its size."""
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        return size

    def freed(self, number: int) -> None:
        """Stop counting it."""
        self.now -= number


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
