"""The cases `precision-accumulation` and `autocast-dtypes`: sums equal NumPy's, types are those of the computation."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cs336_basics.model import RMSNorm
from cs336_systems.bench.case import configurations
from cs336_systems.bench.cases import get_case
from cs336_systems.bench.cases import precision as case
from cs336_systems.bench.cases.precision import (
    ACCUMULATIONS,
    AutocastDtypesBench,
    PrecisionAccumulationBench,
    ToyModel,
)
from cs336_systems.bench.row import append_row, read_rows
from cs336_systems.report.tables import csv_text
from cs336_systems.report.views import VIEWS, rows_table

SUMS, DTYPES = get_case("precision-accumulation"), get_case("autocast-dtypes")
# Type of the values and of the sum; casting a float16 to float32 changes no value.
NUMPY = {
    "fp32 into fp32": (np.float32, np.float32),
    "fp16 into fp16": (np.float16, np.float16),
    "fp16 into fp32": (np.float16, np.float32),
    "fp16 cast to fp32 into fp32": (np.float16, np.float32),
}


def metrics_of(types: str, **fields: float) -> dict[str, Any]:
    config = PrecisionAccumulationBench(accumulation=types, **fields)  # type: ignore[arg-type]
    return case.accumulate(config)[1]


@pytest.mark.parametrize("value, count", [(0.01, 1000), (0.1, 300), (1.0, 3000), (-3.7, 1)])
@pytest.mark.parametrize("types", ACCUMULATIONS)
def test_a_sum_equals_numpys(types: str, value: float, count: int) -> None:
    value_type, sum_type = NUMPY[types]
    total = sum_type(0)
    for _ in range(count):
        total = sum_type(total + sum_type(value_type(value)))
    metrics = metrics_of(types, value=value, count=count)
    assert metrics["sum"] == float(total)
    assert metrics["error"] == float(total) - value * count


def test_rows_separate_rounding_of_the_value_and_of_the_sum() -> None:
    error = {name: metrics_of(name)["error"] for name in ACCUMULATIONS}
    nearest = 655 / 65536  # the float16 nearest to 0.01, where its steps are 2^-17: 1311 / 131072
    assert abs(1311 / 131072 - 0.01) < abs(nearest - 0.01)
    assert error["fp16 into fp32"] == pytest.approx(1000 * 1311 / 131072 - 10, abs=1e-4)
    assert error["fp16 cast to fp32 into fp32"] == error["fp16 into fp32"]
    assert abs(error["fp32 into fp32"]) < 1e-3 < abs(error["fp16 into fp32"]) < 1e-2 < abs(error["fp16 into fp16"])


def test_an_overflowing_sum_is_a_failed_row(tmp_path: Path) -> None:
    (row,) = SUMS.measure([PrecisionAccumulationBench(accumulation="fp16 into fp16", value=100.0)])
    assert (row.status, row.error) == ("error", "metrics.sum is inf: it must be a finite number")
    append_row(tmp_path / "rows.jsonl", row)
    assert read_rows(tmp_path / "rows.jsonl") == [row]


def test_the_table_has_enough_digits_to_show_the_difference() -> None:
    rows = list(SUMS.measure(configurations(SUMS, quick=True)))
    table = rows_table(rows)
    assert [row.variant for row in rows] == list(ACCUMULATIONS)
    assert "value 0.01; count 1000" in table
    assert "| fp16 into fp16 | 9.9531250 | -0.0468750 | float16 |" in table
    assert "| fp16 into fp32 | 10.0021362 | +0.0021362 | float32 |" in table


# Autocast


NAMES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
NORMS = ("layer_norm", "rms_norm")


def dtypes(norm: str, precision: str, device: str = "cpu") -> dict[str, str]:
    config = AutocastDtypesBench(norm=norm, precision=precision, device=device)  # type: ignore[arg-type]
    ran, metrics = case.read_dtypes(config)
    assert ran == {"device": device}
    return metrics["dtypes"]


@pytest.mark.parametrize("precision", NAMES)
@pytest.mark.parametrize("norm", NORMS)
def test_weights_and_gradients_stay_float32_and_products_are_cast(norm: str, precision: str) -> None:
    found = dtypes(norm, precision)
    assert {found[name] for name in ("parameters", "gradients", "loss")} == {"float32"}
    assert {found[name] for name in ("fc1_output", "logits")} == {NAMES[precision]}
    if norm == "rms_norm":  # our own returns the type of its input
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

    monkeypatch.setitem(case._NORMS, "layer_norm", Widening)
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
    rows = list(DTYPES.measure(configurations(DTYPES, {"device": ("cpu",)}, quick=True)))
    assert [row.status for row in rows] == ["ok"] * 6
    table = rows_table(rows)
    assert "device cpu" in table
    line = "| layer_norm | fp32 |" + " float32 |" * 6
    assert line in table
    assert "bfloat16" in csv_text(rows, VIEWS[DTYPES.name])
