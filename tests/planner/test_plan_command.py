"""`cs336 plan`: its output as text and as JSON, and its errors."""

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cs336_systems.bench.row import Row, append_row
from cs336_systems.planner.working import Section, Term, as_json, as_text, show, shown
from tests import forked
from tests.systems.command import Run, the_line

RESULTS = Path(__file__).parents[2] / "results/h200"
CHECKPOINTING = ("checkpointing", "--precision")
NARROW = ("--d_model", "64", "--d_ff", "64", "--num_heads", "1")


Sections = Callable[..., list[Any]]


@pytest.fixture
def plan(cs336: Run) -> Run:
    """Runs `cs336 plan` with the given words; returns exit code, stdout and stderr."""
    return functools.partial(cs336, "plan")


@pytest.fixture
def sections(plan: Run) -> Sections:
    """The sections that a command prints as JSON."""

    def printed(*arguments: str) -> list[Any]:
        code, out, _ = plan(*arguments, "--json")
        assert code == 0
        return json.loads(out)

    return printed


def values(section: dict[str, Any]) -> dict[str, Any]:
    return {term["name"]: term["value"] for term in section["terms"]}


def test_json_has_the_assumptions_and_the_terms(sections: Sections) -> None:
    for given, verdict in (((), "fits"), (("--attention", "naive", "--batch_size", "64"), "does not fit")):
        planned, peak, moments, largest = sections("memory", "--size", "xl", *given)
        terms = values(peak)
        assert planned["notes"][-1].startswith(f"H200 of 139 GiB, {verdict}: the peak of ")
        assert all(isinstance(value, int) for value in terms.values())
        assert terms.pop("peak") == pytest.approx(sum(terms.values())) == max(values(moments).values())
        assert values(largest)["sequences a GPU"] > 4


def test_a_size_has_its_own_context(plan: Run) -> None:
    def tokens(words: str) -> str:
        return plan("memory", *words.split())[1].splitlines()[1].rpartition(" context_length ")[2]

    assert tokens("--size 8B") == "32,768"
    assert tokens("--size 8B --context 1024") == "1,024"
    for words in ("--size xl", "", "--d_model 64 --d_ff 128 --num_layers 2 --num_heads 2"):
        assert tokens(words) == "512"


def test_other_architectures_are_planned_by_the_models_own_options(plan: Run, sections: Sections) -> None:
    """Qwen3-0.6B, whose 596,049,920 parameters transformers counts too."""
    sizes = "--d_model 1024 --d_ff 3072 --num_layers 28 --num_heads 16 --vocab_size 151936"
    options = "--num_kv_heads 8 --head_dim 128 --qk_norm --tie_embeddings"
    counts = values(sections("step", *sizes.split(), *options.split())[1])
    assert counts["N, parameters"] == 596_049_920
    _, out, _ = plan("memory", *sizes.split(), *options.split(), "--window", "64")
    assert "num_kv_heads 8, head_dim 128, qk_norm True, tie_embeddings True, window 64" in out.splitlines()[1]
    code, _, error = plan("step", *sizes.split(), "--num_kv_heads", "3")
    assert (code, error) == (2, "cs336: num_kv_heads is 3: it must be a divisor of num_heads, 16\n")


@pytest.mark.parametrize("command", ["memory", "step"])
def test_the_assumptions_are_printed_first(command: str, plan: Run) -> None:
    given = ("--size", "xl", "--world_size", "2", "--compile", "--cuda_graph", "--card", "H100",
             "--activation_checkpointing", "every_2")  # fmt: skip
    lines = plan(command, *given)[1].splitlines()
    assert lines[:3] == [
        "Planned",
        "  xl: d_model 1,600, d_ff 6,400, num_layers 48, num_heads 25, vocab_size 10,000, context_length 512",
        "  a GPU's step: batch_size 4, precision bf16, attention flash, activation_checkpointing every_2, "
        "compile True, cuda_graph True, strategy fsdp, world_size 2, reshard_after_forward False",
    ]
    assert lines[3].startswith("  H100 of 79 GiB, fits: the peak of ")
    own = ("--d_model", "64", "--d_ff", "128", "--num_layers", "2", "--num_heads", "2")
    assert plan(command, *own)[1].splitlines()[1].startswith("  own shape: d_model 64")


@pytest.mark.parametrize("command", ["memory", "step"])
def test_the_verdict_says_whether_a_step_fits(command: str, plan: Run) -> None:
    def verdict(*given: str) -> str:
        return plan(command, *given)[1].splitlines()[3].partition(" GiB, ")[2]

    # Nine tenths of an L40S's 44 GiB are 39.6; weights, gradients and moments of 2.7B take 44.
    assert verdict("--size", "2.7B", "--card", "RTX 4090").startswith("does not fit: the peak of ")
    assert verdict("--size", "xl", "--card", "L40S").startswith("fits: the peak of 32.39 GiB is within 39.6 GiB")
    more = ("--size", "xl", "--batch_size", "8", "--card", "L40S")
    assert verdict(*more).startswith("may not fit: the peak of 41.86 GiB is above 39.6 GiB")


def test_step_takes_ceilings(sections: Sections) -> None:
    def step(*more: str) -> float:
        return values(sections("step", "--size", "small", *more)[2])["step"]

    assert step("--bandwidth_tb_s", "1") > step() > step("--bandwidth_tb_s", "8")
    assert step("--matmul_tflops", "100") > step() == step("--matmul_tflops", "790", "--bandwidth_tb_s", "4.3")
    link = ("--world_size", "2", "--latency_us", "0.001")
    # 0.13 GB of weights and as much of gradients at 1 GB/s, or twice as much in float32; with overlap 0.51 GB of these.
    assert 0.25 < step(*link, "--link_gb_s", "1") < 0.3
    assert 0.38 < step(*link, "--link_gb_s", "1", "--grad_dtype", "fp32") < 0.43
    assert 0.5 < step(*link, "--link_gb_s", "1", "--strategy", "overlap", "--grad_dtype", "fp32") < 0.55


def test_checkpointing_in_float32_is_best_near_the_square_root(sections: Sections) -> None:
    sizes, found = map(values, sections("checkpointing", "--size", "xl", "--precision", "fp32"))
    assert sizes["none"] > sizes["groups_48"] > sizes["groups_1"]
    assert abs(found["least memory"] - found["by calculus"]) <= 1


def test_checkpointing_says_that_it_counts_autocast_over_float32_weights(plan: Run) -> None:
    said = {name: "weights and residual stream are float32, and autocast" in plan(*CHECKPOINTING, name)[1]
            for name in ("fp32", "bf16", "fp16")}  # fmt: skip
    assert said == {"fp32": False, "bf16": True, "fp16": True}


def test_ddp_overhead_fits_rows(sections: Sections, tmp_path: Path) -> None:
    rows = tmp_path / "all-reduce.jsonl"
    lines = []
    for nbytes in (10**6, 10**8, 10**9):
        config = {"bytes": nbytes, "world_size": 2, "backend": "nccl"}
        metrics = {"time_ms": {"p50": 0.05 + nbytes / 2e11 * 1e3}}
        lines.append({"case": "all-reduce", "variant": "nccl", "config": config, "status": "ok", "metrics": metrics,
                      "env": {}, "error": None})  # fmt: skip
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = ("--rows", str(rows), "--measured", str(RESULTS / "first/ddp.jsonl"))
    _, optimum, _, measured, _ = sections("ddp-overhead", "--size", "xl", *files)
    # sqrt(4 x 1,998,235,200 / (2e11 x 5e-5)).
    assert values(optimum)["buckets"] == pytest.approx(28.272, abs=1e-3)
    assert measured["title"] == "Measured"
    assert len(measured["terms"]) >= 5
    assert "waits for the host" in measured["notes"][1]


@pytest.mark.parametrize("command", ["memory", "step"])
def test_a_strategy_on_one_gpu_gets_a_note(command: str, plan: Run) -> None:
    def is_noted(*options: str) -> bool:
        return "one GPU shares nothing" in plan(command, *options)[1]

    assert is_noted("--strategy", "fsdp")
    assert is_noted("--shard_optimizer")
    assert not is_noted()
    assert not is_noted("--strategy", "fsdp", "--world_size", "2")


def test_parallelism_prints_the_handouts_answers(plan: Run) -> None:
    code, out, _ = plan("parallelism")
    assert code == 0
    for answer in ("219,848,638,464", "3,517.6 GB", "43.97", "319.4 tokens", "20,444.4 tokens"):
        assert answer in out
    assert "638.9 tokens" in plan("parallelism", "--m_x", "1")[1]


def test_check_reads_row_files(plan: Run) -> None:
    code, out, _ = plan("check", str(RESULTS / "train-step.jsonl"), str(RESULTS / "kernels.jsonl"))
    assert code == 0
    assert out.splitlines()[0].startswith("row")
    assert "2.7B 1024 cs336_graph" in out
    assert "not compared" in out


def test_check_reads_all_row_files_below_a_folder(plan: Run, tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "deep/b.jsonl"
    second.parent.mkdir()
    for file in (first, second):
        file.write_text((RESULTS / "ddp-groups.jsonl").read_text())
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')  # of a run, no rows
    found = json.loads(plan("check", str(tmp_path), "--json")[1])
    assert list(dict.fromkeys(row["file"] for row in found)) == [str(first), str(second)]
    lines = plan("check", str(tmp_path))[1].splitlines()
    assert [line for line in lines if line.endswith("b.jsonl:")] == [f"{second}:"]
    assert {row["file"] for row in json.loads(plan("check", str(first), "--json")[1])} == {""}
    code, _, err = plan("check", str(RESULTS))
    assert (code, err) == (0, "")
    empty = RESULTS / "overlap-trace"
    code, _, err = plan("check", str(empty))
    accepted = "a row file, or a folder with row files (.jsonl) below it"
    assert (code, err) == (2, f"cs336: results is '{empty}': it must be {accepted}\n")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("memory", "--size", "huge"), "size is 'huge': it must be one of small"),
        (("memory", "--size", "xl", "--d_model", "100"), "d_model is 100, but size 'xl' means 1600"),
        (("memory", "--d_model", "100"), "d_ff is missing: give it"),
        (("memory", "--card", "H300"), "card is 'H300': it must be one of H200"),
        (("memory", "--memory_gib", "0"), "memory_gib is 0.0: it must be above 0"),
        (("memory", "--attention", "flesh"), "attention is 'flesh': it must be one of naive"),
        (("memory", "--batchsize", "4"), "unknown field batchsize: did you mean batch_size?"),
        (("step", "--bandwidth_tb_s", "-1"), "bandwidth_tb_s is -1.0: it must be at least 1e-6"),
        (("step", "--card", "T4"), "precision is 'bf16': it must be fp32 or fp16 on T4"),
        (
            ("memory", "--card", "A100", "--precision", "fp8"),
            "precision is 'fp8': it must be fp32 or bf16",
        ),
        (("step", "--world_size", "0"), "world_size is 0: it must be at least 1"),
        (("step", "--world_size", "2", "--bucket_size_mb", "0"), "bucket_size_mb is 0.0: it must be above 0"),
        (("ddp-overhead", "--world_size", "1"), "world_size is 1: it must be at least 2"),
        (
            ("ddp-overhead", "--size", "2.7B", "--measured", str(RESULTS / "first/ddp.jsonl")),
            f"measured is '{RESULTS / 'first/ddp.jsonl'}': it has 21 rows of ddp of 7.993 GB on 2 GPUs: it must have",
        ),
        (("ddp-overhead", "--rows", "nothing.jsonl"), "row file nothing.jsonl does not exist"),
        (("parallelism", "--x", "0"), "x is 0: it must be at least 1"),
        (("checkpointing", *NARROW, "--num_layers", "100000000"), "num_layers is 100000000: it must be at most"),
        (("memory", *NARROW, "--num_layers", "100000000"), "num_layers is 100000000: it must be at most"),
        (("memory", "--host_memory_gib", "-1"), "host_memory_gib is -1.0: it must be above 0"),
        (
            ("step", "--precision", "fp8", "--d_model", "100", "--d_ff", "64", "--num_layers", "2", "--num_heads", "2"),
            "d_model is 100: it must be a multiple of 16 with precision 'fp8'",
        ),
        (
            ("memory", "--size", "xl", "--activation_checkpointing", "groups_49"),
            "activation_checkpointing is 'groups_49': it must be none, block, first_K, every_K or groups_K with K from "
            "1 to 48, the number of blocks",
        ),
        (("checkpointing", "--precision", "fp8"), "precision is 'fp8': it must be fp32, bf16 or fp16"),
        (("check", "nothing.jsonl"), "row file nothing.jsonl does not exist"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(arguments: tuple[str, ...], message: str, plan: Run) -> None:
    result = plan(*arguments)
    assert result[1] == ""
    assert the_line(result).startswith(message)


@pytest.mark.parametrize(
    "command", ["", "memory", "step", "activation", "checkpointing", "ddp-overhead", "parallelism"]
)
def test_only_reading_rows_needs_pytorch(command: str) -> None:
    arguments = [command] if command else ["--help"]
    code = (
        f"import sys\nfrom cs336_systems.cli.main import main\ntry:\n    main(['plan', *{arguments!r}])\n"
        "except SystemExit as stopped:\n    assert stopped.code == 0, stopped.code\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True, capture_output=True)


@pytest.mark.parametrize(
    "value, unit, shown",
    [
        (2**30, "bytes", "1.00 GiB"),
        (3 * 2**19, "bytes", "1.50 MiB"),
        (12, "bytes", "12 B"),
        (0.0125, "s", "12.500 ms"),
        (3.4e-5, "s", "34.00 us"),
        (2.5e13, "FLOP", "25 TFLOP"),
        (2.9e11, "bytes/s", "290 GB/s"),
        (0.123, "share", "12.3%"),
        (20444.44, "tokens", "20,444.4 tokens"),
        (float("nan"), "", "-"),
        (float("inf"), "", "none"),
    ],
)
def test_values_in_the_unit_that_reads_best(value: float, unit: str, shown: str) -> None:
    assert show(value, unit) == shown


def test_bytes_that_add_up_are_shown_in_one_unit() -> None:
    sizes = [Term("a", "", 3 * 2**30), Term("b", "", 64 * 2**20), Term("c", "", 2**10)]
    everything = Term("all", "sum", sum(term.value for term in sizes))
    assert shown([*sizes, everything]) == ["3.00 GiB", "0.06 GiB", "0.00 GiB", "3.06 GiB"]
    assert shown(sizes) == ["3.00 GiB", "64.00 MiB", "1.00 KiB"]  # too far apart to be compared
    assert shown(sizes[:2]) == ["3.00 GiB", "0.06 GiB"]
    # The largest is below a GiB, of which two digits would leave little of the others.
    assert shown([Term("a", "", 600 * 2**20), Term("b", "", 5 * 2**20)]) == ["600.00 MiB", "5.00 MiB"]
    times = [Term("a", "", 1.5e-3, "s"), Term("b", "", 5e-5, "s"), Term("c", "", 2.0, "")]
    assert shown(times) == ["1.500 ms", "0.050 ms", "2"]


def test_columns_are_aligned_and_infinite_values_are_null() -> None:
    section = Section("S", (Term("a", "x", 1.0, ""), Term("long", "y", float("inf"), "")), ("note",))
    assert as_text([section]) == "S\n  a        1  x\n  long  none  y\n  note"
    assert [term["value"] for term in as_json([section])[0]["terms"]] == [1.0, None]


def test_more_gpus_send_more_and_a_call_costs_the_same(plan: Run, sections: Sections) -> None:
    def given(world_size: str) -> dict[str, float]:
        first, *_, rings = sections("ddp-overhead", "--world_size", world_size)
        return values(first) | values(rings)

    text = plan("ddp-overhead")[1]
    assert "over k = 2 GPUs" in text
    assert re.search(r"s, gradients +0\.48 GiB  4 N = 4 x 128,625,408", text)
    two, eight = given("2"), given("8")
    assert eight["w, all-reduce"] == pytest.approx(two["w, all-reduce"] * 4 / 7)  # 2 x 7 / 8 bytes a byte, not 1
    assert eight["o, a call"] == two["o, a call"]
    for each in (two, eight):
        assert each["all-reduce"] == pytest.approx(each["o, a call"] + 4 * 128_625_408 / each["w, all-reduce"])


REDUCED: dict[str, Any] = {"backend": "nccl", "world_size": 2, "bytes": 1000}
XL_ON_TWO: dict[str, Any] = {"run": {"model": {"size": "xl"}}, "devices": 2}


@pytest.mark.parametrize(
    "variant, config, metrics, message",
    [
        ("nccl", {"world_size": 2}, {"time_ms": {"p50": 1.0}}, "there is no 'bytes'"),
        ("nccl", {"backend": "nccl"}, {}, "the row file has no all-reduce over so many ranks"),
        ("nccl", REDUCED, {"time_ms": {"p50": 1.0}}, "times are given for 1 sizes"),
        ("nccl", REDUCED, {}, "there is no 'time_ms'"),
        ("bucketed:x1", XL_ON_TWO, {"step_ms": {"p50": 1.0}}, "'x1'"),
        ("bucketed:1", XL_ON_TWO, {}, "there is no 'step_ms'"),
        ("bucketed:1", {}, {}, "there is no 'run'"),
    ],
)
def test_a_wrong_row_is_one_line_with_the_file(
    variant: str, config: dict[str, Any], metrics: dict[str, Any], message: str, tmp_path: Path, plan: Run
) -> None:
    option, case = ("rows", "all-reduce") if variant == "nccl" else ("measured", "ddp")
    row = Row(case=case, variant=variant, config=config, metrics=metrics, env={})
    path = tmp_path / "rows.jsonl"
    append_row(path, row)
    if option == "measured":
        append_row(path, replace(row, variant="alone", metrics={"step_ms": {"p50": 1.0}}))
    line = the_line(plan("ddp-overhead", "--size", "xl", f"--{option}", str(path)))
    assert line.startswith(f"{option} is {str(path)!r}: ")
    assert message in line


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    """`cs336 plan ... | head`."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "cs336_systems", "plan", "scaling"]
    with forked.Popen(command, stdout=write, stderr=subprocess.PIPE, text=True) as done:
        os.close(write)
        _, err = done.communicate(timeout=60)
    assert (done.returncode, err) == (141, "")
