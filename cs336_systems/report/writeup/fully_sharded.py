"""Fully sharded data parallelism: its step, and what it saves and sends."""

from ...bench.instruments.memory_moments import AFTER, FORWARD
from ...bench.row import Row
from ...config.model import ModelConfig
from ...planner.accounting import num_parameters
from ...planner.job import Job
from ...planner.memory import memory_sections, part_bytes
from ...planner.working import Section, Term
from ..memory_parts import memory_parts_in_short, predicted_today
from .claims import (
    XL_2026,
    Evidence,
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
from .problem import Exhibit, Problem, says
from .several_gpus import ddp_exhibit, draw_parts_into, trace_exhibit
from .steps import HOWS, difference, peak_bytes, steps, told_pair
from .strategies import equal_weights
from .timing import CONTEXT

_SECTION = "Fully sharded data parallelism"
_RANKS = 2
_IDLE = 0.1  # of a step: so much of it with nothing to do is told


def _variants(e: Evidence) -> dict[str, Row]:
    rows = of_2026(e.ok("fsdp-accounting", "moments", "step_ms"))
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
    parts = [part_bytes(job) for job in jobs.values()]
    weights = 4 * num_parameters(jobs["nothing"].shape) / _RANKS
    copies = memory_sections(jobs["nothing"])[0].value("weight copies")
    return (
        f"(a) Expected for {XL_2026} on {_RANKS} GPUs: after a step weights, gradients and moments take "
        f"`16 N / {_RANKS}` = {gib(everything)} instead of `16 N` = {gib(whole)}, and {gib(optimizer)} with the "
        "optimizer sharded. The peak comes earlier, where the backward pass begins and there are few gradients: from "
        f"it go half of the weights ({gib(weights)}), half of the moments ({gib(2 * weights)}) and autocast's 16-bit "
        f"copies of the weights ({gib(copies)}), which FSDP frees with each layer. The planner has peaks of "
        f"{gib(parts[2]['peak'])} with FSDP, {gib(parts[0]['peak'])} with nothing sharded and "
        f"{gib(parts[1]['peak'])} with the optimizer."
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
    kept = [gib(row.metrics["moments"][FORWARD]["parts"]["activations"]) for row in (ours, plain)]
    return (
        f"Measured, {claim}: a peak of {gib(peak(ours))} instead of {gib(peak(plain))} with `{plain.variant}` on "
        f"{ours.config['devices']} ranks ({ours.config['size']}); after a step they hold {listing(told)}, and before "
        f"the backward pass activations of {kept[0]} instead of {kept[1]}. Here a step takes "
        f"{ms(p50(ours))}, {difference(ours, plain, (), f' than with `{plain.variant}`')}."
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
        text += f"; it waits for {names}, {ms(held)} of a step's {ms(p50(row))}"
    if backward:
        on_time = sum(gather["slack_ms"] >= 0 for gather in backward)
        text += f". In the backward pass {on_time} of {len(backward)} are in time"
    return f"{text}."


def fsdp_exposed(e: Evidence) -> str | None:
    """(b) Why gathers that come in time are not all hidden, by the trace of a step."""
    rows = of_2026(e.ok("overlap-trace", "communication_ms", "both_ms", "compute_ms", "span_ms", "step_ms"))
    rows = [row for row in rows if row.variant.partition(" ")[0] == "fsdp" and row.metrics["communication_ms"]]
    if not rows:
        return None
    row = rows[-1]
    sent, both, computing, span_ms = (
        row.metrics[f"{name}_ms"] for name in ("communication", "both", "compute", "span")
    )
    longer = span_ms / p50(row) - 1
    slowed = f", which makes a step {percent(longer)} longer" if longer > 0 else ""
    text = (
        f"Traced{slowed}, it communicates for {ms(sent)}, the reduce-scatters of gradients included, of which "
        f"{percent(both / sent)} run beside computing."
    )
    idle = p50(row) - computing - (sent - both)  # more than that cannot be waiting for the host
    if idle < _IDLE * p50(row):
        return text
    return (
        f"{text} For {percent(idle / p50(row))} of a step that is not traced the GPU does neither, because the host "
        "sets the pace: a gather can be in time and still have nothing to run beside."
    )


def _fsdp_step(e: Evidence) -> str | None:
    """FSDP's step beside one GPU alone and PyTorch's, from the case ddp, each told of one launch."""
    told: list[str] = []
    runs = steps(e)
    for end, how in {"": "eager", " compiled": "compiled", **HOWS}.items():
        first: Row | None = None
        found = [
            (pair, than)
            for other, than in (("alone", "one rank alone"), ("torch_fsdp", "with `torch_fsdp`"))
            if (pair := told_pair(runs, f"fsdp{end}", other + end)) is not None
        ]
        # Of several launches, the last comes first.
        launches = [id(run.get(f"fsdp{end}")) for run in runs]
        for pair, than in sorted(found, key=lambda each: -launches.index(id(each[0][0]))):
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
        name="fsdp",
        section=_SECTION,
        places=("", "7"),
        question=(
            "Weights, gradients and optimizer state divided over the ranks, weights gathered for each layer in time."
        ),
        exhibits=(ddp_exhibit("fsdp", "torch_fsdp", is_of_most_steps=True),),
        sentences=(says(equal_weights("fsdp", "test_fsdp.py")), says(fsdp_step, "ddp")),
        code=("cs336_systems/parallel/fsdp.py", "cs336_systems/parallel/fsdp_param_group.py", "tests/test_fsdp.py"),
    ),
    Problem(
        name="fsdp_accounting",
        section=_SECTION,
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
)
