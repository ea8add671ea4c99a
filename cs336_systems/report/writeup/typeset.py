"""Markdown as Typst, and that as a PDF."""

import json
import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from .render import markdown_parser

if TYPE_CHECKING:
    from markdown_it.tree import SyntaxTreeNode

_PREAMBLE = Path(__file__).parent / "pages" / "page.typ"
_BREAK_AFTER = re.compile(r"(?<=[_/,<(:=x-])(?=\w)")
_LONG_WORD = re.compile(r"\S{17,}")
_TEXT_SIZES = ((6, 8.5), (8, 7.5), (11, 6.5), (13, 6.0), (10**9, 5.2))  # columns at most, and points of a table's text
_CALLS = {"em": "emph", "strong": "strong", "list_item": "list.item"}


def to_typst(title: str, text: str) -> str:
    """A Markdown document in Typst. Its text stands in string literals, so that nothing in it is markup."""
    from markdown_it.tree import SyntaxTreeNode

    tree = SyntaxTreeNode(markdown_parser().parse(text))
    return f"#set document(title: {_string(title)}, date: none)\n{_PREAMBLE.read_text('utf-8')}\n{_typst(tree)}"


def write_pdf(source: str, folder: Path, path: Path) -> None:
    """Typeset a document whose pictures are in `folder`. Raises ModuleNotFoundError where typst is not installed."""
    import_module("typst").compile(source.encode(), output=str(path), root=str(folder))


def _typst(node: "SyntaxTreeNode", in_table: bool = False) -> str:
    match node.type:
        case "text":
            return f"#{_string(_breakable(node.content) if in_table else node.content)};"
        case "code_inline":
            return f"#raw({_string(_breakable(node.content))});"
        case "softbreak" | "hardbreak":
            return '#" ";'
        case "fence" | "code_block":
            return f"#raw({_string(node.content)}, block: true);\n\n"
        case "image":
            return f"#image({_string(str(node.attrs['src']))}, width: 88%, alt: {_string(node.content)});"
        case "table":
            return _table(node)
    inner = "".join(_typst(child, in_table) for child in node.children)
    match node.type:
        case "heading":
            return f"#heading(level: {node.tag[1:]})[{inner}];\n\n"
        case "link":
            return f"#link({_string(str(node.attrs['href']))})[{inner}];"
        case "em" | "strong" | "list_item":
            return f"#{_CALLS[node.type]}[{inner}];"
        case "paragraph" | "bullet_list":
            return f"{inner}\n\n"
        case "root" | "inline":
            return inner
    raise ValueError(f"Markdown holds a {node.type}, which is not typeset")


def _table(node: "SyntaxTreeNode") -> str:
    head, *bodies = node.children
    header = head.children[0].children
    aligned = ("right" if "right" in str(cell.attrs.get("style", "")) else "left" for cell in header)
    size = next(points for most, points in _TEXT_SIZES if len(header) <= most)

    def cells(row: "SyntaxTreeNode") -> str:
        return ", ".join(f"[{''.join(_typst(child, True) for child in cell.children)}]" for cell in row.children)

    rows = "".join(f"  {cells(row)},\n" for body in bodies for row in body.children)
    columns = f"columns: {len(header)}, align: ({', '.join(aligned)},)"
    return f"#rows(size: {size}pt, {columns},\n  table.header({cells(head.children[0])}),\n{rows});\n\n"


def _breakable(text: str) -> str:
    """Text whose long words may be broken where their parts end."""
    return _LONG_WORD.sub(lambda word: _BREAK_AFTER.sub(chr(0x200B), word[0]), text)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
