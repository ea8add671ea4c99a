"""Reads a Chrome trace as `torch.profiler` exports it, and picks out what the GPU did."""

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Event = dict[str, Any]

_GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")


def read_trace(path: Path) -> list[Event]:
    """The events of a Chrome trace, .json or .json.gz. Raises ValueError naming a file that is not one."""
    try:
        content = json.loads((gzip.open if path.suffix == ".gz" else open)(path, "rb").read())
        return [event for event in content["traceEvents"] if isinstance(event, dict)]
    except (ValueError, TypeError, KeyError, EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is not a trace of torch.profiler: {error!r}") from error


def gpu_events(events: Iterable[Event]) -> list[Event]:
    """What the GPU did: kernels, copies, memsets.

    A trace also draws ranges of `record_function` on the GPU's streams, from the first to the last kernel launched in
    them. They have a category of their own, and the GPU may be idle within them.
    """
    return [event for event in events if event.get("cat") in _GPU_CATEGORIES and event.get("ph") == "X"]
