"""Plain attention and torch.compile."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from ...bench.row import Row
from ...planner.accounting import naive_attention_bytes
from ...planner.cards import get_card
from ...planner.memory import WORKSPACE
from ...planner.working import GIB, Section, Term
from ..attention_tables import with_speedups
from ..markdown import markdown_table
from ..selection import OUTCOMES, latest
from ..tables import table
from ..views import VIEWS, columns_of
from .claims import Evidence, about, gib, listing, mib, ms, one_setting, p50, peak, percent, span, times
from .problem import Exhibit, Problem, says
from .side_by_side import side_by_side
from .timing import CONTEXT

PLAIN = "Attention in PyTorch"
_COMPILED = {"forward_ms", "backward_ms", "step_ms"}
_MOST = 0.75
_BATCH, _HEAD_SIZE = 8, 16  # of the handout: its batch, and the smallest head
_WORKSPACES = 2 * WORKSPACE  # of the two threads of a forward and a backward pass
_LONG = 4096  # from here on scores are larger than a GPU's cache


def is_eager(row: Row) -> bool:
    """Whether a row is of attention that was not compiled."""
    return not row.config.get("compile")


def attention_times(e: Evidence) -> str | None:
    """Times of the smallest and the largest setting, and what failed."""
    rows = [row for row in e.ok("attention", "forward_ms", "backward_ms") if is_eager(row)]
    if not rows:
        return None
    first, last = min(rows, key=lambda r: p50(r, "forward")), max(rows, key=lambda r: p50(r, "forward"))
    text = (
        f"Forward and backward take {ms(p50(first, 'forward'))} and {ms(p50(first, 'backward'))} at "
        f"{about(first, 'head_size', 'length')}, {ms(p50(last, 'forward'))} and {ms(p50(last, 'backward'))} at "
        f"{about(last, 'head_size', 'length')}"
    )
    failed = [row for row in e.all("attention") if is_eager(row) and row.status == "oom"]
    if not failed:
        return (
            f"{text}; none of the {len(rows)} settings runs out of memory on this machine. By count, {_too_long():,} "
            "is the shortest power of two that does on an H200; it is accounted for below."
        )
    least = min(failed, key=lambda row: (row.config["length"], row.config["head_size"]))
    return f"{text}; the first setting that is {OUTCOMES['oom']} is {about(least, 'head_size', 'length')}."


def attention_memory(e: Evidence) -> str | None:
    """How the memory that is saved for the backward pass grows with the length."""
    name = "memory_before_backward_bytes"
    rows = [row for row in e.ok("attention", name, "counted_bytes") if is_eager(row)]
    rows = one_setting(rows, "head_size")
    by_length = {row.config["length"]: row for row in rows}
    longest = max(by_length, default=0)
    half = by_length.get(longest // 2)
    if half is None:
        return None
    row = by_length[longest]
    ratio = row.metrics[name] / half.metrics[name]
    counted = row.metrics["counted_bytes"]["saved_for_backward"]
    if counted < _MOST * row.metrics[name]:  # of short inputs it is other things that take the memory
        return None
    claim = e.claim("it grows with the square of the length", ratio > 3, ratio_when_length_doubles=ratio)
    return (
        f"At {about(row, 'head_size', 'length')}, {gib(row.metrics[name])} are in use before the backward pass, of "
        f"which {gib(counted)} are counted as saved for it ({percent(counted / row.metrics[name])}): {claim}, "
        f"{times(ratio)} as much for twice the tokens. FlashAttention makes that part linear: it works tile by tile, "
        "rescales the softmax as it goes, and recomputes the scores in the backward pass."
    )


def _counted(length: int) -> dict[str, int]:
    return naive_attention_bytes(_BATCH, length, length, _HEAD_SIZE, is_causal=True, on_gpu=True)


def _too_long() -> int:
    """The shortest power of two at which the backward pass alone needs more than an H200 has."""
    limit = get_card("H200").memory_gib * GIB
    return next(2**n for n in itertools.count() if _counted(2**n)["backward_peak"] > limit)


def attention_working() -> list[Section]:
    """Memory of plain attention at the shortest length, a power of two, that an H200 does not hold, term by term."""
    batch, length = _BATCH, _too_long()
    formulas = {
        "scores": f"S = 4 B N^2 = 4 x {batch} x {length}^2",
        "masked_scores": "S",
        "softmax": "S",
        "masks": f"2 M = 2 x {length}^2",
        "saved_for_backward": "S + M + 4 B D (N + 2 N): the softmax's output, a mask, q / sqrt(D), k, v",
        "forward_peak": "2 S + 2 M + 4 B D N",
        "backward_peak": "4 S + M + 4 B D (N + N) on a GPU",
    }
    terms = tuple(Term(name.replace("_", " "), formulas[name], size) for name, size in _counted(length).items())
    title = f"Plain attention, float32, causal, batch {batch}, length {length}, head size {_HEAD_SIZE}"
    note = f"an H200 has {get_card('H200').memory_gib:g} GiB"
    return [Section(title, terms, (note,))]


def compiled_attention(e: Evidence) -> str | None:
    """What torch.compile makes of plain attention."""
    rows = with_speedups(e.all("attention"), "forward_ms", "forward_speedup", "compile", False)
    rows = with_speedups(rows, "backward_ms", "backward_speedup", "compile", False)
    rows = [r for r in rows if r.config.get("compile") and "forward_speedup" in r.metrics]
    long = [row for row in rows if row.config["length"] >= _LONG]
    if not long:
        return None
    speed = {way: [row.metrics[f"{way}_speedup"] for row in long] for way in ("forward", "backward")}
    slower = sum(row.metrics["forward_speedup"] < 1 for row in rows)
    peaks = []
    for row in long:
        same = {name: row.config[name] for name in ("length", "head_size")}
        eager = e.ok("attention", "peak_memory_bytes", compile=False, **same)
        peaks += [row.metrics["peak_memory_bytes"] / r.metrics["peak_memory_bytes"] for r in eager[-1:]]
    memory = f", with {span(peaks, percent)} of the peak memory" if peaks else ""
    return (
        f"(a) From {_LONG:,} tokens on compiled attention is {span(speed['forward'], times)} as fast forward and "
        f"{span(speed['backward'], times)} backward, because what lies between the two products is fused into fewer "
        f"kernels{memory}; in {slower} of all {len(rows)} settings its forward pass is "
        "slower than the eager one."
    )


def compiled_models(rows: Sequence[Row]) -> list[Row]:
    """The rows of compiled models with plain attention that have an eager one of equal setting, with speed-ups."""
    found = [row for row in latest(rows, VIEWS["model"].keys) if row.status == "ok" and set(row.metrics) >= _COMPILED]
    found = [row for row in found if row.config["attention"] == "naive"]
    for name in _COMPILED:
        found = with_speedups(found, name, name.replace("_ms", "_speedup"), "compile", False)
    return [row for row in found if row.config.get("compile") and "step_speedup" in row.metrics]


def compiled_table(rows: Sequence[Row]) -> str:
    """A line a setting: forward pass and step of the eager model beside those of the compiled one."""
    names = ("forward", "backward", "step")
    header = ["size", "context length", "precision"]
    header += [f"{name}, {way} (ms)" for name in names for way in ("eager", "compiled")] + ["step (x eager)"]
    lines = []
    for row in compiled_models(rows):
        times = [(p50(row, name) * row.metrics[f"{name}_speedup"], p50(row, name)) for name in names]
        lines.append([
            *(str(row.config[field]) for field in ("size", "context_length", "precision")),
            *(f"{each:.2f}" for pair in times for each in pair),
            f"{row.metrics['step_speedup']:.2f}",
        ])  # fmt: skip
    return markdown_table(header, lines, left=3) if lines else ""


def compiled_model(e: Evidence) -> str | None:
    """(b) What torch.compile makes of the whole model."""
    rows = compiled_models(e.all("model"))
    if not rows:
        return None
    best = max(rows, key=lambda row: row.metrics["step_speedup"])
    ahead = [span((row.metrics[f"{name}_speedup"] for row in rows), times) for name in ("forward", "step")]
    return (
        f"(b) Compiled, the model's forward pass is {ahead[0]} as fast and a step with backward pass and optimizer "
        f"{ahead[1]}, most of all for {about(best)}. Each block is compiled by itself, as are the last norm and the "
        "loss, so that all blocks share one compilation; the optimizer is not compiled."
    )


def eager_alone(rows: Sequence[Row]) -> str:
    """The table of plain attention that is not compiled, without what compares it with itself."""
    view = VIEWS["attention"]
    columns = tuple(column for column in view.columns if not column.metric.endswith("_speedup"))
    shown = _in_order(latest(rows, view.keys))
    return "\n\n".join(filter(None, (table(shown, replace(view, columns=columns)), _workspaces_in_use(shown))))


def _in_order(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row.config["head_size"], row.config["length"]))


def _workspaces_in_use(rows: Sequence[Row]) -> str:
    """What is to be known of a row with more in use than that of a greater length, by cuBLAS's workspaces; else ""."""
    name, notes = "memory_before_backward_bytes", []
    own = [row for row in rows if row.status == "ok" and name in row.metrics]
    for row, longer in itertools.pairwise(own):
        more = row.metrics[name] - longer.metrics[name]
        alike = row.config["head_size"] == longer.config["head_size"]
        if alike and 0 < more < _WORKSPACES < row.metrics[name]:
            notes.append(
                f"At {about(row, 'head_size', 'length')} more is in use, {mib(row.metrics[name])}, than at "
                f"{about(longer, 'length')}, {mib(longer.metrics[name])}: {mib(_WORKSPACES)} of it, and of the peak, "
                "are cuBLAS's workspaces, which the first product of a process takes."
            )
    return " ".join(notes)


def eager_beside_compiled(rows: Sequence[Row]) -> str:
    """The table of plain attention as it is and compiled."""
    view = VIEWS["attention"]
    derived = view.derive(latest(rows, view.keys))
    settings = {(row.config["head_size"], row.config["length"]) for row in derived if row.config.get("compile")}
    both = _in_order([row for row in derived if (row.config["head_size"], row.config["length"]) in settings])
    text = side_by_side(
        both, view.keys, "compile", {False: "eager", True: "compiled"},
        columns_of("attention", "forward (ms)", "backward (ms)", "peak (GiB)"),
        columns_of("attention", "forward (x eager)", "backward (x eager)"),
    )  # fmt: skip
    return "\n\n".join(filter(None, (text, _workspaces_in_peaks(both))))


def _workspaces_in_peaks(rows: Sequence[Row]) -> str:
    """What is to be known of compiled rows whose peak is above that of eager ones by nearly cuBLAS's workspaces."""
    peaks: dict[bool, dict[tuple[int, int], float]] = {False: {}, True: {}}
    for row in rows:
        if row.status == "ok" and "peak_memory_bytes" in row.metrics:
            peaks[bool(row.config.get("compile"))][row.config["length"], row.config["head_size"]] = peak(row)
    eager, compiled = peaks[False], peaks[True]
    above = {each: compiled[each] - eager[each] for each in compiled if each in eager}
    above = {each: more for each, more in above.items() if _WORKSPACES / 2 < more <= _WORKSPACES}
    if not above:
        return ""
    lengths = listing([f"{length:,}" for length in sorted({length for length, _ in above})])
    return (
        f"At length {lengths} compiled peaks are up to {mib(max(above.values()))} above eager ones: compiled rows "
        f"count cuBLAS's workspaces, {mib(_WORKSPACES)}, which are most of so small a peak."
    )


PROBLEMS = (
    Problem(
        name="pytorch_attention",
        section=PLAIN,
        places=("1.2.1", "4.1.1"),
        question=(
            "How do time and memory of plain attention grow with length and head size, and where does memory run out?"
        ),
        exhibits=(
            Exhibit(
                case="attention",
                command="bench attention --compile false",
                also=("bench attention --compile false --length 32768 65536",),
                keep=is_eager,
                show=eager_alone,
                plots=("forward", "memory"),
            ),
        ),
        sentences=(says(attention_times, "attention"), says(attention_memory, "attention")),
        working=attention_working,
        code=("cs336_systems/planner/accounting.py", "cs336_systems/bench/cases/attention.py"),
    ),
    Problem(
        name="torch_compile",
        section=PLAIN,
        places=("1.3", "4.2"),
        question="What does torch.compile gain, for attention alone and for the whole model?",
        exhibits=(
            Exhibit(case="attention", command="bench attention", show=eager_beside_compiled, plots=("backward",)),
            Exhibit(
                case="model",
                command=(
                    f"bench model --size small medium large xl 2.7B --context_length {CONTEXT} --mode train_step "
                    "--precision bf16 --compile false true"
                ),
                keep=lambda row: row.config.get("attention", "naive") == "naive" and row.config["mode"] == "train_step",
                is_asked=lambda row: bool(row.config.get("compile")) and row.config["context_length"] == CONTEXT,
                show=compiled_table,
                together=True,
            ),
        ),
        sentences=(says(compiled_attention, "attention"), says(compiled_model, "model")),
        code=("cs336_systems/training/build.py",),
    ),
)
