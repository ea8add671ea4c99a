"""Failures between ranks, reported with rank, operation and step.

If a transfer fails, the wait for it raises. If it never ends, a thread ends the process.
"""

import contextlib
import faulthandler
import hashlib
import json
import os
import re
import sys
import threading
import time
from collections import deque
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..machine.console import launched_rank, one_line
from ..machine.files import write_whole
from ..machine.hardware import use_device_in_thread
from .rendezvous import agents_store

OWN_LAUNCH = "CS336_LAUNCHED"
"""Set in the environment of processes that this project has started, and whose failures it reports."""

HANGS = "is gone or hangs"
"""Words in the messages of the watchdog and the heartbeats, by which the launcher knows a rank that only waited."""

TIMED_OUT = ("Timed out", "Application timeout")
"""Words in gloo's messages about a transfer for which another rank is late."""

TELL_ALL = ("ValueError", "FileNotFoundError", "NonFiniteError", "CheckpointError", "CollectiveError")
"""Errors that are complete without rank and step, which are added to all others."""


class CollectiveError(RuntimeError):
    """A transfer between ranks failed or was not done in time. The message has rank, operation and step."""


_step: int | None = None


def set_step(step: int | None) -> None:
    """Set the training step that messages name."""
    global _step
    _step = step


def place(operation: str) -> str:
    """Rank, operation and, in training, the step."""
    return f"rank {_rank()}: {operation}" + (f" at step {_step}" if _step is not None else "")


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else launched_rank() or 0


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without a backend's source line and advice; its type if it is empty."""
    text = str(error).rpartition("Last error:")[2]  # NCCL's own message comes after two general lines
    line = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return re.sub(r"^\[[^\]]*\] ?", "", line).partition(". This is typically")[0]


class Watched(Protocol):
    """A transfer, for the watchdog."""

    name: str
    started: float

    def done(self) -> bool: ...


class named:
    """Turns the backend's errors into a CollectiveError with the place, and whether another rank is to blame.

    Out-of-memory errors pass unchanged.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, CollectiveError | torch.OutOfMemoryError):
            blame = ", another rank is gone or late" if _is_another_ranks_fault(error) else ""
            raise CollectiveError(f"{place(self.name)} failed{blame}: {first_line(error)}") from error


def _is_another_ranks_fault(error: RuntimeError) -> bool:
    """Whether the backend lost another rank, rather than refusing a call, say for a dtype that it does not have."""
    if isinstance(error, dist.DistBackendError):
        return not any(words in str(error) for words in ("ncclInvalid", "ncclUnhandledCudaError"))
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


class Watchdog:
    """Threads that end this process if a transfer is not done in time. It may hang where nothing can be raised.

    A thread that asks whether transfers are done may hang in the driver as the main thread does, so another one looks
    at the clock. If a hanging call keeps all of Python from running, a timer that needs no Python ends the process and
    prints each thread's stack. The thread at the clock frees no event, because the main thread may hold CUDA's lock.
    """

    STUCK_S = 600.0
    """Seconds beyond the limit that Python may stand still after a transfer: the time of a call on a slow disk."""
    _PATIENCE = 3
    """Turns of the clock thread without a turn of the asking thread, after which the latter counts as hung."""

    def __init__(self, timeout_s: float, device: torch.device) -> None:
        self._timeout_s, self._device, self._stopped = timeout_s, device, threading.Event()
        self._pause_s = min(1.0, timeout_s / 4)
        self._turns = 0  # of the thread that asks
        self._under_way: deque[Watched] = deque()
        for work, name in ((self._ask, "watchdog asking"), (self._watch, "watchdog")):
            threading.Thread(target=work, name=name, daemon=True).start()

    def watch(self, transfer: Watched) -> None:
        self._under_way.append(transfer)

    def stop(self) -> None:
        self._stopped.set()

    def _ask(self) -> None:
        use_device_in_thread(self._device)
        while not self._stopped.wait(self._pause_s):
            # Younger transfers are not asked, because that would keep their tensors alive beyond the wait for them.
            before = time.monotonic() - self._pause_s
            with contextlib.suppress(RuntimeError):  # a work that failed, which the wait for it reports
                while (oldest := self._oldest()) is not None and oldest.started < before and oldest.done():
                    self._under_way.popleft()
            self._turns += 1

    def _watch(self) -> None:
        late: Watched | None = None
        armed = False
        while not self._stopped.wait(self._pause_s):
            oldest = self._oldest()
            if oldest is None and armed:
                faulthandler.cancel_dump_traceback_later()
            elif oldest is not None:
                faulthandler.dump_traceback_later(self._timeout_s + self.STUCK_S, exit=True, file=2)
            armed = oldest is not None
            if oldest is None or time.monotonic() - oldest.started <= self._timeout_s:
                late = None
            elif oldest is not late:
                # After everything stood still, as on a suspended machine, it may be done: the other thread asks first.
                late, turns, waited = oldest, self._turns, 0
            elif self._turns > turns + 1 or (waited := waited + 1) > self._PATIENCE:
                fail(f"{place(oldest.name)} was not done after {self._timeout_s:g} s: another rank {HANGS}")
        if armed:
            faulthandler.cancel_dump_traceback_later()

    def _oldest(self) -> Watched | None:
        try:
            return self._under_way[0]
        except IndexError:
            return None


def fail(message: str) -> None:
    """End this process at once, with a message for its launcher."""
    leave_failure(CollectiveError(message))
    os._exit(1)


_left: BaseException | None = None


def leave_failure(error: BaseException) -> None:
    """Write an error, once, to the file that the launcher has named, in the form that it reads.

    If the launcher is torchrun, print the error too, but only once for all ranks, and without its consequences on other
    ranks (`_say_once`). torchrun itself ends with a summary of the messages of all ranks.
    """
    global _left
    if error is _left:
        return
    _left = error
    message = one_line(error)
    if _step is not None and type(error).__name__ not in TELL_ALL:
        message = f"{place('training')} failed: {message}"
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # Without py_callstack, torchrun's summary shows the message.
        report = {"message": message, "kind": type(error).__name__, "extraInfo": {"timestamp": str(int(time.time()))}}
        # Written whole or not at all, because the launcher may end this process at any moment.
        with contextlib.suppress(OSError):
            write_whole(Path(path), json.dumps({"message": report}))
    if OWN_LAUNCH not in os.environ:
        _say_once(message, isinstance(error, CollectiveError))


def _say_once(message: str, is_consequence: bool = False, patience_s: float = 5) -> None:
    """Print a message with this rank's number, unless another rank of this start has printed the same.

    A possible consequence of another rank's failure is printed only if no rank has printed anything. The first rank to
    count up in the agents' store prints; in doubt, or if it does not print within patience_s, the next one does too.
    """
    start = f"said after {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')} restarts: "
    anything, same = f"{start}anything", start + hashlib.sha256(message.encode()).hexdigest()
    store = None
    with contextlib.suppress(Exception):  # no failure here may hide the message
        store = agents_store(patience_s)
        if store is not None:
            is_first = store.add(f"{anything}, by so many", 1) == 1
            said = anything if is_consequence else same
            if not (is_first if is_consequence else store.add(f"{same}, by so many", 1) == 1):
                store.wait([said], timedelta(seconds=patience_s))
                return
    print(message if message.startswith("rank ") else f"rank {_rank()}: {message}", file=sys.stderr, flush=True)
    if store is not None:
        with contextlib.suppress(Exception):
            store.set(same, "")
            store.set(anything, "")
