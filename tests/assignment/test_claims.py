"""Sentences follow the rows: claims that rows contradict fail the build, and other sentences change their words."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cs336_systems.assignment.build import WriteUp, write
from cs336_systems.assignment.figures import ClaimError, Figures, Source

from .conftest import committed, filled

Change = Callable[[dict[str, Any]], Any]


def altered(case: str, change: Change, **where: Any) -> Figures:
    """The committed rows, with the metrics changed of those that have these fields."""
    figures = committed()
    count = 0
    for i, source in enumerate(figures.sources):
        row = source.row
        fields = {**row.config, "variant": row.variant}
        if row.case == case and row.status == "ok" and where.items() <= fields.items():
            metrics = copied(row.metrics)
            change(metrics)
            count += metrics != row.metrics
            figures.sources[i] = Source(source.path, replace(row, metrics=metrics))
    assert count, "no row is changed"
    return figures


def copied(value: Any) -> Any:
    return {name: copied(each) for name, each in value.items()} if isinstance(value, dict) else value


def scaled(name: str, factor: float) -> Change:
    """Multiply a metric, and if it is a timing all its numbers."""

    def change(metrics: dict[str, Any]) -> None:
        *path, last = name.split(".")
        for key in path:
            metrics = metrics[key]
        old = metrics[last]
        metrics[last] = {key: factor * each for key, each in old.items()} if isinstance(old, dict) else factor * old

    return change


CLAIMS: dict[str, tuple[str, str, Change, dict[str, Any]]] = {
    "ddp_overlap_individual_parameters_benchmarking": (
        "communication is hidden", "ddp", scaled("both_ms", 0), dict(variant="overlap", size="2.7B"),
    ),
    "distributed_communication_single_node": (
        "NCCL between GPUs is faster", "all-reduce", scaled("time_ms", 1e-3), dict(backend="gloo"),
    ),
    "flash_benchmarking": (
        "times as fast as plain attention in bfloat16", "flash", scaled("forward_backward_ms", 100),
        dict(kernel="flash_triton", dtype="bf16"),
    ),
    "fsdp": ("needs far less memory", "ddp", scaled("peak_memory_bytes", 3), dict(variant="fsdp", size="2.7B")),
    "fsdp_accounting": (
        "needs far less memory", "fsdp-accounting", scaled("peak_memory_bytes", 2), dict(variant="fsdp"),
    ),
    "gradient_checkpointing": ("agree with the measured peaks", "checkpointing", scaled("peak_bytes", 1.2), {}),
    "memory_profiling": (
        "needs more memory in bfloat16", "profile-memory", scaled("peak_bytes", 0.5),
        dict(context_length=128, mode="forward", precision="bf16"),
    ),
    "minimal_ddp_flat_benchmarking": (
        "Communication is shorter", "ddp", scaled("communication_ms", 2), dict(variant="flat", size="2.7B"),
    ),
    "mixed_precision_accumulation": (
        "error is by far the largest", "precision-accumulation", scaled("error", 0.001),
        dict(accumulation="fp16 into fp16"),
    ),
    "naive_ddp_benchmarking": (
        "none of that overlaps", "ddp", lambda row: row.update(both_ms=row["communication_ms"]),
        dict(variant="naive", size="2.7B"),
    ),
    "nsys_profile": ("busy nearly all the time", "profile-kernels", scaled("busy_ms", 0.5), dict(mode="forward")),
    "optimizer_state_sharding_accounting": (
        "state is halved", "optimizer-sharding",
        lambda row: row["moments"]["before the step"]["parts"].update(optimizer_state=1), dict(variant="overlap+zero1"),
    ),
    "pytorch_attention": (
        "square of the length", "attention", lambda row: row.update(memory_before_backward_bytes=2**30), {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("problem", CLAIMS)
def test_rows_that_contradict_a_claim_fail_the_build(problem: str, tmp_path: Path) -> None:
    claim, case, change, where = CLAIMS[problem]
    figures = altered(case, change, **where)
    filled(figures, problem)
    document = WriteUp("", {}, [], [], figures.contradictions)
    with pytest.raises(ClaimError, match=f"{problem}: .*{claim}.*: .*\\d"):
        write(document, tmp_path)
    assert not any(tmp_path.iterdir())


WORDS: dict[str, tuple[str, str, str, str, Change, dict[str, Any]]] = {
    "our leaderboard kernel": (
        "leaderboard_2025", "x faster.", "x slower.", "leaderboard-2025", scaled("forward_sum_backward_ms", 2),
        dict(kernel="flash_triton"),
    ),
    "the spread of steps": (
        "benchmarking_script", "timings vary little", "Some timings vary", "model", scaled("step_ms.std", 100), {},
    ),
    "the first step": (
        "benchmarking_script", "because it loads libraries", "the median, and", "warmup",
        lambda row: row.update(steps_ms=[row["step_ms"]["p50"]] * 10), {},
    ),
    "layer norm under autocast": (
        "benchmarking_mixed_precision", "Autocast therefore returns float32", "This CPU's autocast does not do so",
        "autocast-dtypes", lambda row: row["dtypes"].update(norm_output="bfloat16"), {},
    ),
    "the gain of bfloat16": (
        "benchmarking_mixed_precision", "the gain grows with every size", "tends to grow with the size", "model",
        lambda row: [scaled(f"{phase}_ms", 0.2)(row) for phase in ("forward", "backward")],
        dict(size="medium", precision="bf16", context_length=512, mode="train_step"),
    ),
    "a compiled model": (
        "torch_compile", "A small model may even become slower", "and a step with backward pass and optimizer",
        "model", scaled("step_ms", 0.1), dict(compile=True),
    ),
    "a step that does not wait for the host": (
        "naive_ddp_benchmarking", "keep the GPU waiting for the host", "A step of `xl` takes", "ddp",
        scaled("step_ms", 10), dict(variant="alone+graph", size="xl"),
    ),
    "large buckets": (
        "ddp_bucketed_benchmarking", "large buckets do no harm", "to a compiled step", "bucket-size",
        scaled("step_ms", 0.5), dict(variant="bucketed:10+graph compiled"),
    ),
    "one all-reduce": (
        "minimal_ddp_flat_benchmarking", "x slower", "the step is only", "ddp", scaled("step_ms", 0.5),
        dict(variant="flat"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WORDS)
def test_other_rows_have_other_words(name: str) -> None:
    problem, now, then, case, change, where = WORDS[name]
    before = filled(committed(), problem)
    after = filled(altered(case, change, **where), problem)
    assert now in before
    assert now not in after
    assert then in after


def test_a_figure_of_the_text_is_that_of_its_row() -> None:
    figures = altered(
        "leaderboard-2025", lambda row: row["forward_sum_backward_ms"].update(mean=1.25), kernel="flash_triton"
    )
    assert "takes **1.250 ms**" in filled(figures, "leaderboard_2025")
    assert "our kernel takes 1.250 ms" in filled(figures, "summary")


def test_memory_that_does_not_run_out_is_said() -> None:
    figures = committed()
    assert "runs out of memory with" in filled(figures, "pytorch_attention")
    figures.sources = [source for source in figures.sources if source.row.status == "ok"]
    assert "No length of the table runs out of memory" in filled(figures, "pytorch_attention")


def test_a_profile_of_nsight_systems_comes_first_though_it_tells_no_time_of_the_gpu() -> None:
    figures = committed()
    for source in [*figures.sources]:
        if source.row.case == "profile-kernels":
            config, metrics = {**source.row.config, "tool": "nsys"}, {**source.row.metrics, "busy_ms": None}
            figures.sources.append(Source(source.path, replace(source.row, config=config, metrics=metrics)))
    text = filled(figures, "nsys_profile")
    assert "recorded the kernels with Nsight Systems." in text
    assert "the two clocks agree." in text
