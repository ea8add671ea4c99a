"""The runner: every configuration gets a row, whatever happens to the process that measures it."""

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cs336_systems.bench import outcome, worker
from cs336_systems.bench.case import Case, configurations, describe_among, groups, is_of, row_config, value_type
from cs336_systems.bench.cases import get_case
from cs336_systems.bench.cases.ddp import OverlapTrace
from cs336_systems.bench.outcome import failure, requested_bytes
from cs336_systems.bench.row import Row, append_row, exit_code, read_rows
from cs336_systems.bench.runner import rows_on_this_gpu, run_case
from cs336_systems.cli.bench import _disturbed, case_parser
from cs336_systems.machine.console import by_command
from tests import forked
from tests.distributed import processes, wait_until

from .accidents import CASE, TOGETHER
from .conftest import Bench

ROOT = Path(__file__).parents[2]


def run(path: Path, case: Case = CASE, *, kinds: tuple[str, ...], **options: Any) -> list[Row]:
    given: dict[str, Any] = {"kind": kinds, "number": options.pop("numbers", (1,))}
    given["folder"] = (options.pop("folder", ""),)
    return list(run_case(case, configurations(case, given), path, **options))


def started(folder: Path) -> list[str]:
    return [line.rsplit(" ", 1)[0] for line in (folder / "started").read_text().splitlines()]


def test_a_failure_is_a_row_and_the_sweep_goes_on(tmp_path: Path) -> None:
    path, said = tmp_path / "rows.jsonl", []
    kinds = ("none", "oom", "raises", "raises beside", "is killed", "exits", "is another")
    rows = run(path, kinds=kinds, numbers=(1, 2), progress=lambda *state: said.append(state))
    assert read_rows(path) == rows
    assert [(row.variant, row.config["number"]) for row in rows] == [(kind, n) for kind in kinds for n in (1, 2)]
    by_kind = {row.variant: row for row in rows}
    assert {kind: row.status for kind, row in by_kind.items()} == {
        "none": "ok", "oom": "oom", **dict.fromkeys(kinds[2:], "error")
    }  # fmt: skip
    assert by_kind["none"].config == {"kind": "none", "number": 2, "folder": "", "built": True}
    assert by_kind["oom"].metrics == {"requested_bytes": 3 << 29}
    assert by_kind["raises"].error == "RuntimeError: the dog ate it"
    assert by_kind["raises beside"].error == "WorkerEndedError: ValueError: nobody has caught this"
    assert "SIGKILL" in str(by_kind["is killed"].error)
    assert "exit code 3" in str(by_kind["exits"].error)
    assert by_kind["is another"].error == "kind 'is another' was asked for and 'none' ran"
    assert said[0] == (0, 14, "kind none, number 1")
    assert said[-1][:2] == (14, 14)
    assert [done for done, _, _ in said] == sorted(done for done, _, _ in said)


def test_each_group_is_logged_before_it_is_measured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "cs336_systems")
    run(tmp_path / "a", kinds=("none",), numbers=(1,))
    run(tmp_path / "a", kinds=("none",), numbers=(1, 3), resume=True)
    run(tmp_path / "b", TOGETHER, kinds=("none", "oom"), numbers=(1, 2))
    lines = [line for line in caplog.messages if line.startswith("measuring")]
    assert [re.findall(r"\d+", line) for line in lines[:2]] == [["1", "1"], ["2", "2", "3"]]
    assert "measuring 3 to 4 of 4: together; none, oom; number 2" in lines


def test_groups_share_a_process_unless_isolated(tmp_path: Path) -> None:
    shared = run(tmp_path / "a", kinds=("none", "oom"), numbers=(1, 2, 3))
    assert len({row.metrics["process"] for row in shared if row.status == "ok"}) == 1
    isolated = run(tmp_path / "b", kinds=("none",), numbers=(1, 2), isolated=True)
    assert len({row.metrics["process"] for row in isolated}) == 2
    assert os.getpid() not in {row.metrics["process"] for row in isolated}


def test_rows_have_the_command_without_its_output_options(tmp_path: Path) -> None:
    words = ["cs336", "bench", "accident", "--kind", "a b", "--out", "/elsewhere", "--resume"]
    with by_command([*words, "--out_dir=/or", "--number", "1"]):  # the second kind ends its process
        rows = run(tmp_path / "rows.jsonl", kinds=("none", "is killed"))
    commands = [row.env["command"] for row in rows]
    assert commands == ["cs336 bench accident --kind 'a b' --number 1"] * 2
    with by_command(["outer"]):
        with by_command(["inner", "a\nb"]):  # a row's command is one line
            assert Row(case="a", variant="b", config={}).env["command"] == "inner 'a?b'"
        assert Row(case="a", variant="b", config={}).env["command"] == "outer"
    (without,) = run(tmp_path / "others.jsonl", kinds=("none",))
    assert "command" not in without.env


def test_the_configuration_that_ends_a_shared_process_is_found(tmp_path: Path) -> None:
    rows = run(tmp_path / "rows", TOGETHER, kinds=("none", "is killed", "oom"), numbers=(1,))
    assert {row.variant: row.status for row in rows} == {"none": "ok", "is killed": "error", "oom": "oom"}
    assert rows[0].metrics["together"] == 1
    rows = run(tmp_path / "rows", TOGETHER, kinds=("none", "oom"), numbers=(1, 2))
    assert [row.metrics["together"] for row in rows] == [2, 2, 2, 2]


def test_resume_skips_measured_configurations_except_errors(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    first = run(path, kinds=("none", "oom", "raises"), folder=str(tmp_path))
    assert len(run(path, kinds=("oom", "raises", "none"), folder=str(tmp_path), resume=True)) == 1
    assert started(tmp_path) == ["none 1", "oom 1", "raises 1", "raises 1"]
    assert read_rows(path)[:3] == first
    assert len(run(path, kinds=("none",), folder=str(tmp_path))) == 1  # without resume everything is measured again


def test_a_sweep_that_was_killed_goes_on_with_no_row_lost_or_doubled(tmp_path: Path) -> None:
    path, kinds = tmp_path / "rows", ("none", "oom", "hangs", "raises")
    program = (
        "from pathlib import Path\n"
        "from tests.bench.test_runner import run\n"
        f"if __name__ == '__main__': run(Path({str(path)!r}), kinds={kinds}, folder={str(tmp_path)!r})\n"
    )
    (tmp_path / "program.py").write_text(program)
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    sweep = forked.Popen([sys.executable, str(tmp_path / "program.py")], env=environ)
    wait_until(lambda: (tmp_path / "started").exists() and "hangs 1" in started(tmp_path), sweep)
    process = int((tmp_path / "started").read_text().split()[-1])
    sweep.send_signal(signal.SIGKILL)
    sweep.wait()
    wait_until(lambda: not Path(f"/proc/{process}").exists())  # the worker ends too
    before = read_rows(path)
    assert [row.variant for row in before] == ["none", "oom"]
    with open(path, "a") as file:
        file.write('{"case": "accidents", "vari')  # as if killed while writing
    rest = run(path, kinds=("none", "oom", "raises"), folder=str(tmp_path), resume=True)
    assert [row.variant for row in rest] == ["raises"]
    assert read_rows(path) == [*before, *rest]


def test_configurations_are_the_product_of_given_values() -> None:
    def kinds(**options: Any) -> list[tuple[str, int]]:
        return [(config.kind, config.number) for config in configurations(CASE, **options)]

    assert kinds() == [("none", 1), ("oom", 1), ("raises", 1)]
    assert kinds(sweep=["kind"])[-1] == ("is killed", 1)
    assert kinds(given={"kind": ("a", "b"), "number": (1, 2)}) == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    assert kinds(given={"kind": ("a", "a")}) == [("a", 1)]
    with pytest.raises(ValueError, match="sweep has 'speed': it must be one of kind, number, folder"):
        configurations(CASE, sweep=["speed"])
    with pytest.raises(ValueError, match="number is 0"):
        configurations(CASE, {"number": (1, 0)})
    assert value_type(CASE, "number") is int


def test_configurations_are_grouped_by_the_fields_that_do_not_take_turns() -> None:
    configs = configurations(TOGETHER, {"kind": ("a", "b"), "number": (1, 2)})
    found = [[(config.kind, config.number) for config in group] for group in groups(TOGETHER, configs)]
    assert found == [[("a", 1), ("b", 1)], [("a", 2), ("b", 2)]]
    assert groups(CASE, configs) == [[config] for config in configs]
    assert describe_among(configs)(configs[1]) == "kind a, number 2"
    assert describe_among(configs[:1])(configs[0]) == ""


def test_rows_match_configurations_whatever_their_paths_further_and_newer_fields_are() -> None:
    here, there = (OverlapTrace(device="cpu", traces=folder) for folder in ("a", "b"))
    row = Row(case="overlap-trace", variant="v", config={**row_config(here), "more": 1}, env={})
    del row.config["built_once"]  # counts as its default
    assert is_of(row, here)
    assert is_of(row, there)
    for other in (dict(variant="flat"), dict(built_once=True)):
        assert not is_of(row, replace(there, **other))


@pytest.mark.parametrize(
    "message, expected",
    [
        ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU", 20 << 20),
        ("Tried to allocate 512.00 bytes", 512),
        ("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4503599 bytes.", 4_503_599),
        ("no size", None),
        ("Tried to allocate 5 XiB", None),
    ],
)  # fmt: skip
def test_requested_bytes_are_read_from_the_message(message: str, expected: int | None) -> None:
    assert requested_bytes(message) == expected


class Wrapped(RuntimeError):
    """An error as torch.compile wraps it."""

    def __init__(self, inner: Exception) -> None:
        super().__init__("backend='inductor' raised:\nand what it was")
        self.inner_exception = inner


@pytest.mark.parametrize(
    "error, expected",
    [
        (Wrapped(torch.OutOfMemoryError("CUDA out of memory. Tried")), ("oom", "CUDA out of memory. Tried")),
        (Wrapped(Wrapped(KeyError("x"))), ("error", "KeyError: 'x'")),
        (RuntimeError("at 1:0:\n^\n\nno such thing"), ("error", "RuntimeError: at 1:0: no such thing")),
        (RuntimeError("rank 1 failed\nCUDA out of memory. Tried"), ("oom", "CUDA out of memory. Tried")),
        (RuntimeError(""), ("error", "RuntimeError:")),
        (MemoryError("no"), ("oom", "no")),
        (RuntimeError("CPUAllocator: can't allocate memory: you"), ("oom", "CPUAllocator: can't allocate memory: you")),
    ],
)
def test_an_error_has_a_status_and_a_line(error: Exception, expected: tuple[str, str]) -> None:
    assert failure(error) == expected


def test_a_row_has_the_state_of_its_gpu_which_is_in_use_before(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []
    states = [{}, {"sm_mhz": 1}, {"sm_mhz": 2}, {"sm_mhz": 3}]
    monkeypatch.setattr(outcome, "use_device", events.append)
    monkeypatch.setattr(outcome, "current_gpu_state", lambda: events.append("state") or states.pop(0))
    monkeypatch.setattr(outcome, "row_config", lambda config: {})
    case: Any = SimpleNamespace(name="case", variant=lambda config: "v")
    rows = outcome.each(lambda config: events.append("measured") or ({}, {}))
    cuda, cpu = rows(case, [SimpleNamespace(device=device) for device in ("cuda:1", "cpu")])
    assert events == ["cuda:1", "state", "measured", "state", "state", "measured", "state"]
    assert "gpu_before" not in cuda.env
    assert cuda.env["gpu_after"] == {"sm_mhz": 1}
    assert (cpu.env["gpu_before"], cpu.env["gpu_after"]) == ({"sm_mhz": 2}, {"sm_mhz": 3})


def test_resume_ignores_rows_of_another_machine(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    (own,) = run(path, kinds=("none",))
    path.unlink()
    append_row(path, replace(own, env={**own.env, "gpu": "another"}))
    append_row(path, replace(own, case="another"))
    assert len(run(path, kinds=("none",), resume=True)) == 1
    assert run(path, kinds=("none",), resume=True) == []


def test_resume_compares_the_gpu_that_a_configuration_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("H200", "T4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: names[device.index or 0 if device else 0])
    measured = [("cuda", "H200"), ("cuda:0", "H200"), ("cuda:1", "T4"), ("cpu", "H200"), (None, "H200")]
    elsewhere = [("cuda:0", "T4"), ("cuda:1", "H200"), ("cuda:2", "T4"), ("cuda", None)]
    for device, gpu in (*measured, *elsewhere):
        config = {} if device is None else {"device": device}
        append_row(tmp_path / "rows", Row(case="accidents", variant="v", config=config, env={"gpu": gpu}))
    found = rows_on_this_gpu(CASE, tmp_path / "rows")
    assert [(row.config.get("device"), row.env["gpu"]) for row in found] == measured


def test_resume_uses_rows_of_subfolders_and_of_machines_with_more_of_the_same_gpu(tmp_path: Path) -> None:
    (own,) = run(tmp_path / "further" / "launch" / "rows", kinds=("none",))
    (tmp_path / "further" / "launch" / "others").write_text("no row")
    assert run(tmp_path / "rows", kinds=("none",), resume=True) == []
    assert len(run(tmp_path / "further" / "elsewhere" / "rows", kinds=("none",), resume=True)) == 1
    append_row(tmp_path / "alone" / "rows", replace(own, env={**own.env, "gpu_count": 8}))
    assert run(tmp_path / "alone" / "rows", kinds=("none",), resume=True) == []


def test_a_resumed_command_with_nothing_to_measure_leaves_no_empty_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, bench: Bench
) -> None:
    caplog.set_level("INFO", "cs336_systems")
    resume = ["precision-accumulation", "--quick", "--resume", "--out"]
    assert bench(*resume, str(tmp_path / "first"))[0] == 0
    code, said, _ = bench(*resume, str(tmp_path))
    assert code == 0
    assert "| fp16 into fp16 |" in said  # rows of the subfolder are shown
    assert f"4 of 4 configurations are in {tmp_path} already" in caplog.messages
    assert [path.name for path in tmp_path.iterdir()] == ["first"]

    append_row(tmp_path / "precision-accumulation.jsonl", Row(case="other", variant="v", config={}, env={}))
    kept = (tmp_path / "precision-accumulation.jsonl").read_text()
    assert bench(*resume, str(tmp_path))[0] == 0
    assert (tmp_path / "precision-accumulation.jsonl").read_text() == kept
    (tmp_path / "precision-accumulation.jsonl").unlink()
    (tmp_path / "first/precision-accumulation.jsonl").write_text("no row\n")
    assert bench(*resume, str(tmp_path))[0] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


@pytest.mark.parametrize(
    "statuses, code",
    [([], 0), (["ok"], 0), (["oom"], 0), (["error"], 1), (["error", "error"], 1), (["error", "oom"], 0)],
)
def test_a_command_fails_if_all_rows_are_errors(statuses: list[Any], code: int) -> None:
    assert exit_code([Row(case="c", variant="v", config={}, env={}, status=status) for status in statuses]) == code


def append_many(path: str, number: int) -> None:
    for i in range(100):
        append_row(Path(path), Row(case="a", variant=f"{number} {i}", config={"long": "x" * 9000}, env={}))


def test_processes_that_append_to_one_file_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=append_many, args=(str(path), number)) for number in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert sorted(row.variant for row in read_rows(path)) == sorted(f"{n} {i}" for n in range(3) for i in range(100))


def test_only_an_incomplete_row_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("somebody's notes\nmore of them")
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        run(path, kinds=("none",), folder=str(tmp_path))
    assert not (tmp_path / "started").exists()
    append_row(path, Row(case="a", variant="b", config={}, env={}))
    assert path.read_text().startswith("somebody's notes\nmore of them\n{")


def members(group: int) -> list[int]:
    """The processes of a group."""
    return [process.pid for process in processes() if process.group == group]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_interrupt_ends_a_sweep_with_a_line_and_no_process_is_left(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cs336_systems", "bench", "model", "--quick", "--mode", "forward"]
    command += ["--steps", "900000000", "--out", str(tmp_path)]
    sweep = forked.Popen(
        command, cwd=ROOT, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_until(lambda: len(members(sweep.pid)) > 1)  # a worker has started
        os.killpg(sweep.pid, signal.SIGINT)
        said, complained = sweep.communicate(timeout=60)
        assert sweep.returncode == 130
        assert "stopped; there are no rows yet" in said
        assert complained == "cs336: interrupted\n"
        wait_until(lambda: not members(sweep.pid))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(sweep.pid, signal.SIGKILL)


@pytest.mark.parametrize("number, has_rows", [(signal.SIGTERM, True), (signal.SIGHUP, False)])
def test_a_signal_removes_the_scratch_folder_and_sets_the_exit_code(
    number: int, has_rows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bench: Bench
) -> None:
    if has_rows:
        append_row(tmp_path / "model.jsonl", Row(case="other", variant="v", config={}, env={}))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    process = SimpleNamespace(start=lambda: None, join=lambda *_: None, is_alive=lambda: False, kill=lambda: None)
    monkeypatch.setattr(worker._CONTEXT, "Process", lambda **_: process)
    monkeypatch.setattr(worker.forkserver, "ensure_running", lambda: None)

    def measure(*_: Any) -> Iterator[Row]:
        assert len(list(scratch.iterdir())) == 1
        os.kill(os.getpid(), number)
        raise AssertionError("it goes on")
        yield

    before = signal.getsignal(number)  # another test's, perhaps
    monkeypatch.setattr(worker.Worker, "measure", measure)
    code, said, _ = bench("model", "--quick", "--out", str(tmp_path))
    assert code == 128 + number
    assert list(scratch.iterdir()) == []
    assert ("--resume goes on" in said, "there are no rows yet" in said) == (has_rows, not has_rows)
    assert signal.getsignal(number) is before


def test_doubtful_times_are_reported() -> None:
    def said(before: dict[str, Any], after: dict[str, Any]) -> str:
        return _disturbed(Row(case="c", variant="v", config={}, env={"gpu_before": before, "gpu_after": after}))

    quiet = {"slowed_by": [], "other_processes": 0}
    assert said(quiet, quiet) == said({}, {}) == ""
    assert said(quiet, quiet | {"slowed_by": ["heat", "power cap"]}) == "; the GPU was slowed by heat, power cap"
    others = "; other processes on the GPU, which take its time: 2"
    assert said(quiet | {"other_processes": 2}, quiet) == said(quiet, quiet | {"other_processes": 2}) == others


def test_the_help_of_a_quick_run_has_quick_defaults() -> None:
    parsers = (case_parser(get_case("flash"), "bench flash", "bench", "", is_quick) for is_quick in (False, True))
    whole, quick = (" ".join(parser.format_help().split()) for parser in parsers)
    assert "(default: 128 256 512" in whole
    assert "(default: 32 64)" in quick
