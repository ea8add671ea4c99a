"""The problems that the handout of 2026 adds, but its leaderboard: checkpointing, fully sharded data parallelism."""

from collections.abc import Sequence
from typing import Any

from ...accounting import num_parameters
from ...bench.case import Row
from ...bench.memory_moments import AFTER
from ...model_config import ModelConfig
from ...planner.activations import checkpointing_sections
from ...planner.job import Job
from ...planner.memory import memory_sections, part_bytes
from ...planner.working import Section, Term
from ..memory_parts import memory_parts_in_short, predicted_today
from .calculations import CALCULATIONS
from .claims import (
    XL_2026,
    Evidence,
    about,
    gib,
    is_xl_2026,
    listing,
    ms,
    of_2026,
    of_each_size,
    one_setting,
    p50,
    peak,
    percent,
    span,
)
from .leaderboard_2026 import LEADERBOARD_2026
from .memory import RESIDUALS_COMMAND
from .problem import Exhibit, Problem, says, without_details
from .several_gpus import ddp_exhibit, draw_parts_into, trace_exhibit
from .steps import HOWS, difference, peak_bytes, steps, told_pair
from .strategies import equal_weights
from .timing import CONTEXT

CHECKPOINTING, FULLY_SHARDED = "Activation checkpointing", "Fully sharded data parallelism"
_LENGTH = 2048  # at which the handout asks for groups of blocks
_RANKS = 2
_IDLE = 0.1  # of a traced step: so much of it with nothing to do is told
_SETTING = ("size", "context_length", "batch_size", "precision", "compile", "attention", "mode")


HALVES = """\
def run(blocks, x):  # called once with all blocks
    if len(blocks) == 1:
        return blocks[0](x)
    half = len(blocks) // 2
    x = checkpoint(run, blocks[:half], x, use_reentrant=False)
    return checkpoint(run, blocks[half:], x, use_reentrant=False)
"""


def least_peak(e: Evidence) -> str:
    """(a) Nested checkpoints: what they keep and what they compute."""
    return (
        "(a) Checkpoint both halves of the blocks, and in each half the same again, down to single blocks. Whatever "
        "block the backward pass is at, only that one has residuals, A bytes; besides, each level above it keeps at "
        "most one input of its own, I bytes, so that the peak is `A + (ceil(log2 N) + 1) I` instead of `N A`: O(1) "
        "blocks of residuals and O(log N) inputs. Each of `ceil(log2 N)` levels computes a block at most once more, at "
        "most `N (ceil(log2 N) + 1)` blocks in all, O(N log N). One level alone, groups of `sqrt(N)` blocks, computes "
        "`2 N`, but keeps `sqrt(N)` inputs and has `sqrt(N)` blocks whole at once; taking off a single block a level "
        "leaves two inputs beside A, for `N (N + 1) / 2` blocks."
    )


def _groups(e: Evidence) -> tuple[Row | None, list[Row]]:
    """The row without checkpointing and those with, of the setting of 2026's xl, or that with most rows."""
    rows = one_setting(of_2026(e.ok("checkpointing", "peak_bytes")), *_SETTING)
    plain = [row for row in rows if row.config["policy"] == "none"]
    return (plain[-1] if plain else None), [row for row in rows if row.config["policy"] != "none"]


def group_reasoning(e: Evidence) -> str:
    """(b) Why there is a best size of groups, and which it is in the handout's setting."""
    (_, single, *_), found = checkpointing_working(), _groups_asked(e)
    by_calculus = single.value("by calculus")
    text = (
        "(b) Groups of K blocks keep `L / K` inputs of I bytes, have one group, `K A`, whole at once, and cost one "
        f"more forward pass whatever K is. In the handout's setting ({XL_2026}, {_LENGTH} tokens, fp32, plain "
        f"attention) `sqrt(L I / A)` is {'at most 1' if by_calculus <= 1 else f'{by_calculus:.2g}'}, and K = "
        f"{single.value('least memory'):.0f} is best by the planner."
    )
    return f"{text} Measured so, {found[1]}." if found else text


def other_reasoning(e: Evidence) -> str | None:
    """(b) The best size in 16 bits and without scores, where it is another one."""
    (_, single, *_), (_, narrow, *_) = checkpointing_working(), checkpointing_sections(_job(attention="flash_triton"))
    best = narrow.value("least memory")
    if best == single.value("least memory"):
        return None
    return (
        f"With bf16 autocast and FlashAttention A is smaller, and K = {best:.0f} is best by the planner: the peak of "
        "smaller groups is at the end of the forward pass, beside autocast's copies of weights."
    )


def best_size(e: Evidence) -> str | None:
    """(b) The best size of groups where most policies are measured."""
    found = _best_group(_groups(e)[1])
    if found is None or found == _groups_asked(e):
        return None
    c = found[0].config
    return (
        f"Measured for {c['size']} at {c['context_length']} tokens in {c['precision']} with `{c['attention']}`, "
        f"{found[1]}; `sqrt(L I / A)`, {found[0].metrics['best_group']:.1f}, counts only a group's backward pass."
    )


def _groups_asked(e: Evidence) -> tuple[Row, str] | None:
    """`_best_group` in the handout's own setting."""
    plain = e.where(lambda row: (row.config.get("precision"), row.config.get("attention")) == ("fp32", "naive"))
    return _best_group([row for row in _groups(plain)[1] if is_xl_2026(row)])


def _best_group(rows: Sequence[Row]) -> tuple[Row, str] | None:
    """The row of the best size of groups, and in words: its neighbours, and how far the prediction is off."""
    groups = [row for row in predicted_today(rows) if row.config["policy"] == "groups" and "best_group" in row.metrics]
    if len(groups) < 2:
        return None
    by_size = sorted(groups, key=lambda row: row.config["K"])
    best = min(by_size, key=lambda row: row.metrics["peak_bytes"])
    at = by_size.index(best)
    beside = [f"{gib(row.metrics['peak_bytes'])} with K = {row.config['K']}"
              for row in (by_size[at - 1 : at] + by_size[at + 1 : at + 2])]  # fmt: skip
    predicted = min(groups, key=lambda row: row.metrics["predicted_bytes"]).config["K"]
    off = max(abs(row.metrics["predicted_bytes"] / row.metrics["peak_bytes"] - 1) for row in groups)
    return (
        best,
        f"K = {best.config['K']} needs least, {gib(best.metrics['peak_bytes'])} beyond weights and gradients, beside "
        f"{listing(beside)}, each within {percent(max(off, 0.001))} of the prediction"
        f"{'' if predicted == best.config['K'] else f', by which K = {predicted} would be the least'}",
    )


def least_memory(e: Evidence) -> str | None:
    """(b) The policy with the least peak, beside none, and what it costs in time."""
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
        f"{gib(plain.metrics['peak_bytes'])}{cost}."
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
        f"in its part `{part}` for the one that saves most ({about(most)}, `{most.config['attention']}`)."
    )


def checkpointing_working() -> list[Section]:
    """Groups of blocks of 2026's xl, in float32 with plain attention."""
    return checkpointing_sections(_job(precision="fp32", attention="naive"))


def _job(**how: Any) -> Job:
    return Job(shape=ModelConfig(size=XL_2026, context_length=_LENGTH).shape, **how)


def _variants(e: Evidence) -> dict[str, Row]:
    rows = of_2026(e.ok("fsdp-accounting", "moments"))
    return {
        r.variant: r
        for r in one_setting(rows, "devices", "size", "context_length", "batch_size", "precision", "compile")
    }


def _jobs() -> dict[str, Job]:
    """A training step of 2026's xl on two GPUs: nothing sharded, the optimizer's state, everything."""
    shape = ModelConfig(size=XL_2026, context_length=CONTEXT).shape
    return {
        "nothing": Job(shape=shape, strategy="overlap", world_size=_RANKS),
        "optimizer state": Job(shape=shape, strategy="overlap", world_size=_RANKS, shard_optimizer=True),
        "everything": Job(shape=shape, strategy="fsdp", world_size=_RANKS),
    }


def _state_bytes(job: Job) -> float:
    """Weights, gradients and optimizer state of a GPU, by four bytes a number."""
    n = num_parameters(job.shape)
    return 8 * n / (job.world_size if job.is_sharded else 1) + 8 * n / job.state_parts


def sharding_working() -> list[Section]:
    """What a GPU keeps of the training state, and the planner's peak, by what is sharded."""
    jobs = _jobs()
    n = num_parameters(jobs["nothing"].shape)
    formulas = {"nothing": "(4 + 4 + 8) N", "optimizer state": "(4 + 4) N + 8 N / w", "everything": "16 N / w"}
    terms = [
        Term(f"{what} sharded", f"{formulas[what]}, N = {n:,}, w = {_RANKS}", _state_bytes(job))
        for what, job in jobs.items()
    ]
    peaks = [Term(f"{what} sharded", "", part_bytes(job)["peak"]) for what, job in jobs.items()]
    how = f"{XL_2026}, bf16, {jobs['nothing'].batch_size} x {CONTEXT} tokens a GPU"
    return [
        Section("Weights, gradients and AdamW's moments of a GPU", tuple(terms)),
        Section(f"Peak of a step with activations and gathered weights ({how})", tuple(peaks)),
        memory_sections(jobs["everything"])[0],
    ]


def expected_saving(e: Evidence) -> str:
    """(a) What FSDP is expected to save, by arithmetic."""
    jobs = _jobs()
    whole, optimizer, everything = (_state_bytes(job) for job in jobs.values())
    peaks = [part_bytes(job)["peak"] for job in jobs.values()]
    return (
        f"(a) Expected for {XL_2026} on {_RANKS} GPUs: weights, gradients and moments take `16 N / {_RANKS}` = "
        f"{gib(everything)} instead of `16 N` = {gib(whole)}, so that {gib(whole - everything)} go from the peak, and "
        f"{gib(optimizer - everything)} beside a sharded optimizer, which has divided the moments already. With the "
        f"buffers counted the planner has peaks of {gib(peaks[2])} with FSDP, {gib(peaks[0])} with nothing sharded and "
        f"{gib(peaks[1])} with the optimizer."
    )


def fsdp_memory(e: Evidence) -> str | None:
    """(a) What FSDP saves, beside data parallelism."""
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
        f"Measured, {claim}: a peak of {gib(peak(ours))} instead of {gib(peak(plain))} with `{plain.variant}` on "
        f"{ours.config['devices']} ranks ({ours.config['size']}); after a step they hold {listing(told)}."
    )


def fsdp_gathers(e: Evidence) -> str | None:
    """(b) Whether weights come in time for the forward pass."""
    rows = [row for row in _variants(e).values() if row.metrics.get("gathers")]
    if not rows:
        return None
    row = rows[-1]
    turns = [[g for g in row.metrics["gathers"] if (g["turn"] == 1) is is_forward] for is_forward in (True, False)]
    forward, backward = turns
    late = [gather for gather in forward if gather["slack_ms"] < 0]
    in_time = len(forward) - len(late)
    text = (
        f"(b) In a step of {row.config['size']} {in_time} of {len(forward)} all-gathers of the forward pass, which "
        f"take {span((gather['ms'] for gather in forward), ms)} each, are over before their weights are needed"
    )
    if late:
        names = listing([f"`{gather['unit']}`" for gather in late[:3]]) + (" and others" if len(late) > 3 else "")
        held = sum(gather["stall_ms"] for gather in late)
        text += f"; {names} hold{'s' if len(late) == 1 else ''} it up for {ms(held)} of {ms(p50(row))}"
    if backward:
        on_time = sum(gather["slack_ms"] >= 0 for gather in backward)
        text += f". In the backward pass {on_time} of {len(backward)} are in time"
    return f"{text}."


def fsdp_exposed(e: Evidence) -> str | None:
    """(b) Why gathers that come in time are not all hidden, by the trace of a step."""
    rows = of_2026(e.ok("overlap-trace", "communication_ms", "both_ms", "compute_ms", "span_ms"))
    rows = [row for row in rows if row.variant.partition(" ")[0] == "fsdp" and row.metrics["communication_ms"]]
    if not rows:
        return None
    m = rows[-1].metrics
    sent, both, computing, span_ms = (m[f"{name}_ms"] for name in ("communication", "both", "compute", "span"))
    text = (
        f"Traced, a step communicates for {ms(sent)}, the reduce-scatters of gradients included, of which "
        f"{percent(both / sent)} run beside computing"
    )
    idle = span_ms - computing - (sent - both)
    if idle < _IDLE * span_ms:
        return f"{text}."
    return (
        f"{text}. For {percent(idle / span_ms)} of the traced step the GPU does neither, because the host sets the "
        "pace of an eager step: a gather can be in time and still have nothing to run beside."
    )


def _fsdp_step(e: Evidence) -> str | None:
    """FSDP's step beside one GPU alone and PyTorch's, from the case ddp, each told of one launch."""
    told: list[str] = []
    runs = steps(e)
    for end, how in {"": "eager", " compiled": "compiled", **HOWS}.items():
        first: Row | None = None
        for other, than in (("alone", "one rank alone"), ("torch_fsdp", "with `torch_fsdp`")):
            if (pair := told_pair(runs, f"fsdp{end}", other + end)) is None:
                continue
            ours = pair[0]
            text = difference(*pair, f" than {than}")
            if first is None:
                what = "it" if told else f"a step of {ours.config['size']} with `fsdp`"
                most = peak_bytes(runs, ours)
                memory = "" if most is None else f" at a peak of {gib(most)}"
                told.append(f"{how[0].upper()}{how[1:]}, {what} takes {ms(p50(ours))}{memory}, {text}")
            elif ours is first:
                told[-1] += f", and is {text}"
            else:
                told[-1] += f"; in another launch, {ms(p50(ours))}, it is {text}"
            first = first or ours
    return f"{'. '.join(told)}." if told else None


fsdp_step = of_each_size(_fsdp_step)


PROBLEMS = (
    Problem(
        name="gradient_checkpointing",
        section=CHECKPOINTING,
        places=("", "3.2"),
        question="What does a block save for its backward pass, and which blocks made again cost least memory?",
        exhibits=(
            Exhibit(
                case="residuals", command=RESIDUALS_COMMAND, is_asked=is_xl_2026, show=without_details("residuals")
            ),
            Exhibit(
                case="checkpointing",
                command=(
                    f"bench checkpointing --size {XL_2026} --context_length {_LENGTH} --activation_checkpointing none "
                    "block groups_2 groups_3 groups_4 groups_5 groups_6 groups_8 groups_16"
                ),
                also=(
                    f"bench checkpointing --size {XL_2026} --context_length {_LENGTH} --precision fp32 --attention "
                    "naive --activation_checkpointing block groups_2 groups_3 groups_4",
                ),
                is_asked=lambda row: is_xl_2026(row) and row.config["context_length"] == _LENGTH,
                plots=("peak",),
            ),
        ),
        sentences=(
            says(saved_by_block, "residuals"),
            says(least_peak),
            says(group_reasoning),
            says(other_reasoning),
            says(best_size, "checkpointing"),
            says(least_memory, "checkpointing"),
        ),
        sketch=HALVES,
        working=checkpointing_working,
        plan=f"plan checkpointing --size {XL_2026} --context {_LENGTH} --precision fp32 --attention naive",
        code=("cs336_systems/training/build.py", "cs336_systems/bench/cases/checkpointing.py"),
    ),
    Problem(
        name="fsdp",
        section=FULLY_SHARDED,
        places=("", "7"),
        question=(
            "Weights, gradients and optimizer state divided over the ranks, weights gathered for each layer in time."
        ),
        exhibits=(ddp_exhibit("fsdp", "torch_fsdp", is_of_most_steps=True),),
        sentences=(says(equal_weights("fsdp", "test_fsdp.py")), says(fsdp_step, "ddp")),
        code=("cs336_systems/parallel/fsdp.py", "cs336_systems/parallel/fsdp_units.py", "tests/test_fsdp.py"),
    ),
    Problem(
        name="fsdp_accounting",
        section=FULLY_SHARDED,
        places=("", "7"),
        question="What memory does full sharding save, and do its gathers hide behind computing?",
        exhibits=(
            Exhibit(
                case="fsdp-accounting",
                command=f"bench fsdp-accounting --size {XL_2026}",
                is_asked=is_xl_2026,
                show=lambda rows: memory_parts_in_short(predicted_today(rows)),
                pictures=(("memory by part at each moment", draw_parts_into),),
            ),
            trace_exhibit("fsdp"),
        ),
        sentences=(
            says(expected_saving),
            says(fsdp_memory, "fsdp-accounting"),
            says(fsdp_gathers, "fsdp-accounting"),
            says(fsdp_exposed, "overlap-trace"),
        ),
        working=sharding_working,
        plan=f"plan memory --size {XL_2026} --strategy fsdp --world_size {_RANKS}",
    ),
    *CALCULATIONS,
    LEADERBOARD_2026,
)
