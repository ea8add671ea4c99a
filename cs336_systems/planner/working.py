"""A calculation that shows its working: terms with their formulas filled in, as aligned text or as JSON."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

MIB, GIB = 2**20, 2**30
SUM = "sum"
"""The working of a term that is the sum of those before it."""


@dataclass(frozen=True)
class Term:
    """A quantity: its name, its working ("12 N = 12 x 1,998,235,200"), its value and the value's unit."""

    name: str
    working: str
    value: float
    unit: str = "bytes"


@dataclass(frozen=True)
class Section:
    """Terms under a heading; `total` is the name of the last term if that is the sum of the others."""

    title: str
    terms: tuple[Term, ...]
    notes: tuple[str, ...] = ()

    def value(self, name: str) -> float:
        """The value of the term of this name. Raises KeyError where there is none."""
        return {term.name: term.value for term in self.terms}[name]


def total(name: str, terms: Sequence[Term]) -> Term:
    """The sum of terms of one unit."""
    return Term(name, SUM, math.fsum(term.value for term in terms), terms[0].unit)


def show(value: float, unit: str, like: float | None = None) -> str:
    """A value in the unit that reads best: bytes in GiB or MiB, seconds in ms or us, operations in TFLOP.

    like: a value of bytes or seconds whose unit is used instead.
    """
    scaled = {"FLOP": (1e12, "TFLOP"), "FLOP/s": (1e12, "TFLOP/s"), "bytes/s": (1e9, "GB/s")}
    if not math.isfinite(value):
        return "-" if math.isnan(value) else "none"
    if unit in ("bytes", "s", "share"):
        if unit == "share":
            return f"{value:.1%}"
        # A value by itself reads well as 0.34 GiB; as the largest of a list it would leave the others without digits.
        return _bytes(value, 10 * value if like is None else like) if unit == "bytes" else _seconds(value, like)
    if unit in scaled:
        return f"{value / scaled[unit][0]:,.4g} {scaled[unit][1]}"
    digits = ",.0f" if float(value).is_integer() else ",.1f" if abs(value) >= 1000 else ",.4g"
    number = f"{value:{digits}}"
    return f"{number} {unit}".strip()


def _bytes(value: float, like: float) -> str:
    for size, name in ((GIB, "GiB"), (MIB, "MiB"), (2**10, "KiB")):
        if abs(like) >= size:
            return f"{value / size:,.2f} {name}"
    return f"{value:,.0f} B"


def _seconds(value: float, like: float | None) -> str:
    return f"{value * 1e3:,.3f} ms" if abs(value if like is None else like) >= 1e-4 else f"{value * 1e6:,.2f} us"


def shown(terms: Sequence[Term]) -> list[str]:
    """The values of a section's terms: bytes share one unit, and so do seconds, if they add up or are not far apart.

    Far apart means by a factor of 1000. Terms add up if the last is their sum; the unit is that of the largest.
    """
    like: dict[str, float | None] = {}
    for unit in ("bytes", "s"):
        sizes = [abs(term.value) for term in terms if term.unit == unit and term.value and math.isfinite(term.value)]
        together = len(sizes) > 1 and (terms[-1].working == SUM or max(sizes) < 1000 * min(sizes))
        like[unit] = max(sizes) if together else None
    return [show(term.value, term.unit, like.get(term.unit)) for term in terms]


def as_text(sections: Sequence[Section]) -> str:
    """Sections below each other, with name, value and working of each term in columns."""
    blocks = []
    for section in sections:
        values = shown(section.terms)
        rows = [(term.name, value, term.working) for term, value in zip(section.terms, values, strict=True)]
        widths = [max((len(row[i]) for row in rows), default=0) for i in (0, 1)]
        lines = [f"  {name:<{widths[0]}}  {value:>{widths[1]}}  {working}".rstrip() for name, value, working in rows]
        blocks.append("\n".join([section.title, *lines, *(f"  {note}" for note in section.notes)]))
    return "\n\n".join(blocks)


def as_json(sections: Sequence[Section]) -> list[dict[str, Any]]:
    """The sections as plain JSON types; bytes are integers, and values that are not finite are null."""
    plain = [asdict(section) for section in sections]
    for section in plain:
        for term in section["terms"]:
            value = term["value"]
            if not math.isfinite(value):
                term["value"] = None
            elif term["unit"] == "bytes":
                term["value"] = round(value)
    return plain
