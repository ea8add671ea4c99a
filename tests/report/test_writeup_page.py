"""The page of a write-up in a browser: sorted tables, and what is wider than a phone."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from cs336_systems.report.markdown import markdown_table
from cs336_systems.report.writeup.render import html_page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-default-apps"),
    *("--window-size=1200,900", "--virtual-time-budget=10000", "--dump-dom"),
)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
PHONE = 390
TABLE = markdown_table(
    ["size", "step (ms)", "added", "kind"],
    [["small", "1,000.5", "-", "b"], ["xl", "9.5", "+5%", "a"], ["2.7B", "out of memory", "-3%", "b"],
     ["small", "20", "+10%", "a"]],
)  # fmt: skip


def seen(text: str, script: str, folder: Path, width: int = 1000) -> Any:
    """What a script of a page says, which is shown in a frame of some width: a window has a least one."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2))
    figure.savefig(folder / "wide.png")
    page = html_page("T", text, folder)
    said = f"<script>parent.postMessage(JSON.stringify((() => {{ {script} }})()), '*')</script></body>"
    (folder / "page.html").write_text(page.replace("</body>", said))
    frame = f'<iframe width={width} height=800 style="border: 0" src="page.html"></iframe>'
    listening = "<script>addEventListener('message', (event) => { document.title = event.data; })</script>"
    (folder / "frame.html").write_text(f"<title>T</title>{listening}{frame}")
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={folder / 'browser'}", (folder / "frame.html").as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r"<title>(.*?)</title>", dom, re.S)
    assert found
    return json.loads(unescape(found[1]))


def test_a_picture_is_of_the_folder_of_the_document(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(b"secret")
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match=r"a picture is '\.\./secret\.png': it must be a file in "):
        html_page("title", "![x](../secret.png)", tmp_path / "out")


@needs_browser
def test_a_click_sorts_numbers_by_size_names_as_they_stood_and_what_is_none_last(tmp_path: Path) -> None:
    script = """
        const table = document.querySelector("table");
        const column = (at) => [...table.tBodies[0].rows].map((row) => row.cells[at].textContent);
        const click = (at) => { table.tHead.querySelectorAll("button")[at].click(); return column(at).join(" ; "); };
        return [0, 1, 1, 2, 2, 3, 0].map(click);
    """
    sizes, up, down, *added, kinds, again = seen(f"### a\n\n{TABLE}\n", script, tmp_path)
    assert sizes == again == "small ; small ; xl ; 2.7B"
    assert up == "9.5 ; 20 ; 1,000.5 ; out of memory"
    assert down == "1,000.5 ; 20 ; 9.5 ; out of memory"
    assert added == ["-3% ; +5% ; +10% ; -", "+10% ; +5% ; -3% ; -"]
    assert kinds == "b ; b ; a ; a"


@needs_browser
def test_on_a_phone_wide_tables_and_pictures_are_scrolled_by_themselves(tmp_path: Path) -> None:
    wide = markdown_table([f"a column {i}" for i in range(12)], [["1234567.8"] * 12])
    text = f"### a_long_name_of_a_problem\n\n`cs336 bench {'--context_length 1 ' * 9}`\n\n{wide}\n\n![p](wide.png)\n"
    script = """
        const size = (name) => { const e = document.querySelector(name); return [e.clientWidth, e.scrollWidth]; };
        return { page: document.documentElement.scrollWidth, table: size(".wide"), picture: size(".picture") };
    """
    found = seen(text, script, tmp_path, PHONE)
    assert found["page"] == PHONE
    for name in ("table", "picture"):
        shown, whole = found[name]
        assert shown < PHONE < whole


@needs_browser
def test_the_list_of_problems_closes_behind_a_click(tmp_path: Path) -> None:
    script = """
        const contents = document.querySelector("nav details");
        contents.open = true;
        contents.querySelector("a").click();
        return contents.open;
    """
    assert seen("### a\n\ntext\n", script, tmp_path) is False


@needs_browser
@pytest.mark.parametrize("width", [PHONE, 1000])
def test_a_dark_page_is_dark_everywhere(width: int, tmp_path: Path) -> None:
    script = """
        for (const rule of [...document.styleSheets[0].cssRules])
            if (rule.conditionText === "(prefers-color-scheme: dark)") rule.media.mediaText = "all";
        const colours = (name) => [...document.querySelectorAll(name)].map((e) => getComputedStyle(e).backgroundColor);
        return ["body", "nav", "th", "td"].flatMap(colours);
    """
    dark = "rgb(22, 24, 28)"
    assert set(seen(f"### a\n\n{TABLE}\n", script, tmp_path, width)) <= {dark, "rgba(0, 0, 0, 0)"}
