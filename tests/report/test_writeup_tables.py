"""What of the rows a write-up shows, and where: each table for the problem that it is about, wide ones side by side."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cs336_systems.bench.row import Row, read_rows
from cs336_systems.report.memory_parts import memory_parts_in_short
from cs336_systems.report.spec import Column
from cs336_systems.report.writeup import attention, build, flash
from cs336_systems.report.writeup.problem import RowFile
from cs336_systems.report.writeup.problems import PROBLEMS
from cs336_systems.report.writeup.render import html_page
from cs336_systems.report.writeup.side_by_side import side_by_side
from cs336_systems.report.writeup.typeset import to_typst

RESULTS = Path(__file__).parents[2] / "results/h200"
BY_NAME = {problem.name: problem for problem in PROBLEMS}


def row(case: str, variant: str = "v", status: Any = "ok", ms: float = 1.0, **config: Any) -> Row:
    metrics = {} if status != "ok" else {"step_ms": {"p50": ms}, "peak_memory_bytes": 2**30}
    env = {"gpu": "NVIDIA Made-up", "commit": "abc1234"}
    return Row(case=case, variant=variant, config=config, status=status, metrics=metrics, env=env)


def ddp(path: Path, *variants: str) -> RowFile:
    setting = dict(devices=2, size="xl", context_length=512, batch_size=4, precision="bf16")
    return RowFile(path, [row("ddp", variant, **setting) for variant in variants])


def variants_of(name: str, *files: RowFile) -> list[list[str]]:
    """The variants in each table of a problem."""
    parts = build.problem_parts(BY_NAME[name], {"ddp": list(files)}, files[0].path.parent)
    tables = [part for part in parts if "| variant |" in part]
    return [re.findall(r"^\| ([\w:+]+) \| *[\d.o]", table, re.M) for table in tables]


def test_a_problem_shows_the_variants_that_it_is_about_beside_what_they_are_compared_with(tmp_path: Path) -> None:
    files = (
        ddp(tmp_path / "a/ddp.jsonl", "alone", "naive", "flat", "overlap", "bucketed:1", "fsdp", "overlap+zero1"),
        ddp(tmp_path / "b/ddp.jsonl", "alone", "torch_ddp"),
    )
    assert variants_of("naive_ddp_benchmarking", *files) == [["alone", "naive"]]
    assert variants_of("minimal_ddp_flat_benchmarking", *files) == [["alone", "naive", "flat"]]
    assert variants_of("ddp_bucketed_benchmarking", *files) == [["alone", "overlap", "bucketed:1"]]
    assert variants_of("optimizer_state_sharding_accounting", *files) == [
        ["alone", "naive", "overlap", "overlap+zero1"]
    ]
    assert variants_of("fsdp", *files) == [["alone", "fsdp"]]


def test_commands_stand_once_and_later_problems_lead_to_them(tmp_path: Path) -> None:
    text = build.document({}, tmp_path)
    (command,) = BY_NAME["naive_ddp_benchmarking"].exhibits[0].commands
    assert text.count(f"`cs336 {command}`") == 1
    link = "Not measured yet; what measures it stands below [naive_ddp_benchmarking](#naive_ddp_benchmarking)."
    assert text.count(link) == 5
    assert '<a href="#naive_ddp_benchmarking">naive_ddp_benchmarking</a>.' in html_page("T", text, tmp_path)
    typeset = to_typst("T", text)
    assert '#link(label("naive_ddp_benchmarking"))[#"naive_ddp_benchmarking";];' in typeset
    assert '#heading(level: 3)[#"naive_ddp_benchmarking";] <naive_ddp_benchmarking>\n' in typeset


STEP, PEAK = Column("step (ms)", "step_ms.p50", ".1f"), Column("peak", "peak_memory_bytes", ".0f", 2**30)


def table_of(rows: Sequence[Row]) -> list[str]:
    ways = {False: "eager", True: "compiled"}
    return side_by_side(rows, ("size", "length", "compile"), "compile", ways, [STEP], [PEAK]).splitlines()


def test_two_ways_stand_side_by_side_in_the_line_of_their_setting() -> None:
    rows = [
        row("a", ms=2.0, size="xl", length=1, compile=False),
        row("a", ms=1.5, size="xl", length=1, compile=True),
        row("a", ms=4.0, size="xl", length=2, compile=False),
        row("a", status="oom", size="xl", length=2, compile=True),
        row("a", ms=7.0, size="xl", length=3, compile=True),
        row("a", ms=9.0, size="xl", length=3, compile=None),
    ]
    assert table_of(rows) == [
        "NVIDIA Made-up; size xl:",
        "",
        "| length | step, eager (ms) | step, compiled (ms) | peak |",
        "| --- | ---: | ---: | ---: |",
        "| 1 | 2.0 | 1.5 | 1 |",
        "| 2 | 4.0 | out of memory | out of memory |",
        "| 3 | - | 7.0 | 1 |",
    ]
    assert table_of(rows[-1:]) == []


def test_attention_tables_have_a_line_a_setting_and_no_column_that_compares_a_row_with_itself() -> None:
    rows = read_rows(RESULTS / "attention.jsonl")
    settings = {(each.config["head_size"], each.config["length"]) for each in rows}
    eager = attention.eager_alone([each for each in rows if not each.config["compile"]])
    both = attention.eager_beside_compiled(rows)
    compiled = {(each.config["head_size"], each.config["length"]) for each in rows if each.config["compile"]}
    kernels = read_rows(RESULTS / "flash.jsonl")
    beside = flash.beside_naive(kernels)
    measured = {(each.config["dtype"], each.config["head_size"], each.config["length"]) for each in kernels}
    for text, lines in ((eager, len(settings)), (both, len(compiled)), (beside, len(measured))):
        assert len(re.findall(r"^\| (?!-|head|dtype)", text, re.M)) == lines
    assert "x eager" not in eager
    first = next(each for each in rows if each.config["compile"])
    assert f"{first.metrics['forward_ms']['p50']:.4g}" in both


def test_gathers_in_short_are_a_line_a_direction() -> None:
    rows = read_rows(RESULTS / "fsdp-accounting.jsonl")
    gathers = next(each.metrics["gathers"] for each in rows if "gathers" in each.metrics)
    forward = [each for each in gathers if each["turn"] == 1]
    text = memory_parts_in_short(rows)
    line = next(line for line in text.splitlines() if line.startswith("| forward |"))
    least = min(forward, key=lambda each: each["slack_ms"])
    assert line.startswith(f"| forward | {len(forward)} | {min(each['ms'] for each in forward):.3f} |")
    assert f"| {least['slack_ms']:+.3f} | {least['unit']} |" in line
    assert "| layers.1 |" not in text
