"""A process that measures for another, so that the other survives a crash, a full memory or a timeout of the first."""

import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from ..machine.console import COMMAND, no_interrupts_inherited
from .case import Case
from .outcome import is_sound
from .row import Row

# Processes are forked from a server that has loaded PyTorch, which saves each of them seconds. The server has never
# touched CUDA, which does not survive a fork.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "cs336_systems.bench.workload"])


SCRATCH = "CS336_SCRATCH"
"""Environment variable that gives a measuring case a folder that is removed however its process ends."""


class WorkerEndedError(RuntimeError):
    """The process ended, or was ended, before all rows had come; the message says how."""


class Worker:
    """A process for some calls of a case's `measure`. Closed by `close`, or as a context manager."""

    def __init__(self, module: str, empty_caches: bool = False) -> None:
        """`module` is the case's, which the process imports."""
        self.is_sound = True  # false if a failure makes everything after it fail too
        self._stack = ExitStack()
        self._pipe, theirs = _CONTEXT.Pipe()
        lifeline, self._lifeline = _CONTEXT.Pipe(duplex=False)
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="cs336-", ignore_cleanup_errors=True))
        environ = {SCRATCH: folder, COMMAND: os.environ.get(COMMAND, "")}  # the server may be older than the command
        if empty_caches:
            environ |= {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder}
        self._process = _CONTEXT.Process(target=_work, args=(theirs, lifeline, module, environ))
        resource_tracker.ensure_running()  # the server needs it; starting it unblocks interrupts
        with _later(), no_interrupts_inherited():  # a terminal's Ctrl-C is for this process, not for the server
            forkserver.ensure_running()
        with _later():  # half a request would make the server print a traceback
            self._process.start()
        theirs.close()
        lifeline.close()

    def measure(self, configs: Sequence[Any], timeout_s: float | None = None) -> Iterator[Row]:
        """The rows of one call of the case's `measure`, as they come. Raises WorkerEndedError."""
        try:
            self._pipe.send(list(configs))
            deadline = None if timeout_s is None else time.monotonic() + timeout_s * len(configs)
            while True:
                if not self._pipe.poll(None if deadline is None else max(0.0, deadline - time.monotonic())):
                    self.kill()
                    raise WorkerEndedError(f"it took longer than timeout_s, {timeout_s:g} s")
                got = self._pipe.recv()
                if isinstance(got, bool):
                    self.is_sound = got
                    return
                if isinstance(got, str):
                    raise WorkerEndedError(got)
                yield got
        except (EOFError, OSError) as error:
            self._process.join(10)
            raise WorkerEndedError(_how(self._process.exitcode)) from error

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()

    def close(self) -> None:
        """End the process, which first has a moment to end by itself."""
        self._pipe.close()
        self._lifeline.close()
        self._process.join(5)
        if self._process.is_alive():
            self.kill()
            self._process.join()
        self._stack.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@contextlib.contextmanager
def _later() -> Iterator[None]:
    """Delay signals that would end this process until the block is over; none is lost.

    This replaces handlers and does not mask signals, because a mask holds for one thread only: a signal would then
    arrive in another thread, such as that of a progress bar.
    """
    came: list[int] = []
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # only there can handlers be set, and do they run
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for ours, handler in before.items():
            signal.signal(ours, handler)
        for one in dict.fromkeys(came):
            signal.raise_signal(one)


def _how(code: int | None) -> str:
    if code is None:
        return "its process does not answer"
    if code < 0:
        known = {number.value: number.name for number in signal.Signals}
        name = known.get(-code, f"signal {-code}")
        return f"its process was ended by {name}" + (" (was the machine's memory full?)" if name == "SIGKILL" else "")
    return f"its process ended with exit code {code}"


def _work(pipe: Connection, lifeline: Connection, module: str, environ: Mapping[str, str]) -> None:
    """The work of the process: measure what it is sent, and send rows."""
    os.environ.update(environ)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both, and the other process ends this one
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    case: Case = import_module(module).CASE
    _refuse_eager_fallback()
    while True:
        try:
            configs = pipe.recv()
        except EOFError:
            return
        try:
            for row in case.measure(configs):
                pipe.send(row)
            pipe.send(is_sound())
        except Exception as error:  # it has no row: the configurations left are measured one by one
            pipe.send(f"{type(error).__name__}: {error}")
            return


def _refuse_eager_fallback() -> None:
    """Make too many recompilations an error. PyTorch would fall back to eager, and the row would say compiled."""
    from torch._dynamo import config

    config.fail_on_recompile_limit_hit = True


def _end_with(lifeline: Connection) -> None:
    """End this process when the one that started it closes the lifeline, as it also does when it is killed."""
    with contextlib.suppress(EOFError):
        lifeline.recv()
    os._exit(1)
