"""The PDF and the HTML page of a write-up."""

import json
import re
from html.parser import HTMLParser
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from cs336_systems.assignment import build, typeset
from cs336_systems.assignment.build import HTML, MARKDOWN, PDF, SECTIONS, WriteUp
from cs336_systems.assignment.html import html_page
from cs336_systems.assignment.pictures import Pictures
from cs336_systems.assignment.typeset import NO_TYPST, to_typst, write_pdf

from .conftest import BYLINE, Made

TEXT = """## A *section* #strong[x] & $y$

Text with `#c["d"]`, $x$, **bold**, @label and <tag>.

> A note.

- an item

| kind | n | mixed |
| --- | ---: | ---: |
| i\\|j | 1 | - |
| *k* | 2.5 | text |

: The caption of `#it`.

![A picture of <b>](picture.svg)
"""
SVG = """<?xml version="1.0"?>
<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="9" height="9">
<metadata><title>lost</title></metadata><style>*{fill: red}</style>
<clipPath id="a"><rect id="r" width="9" height="9" style="fill: #ffffff; stroke: #000000"/></clipPath>
<g clip-path="url(#a)"><use xlink:href="#r"/></g></svg>
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "picture.svg").write_text(SVG)
    return tmp_path


def elements(source: str, selector: str, folder: Path) -> list[dict[str, Any]]:
    """The elements of a typeset document."""
    typst = pytest.importorskip("typst")
    return json.loads(typst.query(source.encode(), selector, root=str(folder)))


def words(content: Any) -> str:
    """The text of a typeset element."""
    if isinstance(content, list):
        return "".join(map(words, content))
    if not isinstance(content, dict):
        return ""
    if content.get("func") == "space":
        return " "
    return content["text"] if isinstance(content.get("text"), str) else words([*content.values()])


def test_the_pdf_has_every_heading_table_and_figure(made: Made) -> None:
    source = to_typst(build.TITLE, *BYLINE, made.document.body())
    headings = [words(each["body"]) for each in elements(source, "heading", made.folder)]
    assert headings == [name for section, problems in SECTIONS.items() for name in (section, *problems)]
    figures = elements(source, "figure", made.folder)
    labels = [words(each["supplement"]) for each in figures]
    text = made.document.body()
    for kind, count in (("Figure", text.count("](pictures/")), ("Table", len(re.findall(r"\|\n\n: ", text)))):
        assert [each for each in labels if kind in each] == [f"{kind} {i + 1}" for i in range(count)] != []
    assert all(words(each["caption"]["body"]) for each in figures)
    _, warnings = pytest.importorskip("typst").compile_with_warnings(source.encode(), root=str(made.folder))
    assert not warnings  # a layout that does not converge has wrong numbers of pages


def test_the_pdf_of_the_committed_rows_is_short(made: Made) -> None:
    pytest.importorskip("typst")
    content = (made.folder / PDF).read_bytes()
    assert content.startswith(b"%PDF-")
    assert 15 <= len(re.findall(rb"/Type ?/Page\b", content)) <= 20


def test_text_in_print_is_no_markup(folder: Path) -> None:
    source = to_typst('T" #x', "#a", "*b*", TEXT)
    (heading,) = elements(source, "heading", folder)
    assert words(heading["body"]) == "A section #strong[x] & $y$"
    assert [each["text"] for each in elements(source, "raw", folder)][:1] == ['#c["d"]']
    table, picture = elements(source, "figure", folder)
    assert words(table["caption"]["body"]) == "The caption of #it."
    assert words(picture["caption"]["body"]) == "A picture of <b>"
    write_pdf(source, folder, folder / "out.pdf")
    assert (folder / "out.pdf").read_bytes().startswith(b"%PDF-")


def test_only_columns_of_numbers_are_aligned_to_the_right() -> None:
    assert "align: (left, right, left,)" in to_typst("T", "", "", TEXT)
    assert "align: (left, left,)" in to_typst("T", "", "", "| a | b |\n| --- | --- |\n| 1 | 2 |\n")


@pytest.mark.parametrize("text, kind", [("1. a\n", "ordered_list"), ("***\n", "hr")])
def test_markdown_that_cannot_be_typeset_is_named(text: str, kind: str) -> None:
    with pytest.raises(ValueError, match=kind):
        to_typst("T", "", "", text)


def test_the_appendix_is_in_the_pdf_if_asked_for(folder: Path) -> None:
    pytest.importorskip("typst")
    document = WriteUp("Summary.", {}, [("ddp: rows", "| a |\n| --- |\n| 1 |\n")] * 60, [], [])
    sizes = []
    for full in (False, True):
        assert build.write(document, folder, full=full) == [folder / MARKDOWN, folder / HTML, folder / PDF]
        sizes.append(len(re.findall(rb"/Type ?/Page\b", (folder / PDF).read_bytes())))
    assert sizes[0] == 1 < sizes[1]
    assert "### ddp: rows" in (folder / MARKDOWN).read_text()


def test_without_typst_the_rest_is_written_and_the_reason_returned(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(typeset, "import_module", missing)
    document = WriteUp("Summary.", {}, [], [], [])
    assert build.write(document, folder) == [folder / MARKDOWN, folder / HTML, NO_TYPST]
    assert (folder / HTML).exists()
    assert not (folder / PDF).exists()


class Page(HTMLParser):
    """The elements of a page, all of which must be closed in turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.folded = 0
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.folded += tag == "table" and "details" in self.open
        if tag not in ("meta", "img", "br", "wbr", "hr", "link", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def values(self, name: str, *tags: str) -> list[str]:
        return [str(attrs[name]) for tag, attrs in self.found if name in attrs and (not tags or tag in tags)]


def test_the_page_of_the_committed_rows_is_whole(made: Made) -> None:
    text = (made.folder / HTML).read_text()
    page = Page(text)
    pictures = [attrs for tag, attrs in page.found if tag == "svg"]
    assert len(pictures) == made.document.body().count("](pictures/") >= 6
    assert all(str(each["aria-label"]).startswith("Figure ") for each in pictures)
    told = re.findall(r"</title>\s*<(\w+) ", "".join(re.findall(r"<svg.*?</svg>", text, flags=re.S)))
    assert {*told} == {"path"}
    assert len(told) > 2 * len(pictures)
    assert "svg title ~ path { pointer-events: all; }" in text  # shapes without fill get no pointer otherwise
    ids = page.values("id")
    assert len(set(ids)) == len(ids)
    assert {each[1:] for each in page.values("xlink:href")} <= {*ids}
    assert not [tag for tag, _ in page.found if tag in ("link", "img", "iframe", "object", "embed")]
    assert not re.search(r"@import|url\(|https?://", re.sub(r"<main .*</main>", "", text, flags=re.S))
    headings = page.values("id", "h2", "h3")
    assert [*headings] == [*(name for section, names in SECTIONS.items() for name in (section, *names)), "rows"]
    links = [link for link in page.values("href", "a") if link.startswith("#")]
    assert links == ["#text", *(f"#{name}" for name in headings)]
    assert page.folded >= len(made.document.appendix)
    assert [tag for tag, _ in page.found].count("details") == 1 + len(made.document.appendix) > 20


def test_a_picture_of_the_page_has_ids_of_its_own_and_the_colours_of_the_page(folder: Path) -> None:
    (folder / "other.svg").write_text(SVG)
    text = html_page("T", "", "![one](picture.svg)\n\n![two](other.svg)\n", [], folder)
    page = Page(text)
    assert page.values("id", "rect", "clippath") == ["picture-a", "picture-r", "other-a", "other-r"]
    assert page.values("xlink:href") == ["#picture-r", "#other-r"]
    assert page.values("clip-path") == ["url(#picture-a)", "url(#other-a)"]
    assert page.values("style") == ["fill: none; stroke: currentColor"] * 2
    assert "lost" not in text
    assert "fill: red" not in text


def test_every_mark_is_told_with_its_value_even_where_marks_overlap(tmp_path: Path) -> None:
    rows = [
        {"kind": kind, "n": n, "ms": ms}
        for kind, n, ms in (("a & b", 4096, 1.2345), ("c", 4096, 1.2345), ("c", 8192, 2000))
    ]
    pictures = Pictures(tmp_path)
    pictures.problem = "p"
    pictures.lines(rows, itemgetter("n"), itemgetter("ms"), "", by="kind", xlabel="tokens", ylabel="ms", log="x")
    pictures.stacks([("whole", {"one_part": 3 * 2**30, "thin": 2**20})], "", "GiB", 2**30)
    files = [file.read_text() for file in sorted(tmp_path.rglob("*.svg"))]
    told = [[each.split("\n") for each in re.findall(r"<g><title>(.*?)</title>", text, flags=re.S)] for text in files]
    assert told == [
        [["tokens: 4,096", "ms:", "a &amp; b: 1.23", "c: 1.23"], ["tokens: 8,192", "ms:", "c: 2,000"]],
        [["whole", "GiB:", "one part: 3", "thin: 0.000977"]],
    ]
    # The pointer finds a column wherever it is: their edges meet, halfway between the points on the picture.
    columns = [
        re.findall(r"[ML] (\S+) ", path) for path in re.findall(r'</title>\s*<path d="(.*?)"', files[0], flags=re.S)
    ]
    edges = [(min(map(float, column)), max(map(float, column))) for column in columns]
    assert edges[0][1] == edges[1][0]


def test_contents_link_to_headings_with_special_characters(folder: Path) -> None:
    page = Page(html_page("T", "", '## R&D "a" <b>\n\ntext\n', [], folder))
    assert page.values("href")[1:] == ["#" + page.values("id", "h2")[0]] == ['#R&D "a" <b>']


def test_text_on_the_page_is_no_markup(folder: Path) -> None:
    text = html_page("<T>", "<i>by</i> & me", f"{TEXT}\n<script>alert(1)</script> {{{{ title }}}}\n", [], folder)
    assert "<title>&lt;T&gt;</title>" in text
    assert "&lt;i&gt;by&lt;/i&gt; &amp; me" in text
    assert "&lt;script&gt;alert(1)" in text
    assert "{{ title }}" in text
    assert not {"i", "b", "tag"} & {tag for tag, _ in Page(text).found}


def test_tables_and_figures_are_numbered_and_full_tables_folded(folder: Path) -> None:
    again = TEXT.replace("A *section*", "Another")
    text = html_page("T", "", f"{TEXT}\n{again}", [("All <rows>", "| a |\n| --- |\n| 1 |\n")], folder)
    captions = re.findall(r'class="caption">(.*?)<', text)
    assert [each[:9] for each in captions] == ["Table 1. ", "Figure 1.", "Table 2. ", "Figure 2."]
    assert Page(text).folded == 1
    assert "<summary>All &lt;rows&gt;</summary>" in text
