"""Several workloads in one call of `cs336 profile`: a process and a folder each, and one file with the rows of all."""

from pathlib import Path

import pytest

from cs336_systems.bench.row import read_rows
from cs336_systems.cli.main import main
from cs336_systems.report.views import rows_table


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["profile", *arguments])
    return int(stop.value.code or 0)


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_memory_of_two_modes_is_recorded_into_a_folder_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--quick", "--device", "cpu", "--context_length", "16", "--mode", "forward", "full_step"]
    assert command("memory", *given, "--optimizer", "own", "--out", str(tmp_path)) == 0
    said, rows = capsys.readouterr().out, read_rows(tmp_path / "rows.jsonl")
    assert [(row.variant, row.status, row.config["optimizer"]) for row in rows] == [
        ("forward", "ok", "own"),
        ("train_step", "ok", "own"),
    ]
    folders = {f"quick-16-{mode}-fp32" for mode in ("forward", "train_step")}
    assert files_in(tmp_path) == {*folders, "rows.jsonl"}
    for folder in folders:  # and no rows, which would be shown twice
        names = {"phases.json", "snapshot.pickle", "summary.md", "timeline.html", "timeline.png"}
        assert files_in(tmp_path / folder) == names
        assert f"{folder}: ok" in said
    assert rows_table(rows) in said
    assert rows[1].metrics["at_peak_bytes"]["optimizer state"] > 0 == rows[0].metrics["at_peak_bytes"]["gradients"]


def test_kernels_of_two_lengths_are_profiled_into_a_folder_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--quick", "--context_length", "8", "16", "--mode", "train_step", "--optimizer", "own"]
    assert command("kernels", *given, "--out", str(tmp_path)) == 0
    said, rows = capsys.readouterr().out, read_rows(tmp_path / "rows.jsonl")
    facts = [(row.variant, row.status, row.config["context_length"], row.config["optimizer"]) for row in rows]
    assert facts == [("train_step", "ok", length, "own") for length in (8, 16)]
    assert files_in(tmp_path) == {"quick-8-train_step-fp32", "quick-16-train_step-fp32", "rows.jsonl"}
    for length in (8, 16):
        names = {"kernels.csv", "shares.png", "trace_train_step.json.gz"}
        assert files_in(tmp_path / f"quick-{length}-train_step-fp32") == names
    assert rows_table(rows) in said


@pytest.mark.parametrize(
    "wrong, message",
    [
        (["--size", "quick", "huge"], "size is 'huge'"),
        (["--precision", "fp32", "fp8"], "precision is 'fp8'"),
        (["--context_length", "16", "many"], "context_length is many: it must be an integer"),
        (["--mode", "forward", "backwards"], "is 'backwards'"),
        (["--size", "quick", "small", "--out", "/dev/null/below"], "out is '/dev/null/below'"),
    ],
    ids=str,
)
@pytest.mark.parametrize("tool", ["memory", "kernels"])
def test_a_wrong_value_among_several_is_one_line_before_anything_runs(
    tool: str, wrong: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tool, "--quick", "--device", "cpu", "--out", str(tmp_path / "out"), *wrong) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()
