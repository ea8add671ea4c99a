"""Launches a Triton kernel many times with little overhead on the host.

Triton's own launch inspects every argument of every call to find the compiled kernel that fits. With thirty arguments
this takes longer than a short kernel runs. A `Launch` does it once.
"""

import contextlib
import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

INTERPRET = bool(triton.knobs.runtime.interpret)
"""Whether Triton's interpreter runs the kernels on the CPU: TRITON_INTERPRET=1, read when Triton is imported."""


class Launch:
    """A kernel with its grid and all its arguments except the tensors. Call it with the tensors by name.

    A kernel's parameters begin with its tensors; `constants` has all other arguments by name. `blocks` has the shapes
    in which TMA (the tensor memory accelerator of Hopper) moves tensors, by name; a tensor without a block is passed as
    a pointer. Both may have names that the kernel does not take. A block of one axis is cut from the tensor flattened
    to one dimension. A Gluon kernel also has the `layouts` of its blocks in shared memory, by their number of axes, and
    the maximum number of registers per thread.

    The tensors of every call must agree with the first call in shapes, strides, dtypes, device and 16-byte alignment.
    The caller keeps one Launch for each combination.
    """

    def __init__(
        self,
        kernel: Any,
        num_programs: int,
        constants: Mapping[str, Any],
        blocks: Mapping[str, Sequence[int]],
        num_warps: int,
        num_stages: int,
        layouts: Mapping[int, Any] | None = None,
        max_registers: int | None = None,
    ) -> None:
        _hash_in_order(kernel.__module__)
        self.tensors = tuple(name for name in kernel.arg_names if name not in constants)
        """The names of the tensors that it takes."""
        self._kernel = kernel
        self._grid = (num_programs, 1, 1)
        self._constants = [constants[name] for name in kernel.arg_names[len(self.tensors) :]]
        self._select = operator.itemgetter(*self.tensors)
        self._blocks = [blocks.get(name) for name in self.tensors] if blocks else None
        self._layouts = layouts
        self.options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": max_registers}
        self._compiled: Any = None
        self._device = -1

    def __call__(self, tensors: Mapping[str, Tensor]) -> None:
        """Launch on the current stream of the current device. Tensors that the kernel does not take are left out."""
        arguments = self.arguments(tensors)
        if self._compiled is not None:
            stream = triton.runtime.driver.active.get_current_stream(self._device)
            self._compiled(*arguments, stream=stream)
            return
        compiled = self._kernel[self._grid](*arguments, **self.options)
        if not INTERPRET:
            self._compiled, self._device = compiled[self._grid], torch.cuda.current_device()

    @contextlib.contextmanager
    def compiling(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Compile and load the kernel for these tensors in a thread while the `with` body compiles another kernel."""
        if INTERPRET:
            yield
            return
        device, arguments = torch.cuda.current_device(), self.arguments(tensors)

        def compile_it() -> None:
            torch.cuda.set_device(device)  # a new thread starts on the first device
            _ = self._kernel.warmup(*arguments, grid=self._grid, **self.options).run  # .run loads it

        with ThreadPoolExecutor(1) as pool:
            compiled = pool.submit(compile_it)
            yield
            compiled.result()

    def arguments(self, tensors: Mapping[str, Tensor]) -> list[Any]:
        """All arguments of the kernel for these tensors, in order."""
        if self._blocks is None:
            return [*self._select(tensors), *self._constants]
        pairs = zip(self._select(tensors), self._blocks)  # noqa: B905
        given = (x if block is None else _descriptor(x, block, self._layouts) for x, block in pairs)
        return [*given, *self._constants]


_hashed: set[str] = set()


def _hash_in_order(module: str) -> None:
    """Make Triton hash a module's functions in the order of their definitions: called functions come first.

    The hash names a kernel in Triton's cache. In Triton 3.6 (not in 3.9) a bug makes it depend on the functions that
    were hashed before for another kernel. With two threads their order is random, and a cached kernel would sometimes
    be compiled again.
    """
    if module in _hashed:
        return
    _hashed.add(module)
    functions = [each for each in vars(sys.modules[module]).values() if isinstance(each, triton.JITFunction)]
    for each in functions:  # imported functions first, in the order of their own module
        _hash_in_order(each.__module__)
    for each in functions:
        _ = each.cache_key


def _descriptor(x: Tensor, block: Sequence[int], layouts: Mapping[int, Any] | None) -> Any:
    if len(block) == 1:
        x = x.view(-1)
    # The stride of an axis of length 1 is never used but must be valid.
    strides = [step if size > 1 else 16 for step, size in zip(x.stride()[:-1], x.shape[:-1], strict=True)]
    described = x, list(x.shape), [*strides, 1], list(block)
    return TensorDescriptor(*described) if layouts is None else GluonDescriptor(*described, layouts[len(block)])


def has_tma(device: torch.device) -> bool:
    """Whether the card has TMA, which moves tiles by descriptor: Hopper and later."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


def check_device(x: Tensor, kernel: str, name: str = "q", at_least: tuple[int, int] = (8, 0)) -> None:
    """Raise a ValueError if a Triton kernel cannot run on the device of x, the argument `name`.

    at_least: the lowest compute capability that it runs on.
    """
    if INTERPRET and x.device.type in ("cpu", "cuda"):
        return
    if not x.is_cuda:
        raise ValueError(
            f"{name} is on {x.device}: {kernel} needs a CUDA device, or a CPU and TRITON_INTERPRET=1 in the "
            "environment, with which Triton's interpreter runs it slowly"
        )
    if torch.cuda.get_device_capability(x.device) < at_least:
        needed = ".".join(map(str, at_least))
        raise ValueError(
            f"{name} is on {torch.cuda.get_device_name(x.device)}: {kernel} needs compute capability {needed}"
        )
