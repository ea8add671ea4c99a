"""Markdown as Typst, and that as a PDF."""

import json
import re
import textwrap
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from .render import OPTION, markdown_parser

if TYPE_CHECKING:
    from markdown_it.tree import SyntaxTreeNode

_PREAMBLE = Path(__file__).parent / "pages" / "page.typ"
_BREAK_AFTER = re.compile(r"(?<=[_/,<(:=x-])(?=\w)")
_LONG_WORD = re.compile(r"\S{17,}")
_WIDE = 6  # columns from which names of columns are broken into lines, rather than each column as wide as its name
_LEAST_LINE = 8
_WHOLE = 24  # rows at most of a table that is not divided over pages
_LABEL = re.compile(r"\w+")  # what links within a document lead to: the name of a problem
_NUMBER = re.compile(r"[-+]?\d")
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
            return _code(node.content)
        case "softbreak" | "hardbreak":
            return '#" ";'
        case "fence" | "code_block":
            return f"#raw({_string(node.content)}, block: true);\n\n"
        case "image":
            return f"#picture({_string(str(node.attrs['src']))}, {_string(node.content)});"
        case "table":
            return _table(node)
        case "paragraph" if _leads(node):
            return f"#block(sticky: true)[{''.join(map(_typst, node.children))}];\n\n"  # on the page of what follows
    inner = "".join(_typst(child, in_table) for child in node.children)
    match node.type:
        case "heading":
            label = f" <{name}>" if _LABEL.fullmatch(name := _plain(node)) and node.tag == "h3" else ""
            return f"#heading(level: {node.tag[1:]})[{inner}]{label}\n\n"
        case "link" if str(node.attrs["href"]).startswith("#"):
            return f"#link(label({_string(str(node.attrs['href'])[1:])}))[{inner}];"
        case "link":
            return f"#link({_string(str(node.attrs['href']))})[{inner}];"
        case "em" | "strong" | "list_item":
            return f"#{_CALLS[node.type]}[{inner}];"
        case "paragraph" | "bullet_list":
            return f"{inner}\n\n"
        case "root" | "inline":
            return inner
    raise ValueError(f"Markdown holds a {node.type}, which is not typeset")


def _leads(node: "SyntaxTreeNode") -> bool:
    """Whether a paragraph belongs to what follows it: a question below its heading, or the line above a table."""
    before, after = node.previous_sibling, node.next_sibling
    return (after is not None and after.type == "table") or (before is not None and before.type == "heading")


def _code(text: str) -> str:
    """Code in a line of text; options in it are not broken at their hyphens."""
    parts, end = [], 0
    for option in OPTION.finditer(text):
        parts += [f"#raw({_string(_breakable(text[end : option.start()]))});", f"#box(raw({_string(option[0])}));"]
        end = option.end()
    return "".join([*parts, f"#raw({_string(_breakable(text[end:]))});"])


def _table(node: "SyntaxTreeNode") -> str:
    head, *bodies = node.children
    header = head.children[0].children
    body = [row.children for each in bodies for row in each.children]
    texts = [[_plain(row[at]) for row in body] for at in range(len(header))]
    aligned = (
        "right" if "right" in str(cell.attrs.get("style", "")) and any(map(_NUMBER.match, column)) else "left"
        for cell, column in zip(header, texts, strict=True)
    )

    def cells(row: Iterable["SyntaxTreeNode"]) -> str:
        return ", ".join(f"[{''.join(_typst(child, True) for child in cell.children)}]" for cell in row)

    names = cells(header)
    if len(header) > _WIDE:
        widths = [max(map(len, column), default=0) for column in texts]
        names = ", ".join(map(_in_lines, map(_plain, header), widths))
    rows = "".join(f"  {cells(row)},\n" for row in body)
    columns = f"whole: {str(len(body) <= _WHOLE).lower()}, columns: {len(header)}, align: ({', '.join(aligned)},)"
    return f"#rows({columns},\n  table.header({names}),\n{rows});\n\n"


def _plain(node: "SyntaxTreeNode") -> str:
    """The text of a cell without its markup."""
    return "".join(map(_plain, node.children)) if node.children else node.content


def _in_lines(name: str, width: int) -> str:
    """The name of a column in lines that are no wider than what stands below it, where its words allow that."""
    lines = textwrap.wrap(name, max(width, _LEAST_LINE), break_long_words=False, break_on_hyphens=False)
    return f"[{'#linebreak();'.join(f'#{_string(line)};' for line in lines)}]"


def _breakable(text: str) -> str:
    """Text whose long words may be broken where their parts end."""
    return _LONG_WORD.sub(lambda word: _BREAK_AFTER.sub(chr(0x200B), word[0]), text)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
