"""The case `ddp`: the configured runs are measured, and the streams of a step are drawn correctly."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cs336_systems.bench import ranks, runner, turns
from cs336_systems.bench.case import configurations, is_of, is_of_fewer_rounds, row_config
from cs336_systems.bench.cases import ddp
from cs336_systems.bench.cases.ddp import ALONE, CASE, DDPBench, name_of
from cs336_systems.bench.row import Row, append_row, read_rows
from cs336_systems.bench.turns import slowest
from cs336_systems.cli.report import make_report
from cs336_systems.config.run import ParallelConfig
from cs336_systems.planner.rows import job_of
from cs336_systems.report.step_streams import plot_streams, streams_table
from cs336_systems.report.views import rows_table
from cs336_systems.training.loop import StartedStep


def quick(*variants: str, **fields: Any) -> list[DDPBench]:
    given = {name: (value,) for name, value in fields.items()}
    return configurations(CASE, {"variant": variants, **given}, quick=True)


def split(rows: Iterable[Row], count: int) -> tuple[list[Row], list[Row]]:
    """The first `count` rows, and the rest."""
    found = list(rows)
    return found[:count], found[count:]


def test_each_variant_has_a_row_with_its_run(tmp_path: Path) -> None:
    variants = (ALONE, "bucketed:0.01+bf16", "overlap+zero1", "fsdp+zero2")
    first, rows = split(CASE.measure(quick(*variants, rounds=2, traces=str(tmp_path))), len(variants))
    assert [row.variant for row in first] == [row.variant for row in rows] == list(variants)
    assert [(row.config["rounds"], len(row.metrics["steps_ms"]), row.error) for row in first] == [(1, 2, None)] * 4
    assert [row.error for row in rows] == [None, None, None, None]
    alone, bucketed, zero1, zero2 = (row.config["run"] for row in rows)
    assert alone["parallel"]["devices"] == 1
    assert alone["train"]["batch_size"] * 2 == bucketed["train"]["batch_size"]
    assert (bucketed["parallel"]["strategy"], bucketed["parallel"]["bucket_size_mb"]) == ("bucketed", 0.01)
    assert bucketed["parallel"]["grad_dtype"] == "bf16"
    assert zero1["parallel"]["shard_optimizer"] is True
    assert [run["parallel"]["reshard_after_forward"] for run in (zero1, zero2)] == [True, False]
    assert not job_of(rows[3]).reshard_after_forward
    for row in rows:
        assert len(row.metrics["steps_ms"]) == 4  # in two rounds
        assert row.metrics["step_ms"]["p50"] > 0
        assert row.metrics["peak_memory_bytes"] > 0
    for variant in variants:
        assert f"| {variant} |" in rows_table(rows)
    assert "communication_ms" not in rows[0].metrics
    for row in rows[1:]:
        sent, both, span = (row.metrics[f"{name}_ms"] for name in ("communication", "both", "span"))
        assert 0 <= both <= sent < span
        assert sent > 0


Launched = Callable[[list[DDPBench], Path], None]


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Callable[[Launched], None]:
    """Replaces the launch of ranks by a function of the configurations and the folder for their rows."""

    def replace_by(run: Launched) -> None:
        def run_processes(program: list[str], devices: int, folder: Path) -> None:
            run([DDPBench(**fields) for fields in json.loads((folder / "configs.json").read_text())], folder)

        monkeypatch.setattr(ranks, "run_processes", run_processes)

    return replace_by


def test_a_failing_variant_is_a_row_and_the_others_are_measured(launch: Callable[[Launched], None]) -> None:
    launches: list[list[str]] = []

    def run(configs: list[DDPBench], folder: Path) -> None:
        launches.append([config.variant for config in configs])
        for number, config in enumerate(configs):
            (folder / "at_work").write_text(str(number))
            if config.variant == "overlap":
                raise RuntimeError("rank 1: CUDA out of memory. Tried to allocate 2.00 GiB")
            append_row(folder / "rows.jsonl", of_rounds(config, 1))
        raise RuntimeError("rank 1 was ended by SIGSEGV")  # after the last row, which costs no row

    launch(run)
    rows = list(CASE.measure(quick(ALONE, "overlap", "flat")))
    assert [(row.variant, row.status) for row in rows] == [(ALONE, "ok"), ("overlap", "oom"), ("flat", "ok")]
    assert launches == [[ALONE, "overlap", "flat"], ["flat"]]
    assert rows[1].metrics == {"requested_bytes": 2 << 30}


def test_each_round_yields_rows_of_the_rounds_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        def peak_memory_bytes(self) -> int:
            return 1

    def built(config: DDPBench, device: torch.device) -> Any:
        measured.append(config.variant)
        return nullcontext((Fake(), {"first_loss": 1.0, "startup_s": 1.0, "held_before_bytes": 0}))

    measured: list[str] = []
    monkeypatch.setattr(turns, "_built", built)
    monkeypatch.setattr(turns, "time_steps", lambda trainer, steps: [float(len(measured))])
    monkeypatch.setattr(DDPBench, "look", lambda *_: {})
    monkeypatch.setattr(turns, "free_memory", lambda: None)
    configs = quick("naive", "flat", rounds=3)
    rows = list(ddp.measure_in_turns(configs, torch.device("cpu"), lambda config: None))
    assert measured == [row.variant for row in rows] == ["naive", "flat"] * 3
    assert [row.config["rounds"] for row in rows] == [1, 1, 2, 2, 3, 3]
    assert [row.metrics["steps_ms"] for row in rows[::2]] == [[1.0], [1.0, 3.0], [1.0, 3.0, 5.0]]
    naive, flat = configs
    for row in rows[:4:2]:
        assert is_of_fewer_rounds(row, naive)
        assert not is_of_fewer_rounds(row, flat)
        assert not is_of(row, naive)  # as --resume compares them
    assert is_of(rows[4], naive)
    assert not is_of_fewer_rounds(rows[4], naive)


def test_variants_built_once_are_kept_for_all_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, int]] = []
    names: dict[int, int] = {}

    class Counting(turns.Trainer):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            names[id(self)] = len(names)
            events.append(("built", names[id(self)]))

        def start_step(self, *given: Any) -> StartedStep:
            events.append(("step", names[id(self)]))
            return super().start_step(*given)

        def close(self) -> None:
            events.append(("closed", names[id(self)]))
            super().close()

    monkeypatch.setattr(turns, "Trainer", Counting)
    configs = quick(ALONE, devices=1, rounds=2, steps=1, built_once=True)
    configs += [replace(configs[0], context_length=8)]
    rows = list(ddp.measure_in_turns(configs, torch.device("cpu"), lambda config: None))
    first, second = ([("step", i)] * 3 for i in range(2))  # of which the second is measured
    warm = [("built", 0), ("step", 0), ("built", 1), ("step", 1)]
    assert events == [*warm, *first, *second, *first, *second, ("closed", 1), ("closed", 0)]
    assert [len(row.metrics["steps_ms"]) for row in rows] == [1, 1, 2, 2]
    assert all("peak_memory_bytes" not in row.metrics and row.config["built_once"] for row in rows)


def of_rounds(config: DDPBench, rounds: int, status: Any = "ok") -> Row:
    return Row(case="ddp", variant=config.variant, config=row_config(config) | {"rounds": rounds}, status=status)


class Measuring:
    """Replaces the process that measures: yields the rows, and raises the exceptions among them."""

    def __init__(self, *events: Row | BaseException) -> None:
        self.events, self.is_sound, self.ended = events, True, False

    def measure(self, configs: Any) -> Iterator[Row]:
        for event in self.events:
            if isinstance(event, BaseException):
                raise event
            yield event

    def close(self) -> None:
        self.ended = True

    kill = close


def test_the_file_has_the_rounds_so_far_during_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process, which can write nothing more, loses only the current round."""
    path, configs = tmp_path / "rows.jsonl", quick("naive", "flat", rounds=3)
    there: list[list[tuple[str, int]]] = []

    def measure(*_: Any) -> Iterator[Row]:
        for rounds in (1, 2, 3):
            for config in configs:
                yield of_rounds(config, rounds)
                there.append([(row.variant, row.config["rounds"]) for row in read_rows(path)])

    process = Measuring()
    monkeypatch.setattr(process, "measure", measure)
    monkeypatch.setattr(runner, "Worker", lambda *_: process)
    list(runner.run_case(CASE, configs, path))
    assert there == [
        [("naive", 1)],
        [("naive", 1), ("flat", 1)],
        [("naive", 2), ("flat", 1)],
        [("naive", 2), ("flat", 2)],
        [("naive", 3), ("flat", 2)],
        [("naive", 3), ("flat", 3)],
    ]


@pytest.mark.parametrize("reason", [KeyboardInterrupt(), SystemExit(143), OSError("no space")], ids=type)
def test_a_launch_that_ends_early_leaves_rows_of_the_finished_rounds(
    reason: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = quick(ALONE, "naive", "flat", rounds=3)
    events = [of_rounds(config, rounds) for rounds in (1, 2) for config in configs]
    process = Measuring(*events[:5], reason)
    monkeypatch.setattr(runner, "Worker", lambda *_: process)
    path = tmp_path / "rows.jsonl"
    with pytest.raises(type(reason)):
        list(runner.run_case(CASE, configs, path))
    assert process.ended
    assert [(row.variant, row.config["rounds"]) for row in read_rows(path)] == [(ALONE, 2), ("naive", 2), ("flat", 1)]
    process = Measuring(*events, *(of_rounds(config, 3) for config in configs))
    assert [row.config["rounds"] for row in runner.run_case(CASE, configs, path, resume=True)] == [3, 3, 3]
    assert [row.config["rounds"] for row in read_rows(path)] == [2, 2, 1, 3, 3, 3]  # no rows of fewer rounds
    assert list(runner.run_case(CASE, configs, path, resume=True)) == []


def test_a_failure_in_a_later_round_keeps_earlier_rounds_and_restarts_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    naive, flat = configs = quick("naive", "flat", rounds=3)
    rows = [
        of_rounds(naive, 1),
        of_rounds(flat, 1),
        of_rounds(naive, 2),
        of_rounds(flat, 3, "oom"),
        of_rounds(naive, 1),
    ]
    path = tmp_path / "rows.jsonl"

    def left(*more: Row | BaseException, rows: Sequence[Row] = rows, before: Sequence[Row] = ()) -> list[Any]:
        path.unlink(missing_ok=True)
        for row in before:
            append_row(path, row)
        monkeypatch.setattr(runner, "Worker", lambda *_: Measuring(*rows, *more))
        with suppress(KeyboardInterrupt):
            list(runner.run_case(CASE, configs, path))
        return [(row.variant, row.config["rounds"], row.status) for row in read_rows(path)]

    assert left(of_rounds(naive, 3)) == [("naive", 3, "ok"), ("flat", 1, "ok"), ("flat", 3, "oom")]
    assert left(KeyboardInterrupt()) == [("naive", 2, "ok"), ("flat", 1, "ok"), ("flat", 3, "oom")]
    # A row of fewer rounds is not added behind one of all.
    found = left(KeyboardInterrupt(), rows=rows[:2], before=[of_rounds(naive, 3)])
    assert found == [("naive", 3, "ok"), ("flat", 1, "ok")]


def test_rows_of_fewer_rounds_come_through_a_launch(launch: Callable[[Launched], None]) -> None:
    def run(configs: list[DDPBench], folder: Path) -> None:
        for rounds in (1, 2):
            for config in configs:
                append_row(folder / "rows.jsonl", of_rounds(config, rounds))

    launch(run)
    rows = CASE.measure(quick("naive", "flat", rounds=2))
    assert [(row.variant, row.config["rounds"]) for row in rows] == [
        ("naive", 1), ("flat", 1), ("naive", 2), ("flat", 2)]  # fmt: skip


def test_rows_of_ranks_have_the_states_of_the_first_ranks_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    states = [{"sm_mhz": number} for number in (1, 2, 3)]
    monkeypatch.setattr(ranks, "current_gpu_state", lambda: states.pop(0))
    rows = [Row(case="ddp", variant=name, config={}) for name in "ab"]
    case = SimpleNamespace(config=dict, measure_on_rank=lambda *_: iter(rows))
    monkeypatch.setattr(ranks, "load_case", lambda place: case)
    (tmp_path / ranks._CONFIGS).write_text("[]")
    ranks.write_rows("module", tmp_path, torch.device("cpu"))
    first, second = read_rows(tmp_path / ranks._ROWS)
    assert (first.env["gpu_before"], first.env["gpu_after"]) == ({"sm_mhz": 1}, {"sm_mhz": 2})
    assert (second.env["gpu_before"], second.env["gpu_after"]) == ({"sm_mhz": 2}, {"sm_mhz": 3})


def test_what_nccl_does_is_in_the_name_and_the_run_except_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddp, "check_devices", lambda device, devices: None)
    monkeypatch.setattr(ddp, "select_device", torch.device)
    limited, alone = (
        DDPBench(variant=name, nccl_max_ctas=8, copy_engines=False, device="cuda") for name in ("overlap:100", ALONE)
    )
    assert name_of(limited) == "overlap:100+ctas8+nccl"
    parallel = limited.run_config().parallel
    assert (parallel.nccl_max_ctas, parallel.copy_engines) == (8, False)
    assert name_of(alone) == ALONE
    assert alone.run_config().parallel == ParallelConfig()


def test_the_slowest_rank_counts() -> None:
    times = [
        {"step_ms": {"p50": 3.0}, "peak_memory_bytes": 9, "held_before_bytes": 0},
        {"step_ms": {"p50": 5.0}, "peak_memory_bytes": 7, "held_before_bytes": 1},
    ]
    assert slowest(times) == {
        "step_ms": {"p50": 5.0}, "spread_ms": 2.0, "peak_memory_bytes": 9, "held_before_bytes": 1
    }  # fmt: skip


# Tables


def made_up(variant: str, p50: float, gib: int = 1, status: Any = "ok", gpu: str = "A", **fields: Any) -> Row:
    name, _, compiled = variant.partition(" ")
    config = {**row_config(quick(ALONE)[0]), "device": "cuda", "variant": name, "compile": bool(compiled), **fields}
    metrics = {"step_ms": {"p20": 0.9 * p50, "p50": p50, "p80": 1.2 * p50}, "peak_memory_bytes": gib << 30}
    metrics = metrics if status == "ok" else {}
    return Row(case="ddp", variant=variant, config=config, metrics=metrics, status=status, env={"gpu": gpu})


def table_of(*rows: Row) -> list[str]:
    return rows_table(rows).splitlines()


def test_communication_times_have_columns() -> None:
    times = {"communication_ms": 200.0, "both_ms": 10.0, "span_ms": 250.0, "overlapped": 0.05}
    alone, naive = made_up("alone", 160), made_up("naive", 160)
    _, _, header, _, first, second = table_of(alone, replace(naive, metrics=naive.metrics | times))
    assert header.endswith("| profiled: first to last (ms) | communicating (ms) | both (ms) | overlapped |")
    assert first.endswith("| - | - | - | - |")
    assert second.endswith("| 250.00 | 200.00 | 10.00 | 5% |")
    assert "communicating" not in rows_table([alone])


def test_the_table_has_the_time_added_to_a_step_alone() -> None:
    alone, naive, oom = made_up("alone", 100, 3), made_up("naive", 150, 4), made_up("fsdp", 1, status="oom")
    lines = table_of(alone, naive, oom, made_up("alone compiled", 50, 2), made_up("naive compiled", 60, 2))
    assert lines[0].startswith("A; size quick; devices 2; ")
    assert lines[5:] == [
        "| no | naive | 150.00 | 135.00 | 180.00 | 50.00 | +50.0% | 4 |",
        "| no | fsdp | out of memory | - | - | - | - | - |",
        "| yes | alone | 50.00 | 45.00 | 60.00 | - | - | 2 |",
        "| yes | naive | 60.00 | 54.00 | 72.00 | 10.00 | +20.0% | 2 |",
    ]
    # Each launch has its own `alone`; rows before the first one are compared with it.
    lines = table_of(made_up("flat", 300), alone, naive, made_up("alone", 200), made_up("a", 300))
    assert [line.split(" | ")[5] for line in lines[4:]] == ["+200.0%", "-", "+50.0%", "+50.0%"]


def test_settings_and_machines_are_told_apart_and_a_failure_is_not_an_oom() -> None:
    here = [made_up("alone", 100), made_up("naive", 150), made_up("flat", 0, status="error")]
    elsewhere = [made_up("alone", 10, size="xl"), made_up("naive", 30, gpu="B"), made_up("naive", 40, devices=4)]
    lines = table_of(*here, *elsewhere)
    assert lines[2].startswith("| machine | size | devices | variant | step (ms) |")
    assert [line.split(" | ")[8] for line in lines[4:10]] == ["-", "+50.0%", "-", "-", "-", "-"]
    assert "| A | quick | 2 | flat | failed |" in lines[6]


# Streams


def test_streams_have_totals_and_a_picture(tmp_path: Path) -> None:
    step = tmp_path / "overlap.json"
    step.write_text(json.dumps({"compute": [[0, 3]], "communication": [[1, 5]]}))
    assert "| overlap | 5.0 | 3.0 | 4.0 | 2.0 | 50% |" in streams_table([step])
    plot_streams([step, step], tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert "| overlap |" in make_report(["streams", str(step), "--plot", str(tmp_path / "again.png")])


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "does not hold the intervals of a step"),
        ("[]", "does not hold the intervals of a step"),
        ('{"compute": 3, "communication": []}', "does not hold the intervals of a step"),
        ('{"compute": [[1]]}', "does not hold the intervals of a step"),
        (None, "does not exist"),
    ],
)
def test_a_file_without_streams_is_named(content: str | None, message: str, tmp_path: Path) -> None:
    step = tmp_path / "step.json"
    if content is not None:
        step.write_text(content)
    with pytest.raises((ValueError, FileNotFoundError), match=rf"step\.json.*{message}"):
        streams_table([step])
