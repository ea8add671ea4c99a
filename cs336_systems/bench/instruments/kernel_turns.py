"""Times attention kernels in turns: forward, backward and both, with events on a GPU, over several rounds.

A GPU lowers its clock when it gets hot, so if each kernel were finished before the next one began, the first would run
on a cold card.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config

from ...config.checks import is_import_path, without_groups
from ...kernels.attention import check_limits, check_results, get_attention
from ...machine.hardware import DTYPE_NAMES, DTYPES, use_device
from ...training.metrics import summarise
from ..case import Case, row_config
from ..outcome import current_gpu_state, failed, free_memory, is_sound, measured, with_gpu_states
from ..row import Row
from .timing import time_ms, timer, wait_for

if TYPE_CHECKING:
    from ..cases.attention import AttentionBench

logger = logging.getLogger(__name__)
# Matrix products: forward 2, backward 5. Products that a kernel recomputes are not counted.
PRODUCTS = {"forward": 2, "backward": 5, "forward_backward": 7, "forward_sum_backward": 7}
"""Passes that can be timed, with their matrix products. The last one is `attention(q, k, v).sum().backward()`."""
_SLOW_MS = 500  # slower passes are timed in one round only


def timed(config: "AttentionBench", work: str, times: list[float], per: str = "p50") -> dict[str, Any]:
    """Summary of a pass's times in ms, and the TFLOP/s that its median (or `per`) means."""
    summary = summarise(times)
    return {f"{work}_ms": summary, f"{work}_tflops": config.flops(PRODUCTS[work]) / summary[per] / 1e9}


def take_turns(*works: str) -> Callable[[Case, Sequence["AttentionBench"]], Iterator[Row]]:
    """Make the `rows` of a preset whose kernels take turns; `works` are keys of PRODUCTS.

    The configurations of a call differ only in `kernel`. A kernel that fails gives a row of status error or oom, and
    the others go on.
    """

    def rows(case: Case, configs: Sequence["AttentionBench"]) -> Iterator[Row]:
        first = configs[0]
        try:
            device = use_device(first.device)
            torch.manual_seed(0)
            q, k = first.shapes
            inputs = [torch.randn(shape, device=device, dtype=DTYPES[first.dtype]) for shape in (q, k, k, q)]
        except Exception as error:  # a RuntimeError too, if the size overflows or a CPU has too little memory
            for config in configs:
                yield failed(case.name, config.kernel, row_config(config), error)
            return
        kernels = [KernelInTurns(case.name, config, inputs, works) for config in configs]
        del inputs
        for step in ("first_call", *["time_all"] * first.rounds):
            for kernel in kernels:
                kernel.attempt(step)
                if kernel.failure is not None and not is_sound():
                    yield kernel.failure
                    raise RuntimeError("the GPU is lost to this process; the other kernels are measured in another")
        for kernel in kernels:
            yield kernel.row()
        del kernels, kernel
        free_memory()

    return rows


class KernelInTurns:
    """A kernel with its inputs, its times so far, and its failure if there was one."""

    def __init__(self, case: str, config: "AttentionBench", inputs: Sequence[Tensor], works: Sequence[str]) -> None:
        *qkv, self.do = inputs
        self.case, self.config, self.works = case, config, works
        self.trains = any(work != "forward" for work in works)
        self.limits = config.limits(self.do.device)
        self.qkv = [x.detach().requires_grad_(self.trains) for x in qkv]  # shared memory, separate gradients
        self.times: dict[str, list[float]] = {}
        self.facts: dict[str, Any] = {}
        self.ran: dict[str, Any] = {}
        self.failure: Row | None = None
        self.gpu_states: list[dict[str, Any]] = [{}, {}]  # before the first and after the last round

    def attention(self) -> Tensor:
        q, k, v = self.qkv
        return get_attention(self.config.kernel)(q, k, v, self.config.is_causal, **self.limits)

    def attempt(self, step: str) -> None:
        """Call a method unless an earlier one failed; keep the failure."""
        if self.failure is not None:
            return
        try:
            # Many backward passes are timed on one forward pass. Compiled code (flex) refuses that if it has donated
            # buffers; it checks the setting at compile time and at each backward pass.
            with functorch_config.patch(donated_buffer=False):
                getattr(self, step)()
        except Exception as error:  # third-party kernels may raise anything; the other rows are still wanted
            self.failure = failed(self.case, self.config.kernel, row_config(self.config), error)
        if self.failure is not None and is_sound():  # after the except block, whose traceback holds tensors
            self.clear_gradients()
            free_memory()

    def clear_gradients(self) -> None:
        for x in self.qkv:
            x.grad = None

    def call(self) -> None:
        """One forward pass, and a backward pass if one is timed."""
        o = self.attention()
        self.config.check_output(o)
        self.ran = {"dtype": DTYPE_NAMES.get(o.dtype, str(o.dtype)), "device": self.config.device}
        if self.trains:
            o.backward(self.do)

    def first_call(self) -> None:
        """Time the first call, compilation included, then measure the memory of the second."""
        with without_groups({"model.attention": "kernel", "data.documents": "document_length"}):
            check_limits(self.config.kernel, *self.limits)
        begin = time.perf_counter()
        self.call()
        wait_for(self.do.device)
        self.facts["first_call_s"] = time.perf_counter() - begin
        self.clear_gradients()
        if is_import_path(self.config.kernel):
            self.check_own_kernel()
        if self.do.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.do.device)
            before = torch.cuda.memory_allocated(self.do.device)
            self.call()
            results = [self.do, *(self.qkv if self.trains else ())]  # o, and the gradients
            peak = torch.cuda.max_memory_allocated(self.do.device) - before
            self.facts["extra_memory_bytes"] = max(0, peak - sum(x.nbytes for x in results))
            self.clear_gradients()

    def check_own_kernel(self) -> None:
        """Compare a kernel of your own with `naive` on the first 256 tokens of one sequence, without documents.

        A wrong one is timed all the same, and its row says what is wrong.
        """
        *qkv, do = (x.detach()[:1, ..., :256, :].contiguous() for x in (*self.qkv, self.do))
        qkv = [x.requires_grad_(self.trains) for x in qkv]
        limits = {name: value for name, value in self.limits.items() if name != "documents"}
        try:
            with without_groups({"model.attention": "kernel"}):
                check_results(self.config.kernel, qkv, do, self.config.is_causal, **limits)
        except ValueError as error:
            logger.warning("%s", error)
            self.facts["wrong_results"] = str(error)

    def time_all(self) -> None:
        """Time one round, except passes so slow that their first round was enough."""
        o = self.attention()
        calls: dict[str, Callable[[], Any]] = {
            "forward": self.attention,
            "backward": lambda: o.backward(self.do, retain_graph=True),
            "forward_backward": lambda: self.attention().backward(self.do),
            "forward_sum_backward": lambda: self.attention().sum().backward(),
        }
        self.gpu_states[0] = self.gpu_states[0] or current_gpu_state()
        for work in self.works:
            if min(self.times.get(work, [0])) <= _SLOW_MS:
                windows = self.config.warmup_ms, self.config.rep_ms
                times = time_ms(calls[work], self.do.device, *windows, self.qkv, self.config.host_time)
                self.times.setdefault(work, []).extend(times)
        self.gpu_states[1] = current_gpu_state()
        self.clear_gradients()

    def row(self) -> Row:
        if self.failure is not None:
            return self.failure
        samples = {work: len(times) for work, times in self.times.items()}
        metrics: dict[str, Any] = {
            **self.facts,
            "timer": timer(self.do.device, self.config.host_time),
            "samples": samples,
        }
        for work, times in self.times.items():
            metrics |= timed(self.config, work, times)
        row = measured(self.case, self.config.kernel, row_config(self.config), self.ran, metrics)
        return with_gpu_states(row, *self.gpu_states)
