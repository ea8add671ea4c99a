"""Timing and profiling of one GPU."""

from collections.abc import Callable, Sequence
from pathlib import Path

from ...bench.profiling.annotated_attention import SCORES, SOFTMAX, VALUES
from ...bench.row import Row
from ...planner.rows import card_of, is_of_cpu
from ..kernel_profiles import attention_part_ms, kernels_table, plot_shares, setting, shares_in_short, short_name
from ..selection import MACHINE
from .claims import PROFILERS, XL_2026, Evidence, about, is_alike, is_xl_2026, listing, ms, p50, percent
from .problem import Exhibit, Problem, RowFile, says
from .timing import CONTEXT, phases_table, spread_of_steps, the_script, times_by_size, warmup_steps

SECTION = "Profiling and benchmarking"
_SHOWN_SHARE = 0.05
_BUSY = 0.9
_FAST_COPY = 0.6  # of the rate of copies: what moves memory so fast waits for it


def _settings(e: Evidence) -> list[dict[str, Row]]:
    return _by_setting(e.ok("profile-kernels", "spans"))


def _by_setting(rows: Sequence[Row]) -> list[dict[str, Row]]:
    """For each profiled setting its rows by mode; first that of 2026's xl and of most modes, the last of equal ones."""
    groups: dict[str, dict[str, Row]] = {}
    for row in rows:
        groups.setdefault(setting(row), {})[row.variant] = row
    found = list(reversed(groups.values()))
    return sorted(found, key=lambda rows: (any(map(is_xl_2026, rows.values())), len(rows)), reverse=True)


def _profiles(e: Evidence) -> dict[str, Row]:
    """By mode, the profiles of the setting that sentences are about."""
    return next(iter(_settings(e)), {})


def _over_all(e: Evidence, what: str, value: Callable[[dict[str, Row]], float | None], form: Callable) -> str:
    """How a value goes over all settings of a precision, where there are several, with those of both ends; else ""."""
    told: list[str] = []
    for of_precision, settings in _by_precision(_settings(e)):
        found = [(number, rows) for rows in settings if (number := value(rows)) is not None]
        if len(found) < 2:
            continue
        (low, least), (high, most) = (pick(found, key=lambda pair: pair[0]) for pick in (min, max))
        names = [about(next(iter(rows.values())), "size", "context_length") for rows in (least, most)]
        goes = f"{what} goes from" if not told else "from"
        over = f"over {len(found)} settings{of_precision}"
        told.append(f"{over} {goes} {form(low)} ({names[0]}) to {form(high)} ({names[1]})")
    return f" {_sentence(', '.join(told))}" if told else ""


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _by_precision(settings: Sequence[dict[str, Row]]) -> list[tuple[str, list[dict[str, Row]]]]:
    """Settings by precision, with the words for it; no words where there is one."""
    groups: dict[str, list[dict[str, Row]]] = {}
    for rows in settings:
        groups.setdefault(next(iter(rows.values())).config["precision"], []).append(rows)
    return [(f" in {name}" if len(groups) > 1 else "", of) for name, of in groups.items()]


def _busy(rows: dict[str, Row]) -> float | None:
    m = rows["forward"].metrics if "forward" in rows else None
    return m["kernel_ms"] / m["wall_ms"] if m else None


def _share(mode: str, part: str, cls: str) -> Callable[[dict[str, Row]], float | None]:
    """The share of a class of kernels in a part of a mode's step."""

    def value(rows: dict[str, Row]) -> float | None:
        spans = rows[mode].metrics["spans"] if mode in rows else {}
        return spans[part]["share"].get(cls) if part in spans else None

    return value


def profiled_time(e: Evidence) -> str | None:
    """(a) The profiler's time of a forward pass beside that of the host's clock."""
    row = _profiles(e).get("forward")
    if row is None:
        return None
    m, share = row.metrics, row.metrics["kernel_ms"] / row.metrics["wall_ms"]
    if is_of_cpu(row):
        busy = ", on a CPU"
    elif share >= _BUSY:
        busy = ": the GPU is busy nearly all the time"
    else:
        busy = ": the rest of the time the GPU waits for the host"
    slowed = m["profiled_wall_ms"]
    under = f" Under the profiler it takes {ms(slowed)}." if slowed else ""
    return (
        f"(a) Measured with {PROFILERS.get(str(row.config.get('tool')), 'a profiler')}: a forward pass of "
        f"{setting(row)} takes {ms(m['wall_ms'])} by the host's clock, and its kernels add up to {ms(m['kernel_ms'])}, "
        f"{percent(share)} of that{busy}.{_over_all(e, 'that share', _busy, percent)}{under}{_without_profiler(e, row)}"
    )


def _without_profiler(e: Evidence, row: Row) -> str:
    """What `bench model` has measured of the same forward pass, and how far that is from the profile's."""
    alike = ("size", "vocab_size", "context_length", "batch_size", "precision", "compile", "attention",
             "activation_checkpointing", MACHINE)  # fmt: skip
    rows = [each for each in e.ok("model", "forward_ms") if is_alike(each, row, alike)]
    if not rows:
        return ""
    before = max(rows, key=lambda each: each.config["mode"] == row.variant)
    ratio = p50(before, "forward") / row.metrics["wall_ms"]
    return f" In benchmarking_script such a pass takes {ms(p50(before, 'forward'))}, {ratio:.2f} times as long as here."


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
    inferences = [rows for rows in _settings(e) if "forward" in rows]
    counts = []
    for of_precision, settings in _by_precision(inferences):
        tops = [rows["forward"].metrics["spans"]["inference"]["top"][0]["class"] for rows in settings]
        counts.append(f"in {tops.count(forward['class'])} of {len(tops)} settings{of_precision}")
    told = f"{listing(counts)} it is a {forward['class']} kernel"
    among = f" {_sentence(told)}" if len(inferences) > 1 else ""
    same = both[0]["kernel"] == forward["kernel"]
    what = "the same" if same else f"another, `{short_name(both[0]['kernel'])}`"
    return (
        f"{text}; with the backward pass it is {what} ({both[0]['calls']:g} calls, {percent(both[0]['share'])}).{among}"
    )


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
    return (
        f"(c) Besides matrix products ({percent(share['matmul'])}), {told} of the forward pass's kernel time."
        + _over_all(e, "the share of matrix products", _share("forward", "inference", "matmul"), percent)
    )


def products_share(e: Evidence) -> str | None:
    """(d) Matrix products in inference and in a training step."""
    found = _profiles(e)
    if not {"forward", "train_step"} <= set(found):
        return None
    inference = found["forward"].metrics["spans"]["inference"]["share"]
    step = found["train_step"].metrics["spans"]["training step"]["share"]
    how = "less" if step["matmul"] < inference["matmul"] else "more"
    implementation = str(found["train_step"].config.get("optimizer"))
    whose = {"own": ", our own AdamW's,", "torch_fused": ", PyTorch's fused AdamW's,"}.get(implementation, "")
    optimizer = f"; the optimizer's kernels{whose} take {percent(step['optimizer'])}" if step.get("optimizer") else ""
    others = [
        c for c in inference if c not in ("matmul", "optimizer") and max(inference[c], step.get(c, 0)) >= _SHOWN_SHARE
    ]
    told = [f"{cls} kernels go from {percent(inference[cls])} to {percent(step.get(cls, 0))}" for cls in others]
    return (
        f"(d) Matrix products are {percent(inference['matmul'])} of kernel time in inference and "
        f"{percent(step['matmul'])}, {how}, in a whole training step{optimizer}"
        f"{'; ' + listing(told) if told else ''}."
        + _over_all(
            e, "the share of matrix products in a step", _share("train_step", "training step", "matmul"), percent
        )
    )


def _softmax_beside_products(rows: dict[str, Row]) -> tuple[float, float] | None:
    """ms of softmax and of attention's two products in a forward pass."""
    row = rows.get("forward")
    if row is None or not row.metrics.get("attention"):
        return None
    products = sum(attention_part_ms(row, "forward", part, True) for part in (SCORES, VALUES))
    softmax = attention_part_ms(row, "forward", SOFTMAX, None)
    return (softmax, products) if products and softmax else None


def softmax_and_products(e: Evidence) -> str | None:
    """(e) Softmax beside the products of attention: time and operations."""
    rows = _profiles(e)
    found = _softmax_beside_products(rows)
    if found is None:
        return None
    softmax, products = found
    operations = rows["forward"].metrics["attention_operations"]
    work = operations[SOFTMAX] / (operations[SCORES] + operations[VALUES])
    claim = e.claim(
        "softmax takes a larger part of the time than of the operations", softmax / products > work,
        time_ratio=softmax / products, operations_ratio=work,
    )  # fmt: skip

    row = rows["forward"]
    rate = (operations[SCORES] + operations[VALUES]) / (products / 1e3)
    return (
        f"(e) Softmax takes {ms(softmax)} and the two products of attention {ms(products)}: {softmax / products:.2f} "
        f"of their time for {work:.3f} of their operations; {claim}{_by_memory(row, softmax)}. "
        f"The products reach {rate / 1e12:.3g} TFLOP/s.{_beside_narrow_products(row, rate)}"
    )


def _by_memory(row: Row, softmax_ms: float) -> str:
    """Why softmax takes its time, where it moves its matrix nearly as fast as the card copies."""
    c, card = row.config, card_of(row)
    if card is None or not {"num_layers", "num_heads"} <= set(c):
        return ""
    moved = 2 * 4 * c["batch_size"] * c["num_heads"] * c["context_length"] ** 2 * c["num_layers"]
    rate = moved / (softmax_ms / 1e3)
    if rate < _FAST_COPY * card.bandwidth:
        return ""
    return (
        f", because it is bound by memory: it reads and writes float32 scores, `8 B H N^2` bytes a layer, at "
        f"{rate / 1e12:.3g} TB/s, {percent(rate / card.bandwidth)} of the {card.bandwidth / 1e12:.3g} TB/s that the "
        "planner takes for copies on this card"
    )


def float32_attention(rows: Sequence[Row]) -> str:
    """What must be known of rows with plain attention under autocast; "" where there are none."""
    if not any(row.config.get("attention") == "naive" and row.config.get("precision") != "fp32" for row in rows):
        return ""
    return (
        " `naive` attention computes scores, softmax and both products in float32 even under autocast, so that part of "
        "a step gains nothing from 16 bits."
    )


def _beside_narrow_products(row: Row, rate: float) -> str:
    """That the products are of float32 under autocast too, where the card would have had others in 16 bits."""
    told, card = float32_attention([row]), card_of(row)
    if not told or card is None or rate > card.matmul_fp32:
        return told
    return (
        f"{told} If the products ran in 16 bits (up to {card.matmul / 1e12:.3g} TFLOP/s by the planner's ceiling), "
        "softmax would take a larger part of the time."
    )


def profiles_in_short(rows: Sequence[Row]) -> str:
    """The tables of two settings, that of the answer and one of another size, and a line for each profile of others."""
    groups = _by_setting([row for row in rows if row.status == "ok"])
    if not groups:
        return kernels_table(rows)
    sizes = [next(iter(group.values())).config.get("size") for group in groups]
    other = next((group for group, size in zip(groups, sizes, strict=True) if size != sizes[0]), groups[0])
    names = {setting(row) for group in (groups[0], other) for row in group.values()}
    last = {(setting(row), row.variant): row for row in rows if setting(row) not in names}
    rest = {status: [row for row in last.values() if (row.status == "ok") is status] for status in (True, False)}
    parts = [kernels_table([row for row in rows if setting(row) in names])]
    if rest[True]:
        parts.append(shares_in_short(rest[True]))
    if rest[False]:
        parts.append(kernels_table(rest[False]))
    return "\n\n".join(parts)


def _draw_shares(files: Sequence[RowFile], out: Path) -> None:
    rows = [row for file in files for row in file.rows if row.status == "ok"]
    if of_xl := [row for row in rows if is_xl_2026(row)] or rows:
        plot_shares([row for row in of_xl if setting(row) == setting(of_xl[-1])], out)


MODEL_COMMAND = (
    "bench model --size small medium large xl 2.7B --context_length 128 256 512 1024 --mode train_step --precision "
    "fp32 bf16"
)
# Longer ones do not leave room for 2026's xl in training.
_PROFILED = (
    f"profile kernels --size small medium large xl {XL_2026} --context_length 128 256 {CONTEXT} 1024 --precision fp32 "
    "bf16 --optimizer own"
)

PROBLEMS = (
    Problem(
        name="benchmarking_script",
        section=SECTION,
        places=("1.1.3", "2.1.3"),
        question=(
            "How long do forward and backward pass and the optimizer take for each size, and what do warm-up steps "
            "change?"
        ),
        exhibits=(
            Exhibit(
                case="model",
                command=MODEL_COMMAND,
                also=("bench model --size 10B --context_length 512 --mode forward forward_backward",),
                show=phases_table,
                plots=("step",),
            ),
            Exhibit(
                case="warmup",
                command=f"bench warmup --size small {XL_2026} --context_length {CONTEXT} --warmup 0 1 2 5",
                is_asked=lambda row: row.config["context_length"] == CONTEXT,
                plots=("steps",),
            ),
        ),
        sentences=(
            says(the_script),
            says(times_by_size, "model"),
            says(spread_of_steps, "model"),
            says(warmup_steps, "warmup"),
        ),
        code=("cs336_systems/bench/cases/model.py",),
    ),
    Problem(
        name="nsys_profile",
        section=SECTION,
        places=("1.1.4", "2.1.4"),
        question=(
            "Which kernels take the time of inference and of training, and what does attention's softmax cost beside "
            "its products?"
        ),
        exhibits=(
            Exhibit(
                case="profile-kernels",
                command=_PROFILED,
                is_asked=is_xl_2026,
                together=True,
                show=profiles_in_short,
                pictures=(("shares of kernel time", _draw_shares),),
            ),
        ),
        sentences=tuple(
            says(each, "profile-kernels")
            for each in (profiled_time, longest_kernel, other_kernels, products_share, softmax_and_products)
        ),
        code=("cs336_systems/bench/profiling/kernel_profile.py", "cs336_systems/bench/profiling/nsys.py"),
    ),
)
