"""Markdown tables: of runs, from their result.json, and of measured rows."""

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..accounting import num_parameters
from ..bench.case import Row
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


def rows_table(rows: Sequence[Row]) -> str:
    """Measured rows, one table a case. Raises ValueError for a case that there is no table for."""
    tables = []
    for case in dict.fromkeys(row.case for row in rows):
        if case not in _CASES:
            raise ValueError(f"a row has case {case!r}: it must be one of {', '.join(_CASES)}")
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


def _attention_table(rows: Sequence[Row]) -> str:
    """Medians, a line a kernel and a column a shape; then the handout's call, memory and start-up in the same way."""
    shapes = list(dict.fromkeys(tuple(row.config["shape"]) for row in rows))
    cells = {(row.variant, tuple(row.config["shape"])): row for row in rows}  # the last, where there are several
    kernels = list(dict.fromkeys(row.variant for row in rows))

    def times(row: Row | None) -> str:
        if row is None:
            return "-"
        if row.status != "ok":
            return {"oom": "out of memory", "error": "not served"}[row.status]
        forward, backward, both = (row.metrics[f"{n}_ms"]["p50"] for n in ("forward", "backward", "forward_backward"))
        return f"{forward:.3g} / {backward:.3g} / {both:.3g} ({row.metrics['forward_backward_tflops']:.3g})"

    def details(row: Row | None) -> str:
        if row is None or row.status != "ok":
            return "-"
        memory = row.metrics.get("extra_memory_bytes")
        return " / ".join(
            (
                f"{row.metrics['forward_sum_backward_ms']['p50']:.3g}",
                _number(memory and memory / 2**20, ",.1f"),
                f"{row.metrics['first_call_s']:.1f}",
            )
        )

    def table(cell: Callable[[Row | None], str]) -> str:
        lines = [(kernel, *(cell(cells.get((kernel, shape))) for shape in shapes)) for kernel in kernels]
        return markdown_table(["B x H x N x D", *("x".join(map(str, shape)) for shape in shapes)], lines)

    return "\n\n".join(
        (
            "Forward / backward / both in ms (TFLOP/s of both), medians:",
            table(times),
            "`attention(q, k, v).sum().backward()` in ms / memory beyond q, k, v, o and their gradients in MiB / "
            "the first call of all, with what it compiles, in s:",
            table(details),
        )
    )


_CASES = {"train-step": _train_step_table, "attention": _attention_table}
