"""Processes that train together: start and stop, and collectives between them.

A collective is started, then waited for; in between, the process computes. Each has a name, so that one that fails or
never ends is reported by rank, operation and step. With one process nothing is sent and the same code runs.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from .failure import CollectiveError, Watchdog, first_line, named
from .heartbeat import Heartbeats
from .meeting import check_environment, meeting_place
from .ranks import rank, world_size

# ---------------------------------------------------------------------------------------------------------------------
# Start and stop
# ---------------------------------------------------------------------------------------------------------------------


_watchdog: Watchdog | None = None
_heartbeats: Heartbeats | None = None
_spare_events: list[torch.cuda.Event] = []
"""Events to record again. The watchdog frees none, because that would wait for CUDA's lock."""


@contextlib.contextmanager
def process_group(
    device: torch.device,
    *,
    init_timeout_s: float = 300,
    step_timeout_s: float = 120,
    nccl_max_ctas: int | None = None,
    **where: Any,
) -> Iterator[None]:
    """The process group of this run: NCCL for tensors on a GPU, gloo for those on a CPU.

    Where the other ranks are comes from the environment, as torchrun sets it, or from `where`: what
    `init_process_group` takes (init_method, rank, world_size). A collective that is not done within step_timeout_s ends
    the process (tensors on a GPU) or raises CollectiveError (tensors on a CPU; and objects, on a GPU a minute later).
    CollectiveError is also raised if the other ranks do not come within init_timeout_s. NCCL takes at most
    nccl_max_ctas thread blocks of a GPU. Raises ValueError if the environment has another limit, or does not say where
    the ranks meet.
    """
    global _watchdog, _heartbeats
    if nccl_max_ctas is not None:  # NCCL reads it once per process, when it first connects
        given = os.environ.setdefault("NCCL_MAX_CTAS", str(nccl_max_ctas))
        if given != str(nccl_max_ctas):
            raise ValueError(f"nccl_max_ctas is {nccl_max_ctas}: NCCL_MAX_CTAS is {given!r} in the environment")
    # gloo, beside NCCL, carries Python objects, which would otherwise wait for the GPU.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if not where:
        check_environment()
    try:
        where = where or meeting_place(init_timeout_s)
        dist.init_process_group(backend, timeout=timedelta(seconds=init_timeout_s), **where)
        with named("meeting of all ranks"):
            dist.barrier(device_ids=[device.index or 0] if device.type == "cuda" else None)
    except RuntimeError as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        raise CollectiveError(f"the ranks did not all meet within {init_timeout_s:g} s: {first_line(error)}") from error
    # Our watchdog must fire before NCCL's own, which does not know the step. gloo's timeout must fire before ours,
    # because gloo raises in whoever waits.
    allowance = 60 if device.type == "cuda" else 0
    timeout = timedelta(seconds=step_timeout_s + allowance)
    dist.distributed_c10d._set_pg_timeout(timeout, dist.group.WORLD)
    _watchdog = Watchdog(step_timeout_s + (0 if allowance else 10), device)
    if "store" in where and world_size() > 1:  # other stores may end before this process
        _heartbeats = Heartbeats(where["store"], rank(), world_size(), step_timeout_s)
    try:
        yield
    except BaseException:
        _stop_watching()
        # Not destroyed: that would wait for transfers that the other ranks may not have sent.
        if hasattr(dist.distributed_c10d, "_abort_process_group"):
            dist.distributed_c10d._abort_process_group()
        raise
    _stop_watching()
    dist.destroy_process_group()


def _stop_watching() -> None:
    global _watchdog, _heartbeats
    for watcher in (_watchdog, _heartbeats):
        if watcher is not None:
            watcher.stop()
    _watchdog = _heartbeats = None
    _spare_events.clear()


def awaiting(what: str) -> contextlib.AbstractContextManager[None]:
    """While active, this process ends if another rank's has stopped for longer than a step may take.

    For waits without a limit of their own, between ranks that an agent has started.
    """
    return _heartbeats.awaiting(what) if _heartbeats is not None else contextlib.nullcontext()


# ---------------------------------------------------------------------------------------------------------------------
# Transfers
# ---------------------------------------------------------------------------------------------------------------------


class Transfer:
    """A collective under way, returned by one of the `start_` functions.

    `wait` returns when its tensors may be used; on a GPU it only makes the current stream wait.
    """

    def __init__(self, what: str, works: Sequence[Any] = (), apply: Callable[[], None] | None = None) -> None:
        self.what, self.works, self.started = what, works, time.monotonic()
        self._apply = apply
        self._passed: torch.cuda.Event | None = None
        # A transfer that is recorded in a CUDA graph does not run now, and nobody may ask whether it is done.
        recorded = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        self._watched = bool(works) and _watchdog is not None and not recorded
        if self._watched and _watchdog is not None:
            _watchdog.watch(self)

    def wait(self) -> None:
        with named(self.what):
            for work in self.works:
                work.wait()
        if self._apply is not None:
            self._apply()
        # The watchdog keeps this object for up to two seconds, which is many steps, and works and `apply` hold tensors,
        # so drop them. Each transfer records its own event, although they end in order, so that one that hangs is
        # reported by its name.
        if self._watched and self.works and torch.cuda.is_initialized():
            self._passed = _event_now()
        self.works, self._apply = (), None

    def done(self) -> bool:
        """Whether the transfer is done, for the watchdog, which stops asking once it is."""
        if not all(work.is_completed() for work in self.works):
            return False
        if self._passed is None:
            self._watched = False  # so `wait` records no event
            return True
        return _has_passed(self._passed)


class _Queued:
    """Work that was queued on the GPU, as the watchdog sees it."""

    def __init__(self, what: str) -> None:
        self.what, self.started = what, time.monotonic()
        self.passed: torch.cuda.Event | None = None
        self.given_up = False

    def done(self) -> bool:
        """As `Transfer.done`."""
        return self.given_up or (self.passed is not None and _has_passed(self.passed))


def _event_now() -> torch.cuda.Event:
    event = _spare_events.pop() if _spare_events else torch.cuda.Event()
    event.record()
    return event


def _has_passed(event: torch.cuda.Event) -> bool:
    if not event.query():
        return False
    _spare_events.append(event)
    return True


@contextlib.contextmanager
def watched(what: str) -> Iterator[None]:
    """Have the watchdog time, like one transfer, what is queued inside on the current stream of a GPU.

    For transfers that it cannot see one by one, such as those in a CUDA graph. The time limit begins before they are
    queued.
    """
    if _watchdog is None or world_size() == 1:
        yield
        return
    queued = _Queued(what)
    _watchdog.watch(queued)
    try:
        yield
        queued.passed = _event_now()  # set only once recorded: before that, an event counts as passed
    except BaseException:
        queued.given_up = True  # whoever catches the error reports it
        raise


def start_mean(tensors: Iterable[Tensor], what: str, wire_dtype: torch.dtype | None = None) -> Transfer:
    """Average tensors over all ranks, in place, in as few transfers as possible: one per dtype.

    With a wire_dtype they are cast to it to be sent. Raises ValueError for a sparse tensor.
    """
    tensors = [t for t in tensors if t.numel()]
    if world_size() == 1 or not tensors:
        return Transfer(what)
    check_dense(tensors, what)
    sent = [t.to(wire_dtype or t.dtype).contiguous() for t in tensors]  # the tensor itself if nothing changes
    op = _divide_unless_averaged(sent)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for t in sent:
        by_dtype.setdefault(t.dtype, []).append(t)
    works = []
    for group in by_dtype.values():
        if len(group) > 1 and _coalesces(group[0]):
            works.append(_together("allreduce_coalesced", [group], c10d.AllreduceCoalescedOptions(), what, op))
        else:
            works += [_together("allreduce", [[t]], c10d.AllreduceOptions(), what, op) for t in group]

    def apply() -> None:
        for t, s in zip(tensors, sent, strict=True):
            if s is not t:
                t.copy_(s)

    return Transfer(what, works, apply)


def check_dense(tensors: Iterable[Tensor], what: str) -> None:
    """Raise ValueError for a sparse tensor."""
    if others := [t.layout for t in tensors if t.layout is not torch.strided]:
        raise ValueError(f"{what}: a tensor is {others[0]}: only dense ones can be averaged")


def _divide_unless_averaged(sent: Sequence[Tensor]) -> Any:
    """The operation that averages. gloo can only add: for it, tensors are divided here, because a sum may overflow."""
    if _by_nccl(sent[0]):
        return dist.ReduceOp.AVG
    torch._foreach_div_(list(sent), world_size())
    return dist.ReduceOp.SUM


def start_gather(outputs: Sequence[Tensor], inputs: Sequence[Tensor], what: str) -> Transfer:
    """Fill each output (world_size * rows, ...) with the inputs (rows, ...) of all ranks, in rank order.

    All tensors have one dtype and are contiguous.
    """
    if world_size() == 1:
        torch._foreach_copy_(list(outputs), list(inputs))
        return Transfer(what)
    calls: Any = [(_ALL_GATHER, outputs, inputs)]
    if not _by_nccl(outputs[0]):  # two coalesced gathers under way corrupt gloo's heap (PyTorch 2.13)
        calls = [(_GATHER, *pair) for pair in zip(outputs, inputs, strict=True)]
    return Transfer(what, [_together(name, tensors, c10d.AllgatherOptions(), what) for name, *tensors in calls])


def start_scatter_mean(outputs: Sequence[Tensor], inputs: Sequence[Tensor], what: str) -> Transfer:
    """Average inputs (world_size * rows, ...) over all ranks and leave each rank its rows in output (rows, ...).

    All tensors have one dtype and are contiguous. The inputs must not be used afterwards.
    """
    if world_size() == 1:
        torch._foreach_copy_(list(outputs), list(inputs))
        return Transfer(what)
    op, options = _divide_unless_averaged(inputs), c10d.ReduceScatterOptions()
    return Transfer(what, [_together(_REDUCE_SCATTER, [outputs, inputs], options, what, op)])


def start_broadcasts(sources: Iterable[tuple[Tensor, int]], what: str) -> Transfer:
    """Copy each tensor from the rank given with it to all others; on NCCL all at once, so that all ranks send.

    A tensor's memory layout may differ between ranks. If it is expanded on all ranks, each element is sent once.
    `_coalescing_manager` and `dist.broadcast` would do the same in more host time.
    """
    calls = [(tensor, source) for tensor, source in sources if tensor.numel()]
    if world_size() == 1 or not calls:
        return Transfer(what)
    group, device = dist.group.WORLD, calls[0][0].device
    assert group is not None
    with named(what), torch._C._profiler._RecordFunctionFast(what):
        together = _by_nccl(calls[0][0])
        if together:
            group._start_coalescing(device)
        works, copies = [], []
        for tensor, source in calls:
            options = c10d.BroadcastOptions()
            options.rootRank, options.rootTensor, options.asyncOp = source, 0, True  # off the current stream
            if not tensor.is_contiguous():  # NCCL and gloo would send its memory, gaps included
                tensor = _each_element_once(tensor)
                copies.append((tensor, tensor.contiguous()))
                tensor = copies[-1][1]
            works.append(group.broadcast([_as_sent(tensor)], options))

        def apply() -> None:
            for tensor, dense in copies:
                tensor.copy_(dense)

        # Coalesced broadcasts have one work together, which can be asked whether it is done.
        return Transfer(what, [group._end_coalescing(device)] if together else works, apply if copies else None)


def _each_element_once(tensor: Tensor) -> Tensor:
    """A view without what an expanded tensor repeats."""
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]


_SENT_AS_THEY_ARE = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)


def _as_sent(tensor: Tensor) -> Tensor:
    """The same memory, viewed as bytes if not every backend knows the dtype."""
    if tensor.dtype in _SENT_AS_THEY_ARE:
        return tensor
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # of one element, the stride may be any


def _by_nccl(tensor: Tensor) -> bool:
    """Whether NCCL carries this tensor; gloo can carry GPU tensors too."""
    return tensor.is_cuda and "cuda:nccl" in dist.get_backend_config()


def _coalesces(tensor: Tensor) -> bool:
    """Whether one all-reduce may carry several such tensors. gloo takes GPU tensors one at a time."""
    return _by_nccl(tensor) or not tensor.is_cuda


_GATHER = "all_gather_single"
_ALL_GATHER, _REDUCE_SCATTER = "all_gather_single_coalesced", "reduce_scatter_single_coalesced"
if not hasattr(dist.ProcessGroup, _ALL_GATHER):  # before PyTorch 2.13
    _GATHER = "_allgather_base"
    _ALL_GATHER, _REDUCE_SCATTER = "allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"


def _together(method: str, tensors: Sequence[Any], options: Any, what: str, op: Any = None) -> Any:
    """Start one collective for tensors, or lists of them.

    `_coalescing_manager` does the same in three times the host time.
    """
    options.asyncOp = True
    if op is not None:
        options.reduceOp = op
    with named(what), torch._C._profiler._RecordFunctionFast(what):
        return getattr(dist.group.WORLD, method)(*tensors, options)


def mean(tensors: Iterable[Tensor], what: str) -> None:
    """`start_mean`, and wait for it."""
    start_mean(tensors, what).wait()


def broadcast(tensors: Iterable[Tensor], what: str) -> None:
    """Copy tensors from rank 0 to all others."""
    start_broadcasts([(tensor, 0) for tensor in tensors], what).wait()


def gather_objects(value: Any, what: str) -> list[Any]:
    """The values of all ranks, in rank order. Only for small ones of this program's own: they are pickled."""
    values: list[Any] = [value] * world_size()
    if world_size() > 1:
        with named(what):
            dist.all_gather_object(values, value)
    return values


def mean_weight(count: int) -> float:
    """What a rank multiplies its mean loss over `count` tokens by, so that gradients are of the mean over all tokens.

    That is world_size * count / (count of all ranks), because gradients are averaged over ranks as they are; 1.0 where
    all counts are 0. All ranks call it together.
    """
    total = sum(gather_objects(count, "count of tokens"))
    return world_size() * count / total if total else 1.0


def barrier(what: str) -> None:
    """Return when all ranks have reached this call."""
    gather_objects(None, what)


def check_same(facts: dict[str, Any], what: str) -> None:
    """Raise ValueError, on all ranks, naming facts in which a rank differs from rank 0; their order counts too."""
    missing = "nothing"
    everyone = gather_objects(facts, f"comparison of {what}")
    for other, theirs in enumerate(everyone):
        names = [*everyone[0], *(name for name in theirs if name not in everyone[0])]
        differing = [
            f"{name} is {theirs.get(name, missing)} on rank {other} and {everyone[0].get(name, missing)} on rank 0"
            for name in names
            if theirs.get(name, missing) != everyone[0].get(name, missing)
        ]
        for i, (name, here) in enumerate(zip(theirs, everyone[0], strict=False)):
            if not differing and name != here:
                differing.append(f"number {i} is {name} on rank {other} and {here} on rank 0")
        if differing:
            more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
            raise ValueError(f"the ranks have different {what}: {'; '.join(differing[:3])}{more}")
