"""Blocks of Markdown documents that commands fill, so that no number in them is typed by hand.

A block begins with a comment that holds its command and ends with another:

    <!-- cs336 report runs results/cpu/demo -->
    ...
    <!-- end -->
"""

import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from ..machine.files import write_whole

# `end` is empty if the next block, or the end of the document, comes before <!-- end -->.
_BLOCK = re.compile(
    r"(?P<begin><!-- cs336 report (?P<arguments>[^\n]*?) -->(?P<newline>\r?\n))"
    r".*?(?P<end><!-- end -->|(?=<!-- cs336 report )|\Z)",
    re.S,
)


def fill_blocks(text: str, make: Callable[[Sequence[str]], str]) -> str:
    """The text with each block's body replaced by the result of `make` for the arguments of its command.

    Raises ValueError naming the command of a block that has no end.
    """

    def fill(match: re.Match[str]) -> str:
        if not match["end"]:
            raise ValueError(f"the block of `cs336 report {match['arguments']}` has no <!-- end -->")
        body = f"\n{make(shlex.split(match['arguments']))}\n\n"
        return match["begin"] + body.replace("\n", match["newline"]) + match["end"]

    return _BLOCK.sub(fill, text)


def update_documents(paths: Sequence[Path], make: Callable[[Sequence[str]], str]) -> list[str]:
    """Fill the blocks of several files; return a line for each with the outcome.

    All files are tried. If one cannot be filled, raises ValueError with the lines of all.
    """
    lines: dict[Path, str] = {}
    failed = False
    for path in paths:
        try:
            lines[path] = f"{path}: {'made again' if update_document(path, make) else 'up to date'}"
        except (ValueError, OSError) as error:
            failed, lines[path] = True, str(error)
    if failed:
        raise ValueError("; ".join(lines.values()))
    return list(lines.values())


def update_document(path: Path, make: Callable[[Sequence[str]], str]) -> bool:
    """Fill the blocks of a file in place; return whether it changed."""
    if not path.is_file():
        raise FileNotFoundError(f"document {path} does not exist")
    before = path.read_bytes()  # as bytes, to keep the line endings
    try:
        after = fill_blocks(before.decode(), make).encode()
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"document {path}: {error}") from error
    if after != before:
        write_whole(path, after)
    return after != before
