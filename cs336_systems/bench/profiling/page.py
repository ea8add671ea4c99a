"""Zoomable pages, each a single HTML file that needs only a browser; and the page of a memory history."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from ...machine.files import write_whole
from .history import History
from .timeline import COLORS, code_lines, facts, size_text

_FILES = Path(__file__).parent / "page"
_DETAIL = 5000


def write_page(history: History, path: Path, title: str, note: str) -> None:
    """Write the page. At first it draws the _DETAIL largest allocations one by one; its slider changes this."""
    write_whole(path, fill_page("page.html", ("stack.js", "page.js"), title, note, page_data(history)))


def fill_page(template: str, scripts: Sequence[str], title: str, note: str, data: Any) -> str:
    """A page from files in the folder `page` that contains its data and draws it, without any network."""
    pages = jinja2.Environment(loader=jinja2.FileSystemLoader(_FILES), autoescape=True)
    pages.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    style, *parts = ((_FILES / name).read_text() for name in ("page.css", "view.js", *scripts))
    return pages.get_template(template).render(title=title, note=note, data=data, style=style, script="".join(parts))


def page_data(history: History) -> dict[str, Any]:
    """The data of the page: columns of numbers, one text per kind of allocation, and its other plain texts."""
    category = {name: i for i, name in enumerate(history.categories)}
    texts: dict[str, int] = {}
    labels = []
    lines = functools.lru_cache(maxsize=None)(code_lines)
    for a in history.allocations:
        text = "\n".join(filter(None, (a.name, *lines(a.frames))))
        labels.append(texts.setdefault(text, len(texts)))
    found = facts(history)
    return {
        "categories": [{"name": name, "color": COLORS[name]} for name in history.categories],
        "phases": history.phases,
        "boundaries": history.boundaries,
        "times_us": history.times_us,
        "sizes": [a.size for a in history.allocations],
        "starts": [a.start for a in history.allocations],
        "ends": [a.end for a in history.allocations],
        "kinds": [category[a.category] for a in history.allocations],
        "labels": labels,
        "texts": list(texts),
        "detail": min(_DETAIL, len(history.allocations)),
        "peak": f"peak {size_text(found['peak_bytes'])} in {found['peak_phase']} at {found['peak_ms']:.1f} ms",
        "warnings": history.warnings,
    }
