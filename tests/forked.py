"""`subprocess.Popen` and `run` for programs in Python, where the test is not about how an interpreter starts.

They fork this process, which has PyTorch loaded: an interpreter takes 5 s of a core to import it. The program imports
this project anew. Ranks that it launches and its fork servers are forked too. With a GPU, which a forked process may
not use, and on other systems than Linux, both start interpreters.
"""

import asyncio
import atexit
import contextlib
import io
import logging
import os
import random
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker, util
from typing import Any

import matplotlib.backends.backend_agg  # a program that draws takes two seconds to load it
import matplotlib.figure
import torch
import torch._dynamo  # the first optimizer of a process loads it, which takes seconds
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

CAN_FORK = sys.platform == "linux" and not torch.cuda.is_available()
_OURS = ("cs336_basics", "cs336_systems", "tests")
_savefig = matplotlib.figure.Figure.savefig
_before: list[types.ModuleType] = []  # pytest's modules of ours: kept, as PyTorch may have references to their parts


def fork_everything() -> None:
    """From now on, ranks that PyTorch's launcher starts and the servers of `multiprocessing` are forked too.

    The launcher notes for each event which function it is in, and looks through all modules for that: a second in all.
    """
    dynamic_rendezvous.get_method_name = lambda depth=2: "not looked up"  # type: ignore[attr-defined]
    if CAN_FORK:
        util.spawnv_passfds = _spawn
        subprocess_handler.Popen = _Forked  # type: ignore[misc]


def _spawn(path: Any, arguments: Sequence[str | bytes], kept: Iterable[int]) -> int:
    def enter() -> None:  # the server outlives the test that starts it, whose pictures may be blank
        matplotlib.figure.Figure.savefig = _savefig  # type: ignore[method-assign]

    return _fork([*map(os.fsdecode, arguments)][1:], [0, 1, 2], kept, enter, os.environ.copy())


class _Forked(subprocess.Popen):
    """Forks programs in Python, and starts others."""

    def _execute_child(  # what Popen does between making the pipes and reading from them
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any,
        startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int,
        errread: int, errwrite: int, restore_signals: Any, gid: Any, gids: Any, uid: Any, umask: Any, new_session: bool,
        *more: Any,
    ) -> None:  # fmt: skip
        if shell or [*args][:1] != [sys.executable]:
            given = executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell
            pipes = p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite
            how = restore_signals, gid, gids, uid, umask, new_session
            super()._execute_child(args, *given, *pipes, *how, *more)  # type: ignore[misc]
            return

        def enter() -> None:
            if new_session:
                os.setsid()
            if cwd is not None:
                os.chdir(cwd)
            if preexec_fn is not None:
                preexec_fn()

        files = [ours if file == -1 else file for ours, file in enumerate((p2cread, c2pwrite, errwrite))]
        words = [str(word) for word in args[1:]]
        self.pid = _fork(words, files, pass_fds, enter, os.environ.copy() if env is None else env)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def _fork(
    arguments: list[str], files: Sequence[int], kept: Iterable[int], enter: Callable[[], None], env: Mapping[str, str]
) -> int:
    """Fork a process that does as an interpreter with these arguments; return its ID.

    files: become its 0, 1 and 2. kept: other files that stay open. enter: what it does before the program.
    """
    if pid := os.fork():
        return pid
    code = 1
    try:
        for ours, file in enumerate(files):
            os.dup2(file, ours)
        nothing = os.open(os.devnull, os.O_RDWR)
        for file in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *kept}:
            with contextlib.suppress(OSError):  # not closed: objects of pytest's may still use the number
                os.dup2(nothing, file, inheritable=False)
        _leave_pytest(env)
        enter()
        code = _interpret(arguments)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        if sys.stdout is not None and not sys.stdout.closed:
            sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _leave_pytest(env: Mapping[str, str]) -> None:
    """Be as an interpreter that has just started."""
    atexit._clear()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin, sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(number, mode), env.get("PYTHONIOENCODING"), line_buffering=True)  # type: ignore[type-var]
        for number, mode in enumerate("rww")
    )
    logging.getLogger().handlers.clear()
    loggers = logging.Logger.manager.loggerDict
    for name in [name for name in loggers if name.partition(".")[0] in _OURS]:
        del loggers[name]
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    warnings.showwarning = lambda *what, **_: sys.stderr.write(warnings.formatwarning(*what[:4]))
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = ["", *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    _before.extend(sys.modules.pop(name) for name in [*sys.modules] if _is_replaced(name))
    asyncio.set_event_loop_policy(None)  # no loop that pytest's process runs
    random.seed()
    torch.set_num_threads(1)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    fork_everything()
    for singleton in (forkserver._forkserver, resource_tracker._resource_tracker):  # type: ignore[attr-defined]
        singleton.__init__()  # not pytest's, which this process may have none of


def _is_replaced(name: str) -> bool:
    """Whether a program imports a module anew: ours, a test's, or one that reads the environment when imported."""
    file = getattr(sys.modules[name], "__file__", None) or sys.prefix
    is_test = not file.startswith((sys.prefix, sys.base_prefix))
    return is_test or name.partition(".")[0] in (*_OURS, "huggingface_hub")


def _interpret(arguments: list[str]) -> int:
    """Run `[OPTIONS] FILE|-c CODE|-m MODULE ARGUMENTS` as Python does; return the exit code."""
    while arguments[0].startswith("-") and arguments[0] not in ("-c", "-m"):
        del arguments[0]
    first, *rest = arguments
    try:
        if first == "-c":
            sys.argv = ["-c", *rest[1:]]
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(rest[0], "<string>", "exec"), main.__dict__)
        elif first == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path[0] = os.path.dirname(first)
            runpy.run_path(os.path.abspath(first), run_name="__main__")
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    return 0


Popen: type[subprocess.Popen] = _Forked if CAN_FORK else subprocess.Popen


def run(
    command: Sequence[Any], timeout: float, start: type[subprocess.Popen] = Popen, **popen: Any
) -> subprocess.CompletedProcess:
    """`subprocess.run` that captures text."""
    with start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **popen) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
