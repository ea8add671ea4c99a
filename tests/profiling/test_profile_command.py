"""`cs336 profile`: several workloads in one call, a folder each and one file of rows; mistakes are one line."""

from pathlib import Path

import pytest

from cs336_systems.bench.row import read_rows
from cs336_systems.report.kernel_profiles import plot_shares
from cs336_systems.report.views import rows_table
from tests.systems.command import Run, the_line


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_memory_of_two_modes_is_recorded_into_a_folder_each(tmp_path: Path, cs336: Run) -> None:
    given = ["--quick", "--device", "cpu", "--context_length", "16", "--mode", "forward", "full_step"]
    code, said, _ = cs336("profile", "memory", *given, "--optimizer", "own", "--out", str(tmp_path))
    rows = read_rows(tmp_path / "rows.jsonl")
    facts = [(row.variant, row.status, row.config["optimizer"]) for row in rows]
    assert (code, facts) == (0, [("forward", "ok", "own"), ("train_step", "ok", "own")])
    folders = {f"quick-16-{mode}-fp32" for mode in ("forward", "train_step")}
    assert files_in(tmp_path) == {*folders, "rows.jsonl"}
    for folder in folders:  # and no rows, which would be shown twice
        names = {"phases.json", "snapshot.pickle", "summary.md", "timeline.html", "timeline.png"}
        assert files_in(tmp_path / folder) == names
        assert f"{folder}: ok" in said
    assert rows_table(rows) in said
    assert rows[1].metrics["at_peak_bytes"]["optimizer state"] > 0 == rows[0].metrics["at_peak_bytes"]["gradients"]


def test_kernels_of_two_lengths_are_profiled_into_a_folder_each(tmp_path: Path, cs336: Run) -> None:
    given = ["--quick", "--context_length", "8", "16", "--mode", "train_step", "--optimizer", "own"]
    code, said, _ = cs336("profile", "kernels", *given, "--out", str(tmp_path))
    rows = read_rows(tmp_path / "rows.jsonl")
    facts = [(row.variant, row.status, row.config["context_length"], row.config["optimizer"]) for row in rows]
    assert (code, facts) == (0, [("train_step", "ok", length, "own") for length in (8, 16)])
    assert files_in(tmp_path) == {"quick-8-train_step-fp32", "quick-16-train_step-fp32", "rows.jsonl"}
    for length in (8, 16):
        names = {"shares.png", "trace_train_step.json.gz"}
        assert files_in(tmp_path / f"quick-{length}-train_step-fp32") == names
    assert rows_table(rows) in said


@pytest.mark.parametrize("what", ["kernels", "memory"])
def test_a_resumed_profile_shows_earlier_rows_too(what: str, tmp_path: Path, cs336: Run) -> None:
    given = ["profile", what, "--quick", "--device", "cpu", "--context_length", "8", "16", "--out", str(tmp_path)]
    assert cs336(*given, "--mode", "forward")[0] == 0
    for _ in range(2):  # the second time there is nothing to measure
        code, said, _ = cs336(*given, "--mode", "forward", "train_step", "--resume")
        rows = read_rows(tmp_path / "rows.jsonl")
        in_order = sorted(rows, key=lambda row: (row.config["context_length"], row.variant))
        assert (code, len(rows)) == (0, 4)
        assert rows_table(in_order) in said


def test_the_shares_of_a_resumed_profile_have_earlier_rows_too(tmp_path: Path, cs336: Run) -> None:
    given = ["profile", "kernels", "--quick", "--out", str(tmp_path)]
    assert cs336(*given, "--mode", "forward")[0] == 0
    alone = (tmp_path / "shares.png").read_bytes()
    assert cs336(*given, "--mode", "forward", "train_step", "--resume")[0] == 0
    plot_shares(read_rows(tmp_path / "rows.jsonl"), tmp_path / "both.png")
    assert alone != (tmp_path / "shares.png").read_bytes() == (tmp_path / "both.png").read_bytes()


OF_BOTH = [
    ("--size quick huge", "size is 'huge'"),
    ("--precision fp32 fp8", "precision is 'fp8'"),
    ("--context_length 16 many", "context_length is many: it must be an integer"),
    ("--mode forward backwards", "mode is 'backwards'"),
    ("--warmpu 3", "unknown field warmpu: did you mean warmup?"),
    ("--out /dev/null/below", "out is '/dev/null/below': it must be a folder that can be written"),
]
MISTAKES = {
    "kernels": [*OF_BOTH, ("--steps 0", "steps is 0"), ("--warmup 0", "warmup is 0"), ("--tool ncu", "tool is 'ncu'")],
    "memory": [*OF_BOTH, ("--warmup -1", "warmup is -1"), ("--compile true", "compile is true")],
    "memory --snapshot": [
        ("no.pickle", "snapshot no.pickle does not exist"),
        ("notes", "snapshot notes is not a memory snapshot"),
        ("notes --precision bf16", "precision is 'bf16'"),
        ("notes --warmup 3", "warmup is 3"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("what, words, message", [(what, *each) for what, rows in MISTAKES.items() for each in rows])
def test_a_mistake_is_one_line_before_anything_runs(
    what: str, words: str, message: str, tmp_path: Path, cs336: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").write_bytes(b"hello")
    quick = [] if "--snapshot" in what else ["--quick", "--device", "cpu"]
    assert the_line(cs336("profile", *what.split(), *words.split(), *quick)).startswith(message)
    assert files_in(tmp_path) == {"notes"}
