"""The page of a memory history: opened in a browser, pointed at, and without any way to the network."""

import json
import re
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from cs336_systems.bench.profiling.history import history_of
from cs336_systems.bench.profiling.page import fill_page, page_data, write_page
from cs336_systems.bench.profiling.snapshot import read_snapshot

from .snapshots import Trace, frames, one_step, save

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-default-apps"),
    *("--window-size=1200,900", "--virtual-time-budget=10000"),
)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">&lt;&"


def page(folder: Path, content: dict | None = None) -> Path:
    made, phases = one_step()
    history = history_of(read_snapshot(save(folder / "snapshot.pickle", content or made)), None if content else phases)
    path = folder / "timeline.html"
    write_page(history, path, "a title", "a note")
    return path


def browse(path: Path, folder: Path, script: str = ";", *more: str) -> str:
    """The page after it has been drawn and a script has run in it; or, with `more`, other output of the browser."""
    if script:
        # Without a screen there may be no frames for long, and the browser's time runs ahead when it has nothing to do.
        frames = "<script>window.requestAnimationFrame = (work) => setTimeout(work, 16)</script>"
        drawn = "document.querySelector('canvas').dataset.milliseconds"
        begin = f"const begin = () => {{ if (!{drawn}) return void setTimeout(begin, 50); {script} }};"
        test = f"<script>{begin} addEventListener('load', begin)</script>"
        text = path.read_text().replace("<head>", f"<head>{frames}").replace("</body>", f"{test}</body>")
        path = folder / "with_test.html"
        path.write_text(text)
    profile = folder / f"browser{time.time_ns()}"
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", *(more or ("--dump-dom",)), path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def shown(dom: str, name: str) -> str:
    found = re.search(rf'id="{name}"[^>]*>(.*?)</(?:div|p|ul|output|tbody)>', dom, re.S)
    assert found, f"no {name} in the page"
    return found[1]


def pointing(x: float, y: float) -> str:
    """A script that points at a part of the plot: x from the left, y from the bottom, both from 0 to 1."""
    return f"""
        const box = canvas.getBoundingClientRect();
        canvas.dispatchEvent(new MouseEvent("mousemove", {{
            clientX: box.left + MARGIN.left + {x} * plotWidth(),
            clientY: box.top + MARGIN.top + (1 - {y}) * plotHeight(), bubbles: true }}));
    """


@needs_browser
def test_the_page_draws_and_says_peak_categories_and_largest(tmp_path: Path) -> None:
    dom = browse(page(tmp_path), tmp_path)
    assert shown(dom, "summary") == "peak 5.22 KiB in backward at 0.1 ms"
    legend = shown(dom, "legend")
    for words in ("parameters: 1000 bytes", "optimizer state: 1.95 KiB", "activations: 700 bytes"):
        assert words in legend
    assert shown(dom, "drawn") == "9 of 9"
    assert "exp_avg of w" in shown(dom, "largest").split("</tr>")[0]
    assert "data-milliseconds" in dom


POINTED_AT = [
    # The scale ends 6 % above the peak of 5350, and time at the last of the events, 300 us after the first.
    (0.05, 500, "1000 bytes, parameters\nfrom before the recording to after it\nw"),
    (0.05, 2000, "1.95 KiB, optimizer state\nfrom before the recording to after it\nexp_avg of w"),
    (0.05, 5600, ""),  # beside memory
    (0.135, 3200, "400 bytes, activations\nfrom 0.030 ms (forward) to 0.140 ms (backward)\n"
     "cs336_basics/model.py:11 forward"),
    (0.44, 3500, "1000 bytes, gradients\nfrom 0.110 ms (backward) to 0.260 ms (optimizer)\n"
     "gradient of w\ncs336_basics/model.py:14 forward"),
]  # fmt: skip


@needs_browser
def test_pointing_at_memory_describes_it(tmp_path: Path) -> None:
    one_by_one = [f"{{ {pointing(x, up / (5350 * 1.06))} }} note();" for x, up, _ in POINTED_AT]
    note = 'const said = []; const note = () => said.push(tip.hidden ? "" : tip.textContent);'
    script = f'{note} {" ".join(one_by_one)} tip.textContent = said.join(" | ");'
    dom = browse(page(tmp_path), tmp_path, script)
    assert shown(dom, "tip").split(" | ") == [words for *_, words in POINTED_AT]


@needs_browser
def test_the_slider_sums_the_smaller_ones(tmp_path: Path) -> None:
    script = 'element("detail").value = 0; element("detail").dispatchEvent(new Event("input"));'
    later = f"setTimeout(() => {{ {pointing(0.05, 0.05)} }}, 1000);"
    dom = browse(page(tmp_path), tmp_path, script + later)
    assert shown(dom, "drawn") == "0 of 9"
    assert shown(dom, "tip").startswith("parameters: smaller allocations, summed")


@needs_browser
def test_the_wheel_and_the_keys_zoom_and_move_within_the_data(tmp_path: Path) -> None:
    script = """
        const said = [];
        const note = () => said.push(view.x.map((v) => v.toFixed(4)).join(" "));
        const key = (k) => canvas.dispatchEvent(new KeyboardEvent("keydown", { key: k, bubbles: true }));
        const all = size("x"), box = canvas.getBoundingClientRect();
        note();
        canvas.dispatchEvent(new WheelEvent("wheel", { deltaY: -300, clientX: box.left + MARGIN.left + plotWidth() / 2,
            clientY: box.top + 100, bubbles: true, cancelable: true }));
        said.push(size("x") < all * 0.7 && view.x[0] > 0 ? "closer" : "not closer");
        for (let i = 0; i < 50; i++) key("ArrowLeft");
        said.push(Math.abs(view.x[0] - timeOf(0)) < 1e-9 ? "at the left end" : `at ${view.x[0]}`);
        key("0");
        note();
        said.push(said[0] === said[3] ? "all again" : "lost");
        document.title = said.join(", ");
    """
    title = re.search(r"<title>(.*?)</title>", browse(page(tmp_path), tmp_path, script))
    assert title
    assert ", closer, at the left end, " in title[1]
    assert title[1].endswith("all again")


@needs_browser
def test_text_in_a_snapshot_is_shown_and_never_run(tmp_path: Path) -> None:
    trace = Trace().note("alloc", 1, 5000, frames=frames(1, HOSTILE, f"/src/cs336_basics/{HOSTILE}.py"))
    content = trace.alloc(2, 10).snapshot((1, 5000), (2, 10))
    path = page(tmp_path, content=content)
    assert path.read_text().count("</script>") == 2
    dom = browse(path, tmp_path, pointing(0.7, 0.3))
    assert "<title>a title</title>" in dom
    assert "onerror" in shown(dom, "tip")
    assert "<img" not in shown(dom, "tip")


@needs_browser
def test_a_screenshot_shows_the_colours_of_the_categories(tmp_path: Path) -> None:
    from matplotlib.image import imread

    picture = tmp_path / "page.png"
    browse(page(tmp_path), tmp_path, "", f"--screenshot={picture}")
    pixels = (imread(picture)[..., :3] * 255).round().astype(int)
    for color in ((0x4C, 0x78, 0xA8), (0x9E, 0xCA, 0xE9), (0xE4, 0x57, 0x56), (0x54, 0xA2, 0x4B), (0xF2, 0xA9, 0x3B)):
        r, g, b = color
        lighter = tuple(round(c + (255 - c) * 0.18) for c in color)  # every second allocation
        area = sum(int((np.abs(pixels - wanted).max(axis=-1) <= 2).sum()) for wanted in ((r, g, b), lighter))
        assert area > 2000, color


def test_the_page_asks_nobody_for_anything(tmp_path: Path) -> None:
    text = page(tmp_path).read_text()
    assert "default-src 'none'" in text
    assert not re.search(r"https?://|//[a-z]+\.|@import|url\(|\bfetch\(|XMLHttpRequest|<link|src=", text)
    assert "{{" not in text.split('<script id="data"')[0]


def test_embedded_data_comes_back_and_cannot_end_its_element() -> None:
    value = {"text": HOSTILE + "<!--\u2028\u00e9{{DATA}}", "number": [1, 2.5, None]}
    text = (
        fill_page("page.html", (), HOSTILE, HOSTILE, value).split('type="application/json">')[1].split("</script>")[0]
    )
    assert json.loads(text) == value
    assert not set("<>&\u2028") & set(text)


def test_the_page_has_the_data_of_the_history(tmp_path: Path) -> None:
    made, phases = one_step()
    history = history_of(read_snapshot(save(tmp_path / "a.pickle", made)), phases)
    data = page_data(history)
    assert data["detail"] == 9
    assert sorted(data["sizes"]) == [50, 300, 400, 600, 700, 900, 1000, 1000, 2000]
    assert data["starts"] == sorted(data["starts"])
    assert data["boundaries"] == (1, 9, 20, 28)
