"""How long steps take, how far they lie apart, and what warm-up steps change: the problem benchmarking_script."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...bench.row import Row
from ...config.model import MODEL_SIZES
from ...planner.rows import is_of_cpu
from ..selection import latest
from ..spec import Spread
from ..tables import table
from ..views import VIEWS
from .claims import Evidence, about, ends, mean, one_setting, p50, percent, span, times
from .steps import FAR

CONTEXT = 512
"""Tokens where the handout of 2026 names no others."""
WAY = ("mode", "compile", "attention", "activation_checkpointing")
"""How a model is run; what is compared is run in one way, that of most rows."""
_PHASES = ("forward", "backward", "optimizer")
_LITTLE = 0.01  # of the median: a step that is longer by less has nothing left to warm up
_STEADY = 0.05  # of the mean: a standard deviation below that is called small
_GROWS = 1.5  # times as long for twice the tokens, or more: then it is the GPU that a step waits for
_ALIKE = ("size", "batch_size", "precision", *WAY)


def at_one_length(rows: Sequence[Row]) -> list[Row]:
    """Of rows run in one way those of the handout's length, or else of the longest; the smaller models first."""
    found = one_setting(rows, *WAY)
    lengths = {row.config["context_length"] for row in found}
    length = CONTEXT if CONTEXT in lengths else max(lengths, default=0)
    sizes = list(MODEL_SIZES)
    order = lambda row: sizes.index(size) if (size := row.config["size"]) in sizes else -1  # noqa: E731
    return sorted((row for row in found if row.config["context_length"] == length), key=order)


def phases_table(rows: Sequence[Row]) -> str:
    """The table of the case model with each phase's mean and standard deviation, as the handout asks."""
    view = VIEWS["model"]
    times = [Spread(f"{name}, mean ± std (ms)", f"{name}_ms") for name in (*_PHASES, "step")]
    rest = [column for column in view.columns if not column.name.endswith("(ms)")]
    return table(latest(rows, view.keys), replace(view, columns=(*times, *rest)))


def the_script(e: Evidence) -> str:
    """(a) What times the model."""
    return (
        "(a) The script is `cs336 bench model`. Model size, warm-up steps, timed steps and what a step does are "
        "options (`--size`, `--warmup`, `--steps`, `--mode`); the batch is random, and it synchronizes with the GPU "
        "after each step."
    )


def times_by_size(e: Evidence) -> str | None:
    """(b) How long the phases of a step take, size by size."""
    found = e.ok("model", "forward_ms", "backward_ms", precision="fp32")
    rows = at_one_length(found)
    if not rows:
        return None
    sizes, length = {row.config["size"] for row in rows}, rows[0].config["context_length"]
    more = [row for row in found if row.config["size"] not in sizes and row.config["context_length"] == length]
    rows += at_one_length(more)  # of which no whole step fits
    phases = [name for name in _PHASES if any(f"{name}_ms" in row.metrics for row in rows)]
    told = [
        f"{row.config['size']} "
        + " / ".join(f"{mean(row, name):.1f}" if f"{name}_ms" in row.metrics else "-" for name in phases)
        for row in rows
    ]
    ratio = span((p50(row, "backward") / p50(row, "forward") for row in rows), lambda x: f"{x:.1f}")
    return (
        f"(b) Mean {' / '.join(phases)} in ms at {length} tokens in fp32: {ends(told)}"
        f"{_forward_alone(e, {row.config['size'] for row in rows}, length)}; a backward pass takes {ratio} times as "
        f"long as the forward pass.{_sum_of_phases(e)}"
    )


def _forward_alone(e: Evidence, told: set[str], length: int) -> str:
    """The forward passes of sizes of which no more is measured."""
    rows = [row for row in e.ok("model", "forward_ms", precision="fp32", context_length=length)
            if row.config["size"] not in told and row.config["mode"] == "forward"]  # fmt: skip
    return "".join(f", and {row.config['size']} forward only {mean(row, 'forward'):.1f}" for row in rows[-1:])


def _sum_of_phases(e: Evidence) -> str:
    """How the phases' times, each of which ends in a wait, add up beside that of the step."""
    rows = e.ok("model", "step_ms", *(f"{name}_ms" for name in _PHASES))
    if not rows:
        return ""
    over = span((sum(p50(row, name) for name in _PHASES) / p50(row) for row in rows), lambda x: f"{x:.2f}")
    return f" Phases are timed separately, with a synchronization after each: their sum is {over} times the step."


def spread_of_steps(e: Evidence) -> str | None:
    """(b) How far the steps of a setting lie apart, and why, as far as rows show it."""
    rows = e.ok("model", "step_ms")
    if not rows:
        return None
    most = max(rows, key=_spread)
    steady = sum(_spread(row) < _STEADY for row in rows)
    return (
        f"The standard deviation is below {percent(_STEADY)} of the mean in {steady} of {len(rows)} settings, and at "
        f"most {percent(_spread(most))} ({about(most, 'mode', 'size', 'context_length', 'precision')})."
        f"{_why_steps_differ(rows)}"
    )


def _spread(row: Row) -> float:
    return row.metrics["step_ms"]["std"] / row.metrics["step_ms"]["mean"]


def _why_steps_differ(rows: Sequence[Row]) -> str:
    """Whether steps that differ are those that hardly grow with the tokens, which it is not the GPU that holds up."""
    by_setting = {_key(row, row.config.get("context_length")): row for row in rows}
    growth = [(row, ratio) for row in rows if (ratio := _growth(row, by_setting)) is not None]
    unsteady = [row for row in rows if _spread(row) >= _STEADY]
    compared = [ratio for row, ratio in growth if _spread(row) >= _STEADY]
    grown = [_spread(row) for row, ratio in growth if ratio >= _GROWS]
    waiting, alone = sum(ratio < _GROWS for ratio in compared), len(unsteady) - len(compared)
    if not grown or 2 * waiting <= len(compared):
        return ""
    longer = len(compared) - waiting
    also = f", {longer} of the {len(unsteady)}," if longer else ""
    at_one = f"; {alone} of the {len(unsteady)} {'was' if alone == 1 else 'were'} measured at one length only"
    return (
        f" Of the other {len(unsteady)}, {waiting} take less than {_GROWS} times as long for twice the tokens: they "
        f"wait for the host, whose pace varies. Settings that take longer{also} have at most {percent(max(grown))}"
        f"{at_one if alone else ''}."
    )


def _key(row: Row, length: int | None) -> str:
    return str([length, *(row.config.get(name) for name in _ALIKE)])


def _growth(row: Row, by_setting: Mapping[str, Row]) -> float | None:
    """How many times as long a step takes for twice the tokens: from half of them, or to twice, the lesser."""
    length = row.config.get("context_length")
    if not isinstance(length, int):
        return None
    half, twice = by_setting.get(_key(row, length // 2)), by_setting.get(_key(row, 2 * length))
    found = [p50(row) / p50(half)] if half else []
    return min([*found, *([p50(twice) / p50(row)] if twice else [])], default=None)


def warmup_steps(e: Evidence) -> str | None:
    """(c) What the first steps of a process do to the mean."""
    rows = e.ok("warmup", "steps_ms")
    cold, warm = [r for r in rows if r.config["warmup"] == 0], [r for r in rows if r.config["warmup"] > 0]
    if not cold or not warm:
        return None
    first = [row.metrics["steps_ms"][0] / p50(row) for row in cold]
    excess = [row.metrics["step_ms"]["mean"] / p50(row) - 1 for row in cold]
    off = max(abs(row.metrics["step_ms"]["mean"] / p50(row) - 1) for row in warm)
    least = min(row.config["warmup"] for row in warm)
    text = "without warm-up the first step is longer than the others"
    if not all(map(is_of_cpu, cold)):  # a CPU has little to begin with, and other work beside it
        e.claim(text, min(first) > 1, least_ratio=min(first))
    elif min(first) <= 1:
        return None
    few = [row for row in warm if row.config["warmup"] in (1, 2) and len(row.metrics["steps_ms"]) > 1]
    return (
        f"(c) {text[0].upper()}{text[1:]}, {span(first, times)} the median, because it loads libraries, chooses "
        f"kernels and takes memory from the driver; the mean is then {span(excess, percent)} above the median. After "
        f"{least} or more warm-up steps mean and median are within {percent(off)} of each other"
        f"{_after_a_few(few) if few else ''}."
    )


def _after_a_few(rows: Sequence[Row]) -> str:
    """What the first measured step takes after one or two to warm up, beside the longest of those after it."""
    first = [row.metrics["steps_ms"][0] / p50(row) for row in rows]
    later = [max(row.metrics["steps_ms"][1:]) / p50(row) for row in rows]
    what = (
        f"; after one or two the first measured step takes {span(first, lambda x: f'{x:.2f}')} times the median, and "
        f"the longest of the later ones {span(later, lambda x: f'{x:.2f}')} times"
    )
    if all(one - 1 <= max(_LITTLE, FAR * (other - 1)) for one, other in zip(first, later, strict=True)):
        return f"{what}: what still differs is noise that all steps have, and no warming up"
    return f"{what}: clocks, caches and the allocator's blocks may need more steps to settle"
