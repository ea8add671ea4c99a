"""Sums, types and speed in 16 bits."""

from collections.abc import Sequence

from ...bench.row import Row
from ..attention_tables import with_speedups
from ..markdown import markdown_table
from ..selection import latest
from ..views import VIEWS
from .claims import (
    Evidence,
    about,
    ends,
    is_alike,
    listing,
    one_setting,
    p50,
    percent,
    span,
    times,
)
from .problem import Exhibit, Problem, says
from .profiling import MODEL_COMMAND, SECTION, float32_attention
from .timing import WAY, at_one_length

_NOISE = 0.1  # of a time: what the same differs by in another table is told from here on
_SPEEDUPS = ("forward", "backward", "step")
_STEPS = {
    "train_step": "A step is a whole training step, with the optimizer",
    "forward_backward": "A step is a forward and a backward pass, without the optimizer",
}


def accumulation(e: Evidence) -> str | None:
    """Which sums are near the truth."""
    rows = one_setting(e.ok("precision-accumulation", "error"), "value", "count")
    # A power of two is the same in each type, and so are its sums.
    if len(rows) < 2 or not any(r.metrics["error"] and r.metrics["dtype"] == "float16" for r in rows):
        return None
    by_error = sorted(rows, key=lambda row: abs(row.metrics["error"]))
    near, far = by_error[0], by_error[-1]
    claim = e.claim(
        f"the sum that is kept in float16 is farthest off (`{far.variant}`)", far.metrics["dtype"] == "float16",
        farthest=far.variant, error=far.metrics["error"],
    )  # fmt: skip
    text = (
        f"Added up {far.config['count']:,} times, {far.config['value']:g} gives {near.metrics['sum']:.7g} at best "
        f"(`{near.variant}`) and {far.metrics['sum']:.7g} at worst: {claim}, {abs(far.metrics['error']):.2g} from "
        f"{far.metrics['exact']:g}, since each addition is rounded to it."
    )
    wide = [r for r in rows if r.metrics["dtype"] == "float32" and r.variant.startswith("fp16")]
    if not wide:
        return text
    errors = span((abs(row.metrics["error"]) for row in wide), lambda x: f"{x:.2g}")
    return f"{text} float16 numbers added in float32 are off by {errors}, the rounding of the numbers themselves."


def _types(e: Evidence, norm: str, precision: str) -> dict[str, str] | None:
    rows = e.ok("autocast-dtypes", "dtypes", norm=norm, precision=precision)
    return rows[-1].metrics["dtypes"] if rows else None


def _is_of_gpu(e: Evidence) -> bool:
    """Whether types were read on a GPU: autocast has other lists of operations on a CPU."""
    return all(str(row.config.get("device")).startswith("cuda") for row in e.ok("autocast-dtypes"))


def autocast_types(e: Evidence) -> str | None:
    """(a) Types under float16 autocast."""
    types = _types(e, "layer_norm", "fp16")
    if types is None:
        return None
    told = listing([f"{name.replace('_', ' ')} {kind}" for name, kind in types.items()])
    return f"(a) Under float16 autocast these are the types of the toy model: {told}."


def norm_type(e: Evidence) -> str | None:
    """(b) Layer norm under both autocast types."""
    half, brain = _types(e, "layer_norm", "fp16"), _types(e, "layer_norm", "bf16")
    if half is None or brain is None:
        return None
    if _is_of_gpu(e):
        e.claim(
            "autocast keeps layer norm in float32 under float16", half["norm_output"] == "float32",
            type=half["norm_output"],
        )  # fmt: skip
    text = "(b) Layer norm squares and averages, and in float16 squares overflow: "
    if half["norm_output"] == "float32":
        there = brain["norm_output"]
        does = "autocast keeps it in float32 there too" if there == "float32" else "autocast does not protect it there"
        text += (
            "autocast keeps it in float32. bfloat16 has the range of float32, so squares do not overflow, but its 8 "
            f"bits of precision still make for poor means and variances; {does} (output {there})"
        )
    else:
        text += (
            f"on a GPU autocast keeps it in float32. These rows are of a CPU, whose autocast does not: its output is "
            f"{half['norm_output']} under float16 and {brain['norm_output']} under bfloat16"
        )
    own = _types(e, "rms_norm", "bf16")
    if own is None:
        return f"{text}."
    return f"{text}; an RMSNorm written in plain operations gives {own['norm_output']}."


def with_bf16_speedups(rows: Sequence[Row]) -> list[Row]:
    """The rows in bf16 that have one of equal setting in fp32, with how many times as fast they are."""
    done = [row for row in latest(rows, VIEWS["model"].keys) if row.status == "ok"]
    found = one_setting([row for row in done if all(f"{name}_ms" in row.metrics for name in _SPEEDUPS)], *WAY)
    for name in _SPEEDUPS:
        found = with_speedups(found, f"{name}_ms", f"{name}_speedup", "precision", "fp32")
    return [r for r in found if r.config.get("precision") == "bf16" and "step_speedup" in r.metrics]


def speedup_table(rows: Sequence[Row]) -> str:
    """A line a setting: the times in bf16, and how many times as fast as in fp32 they are."""
    shown = with_bf16_speedups(rows)
    header = ["size", "context length", *(f"{n} in bf16 (ms)" for n in _SPEEDUPS)]
    header += [f"{n}, times as fast as in fp32" for n in _SPEEDUPS]
    lines = [
        [str(row.config["size"]), str(row.config["context_length"]), *(f"{p50(row, n):.2f}" for n in _SPEEDUPS),
         *(f"{row.metrics[f'{n}_speedup']:.2f}" for n in _SPEEDUPS)]
        for row in shown
    ]  # fmt: skip
    if not lines:
        return ""
    mode = _STEPS.get(str(shown[0].config.get("mode")), "a step")
    return f"{mode}; rows of one file are compared with each other:\n\n{markdown_table(header, lines, left=2)}"


def _noise(e: Evidence, rows: Sequence[Row]) -> str:
    """How far the forward passes of some rows are from the same ones measured in other modes, where that is far."""
    ratios = []
    for row in rows:
        same = ("size", "context_length", "precision", "batch_size", "compile", "attention")
        others = [each for each in e.ok("model", "forward_ms") if is_alike(each, row, same)]
        ratios += [(p50(each, "forward") / p50(row, "forward"), row.config["size"]) for each in others]
    most, size = max(ratios, key=lambda pair: abs(pair[0] - 1), default=(1.0, ""))
    if abs(most - 1) < _NOISE:
        return ""
    return f" (the bf16 forward pass of {size} differs by {percent(abs(most - 1))} between the two tables below)"


def bf16_speed(e: Evidence) -> str | None:
    """(c) What bf16 gains, size by size, and where it does not."""
    rows = with_bf16_speedups(e.all("model"))
    if not rows:
        return None
    ratio = lambda row: row.metrics["step_speedup"]  # noqa: E731
    gain = lambda row, name: p50(row, name) * row.metrics[f"{name}_speedup"]  # noqa: E731
    each = at_one_length(rows)
    told = [
        f"{row.config['size']} {gain(row, 'forward'):.0f} + {gain(row, 'backward'):.0f} become "
        f"{p50(row, 'forward'):.0f} + {p50(row, 'backward'):.0f}"
        for row in each
    ]
    slower = [row for row in rows if ratio(row) < 1]
    order = [ratio(row) for row in each]
    trend = "more with each size" if order == sorted(order) else "not in the order of the sizes"
    worst, caveat = min(rows, key=ratio), float32_attention(rows)
    text = (
        f"(c) Forward and backward passes in ms at {each[0].config['context_length']} tokens, fp32 and bf16: "
        f"{ends(told)}. A step there is {span(order, times)} as fast, {trend}"
    )
    if not slower:
        return f"{text}; it is nowhere slower, and the least gain is {times(ratio(worst))} ({about(worst)}).{caveat}"
    return (
        f"{text}; in {len(slower)} of {len(rows)} settings it is slower, most of all for "
        f"{about(worst, 'size', 'context_length')} ({times(ratio(worst))} as fast): autocast's casts are additional "
        f"kernels, and small models wait for the host to launch them{_noise(e, each)}.{caveat}"
    )


PROBLEMS = (
    Problem(
        name="mixed_precision_accumulation",
        section=SECTION,
        places=("1.1.5", "2.1.5"),
        question="What becomes of a sum of many small numbers when numbers or sum are of 16 bits?",
        exhibits=(Exhibit(case="precision-accumulation", command="bench precision-accumulation"),),
        sentences=(says(accumulation, "precision-accumulation"),),
    ),
    Problem(
        name="benchmarking_mixed_precision",
        section=SECTION,
        places=("1.1.5", "2.1.5"),
        question="Which types do tensors have under autocast, why are norms an exception, and how much faster is bf16?",
        exhibits=(
            Exhibit(case="autocast-dtypes", command="bench autocast-dtypes"),
            Exhibit(case="model", command=MODEL_COMMAND, show=speedup_table),
        ),
        sentences=(
            says(autocast_types, "autocast-dtypes"),
            says(norm_type, "autocast-dtypes"),
            says(bf16_speed, "model"),
        ),
    ),
)
