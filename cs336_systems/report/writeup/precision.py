"""Section 1.1 of the handout, its second half: precision and memory."""

from collections.abc import Sequence

from ...bench.case import Row
from ...model_config import ModelConfig
from ...planner.activations import activation_sections, residual_stream
from ...planner.job import Job
from ...planner.working import Section
from ..attention import with_speedups
from ..tables import markdown_table
from ..view import latest
from ..views import VIEWS
from .claims import Evidence, about, gib, listing, one_setting, p50, peak, span, times
from .problem import Exhibit, Problem, says
from .profiling import MODEL_COMMAND, SECTION

_SPEEDUPS = ("forward", "backward", "step")
_WAY = ("mode", "compile", "attention", "activation_checkpointing")
"""How a model is run; what is compared is run in one way, that of most rows."""


def accumulation(e: Evidence) -> str | None:
    """Which sums are near the truth."""
    rows = e.ok("precision-accumulation", "error")
    if len(rows) < 2:
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
    e.claim(
        "autocast keeps layer norm in float32 under float16", half["norm_output"] == "float32", type=half["norm_output"]
    )
    also = "also" if brain["norm_output"] == "float32" else "not"
    text = (
        "(b) Layer norm squares and averages, and what is squared overflows float16: autocast keeps it in float32. "
        f"Under bfloat16, whose range is that of float32, it {also} does so (output {brain['norm_output']}), for its "
        "few digits"
    )
    own = _types(e, "rms_norm", "bf16")
    if own is None:
        return f"{text}."
    return f"{text}; an RMSNorm written in plain operations gives {own['norm_output']}."


def with_bf16_speedups(rows: Sequence[Row]) -> list[Row]:
    """The rows in bf16 that have one of equal setting in fp32, with how many times as fast they are."""
    done = [row for row in latest(rows, VIEWS["model"].keys) if row.status == "ok"]
    found = one_setting([row for row in done if all(f"{name}_ms" in row.metrics for name in _SPEEDUPS)], *_WAY)
    for name in _SPEEDUPS:
        found = with_speedups(found, f"{name}_ms", f"{name}_speedup", "precision", "fp32")
    return [r for r in found if r.config.get("precision") == "bf16" and "step_speedup" in r.metrics]


def speedup_table(rows: Sequence[Row]) -> str:
    """A line a setting: the times in bf16, and how many times as fast as in fp32 they are."""
    header = ["size", "context length", *(f"{n} bf16 (ms)" for n in _SPEEDUPS), *(f"{n} (x fp32)" for n in _SPEEDUPS)]
    lines = [
        [str(row.config["size"]), str(row.config["context_length"]), *(f"{p50(row, n):.2f}" for n in _SPEEDUPS),
         *(f"{row.metrics[f'{n}_speedup']:.2f}" for n in _SPEEDUPS)]
        for row in with_bf16_speedups(rows)
    ]  # fmt: skip
    return markdown_table(header, lines, left=2) if lines else ""


def bf16_speed(e: Evidence) -> str | None:
    """(c) What bf16 gains, and where it does not."""
    rows = with_bf16_speedups(e.all("model"))
    if not rows:
        return None
    ratio = lambda row: row.metrics["step_speedup"]  # noqa: E731
    best, worst = max(rows, key=ratio), min(rows, key=ratio)
    slower = sum(ratio(row) < 1 for row in rows)
    text = f"(c) A step in bf16 is {times(ratio(best))} as fast as in fp32 for {about(best, 'size', 'context_length')}"
    if not slower:
        return f"{text}, and nowhere slower; the least gain is {times(ratio(worst))} ({about(worst)})."
    return (
        f"{text}; in {slower} of {len(rows)} settings it is slower, most of all for "
        f"{about(worst, 'size', 'context_length')} ({times(ratio(worst))} as fast): autocast's copies are kernels "
        "more, and small models wait for the host to launch them."
    )


def _memory_rows(e: Evidence) -> list[Row]:
    return e.ok("profile-memory", "at_peak_bytes", "phase_peak_bytes")


def memory_at_peak(e: Evidence) -> str | None:
    """(a, b) The peak, its phase and what it consists of."""
    rows = _memory_rows(e)
    if not rows:
        return None
    row = max(rows, key=lambda row: row.metrics["peak_bytes"])
    parts = {name: size for name, size in row.metrics["at_peak_bytes"].items() if size > 0}
    order = sorted(parts, key=lambda name: -parts[name])
    told = listing([f"{name} {gib(parts[name])}" for name in order[:3]])
    also = ""
    if len(rows) > 1:
        peaks = (f"{gib(r.metrics['peak_bytes'])} ({about(r, 'size', 'context_length', 'mode')})" for r in rows)
        also = f" Of all that were recorded: {listing(list(peaks))}."
    phases = listing([f"{name} {gib(size)}" for name, size in row.metrics["phase_peak_bytes"].items()])
    return (
        f"(a, b) A {row.variant.replace('_', ' ')} of {about(row)} peaks at {gib(row.metrics['peak_bytes'])} in its "
        f"{row.metrics['peak_phase']} phase, of which {told}; the peaks of its phases are {phases}.{also}"
    )


def memory_by_precision(e: Evidence) -> str | None:
    """(c) What mixed precision does to the peak."""
    rows = one_setting(e.ok("model", "peak_memory_bytes"), *_WAY)
    peaks: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        peaks.setdefault((row.config["size"], row.config["context_length"]), {})[row.config["precision"]] = row
    ratios = {
        id(p["bf16"]): peak(p["bf16"]) / peak(p["fp32"]) - 1 for p in peaks.values() if {"fp32", "bf16"} <= set(p)
    }
    if not ratios:
        return None
    pairs = [p for p in peaks.values() if {"fp32", "bf16"} <= set(p)]
    largest = max(pairs, key=lambda pair: peak(pair["fp32"]))
    changes = span(ratios.values(), lambda x: f"{x:+.0%}")
    return (
        f"(c) bf16 changes the peak by {changes}: {gib(peak(largest['fp32']))} become {gib(peak(largest['bf16']))} for "
        f"{about(largest['fp32'], 'size', 'context_length')}, for weights, gradients and optimizer state stay float32 "
        "and copies of the weights are added."
    )


def residual_size(e: Evidence) -> str | None:
    """(d) One activation of the residual stream."""
    rows = [row for row in _memory_rows(e) if row.metrics.get("counted")]
    if not rows:
        return None
    row = rows[-1]
    c = row.config
    size = residual_stream(c["batch_size"], c["context_length"], c["d_model"])
    e.claim(
        "the size of the residual stream is that which was counted in the run",
        size == row.metrics["counted"]["residual_stream_bytes"], formula=size,
        row=row.metrics["counted"]["residual_stream_bytes"],
    )  # fmt: skip
    return (
        f"(d) An activation of the residual stream of {about(row, 'size', 'context_length')} in single precision has "
        f"{c['batch_size']} x {c['context_length']} x {c['d_model']} x 4 bytes, {gib(size)}."
    )


def largest_allocation(e: Evidence) -> str | None:
    """(e) The largest allocation and the line that asked for it."""
    rows = [row for row in _memory_rows(e) if row.metrics.get("largest")]
    if not rows:
        return None
    most = rows[-1].metrics["largest"][0]
    where = f" by `{most['code'][0]}`" if most["code"] else ""
    return f"(e) The largest allocations have {gib(most['bytes'])} and are made{where} in the {most['phase']} phase."


def residual_working() -> list[Section]:
    """The residual stream of the handout's largest 2025 size, and what a block of it saves."""
    shape = ModelConfig(size="2.7B", context_length=512).shape
    return activation_sections(Job(shape=shape, precision="fp32", attention="naive"))


PROBLEMS = (
    Problem(
        name="mixed_precision_accumulation",
        section=SECTION,
        question="What becomes of a sum of many small numbers when numbers or sum are of 16 bits?",
        exhibits=(Exhibit(case="precision-accumulation", command="bench precision-accumulation"),),
        sentences=(says(accumulation, "precision-accumulation"),),
    ),
    Problem(
        name="benchmarking_mixed_precision",
        section=SECTION,
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
    Problem(
        name="memory_profiling",
        section=SECTION,
        question="What is in memory over a step, what is its peak made of, and which allocations are largest?",
        exhibits=(
            Exhibit(
                case="profile-memory",
                command="profile memory --size xl --context_length 512 --batch_size 4 --precision bf16",
            ),
            Exhibit(case="model", command=MODEL_COMMAND, show=lambda rows: "", plots=("peak",)),
        ),
        sentences=(
            says(memory_at_peak, "profile-memory"),
            says(memory_by_precision, "model"),
            says(residual_size, "profile-memory"),
            says(largest_allocation, "profile-memory"),
        ),
        working=residual_working,
        plan="plan activation --size 2.7B --context 512 --precision fp32 --attention naive",
    ),
)
