"""The problems that the handout of 2026 adds: checkpointing, fully sharded data parallelism, its leaderboard."""

from ...bench.case import Row
from ...bench.memory_moments import AFTER
from ...model_config import ModelConfig
from ...planner.activations import checkpointing_sections
from ...planner.job import Job
from ...planner.working import Section
from ..view import OUTCOMES
from .calculations import CALCULATIONS, SECTION
from .claims import Evidence, gib, listing, ms, one_setting, p50, peak, percent, span, times
from .problem import Exhibit, Problem, says, without_details
from .several_gpus import draw_parts_into

_SETTING = ("size", "context_length", "batch_size", "precision", "compile", "attention", "mode")


def _groups(e: Evidence) -> tuple[Row | None, list[Row]]:
    """The row without checkpointing and those with, of the setting with most rows."""
    rows = one_setting(e.ok("checkpointing", "peak_bytes"), *_SETTING)
    plain = [row for row in rows if row.config["policy"] == "none"]
    return (plain[-1] if plain else None), [row for row in rows if row.config["policy"] != "none"]


def least_memory(e: Evidence) -> str | None:
    """The policy with the least peak, beside none, and what it costs in time."""
    plain, others = _groups(e)
    if plain is None or not others:
        return None
    best = min(others, key=lambda row: row.metrics["peak_bytes"])
    name = best.config["activation_checkpointing"]
    claim = e.claim(
        f"`{name}` needs less than no checkpointing", best.metrics["peak_bytes"] < plain.metrics["peak_bytes"],
        least=best.metrics["peak_bytes"], none=plain.metrics["peak_bytes"],
    )  # fmt: skip
    cost = f", for a step that is {percent(p50(best) / p50(plain) - 1)} longer" if p50(best) > p50(plain) else ""
    return (
        f"{claim}, and least of all {len(others)} policies: {gib(best.metrics['peak_bytes'])} instead of "
        f"{gib(plain.metrics['peak_bytes'])} beyond weights and gradients{cost}."
    )


def best_size(e: Evidence) -> str | None:
    """The best size of groups, measured and by the formula, and how far the prediction is off."""
    _, others = _groups(e)
    groups = [row for row in others if row.config["policy"] == "groups" and "best_group" in row.metrics]
    if len(groups) < 2:
        return None
    best = min(groups, key=lambda row: row.metrics["peak_bytes"])
    predicted = min(groups, key=lambda row: row.metrics["predicted_bytes"])
    off = max(abs(row.metrics["predicted_bytes"] / row.metrics["peak_bytes"] - 1) for row in groups)
    return (
        f"Among groups of blocks K = {best.config['K']} needs least; sqrt(L I / A) = {best.metrics['best_group']:.1f} "
        "(L blocks, I bytes of a block's input, A of all that it saves) leaves out what stays however large the groups "
        f"are, and with all of it counted K = {predicted.config['K']} is predicted, each peak to within {percent(off)}."
    )


def saved_by_block(e: Evidence) -> str | None:
    """What a block saves, measured and counted."""
    rows = e.ok("residuals", "saved_bytes", "counted_bytes", compile=False)
    if not rows:
        return None
    off = max(abs(row.metrics["saved_bytes"] / row.metrics["counted_bytes"] - 1) for row in rows)
    most = max(rows, key=lambda row: row.metrics["saved_bytes"])
    part = max(most.metrics["parts"], key=lambda name: most.metrics["parts"][name])
    share = most.metrics["parts"][part] / most.metrics["saved_bytes"]
    near = f"within {percent(off)}" if off else "to the byte"
    return (
        f"An eager block saves what is counted from its shapes, {near}, most of it, {percent(share)}, "
        f"in its part `{part}` ({most.config['size']}, {most.config['precision']}, `{most.config['attention']}`)."
    )


def checkpointing_working() -> list[Section]:
    """Groups of blocks of xl at 1024 tokens."""
    shape = ModelConfig(size="xl", context_length=1024).shape
    return checkpointing_sections(Job(shape=shape, attention="flash_triton"))


def _variants(e: Evidence) -> dict[str, Row]:
    rows = e.ok("fsdp-accounting", "moments")
    return {
        r.variant: r
        for r in one_setting(rows, "devices", "size", "context_length", "batch_size", "precision", "compile")
    }


def fsdp_memory(e: Evidence) -> str | None:
    """What FSDP saves, beside data parallelism."""
    found = _variants(e)
    plain = next((row for name, row in found.items() if not name.startswith("fsdp") and "+" not in name), None)
    ours = next((row for name, row in found.items() if name.startswith("fsdp")), None)
    if plain is None or ours is None:
        return None
    parts = [row.metrics["moments"][AFTER]["parts"] for row in (ours, plain)]
    told = [
        f"{name.replace('_', ' ')} {gib(parts[0][name])} of {gib(parts[1][name])}"
        for name in ("parameters", "gradients", "optimizer_state")
        if parts[1][name]
    ]
    claim = e.claim("FSDP needs less memory", peak(ours) < peak(plain), fsdp=peak(ours), plain=peak(plain))
    return (
        f"{claim}: a peak of {gib(peak(ours))} instead of {gib(peak(plain))} with `{plain.variant}` on "
        f"{ours.config['devices']} ranks; after a step they hold {listing(told)}."
    )


def fsdp_gathers(e: Evidence) -> str | None:
    """Whether weights come in time."""
    rows = [row for row in _variants(e).values() if "gathers_counted" in row.metrics]
    if not rows:
        return None
    m = rows[-1].metrics
    return (
        f"{m['gathers_in_time']} of {m['gathers_counted']} all-gathers of a step are over before their weights are "
        f"needed; the others hold it up for {ms(m['stall_ms'])} of {ms(m['step_ms']['p50'])}."
    )


def fsdp_step(e: Evidence) -> str | None:
    """FSDP's step beside one GPU alone and PyTorch's, from the case ddp."""
    rows = one_setting(e.ok("ddp", "step_ms"), "devices", "size", "context_length", "batch_size", "precision")
    found = {row.variant: row for row in rows}
    told = []
    for how in ("", " compiled"):
        ours = found.get(f"fsdp{how}")
        others = [
            f"{ms(p50(found[name + how]))} with `{name}`" for name in ("alone", "torch_fsdp") if name + how in found
        ]
        if ours is not None and others:
            told.append(f"{how.strip() or 'eager'} {ms(p50(ours))} beside {listing(others)}, at {gib(peak(ours))}")
    return f"A step takes {'; '.join(told)}." if told else None


def fastest_8b(e: Evidence) -> str | None:
    """The fastest step of the leaderboard's model, beside the same with PyTorch's sharding."""
    rows = e.ok("leaderboard-2026", "step_ms", size="8B")
    ours = [row for row in rows if row.config["strategy"] == "fsdp"]
    if not ours:
        return None
    best = min(ours, key=p50)
    m = best.metrics
    told = f", {percent(m['mfu'])} of the peak rate" if m.get("mfu") else ""
    text = (
        f"The fastest step, `{best.variant}`, takes {p50(best) / 1e3:.2f} s ({m['tokens_per_s']:,.0f} tokens/s{told}) "
        f"and peaks at {gib(peak(best))} a GPU"
    )
    theirs = [row for row in rows if row.config["strategy"] == "torch_fsdp"]
    failed = [row for row in e.all("leaderboard-2026") if row.status == "oom"]
    if theirs:
        text += f"; with PyTorch's `fully_shard` it takes {times(min(map(p50, theirs)) / p50(best))} as long"
    if failed:
        text += (
            f"; {len(failed)} of the variants are {OUTCOMES['oom']}: {listing([f'`{row.variant}`' for row in failed])}"
        )
    return f"{text}."


def what_makes_it_fit(e: Evidence) -> str | None:
    """The range of steps over ways to keep memory down."""
    rows = one_setting(e.ok("leaderboard-2026", "step_ms", strategy="fsdp"), "size", "context_length", "devices")
    if len(rows) < 2:
        return None
    return (
        f"Over {len(rows)} ways to keep activations small the step goes {span(map(p50, rows), ms)} and the peak "
        f"{span(map(peak, rows), gib)}."
    )


PROBLEMS = (
    Problem(
        name="gradient_checkpointing",
        section=SECTION,
        question="What does a block save for its backward pass, and which blocks made again cost least memory?",
        exhibits=(
            Exhibit(case="residuals", command="bench residuals", show=without_details("residuals")),
            Exhibit(
                case="checkpointing", command="bench checkpointing --size xl --context_length 1024", plots=("peak",)
            ),
        ),
        sentences=(
            says(saved_by_block, "residuals"),
            says(least_memory, "checkpointing"),
            says(best_size, "checkpointing"),
        ),
        working=checkpointing_working,
        plan="plan checkpointing --size xl --context 1024 --attention flash_triton",
    ),
    Problem(
        name="fsdp",
        section=SECTION,
        question=(
            "Weights, gradients and optimizer state divided over the ranks, weights gathered for each layer in time."
        ),
        sentences=(says(fsdp_step, "ddp"),),
        code=("cs336_systems/parallel/fsdp.py", "cs336_systems/parallel/fsdp_units.py", "tests/test_fsdp.py"),
    ),
    Problem(
        name="fsdp_accounting",
        section=SECTION,
        question="What memory does full sharding save, and do its gathers hide behind computing?",
        exhibits=(
            Exhibit(
                case="fsdp-accounting",
                command="bench fsdp-accounting",
                pictures=(("memory by part at each moment", draw_parts_into),),
            ),
        ),
        sentences=(says(fsdp_memory, "fsdp-accounting"), says(fsdp_gathers, "fsdp-accounting")),
    ),
    *CALCULATIONS,
    Problem(
        name="leaderboard_2026",
        section=SECTION,
        question="How fast is a training step of the 8B model with 32,768 tokens on each of two GPUs?",
        exhibits=(Exhibit(case="leaderboard-2026", command="bench leaderboard-2026", plots=("step",)),),
        sentences=(says(fastest_8b, "leaderboard-2026"), says(what_makes_it_fit, "leaderboard-2026")),
        code=("cs336_systems/bench/cases/leaderboard_2026.py",),
    ),
)
