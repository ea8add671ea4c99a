"""The row of an attempt to measure: measured, out of memory, or failed."""

import contextlib
import functools
import gc
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from ..machine.hardware import gpu_state, use_device, with_index
from .case import Case, row_config
from .row import Row, not_finite

Status = Literal["oom", "error"]
_UNITS = {"B": 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


Found = tuple[dict[str, Any], dict[str, Any]]
"""The configuration as it ran, which must be as requested, and the metrics."""


def each(measure: Callable[[Any], Found]) -> Callable[[Case, Sequence[Any]], Iterable[Row]]:
    """Make the `rows` of a case from a function that measures one configuration."""

    def rows(case: Case, configs: Sequence[Any]) -> Iterable[Row]:
        for config in configs:
            if str(getattr(config, "device", "")).startswith("cuda"):
                with contextlib.suppress(Exception):  # `measure` will raise it again
                    use_device(config.device)  # `attempt` reads the GPU's state, for which it must be in use
            yield attempt(case, config, functools.partial(measure, config))
            free_memory()

    return rows


def attempt(case: Case, config: Any, measure: Callable[[], Found]) -> Row:
    """The row of a measurement with the GPU's state before and after it, or the row of a failure."""
    before, of = current_gpu_state(), (case.name, case.variant(config), row_config(config))
    try:
        ran, metrics = measure()
    except Exception as error:  # a kernel, a compiler or a driver may raise anything: the sweep goes on
        return failed(*of, error)
    after = current_gpu_state()  # first of all: a reason for a lower clock is gone in a moment
    return with_gpu_states(measured(*of, ran, metrics), before, after)


def current_gpu_state() -> dict[str, Any]:
    """`gpu_state` of the current GPU; {} if this process has used no GPU."""
    return gpu_state(with_index(torch.device("cuda"))) if torch.cuda.is_initialized() else {}


def with_gpu_states(row: Row, before: dict[str, Any], after: dict[str, Any]) -> Row:
    """The row with its GPU's states in `env`; empty states are left out."""
    states = {name: state for name, state in (("gpu_before", before), ("gpu_after", after)) if state}
    return replace(row, env={**row.env, **states})


def measured(case: str, variant: str, asked: dict[str, Any], ran: dict[str, Any], metrics: dict[str, Any]) -> Row:
    """The row of a measurement. Its status is error if a field ran with another value than asked, or a metric is not
    finite, which no table could show."""
    ran = row_config(ran)
    for name, value in asked.items():
        if ran.get(name, value) != value:
            message = f"{name} {value!r} was asked for and {ran[name]!r} ran"
            return Row(case=case, variant=variant, config=asked, status="error", error=message)
    row = Row(case=case, variant=variant, config={**asked, **ran}, metrics=metrics)
    complaint = not_finite(metrics)
    return row if complaint is None else replace(row, status="error", error=complaint)


def failed(case: str, variant: str, asked: dict[str, Any], error: Exception) -> Row:
    """The row of a configuration that raised; if memory was short, with the requested bytes."""
    status, message = failure(error)
    requested = requested_bytes(message) if status == "oom" else None
    metrics = {} if requested is None else {"requested_bytes": requested}
    return Row(case=case, variant=variant, config=asked, status=status, metrics=metrics, error=message)


def failure(error: BaseException) -> tuple[Status, str]:
    """Status and error text for an exception, after unwrapping those of a compiler or an executor."""
    while (inner := getattr(error, "inner_exception", None)) is not None:
        error = inner
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    # PyTorch has no error type for a CPU that is out of memory, and other processes and compilers send only messages.
    short = next((line for line in lines if "can't allocate memory" in line or "out of memory" in line), None)
    if short is not None or isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "oom", short or lines[0]
    # If the first line ends with a colon, the last line says more: "at 1:0:".
    line = " ".join((lines[0], lines[-1])) if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    return "error", f"{type(error).__name__}: {line}".strip()


def requested_bytes(message: str) -> int | None:
    """The requested bytes in PyTorch's out-of-memory message; None if it names none."""
    found = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMGT]?i?B)", message)
    return int(float(found[1]) * _UNITS[found[2]]) if found and found[2] in _UNITS else None


def free_memory() -> None:
    """Release the last measurement's memory, including cycles of compiled code and the allocator's cache."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def is_sound() -> bool:
    """Whether the GPU still works for this process; after an illegal access it does not."""
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
    return True
