"""Records the tensors that autograd saves for the backward pass: each storage once, with the operation saving it."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True)
class Saved:
    """A storage that the backward pass needs."""

    kind: str
    """activation, input, weight (parameters and buffers), or weight copy (a parameter in another type)."""
    module: str
    """Name of the module that saved it; "" for the outermost."""
    operation: str
    """PyTorch function that saved it; "" for an autograd.Function and for compiled code."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    """Size of the whole storage, which a view keeps alive."""


class SavedTensors:
    """While active, records the tensors that a module with these inputs saves for its backward pass.

    named: also record submodule and operation, which would recompile compiled code.
    """

    def __init__(self, module: nn.Module, inputs: Sequence[Tensor], named: bool = True) -> None:
        self.found: list[Saved] = []
        self._module, self._named = module, named
        self._parameters = dict(module.named_parameters())
        self._kinds = {_place(t): "weight" for t in (*self._parameters.values(), *module.buffers())}
        self._kinds |= {_place(t): "input" for t in inputs}
        self._places: set[int] = set()
        self._kept: list[Tensor] = []  # while they live, no other storage gets their address
        self._inside: list[str] = [""]
        self._operations = _Operations()
        self._stack = ExitStack()

    def __enter__(self) -> "SavedTensors":
        if self._named:
            for name, child in self._module.named_modules():
                enter = child.register_forward_pre_hook(lambda *_, name=name: self._inside.append(name))
                leave = child.register_forward_hook(self._leave)
                self._stack.callback(enter.remove)
                self._stack.callback(leave.remove)
            self._stack.enter_context(self._operations)
        self._stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor))
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()
        self._kept.clear()

    def bytes(self, kind: str) -> int:
        """Total bytes of a kind."""
        return sum(saved.bytes for saved in self.found if saved.kind == kind)

    def by(self, key: Callable[[Saved], str]) -> dict[str, int]:
        """Bytes of activations by key."""
        counted: Counter[str] = Counter()
        for saved in self.found:
            if saved.kind == "activation":
                counted[key(saved)] += saved.bytes
        return dict(counted)

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._inside.pop()

    def _pack(self, tensor: Tensor) -> Tensor:
        self._kept.append(tensor)
        place = _place(tensor)
        if place not in self._places and tensor.numel():
            kind = self._kinds.get(place) or ("weight copy" if self._is_weight_copy(tensor) else "activation")
            self._places.add(place)
            size = tensor.untyped_storage().nbytes()
            shape, operation = tuple(tensor.shape), self._operations.now
            self.found.append(Saved(kind, self._inside[-1], operation, shape, tensor.dtype, size))
        return tensor

    def _is_weight_copy(self, tensor: Tensor) -> bool:
        """Compare values, because a saved tensor does not know its source."""
        candidates = [p for p in self._parameters.values() if p.numel() == tensor.numel() and p.dtype != tensor.dtype]
        turned = [tensor, tensor.mT] if tensor.ndim == 2 else [tensor]
        return any(p.shape == t.shape and torch.equal(p.detach().to(t.dtype), t) for p in candidates for t in turned)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Operations(TorchFunctionMode):
    """While active, `now` is the name of the PyTorch function that is running."""

    def __init__(self) -> None:
        super().__init__()
        self.now = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, self.now = self.now, getattr(func, "__name__", str(func))
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.now = before
