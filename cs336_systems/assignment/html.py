"""The write-up as one HTML file: contents beside the text, tables that sort, light and dark, nothing to load."""

import html
import re
from pathlib import Path
from typing import Any

import jinja2

from .numbered import numbered

_FILES = Path(__file__).parent / "pages"


def html_page(title: str, byline: str, text: str, tables: list[tuple[str, str]], folder: Path) -> str:
    """The page of a Markdown document whose pictures are in `folder`.

    tables: title and Markdown of each full table, which the page keeps folded.
    """
    body, contents = _rendered(text, folder)
    folded = [(html.escape(name), _rendered(table, folder)[0]) for name, table in tables]
    style, script, page = ((_FILES / f"page.{kind}").read_text("utf-8") for kind in ("css", "js", "html"))
    return jinja2.Environment(autoescape=False).from_string(page).render(
        title=html.escape(title), byline=html.escape(byline), body=body, contents=contents, tables=folded,
        style=style, script=script,
    )  # fmt: skip


def _rendered(text: str, folder: Path) -> tuple[str, list[tuple[str, str, str]]]:
    """The HTML of Markdown, and each heading's level, name, and name with places where a line may break."""
    from markdown_it import MarkdownIt

    parser, tokens = MarkdownIt("commonmark"), numbered(text)
    contents: list[tuple[str, str, str]] = []
    for i, token in enumerate(tokens):
        if token.type == "heading_open":
            name = tokens[i + 1].content
            token.attrSet("id", name)  # which is escaped as it is rendered
            contents.append((token.tag, html.escape(name), html.escape(name).replace("_", "_<wbr>")))
        for child in token.children or ():
            if child.type == "image":
                child.content = f"{child.meta['label']}. {child.content}"
                child.attrSet("src", str(folder / str(child.attrs["src"])))
        if label := token.meta.get("label"):
            token.attrSet("class", "caption")
            first: Any = (tokens[i + 1].children or [])[0]
            first.content = f"{label}. {first.content}"
    parser.renderer.rules["image"] = _picture  # type: ignore[attr-defined]
    parser.renderer.rules["table_open"] = lambda *_: '<div class="wide"><table>'  # type: ignore[attr-defined]
    parser.renderer.rules["table_close"] = lambda *_: "</table></div>"  # type: ignore[attr-defined]
    return parser.renderer.render(tokens, parser.options, {}), contents


def _picture(tokens: Any, index: int, *_: Any) -> str:
    """An SVG as a part of the page, with its caption: its ids are its own, black and white those of the page."""
    path, caption = Path(tokens[index].attrs["src"]), html.escape(tokens[index].content)
    drawing = path.read_text("utf-8").partition("<svg")[2]
    drawing = re.sub(r"<(metadata|style).*?</\1>", "", drawing, flags=re.S)
    drawing = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{path.stem}-", drawing)
    drawing = drawing.replace("#000000", "currentColor").replace("#ffffff", "none")
    return f'<svg role="img" aria-label="{caption}"{drawing}<span class="caption">{caption}</span>'
