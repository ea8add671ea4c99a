"""The case `precision-accumulation`: the sums equal NumPy's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cs336_systems.bench.case import configurations
from cs336_systems.bench.cases.precision_accumulation import ACCUMULATIONS, CASE, PrecisionAccumulationBench, measure
from cs336_systems.bench.row import append_row, read_rows
from cs336_systems.report.views import rows_table

# Type of the values and of the sum; casting a float16 to float32 changes no value.
NUMPY = {
    "fp32 into fp32": (np.float32, np.float32),
    "fp16 into fp16": (np.float16, np.float16),
    "fp16 into fp32": (np.float16, np.float32),
    "fp16 cast to fp32 into fp32": (np.float16, np.float32),
}


def metrics_of(accumulation: str, **fields: float) -> dict[str, Any]:
    return measure(PrecisionAccumulationBench(accumulation=accumulation, **fields))[1]  # type: ignore[arg-type]


@pytest.mark.parametrize("value, count", [(0.01, 1000), (0.1, 300), (1.0, 3000), (-3.7, 1)])
@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
def test_a_sum_equals_numpys(accumulation: str, value: float, count: int) -> None:
    value_type, sum_type = NUMPY[accumulation]
    total = sum_type(0)
    for _ in range(count):
        total = sum_type(total + sum_type(value_type(value)))
    metrics = metrics_of(accumulation, value=value, count=count)
    assert metrics["sum"] == float(total)
    assert metrics["error"] == float(total) - value * count


def test_rows_separate_rounding_of_the_value_and_of_the_sum() -> None:
    error = {name: metrics_of(name)["error"] for name in ACCUMULATIONS}
    nearest = 655 / 65536  # the float16 nearest to 0.01, where its steps are 2^-17: 1311 / 131072
    assert abs(1311 / 131072 - 0.01) < abs(nearest - 0.01)
    assert error["fp16 into fp32"] == pytest.approx(1000 * 1311 / 131072 - 10, abs=1e-4)
    assert error["fp16 cast to fp32 into fp32"] == error["fp16 into fp32"]
    assert abs(error["fp32 into fp32"]) < 1e-3 < abs(error["fp16 into fp32"]) < 1e-2 < abs(error["fp16 into fp16"])


def test_a_float16_sum_of_ones_ends_where_its_steps_are_two() -> None:
    assert metrics_of("fp16 into fp16", value=1.0, count=3000)["sum"] == 2048
    assert metrics_of("fp16 into fp32", value=1.0, count=3000)["sum"] == 3000


def test_an_overflowing_sum_is_a_failed_row(tmp_path: Path) -> None:
    (row,) = CASE.measure([PrecisionAccumulationBench(accumulation="fp16 into fp16", value=100.0, count=1000)])
    assert (row.status, row.error) == ("error", "metrics.sum is inf: it must be a finite number")
    append_row(tmp_path / "rows.jsonl", row)
    assert read_rows(tmp_path / "rows.jsonl") == [row]


def test_the_table_has_enough_digits_to_show_the_difference() -> None:
    rows = list(CASE.measure(configurations(CASE, quick=True)))
    table = rows_table(rows)
    assert [row.variant for row in rows] == list(ACCUMULATIONS)
    assert "value 0.01; count 1000" in table
    assert "| fp16 into fp16 | 9.9531250 | -0.0468750 | float16 |" in table
    assert "| fp16 into fp32 | 10.0021362 | +0.0021362 | float32 |" in table
