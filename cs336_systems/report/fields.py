"""Nested JSON read by dotted names, with errors that name the source and the field."""

import re
from collections.abc import Mapping
from typing import Any

from ..bench.row import Row


class Fields:
    """A JSON object whose values are read by dotted names; items of a list are named by their index.

    Raises ValueError naming the source and the field if the field is missing or is not a number.
    """

    def __init__(self, source: str, content: Mapping[str, Any]) -> None:
        self.source, self.content = source, content

    def get(self, name: str) -> Any:
        value: Any = self.content
        for key in name.split("."):
            if isinstance(value, list) and re.fullmatch(r"-?\d+", key) and -len(value) <= int(key) < len(value):
                value = value[int(key)]
            elif isinstance(value, Mapping) and key in value:
                value = value[key]
            else:
                raise ValueError(f"{self.source} has no {name}")
        return value

    def has(self, name: str) -> bool:
        """Whether the field exists and is not None."""
        try:
            return self.get(name) is not None
        except ValueError:
            return False

    def value(self, name: str) -> float:
        """A number."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{self.source} has {name} {value!r}: it must be a number")
        return value

    def number(self, name: str, form: str, unit: int = 1) -> str:
        """A number, divided by `unit` and formatted; "n/a" for None."""
        if self.get(name) is None:
            return "n/a"
        value = self.value(name)
        if form.endswith("d") and not isinstance(value, int):
            raise ValueError(f"{self.source} has {name} {value!r}: it must be a whole number")
        return format(value if unit == 1 else value / unit, form)


def row_fields(row: Row) -> Fields:
    """A row's `config`, `metrics` and `env` by dotted names."""
    content = {"config": row.config, "metrics": row.metrics, "env": row.env}
    return Fields(f"a row of case {row.case!r}, variant {row.variant!r}", content)
