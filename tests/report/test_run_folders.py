"""Tables and loss curves of run folders, and the errors for damaged ones."""

import json
import shutil
from pathlib import Path

import pytest

from cs336_systems.cli.report import report
from cs336_systems.report.run_folders import plot_runs, runs_table, summary_block

DEMO = Path(__file__).parents[2] / "results/cpu/demo"


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
        runs_table([tmp_path / "nowhere"])


def test_unfinished_runs_and_other_folders_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    begun, other = tmp_path / "begun", tmp_path / "other"
    for folder in (begun, other):
        folder.mkdir()
    (begun / "config.json").write_text("{}")
    assert len(runs_table([begun, other, DEMO]).splitlines()) == 3
    assert caplog.messages == [
        f"{begun} has no result.json, so the table leaves it out",
        f"{other} has no config.json, so the table leaves it out",
    ]
    assert runs_table([begun]) == "none of these runs has a result.json"


def test_the_number_of_processes_is_shown(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text((DEMO / "result.json").read_text())
    config = json.loads((DEMO / "config.json").read_text())
    for processes, shown in ((1, "| "), (2, "| 2 x ")):
        (tmp_path / "config.json").write_text(json.dumps(config | {"parallel": {"devices": processes}}))
        threads = json.loads((DEMO / "result.json").read_text())["env"]["cpu_threads"]
        assert f"{shown}{threads} CPU threads, fp32 |" in runs_table([tmp_path])


def test_lists_of_a_configuration_are_read_as_they_are_written(tmp_path: Path) -> None:
    config = json.loads((DEMO / "config.json").read_text())
    config["model"]["rope_scaling"] = [8.0, 1.0, 4.0, 64.0]
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(DEMO / "result.json", tmp_path)
    assert len(runs_table([tmp_path]).splitlines()) == 3


def test_runs_without_metrics_are_not_drawn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run has no metrics before its first step, or if only its result was kept."""
    begun, done = tmp_path / "begun", tmp_path / "done"
    begun.mkdir()
    shutil.copytree(DEMO, done)
    plot_runs([begun, done], tmp_path / "both.png")
    assert caplog.messages == [f"{begun} has no metrics.jsonl, not drawn"]
    plot_runs([done], tmp_path / "one.png")
    assert (tmp_path / "both.png").read_bytes() == (tmp_path / "one.png").read_bytes()
    with pytest.raises(ValueError, match=r"none of these runs has a metrics\.jsonl"):
        plot_runs([begun], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_runs_without_a_result_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [tmp_path / name for name in ("a", "b")]
    for run_dir in runs:
        run_dir.mkdir()
        for name in ("config.json", "metrics.jsonl"):
            shutil.copy(DEMO / name, run_dir)
    assert report(["runs", *map(str, runs), "--plot", str(tmp_path / "drawn.png")]) == 0
    told = capsys.readouterr().out  # warnings may come before it
    assert told.endswith(f"none of these runs has a result.json\n\n{tmp_path / 'drawn.png'}\n")
    plot_runs(runs, tmp_path / "both.png")
    assert (tmp_path / "drawn.png").read_bytes() == (tmp_path / "both.png").read_bytes()


@pytest.mark.parametrize("content", ["{}", "[]", "not JSON", '{"model": 3}', '{"model": {"size": "huge"}}'])
@pytest.mark.parametrize("name", ["config.json", "result.json"])
def test_a_damaged_file_of_a_run_is_named(tmp_path: Path, name: str, content: str) -> None:
    for file in ("config.json", "result.json"):
        (tmp_path / file).write_text((DEMO / file).read_text())
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        runs_table([tmp_path])
    if name == "result.json":
        with pytest.raises(ValueError, match=r"result\.json"):
            summary_block(tmp_path)
