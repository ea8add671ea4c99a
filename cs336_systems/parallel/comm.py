"""The process group, and collectives between its ranks.

A collective is started, then waited for; the process computes in between. Each has a name, so that one that fails or
never ends is reported with rank, operation and step. With one process nothing is sent, and the same code runs.
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
from .ranks import rank, world_size
from .rendezvous import rendezvous_arguments

allows_copy_engines = True
"""Whether this process group may send by `peer_memory`."""
timeout_s = 600.0
"""Seconds after which a collective gives up by itself. On a GPU the watchdog ends the process before."""
_watchdog: Watchdog | None = None
_heartbeats: Heartbeats | None = None
_spare_events: list[torch.cuda.Event] = []
"""Events to record again. The watchdog frees none of them, because that would wait for CUDA's lock."""


@contextlib.contextmanager
def process_group(
    device: torch.device,
    *,
    init_timeout_s: float = 300,
    step_timeout_s: float = 120,
    nccl_max_ctas: int | None = None,
    copy_engines: bool = True,
    **where: Any,
) -> Iterator[None]:
    """The process group of this run: NCCL for tensors on a GPU, gloo for tensors on a CPU.

    The ranks meet as torchrun's environment says, or as `where` does: arguments of `init_process_group` (init_method,
    rank, world_size). A collective that takes longer than step_timeout_s ends the process (tensors on a GPU) or raises
    CollectiveError (tensors on a CPU; Python objects too, but a minute later if the device is a GPU). copy_engines:
    whether `peer_memory` may be used.

    Raises CollectiveError if the other ranks do not come within init_timeout_s. NCCL takes at most nccl_max_ctas thread
    blocks of a GPU. Raises ValueError if the environment sets another limit, or does not say where the ranks meet.
    """
    global _watchdog, _heartbeats, allows_copy_engines, timeout_s
    allows_copy_engines = copy_engines
    if nccl_max_ctas is not None:  # NCCL reads it once per process, when it first connects
        given = os.environ.setdefault("NCCL_MAX_CTAS", str(nccl_max_ctas))
        if given != str(nccl_max_ctas):
            raise ValueError(f"nccl_max_ctas is {nccl_max_ctas}: NCCL_MAX_CTAS is {given!r} in the environment")
    # gloo, beside NCCL, carries Python objects, which would otherwise wait for the GPU.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        where = where or rendezvous_arguments(init_timeout_s)
        dist.init_process_group(backend, timeout=timedelta(seconds=init_timeout_s), **where)
        with named("meeting of all ranks"):
            dist.barrier(device_ids=[device.index or 0] if device.type == "cuda" else None)
    except RuntimeError as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        raise CollectiveError(f"the ranks did not all meet within {init_timeout_s:g} s: {first_line(error)}") from error
    # Our watchdog must fire before NCCL's own, which does not know the step. gloo's timeout must fire before ours,
    # because gloo raises an error in the thread that waits.
    allowance = 60 if device.type == "cuda" else 0
    timeout_s = step_timeout_s + allowance
    c10d._set_pg_timeout(timedelta(seconds=timeout_s), dist.group.WORLD)
    _watchdog = Watchdog(step_timeout_s + (0 if allowance else 10), device)
    if "store" in where and world_size() > 1:  # the agents' store; others may end before this process
        _heartbeats = Heartbeats(where["store"], rank(), world_size(), step_timeout_s)
    try:
        yield
    except BaseException:
        _stop_watching()
        # Aborted, not destroyed: that would wait for transfers that the other ranks may not have sent.
        c10d._abort_process_group()
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


def awaiting(name: str) -> contextlib.AbstractContextManager[None]:
    """While active, this process ends if another rank's process stands still for longer than a step may take.

    For waits without a time limit, between ranks that an agent has started.
    """
    return _heartbeats.awaiting(name) if _heartbeats is not None else contextlib.nullcontext()


class Transfer:
    """A collective under way, returned by the `start_` functions.

    `wait` returns when its tensors may be used; on a GPU it only makes the current stream wait.
    """

    def __init__(self, name: str, works: Sequence[Any] = (), apply: Callable[[], None] | None = None) -> None:
        self.name, self.works, self.started = name, works, time.monotonic()
        self._apply = apply
        self._passed: torch.cuda.Event | None = None
        # A transfer that is recorded in a CUDA graph does not run now, and must not be asked whether it is done.
        recorded = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        self._watched = bool(works) and _watchdog is not None and not recorded
        if self._watched and _watchdog is not None:
            _watchdog.watch(self)

    def wait(self) -> None:
        with named(self.name):
            for work in self.works:
                work.wait()
        if self._apply is not None:
            self._apply()
        # Works and `apply` hold tensors, and the watchdog keeps this object for up to two seconds, which is many steps:
        # drop them. Transfers end in order, but each records its own event, so that one that hangs is reported by name.
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
    """Work on the GPU's queue, for the watchdog."""

    def __init__(self, name: str) -> None:
        self.name, self.started = name, time.monotonic()
        self.passed: torch.cuda.Event | None = None
        self.given_up = False

    def done(self) -> bool:
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
def watched(name: str) -> Iterator[None]:
    """Let the watchdog time all work that is queued inside, on the GPU's current stream, as one transfer.

    For transfers that it cannot see one by one, as in a CUDA graph. The time limit begins before they are queued.
    """
    if _watchdog is None or world_size() == 1:
        yield
        return
    queued = _Queued(name)
    _watchdog.watch(queued)
    try:
        yield
        queued.passed = _event_now()  # set only once recorded: before that, an event counts as passed
    except BaseException:
        queued.given_up = True  # the error itself is reported
        raise


def start_mean(
    tensors: Iterable[Tensor],
    name: str,
    communication_dtype: torch.dtype | None = None,
    by_copies: Callable[[list[Tensor], str], tuple[list[Any], list[Tensor]]] | None = None,
) -> Transfer:
    """Average tensors over all ranks, in place.

    With a communication_dtype they are sent in it. `by_copies` (`peer_memory.AllReduce.start`) starts what it can and
    leaves the other tensors. Raises ValueError for a sparse tensor.
    """
    tensors = [t for t in tensors if t.numel()]
    if world_size() == 1 or not tensors:
        return Transfer(name)
    check_dense(tensors, name)
    sent = [t.to(communication_dtype or t.dtype).contiguous() for t in tensors]  # the tensor itself if nothing changes
    works, rest = by_copies(sent, name) if by_copies else ([], sent)
    op = _divide_unless_averaged(rest) if rest else None
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for t in rest:
        by_dtype.setdefault(t.dtype, []).append(t)
    for group in by_dtype.values():
        if len(group) > 1 and (by_nccl(group[0].device) or not group[0].is_cuda):  # else one at a time
            works.append(_start("allreduce_coalesced", [group], c10d.AllreduceCoalescedOptions(), name, op))
        else:
            works += [_start("allreduce", [[t]], c10d.AllreduceOptions(), name, op) for t in group]

    def apply() -> None:
        for t, s in zip(tensors, sent, strict=True):
            if s is not t:
                t.copy_(s)

    return Transfer(name, works, apply)


def check_dense(tensors: Iterable[Tensor], name: str) -> None:
    """Raise ValueError for a sparse tensor."""
    if others := [t.layout for t in tensors if t.layout is not torch.strided]:
        raise ValueError(f"{name}: a tensor is {others[0]}: only dense ones can be averaged")


def _divide_unless_averaged(sent: Sequence[Tensor]) -> Any:
    """The operation that averages. gloo can only add, so its tensors are divided here, before a sum could overflow."""
    if by_nccl(sent[0].device):
        return dist.ReduceOp.AVG
    torch._foreach_div_(list(sent), world_size())
    return dist.ReduceOp.SUM


def start_all_gather(outputs: Sequence[Tensor], inputs: Sequence[Tensor], name: str) -> Transfer:
    """Fill each output (world_size * rows, ...) with the inputs (rows, ...) of all ranks, in rank order.

    All tensors have one dtype and are contiguous.
    """
    if world_size() == 1:
        torch._foreach_copy_(list(outputs), list(inputs))
        return Transfer(name)
    calls: Any = [(_ALL_GATHER_COALESCED, outputs, inputs)]
    if not by_nccl(outputs[0].device):  # two coalesced gathers under way corrupt gloo's heap (PyTorch 2.13)
        calls = [(_ALL_GATHER, *pair) for pair in zip(outputs, inputs, strict=True)]
    return Transfer(name, [_start(method, tensors, c10d.AllgatherOptions(), name) for method, *tensors in calls])


def start_reduce_scatter_mean(outputs: Sequence[Tensor], inputs: Sequence[Tensor], name: str) -> Transfer:
    """Average inputs (world_size * rows, ...) over all ranks and leave each rank its rows in output (rows, ...).

    All tensors have one dtype and are contiguous. The inputs must not be used afterwards.
    """
    if world_size() == 1:
        torch._foreach_copy_(list(outputs), list(inputs))
        return Transfer(name)
    op, options = _divide_unless_averaged(inputs), c10d.ReduceScatterOptions()
    return Transfer(name, [_start(_REDUCE_SCATTER_COALESCED, [outputs, inputs], options, name, op)])


def start_all_to_all(output: Tensor, sent: Tensor, received: list[int], parts: list[int], name: str) -> Transfer:
    """Send consecutive parts of a flat tensor to the ranks, and fill `output` with what they send, in rank order.

    parts, received: the elements that go to each rank, and that come from it. `sent` must stay until the wait.
    """
    if world_size() == 1:
        output.copy_(sent)
        return Transfer(name)
    return Transfer(name, [_start(_ALL_TO_ALL, [output, sent, received, parts], c10d.AllToAllOptions(), name)])


def start_broadcasts(sources: Iterable[tuple[Tensor, int]], name: str) -> Transfer:
    """Copy each tensor from its rank to all others; on NCCL all at once, so that all ranks send.

    A tensor's memory layout may differ between ranks. If it is expanded on all ranks, each element is sent once.
    `_coalescing_manager` and `dist.broadcast` would do the same in more host time.
    """
    calls = [(tensor, source) for tensor, source in sources if tensor.numel()]
    if world_size() == 1 or not calls:
        return Transfer(name)
    group, device = dist.group.WORLD, calls[0][0].device
    assert group is not None
    with named(name), torch._C._profiler._RecordFunctionFast(name):
        coalesced = by_nccl(device)
        if coalesced:
            group._start_coalescing(device)
        works, copies = [], []
        for tensor, source in calls:
            options = c10d.BroadcastOptions()
            options.rootRank, options.rootTensor, options.asyncOp = source, 0, True  # off the current stream
            if not tensor.is_contiguous():  # NCCL and gloo would send its memory, gaps included
                once = tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
                tensor = once.contiguous()
                copies.append((once, tensor))
            # As bytes, because a backend may not know the dtype; a single element may have any stride.
            works.append(group.broadcast([tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)], options))

        def apply() -> None:
            for tensor, dense in copies:
                tensor.copy_(dense)

        # Coalesced broadcasts share one work, which can be asked whether it is done.
        return Transfer(name, [group._end_coalescing(device)] if coalesced else works, apply if copies else None)


def by_nccl(device: torch.device) -> bool:
    """Whether NCCL carries tensors of this device. gloo can carry a GPU's too, but the host waits for each transfer."""
    return device.type == "cuda" and "cuda:nccl" in dist.get_backend_config()


_ALL_GATHER, _ALL_TO_ALL = "all_gather_single", "all_to_all_single"
_ALL_GATHER_COALESCED, _REDUCE_SCATTER_COALESCED = "all_gather_single_coalesced", "reduce_scatter_single_coalesced"
if not hasattr(dist.ProcessGroup, _ALL_GATHER):  # before PyTorch 2.13
    _ALL_GATHER, _ALL_TO_ALL = "_allgather_base", "alltoall_base"
    _ALL_GATHER_COALESCED, _REDUCE_SCATTER_COALESCED = (
        "allgather_into_tensor_coalesced",
        "reduce_scatter_tensor_coalesced",
    )


def _start(method: str, tensors: Sequence[Any], options: Any, name: str, op: Any = None) -> Any:
    """Start one collective for tensors, or lists of them.

    `_coalescing_manager` does the same in three times the host time.
    """
    options.asyncOp = True
    if op is not None:
        options.reduceOp = op
    with named(name), torch._C._profiler._RecordFunctionFast(name):
        return getattr(dist.group.WORLD, method)(*tensors, options)


def mean(tensors: Iterable[Tensor], name: str) -> None:
    """Average tensors over all ranks, in place, and wait for it."""
    start_mean(tensors, name).wait()


def broadcast(tensors: Iterable[Tensor], name: str) -> None:
    """Copy tensors from rank 0 to all others."""
    start_broadcasts([(tensor, 0) for tensor in tensors], name).wait()


def all_gather_objects(value: Any, name: str) -> list[Any]:
    """The values of all ranks, in rank order. They are pickled, so they should be small and of trusted types."""
    values: list[Any] = [value] * world_size()
    if world_size() > 1:
        with named(name):
            dist.all_gather_object(values, value)
    return values


def mean_weight(count: int) -> float:
    """The factor for a rank's mean loss over `count` tokens that makes gradients those of the mean over all tokens.

    It is world_size * count / (count of all ranks), because gradients are averaged over ranks with equal weights; 1.0
    if all counts are 0. All ranks call it together.
    """
    total = sum(all_gather_objects(count, "count of tokens"))
    return world_size() * count / total if total else 1.0


def barrier(name: str) -> None:
    """Return when all ranks have reached this call."""
    all_gather_objects(None, name)


def check_same(facts: dict[str, Any], kind: str) -> None:
    """Raise ValueError on all ranks if a rank's facts, or their order, differ from rank 0's. The message names them."""
    missing = "nothing"
    first, *others = all_gather_objects(facts, f"comparison of {kind}")
    for other, theirs in enumerate(others, start=1):
        differing = [
            f"{name} is {theirs.get(name, missing)} on rank {other} and {first.get(name, missing)} on rank 0"
            for name in {**first, **theirs}
            if theirs.get(name, missing) != first.get(name, missing)
        ]
        for i, (name, here) in enumerate(zip(theirs, first, strict=False)):
            if not differing and name != here:
                differing.append(f"number {i} is {name} on rank {other} and {here} on rank 0")
        if differing:
            more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
            raise ValueError(f"the ranks have different {kind}: {'; '.join(differing[:3])}{more}")
