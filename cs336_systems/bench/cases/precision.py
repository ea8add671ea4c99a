"""The types of numbers: the cases `precision-accumulation` and `autocast-dtypes`.

`precision-accumulation` adds up the same numbers in different types. The rows separate two errors: the value is rounded
once (the float16 nearest to 0.01 is 0.0100021, and casting it to float32 repairs nothing), and each sum is rounded.

`autocast-dtypes` reads the types that autocast gives to the parts of a small model while it computes. CPU and GPU have
different lists of operations that stay in float32; a row names its device.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cs336_basics.model import RMSNorm

from ...config.checks import check_types, require, require_at_least, without_groups
from ...machine.hardware import autocast, check_precision, select_device, use_device
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


def accumulate(config: PrecisionAccumulationBench) -> tuple[dict[str, Any], dict[str, Any]]:
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


_NORMS: dict[str, Callable[[int], nn.Module]] = {"layer_norm": nn.LayerNorm, "rms_norm": RMSNorm}
_BATCH, _IN, _OUT = 8, 20, 5


class ToyModel(nn.Module):
    """The handout's toy model: two linear layers without biases, ReLU and a norm between them."""

    def __init__(self, in_features: int, out_features: int, norm: str = "layer_norm") -> None:
        super().__init__()
        self.fc1 = nn.Linear(in_features, 10, bias=False)
        self.ln = _NORMS[norm](10)
        self.fc2 = nn.Linear(10, out_features, bias=False)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.ln(self.relu(self.fc1(x))))


@dataclass(frozen=True, kw_only=True)
class AutocastDtypesBench:
    """A precision and a norm."""

    norm: Literal["layer_norm", "rms_norm"] = swept("layer_norm", "rms_norm")
    """Normalisation of the model: PyTorch's LayerNorm, or the RMSNorm of cs336_basics."""
    precision: Literal["fp32", "bf16", "fp16"] = swept("fp32", "fp16", "bf16")
    """Autocast type; fp32 means no autocast."""
    device: str = swept("auto")
    """auto, cpu, cuda or cuda:N."""

    def __post_init__(self) -> None:
        check_types(self, "")
        with without_groups():
            object.__setattr__(self, "device", str(select_device(self.device)))


def read_dtypes(config: AutocastDtypesBench) -> tuple[dict[str, Any], dict[str, Any]]:
    """The device, and the types of weights, activations, loss and gradients in a forward and a backward pass."""
    device = use_device(config.device)
    check_precision(device, config.precision)
    torch.manual_seed(0)
    model = ToyModel(_IN, _OUT, config.norm).to(device)
    x, targets = torch.randn(_BATCH, _IN, device=device), torch.zeros(_BATCH, dtype=torch.long, device=device)
    seen: dict[str, str] = {}

    model.register_forward_pre_hook(lambda module, inputs: seen.update(parameters=_names(*module.parameters())))
    for name, module in (("fc1_output", model.fc1), ("norm_output", model.ln), ("logits", model)):
        module.register_forward_hook(lambda module, inputs, output, name=name: seen.update({name: _names(output)}))
    with autocast(device, config.precision):
        loss = nn.functional.cross_entropy(model(x), targets)
    loss.backward()
    seen["loss"] = _names(loss)
    seen["gradients"] = _names(*(p.grad for p in model.parameters() if p.grad is not None))
    return {"device": str(device)}, {"dtypes": seen}


def _names(*tensors: Tensor) -> str:
    """The types of tensors, such as "float32"."""
    return ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors}))


_ACCUMULATION = Case(
    name="precision-accumulation",
    config=PrecisionAccumulationBench,
    variant=lambda config: config.accumulation,
    rows=each(accumulate),
)
_AUTOCAST = Case(
    name="autocast-dtypes",
    config=AutocastDtypesBench,
    variant=lambda config: f"{config.precision} {config.norm}",
    rows=each(read_dtypes),
)
PRESETS = {case.name: case for case in (_ACCUMULATION, _AUTOCAST)}
