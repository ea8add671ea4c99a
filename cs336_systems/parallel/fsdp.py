"""Fully sharded data parallelism: every rank keeps a shard of each weight, and the whole weight only while it computes.

ZeRO stage 3 (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models") in the
form of PyTorch FSDP (Zhao et al. 2023). `fsdp_simple.py` is the same without prefetching. `fsdp_param_group.py` sends
and receives, `fsdp_prefetch.py` decides when.

One step. `_root_pre_forward` begins the forward schedule. For each module, `_pre_forward` waits for its weights and
prefetches the next ones; `_post_forward` reshards them and hooks its outputs. `_pre_backward`, from those hooks, does
the same in reverse order. `_post_accumulate_grad` counts gradients and reduce-scatters complete groups.
`_root_post_backward` reduces the remaining groups and reshards all.

Streams. An NCCL collective starts after the work queued on the current stream so far, and `wait` makes the current
stream wait for it. Buffers are allocated and freed on the current stream, and freed only after that wait, so the
caching allocator reuses them in order. `record_stream`, which would keep the memory for longer, is not needed.
"""

from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from . import comm
from .fsdp_modules import EMBEDDINGS
from .fsdp_param_group import GUARDED, SHARDED, UNSHARDED, ParamGroup, shard_module
from .fsdp_prefetch import PrefetchSchedule, ScheduleStep
from .strategy import Strategy, UsedParameters, check_communication_dtype, weak_hook


class FSDP(Strategy):
    """The weights of Linear and Embedding are sharded by rows over all ranks; all other parameters are replicated.

    A weight (rows, ...) is divided as torch.chunk and DTensor's Shard(0) do: ceil(rows / world_size) rows per rank, and
    fewer or none on the last ranks. After wrapping, the module's parameter is this rank's shard. It stays the same
    object and keeps its dtype: the shards are the master weights that the optimizer sees. Their gradients are shards of
    that dtype too.

    A parameter group is the weights of one element of an nn.ModuleList (a Transformer block), and elsewhere the weights
    of one module. While a group computes, forward or backward, the next one is prefetched, so at most two are unsharded
    at a time, unless they are to stay so. Gradients are reduce-scattered as soon as a group has all of them, and waited
    for when the next group's are sent, or when backward ends.

    reshard_after_forward: with False, weights that backward needs stay whole until it has passed them, and are gathered
    once in a step instead of twice (ZeRO stage 2; SHARD_GRAD_OP in Zhao et al.). If backward never comes, they stay
    until the next forward or `finish_gradient_synchronization`.
    compute_dtype (PyTorch: param_dtype): shards are cast to it before they are sent, and weights and their gradients
    have it in computation. Replicated parameters keep their dtype, and inputs are not cast. Under autocast give the
    same dtype; otherwise autocast keeps its own copies of all weights until backward is over.
    grad_dtype (PyTorch: reduce_dtype): the dtype in which gradients are sent (default: their own).

    Accumulation: gradients are averaged after each backward, also inside `no_sync`, and summed as shards, because the
    sum of means is the mean of sums. Whole gradients would take as much memory as sharding saves.

    Limits:

    - Calls. Ranks may use different weights, but must make the same calls of forward and backward. In the first
      forward, which teaches the order of modules, they may use different weights only if modules are registered in that
      order. In one backward of several forwards, all ranks must use the outputs of each.
    - Access. Modules hold whole weights only inside their own calls and their backward. In that first forward, using a
      weight elsewhere raises RuntimeError. A module called between a forward and its backward may see weights gathered
      by that forward, even if they have changed since.
    - Compiling and checkpointing. A block may be compiled or checkpointed inside (its `forward` replaced, before or
      after wrapping), or checkpointed from outside with use_reentrant=False (otherwise backward raises RuntimeError).
      If several blocks are checkpointed together, all ranks must use the same ones.
    - Outputs. A module must return everything that the loss takes from it, in tensors, tuples, lists or dicts, which
      must not be modified in place afterwards. If the loss took it from an attribute, or from inside another class,
      backward would reach weights that have not been gathered.
    - Gradients. Freeze or unfreeze parameters before wrapping. Gradients of gradients (create_graph) are not supported.
      Hooks on a sharded parameter are not called with its gradients.

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
        self._reshards = reshard_after_forward
        self._gathered = shard_module(module, compute_dtype, grad_dtype)
        self._groups = list(dict.fromkeys(group for gathered in self._gathered for group in gathered.groups))
        self._params = {id(p.shard): p for group in self._groups for p in group.params}
        self._group_of_full = {id(p.full): (group, p) for group in self._groups for p in group.trainable}
        self._trainable = self.trainable()
        self._frozen = [p for p in self.module.parameters() if not p.requires_grad]
        self._flags = UsedParameters(self._trainable)
        self._plan(list(range(len(self._gathered))))
        self._order_known = False  # learned in the first forward pass
        self._grad_order_known = False  # learned again in the first one with gradients
        # Modules called in a pass whose order is not known, and whether backward reaches them.
        self._called_modules: list[tuple[int, bool]] = []
        self._forward: PrefetchSchedule | None = None  # of the forward pass under way
        self._forwards = 0  # forward passes that have begun
        self._kept: set[ParamGroup] = set()  # groups that the forward pass leaves unsharded
        self._backward: PrefetchSchedule | None = None  # of the backward pass under way
        self._backward_forward_id: int | None = None  # the forward pass that it has reached
        self._graph_task = -1  # autograd's id of that backward pass, -1 without one
        self._recompute_task = -1  # id of the last backward pass in which checkpointing called a module again
        self._used_is_marked = False  # whether `_mark_used` was called in this step
        self._group_in_reduction: ParamGroup | None = None
        self._guarded = False  # whether modules hold `ShardedGuard`s in place of their shards
        for group in self._groups:
            for p in group.trainable:
                p.full.register_post_accumulate_grad_hook(weak_hook(self._post_accumulate_grad))
        # Hooks rather than a new `forward`: they run outside of anything that compiles or checkpoints the forward.
        outside = torch.compiler.disable
        module.register_forward_pre_hook(outside(self._root_pre_forward))
        for number, gathered in enumerate(self._gathered):
            gathered.module.register_forward_pre_hook(outside(partial(self._pre_forward, number)))
            gathered.module.register_forward_hook(outside(partial(self._post_forward, number)), always_call=True)
        module.register_forward_hook(outside(self._root_post_forward))
        module.register_forward_hook(outside(self._remove_guards), always_call=True)

    # -- forward ------------------------------------------------------------------------------------------------------

    def _root_pre_forward(self, module: nn.Module, inputs: Any) -> None:
        if _in_backward():  # the recompute of checkpointing
            return
        self._reset()  # groups left unsharded are of an older pass, and may have changed since
        if torch.is_grad_enabled() and not self._reshards:
            self._kept = self._for_backward
        self._forward = PrefetchSchedule(self._forward_steps, keep=self._kept)
        self._forwards += 1
        self._called_modules = []
        if not self._grad_order_known:
            for group in self._groups:
                group.install(GUARDED)
            self._guarded = True

    def _pre_forward(self, number: int, module: nn.Module, inputs: Any) -> None:
        gathered = self._gathered[number]
        if _in_backward():
            self._recompute_task = torch._C._current_graph_task_id()
        else:
            gathered.called_at = torch.autograd._get_sequence_nr()
        in_turn = not _in_backward() and self._forward is not None and self._forward.visit(number)
        if not in_turn:
            gathered.unshard()  # not scheduled: all ranks must call it alike
        gathered.install(UNSHARDED)

    def _post_forward(self, number: int, module: nn.Module, inputs: Any, output: Any) -> None:
        if _in_backward():
            return  # keep the weights: their gradients come next
        gathered = self._gathered[number]
        gathered.install(GUARDED if self._guarded else SHARDED)
        # An output that is an input handed on is left out: its backward belongs to the module that computed it.
        pre_backward = partial(self._pre_backward, number, self._forwards)
        reached = _before_backward(output, pre_backward, since=gathered.called_at)
        if not self._grad_order_known:
            self._called_modules.append((number, reached))
        if self._forward is None or not self._forward.is_at(number):
            for group in gathered.groups:
                if group not in self._kept:
                    group.reshard()
        elif not (self._forward.at_end() and torch.is_grad_enabled()):  # backward needs the last module first: keep it
            self._forward.leave()

    def _root_post_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if _in_backward() or self._forward is None:
            return
        self._forward.to_end()
        if torch.is_grad_enabled():
            _before_backward(output, partial(self._enter_backward, self._forwards))
        else:
            self._forward.leave()
        self._forward = None
        if not (self._grad_order_known if torch.is_grad_enabled() else self._order_known):
            self._learn()

    def _remove_guards(self, *_: Any) -> None:
        """Give the modules their shards again after the first forward pass, also if it has failed."""
        if self._guarded and not _in_backward():
            self._guarded = False
            for group in self._groups:
                group.install(SHARDED)

    def _learn(self) -> None:
        """Agree with all ranks on the order of the first forward pass, and of the first one with gradients."""
        everyone = comm.gather_objects(self._called_modules, "the order of the parameter groups")
        # The longest pass gives the order; modules that it did not call are inserted beside their neighbours.
        order = [number for number, _ in max(everyone, key=len)]
        for number in set(range(len(self._gathered))).difference(order):
            _insert_uncalled_module(order, number, [gathered.name.rpartition(".")[0] for gathered in self._gathered])
        self._order_known = True
        self._grad_order_known = self._grad_order_known or torch.is_grad_enabled()
        if order != [step.number for step in self._forward_steps]:
            self._reset()
        self._plan(order, {number for called in everyone for number, reached in called if reached})

    def _plan(self, order: list[int], reached: Container[int] = ()) -> None:
        """Plan the steps of forward, and those of backward as far back as it may go on any rank."""
        modules = self._gathered
        self._forward_steps = [ScheduleStep(number, modules[number].groups, []) for number in order]
        in_backward = [number in reached or modules[number].trains for number in order]
        seen: set[ParamGroup] = set()
        self._backward_steps: list[ScheduleStep] = []
        for number in order[in_backward.index(True) if True in in_backward else len(order) :]:
            groups = modules[number].groups
            due = [group for group in groups if group.trainable and group not in seen]
            seen.update(due)
            # The backward of an embedding needs the indices, not the weight.
            needed = [] if isinstance(modules[number].module, EMBEDDINGS) else groups
            self._backward_steps.insert(0, ScheduleStep(number, needed, due))
        self._for_backward = {group for step in self._backward_steps for group in step.needed}

    # -- backward -----------------------------------------------------------------------------------------------------

    def _enter_backward(self, forward: int | None = None) -> None:
        """Begin or continue a backward pass. `forward` is the number of the forward pass that it reaches, if known."""
        task = torch._C._current_graph_task_id()
        if task == self._graph_task:
            self._continue_backward(forward)
        else:
            self._begin_backward(task, forward)

    def _continue_backward(self, forward: int | None) -> None:
        self._recompute_task = -1  # the recomputed module has its backward in this pass
        if self._backward is not None and forward is not None:
            # One backward of two forwards reaches the later one first.
            if self._backward_forward_id not in (None, forward):
                self._backward.restart()
            self._backward_forward_id = forward

    def _begin_backward(self, task: int, forward: int | None) -> None:
        if self._graph_task != -1 and self._recompute_task == self._graph_task:  # a backward pass inside of another one
            raise RuntimeError("a module in fsdp is checkpointed with use_reentrant=True, which gives wrong gradients: "
                               "it must be use_reentrant=False; or a backward pass failed while it recomputed a block: "
                               "call zero_grad of the fsdp module first")  # fmt: skip
        # Keep the groups that forward has left unsharded, unless an earlier backward was aborted.
        self._reset(keep=self._graph_task == -1)
        self._mark_used()
        self._graph_task, self._backward_forward_id = task, forward
        self._backward = PrefetchSchedule(self._backward_steps, self._reduce)
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._root_post_backward)

    def _pre_backward(self, number: int, forward: int) -> None:
        """Backward reaches a module. Autograd goes in the reverse order of forward, so later modules are done."""
        self._enter_backward(forward)
        assert self._backward is not None
        if not self._backward.is_at(number) and not self._backward.visit(number) and self._backward.knows(number):
            self._backward.restart()  # called more often than in the pass that taught the order
            self._backward.visit(number)
        gathered = self._gathered[number]
        if not isinstance(gathered.module, EMBEDDINGS):
            gathered.unshard()
            gathered.install(UNSHARDED)  # checkpointing recomputes the forward, with the module's weights

    def _post_accumulate_grad(self, full: Tensor) -> None:
        self._enter_backward()
        group, p = self._group_of_full[id(full)]
        p.used = True
        group.num_gradients += 1
        if self._backward is not None:
            self._backward.send_ready()

    def _reduce(self, group: ParamGroup) -> None:
        """The post-backward of a group: send its gradients."""
        # Wait for the previous group's gradients only now: their reduce-scatter overlapped this group's backward.
        self._wait_for_gradients()
        group.reduce_gradients()
        self._group_in_reduction = group

    def _wait_for_gradients(self) -> None:
        if self._group_in_reduction is not None:
            self._group_in_reduction.wait_for_gradients()
            self._group_in_reduction = None

    def _root_post_backward(self) -> None:
        """Go to the end of the schedule, as other ranks may have, and send gradients that came after their turn."""
        if self._backward is None:
            return
        self._backward.to_end()
        for step in self._backward_steps:
            for group in step.due:
                if group.num_gradients or not group.reduced:
                    self._reduce(group)
        self._wait_for_gradients()  # whoever drops the gradients next, even an optimizer's zero_grad, drops all of them
        self._backward, self._graph_task = None, -1
        for group in self._groups:
            group.reshard()
            group.forget_backward()

    def _reset(self, keep: bool = False) -> None:
        """Discard a pass that was aborted, and reshard all groups, unless they are to be kept."""
        self._forward, self._kept = None, set()
        self._remove_guards()
        aborted = self._graph_task != -1
        if aborted:
            self._used_is_marked = False  # the aborted pass does not count as a use
            if self._group_in_reduction is not None:
                self._group_in_reduction.drop_gradients()
                self._group_in_reduction = None
        for group in () if keep else self._groups:
            group.reshard()
            if aborted:
                group.forget_backward()
        self._backward, self._graph_task = None, -1

    # -- the contract -------------------------------------------------------------------------------------------------

    def finish_gradient_synchronization(self) -> None:
        """Average the replicated gradients. All groups are resharded."""
        self._reset()
        # Buffers and hooks are made for the parameters that were trainable at wrapping.
        unfrozen = {p for p in self._frozen if p.requires_grad}
        frozen = {p for p in self._trainable if not p.requires_grad}
        for name, parameter in self.module.named_parameters() if unfrozen or frozen else ():
            if parameter in unfrozen or parameter in frozen:
                was, now = ("frozen", "is not now") if parameter in unfrozen else ("trainable", "is frozen now")
                raise ValueError(f"{name} was {was} when its module was wrapped and {now}: change that "
                                 "before, or wrap the module again")  # fmt: skip
        self._mark_used()
        self._used_is_marked = False
        if not self._trainable:
            return
        flags = self._flags.fill_missing_gradients(self._is_unused)
        replicated = [p.grad for p in self._trainable if id(p) not in self._params and p.grad is not None]
        comm.start_mean([*replicated, flags], "mean of the replicated gradients", self.grad_dtype).wait()
        self._flags.drop_unused_gradients()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and forget which weights were used and a backward pass that was aborted."""
        if self._graph_task != -1:
            self._reset()
        self._used_is_marked = False
        super().zero_grad(set_to_none)

    def _is_unused(self, parameter: nn.Parameter) -> bool:
        p = self._params.get(id(parameter))
        return parameter.grad is None if p is None else not p.used

    def _mark_used(self) -> None:
        """Once per step, before its gradients come: a weight that has a gradient keeps it, whoever uses it now."""
        if not self._used_is_marked:
            self._used_is_marked = True
            for p in self._params.values():
                p.used = p.shard.grad is not None

    def gather_full_params(self) -> dict[str, Tensor]:
        """Every parameter whole, in the dtype of the master weights, by its name; replicated ones as they are.

        All ranks call it together.
        """
        named = dict(self.module.named_parameters(remove_duplicate=False))
        whole = self._gather_whole(list(named.values()), lambda tensor: tensor)
        return {name: whole[p] for name, p in named.items()}

    def _gather_whole(self, parts: Sequence[Tensor], keep: Callable[[Tensor], Tensor]) -> dict[Tensor, Tensor]:
        whole = super()._gather_whole([part for part in parts if id(part) not in self._params], keep)
        for group in self._groups:
            whole |= group.gather_full(keep)
        return whole

    def shards(self) -> dict[str, tuple[torch.Size, int]]:
        """The sharded parameters by name: the whole shape, and the first row that this rank has."""
        named = self.module.named_parameters(remove_duplicate=False)
        params = {name: self._params[id(p)] for name, p in named if id(p) in self._params}
        return {name: (p.shape, p.first_row) for name, p in params.items()}

    def gathered_bytes(self) -> int:
        """Bytes of the groups that are unsharded or being gathered."""
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


def _before_backward(output: Any, hook: Callable[[], None], since: int = 0) -> bool:
    """Call `hook` when the gradient of a tensor in output is ready, before backward goes on into its computation.

    Only for tensors computed since autograd's counter of operations was at `since`. Returns whether there are any.
    """
    tensors = [output] if isinstance(output, Tensor) else tree_leaves(output)
    tensors = [t for t in tensors if isinstance(t, Tensor) and t.requires_grad] if torch.is_grad_enabled() else []
    tensors = [t for t in tensors if t.grad_fn is not None and t.grad_fn._sequence_nr() >= since]
    for tensor in tensors:
        tensor.register_hook(lambda _: hook())
    return bool(tensors)


def _insert_uncalled_module(order: list[int], number: int, parents: list[str]) -> None:
    """Insert a module that was not called beside its neighbours in the same list, or in order of registration."""
    near = [other for other in order if parents[other] == parents[number]] if parents[number] else []
    near = near or order
    if before := [other for other in near if other < number]:
        order.insert(len(order) - order[::-1].index(max(before)), number)
    else:
        order.insert(order.index(min(near)) if near else 0, number)
