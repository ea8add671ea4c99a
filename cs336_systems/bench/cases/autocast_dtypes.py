"""The case `autocast-dtypes`: the types that autocast gives to the parts of a small model, read while it computes.

Weights and gradients stay float32; autocast casts the inputs of matrix products. It computes sensitive operations in
float32: on a GPU, layer norm and the loss. A custom RMSNorm is a series of element-wise operations to autocast, which
keep their input's type, so our RMSNorm casts by itself and returns the type of its input. CPU and GPU have different
lists of operations; a row names its device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cs336_basics.model import RMSNorm

from ...config.checks import check_types, without_groups
from ...machine.hardware import autocast, check_precision, select_device, use_device
from ..case import Case, swept
from ..outcome import each

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


def measure(config: AutocastDtypesBench) -> tuple[dict[str, Any], dict[str, Any]]:
    """The device, and the types of weights, activations, loss and gradients in a forward and a backward pass."""
    device = use_device(config.device)
    check_precision(device, config.precision)
    torch.manual_seed(0)
    model = ToyModel(_IN, _OUT, config.norm).to(device)
    x, targets = torch.randn(_BATCH, _IN, device=device), torch.zeros(_BATCH, dtype=torch.long, device=device)
    seen: dict[str, str] = {}

    def read_parameters(module: nn.Module, inputs: Any) -> None:
        seen["parameters"] = _names(*module.parameters())

    def read_output(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda module, inputs, output: seen.update({name: _names(output)})

    model.register_forward_pre_hook(read_parameters)
    for name, module in (("fc1_output", model.fc1), ("norm_output", model.ln), ("logits", model)):
        module.register_forward_hook(read_output(name))
    with autocast(device, config.precision):
        loss = nn.functional.cross_entropy(model(x), targets)
    loss.backward()
    seen["loss"] = _names(loss)
    seen["gradients"] = _names(*(p.grad for p in model.parameters() if p.grad is not None))
    return {"device": str(device)}, {"dtypes": seen}


def _names(*tensors: Tensor) -> str:
    """The types of tensors, such as "float32"."""
    return ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors}))


def variant(config: AutocastDtypesBench) -> str:
    """Precision and norm: "bf16 layer_norm"."""
    return f"{config.precision} {config.norm}"


CASE = Case(
    name="autocast-dtypes",
    module=__name__,
    config=AutocastDtypesBench,
    variant=variant,
    measure=each("autocast-dtypes", variant, measure),
)
