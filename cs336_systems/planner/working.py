"""A calculation that shows its working: terms with their formulas filled in, as aligned text or as JSON."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

MIB, GIB = 2**20, 2**30
SUM = "sum"
"""The working of a term that adds up the terms before it."""


@dataclass(frozen=True)
class Term:
    """A quantity: its name, its working ("12 N = 12 x 1,998,235,200"), its value and the value's unit."""

    name: str
    working: str
    value: float
    unit: str = "bytes"


@dataclass(frozen=True)
class Section:
    """Terms under a heading, and notes below them."""

    title: str
    terms: tuple[Term, ...]
    notes: tuple[str, ...] = ()

    def value(self, name: str) -> float:
        return {term.name: term.value for term in self.terms}[name]


def total(name: str, terms: Sequence[Term]) -> Term:
    """The sum of terms of one unit."""
    return Term(name, SUM, math.fsum(term.value for term in terms), terms[0].unit)


def as_factor(formula: str) -> str:
    """A formula as a factor of another: a sum in brackets."""
    return f"({formula})" if " + " in formula else formula


def show(value: float, unit: str, like: float | None = None) -> str:
    """A value in the unit that reads best: bytes in GiB or MiB, seconds in ms or us, operations in TFLOP.

    like: a value of bytes or seconds whose unit is used instead.
    """
    if not math.isfinite(value):
        return "-" if math.isnan(value) else "none"
    if unit == "share":
        return f"{value:.1%}"
    if unit == "bytes":
        # A value by itself reads well as 0.34 GiB; as the largest of a list it would leave the others without digits.
        size = abs(10 * value if like is None else like)
        scale, name = next((each for each in ((GIB, "GiB"), (MIB, "MiB"), (2**10, "KiB")) if size >= each[0]), (1, "B"))
        return f"{value / scale:,.{0 if scale == 1 else 2}f} {name}"
    if unit == "s":
        in_ms = abs(value if like is None else like) >= 1e-4
        return f"{value * 1e3:,.3f} ms" if in_ms else f"{value * 1e6:,.2f} us"
    scaled = {"FLOP": (1e12, "TFLOP"), "FLOP/s": (1e12, "TFLOP/s"), "bytes/s": (1e9, "GB/s")}
    if unit in scaled:
        return f"{value / scaled[unit][0]:,.4g} {scaled[unit][1]}"
    digits = ",.0f" if float(value).is_integer() else ",.1f" if abs(value) >= 1000 else ",.4g"
    return f"{value:{digits}} {unit}".strip()


def shown(terms: Sequence[Term]) -> list[str]:
    """The values of a section's terms. Bytes share one unit if they add up or are within a factor of 1000; so do times.

    Terms add up if the last is their sum. The shared unit suits the largest.
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
        lines = [*in_columns(rows, left=(0, 2)), *section.notes]
        blocks.append("\n".join([section.title, *(f"  {line}" for line in lines)]))
    return "\n\n".join(blocks)


def in_columns(rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """A line for each row, whose cells begin below each other in the columns `left`, and end below each other else."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:{'<' if i in left else '>'}{widths[i]}}" for i, cell in enumerate(row)).rstrip()
        for row in rows
    ]


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
