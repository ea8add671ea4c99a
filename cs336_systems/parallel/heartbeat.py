"""Heartbeats: do the other ranks still run while one waits for their disks, which may take longer than any transfer?

A stopped or unreachable process looks like one with a slow disk. So a thread of each rank counts up in a shared store
as long as its process runs. While a rank waits, its thread watches the other counts, and ends the process if one stands
still.
"""

import contextlib
import threading
from collections.abc import Iterator

import torch.distributed as dist

from .failure import HANGS, fail, place


class Heartbeats:
    """A thread that counts for this rank and, during `awaiting`, ends this process if another count stands still.

    It measures time in its own turns, so that nothing happens after all ranks stood still together.
    """

    LEAST_S = 60.0
    """The shortest limit: safetensors keeps all of Python from running while it serializes a file, which takes 3 s per
    GiB, and files have up to two."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, limit_s: float) -> None:
        # A connection of its own, because the calls of several threads on one connection wait for each other.
        self._store: dist.Store = store.clone()  # type: ignore[attr-defined]
        self._limit_s, self._stopped = max(limit_s, self.LEAST_S), threading.Event()
        self._pause_s = min(1.0, self._limit_s / 4)
        self._awaited: list[str] = []
        self._key, self._others = _key(rank), [other for other in range(world_size) if other != rank]
        self._store.set(self._key, "0")
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    @contextlib.contextmanager
    def awaiting(self, name: str) -> Iterator[None]:
        """While active, all ranks have to run. Several threads may wait at a time."""
        self._awaited.append(name)
        try:
            yield
        finally:
            self._awaited.remove(name)

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        turn, seen, still = 0, dict[int, bytes](), dict[int, int]()
        keys = [_key(other) for other in self._others]
        with contextlib.suppress(RuntimeError):  # the store has ended with its agent
            while not self._stopped.wait(self._pause_s):
                turn += 1
                self._store.set(self._key, str(turn))
                if not self._awaited:
                    seen.clear()
                    continue
                counts = dict(zip(self._others, self._store.multi_get(keys), strict=True))  # one request for all
                still = {other: still.get(other, 0) + 1 if counts[other] == seen.get(other) else 0 for other in counts}
                seen = counts
                longest = max(still, key=lambda other: still[other])
                awaited = tuple(self._awaited)  # other threads may end their waits meanwhile
                if awaited and still[longest] * self._pause_s >= self._limit_s:
                    fail(f"{place(awaited[0])}: rank {longest} stood still for {self._limit_s:g} s: it {HANGS}")
                    return


def _key(rank: int) -> str:
    return f"heartbeat of rank {rank}"
