"""The table of the case `ddp`: what each strategy adds to a step of one GPU alone."""

from collections.abc import Sequence

from ..bench.case import Row
from ..planner.rows import is_of_cpu
from .tables import markdown_table, row_fields
from .view import OUTCOMES, grouped, machine

_SETTING = ("devices", "size", "context_length", "batch_size", "precision")


def ddp_table(rows: Sequence[Row]) -> str:
    """A table a machine and setting: the median step of each variant, eager and compiled, what it adds, its memory."""
    return "\n\n".join(map(_setting_table, grouped(rows, _SETTING)))


def _setting_table(rows: Sequence[Row]) -> str:
    last = {row.variant: row for row in rows}
    beside: dict[str, Row | None] = {}  # what each is compared with: the row of the launch it was measured in
    alone: dict[tuple[bool, bool], Row] = {}
    for row in rows:
        kind = "+graph" in row.variant, row.variant.endswith(" compiled")
        if row.variant.startswith("alone"):
            alone[kind] = row
        beside[row.variant] = alone.get(kind)
    variants = list(dict.fromkeys(variant.removesuffix(" compiled") for variant in last))

    def cells(variant: str, how: str) -> tuple[str, str, str]:
        row = last.get(variant + how)
        by_itself = beside.get(variant + how) or alone.get(("+graph" in variant, bool(how)))
        if row is None or row.status != "ok":
            return ("-" if row is None else OUTCOMES[row.status], "-", "-")
        fields, added = row_fields(row), "-"
        if by_itself is not None and by_itself.status == "ok":
            added = f"{row.metrics['step_ms']['p50'] / by_itself.metrics['step_ms']['p50'] - 1:+.1%}"
        step, peak = (fields.number("metrics.step_ms.p50", ".1f"),
                      fields.number("metrics.peak_memory_bytes", ".1f", 2**30))  # fmt: skip
        return step, added, peak

    facts = row_fields(rows[0])
    whose = "a process, with what it has loaded," if is_of_cpu(rows[0]) else "a GPU"
    head = (
        f"{facts.get('config.devices')} x {machine(rows[0])}, {facts.get('config.size')}, "
        f"{facts.get('config.batch_size')} x {facts.get('config.context_length')} a process, "
        f"{facts.get('config.precision')}; median step in ms, what it is more than `alone`, peak memory {whose} in GiB:"
    )
    names = [f"{how} {what}" for how in ("eager", "compiled") for what in ("step", "added", "peak")]
    lines = [(variant, *cells(variant, ""), *cells(variant, " compiled")) for variant in variants]
    return head + "\n\n" + markdown_table(["variant", *names], lines)
