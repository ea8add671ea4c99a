"""Values of rows and of JSON files by dotted names, in words."""

from collections.abc import Mapping
from typing import Any

from ..bench.row import Row

_REQUIRED = object()


def get(source: Row | Mapping[str, Any], name: str, default: Any = _REQUIRED) -> Any:
    """The value at a dotted name, such as "metrics.step_ms.p50"; items of a list are named by their index.

    Returns the default if there is none. Without a default, raises KeyError with the name.
    """
    value: Any = vars(source) if isinstance(source, Row) else source
    try:
        for key in name.split("."):
            value = value[int(key) if isinstance(value, list) else key]
    except (KeyError, IndexError, TypeError, ValueError):
        if default is _REQUIRED:
            raise KeyError(name) from None
        return default
    return value


def number(source: Row | Mapping[str, Any], name: str, form: str, unit: int = 1) -> str:
    """The number at a dotted name, divided by `unit` and formatted; "n/a" for None."""
    value = get(source, name)
    return "n/a" if value is None else format(value if unit == 1 else value / unit, form)


def faster(ours: float, theirs: float, other: str = "") -> str:
    """Two times compared: "1.50x faster", "1.20x slower", or "as fast" within one percent.

    other: the name of theirs, which makes it "1.50x faster than OTHER" or "as fast as OTHER".
    """
    if abs(ours / theirs - 1) < 0.01:
        return f"as fast as {other}" if other else "as fast"
    found = f"{theirs / ours:.2f}x faster" if ours < theirs else f"{ours / theirs:.2f}x slower"
    return f"{found} than {other}" if other else found
