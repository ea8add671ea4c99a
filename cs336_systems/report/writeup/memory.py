"""What fills memory over a step, and what a block saves."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...bench.profiling.timeline import Timeline
from ...bench.row import Row
from ...planner.activations import activation_sections, residual_stream
from ...planner.memory import head_term, logits_terms
from ...planner.rows import is_of_cpu, workload_job
from ...planner.working import Section
from ..memory_profiles import KEYS, draw_timeline, memory_table
from ..selection import latest
from .claims import (
    XL_2026,
    Evidence,
    about,
    gib,
    is_alike,
    is_xl_2026,
    listing,
    mib,
    ms,
    of_2026,
    percent,
)
from .memory_peaks import LENGTHS, MODES, job_of, memory_by_precision, peaks_by_length, peaks_table, words
from .problem import Drawing, Exhibit, Problem, RowFile, evidence_of, says
from .profiling import MODEL_COMMAND, SECTION
from .timing import CONTEXT

RESIDUALS_COMMAND = f"bench residuals --size {XL_2026} --context_length {CONTEXT} 2048"
_LISTED = 5  # operations that the handout asks for
_NEAR = 0.01
_LONG = 0.1  # of a phase: a stretch at one level that its picture shows


def _memory_rows(e: Evidence) -> list[Row]:
    return of_2026(e.ok("profile-memory", "at_peak_bytes", "phase_peak_bytes"))


def _told_by_mode(e: Evidence) -> dict[str, Row]:
    """By mode the recordings that (a) tells of and that are drawn: the step that peaks highest, and its forward pass.

    Those that have a timeline go before those that have none. Without a step it is the forward pass that peaks highest.
    """
    rows = sorted(_memory_rows(e), key=lambda row: ("timeline" in row.metrics, row.metrics["peak_bytes"]))
    steps = [row for row in rows if row.variant == "train_step"]
    found = {row.variant: row for row in rows if not steps or about(row) == about(steps[-1])}
    return {mode: found[mode] for mode in MODES if mode in found}


def memory_over_time(e: Evidence) -> str | None:
    """(a) What a step's memory does, and by what its stages are told apart."""
    found = _told_by_mode(e)
    if "train_step" not in found:
        return None
    row = found["train_step"]
    m = row.metrics
    parts = {name: size for name, size in m["at_peak_bytes"].items() if size > 0}
    order = sorted(parts, key=lambda name: -parts[name])
    told = listing([f"{name} {gib(parts[name])}" for name in order[:3]])
    phases = listing([f"{name} {gib(size)}" for name, size in m["phase_peak_bytes"].items()])
    by_phase = m["phase_peak_bytes"]
    way = (
        "falls in the backward pass, where activations are freed faster than gradients are made,"
        if by_phase["optimizer"] < by_phase["forward"]
        else "keeps rising in the backward pass, where more gradients are made than activations freed,"
    )
    text = (
        "(a) From PyTorch's allocator history (a memory snapshot, drawn here): a train step of "
        f"{about(row)} peaks at {gib(m['peak_bytes'])} in its {m['peak_phase']} phase, of which {told}; the peaks of "
        f"its phases are {phases}. The stages can be told apart: memory climbs block by block in the forward pass, "
        f"{way} and is level while the optimizer steps{_after_step(m)}."
    )
    if "forward" not in found:
        return text
    inference = found["forward"].metrics["peak_bytes"]
    claim = e.claim(
        "a forward pass alone keeps nothing for later", inference < m["peak_bytes"], inference=inference,
        step=m["peak_bytes"],
    )  # fmt: skip
    return f"{text} {claim[0].upper()}{claim[1:]}: it peaks at {gib(inference)}, alike in every block."


def _after_step(metrics: dict[str, Any]) -> str:
    """What its last phase ends with, where that is less than what it has most."""
    if "timeline" not in metrics:
        return ""
    timeline = Timeline(**metrics["timeline"])
    end = max(at for at, ms in enumerate(timeline.ms) if ms <= timeline.phases["optimizer"][1])
    left = int(timeline.total[end])
    if left > (1 - _NEAR) * metrics["phase_peak_bytes"]["optimizer"]:
        return ""
    return f", until the gradients are freed, which leaves {gib(left)}"


def level_stretches(e: Evidence) -> str | None:
    """(a) Why memory is level in the pictures up to the end of a phase: their time is that of the host."""
    row = _told_by_mode(e).get("train_step")
    if row is None or "timeline" not in row.metrics or is_of_cpu(row):
        return None
    timeline = Timeline(**row.metrics["timeline"])
    told = []
    for name in ("forward", "backward"):
        begin, end = timeline.phases.get(name, (0.0, 0.0))
        last = max((at for at in timeline.ms if begin <= at < end - _NEAR * (end - begin)), default=end)
        if end - last > _LONG * (end - begin):
            told.append(f"{ms(end - last)} of the {name} pass's {ms(end - begin)}")
    if not told:
        return None
    return (
        f"Time in the pictures is the host's: memory is level for the last {listing(told)}, in which the host has "
        "launched all kernels and waits for the GPU."
    )


def peak_parts(rows: Sequence[Row]) -> str:
    """The table of what peaks consist of, with what that means in rows whose step ran out of memory."""
    text = memory_table(rows)
    failed = [row for row in latest(rows, KEYS) if (row.status, row.variant) == ("oom", "train_step")]
    failed = [row for row in failed if "at_peak_bytes" in row.metrics]
    begun = [row for row in failed if row.metrics["at_peak_bytes"].get("optimizer state")]
    first = [row for row in failed if row not in begun]
    parts = [
        f"{listing([about(row) for row in own])} {when}"
        for own, when in (
            (first, "in its first step, before AdamW has its moments"),
            (begun, "in a later one, with AdamW's moments"),
        )
        if own
    ]
    if not parts:
        return text
    return (
        f"{text}\n\nOf a step that is out of memory this is what it had most before it failed, not the peak of a whole "
        f"step: {'; '.join(parts)}."
    )


def residual_size(e: Evidence) -> str:
    """(d) One activation of the residual stream of 2026's xl."""
    for row in _memory_rows(e):
        if counted := row.metrics.get("counted"):
            c = row.config
            size = residual_stream(c["batch_size"], c["context_length"], c["d_model"])
            e.claim(
                "the size of the residual stream is that which was counted in the run",
                size == counted["residual_stream_bytes"], formula=size, row=counted["residual_stream_bytes"],
            )  # fmt: skip
    job = job_of(CONTEXT)
    batch, length, width = job.batch_size, job.shape.context_length, job.shape.d_model
    return (
        f"(d) An activation of the residual stream of {XL_2026} in single precision has `B N d` numbers of 4 bytes, "
        f"{batch} x {length} x {width} x 4 = {mib(residual_stream(batch, length, width))}."
    )


def largest_allocation(e: Evidence) -> str | None:
    """(e) The largest allocations of a forward pass, and the lines that asked for them."""
    rows = of_2026([row for row in e.ok("profile-memory", "largest") if _of_forward(row)])
    if not rows:
        return None
    row = ([r for r in rows if r.variant == "forward"] or rows)[-1]
    most = _of_forward(row)[0]
    alike = [each for each in _of_forward(row) if each["bytes"] == most["bytes"]]
    lines = listing([f"`{code}`" for code in dict.fromkeys(each["code"][0] for each in alike if each["code"])])
    c = row.config
    shapes = _tensor_sizes(c) if "num_heads" in c else {}
    what = next((f", each {name}" for name, size in shapes.items() if size == most["bytes"]), "")
    of = f"the {most['phase']} phase of the recorded {words(row.variant)} of {about(row)}"
    of += "" if row.variant == "forward" else " (no forward pass alone is recorded)"
    made = f", made by {lines}" if lines else ""
    return f"(e) The largest allocations in {of} have {mib(most['bytes'])}{what}{made}."


def _of_forward(row: Row) -> list[dict[str, Any]]:
    """Those of a recording's largest allocations that the forward pass made, the largest first."""
    return [each for each in row.metrics["largest"] if each["phase"] == "forward"]


def _tensor_sizes(c: dict[str, Any]) -> dict[str, int]:
    """Sizes in bytes by which a large tensor of a forward pass is known."""
    tokens, scores = c["batch_size"] * c["context_length"], c["num_heads"] * c["context_length"]
    return {
        "a matrix of attention scores in float32, `4 B H N^2` bytes": 4 * tokens * scores,
        "an activation inside the feed-forward layer in float32, `4 B N d_ff` bytes": 4 * tokens * c["d_ff"],
        "logits in float32, `4 B N V` bytes": 4 * tokens * c["vocab_size"],
        "a feed-forward weight's 16-bit copy, `2 d d_ff` bytes": 2 * c["d_model"] * c["d_ff"],
    }


def largest_residuals(e: Evidence) -> str | None:
    """(f) What a block saves, and the operations that save most of it."""
    row = _block_row(e)
    if row is None:
        return None
    saved = row.metrics["saved_bytes"]
    by_operation: Counter[str] = Counter()
    for each in row.metrics["tensors"]:
        by_operation[each["what"]] += each["count"] * each["bytes"]
    largest = by_operation.most_common(_LISTED)
    told = [f"`{what}` {mib(size)} ({percent(size / saved)})" for what, size in largest]
    return (
        f"(f) A block of {about(row)}, `{row.config['attention']}`, saves {mib(saved)} for its backward pass besides "
        f"its input; the {len(told)} operations that save most are {listing(told)}, together "
        f"{percent(sum(size for _, size in largest) / saved)}."
    )


def _block_row(e: Evidence) -> Row | None:
    """The eager block of plain attention in float32 of 2026's xl, or else of another size, at the handout's length."""
    rows = of_2026([row for row in e.ok("residuals", "saved_bytes", "tensors") if _is_plain_block(row)])
    return min(rows, key=lambda row: abs(row.config["context_length"] - CONTEXT), default=None)


def _is_plain_block(row: Row) -> bool:
    plain = {"precision": "fp32", "attention": "naive", "compile": False}
    return {name: row.config.get(name, value) for name, value in plain.items()} == plain


def block_gradients(e: Evidence) -> str | None:
    """(f) Memory of a block's gradients: by counting, from what backward frees, and as a run has them."""
    row = _block_row(e)
    if row is None:
        return None
    c, saved = row.config, row.metrics["saved_bytes"] + row.metrics["input_bytes"]
    gradients = 4 * _block_parameters(c["d_model"], c["d_ff"])
    way = "rises" if gradients > saved else "falls"
    text = (
        f"Its gradients have a number a parameter, `4 (4 d^2 + 3 d d_ff + 2 d)` bytes = {mib(gradients)}; {mib(saved)} "
        f"are freed, its input included, so memory {way} by {mib(abs(saved - gradients))} a block in the backward pass"
    )
    if (told := _change_in_profile(e, row, saved, gradients)) is not None:
        return f"{text}. {told}"
    found = [(each, made) for each in _memory_rows(e) if (made := _recorded_gradients(each)) is not None]
    if not found:
        return f"{text}."
    recorded, made = found[-1]
    counted = 4 * _block_parameters(recorded.config["d_model"], recorded.config["d_ff"])
    claim = e.claim(
        "as counted", abs(made / counted - 1) <= _NEAR, recorded=made, counted=counted
    )  # fmt: skip
    return (
        f"{text}. In the recorded step of {about(recorded)} what is in use while the optimizer steps, less weights, "
        f"optimizer state, and the gradients of embedding, head and last norm, is {mib(made)} a block, {claim}."
    )


def _change_in_profile(e: Evidence, block: Row, saved: float, gradients: float) -> str | None:
    """A block's gradients out of the recorded change of memory over the backward pass, in a step of its setting.

    Over it, what the last norm, head and loss save is freed too, and gradients are made of weights outside of blocks.
    """
    setting = ("size", "context_length", "batch_size", "precision")
    rows = [row for row in e.ok("profile-memory", "phase_peak_bytes", "counted") if row.variant == "train_step"]
    rows = [row for row in rows if is_alike(row, block, setting) and row.config.get("optimizer") == "torch_fused"]
    rows = [row for row in rows if _is_plain_block(row) and row.config["activation_checkpointing"] == "none"]
    if not rows:
        return None
    phases, job = rows[-1].metrics["phase_peak_bytes"], workload_job(rows[-1].config)
    freed, made = head_term(job).value + logits_terms(job)[0].value, _outside_of_blocks(rows[-1])
    change = (phases["forward"] - phases["optimizer"] - freed + made) / job.shape.num_layers
    found = saved - change
    # Of a small model what is freed outside of blocks, which is only counted, is not little beside a block.
    beside = "as counted" if abs(found / gradients - 1) <= _NEAR else f"where {mib(gradients)} are counted"
    return (
        f"The profile shows that change: from {gib(phases['forward'])} at the end of the forward pass to "
        f"{gib(phases['optimizer'])} while the optimizer steps. Outside of blocks, by count, {mib(freed)} are freed, "
        f"of last norm, head and loss, and gradients of {mib(made)} made; the rest is {mib(abs(change))} a block, so "
        f"its gradients have {mib(saved)} {'-' if change >= 0 else '+'} {mib(abs(change))} = {mib(found)}, {beside}."
    )


def _outside_of_blocks(row: Row) -> float:
    """Bytes of the weights of embedding, head and last norm, or of their gradients, of a recorded step."""
    c = row.config
    return row.metrics["counted"]["parameter_bytes"] - 4 * c["num_layers"] * _block_parameters(c["d_model"], c["d_ff"])


def _block_parameters(d_model: int, d_ff: int) -> int:
    """Parameters of a block: four projections, three feed-forward matrices, two norms."""
    return 4 * d_model**2 + 3 * d_model * d_ff + 2 * d_model


def _recorded_gradients(row: Row) -> float | None:
    """Bytes of a block's gradients in a recorded step, whose fused optimizer makes no tensors of its own."""
    m, c = row.metrics, row.config
    if row.variant != "train_step" or c.get("optimizer") != "torch_fused" or "optimizer" not in m["phase_peak_bytes"]:
        return None
    constant = sum(m["at_peak_bytes"].get(name, 0) for name in ("parameters", "optimizer state", "other"))
    return (m["phase_peak_bytes"]["optimizer"] - constant - _outside_of_blocks(row)) / c["num_layers"]


def residual_working() -> list[Section]:
    """The residual stream of 2026's xl, and what a block of it saves."""
    return activation_sections(job_of(CONTEXT))


def _timeline(mode: str, length: int | None = None) -> Drawing:
    """Memory over a step of a mode: of the recording that (a) tells of, or of another in float32 at some length."""

    def draw(files: Sequence[RowFile], out: Path) -> None:
        e = evidence_of("memory_profiling", {"profile-memory": files})
        told = _told_by_mode(e).get(mode)
        shown = [] if told is None else [told]
        if length is not None:
            at = {"mode": mode, "context_length": length, "precision": "fp32"}
            rows = [row for row in of_2026(e.all("profile-memory")) if at.items() <= row.config.items()]
            shown = [row for row in rows if row is not told]
        if shown and "timeline" in shown[-1].metrics:
            draw_timeline(shown[-1], out)

    return draw


_RECORDED = (
    f"profile memory --size {XL_2026} --context_length {' '.join(map(str, LENGTHS))} --mode {' '.join(MODES)} "
    "--precision fp32 bf16"
)

PROBLEMS = (
    Problem(
        name="memory_profiling",
        section=SECTION,
        places=("1.1.6", "2.1.6"),
        question="What is in memory over a step, what is its peak made of, and which allocations are largest?",
        exhibits=(
            Exhibit(
                case="profile-memory",
                command=_RECORDED,
                is_asked=is_xl_2026,
                together=True,
                show=peak_parts,
                pictures=(
                    *((f"memory over a {words(mode)}", _timeline(mode)) for mode in MODES),
                    *(
                        (f"memory over a {words(mode)}, {length} tokens", _timeline(mode, length))
                        for length in LENGTHS
                        for mode in MODES
                    ),
                ),
            ),
            Exhibit(
                case="model",
                command=MODEL_COMMAND,
                keep=lambda row: is_xl_2026(row) and not row.config.get("compile"),
                show=peaks_table,
                together=True,
            ),
            Exhibit(
                case="residuals",
                command=RESIDUALS_COMMAND,
                is_asked=is_xl_2026,
                keep=_is_plain_block,
            ),
        ),
        sentences=(
            says(memory_over_time, "profile-memory"),
            says(level_stretches, "profile-memory"),
            says(peaks_by_length),
            says(memory_by_precision),
            says(residual_size),
            says(largest_allocation, "profile-memory"),
            says(largest_residuals, "residuals"),
            says(block_gradients, "residuals"),
        ),
        working=residual_working,
        plan=f"plan activation --size {XL_2026} --context {CONTEXT} --precision fp32 --attention naive",
        code=("cs336_systems/bench/profiling/memory_profile.py", "cs336_systems/bench/cases/residuals.py"),
    ),
)
