"""Fully sharded data parallelism: every rank keeps a shard of each weight, and a whole one only while it computes.

ZeRO stage 3 (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models") in the
form of PyTorch FSDP (Zhao et al. 2023). `fsdp_walk.py` says when something is sent, `fsdp_units.py` what is sent.

Streams. An NCCL transfer starts after what is queued on the current stream so far, and `wait` makes the current stream
wait for it. All memory of transfers is allocated and freed on the current stream, and freed only after that wait, so
the caching allocator reuses it in order. Nothing needs `record_stream`, which would keep the memory for longer.
"""

import math
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cs336_basics.nn_utils import gradient_norms

from . import comm
from .fsdp_units import APART, EMBEDDINGS, PART, WHOLE, Unit, divide
from .fsdp_walk import Place, Walk, insert
from .strategy import Strategy, UsedParameters, check_wire_dtype, weak_hook


class FSDP(Strategy):
    """Weights of Linear and Embedding sharded by rows over all ranks; all else is replicated, its gradients averaged.

    A weight (rows, ...) is divided as torch.chunk and DTensor's Shard(0) do: ceil(rows / world_size) rows per rank, and
    fewer or none on the last ranks. After wrapping, the module's parameter of that name is this rank's shard. It is the
    same object as before and has the dtype it had (the shards are the master weights, and what optimizers see). Its
    gradient is a shard of that dtype too.

    A unit is what is gathered together: the weights of one element of an nn.ModuleList (a Transformer block), and
    elsewhere the weights of one module. While a unit computes, forward or backward, the next one is prefetched, so at
    most two are whole, unless they are to stay so. A unit's gradients are sent as soon as they are ready, and are
    waited for when the next unit's are sent, or when backward ends.

    reshard_after_forward: with False, weights that backward needs stay whole until it has passed them, and are gathered
    once in a step instead of twice (ZeRO stage 2; SHARD_GRAD_OP in Zhao et al.). All of them are whole when it begins,
    and if it never comes, until the next forward or `finish_gradient_synchronization`.
    compute_dtype: shards are cast to it before they are sent; weights and their gradients have it in computation. What
    is replicated keeps its dtype, and inputs are not cast. Under autocast give the same dtype; otherwise autocast keeps
    its own copies of all weights until backward is over.
    grad_dtype: the dtype in which gradients are sent (default: the one they have).

    Accumulation: gradients are averaged after each backward, also inside `no_sync`, and summed as shards, because the
    sum of means is the mean of sums. Whole gradients would take as much memory as sharding saves.

    Ranks may use different weights, but must make the same calls of forward and backward. In the first forward, which
    teaches the order of units, they may use different weights only if the units are registered in that order. In one
    backward of several forwards, all ranks must use the outputs of each. Modules hold whole weights only inside the
    calls of their unit's module and its backward; in that first forward, using one elsewhere raises RuntimeError.

    A block may be compiled or checkpointed inside (its `forward` replaced, before or after wrapping), or checkpointed
    from outside with use_reentrant=False (otherwise backward raises RuntimeError). Where several blocks are
    checkpointed together, all ranks must use the same ones. Freeze or thaw parameters before wrapping. A module that is
    called by itself between a forward and its backward may have the weights which that forward gathered. Gradients of
    gradients (create_graph) are not supported.

    What the loss takes from a unit must leave it through its module's outputs, in tensors, tuples, lists or dicts, and
    must not be modified in place there. If it came from an attribute, or inside another class, backward would reach
    weights that have not been gathered. Hooks on a sharded parameter are not called with its gradients, which are those
    of shards.

    Raises ValueError if the ranks' modules differ, and for sparse gradients and max_norm of nn.Embedding.
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        grad_dtype: torch.dtype | None = None,
        reshard_after_forward: bool = True,
    ) -> None:
        check_wire_dtype("compute_dtype", compute_dtype)
        for name, child in module.named_modules():
            if isinstance(child, nn.Embedding) and (child.sparse or child.max_norm is not None):
                option = "sparse=True" if child.sparse else f"max_norm={child.max_norm}"
                where = f"{name}.weight".removeprefix(".")
                raise ValueError(f"{where} is of an nn.Embedding with {option}, which fsdp cannot shard")
        super().__init__(module, grad_dtype)
        self._reshards = reshard_after_forward
        self._stages = divide(module, compute_dtype, grad_dtype)
        self._units = list(dict.fromkeys(unit for stage in self._stages for unit in stage.units))
        self._sharded = {id(w.shard): w for unit in self._units for w in unit.weights}
        self._trainable = self.trainable()
        self._flags = UsedParameters(self._trainable)
        self._frozen = [p for p in self.module.parameters() if not p.requires_grad]
        self._device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self._plan(list(range(len(self._stages))))
        self._unknown = {True, False}  # kinds of forward (True: with gradients) whose order is not learned yet
        self._called: list[tuple[int, bool]] = []  # in such a pass: stages called, and whether backward reaches them
        self._walk: Walk | None = None  # through the forward pass under way
        self._kept: set[Unit] = set()  # what that pass leaves whole
        self._forward = 0  # how many forward passes have begun
        self._back: Walk | None = None  # through the backward pass under way
        self._back_of: int | None = None  # the forward pass that it has reached
        self._task = -1  # autograd's id of that backward pass, -1 without one
        self._recomputing = -1  # the one in which checkpointing has last called a stage again
        self._marked = False  # whether `_mark_used` was called in this step
        self._scattering: Unit | None = None
        self._hidden = False  # whether modules hold `Apart` tensors in place of their shards
        self._whole = {id(weight.full): (unit, weight) for unit in self._units for weight in unit.trainable}
        hook = weak_hook(self._after_gradient)
        for unit in self._units:
            for weight in unit.trainable:
                weight.full.register_post_accumulate_grad_hook(hook)
        # Hooks rather than a new `forward`, so that they run outside of what compiles or checkpoints the forward.
        outside = torch.compiler.disable
        module.register_forward_pre_hook(outside(self._before_forward))
        for number, stage in enumerate(self._stages):
            stage.module.register_forward_pre_hook(outside(partial(self._before_stage, number)))
            stage.module.register_forward_hook(outside(partial(self._after_stage, number)), always_call=True)
        module.register_forward_hook(outside(self._after_forward))
        module.register_forward_hook(outside(self._show_parts), always_call=True)

    # -- forward ------------------------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if _in_backward():  # the recompute of checkpointing
            return
        self._reset()  # what is whole is of an older pass: weights may have changed, or its backward never came
        if torch.is_grad_enabled() and not self._reshards:
            self._kept = self._for_backward
        self._walk = Walk(self._places, keep=self._kept)
        self._forward += 1
        self._called = []
        if self._unknown:
            for unit in self._units:
                unit.register(APART)
            self._hidden = True

    def _before_stage(self, number: int, module: nn.Module, inputs: Any) -> None:
        stage = self._stages[number]
        if _in_backward():
            self._recomputing = torch._C._current_graph_task_id()
        else:
            stage.began = torch.autograd._get_sequence_nr()
        if _in_backward() or self._walk is None or not self._walk.visit(number):
            stage.start()  # out of turn: all ranks must do the same
            stage.wait()
        stage.register(WHOLE)

    def _after_stage(self, number: int, module: nn.Module, inputs: Any, output: Any) -> None:
        if _in_backward():
            return  # keep the weights: the gradients come next
        stage = self._stages[number]
        stage.register(APART if self._hidden else PART)
        # Not what it hands on: backward reaches that in the stage that computed it, which has its turn then.
        hook = partial(self._before_stage_backward, number, self._forward)
        backed = _watch(output, hook, since=stage.began)
        if self._unknown:
            self._called.append((number, backed))
        if self._walk is None or not self._walk.is_at(number):
            stage.free(self._kept)
        elif not (self._walk.at_end() and torch.is_grad_enabled()):  # backward needs the last stage first, so keep it
            self._walk.leave()

    def _show_parts(self, *_: Any) -> None:
        """Give the modules their shards again after the first forward pass, also if it has failed."""
        if self._hidden and not _in_backward():
            self._hidden = False
            for unit in self._units:
                unit.register(PART)

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if _in_backward() or self._walk is None:
            return
        self._walk.to_end()
        if torch.is_grad_enabled():
            _watch(output, partial(self._begin_backward, self._forward))
        else:
            self._walk.leave()
        self._walk = None
        if torch.is_grad_enabled() in self._unknown:
            self._learn()

    def _learn(self) -> None:
        """Agree with all ranks on the order of the first forward pass, and of the first one with gradients."""
        everyone = comm.gather_objects(self._called, "the order of the units")
        # The longest pass gives the order; stages that it did not call are inserted among their neighbours.
        order = [number for number, _ in max(everyone, key=lambda called: len(called))]
        for number in set(range(len(self._stages))).difference(order):
            insert(order, number, [stage.name.rpartition(".")[0] for stage in self._stages])
        self._unknown -= {False, torch.is_grad_enabled()}
        if order != [place.number for place in self._places]:
            self._reset()
        self._plan(order, {number for called in everyone for number, backed in called if backed})

    def _plan(self, order: list[int], backed: Container[int] = ()) -> None:
        """Plan the walk of forward, and that of backward as far back as it goes, or may go, on any rank."""
        stages = self._stages
        self._places = [Place(number, stages[number].units, []) for number in order]
        goes = [number in backed or stages[number].trains for number in order]
        seen: set[Unit] = set()
        self._back_places: list[Place] = []
        for number in order[goes.index(True) if True in goes else len(order) :]:
            stage = stages[number]
            due = [unit for unit in stage.units if unit.trainable and unit not in seen]
            seen.update(due)
            # The backward of an embedding needs the indices, not the weight.
            gathered = [] if isinstance(stage.module, EMBEDDINGS) else stage.units
            self._back_places.insert(0, Place(number, gathered, due))
        self._for_backward = {unit for place in self._back_places for unit in place.gathered}

    # -- backward -----------------------------------------------------------------------------------------------------

    def _begin_backward(self, forward: int | None = None) -> None:
        task = torch._C._current_graph_task_id()
        if task == self._task:
            self._recomputing = -1  # what was computed again has its backward in this pass
            if self._back is not None and forward is not None:
                if self._back_of not in (None, forward):  # one backward of two forward passes, of the later one first
                    self._back.restart()
                self._back_of = forward
            return
        if self._task != -1 and self._recomputing == self._task:  # a backward pass inside of another one
            raise RuntimeError("a module in fsdp is checkpointed with use_reentrant=True, which gives wrong gradients: "
                               "it must be use_reentrant=False; or a backward pass failed while it recomputed a block: "
                               "call zero_grad of the fsdp module first")  # fmt: skip
        self._reset(keep=self._task == -1)  # all but what forward kept whole, unless a backward was aborted
        self._mark_used()
        self._task, self._back, self._back_of = task, Walk(self._back_places, self._scatter), forward
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._end_backward)

    def _before_stage_backward(self, number: int, forward: int) -> None:
        """Backward reaches a stage. autograd goes in the reverse order of forward, so later stages are done."""
        self._begin_backward(forward)
        assert self._back is not None
        if not self._back.is_at(number) and not self._back.visit(number) and self._back.knows(number):
            self._back.restart()  # called more often than in the pass that taught the order
            self._back.visit(number)
        stage = self._stages[number]
        if not isinstance(stage.module, EMBEDDINGS):
            stage.start()
            stage.wait()
            stage.register(WHOLE)  # checkpointing recomputes the forward, with the module's weights

    def _after_gradient(self, full: Tensor) -> None:
        self._begin_backward()
        unit, weight = self._whole[id(full)]
        weight.used = True
        unit.arrived += 1
        if self._back is not None:
            self._back.send_ready()

    def _scatter(self, unit: Unit) -> None:
        self._wait_scatter()  # not earlier, so that it was under way while this unit computed
        unit.start_scatter()
        self._scattering = unit

    def _wait_scatter(self) -> None:
        if self._scattering is not None:
            self._scattering.wait_scatter()
            self._scattering = None

    def _end_backward(self) -> None:
        """Go to the end of the walk, as other ranks may have done, and send gradients that came after their turn."""
        if self._back is None:
            return
        self._back.to_end()
        for place in self._back_places:
            for unit in place.due:
                if unit.arrived or not unit.scattered:
                    self._scatter(unit)
        self._wait_scatter()  # so that whoever drops the gradients, even an optimizer's zero_grad, drops all of them
        self._back, self._task = None, -1
        for unit in self._units:
            unit.free()
            unit.forget()

    def _reset(self, keep: bool = False) -> None:
        """Discard a pass that was aborted; free what is whole."""
        self._walk, self._kept = None, set()
        self._show_parts()
        if self._task != -1 and self._scattering is not None:
            self._scattering.drop_scatter()
            self._scattering = None
        for unit in () if keep else self._units:
            unit.free()
            if self._task != -1:
                unit.forget()
        if self._task != -1:
            self._marked = False  # what the aborted pass used does not count
        self._back, self._task = None, -1

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FSDP":
        # `to`, `half` and `cuda` call this. Units keep memory of the dtype and on the device that they began with.
        for name, p in self.module.named_parameters():
            other = fn(p.detach()[:0] if p.ndim else p.detach())
            if (other.dtype, other.device) != (p.dtype, p.device):
                raise ValueError(f"{name} would become {other.dtype} on {other.device} from {p.dtype} on {p.device}: "
                                 "cast and move a module before fsdp goes around it")  # fmt: skip
        return super()._apply(fn, recurse)

    def gathered_bytes(self) -> int:
        """Bytes of the units that are whole at the moment or being gathered."""
        return sum(unit.whole.nbytes for unit in self._units if unit.whole.is_there())

    # -- the contract -------------------------------------------------------------------------------------------------

    def finish_gradient_synchronization(self) -> None:
        """Average the replicated gradients; no unit is whole afterwards."""
        self._reset()
        self._check_frozen()
        self._mark_used()
        self._marked = False
        if not self._trainable:
            return
        flags = self._flags.fill(lambda p: not self._used(p))
        replicated = [p.grad for p in self._trainable if id(p) not in self._sharded and p.grad is not None]
        comm.start_mean([*replicated, flags], "mean of the replicated gradients", self.grad_dtype).wait()
        self._flags.settle()

    def _check_frozen(self) -> None:
        # Whole weights are as they were at wrapping, and so is which gradients are sent.
        thawed = {p for p in self._frozen if p.requires_grad}
        frozen = {p for p in self._trainable if not p.requires_grad}
        for name, p in self.module.named_parameters() if thawed or frozen else ():
            if p in thawed or p in frozen:
                was, now = ("frozen", "is not now") if p in thawed else ("trainable", "is frozen now")
                raise ValueError(f"{name} was {was} when its module was wrapped and {now}: freeze and thaw before, or "
                                 "wrap anew")  # fmt: skip

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and forget which weights were used and a backward pass that was aborted."""
        if self._task != -1:
            self._reset()
        self._marked = False
        super().zero_grad(set_to_none)

    def _used(self, parameter: nn.Parameter) -> bool:
        weight = self._sharded.get(id(parameter))
        return parameter.grad is not None if weight is None else weight.used

    def _mark_used(self) -> None:
        """Once per step, before its gradients: a weight that has a gradient already keeps it, whoever uses it now."""
        if not self._marked:
            self._marked = True
            for weight in self._sharded.values():
                weight.used = weight.shard.grad is not None

    def clip_gradient(self, max_norm: float = math.inf) -> Tensor:
        """Scale the averaged gradients to a common 2-norm, over all shards, of at most max_norm; return the old one."""
        gradients: dict[bool, list[Tensor]] = {True: [], False: []}
        for p in self._trainable:
            if p.grad is not None:
                gradients[id(p) in self._sharded].append(p.grad)
        squares = {}
        for kind, some in gradients.items():
            norms = gradient_norms(some) if some else [torch.zeros((), device=self._device)]
            squares[kind] = torch.stack(norms).square().sum()
        comm.mean([squares[True]], "norm of the gradients")
        norm = (squares[True] * comm.world_size() + squares[False]).sqrt()
        if max_norm != math.inf and (everything := gradients[True] + gradients[False]):
            torch._foreach_mul_(everything, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def gather_full_params(self) -> dict[str, Tensor]:
        """Every parameter whole, in the dtype of the master weights, by its name; replicated ones as they are.

        All ranks call it together.
        """
        named = dict(self.module.named_parameters(remove_duplicate=False))
        whole = self._gather_whole(list(named.values()), lambda tensor: tensor)
        return {name: whole[p] for name, p in named.items()}

    def _gather_whole(self, parts: Sequence[Tensor], keep: Callable[[Tensor], Tensor]) -> dict[Tensor, Tensor]:
        whole = super()._gather_whole([part for part in parts if id(part) not in self._sharded], keep)
        for unit in self._units:
            whole |= unit.gather_masters(keep)
        return whole

    def shards(self) -> dict[str, tuple[torch.Size, int]]:
        """The sharded parameters by name: the whole shape, and the first row that this rank has."""
        named = self.module.named_parameters(remove_duplicate=False)
        weights = {name: self._sharded[id(p)] for name, p in named if id(p) in self._sharded}
        return {name: (weight.shape, weight.first_row) for name, weight in weights.items()}


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _watch(output: Any, hook: Callable[[], None], since: int = 0) -> bool:
    """Call `hook` when the gradient of a tensor in output is ready, before backward goes on into what computed it.

    Only of tensors that have been computed since autograd's counter of operations stood there.
    """
    tensors = [output] if isinstance(output, Tensor) else tree_leaves(output)
    tensors = [t for t in tensors if isinstance(t, Tensor) and t.requires_grad] if torch.is_grad_enabled() else []
    tensors = [t for t in tensors if t.grad_fn is not None and t.grad_fn._sequence_nr() >= since]
    for tensor in tensors:
        tensor.register_hook(lambda _: hook())
    return bool(tensors)
