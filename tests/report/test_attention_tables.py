"""Tables and plots of attention, of rows from an invented GPU."""

import csv
import itertools
from pathlib import Path
from typing import Any

import pytest

from cs336_systems.bench.cases.attention import KERNELS
from cs336_systems.bench.row import Row
from cs336_systems.report.attention_tables import with_speedups
from cs336_systems.report.plots import KERNEL_COLORS, KERNEL_MARKERS
from cs336_systems.report.views import VIEWS, rows_table, write_views

ENV = {"gpu": "NVIDIA Made-up", "cpu_threads": 8}
PNG = b"\x89PNG"


def flash_row(kernel: str, dtype: str, head_size: int, length: int, ms: float | None) -> Row:
    config = dict(kernel=kernel, dtype=dtype, is_causal=True, batch_size=1, head_size=head_size, length=length)
    phases = ("forward", "backward", "forward_backward")
    metrics: dict[str, Any] = {} if ms is None else {f"{phase}_ms": {"p50": ms} for phase in phases}
    metrics |= {} if ms is None else {f"{phase}_tflops": 100.0 for phase in phases}
    status: Any = "oom" if ms is None else "ok"
    return Row(case="flash", variant=kernel, config=config, status=status, metrics=metrics, env=ENV)


def test_speedups_are_over_the_fastest_reference_of_the_same_shape() -> None:
    rows = [
        flash_row("naive", "bf16", 64, 128, 8.0),
        flash_row("flex", "bf16", 64, 128, 2.0),
        flash_row("sdpa", "bf16", 64, 128, 4.0),
        flash_row("flash_triton", "bf16", 64, 128, 1.0),
        flash_row("naive", "bf16", 64, 256, None),
        flash_row("flash_triton", "bf16", 64, 256, 3.0),
        flash_row("sdpa", "fp32", 64, 256, 6.0),
    ]
    over = with_speedups(rows, "forward_ms", "x", "kernel", "sdpa", "flex")
    assert [row.metrics.get("x") for row in over] == [0.25, 1.0, 0.5, 2.0, None, None, 1.0]
    assert all("x" not in row.metrics for row in rows)
    lines = rows_table(rows).splitlines()
    assert lines[0] == "NVIDIA Made-up; is_causal yes; batch_size 1; head_size 64:"
    assert lines[2] == (
        "| dtype | length | kernel | forward (ms) | backward (ms) | both (ms) | forward (TFLOP/s) | backward (TFLOP/s) "
        "| both (TFLOP/s) | forward (x naive) | backward (x naive) | both (x naive) | both (x best peer) |"
    )
    assert lines[7] == ("| bf16 | 128 | flash_triton | 1 | 1 | 1 | 100 | 100 | 100 | 8.00 | 8.00 | 8.00 | 2.00 |")
    assert lines[8] == "| bf16 | 256 | naive | out of memory |" + " - |" * 9
    assert lines[9].endswith("| 100 | - | - | - | - |")


def test_flash_has_a_picture_for_each_type_and_a_panel_for_each_head_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: figures.append(figure))
    rows = [
        flash_row(kernel, dtype, head_size, length, length / 100)
        for kernel, dtype, head_size, length in itertools.product(
            ("naive", "flash_triton"), ("bf16", "fp32"), (128, 16, 64), (1024, 128)
        )
        if (kernel, length) != ("naive", 1024)
    ]
    files = [path.name for path in write_views(rows, tmp_path)]
    names = [
        f"flash-{name}-{dtype}.png" for name in ("forward", "backward", "both", "tflops") for dtype in ("bf16", "fp32")
    ]
    assert files == ["flash.md", "flash.csv", *names]
    panels = [axes for axes in figures[0].axes if axes.get_visible()]
    assert [axes.get_title() for axes in panels] == ["head size 16", "head size 64", "head size 128"]
    for axes in panels:
        lines = {line.get_label(): line for line in axes.get_lines()}
        assert list(lines["flash_triton"].get_xdata()) == [128, 1024]
        assert list(lines["flash_triton"].get_ydata()) == [1.28, 10.24]
        assert list(lines["naive"].get_xdata()) == [128]
        assert {name: line.get_color() for name, line in lines.items()} == {name: KERNEL_COLORS[name] for name in lines}
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert panels[0].get_ylabel() == "forward (ms)"
    assert panels[-1].get_xlabel() == "length"


@pytest.mark.usefixtures("unrendered")
def test_each_type_has_pictures_if_it_has_two_lengths(tmp_path: Path) -> None:
    rows = [flash_row("naive", dtype, 16, length, 1.0) for dtype in ("bf16", "fp32") for length in (128, 1024)]
    write_views(rows[:3], tmp_path)
    names = {f"flash-{name}-{{}}.png" for name in ("forward", "backward", "both", "tflops")}
    assert {file.name for file in tmp_path.glob("*.png")} == {name.format("bf16") for name in names}
    write_views(rows, tmp_path)
    assert {file.name for file in tmp_path.glob("*.png")} == {n.format(d) for n in names for d in ("bf16", "fp32")}


def test_flash_without_measurements_has_no_plot(tmp_path: Path) -> None:
    files = write_views([flash_row("naive", "bf16", 64, 65536, None)], tmp_path)
    assert [path.name for path in files] == ["flash.md", "flash.csv"]


def test_every_kernel_has_its_own_colour_and_marker() -> None:
    assert set(KERNELS) <= set(KERNEL_COLORS)
    assert len(set(KERNEL_COLORS.values())) == len(set(KERNEL_MARKERS.values())) == len(KERNEL_COLORS)


def test_attention_out_of_memory_still_shows_the_counted_bytes() -> None:
    def row(length: int, compile: bool, ms: float | None, status: Any = "ok") -> Row:
        counted = {"scores": 3 << 30, "saved_for_backward": 4 << 30, "backward_peak": 9 << 30}
        times = {} if ms is None else {"forward_ms": {"p50": ms}, "backward_ms": {"p50": 2 * ms}}
        config = dict(kernel="naive", head_size=64, length=length, compile=compile)
        metrics = {**times, "counted_bytes": counted}
        return Row(case="attention", variant="v", config=config, status=status, metrics=metrics, env=ENV)

    lines = rows_table([row(128, False, 3.0), row(128, True, 1.5), row(256, True, None, "oom")]).splitlines()[4:]
    assert lines == [
        "| 128 | no | 3 | 6 | 1.00 | 1.00 | 3 | 4 | 9 |",
        "| 128 | yes | 1.5 | 3 | 2.00 | 2.00 | 3 | 4 | 9 |",
        "| 256 | yes | out of memory | - | - | - | 3 | 4 | 9 |",
    ]


def sweep_row(kernel: str, tier: list[int], ms: float | None, dtype: str = "bf16") -> Row:
    config = dict(kernel=kernel, dtype=dtype, is_causal=False, batch_size=4, num_heads=16, head_size=64, tier=tier)
    metrics = {} if ms is None else {"forward_ms": {"p50": ms}, "forward_tflops": 1.0}
    status: Any = "error" if ms is None else "ok"
    return Row(case="attention-sweep", variant=kernel, config=config, status=status, metrics=metrics, env=ENV)


SWEEP = [
    sweep_row("naive", [256, 128], 9.0, "fp32"),
    sweep_row("naive", [256, 128], 8.0),
    sweep_row("sdpa", [256, 128], 2.0),
    sweep_row("naive", [64, 64], 1.0),
    sweep_row("sdpa", [64, 64], None),
]


def test_kernels_of_older_rows_were_timed_with_the_host() -> None:
    shared: dict[str, Any] = dict(dtype="bf16", is_causal=True, shape=[1, 2, 64, 16])
    configs = {"naive": shared, "sdpa": shared | {"host_time": True}}
    rows = [Row(case="kernels", variant=name, config=config, env=ENV) for name, config in configs.items()]
    assert "host_time yes" in rows_table(rows)


def test_the_sweep_has_a_table_and_bars(tmp_path: Path) -> None:
    files = write_views(SWEEP, tmp_path)
    names = [".md", ".csv", "-forward.png"]
    assert [path.name for path in files] == [f"attention-sweep{name}" for name in names]
    assert all(path.read_bytes().startswith(PNG) for path in files if path.suffix == ".png")
    with files[1].open() as file:
        lines = list(csv.DictReader(file))
    assert [(line["tier"], line["forward_ms.p50"], line["forward_speedup"], line["status"]) for line in lines] == [
        ("256:128", "9.0", "1.0", "ok"),
        ("256:128", "8.0", "1.0", "ok"),
        ("256:128", "2.0", "4.0", "ok"),
        ("64:64", "1.0", "1.0", "ok"),
        ("64:64", "", "", "error"),
    ]
    assert "| bf16 | 64:64 | sdpa | failed |" in files[0].read_text()


def test_attention_views_have_distinct_columns() -> None:
    for name in ("attention", "flash", "kernels", "leaderboard-2025", "attention-sweep"):
        columns = [column.name for column in VIEWS[name].columns]
        assert len(set(columns)) == len(columns)
