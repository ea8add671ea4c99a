"""The row: one JSON object a measurement, the only place that tables, plots and docs take numbers from."""

import json
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from ..hardware import environment


@dataclass(frozen=True, kw_only=True)
class Row:
    """A measurement: what was run (`case`, `variant`, `config`), how it ended, what was measured, on what machine."""

    case: str
    variant: str
    config: dict[str, Any]
    status: Literal["ok", "oom", "error"] = "ok"
    metrics: dict[str, Any] = field(default_factory=dict)
    env: dict[str, Any] = field(default_factory=lambda: {**environment(), "date": f"{datetime.now(UTC):%Y-%m-%d}"})
    error: str | None = None


def append_row(path: Path, row: Row) -> None:
    """Append a row to a JSON Lines file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(asdict(row)) + "\n")


def read_rows(path: Path) -> list[Row]:
    """The rows of a JSON Lines file."""
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()]
