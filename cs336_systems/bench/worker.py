"""A process that measures for another one, which survives its end: by a crash, a full memory, or taking too long."""

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

from ..console import COMMAND
from .case import Row
from .outcome import is_sound
from .sweep import Case

# From a server that has PyTorch loaded and has never touched CUDA, which does not survive a fork: that spares each
# process seconds.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "cs336_systems.bench.workload"])


SCRATCH = "CS336_SCRATCH"
"""Names, in the environment of a case that measures, a folder that is removed however its process ends."""


class WorkerEndedError(RuntimeError):
    """The process has ended, or was ended, before all rows were there; the message says how."""


class Worker:
    """A process for some calls of a case's `measure`. Closed by `close`, or as a context manager."""

    def __init__(self, module: str, empty_caches: bool = False) -> None:
        """`module` is that of the case, which is imported in the process."""
        self.is_sound = True  # false where what has failed makes what comes after it fail too
        self._stack = ExitStack()
        self._pipe, theirs = _CONTEXT.Pipe()
        lifeline, self._lifeline = _CONTEXT.Pipe(duplex=False)
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="cs336-", ignore_cleanup_errors=True))
        environ = {SCRATCH: folder, COMMAND: os.environ.get(COMMAND, "")}  # the server may be older than the command
        if empty_caches:
            environ |= {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder}
        self._process = _CONTEXT.Process(target=_work, args=(theirs, lifeline, module, environ))
        resource_tracker.ensure_running()  # which the server needs; where it is started, it lets interrupts through
        with _later(), _no_interrupts_inherited():  # the server is to get none: a terminal's Ctrl-C is for this process
            forkserver.ensure_running()
        with _later():  # half of a request would be a traceback of the server's
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
        """End the process: it has a moment to end by itself."""
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
    """A signal that is to end this process is not lost but comes afterwards.

    By its handler, not by a mask, which is of one thread: a signal then comes by another, such as that of a bar.
    """
    came: list[int] = []
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # only there may handlers be set, and are they run
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


@contextlib.contextmanager
def _no_interrupts_inherited() -> Iterator[None]:
    """A process that is started now, by this thread, gets no interrupts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _how(code: int | None) -> str:
    if code is None:
        return "its process does not answer"
    if code < 0:
        known = {number.value: number.name for number in signal.Signals}
        name = known.get(-code, f"signal {-code}")
        return f"its process was ended by {name}" + (" (was the machine's memory full?)" if name == "SIGKILL" else "")
    return f"its process ended with exit code {code}"


def _work(pipe: Connection, lifeline: Connection, module: str, environ: Mapping[str, str]) -> None:
    """What the process does: measure what it is sent, send rows."""
    os.environ.update(environ)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both, and the other one ends this
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
        except Exception as error:  # what no row is of: the configurations that are left are measured one by one
            pipe.send(f"{type(error).__name__}: {error}")
            return


def _refuse_eager_fallback() -> None:
    """Let what is compiled too often fail. PyTorch would go on without compiling it, and its row say it is compiled."""
    from torch._dynamo import config

    config.fail_on_recompile_limit_hit = True


def _end_with(lifeline: Connection) -> None:
    """End this process when the one that started it lets go of it, which it also does when it is killed."""
    with contextlib.suppress(EOFError):
        lifeline.recv()
    os._exit(1)
