"""The memory of tensors that are alive, and its peak: what a GPU's allocator tells, on a CPU."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """While active, follows the storages of tensors that operations make, from their first tensor to their last.

    Storages that were there before do not count, nor does what an operation has for itself while it runs. Sees eager
    operations only, backward passes included.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        """Bytes alive of those that have been made."""
        self.peak = 0
        """Most of them at one time."""
        self._alive: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            key = _storage(tensor)
            if key not in given and key not in self._alive:  # else a view, or written in place
                self._follow(key, tensor)
        return result

    def _follow(self, key: int, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        size = storage.nbytes()

        def freed(_: Any) -> None:
            self.now -= size
            self._alive.pop(key, None)

        self._alive[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
