"""Markdown tables: of runs, from their result.json, and of measured rows."""

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..bench.row import Row
from ..config.run import ModelConfig
from ..planner.accounting import num_parameters
from ..training.metrics import METRICS_FILE, plot_loss_curves, read_metrics

logger = logging.getLogger(__name__)
_LONGEST = 500
"""Maximum number of letters of a text that comes from elsewhere."""


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A Markdown table: the first `left` columns are aligned left, the numbers after them right."""
    rule = [*["---"] * left, *["---:"] * (len(header) - left)]
    escaped = ([cell.replace("|", "\\|") for cell in cells] for cells in (header, rule, *rows))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in escaped)


_ACTIVE = re.compile(r"[\\`*<>\[\]!]")


def plain(text: str) -> str:
    """Text from elsewhere, such as an error message, as one line of Markdown without active characters."""
    line = " ".join(text.split())
    line = line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."
    return _ACTIVE.sub(r"\\\g<0>", "".join(letter if letter.isprintable() else "?" for letter in line))


class Fields:
    """A JSON object by dotted names, list items by number. Raises ValueError for what is missing, or not a number."""

    def __init__(self, where: str, content: Mapping[str, Any]) -> None:
        self.where, self.content = where, content

    def get(self, name: str) -> Any:
        value: Any = self.content
        for key in name.split("."):
            if isinstance(value, list) and re.fullmatch(r"-?\d+", key) and -len(value) <= int(key) < len(value):
                value = value[int(key)]
            elif isinstance(value, Mapping) and key in value:
                value = value[key]
            else:
                raise ValueError(f"{self.where} has no {name}")
        return value

    def has(self, name: str) -> bool:
        """Whether there is a value of that name, and it is not None."""
        try:
            return self.get(name) is not None
        except ValueError:
            return False

    def number(self, name: str, form: str, unit: int = 1) -> str:
        """A number as text in a format and a unit; n/a for None."""
        if self.get(name) is None:
            return "n/a"
        value = self.value(name)
        if form.endswith("d") and not isinstance(value, int):
            raise ValueError(f"{self.where} has {name} {value!r}: it must be a whole number")
        return format(value if unit == 1 else value / unit, form)

    def value(self, name: str) -> float:
        """A number itself."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{self.where} has {name} {value!r}: it must be a number")
        return value


def _read_json(path: Path) -> Fields:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: a folder of a finished run is needed")
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return Fields(str(path), content)


def row_fields(row: Row) -> Fields:
    """A row's `config`, `metrics` and `env` by dotted names."""
    return Fields(
        f"a row of case {row.case!r}, variant {row.variant!r}",
        {"config": row.config, "metrics": row.metrics, "env": row.env},
    )


def runs_table(run_dirs: Sequence[Path]) -> str:
    """One line per run: model, machine, losses beside the baselines, speed (of its last part if it was resumed)."""
    lines = []
    for run_dir in run_dirs:
        if (run_dir / "config.json").exists() and not (run_dir / "result.json").exists():
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
    if not lines:  # the unfinished ones may still be drawn
        return "none of these runs is finished"
    header = "run,parameters,on,steps,training loss,validation loss,unigram entropy,bigram model,tokens/s,MFU"
    return markdown_table(header.split(","), lines)


def summary(result: Mapping[str, Any]) -> str:
    """What a run came to, in the words that `cs336 train` ends with; `result` as in result.json."""
    return _summary(Fields("the result", result))


def _summary(result: Fields) -> str:
    lines = [
        f"validation loss  {result.number('valid_loss', '.4f')} nats a token",
        f"unigram entropy  {result.number('unigram_entropy', '.4f')} of the same text: "
        "how frequent each token is in it",
        f"bigram model     {result.number('bigram_model_loss', '.4f')} on the same text: "
        "it sees only the previous token, and knows the training text's pairs",
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
    """Draw the loss curves of some runs into one picture. Raises ValueError if none of them has begun."""
    begun = [run_dir for run_dir in run_dirs if (run_dir / METRICS_FILE).is_file()]
    for run_dir in run_dirs:
        if run_dir not in begun:
            logger.warning("%s has no %s, not drawn", run_dir, METRICS_FILE)
    if not begun:
        raise ValueError(f"none of these runs has a {METRICS_FILE}: there is nothing to draw")
    names = [run_dir.name for run_dir in begun]
    if len(set(names)) < len(names):
        names = [str(run_dir) for run_dir in begun]
    plot_loss_curves({n: read_metrics(d / METRICS_FILE) for n, d in zip(names, begun, strict=True)}, path)
