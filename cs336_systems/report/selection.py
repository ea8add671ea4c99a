"""Rows grouped and compared by the fields of their configuration, and those fields in words."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..bench.row import Row
from ..planner.rows import is_of_cpu
from .markdown import plain

MACHINE = "machine"
"""Stands for the machine among the names of fields."""
OUTCOMES = {"oom": "out of memory", "error": "failed"}
_SWITCHES = {  # in a legend: on, off
    "compile": ("compiled", "eager"),
    "is_causal": ("causal", "not causal"),
    "cuda_graph": ("CUDA graph", "no CUDA graph"),
}


def machine(row: Row) -> str:
    """The machine that measured a row, in words."""
    return f"CPU, {row.env.get('cpu_threads')} threads" if is_of_cpu(row) else str(row.env["gpu"])


def value_of(row: Row, name: str) -> Any:
    """A field of a row's configuration, or its machine."""
    return machine(row) if name == MACHINE else row.config.get(name)


def differ(rows: Sequence[Row], name: str) -> bool:
    """Whether a field, or MACHINE, has more than one value among rows."""
    return len({str(value_of(row, name)) for row in rows}) > 1


def group_key(row: Row, names: Sequence[str]) -> str:
    """A row's machine and values of some fields, to compare it with other rows."""
    return str([value_of(row, name) for name in (MACHINE, *names)])


def grouped(rows: Iterable[Row], names: Sequence[str]) -> list[list[Row]]:
    """Rows grouped by machine and by the values of some fields, in order of first appearance."""
    return grouped_by(rows, lambda row: group_key(row, names))


def grouped_by(rows: Iterable[Row], key: Callable[[Row], Any]) -> list[list[Row]]:
    """Rows grouped by a key, in order of first appearance."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.values())


def latest(rows: Iterable[Row], keys: Sequence[str]) -> list[Row]:
    """The last row for each variant, machine and value of the keys, in order of first appearance.

    Only the keys count, because a failed row records less of its configuration than one that ran, and older rows lack
    newer fields.
    """
    last: dict[str, Row] = {}
    for row in rows:
        last[f"{row.variant} {group_key(row, keys)}"] = row
    return list(last.values())


def common_facts(rows: Sequence[Row], keys: Sequence[str]) -> tuple[str, list[str]]:
    """A line with the machine and the fields that all rows share, and the names of the fields that differ."""
    differing = [name for name in (MACHINE, *keys) if differ(rows, name)]
    shared = {name: value_of(rows[0], name) for name in keys if name not in differing}
    facts = [f"{name} {plain(show(value, name))}" for name, value in shared.items() if value is not None]
    return "; ".join([*([] if MACHINE in differing else [machine(rows[0])]), *facts]), differing


def show(value: Any, name: str = "") -> str:
    """A configuration's value in words; `name` is its field, which may have a unit."""
    if name == "bytes" and isinstance(value, int):
        return f"{value / 1e6:g} MB"  # always MB, so that a column of sizes can be sorted
    if isinstance(value, list | tuple):
        return "x".join(map(str, value))
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)  # short only if that loses nothing
    return {True: "yes", False: "no", None: "-"}[value] if isinstance(value, bool | None) else str(value)


def field_in_words(name: str) -> str:
    """A field's name as a column header or an axis label."""
    return "bucket size (MiB)" if name == "bucket_size_mb" else name.replace("_", " ")


def label(name: str, row: Row) -> str:
    """A field of a row in a legend: a number with the field's name, a switch as on or off, other values alone."""
    value = value_of(row, name)
    if isinstance(value, bool):
        return _SWITCHES.get(name, (name, f"no {name}"))[not value]
    return f"{name.replace('_', ' ')} {show(value)}" if isinstance(value, int | float) else show(value)
