"""Work on files that all ranks do together: every rank gets the result, or every rank raises the same error.

With one process, the function is called and nothing is sent.
"""

import contextlib
import pickle
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from ..parallel import comm
from ..parallel.failure import named

T = TypeVar("T")


def file_group(wait_h: float = 0.5) -> Any:
    """A new gloo group of all ranks, for work on files; None with one process. All ranks call it together.

    Ranks wait for each other for up to wait_h hours. A background thread needs a group of its own.
    """
    return dist.new_group(backend="gloo", timeout=timedelta(hours=wait_h)) if comm.world_size() > 1 else None


_main: tuple[Any, Any] | None = None


def main_group() -> Any:
    """The `file_group` of the main thread, made at the first call in a process group."""
    global _main
    if comm.world_size() == 1:
        return None
    if _main is None or _main[0] is not dist.group.WORLD:
        _main = dist.group.WORLD, file_group()
    return _main[1]


class RankError(Exception):
    """An error with its rank, in words, because not every exception can be sent."""


def reason(error: BaseException) -> str:
    """Why something failed. If a system error is anywhere in the chain of causes, only its own words."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        if isinstance(cause, RankError):
            return str(cause)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def naming_the_rank() -> Iterator[None]:
    """With several processes, turn an error into a RankError."""
    try:
        yield
    except Exception as error:
        if comm.world_size() == 1:
            raise
        raise RankError(f"rank {comm.rank()}: {reason(error)}") from error


def on_every_rank(function: Callable[[], T], what: str, group: Any = None) -> list[T]:
    """Call a function on all ranks; return all results, in rank order, on every rank.

    If the function raises an error on some ranks, all ranks raise that of the lowest, so nobody is left waiting. Raises
    CollectiveError if a rank is gone. `what` names the work in error messages.
    """
    if comm.world_size() == 1:
        return [function()]
    result, failure = None, None
    try:
        result = function()
        pickle.dumps(result)  # if it cannot be sent, this rank fails and not the ranks that wait for it
    except Exception as error:
        failure = error
    outcomes: list[Any] = [None] * comm.world_size()
    group = group or main_group()
    with named(what):
        dist.all_gather_object(outcomes, (result, None if failure is None else _sendable(failure)), group=group)
    for other, (_, theirs) in enumerate(outcomes):
        if theirs is not None:
            raise failure if failure is not None and other == comm.rank() else theirs  # its own has a traceback
    return [result for result, _ in outcomes]


def on_first_rank(function: Callable[[], T], what: str = "work of the first rank", group: Any = None) -> T:
    """Call a function on rank 0 alone; return its result, or raise its error, on all ranks.

    All ranks call this together. The function itself communicates nothing. The result is sent pickled.
    """
    results = on_every_rank(lambda: function() if comm.rank() == 0 else None, what, group)
    return results[0]  # type: ignore[return-value]


def _sendable(error: Exception) -> Exception:
    """The error itself, or one that says the same if it would not survive pickling."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
