"""Markdown as a page that needs nothing but a browser."""

import base64
import html
import re
from pathlib import Path
from typing import Any

from ...bench.profiling.page import fill_template, framed

OPTION = re.compile(r"(?<= )--\w[\w-]*")
"""An option in a command, which is to stay in one line."""
_FILES = Path(__file__).parent / "pages"


def markdown_parser() -> Any:
    """The parser of what documents are written in: CommonMark and tables, without HTML."""
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark", {"html": False}).enable("table")


def html_page(title: str, text: str, folder: Path) -> str:
    """The page of a Markdown document; pictures, named by their path in `folder`, are in it."""
    parser = markdown_parser()
    tokens = parser.parse(text)
    contents = []
    for i, token in enumerate(tokens):
        if token.type == "heading_open" and token.tag == "h3":
            name = html.escape(tokens[i + 1].content)
            token.attrSet("id", name)
            contents.append(f'<li><a href="#{name}">{name}</a></li>')
        for child in token.children or ():
            if child.type == "image":
                child.attrSet("src", _embedded(folder, str(child.attrs["src"])))
    body = parser.renderer.render(tokens, parser.options, {})
    content = {
        "CONTENTS": "\n".join(contents),
        "BODY": _scrolled(body),
    }
    style, script = ((_FILES / f"page.{kind}").read_text("utf-8") for kind in ("css", "js"))
    return framed(title, fill_template((_FILES / "page.html").read_text("utf-8"), content), style, script)


def _scrolled(body: str) -> str:
    """What may be wider than a phone, scrolled by itself: tables, and pictures, which stand in paragraphs."""
    body = re.sub(r"<code>([^<]*)</code>", lambda code: OPTION.sub(r"<span>\g<0></span>", code[0]), body)
    body = body.replace("<table>", '<div class="wide" tabindex="0"><table>').replace("</table>", "</table></div>")
    return re.sub(r"<p>(<img [^>]*>)</p>", r'<p class="picture" tabindex="0">\1</p>', body)


def _embedded(folder: Path, name: str) -> str:
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):  # whoever wrote a row is not to choose what of this machine is shown
        raise ValueError(f"a picture is {name!r}: it must be a file in {folder}")
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
