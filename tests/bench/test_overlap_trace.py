"""The case `overlap-trace`: the streams of two strategies' steps, as numbers, as a picture and as a page."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from cs336_systems.bench.case import configurations, row_config
from cs336_systems.bench.cases.ddp import OVERLAP_TRACE as CASE
from cs336_systems.bench.row import Row, read_rows
from cs336_systems.report.step_streams import draw_streams, nsys_command, streams_file, write_page
from tests.bench.conftest import Bench
from tests.profiling.test_page import browse, needs_browser


def a_step(path: Path, communication: tuple[float, float]) -> Path:
    """A GEMM from 0 to 3 ms and a transfer."""
    content = {"compute": [[0, 3]], "communication": [communication], "names": ["gemm</script>", "ncclAllReduce"],
               "pieces": {"compute": [[0, 0, 3]], "communication": [[1, *communication]]}}  # fmt: skip
    path.write_text(json.dumps(content))
    return path


def page_data(path: Path) -> dict[str, Any]:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', path.read_text(), re.S)
    assert found
    return json.loads(found[1])


def test_the_page_holds_every_piece_with_its_name_and_needs_no_network(tmp_path: Path) -> None:
    steps = [a_step(tmp_path / "naive.json", (3, 5)), a_step(tmp_path / "overlap.json", (2, 4))]
    write_page(steps, tmp_path / "page.html", "<note>")
    text, data = (tmp_path / "page.html").read_text(), page_data(tmp_path / "page.html")
    assert [step["name"] for step in data["steps"]] == ["naive", "overlap"]
    assert [step["totals"]["overlapped"] for step in data["steps"]] == [0.0, 0.5]
    assert data["steps"][1]["pieces"] == {"compute": [[0, 0, 3]], "communication": [[1, 2, 4]]}
    assert data["steps"][0]["names"] == ["gemm</script>", "ncclAllReduce"]
    assert "&lt;note&gt;" in text
    assert "{{" not in text
    assert not re.search(r"https?://", text)
    assert "default-src 'none'" in text


@needs_browser
def test_the_page_shows_the_name_under_the_pointer(tmp_path: Path) -> None:
    write_page([a_step(tmp_path / "overlap.json", (2, 4))], tmp_path / "page.html", "")
    script = """
        const box = canvas.getBoundingClientRect(), at = lanes[1];
        canvas.dispatchEvent(new MouseEvent("mousemove", { bubbles: true,
            clientX: box.left + MARGIN.left + 0.75 * plotWidth(), clientY: box.top + at.top + 3 }));
    """
    dom = browse(tmp_path / "page.html", tmp_path, script)
    assert "ncclAllReduce\ncommunication of overlap\n2000 us, from 2.000 to 4.000 ms" in dom
    assert "50 %" in dom


def test_a_file_without_names_is_named(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"compute": [[0, 3]], "communication": []}))
    with pytest.raises(ValueError, match=r"old\.json: there is no 'names'"):
        write_page([path], tmp_path / "page.html", "")


@pytest.mark.usefixtures("in_this_process", "ranks_forked")
def test_the_quick_command_draws_two_strategies(tmp_path: Path, bench: Bench) -> None:
    code, said, _ = bench("overlap-trace", "--quick", "--out", str(tmp_path))
    assert code == 0
    rows = read_rows(tmp_path / "overlap-trace.jsonl")
    assert {Path(row.metrics["streams"]).parent for row in rows} == {tmp_path / "overlap-trace"}  # beside the rows
    assert [(row.variant, row.error) for row in rows] == [("naive", None), ("overlap", None)]
    data = page_data(tmp_path / "overlap-trace.html")
    assert [step["name"] for step in data["steps"]] == ["quick-16-naive", "quick-16-overlap"]
    for row, step in zip(rows, data["steps"], strict=True):
        sent = step["pieces"]["communication"]
        # 21 gradients, the flags of used parameters, and the loss together with the norm.
        assert len(sent) == 23
        assert {step["names"][i] for i, _, _ in sent} == {"gloo:all_reduce"}
        assert 0 <= row.metrics["overlapped"] <= 1
        assert row.metrics["both_ms"] <= min(row.metrics["compute_ms"], row.metrics["communication_ms"]) + 1e-6
    assert (tmp_path / "overlap-trace.png").read_bytes().startswith(b"\x89PNG")
    assert "nsys profile --trace=cuda,nvtx" in said


def test_the_command_for_nsight_records_the_same_step(tmp_path: Path) -> None:
    (config,) = configurations(CASE, {"variant": ("overlap+bf16",), "compile": (True,), "device": ("cpu",)})
    row = Row(case="overlap-trace", variant="v", config=row_config(config), metrics={"streams": "a/xl-overlap.json"})
    command = shlex.split(nsys_command(row))
    assert command[:2] == ["nsys", "profile"]
    assert "--capture-range=cudaProfilerApi" in command
    assert "--output=runs/bench/nsys-xl-overlap" in command
    start = command.index("cs336")
    assert command[start:] == ["cs336", "bench", "overlap-trace", "--profiler", "nsys", "--variant", "overlap+bf16",
                               "--compile", "true", "--out", "runs/bench/nsys"]  # fmt: skip


def test_a_missing_trace_is_left_out(tmp_path: Path) -> None:
    row = Row(case="overlap-trace", variant="v", config={}, metrics={"streams": str(tmp_path / "gone.json")}, env={})
    assert draw_streams([row], tmp_path) == []


def test_a_trace_is_found_where_it_was_written_and_beside_the_rows(tmp_path: Path) -> None:
    row = Row(case="overlap-trace", variant="v", config={}, metrics={"streams": str(tmp_path / "a/step.json")}, env={})
    beside, written = tmp_path / "rows/a/step.json", tmp_path / "a/step.json"
    assert streams_file(row.metrics, tmp_path / "rows") is None
    for file in (beside, written):
        file.parent.mkdir(parents=True)
        file.touch()
        assert streams_file(row.metrics, tmp_path / "rows") == file


@pytest.mark.multigpu
def test_on_gpus_overlap_is_found_in_the_trace(tmp_path: Path) -> None:
    # float32, so that backward takes longer to compute than to launch: work that waits for the host overlaps nothing.
    computes_long = {"precision": ("fp32",), "batch_size": (8,), "context_length": (1024,)}
    given = {"size": ("small",), **computes_long, "device": ("cuda",), "traces": (str(tmp_path),)}
    naive, overlap = CASE.measure(configurations(CASE, given))
    assert (naive.error, overlap.error) == (None, None)
    assert naive.metrics["overlapped"] < 0.1 < overlap.metrics["overlapped"]
