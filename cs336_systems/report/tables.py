"""Markdown tables: of runs, from their result.json, and of measured rows."""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..accounting import num_parameters
from ..bench.case import Row, read_rows
from ..config import ModelConfig
from ..training.metrics import METRICS_FILE, plot_loss_curves, read_metrics

logger = logging.getLogger(__name__)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table: text left, everything after the first column right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))


def _number(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: a folder of a finished run is needed")
    return json.loads(path.read_text())


def runs_table(run_dirs: Sequence[Path]) -> str:
    """One line a run: model, machine, losses beside the baselines, speed (of its last part, where it was resumed)."""
    lines = []
    for run_dir in run_dirs:
        if run_dir.is_dir() and not (run_dir / "result.json").exists():
            logger.warning("%s is not finished, left out", run_dir)
            continue
        config, result = _read_json(run_dir / "config.json"), _read_json(run_dir / "result.json")
        shape = ModelConfig(**config["model"]).shape
        env = result["env"]
        lines.append(
            (
                run_dir.name,
                f"{num_parameters(shape) / 1e6:.1f} M",
                f"{env['gpu'] or str(env['cpu_threads']) + ' CPU threads'}, {config['train']['precision']}",
                f"{result['step']:,}",
                _number(result["train_loss"], ".3f"),
                _number(result["valid_loss"], ".3f"),
                _number(result["unigram_entropy"], ".3f"),
                _number(result["bigram_model_loss"], ".3f"),
                _number(result["tokens_per_s"], ",.0f"),
                _number(result["mfu"], ".1%"),
            )
        )
    header = "run,parameters,on,steps,training loss,validation loss,unigram entropy,bigram model,tokens/s,MFU"
    return markdown_table(header.split(","), lines)


def summary(result: Mapping[str, Any]) -> str:
    """What a run came to, in the words that `cs336 train` ends with; `result` as in result.json."""
    lines = [
        f"validation loss  {_number(result['valid_loss'], '.4f')} nats a token",
        f"unigram entropy  {result['unigram_entropy']:.4f} of the same text: how frequent each token is in it",
        f"bigram entropy   {result['bigram_entropy']:.4f} of the same text: how frequent each token is after another",
        f"bigram model     {result['bigram_model_loss']:.4f} on the same text, from the pairs of the training text",
    ]
    if result["sample"] is not None:
        lines += ["", "sample:", *(f"    {line}".rstrip() for line in result["sample"].strip().splitlines())]
    return "\n".join(
        [
            *lines,
            "",
            f"run folder       {result['run_dir']}",
            f"loss curve       {result['loss_curve']}",
            f"checkpoint       {result['checkpoint']}",
        ]
    )


def summary_block(run_dir: Path) -> str:
    """`summary` of a run folder as a Markdown code block."""
    return f"```text\n{summary(_read_json(run_dir / 'result.json'))}\n```"


def plot_runs(run_dirs: Sequence[Path], path: Path) -> None:
    """The loss curves of some runs in one picture."""
    names = [run_dir.name for run_dir in run_dirs]
    if len(set(names)) < len(names):
        names = [str(run_dir) for run_dir in run_dirs]
    plot_loss_curves({n: read_metrics(d / METRICS_FILE) for n, d in zip(names, run_dirs, strict=True)}, path)


def rows_table(paths: Sequence[Path]) -> str:
    """Measured rows, one table a case."""
    rows = [row for path in paths for row in read_rows(path)]
    tables = []
    for case in dict.fromkeys(row.case for row in rows):
        if case not in _CASES:
            raise ValueError(f"case {case!r} of {', '.join(map(str, paths))}: it must be one of {', '.join(_CASES)}")
        tables.append(_CASES[case]([row for row in rows if row.case == case]))
    return "\n\n".join(tables)


def _train_step_table(rows: Sequence[Row]) -> str:
    def line(row: Row) -> tuple[str, ...]:
        metrics, model, train = row.metrics, row.config["model"], row.config["train"]
        what = (f"{model['size']}, {train['batch_size']} x {model['context_length']}", row.variant)
        if row.status != "ok":
            return (*what, row.status, *["-"] * 5)
        return (
            *what,
            _number(metrics["step_ms"]["mean"], ".1f"),
            _number(metrics["tokens_per_s"], ",.0f"),
            _number(metrics["mfu"], ".1%"),
            _number(metrics["peak_memory_bytes"] and metrics["peak_memory_bytes"] / 2**30, ".1f"),
            _number(metrics["startup_s"], ".1f"),
            _number(metrics.get("data_wait_ms"), ".3f"),
        )

    header = "size,variant,step (ms),tokens/s,MFU,peak memory (GiB),start-up (s),waiting for data (ms)"
    return markdown_table(header.split(","), map(line, rows))


_CASES = {"train-step": _train_step_table}
