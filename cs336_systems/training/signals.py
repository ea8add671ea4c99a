"""Signals that ask a run to stop: Ctrl-C, a scheduler's SIGTERM, a closed terminal's SIGHUP."""

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any

from ..parallel import comm, failure
from ..parallel.ranks import launched


class StopRequest:
    """While active, SIGINT, SIGTERM or SIGHUP asks the loop to stop after its step; a second SIGINT interrupts.

    If this rank fails, it records the error before it restores the handlers: the launcher may send SIGTERM at any
    moment after another rank has ended, and a process that dies of it reports nothing.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self._interrupted = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, Exception) and launched():
            failure.leave_failure(error)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def requested(self) -> bool:
        """Whether a signal has come."""
        return self.signal is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
        if self.signal is None or number != signal.SIGINT:  # the exit code of a SIGTERM stays 143
            self.signal = signal.Signals(number).name
        # Our launcher forwards every signal as SIGTERM. It names the original one itself, at the end.
        name = "" if failure.OWN_LAUNCH in os.environ else f"{self.signal}: "
        # os.write, because a signal can interrupt print or a logger, which are not reentrant.
        if comm.rank() == 0:
            with contextlib.suppress(OSError):
                os.write(1, f"{name}stopping after this step, which is then saved and validated\n".encode())
