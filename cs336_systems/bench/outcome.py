"""Rows for what was tried: measured, out of memory, or failed."""

import contextlib
import functools
import gc
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from ..machine.hardware import gpu_state, use_device, with_index
from .case import row_config
from .row import Row, not_finite

Status = Literal["oom", "error"]
_UNITS = {"B": 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def each(
    case: str, variant: Callable[[Any], str], measure: Callable[[Any], tuple[dict[str, Any], dict[str, Any]]]
) -> Callable[[Sequence[Any]], Iterable[Row]]:
    """Make the `measure` of a case whose configurations are measured one by one.

    The argument `measure` returns one configuration as it ran, which must be what was asked for, and its metrics.
    """

    def rows(configs: Sequence[Any]) -> Iterable[Row]:
        for config in configs:
            if str(getattr(config, "device", "")).startswith("cuda"):
                with contextlib.suppress(Exception):  # measuring will say what is wrong
                    use_device(config.device)  # a new process has not done so yet, and the GPU's state is read next
            yield attempt(case, variant(config), row_config(config), functools.partial(measure, config))
            free_memory()

    return rows


def attempt(
    case: str, variant: str, asked: dict[str, Any], measure: Callable[[], tuple[dict[str, Any], dict[str, Any]]]
) -> Row:
    """The row of a measurement, with the state of the GPU before and after it; or the row of what went wrong."""
    before = current_gpu_state()
    try:
        ran, metrics = measure()
    except Exception as error:  # a kernel, a compiler or a driver may raise anything: the sweep goes on
        return failed(case, variant, asked, error)
    after = current_gpu_state()  # before anything else: a reason for a lower clock is gone in a moment
    return with_gpu_states(measured(case, variant, asked, ran, metrics), before, after)


def current_gpu_state() -> dict[str, Any]:
    """`gpu_state` of the current GPU; {} if this process has not used one yet."""
    return gpu_state(with_index(torch.device("cuda"))) if torch.cuda.is_initialized() else {}


def with_gpu_states(row: Row, before: dict[str, Any], after: dict[str, Any]) -> Row:
    """The row with the states of its GPU, as far as they are known."""
    states = {name: state for name, state in (("gpu_before", before), ("gpu_after", after)) if state}
    return replace(row, env={**row.env, **states})


def measured(case: str, variant: str, asked: dict[str, Any], ran: dict[str, Any], metrics: dict[str, Any]) -> Row:
    """The row of a measurement; its status is error if something else ran than was asked for.

    It is also error if a metric is not finite, because no table or ratio could show that.
    """
    ran = row_config(ran)
    for name, value in asked.items():
        if ran.get(name, value) != value:
            message = f"{name} {value!r} was asked for and {ran[name]!r} ran"
            return Row(case=case, variant=variant, config=asked, status="error", error=message)
    row = Row(case=case, variant=variant, config={**asked, **ran}, metrics=metrics)
    complaint = not_finite(metrics)
    return row if complaint is None else replace(row, status="error", error=complaint)


def failed(case: str, variant: str, asked: dict[str, Any], error: Exception) -> Row:
    """The row of something that raised; if memory was short, with the bytes that were requested."""
    status, message = failure(error)
    requested = requested_bytes(message) if status == "oom" else None
    metrics = {} if requested is None else {"requested_bytes": requested}
    return Row(case=case, variant=variant, config=asked, status=status, metrics=metrics, error=message)


def failure(error: BaseException) -> tuple[Status, str]:
    """Status and error of the row for an exception; one wrapped by a compiler or an executor is unwrapped."""
    while (inner := getattr(error, "inner_exception", None)) is not None:
        error = inner
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    # PyTorch has no error type of its own for a CPU, and errors of other processes or compilers come as messages.
    short = next((line for line in lines if "can't allocate memory" in line or "out of memory" in line), None)
    if short is not None or isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "oom", short or lines[0]
    # If the first line ends with a colon, the last line says more: "at 1:0:".
    line = " ".join((lines[0], lines[-1])) if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    return "error", f"{type(error).__name__}: {line}".strip()


def requested_bytes(message: str) -> int | None:
    """The requested size in PyTorch's out-of-memory message; None if it has none."""
    found = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMGT]?i?B)", message)
    return int(float(found[1]) * _UNITS[found[2]]) if found and found[2] in _UNITS else None


def free_memory() -> None:
    """Release what the last measurement held, including references of compiled code and the allocator's cache."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def is_sound() -> bool:
    """Whether the GPU still works: after an illegal access, nothing in the process does."""
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
    return True
