"""The case `autocast-dtypes`: rows have the types that the model computed with."""

import pytest
import torch
from torch import Tensor, nn

from cs336_basics.model import RMSNorm
from cs336_systems.bench.case import configurations
from cs336_systems.bench.cases import autocast_dtypes
from cs336_systems.bench.cases.autocast_dtypes import CASE, AutocastDtypesBench, ToyModel, measure
from cs336_systems.bench.row import Row
from cs336_systems.report.tables import csv_text
from cs336_systems.report.views import VIEWS, rows_table

NAMES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
NORMS = ("layer_norm", "rms_norm")


def dtypes(norm: str, precision: str, device: str = "cpu") -> dict[str, str]:
    config = AutocastDtypesBench(norm=norm, precision=precision, device=device)  # type: ignore[arg-type]
    ran, metrics = measure(config)
    assert ran == {"device": device}
    return metrics["dtypes"]


@pytest.mark.parametrize("precision", NAMES)
@pytest.mark.parametrize("norm", NORMS)
def test_weights_and_gradients_stay_float32_and_products_are_cast(norm: str, precision: str) -> None:
    found = dtypes(norm, precision)
    assert {found[name] for name in ("parameters", "gradients", "loss")} == {"float32"}
    assert {found[name] for name in ("fc1_output", "logits")} == {NAMES[precision]}


@pytest.mark.parametrize("precision", NAMES)
def test_an_own_norm_returns_the_type_of_its_input(precision: str) -> None:
    found = dtypes("rms_norm", precision)
    assert found["norm_output"] == found["fc1_output"]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_layer_norm_is_float32_where_autocast_lists_it(precision: str, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    with torch.autocast(device, dtype=getattr(torch, NAMES[precision])):
        x = torch.ones(2, 10, device=device, dtype=getattr(torch, NAMES[precision]))
        expected = nn.functional.layer_norm(x, (10,)).dtype
    assert dtypes("layer_norm", precision, device)["norm_output"] == str(expected).removeprefix("torch.")
    assert expected == (torch.float32 if device == "cuda" else x.dtype)


def test_types_are_read_from_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    class Widening(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(size, dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> Tensor:
            return x.float() * self.weight

    monkeypatch.setitem(autocast_dtypes._NORMS, "layer_norm", Widening)
    found = dtypes("layer_norm", "bf16")
    assert (found["fc1_output"], found["norm_output"]) == ("bfloat16", "float32")
    assert found["parameters"] == found["gradients"] == "bfloat16, float32"


def test_the_model_equals_the_handouts() -> None:
    model = ToyModel(20, 5)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == {
        "fc1.weight": (10, 20),
        "ln.weight": (10,),
        "ln.bias": (10,),
        "fc2.weight": (5, 10),
    }
    x = torch.randn(3, 20)
    truth = nn.functional.layer_norm((x @ model.fc1.weight.T).relu(), (10,)) @ model.fc2.weight.T
    torch.testing.assert_close(model(x), truth)
    assert isinstance(ToyModel(20, 5, "rms_norm").ln, RMSNorm)


def test_the_table_has_types_and_device() -> None:
    rows: list[Row] = list(CASE.measure(configurations(CASE, {"device": ("cpu",)}, quick=True)))
    assert [row.status for row in rows] == ["ok"] * 6
    table = rows_table(rows)
    assert "device cpu" in table
    line = "| layer_norm | fp32 |" + " float32 |" * 6
    assert line in table
    assert "bfloat16" in csv_text(rows, VIEWS[CASE.name])
