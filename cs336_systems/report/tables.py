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
from .memory_tables import memory_table

logger = logging.getLogger(__name__)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table: text left, everything after the first column right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    escaped = ([cell.replace("|", "\\|") for cell in cells] for cells in (header, rule, *rows))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in escaped)


class _Fields:
    """A JSON object by dotted names. ValueError says where one is missing, or is no number."""

    def __init__(self, where: str, content: Mapping[str, Any]) -> None:
        self.where, self.content = where, content

    def get(self, name: str) -> Any:
        value: Any = self.content
        for key in name.split("."):
            if not isinstance(value, Mapping) or key not in value:
                raise ValueError(f"{self.where} has no {name}")
            value = value[key]
        return value

    def number(self, name: str, form: str, unit: int = 1) -> str:
        """A number in a format and a unit; n/a for None."""
        value = self.get(name)
        if value is None:
            return "n/a"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{self.where} has {name} {value!r}: it must be a number")
        return format(value if unit == 1 else value / unit, form)


def _read_json(path: Path) -> _Fields:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: a folder of a finished run is needed")
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return _Fields(str(path), content)


def _row_fields(row: Row) -> _Fields:
    return _Fields(
        f"a row of case {row.case!r}, variant {row.variant!r}",
        {"config": row.config, "metrics": row.metrics, "env": row.env},
    )


def runs_table(run_dirs: Sequence[Path]) -> str:
    """One line a run: model, machine, losses beside the baselines, speed (of its last part, where it was resumed)."""
    lines = []
    for run_dir in run_dirs:
        if run_dir.is_dir() and not (run_dir / "result.json").exists():
            logger.warning("%s is not finished, left out", run_dir)
            continue
        config, result = _read_json(run_dir / "config.json"), _read_json(run_dir / "result.json")
        try:
            shape = ModelConfig(**config.get("model")).shape
        except (TypeError, ValueError) as error:
            raise ValueError(f"{config.where} holds no model: {error}") from error
        on = result.get("env.gpu") or f"{result.get('env.cpu_threads')} CPU threads"
        lines.append(
            (
                run_dir.name,
                f"{num_parameters(shape) / 1e6:.1f} M",
                f"{on}, {config.get('train.precision')}",
                result.number("step", ","),
                result.number("train_loss", ".3f"),
                result.number("valid_loss", ".3f"),
                result.number("unigram_entropy", ".3f"),
                result.number("bigram_model_loss", ".3f"),
                result.number("tokens_per_s", ",.0f"),
                result.number("mfu", ".1%"),
            )
        )
    header = "run,parameters,on,steps,training loss,validation loss,unigram entropy,bigram model,tokens/s,MFU"
    return markdown_table(header.split(","), lines)


def summary(result: Mapping[str, Any]) -> str:
    """What a run came to, in the words that `cs336 train` ends with; `result` as in result.json."""
    return _summary(_Fields("the result", result))


def _summary(result: _Fields) -> str:
    lines = [
        f"validation loss  {result.number('valid_loss', '.4f')} nats a token",
        f"unigram entropy  {result.number('unigram_entropy', '.4f')} of the same text: "
        "how frequent each token is in it",
        f"bigram entropy   {result.number('bigram_entropy', '.4f')} of the same text: "
        "how frequent each token is after another",
        f"bigram model     {result.number('bigram_model_loss', '.4f')} on the same text, "
        "from the pairs of the training text",
    ]
    sample = result.get("sample")
    if sample is not None:
        lines += ["", "sample:", *(f"    {line}".rstrip() for line in str(sample).strip().splitlines())]
    return "\n".join(
        [
            *lines,
            "",
            f"run folder       {result.get('run_dir')}",
            f"loss curve       {result.get('loss_curve')}",
            f"checkpoint       {result.get('checkpoint')}",
        ]
    )


def summary_block(run_dir: Path) -> str:
    """`summary` of a run folder as a Markdown code block."""
    return f"```text\n{_summary(_read_json(run_dir / 'result.json'))}\n```"


def plot_runs(run_dirs: Sequence[Path], path: Path) -> None:
    """The loss curves of some runs in one picture."""
    names = [run_dir.name for run_dir in run_dirs]
    if len(set(names)) < len(names):
        names = [str(run_dir) for run_dir in run_dirs]
    plot_loss_curves({n: read_metrics(d / METRICS_FILE) for n, d in zip(names, run_dirs, strict=True)}, path)


def rows_table(rows: Sequence[Row]) -> str:
    """Measured rows, one table a case.

    Raises ValueError for a case that there is no table for, and for a row without what its table shows.
    """
    tables = []
    for case in dict.fromkeys(row.case for row in rows):
        if case not in _CASES:
            raise ValueError(f"a row has case {case!r}: it must be one of {', '.join(_CASES)}")
        tables.append(_CASES[case]([row for row in rows if row.case == case]))
    return "\n\n".join(tables)


def _train_step_table(rows: Sequence[Row]) -> str:
    def line(row: Row) -> tuple[str, ...]:
        fields = _row_fields(row)
        size, length = fields.get("config.model.size"), fields.get("config.model.context_length")
        what = (f"{size}, {fields.get('config.train.batch_size')} x {length}", row.variant)
        if row.status != "ok":
            return (*what, row.status, *["-"] * 5)
        return (
            *what,
            fields.number("metrics.step_ms.mean", ".1f"),
            fields.number("metrics.tokens_per_s", ",.0f"),
            fields.number("metrics.mfu", ".1%"),
            fields.number("metrics.peak_memory_bytes", ".1f", 2**30),
            fields.number("metrics.startup_s", ".1f"),
            fields.number("metrics.data_wait_ms", ".3f") if "data_wait_ms" in row.metrics else "n/a",
        )

    header = "size,variant,step (ms),tokens/s,MFU,peak memory (GiB),start-up (s),waiting for data (ms)"
    return markdown_table(header.split(","), map(line, rows))


def _attention_table(rows: Sequence[Row]) -> str:
    """Two tables for each type, mask and device, in their order of appearance."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(_attention_setting(row), []).append(row)
    return "\n\n".join(_attention_tables(setting, group) for setting, group in groups.items())


def _attention_setting(row: Row) -> str:
    """What the times of a row are times of, besides kernel and shape: "bf16, causal, NVIDIA H200, "."""
    config, device = row.config, row.config.get("device")
    is_causal = config.get("is_causal")
    mask = None if is_causal is None else "causal" if is_causal else "not causal"
    on = "CPU" if device == "cpu" else row.env.get("gpu") or device
    return "".join(f"{part}, " for part in (config.get("dtype"), mask, on) if part is not None)


def _attention_tables(setting: str, rows: Sequence[Row]) -> str:
    """Medians, a line a kernel and a column a shape; then the handout's call, memory and start-up in the same way."""
    cells = {(row.variant, _shape(row)): row for row in rows}  # the last, where there are several
    kernels = list(dict.fromkeys(kernel for kernel, _ in cells))
    shapes = list(dict.fromkeys(shape for _, shape in cells))

    def times(row: Row) -> str:
        if row.status != "ok":
            return {"oom": "out of memory", "error": "not served"}[row.status]
        fields = _row_fields(row)
        three = (fields.number(f"metrics.{n}_ms.p50", ".3g") for n in ("forward", "backward", "forward_backward"))
        return f"{' / '.join(three)} ({fields.number('metrics.forward_backward_tflops', '.3g')})"

    def details(row: Row) -> str:
        if row.status != "ok":
            return "-"
        fields = _row_fields(row)
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
    fields = _row_fields(row)
    shape = fields.get("config.shape")
    if not isinstance(shape, list | tuple):
        raise ValueError(f"{fields.where} has config.shape {shape!r}: it must be a list of numbers")
    return "x".join(map(str, shape))


def _ddp_table(rows: Sequence[Row]) -> str:
    """A line a variant: median step eager and compiled, what it adds to a step alone, and peak memory."""
    latest = {row.variant: row for row in rows}
    variants = list(dict.fromkeys(variant.removesuffix(" compiled") for variant in latest))

    def cells(variant: str, how: str) -> tuple[str, str, str]:
        by_itself = "alone+graph" if "+graph" in variant else "alone"
        row, alone = latest.get(variant + how), latest.get(by_itself + how)
        if row is None or row.status != "ok":
            return ("-" if row is None else "out of memory", "-", "-")
        fields = _row_fields(row)
        added = "-"
        if alone is not None and alone.status == "ok":
            added = f"{row.metrics['step_ms']['p50'] / alone.metrics['step_ms']['p50'] - 1:+.1%}"
        return (
            fields.number("metrics.step_ms.p50", ".1f"),
            added,
            fields.number("metrics.peak_memory_bytes", ".1f", 2**30),
        )

    facts = _row_fields(rows[0])
    head = (
        f"{facts.get('config.devices')} x {rows[0].env.get('gpu') or 'CPU'}, "
        f"{facts.get('config.model.size') or 'a tiny model'}, context {facts.get('config.model.context_length')}, "
        f"{facts.get('config.train.precision')}; median step in ms, what it is more than `alone`, peak memory a GPU "
        "in GiB:"
    )
    names = [f"{how} {what}" for how in ("eager", "compiled") for what in ("step", "added", "peak")]
    lines = [(variant, *cells(variant, ""), *cells(variant, " compiled")) for variant in variants]
    return head + "\n\n" + markdown_table(["variant", *names], lines)


_CASES = {
    "train-step": _train_step_table,
    "attention": _attention_table,
    "ddp": _ddp_table,
    "profile-memory": memory_table,
}
