"""The case `kernels`: every attention kernel at the shapes of published figures, or at others."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..attention import KernelBench, check_sizes, parse_sizes, take_turns
from ..case import Case, swept

# What docs/log.md compares with others' published figures.
SHAPES = (
    (1, 16, 1024, 64),
    (4, 25, 1024, 64),
    (8, 16, 4096, 64),
    (1, 16, 8192, 64),
    (1, 16, 16384, 64),
    (1, 16, 16384, 128),
    (1, 16, 65536, 64),
)


def parse_shape(text: str) -> tuple[int, ...]:
    """Parse a shape written as BxHxNxD. Raises ValueError for anything else."""
    return parse_sizes(text, "shape", "BxHxNxD, such as 1x16x1024x64", 4, "x")


@dataclass(frozen=True, kw_only=True)
class KernelsBench(KernelBench):
    """A kernel at a shape with batch and heads."""

    shape: tuple[int, int, int, int] = swept(
        *SHAPES, quick=((1, 2, 64, 16), (1, 2, 65, 32)), parse=parse_shape, also="shapes"
    )
    """BxHxNxD of q, k and v: batch, heads, length, head size."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self, "shape")

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape of q, and that of k and v."""
        return self.shape, self.shape

    def read_back(self, o: Tensor, k: Tensor) -> dict[str, Any]:
        """The fields of the shape, read from an output and the keys."""
        return {"shape": list(o.shape)}


CASE = Case(
    name="kernels",
    about="Every attention kernel at the shapes of published figures, forward and backward, in turns.",
    module=__name__,
    config=KernelsBench,
    variant=lambda config: config.kernel,
    measure=take_turns("kernels", "forward", "backward", "forward_backward", "forward_sum_backward"),
    together=("kernel",),
)
