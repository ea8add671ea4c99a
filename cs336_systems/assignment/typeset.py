"""Markdown as Typst, and that as a PDF."""

import json
import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from .numbered import numbered

if TYPE_CHECKING:
    from markdown_it.tree import SyntaxTreeNode

NO_TYPST = "writeup.pdf is left out: the package typst is not installed (pip install typst)"
_PREAMBLE = Path(__file__).parent / "pages" / "page.typ"
_NUMBER = re.compile(r"[-+]?\d")
_CALLS = {"em": "emph", "strong": "strong", "list_item": "list.item"}


def to_typst(title: str, author: str, date: str, text: str) -> str:
    """A Markdown document in Typst. Its text stands in string literals, so that nothing in it is markup."""
    from markdown_it.tree import SyntaxTreeNode

    tree = SyntaxTreeNode(numbered(text))
    head = f"#show: paper.with(title: {_string(title)}, author: {_string(author)}, date: {_string(date)})"
    nodes = [*tree.children]
    first = next((i for i, node in enumerate(nodes) if node.type == "heading"), len(nodes))
    parts = [*map(_typst, nodes[:first]), "#contents()\n\n", *map(_typst, nodes[first:])]
    return f"{_PREAMBLE.read_text('utf-8')}\n{head}\n{''.join(parts)}"


def write_pdf(source: str, folder: Path, path: Path) -> None:
    """Typeset a document whose pictures are in `folder`. Raises ModuleNotFoundError if typst is not installed."""
    import_module("typst").compile(source.encode(), output=str(path), root=str(folder))


def _typst(node: "SyntaxTreeNode") -> str:
    match node.type:
        case "text":
            return f"#{_string(node.content)};"
        case "code_inline":
            return f"#raw({_string(node.content)});"
        case "softbreak" | "hardbreak":
            return '#" ";'
        case "fence" | "code_block":
            return f"#raw({_string(node.content)}, block: true);\n\n"
        case "image":
            texts = map(_string, (str(node.attrs["src"]), node.meta["label"], node.content))
            return f"#picture({', '.join(texts)});"
        case "table":
            return _table(node)
        case "paragraph" if node.meta.get("label"):
            return ""  # set with its table
    inner = "".join(map(_typst, node.children))
    match node.type:
        case "heading":
            return f"#heading(level: {int(node.tag[1:]) - 1})[{inner}]\n\n"
        case "link":
            return f"#link({_string(str(node.attrs['href']))})[{inner}];"
        case "em" | "strong" | "list_item":
            return f"#{_CALLS[node.type]}[{inner}];"
        case "blockquote":
            return f"#note[{inner}]\n\n"
        # A question, or a sentence that introduces what follows.
        case "paragraph" if getattr(node.previous_sibling, "type", "") == "heading" or _plain(node).endswith(":"):
            return f"#kept[{inner}]\n\n"
        case "paragraph" | "bullet_list":
            return f"{inner}\n\n"
        case "inline":
            return inner
    raise ValueError(f"the Markdown of the write-up has a {node.type}, which cannot be typeset")


def _table(node: "SyntaxTreeNode") -> str:
    after = node.next_sibling
    label = after.meta.get("label", "") if after else ""
    caption = _plain(after) if after and label else ""
    head, *bodies = node.children
    header = head.children[0].children
    body = [row.children for each in bodies for row in each.children]
    columns = [[_plain(row[at]) for row in body] for at in range(len(header))]
    right = ["right" in str(cell.attrs.get("style")) for cell in header]
    aligned = [
        "right" if any(map(_NUMBER.match, c)) and is_right else "left"
        for c, is_right in zip(columns, right, strict=True)
    ]
    lines = [", ".join(f"[{''.join(map(_typst, cell.children))}]" for cell in row) for row in (header, *body)]
    rows = "".join(f"  {line},\n" for line in lines[1:])
    settings = f"columns: {len(header)}, align: ({', '.join(aligned)},)"
    return f"#rows({_string(label)}, {_string(caption)}, {settings},\n  table.header({lines[0]}),\n{rows});\n\n"


def _plain(node: "SyntaxTreeNode") -> str:
    """The text of a node without its markup."""
    return "".join(map(_plain, node.children)) if node.children else " " if "break" in node.type else node.content


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
