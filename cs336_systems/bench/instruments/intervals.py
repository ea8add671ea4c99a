"""Intervals of time: union, intersection, length."""

from collections.abc import Iterable

Interval = tuple[float, float]
"""Start and end."""


def merge(spans: Iterable[Interval], gap: float = 0.0) -> list[Interval]:
    """The union of spans, in order; spans at most `gap` apart become one."""
    merged: list[Interval] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1] + gap:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def overlap(a: Iterable[Interval], b: Iterable[Interval]) -> float:
    """Length of the intersection of two lists of merged spans."""
    a, b, total = list(a), list(b), 0.0
    i = j = 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def length(spans: Iterable[Interval]) -> float:
    """Total length of merged spans."""
    return sum(end - start for start, end in spans)
