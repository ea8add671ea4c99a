"""The table of the case `ddp`: what each strategy adds to a step of one GPU alone."""

from collections.abc import Callable, Mapping, Sequence

from ..bench.row import Row
from ..planner.rows import is_of_cpu
from .tables import Fields, markdown_table, row_fields
from .view import OUTCOMES, grouped, machine

_SETTING = ("devices", "size", "context_length", "batch_size", "precision")


def ddp_table(rows: Sequence[Row]) -> str:
    """Tables per machine and setting: each variant's step, its spread, what it adds, its memory, uncompiled and
    compiled; and, if rows have them, the times of communication in a profiled step."""
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

    def cells(variant: str, how: str) -> tuple[str, ...]:
        row = last.get(variant + how)
        by_itself = beside.get(variant + how) or alone.get(("+graph" in variant, bool(how)))
        if row is None or row.status != "ok":
            return ("-" if row is None else OUTCOMES[row.status], "-", "-", "-")
        fields, added = row_fields(row), "-"
        if by_itself is not None and by_itself.status == "ok":
            added = f"{row.metrics['step_ms']['p50'] / by_itself.metrics['step_ms']['p50'] - 1:+.1%}"
        step, peak = "metrics.step_ms", "metrics.peak_memory_bytes"  # variants that were held together have none
        return (
            fields.number(f"{step}.p50", ".1f"),
            _spread(fields, step),
            added,
            fields.number(peak, ".1f", 2**30) if fields.has(peak) else "-",
        )

    facts = row_fields(rows[0])
    whose = "per process, with what it has loaded," if is_of_cpu(rows[0]) else "per GPU"
    head = (
        f"{facts.get('config.devices')} x {machine(rows[0])}, {facts.get('config.size')}, "
        f"{facts.get('config.batch_size')} x {facts.get('config.context_length')} per process, "
        f"{facts.get('config.precision')}; median step in ms, 20th to 80th percentile, how much longer the median is "
        f"than that of `alone`, peak memory {whose} in GiB:"
    )
    return "\n\n".join(
        [head, _side_by_side(variants, ("step", "p20 to p80", "added", "peak"), cells), *_communication(last, variants)]
    )


def _spread(fields: Fields, name: str) -> str:
    ends = [f"{name}.{end}" for end in ("p20", "p80")]
    return " to ".join(fields.number(end, ".1f") for end in ends) if all(map(fields.has, ends)) else "-"


_HOWS = {"uncompiled": "", "compiled": " compiled"}
"""How variants ran, and what their names end in."""


def _side_by_side(variants: Sequence[str], columns: Sequence[str], cells: Callable[[str, str], Sequence[str]]) -> str:
    """A table with a line per variant: its cells uncompiled and compiled, without those that no variant has."""
    found = {how: [cells(variant, end) for variant in variants] for how, end in _HOWS.items()}
    shown = [how for how, lines in found.items() if any(set(line) != {"-"} for line in lines)]
    header = ["variant", *(f"{what}, {how}" for how in shown for what in columns)]
    return markdown_table(
        header, [(variant, *(cell for how in shown for cell in found[how][i])) for i, variant in enumerate(variants)]
    )


_COMMUNICATION = ("profiled", "communicating", "share", "not hidden")


def _communication(last: Mapping[str, Row], variants: Sequence[str]) -> list[str]:
    """A line and a table about the profiled steps, for the variants that have one."""

    def cells(variant: str, how: str) -> tuple[str, ...]:
        row = last.get(variant + how)
        fields = None if row is None else row_fields(row)
        if fields is None or not fields.has("metrics.communication_ms"):
            return ("-",) * len(_COMMUNICATION)
        span, sent, both = (fields.value(f"metrics.{name}_ms") for name in ("span", "communication", "both"))
        return f"{span:.1f}", f"{sent:.1f}", f"{sent / span:.0%}" if span else "n/a", f"{sent - both:.1f}"

    profiled = [v for v in variants if any(set(cells(v, end)) != {"-"} for end in _HOWS.values())]
    if not profiled:
        return []
    head = (
        "One more step, profiled on the first rank, which makes it longer; in ms: its time, how long it communicates "
        "(waiting for the other ranks included), that as a share of its time, and for how long of that nothing is "
        "computed:"
    )
    return [head, _side_by_side(profiled, _COMMUNICATION, cells)]
