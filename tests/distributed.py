"""The one way in which tests start several ranks: real processes, gloo (NCCL for multigpu tests), a time limit.

With a backend, ranks meet as users of `torch.distributed` do, in a group that this project has not made.

Processes are forked from a server that has PyTorch loaded: four ranks start in a fraction of a second.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from cs336_systems.parallel import comm

forkserver = multiprocessing.get_context("forkserver")
forkserver.set_forkserver_preload(["tests.preloaded"])


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    device: str = "cpu",
    backend: str | None = None,
    timeout_s: float = 60,
) -> list[Any]:
    """Run `function(*args)` on each of world_size ranks of a process group; return its results in their order.

    The function must be one of a module, and what it takes and returns is pickled (return plain values or CPU tensors).
    Fails the test with the traceback of the first rank that raises, and where a rank dies or the time is over.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        pipes, processes = [], []
        for rank in range(world_size):
            ours, theirs = forkserver.Pipe()
            process = forkserver.Process(
                target=_rank_main, args=(theirs, rank, world_size, store, device, backend, timeout_s, function, args)
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(pipes: list[Any], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0, deadline - time.monotonic()))
        if not ready:
            pytest.fail(f"ranks {sorted(waiting.values())} did not end in time")
        for pipe in ready:
            rank = waiting[pipe]
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                pytest.fail(f"rank {rank} died")
            if not ok:
                pytest.fail(f"rank {rank}:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    pipe: Any, rank: int, world_size: int, store: str, device: str, backend: str | None, timeout_s: float,
    function: Any, args: Any,
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    try:
        where = torch.device(device)
        if where.type == "cuda":  # gloo's ranks can share a GPU
            where = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(where)
        with _group(backend, where, timeout_s, init_method=store, rank=rank, world_size=world_size):
            value = function(*args)
            comm.barrier("end of the test")
        answer = True, value
    except BaseException:
        answer = False, traceback.format_exc()
    # Not by send, which would share tensors with a process that is gone by then.
    pipe.send_bytes(pickle.dumps(answer))


@contextlib.contextmanager
def _group(backend: str | None, device: torch.device, timeout_s: float, **where: Any) -> Iterator[None]:
    if backend is None:
        with comm.process_group(device, init_timeout_s=timeout_s, step_timeout_s=timeout_s, **where):
            yield
    else:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **where)
        yield
        dist.destroy_process_group()


class Process(NamedTuple):
    """A living process."""

    pid: int
    parent: int
    group: int
    words: str  # its command line
    folder: str  # in which it works


def processes() -> list[Process]:
    """All living processes, as /proc has them."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            _, parent, group, *_ = (place / "stat").read_text().rpartition(")")[2].split()
            words, folder = (place / "cmdline").read_text(), str((place / "cwd").readlink())
            found.append(Process(int(place.name), int(parent), int(group), words, folder))
    return found


def processes_of(folder: str) -> list[str]:
    """Command lines of other processes that work in the folder, as ranks do, or name it."""
    return [p.words for p in processes() if folder in f"{p.words} {p.folder}" and p.pid != os.getpid()]


def wait_until(condition: Callable[[], Any], process: subprocess.Popen | None = None, timeout_s: float = 60) -> Any:
    """Wait until a condition is true, and return it. Fails at the time limit, or if the process ends before."""
    end = time.monotonic() + timeout_s
    while not (found := condition()):
        if process is not None and process.poll() is not None:
            pytest.fail(f"the process ended with {process.returncode}: {process.communicate()[1]}")
        if time.monotonic() > end:
            pytest.fail(f"not within {timeout_s} s")
        time.sleep(0.005)
    return found
