"""The presets of the case of attention kernels, tiny and with fake clocks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cs336_systems.bench.case import configurations, groups, is_of
from cs336_systems.bench.cases import attention
from cs336_systems.bench.cases.attention import PRESETS
from cs336_systems.bench.instruments.timing import Stopwatch
from cs336_systems.bench.row import read_rows
from cs336_systems.kernels.attention.contract import visible_pairs
from cs336_systems.planner.accounting import naive_attention_bytes
from cs336_systems.report.outputs import RECORD
from cs336_systems.report.views import rows_table
from tests.bench.conftest import Bench

FLASH, ATTENTION = PRESETS["flash"], PRESETS["attention"]
SWEEP, LEADERBOARD = PRESETS["attention-sweep"], PRESETS["leaderboard-2025"]


@pytest.mark.parametrize("name", PRESETS)
def test_the_quick_form_measures_every_configuration_on_a_cpu(name: str) -> None:
    case = PRESETS[name]
    configs = configurations(case, quick=True)
    rows = [row for group in groups(case, configs) for row in case.measure(group)]
    assert [(row.status, row.error) for row in rows] == [("ok", None)] * len(configs)
    assert all(any(is_of(row, config) for row in rows) for config in configs)
    assert {row.case for row in rows} == {name}
    assert rows_table(rows)


def test_flash_is_the_handouts_sweep() -> None:
    configs = configurations(FLASH)
    assert {config.length for config in configs} == {2**i for i in range(7, 17)}
    assert {config.head_size for config in configs} == {16, 32, 64, 128}
    assert {config.dtype for config in configs} == {"bf16", "fp32"}
    assert {(config.batch_size, config.is_causal) for config in configs} == {(1, True)}
    assert len(groups(FLASH, configs)) == 10 * 4 * 2


def test_a_band_and_groups_of_heads_are_measured_on_their_work() -> None:
    given: dict[str, Any] = dict(kernel=("naive", "flash_torch"), shape=((2, 4, 64, 16),), num_kv_heads=(2,))
    whole, limited = (
        [row for config in configurations(PRESETS["kernels"], given | limits, quick=True)
         for row in PRESETS["kernels"].measure([config])]
        for limits in ({}, dict(window=(8,), document_length=(16,)))
    )  # fmt: skip
    assert [row.status for row in (*whole, *limited)] == ["ok"] * 4
    pairs = [64 * 65 // 2, 4 * (8 * 9 // 2 + 8 * 8)]
    found = [row.metrics["forward_tflops"] * row.metrics["forward_ms"]["p50"] for row in (whole[0], limited[0])]
    assert found[1] / found[0] == pytest.approx(pairs[1] / pairs[0])


def test_16_bit_kernels_are_left_out_of_fp32_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cs336_systems.bench.cases.attention.select_device", lambda name: "cuda")
    wide = {config.kernel for config in configurations(FLASH) if config.dtype == "fp32"}
    narrow = {config.kernel for config in configurations(FLASH) if config.dtype == "bf16"}
    assert narrow - wide == {"sdpa_flash", "sdpa_cudnn"}


class Clocked(torch.autograd.Function):
    """Attention that moves a fake clock by 3 ms forward and 5 ms backward; the first two passes take longer."""

    now = 0.0
    calls = 0

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        assert q.grad is None  # gradients do not accumulate
        Clocked.calls += 1
        Clocked.now += 3e-3 if Clocked.calls > 2 else 1.0
        return q + k + v

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        Clocked.now += 5e-3 if Clocked.calls > 2 else 1.0
        return (*gradients * 3, None)


class FakeStopwatch(Stopwatch):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device, lambda: Clocked.now)


def test_forward_and_backward_are_timed_separately_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "get_attention", lambda name: Clocked.apply)
    monkeypatch.setattr(attention, "Stopwatch", FakeStopwatch)
    monkeypatch.setattr(Clocked, "calls", 0)
    config = attention.PlainBench(batch_size=2, length=16, head_size=8, device="cpu", warmup=2, repeats=7)
    (row,) = ATTENTION.measure([config])
    assert (row.status, row.error) == ("ok", None)
    assert Clocked.calls == 9
    assert row.metrics["forward_ms"] == pytest.approx(dict(p20=3.0, p50=3.0, p80=3.0, mean=3.0, std=0.0), abs=1e-6)
    assert row.metrics["backward_ms"] == pytest.approx(dict(p20=5.0, p50=5.0, p80=5.0, mean=5.0, std=0.0), abs=1e-6)
    assert row.metrics["backward_tflops"] == pytest.approx(5 * 2 * 8 * visible_pairs(16, 16, True) * 2 / 5.0 / 1e9)
    assert "default_timer" in row.metrics["timer"]


def test_an_oom_row_of_attention_has_the_counted_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32.00 GiB. GPU 0 has less")

    monkeypatch.setattr(attention, "get_attention", lambda name: short)
    config = attention.PlainBench(length=16, head_size=8, device="cpu", is_causal=False)
    (row,) = ATTENTION.measure([config])
    assert row.status == "oom"
    assert row.metrics["requested_bytes"] == 32 << 30
    assert row.metrics["counted_bytes"] == naive_attention_bytes(8, 16, 16, 8, is_causal=False)
    (line,) = rows_table([row]).splitlines()[4:]
    assert line == "| naive eager | out of memory | 1.91e-05 | 3.05e-05 |"


def test_rows_tell_compiled_from_eager_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: real(f, backend="aot_eager", **how))
    configs = configurations(ATTENTION, {"compile": (False, True), "length": (16, 24), "head_size": (8,)}, (), True)
    rows = list(ATTENTION.measure(configs))
    assert [(row.variant, row.config["compile"], row.error) for row in rows] == [
        ("naive eager", False, None), ("naive compiled", True, None)
    ] * 2  # fmt: skip


def test_attention_is_the_handouts_sweep() -> None:
    configs = configurations(ATTENTION)
    assert {(config.head_size, config.length) for config in configs} == {
        (d, n) for d in (16, 32, 64, 128) for n in (256, 1024, 4096, 8192, 16384)
    }
    assert {(config.batch_size, config.repeats, config.dtype) for config in configs} == {(8, 100, "fp32")}
    assert {config.compile for config in configs} == {False, True}


def test_the_leaderboard_is_timed_as_in_the_handout(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def do_bench(work: Any, **how: Any) -> list[float]:
        asked.update(how, work=work)
        return [4.0, 5.0, 9.0]

    monkeypatch.setattr("triton.testing.do_bench", do_bench)
    config = configurations(LEADERBOARD)[0]
    assert (config.num_heads, config.length, config.head_size, config.dtype) == (16, 16384, 64, "bf16")
    assert config.compile
    times, timer = attention.handout_times(print, config, torch.device("cuda"))  # type: ignore[arg-type]
    assert times == [4.0, 5.0, 9.0]
    assert asked == dict(work=print, rep=10_000, warmup=1_000, return_mode="all")
    assert timer.startswith("triton.testing.do_bench(flash_forward_backward, rep=10000, warmup=1000)")


def test_the_leaderboard_on_a_cpu_names_its_timer() -> None:
    (row,) = LEADERBOARD.measure(configurations(LEADERBOARD, {"kernel": ("sdpa",)}, quick=True))
    assert "do_bench needs a GPU" in row.metrics["timer"]
    flops = 7 * 2 * 16 * visible_pairs(64, 64, True) * 2
    expected = flops / row.metrics["forward_sum_backward_ms"]["mean"] / 1e9
    assert row.metrics["forward_sum_backward_tflops"] == pytest.approx(expected)


def test_tiers_and_shapes_are_sizes() -> None:
    assert attention.parse_tier("256:128") == (256, 128)
    for text in ("256", "256x128", "256:128:64", "0:1", ":", "a:b", "-1:2", "1:2147483648", "٣:٣"):
        with pytest.raises(ValueError, match=r"^tier is '.*QUERIES:KEYS, such as 256:128"):
            attention.parse_tier(text)
    for text in ("1x2x3", "1x2x3x0", "axbxcxd", "", "1x2x-3x4", "1x2x3x4x5", "1x1x1x2147483648", "1x1x1x" + 5000 * "9"):
        with pytest.raises(ValueError, match=r"^shape is '.*BxHxNxD"):
            attention.parse_shape(text)


def test_the_sweep_has_a_row_for_a_tier() -> None:
    (row,) = SWEEP.measure(configurations(SWEEP, {"tier": ((16, 8),), "kernel": ("naive",)}, quick=True))
    assert row.config["tier"] == [16, 8]
    flops = 2 * 2 * 16 * 16 * 8 * 2  # two products, two heads
    assert row.metrics["forward_tflops"] == pytest.approx(flops / row.metrics["forward_ms"]["p50"] / 1e9)
    assert "backward_ms" not in row.metrics


@pytest.mark.usefixtures("in_this_process")
def test_the_command_writes_the_sweeps_files(tmp_path: Path, bench: Bench) -> None:
    arguments = ["--kernels", "naive", "sdpa", "--tiers", "16:8", "8:8", "--out", str(tmp_path)]
    assert bench("attention-sweep", "--quick", *arguments)[0] == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        RECORD,
        "attention-sweep.jsonl",
        "attention-sweep.csv",
        "attention-sweep.md",
        "attention-sweep-forward.png",
    }
    rows = read_rows(tmp_path / "attention-sweep.jsonl")
    assert [(row.status, row.variant, row.config["tier"]) for row in rows] == [
        ("ok", kernel, tier) for tier in ([16, 8], [8, 8]) for kernel in ("naive", "sdpa")
    ]


@pytest.mark.gpu
def test_on_a_gpu_plain_attention_holds_the_counted_bytes() -> None:
    given = {"length": (2048,), "head_size": (32,), "compile": (False,), "device": ("cuda",), "repeats": (3,)}
    (row,) = ATTENTION.measure(configurations(ATTENTION, given))
    assert (row.status, row.error) == ("ok", None)
    tensor, counted = 8 * 2048 * 32 * 4, row.metrics["counted_bytes"]
    # Besides the counted bytes: q, k, v, o and the gradient of o. k and v are in both.
    in_use = counted["saved_for_backward"] + 3 * tensor
    assert in_use <= row.metrics["memory_before_backward_bytes"] <= in_use + (4 << 20)  # blocks are rounded up
    peak = counted["backward_peak"] + 5 * tensor
    assert peak <= row.metrics["peak_memory_bytes"] <= peak + (4 << 20)


@pytest.mark.gpu
def test_on_a_gpu_every_kernel_and_the_handouts_timer() -> None:
    given = {"length": (256,), "head_size": (64,), "rounds": (1,), "rep_ms": (1.0,), "device": ("cuda",)}
    for group in groups(FLASH, configurations(FLASH, given)):
        for row in FLASH.measure(group):
            assert (row.variant, row.status, row.error) == (row.variant, "ok", None)
            assert row.metrics["extra_memory_bytes"] >= 0
    given = {"length": (1024,), "rep_ms": (20.0,), "warmup_ms": (5.0,), "device": ("cuda",)}
    for row in LEADERBOARD.measure(configurations(LEADERBOARD, given)):
        assert (row.variant, row.status, row.error) == (row.variant, "ok", None)
        assert row.metrics["timer"].startswith("triton.testing.do_bench(")
        assert row.metrics["calls"] > 1
