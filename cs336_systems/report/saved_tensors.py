"""The tensors that a row of the case `residuals` lists."""

from ..bench.row import Row
from .tables import markdown_table


def tensors_table(row: Row) -> str:
    """The tensors that a block saves, equal ones in one line, under a line that says what the row is of."""
    lines = [
        (t["what"], "x".join(map(str, t["shape"])), t["dtype"], str(t["count"]), f"{t['bytes'] / 2**20:.4g}")
        for t in row.metrics["tensors"]
    ]
    listed, count = sum(t["count"] for t in row.metrics["tensors"]), row.metrics["num_tensors"]
    which = f"{count} saved tensors" if listed == count else f"{listed} of {count} saved tensors, the largest"
    table = markdown_table(("saved by", "shape", "type", "count", "MiB each"), lines)
    return f"{row.config['size']} {row.variant}, context {row.config['context_length']}, {which}:\n\n{table}"
