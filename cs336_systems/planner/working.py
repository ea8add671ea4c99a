"""A calculation that shows its working: terms with their formula filled in, as aligned text or as JSON."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

GIB = 2**30


@dataclass(frozen=True)
class Term:
    """A quantity, how it comes about ("12 N = 12 x 1,998,235,200"), its value, and the unit of that."""

    name: str
    working: str
    value: float
    unit: str = "bytes"


@dataclass(frozen=True)
class Section:
    """Terms under a heading; `total` is the name of the last term where that is the sum of the others."""

    title: str
    terms: tuple[Term, ...]
    notes: tuple[str, ...] = ()

    def value(self, name: str) -> float:
        """The value of the term of this name. Raises KeyError where there is none."""
        return {term.name: term.value for term in self.terms}[name]


def total(name: str, terms: Sequence[Term]) -> Term:
    """The sum of terms of one unit."""
    return Term(name, "sum", math.fsum(term.value for term in terms), terms[0].unit)


def show(value: float, unit: str) -> str:
    """A value in the unit that reads best: bytes in GiB or MiB, seconds in ms or us, operations in TFLOP."""
    scaled = {"FLOP": (1e12, "TFLOP"), "FLOP/s": (1e12, "TFLOP/s"), "bytes/s": (1e9, "GB/s")}
    if not math.isfinite(value):
        return "-" if math.isnan(value) else "none"
    if unit in ("bytes", "s", "share"):
        return {"bytes": _bytes, "s": _seconds, "share": lambda x: f"{x:.1%}"}[unit](value)
    if unit in scaled:
        return f"{value / scaled[unit][0]:,.4g} {scaled[unit][1]}"
    digits = ",.0f" if float(value).is_integer() else ",.1f" if abs(value) >= 1000 else ",.4g"
    number = f"{value:{digits}}"
    return f"{number} {unit}".strip()


def _bytes(value: float) -> str:
    for size, name in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(value) >= size / 10:
            return f"{value / size:,.2f} {name}"
    return f"{value:,.0f} B"


def _seconds(value: float) -> str:
    return f"{value * 1e3:,.3f} ms" if abs(value) >= 1e-4 else f"{value * 1e6:,.2f} us"


def as_text(sections: Sequence[Section]) -> str:
    """Sections one below the other: name, value and working of each term in columns."""
    blocks = []
    for section in sections:
        rows = [(term.name, show(term.value, term.unit), term.working) for term in section.terms]
        widths = [max((len(row[i]) for row in rows), default=0) for i in (0, 1)]
        lines = [f"  {name:<{widths[0]}}  {value:>{widths[1]}}  {working}".rstrip() for name, value, working in rows]
        blocks.append("\n".join([section.title, *lines, *(f"  {note}" for note in section.notes)]))
    return "\n\n".join(blocks)


def as_json(sections: Sequence[Section]) -> list[dict[str, Any]]:
    """The same as plain JSON types; what is not finite is null."""
    plain = [asdict(section) for section in sections]
    for section in plain:
        for term in section["terms"]:
            term["value"] = term["value"] if math.isfinite(term["value"]) else None
    return plain
