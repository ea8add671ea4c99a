"""Kernels in turns, with the preset `kernels`: kernels that run, that fail, that run out of memory."""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cs336_systems.bench.case import configurations, groups
from cs336_systems.bench.cases.attention import KERNELS, PRESETS, SHAPES, KernelsBench
from cs336_systems.bench.instruments import kernel_turns as bench
from cs336_systems.bench.instruments.timing import time_ms
from cs336_systems.bench.row import Row, read_rows
from cs336_systems.kernels.attention import get_attention
from cs336_systems.kernels.attention.contract import visible_pairs
from cs336_systems.machine.console import COMMAND
from cs336_systems.report.views import rows_table
from tests.bench.conftest import Bench

CASE = PRESETS["kernels"]
QUICK: dict[str, Any] = dict(shape=(1, 2, 32, 16), dtype="fp32", device="cpu", rounds=2, rep_ms=0.5, warmup_ms=0.0)
WORKS = {"forward": 2, "backward": 5, "forward_backward": 7, "forward_sum_backward": 7}


def measure(*kernels: str, **more: Any) -> list[Row]:
    return list(CASE.measure([KernelsBench(kernel=kernel, **QUICK | more) for kernel in kernels]))


def test_a_row_has_its_configuration_and_rates_from_its_times() -> None:
    (row,) = measure("naive")
    assert (row.case, row.variant, row.status, row.error) == ("kernels", "naive", "ok", None)
    assert (row.config["shape"], row.config["dtype"], row.config["is_causal"]) == ([1, 2, 32, 16], "fp32", True)
    for name, products in WORKS.items():
        times = row.metrics[f"{name}_ms"]
        assert 0 < times["p20"] <= times["p50"] <= times["p80"]
        flops = products * 2 * 16 * visible_pairs(32, 32, True) * 2  # two heads
        assert row.metrics[f"{name}_tflops"] == pytest.approx(flops / times["p50"] / 1e9)
        assert row.metrics["samples"][name] >= 2  # in two rounds
    assert row.metrics["timer"] == "time.perf_counter around each call"


def test_kernels_take_turns_and_all_rounds_count(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []
    rounds = iter([[1.0], [1.0], [3.0], [3.0]])  # two kernels, two rounds
    now: list[list[float]] = []

    def get(name: str) -> Any:
        turns.append(name)
        return real(name)

    def fake_time_ms(work: Any, *how: Any) -> list[float]:
        nonlocal now
        now = now or [next(rounds)] * len(WORKS)
        work()
        return now.pop()

    real = bench.get_attention
    monkeypatch.setattr(bench, "get_attention", get)
    monkeypatch.setattr(bench, "time_ms", fake_time_ms)
    rows = measure("naive", "sdpa")
    assert [name for name, before in zip(turns, ["", *turns], strict=False) if name != before] == ["naive", "sdpa"] * 3
    for row in rows:  # the first of the three turns is the first call
        assert {name: row.metrics[f"{name}_ms"]["p50"] for name in WORKS} == dict.fromkeys(WORKS, 2.0)


def test_a_slow_kernel_is_timed_in_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast = [2000.0] * len(WORKS), [1.0] * len(WORKS)
    given = iter([*slow, *fast, *(3 * ms for ms in fast)])
    monkeypatch.setattr(bench, "time_ms", lambda *_: [next(given)])
    rows = measure("naive", "sdpa")
    for row, ms in zip(rows, (2000.0, 2.0), strict=True):
        assert {name: row.metrics[f"{name}_ms"]["p50"] for name in WORKS} == dict.fromkeys(WORKS, ms)
    assert next(given, None) is None


def test_a_kernel_that_computes_in_another_type_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "get_attention", lambda name: lambda q, k, v, is_causal: (q + k + v).double())
    monkeypatch.setattr(bench.KernelInTurns, "time_all", lambda self: None)
    monkeypatch.setattr(torch.Tensor, "backward", lambda *_, **__: None)
    (row,) = measure("naive")
    assert (row.status, row.error) == ("error", "dtype 'fp32' was asked for and 'torch.float64' ran")


@pytest.mark.parametrize("kernel", ["sdpa_math", "tests.kernels.test_own_kernels:einsum"])
def test_a_kernel_that_lacks_an_argument_is_named_with_it(kernel: str) -> None:
    for field, value, argument in (("window", 4, "window"), ("document_length", 8, "documents")):
        lacking, other = measure(kernel, "naive", **{field: value})
        expected = rf"ValueError: kernel is '{kernel}': it must be .* argument {argument}, .* because {field} is set"
        assert re.fullmatch(expected, lacking.error or "")
        assert other.status == "ok"


def test_a_failing_kernel_is_a_row_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(name: str) -> object:
        def short_of_memory(*_: object) -> None:
            raise torch.OutOfMemoryError("Tried to allocate 8.00 GiB\nof which nothing is there")

        return short_of_memory if name == "vectorized_torch" else real(name)

    real = bench.get_attention
    monkeypatch.setattr(bench, "get_attention", get)
    rows = measure("vectorized_torch", "sdpa_cudnn", "sdpa")
    assert [row.status for row in rows] == ["oom", "error", "ok"]
    assert (rows[0].error, rows[0].metrics) == ("Tried to allocate 8.00 GiB", {"requested_bytes": 8 << 30})
    assert rows[1].error is not None
    assert rows[1].error.startswith("ValueError: q is on cpu")
    table = rows_table(rows)
    assert "| vectorized_torch | out of memory |" in table
    assert "| sdpa_cudnn | failed |" in table
    assert "- failed: ValueError: q is on cpu" in table


@pytest.mark.parametrize("too_large, status", [((1 << 30, 1 << 20, 1, 1), "oom"), ((1 << 30,) * 4, "error")])
def test_a_shape_that_cannot_be_allocated_gives_failed_rows(too_large: tuple[int, ...], status: str) -> None:
    rows = [*measure("naive", "sdpa", shape=too_large), *measure("naive", "sdpa")]
    assert [row.status for row in rows] == [status, status, "ok", "ok"]
    assert [row.variant for row in rows] == ["naive", "sdpa"] * 2
    assert rows[0].error
    assert rows[0].config.keys() == rows[2].config.keys()
    assert rows_table(rows)


def test_a_compiled_kernel_with_buffers_to_donate_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wasteful(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> torch.Tensor:
        return ((q @ k.mT).exp() @ v).exp()

    compiled = torch.compile(wasteful, backend="aot_eager")
    monkeypatch.setattr(bench, "get_attention", lambda name: compiled)
    (row,) = measure("naive")
    assert (row.status, row.error) == ("ok", None)


def test_all_kernels_of_a_shape_are_one_group_at_the_published_shapes() -> None:
    found = groups(CASE, configurations(CASE))
    assert [group[0].shape for group in found] == list(SHAPES)
    assert all([config.kernel for config in group] == list(KERNELS) for group in found)
    assert {"naive", "flash_triton", "sdpa", "flex"} <= set(KERNELS)


@pytest.mark.usefixtures("in_this_process")
def test_the_command_appends_rows_and_prints_a_table(tmp_path: Path, bench: Bench) -> None:
    for expected in (4, 8):
        code, said, _ = bench("kernels", "--quick", "--kernels", "naive", "sdpa", "--out", str(tmp_path))
        assert code == 0
        assert len((tmp_path / "kernels.jsonl").read_text().splitlines()) == expected
    commands = {row.env["command"] for row in read_rows(tmp_path / "kernels.jsonl")}
    assert commands == {"cs336 bench kernels --quick --kernels naive sdpa"}  # without the output folder
    assert COMMAND not in os.environ
    assert "| sdpa |" in said
    assert {"kernels.md", "kernels.csv", "kernels-tflops-fp32.png"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.usefixtures("in_this_process")
def test_options_win_over_quick(tmp_path: Path, bench: Bench) -> None:
    arguments = ["--kernel", "naive", "--device", "cpu", "--out", str(tmp_path), "--dtype", "bf16", "--rounds", "2"]
    shapes = ["--shapes", "1x2x8x4", "2X1x4x8"]
    assert bench("kernels", "--quick", *arguments, "--rep_ms", "0.5", "--is_causal", "false", *shapes)[0] == 0
    rows = read_rows(tmp_path / "kernels.jsonl")
    assert [row.config["shape"] for row in rows] == [[1, 2, 8, 4], [2, 1, 4, 8]]
    for row in rows:
        config = {name: row.config[name] for name in ("dtype", "rounds", "rep_ms", "warmup_ms", "is_causal")}
        assert config == {"dtype": "bf16", "rounds": 2, "rep_ms": 0.5, "warmup_ms": 0.0, "is_causal": False}


@pytest.mark.gpu
@pytest.mark.timing
@pytest.mark.parametrize("length", [32768, 65536])  # long enough that the host is ahead
def test_the_case_flash_agrees_with_tritons_benchmark(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both measure in turn, in short windows after a rest: within 0.1 s these kernels bring the card to its power
    limit, where its clock falls by a tenth (docs/log.md). That only slows a window, so the fastest are compared."""
    from triton.testing import do_bench

    of_case = PRESETS["flash"]
    given = {"kernel": ("flash_triton",), "length": (length,), "head_size": (64,), "dtype": ("bf16",), "rounds": (1,)}
    (config,) = configurations(of_case, given | {"warmup_ms": (5.0,), "rep_ms": (20.0,)})
    q, k, v, dO = (torch.randn(1, length, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def attention() -> torch.Tensor:
        return get_attention("flash_triton")(q, k, v, True)

    o = attention()
    by_hand: dict[str, Callable[[], Any]] = {
        "forward": attention,
        "backward": lambda: o.backward(dO, retain_graph=True),
        "forward_backward": lambda: attention().backward(dO),
    }
    how = dict(warmup=config.warmup_ms, rep=config.rep_ms, grad_to_none=inputs, return_mode="median")
    times: dict[str, list[tuple[float, float]]] = {work: [] for work in by_hand}

    def rested(timed: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (time.sleep(1), timed(*args, **kwargs))[1]

    def timed_by_hand() -> dict[str, float]:
        return {work: rested(do_bench)(call, **how) for work, call in by_hand.items()}

    monkeypatch.setattr(bench, "time_ms", rested(time_ms))
    for i in range(8):
        hand = {} if i % 2 else timed_by_hand()
        (row,) = of_case.measure([config])
        hand = hand or timed_by_hand()
        for work, of_work in times.items():
            of_work.append((row.metrics[f"{work}_ms"]["p50"], hand[work]))
    fastest = {work: [min(side) for side in zip(*both, strict=True)] for work, both in times.items()}
    ratios = {work: case / hand for work, (case, hand) in fastest.items()}
    assert ratios == pytest.approx(dict.fromkeys(ratios, 1), rel=0.01), times
