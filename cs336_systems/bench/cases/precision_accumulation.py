"""The case `precision-accumulation`: the same numbers added up in different types.

The rows separate two errors. First, the value itself is rounded once: the float16 nearest to 0.01 is 0.0100021, so a
thousand of them sum to 10.0021 however well they are added. Casting float16 to float32 before adding repairs nothing.
Second, each sum is rounded: from 8 on, float16 has steps of 1/128, and adding 0.01 goes to the nearest step. That is
why accumulators are float32.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ...config.checks import check_types, require, require_at_least
from ..case import Case, swept
from ..outcome import each

# Type of the values, type to which they are cast before adding (None: no cast), type of the sum.
ACCUMULATIONS: dict[str, tuple[torch.dtype, torch.dtype | None, torch.dtype]] = {
    "fp32 into fp32": (torch.float32, None, torch.float32),
    "fp16 into fp16": (torch.float16, None, torch.float16),
    "fp16 into fp32": (torch.float16, None, torch.float32),
    "fp16 cast to fp32 into fp32": (torch.float16, torch.float32, torch.float32),
}


@dataclass(frozen=True, kw_only=True)
class PrecisionAccumulationBench:
    """A value, the number of additions, and the types."""

    accumulation: Literal["fp32 into fp32", "fp16 into fp16", "fp16 into fp32", "fp16 cast to fp32 into fp32"] = swept(
        *ACCUMULATIONS
    )
    """Types of the values, of the cast and of the sum."""
    value: float = swept(0.01)
    """The value to add."""
    count: int = swept(1000)
    """Number of additions."""

    def __post_init__(self) -> None:
        check_types(self, "")
        require(math.isfinite(self.value), "value", self.value, "finite")
        require_at_least(self, "", 1, "count")


def measure(config: PrecisionAccumulationBench) -> tuple[dict[str, Any], dict[str, Any]]:
    """The device, and the sum of the handout's loop beside the exact product."""
    value_dtype, cast_dtype, sum_dtype = ACCUMULATIONS[config.accumulation]
    total = torch.tensor(0, dtype=sum_dtype)
    value = torch.tensor(config.value, dtype=value_dtype)
    for _ in range(config.count):
        total += value if cast_dtype is None else value.to(cast_dtype)
    exact = config.value * config.count
    found = total.item()
    dtype = str(total.dtype).removeprefix("torch.")
    return {"device": str(total.device)}, {"sum": found, "exact": exact, "error": found - exact, "dtype": dtype}


CASE = Case(
    name="precision-accumulation",
    module=__name__,
    config=PrecisionAccumulationBench,
    variant=lambda config: config.accumulation,
    measure=each("precision-accumulation", lambda config: config.accumulation, measure),
)
