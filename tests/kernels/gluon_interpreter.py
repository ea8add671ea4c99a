"""Runs the project's Gluon kernels on the CPU: warps as threads, tensors as tensors. Triton has no interpreter for it.

All programs run at once, as on a GPU with as many multiprocessors.

It checks the results, and whether the barriers prevent reads of data that has not arrived and writes over data still in
use: shared memory is NaN until it is filled, and again from the start of a copy into it; copies take a random time and
overtake each other; a product reads its operands when a warp waits for it, not when it starts; TMA reads what it stores
or adds when a warp waits for that, and writes it when a warp waits for that too, or at the end. None of them may read
what a warp has written before a fence. It ignores layouts.
"""

import functools
import importlib.util
import inspect
import math
import queue
import random
import re
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

_PACKAGE = "triton.experimental.gluon"
PATIENCE = 20.0
"""Seconds that a warp waits for a barrier."""
LAG = 0.0
"""Seconds by which one of two groups, in turn, is late at each wait for a product."""
LATENCY = 0.001
"""Seconds that one of four copies takes, at random."""
LATE = 0
"""Address of a tensor whose copies all take so long."""
DELAY = 0.0
"""Seconds within which the programs start, at random."""
_changed = threading.Condition()
_memory = threading.Lock()
"""Held while a number in memory is added to."""


class _Warps(threading.local):
    """What the warps of this thread have started and not waited for, and written and not fenced."""

    program = 0
    polls = 0

    def __init__(self) -> None:
        self.products: list[_Product] = []
        self.stores: list[Callable[[], Callable[[], None]]] = []
        self.writes: list[Callable[[], None]] = []  # of stores whose sources have been read
        self.unfenced: list[Tensor] = []
        self.lag = 0.0
        self.named: dict[int, tuple[_Barrier, set[int]]] = {}  # of this program, with the threads that arrived


_warps = _Warps()
_num_programs = [0]


class Descriptor:
    """A tensor whose blocks TMA moves: zero beyond the tensor, where nothing is written."""

    def __init__(self, x: Tensor, block: Sequence[int]) -> None:
        self.x, self.dtype = x.detach(), x.dtype
        self.block_type = types.SimpleNamespace(shape=list(block), nbytes=math.prod(block) * x.element_size())

    def inside(self, start: Sequence[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """The part of the tensor that a block covers, and the part of the block that lies in the tensor."""
        sizes = [
            max(0, min(int(i) + size, n) - int(i))
            for i, size, n in zip(start, self.block_type.shape, self.x.shape, strict=True)
        ]
        there = tuple(slice(int(i), int(i) + size) for i, size in zip(start, sizes, strict=True))
        return there, tuple(slice(0, size) for size in sizes)


class Pointer:
    def __init__(self, x: Tensor, offset: Any = 0) -> None:
        self.x, self.offset = x, offset

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.x, self.offset + offset)


class _Shared:
    """A piece of shared memory. `unfenced` has ones where a warp wrote and no fence came yet."""

    def __init__(self, x: Tensor, unfenced: Tensor) -> None:
        self.x, self.unfenced, self.dtype, self.shape = x, unfenced, x.dtype, tuple(x.shape)

    def of(self, view: Callable[[Tensor], Tensor]) -> "_Shared":
        return _Shared(view(self.x), view(self.unfenced))

    def index(self, i: Any) -> "_Shared":
        assert 0 <= int(i) < len(self.x)
        return self.of(lambda x: x[int(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> "_Shared":
        return self.of(lambda x: x.narrow(dim, start, length))

    def reshape(self, shape: Sequence[int]) -> "_Shared":
        return self.of(lambda x: x.view(*shape))

    def permute(self, order: Sequence[int]) -> "_Shared":
        return self.of(lambda x: x.permute(*order))

    def viewed_as(self, dtype: torch.dtype, shape: Sequence[int]) -> "_Shared":
        found = self.x.view(-1).view(dtype)[: math.prod(shape)].view(*shape)
        return _Shared(found, torch.zeros(shape, dtype=torch.bool))

    def load(self, layout: Any) -> Tensor:
        return self.x.clone()

    def store(self, value: Tensor) -> None:
        assert (value.dtype, value.shape) == (self.dtype, self.x.shape)
        self.x.copy_(value)
        self.unfenced.fill_(True)
        _warps.unfenced.append(self.unfenced)

    def read(self) -> Tensor:
        """The numbers, read by TMA or for a product."""
        assert not self.unfenced.any(), "read before a fence"
        return self.x


def _fence() -> None:
    while _warps.unfenced:
        _warps.unfenced.pop().fill_(False)


class _Barrier:
    phase, arrivals, left, bytes = 0, 0, 0, 0

    def __init__(self, arrivals: int = 0) -> None:
        self.set(arrivals)

    def change(self, arrived: int, size: int) -> None:
        with _changed:
            self.left -= arrived
            self.bytes += size
            assert min(self.left, self.bytes) >= 0
            if self.left == self.bytes == 0:
                self.phase, self.left = 1 - self.phase, self.arrivals
                _changed.notify_all()

    def set(self, count: int) -> None:
        self.arrivals = self.left = int(count)

    def wait(self, phase: Any) -> None:
        with _changed:
            assert _changed.wait_for(lambda: self.phase != int(phase), timeout=PATIENCE), "nobody arrives any more"


class _Barriers(list[_Barrier]):
    def index(self, i: Any) -> _Barrier:  # type: ignore[override]
        assert 0 <= int(i) < len(self)
        return self[int(i)]


class _Product:
    def __init__(self, a: Any, b: _Shared, accumulator: Tensor) -> None:
        self.a, self.b, self.accumulator = a, b, accumulator
        self.result: Tensor | None = None

    def compute(self) -> None:
        a = self.a.read() if isinstance(self.a, _Shared) else self.a
        assert a.dtype == self.b.dtype
        self.result = self.accumulator + a.float() @ self.b.read().float()


def _start(a: Any, b: _Shared, accumulator: Tensor, use_acc: bool = True, is_async: bool = False) -> _Product:
    assert isinstance(accumulator, Tensor), "added to before it was waited for"
    product = _Product(a, b, accumulator if use_acc else torch.zeros_like(accumulator))
    _warps.products.append(product)
    return product


def _wait(outstanding: int, values: list[Any]) -> Any:
    time.sleep(_warps.lag)
    while len(_warps.products) > outstanding:
        _warps.products.pop(0).compute()
    found = [x.result if isinstance(x, _Product) else x for x in values]
    assert all(x is not None for x in found), "used before it was waited for"
    return found[0] if len(found) == 1 else found


class _CopyEngine:
    def __init__(self) -> None:
        self.copies: queue.Queue[Any] = queue.Queue()
        for _ in range(2):  # so that copies overtake each other
            threading.Thread(target=self.run, daemon=True).start()

    def load(self, descriptor: Descriptor, start: Sequence[Any], barrier: _Barrier, buffer: _Shared) -> None:
        assert buffer.shape == tuple(descriptor.block_type.shape)
        buffer.x.fill_(math.nan)
        self.copies.put((descriptor, start, barrier, buffer))

    def run(self) -> None:
        while True:
            descriptor, start, barrier, buffer = self.copies.get()
            time.sleep(LATENCY if descriptor.x.data_ptr() == LATE else random.choice([0, 0, 0, LATENCY]))
            there, here = descriptor.inside(start)
            buffer.x.zero_()
            buffer.x[here] = descriptor.x[there]
            barrier.change(0, -descriptor.block_type.nbytes)


def _start_store(descriptor: Descriptor, start: Sequence[Any], buffer: _Shared, add: bool = False) -> None:
    def read() -> Callable[[], None]:
        there, here = descriptor.inside(start)
        numbers = buffer.read()[here].clone()

        def write() -> None:
            with _memory:
                descriptor.x[there] = numbers + (descriptor.x[there] if add else 0)

        return write

    _warps.stores.append(read)


def _wait_until_read(left: int) -> None:
    while len(_warps.stores) > left:
        _warps.writes.append(_warps.stores.pop(0)())


def _assembly(source: str, constraints: str, arguments: Sequence[Tensor], *_: Any) -> Tensor:
    if named := re.match(r"bar\.(sync|arrive) \$1, (\d+);", source):
        name, threads = arguments[0].unique().item(), int(named[2])
        with _changed:
            barrier, arrived = _warps.named.setdefault(name, (_Barrier(threads), set[int]()))
            warps, phase = threading.get_ident(), barrier.phase
            assert barrier.arrivals == threads
            assert warps not in arrived, "the same warps arrived twice"
            arrived.add(warps)
            barrier.change(arguments[0].numel(), 0)
            if barrier.phase != phase:
                arrived.clear()
            if named[1] == "sync":
                barrier.wait(phase)
    elif source.startswith("cp.async.bulk.wait_group 0;"):
        _wait_until_written()
    else:
        assert source == "mov.b32 $0, 0;"
    return torch.tensor(0)


def _wait_until_written() -> None:
    _wait_until_read(0)
    while _warps.writes:
        _warps.writes.pop(0)()


def _at_once(functions: Sequence[Callable[[], None]]) -> None:
    """Run functions in threads; raise the first error."""
    errors: list[BaseException] = []

    def run(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _specialize(partitions: list[tuple[Callable[..., None], Any]], *_: Any) -> None:
    program, named = _warps.program, dict[int, tuple[_Barrier, set[int]]]()

    def run(i: int) -> None:
        _warps.program, _warps.named, _warps.lag = program, named, LAG if i == program % 2 else 0
        function, arguments = partitions[i]
        function(*arguments)
        assert not _warps.products, "products were not waited for"
        assert not _warps.stores, "stores were not waited for"
        _wait_until_written()

    _at_once([functools.partial(run, i) for i in range(len(partitions))])


def _load(pointer: Pointer, mask: Tensor | None = None, other: float = 0.0, volatile: bool = False) -> Tensor:
    if volatile:
        time.sleep(1e-3)
        _warps.polls += 1
        assert _warps.polls < 1e3 * PATIENCE, "nobody counts any more"
    if mask is None:
        return pointer.x.view(-1)[pointer.offset.long()]
    found = torch.full(mask.shape, other, dtype=pointer.x.dtype)
    found[mask] = pointer.x.view(-1)[pointer.offset[mask]]
    return found


def _store(pointer: Pointer, value: Tensor, mask: Tensor | None = None) -> None:
    inside = slice(None) if mask is None else mask
    pointer.x.view(-1)[pointer.offset[inside]] = value[inside]


def _atomic_add(pointer: Pointer, value: Tensor, mask: Tensor, sem: str = "acq_rel") -> Tensor:
    before = torch.full(mask.shape, -1, dtype=pointer.x.dtype)  # where there is a mask, the number is undefined
    for i in mask.nonzero().flatten():
        with _memory:
            before[i] = pointer.x[pointer.offset[i]]
            pointer.x[pointer.offset[i]] += value[i]
    return before


def _allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
    if dtype == torch.int64:
        return _Barriers(_Barrier() for _ in range(shape[0]))
    return _Shared(
        torch.full(shape, math.nan if dtype.is_floating_point else -1, dtype=dtype),
        torch.zeros(shape, dtype=torch.bool),
    )


def _jit(function: Any = None, **_: Any) -> Any:
    return function or (lambda function: function)


class _Layout:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.value = self


def _where(condition: Tensor, a: Any, b: Any) -> Tensor:
    dtype = a.dtype if isinstance(a, Tensor) else b.dtype
    return torch.where(condition, torch.as_tensor(a, dtype=dtype), torch.as_tensor(b, dtype=dtype))


def _language() -> types.ModuleType:
    gl = types.ModuleType(f"{_PACKAGE}.language")
    layouts = (
        "DistributedLinearLayout",
        "BlockedLayout",
        "NVMMASharedLayout",
        "NVMMADistributedLayout",
        "SliceLayout",
        "DotOperandLayout",
    )
    scalars = torch.as_tensor
    gl.__dict__.update(
        dict.fromkeys(layouts, _Layout),
        constexpr=lambda value: value,
        float32=torch.float32,
        int32=torch.int32,
        int64=torch.int64,
        cdiv=lambda a, b: (scalars(a) + b - 1) // b,
        minimum=lambda a, b: torch.minimum(scalars(a), scalars(b)),
        maximum=lambda a, b: torch.maximum(scalars(a), scalars(b)),
        where=_where,
        exp2=torch.exp2,
        log2=torch.log2,
        sum=lambda x, axis: x.sum(axis),
        max=lambda x, axis: x.amax(axis),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        arange=lambda start, end, layout: torch.arange(start, end, dtype=torch.int32),
        broadcast=lambda a, b: torch.broadcast_tensors(a, b),
        convert_layout=lambda x, layout: x,
        static_range=range,
        program_id=lambda axis: scalars(_warps.program),
        num_programs=lambda axis: scalars(_num_programs[0]),
        load=_load,
        store=_store,
        atomic_add=_atomic_add,
        inline_asm_elementwise=_assembly,
        barrier=lambda: None,
        allocate_shared_memory=_allocate,
        warp_specialize=_specialize,
    )
    return gl


def _hopper() -> types.ModuleType:
    hopper, engine = types.ModuleType(f"{_PACKAGE}.language.nvidia.hopper"), _CopyEngine()
    hopper.__dict__.update(
        fence_async_shared=_fence,
        mbarrier=types.SimpleNamespace(
            MBarrierLayout=_Layout,
            init=_Barrier.set,
            wait=_Barrier.wait,
            expect=lambda barrier, size: barrier.change(1, size),
            arrive=lambda barrier: barrier.change(1, 0),
        ),
        tma=types.SimpleNamespace(
            async_load=engine.load,
            async_store=_start_store,
            async_atomic_add=functools.partial(_start_store, add=True),
            store_wait=_wait_until_read,
        ),
        warpgroup_mma=_start,
        warpgroup_mma_wait=_wait,
    )
    return hopper


def _core() -> types.ModuleType:
    """What Triton's own built-in functions are made with."""
    core = types.ModuleType(f"{_PACKAGE}.language._core")
    semantic = types.SimpleNamespace(
        memdesc_reinterpret=lambda buffer, dtype, shape, layout: buffer.viewed_as(dtype, shape)
    )
    core.__dict__.update(
        builtin=lambda function: functools.partial(function, _semantic=semantic),
        _unwrap_if_constexpr=lambda value: value,
    )
    return core


def interpreted(*kernels: types.ModuleType, fault: tuple[str, str] = ("", "")) -> list[types.ModuleType]:
    """The modules, executed again for this interpreter; each may import from the modules before it.

    fault: a piece of their source, and what to put in its place.
    """
    gl, gluon = _language(), types.ModuleType(_PACKAGE)
    gluon.__dict__.update(jit=_jit, language=gl)
    experimental = types.ModuleType("triton.experimental")
    experimental.__dict__.update(gluon=gluon)
    assert any(fault[0] in inspect.getsource(module) for module in kernels), fault
    again = []
    with pytest.MonkeyPatch.context() as patch:
        for module in (experimental, gluon, gl, _core(), types.ModuleType(f"{_PACKAGE}.language.nvidia"), _hopper()):
            patch.setitem(sys.modules, module.__name__, module)
        for module in kernels:
            spec = module.__spec__
            assert spec is not None
            again.append(importlib.util.module_from_spec(spec))
            patch.setitem(sys.modules, module.__name__, again[-1])
            source = inspect.getsource(module).replace(*fault)
            exec(compile(source, str(module.__file__), "exec"), again[-1].__dict__)
    return again


class Launch:
    """The project's `Launch`, for a kernel of this interpreter."""

    def __init__(
        self,
        kernel: Callable[..., None],
        num_programs: int,
        constants: Mapping[str, Any],
        blocks: Mapping[str, Sequence[int]],
        *_: Any,
        **__: Any,
    ) -> None:
        self.kernel, self.num_programs, self.blocks = kernel, num_programs, blocks
        self.tensors = [name for name in inspect.signature(kernel).parameters if name not in constants]
        self.constants = {name: torch.tensor(x) if type(x) is int else x for name, x in constants.items()}

    def __call__(self, tensors: Mapping[str, Tensor]) -> None:
        """Run all programs at once."""
        given: dict[str, Any] = {}
        for name in self.tensors:
            x, block = tensors[name], self.blocks.get(name)
            given[name] = Pointer(x) if block is None else Descriptor(x.view(-1) if len(block) == 1 else x, block)
        _num_programs[0] = self.num_programs

        def run(program: int) -> None:
            _warps.program = program
            time.sleep(random.uniform(0, DELAY))
            self.kernel(**given, **self.constants)

        _at_once([functools.partial(run, i) for i in random.sample(range(self.num_programs), self.num_programs)])
