"""The Markdown of the write-up as tokens, with a number for each figure and table."""

from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markdown_it.token import Token


def numbered(text: str) -> "list[Token]":
    """The tokens of Markdown, with labels as `meta["label"]`: "Figure 1" at a picture, "Table 1" at a table's caption.

    A caption is a paragraph after a table that begins with ": ", which is taken away.
    """
    from markdown_it import MarkdownIt

    tokens = MarkdownIt("commonmark", {"html": False}).enable("table").parse(text)
    figures, tables = count(1), count(1)
    for i, token in enumerate(tokens):
        for child in token.children or ():
            if child.type == "image":
                child.meta["label"] = f"Figure {next(figures)}"
        if token.children and token.content.startswith(": ") and tokens[i - 2].type == "table_close":
            tokens[i - 1].meta["label"] = f"Table {next(tables)}"
            token.children[0].content = token.children[0].content[2:]
    return tokens
