"""Views of the attention cases."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..bench.row import Row
from .fields import get
from .spec import Column, Plot, View

PEERS = ("sdpa", "sdpa_flash", "sdpa_cudnn", "sdpa_math", "flex", "fa4")


def with_speedups(rows: Sequence[Row], metric: str, name: str, field: str, *references: Any) -> list[Row]:
    """Rows with a further metric `name`: the median of `metric` of the fastest reference, divided by the row's own.

    The references of a row have one of `references` as their `field`, and the row's own value of every other field,
    machine and version. A row without any gets no such metric.
    """

    def others(row: Row) -> str:
        config = sorted((name, str(value)) for name, value in row.config.items() if name != field)
        return f"{config} {[row.env.get(name) for name in ('gpu', 'driver', 'cuda', 'torch', 'triton')]}"

    known: dict[str, dict[Any, float]] = {}
    for row in rows:
        if row.status == "ok" and row.config.get(field) in references and metric in row.metrics:
            # The last one, if it was measured again.
            known.setdefault(others(row), {})[row.config[field]] = get(row, f"metrics.{metric}.p50")
    found = []
    for row in rows:
        if row.status == "ok" and metric in row.metrics and (times := known.get(others(row))):
            faster = min(times.values()) / get(row, f"metrics.{metric}.p50")
            row = replace(row, metrics={**row.metrics, name: faster})
        found.append(row)
    return found


def _against(rows: Sequence[Row], field: str, reference: Any) -> list[Row]:
    """Rows with the speed-up of each pass over the reference, and over the fastest peer."""
    for phase in ("forward", "backward", "forward_backward"):
        rows = with_speedups(rows, f"{phase}_ms", f"{phase}_speedup", field, reference)
    return with_speedups(rows, "forward_backward_ms", "over_best_peer", "kernel", *PEERS)


def _wrong_results(row: Row) -> str:
    """What is wrong with a kernel of your own; '' if nothing is."""
    return str(row.metrics.get("wrong_results", ""))


def _as_tiers(rows: Sequence[Row]) -> list[Row]:
    """Rows of `attention-sweep` with the tier as on the command line, and their speed-up over naive attention."""
    named = [replace(row, config={**row.config, "tier": ":".join(map(str, row.config["tier"]))}) for row in rows]
    return with_speedups(named, "forward_ms", "forward_speedup", "kernel", "naive")


_FORWARD, _BACKWARD = (Column(f"{phase} (ms)", f"{phase}_ms.p50", ".4g") for phase in ("forward", "backward"))
_BOTH = Column("both (ms)", "forward_backward_ms.p50", ".4g")
_BOTH_TFLOPS = Column("both (TFLOP/s)", "forward_backward_tflops", ".3g")
_TFLOPS = (*(Column(f"{phase} (TFLOP/s)", f"{phase}_tflops", ".3g") for phase in ("forward", "backward")), _BOTH_TFLOPS)
_SUM = replace(_BOTH, name="forward + backward (ms)")
_SUM_TFLOPS = replace(_BOTH_TFLOPS, name="forward + backward (TFLOP/s)")
_BEFORE_BACKWARD = Column("in use before backward (GiB)", "memory_before_backward_bytes", ".3g", 2**30)

_SUM_MEAN = Column("mean (ms)", "forward_sum_backward_ms.mean", ".3f")
_SPEEDUP = Column("times as fast as naive", "forward_speedup")
_SWEEP_KEYS = ("dtype", "is_causal", "batch_size", "num_heads", "head_size")

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
        derive=lambda rows: _against(rows, "compile", False),
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
            Plot(name=name, y=y, x="length", lines=("kernel",), log=log, panels=("head_size",), files=("dtype",))
            for name, y, log in (
                ("forward", _FORWARD, "xy"),
                ("backward", _BACKWARD, "xy"),
                ("both", _SUM, "xy"),
                ("tflops", _SUM_TFLOPS, "x"),
            )
        ),
        details=_wrong_results,
        derive=lambda rows: _against(rows, "kernel", "naive"),
    ),
    "kernels": View(
        keys=("dtype", "is_causal", "shape", "num_kv_heads", "window", "document_length", "host_time", "kernel"),
        columns=(
            _FORWARD,
            _BACKWARD,
            _BOTH,
            Column("sum().backward() (ms)", "forward_sum_backward_ms.p50", ".4g"),
            *_TFLOPS,
            Column("memory beyond inputs and results (MiB)", "extra_memory_bytes", ",.1f", 2**20),
            Column("first call (s)", "first_call_s", ".1f"),
        ),
        plots=(Plot(name="tflops", y=_SUM_TFLOPS, x="shape", lines=("kernel",), kind="bar", files=("dtype",)),),
        details=_wrong_results,
        # older rows have the kernel only as their variant, and their host_time was true
        derive=lambda rows: [
            replace(row, config={"kernel": row.variant, "host_time": True, **row.config}) for row in rows
        ],
    ),
    "leaderboard-2025": View(
        keys=("num_heads", "length", "head_size", "dtype", "rep_ms", "warmup_ms", "kernel", "compile"),
        columns=(
            replace(_SUM_MEAN, name="mean (ms), as the handout prints it"),
            *(Column(f"{name} (ms)", f"forward_sum_backward_ms.{name}", ".3f") for name in ("p20", "p50", "p80")),
            Column("std (ms)", "forward_sum_backward_ms.std", ".3f"),
            Column("calls", "calls", ","),
            Column("TFLOP/s", "forward_sum_backward_tflops", ".3g"),
            Column("peak (GiB)", "peak_memory_bytes", ".2f", 2**30),
        ),
        plots=(Plot(name="time", y=_SUM_MEAN, x="kernel", lines=("compile",), kind="bar"),),
    ),
    "attention-sweep": View(
        keys=(*_SWEEP_KEYS, "tier", "kernel"),
        columns=(
            _FORWARD,
            *(Column(f"{name} (ms)", f"forward_ms.{name}", ".4g") for name in ("p20", "p80", "mean", "std")),
            Column("TFLOP/s", "forward_tflops", ".1f"),
            _SPEEDUP,
        ),
        plots=(Plot(name="forward", y=_FORWARD, x="tier", lines=("kernel",), kind="bar", log="y"),),
        derive=_as_tiers,
    ),
}
