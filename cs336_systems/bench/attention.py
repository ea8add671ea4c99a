"""Compares attention kernels: the inputs of a kernel, and how several kernels take turns.

The kernels of a shape take turns over several rounds. A GPU lowers its clock when it gets hot, so if each kernel were
finished before the next one began, the first would run on a cold card.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch._functorch import config as functorch_config

from ..config.checks import check_types, is_place, require, require_at_least, without_groups
from ..kernels.attention import ATTENTION, get_attention
from ..kernels.attention.contract import attention_flops
from ..machine.hardware import DTYPE_NAMES, DTYPES, select_device, use_device
from ..training.metrics import summarise
from .case import row_config, swept
from .instruments.timing import time_ms, timer, wait_for
from .outcome import current_gpu_state, failed, free_memory, is_sound, measured, with_gpu_states
from .row import Row

KERNELS = tuple(name for name in ATTENTION if name not in ("scaled_dot_prod_attention", "flash_attention_triton"))
QUICK_KERNELS = ("naive", "vectorized_torch", "flash_torch", "sdpa")
"""Kernels that are quick on a CPU; Triton's interpreter is slow."""
# Matrix products: forward 2, backward 5. What a kernel recomputes is not counted.
WORKS = {"forward": 2, "backward": 5, "forward_backward": 7, "forward_sum_backward": 7}
"""What can be timed, and its number of matrix products. The last one is `attention(q, k, v).sum().backward()`."""
_SIZE_LIMIT = 1 << 31
_LONGEST_MS = 3.6e6
_SLOW_MS = 500  # a call that takes longer is timed in one round only


@dataclass(frozen=True, kw_only=True)
class KernelBench:
    """A kernel, the type it computes in, and how it is timed; subclasses add the shape."""

    kernel: str = swept(*KERNELS, quick=QUICK_KERNELS, also="kernels")
    """Attention kernel by its registered name."""
    dtype: Literal["bf16", "fp16", "fp32"] = swept("bf16", quick="fp32")
    """Type of q, k and v."""
    is_causal: bool = swept(True, sweep=(True, False))
    """Whether query i sees only the keys up to i."""
    device: str = swept("auto", quick="cpu")
    """auto, cpu, cuda or cuda:N; auto takes the GPU if there is one."""
    rounds: int = swept(3, quick=1)
    """Number of rounds in which the kernels take turns."""
    warmup_ms: float = swept(25.0, quick=0.0)
    """Time for warming up before each measurement of a round."""
    rep_ms: float = swept(50.0, quick=1.0)
    """Time for each measurement of a round."""

    def __post_init__(self) -> None:
        check_types(self, "")
        check_kernel(self.kernel)
        require_at_least(self, "", 1, "rounds")
        for name in ("warmup_ms", "rep_ms"):
            value = getattr(self, name)
            require(0 <= value <= _LONGEST_MS, name, value, f"at least 0 and at most {_LONGEST_MS:g}, an hour")
        object.__setattr__(self, "device", resolve_device(self.device))

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape of q, and that of k and v."""
        raise NotImplementedError

    def read_back(self, o: Tensor, k: Tensor) -> dict[str, Any]:
        """The fields of the shape, read from an output and the keys."""
        raise NotImplementedError


def check_kernel(name: str) -> None:
    """Raise ValueError if no kernel has the name. One of ours that cannot be imported is a row that says so."""
    if is_place(name):
        with without_groups({"model.attention": "kernel"}):
            get_attention(name)
    else:
        require(name in ATTENTION, "kernel", name, f"one of {', '.join(ATTENTION)}, or module:function")


def check_sizes(config: Any, *names: str) -> None:
    """Raise ValueError for a field with a size that no tensor can have."""
    for name in names:
        value = getattr(config, name)
        sizes = value if isinstance(value, tuple) else (value,)
        require(all(1 <= size < _SIZE_LIMIT for size in sizes), name, value, "from 1 to 2^31 - 1")


def resolve_device(name: str) -> str:
    """The device's name, with auto resolved. Raises ValueError for a device that is not there."""
    with without_groups():
        return str(select_device(name))


def parse_sizes(text: str, name: str, form: str, count: int, separator: str) -> tuple[int, ...]:
    """Parse `count` sizes from the command line. Raises ValueError naming field, value and form."""
    parts = text.lower().split(separator)
    # Ten digits are enough, and more than some thousand are too many for int().
    if len(parts) != count or not all(
        re.fullmatch(r"\d{1,10}", part, re.ASCII) and 0 < int(part) < _SIZE_LIMIT for part in parts
    ):
        raise ValueError(f"{name} is {text!r}: it must be {form}, of numbers from 1 to 2^31 - 1")
    return tuple(map(int, parts))


def take_turns(case: str, *works: str) -> Callable[[Sequence[KernelBench]], Iterator[Row]]:
    """Make the `measure` of a case whose configurations differ only in `kernel` and take turns; `works` are of WORKS.

    A kernel that fails gives a row of status error or oom, and the others go on.
    """

    def measure(configs: Sequence[KernelBench]) -> Iterator[Row]:
        yield from _measure(case, works, configs)
        free_memory()

    return measure


def _measure(case: str, works: Sequence[str], configs: Sequence[KernelBench]) -> Iterator[Row]:
    try:
        inputs = _inputs(configs[0])
    except Exception as error:  # a RuntimeError too, where the size overflows or a CPU has too little memory
        for config in configs:
            yield failed(case, config.kernel, row_config(config), error)
        return
    subjects = [_Subject(case, config, inputs, works) for config in configs]
    steps = [(subject, subject.first_call) for subject in subjects]
    steps += [(subject, subject.time_all) for _ in range(configs[0].rounds) for subject in subjects]
    for subject, step in steps:
        subject.run(step)
        if subject.failure is not None and not is_sound():
            yield subject.failure
            raise RuntimeError("the GPU is lost to this process; the other kernels are measured in another")
    for subject in subjects:
        yield subject.row()


def _inputs(config: KernelBench) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of the output."""
    device = use_device(config.device)
    torch.manual_seed(0)
    q_shape, k_shape = config.shapes
    shapes = (q_shape, k_shape, k_shape, q_shape)
    return tuple(torch.randn(shape, device=device, dtype=DTYPES[config.dtype]) for shape in shapes)


class _Subject:
    """A kernel at a shape: its inputs, its times so far, and what went wrong."""

    def __init__(self, case: str, config: KernelBench, inputs: Sequence[Tensor], works: Sequence[str]) -> None:
        *qkv, self.do = inputs
        self.case, self.config, self.works = case, config, works
        self.trains = any(work != "forward" for work in works)
        self.qkv = [x.detach().requires_grad_(self.trains) for x in qkv]  # shared memory, separate gradients
        self.times: dict[str, list[float]] = {}
        self.facts: dict[str, Any] = {}
        self.ran: dict[str, Any] = {}
        self.failure: Row | None = None
        self.states: list[dict[str, Any]] = [{}, {}]  # of the GPU, before the first and after the last round

    def attention(self) -> Tensor:
        q, k, v = self.qkv
        return get_attention(self.config.kernel)(q, k, v, self.config.is_causal)

    def run(self, step: Callable[[], None]) -> None:
        """Do a step unless an earlier one failed; keep the failure if there is one."""
        if self.failure is not None:
            return
        try:
            # The backward pass is timed many times on one forward pass. Compiled code (flex) refuses that if it has
            # donated buffers; it checks the setting at compile time and at each backward pass.
            with functorch_config.patch(donated_buffer=False):
                step()
        except Exception as error:  # third-party kernels may raise anything; the other rows are still wanted
            self.failure = failed(self.case, self.config.kernel, row_config(self.config), error)
        if self.failure is not None:
            if not is_sound():
                return  # the caller leaves this process
            self.clear()
            free_memory()

    def clear(self) -> None:
        for x in self.qkv:
            x.grad = None

    def call(self) -> None:
        """Everything that is timed, once."""
        o = self.attention()
        dtype = DTYPE_NAMES.get(o.dtype, str(o.dtype))
        self.ran = {**self.config.read_back(o, self.qkv[1]), "dtype": dtype, "device": self.config.device}
        if self.trains:
            o.backward(self.do)

    def first_call(self) -> None:
        """Time the first pass, compilation included, then measure the memory of the second."""
        begin = time.perf_counter()
        self.call()
        wait_for(self.do.device)
        self.facts["first_call_s"] = time.perf_counter() - begin
        self.clear()
        if self.do.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.do.device)
            before = torch.cuda.memory_allocated(self.do.device)
            self.call()
            results = [self.do, *(self.qkv if self.trains else ())]  # o, and the gradients
            peak = torch.cuda.max_memory_allocated(self.do.device) - before
            self.facts["extra_memory_bytes"] = max(0, peak - sum(x.nbytes for x in results))
            self.clear()

    def time_all(self) -> None:
        """Time one round, except work so slow that its first round was enough."""
        o = self.attention()
        todo: dict[str, Callable[[], Any]] = {
            "forward": self.attention,
            "backward": lambda: o.backward(self.do, retain_graph=True),
            "forward_backward": lambda: self.attention().backward(self.do),
            "forward_sum_backward": lambda: self.attention().sum().backward(),
        }
        warmup_ms, rep_ms = self.config.warmup_ms, self.config.rep_ms
        self.states[0] = self.states[0] or current_gpu_state()
        for name in self.works:
            if min(self.times.get(name, [0])) > _SLOW_MS:
                continue
            times = time_ms(todo[name], self.do.device, warmup_ms, rep_ms, self.qkv)
            self.times.setdefault(name, []).extend(times)
        self.states[1] = current_gpu_state()
        self.clear()

    def row(self) -> Row:
        if self.failure is not None:
            return self.failure
        counts = {name: len(times) for name, times in self.times.items()}
        metrics: dict[str, Any] = {**self.facts, "timer": timer(self.do.device), "samples": counts}
        for name, times in self.times.items():
            flops = attention_flops(self.do.shape, self.qkv[1].shape[-2], self.config.is_causal, WORKS[name])
            metrics[f"{name}_ms"] = summarise(times)
            metrics[f"{name}_tflops"] = flops / metrics[f"{name}_ms"]["p50"] / 1e9
        row = measured(self.case, self.config.kernel, row_config(self.config), self.ran, metrics)
        return with_gpu_states(row, *self.states)
