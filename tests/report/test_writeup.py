"""The document of answers: sentences of made-up rows whose truth is known, and the files made of the committed rows."""

import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cs336_systems.bench.case import Row, append_row, read_rows
from cs336_systems.bench.cases import NAMES, get_case
from cs336_systems.bench.memory_moments import MOMENTS
from cs336_systems.cli import make_report
from cs336_systems.report.writeup import (
    additions,
    attention,
    build,
    claims,
    measure,
    precision,
    profiling,
    several_gpus,
)
from cs336_systems.report.writeup.build import HTML, MARKDOWN, NO_TYPST, PDF, RowFile, answer_of, document, find_rows
from cs336_systems.report.writeup.claims import ClaimError, Evidence
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
    found: dict[str, list[Row]] = {}
    for each in rows:
        found.setdefault(each.case, []).append(each)
    return Evidence("made_up", found)


def warmups(first: float) -> list[Row]:
    def one(warmup: int, steps: list[float], mean: float) -> Row:
        metrics = {"steps_ms": steps, "step_ms": {"p50": 10.0, "mean": mean}}
        return row("warmup", f"warmup {warmup}", metrics, size="small", warmup=warmup)

    return [one(0, [first, 10.0], 20.0), one(2, [10.0, 10.0], 10.1)]


def test_a_sentence_takes_its_figures_from_the_rows_and_changes_with_them() -> None:
    said = profiling.warmup_steps(evidence(*warmups(40.0)))
    assert said is not None
    assert "the first step is longer than the others, 4.0 times the median" in said
    assert "100% above the median. After 2 or more warm-up steps the two are within 1.0%" in said
    assert "7.5 times the median" in (profiling.warmup_steps(evidence(*warmups(75.0))) or "")


def test_a_claim_that_the_rows_contradict_names_problem_claim_and_figures() -> None:
    problem = PROBLEMS[0]
    rows = {"warmup": [RowFile(Path("warmup.jsonl"), warmups(9.0))]}
    with pytest.raises(
        ClaimError, match=r"benchmarking_script.*'without warm-up the first step is longer.*least_ratio 0\.9"
    ):
        answer_of(problem, rows)


def test_a_row_without_what_a_sentence_needs_is_named() -> None:
    rows = {"warmup": [RowFile(Path("warmup.jsonl"), [replace(r, metrics={"steps_ms": [1]}) for r in warmups(9.0)])]}
    with pytest.raises(ValueError, match="benchmarking_script: a row is not as a sentence needs it: KeyError"):
        answer_of(PROBLEMS[0], rows)


def test_which_way_a_comparison_goes_is_of_the_rows() -> None:
    setting = dict(devices=2, size="xl", context_length=8, batch_size=1, precision="bf16")
    shorter = evidence(timed("ddp", 100.0, "naive", **setting), timed("ddp", 80.0, "flat", **setting))
    assert (
        several_gpus.compared("flat", "naive")(shorter) == "Eager, a step with `flat` is 20% shorter than with `naive`."
    )
    longer = evidence(timed("ddp", 100.0, "naive", **setting), timed("ddp", 150.0, "flat", **setting))
    assert (
        several_gpus.compared("flat", "naive")(longer) == "Eager, a step with `flat` is 50% longer than with `naive`."
    )
    assert several_gpus.compared("flat", "naive")(evidence(timed("ddp", 1.0, "flat", **setting))) is None


def test_what_communication_adds_is_beside_one_gpu_alone() -> None:
    setting = dict(devices=2, size="xl", context_length=512, batch_size=4, precision="bf16")
    said = several_gpus.added("naive")(
        evidence(timed("ddp", 120.0, "alone", **setting), timed("ddp", 150.0, "naive", **setting))
    )
    assert said is not None
    assert "eager, 150 ms beside 120 ms of one rank alone (+25%)" in said


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
    assert "4.0 times as fast as in fp32 for xl, 128 tokens, and nowhere slower" in faster
    slower = precision.bf16_speed(evidence(*pair("small", 10.0, 20.0), *pair("xl", 40.0, 10.0))) or ""
    assert "in 1 of 2 settings it is slower, most of all for small, 128 tokens (0.50 times as fast)" in slower


def test_which_kernel_dominates_is_of_the_rows() -> None:
    def profile(mode: str, longest: str, matmul: float) -> Row:
        top = [{"kernel": longest, "class": "matmul", "calls": 3.0, "ms": 1.0, "share": 0.25}]
        part = {"top": top, "share": {"matmul": matmul, "copy": 0.2, "other": 0.01, "optimizer": 0.0}}
        names = ("inference",) if mode == "forward" else ("forward + backward", "training step")
        config = dict(size="xl", batch_size=4, context_length=8, precision="bf16", attention="naive")
        config |= dict(activation_checkpointing="none", device="cuda")
        return row("profile-kernels", mode, {"spans": dict.fromkeys(names, part)}, mode=mode, **config)

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


def test_memory_is_told_by_part_and_phase() -> None:
    def profile(activations: int) -> Row:
        parts = {"parameters": 2 << 30, "optimizer state": 4 << 30, "gradients": 0, "activations": activations}
        metrics = {"peak_bytes": 20 << 30, "peak_phase": "backward", "at_peak_bytes": parts}
        metrics |= {"phase_peak_bytes": {"forward": 19 << 30, "backward": 20 << 30}}
        metrics |= {"counted": {"residual_stream_bytes": 2 * 8 * 16 * 4}}
        config = dict(size="xl", batch_size=2, context_length=8, d_model=16, precision="bf16", mode="train_step")
        return row("profile-memory", "train_step", metrics, **config)

    assert precision.memory_at_peak(evidence(profile(14 << 30))) == (
        "(a, b) A train step of xl, 8 tokens, bf16 peaks at 20 GiB in its backward phase, of which activations 14 GiB, "
        "optimizer state 4 GiB and parameters 2 GiB; the peaks of its phases are forward 19 GiB and backward 20 GiB."
    )
    assert "of which optimizer state 4 GiB, activations 3 GiB" in (
        precision.memory_at_peak(evidence(profile(3 << 30))) or ""
    )
    assert (precision.residual_size(evidence(profile(1))) or "").endswith("has 2 x 8 x 16 x 4 bytes, 1 KiB.")
    wrong = profile(1)
    wrong.metrics["counted"]["residual_stream_bytes"] = 1
    with pytest.raises(ClaimError, match=r"size of the residual stream.*formula 1024, row 1"):
        precision.residual_size(evidence(wrong))


def test_checkpointing_that_saves_nothing_fails() -> None:
    def policy(name: str, nbytes: int, k: int | None) -> Row:
        metrics = {"peak_bytes": nbytes, "predicted_bytes": nbytes, "best_group": 2.5, "step_ms": {"p50": 10.0}}
        kind = name.partition("_")[0]
        return row("checkpointing", name, metrics, size="xl", activation_checkpointing=name, policy=kind, K=k)

    rows = [policy("none", 8 << 30, None), policy("groups_2", 2 << 30, 2), policy("groups_4", 3 << 30, 4)]
    said = additions.least_memory(evidence(*rows)) or ""
    assert said.startswith(
        "`groups_2` needs less than no checkpointing, and least of all 2 policies: 2 GiB instead of 8 GiB"
    )
    assert "K = 2 needs least; sqrt(L I / A) = 2.5" in (additions.best_size(evidence(*rows)) or "")
    with pytest.raises(ClaimError, match=r"made_up.*`groups_2` needs less.*least 2147483648, none 1073741824"):
        additions.least_memory(evidence(policy("none", 1 << 30, None), *rows[1:]))


def test_collectives_are_compared_by_size_and_backend() -> None:
    def call(backend: str, nbytes: int, ms: float) -> Row:
        metrics = {"time_ms": {"p50": ms}, "bus_bytes_per_s": 2e9}
        return row("all-reduce", backend, metrics, collective="all-reduce", backend=backend, world_size=2, bytes=nbytes)

    rows = [call("gloo", 10**6, 10.0), call("gloo", 10**8, 100.0), call("nccl", 10**8, 1.0)]
    assert several_gpus.bandwidths(evidence(*rows)) == (
        "An all-reduce of 100 MB takes 100 ms with gloo over 2 (2 GB/s bus bandwidth) and 1 ms with nccl over 2 "
        "(2 GB/s bus bandwidth)."
    )
    assert "is 100 times as fast as gloo" in (several_gpus.backends(evidence(*rows)) or "")
    assert "100 times the bytes take 10 times the time: a small one waits for the call" in (
        several_gpus.small_and_large(evidence(*rows)) or ""
    )
    assert several_gpus.backends(evidence(*rows[:2])) is None


def test_the_best_bucket_is_that_which_adds_least() -> None:
    setting = dict(devices=2, size="xl", context_length=8, batch_size=1, precision="bf16", compile=False)

    def bucket(size: float, ms: float) -> Row:
        made = timed("bucket-size", ms, f"bucketed:{size:g}", **setting, bucket_size_mb=size)
        return replace(made, metrics={**made.metrics, "predicted": {"best_mb": 266.0}})

    alone = timed("bucket-size", 100.0, "alone", **setting, bucket_size_mb=None)
    said = several_gpus.buckets(evidence(alone, bucket(1.0, 130.0), bucket(100.0, 112.0)))
    assert said == (
        "Eager, of the bucket sizes 1 and 100 MiB, 100 MiB adds least, 12 ms a step; "
        "the model puts the optimum at 266 MiB."
    )


def test_sharding_that_does_not_divide_the_state_fails() -> None:
    def measured(case: str, variant: str, state: int, nbytes: int) -> Row:
        parts = {"parameters": 2**30, "gradients": 2**30, "optimizer_state": state}
        moments = {name: {"peak_bytes": nbytes, "live_bytes": nbytes, "parts": parts} for name in MOMENTS}
        return row(case, variant, {"moments": moments, "peak_memory_bytes": nbytes}, devices=2, size="xl")

    plain = measured("optimizer-sharding", "overlap", 4 << 30, 8 << 30)
    halved = measured("optimizer-sharding", "overlap+zero1", 2 << 30, 6 << 30)
    said = several_gpus.sharded_memory(evidence(plain, halved)) or ""
    assert "6 GiB instead of 8 GiB after initialisation" in said
    assert said.endswith("AdamW's moments are 2 GiB of 4 GiB.")
    whole = measured("optimizer-sharding", "overlap+zero1", 4 << 30, 8 << 30)
    with pytest.raises(ClaimError, match="sharding divides the optimizer's state"):
        several_gpus.sharded_memory(evidence(plain, whole))
    sharded = [
        measured("fsdp-accounting", "overlap", 4 << 30, 8 << 30),
        measured("fsdp-accounting", "fsdp", 1, 9 << 30),
    ]
    with pytest.raises(ClaimError, match="'FSDP needs less memory'"):
        additions.fsdp_memory(evidence(*sharded))


def test_the_8b_step_beside_pytorchs_sharding() -> None:
    def step(strategy: str, ms: float) -> Row:
        made = timed("leaderboard-2026", ms, f"{strategy} first_6", strategy=strategy, size="8B")
        return replace(made, metrics={**made.metrics, "tokens_per_s": 65536.0, "mfu": 0.5})

    said = additions.fastest_8b(evidence(step("fsdp", 5000.0), step("fsdp", 4000.0), step("torch_fsdp", 6000.0))) or ""
    assert "takes 4.00 s (65,536 tokens/s, 50% of the peak rate) and peaks at 1 GiB a GPU" in said
    assert said.endswith("with PyTorch's `fully_shard` it takes 1.50 times as long.")


def test_evidence_is_of_one_machine_and_the_last_measurement() -> None:
    cpu = [replace(timed("model", 5.0, size=s), env={"gpu": None, "cpu_threads": 2}) for s in "abc"]
    again = [timed("model", 7.0, size="a"), timed("model", 8.0, size="a")]
    assert [claims.p50(each) for each in evidence(*cpu, *again).ok("model")] == [8.0]


@pytest.mark.parametrize(
    "made, text",
    [
        (claims.ms(3.14159), "3.14 ms"), (claims.ms(1234.5), "1,234 ms"), (claims.gib(3 << 30), "3 GiB"),
        (claims.percent(0.0567), "5.7%"), (claims.percent(0.567), "57%"), (claims.times(1.234), "1.23 times"),
        (claims.times(12.34), "12 times"), (claims.span([3, 1, 2], str), "1 to 3"), (claims.span([1, 1], str), "1"),
        (claims.span([2, 1], claims.ms), "1 to 2 ms"),
        (claims.listing(["a", "b", "c"]), "a, b and c"), (claims.listing(["a"]), "a"),
    ],
)  # fmt: skip
def test_figures_as_text(made: str, text: str) -> None:
    assert made == text


def test_every_problem_of_the_handout_is_there_in_its_order() -> None:
    assert [problem.name for problem in PROBLEMS] == HANDOUT


def test_commands_and_files_that_problems_name_are_there() -> None:
    from cs336_systems.plan_command import _WHAT

    for problem in PROBLEMS:
        assert not [path for path in problem.code if not (ROOT / path).exists()], problem.name
        assert not problem.plan or problem.plan.split()[1] in _WHAT
        for exhibit in problem.exhibits:
            what, name, *options = exhibit.command.split()
            if what == "bench":
                assert name == exhibit.case in NAMES
                fields = {f"--{field}" for field in get_case(name).config.__dataclass_fields__}
                flags = {word for word in options if word.startswith("--")}
                assert flags <= fields | {"--kernels"}, exhibit.command
            else:
                assert (what, exhibit.case) == ("profile", f"profile-{name}")


def test_without_rows_each_problem_gives_its_command(tmp_path: Path) -> None:
    text = document({}, tmp_path)
    assert re.findall(r"^### (\S+)$", text, re.M) == HANDOUT
    for problem in PROBLEMS:
        for exhibit in problem.exhibits:
            assert f"Not measured yet; this measures it: `cs336 {exhibit.command}`." in text


def test_a_folder_that_is_none_and_needless_paths_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"results is .*no': it must be a folder with row files"):
        find_rows(tmp_path / "no")
    with pytest.raises(ValueError, match=r"paths is \['a'\]: it must be left out with writeup"):
        make_report(["writeup", "a"])
    with pytest.raises(ValueError, match=r"paths is \[\]: it must be given with rows"):
        make_report(["rows"])


def test_a_document_is_typeset_as_text_and_not_as_markup() -> None:
    made = to_typst("T", '# A\n\n- b `#c["d"]` $x$\n\n| h | n |\n| --- | ---: |\n| i\\|j | 1 |\n')
    for part in ('#heading(level: 1)[#"A";];', '#raw("#c[\\"d\\"]");', '#" $x$";', "columns: 2, align: (left, right,)",
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
    """The document of the committed rows."""
    out = tmp_path_factory.mktemp("writeup")
    make_report(["writeup", "--results", str(ROOT / "results"), "--out", str(out)])
    return out


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
    sources = re.findall(
        r"^Rows: \[.*?\]\((.*?)\) \(\d+\), measured by `cs336 \S.*?`; commit `.*`; \S.*\.$", text, re.M
    )
    assert len(sources) == text.count("Rows: [") >= 15
    assert all((made / source).resolve().is_file() for source in sources)
    pictures = re.findall(r"\]\((pictures/.*?)\)", text)
    assert pictures
    assert all((made / picture).is_file() for picture in pictures)
    assert any("steps with --traces" in line for line in text.splitlines())  # of files beside the rows


def test_the_pdf_is_made_of_the_committed_rows(made: Path) -> None:
    pytest.importorskip("typst")
    assert (made / PDF).read_bytes().startswith(b"%PDF-")


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

    def run(words: list[str], check: bool) -> Any:
        found.append(words[3:])
        out = Path(words[words.index("--out") + 1])
        out.mkdir(exist_ok=True)
        (out / "rows.jsonl").write_text("")
        if stops and stops in words:
            raise KeyboardInterrupt
        return SimpleNamespace(returncode=1 if fails and fails in words else 0)

    monkeypatch.setattr(measure.subprocess, "run", run)
    monkeypatch.setattr(measure, "gpu_count", lambda: 1)
    return found


def test_every_command_is_run_once_and_a_second_time_only_those_that_know_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = {exhibit.command for problem in PROBLEMS for exhibit in problem.exhibits}
    found = ran_commands(monkeypatch, fails="ddp")
    assert measure.measure_missing(tmp_path) == ["cs336 bench ddp --compile false true --rounds 3"]
    assert len(found) == len(commands)
    assert all(("--resume" in words) is (words[0] == "bench") for words in found)
    assert (tmp_path / "profile-kernels/rows.jsonl").exists()
    first = len(found)
    measure.measure_missing(tmp_path)
    assert {words[0] for words in found[first:]} == {"bench"}


def test_a_profile_that_was_interrupted_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ran_commands(monkeypatch, stops="kernels")
    with pytest.raises(KeyboardInterrupt):
        measure.measure_missing(tmp_path)
    assert not (tmp_path / "profile-kernels").exists()
    found = ran_commands(monkeypatch)
    measure.measure_missing(tmp_path)
    assert any(words[:2] == ["profile", "kernels"] for words in found)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"profile-kernels", "profile-memory"}


def test_rows_of_a_profile_are_found_where_it_writes_them(tmp_path: Path) -> None:
    append_row(tmp_path / "profile-kernels/rows.jsonl", Row(case="profile-kernels", variant="v", config={}, env=ENV))
    append_row(tmp_path / "profile-kernels/rows.jsonl", Row(case="other", variant="v", config={}, env=ENV))
    ((case, files),) = find_rows(tmp_path).items()
    assert (case, [len(file.rows) for file in files]) == ("profile-kernels", [1])


def test_without_a_gpu_nothing_is_measured_and_with_others_than_a_writeup_neither(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match=r"^measure is True: it needs a CUDA GPU"):
        make_report(["writeup", "--measure", "--results", str(tmp_path), "--out", str(tmp_path / "out")])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match=r"^measure is True: it must be left out with rows"):
        make_report(["rows", "some.jsonl", "--measure"])
