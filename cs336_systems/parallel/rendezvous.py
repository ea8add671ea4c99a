"""A store in which the ranks of one start find each other, and not those of an earlier start.

The agents of torchrun keep one key-value store through all restarts, and PyTorch's process groups leave their addresses
in it under names that do not change. After a restart, the first rank reads an old address, and the restart fails. The
number of restarts cannot tell the starts apart, because each agent counts its own (pytorch/pytorch issue 135712).
"""

import os
import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..machine.console import count_in_environment


def rendezvous_arguments(timeout_s: float) -> dict[str, Any]:
    """Arguments of `init_process_group` with a store for this start, or {} if no agent has started this process.

    Raises RuntimeError if not all ranks come within timeout_s, ValueError if MASTER_PORT is no number.
    """
    count_in_environment("MASTER_PORT", 0)  # PyTorch's message would not name it
    if (store := agents_store(timeout_s)) is None:
        return {}
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return {"store": fresh_store(store, rank, world_size, timeout_s), "rank": rank, "world_size": world_size}


def agents_store(timeout_s: float) -> dist.Store | None:
    """The key-value store that the agents keep for all processes, or None if no agent has started this one.

    Raises RuntimeError if it does not answer within timeout_s.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    return store


def fresh_store(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """A part of the store that no earlier start has written to, the same one on all ranks of this start.

    Rank 0 draws its name. The others cannot tell which name in the store belongs to this start. So each asks under a
    name of its own, which only this start's rank 0 can answer, and rank 0 answers until all have its name. Nobody takes
    its answer to a question of an earlier start.
    """
    own = uuid.uuid4().hex
    if rank != 0:
        store.set(f"question of rank {rank}", own)
        store.wait([f"answer to {own}"], timedelta(seconds=timeout_s))
        name = store.get(f"answer to {own}").decode()
        store.set(f"{name} is known to rank {rank}", "")
        return dist.PrefixStore(name, store)
    missing = set(range(1, world_size))
    end = time.monotonic() + timeout_s
    while missing:
        for other in sorted(missing):
            if store.check([f"{own} is known to rank {other}"]):
                missing.remove(other)
            elif store.check([f"question of rank {other}"]):
                question = store.get(f"question of rank {other}").decode()
                store.set(f"answer to {question}", own)
        if missing and time.monotonic() > end:
            raise RuntimeError(f"no answer from rank {', '.join(map(str, sorted(missing)))}")
        time.sleep(0.01)
    return dist.PrefixStore(own, store)
