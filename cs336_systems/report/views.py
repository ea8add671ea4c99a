"""The tables and plots of every case, and the files made from rows: Markdown, CSV and PNG."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

from ..bench.row import Row, read_rows
from ..machine.files import write_whole
from ..planner.rows import naming
from . import kernel_profiles, memory_parts, memory_profiles, step_streams, strategy_tables
from .attention_tables import ATTENTION_VIEWS
from .markdown import markdown_table
from .plots import draw
from .selection import grouped_by, latest
from .spec import Column, Plot, View
from .tables import csv_text, table

Shown = TypeVar("Shown")

_TIMES = tuple(Column(f"{phase} (ms)", f"{phase}_ms.p50") for phase in ("forward", "backward", "optimizer"))
_STEP = Column("step (ms)", "step_ms.p50")
_MEAN = Column("mean (ms)", "step_ms.mean")
_STD = Column("std (ms)", "step_ms.std")
_PEAK = Column("peak (GiB)", "peak_memory_bytes", ".3g", 2**30)
_RATES = (Column("tokens/s", "tokens_per_s", ",.0f"), Column("MFU", "mfu", ".1%"))
_CALL = Column("a call (ms)", "time_ms.p50", ".4g")
_BUS = Column("bus (GB/s)", "bus_bytes_per_s", ".4g", 10**9)
_OF_RUNS = {
    "time": Column("an epoch (s)", "epoch_s", ".4g"),
    "memory": Column("peak memory of a process (GiB)", "peak_memory_bytes", ".3g", 2**30),
    "throughput": _RATES[0],
}
_MODEL_KEYS = ("size", "vocab_size", "context_length", "batch_size", "mode", "precision", "compile", "attention",
               "activation_checkpointing", "optimizer", "warmup")  # fmt: skip


def _steps(row: Row) -> list[Row]:
    """A row for each timed step, numbered from the first step of the process."""
    return [
        replace(row, config={**row.config, "step": row.config["warmup"] + i}, metrics={"step_ms": {"p50": ms}})
        for i, ms in enumerate(row.metrics.get("steps_ms", ()), 1)
    ]


def _saved_tensors(row: Row) -> str:
    """The tensors that a block saves for its backward pass, with equal ones in one line."""
    tensors, count = row.metrics["tensors"], row.metrics["num_tensors"]
    lines = [
        (t["what"], "x".join(map(str, t["shape"])), t["dtype"], str(t["count"]), f"{t['bytes'] / 2**20:.4g}")
        for t in tensors
    ]
    listed = sum(t["count"] for t in tensors)
    number = f"{count} saved tensors" if listed == count else f"{listed} of {count} saved tensors, the largest"
    table = markdown_table(("saved by", "shape", "type", "count", "MiB each"), lines)
    return f"{row.config['size']} {row.variant}, context {row.config['context_length']}, {number}:\n\n{table}"


VIEWS: dict[str, View] = {
    "model": View(
        keys=_MODEL_KEYS,
        columns=(
            *_TIMES,
            _STEP,
            _STD,
            *_RATES,
            Column("TFLOP/s", "tflops", ".3g"),
            _PEAK,
        ),
        plots=tuple(
            Plot(name=name, y=y, x="context_length", panels=("size",), log="xy",
                 lines=("mode", "precision", "compile", "attention"))
            for name, y in (("step", _STEP), ("peak", _PEAK))
        ),
    ),
    "warmup": View(
        keys=_MODEL_KEYS,
        columns=(_STEP, _MEAN, _STD, Column("first (ms)", "steps_ms.0"),
                 Column("second (ms)", "steps_ms.1"), Column("last (ms)", "steps_ms.-1")),
        plots=(
            Plot(name="steps", y=_STEP, x="step", panels=("size",), lines=("mode", "warmup"), log="y", points=_steps),
        ),
    ),
    "train-step": View(
        keys=("size", "variant", "context_length", "batch_size", "precision", "compile"),
        columns=(
            Column("step (ms)", "step_ms.mean", ".1f"),
            *_RATES,
            _PEAK,
            Column("start-up (s)", "startup_s", ".1f"),
            Column("waiting for data (ms)", "data_wait_ms", ".3f"),
        ),
    ),
    "precision-accumulation": View(
        keys=("accumulation", "value", "count", "device"),
        columns=(Column("sum", "sum", ".7f"), Column("error", "error", "+.7f"), Column("type", "dtype", "s")),
        plots=(
            Plot(name="error", y=Column("error", "error", "+.7f"), x="accumulation", lines=("device",), kind="bar"),
        ),
    ),
    "autocast-dtypes": View(
        keys=("norm", "precision", "device"),
        columns=tuple(Column(name.replace("_", " "), f"dtypes.{name}", "s")
                      for name in ("parameters", "fc1_output", "norm_output", "logits", "loss", "gradients")),
    ),
    "residuals": View(
        keys=("size", "context_length", "batch_size", "precision", "compile", "attention"),
        columns=(
            Column("saved (MiB)", "saved_bytes", ".4g", 2**20),
            Column("counted (MiB)", "counted_bytes", ".4g", 2**20),
            *(Column(f"{part.replace('_', ' ')} (MiB)", f"parts.{part}", ".4g", 2**20)
              for part in ("ln1", "qkv_proj", "attention", "output_proj", "ln2", "ffn")),
            Column("input (MiB)", "input_bytes", ".4g", 2**20),
            Column("weight copies (MiB)", "weight_copy_bytes", ".4g", 2**20),
            Column("allocated (MiB)", "held_bytes", ".4g", 2**20),
            Column("peak (MiB)", "peak_bytes", ".4g", 2**20),
        ),
        plots=(
            Plot(name="saved", y=Column("saved (MiB)", "saved_bytes", ".4g", 2**20), x="context_length",
                 lines=("size", "precision", "compile", "attention"), kind="bar"),
        ),
        details=_saved_tensors,
    ),
    "checkpointing": View(
        keys=("size", "num_layers", "context_length", "batch_size", "mode", "precision", "compile", "attention",
              "policy", "K"),
        columns=(
            _STEP,
            _STD,
            Column("kept after forward (GiB)", "held_bytes", ".4g", 2**30),
            Column("predicted (GiB)", "predicted_held_bytes", ".4g", 2**30),
            Column("peak (GiB)", "peak_bytes", ".4g", 2**30),
            Column("predicted (GiB)", "predicted_bytes", ".4g", 2**30),
            Column("sqrt(L I / A), at least 1", "best_group", ".1f"),
            Column("with weights and gradients (GiB)", "peak_memory_bytes", ".4g", 2**30),
        ),
        plots=(
            Plot(name="peak", y=Column("peak beyond weights and gradients (GiB)", "peak_bytes", ".4g", 2**30), x="K",
                 lines=("size", "context_length", "precision", "compile", "attention", "policy"), log="x",
                 beside=Column("predicted (GiB)", "predicted_bytes", ".4g", 2**30)),
            Plot(name="step", y=_STEP, x="K", log="x",
                 lines=("size", "context_length", "precision", "compile", "attention", "policy")),
        ),
        derive=memory_parts.predicted_today,
    ),
    "leaderboard-2026": View(
        keys=("strategy", "size", "context_length", "devices", "batch_size", "precision", "weight_dtype", "attention",
              "activation_checkpointing", "compile", "compile_memory_budget", "loss_chunk_tokens"),
        columns=(_STEP, _MEAN, _STD, *_RATES, Column("TFLOP/s a GPU", "tflops", ".1f"), _PEAK,
                 Column("start-up (s)", "startup_s", ".1f")),
        details=lambda row: f"A step: {row.metrics['timer']}.",
        plots=(
            Plot(name="step", y=_STEP, x="activation_checkpointing", kind="bar",
                 lines=("strategy", "weight_dtype", "attention", "compile", "compile_memory_budget")),
        ),
    ),
    "all-reduce": View(
        keys=("collective", "backend", "world_size", "bytes"),
        columns=(
            _CALL,
            Column("p20 (ms)", "time_ms.p20", ".4g"),
            Column("p80 (ms)", "time_ms.p80", ".4g"),
            Column("spread of ranks (ms)", "spread_ms", ".2g"),
            Column("algorithm (GB/s)", "algorithm_bytes_per_s", ".4g", 10**9),
            _BUS,
            Column("calls", "calls", "d"),
        ),
        plots=(
            Plot(name="time", y=_CALL, x="bytes", lines=("backend", "world_size"), panels=("collective",), log="xy"),
            Plot(name="bandwidth", y=_BUS, x="bytes", lines=("backend", "world_size"), panels=("collective",),
                 log="xy"),
        ),
    ),
    **ATTENTION_VIEWS,
    "lm-matrix": View(
        keys=("size", "d_model", "num_layers", "vocab_size", "context_length", "batch_size", "precision", "compile",
              "devices", "train_path", "epochs", "max_steps", "lr", "seed", "device", "kernel", "strategy"),
        columns=(
            Column("final loss", "final_loss", ".5f"),
            Column("differs by", "loss_difference", ".1e"),
            Column("first gradient norms differ by", "norm_difference", ".1e"),
            Column("last training loss", "train_loss", ".5f"),
            Column("steps", "steps", ".0f"),
            *_OF_RUNS.values(),
            _STEP,
            Column("start-up (s)", "startup_s", ".1f"),
        ),
        plots=tuple(Plot(name=name, y=y, x="kernel", lines=("strategy",), kind="bar") for name, y in _OF_RUNS.items()),
    ),
    "ddp": strategy_tables.DDP,
    "bucket-size": strategy_tables.BUCKET_SIZE,
    "overlap-trace": step_streams.VIEW,
    "optimizer-sharding": memory_parts.VIEW,
    "fsdp-accounting": memory_parts.VIEW,
    "profile-kernels": kernel_profiles.VIEW,
    "profile-memory": memory_profiles.VIEW,
}  # fmt: skip


_TABLES: dict[str, Callable[[Sequence[Row]], str]] = {
    "optimizer-sharding": memory_parts.memory_parts_table,
    "fsdp-accounting": memory_parts.memory_parts_table,
    "profile-kernels": kernel_profiles.kernels_table,
}
"""Cases whose table is not simply a line for each row."""


def rows_table(rows: Sequence[Row], swept: Sequence[str] = ()) -> str:
    """Markdown tables of rows, one for each case. `swept` names further fields that tell rows apart.

    Raises ValueError for a case that has no table.
    """
    return "\n\n".join(_case_table(own, swept) for own in grouped_by(rows, attrgetter("case")))


def write_views(rows: Sequence[Row], folder: Path, swept: Sequence[str] = ()) -> list[Path]:
    """Write a table (.md, .csv) and plots (.png) for each case into a folder; return the files.

    Empty plots are left out. `swept` is as in `rows_table`.
    """
    files = []
    for own in grouped_by(rows, attrgetter("case")):
        case = own[0].case
        view = _view(case, swept)
        shown = latest(view.derive(own), view.keys) if view else []
        files.append(write_whole(folder / f"{case}.md", _case_table(own, swept) + "\n"))
        if view:
            files.append(write_whole(folder / f"{case}.csv", csv_text(shown, view)))
            for plot in view.plots:
                files += draw(plot, shown, folder / f"{case}-{plot.name}.png", VIEWS[case].keys)
            files += view.more(shown, folder) if view.more else []
    return files


def _view(case: str, swept: Sequence[str]) -> View | None:
    view = VIEWS.get(case)
    return view and replace(view, keys=(*view.keys, *(name for name in swept if name not in view.keys)))


def _case_table(rows: Sequence[Row], swept: Sequence[str]) -> str:
    case = rows[0].case
    if case in _TABLES:
        return _TABLES[case](rows)
    view = _view(case, swept)
    if view is None:
        raise ValueError(f"a row has case {case!r}: it must be one of {', '.join({**_TABLES, **VIEWS})}")
    return table(latest(view.derive(rows), view.keys), view)


def show_files(paths: Sequence[Path], show: Callable[[Sequence[Row]], Shown]) -> Shown:
    """The result of `show` for the rows of all files. An error about the rows names the files."""
    rows = [row for path in paths for row in read_rows(path)]
    with naming(", ".join(map(str, paths))):
        if not rows:
            raise ValueError("there is no row")
        return show(rows)
