"""Section 1.1 of the handout: timing and profiling of one GPU."""

from collections.abc import Sequence
from pathlib import Path

from ...bench.case import Row
from ...profiling.annotated import SCORES, SOFTMAX, VALUES
from ..profile_plots import plot_shares
from ..profile_tables import attention_part_ms, setting, short_name
from .claims import Evidence, about, listing, ms, p50, percent, span, times
from .problem import Exhibit, Problem, says

SECTION = "1.1 Profiling and benchmarking"
_STEADY = 0.05  # of the mean: a standard deviation below that is called small
_SHOWN_SHARE = 0.05
_BUSY = 0.9


def times_by_size(e: Evidence) -> str | None:
    """How long the passes take, and how they compare."""
    rows = e.ok("model", "forward_ms", "backward_ms")
    if not rows:
        return None
    first, last = min(rows, key=lambda row: p50(row, "forward")), max(rows, key=lambda row: p50(row, "forward"))
    ratio = span((p50(row, "backward") / p50(row, "forward") for row in rows), lambda x: f"{x:.1f}")
    return (
        f"A forward pass takes from {ms(p50(first, 'forward'))} ({about(first)}) to {ms(p50(last, 'forward'))} "
        f"({about(last)}), and the backward pass {ratio} times as long."
    )


def spread_of_steps(e: Evidence) -> str | None:
    """How far the steps of a setting lie apart."""
    rows = e.ok("model", "step_ms")
    if not rows:
        return None
    shares = {id(row): row.metrics["step_ms"]["std"] / row.metrics["step_ms"]["mean"] for row in rows}
    most = max(rows, key=lambda row: shares[id(row)])
    steady = sum(share < _STEADY for share in shares.values())
    return (
        f"The standard deviation is below {percent(_STEADY)} of the mean in {steady} of {len(rows)} settings; it is "
        f"largest, {percent(shares[id(most)])}, for {about(most)}."
    )


def warmup_steps(e: Evidence) -> str | None:
    """What the first steps of a process do to the mean."""
    rows = e.ok("warmup", "steps_ms")
    cold, warm = [r for r in rows if r.config["warmup"] == 0], [r for r in rows if r.config["warmup"] > 0]
    if not cold or not warm:
        return None
    first = [row.metrics["steps_ms"][0] / p50(row) for row in cold]
    excess = [row.metrics["step_ms"]["mean"] / p50(row) - 1 for row in cold]
    off = max(abs(row.metrics["step_ms"]["mean"] / p50(row) - 1) for row in warm)
    least = min(row.config["warmup"] for row in warm)
    claim = e.claim("without warm-up the first step is longer than the others", min(first) > 1, least_ratio=min(first))
    return (
        f"{claim[0].upper()}{claim[1:]}, {span(first, times)} the median, because libraries are loaded, kernels chosen "
        f"and memory taken from the driver in it; the mean is then {span(excess, percent)} above the median. After "
        f"{least} or more warm-up steps the two are within {percent(off)} of each other."
    )


def _profiles(e: Evidence) -> dict[str, Row]:
    """By mode, the profiles of the setting that has most modes, the last of equal ones."""
    groups: dict[str, dict[str, Row]] = {}
    for row in e.ok("profile-kernels", "spans"):
        groups.setdefault(setting(row), {})[row.variant] = row
    return max(reversed(groups.values()), key=len, default={})


def profiled_time(e: Evidence) -> str | None:
    """(a) The profiler's time of a forward pass beside that of the host's clock."""
    row = _profiles(e).get("forward")
    if row is None:
        return None
    m, share = row.metrics, row.metrics["kernel_ms"] / row.metrics["wall_ms"]
    busy = "the GPU is busy nearly all the time" if share >= _BUSY else "the GPU waits for the host in the rest of it"
    return (
        f"(a) A forward pass of {setting(row)} takes {ms(m['wall_ms'])} by the host's clock, and its kernels add up to "
        f"{ms(m['kernel_ms'])}, {percent(share)} of that: {busy}. Under the profiler the same takes "
        f"{ms(m['profiled_wall_ms'])}."
    )


def longest_kernel(e: Evidence) -> str | None:
    """(b) The kernel with the most time, forward, and forward and backward."""
    found = _profiles(e)
    if not {"forward", "train_step"} <= set(found):
        return None
    forward = found["forward"].metrics["spans"]["inference"]["top"][0]
    both = found["train_step"].metrics["spans"].get("forward + backward", {"top": []})["top"]
    text = (
        f"(b) The kernel with the most time of the forward pass is `{short_name(forward['kernel'])}`, a "
        f"{forward['class']} kernel: {forward['calls']:g} calls, {percent(forward['share'])} of kernel time"
    )
    if not both:
        return f"{text}."
    same = both[0]["kernel"] == forward["kernel"]
    what = "the same" if same else f"another, `{short_name(both[0]['kernel'])}`"
    return f"{text}; with the backward pass it is {what} ({both[0]['calls']:g} calls, {percent(both[0]['share'])})."


def other_kernels(e: Evidence) -> str | None:
    """(c) What takes time besides matrix products."""
    row = _profiles(e).get("forward")
    if row is None:
        return None
    share = row.metrics["spans"]["inference"]["share"]
    others = sorted((cls for cls in share if cls != "matmul" and share[cls] >= _SHOWN_SHARE), key=lambda c: -share[c])
    if not others:
        return f"(c) Besides matrix products no class of kernels takes {percent(_SHOWN_SHARE)} of the forward pass."
    told = listing([f"{cls} kernels {percent(share[cls])}" for cls in others])
    return f"(c) Besides matrix products ({percent(share['matmul'])}), {told} of the forward pass's kernel time."


def products_share(e: Evidence) -> str | None:
    """(d) Matrix products in inference and in a training step."""
    found = _profiles(e)
    if not {"forward", "train_step"} <= set(found):
        return None
    inference = found["forward"].metrics["spans"]["inference"]["share"]
    step = found["train_step"].metrics["spans"]["training step"]["share"]
    how = "less" if step["matmul"] < inference["matmul"] else "more"
    optimizer = f"; the optimizer's kernels take {percent(step['optimizer'])}" if step.get("optimizer") else ""
    return (
        f"(d) Matrix products are {percent(inference['matmul'])} of kernel time in inference and "
        f"{percent(step['matmul'])}, {how}, in a whole training step{optimizer}."
    )


def softmax_and_products(e: Evidence) -> str | None:
    """(e) Softmax beside the products of attention: time and operations."""
    row = _profiles(e).get("forward")
    if row is None or not row.metrics.get("attention"):
        return None
    products = sum(attention_part_ms(row, "forward", part, True) for part in (SCORES, VALUES))
    softmax = attention_part_ms(row, "forward", SOFTMAX, None)
    if not products or not softmax:
        return None
    operations = row.metrics["attention_operations"]
    work = operations[SOFTMAX] / (operations[SCORES] + operations[VALUES])
    claim = e.claim(
        "softmax takes a larger part of the time than of the operations", softmax / products > work,
        time_ratio=softmax / products, operations_ratio=work,
    )  # fmt: skip
    return (
        f"(e) Softmax takes {ms(softmax)} and the two products of attention {ms(products)}: {softmax / products:.2f} "
        f"of their time for {work:.3f} of their operations; {claim}, because it is memory that it waits for."
    )


def _shares(rows: Sequence[Row], _: Path, out: Path) -> None:
    plot_shares([row for row in rows if setting(row) == setting(rows[-1])], out)


MODEL_COMMAND = (
    "bench model --size small medium large xl 2.7B --context_length 128 256 512 1024 --mode train_step --precision "
    "fp32 bf16"
)

PROBLEMS = (
    Problem(
        name="benchmarking_script",
        section=SECTION,
        question=(
            "How long do forward and backward pass and the optimizer take for each size, and what do warm-up steps "
            "change?"
        ),
        exhibits=(
            Exhibit(case="model", command=MODEL_COMMAND, plots=("step",)),
            Exhibit(case="warmup", command="bench warmup --size small xl", plots=("steps",)),
        ),
        sentences=(says(times_by_size, "model"), says(spread_of_steps, "model"), says(warmup_steps, "warmup")),
        code=("cs336_systems/bench/cases/model.py", "cs336_systems/bench/cases/warmup.py"),
    ),
    Problem(
        name="nsys_profile",
        section=SECTION,
        question=(
            "Which kernels take the time of inference and of training, and what does attention's softmax cost beside "
            "its products?"
        ),
        exhibits=(
            Exhibit(
                case="profile-kernels",
                command="profile kernels --size xl --context_length 512 --precision bf16",
                pictures=(("shares of kernel time", _shares),),
            ),
        ),
        sentences=tuple(
            says(each, "profile-kernels")
            for each in (profiled_time, longest_kernel, other_kernels, products_share, softmax_and_products)
        ),
    ),
)
