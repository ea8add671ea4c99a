"""What the case `lm-matrix` writes: a CSV file, three plots and a report of them, with names of their own."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..bench.row import Row
from ..machine.files import write_whole
from .plots import draw
from .tables import markdown_table, row_fields
from .view import Column, Plot, View, common_facts, csv_text, grouped, table

CSV, TIME, MEMORY, THROUGHPUT, REPORT = (
    f"lm_matrix_{name}" for name in ("results.csv", "time.png", "memory.png", "throughput.png", "report.md")
)
_EPOCH = Column("an epoch (s)", "epoch_s", ".4g")
_MEMORY = Column("peak memory of a process (GiB)", "peak_memory_bytes", ".3g", 2**30)
_THROUGHPUT = Column("tokens/s", "tokens_per_s", ",.0f")
_LOSS = Column("final loss", "final_loss", ".5f")
_DIFFERENCE = Column("differs by", "loss_difference", ".1e")
_NORMS = Column("first gradient norms differ by", "norm_difference", ".1e")
_PLOTS = {TIME: _EPOCH, MEMORY: _MEMORY, THROUGHPUT: _THROUGHPUT}
_SETTING = ("size", "d_model", "num_layers", "vocab_size", "context_length", "batch_size", "precision", "compile",
            "devices", "train_path", "epochs", "max_steps", "lr", "seed", "device")  # fmt: skip


def write(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write all into a folder; return the files. CSV and table have all rows, plots those of the last row's setting."""
    drawn = next(group for group in grouped(rows, _SETTING) if rows[-1] in group)
    plain = [replace(row, config={k: v for k, v in row.config.items() if k != "run"}) for row in rows]
    write_whole(folder / CSV, csv_text(plain, VIEW))
    for name, column in _PLOTS.items():
        plot = Plot(name=Path(name).stem, y=column, x="kernel", lines=("strategy",), kind="bar")
        draw(plot, [row for row in drawn if row.status == "ok"], folder / name, _SETTING)
    write_whole(folder / REPORT, report(rows, drawn))
    return [folder / name for name in (CSV, *_PLOTS, REPORT)]


def report(rows: Sequence[Row], drawn: Sequence[Row]) -> str:
    """The document: whether the losses are equal, the fastest strategy of each kernel, the plots, all rows."""
    done = [row for row in drawn if row.status == "ok"]
    differing = [row for row in drawn if row.status == "error" and _DIFFERENCE.value(row) is not None]
    lines = []
    for kernel in dict.fromkeys(row.config["kernel"] for row in done):
        rates = {row.config["strategy"]: row for row in done if row.config["kernel"] == kernel and _rate(row)}
        if rates:
            best = max(rates, key=lambda name: _rate(rates[name]))
            fields = row_fields(rates[best])
            lines.append([kernel, best, _THROUGHPUT.text(fields), _LOSS.text(fields)])
    largest = max((_DIFFERENCE.value(row) or 0.0 for row in done), default=0.0)
    verdict = f"The final losses of a kernel's strategies are equal to within {largest:.1e} nats a token."
    if differing:
        verdict = "**Final losses differ:** " + "; ".join(f"{row.variant}: {row.error}" for row in differing) + "."
    fastest = markdown_table(["kernel", "fastest strategy", _THROUGHPUT.name, _LOSS.name], lines, left=2)
    pictures = "\n\n".join(f"![{name}]({name})" for name in _PLOTS)
    return (
        "# Training runs: attention kernels x parallel strategies\n\n"
        "Each is a run of the training loop; all see the same batches, which the processes of a strategy share, and "
        "end with a validation. `none` is one process. The time of an epoch is the mean of all steps, the first ones "
        "too, times their number; throughput is of the median step. "
        f"In the plots and the first table: {common_facts(drawn, _SETTING)[0]}."
        f"\n\n{verdict}\n\n{fastest}\n\n{pictures}\n\n## All rows\n\n{table(rows, VIEW)}\n"
    )


def _rate(row: Row) -> float:
    return _THROUGHPUT.value(row) or 0.0


VIEW = View(
    keys=(*_SETTING, "val_path", "kernel", "strategy"),
    columns=(
        _LOSS,
        _DIFFERENCE,
        _NORMS,
        Column("last training loss", "train_loss", ".5f"),
        Column("steps", "steps", ".0f"),
        _EPOCH,
        Column("step (ms)", "step_ms.p50"),
        _THROUGHPUT,
        _MEMORY,
        Column("start-up (s)", "startup_s", ".1f"),
    ),
    write=write,
)
