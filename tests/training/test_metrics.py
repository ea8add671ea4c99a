"""Every log of a run has the true numbers, and no logging package is imported unless it is asked for."""

import dataclasses
import io
import json
import math
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from cs336_systems.training import train
from cs336_systems.training.metrics import (
    METRICS_FILE,
    JsonLines,
    Progress,
    plot_loss_curves,
    read_metrics,
    summarise,
)

from .helpers import checkpoint_path, largest_file, make_config, run_train

pytestmark = pytest.mark.usefixtures("one_thread")

ROW = dict(
    step=10,
    loss=2.34567,
    lr=0.00123,
    grad_norm=0.5,
    step_ms=12.0,
    data_wait_ms=0.1,
    tokens_per_s=12345.6,
    mfu=0.4567,
    memory_bytes=3 * 2**29,
    skipped_steps=0,
)


# metrics.jsonl


def write_lines(path: Path, *rows: dict[str, Any], end: str = "") -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + end)
    return path


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    rows = [ROW, {"step": 10, "valid_loss": 1.25}, {**ROW, "step": 11, "mfu": None}]
    sink = JsonLines(path)
    assert read_metrics(path) == []
    for i, row in enumerate(rows, start=1):
        sink.write(row)
        assert read_metrics(path) == rows[:i], "a row is not in the file as soon as it is written"
    sink.write({"step": 12, "loss": math.nan, "grad_norm": math.inf})
    sink.close()
    assert "NaN" not in path.read_text()
    assert read_metrics(path)[-1] == {"step": 12, "loss": None, "grad_norm": None}


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    sink = JsonLines(path)
    sink.write(ROW)
    for use in (lambda: sink.write(ROW), sink.close):
        with pytest.raises(OSError, match=rf"\] File too large: '{path}'$"), largest_file(path.stat().st_size):
            use()
    assert read_metrics(path) == [ROW]


def test_a_last_line_cut_short_at_any_place_is_left_out(tmp_path: Path) -> None:
    first, last = {"step": 1, "loss": 2.0}, json.dumps(ROW)
    for cut in range(1, len(last) + 1):
        path = write_lines(tmp_path / METRICS_FILE, first, end=last[:cut])
        expected = (
            [first, ROW] if cut == len(last) else [first]
        )  # where only the end of the line is missing, all is there
        assert read_metrics(path) == expected, last[:cut]

        JsonLines(path, last_step=10).close()  # a resume goes on from there
        assert path.read_text() == "".join(json.dumps(row) + "\n" for row in expected), last[:cut]


def test_a_broken_line_in_the_middle_is_an_error_that_names_file_and_line(tmp_path: Path) -> None:
    path = write_lines(tmp_path / METRICS_FILE, {"step": 1}, end='{"step": 2, "lo\n{"step": 3}\n')
    for use in (lambda: read_metrics(path), lambda: JsonLines(path, last_step=3)):
        with pytest.raises(ValueError, match="line 2") as caught:
            use()
        assert str(path) in str(caught.value)
    assert '{"step": 2, "lo\n' in path.read_text(), "the line that a person may want to mend is gone"


@settings(max_examples=50, deadline=None)
@given(steps=st.lists(st.integers(1, 20), max_size=12), last_step=st.integers(0, 20))
def test_a_resume_cuts_off_the_rows_after_its_step_and_only_those(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], last_step: int
) -> None:
    rows = [{"step": step, "loss": float(i)} for i, step in enumerate(steps)]
    path = write_lines(tmp_path_factory.mktemp("rows") / METRICS_FILE, *rows)
    sink = JsonLines(path, last_step)
    sink.write({"step": last_step + 1, "loss": 9.0})
    sink.close()
    kept = [row for row in rows if row["step"] <= last_step]
    assert read_metrics(path) == [*kept, {"step": last_step + 1, "loss": 9.0}]


def test_a_summary_of_known_times() -> None:
    assert summarise([1, 2, 3, 4, 5, 6]) == pytest.approx(dict(p20=2, p50=3.5, p80=5, mean=3.5, std=1.7078251))
    assert summarise([]) == {}


# The progress line


def progress_at(monkeypatch: pytest.MonkeyPatch, console: Console, first_step: int, max_steps: int) -> Progress:
    monkeypatch.setattr("cs336_systems.training.metrics.time.perf_counter", lambda: 100.0)
    monkeypatch.setattr("cs336_systems.training.metrics.rich.get_console", lambda: console)
    return Progress(first_step, max_steps)


@pytest.mark.parametrize(
    "row, first_step, max_steps, seconds, parts",
    [
        (ROW, 0, 30, 10.0, ["step 10/30", "loss 2.3457", "lr 1.23e-03", "12,346", "45.7%", "1.50 GiB", "left 0:20"]),
        # Resumed at step 1,000: the time is of ten steps.
        ({**ROW, "step": 1010, "mfu": None}, 1000, 2010, 1.0, ["step 1,010/2,010", "left 1:40"]),
        ({**ROW, "step": 30, "loss": math.nan}, 0, 30, 10.0, ["loss nan", "left 0:00"]),
        ({**ROW, "step": 2}, 0, 100_002, 2.0, ["left 1666:40"]),
    ],
)
def test_the_progress_line_of_a_row(
    monkeypatch: pytest.MonkeyPatch, row: dict[str, Any], first_step: int, max_steps: int, seconds: float, parts: Any
) -> None:
    progress = progress_at(monkeypatch, Console(file=io.StringIO()), first_step, max_steps)
    line = progress.format(row, 100.0 + seconds)
    assert [part for part in parts if part not in line] == []
    # The first step may compile the model, so nothing is said after it.
    assert "left" not in progress.format({**ROW, "step": first_step + 1}, 160.0)


def test_without_a_terminal_there_are_plain_lines_at_once_and_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    progress = progress_at(monkeypatch, Console(file=out, width=40), 0, 30)
    with progress:
        for second, step in ((101, 1), (109, 9), (111, 11), (112, 12), (121, 21)):
            monkeypatch.setattr("cs336_systems.training.metrics.time.perf_counter", lambda second=second: float(second))
            progress.update({**ROW, "step": step})
        progress.update({"step": 21, "valid_loss": 1.5})
    lines = out.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "step 1/30",
        "step 11/30",
        "step 21/30",
        "step 21/30 valid 1.5000",
    ]
    assert "\x1b" not in out.getvalue()


def test_on_a_terminal_the_line_is_live_and_remembers_the_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    progress = progress_at(monkeypatch, Console(file=out, force_terminal=True, width=160), 0, 30)
    with progress:
        progress.update({**ROW, "step": 1})
        progress.update({"step": 1, "valid_loss": 1.5})
        first = out.getvalue()
        progress.update({**ROW, "step": 2})
    assert "valid 1.5000" in first
    assert "step 1/30" in out.getvalue()
    assert "step 2/30" in out.getvalue().replace("\x1b[1m", "")
    assert "valid 1.5000" in out.getvalue()
    assert "\x1b" in out.getvalue()


# The loss curve


def coloured_columns(path: Path) -> np.ndarray:
    """How many pixels of each column are neither white nor grey nor black."""
    image = matplotlib.image.imread(path)[..., :3]
    return ((image.max(axis=-1) - image.min(axis=-1)) > 0.1).sum(axis=0)


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize("runs", [1, 2])
def test_curves_run_over_the_width_of_the_picture(tmp_path: Path, runs: int) -> None:
    rows = [{"step": i, "loss": 5 / i} for i in range(1, 50)] + [{"step": 49, "valid_loss": 0.2}]
    plot_loss_curves({f"run {i}": rows for i in range(runs)}, tmp_path / "a.png", {"unigram entropy": 3.0})
    assert (coloured_columns(tmp_path / "a.png") > 0).mean() > 0.7


# TensorBoard


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = accumulators.EventAccumulator(str(folder), size_guidance={accumulators.SCALARS: 0})
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


def told(run_dir: Path, key: str) -> list[tuple[int, float]]:
    return [(row["step"], row[key]) for row in read_metrics(run_dir / METRICS_FILE) if key in row]


def test_tensorboard_has_every_loss_once_also_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    config = make_config(tmp_path, log=dict(tensorboard=True), checkpoint=dict(checkpointing_interval=5))
    for again in (False, True):
        if again:
            shutil.rmtree(checkpoint_path(config, 10))
            config = dataclasses.replace(config, resume="auto")
        train(config)
        found = scalars(tmp_path / "run" / "tensorboard")
        for key in ("loss", "valid_loss", "lr", "grad_norm"):
            expected = told(tmp_path / "run", key)
            assert [step for step, _ in found[key]] == [step for step, _ in expected], f"{key}, resumed: {again}"
            assert [value for _, value in found[key]] == pytest.approx([value for _, value in expected], rel=1e-6)


# Weights & Biases


def wandb_log(file: Path) -> tuple[str, dict[str, list[tuple[int, float]]]]:
    """The run's ID in a .wandb file, and the values of each key by step, in the order in which they were logged.

    The file has the format of LevelDB's logs: a header of 7 bytes, then blocks of 32 KiB with pieces of records.
    """
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    data, place, whole, run_id = file.read_bytes(), 7, b"", ""
    found: dict[str, list[tuple[int, float]]] = {}
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:  # too little for the head of a piece
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (2, 3):  # the first and a middle piece
            continue
        record, whole = messages.Record.FromString(whole), b""
        run_id = record.run.run_id or run_id
        items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for key, value in items.items():
            found.setdefault(key, []).append((items["_step"], value))
    return run_id, found


def test_wandb_goes_on_with_the_same_run_after_a_resume_rewound_to_its_step(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    log = dict(wandb="offline", wandb_project="tiny")
    config = make_config(tmp_path, log=log, checkpoint=dict(checkpointing_interval=5))
    assert run_train(config).returncode == 0  # by itself: wandb leaves a service behind until its process ends
    assert not (tmp_path / "wandb").exists()
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    assert b"tiny" in file.read_bytes()
    shutil.rmtree(checkpoint_path(config, 10))
    other = dataclasses.replace(config.train, max_steps=12)  # so that steps 6 to 10 have other rates than at first
    assert run_train(dataclasses.replace(config, resume="auto", train=other)).returncode == 0

    (first, before), (second, after) = map(
        wandb_log, sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    )
    assert first == second != ""
    for key in ("loss", "valid_loss", "lr", "grad_norm"):
        assert after[key] == told(tmp_path / "run", key), key
    assert [step for step, _ in after["loss"]] == list(range(1, 13))
    assert after["lr"][:5] == before["lr"][:5]
    assert after["lr"][5:10] != before["lr"][5:10]


def test_wandb_that_cannot_log_in_is_a_line_that_names_the_field(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    code = f"import os; os.environ['HOME'] = {str(tmp_path)!r}; from cs336_systems.cli.main import main; main()"
    done = run_train(make_config(tmp_path, log=dict(wandb="online")), code, stdin=subprocess.DEVNULL)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("cs336: log.wandb is 'online'")


# Packages that are not asked for, or not installed

_MODULES = """
import sys
for name in [*sys.modules]:  # those of pytest's process, of which this is a fork
    if name.split(".")[0] in ("wandb", "tensorboard") or name.startswith("torch.utils.tensorboard"):
        del sys.modules[name]
from cs336_systems.cli.main import main
try:
    main()
finally:
    print("loaded:", *sorted({name.split(".")[0] for name in sys.modules} & {"wandb", "tensorboard"}))
"""


def test_neither_tensorboard_nor_wandb_is_imported_unasked(tmp_path: Path) -> None:
    config = make_config(tmp_path, train=dict(max_steps=1))
    done = run_train(config, _MODULES)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded:"
    assert not (tmp_path / "run" / "tensorboard").exists()
    assert not (tmp_path / "run" / "wandb").exists()


@pytest.mark.parametrize(
    "log, module, field",
    [
        (dict(tensorboard=True), "tensorboard", "log.tensorboard is true"),
        (dict(wandb="offline"), "wandb", "log.wandb is 'offline'"),
        (dict(wandb="online"), "wandb", "log.wandb is 'online'"),
    ],
)
def test_a_missing_package_is_a_value_error_that_names_field_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: dict[str, Any], module: str, field: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=f"pip install {module}") as caught:
        train(make_config(tmp_path, log=log))
    assert field in str(caught.value)
    assert not (tmp_path / "run").exists()
