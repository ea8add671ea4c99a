"""The metrics of a run: metrics.jsonl, a progress line, and on request TensorBoard and Weights & Biases."""

import contextlib
import importlib.util
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import rich
from rich.live import Live
from rich.text import Text

from cs336_basics.files import naming_file

from ..config.checks import shown
from ..config.run import LogConfig, RunConfig
from ..machine.console import READER_GONE, say
from ..machine.files import write_figure, write_whole

Row = dict[str, Any]
METRICS_FILE = "metrics.jsonl"


class Sink(Protocol):
    """Receives the rows of metrics of a run."""

    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """metrics.jsonl: one JSON object a line. Drops rows after `last_step`, which a resumed run makes again."""

    def __init__(self, path: Path, last_step: int = 0) -> None:
        kept = _rows_until(path, last_step)
        write_whole(path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in kept))
        self._path = path
        self._file = path.open("a", buffering=1)

    def write(self, row: Row) -> None:
        # JSON has no NaN and Infinity: such a loss becomes null.
        plain = {k: finite_or_none(v) if isinstance(v, float) else v for k, v in row.items()}
        with naming_file(self._path):
            self._file.write(json.dumps(plain, allow_nan=False) + "\n")

    def close(self) -> None:
        with naming_file(self._path):
            self._file.close()


class TensorBoard:
    """TensorBoard event files in the run folder."""

    def __init__(self, run_dir: Path, last_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=last_step + 1)

    def write(self, row: Row) -> None:
        for name, value in _numbers(row).items():
            self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A Weights & Biases run, kept in the run folder; mode "offline" sends nothing.

    A resumed run has the same ID, and first logs the rows of metrics.jsonl up to `last_step` again. They replace the
    earlier log. Unlike Weights & Biases' own rewind, this works offline and on every server.
    """

    def __init__(self, run_dir: Path, config: RunConfig, last_step: int) -> None:
        import wandb

        id_file = run_dir / "wandb" / "run_id.txt"
        try:
            self._run = wandb.init(
                project=config.log.wandb_project,
                id=id_file.read_text().strip() if id_file.is_file() else None,
                name=run_dir.name,
                dir=str(run_dir),
                mode=config.log.wandb,  # type: ignore[arg-type]
                config=config.to_dict(),
            )
        except wandb.Error as error:  # nobody is logged in, for example
            raise ValueError(f"log.wandb is {config.log.wandb!r}, but Weights & Biases refuses it: {error}") from error
        write_whole(id_file, self._run.id)
        for row in _rows_until(run_dir / METRICS_FILE, last_step):
            self.write(row)

    def write(self, row: Row) -> None:
        self._run.log(_numbers(row), step=row["step"])

    def close(self) -> None:
        self._run.finish()


def _numbers(row: Row) -> dict[str, float]:
    return {k: v for k, v in row.items() if k != "step" and isinstance(v, int | float)}


def finite_or_none(value: float) -> float | None:
    """The value, or None if it is infinite or not a number."""
    return value if math.isfinite(value) else None


def check_packages(log: LogConfig) -> None:
    """Raise ValueError naming the field if it needs a package that is not installed."""
    for package, is_used in (("tensorboard", log.tensorboard), ("wandb", log.wandb != "off")):
        if is_used and importlib.util.find_spec(package) is None:
            value = shown(getattr(log, package))
            raise ValueError(f"log.{package} is {value}, but {package} is not installed: pip install {package}")


def open_sinks(run_dir: Path, config: RunConfig, last_step: int) -> list[Sink]:
    """The sinks that the configuration names. `check_packages` has found their packages."""
    sinks: list[Sink] = []
    if config.log.tensorboard:
        sinks.append(TensorBoard(run_dir, last_step))
    if config.log.wandb != "off":
        sinks.append(WeightsAndBiases(run_dir, config, last_step))
    return [JsonLines(run_dir / METRICS_FILE, last_step), *sinks]


def read_metrics(path: str | os.PathLike[str]) -> list[Row]:
    """The rows of a metrics.jsonl. Leaves out a last line that a crash cut short."""
    lines = Path(path).read_text().splitlines()
    rows = []
    for i, line in enumerate(lines):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                raise ValueError("it is no row of metrics, an object with a step")
            rows.append(row)
        except ValueError as error:
            if i < len(lines) - 1:
                raise ValueError(f"{path}, line {i + 1}: {error}") from error
    return rows


def _rows_until(path: Path, last_step: int) -> list[Row]:
    """The rows of a metrics.jsonl up to a step; none if there is no file yet."""
    return [row for row in read_metrics(path) if row["step"] <= last_step] if path.exists() else []


def summarise(times_ms: Sequence[float]) -> dict[str, float]:
    """p20, p50, p80, mean and standard deviation of some times; empty for none."""
    if not times_ms:
        return {}
    p20, p50, p80 = np.percentile(times_ms, (20, 50, 80)).tolist()
    return {"p20": p20, "p50": p50, "p80": p80, "mean": float(np.mean(times_ms)), "std": float(np.std(times_ms))}


class Progress:
    """The progress line: updated in place on a terminal, otherwise printed every 10 seconds."""

    PLAIN_INTERVAL_S = 10.0

    def __init__(self, first_step: int, max_steps: int) -> None:
        self._first_step, self._max_steps = first_step, max_steps
        self._console = rich.get_console()
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._start, self._last_plain = time.perf_counter(), -math.inf
        self._line = self._valid = ""

    def __enter__(self) -> "Progress":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live:
            self._live.stop()

    def update(self, row: Row) -> None:
        """Show the row of a step or of a validation."""
        now = time.perf_counter()
        if "valid_loss" in row:
            self._valid = f"  valid {row['valid_loss']:.4f}"
        else:
            self._line = self.format(row, now)
        if self._live:
            with contextlib.suppress(*READER_GONE):
                self._live.update(Text(self._line + self._valid), refresh=True)
        elif "valid_loss" in row:
            say(f"step {row['step']:,}/{self._max_steps:,} {self._valid.strip()}")
        elif now - self._last_plain >= self.PLAIN_INTERVAL_S:
            self._last_plain = now
            say(self._line)

    def format(self, row: Row, now: float) -> str:
        """The progress line for the row of a step.

        It has no time left after the first step, which may have compiled the model.
        """
        steps_done = row["step"] - self._first_step
        seconds = int((now - self._start) / steps_done * (self._max_steps - row["step"]))
        left = f"  left {seconds // 60}:{seconds % 60:02d}" if steps_done > 1 else ""
        mfu = f"  mfu {row['mfu']:.1%}" if row["mfu"] is not None else ""
        return (
            f"step {row['step']:,}/{self._max_steps:,}  loss {row['loss']:.4f}  lr {row['lr']:.2e}  "
            f"{row['tokens_per_s']:,.0f} tok/s{mfu}  mem {row['memory_bytes'] / 2**30:.2f} GiB{left}"
        )


def plot_loss_curves(
    runs: Mapping[str, Sequence[Row]], path: str | os.PathLike[str], baselines: Mapping[str, float] | None = None
) -> None:
    """Draw training and validation loss over steps of one or more runs (name -> rows) into a PNG.

    baselines are drawn as labelled horizontal lines (name -> nats a token).
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="cross-entropy (nats a token)")
    for i, (name, rows) in enumerate(runs.items()):
        train = [(row["step"], row["loss"]) for row in rows if row.get("loss") is not None]
        valid = [(row["step"], row["valid_loss"]) for row in rows if row.get("valid_loss") is not None]
        prefix = f"{name}: " if len(runs) > 1 else ""
        if train:
            axes.plot(*zip(*train, strict=True), color=f"C{i}", alpha=0.35, linewidth=0.8, label=f"{prefix}training")
        if valid:
            axes.plot(*zip(*valid, strict=True), color=f"C{i}", marker="o", markersize=3, label=f"{prefix}validation")
    for i, (name, value) in enumerate((baselines or {}).items()):
        axes.axhline(value, color="0.4", linestyle=(":", "--", "-.")[i % 3], linewidth=1, label=f"{name} ({value:.2f})")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    write_figure(figure, Path(path))
