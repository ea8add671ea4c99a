"""Training in several processes on this machine, through the launcher behind torchrun.

Each process runs `one_rank.py`, which calls a function. It leaves the reason of a failure in a file for this process.
"""

import contextlib
import ctypes
import dataclasses
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ..config.run import RunConfig
from ..machine.console import Ended, check_single_process, start_console
from ..machine.files import write_whole
from ..machine.hardware import select_device, use_device
from ..parallel import comm, failure
from ..parallel.ranks import environment_rank, launched, local_rank, local_world_size
from .checkpoint import CheckpointError
from .loop import NonFiniteError
from .result import RunResult

_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (ValueError, FileNotFoundError, NonFiniteError, CheckpointError, failure.CollectiveError)
}
_PID = "pid"  # a file beside the report of each process
_SAVING_S = 600  # time to write a checkpoint after a signal
CALL = ["-m", f"{__package__}.one_rank"]
"""Arguments of Python with which a process calls a function, module:name, with a list of the texts after it."""


def launch(config: RunConfig) -> RunResult:
    """Run `train(config)` in `parallel.devices` processes; return the run's result.

    Raises the error of a process that failed, a cause before its consequences. Raises KeyboardInterrupt, or its
    subclass Ended, for a signal that comes before the processes can save.
    """
    check_devices(config.train.device, config.parallel.devices)
    by_interrupt = False
    with tempfile.TemporaryDirectory(prefix="cs336-") as folder:
        config_file, result_file = Path(folder) / "config.json", Path(folder) / "result.json"
        config_file.write_text(json.dumps(config.to_dict()))
        try:
            function = f"{__package__}.pipeline:train_one_rank"
            run_processes([*CALL, function, str(config_file), str(result_file)], config.parallel.devices, Path(folder))
        except SignalException as error:
            by_interrupt = isinstance(error, _Interrupt) and type(error.__context__) is not SignalException  # the first
            if not result_file.is_file():
                raise (KeyboardInterrupt if by_interrupt else Ended(error.sigval)) from None
        result = RunResult(**json.loads(result_file.read_text()))
    if by_interrupt and result.interrupted is not None:
        result = dataclasses.replace(result, interrupted="SIGINT")
    return result


class _Interrupt(SignalException):
    """SIGINT, forwarded as SIGTERM, which ends a process that is still starting wherever it waits."""

    def __init__(self) -> None:
        super().__init__("interrupted", signal.SIGTERM)


def _interrupt(*_: Any) -> None:
    raise _Interrupt


def run_processes(program: list[str], count: int, folder: Path) -> None:
    """Run `python PROGRAM... PARENT` in `count` processes on this machine, as torchrun would, and wait for them.

    PARENT is this process's ID, see `child_process`. The processes report failures in `folder`. Raises the error of
    one that failed, a cause before its consequences, or SignalException if a signal came, after all have ended.
    """
    for name in ("", ".elastic.agent.server.api"):  # the latter has a level of its own and logs each signal
        logging.getLogger(f"torch.distributed{name}").setLevel(logging.CRITICAL)
    # SIGINT is handled below. A PyTorch without `signals_to_handle` forwards it to the processes unchanged.
    options: dict[str, Any] = {"shutdown_timeout": _SAVING_S, "signals_to_handle": "SIGTERM,SIGHUP,SIGQUIT"}
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    launcher = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # a port that the system chooses
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
        **{name: value for name, value in options.items() if name in known},
    )
    threads = max(1, (os.cpu_count() or 1) // count)
    environ = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "TORCH_CPP_LOG_LEVEL": "ERROR"} | {
        **os.environ,
        failure.OWN_LAUNCH: "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),  # to find a kernel or strategy of the user's
    }
    before = dict(os.environ)
    os.environ.update(environ)
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, _interrupt) if in_main_thread else None
    try:
        elastic_launch(launcher, sys.executable)(*program, str(os.getpid()))
    except ChildFailedError as error:
        raise _failure(error.failures, folder) from None
    except SignalException:  # of several interrupts the last does not wait for the processes
        if in_main_thread:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        _kill_processes(folder)
        raise
    finally:
        if in_main_thread:
            signal.signal(signal.SIGINT, handler)
        os.environ.clear()
        os.environ.update(before)


def _kill_processes(folder: Path) -> None:
    """Kill the processes of this launch that still run."""
    for file in folder.rglob(_PID):
        pid = int(file.read_text())
        with contextlib.suppress(ChildProcessError):  # it has ended
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                os.kill(pid, signal.SIGKILL)


def check_devices(device: str, count: int, name: str = "parallel.devices") -> None:
    """Raise ValueError for more processes than GPUs or, on a CPU, for far more than cores.

    device: as in train.device. name: name of the count in the message.
    """
    on_gpus = select_device(device).type == "cuda"
    cores = os.cpu_count() or 1
    if not on_gpus and count > (most := max(16, 4 * cores)):  # each takes half a GB, and all wait for the last
        raise ValueError(f"{name} is {count}: it must be at most {most} on a CPU of {cores} cores")
    if on_gpus and count > torch.cuda.device_count():
        raise ValueError(
            f"{name} is {count}: each process takes a CUDA device, and PyTorch sees "
            f"{torch.cuda.device_count()} here (train.device cpu needs none)"
        )


def use_device_of_rank(device: str) -> torch.device:
    """Select this rank's device: its own GPU of the machine, or the CPU."""
    check_devices(device, local_world_size(), "LOCAL_WORLD_SIZE (torchrun's --nproc-per-node)")
    kind = select_device(device).type
    return use_device(f"cuda:{local_rank()}" if kind == "cuda" else kind)


@contextlib.contextmanager
def device_of_rank(device: str) -> Iterator[torch.device]:
    """This process's device, in a process group if a launcher has started several processes.

    Ranks may wait for each other for a day.
    """
    if not launched():
        check_single_process()
        yield use_device(device, or_mps=True)
        return
    own = use_device_of_rank(device)
    with comm.process_group(own, step_timeout_s=24 * 3600):
        yield own


def call_in_processes(function: list[str], count: int) -> None:
    """`run_processes` of a function, with its texts; a signal raises KeyboardInterrupt or its subclass Ended."""
    with tempfile.TemporaryDirectory(prefix="cs336-") as folder:
        try:
            run_processes([*CALL, *function], count, Path(folder))
        except SignalException as error:
            raise (KeyboardInterrupt if isinstance(error, _Interrupt) else Ended(error.sigval)) from None


def check_launch(config: RunConfig) -> None:
    """Raise ValueError if torchrun has started another number of processes than the configuration asks for."""
    if config.parallel.devices not in (1, local_world_size()):
        raise ValueError(
            f"parallel.devices is {config.parallel.devices}: {local_world_size()} processes have been started on "
            f"this machine; leave it out under torchrun, or, where a run's config.json has it, give "
            f"--parallel.devices {local_world_size()}"
        )


def _failure(failures: dict[int, ProcessFailure], folder: Path) -> Exception:
    """The error to raise for failed processes: the first report of a cause, and the ranks that a signal ended.

    A report that another rank is gone describes a consequence, so it comes after other reports. The launcher ends the
    remaining processes by SIGTERM, then by SIGKILL. Such ranks come last. SIGTERM is left out if another signal ended a
    rank, or if a report has the cause.
    """
    reports = []
    for file in sorted(folder.rglob("error.json")):
        with contextlib.suppress(ValueError):  # a process may die while it writes
            reports.append(json.loads(file.read_text())["message"])
    reports.sort(key=lambda report: (report["kind"] == "CollectiveError", int(report["extraInfo"]["timestamp"])))
    signals = {rank: f.signal_name() for rank, f in failures.items() if f.exitcode < 0}
    report = reports[0]["message"] if reports else ""
    # A rank that waited in vain means that the others hung, and that the launcher ended them.
    waited = any(words in report for words in (failure.HANGS, *failure.TIMED_OUT))
    by_launcher = waited or {*signals.values()} <= {"SIGTERM"}
    has_cause = bool(reports) and reports[0]["kind"] != "CollectiveError"
    left_out = "SIGTERM" if has_cause or not by_launcher else None
    ended = [f"rank {rank} was ended by {name}" for rank, name in signals.items() if name != left_out]
    if not reports:
        ended += [f"rank {rank} ended with exit code {f.exitcode}" for rank, f in failures.items() if f.exitcode >= 0]
        return failure.CollectiveError("; ".join(ended))
    message = [report, *ended] if by_launcher else [*ended, report]
    return _ERRORS.get(reports[0]["kind"], RuntimeError)("; ".join(message))


@contextlib.contextmanager
def child_process(parent: str) -> Iterator[None]:
    """Context of a process started by `run_processes`: reports its ID and a failure, and ends the process.

    If the parent is gone, this process gets SIGTERM (Linux only).
    """
    if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        write_whole(Path(report).with_name(_PID), str(os.getpid()))
    if sys.platform == "linux":
        death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(death_signal, signal.SIGTERM)
        if os.getppid() != int(parent):
            os._exit(1)
    start_console(quiet=environment_rank() != 0)
    try:
        yield
    except BaseException as error:
        failure.leave_failure(error)
        # Not sys.exit: closing a process group whose other ranks are gone may wait for them forever.
        os._exit(1)
