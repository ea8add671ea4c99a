"""The document of answers: sentences of made-up rows whose truth is known, and the files made of the committed rows."""

import fcntl
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from cs336_systems.bench.case import configurations
from cs336_systems.bench.cases import NAMES, get_case
from cs336_systems.bench.instruments.memory_moments import MOMENTS
from cs336_systems.bench.row import Row, append_row, read_rows
from cs336_systems.cli import bench as bench_command
from cs336_systems.cli import profile as profile_command
from cs336_systems.cli.report import make_report
from cs336_systems.config.model import MODEL_SIZES
from cs336_systems.planner.working import Section, Term
from cs336_systems.report.memory_profiles import draw_timeline
from cs336_systems.report.writeup import (
    attention,
    buckets,
    build,
    checkpointing,
    claims,
    collectives,
    fully_sharded,
    leaderboard_2026,
    measure,
    memory,
    precision,
    profiling,
    several_gpus,
)
from cs336_systems.report.writeup.build import HTML, MARKDOWN, NO_TYPST, PDF, answer_of, document, find_rows
from cs336_systems.report.writeup.claims import ClaimError, Evidence
from cs336_systems.report.writeup.problem import RowFile
from cs336_systems.report.writeup.problems import PROBLEMS
from cs336_systems.report.writeup.render import html_page
from cs336_systems.report.writeup.typeset import to_typst

ROOT = Path(__file__).parents[2]
ENV = {"gpu": "NVIDIA Made-up", "cpu_threads": 8, "commit": "abc1234"}
HANDOUT = [
    "benchmarking_script",
    "nsys_profile",
    "mixed_precision_accumulation",
    "benchmarking_mixed_precision",
    "memory_profiling",
    "pytorch_attention",
    "torch_compile",
    "flash_forward",
    "flash_backward",
    "flash_benchmarking",
    "leaderboard",
    "distributed_communication_single_node",
    "naive_ddp",
    "naive_ddp_benchmarking",
    "minimal_ddp_flat_benchmarking",
    "ddp_overlap_individual_parameters",
    "ddp_overlap_individual_parameters_benchmarking",
    "ddp_overlap_bucketed",
    "ddp_bucketed_benchmarking",
    "communication_accounting",
    "optimizer_state_sharding",
    "optimizer_state_sharding_accounting",
    "gradient_checkpointing",
    "fsdp",
    "fsdp_accounting",
    "alternate_ring_all_reduce",
    "data_parallel_calcs",
    "fsdp_calcs",
    "tp_calcs",
    "fsdp_tp_calcs",
    "leaderboard_2026",
]


def row(case: str, variant: str = "v", metrics: dict[str, Any] | None = None, **config: Any) -> Row:
    status = config.pop("status", "ok")
    return Row(case=case, variant=variant, config=config, status=status, metrics=metrics or {}, env=ENV)


def timed(case: str, ms: float, variant: str = "v", **config: Any) -> Row:
    return row(
        case, variant, {"step_ms": {"p50": ms, "mean": ms, "std": ms / 10}, "peak_memory_bytes": 2**30}, **config
    )


def evidence(*rows: Row) -> Evidence:
    return of_files(rows)


def of_files(*files: Sequence[Row]) -> Evidence:
    found: dict[str, list[list[Row]]] = {}
    for rows in files:
        for case in dict.fromkeys(each.case for each in rows):
            found.setdefault(case, []).append([each for each in rows if each.case == case])
    return Evidence("made_up", found)


def test_sizes_whose_step_does_not_fit_are_told_without_the_optimizer() -> None:
    def at(size: str, mode: str, *phases: str) -> Row:
        times = {f"{name}_ms": {"p50": 5.0} for name in phases}
        return row("model", metrics=times, size=size, mode=mode, context_length=512, precision="fp32", compile=False)

    rows = [at(size, "train_step", "forward", "backward", "optimizer") for size in ("xl", "small")]
    said = profiling.times_by_size(evidence(*rows, at("10B", "forward_backward", "forward", "backward"))) or ""
    assert "from small 5.0 / 5.0 / 5.0 to 10B 5.0 / 5.0 / -; a backward pass" in said


def warmups(first: float) -> list[Row]:
    def one(warmup: int, steps: list[float], mean: float) -> Row:
        metrics = {"steps_ms": steps, "step_ms": {"p50": 10.0, "mean": mean}}
        return row("warmup", f"warmup {warmup}", metrics, size="small", warmup=warmup)

    return [one(0, [first, 10.0], 20.0), one(2, [10.0, 10.0], 10.1)]


def test_a_sentence_takes_its_figures_from_the_rows_and_changes_with_them() -> None:
    said = profiling.warmup_steps(evidence(*warmups(40.0)))
    assert said is not None
    assert "the first step is longer than the others, 4.0 times the median" in said
    assert "100% above the median. After 2 or more warm-up steps mean and median are within 1.0%" in said
    assert "7.5 times the median" in (profiling.warmup_steps(evidence(*warmups(75.0))) or "")


def test_a_claim_that_the_rows_contradict_names_problem_claim_and_figures() -> None:
    problem = PROBLEMS[0]
    rows = {"warmup": [RowFile(Path("warmup.jsonl"), warmups(9.0))]}
    with pytest.raises(
        ClaimError, match=r"benchmarking_script.*'without warm-up the first step is longer.*least_ratio 0\.9"
    ):
        answer_of(problem, rows)


def test_a_row_without_what_a_sentence_needs_is_named(tmp_path: Path) -> None:
    for each in warmups(9.0):
        append_row(tmp_path / "warmup.jsonl", replace(each, metrics={"steps_ms": [1]}))
    said = r"warmup\.jsonl: rows are not as benchmarking_script needs them: there is no 'step_ms'$"
    with pytest.raises(ValueError, match=said):
        answer_of(PROBLEMS[0], find_rows(tmp_path))


def spoilt(path: Path, case: str, lines: Sequence[int], spoil: Callable[[dict[str, Any]], Any]) -> Path:
    """A file of the committed rows of a case, some of which are spoilt."""
    rows = [json.loads(line) for line in (ROOT / f"results/h200/{case}.jsonl").read_text().splitlines()]
    for line in lines:
        spoil(rows[line - 1])
    path.mkdir()
    file = path / Path(f"{case}.jsonl").name
    file.write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    return file


SPOILT: dict[str, tuple[str, Sequence[int], Callable[[dict[str, Any]], Any], str]] = {
    "missing metric": (
        "flash", [20], lambda row: row["metrics"].pop("forward_ms"), "there is no 'metrics.forward_ms.p50'$"
    ),
    "missing field": ("model", [2], lambda row: row["config"].pop("attention"), "there is no 'attention'$"),
    "null": (
        "warmup", [1], lambda row: row["metrics"].update(steps_ms=None), "a value is not as a table or plot needs it"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case, lines, spoil, said", SPOILT.values(), ids=SPOILT)
def test_rows_that_cannot_be_shown_are_a_line_that_names_their_file(
    case: str, lines: Sequence[int], spoil: Callable[[dict[str, Any]], Any], said: str, tmp_path: Path
) -> None:
    file = spoilt(tmp_path / "rows", case, lines, spoil)
    with pytest.raises(ValueError, match=f"^{file}[,:] .*{said}"):
        make_report(["writeup", "--results", str(tmp_path / "rows"), "--out", str(tmp_path / "out")])


def test_no_folder_is_not_the_current_one() -> None:
    with pytest.raises(ValueError, match="results is '': it must be the path of a folder, or left out"):
        make_report(["writeup", "--results", ""])


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_is_refused_by_every_report(number: float, tmp_path: Path) -> None:
    file = spoilt(tmp_path / "rows", "strategies/ddp", [5], lambda row: row["metrics"]["step_ms"].update(p50=number))
    out = ["--out", str(tmp_path / "out")]
    for arguments in (["rows", str(file)], ["tables", str(file), *out], ["headline", str(file)],
                      ["writeup", "--results", str(file.parent), *out]):  # fmt: skip
        said = f"^{file}, line 5: metrics.step_ms.p50 is {number}: it must be a finite number$"
        with pytest.raises(ValueError, match=said):
            make_report(arguments)


def test_what_failed_may_say_so_with_a_number_that_is_not_finite(tmp_path: Path) -> None:
    append_row(tmp_path / "a.jsonl", row("lm-matrix", metrics={"final_loss": math.nan}, status="error"))
    (read,) = read_rows(tmp_path / "a.jsonl")
    assert math.isnan(read.metrics["final_loss"])


def test_which_way_a_comparison_goes_is_of_the_rows() -> None:
    setting = dict(devices=2, size="xl", context_length=8, batch_size=1, precision="bf16")
    say = several_gpus.compared("flat", "naive")
    for flat, how in ((80.0, "20% shorter"), (150.0, "50% longer")):
        rows = timed("ddp", 100.0, "naive", **setting), timed("ddp", flat, "flat", **setting)
        assert say(evidence(*rows)) == f"Eager, a step of xl with `flat` is {how} than with `naive`."
    assert say(evidence(timed("ddp", 1.0, "flat", **setting))) is None


def test_what_communication_adds_is_beside_one_gpu_alone() -> None:
    setting = dict(devices=2, size="xl", context_length=512, batch_size=4, precision="bf16")
    said = several_gpus.added("naive")(
        evidence(timed("ddp", 120.0, "alone", **setting), timed("ddp", 150.0, "naive", **setting))
    )
    assert said is not None
    assert said.endswith("with `naive` takes 150 ms, 25% longer than one rank alone.")


def test_how_long_a_step_communicates_is_said_where_it_was_profiled() -> None:
    def said(both_ms: float, sent_ms: float = 75.0) -> str:
        rows = of_ddp(alone=50.0, naive=60.0)  # shorter than the profiled step communicates
        rows[1].metrics.update(communication_ms=sent_ms, both_ms=both_ms, span_ms=300.0)
        return several_gpus.added("naive")(evidence(*rows)) or ""

    assert said(0.0).endswith("In one profiled step of 300 ms it communicates for 75 ms, 25% of it, all of it exposed.")
    assert said(20.0).endswith("55 ms of that with nothing computed meanwhile.")
    assert said(0.0, 0.0).endswith("longer than one rank alone.")
    with pytest.raises(ValueError, match=r"variant naive: both_ms is 80\.0: it must be from 0 to communication_ms, 75"):
        said(80.0)


XL = dict(devices=2, size="xl", context_length=512, batch_size=4, precision="bf16")


def of_ddp(date: str = "2026-01-01", **step_ms: float) -> list[Row]:
    """A file of the case ddp: "_plus_" in a name is "+", "_compiled" ends one that is compiled."""
    names = {name.replace("_plus_", "+").replace("_compiled", " compiled"): ms for name, ms in step_ms.items()}
    return [replace(timed("ddp", ms, name, **XL), env={**ENV, "date": date}) for name, ms in names.items()]


def test_steps_that_a_sentence_compares_are_of_one_run() -> None:
    first = of_ddp(alone=100.0, naive=150.0, overlap=310.0, overlap_plus_zero1=297.0)
    later = of_ddp("2026-01-02", alone=80.0, overlap=265.0, fsdp=90.0)
    for e in (of_files(first, later), of_files(later, first)):  # by date, whatever the files are called
        assert "takes 150 ms, 50% longer than one rank alone." in (several_gpus.added("naive")(e) or "")
        assert "takes 265 ms, 231% longer than one rank alone (210% longer in 1 other launch)." in (
            several_gpus.added("overlap")(e) or ""
        )
        assert "takes 297 ms instead of 310 ms with `overlap`" in (several_gpus.sharded_time(e) or "")
        assert fully_sharded.fsdp_step(e) == (
            "Eager, a step of xl with `fsdp` takes 90 ms at a peak of 1 GiB, 12% longer than one rank alone."
        )
        assert several_gpus.compared("fsdp", "naive")(e) is None


def test_a_file_with_rows_of_two_commits_has_two_runs() -> None:
    rows = of_ddp(alone=100.0) + [replace(each, env={**each.env, "commit": "def5678"}) for each in of_ddp(naive=150.0)]
    assert several_gpus.added("naive")(evidence(*rows)) is None
    cool, warm = ({**ENV, "gpu_state": {"temperature": t}} for t in (30, 60))
    rows = [replace(each, env=env) for each, env in zip(of_ddp(alone=100.0, naive=150.0), (cool, warm), strict=True)]
    assert several_gpus.added("naive")(evidence(*rows)) is not None


def test_a_comparison_is_of_the_last_launch_beside_the_range_of_earlier_ones() -> None:
    all_three, two = of_ddp(naive=200.0, flat=160.0, overlap=100.0), of_ddp("2026-01-02", naive=100.0, overlap=90.0)
    said = several_gpus.compared("overlap", "naive", "flat")
    assert said(of_files(all_three, two)) == (
        "Eager, a step of xl with `overlap` is 10% shorter than with `naive` (50% shorter in 1 other launch) and 38% "
        "shorter than with `flat`."
    )
    longer = of_ddp("2026-01-02", naive=100.0, flat=100.0, overlap=120.0)
    assert said(of_files(all_three, longer)) == (
        "Eager, a step of xl with `overlap` is 20% longer than with `naive` (50% shorter in 1 other launch, so that it "
        "is undecided which is shorter) and 20% longer than with `flat` (38% shorter in 1 other launch, so that it is "
        "undecided which is shorter)."
    )
    third = of_ddp("2026-01-03", naive=100.0, overlap=150.0)
    assert "is 50% longer than with `naive` (50% shorter to 20% longer in 2 other launches, longer in 1 of them)" in (
        said(of_files(all_three, longer, third)) or ""
    )


def test_why_a_step_that_hides_transfers_is_longer_is_said_where_rows_show_the_host() -> None:
    say = several_gpus.waits_for_the_host("overlap", "naive")

    def profiled(overlap: float = 280.0, hidden: float = 20.0) -> list[Row]:
        rows = of_ddp(naive=230.0, overlap=overlap)
        for each, both_ms in zip(rows, (0.0, hidden), strict=True):
            each.metrics.update(communication_ms=40.0, both_ms=both_ms, span_ms=300.0)
        return rows

    said = say(evidence(*profiled())) or ""
    assert said.startswith(
        "It leaves less of its communication exposed all the same (20 ms instead of 40 ms): the host, to which"
    )
    assert "sets the pace of an eager step" in said
    assert say(evidence(*profiled(overlap=220.0))) is None
    assert say(evidence(*profiled(hidden=0.0))) is None
    assert say(evidence(*of_ddp(naive=230.0, overlap=280.0))) is None
    shorter = of_ddp("2026-01-02", naive=230.0, overlap=220.0)  # in another launch: it is not always the longer one
    assert say(of_files(profiled(), shorter)) is None


def test_communication_of_two_variants_is_compared_where_one_launch_has_profiled_both() -> None:
    say = several_gpus.communicates_less("flat", "naive")

    def launch(flat_ms: float, sent: float, more_bytes: int = 0) -> list[Row]:
        naive, flat = of_ddp(naive=200.0, flat=flat_ms)
        naive.metrics.update(communication_ms=40.0, both_ms=0.0, span_ms=300.0)
        flat.metrics.update(communication_ms=sent, both_ms=0.0, span_ms=300.0)
        flat.metrics["peak_memory_bytes"] += more_bytes
        return [naive, flat]

    assert say(evidence(*launch(150.0, 30.0))) == (
        "Communication itself is 25% shorter than with `naive` (30 ms instead of 40 ms)."
    )
    assert (say(evidence(*launch(220.0, 30.0, 1 << 30))) or "").endswith(
        ", but gradients are copied into one tensor and back, and they take 1 GiB more at the peak."
    )
    assert (say(evidence(*launch(220.0, 50.0))) or "").endswith("(50 ms instead of 40 ms).")
    assert say(evidence(*of_ddp(naive=1.0, flat=2.0))) is None
    apart = of_files(launch(150.0, 30.0)[:1], launch(150.0, 30.0)[1:])
    assert say(apart) is None


def test_the_setup_of_strategies_is_told_of_the_rows_own_settings() -> None:
    (made,) = of_ddp(naive=1.0)
    run = {"model": {"attention": "auto"}, "optimizer": {"implementation": "torch_fused"}}
    said = several_gpus.setup(evidence(replace(made, config={**made.config, "steps": 5, "rounds": 3, "warmup": 2,
                                                             "run": run}))) or ""  # fmt: skip
    assert "PyTorch's fused AdamW, with PyTorch's attention; its time is the median of 15 steps after 2 warm-up" in said
    run = {"model": {"attention": "flash_triton"}, "optimizer": {"implementation": "own"}}
    said = several_gpus.setup(evidence(replace(made, config={**made.config, "run": run}))) or ""
    assert "our own AdamW, with `flash_triton`;" in said
    assert several_gpus.setup(evidence()) is None


def test_why_gathers_in_time_are_not_all_hidden_is_told_of_a_trace() -> None:
    def said(compute_ms: float, step_ms: float = 200.0) -> str:
        metrics = dict(span_ms=200.0, compute_ms=compute_ms, communication_ms=40.0, both_ms=20.0)
        metrics |= dict(step_ms={"p50": step_ms})
        return fully_sharded.fsdp_exposed(evidence(row("overlap-trace", "fsdp", metrics, size="2.7B"))) or ""

    assert said(175.0) == (
        "Traced, it communicates for 40 ms, the reduce-scatters of gradients included, of which 50% run beside "
        "computing."
    )
    assert "For 40% of a step that is not traced the GPU does neither" in said(100.0)
    # What tracing alone makes idle is not put down to the host.
    assert said(100.0, 125.0).startswith("Traced, which makes a step 60% longer, it communicates for 40 ms")
    assert "neither" not in said(100.0, 125.0)
    assert fully_sharded.fsdp_exposed(evidence(row("overlap-trace", "naive", {}, size="2.7B"))) is None


def test_where_there_are_rows_of_2026s_xl_sentences_are_of_it_and_of_the_other_before_it() -> None:
    def both(size: str, naive: float) -> list[Row]:
        setting = dict(devices=2, size=size, context_length=512, batch_size=4, precision="bf16")
        return [timed("ddp", 100.0, "alone", **setting), timed("ddp", naive, "naive", **setting)]

    more = timed("ddp", 1.0, "flat", devices=2, size="xl", context_length=512, batch_size=4, precision="bf16")
    e = evidence(*both("2.7B", 130.0), *both("xl", 150.0), more)
    one = several_gpus.added("naive")(e) or ""
    assert one.startswith("Eager, a step of 2.7B (4 x 512 on each of 2 ranks, bf16) with `naive` takes 130 ms, 30% ")
    say = claims.of_each_size(several_gpus.added("naive"), several_gpus.compared("flat", "naive"), part="(a) ")
    assert (say(e) or "").startswith(
        "(a) Eager, a step of xl (4 x 512 on each of 2 ranks, bf16) with `naive` takes 150"
    )
    assert (say(e) or "").endswith(f"Eager, a step of xl with `flat` is 99% shorter than with `naive`.\n\n{one}")
    assert say(evidence()) is None
    assert e.asked == {"ddp"}


def test_memory_that_runs_out_is_said() -> None:
    def at(length: int, status: str = "ok") -> Row:
        times = {"forward_ms": {"p50": length / 1000}, "backward_ms": {"p50": length / 500}}
        return row("attention", metrics=times if status == "ok" else {}, head_size=16, length=length, status=status)

    assert "none of the 2 settings runs out of memory" in (attention.attention_times(evidence(at(256), at(512))) or "")
    said = attention.attention_times(evidence(at(256), at(1024, "oom"), at(512, "oom"))) or ""
    assert "the first setting that is out of memory is head size 16, length 512." in said


def test_speed_of_16_bits_says_where_it_is_slower() -> None:
    def pair(size: str, fp32: float, bf16: float) -> list[Row]:
        def one(precision: str, ms: float) -> Row:
            times = {f"{name}_ms": {"p50": ms} for name in ("forward", "backward", "step")}
            return row("model", metrics=times, size=size, context_length=128, precision=precision)

        return [one("fp32", fp32), one("bf16", bf16)]

    faster = precision.bf16_speed(evidence(*pair("small", 20.0, 10.0), *pair("xl", 40.0, 10.0))) or ""
    assert "at 128 tokens, fp32 and bf16: small 20 + 20 become 10 + 10 and xl 40 + 40 become 10 + 10." in faster
    assert "A step there is 2.0 to 4.0 times as fast, more with each size; it is nowhere slower" in faster
    slower = precision.bf16_speed(evidence(*pair("small", 10.0, 20.0), *pair("xl", 40.0, 10.0))) or ""
    against = precision.bf16_speed(evidence(*pair("small", 40.0, 10.0), *pair("xl", 20.0, 10.0))) or ""
    assert "not in the order of the sizes" in against
    assert "in 1 of 2 settings it is slower, most of all for small, 128 tokens (0.50 times as fast)" in slower


def test_which_kernel_dominates_is_of_the_rows() -> None:
    def profile(mode: str, longest: str, matmul: float, length: int = 8) -> Row:
        top = [{"kernel": longest, "class": "matmul", "calls": 3.0, "ms": 1.0, "share": 0.25}]
        part = {"top": top, "share": {"matmul": matmul, "copy": 0.2, "other": 0.01, "optimizer": 0.0}}
        names = ("inference",) if mode == "forward" else ("forward + backward", "training step")
        config = dict(size="xl", batch_size=4, context_length=length, precision="bf16", attention="naive")
        config |= dict(activation_checkpointing="none", device="cuda")
        metrics = {"spans": dict.fromkeys(names, part), "kernel_ms": 9.0, "wall_ms": 10.0, "profiled_wall_ms": None}
        return row("profile-kernels", mode, metrics, mode=mode, **config)

    found = evidence(profile("forward", "gemm_a", 0.5), profile("train_step", "gemm_b", 0.4))
    assert "is `gemm_a`, a matmul kernel: 3 calls, 25%" in (profiling.longest_kernel(found) or "")
    assert "it is another, `gemm_b`" in (profiling.longest_kernel(found) or "")
    assert "50% of kernel time in inference and 40%, less," in (profiling.products_share(found) or "")
    assert profiling.other_kernels(found) == (
        "(c) Besides matrix products (50%), copy kernels 20% of the forward pass's kernel time."
    )
    same = evidence(profile("forward", "gemm_a", 0.5), profile("train_step", "gemm_a", 0.6))
    assert "it is the same (" in (profiling.longest_kernel(same) or "")
    assert "60%, more," in (profiling.products_share(same) or "")

    longer = (profile("forward", "gemm_a", 0.25, 16), profile("train_step", "gemm_a", 0.2, 16))
    of_two = [profile("forward", "gemm_a", 0.5), profile("train_step", "gemm_b", 0.4), *longer]
    two = evidence(*of_two)
    ends = "goes from 25% (xl, 16 tokens) to 50% (xl, 8 tokens)."
    assert (profiling.other_kernels(two) or "").endswith(f"Over 2 settings the share of matrix products {ends}")
    assert "Over 2 settings the share of matrix products in a step goes from 20%" in (
        profiling.products_share(two) or ""
    )
    assert "In 2 of 2 settings it is a matmul kernel." in (profiling.longest_kernel(two) or "")
    of_fp32 = [replace(each, config={**each.config, "precision": "fp32"}) for each in longer]
    both = evidence(*of_two, *of_fp32, profile("forward", "copy", 0.1, 32))
    assert "In 1 of 1 settings in fp32 and in 3 of 3 settings in bf16 it" in (profiling.longest_kernel(both) or "")
    assert (profiling.other_kernels(both) or "").endswith(
        "Over 3 settings in bf16 the share of matrix products goes from 10% (xl, 32 tokens) to 50% (xl, 8 tokens)."
    )
    assert "Over" not in (profiling.profiled_time(found) or "Over")
    assert "Under the profiler" not in (profiling.profiled_time(found) or "")
    assert (profiling.profiled_time(found) or "").endswith("90% of that: the GPU is busy nearly all the time.")
    config = found.ok("profile-kernels", mode="forward")[0].config
    before = row("model", metrics={"forward_ms": {"p50": 8.0}}, **config | {"mode": "train_step"})
    assert (profiling.profiled_time(evidence(profile("forward", "gemm_a", 0.5), before)) or "").endswith(
        " In benchmarking_script such a pass takes 8 ms, 0.80 times as long as here."
    )
    assert "such a pass" not in (profiling.profiled_time(evidence(profile("forward", "gemm_a", 0.5, 16), before)) or "")
    here = replace(profile("forward", "gemm_a", 0.5), env=ENV | {"gpu": None})
    assert (profiling.profiled_time(evidence(here)) or "").endswith("90% of that, on a CPU.")


def recorded(mode: str, peak: int, size: str = "2.7B", length: int = 128, precision: str = "fp32", **more: Any) -> Row:
    """What the memory profiler has recorded of a step of a made-up model."""
    parts = {"parameters": 2 << 30, "optimizer state": 4 << 30, "gradients": 0, "activations": peak - (6 << 30)}
    parts |= {"temporaries": 0, "other": 0}
    metrics: dict[str, Any] = {"peak_bytes": peak, "peak_phase": "backward", "at_peak_bytes": parts}
    metrics |= {"phase_peak_bytes": {"forward": peak - 1, "backward": peak, "optimizer": 8 << 30}}
    metrics |= {"counted": {"residual_stream_bytes": 2 * length * 16 * 4, "parameter_bytes": 2 << 30}}
    config = dict(size=size, batch_size=2, context_length=length, d_model=16, d_ff=64, num_layers=1, num_heads=4)
    config |= dict(vocab_size=10, precision=precision, mode=mode, optimizer="torch_fused")
    return row("profile-memory", mode, metrics | more, **config)


def test_memory_is_told_by_part_and_phase() -> None:
    said = memory.memory_over_time(evidence(recorded("train_step", 20 << 30)))
    assert said is not None
    assert said.startswith(
        "(a) From PyTorch's allocator history (a memory snapshot, drawn here): a train step of 2.7B, 128 tokens, fp32 "
        "peaks at 20 GiB in its backward phase, of which activations 14 GiB, optimizer state 4 GiB and parameters "
        "2 GiB; the peaks of its phases are forward 20 GiB, backward 20 GiB and optimizer 8 GiB."
    )
    assert "falls in the backward pass, where activations are freed faster" in said
    short = recorded("train_step", 9 << 30)
    short.metrics["phase_peak_bytes"] |= {"forward": 7 << 30}
    assert "keeps rising in the backward pass" in (memory.memory_over_time(evidence(short)) or "")
    assert "of which optimizer state 4 GiB, activations 3 GiB" in (
        memory.memory_over_time(evidence(recorded("train_step", 9 << 30))) or ""
    )
    two = evidence(recorded("train_step", 9 << 30), recorded("forward", 7 << 30))
    assert "keeps nothing for later: it peaks at 7 GiB" in (memory.memory_over_time(two) or "")
    with pytest.raises(ClaimError, match="'a forward pass alone keeps nothing for later'"):
        memory.memory_over_time(evidence(recorded("train_step", 9 << 30), recorded("forward", 10 << 30)))


def test_peaks_are_of_2026s_xl_by_length_mode_and_precision() -> None:
    rows = [recorded("forward", 7 << 30), recorded("train_step", 9 << 30), recorded("forward", 8 << 30, "xl")]
    rows += [recorded("forward", 14 << 30, precision="bf16"), recorded("train_step", 6 << 30, precision="bf16")]
    failed = replace(recorded("train_step", 0, length=2048), status="oom", metrics={})
    said = memory.peaks_by_length(evidence(*rows, failed))
    assert said is not None
    assert said.startswith(
        "(b) Peaks of 2.7B in fp32: forward pass 7 GiB at 128 tokens; train step 9 GiB at 128 tokens and out of memory "
        "at 2048 tokens. For a train step the planner counts 173 GiB at 2048 tokens."
    )
    by_precision = memory.memory_by_precision(evidence(*rows, failed)) or ""
    assert "a forward pass goes from 7 GiB to 14 GiB, +100%, at 128 tokens" in by_precision
    assert "a train step goes from 9 GiB to 6 GiB, -33%, at 128 tokens" in by_precision
    assert "inference, which keeps no activations, needs more" in by_precision
    # Where the profiler has not recorded both modes, the rows of the case model are told.
    model = row("model", metrics={"peak_memory_bytes": 5 << 30}, size="2.7B", context_length=128, mode="forward",
                precision="fp32")  # fmt: skip
    assert "forward pass 5 GiB at 128 tokens" in (memory.peaks_by_length(evidence(rows[0], model)) or "")
    assert memory.peaks_by_length(evidence()).startswith("(b) For a train step the planner counts 51")


def test_an_activation_of_the_residual_stream_is_as_it_was_counted() -> None:
    assert memory.residual_size(evidence()).endswith("4 x 512 x 2560 x 4 = 20 MiB.")
    wrong = recorded("train_step", 9 << 30)
    wrong.metrics["counted"]["residual_stream_bytes"] = 1
    with pytest.raises(ClaimError, match=r"size of the residual stream.*formula 16384, row 1"):
        memory.residual_size(evidence(wrong))


def test_the_largest_allocations_are_those_of_a_forward_pass_and_known_by_their_size() -> None:
    def largest(size: int) -> dict[str, Any]:
        entry = {"bytes": size, "phase": "forward", "code": ["model.py:33 attention"]}
        return {"largest": [entry, {**entry, "code": ["model.py:36 attention"]}, {**entry, "bytes": 1}]}

    scores = 4 * 2 * 4 * 128 * 128
    step = recorded("train_step", 9 << 30, **largest(scores))
    assert memory.largest_allocation(evidence(step)) == (
        "(e) The largest allocations in the forward phase of the recorded train step of 2.7B, 128 tokens, fp32 (no "
        "forward pass alone is recorded) have 0.5 MiB, each a matrix of attention scores in float32, `4 B H N^2` "
        "bytes, made by `model.py:33 attention` and `model.py:36 attention`."
    )
    before = {"largest": [{"bytes": 9 << 20, "phase": "before", "code": []}]}  # weights, say
    assert memory.largest_allocation(evidence(recorded("train_step", 9 << 30, **before))) is None
    forward = recorded("forward", 7 << 30, **largest(4 << 20))
    assert memory.largest_allocation(evidence(forward, step)) == (
        "(e) The largest allocations in the forward phase of the recorded forward pass of 2.7B, 128 tokens, fp32 have "
        "4 MiB, made by `model.py:33 attention` and `model.py:36 attention`."
    )


def test_what_a_block_saves_and_its_gradients_by_count_and_as_recorded() -> None:
    tensors = [{"what": f"op {i}", "count": 1, "bytes": i << 20} for i in 2 * (1, 2, 3, 4, 5, 6)]
    metrics = {"saved_bytes": 42 << 20, "input_bytes": 1 << 20, "tensors": tensors}
    config = dict(size="xl", context_length=512, precision="fp32", compile=False, attention="naive")
    block = row("residuals", "fp32 naive", metrics, **config, d_model=1024, d_ff=4096)
    said = memory.largest_residuals(evidence(block)) or ""
    assert "A block of xl, 512 tokens, fp32, `naive`, saves 42 MiB" in said
    assert "the 5 operations that save most are `op 6` 12 MiB (29%), `op 5` 10 MiB (24%)" in said
    assert said.endswith("`op 2` 4 MiB (9.5%), together 95%.")
    by_count = memory.block_gradients(evidence(block)) or ""
    assert "= 64 MiB; 43 MiB are freed, its input included, so memory rises by 21 MiB a block" in by_count

    one_block = 4 * (4 * 16**2 + 3 * 16 * 64 + 2 * 16)
    step = recorded("train_step", 9 << 30)
    step.metrics["counted"]["parameter_bytes"] = one_block + 1000  # of embedding, head and last norm
    step.metrics["phase_peak_bytes"]["optimizer"] = (6 << 30) + one_block + 1000
    assert (memory.block_gradients(evidence(block, step)) or "").endswith("0.0157 MiB a block, as counted.")
    profiled = recorded("train_step", 9 << 30, size="xl", length=512)
    how = dict(batch_size=2, attention="naive", compile=False, activation_checkpointing="none", num_layers=2)
    profiled = replace(profiled, config={**profiled.config, **block.config, **how})
    block = replace(block, config={**block.config, **how})
    outside = 4 * 1024 * (2 * 10 + 1)  # weights of embedding, head and last norm
    freed = 12 * 1024 * 1024 + 8 * 1024 + 8 * 1024 * 10  # what last norm and head save, then logits and loss
    profiled.metrics["counted"]["parameter_bytes"] = 2 * 4 * (4 * 1024**2 + 3 * 1024 * 4096 + 2 * 1024) + outside
    phases = {"forward": (3 << 30) + freed, "optimizer": (3 << 30) + (42 << 20) + outside}
    profiled.metrics["phase_peak_bytes"] |= phases
    assert (memory.block_gradients(evidence(block, profiled)) or "").endswith(
        "Outside of blocks, by count, 12.1 MiB are freed, of last norm, head and loss, and gradients of 0.082 MiB "
        "made; the rest is 21 MiB a block, so its gradients have 43 MiB + 21 MiB = 64 MiB, as counted."
    )
    profiled.metrics["phase_peak_bytes"]["forward"] -= 1 << 30
    assert (memory.block_gradients(evidence(block, profiled)) or "").endswith("where 64 MiB are counted.")
    step.metrics["phase_peak_bytes"]["optimizer"] += one_block
    with pytest.raises(ClaimError, match="'as counted'"):
        memory.block_gradients(evidence(block, step))


def test_checkpointing_that_saves_nothing_fails() -> None:
    def policy(name: str, nbytes: int, k: int | None, precision: str = "bf16", attention: str = "flash_triton") -> Row:
        metrics = {"peak_bytes": nbytes, "predicted_bytes": nbytes, "best_group": 2.5, "step_ms": {"p50": 10.0}}
        kind = name.partition("_")[0]
        shape = dict(vocab_size=10_000, num_layers=48, d_model=1600, d_ff=6400, num_heads=25, context_length=1024)
        config = dict(size="xl", batch_size=4, mode="forward_backward", precision=precision, compile=False,
                      activation_checkpointing=name, attention=attention, **shape)  # fmt: skip
        return row("checkpointing", name, metrics, **config, policy=kind, K=k)

    rows = [policy("none", 8 << 30, None), policy("groups_2", 2 << 30, 2), policy("groups_4", 3 << 30, 4)]
    said = checkpointing.least_memory(evidence(*rows)) or ""
    assert said.startswith(
        "`groups_2` needs less than no checkpointing, and least of all 2 policies: 2 GiB instead of 8 GiB"
    )
    smaller = policy("groups_1", 4 << 30, 1)
    best = checkpointing.best_size(evidence(smaller, *rows)) or ""
    assert "K = 2 needs least, 2 GiB beyond weights and gradients, beside 4 GiB with K = 1 and 3 GiB with K = 4" in best
    assert "`sqrt(L I / A)`, 2.5, counts only a group's backward pass." in best
    assert "by which K = 4 would be the least;" in best
    assert "Measured" not in checkpointing.group_reasoning(evidence(smaller, *rows))
    shape = dict(size="2.7B", num_layers=32, d_model=2560, d_ff=10240, num_heads=32, context_length=2048)
    given = [policy(f"groups_{k}", size, k, "fp32", "naive") for k, size in ((1, 11781832712), (2, 14772437000))]
    asked = [replace(each, config={**each.config, **shape}) for each in given]
    assert checkpointing.group_reasoning(evidence(smaller, *rows, *asked)).endswith(
        "K = 1 is best by the planner. Measured so, K = 1 needs least, 11 GiB beyond weights and gradients, beside "
        "13.8 GiB with K = 2, each within 0.1% of the planner's count."
    )
    less = [
        replace(each, metrics={**each.metrics, "predicted_bytes": each.metrics["peak_bytes"] * 0.8}) for each in asked
    ]
    assert checkpointing.group_reasoning(evidence(smaller, *rows, *less)).endswith(
        "each within 0.1% of the planner's count (it was 20% off until these were measured)."
    )
    assert checkpointing.best_size(evidence(*asked)) is None
    assert "and K = 4 is best by the planner" in (checkpointing.other_reasoning(evidence()) or "")
    ours = [replace(each, config={**each.config, "size": "2.7B"}) for each in (rows[0], rows[2])]
    assert "`groups_4` needs less" in (checkpointing.least_memory(evidence(*rows, *ours)) or "")
    with pytest.raises(ClaimError, match=r"made_up.*`groups_2` needs less.*least 2147483648, none 1073741824"):
        checkpointing.least_memory(evidence(policy("none", 1 << 30, None), *rows[1:]))


def test_collectives_are_compared_by_size_and_backend() -> None:
    def call(backend: str, nbytes: int, ms: float, ranks: int = 2) -> Row:
        metrics = {"time_ms": {"p50": ms}, "bus_bytes_per_s": 2e9}
        what = dict(collective="all-reduce", backend=backend, world_size=ranks, bytes=nbytes)
        return row("all-reduce", backend, metrics, **what)

    rows = [call("gloo", 10**6, 10.0), call("gloo", 10**8, 100.0), call("nccl", 10**8, 1.0)]
    assert collectives.bandwidths(evidence(*rows)) == (
        "An all-reduce of 100 MB takes 100 ms with gloo over 2 (2 GB/s on the bus) and 1 ms with nccl over 2 "
        "(2 GB/s on the bus)."
    )
    some = [call("gloo", 10**8, ms, ranks) for ranks, ms in ((8, 9.0), (2, 3.0), (4, 5.0))]
    assert (collectives.bandwidths(evidence(*some)) or "").endswith(
        "takes 3 ms with gloo over 2 (2 GB/s on the bus) and 9 ms with gloo over 8 (2 GB/s on the bus)."
    )
    assert "is 100 times as fast as gloo" in (collectives.backends(evidence(*rows)) or "")
    assert collectives.backends(evidence(*rows[:2])) is None
    assert collectives.by_ranks(evidence(*rows)) is None
    rows += [call("nccl", 10**6, 0.5), call("nccl", 10**8, 1.2, 4), call("nccl", 10**6, 0.6, 4)]
    assert collectives.small_and_large(evidence(*rows)) == (
        "At the rate of 100 MB, 1 MB would take 1 ms with gloo over 2 ranks and 0.012 ms with nccl over 4 ranks; it "
        "takes 10 ms and 0.6 ms, of which the rest is the overhead of a call."
    )
    assert collectives.small_and_large(evidence(call("gloo", 10**6, 1.0), call("gloo", 10**8, 100.0))) is None
    assert collectives.by_ranks(evidence(*rows)) == (
        "From 2 to 4 ranks nccl takes 1.20 times as long for the largest, where a ring sends 1.50 times the bytes."
    )


def bucket_sizes(step_ms: dict[float, float], is_recorded: bool = False, **predicted: float) -> list[Row]:
    """The rows of bucket-size of xl on two GPUs, of which one alone takes 100 ms."""
    predicted = {"added_ms": 1.0, "best_mb": 300.0, "overhead_s": 39e-6, "bytes_per_s": 344e9, **predicted}
    setting = dict(**XL, compile=is_recorded, cuda_graph=is_recorded)
    rows = [timed("bucket-size", 100.0, "alone", **setting, bucket_size_mb=None)]
    for size, ms in step_ms.items():
        made = timed("bucket-size", ms, f"bucketed:{size:g}", **setting, bucket_size_mb=size)
        rows.append(replace(made, metrics={**made.metrics, "predicted": predicted, "buckets": 434}))
    return rows


def test_the_best_bucket_is_that_which_adds_least() -> None:
    said = buckets.buckets(evidence(*bucket_sizes({100.0: 112.0, 1.0: 130.0}, added_ms=12.0))) or ""
    assert said.startswith("(a) Expected: small buckets pay for many calls")
    assert said.endswith("Measured with 1 and 100 MiB: eager, 100 MiB adds least, 12 ms a step.")


def test_buckets_whose_steps_overlap_are_not_told_apart() -> None:
    rows = bucket_sizes({1.0: 130.0, 100.0: 112.0, 300.0: 112.5}, added_ms=12.0)
    for each in rows[1:]:
        middle = each.metrics["step_ms"]["p50"]
        each.metrics["step_ms"] |= {"p20": middle - 1, "p80": middle + 1}
    assert "12 ms a step (not distinguishable from 300 MiB)." in (buckets.buckets(evidence(*rows)) or "")


def test_the_optimum_of_buckets_is_told_for_two_h200_and_as_the_rows_have_it_where_that_is_another() -> None:
    assert buckets.bucket_optimum(evidence()).endswith("fit w = 344 GB/s and o = 39 us, that is 314 MiB.")
    theirs = "By the all-reduces of the machine that was measured it is 300 MiB."
    assert buckets.bucket_optimum(evidence(*bucket_sizes({100.0: 112.0}))).endswith(theirs)
    same = bucket_sizes({100.0: 112.0}, best_mb=314.1)
    assert "that was measured" not in buckets.bucket_optimum(evidence(*same))


def test_the_best_bucket_is_told_recorded_and_eager() -> None:
    recorded = bucket_sizes({1000.0: 118.0, 300.0: 118.4}, is_recorded=True, added_ms=20.0)
    eager = bucket_sizes({1000.0: 165.0, 300.0: 139.0}, added_ms=20.0)
    said = buckets.buckets(evidence(*eager, *recorded)) or ""
    assert said.endswith(
        "Measured with 300 and 1,000 MiB: compiled, the step recorded as a CUDA graph, 1,000 MiB adds least, 18 ms a "
        "step; eager, 300 MiB adds least, 39 ms a step."
    )


def test_what_the_model_of_buckets_leaves_out_is_said_where_it_is_off() -> None:
    hidden = buckets.buckets(evidence(*bucket_sizes({300.0: 118.0}, added_ms=2.0))) or ""
    assert "At 300 MiB the model of (b) predicts 2 ms, but 18 ms are measured: it counts hidden transfers" in hidden
    assert "Results would come closer where the GPU, not the host, sets the pace" in hidden
    assert "calls, but" not in hidden
    small = buckets.buckets(evidence(*bucket_sizes({1.0: 136.0, 300.0: 118.0}, added_ms=300.0))) or ""
    assert small.endswith(
        "At 1 MiB it predicts 300 ms, but 36 ms are measured: it counts 7,623 calls, but a tensor is never split, so "
        "there are 434."
    )
    assert "hidden" not in small


def test_sharding_that_does_not_divide_the_state_fails() -> None:
    def measured(case: str, variant: str, state: int, nbytes: int) -> Row:
        parts = {"parameters": 2**30, "gradients": 2**30, "optimizer_state": state, "activations": 3 << 30}
        moments = {name: {"peak_bytes": nbytes, "live_bytes": nbytes - 1, "parts": parts} for name in MOMENTS}
        metrics = {"moments": moments, "peak_memory_bytes": nbytes, "step_ms": {"p50": 10.0}}
        return row(case, variant, metrics, devices=2, size="xl")

    plain = measured("optimizer-sharding", "overlap", 4 << 30, 8 << 30)
    halved = measured("optimizer-sharding", "overlap+zero1", 2 << 30, 6 << 30)
    said = several_gpus.sharded_memory(evidence(plain, halved)) or ""
    assert "6 GiB instead of 8 GiB after initialisation" in said
    assert "step 6 GiB instead of 8 GiB are in use: AdamW's moments 2 GiB instead of 4 GiB, and parameters 1 " in said
    assert "earlier, where activations, 3 GiB, are there instead of gradients" in said
    whole = measured("optimizer-sharding", "overlap+zero1", 4 << 30, 8 << 30)
    with pytest.raises(ClaimError, match="sharding divides the optimizer's state"):
        several_gpus.sharded_memory(evidence(plain, whole))
    sharded = [
        measured("fsdp-accounting", "overlap", 4 << 30, 8 << 30),
        measured("fsdp-accounting", "fsdp", 1, 9 << 30),
    ]
    with pytest.raises(ClaimError, match="'FSDP needs less memory'"):
        fully_sharded.fsdp_memory(evidence(*sharded))


def step_8b(ms: float, strategy: str = "fsdp", attention: str = "sdpa", policy: str = "first_6", **more: Any) -> Row:
    fields = dict(strategy=strategy, attention=attention, activation_checkpointing=policy, size="8B")
    made = timed("leaderboard-2026", ms, f"{strategy} {policy}", **fields)
    return replace(made, metrics={**made.metrics, "tokens_per_s": 65536.0, "mfu": 0.5, **more})


def test_the_8b_step_beside_pytorchs_sharding() -> None:
    said = leaderboard_2026.fastest_8b(evidence(step_8b(5000.0), step_8b(4000.0), step_8b(6000.0, "torch_fsdp"))) or ""
    assert "takes 4.00 s (65,536 tokens/s, 50% of the peak rate) and peaks at 1 GiB a GPU" in said
    uneven = replace(step_8b(4000.0), metrics={**step_8b(4000.0).metrics, "step_ms": {"p50": 4000.0, "mean": 4100.0}})
    assert "takes 4.00 s, in the mean 4.10 s (" in (leaderboard_2026.fastest_8b(evidence(uneven)) or "")
    assert said.endswith("; it takes 1.50 times as long with PyTorch's `fully_shard`.")


def test_8b_steps_are_compared_that_differ_in_nothing_else() -> None:
    faster, alike, theirs = step_8b(4000.0, policy="first_2"), step_8b(4800.0), step_8b(4800.0, "torch_fsdp")
    said = leaderboard_2026.fastest_8b(evidence(faster, alike, theirs)) or ""
    assert said.endswith("; `fsdp first_6` takes 4.80 s, and as long with PyTorch's `fully_shard`.")
    assert "fully_shard" not in (leaderboard_2026.fastest_8b(evidence(faster, theirs)) or "")
    elsewhere = replace(theirs, env={**ENV, "cpu_threads": 64})
    assert (leaderboard_2026.fastest_8b(evidence(alike, elsewhere)) or "").endswith("`fully_shard` (in another run).")
    own = step_8b(5040.0, attention="flash_triton")
    assert leaderboard_2026.own_8b(evidence(faster, alike, own)) == (
        "With our own attention, as the leaderboard's rules ask, `fsdp first_6` takes 5.04 s, 2.0 times as fast as the "
        "baseline of 10 s, which is for two B200; that is 5.0% longer than the same with PyTorch's attention."
    )
    assert (leaderboard_2026.own_8b(evidence(faster, own)) or "").endswith("which is for two B200.")
    best = step_8b(4900.0, attention="flash_triton", policy="first_4")
    assert (leaderboard_2026.own_8b(evidence(alike, own, best)) or "").endswith(
        "; `fsdp first_6` with it is 5.0% longer than the same with PyTorch's attention."
    )


def test_how_many_8b_steps_do_not_fit_is_said_as_it_is_spoken() -> None:
    failed = [replace(step_8b(0.0, policy=policy), status="oom", metrics={}) for policy in ("none", "first_1")]
    one, two = (leaderboard_2026.fastest_8b(evidence(step_8b(4000.0), *failed[:n])) or "" for n in (1, 2))
    assert one.endswith("; 1 variant is out of memory: `fsdp none`.")
    assert two.endswith("; 2 variants are out of memory: `fsdp none` and `fsdp first_1`.")


def test_the_8b_step_with_our_own_attention_and_from_empty_caches() -> None:
    rows = [step_8b(4000.0, startup_s=90.0), step_8b(5000.0, attention="flash_triton", startup_s=120.0)]
    assert "; that is 25% longer than the same with PyTorch's" in (leaderboard_2026.own_8b(evidence(*rows)) or "")
    assert leaderboard_2026.own_8b(evidence(rows[0])) is None
    assert "with the 40 s of the handout's timer that is within the 600 s" in (
        leaderboard_2026.from_empty_caches(evidence(*rows)) or ""
    )
    assert "beyond the 600 s" in (leaderboard_2026.from_empty_caches(evidence(step_8b(1.0, startup_s=570.0))) or "")


def test_the_time_of_a_sharded_optimizer_is_that_of_the_rows_that_have_its_memory_and_of_ddp() -> None:
    fields = dict(devices=2, context_length=512, batch_size=4, compile=False)
    memory = [timed("optimizer-sharding", ms, name, size="2.7B", **fields)
              for name, ms in (("overlap", 200.0), ("overlap+zero1", 210.0))]  # fmt: skip
    said = several_gpus.sharded_time(evidence(*memory))
    first = "A step of 2.7B on 2 ranks with the optimizer sharded takes 210 ms instead of 200 ms with `overlap`, 5.0% "
    assert said == f"(b) {first}longer; its peak is 0 KiB less."
    assert several_gpus.sharded_time(evidence(*memory[:1])) is None

    def with_ddp(devices: int = 2, gpu: str = ENV["gpu"]) -> str:
        launch = [timed("ddp", ms, name, size="2.7B", **{**fields, "devices": devices})
                  for name, ms in (("overlap", 200.0), ("overlap+zero1", 190.0))]  # fmt: skip
        elsewhere = [replace(each, env={**each.env, "gpu": gpu}) for each in launch]
        return several_gpus.sharded_time(of_files(memory, elsewhere)) or ""

    assert "`overlap`, 5.0% shorter (5.0% longer in 1 other launch, so that" in with_ddp()
    assert [part[:25] for part in with_ddp(devices=4).split("A step of ")[1:]] == [
        "2.7B on 2 ranks with the ", "2.7B on 4 ranks with the "
    ]  # fmt: skip
    assert with_ddp(gpu="another").endswith("190 ms instead of 200 ms with `overlap`, 5.0% shorter; its peak is 0 KiB "
                                            "less.")  # fmt: skip


def test_gathers_of_the_forward_pass_are_told_apart_from_those_of_the_backward_pass() -> None:
    def gather(unit: str, turn: int, slack: float) -> dict[str, Any]:
        return {"unit": unit, "turn": turn, "ms": 2.0, "slack_ms": slack, "stall_ms": max(0.0, -slack)}

    gathers = [gather("embedding", 1, -3.0), gather("block 0", 1, 1.0), gather("block 0", 2, -9.0)]
    metrics = {"moments": {}, "gathers": gathers, "step_ms": {"p50": 50.0}}
    said = fully_sharded.fsdp_gathers(evidence(row("fsdp-accounting", "fsdp", metrics, size="2.7B")))
    assert said == (
        "(b) In a step of 2.7B 1 of 2 all-gathers of the forward pass, which take 2 ms each, are over before their "
        "weights are needed; it waits for `embedding`, 3 ms of a step's 50 ms. In the backward pass 0 of 1 are in time."
    )


def test_every_part_of_the_accounting_of_communication_is_answered_with_a_smaller_batch_on_as_many_devices() -> None:
    answer = build.paragraphs([several_gpus.xxl(evidence()), several_gpus.smaller_batches(evidence())])
    assert [paragraph[2:5] for paragraph in answer] == ["(a)", "(b)", "(c)", "(d)"]
    alpha = 4.6e14 / 1.8e11
    assert f"{alpha * 16 / 2:,.0f} in all" in answer[2]
    # B = alpha X / M_X, and Y may grow to F M_Y / alpha: of the divisors of 64 to 16.
    assert (
        f"X = 4, Y = 16 as many devices need {alpha * 4 / 2:,.0f} tokens instead of {alpha * 16 / 2:,.0f}" in answer[3]
    )
    assert 53248 / alpha >= 16 > 53248 / alpha / 2


def test_what_fsdp_is_expected_to_save_is_half_of_sixteen_bytes_a_parameter() -> None:
    parameters = 2 * 10_000 * 2560 + 32 * (4 * 2560**2 + 3 * 2560 * 10_240 + 2 * 2560) + 2560
    told = f"`16 N / 2` = {claims.gib(8 * parameters)} instead of `16 N` = {claims.gib(16 * parameters)}"
    assert told in fully_sharded.expected_saving(evidence())
    assert re.search(
        r"peaks of \S+ GiB with FSDP, \S+ GiB with nothing sharded and", fully_sharded.expected_saving(evidence())
    )
    state = fully_sharded.sharding_working()[0]
    assert state.value("optimizer state sharded") == 12 * parameters
    assert state.value("everything sharded") == 8 * parameters


class Blocks:
    """Blocks that count how often they are computed, and what is in memory when one of them is differentiated."""

    def __init__(self, count: int) -> None:
        self.computed = self.most_inputs = self.most_residuals = 0
        self._inputs: list[weakref.ref] = []
        self._residuals: list[weakref.ref] = []
        self.all = [self._block] * count

    def _block(self, x: torch.Tensor) -> torch.Tensor:
        blocks = self
        self.computed += 1
        self._inputs.append(weakref.ref(x.untyped_storage()))

        class Block(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                residual = torch.ones(1)
                blocks._residuals.append(weakref.ref(residual.untyped_storage()))
                ctx.save_for_backward(x, residual)
                return x + 1

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                saved = ctx.saved_tensors  # made again here, and held while they are counted
                blocks._look()
                del saved
                return gradient

        return Block.apply(x)

    def _look(self) -> None:
        inputs = [storage._cdata for reference in self._inputs if (storage := reference()) is not None]
        self.most_inputs = max(self.most_inputs, len(set(inputs)))
        self.most_residuals = max(self.most_residuals, sum(reference() is not None for reference in self._residuals))


def differentiated(code: str, count: int) -> Blocks:
    """Blocks after a forward and a backward pass by `run` of some code."""
    names: dict[str, Any] = {"checkpoint": checkpoint}
    exec(code, names)
    blocks, x = Blocks(count), torch.zeros(1, requires_grad=True)
    with set_checkpoint_early_stop(False):  # which leaves out what is computed in vain
        names["run"](blocks.all, x).backward()
    assert x.grad == 1
    return blocks


ONE_BY_ONE = """
def run(blocks, x):
    if len(blocks) > 1:
        x = checkpoint(run, blocks[:-1], x, use_reentrant=False)
    return blocks[-1](x)
"""
GROUPS = """
def run(blocks, x):
    size = round(len(blocks) ** 0.5)
    def group(first, x):
        for block in blocks[first : first + size]:
            x = block(x)
        return x
    for first in range(0, len(blocks), size):
        x = checkpoint(group, first, x, use_reentrant=False)
    return x
"""


def test_halves_keep_the_inputs_and_compute_the_blocks_that_the_answer_says() -> None:
    for count in (*range(1, 18), 31, 32, 33, 63, 64):
        blocks, levels = differentiated(checkpointing.HALVES, count), math.ceil(math.log2(count))
        assert blocks.most_residuals == 1, count
        assert blocks.most_inputs == levels + 1, count
        most = count * (levels + 1)
        assert blocks.computed == most if count == 2**levels else count * levels < blocks.computed < most, count


def test_what_the_answer_says_of_other_arrangements() -> None:
    one_by_one = differentiated(ONE_BY_ONE, 20)
    assert (one_by_one.most_residuals, one_by_one.most_inputs, one_by_one.computed) == (1, 2, 20 * 21 // 2)
    groups = differentiated(GROUPS, 36)
    assert (groups.most_residuals, groups.computed) == (6, 2 * 36)
    assert groups.most_inputs == 6 + 6 - 1  # of the groups, and of the blocks of one, the first of which is the same


def test_evidence_is_of_one_machine_and_the_last_measurement() -> None:
    cpu = [replace(timed("model", 5.0, size=s), env={"gpu": None, "cpu_threads": 2}) for s in "abc"]
    again = [timed("model", 7.0, size="a"), timed("model", 8.0, size="a")]
    assert [claims.p50(each) for each in evidence(*cpu, *again).ok("model")] == [8.0]


@pytest.mark.parametrize(
    "made, text",
    [
        (claims.ms(3.14159), "3.14 ms"), (claims.ms(1234.5), "1,234 ms"), (claims.gib(3 << 30), "3 GiB"),
        (claims.percent(0.0567), "5.7%"), (claims.percent(0.567), "57%"), (claims.times(1.234), "1.23 times"),
        (claims.times(1000.0), "1,000 times"),
        (claims.about(row("c", length=16384, size="xl"), "length", "size"), "length 16,384, xl"),
        (claims.times(12.34), "12 times"), (claims.span([3, 1, 2], str), "1 to 3"), (claims.span([1, 1], str), "1"),
        (claims.span([2, 1], claims.ms), "1 to 2 ms"),
        (claims.listing(["a", "b", "c"]), "a, b and c"), (claims.listing(["a"]), "a"),
    ],
)  # fmt: skip
def test_figures_as_text(made: str, text: str) -> None:
    assert made == text


def test_every_problem_of_the_handout_is_there_in_its_order() -> None:
    assert [problem.name for problem in PROBLEMS] == HANDOUT


def test_a_part_of_an_answer_is_a_paragraph() -> None:
    said = ["Before.", "(a) One (b of it).", "More.", "(b) Two. (c, d) Three (a) aside."]
    assert build.paragraphs(said) == [
        "Before.", "**(a)** One (b of it). More.", "**(b)** Two.", "**(c, d)** Three (a) aside.",
    ]  # fmt: skip


def test_formulas_below_a_calculation_are_code() -> None:
    section = Section("T", (Term("a", "b * c", 1.0, ""),), ("note:", "  x * y", "  z", "end"))
    assert build._section_text(section).endswith("- note:\n\n```\nx * y\nz\n```\n\n- end")


def test_each_problem_names_its_section_in_each_edition() -> None:
    only = {edition: {p.name for p in PROBLEMS if not p.places[i]} for i, edition in enumerate((2025, 2026))}
    assert only[2025] == set(HANDOUT[HANDOUT.index("gradient_checkpointing") :])
    bucketed = {"ddp_overlap_bucketed", "ddp_bucketed_benchmarking"}
    assert only[2026] == {"leaderboard", "communication_accounting"} | bucketed
    assert all(re.fullmatch(r"(\d(\.\d){0,2})?", place) for problem in PROBLEMS for place in problem.places)


def test_what_2026_calls_its_sizes_is_said_where_they_are_named() -> None:
    sizes = MODEL_SIZES[claims.XL_2026]
    told = f"`xl` of 2026 ({sizes['d_model']} wide, {sizes['num_layers']} layers) is `--size {claims.XL_2026}` here"
    assert told in (ROOT / "docs/assignment.md").read_text()
    assert "2560 / 10240 / 32 / 32, is `2.7B` here" in document({}, ROOT, ())


def test_problems_name_files_and_calculations_that_are_there() -> None:
    from cs336_systems.cli.plan import _COMMANDS

    for problem in PROBLEMS:
        assert not [path for path in problem.code if not (ROOT / path).exists()], problem.name
        assert not problem.plan or problem.plan.split()[1] in _COMMANDS


COMMANDS = {command: each.case for problem in PROBLEMS for each in problem.exhibits for command in each.commands}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse_and_give_configurations(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    what, name, *options = shlex.split(command)
    if what == "profile":
        assert COMMANDS[command] == f"profile-{name}"
        asked: list[Any] = []
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("cs336_systems.bench.case.check_sized_for_gpu", lambda *_: None)
        monkeypatch.setattr(profile_command, "measure", lambda case, each, *_: asked.extend(each) or [])
        assert profile_command.profile([name, *options]) == 0
        assert len(asked) > 1
        return
    assert (what, name) == ("bench", COMMANDS[command])
    assert name in NAMES
    case = get_case(name)
    parsed = bench_command.case_parser(case, "bench", "bench", "", is_quick=False).parse_args(options)
    given = {
        name: tuple(values) for name in case.config.__dataclass_fields__ if (values := getattr(parsed, name, None))
    }
    parsers = {field.name: field.metadata.get("parse") or (lambda value: value) for field in fields(case.config)}
    values = {name: tuple(map(parsers[name], several)) for name, several in given.items()}
    try:
        found = configurations(case, values)
    except ValueError:
        if torch.cuda.is_available():
            raise
        found = configurations(case, values, quick=True)  # some take what is left open only where there is a GPU
    assert found


def test_without_rows_each_problem_gives_its_command(tmp_path: Path) -> None:
    text = document({}, tmp_path)
    assert re.findall(r"^### (\S+)$", text, re.M) == HANDOUT
    for problem in PROBLEMS:
        for exhibit in problem.exhibits:
            if len(exhibit.commands) == 1:
                assert f"Not measured yet; this measures it: `cs336 {exhibit.command}`." in text
            else:
                lines = "\n".join(f"cs336 {command}" for command in exhibit.commands)
                assert f"Not measured yet; these measure it:\n\n```\n{lines}\n```" in text


def test_rows_of_another_setting_are_shown_and_the_command_that_is_asked_for_stands_below(tmp_path: Path) -> None:
    problem = next(each for each in PROBLEMS if each.name == "naive_ddp_benchmarking")
    setting = dict(devices=2, context_length=512, batch_size=4, precision="bf16", compile=False)

    def made(size: str) -> str:
        file = RowFile(tmp_path / "ddp.jsonl", [timed("ddp", 1.0, "naive", size=size, **setting)])
        return "\n".join(build.problem_parts(problem, {"ddp": [file]}, tmp_path))

    other, asked = made("xl"), made("2.7B")
    command = problem.exhibits[0].command
    assert "measured by `cs336 bench ddp` with the settings in and above the table" in other
    assert f"Not measured yet as 2026 asks for it; this measures it: `cs336 {command}`." in other
    assert f"measured by `cs336 {command}`" in asked
    assert "Not measured" not in asked


def test_recordings_of_several_files_are_one_table_and_a_picture_a_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = next(each for each in PROBLEMS if each.name == "memory_profiling")
    files, drawn = [], []

    def draw(row: Row, path: Path) -> Path:
        drawn.append((row.variant, row.config["context_length"]))
        return draw_timeline(row, path)

    monkeypatch.setattr(memory, "draw_timeline", draw)
    for mode, length in (("forward", 2048), ("forward", 128), ("train_step", 128)):
        folder = tmp_path / f"{mode}-{length}"
        timeline = {"ms": [0.0, 1.0], "in_use": {"activations": [1, 2]}, "phases": {"forward": [0.0, 1.0]}}
        append_row(folder / "rows.jsonl", recorded(mode, 9 << 30, length=length, timeline=timeline))
        files.append(RowFile(folder / "rows.jsonl", read_rows(folder / "rows.jsonl")))
    parts = build._exhibit_parts(problem, problem.exhibits[0], files, tmp_path / "out", None, {})
    assert len(parts) == 6  # the table, three pictures, where the rows are and what is missing
    assert parts[0].count("2 x 128") == 2
    assert parts[4].count("rows.jsonl](") == 3
    assert "context_length 128, mode forward, precision bf16" in parts[5]
    assert len(list((tmp_path / "out/pictures").glob("*.png"))) == 3
    assert drawn == [("forward", 128), ("train_step", 128), ("forward", 2048)]


def test_a_folder_that_is_none_and_needless_paths_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"results is .*no': it must be a folder with row files"):
        find_rows(tmp_path / "no")
    with pytest.raises(ValueError, match=r"paths is \['a'\]: it must be left out with writeup"):
        make_report(["writeup", "a"])
    with pytest.raises(ValueError, match=r"paths is \[\]: it must be given with rows"):
        make_report(["rows"])


@pytest.mark.parametrize("folder", ["plain", "with space (and) 100% [of] #it"])
def test_links_lead_to_the_rows_whatever_their_folder_is_called(folder: str, tmp_path: Path) -> None:
    results, out = tmp_path / folder, tmp_path / "out"
    append_row(results / "ddp.jsonl", timed("ddp", 1.0, "naive", devices=2, size="xl", context_length=512,
                                            batch_size=4, precision="bf16", compile=False))  # fmt: skip
    arguments = ["writeup", "--results", str(results), "--out", str(out)]
    for more, start in (([], out), (["--links_from", str(tmp_path)], tmp_path)):
        make_report([*arguments, *more])
        links = set(re.findall(r'<a href="([^"#][^"]*)">(.*?)</a>', (out / HTML).read_text()))
        ((link, name),) = links
        assert name == f"{folder}/ddp.jsonl"
        assert start / unquote(link) == start / os.path.relpath(results / "ddp.jsonl", start)
    assert unquote(link) == f"{folder}/ddp.jsonl"


def test_what_lies_in_the_way_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    arguments = ["writeup", "--results", str(tmp_path / "results"), "--out"]
    for name in (MARKDOWN, HTML, PDF):
        (tmp_path / name / name).mkdir(parents=True)
        with pytest.raises(ValueError, match=f"^out is '{tmp_path / name}': it holds a folder {name}, where a file"):
            make_report([*arguments, str(tmp_path / name)])


@pytest.mark.parametrize(
    "what, option",
    [("writeup", "plot"), ("summary", "out"), ("rows", "out"), ("runs", "out"), ("streams", "out"), ("update", "out"),
     ("tables", "plot"), ("summary", "plot"), ("rows", "results"), ("tables", "links_from")],
)  # fmt: skip
def test_an_option_that_would_be_ignored_is_refused(what: str, option: str, tmp_path: Path) -> None:
    paths = [] if what == "writeup" else ["some"]
    with pytest.raises(ValueError, match=f"^{option} is '{tmp_path}/x': it must be left out with {what}$"):
        make_report([what, *paths, f"--{option}", str(tmp_path / "x")])
    assert list(tmp_path.iterdir()) == []


def test_options_may_stand_before_paths(tmp_path: Path) -> None:
    file, out = tmp_path / "model.jsonl", tmp_path / "out"
    append_row(file, timed("model", 5.0, size="a", context_length=8))
    after = make_report(["tables", str(file), "--out", str(out)])
    assert after.splitlines() == [str(out / "model.md"), str(out / "model.csv")]
    for arguments in (["tables", "--out", str(out), str(file)], ["--out", str(out), "tables", str(file)],
                      [f"--out={out}", "tables", "--", str(file)]):  # fmt: skip
        assert make_report(arguments) == after
    with pytest.raises(ValueError, match="unknown field ot: did you mean out"):
        make_report(["tables", "--ot", str(out), str(file)])


def test_a_document_is_typeset_as_text_and_not_as_markup() -> None:
    made = to_typst("T", '# A\n\n- b `#c["d"]` $x$\n\n| h | n |\n| --- | ---: |\n| i\\|j | 1 |\n')
    for part in ('#heading(level: 1)[#"A";]\n', '#raw("#c[\\"d\\"]");', '#" $x$";', "columns: 2, align: (left, right,)",
                 '[#"i|j";], [#"1";],'):  # fmt: skip
        assert part in made
    with pytest.raises(ValueError, match="Markdown holds a blockquote, which is not typeset"):
        to_typst("T", "> a\n")


class Page(HTMLParser):
    """Elements that are open must be closed in turn; what a page loads, and its headings."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.loaded += [str(given["src"])] if "src" in given else []
        self.ids += [str(given["id"])] if tag == "h3" else []
        if tag not in ("meta", "img", "br", "hr", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_text_of_rows_is_no_markup_of_the_page(tmp_path: Path) -> None:
    made = html_page("<T>", "### a\n\n<script>alert(1)</script> | `<b>` {{BODY}}\n", tmp_path)
    assert "<title>&lt;T&gt;</title>" in made
    assert "&lt;script&gt;alert(1)" in made
    assert "<b>" not in made
    assert "{{BODY}}" in made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The document of the committed rows, made once for all test processes."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    with (shared / "writeup.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "writeup").exists():
            make_report(["writeup", "--results", str(ROOT / "results"), "--out", str(shared / "making")])
            (shared / "making").rename(shared / "writeup")
    return shared / "writeup"


def test_the_page_parses_is_whole_and_has_every_problem(made: Path) -> None:
    page = Page()
    page.feed((made / HTML).read_text())
    page.close()
    assert page.open == []
    assert page.ids == HANDOUT
    assert len(page.loaded) >= 10
    assert all(each.startswith("data:image/png;base64,") for each in page.loaded)


def test_every_table_of_rows_names_file_command_commit_and_machine(made: Path) -> None:
    text = (made / MARKDOWN).read_text()
    lines = [line for line in text.splitlines() if line.startswith("Rows: [")]
    assert len(lines) >= 15
    links = [re.findall(r"\[[^]]*\]\(([^)]*)\) \(\d+\)", line) for line in lines]
    for line, files in zip(lines, links, strict=True):
        assert re.search(r"\(\d+\), (?:with the settings of|measured by) `cs336 \S.*?`.*; commit `.*`; \S.*\.$", line)
        assert files
        assert all((made / file).resolve().is_file() for file in files)
    assert any(len(files) > 1 for files in links)
    pictures = re.findall(r"\]\((pictures/.*?)\)", text)
    assert pictures
    assert all((made / picture).is_file() for picture in pictures)


def test_the_pdf_is_made_of_the_committed_rows(made: Path) -> None:
    pytest.importorskip("typst")
    content = (made / PDF).read_bytes()
    assert content.startswith(b"%PDF-")
    pages = len(re.findall(rb"/Type ?/Page\b", content))
    assert pages > (made / MARKDOWN).read_text().count("\n### ") / 2  # some problems are half a page
    assert len(re.findall(rb"/Subtype ?/Image\b", content)) >= (made / MARKDOWN).read_text().count("](pictures/")


def test_without_typst_the_rest_is_written_and_a_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'typst'", name="typst")

    monkeypatch.setattr(build, "write_pdf", missing)
    (tmp_path / "results").mkdir()
    said = make_report(["writeup", "--results", str(tmp_path / "results"), "--out", str(tmp_path / "out")])
    assert said.splitlines()[-1] == NO_TYPST
    assert (tmp_path / "out" / HTML).exists()
    assert not (tmp_path / "out" / PDF).exists()


def test_a_changed_row_changes_the_document(tmp_path: Path) -> None:
    case = "leaderboard-2025"
    rows = read_rows(ROOT / f"results/h200/{case}.jsonl")
    ours = next(each for each in rows if each.variant == "flash_triton")
    mean = ours.metrics["forward_sum_backward_ms"]["mean"]
    problem = next(each for each in PROBLEMS if each.name == "leaderboard")
    file = tmp_path / f"{case}.jsonl"
    shutil.copy(ROOT / f"results/h200/{case}.jsonl", file)
    (before,) = answer_of(problem, find_rows(tmp_path))
    assert f"takes {mean:.3f} ms" in before
    append_row(file, replace(ours, metrics=json.loads(json.dumps(ours.metrics).replace(str(mean), str(mean / 2)))))
    (after,) = answer_of(problem, find_rows(tmp_path))
    assert f"takes {mean / 2:.3f} ms" in after
    assert after != before


# Measuring


def ran_commands(monkeypatch: pytest.MonkeyPatch, fails: str = "", stops: str = "") -> list[list[str]]:
    """What is run from now on, in the place of measuring: each leaves a file; one fails, one is interrupted."""
    found: list[list[str]] = []

    def run(words: list[str]) -> int:
        found.append(words[3:])
        out = Path(words[words.index("--out") + 1])
        out.mkdir(parents=True, exist_ok=True)
        (out / "rows.jsonl").write_text("")
        if stops and stops in words:
            raise KeyboardInterrupt
        return 1 if fails and fails in words else 0

    monkeypatch.setattr(measure, "run_alone", run)
    monkeypatch.setattr(measure, "gpu_count", lambda: 1)
    return found


def test_every_command_is_run_once_and_a_second_time_only_those_that_know_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ran_commands(monkeypatch, fails="ddp")
    assert measure.measure_missing(tmp_path) == [f"cs336 {several_gpus.DDP_COMMAND}"]
    assert len(found) == len(COMMANDS)
    assert all(("--resume" in words) is (words[0] == "bench") for words in found)
    folder = "size-2.7B-context_length-128-2048-mode-forward-train_step-precision-fp32-bf16"
    assert (tmp_path / "profile-memory" / folder / "rows.jsonl").exists()
    first = len(found)
    measure.measure_missing(tmp_path)
    assert {words[0] for words in found[first:]} == {"bench"}


def test_a_profile_is_left_out_where_rows_of_this_gpu_have_all_that_its_command_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = next(command for command in COMMANDS if command.startswith("profile kernels"))
    configs = [
        {"size": size, "context_length": length, "precision": precision, "optimizer": "own"}
        for size in ("small", "medium", "large", "xl", "2.7B")
        for length in (128, 256, 512, 1024)
        for precision in ("fp32", "bf16")
    ]

    def profiled(rows: list[Row], folder: str = "kept") -> list[list[str]]:
        shutil.rmtree(tmp_path / "rows", ignore_errors=True)
        for row in rows:
            append_row(tmp_path / "rows" / folder / "profile-kernels.jsonl", row)
        found = ran_commands(monkeypatch)
        measure.measure_missing(tmp_path / "rows")
        return [words for words in found if words[:2] == ["profile", "kernels"]]

    monkeypatch.setattr(measure, "gpu_name", lambda: "H")
    rows = [Row(case="profile-kernels", variant="v", config=config, env=ENV | {"gpu": "H"}) for config in configs]
    (words,) = profiled([])
    assert " ".join(words).startswith(command)
    assert profiled(rows) == []
    assert profiled([*rows[1:], replace(rows[0], status="oom")]) == []
    for not_all in (
        rows[1:],
        [*rows[1:], replace(rows[0], status="error")],
        [*rows[1:], replace(rows[0], env=ENV | {"gpu": "another"})],
    ):
        assert profiled(not_all) == [words]
    assert profiled(rows, f"{words[-1].rpartition('/')[2]}") == [words]  # what an interrupt has left


def test_rows_that_cannot_be_read_are_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ran_commands(monkeypatch)
    (tmp_path / "model.jsonl").write_text("no row\n")
    with pytest.raises(ValueError, match=r"model\.jsonl, line 1"):
        measure.measure_missing(tmp_path)
    assert not found


def test_a_profile_that_was_interrupted_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ran_commands(monkeypatch, stops="kernels")
    with pytest.raises(KeyboardInterrupt):
        measure.measure_missing(tmp_path)
    assert [path.suffix for path in (tmp_path / "profile-kernels").iterdir()] == [".part"]
    found = ran_commands(monkeypatch)
    measure.measure_missing(tmp_path)
    kernels = [command for command in COMMANDS if command.startswith("profile kernels")]
    assert [words[:2] for words in found].count(["profile", "kernels"]) == len(kernels)
    made = list((tmp_path / "profile-kernels").iterdir())
    assert len(made) == len(kernels)
    assert not [path for path in made if path.suffix == ".part"]


MEASURING = """
import sys
from cs336_systems.report.writeup.measure import run_alone
work = "import time; print('at work', flush=True); time.sleep(600)"
try:
    run_alone([sys.executable, "-c", work])
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("number, code, said", [(signal.SIGINT, 0, "interrupted\n"), (signal.SIGTERM, 143, "")])
def test_a_signal_from_the_terminal_is_told_of_once(number: signal.Signals, code: int, said: str) -> None:
    pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, "-c", MEASURING], start_new_session=True, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "at work\n"
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=30)  # which waits for the command too, since it holds the pipes
    assert (process.returncode, out, err) == (code, said, "")


def test_rows_of_a_profile_are_found_where_it_writes_them(tmp_path: Path) -> None:
    append_row(tmp_path / "profile-kernels/rows.jsonl", Row(case="profile-kernels", variant="v", config={}, env=ENV))
    append_row(tmp_path / "profile-kernels/rows.jsonl", Row(case="other", variant="v", config={}, env=ENV))
    ((case, files),) = find_rows(tmp_path).items()
    assert (case, [len(file.rows) for file in files]) == ("profile-kernels", [1])


def test_without_a_gpu_nothing_is_measured_and_with_others_than_a_writeup_neither(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match=r"^measure is true: it needs a CUDA GPU"):
        make_report(["writeup", "--measure", "--results", str(tmp_path), "--out", str(tmp_path / "out")])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match=r"^measure is true: it must be left out with rows"):
        make_report(["rows", "some.jsonl", "--measure"])
