"""The optimizer's work in two passes over memory, for all parameters of a model at once, in Triton.

`square_sum` reads the gradients. `adamw` reads them again, clips them, and updates the moments and the float32 weights.
Clipping and the decision to skip a step are one number on the device, so nothing waits for the host, and a CUDA graph
can hold both.

A bfloat16 weight of the model is the upper half of a float32 one, rounded, and the optimizer has the lower half: both
together are the 4 bytes of the float32 weight, and nothing is kept twice. A float16 weight is a copy of a float32 one.

A launch for each of hundreds of parameters would leave the GPU idle between them. So a launch gets a table of
addresses, and a list that names a parameter and a block of it for each program. The tensors stay where they are.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from .launch import check_device

BLOCK = 2048
"""Elements of a program."""
OLDEST = (7, 0)
"""The lowest compute capability: that of torch.compile, whose kernels are as simple as these."""
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def block_of(addresses, blocks, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """This program's column of the table, its first element there, and which of its elements there are."""
    program = tl.program_id(0)
    row = addresses + tl.load(blocks + 2 * program)
    first = tl.load(blocks + 2 * program + 1).to(tl.int64) * BLOCK
    left = tl.load(row) - first
    return row, first, tl.arange(0, BLOCK) < (tl.multiple_of(left, 16) if ALIGNED else left)


@triton.jit
def pointers(address, first, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Pointers to the elements from `first` on of the tensor whose address is stored at `address`."""
    found = tl.load(address).to(tl.pointer_type(DTYPE)) + first + tl.arange(0, BLOCK)
    # A thread has four neighbours of every tensor, 8 bytes where they are 16-bit, so no layout is converted.
    return tl.multiple_of(found, 4 * DTYPE.primitive_bitwidth // 8) if ALIGNED else found


@triton.jit
def master_pointers(address, first, WEIGHT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """`pointers` of float32 weights, or of the lower halves beside bfloat16 weights."""
    if tl.bfloat16 == WEIGHT:
        found = pointers(address, first, tl.int16, ALIGNED, BLOCK)
    else:
        found = pointers(address, first, tl.float32, ALIGNED, BLOCK)
    return found


@triton.jit
def load_weights(at_weight, at_master, inside, WEIGHT: tl.constexpr):
    """Float32 weights, from both halves if the model has their upper halves."""
    if tl.bfloat16 == WEIGHT:
        upper = tl.load(at_weight, mask=inside, other=0.0).to(tl.int16, bitcast=True).to(tl.int32) << 16
        lower = tl.load(at_master, mask=inside, other=0)
        lower = tl.where((upper << 1) == 0, tl.maximum(lower, 0), lower)  # as in `joined`
        weights = (upper + lower).to(tl.float32, bitcast=True)
    else:
        weights = tl.load(at_master, mask=inside, other=0.0)
    return weights


@triton.jit
def store_weights(weights, at_weight, at_master, inside, WEIGHT: tl.constexpr):
    """Store float32 weights where `load_weights` finds them, and the model those that it computes with."""
    if tl.bfloat16 == WEIGHT:
        bits = weights.to(tl.int32, bitcast=True)
        upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to the nearest, ties to even
        upper = tl.where(weights == weights, upper, 0x7FC0)  # NaN, whose bits may overflow
        tl.store(at_weight, upper.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
        tl.store(at_master, tl.minimum(bits - (upper << 16), 0x7FFF).to(tl.int16), mask=inside)
    else:
        tl.store(at_master, weights, mask=inside)
        if tl.float32 != WEIGHT:
            tl.store(at_weight, weights.to(WEIGHT), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _square_sum_kernel(
    addresses, blocks, count, sums, GRADIENT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    row, first, inside = block_of(addresses, blocks, ALIGNED, BLOCK)
    g = tl.load(pointers(row + count, first, GRADIENT, ALIGNED, BLOCK), mask=inside, other=0.0).to(tl.float32)
    tl.store(sums + tl.program_id(0), tl.sum(g * g))


@triton.jit(do_not_specialize=["count"])
def _adamw_kernel(
    addresses, blocks, count, factor_pointer, lr_pointer,
    log2_beta1, log2_beta2, beta1, beta2, rest1, rest2, eps, decay,
    GRADIENT: tl.constexpr, WEIGHT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    factor = tl.load(factor_pointer)
    if factor > 0:
        row, first, inside = block_of(addresses, blocks, ALIGNED, BLOCK)
        # float64, because 1 - beta^t cancels.
        lr = tl.load(lr_pointer)
        t = tl.load(tl.load(row + 2 * count).to(tl.pointer_type(tl.float32))).to(tl.float64)
        step_size = (lr / (1 - tl.exp2(t * log2_beta1))).to(tl.float32)
        correction = tl.sqrt(1 - tl.exp2(t * log2_beta2)).to(tl.float32)
        kept = (1 - lr * decay).to(tl.float32)
        at_master = master_pointers(row + 3 * count, first, WEIGHT, ALIGNED, BLOCK)
        at_weight = pointers(row + 6 * count, first, WEIGHT, ALIGNED, BLOCK)
        at_m = pointers(row + 4 * count, first, tl.float32, ALIGNED, BLOCK)
        at_v = pointers(row + 5 * count, first, tl.float32, ALIGNED, BLOCK)
        g = tl.load(pointers(row + count, first, GRADIENT, ALIGNED, BLOCK), mask=inside, other=0.0)
        g = g.to(tl.float32) * factor
        m = beta1 * tl.load(at_m, mask=inside, other=0.0) + rest1 * g
        v = beta2 * tl.load(at_v, mask=inside, other=0.0) + rest2 * g * g
        weights = kept * load_weights(at_weight, at_master, inside, WEIGHT)
        weights -= step_size * m / (tl.sqrt(v) / correction + eps)
        tl.store(at_m, m, mask=inside)
        tl.store(at_v, v, mask=inside)
        store_weights(weights, at_weight, at_master, inside, WEIGHT)


class _Table:
    """One launch: parameters whose tensors have the same dtypes, and are aligned to 16 bytes or not, all of them.

    `addresses` (fields, parameters) has the number of elements, the address of the gradient, the other addresses, and
    the place among all elements of all parameters. `blocks` (programs, 2) has each program's parameter and the number
    of its block.
    """

    def __init__(
        self, gradients: Sequence[Tensor], states: Sequence[Sequence[Tensor]], places: Sequence[int], aligned: bool
    ) -> None:
        sizes, device = [g.numel() for g in gradients], gradients[0].device
        others = [[t.data_ptr() for t in column] for column in zip(*states, strict=True)]
        fields = [sizes, [0] * len(sizes), *others, places]
        counts = np.array([-(-size // BLOCK) for size in sizes])
        owner = np.repeat(np.arange(len(sizes)), counts)
        number = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        self.addresses = torch.tensor(fields, dtype=torch.int64).to(device)
        self.blocks = torch.from_numpy(np.stack([owner, number], axis=1).astype(np.int32)).to(device)
        self.num_programs = len(owner)
        self.constants: dict[str, Any] = dict(GRADIENT=_TYPES[gradients[0].dtype], ALIGNED=aligned, BLOCK=BLOCK)
        if states[0]:
            self.constants["WEIGHT"] = _TYPES[states[0][-1].dtype]
        self._slots, self._known = list(self.addresses[1].unbind()), [0] * len(sizes)

    def point_to(self, gradients: Sequence[Tensor]) -> None:
        """Write the gradients' addresses into the table if they have changed."""
        found = [g.data_ptr() for g in gradients]
        recording = self.addresses.is_cuda and torch.cuda.is_current_stream_capturing()
        if recording or found != self._known:
            # As arguments of kernels: a recorded copy would read host memory again in each replay.
            self.addresses[1].zero_()
            torch._foreach_add_(self._slots, found)
            self._known = [] if recording else found  # each replay writes the recorded ones

    def launch(self, kernel: Any, *arguments: Any) -> None:
        """Run a kernel over all blocks."""
        count = self.addresses.shape[1]
        with torch.cuda.device_of(self.addresses):
            kernel[(self.num_programs,)](self.addresses, self.blocks, count, *arguments, num_warps=4, **self.constants)


Tables = dict[Any, list[tuple[_Table, list[int]]]]
"""An optimizer's launch tables, which the caller keeps from step to step, with the places of their gradients."""


def pointed_to(
    tables: Tables,
    gradients: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]] | None = None,
    packed: bool = False,
) -> list[_Table]:
    """The tables of these gradients with their parameters' states, whose tensors must stay where they are.

    packed: a kernel takes one more tensor, with all parameters one after the other.
    """
    states = states or [()] * len(gradients)
    key = tuple(
        (g.numel(), g.dtype, g.data_ptr() % 16, *(t.data_ptr() for t in state[-1:]))
        for g, state in zip(gradients, states, strict=True)
    )
    if key not in tables:
        kinds: dict[Any, list[int]] = {}
        places = [0, *accumulate(g.numel() for g in gradients)]
        for i, (g, state) in enumerate(zip(gradients, states, strict=True)):
            numbers = (g.numel(), packed * places[i], *(t.data_ptr() for t in (g, *state)))
            aligned = not any(number % 16 for number in numbers)
            if g.numel():
                kinds.setdefault((g.dtype, state[-1].dtype if state else None, aligned), []).append(i)
        tables[key] = [
            (_Table([gradients[i] for i in some], [states[i] for i in some], [places[i] for i in some], aligned), some)
            for (*_, aligned), some in kinds.items()
        ]
    for table, some in tables[key]:
        table.point_to([gradients[i] for i in some])
    return [table for table, _ in tables[key]]


def square_sum(gradients: Sequence[Tensor], tables: Tables) -> Float[Tensor, ""]:
    """The sum of the squares of all elements, in float32, on the gradients' device. The same numbers, the same bits.

    The gradients are contiguous and not none. tables: {} at first.
    """
    check_device(gradients[0], "square_sum", "a gradient", at_least=OLDEST)
    total = torch.zeros((), device=gradients[0].device)
    for table in pointed_to(tables, gradients):
        sums = torch.empty(table.num_programs, device=gradients[0].device)
        table.launch(_square_sum_kernel, sums)
        total += sums.sum()
    return total


def adamw(
    gradients: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    tables: Tables,
    *,
    factor: Float[Tensor, ""],
    lr: Float[Tensor, ""],
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """`cs336_basics.optimizer.AdamW` in place, for gradients times `factor`; changes nothing unless factor is above 0.

    states: for each gradient the number of its step, from 1 (a float32 scalar); the float32 weight, or its lower half
    beside a bfloat16 one (`training.optimizer.halves`); two float32 moments; and the weight that the model has, which
    is the float32 one, its copy in float16, or its upper half. All are contiguous, and stay where they are from call to
    call. factor is float32, lr float64; both are on the device.
    """
    if not gradients:
        return
    check_device(gradients[0], "adamw", "a gradient", at_least=OLDEST)
    hyper = [math.log2(beta) if beta else -math.inf for beta in betas]
    hyper += [*betas, *(1 - beta for beta in betas), eps, weight_decay]
    for table in pointed_to(tables, gradients, states):
        table.launch(_adamw_kernel, factor, lr, *hyper)
