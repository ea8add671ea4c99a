"""Communication, data parallelism, the sharded optimizer."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...bench.instruments.memory_moments import AFTER, BEFORE, FORWARD, INITIALISED
from ...bench.row import Row
from ...planner.parallelism import FeedForward, Mesh, least_device_batch, parallelism_sections
from ..memory_parts import draw_parts, predicted_today
from ..step_streams import plot_streams, streams_file
from ..views import rows_table
from .buckets import bucket_optimum, bucket_working, buckets
from .claims import (
    PROFILERS,
    XL_2026,
    Evidence,
    gib,
    is_alike,
    is_xl_2026,
    listing,
    ms,
    of_2026,
    of_each_size,
    one_setting,
    p50,
    percent,
)
from .collectives import DISTRIBUTED_COMMUNICATION
from .problem import Exhibit, Problem, RowFile, says
from .steps import ALONE, SETTING
from .strategies import (
    added,
    communicates_less,
    compared,
    equal_weights,
    pace_of_the_host,
    setup,
    sharded_time,
    waits_for_the_host,
)

DATA, SHARDED = "Data parallelism", "Sharded optimizer state"
_LONGER = "the profiler makes eager steps longer"
_USUAL_STEPS = 10
_WITH_ZERO1 = ("naive", "overlap", "overlap:100", "bucketed:100")


def _overlapped(e: Evidence) -> str | None:
    """How much of the communication ran beside the backward pass, by the profiler."""
    rows = [
        row
        for row in e.ok("overlap-trace", "communication_ms", "overlapped")
        if row.metrics["overlapped"] is not None and not row.variant.startswith("fsdp")
    ]
    rows = one_setting(rows, *SETTING, "compile")
    told = [
        f"{percent(row.metrics['overlapped'])} of {ms(row.metrics['communication_ms'])} with `{row.variant}`"
        for row in rows
    ]
    if not told:
        return None
    profiled = {row.variant for row in e.ok("ddp", "communication_ms") if is_alike(row, rows[0], SETTING)}
    slowed = [
        f"{ms(row.metrics['span_ms'])} instead of {ms(p50(row))} with `{row.variant}`"
        for row in rows
        if "span_ms" in row.metrics and "step_ms" in row.metrics and row.metrics["span_ms"] > p50(row)
    ]
    longer = f" Tracing makes steps, and waiting, longer: {listing(slowed)}" if slowed else ""
    if longer and profiled >= {row.variant for row in rows}:
        longer += "; the profiles above, without operators, disturb them less"
    size = rows[0].config["size"]
    tool = PROFILERS.get(str(rows[0].config.get("profiler")), "the profiler")
    return (
        f"In a step of {size} traced with {tool} communication, waiting for the other rank included, runs beside "
        f"computing for {listing(told)}.{longer}{'.' if longer else ''}"
    )


overlapped = of_each_size(_overlapped, part="(b) ")


def equal_to_whole(e: Evidence) -> str:
    """The sentence on what shows that the sharded optimizer steps as the whole one does."""
    return (
        "Given the same gradients, weights and state after 10 steps are equal to those of the optimizer that is not "
        "sharded, to the last bit and on all ranks, for AdamW, SGD and others, with parameter groups, schedulers, "
        "closures and groups added later: `tests/parallel/test_zero1.py`, on 1, 2 and 4 ranks."
    )


def xxl(e: Evidence) -> str:
    """(a) to (c): memory and the bounds of the handout's XXL configuration."""
    model, mesh = FeedForward(), Mesh()
    memory, sharded, bound = parallelism_sections(model, mesh)
    gpus, saved = memory.value("GPUs for the state"), memory.value("saved for backward, a token")
    least = least_device_batch(model, mesh)
    device = sharded.terms[0].value
    return (
        f"(a) XXL has {model.parameters / 1e9:,.1f} billion parameters: {memory.value('state, float32') / 1e9:,.0f} GB "
        f"of float32 state, as much as {gpus:.0f} GPUs of 80 GB hold, and {saved / 1e6:.1f} MB of activations a token. "
        f"(b) A device has `(16 P + A / 2) / N_FSDP + A / 2` bytes; below 95 GB it takes N_FSDP of at least "
        f"{device:.0f}, before activations. (c) With X = {mesh.x}, Y = {mesh.y} the "
        f"forward pass is bound by its products from {least:.0f} tokens a device on where transfers overlap, "
        f"{bound.value('B, overlapped'):,.0f} in all."
    )


def smaller_batches(e: Evidence) -> str:
    """(d) What lets the batch be smaller, with the best mesh of as many devices."""
    model, mesh = FeedForward(), Mesh()
    most = int(model.d_ff * mesh.m_y / mesh.intensity)  # of Y, for T_TP <= T_math
    y = max(n for n in range(1, most + 1) if mesh.devices % n == 0)
    other = replace(mesh, x=mesh.devices // y, y=y)
    batch, smaller = (least_device_batch(model, each) * each.devices for each in (mesh, other))
    return (
        f"(d) In all `B = alpha X / M_X` tokens are needed, so B falls with X, alpha or the bytes that are sent. More "
        f"of the devices for tensor parallelism: it costs nothing up to `Y = F M_Y / alpha` = {most}, and with X = "
        f"{other.x}, Y = {other.y} as many devices need {smaller:,.0f} tokens instead of {batch:,.0f}. Pipeline stages "
        "(GPipe, Huang et al. 2019): P of them leave `X = N / (Y P)`, for a bubble of `(P - 1) / (m + P - 1)` with m "
        "microbatches. Weights gathered in 8 bits instead of 16 (ZeRO++, Wang et al. 2023) halve T_FSDP and so B. And "
        "B counts tokens: with sequences split over the devices (Ring Attention, Liu et al. 2023) they may all be of "
        "one sequence."
    )


def sharded_memory(e: Evidence) -> str | None:
    """(a) Memory at the three moments, with and without."""
    rows = one_setting(
        of_2026(e.ok("optimizer-sharding", "moments")), "devices", "size", "context_length", "batch_size", "compile"
    )
    sharded = [row for row in rows if "+zero1" in row.variant]
    plain = [row for row in rows if sharded and row.variant == sharded[-1].variant.replace("+zero1", "")]
    if not plain:
        return None
    moments, ours = plain[-1].metrics["moments"], sharded[-1].metrics["moments"]
    told = [
        f"{gib(ours[at]['peak_bytes'])} instead of {gib(moments[at]['peak_bytes'])} {word}"
        for at, word in (
            (INITIALISED, "after initialisation"),
            (BEFORE, "before the optimizer's step"),
            (AFTER, "after it"),
        )
    ]
    state = [m[BEFORE]["parts"]["optimizer_state"] for m in (ours, moments)]
    e.claim("sharding divides the optimizer's state", state[0] < state[1], sharded=state[0], whole=state[1])
    rest = listing([f"{name} {gib(ours[BEFORE]['parts'][name])}" for name in ("parameters", "gradients")])
    used = [gib(m[BEFORE]["live_bytes"]) for m in (ours, moments)]
    activations = gib(ours[FORWARD]["parts"]["activations"])
    begun, parts = [m[INITIALISED] for m in (ours, moments)], []
    if not any(m["parts"]["optimizer_state"] + m["parts"]["gradients"] for m in begun):
        parts.append("After initialisation it is weights alone, since AdamW makes its moments in its first step")
        if begun[0]["peak_bytes"] > begun[1]["peak_bytes"]:
            parts.append(
                "what the sharded one has more is a piece of them that is there twice while they are moved into the "
                "tensors that are sent"
            )
    initialised = f" {'; '.join(parts)}." if parts else ""
    return (
        f"(a) With the optimizer sharded, {sharded[-1].config['size']} on {sharded[-1].config['devices']} ranks has a "
        f"peak of memory of {listing(told)}. Directly before the optimizer's step {used[0]} instead of {used[1]} are "
        f"in use: AdamW's moments {gib(state[0])} instead of {gib(state[1])}, and {rest} in both cases. The peak comes "
        f"earlier, where activations, {activations}, are there instead of gradients.{initialised}"
    )


def sharded_and_zero(e: Evidence) -> str:
    """(c) The differences from ZeRO stage 1."""
    return (
        "(c) In memory the two are alike: P_os divides the optimizer's state alone, and weights and gradients stay "
        "whole on every rank, as here (dividing gradients is stage 2, P_os+g); but ZeRO gives each rank an equal slice "
        "of all parameters put together, where here whole parameters have an owner, so that ranks may differ by as "
        "much as the largest parameter. In volume a rank of ZeRO needs the reduced gradients of its own slice only, a "
        "reduce-scatter, and then gathers weights, together as many bytes as the all-reduce of data parallelism; here "
        "all gradients are all-reduced and weights sent by their owners to all besides, half as much again."
    )


DDP_COMMAND = (
    f"bench ddp --size {XL_2026} --compile false --variant alone naive flat overlap bucketed:1 bucketed:10 "
    "bucketed:100 bucketed:1000 torch_ddp overlap+zero1 fsdp torch_fsdp"
)
"""Of eager steps; those of xl, compiled and as CUDA graphs, are the case's default."""


def ddp_exhibit(
    *names: str,
    beside: tuple[str, ...] = (),
    options: str = r"(\+graph)?",
    is_of_most_steps: bool = False,
) -> Exhibit:
    """The rows of some variants beside others and one GPU alone, of files that have any of the former.

    options: what may follow the names, as a pattern. is_of_most_steps: whether files with more steps than usual go
    before those measured later, as in the sentences.
    """

    def matching(*which: str) -> re.Pattern[str]:
        return re.compile(rf"({'|'.join(map(re.escape, which))}){options}( compiled)?")

    own, shown = matching(*names), matching(ALONE, *beside, *names)
    return Exhibit(
        case="ddp",
        command=DDP_COMMAND,
        keep=lambda row: shown.fullmatch(row.variant) is not None,
        is_about=lambda row: own.fullmatch(row.variant) is not None,
        is_asked=is_xl_2026,
        measures=lambda row: (row.variant, *(row.config.get(name) for name in SETTING)),
        rank=_many_steps if is_of_most_steps else lambda row: 0,
    )


def _many_steps(row: Row) -> int:
    steps = len(row.metrics.get("steps_ms", ()))
    return steps if steps > _USUAL_STEPS else 0


def draw_parts_into(files: Sequence[RowFile], out: Path) -> None:
    """Draw memory by part at each moment into a PNG, should any row have been measured."""
    for made in draw_parts([row for file in files for row in file.rows], out.parent):
        made.replace(out)


def draw_traced(files: Sequence[RowFile], out: Path) -> None:
    """Draw the streams of the rows' steps into a PNG, should the files that have them be here."""
    found = [step for file in files for row in file.rows if (step := streams_file(row, file.path.parent)) is not None]
    if found:
        plot_streams(found, out)


def trace_exhibit(*variants: str) -> Exhibit:
    """What the streams of a GPU do over a step of some variants."""
    return Exhibit(
        case="overlap-trace",
        command=f"bench overlap-trace --size {XL_2026} --variant {' '.join(variants)}",
        keep=lambda row: row.variant.partition(" ")[0] in variants,
        is_asked=is_xl_2026,
        pictures=((f"computing and communication over one profiled step ({_LONGER})", draw_traced),),
    )


PROBLEMS = (
    DISTRIBUTED_COMMUNICATION,
    Problem(
        name="naive_ddp",
        section=DATA,
        places=("2.2", "5.2"),
        question="Data parallelism that all-reduces each gradient after the backward pass, and ends in equal weights.",
        sentences=(says(equal_weights("naive", "test_ddp.py")),),
        code=("cs336_systems/parallel/ddp.py", "tests/test_ddp.py"),
    ),
    Problem(
        name="naive_ddp_benchmarking",
        section=DATA,
        places=("2.2", "5.2"),
        question="How much of a step with naive data parallelism is communication?",
        exhibits=(ddp_exhibit("naive"),),
        sentences=(
            says(setup, "ddp"),
            says(of_each_size(added("naive"), pace_of_the_host), "ddp"),
        ),
    ),
    Problem(
        name="minimal_ddp_flat_benchmarking",
        section=DATA,
        places=("2.3.1", "5.3.1"),
        question="What does a single all-reduce of all gradients gain over one a parameter?",
        exhibits=(ddp_exhibit("flat", beside=("naive",)),),
        sentences=(
            says(
                of_each_size(
                    added("flat", is_profiled=False), compared("flat", "naive"), communicates_less("flat", "naive")
                ),
                "ddp",
            ),
        ),
    ),
    Problem(
        name="ddp_overlap_individual_parameters",
        section=DATA,
        places=("2.3.2", "5.3.2"),
        question=(
            "Data parallelism that sends each gradient as soon as it is there, beside the rest of the backward pass."
        ),
        sentences=(says(equal_weights("overlap", "test_ddp.py")),),
        code=("cs336_systems/parallel/ddp.py", "tests/test_ddp_individual_parameters.py"),
    ),
    Problem(
        name="ddp_overlap_individual_parameters_benchmarking",
        section=DATA,
        places=("2.3.2", "5.3.2"),
        question="What does sending during the backward pass gain, and is the overlap there in a profile?",
        exhibits=(
            ddp_exhibit("overlap", beside=("naive", "flat")),
            trace_exhibit("naive", "overlap"),
        ),
        sentences=(
            says(
                of_each_size(
                    added("overlap"),
                    compared("overlap", "naive", "flat"),
                    waits_for_the_host("overlap", "naive"),
                    part="(a) ",
                ),
                "ddp",
            ),
            says(overlapped, "overlap-trace"),
        ),
    ),
    Problem(
        name="ddp_overlap_bucketed",
        section=DATA,
        places=("2.3.3", ""),
        question="Data parallelism that sends gradients in buckets of a size during the backward pass.",
        sentences=(says(equal_weights("bucketed", "test_ddp.py")),),
        code=("cs336_systems/parallel/bucketed.py", "tests/test_ddp.py"),
    ),
    Problem(
        name="ddp_bucketed_benchmarking",
        section=DATA,
        places=("2.3.3", ""),
        question="What does the size of a bucket change, and what is the best one, measured and by a model?",
        exhibits=(
            Exhibit(
                case="bucket-size",
                command="bench bucket-size",
                plots=("added",),
            ),
            ddp_exhibit(*(f"bucketed:{size}" for size in (1, 10, 100, 1000)), beside=("overlap", "torch_ddp")),
        ),
        sentences=(says(buckets), says(of_each_size(compared("bucketed:100", "overlap")), "ddp"), says(bucket_optimum)),
        working=bucket_working,
        plan="plan ddp-overhead --size xl",
    ),
    Problem(
        name="communication_accounting",
        section=DATA,
        places=("2.4", ""),
        question="What memory and which batch does a model of 126 huge feed-forward blocks need, sharded over a mesh?",
        sentences=(says(xxl), says(smaller_batches)),
        working=lambda: parallelism_sections(FeedForward(), Mesh()),
        plan="plan parallelism",
    ),
    Problem(
        name="optimizer_state_sharding",
        section=SHARDED,
        places=("3", "6"),
        question=(
            "An optimizer of which each rank keeps the state of its part alone, and sends the weights it has stepped."
        ),
        sentences=(says(equal_to_whole),),
        code=("cs336_systems/parallel/zero1.py", "tests/test_sharded_optimizer.py"),
    ),
    Problem(
        name="optimizer_state_sharding_accounting",
        section=SHARDED,
        places=("3", "6"),
        question="What does sharding the optimizer's state save of memory, cost of time, and lack of ZeRO stage 1?",
        exhibits=(
            Exhibit(
                case="optimizer-sharding",
                command=f"bench optimizer-sharding --size {XL_2026}",
                is_asked=is_xl_2026,
                show=lambda rows: rows_table(predicted_today(rows)),
                pictures=(("memory by part at each moment", draw_parts_into),),
            ),
            ddp_exhibit(*(f"{name}+zero1" for name in _WITH_ZERO1), beside=_WITH_ZERO1, is_of_most_steps=True),
        ),
        sentences=(
            says(sharded_memory, "optimizer-sharding"),
            says(sharded_time),
            says(sharded_and_zero),
        ),
    ),
)
