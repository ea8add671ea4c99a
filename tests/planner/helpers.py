"""Committed rows, for tests of the planner."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

RESULTS = Path(__file__).parents[2] / "results/h200"


def rows(*names: str) -> list[Any]:
    """The rows of files below results/h200; other lines, such as the log of a run, are left out."""
    lines = [line for name in names for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]
    return [SimpleNamespace(**row) for row in map(json.loads, lines) if "case" in row]
