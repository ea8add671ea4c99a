"""Rows of what was tried: measured, out of memory, or failed."""

import contextlib
import functools
import gc
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from ..hardware import gpu_state, use_device, with_index
from .case import Row, not_finite
from .sweep import as_json

Status = Literal["oom", "error"]
_UNITS = {"B": 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def each(
    case: str, variant: Callable[[Any], str], measure: Callable[[Any], tuple[dict[str, Any], dict[str, Any]]]
) -> Callable[[Sequence[Any]], Iterable[Row]]:
    """The `measure` of a case whose configurations are measured one by one.

    That of one returns the configuration as it ran, which must have what was asked for, and the metrics.
    """

    def rows(configs: Sequence[Any]) -> Iterable[Row]:
        for config in configs:
            if str(getattr(config, "device", "")).startswith("cuda"):
                with contextlib.suppress(Exception):  # measuring it says what is wrong
                    use_device(config.device)  # in a process of its own nobody has: its state before is asked for next
            yield attempt(case, variant(config), as_json(config), functools.partial(measure, config))
            free_memory()

    return rows


def attempt(
    case: str, variant: str, asked: dict[str, Any], measure: Callable[[], tuple[dict[str, Any], dict[str, Any]]]
) -> Row:
    """The row of a measurement, or of what went wrong with it; with the state of a GPU before and after it."""
    before = current_gpu_state()
    try:
        ran, metrics = measure()
    except Exception as error:  # a kernel, a compiler or a driver may raise anything: the sweep goes on
        return failed(case, variant, asked, error)
    after = current_gpu_state()  # before anything else: a reason for a lower clock is gone in a moment
    return with_gpu_states(measured(case, variant, asked, ran, metrics), before, after)


def current_gpu_state() -> dict[str, Any]:
    """`gpu_state` of the current GPU; {} where this process has not begun to use one."""
    return gpu_state(with_index(torch.device("cuda"))) if torch.cuda.is_initialized() else {}


def with_gpu_states(row: Row, before: dict[str, Any], after: dict[str, Any]) -> Row:
    """A row that has the states of its GPU too, those that are known."""
    states = {name: state for name, state in (("gpu_before", before), ("gpu_after", after)) if state}
    return replace(row, env={**row.env, **states})


def measured(case: str, variant: str, asked: dict[str, Any], ran: dict[str, Any], metrics: dict[str, Any]) -> Row:
    """The row of a measurement; one of status error where something else ran than was asked for.

    Or where a metric is not finite, which no table and no ratio could show.
    """
    ran = as_json(ran)
    for name, value in asked.items():
        if ran.get(name, value) != value:
            message = f"{name} {value!r} was asked for and {ran[name]!r} ran"
            return Row(case=case, variant=variant, config=asked, status="error", error=message)
    row = Row(case=case, variant=variant, config={**asked, **ran}, metrics=metrics)
    complaint = not_finite(metrics)
    return row if complaint is None else replace(row, status="error", error=complaint)


def failed(case: str, variant: str, asked: dict[str, Any], error: Exception) -> Row:
    """The row of something that raised; where memory was short, with the bytes that were asked for."""
    status, message = failure(error)
    requested = requested_bytes(message) if status == "oom" else None
    metrics = {} if requested is None else {"requested_bytes": requested}
    return Row(case=case, variant=variant, config=asked, status=status, metrics=metrics, error=message)


def failure(error: BaseException) -> tuple[Status, str]:
    """Status and error of the row of something that raised; what a compiler or an executor wraps is unwrapped."""
    while (inner := getattr(error, "inner_exception", None)) is not None:
        error = inner
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    # For a CPU PyTorch has no error of its own, and that of another process or of a compiler comes as its message.
    short = next((line for line in lines if "can't allocate memory" in line or "out of memory" in line), None)
    if short is not None or isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "oom", short or lines[0]
    # Of a message that ends its first line with a colon the last line says more: "at 1:0:".
    line = " ".join((lines[0], lines[-1])) if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    return "error", f"{type(error).__name__}: {line}".strip()


def requested_bytes(message: str) -> int | None:
    """The size in PyTorch's message that memory is short, None where there is none."""
    found = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMGT]?i?B)", message)
    return int(float(found[1]) * _UNITS[found[2]]) if found and found[2] in _UNITS else None


def free_memory() -> None:
    """Give back what the last measurement held, compiled code's references and the allocator's cache too."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def is_sound() -> bool:
    """Whether the GPU still computes: after an illegal access nothing in its process does."""
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
    return True
