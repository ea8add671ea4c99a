"""The case `attention-sweep`: attention's forward pass at square and rectangular tiers of queries and keys."""

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from ..attention import QUICK_KERNELS, KernelBench, check_sizes, parse_sizes, take_turns
from ..case import Case, swept

_SQUARES = tuple((length, length) for length in (128, 256, 512, 1024, 2048))
_RECTANGLES = ((128, 2048), (512, 2048), (2048, 128), (2048, 512))


def parse_tier(text: str) -> tuple[int, ...]:
    """Parse a tier written as QUERIES:KEYS. Raises ValueError for anything else."""
    return parse_sizes(text, "tier", "QUERIES:KEYS, such as 256:128", 2, ":")


@dataclass(frozen=True, kw_only=True)
class AttentionSweepBench(KernelBench):
    """A kernel at a number of queries and of keys."""

    kernel: str = swept(
        "naive", "vectorized_torch", "flash_torch", "flash_triton", "sdpa", quick=QUICK_KERNELS, also="kernels"
    )
    """Attention kernel by its registered name."""
    dtype: Literal["bf16", "fp16", "fp32"] = swept("bf16", sweep=("bf16", "fp32"), quick="fp32")
    """Type of q, k and v."""
    is_causal: bool = swept(False, sweep=(False, True))
    """Whether query i sees only the keys up to i; in a rectangle, some keys are then seen by no query."""
    tier: tuple[int, int] = swept(
        *_SQUARES, *_RECTANGLES, quick=((16, 16), (32, 32), (32, 16)), parse=parse_tier, also="tiers"
    )
    """QUERIES:KEYS, such as 256:128 (default: squares from 128 to 2048 and four rectangles)."""
    batch_size: int = swept(4, quick=1)
    """Sequences per batch."""
    num_heads: int = swept(16, quick=2)
    """Number of heads."""
    head_size: int = swept(64, quick=16)
    """Length of each query, key and value vector."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self, "tier", "batch_size", "num_heads", "head_size")

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape of q, and that of k and v."""
        q, k = ((self.batch_size, self.num_heads, length, self.head_size) for length in self.tier)
        return q, k

    def read_back(self, o: Tensor, k: Tensor) -> dict[str, Any]:
        """The fields of the shape, read from an output and the keys."""
        batch_size, num_heads, n_q, head_size = o.shape
        return dict(batch_size=batch_size, num_heads=num_heads, head_size=head_size, tier=[n_q, k.shape[-2]])


CASE = Case(
    name="attention-sweep",
    about="Attention's forward pass at square and rectangular numbers of queries and keys.",
    module=__name__,
    config=AttentionSweepBench,
    variant=lambda config: config.kernel,
    measure=take_turns("attention-sweep", "forward"),
    together=("kernel",),
)
