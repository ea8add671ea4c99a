"""Tables, CSV and plots of rows from an invented GPU."""

import csv
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cs336_systems.bench.row import Row, append_row, read_rows
from cs336_systems.cli.report import make_report
from cs336_systems.report.markdown import markdown_table
from cs336_systems.report.plots import figure_of
from cs336_systems.report.selection import latest, show
from cs336_systems.report.spec import Column, Plot
from cs336_systems.report.tables import csv_text
from cs336_systems.report.views import VIEWS, rows_table, write_views

KEYS = VIEWS["model"].keys
ENV = {"gpu": "NVIDIA Made-up", "cpu_threads": 8}


def row(size: str, length: int, ms: float | None, **more: Any) -> Row:
    config = dict(size=size, context_length=length, batch_size=4, mode="train_step", compile=more.pop("compile", False))
    metrics = {} if ms is None else {"step_ms": {"p50": ms, "std": 0.5}, "mfu": 0.25, "peak_memory_bytes": 3 << 30}
    status = "oom" if ms is None else "ok"
    return Row(case="model", variant="v", config=config, status=status, metrics=metrics, env=more.pop("env", ENV))  # type: ignore[arg-type]


ROWS = [row("small", 128, 10.0), row("small", 256, 21.0), row("xl", 128, 100.0), row("xl", 256, None)]


def test_fields_that_all_rows_share_are_above_the_table() -> None:
    head, _, header, rule, *lines = rows_table(ROWS).splitlines()
    assert head == "NVIDIA Made-up; batch_size 4; mode train_step; compile no:"
    assert header == "| size | context length | step (ms) | std (ms) | MFU | peak (GiB) |"
    assert rule == "| --- | --- | ---: | ---: | ---: | ---: |"
    assert lines == [
        "| small | 128 | 10.00 | 0.50 | 25.0% | 3 |",
        "| small | 256 | 21.00 | 0.50 | 25.0% | 3 |",
        "| xl | 128 | 100.00 | 0.50 | 25.0% | 3 |",
        "| xl | 256 | out of memory | - | - | - |",
    ]


def test_the_last_of_equal_rows_is_shown_in_the_place_of_the_first() -> None:
    rows = latest([*ROWS, row("small", 128, 11.0), row("small", 128, 12.0, env={"gpu": "another"})], KEYS)
    assert [r.metrics.get("step_ms", {}).get("p50") for r in rows] == [11.0, 21.0, 100.0, None, 12.0]


def test_a_row_replaces_one_that_failed_or_has_fewer_fields() -> None:
    old = [replace(row("small", 128, None), status="error"), row("small", 256, 9.0)]
    new = [replace(r, config={**r.config, "steps": 3, "d_model": 8}) for r in (row("small", 128, 1.0), ROWS[1])]
    assert latest([*old, *new], KEYS) == new


def test_swept_fields_tell_rows_apart(tmp_path: Path) -> None:
    rows = [replace(ROWS[0], config={**ROWS[0].config, "steps": steps}) for steps in (1, 3)]
    assert len(rows_table(rows).splitlines()) == 5  # the view takes them for equal
    *_, first, second = rows_table(rows, swept=["steps"]).splitlines()
    assert (first[:5], second[:5]) == ("| 1 |", "| 3 |")
    write_views(rows, tmp_path, swept=["steps"])
    assert len(list(csv.DictReader((tmp_path / "model.csv").open()))) == 2


def test_a_row_measured_on_the_cpu_of_a_gpu_machine_is_named_cpu() -> None:
    on_cpu = replace(ROWS[0], config={**ROWS[0].config, "device": "cpu"})
    assert rows_table([on_cpu]).startswith("CPU, 8 threads; ")


def test_tables_and_plots_tell_machines_apart() -> None:
    rows = [ROWS[0], row("small", 128, 11.0, env={"gpu": "another"}), row("small", 128, 12.0, env={"cpu_threads": 2})]
    lines = rows_table(rows).splitlines()
    assert lines[0] == "size small; context_length 128; batch_size 4; mode train_step; compile no:"
    assert [line.split(" | ")[0] for line in lines[4:]] == ["| NVIDIA Made-up", "| another", "| CPU, 2 threads"]
    drawn = figure_of(VIEWS["model"].plots[0], rows, KEYS).axes[0].lines
    assert [line.get_label() for line in drawn] == ["NVIDIA Made-up", "another", "CPU, 2 threads"]


def test_rows_that_differ_in_a_field_unknown_to_the_plot_are_separate_lines() -> None:
    plot = Plot(name="p", y=Column("y", "step_ms.p50"), x="context_length", lines=("size",))
    rows = [*ROWS[:2], *(replace(r, config={**r.config, "batch_size": 8}) for r in ROWS[:2])]
    assert [line.get_label() for line in figure_of(plot, rows, KEYS).axes[0].lines] == ["batch size 4", "batch size 8"]


def test_a_line_with_a_single_point_has_a_marker() -> None:
    y = Column("y", "step_ms.p50")
    plot = Plot(name="p", y=y, x="context_length", lines=("size",), beside=Column("predicted", "mfu"))
    lines = {line.get_label(): line for line in figure_of(plot, ROWS, KEYS).axes[0].lines}
    assert {name: len(line.get_xdata()) for name, line in lines.items()} == {
        "small": 2, "small, predicted": 2, "xl": 1, "xl, predicted": 1
    }  # fmt: skip
    assert lines["small, predicted"].get_marker() == "None"
    assert {lines[name].get_marker() for name in ("xl", "xl, predicted")} <= {"o", "x"}


def test_a_prediction_shared_by_all_lines_is_drawn_once() -> None:
    rows = [replace(row(size, length, 2.0), metrics={"step_ms": {"p50": 2.0}, "mfu": length / 1000})
            for size in ("small", "xl") for length in (128, 256)]  # fmt: skip
    y = Column("y", "step_ms.p50")
    plot = Plot(name="p", y=y, x="context_length", lines=("size",), beside=Column("predicted", "mfu"))
    labels = [line.get_label() for line in figure_of(plot, rows, KEYS).axes[0].lines]
    assert labels == ["small", "xl", "predicted"]


def test_every_step_after_the_warmup_is_a_point() -> None:
    rows = [
        replace(row("small", 128, 2.0), config={"size": "small", "warmup": 1}, metrics={"steps_ms": [5.0, 2.0, 2.5]})
    ]
    (plot,) = VIEWS["warmup"].plots
    (line,) = figure_of(plot, [point for row in rows for point in plot.points(row)], ()).axes[0].lines
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([2, 3, 4], [5.0, 2.0, 2.5])


def test_a_single_row_is_named_by_its_variant() -> None:
    assert "| v | 10.00 |" in rows_table(ROWS[:1])
    assert "| v | out of memory |" in rows_table(ROWS[3:])


def test_csv_has_every_field_and_unrounded_numbers() -> None:
    lines = list(csv.DictReader(io.StringIO(csv_text(ROWS, VIEWS["model"]))))
    assert [line["step_ms.p50"] for line in lines] == ["10.0", "21.0", "100.0", ""]
    assert [line["status"] for line in lines] == ["ok", "ok", "ok", "oom"]
    assert lines[2]["peak_memory_bytes"] == str(3 << 30)
    assert (lines[0]["compile"], lines[0]["size"]) == ("False", "small")


def test_a_case_gets_a_table_a_csv_file_and_plots(tmp_path: Path) -> None:
    files = write_views(ROWS, tmp_path)
    assert [file.name for file in files] == ["model.md", "model.csv", "model-step.png", "model-peak.png"]
    assert files[2].read_bytes().startswith(b"\x89PNG")
    assert write_views(ROWS[3:], tmp_path / "none")  # nothing to draw is no error


def test_an_error_message_is_one_escaped_line(tmp_path: Path) -> None:
    error = "out of *luck*\n\n1. ![x](/etc/passwd) <!-- end -->\n```\n\x1b]0;\ud800" + "long " * 200
    path = tmp_path / "rows.jsonl"
    append_row(path, Row(case="model", variant="v", config={"size": "a<b"}, env={}, status="error", error=error))
    *_, failure = rows_table(read_rows(path)).splitlines()
    escaped = r"- failed: out of \*luck\* 1. \!\[x\](/etc/passwd) \<\!-- end --\> \`\`\` ?\]0;?long long "
    assert failure.startswith(escaped)
    assert failure.endswith("...")
    assert len(failure) < 600
    assert r"size a\<b" in rows_table(read_rows(path))


def test_markdown_tables_escape_bars() -> None:
    assert markdown_table(["a", "b"], [["1", "2|3"]]) == "| a | b |\n| --- | ---: |\n| 1 | 2\\|3 |"


def test_an_unknown_case_is_refused() -> None:
    with pytest.raises(ValueError, match="a row has case 'x': it must be one of "):
        rows_table([Row(case="x", variant="v", config={}, env={})])


def test_every_plot_uses_fields_of_its_view() -> None:
    by_each = {"warmup": {"step"}}  # the field that `points` adds
    for name, view in VIEWS.items():
        for plot in view.plots:
            made = by_each.get(name, set())
            assert {plot.x, *plot.lines, *plot.panels, *plot.files} <= {*view.keys, *made}


DAMAGED = {
    "has no spans": (dict(case="profile-kernels", config=ROWS[0].config), "phase_wall_ms"),
    "has no tier": (dict(case="attention-sweep", config={}), "tier"),
    "has text for a number": (
        dict(case="model", config={}, metrics={"step_ms": {"p50": 1}, "mfu": "fast"}),
        "fast|format",
    ),
    "has a number for a table": (dict(case="attention", config={"compile": False}, metrics={"forward_ms": 3}), "p50"),
}


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize("report", ["rows", "tables"])
def test_rows_that_cannot_be_shown_are_an_error_that_names_their_files(name: str, report: str, tmp_path: Path) -> None:
    damaged, message = DAMAGED[name]
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    append_row(good, ROWS[0])
    append_row(bad, Row(variant="v", env=ENV, **damaged))
    out = ["--out", str(tmp_path / "out")] if report == "tables" else []
    with pytest.raises(ValueError, match=f"^{good}, {bad}: .*({message})"):
        make_report([report, str(good), str(bad), *out])
    assert not [*tmp_path.glob("out/*")]


def test_a_file_without_rows_is_named(tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").touch()
    with pytest.raises(ValueError, match=r"none\.jsonl: there is no row"):
        make_report(["rows", str(tmp_path / "none.jsonl")])


@pytest.mark.parametrize("value, text", [(1.0, "1"), (1e-05, "1e-05"), (314.145, "314.145"), (1234567.5, "1234567.5")])
def test_numbers_are_as_short_as_possible_without_loss(value: float, text: str) -> None:
    assert show(value) == text
