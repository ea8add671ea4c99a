"""What is shown of the attention cases `attention`, `flash`, `kernels` and `leaderboard-2025`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..bench.row import Row
from ..machine.hardware import DTYPES
from .tables import markdown_table, row_fields
from .view import OUTCOMES, Column, Plot, View

PEERS = ("sdpa", "sdpa_flash", "sdpa_cudnn", "sdpa_math", "flex", "fa4")


def with_speedups(rows: Sequence[Row], metric: str, name: str, field: str, *references: Any) -> list[Row]:
    """Rows with a metric `name`: how many times as fast each is as the fastest of its references, by p50 of `metric`.

    A row's references are those whose `field` has one of the values in `references`, and whose other fields, machine
    and software are the same.
    """
    reference = fastest(rows, metric, field, *references)

    def ratio(row: Row) -> dict[str, float]:
        best = reference(row) if row.status == "ok" else None
        return {} if best is None else {name: _median(best, metric) / _median(row, metric)}

    return [replace(row, metrics={**row.metrics, **ratio(row)}) for row in rows]


def fastest(rows: Sequence[Row], metric: str, field: str, *references: Any) -> Callable[[Row], Row | None]:
    """What finds the fastest of a row's references by p50 of `metric`, which are those of `with_speedups`."""
    best: dict[str, Row] = {}
    for row in rows:
        if row.status == "ok" and row.config.get(field) in references:
            key = _others(row, field)
            best[key] = min(best.get(key, row), row, key=lambda each: _median(each, metric))
    return lambda row: best.get(_others(row, field))


def _median(row: Row, metric: str) -> float:
    fields, where = row_fields(row), f"metrics.{metric}.p50"
    value = fields.value(where)
    if value <= 0:
        raise ValueError(f"{fields.where} has {where} {value!r}: it must be above 0")
    return value


def _others(row: Row, field: str) -> str:
    others = sorted((name, str(value)) for name, value in row.config.items() if name != field)
    return f"{others} {[row.env.get(name) for name in ('gpu', 'driver', 'cuda', 'torch', 'triton')]}"


def _against_plain_and_peers(rows: Sequence[Row]) -> list[Row]:
    for phase in ("forward", "backward", "forward_backward"):
        rows = with_speedups(rows, f"{phase}_ms", f"{phase}_speedup", "kernel", "naive")
    return with_speedups(rows, "forward_backward_ms", "over_best_peer", "kernel", *PEERS)


def _against_eager(rows: Sequence[Row]) -> list[Row]:
    for phase in ("forward", "backward"):
        rows = with_speedups(rows, f"{phase}_ms", f"{phase}_speedup", "compile", False)
    return list(rows)


def _with_kernel(rows: Sequence[Row]) -> list[Row]:
    """Rows with the kernel as a field; older rows have it only as their variant."""
    return [replace(row, config={"kernel": row.variant, **row.config}) for row in rows]


_FORWARD, _BACKWARD = (Column(f"{phase} (ms)", f"{phase}_ms.p50", ".4g") for phase in ("forward", "backward"))
_BOTH = Column("both (ms)", "forward_backward_ms.p50", ".4g")
_BOTH_TFLOPS = Column("both (TFLOP/s)", "forward_backward_tflops", ".3g")
_TFLOPS = (*(Column(f"{phase} (TFLOP/s)", f"{phase}_tflops", ".3g") for phase in ("forward", "backward")), _BOTH_TFLOPS)
_BEFORE_BACKWARD = Column("in use before backward (GiB)", "memory_before_backward_bytes", ".3g", 2**30)


_SUM = Column("forward + backward (ms)", _BOTH.where)
_SUM_TFLOPS = Column("forward + backward (TFLOP/s)", _BOTH_TFLOPS.where)


def _over_length(name: str, y: Column, log: str = "xy") -> Plot:
    return Plot(name=name, y=y, x="length", lines=("kernel",), log=log, panels=("head_size",), files={"dtype": DTYPES})


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
            *(
                Column(f"{phase} (x naive)", f"{name}_speedup")
                for phase, name in (("forward", "forward"), ("backward", "backward"), ("both", "forward_backward"))
            ),
            Column("both (x best peer)", "over_best_peer"),
        ),
        plots=(
            _over_length("forward", _FORWARD),
            _over_length("backward", _BACKWARD),
            _over_length("both", _SUM),
            _over_length("tflops", _SUM_TFLOPS, log="x"),
        ),
        derive=_against_plain_and_peers,
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
        derive=_with_kernel,
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
"""By case; `kernels` also has a table of its own."""


def attention_table(rows: Sequence[Row]) -> str:
    """Two tables for each type, mask and device, in their order of appearance."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(_setting(row), []).append(row)
    return "\n\n".join(_tables(setting, group) for setting, group in groups.items())


def _setting(row: Row) -> str:
    """The setting of a row's times besides kernel and shape: "bf16, causal, NVIDIA H200, "."""
    config, device = row.config, row.config.get("device")
    is_causal = config.get("is_causal")
    mask = None if is_causal is None else "causal" if is_causal else "not causal"
    on = "CPU" if device == "cpu" else row.env.get("gpu") or device
    return "".join(f"{part}, " for part in (config.get("dtype"), mask, on) if part is not None)


def _tables(setting: str, rows: Sequence[Row]) -> str:
    """Medians, with a line per kernel and a column per shape; then likewise the handout's call, memory and start-up."""
    cells = {(row.variant, _shape(row)): row for row in rows}  # the last, if there are several
    kernels = list(dict.fromkeys(kernel for kernel, _ in cells))
    shapes = list(dict.fromkeys(shape for _, shape in cells))

    def times(row: Row) -> str:
        if row.status != "ok":
            refused = (row.error or "").startswith("ValueError:")  # a kernel raises it for what it does not serve
            return "not served" if refused else OUTCOMES[row.status]
        fields = row_fields(row)
        three = (fields.number(f"metrics.{n}_ms.p50", ".3g") for n in ("forward", "backward", "forward_backward"))
        return f"{' / '.join(three)} ({fields.number('metrics.forward_backward_tflops', '.3g')})"

    def details(row: Row) -> str:
        if row.status != "ok":
            return "-"
        fields = row_fields(row)
        on_gpu = "extra_memory_bytes" in row.metrics
        return " / ".join(
            (
                fields.number("metrics.forward_sum_backward_ms.p50", ".3g"),
                fields.number("metrics.extra_memory_bytes", ",.1f", 2**20) if on_gpu else "n/a",
                fields.number("metrics.first_call_s", ".1f"),
            )
        )

    def table(cell: Callable[[Row], str]) -> str:
        def show(kernel: str, shape: str) -> str:
            row = cells.get((kernel, shape))
            return "-" if row is None else cell(row)

        lines = [(kernel, *(show(kernel, shape) for shape in shapes)) for kernel in kernels]
        return markdown_table(["B x H x N x D", *shapes], lines)

    return "\n\n".join(
        (
            f"{setting}medians of forward / backward / both in ms (TFLOP/s of both):",
            table(times),
            f"{setting}`attention(q, k, v).sum().backward()` in ms / memory beyond q, k, v, o and their gradients in "
            "MiB / the first call of all, with what it compiles, in s:",
            table(details),
        )
    )


def _shape(row: Row) -> str:
    fields = row_fields(row)
    shape = fields.get("config.shape")
    if not isinstance(shape, list | tuple):
        raise ValueError(f"{fields.where} has config.shape {shape!r}: it must be a list of numbers")
    return "x".join(map(str, shape))
