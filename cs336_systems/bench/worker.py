"""A separate process that measures, so that a crash or a full memory does not end the command."""

import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from ..machine.console import COMMAND, no_interrupts_inherited
from .case import load_case
from .outcome import is_sound
from .row import Row

# Workers are forked from a server that has loaded PyTorch, which saves seconds each. The server never touches CUDA,
# which would not survive a fork.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "cs336_systems.bench.workload"])

SCRATCH = "CS336_SCRATCH"
"""Environment variable with a folder for a measuring case; it is removed however the worker ends."""


class WorkerEndedError(RuntimeError):
    """The process ended before it had sent all rows; the message says how."""


class Worker:
    """A process that calls a case's `measure`. Close it with `close`."""

    def __init__(self, place: str, empty_caches: bool = False) -> None:
        """`place` is the case's, which the process passes to `load_case`."""
        self.is_sound = True  # false once the GPU is lost to the process: all later measurements would fail
        self._stack = ExitStack()
        self._pipe, theirs = _CONTEXT.Pipe()
        lifeline, self._lifeline = _CONTEXT.Pipe(duplex=False)
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="cs336-", ignore_cleanup_errors=True))
        environ = {SCRATCH: folder, COMMAND: os.environ.get(COMMAND, "")}  # the server may be older than the command
        if empty_caches:
            environ |= {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder}
        self._process = _CONTEXT.Process(target=_work, args=(theirs, lifeline, place, environ))
        resource_tracker.ensure_running()  # the server needs it; starting it unblocks interrupts
        with no_interrupts_inherited():  # a terminal's Ctrl-C is for this process, not for the server
            forkserver.ensure_running()
        self._process.start()
        theirs.close()
        lifeline.close()

    def measure(self, configs: Sequence[Any]) -> Iterator[Row]:
        """Yield the rows of one call of the case's `measure`, as they come. Raises WorkerEndedError."""
        try:
            self._pipe.send(list(configs))
            while True:
                got = self._pipe.recv()
                if isinstance(got, bool):
                    self.is_sound = got
                    return
                if isinstance(got, str):
                    raise WorkerEndedError(got)
                yield got
        except (EOFError, OSError) as error:
            self._process.join(10)
            raise WorkerEndedError(_how_it_ended(self._process.exitcode)) from error

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """End the process: it may end by itself within five seconds, and is killed then."""
        self._pipe.close()
        self._lifeline.close()
        self._process.join(5)
        if self._process.is_alive():
            self.kill()
            self._process.join()
        self._stack.close()


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "its process does not answer"
    if code < 0:
        known = {number.value: number.name for number in signal.Signals}
        name = known.get(-code, f"signal {-code}")
        return f"its process was ended by {name}" + (" (was the machine's memory full?)" if name == "SIGKILL" else "")
    return f"its process ended with exit code {code}"


def _work(pipe: Connection, lifeline: Connection, place: str, environ: Mapping[str, str]) -> None:
    os.environ.update(environ)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to both; the parent then ends this one
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    case = load_case(place)
    from torch._dynamo import config

    # After too many recompilations PyTorch would fall back to eager mode, and the row would say compiled.
    config.fail_on_recompile_limit_hit = True
    while True:
        try:
            configs = pipe.recv()
        except EOFError:
            return
        try:
            for row in case.measure(configs):
                pipe.send(row)
            pipe.send(is_sound())
        except Exception as error:  # no row holds this error: the parent measures the rest one by one
            pipe.send(f"{type(error).__name__}: {error}")
            return


def _end_with(lifeline: Connection) -> None:
    """End this process when its parent closes the lifeline or dies."""
    with contextlib.suppress(EOFError):
        lifeline.recv()
    os._exit(1)
