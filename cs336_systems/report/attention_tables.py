"""Views of the attention cases `attention`, `flash`, `kernels` and `leaderboard-2025`, and the table of `kernels`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..bench.row import Row
from ..machine.hardware import DTYPES
from .fields import get, number
from .markdown import markdown_table
from .selection import OUTCOMES
from .spec import Column, Plot, View

PEERS = ("sdpa", "sdpa_flash", "sdpa_cudnn", "sdpa_math", "flex", "fa4")


def with_speedups(rows: Sequence[Row], metric: str, name: str, field: str, *references: Any) -> list[Row]:
    """Rows with a further metric `name`: the median of `metric` of the fastest reference, divided by the row's own.

    The references of a row are the rows of `fastest`. A row without any gets no such metric.
    """
    reference = fastest(rows, metric, field, *references)
    found = []
    for row in rows:
        best = reference(row) if row.status == "ok" else None
        if best is not None:
            row = replace(row, metrics={**row.metrics, name: _median(best, metric) / _median(row, metric)})
        found.append(row)
    return found


def fastest(rows: Sequence[Row], metric: str, field: str, *references: Any) -> Callable[[Row], Row | None]:
    """A function from a row to its reference with the lowest median of `metric`, or to None.

    The references of a row have one of `references` as their `field`, and the row's own value of every other field,
    machine and version.
    """

    def others(row: Row) -> str:
        config = sorted((name, str(value)) for name, value in row.config.items() if name != field)
        return f"{config} {[row.env.get(name) for name in ('gpu', 'driver', 'cuda', 'torch', 'triton')]}"

    best: dict[str, Row] = {}
    for row in rows:
        if row.status == "ok" and row.config.get(field) in references:
            best[others(row)] = min(best.get(others(row), row), row, key=lambda each: _median(each, metric))
    return lambda row: best.get(others(row))


def _median(row: Row, metric: str) -> float:
    return get(row, f"metrics.{metric}.p50")


def _against_eager(rows: Sequence[Row]) -> list[Row]:
    for phase in ("forward", "backward"):
        rows = with_speedups(rows, f"{phase}_ms", f"{phase}_speedup", "compile", False)
    return list(rows)


def _against_naive_and_peers(rows: Sequence[Row]) -> list[Row]:
    for phase in ("forward", "backward", "forward_backward"):
        rows = with_speedups(rows, f"{phase}_ms", f"{phase}_speedup", "kernel", "naive")
    return with_speedups(rows, "forward_backward_ms", "over_best_peer", "kernel", *PEERS)


_FORWARD, _BACKWARD = (Column(f"{phase} (ms)", f"{phase}_ms.p50", ".4g") for phase in ("forward", "backward"))
_BOTH = Column("both (ms)", "forward_backward_ms.p50", ".4g")
_BOTH_TFLOPS = Column("both (TFLOP/s)", "forward_backward_tflops", ".3g")
_TFLOPS = (*(Column(f"{phase} (TFLOP/s)", f"{phase}_tflops", ".3g") for phase in ("forward", "backward")), _BOTH_TFLOPS)
_SUM = replace(_BOTH, name="forward + backward (ms)")
_SUM_TFLOPS = replace(_BOTH_TFLOPS, name="forward + backward (TFLOP/s)")
_BEFORE_BACKWARD = Column("in use before backward (GiB)", "memory_before_backward_bytes", ".3g", 2**30)

ATTENTION_VIEWS: dict[str, View] = {
    "attention": View(
        keys=("kernel", "dtype", "is_causal", "batch_size", "head_size", "length", "compile"),
        columns=(
            _FORWARD,
            _BACKWARD,
            Column("forward (x eager)", "forward_speedup"),
            Column("backward (x eager)", "backward_speedup"),
            _BEFORE_BACKWARD,
            Column("peak (GiB)", "peak_memory_bytes", ".3g", 2**30),
            Column("counted: a matrix of scores (GiB)", "counted_bytes.scores", ".3g", 2**30),
            Column("saved for backward (GiB)", "counted_bytes.saved_for_backward", ".3g", 2**30),
            Column("needed in backward (GiB)", "counted_bytes.backward_peak", ".3g", 2**30),
        ),
        plots=tuple(
            Plot(name=name, y=y, x="length", lines=("compile", "is_causal", "dtype"), log="xy", panels=("head_size",))
            for name, y in (("forward", _FORWARD), ("backward", _BACKWARD), ("memory", _BEFORE_BACKWARD))
        ),
        derive=_against_eager,
    ),
    "flash": View(
        keys=("dtype", "is_causal", "batch_size", "head_size", "length", "kernel"),
        columns=(
            _FORWARD,
            _BACKWARD,
            _BOTH,
            *_TFLOPS,
            Column("forward (x naive)", "forward_speedup"),
            Column("backward (x naive)", "backward_speedup"),
            Column("both (x naive)", "forward_backward_speedup"),
            Column("both (x best peer)", "over_best_peer"),
        ),
        plots=tuple(
            Plot(name=name, y=y, x="length", lines=("kernel",), log=log, panels=("head_size",), files={"dtype": DTYPES})
            for name, y, log in (
                ("forward", _FORWARD, "xy"),
                ("backward", _BACKWARD, "xy"),
                ("both", _SUM, "xy"),
                ("tflops", _SUM_TFLOPS, "x"),
            )
        ),
        derive=_against_naive_and_peers,
    ),
    "kernels": View(
        keys=("dtype", "is_causal", "shape", "kernel"),
        columns=(
            _FORWARD,
            _BACKWARD,
            _BOTH,
            Column("sum().backward() (ms)", "forward_sum_backward_ms.p50", ".4g"),
            *_TFLOPS,
            Column("memory beyond inputs and results (MiB)", "extra_memory_bytes", ",.1f", 2**20),
            Column("first call (s)", "first_call_s", ".1f"),
        ),
        plots=(Plot(name="tflops", y=_SUM_TFLOPS, x="shape", lines=("kernel",), kind="bar", files={"dtype": DTYPES}),),
        # older rows have the kernel only as their variant
        derive=lambda rows: [replace(row, config={"kernel": row.variant, **row.config}) for row in rows],
    ),
    "leaderboard-2025": View(
        keys=("num_heads", "length", "head_size", "dtype", "rep_ms", "warmup_ms", "kernel", "compile"),
        columns=(
            Column("mean (ms), as the handout prints it", "forward_sum_backward_ms.mean", ".3f"),
            *(Column(f"{name} (ms)", f"forward_sum_backward_ms.{name}", ".3f") for name in ("p20", "p50", "p80")),
            Column("std (ms)", "forward_sum_backward_ms.std", ".3f"),
            Column("calls", "calls", ","),
            Column("TFLOP/s", "forward_sum_backward_tflops", ".3g"),
            Column("peak (GiB)", "peak_memory_bytes", ".2f", 2**30),
        ),
        plots=(
            Plot(
                name="time",
                y=Column("mean (ms)", "forward_sum_backward_ms.mean", ".3f"),
                x="kernel",
                lines=("compile",),
                kind="bar",
            ),
        ),
    ),
}


def attention_table(rows: Sequence[Row]) -> str:
    """The table of `kernels`: for each type, mask and device a line per kernel and a column per shape, twice.

    The first table has medians of the phases, the second the time of the handout's call, memory and start-up.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        config, device = row.config, row.config.get("device")
        is_causal = config.get("is_causal")
        mask = None if is_causal is None else "causal" if is_causal else "not causal"
        on = "CPU" if device == "cpu" else row.env.get("gpu") or device
        setting = "".join(f"{part}, " for part in (config.get("dtype"), mask, on) if part is not None)
        groups.setdefault(setting, []).append(row)
    parts = []
    for setting, group in groups.items():
        parts += [
            f"{setting}medians of forward / backward / both in ms (TFLOP/s of both):",
            _kernels_by_shapes(group, _times),
            f"{setting}`attention(q, k, v).sum().backward()` in ms / memory beyond q, k, v, o and their gradients in "
            "MiB / first call with its compilation in s:",
            _kernels_by_shapes(group, _call_memory_and_startup),
        ]
    return "\n\n".join(parts)


def _kernels_by_shapes(rows: Sequence[Row], cell: Callable[[Row], str]) -> str:
    # The last one, if a row was measured again.
    cells = {(row.variant, "x".join(map(str, row.config["shape"]))): cell(row) for row in rows}
    kernels, shapes = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True))
    lines = [(kernel, *(cells.get((kernel, shape), "-") for shape in shapes)) for kernel in kernels]
    return markdown_table(["B x H x N x D", *shapes], lines)


def _times(row: Row) -> str:
    if row.status != "ok":
        refused = (row.error or "").startswith("ValueError:")  # raised by a kernel that does not support the shape
        return "not served" if refused else OUTCOMES[row.status]
    times = (number(row, f"metrics.{phase}_ms.p50", ".3g") for phase in ("forward", "backward", "forward_backward"))
    return f"{' / '.join(times)} ({number(row, 'metrics.forward_backward_tflops', '.3g')})"


def _call_memory_and_startup(row: Row) -> str:
    if row.status != "ok":
        return "-"
    call = number(row, "metrics.forward_sum_backward_ms.p50", ".3g")
    on_gpu = "extra_memory_bytes" in row.metrics
    memory = number(row, "metrics.extra_memory_bytes", ",.1f", 2**20) if on_gpu else "n/a"
    return f"{call} / {memory} / {number(row, 'metrics.first_call_s', '.1f')}"
