"""`torch.profiler` without its notices, and the events of its Chrome traces."""

import contextlib
import gzip
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

Event = dict[str, Any]

_GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
_NOTICE = b"USDT:"


class Profiler(torch.profiler.profile):
    """`torch.profiler.profile` without the lines on stderr that PyTorch 2.13 prints at each start and stop.

    `KINETO_LOG_LEVEL` could silence them only together with errors, and only before PyTorch is imported.
    """

    def start_trace(self) -> None:
        with _without_notices():
            super().start_trace()

    def stop_trace(self) -> None:
        with _without_notices():
            super().stop_trace()


@contextlib.contextmanager
def _without_notices() -> Iterator[None]:
    """Hold back all output to file descriptor 2, also C++'s; write it afterwards without the notices."""
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            held.seek(0)
            for line in held:
                if not line.startswith(_NOTICE):
                    os.write(2, line)


def read_trace(path: Path) -> list[Event]:
    """The events of a Chrome trace, .json or .json.gz. Raises ValueError naming a file that is not one."""
    try:
        content = json.loads((gzip.open if path.suffix == ".gz" else open)(path, "rb").read())
        return [event for event in content["traceEvents"] if isinstance(event, dict)]
    except (ValueError, TypeError, KeyError, EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is not a trace of torch.profiler: {error!r}") from error


def gpu_events(events: Iterable[Event]) -> list[Event]:
    """The GPU's kernels, copies and memsets, without the ranges of `record_function`, in which the GPU may be idle."""
    return [event for event in events if event.get("cat") in _GPU_CATEGORIES and event.get("ph") == "X"]
