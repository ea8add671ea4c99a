"""The clocks for kernels and for steps."""

from types import SimpleNamespace

import pytest
import torch

from cs336_systems.bench.instruments import timing
from cs336_systems.bench.instruments.timing import Stopwatch, time_ms


def test_gradients_are_cleared_before_each_timed_call() -> None:
    x = torch.ones(3, requires_grad=True)
    calls = []

    def work() -> None:
        calls.append(x.grad)
        x.sum().backward()

    times = time_ms(work, torch.device("cpu"), warmup_ms=0.0, rep_ms=1000.0, gradients_of=[x])
    assert len(calls) == 5 + len(times)  # five estimate the duration of a call
    calls.clear()
    times = time_ms(work, torch.device("cpu"), warmup_ms=0.0, rep_ms=0.0, gradients_of=[x])
    assert len(calls) == len(times) == 1  # a long call is not repeated
    assert all(grad is None for grad in calls)


def test_on_a_gpu_the_cache_is_flushed_before_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    event = SimpleNamespace(record=lambda: seen.append("event"), elapsed_time=lambda end: 2.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: seen.append("waited"))
    monkeypatch.setattr(torch, "empty", lambda *_, **__: SimpleNamespace(zero_=lambda: seen.append("flushed")))
    x = SimpleNamespace(grad=1)
    times, period = timing._gpu_times(lambda: seen.append(f"work, {x.grad}"), 2, [x], torch.device("cuda"))
    assert (times, period) == ([2.0, 2.0], 2.0)
    assert seen == 2 * ["event", "flushed", "event", "work, None", "event"] + ["waited"]


def test_on_a_gpu_the_flushes_count_towards_the_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    monkeypatch.setattr(timing, "_gpu_times", lambda work, count, *_: (counts.append(count) or count * [0.02], 0.125))
    times = time_ms(lambda: None, torch.device("cuda"), warmup_ms=25, rep_ms=100)
    assert times == 800 * [0.02]
    assert counts == [1, 4, 200, 800]


def test_warm_up_calls_come_before_measured_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    monkeypatch.setattr(timing, "_cpu_times", lambda work, count, *_: (counts.append(count) or count * [2.0], 2.0))
    assert len(time_ms(lambda: None, torch.device("cpu"), warmup_ms=20, rep_ms=100)) == 50
    assert counts == [1, 4, 10, 50]


def test_a_call_shorter_than_the_clocks_tick_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_cpu_times", lambda work, count, *_: (count * [0.0], 0.0))
    for rep_ms, count in ((0.0, 1), (0.1, 100)):
        assert time_ms(lambda: None, torch.device("cpu"), warmup_ms=0.1, rep_ms=rep_ms) == count * [0.0]


def test_laps_follow_the_clock() -> None:
    now = iter((10.0, 10.5, 12.0))
    watch = Stopwatch(torch.device("cpu"), lambda: next(now))
    assert [watch.lap_ms(), watch.lap_ms()] == [500.0, 1500.0]


def test_a_lap_ends_when_the_device_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(timing, "wait_for", lambda device: seen.append(f"waited for {device}"))
    watch = Stopwatch(torch.device("cpu"), lambda: seen.append("looked at the clock") or 0.0)
    watch.lap_ms()
    assert seen == 2 * ["waited for cpu", "looked at the clock"]
