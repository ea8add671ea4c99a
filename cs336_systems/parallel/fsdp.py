"""Fully sharded data parallelism: every rank keeps a shard of each weight, and the whole weight only while it computes.

ZeRO stage 3 (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models") in the
form of PyTorch FSDP (Zhao et al. 2023). `fsdp_simple.py` is the same without prefetching. `fsdp_param_group.py` sends
and receives, `fsdp_prefetch.py` decides when.

One step. `_root_pre_forward` begins the forward schedule. For each module, `_pre_forward` waits for its weights and
prefetches the next ones; `_post_forward` reshards them and hooks its outputs. `_pre_backward`, from those hooks, does
the same in reverse order. `_post_accumulate_grad` counts gradients and reduce-scatters complete groups.
`_root_post_backward` reduces the remaining groups and reshards all.

GPUs that reach each other's memory send by their copy engines (`peer_memory.py`), others by NCCL.

Streams. An NCCL collective or a copy starts after the work queued on the current stream so far, and `wait` makes the
current stream wait for it. Buffers are allocated and freed on the current stream, and freed only after that wait, so
the caching allocator reuses them in order. `record_stream`, which would keep the memory for longer, is not needed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from . import comm
from .fsdp_modules import EMBEDDINGS, describe_shards
from .fsdp_param_group import GUARDED, SHARDED, UNSHARDED, shard_module
from .fsdp_prefetch import PrefetchSchedule, insert_uncalled_modules, plan_backward, plan_forward
from .strategy import Strategy, UsedParameters, check_communication_dtype, weak_hook


@dataclass
class ForwardPass:
    """State of one forward pass."""

    schedule: PrefetchSchedule
    number: int
    records_order: bool
    """Whether the pass records the order of the modules. Until it ends, they hold a `ShardedGuard` for each shard."""
    called: list[tuple[int, bool]] = field(default_factory=list)
    """The modules in the order of their calls, and whether backward reaches them."""


@dataclass
class BackwardPass:
    """State of one backward pass."""

    schedule: PrefetchSchedule
    graph_task_id: int
    """Autograd's ID of the pass."""
    forward_number: int | None
    """Number of the forward pass that it has reached, if known."""
    recomputes: bool = False
    """Whether checkpointing has called a module again that backward has not reached yet."""


class FSDP(Strategy):
    """The weights of Linear and Embedding are sharded by rows over all ranks; all other parameters are replicated.

    A weight (rows, ...) is divided as torch.chunk and DTensor's Shard(0) do. After wrapping, the module's parameter is
    this rank's shard. It stays the same object of the same dtype, and its gradient is a shard too.

    A parameter group is the weights of one element of an nn.ModuleList (a Transformer block), and elsewhere the weights
    of one module. While a group computes, forward or backward, the next one is prefetched, so at most two are unsharded
    at a time. Gradients are reduce-scattered as soon as a group has all of them.

    reshard_after_forward: with False, weights that backward needs stay whole until it has passed them, and are gathered
    once in a step instead of twice (ZeRO stage 2; SHARD_GRAD_OP in Zhao et al.).
    compute_dtype (PyTorch: param_dtype): the dtype of weights in communication and computation, and of their gradients
    (default: their own). Replicated parameters keep their dtype, and inputs are not cast. Under autocast give the same
    dtype; otherwise autocast keeps its own copies of all weights until backward is over.
    grad_dtype (PyTorch: reduce_dtype): the dtype in which gradients are sent (default: compute_dtype).

    Gradients are averaged after each backward, also inside `no_sync`, and summed as shards, because whole gradients
    would take as much memory as sharding saves.

    Limits:

    - Calls. Ranks may use different weights, but must make the same calls of forward and backward. The first forward
      with gradients teaches the order of modules. Up to then, ranks may use different weights only if modules are
      registered in the order of their calls. In one backward of several forwards, all ranks must use each one's
      outputs.
    - Access. Modules hold whole weights only inside their own calls and their backward. In that first forward, using a
      weight elsewhere raises RuntimeError. A module called between a forward and its backward may see weights gathered
      by that forward, even if they have changed since.
    - Compiling and checkpointing. A block may be compiled or checkpointed inside (its `forward` replaced), or
      checkpointed from outside with use_reentrant=False (otherwise backward raises RuntimeError). If several blocks are
      checkpointed together, all ranks must use the same ones.
    - Outputs. A module must return everything that the loss takes from it, in tensors, tuples, lists or dicts, which
      must not be modified in place afterwards. Otherwise backward would reach weights that have not been gathered.
    - Gradients. Freeze or unfreeze parameters before wrapping. Gradients of gradients (create_graph) are not supported.
      Hooks on a sharded parameter are not called with its gradients.
    - Writing. Call `finish_gradient_synchronization`, or a barrier of all ranks, before you change weights. Until then
      other ranks may read this one's shards.

    Raises ValueError if the ranks' modules differ, and for sparse gradients and max_norm of nn.Embedding.
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        grad_dtype: torch.dtype | None = None,
        reshard_after_forward: bool = True,
    ) -> None:
        check_communication_dtype("compute_dtype", compute_dtype)
        super().__init__(module, grad_dtype)
        # Fixed when the module is wrapped.
        self._reshards = reshard_after_forward
        self._fsdp_modules = shard_module(module, compute_dtype, grad_dtype)
        self._groups = list(dict.fromkeys(group for fsdp_module in self._fsdp_modules for group in fsdp_module.groups))
        self._params = {p.shard: p for group in self._groups for p in group.params}
        self._group_and_param = {p.full: (group, p) for group in self._groups for p in group.trainable}
        self._trainable = self.trainable()
        self._frozen = [p for p in self.module.parameters() if not p.requires_grad]
        self._used = UsedParameters(self._trainable)
        self._num_forwards = 0
        self._peers = next((group.peers for group in self._groups if group.peers is not None), None)
        # The order of registration, which the first forward pass with gradients replaces by the order of the calls.
        self._order_known = False
        self._order = list(range(len(self._fsdp_modules)))
        self._forward_steps = plan_forward(self._fsdp_modules, self._order)
        self._backward_steps = plan_backward(self._fsdp_modules, self._order)
        # For one step.
        self._used_is_marked = False  # whether `_mark_used` was called
        # For one pass.
        self._forward: ForwardPass | None = None
        self._backward: BackwardPass | None = None
        for group in self._groups:
            for p in group.trainable:
                p.full.register_post_accumulate_grad_hook(weak_hook(self._post_accumulate_grad))
        # Hooks rather than a new `forward`: they run outside of anything that compiles or checkpoints the forward.
        outside = torch.compiler.disable
        module.register_forward_pre_hook(outside(self._root_pre_forward))
        for number, fsdp_module in enumerate(self._fsdp_modules):
            fsdp_module.module.register_forward_pre_hook(outside(partial(self._pre_forward, number)))
            fsdp_module.module.register_forward_hook(outside(partial(self._uninstall, number)), always_call=True)
            fsdp_module.module.register_forward_hook(outside(partial(self._post_forward, number)))
        module.register_forward_hook(outside(self._root_post_forward))
        module.register_forward_hook(outside(self._end_forward), always_call=True)

    # -- forward ------------------------------------------------------------------------------------------------------

    def _root_pre_forward(self, module: nn.Module, inputs: Any) -> None:
        if _in_backward():  # the recompute of checkpointing
            return
        self._reset()  # groups that are still unsharded have the weights of an older pass
        if torch.is_grad_enabled() and not self._reshards:
            for step in self._backward_steps:
                for group in step.needed:
                    group.kept = True
        self._num_forwards += 1
        self._barrier()
        schedule = PrefetchSchedule(self._forward_steps)
        self._forward = ForwardPass(schedule, self._num_forwards, records_order=not self._order_known)
        if self._forward.records_order:
            for group in self._groups:
                group.install(GUARDED)

    def _pre_forward(self, number: int, module: nn.Module, inputs: Any) -> None:
        fsdp_module = self._fsdp_modules[number]
        in_turn = False
        if not _in_backward():
            fsdp_module.called_at = torch.autograd._get_sequence_nr()
            in_turn = self._forward is not None and self._forward.schedule.visit(number)
        elif self._backward is not None:  # use_reentrant=True begins a second backward next: `_begin_backward` refuses
            self._backward.recomputes = self._backward.graph_task_id == torch._C._current_graph_task_id()
        if not in_turn:
            if self._forward is None and not _in_backward():
                self._barrier()
            fsdp_module.unshard()  # not scheduled: all ranks must call it alike
        fsdp_module.install(UNSHARDED)

    def _barrier(self) -> None:
        """Wait for all ranks, so that none reads weights that another one still updates.

        No rank updates weights that another still reads, because all ranks average the replicated gradients before.
        """
        if self._peers is not None:
            self._peers.barrier()

    def _uninstall(self, number: int, *_: Any) -> None:
        """Take the whole weights out of a module, also if its call has failed."""
        if not _in_backward():  # there their gradients come next
            is_recording = self._forward is not None and self._forward.records_order
            self._fsdp_modules[number].install(GUARDED if is_recording else SHARDED)

    def _post_forward(self, number: int, module: nn.Module, inputs: Any, output: Any) -> None:
        if _in_backward():
            return
        fsdp_module, forward = self._fsdp_modules[number], self._forward
        # An input that the module returns unchanged gets no hook: its backward belongs to the module that computed it.
        pre_backward = partial(self._pre_backward, number, self._num_forwards)
        reached = _register_pre_backward_hooks(output, pre_backward, since=fsdp_module.called_at)
        if forward is not None:
            forward.called.append((number, reached))
        if forward is None or not forward.schedule.is_at(number):
            for group in fsdp_module.groups:
                if not group.kept:
                    group.reshard()
        elif not (forward.schedule.at_end() and torch.is_grad_enabled()):  # backward needs the last module first
            forward.schedule.leave()

    def _root_post_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        forward = self._forward
        if _in_backward() or forward is None:
            return
        forward.schedule.to_end()
        if not torch.is_grad_enabled():
            forward.schedule.leave()
            return
        _register_pre_backward_hooks(output, partial(self._enter_backward, forward.number))
        if forward.records_order:
            self._learn_order(forward.called)

    def _end_forward(self, *_: Any) -> None:
        """End a forward pass, also one that has failed, and give the modules their shards again."""
        if self._forward is not None and self._forward.records_order:
            for group in self._groups:
                group.install(SHARDED)
        self._forward = None

    def _learn_order(self, called: list[tuple[int, bool]]) -> None:
        """Agree with all ranks on the order of modules, and on how far back backward goes."""
        everyone = comm.all_gather_objects(called, "the order of the parameter groups")
        order = [number for number, _ in max(everyone, key=len)]  # of the rank that called most
        insert_uncalled_modules(order, self._fsdp_modules)
        if order != self._order:
            self._reset()  # the last group, kept for backward, may not be the last of the new order
        reached = {number for of_rank in everyone for number, is_reached in of_rank if is_reached}
        self._order_known, self._order = True, order
        self._forward_steps = plan_forward(self._fsdp_modules, order)
        self._backward_steps = plan_backward(self._fsdp_modules, order, reached)

    # -- backward -----------------------------------------------------------------------------------------------------

    def _enter_backward(self, forward_number: int | None = None) -> BackwardPass:
        """Begin or continue a backward pass that reaches this forward pass, if its number is known."""
        backward, graph_task_id = self._backward, torch._C._current_graph_task_id()
        if backward is None or backward.graph_task_id != graph_task_id:
            return self._begin_backward(graph_task_id, forward_number)
        backward.recomputes = False
        if forward_number is not None:
            # One backward of two forwards reaches the later one first.
            if backward.forward_number not in (None, forward_number):
                backward.schedule.restart()
            backward.forward_number = forward_number
        return backward

    def _begin_backward(self, graph_task_id: int, forward_number: int | None) -> BackwardPass:
        if self._backward is not None:  # it was aborted, or this one is inside of it
            if self._backward.recomputes:
                raise RuntimeError(
                    "a module in fsdp is checkpointed with use_reentrant=True, which gives wrong gradients: it must be "
                    "use_reentrant=False; or a backward pass failed while it recomputed a block: call zero_grad of the "
                    "fsdp module first"
                )
            self._reset()
        self._end_forward()
        for group in self._groups:
            group.kept = False  # this pass reshards it
        self._mark_used()
        self._backward = BackwardPass(PrefetchSchedule(self._backward_steps), graph_task_id, forward_number)
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._root_post_backward)
        return self._backward

    def _pre_backward(self, number: int, forward_number: int) -> None:
        """Backward reaches a module. Autograd goes in the reverse order of forward, so later modules are done."""
        schedule = self._enter_backward(forward_number).schedule
        if not schedule.is_at(number):
            schedule.visit_again(number)
        fsdp_module = self._fsdp_modules[number]
        if not isinstance(fsdp_module.module, EMBEDDINGS):
            fsdp_module.unshard()
            fsdp_module.install(UNSHARDED)  # checkpointing recomputes the forward, with the module's weights

    def _post_accumulate_grad(self, full: nn.Parameter) -> None:
        backward = self._enter_backward()
        group, p = self._group_and_param[full]
        p.used = True
        group.num_gradients += 1
        backward.schedule.send_ready()

    def _root_post_backward(self) -> None:
        if self._backward is None:
            return
        # Wait for all gradients now, so that an optimizer's zero_grad drops all of them.
        self._backward.schedule.finish_gradients()
        self._backward = None
        for group in self._groups:
            group.reshard()
            group.forget_backward()

    def _reset(self) -> None:
        """Discard a pass that was aborted, and reshard all groups."""
        self._end_forward()
        for group in self._groups:
            group.reshard()
        if self._backward is not None:
            self._used_is_marked = False  # the aborted pass does not count as a use
            self._backward.schedule.drop_gradients()
            for group in self._groups:
                group.forget_backward()
            self._backward = None

    # -- the contract -------------------------------------------------------------------------------------------------

    def finish_gradient_synchronization(self) -> None:
        """Average the replicated gradients. All groups are resharded."""
        self._reset()
        # Buffers and hooks are made for the parameters that were trainable at wrapping.
        changed = {p for p in self._frozen if p.requires_grad} | {p for p in self._trainable if not p.requires_grad}
        for name, p in self.module.named_parameters() if changed else ():
            if p in changed:
                was, now = ("frozen", "is not now") if p.requires_grad else ("trainable", "is frozen now")
                raise ValueError(f"{name} was {was} when its module was wrapped and {now}: change that "
                                 "before, or wrap the module again")  # fmt: skip
        self._mark_used()
        self._used_is_marked = False
        if not self._trainable:
            return
        flags = self._used.fill_missing_gradients(
            lambda p: not self._params[p].used if p in self._params else p.grad is None
        )
        replicated = [p.grad for p in self._trainable if p not in self._params and p.grad is not None]
        comm.start_mean([*replicated, flags], "mean of the replicated gradients", self.grad_dtype).wait()
        self._used.drop_unused_gradients()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and forget which weights were used and a backward pass that was aborted."""
        if self._backward is not None:
            self._reset()
        self._used_is_marked = False
        super().zero_grad(set_to_none)

    def _mark_used(self) -> None:
        """Once per step, before backward: count a weight as used if it has a gradient from before."""
        if not self._used_is_marked:
            self._used_is_marked = True
            for p in self._params.values():
                p.used = p.shard.grad is not None

    def gather_full_params(self) -> dict[str, Tensor]:
        """Every parameter whole, in its own dtype, by its name. All ranks call it together."""
        named = dict(self.module.named_parameters(remove_duplicate=False))
        whole = self._gather_whole(list(named.values()), lambda tensor: tensor)
        return {name: whole[p] for name, p in named.items()}

    def _gather_whole(self, parts: Sequence[Tensor], keep: Callable[[Tensor], Tensor]) -> dict[Tensor, Tensor]:
        whole = super()._gather_whole([part for part in parts if part not in self._params], keep)
        for group in self._groups:
            whole |= group.gather_full(keep)
        return whole

    def shards(self) -> dict[str, tuple[torch.Size, int]]:
        return describe_shards(self.module, self._params)

    def gathered_bytes(self) -> int:
        return sum(group.unsharded.nbytes for group in self._groups if group.unsharded.is_allocated())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FSDP":
        # `to`, `half` and `cuda` call this. Groups keep buffers of the dtype and on the device that they began with.
        for name, p in self.module.named_parameters():
            other = fn(p.detach()[:0] if p.ndim else p.detach())
            if (other.dtype, other.device) != (p.dtype, p.device):
                raise ValueError(f"{name} would become {other.dtype} on {other.device} from {p.dtype} on {p.device}: "
                                 "cast and move a module before fsdp goes around it")  # fmt: skip
        return super()._apply(fn, recurse)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _register_pre_backward_hooks(output: Any, hook: Callable[[], Any], since: int = 0) -> bool:
    """Call `hook` in backward when the gradient of a tensor in `output` is ready, before it is used.

    Leaves out tensors from before autograd's sequence number `since`. Returns whether there are others.
    """
    tensors = [output] if isinstance(output, Tensor) else tree_leaves(output)
    tensors = [t for t in tensors if isinstance(t, Tensor) and t.requires_grad] if torch.is_grad_enabled() else []
    tensors = [t for t in tensors if t.grad_fn is not None and t.grad_fn._sequence_nr() >= since]

    def call(gradient: Tensor) -> None:
        hook()

    for tensor in tensors:
        tensor.register_hook(call)
    return bool(tensors)
