"""The problems that the handout of 2026 adds: checkpointing, fully sharded data parallelism, its leaderboard."""

from ...accounting import num_parameters
from ...bench.case import Row
from ...bench.memory_moments import AFTER
from ...model_config import ModelConfig
from ...planner.activations import checkpointing_sections
from ...planner.job import Job
from ...planner.memory import memory_sections, part_bytes
from ...planner.working import Section, Term
from ..memory_parts import memory_parts_in_short
from ..view import OUTCOMES
from ..views import VIEWS
from .calculations import CALCULATIONS
from .claims import (
    XL_2026,
    Evidence,
    gib,
    is_alike,
    is_xl_2026,
    listing,
    ms,
    of_2026,
    one_setting,
    p50,
    peak,
    percent,
    span,
    times,
)
from .memory import RESIDUALS_COMMAND
from .problem import Exhibit, Problem, says, without_details
from .profiling import CONTEXT
from .several_gpus import ddp_exhibit, draw_parts_into, trace_exhibit
from .steps import HOWS, of_one_run, steps

CHECKPOINTING, FULLY_SHARDED, LEADERBOARD = "Activation checkpointing", "Fully sharded data parallelism", "Leaderboard"
_LENGTH = 2048  # at which the handout asks for groups of blocks
_RANKS = 2
# Of the handout's leaderboard: what is to be beaten, for how long its timer runs, and what a run may take.
_BASELINE_S, _TIMED_S, _LIMIT_S = 10, 40, 600
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
    """(b) Why there is a best size of groups."""
    sections = checkpointing_working()
    best = sections[1].value("least memory")
    return (
        f"(b) Groups of K blocks keep `L / K` inputs of I bytes and have one group, `K A`, whole at once, and cost one "
        f"forward pass more whatever K is. By the planner K = {best:.0f} is best for {XL_2026} at {_LENGTH} tokens."
    )


def best_size(e: Evidence) -> str | None:
    """(b) The best size of groups, measured, with its neighbours, and how far the prediction is off."""
    _, others = _groups(e)
    groups = [row for row in others if row.config["policy"] == "groups" and "best_group" in row.metrics]
    if len(groups) < 2:
        return None
    by_size = sorted(groups, key=lambda row: row.config["K"])
    best = min(by_size, key=lambda row: row.metrics["peak_bytes"])
    at = by_size.index(best)
    beside = [f"{gib(row.metrics['peak_bytes'])} with K = {row.config['K']}"
              for row in (by_size[at - 1 : at] + by_size[at + 1 : at + 2])]  # fmt: skip
    predicted = min(groups, key=lambda row: row.metrics["predicted_bytes"])
    off = max(abs(row.metrics["predicted_bytes"] / row.metrics["peak_bytes"] - 1) for row in groups)
    c = best.config
    beside_inputs = "the logits" if c["precision"] == "fp32" else "autocast's copies of all weights"
    return (
        f"Measured for {c['size']} at {c['context_length']} tokens, K = {c['K']} needs least, "
        f"{gib(best.metrics['peak_bytes'])} beyond weights and gradients, beside {listing(beside)}. "
        f"`sqrt(L I / A)` = {best.metrics['best_group']:.1f} has the peak in a group's backward pass; with small "
        f"groups it is at the end of the forward pass, where besides inputs there are {beside_inputs}. With both "
        f"counted K = {predicted.config['K']} is predicted, each peak to within {percent(off)}."
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
        f"in its part `{part}` ({most.config['size']}, {most.config['precision']}, `{most.config['attention']}`)."
    )


def checkpointing_working() -> list[Section]:
    """Groups of blocks of 2026's xl."""
    shape = ModelConfig(size=XL_2026, context_length=_LENGTH).shape
    return checkpointing_sections(Job(shape=shape, attention="flash_triton"))


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


def fsdp_step(e: Evidence) -> str | None:
    """FSDP's step beside one GPU alone and PyTorch's, from the case ddp."""
    runs = steps(e)
    told, size = [], ""
    for end, how in {"": "eager", " compiled": "compiled", **HOWS}.items():
        if found := of_one_run(runs, f"fsdp{end}", f"alone{end}", f"torch_fsdp{end}"):
            ours, *others = found.items()
            beside = listing([f"{ms(p50(row))} with `{name.removesuffix(end)}`" for name, row in others])
            size = ours[1].config["size"]
            told.append(f"{how}, {ms(p50(ours[1]))} at a peak of {gib(peak(ours[1]))}, beside {beside}")
    return f"A step of {size} with `fsdp` takes, {'; '.join(told)}." if told else None


def fastest_8b(e: Evidence) -> str | None:
    """The fastest step of the leaderboard's model, beside the same with PyTorch's sharding."""
    rows = e.ok("leaderboard-2026", "step_ms", size="8B")
    ours = [row for row in rows if row.config["strategy"] == "fsdp"]
    if not ours:
        return None
    best = min(ours, key=p50)
    m = best.metrics
    told = f", {percent(m['mfu'])} of the peak rate" if m.get("mfu") else ""
    mean = _mean_too(best)
    text = (
        f"The fastest step, `{best.variant}`, takes {p50(best) / 1e3:.2f} s{mean} ({m['tokens_per_s']:,.0f} tokens/s"
        f"{told}) and peaks at {gib(peak(best))} a GPU: {times(_BASELINE_S * 1e3 / p50(best))} as fast as the "
        f"handout's baseline of {_BASELINE_S} s, which is for two B200"
    )
    if pair := _fastest_pair(e, "strategy", "torch_fsdp", "fsdp"):
        theirs, same = pair
        told = "" if same is best else f"; `{same.variant}` takes {p50(same) / 1e3:.2f} s, and"
        text += (
            f"{told or '; it takes'} {_as_long(p50(theirs) / p50(same))} with PyTorch's `fully_shard`"
            f"{_of_another_run(e, theirs, same)}"
        )
    if failed := [f"`{row.variant}`" for row in e.all("leaderboard-2026") if row.status == "oom"]:
        one = len(failed) == 1
        text += f"; {len(failed)} variant{' is' if one else 's are'} {OUTCOMES['oom']}: {listing(failed)}"
    return f"{text}."


def _mean_too(row: Row) -> str:
    """The mean of a step, where it reads differently than the median: the handout's timer prints it."""
    mean = f"{row.metrics['step_ms'].get('mean', p50(row)) / 1e3:.2f}"
    return "" if mean == f"{p50(row) / 1e3:.2f}" else f", in the mean {mean} s"


def _as_long(ratio: float) -> str:
    return "as long" if f"{ratio:.2f}" == "1.00" else f"{times(ratio)} as long"


def _fastest_pair(e: Evidence, field: str, value: str, other: str | None = None) -> tuple[Row, Row] | None:
    """The fastest step with a value of a field for which there is one that differs in nothing else, and that one.

    Of several others it is one of the same run if there is any, then the fastest.
    other: the value of the other's field, if only one will do.
    """
    rows = e.ok("leaderboard-2026", "step_ms", size="8B")
    rest = [name for name in VIEWS["leaderboard-2026"].keys if name != field]
    for row in sorted((row for row in rows if row.config[field] == value), key=p50):
        alike = [each for each in rows if each.config[field] != value and is_alike(row, each, rest)]
        if alike := [each for each in alike if other in (None, each.config[field])]:
            return row, min(alike, key=lambda each: (not _are_of_one_run(e, row, each), p50(each)))
    return None


def _are_of_one_run(e: Evidence, *rows: Row) -> bool:
    return any(all(row in run for row in rows) for run in e.runs("leaderboard-2026"))


def _of_another_run(e: Evidence, *rows: Row) -> str:
    return "" if _are_of_one_run(e, *rows) else " (in another run)"


def own_8b(e: Evidence) -> str | None:
    """The step with our own attention, since the handout wants an implementation that is one's own."""
    rows = e.ok("leaderboard-2026", "step_ms", size="8B", strategy="fsdp")
    own = [row for row in rows if row.config.get("attention") == "flash_triton"]
    if not own:
        return None
    text = f"With our own attention, `flash_triton`, the step takes {p50(min(own, key=p50)) / 1e3:.2f} s"
    if pair := _fastest_pair(e, "attention", "flash_triton"):
        ours, theirs = pair
        ratio = p50(ours) / p50(theirs)
        text += (
            f"; `{ours.variant}` is with it {percent(abs(ratio - 1))} {'longer' if ratio >= 1 else 'shorter'} than "
            f"the same with PyTorch's attention{_of_another_run(e, ours, theirs)}"
        )
    return f"{text}."


def what_a_step_is(e: Evidence) -> str:
    """How the measured step differs from the handout's, and what of it is not our own."""
    return (
        "The step is the training loop's: beside forward pass, loss, backward pass and AdamW it takes the gradients' "
        "norm, clips by it and checks that both are finite, which the handout's does not. AdamW's kernel is PyTorch's "
        "fused one, and attention is PyTorch's where the row says `sdpa`; sharding, checkpointing, the chunked loss "
        "and `flash_triton` are our own."
    )


def from_empty_caches(e: Evidence) -> str | None:
    """Whether start-up, with all compilation, leaves the time that the handout gives."""
    rows = [row for row in e.ok("leaderboard-2026", "startup_s", size="8B") if row.config["strategy"] == "fsdp"]
    if not rows:
        return None
    most = max(row.metrics["startup_s"] for row in rows)
    verdict = "within" if most + _TIMED_S < _LIMIT_S else "beyond"
    return (
        f"Building the model and a first step, with all that is to be compiled, take up to {most:.0f} s; with the "
        f"{_TIMED_S} s of the handout's timer that is {verdict} the {_LIMIT_S} s of a run, if its caches were empty."
    )


def what_makes_it_fit(e: Evidence) -> str | None:
    """The range of steps over ways to keep memory down, with the attention that is fastest."""
    rows = one_setting(e.ok("leaderboard-2026", "step_ms", strategy="fsdp"), "size", "context_length", "devices")
    attention = min(rows, key=p50).config.get("attention") if rows else None
    rows = [row for row in rows if row.config.get("attention") == attention]
    if len(rows) < 2:
        return None
    return (
        f"Over {len(rows)} ways to keep activations small the step goes from {span(map(p50, rows), ms)} and the peak "
        f"{span(map(peak, rows), gib)}."
    )


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
                is_asked=lambda row: is_xl_2026(row) and row.config["context_length"] == _LENGTH,
                plots=("peak",),
            ),
        ),
        sentences=(
            says(saved_by_block, "residuals"),
            says(least_peak),
            says(group_reasoning),
            says(best_size, "checkpointing"),
            says(least_memory, "checkpointing"),
        ),
        sketch=HALVES,
        working=checkpointing_working,
        plan=f"plan checkpointing --size {XL_2026} --context {_LENGTH} --attention flash_triton",
        code=("cs336_systems/training/build.py", "cs336_systems/bench/cases/checkpointing.py"),
    ),
    Problem(
        name="fsdp",
        section=FULLY_SHARDED,
        places=("", "7"),
        question=(
            "Weights, gradients and optimizer state divided over the ranks, weights gathered for each layer in time."
        ),
        exhibits=(ddp_exhibit("fsdp", "torch_fsdp"),),
        sentences=(says(fsdp_step, "ddp"),),
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
                show=memory_parts_in_short,
                pictures=(("memory by part at each moment", draw_parts_into),),
            ),
            trace_exhibit("fsdp"),
        ),
        sentences=(
            says(expected_saving),
            says(fsdp_memory, "fsdp-accounting"),
            says(fsdp_gathers, "fsdp-accounting"),
        ),
        working=sharding_working,
        plan=f"plan memory --size {XL_2026} --strategy fsdp --world_size {_RANKS}",
    ),
    *CALCULATIONS,
    Problem(
        name="leaderboard_2026",
        section=LEADERBOARD,
        places=("", "9"),
        question="How fast is a training step of the 8B model with 32,768 tokens on each of two GPUs?",
        exhibits=(
            Exhibit(
                case="leaderboard-2026",
                command="bench leaderboard-2026 --attention flash_triton sdpa",
                also=("bench leaderboard-2026 --strategy torch_fsdp",),
                plots=("step",),
            ),
        ),
        sentences=(
            says(fastest_8b, "leaderboard-2026"),
            says(own_8b, "leaderboard-2026"),
            says(what_a_step_is),
            says(from_empty_caches, "leaderboard-2026"),
            says(what_makes_it_fit, "leaderboard-2026"),
        ),
        code=("cs336_systems/bench/cases/leaderboard_2026.py",),
    ),
)
