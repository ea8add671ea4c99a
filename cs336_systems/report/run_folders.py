"""Training runs in a table, in words and as loss curves, read from their run folders."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config.checks import from_json
from ..config.run import ModelConfig
from ..planner.accounting import num_parameters
from ..planner.rows import naming
from ..training.metrics import METRICS_FILE, plot_loss_curves, read_metrics
from .fields import get, number
from .markdown import markdown_table

logger = logging.getLogger(__name__)
_LOSSES = ("train_loss", "valid_loss", "unigram_entropy", "bigram_model_loss")


def runs_table(run_dirs: Sequence[Path]) -> str:
    """A line for each finished run: model, machine, losses beside the baselines, and speed.

    A resumed run shows the speed of its last part.
    """
    lines, entropies = [], set[Any]()
    for run_dir in run_dirs:
        files = run_dir / "config.json", run_dir / "result.json"
        if run_dir.is_dir() and (missing := [file.name for file in files if not file.exists()]):
            logger.warning("%s has no %s, so the table leaves it out", run_dir, missing[0])
            continue
        with naming(", ".join(map(str, files))):
            config, result = map(_read_json, files)
            lines.append(_line(run_dir.name, config, result))
            entropies.add(result.get("unigram_entropy"))
    if not lines:  # no error: unfinished runs may still be plotted
        return "none of these runs has a result.json"
    if len(entropies) > 1:
        logger.warning("these runs were validated on different tokens: their losses are not comparable")
    header = "run,parameters,on,steps,training loss,validation loss,unigram entropy,bigram model,tokens/s,MFU"
    return markdown_table(header.split(","), lines)


def _line(name: str, config: Mapping[str, Any], result: Mapping[str, Any]) -> tuple[str, ...]:
    device = get(result, "env.gpu") or f"{get(result, 'env.cpu_threads')} CPU threads"
    processes = get(config, "parallel.devices", 1)  # torchrun's are not recorded
    device = f"{processes} x {device}" if processes > 1 else device
    return (
        name,
        f"{num_parameters(from_json(ModelConfig, config['model']).shape) / 1e6:.1f} M",
        f"{device}, {get(config, 'train.precision')}",
        number(result, "step", ","),
        *(number(result, loss, ".3f") for loss in _LOSSES),
        number(result, "tokens_per_s", ",.0f"),
        number(result, "mfu", ".1%"),
    )


def _read_json(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: a folder of a finished run is needed")
    return json.loads(path.read_bytes())


def summary_block(run_dir: Path) -> str:
    """`summary` of a run folder as a Markdown code block."""
    path = run_dir / "result.json"
    with naming(str(path)):
        return f"```text\n{summary(_read_json(path))}\n```"


def summary(result: Mapping[str, Any]) -> str:
    """How a run ended, as `cs336 train` prints it; `result` is the content of result.json."""
    lines = [
        f"validation loss  {number(result, 'valid_loss', '.4f')} nats a token",
        f"unigram entropy  {number(result, 'unigram_entropy', '.4f')} of the same text: "
        "how frequent each token is in it",
        f"bigram model     {number(result, 'bigram_model_loss', '.4f')} on the same text: "
        "it sees only the previous token, and knows the training text's pairs",
    ]
    if (sample := result["sample"]) is not None:
        lines += ["", "sample:", *(f"    {line}".rstrip() for line in str(sample).strip().splitlines())]
    lines += ["", f"run folder       {result['run_dir']}"]
    lines += [f"loss curve       {result['loss_curve']}", f"checkpoint       {result['checkpoint']}"]
    return "\n".join(lines)


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
