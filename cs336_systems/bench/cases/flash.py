"""The case `flash`: every attention kernel over lengths and head sizes, at batch 1.

The handout's flash_benchmarking: causal, lengths 128 to 65536 and head sizes 16 to 128 in powers of two, bf16 and fp32.
"""

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from ...config.checks import require
from ..attention import KERNELS, QUICK_KERNELS, KernelBench, check_sizes, take_turns
from ..case import Case, swept

_SIXTEEN_BITS_ONLY = ("sdpa_flash", "sdpa_cudnn", "fa4")


@dataclass(frozen=True, kw_only=True)
class FlashBench(KernelBench):
    """A kernel at a length and a head size, without heads."""

    kernel: str = swept(
        *(name for name in KERNELS if name != "fa4"), sweep=KERNELS, quick=QUICK_KERNELS, also="kernels"
    )
    """Attention kernel by its registered name."""
    dtype: Literal["bf16", "fp16", "fp32"] = swept("bf16", "fp32", quick="fp32")
    """Type of q, k and v."""
    batch_size: int = swept(1)
    """Sequences per batch, with one head each."""
    head_size: int = swept(16, 32, 64, 128, quick=16)
    """Length of each query, key and value vector."""
    length: int = swept(*(2**i for i in range(7, 17)), quick=(32, 64))
    """Number of queries and of keys."""
    warmup_ms: float = swept(25.0, quick=0.0)
    """Time for warming up before each measurement of a round. It and rep_ms are those of Triton's `do_bench`."""
    rep_ms: float = swept(100.0, quick=1.0)
    """Time for each measurement of a round."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self, "batch_size", "length", "head_size")

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape of q, and that of k and v."""
        shape = self.batch_size, self.length, self.head_size
        return shape, shape

    def read_back(self, o: Tensor, k: Tensor) -> dict[str, Any]:
        """The fields of the shape, read from an output and the keys."""
        return dict(zip(("batch_size", "length", "head_size"), o.shape, strict=True))


def check_type(config: FlashBench) -> None:
    """Raise ValueError if the kernel does not compute in that type on that device."""
    is_wide = config.dtype == "fp32" and config.device != "cpu"
    is_served = not (is_wide and config.kernel in _SIXTEEN_BITS_ONLY)
    require(is_served, "kernel", config.kernel, f"none of {', '.join(_SIXTEEN_BITS_ONLY)} with dtype 'fp32'")


CASE = Case(
    name="flash",
    about="Attention kernels over lengths, head sizes and types, forward and backward, in turns.",
    module=__name__,
    config=FlashBench,
    variant=lambda config: config.kernel,
    measure=take_turns("flash", "forward", "backward", "forward_backward"),
    together=("kernel",),
    check=check_type,
)
