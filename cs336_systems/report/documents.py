"""Blocks of Markdown documents that commands fill, so that no number in them is typed.

A block begins with a comment that holds its command and ends with another:

    <!-- cs336 report runs results/cpu/demo -->
    ...
    <!-- end -->
"""

import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

_BLOCK = re.compile(r"(<!-- cs336 report (?P<arguments>[^\n]*?) -->\n)(?P<body>.*?)(<!-- end -->)", re.S)


def fill_blocks(text: str, make: Callable[[Sequence[str]], str]) -> str:
    """The text with every block's body replaced by what `make` returns for its command's arguments."""

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}\n{make(shlex.split(match['arguments']))}\n\n{match[4]}"

    return _BLOCK.sub(fill, text)


def update_document(path: Path, make: Callable[[Sequence[str]], str]) -> bool:
    """Fill the blocks of a file in place; returns whether that changed it."""
    if not path.is_file():
        raise FileNotFoundError(f"document {path} does not exist")
    before = path.read_text()
    after = fill_blocks(before, make)
    if after != before:
        path.write_text(after)
    return after != before
