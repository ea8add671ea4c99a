"""Storages of tensors as they come and go on a CPU, and the memory of those alive: what a GPU's allocator tells."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageFollower(TorchDispatchMode):
    """While active, follows the storages of tensors that operations make, from their first tensor to their last.

    Storages that were there before do not count, nor does what an operation has for itself while it runs, nor what has
    no bytes. Sees eager operations only, backward passes included. Subclasses say what to do in `made` and `freed`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._followed: dict[int, weakref.ref] = {}

    def made(self, storage: torch.UntypedStorage) -> int:
        """Called for each storage; returns the number by which `freed` is to know it."""
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
        """Whether it has main memory and is not followed yet."""
        return storage._cdata not in self._followed and storage.nbytes() > 0 and storage.device.type == "cpu"

    def stop(self) -> None:
        """Follow none any more; without it those that were made are followed to their end."""
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
    """The bytes of storages that operations make while it is active, alive and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        """Bytes alive of those that have been made."""
        self.peak = 0
        """Most of them at one time."""

    def made(self, storage: torch.UntypedStorage) -> int:
        """Count it; `freed` knows it by its size."""
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        return size

    def freed(self, number: int) -> None:
        """Count it no longer."""
        self.now -= number


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
