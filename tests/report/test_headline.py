"""Comparisons with peers, and their pictures in the README."""

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cs336_systems.bench.row import Row, append_row
from cs336_systems.cli.report import make_report
from cs336_systems.report.headline import ATTENTION_PICTURE, TRAINING_PICTURE, headline, write_pictures
from cs336_systems.report.pictures import hash_in

ROOT = Path(__file__).parents[2]
ENV = {"gpu": "NVIDIA Made-up", "torch": "9.9", "commit": "c0ffee", "date": "2026-01-01"}


def kernels(kernel: str, ms: float, shape: tuple[int, ...] = (4, 16, 4096, 64), dtype: str = "bf16") -> Row:
    config = dict(kernel=kernel, dtype=dtype, is_causal=True, shape=list(shape))
    metrics = {"forward_backward_ms": {"p50": ms}, "forward_backward_tflops": 1000.0 / ms}
    return Row(case="kernels", variant=kernel, config=config, metrics=metrics, env=ENV)


def train_step(variant: str, ms: float, size: str = "small", **env: Any) -> Row:
    config = dict(variant=variant, size=size, context_length=8, batch_size=4, precision="bf16", compile=True)
    metrics = {"step_ms": {"mean": ms}, "mfu": 5.0 / ms}
    return Row(case="train-step", variant=variant, config=config, metrics=metrics, env={**ENV, **env})


def ddp(variant: str, ms: float, compiled: bool = False) -> Row:
    config = dict(variant=variant, compile=compiled, devices=2, size="xl", context_length=8, batch_size=4,
                  precision="bf16")  # fmt: skip
    times = {"step_ms": {"p20": ms - 1, "p50": ms, "p80": ms + 2}}
    return Row(
        case="ddp", variant=f"{variant} compiled" if compiled else variant, config=config, metrics=times, env=ENV
    )


ATTENTION = [kernels("flash_triton", 6.0), kernels("fa4", 5.0), kernels("sdpa", 8.0),
             kernels("flash_triton", 7.0, (8, 16, 2048, 64)), kernels("fa4", 1.0, (8, 16, 2048, 64)),
             kernels("flash_triton", 7.0, (8, 1, 4096, 64)), kernels("fa4", 1.0, (8, 1, 4096, 64))]  # fmt: skip
TRAINING = [train_step("cs336", 25.0), train_step("cs336_graph", 10.0), train_step("hf_llama", 20.0)]
LARGER = [train_step("cs336_graph", 50.0, "xl"), train_step("hf_llama", 40.0, "xl", command="another of the run")]
PARALLEL = [ddp("alone", 9.0), ddp("bucketed:100", 30.0), ddp("bucketed:100+graph", 15.0), ddp("torch_ddp", 20.0),
            ddp("fsdp", 12.0), ddp("torch_fsdp", 24.0), ddp("bucketed:100", 7.0, compiled=True),
            ddp("fsdp+zero2+graph", 6.0), ddp("torch_fsdp+zero2", 30.0)]  # fmt: skip
ALL = [*ATTENTION, *TRAINING, *LARGER, *PARALLEL]


def file_of(rows: list[Row], path: Path) -> Path:
    for row in rows:
        append_row(path, row)
    return path


def test_every_pair_of_one_run_is_compared_whoever_is_faster(tmp_path: Path) -> None:
    head, _, header, rule, *lines = headline([file_of(ALL, tmp_path / "rows.jsonl")]).splitlines()
    assert head == "bf16; attention: forward and backward; both times of a line are from one run:"
    assert header == "| work | on | ours | peer | ours is |"
    assert rule == "| --- | --- | --- | --- | ---: |"
    on, heads = ENV["gpu"], "attention, 4 x 16 heads of 64, 4,096 tokens"
    small, alone = "training step, small, 4 x 8, compiled", "training step, xl, 4 x 8, compiled"
    both = "training step, xl, 4 x 8 on each of 2 GPUs, eager"
    assert lines == [
        # not at 2,048 tokens, and not with a single head
        f"| {heads} | {on} | `flash_triton` 6 ms | the fastest of the others (`fa4`) 5 ms | 1.20x slower |",
        f"| {small} | {on} | `cs336_graph` 10 ms | Hugging Face's Llama (`hf_llama`) 20 ms | 2.00x faster |",
        f"| {alone} | {on} | `cs336_graph` 50 ms | Hugging Face's Llama (`hf_llama`) 40 ms | 1.25x slower |",
        # without graphs `bucketed:100` and `fsdp` wait for the host, so they are left out
        f"| {both} | {on} | `bucketed:100+graph` 15 ms | PyTorch's DDP (`torch_ddp`) 20 ms | 1.33x faster |",
        f"| {both} | {on} | `fsdp+zero2+graph` 6 ms | PyTorch's DDP (`torch_ddp`) 20 ms | 3.33x faster |",
        f"| {both} | {on} | `fsdp+zero2+graph` 6 ms | PyTorch's FSDP2 (`torch_fsdp+zero2`) 30 ms | 5.00x faster |",
    ]


def test_the_last_run_is_compared(tmp_path: Path) -> None:
    old = file_of([train_step("cs336_graph", 30.0), train_step("hf_llama", 10.0)], tmp_path / "old.jsonl")
    new = file_of([train_step("cs336_graph", 30.0), train_step("hf_llama", 60.0)], tmp_path / "new.jsonl")
    for files, peer in (([old, new], "60 ms | 2.00x faster"), ([new, old], "10 ms | 3.00x slower")):
        *_, rule, line = headline(files).splitlines()
        assert rule.startswith("| ---")
        assert f"30 ms | Hugging Face's Llama (`hf_llama`) {peer} |" in line


def test_each_line_names_its_machine(tmp_path: Path) -> None:
    files = [file_of(TRAINING[1:], tmp_path / "one.jsonl")]
    files += [file_of([train_step(n, 8.0, gpu="Other") for n in ("cs336_graph", "hf_llama")], tmp_path / "other.jsonl")]
    *_, one, other = headline(files).splitlines()
    assert one.startswith("| training step, small, 4 x 8, compiled | NVIDIA Made-up | `cs336_graph` 10 ms |")
    assert other.startswith("| training step, small, 4 x 8, compiled | Other | `cs336_graph` 8 ms |")


def test_a_gpu_of_unknown_peak_has_no_mfu_bars(tmp_path: Path) -> None:
    rows = [replace(row, metrics={**row.metrics, "mfu": None}) for row in TRAINING]
    path = file_of(rows, tmp_path / "rows.jsonl")
    assert len(headline([path]).splitlines()) == 5
    assert write_pictures([path], tmp_path) == []


def test_the_state_of_the_gpu_does_not_tell_runs_apart(tmp_path: Path) -> None:
    rows = [
        train_step("cs336_graph", 10.0, gpu_after={"sm_mhz": 1}),
        train_step("hf_llama", 20.0, gpu_after={"sm_mhz": 2}),
    ]
    assert len(headline([file_of(rows, tmp_path / "rows.jsonl")]).splitlines()) == 5


OURS, PEER = TRAINING[1], TRAINING[2]
INCOMPARABLE = {
    "another commit": [OURS, train_step("hf_llama", 20.0, commit="beef")],
    "another GPU": [OURS, train_step("hf_llama", 20.0, gpu="NVIDIA Other")],
    "another day": [OURS, train_step("hf_llama", 20.0, date="2026-01-02")],
    "eager": [OURS, replace(PEER, config={**PEER.config, "compile": False})],
    "another size": [OURS, replace(PEER, config={**PEER.config, "size": "xl"})],
    "failed": [OURS, replace(PEER, status="error", metrics={})],
    "float32": [kernels("flash_triton", 1.0, dtype="fp32"), kernels("sdpa", 1.0, dtype="fp32")],
    "ours alone": TRAINING[:2],
    "another case": [Row(case="model", variant="v", config={"precision": "bf16"}, env=ENV)],
}


@pytest.mark.parametrize("why", INCOMPARABLE)
def test_only_equal_work_of_one_run_is_compared(why: str, tmp_path: Path) -> None:
    path = file_of(INCOMPARABLE[why], tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match=r"paths is \['.*rows\.jsonl'\]: there must be rows of one run and of bf16"):
        headline([path])
    assert write_pictures([path], tmp_path) == []


def test_two_files_are_two_runs(tmp_path: Path) -> None:
    files = [file_of([row], tmp_path / f"{row.variant}.jsonl") for row in (OURS, PEER)]
    with pytest.raises(ValueError, match="there must be rows of one run"):
        headline(files)


def test_a_row_without_the_compared_metric_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rows\.jsonl: there is no 'step_ms'"):
        headline([file_of([replace(OURS, metrics={}), PEER], tmp_path / "rows.jsonl")])


@pytest.mark.usefixtures("unrendered")
def test_pictures_are_written_to_out_and_their_hashes_follow_the_rows(tmp_path: Path) -> None:
    path = file_of(ALL, tmp_path / "rows.jsonl")
    pictures = [tmp_path / "out" / name for name in (ATTENTION_PICTURE, TRAINING_PICTURE)]
    assert make_report(["headline", str(path)]) == headline([path])
    assert not any(picture.exists() for picture in pictures)
    assert make_report(["headline", str(path), "--out", str(tmp_path / "out")]).splitlines()[-2:] == [
        *map(str, pictures)
    ]
    before = [hash_in(picture) for picture in pictures]
    write_pictures([path], tmp_path / "out")
    assert [hash_in(picture) for picture in pictures] == before
    append_row(path, kernels("sdpa", 8.5))
    write_pictures([path], tmp_path / "out")
    assert [hash_in(p) == old for p, old in zip(pictures, before, strict=True)] == [False, True]
    append_row(path, ddp("overlap", 31.0))  # a bar, but no line of the table
    write_pictures([path], tmp_path / "out")
    assert [hash_in(p) == old for p, old in zip(pictures, before, strict=True)] == [False, False]


def test_each_picture_needs_only_its_own_rows(tmp_path: Path) -> None:
    for name, rows in ((ATTENTION_PICTURE, ATTENTION), (TRAINING_PICTURE, TRAINING), (TRAINING_PICTURE, PARALLEL)):
        path = file_of(rows, tmp_path / rows[0].case / "rows.jsonl")
        assert write_pictures([path], path.parent) == [path.parent / name]


def test_the_pictures_of_the_readme_are_not_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    readme = Path("README.md").read_text()
    command = re.search(r"<!-- cs336 report headline (.*) -->", readme)
    assert command
    files = [Path(word) for word in shlex.split(command[1])]
    for made in write_pictures(files, tmp_path):
        shown = Path("docs") / made.name
        assert f"({shown})" in readme
        assert hash_in(shown) == hash_in(made), f"cs336 report headline {command[1]} --out docs"
