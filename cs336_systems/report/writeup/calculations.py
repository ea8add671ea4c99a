"""The handout's calculations of 2026: a gated feed-forward layer over many devices, answered by the planner."""

from collections.abc import Callable

from ...planner.scaling import (
    Layer,
    alternate_ring_section,
    both_section,
    data_parallel_section,
    fsdp_section,
    most_fsdp,
    most_of_both,
    most_tensor_parallel,
    tensor_parallel_backward,
    tensor_parallel_section,
)
from ...planner.working import Section
from .claims import Evidence
from .problem import Problem, says

SECTION = "Parallelism strategies"
_LAYER = Layer()


def alternate_ring(e: Evidence) -> str:
    """The time of the handout's other all-reduce."""
    return (
        "`(N - 1) S / W`: each of N - 1 steps sends a whole tensor of S bytes, where a ring reduce-scatter and "
        "all-gather send `2 (N - 1) / N` of one in all; beyond two devices it takes longer, N / 2 times."
    )


def data_parallel(e: Evidence) -> str:
    """(a) to (c), in the handout's letters."""
    return (
        "(a) `12 B D F / N_DP` operations a device: two gradients of each of three products of `2 B D F`. "
        "(b) `12 (N_DP - 1) / N_DP D F / W`: an all-reduce of three matrices of 2 D F bytes. "
        "(c) Communication is the longer from `N_DP > 1 + B W / C` on; "
        f"for {_example()} that is {most_fsdp(_LAYER):.1f} devices."
    )


def fully_sharded(e: Evidence) -> str:
    """(a) to (c), in the handout's letters."""
    return (
        "(a) `12 B D F / N_FSDP` backward and `6 B D F / N_FSDP` forward: what is computed stays the same. "
        "(b) Forward `6 (N_FSDP - 1) / N_FSDP D F / W`, three matrices gathered; backward twice that, since gradients "
        "are reduce-scattered too. (c) In both directions `N_FSDP <= 1 + B W / C`, as in data parallelism, whose "
        "all-reduce sends what a gather and a reduce-scatter send."
    )


def tensor_parallel(e: Evidence) -> str:
    """(a) to (d), in the handout's letters."""
    forward, backward = most_tensor_parallel(_LAYER, "forward"), most_tensor_parallel(_LAYER, "backward")
    return (
        "(a) Device i has columns of W1 and W2 and rows of W3. (b) `6 B D F / N_TP` forward and `12 B D F / "
        "N_TP` backward: each device has a share of each matrix. (c) `4 (N_TP - 1) / N_TP B D / W` in either "
        "direction: y, and backward dx, are all-reduced. (d) Forward `N_TP <= 1 + 3 F W / (2 C)`, backward `N_TP <= 1 "
        f"+ 3 F W / C`: the batch cancels, the width decides; for {_example()} that is {forward:.1f} and "
        f"{backward:.1f} devices."
    )


def two_dimensions(e: Evidence) -> str:
    """(a) to (d), in the handout's letters."""
    (a, b), (c, d) = most_of_both(_LAYER, together=True), most_of_both(_LAYER, together=False)
    return (
        "(a) `6 B D F / (N_FSDP N_TP)`. (b) The larger of `6 (N_FSDP - 1) / N_FSDP D F / (N_TP W)` and "
        "`4 (N_TP - 1) / N_TP B D / (N_FSDP W)`. (c) Each axis has a bound of its own, so `N <= (1 + p) (1 + q)` with "
        "`p = B W / C` and `q = 3 F W / (2 C)`, about `3 B F W^2 / (2 C^2)`. (d) In turns "
        "`(N_FSDP - 1) / p + (N_TP - 1) / q <= 1`; N is largest where `N_FSDP / p = N_TP / q`: "
        "`N <= p q (1 + 1/p + 1/q)^2 / 4`, about a quarter of that, `3 B F W^2 / (8 C^2)`. "
        f"For {_example()} the two are {a * b:.0f} and {c * d:.0f} devices."
    )


def _example() -> str:
    c = _LAYER
    return (
        f"B = {c.batch:,} tokens, D = {c.d_model:,}, F = {c.d_ff:,}, C = {c.flops / 1e12:.0f} TFLOP/s and "
        f"W = {c.egress / 1e9:.0f} GB/s"
    )


def _problem(
    name: str,
    place: str,
    question: str,
    answer: Callable[[Evidence], str],
    working: Callable[[], Section],
    sketch: str = "",
) -> Problem:
    return Problem(
        name=name,
        section=SECTION,
        places=("", place),
        question=question,
        sentences=(says(answer),),
        sketch=sketch,
        working=lambda: [working()],
        plan="plan scaling",
    )


CALCULATIONS = (
    _problem(
        "alternate_ring_all_reduce", "8.1",
        "How long does a ring all-reduce take that sends whole tensors on, rather than parts of sums?",
        alternate_ring, lambda: alternate_ring_section(_LAYER.weight_bytes, _LAYER.devices, _LAYER.egress),
    ),
    _problem(
        "data_parallel_calcs", "8.2",
        "Operations and communication of a gated feed-forward layer's backward pass, and how far it scales.",
        data_parallel, lambda: data_parallel_section(_LAYER),
    ),
    _problem(
        "fsdp_calcs", "8.3", "The same with everything sharded, in both directions.",
        fully_sharded, lambda: fsdp_section(_LAYER),
    ),
    _problem(
        "tp_calcs", "8.4",
        "The backward pass of a tensor-parallel layer, what it computes and sends, and how far it scales.",
        tensor_parallel, lambda: tensor_parallel_section(_LAYER), "\n".join(tensor_parallel_backward()),
    ),
    _problem(
        "fsdp_tp_calcs", "8.5",
        "FSDP and tensor parallelism together: the most devices, with transfers at once and in turns.",
        two_dimensions, lambda: both_section(_LAYER),
    ),
)  # fmt: skip
