"""Markdown tables, and text from elsewhere made safe for Markdown."""

import re
from collections.abc import Iterable, Sequence

_MAX_LENGTH = 500
_ACTIVE = re.compile(r"[\\`*<>\[\]!]")


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A Markdown table. The first `left` columns are aligned left, the numbers after them right."""
    rule = [*["---"] * left, *["---:"] * (len(header) - left)]
    escaped = ([cell.replace("|", "\\|") for cell in cells] for cells in (header, rule, *rows))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in escaped)


def plain(text: str) -> str:
    """Text from elsewhere, such as an error message, as one line of Markdown without active characters."""
    line = " ".join(text.split())
    line = line if len(line) <= _MAX_LENGTH else f"{line[:_MAX_LENGTH]}..."
    return _ACTIVE.sub(r"\\\g<0>", "".join(letter if letter.isprintable() else "?" for letter in line))
