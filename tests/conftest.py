"""Tests that a machine cannot run are left out and counted in a line; slow tests run where `-m` names them.

Without a GPU, Triton's kernels run in its interpreter, which has to be said before anything imports Triton.
"""

import collections
import dataclasses
import functools
import gc
import logging
import os
import signal
import types
from collections.abc import Callable, Iterator
from typing import Any

# Read when PyTorch is loaded. Each of several test processes is to take one core, and none is to spin while it waits.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from matplotlib.figure import Figure

from tests import garbage

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

LONG = ("test_notebooks.py", "test_guides.py", "test_launch.py")  # begin first, so that no process ends them alone
LEFT_OUT = pytest.StashKey[collections.Counter[str]]()


@pytest.hookimpl(optionalhook=True)  # for runs without xdist: -p no:xdist
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: tests that start processes wait for them for a good part of their time."""
    return (os.cpu_count() or 1) + 1


def pytest_sessionstart(session: pytest.Session) -> None:
    _hear_signals()
    if session.config.getoption("tx", None):  # xdist's first process, which runs no tests
        return
    gc.disable()  # until the tests are collected: nearly all that is imported and collected stays
    if os.environ.get("TRITON_INTERPRET") == "1":
        _spare_the_interpreter()
    from tests import forked

    forked.fork_everything()


def _hear_signals() -> None:
    """Under nohup and in a shell's background jobs signals are ignored, and by the processes that tests start too."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


def _spare_the_interpreter() -> None:
    """Triton prepares all of triton.language for each call of a function in a kernel it interprets: once will do.

    So with its table of types, which it makes for each conversion, and with the types of blocks and the shapes of their
    tensors, which it makes for each operation. And it looks for overflows of integers, with ten operations for one, but
    does not report them.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    def patch(function: Any, in_full: Any = interpreter._patch_lang) -> Any:
        languages = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        if not languages or any(tl.core.is_builtin(language.load) for language in languages):
            return in_full(function)
        return interpreter._LangPatchScope()  # nothing to take back

    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = patch
    if hasattr(interpreter, "_get_np_dtype"):
        look_up = interpreter._get_np_dtype
        of_numbers = functools.cache(look_up)
        interpreter._get_np_dtype = lambda kind: (
            look_up(kind) if isinstance(kind.scalar, tl.pointer_type) else of_numbers(kind.scalar)
        )
    _make_types_once(tl.core.block_type, tl.core.tensor)


def _make_types_once(block_type: Any, tensor: Any) -> None:
    """Share the instances of block_type that are equal, and what tensors take from their type."""
    type_in_full, tensor_in_full, made = block_type.__init__, tensor.__init__, {}

    def new(cls: type, element_ty: Any = None, shape: Any = (), *_: Any, **__: Any) -> Any:
        if cls is not block_type or element_ty.is_ptr():  # pointers cannot be keys
            return object.__new__(cls)
        key = element_ty, *(getattr(size, "value", size) for size in shape)
        return made.get(key) or made.setdefault(key, object.__new__(cls))

    def make_type(self: Any, *given: Any, **named: Any) -> None:
        if not self.__dict__:
            type_in_full(self, *given, **named)

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        if shared := type.__dict__.get("of_tensors"):
            self.__dict__.update(shared, handle=handle)
        else:
            tensor_in_full(self, handle, type)
            type.of_tensors = {name: value for name, value in self.__dict__.items() if name != "handle"}

    block_type.__new__, block_type.__init__, tensor.__init__ = new, make_type, make_tensor


@functools.cache
def reasons_of(config: pytest.Config) -> dict[str, str]:
    """Why tests are left out, by the name of their mark."""
    reasons: dict[str, str] = {}
    if "slow" not in (config.getoption("markexpr") or ""):
        reasons["slow"] = "take minutes: -m slow runs them"
    if "PYTEST_XDIST_WORKER" in os.environ:
        reasons["timing"] = "compare times, which others beside them disturb: they run without -n"
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus < 1:
        reasons["gpu"] = "need a CUDA GPU"
    if gpus < 2:
        reasons["multigpu"] = f"need two CUDA GPUs, here are {gpus}"
    return reasons


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = collections.Counter()


def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> list[pytest.Item] | None:
    """Classes and functions that are left out as a whole are not divided into their thousands of cases first."""
    marks = {mark.name for mark in getattr(obj, "pytestmark", ()) if isinstance(obj, (type, types.FunctionType))}
    for name, why in reasons_of(collector.config).items():
        if name in marks:
            collector.config.stash[LEFT_OUT][why] += 1
            return []
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons, kept, left_out = reasons_of(config), [], config.stash[LEFT_OUT]
    for item in items:
        why = next((reason for name, reason in reasons.items() if item.get_closest_marker(name)), None)
        if why is None:
            kept.append(item)
        else:
            left_out[why] += 1
    items[:] = sorted(kept, key=lambda item: item.path.name not in LONG)


def pytest_collection_finish() -> None:
    garbage.freeze_for_good()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    garbage.unfreeze()
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(session.config.stash.get(LEFT_OUT, {}))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """All of xdist's workers collect the same tests."""
    node.config.stash[LEFT_OUT] = collections.Counter(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if left_out := config.stash.get(LEFT_OUT, {}):
        counts = "; ".join(f"{count} {why}" for why, count in left_out.items())
        terminalreporter.write_line(f"left out (a class, or a test with all its cases, counts as one): {counts}")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For models that are far too small to share among cores; and the cores are shared among tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are blank, which saves most of their time. Their hashes are those of what would be on them."""
    save = Figure.savefig
    blank = functools.partial(Figure, figsize=(1, 1))
    monkeypatch.setattr(Figure, "savefig", lambda _, *args, **options: save(blank(), *args, **options))


@pytest.fixture
def cs336(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """Runs the command in this process; returns exit code, stdout and stderr."""
    from cs336_systems.cli.main import main

    log = logging.getLogger("cs336_systems")
    before = log.handlers[:], log.level

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    yield run
    log.handlers[:], log.level = before
