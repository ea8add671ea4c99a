"""Activation checkpointing: what a block saves, nested checkpoints, and the best size of groups of blocks."""

from collections.abc import Sequence
from typing import Any

from ...bench.row import Row
from ...config.model import ModelConfig
from ...planner.activations import checkpointing_sections
from ...planner.job import Job
from ...planner.working import Section
from ..memory_parts import predicted_today
from .claims import XL_2026, Evidence, about, gib, is_xl_2026, listing, of_2026, one_setting, p50, percent
from .memory import RESIDUALS_COMMAND
from .problem import Exhibit, Problem, says, without_details

_LENGTH = 2048  # at which the handout asks for groups of blocks
_CORRECTED = 0.02  # a prediction that was so far off, and is nearer today, is told as corrected
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
        "(b) Groups of K blocks keep `L / K` inputs of I bytes, have one group, `K A`, whole at once, and cost at most "
        f"one more forward pass whatever K is. In the handout's setting ({XL_2026}, {_LENGTH} tokens, fp32, plain "
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
    off = _off(groups)
    stored = [row for row in rows if row.config["policy"] == "groups" and "predicted_bytes" in row.metrics]
    before = _off(stored) if len(stored) == len(groups) else off
    corrected = f" (it was {percent(before)} off until these were measured)" if before > max(_CORRECTED, off) else ""
    return (
        best,
        f"K = {best.config['K']} needs least, {gib(best.metrics['peak_bytes'])} beyond weights and gradients, beside "
        f"{listing(beside)}, each within {percent(max(off, 0.001))} of the planner's count{corrected}"
        f"{'' if predicted == best.config['K'] else f', by which K = {predicted} would be the least'}",
    )


def _off(rows: Sequence[Row]) -> float:
    """How far predicted peaks are from those measured, at most, as a share."""
    return max(abs(row.metrics["predicted_bytes"] / row.metrics["peak_bytes"] - 1) for row in rows)


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
        f"An eager block saves what is counted from its shapes, {near}. Of what the largest of them saves "
        f"({about(most)}, `{most.config['attention']}`) {percent(share)} is in its part `{part}`."
    )


def checkpointing_working() -> list[Section]:
    """Groups of blocks of 2026's xl, in float32 with plain attention."""
    return checkpointing_sections(_job(precision="fp32", attention="naive"))


def _job(**how: Any) -> Job:
    return Job(shape=ModelConfig(size=XL_2026, context_length=_LENGTH).shape, **how)


GRADIENT_CHECKPOINTING = Problem(
    name="gradient_checkpointing",
    section="Activation checkpointing",
    places=("", "3.2"),
    question="What does a block save for its backward pass, and which blocks made again cost least memory?",
    exhibits=(
        Exhibit(case="residuals", command=RESIDUALS_COMMAND, is_asked=is_xl_2026, show=without_details("residuals")),
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
)
