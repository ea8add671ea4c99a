"""Lifetimes, categories and peaks of snapshots whose answers were worked out by hand."""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest

from cs336_systems.bench.profiling.history import History, history_of
from cs336_systems.bench.profiling.phases import Held, Phases, read_phases
from cs336_systems.bench.profiling.snapshot import Frame, read_snapshot
from cs336_systems.bench.profiling.timeline import Timeline, code_lines, facts, levels, size_text, timeline_of

from .snapshots import Trace, one_step, save


def history(content: dict[str, Any], folder: Path, phases: Phases | None = None) -> History:
    return history_of(read_snapshot(save(folder / "snapshot.pickle", content)), phases)


def step_by_hand(folder: Path) -> History:
    content, phases = one_step()
    return history(content, folder, phases)


def test_a_step_by_hand_has_the_memory_over_time_that_was_worked_out(tmp_path: Path) -> None:
    step = step_by_hand(tmp_path)
    assert levels(step).sum(axis=0).tolist() == (
        [3050] * 4 + [3450, 4150, 4150, 3450] + [3750] * 4 + [4750, 5350, 5350, 4950, 4950, 4350, 4350]
        + [4050] * 4 + [4950, 4950, 4050, 4050] + [3050] * 4
    )  # fmt: skip
    assert step.boundaries == (1, 9, 20, 28)
    assert step.times_us[step.boundaries[1]] == 80  # from the first boundary on: eight events of 10 us later
    assert step.warnings == ()


def test_a_step_by_hand_has_the_peak_the_categories_and_the_largest_that_were_worked_out(tmp_path: Path) -> None:
    found = facts(step_by_hand(tmp_path))
    assert (found["peak_bytes"], found["peak_phase"], found["peak_ms"]) == (5350, "backward", 0.12)
    assert found["at_peak_bytes"] == {
        "parameters": 1000,
        "optimizer state": 2000,
        "gradients": 1000,
        "activations": 400 + 300,
        "temporaries": 600,
        "other": 50,
    }
    assert found["phase_peak_bytes"] == {"forward": 4150, "backward": 5350, "optimizer": 4950}
    assert [entry["bytes"] for entry in found["largest"]] == [2000, 1000, 1000, 900, 700, 600, 400, 300, 50]
    largest = {entry["bytes"]: entry for entry in found["largest"]}
    assert largest[2000] == dict(bytes=2000, phase="before", category="optimizer state", name="exp_avg of w", code=[])
    assert largest[900] == dict(
        bytes=900, phase="optimizer", category="temporaries", name="", code=["cs336_basics/model.py:16 forward"]
    )
    assert largest[700]["category"] == "temporaries"  # freed before the backward pass
    assert (largest[600]["category"], largest[600]["phase"]) == ("temporaries", "backward")  # at the same address
    assert found["allocated_bytes"] == 400 + 700 + 300 + 1000 + 600 + 900


def test_a_step_by_hand_has_the_timeline_that_was_worked_out(tmp_path: Path) -> None:
    drawn = Timeline(**facts(step_by_hand(tmp_path))["timeline"])
    assert drawn.total.tolist() == levels(step_by_hand(tmp_path)).sum(axis=0).tolist()
    assert drawn.in_use["gradients"] == [0] * 12 + [1000] * 15 + [0] * 4
    assert sum(drawn.in_use["temporaries"]) == 2 * 700 + 4 * 600 + 2 * 900
    assert drawn.phases == {"forward": [0.0, 0.08], "backward": [0.08, 0.19], "optimizer": [0.19, 0.27]}


def test_without_phases_categories_are_lifetimes(tmp_path: Path) -> None:
    bare = history(one_step()[0], tmp_path)
    found = facts(bare)
    assert (found["peak_bytes"], found["peak_phase"]) == (5350, "recorded")
    assert found["at_peak_bytes"] == {
        "alive all along": 3050,
        "alive before, freed": 0,
        "allocated, kept": 0,
        "allocated, freed": 2300,
    }


def test_memory_from_before_that_is_freed_and_memory_that_is_kept(tmp_path: Path) -> None:
    trace = Trace().free(0x100, 64).alloc(0x100, 32).alloc(0x200, 8)
    made = history(trace.snapshot((0x100, 32), (0x200, 8), (0x300, 4)), tmp_path)
    spans = [(a.address, a.size, a.start, a.end, a.category) for a in made.allocations]
    assert spans == [
        (0x100, 64, 0, 2, "alive before, freed"),
        (0x300, 4, 0, 5, "alive all along"),
        (0x100, 32, 3, 5, "allocated, kept"),
        (0x200, 8, 4, 5, "allocated, kept"),
    ]
    assert levels(made).sum(axis=0).tolist() == [68, 68, 4, 36, 44]


def test_memory_that_another_stream_still_needs_is_in_use_until_the_free_is_completed(tmp_path: Path) -> None:
    trace = Trace().alloc(1, 100, stream=7).note("free_requested", 1, 100, stream=7).alloc(2, 10)
    trace.note("free_completed", 1, 100, stream=7)
    made = history(trace.snapshot((2, 10)), tmp_path)
    assert levels(made).sum(axis=0).tolist() == [0, 100, 100, 110, 10]


def test_memory_that_waits_for_its_free_at_the_end_is_in_use(tmp_path: Path) -> None:
    trace = Trace().alloc(1, 100).note("free_requested", 1, 100).alloc(2, 10).free(2, 10)
    made = history(trace.snapshot((1, 100), state="active_awaiting_free"), tmp_path)
    assert levels(made).sum(axis=0).tolist() == [0, 100, 100, 110, 110, 100]


def test_a_free_that_the_trace_never_completes_counts_from_its_request(tmp_path: Path) -> None:
    """As when free_completed events are not recorded: at another alloc there, or when it is not in use in the end."""
    trace = Trace().alloc(1, 100).note("free_requested", 1, 100).alloc(1, 7).note("free_requested", 1, 7).alloc(2, 1)
    made = history(trace.snapshot((2, 1)), tmp_path)
    assert levels(made).sum(axis=0).tolist() == [0, 100, 0, 7, 0, 1]
    assert made.warnings == ()


@pytest.mark.parametrize("seed", range(25))
def test_any_trace_has_the_levels_of_a_simulation(seed: int, tmp_path: Path) -> None:
    """Memory given and freed at random, addresses used again, some from before, frees that wait for another stream."""
    chance, trace = random.Random(seed), Trace()
    sizes = {512 * i: chance.randrange(1, 10_000) for i in range(chance.randrange(20))}
    in_use, waiting, expected = dict(sizes), [], [sum(sizes.values())]
    while len(expected) < 300:
        free = [address for address in range(0, 512 * 60, 512) if address not in in_use]
        if waiting and chance.random() < 0.3:
            address = waiting.pop(chance.randrange(len(waiting)))
            trace.note("free_completed", address, in_use.pop(address))
        elif (held := [address for address in in_use if address not in waiting]) and chance.random() < 0.5:
            address = chance.choice(held)
            trace.note("free_requested", address, in_use[address])
            waiting.append(address)
        elif free:
            address = chance.choice(free)
            in_use[address] = chance.randrange(1, 10_000)
            trace.alloc(address, in_use[address], stream=chance.randrange(3))
        else:
            continue
        expected.append(sum(in_use.values()))
    made = history(trace.snapshot(*in_use.items()), tmp_path)
    assert levels(made).sum(axis=0).tolist() == expected
    assert made.warnings == ()
    for columns in (1, 7, 1000):
        drawn = timeline_of(made, columns)
        assert len(drawn.ms) <= 2 * columns + 1
        assert drawn.total.max() == max(expected)
        assert drawn.ms[int(drawn.total.argmax())] == facts(made)["peak_ms"]
        assert (drawn.ms[0], drawn.ms[-1], drawn.total[-1]) == (0.0, made.times_us[-1] / 1e3, expected[-1])
    assert drawn.total.tolist() == expected  # with a column for each moment, all of them


def test_an_address_that_is_given_again_without_a_free_counts_once(tmp_path: Path) -> None:
    made = history(Trace().alloc(1, 100).alloc(1, 50).alloc(3, 9).snapshot((1, 50)), tmp_path)
    assert levels(made).sum(axis=0).tolist() == [0, 100, 50, 59]


def test_a_full_trace_is_a_warning_and_cut_phases_begin_with_it(tmp_path: Path) -> None:
    content, phases = one_step()
    content["device_traces"][0] = content["device_traces"][0][4:]  # from the alloc of t on
    made = history(content, tmp_path, phases)
    assert made.boundaries == (0, 5, 16, 24)
    assert "full after 26 entries" in made.warnings[0]
    assert facts(made)["peak_bytes"] == 5350
    full = dataclasses.replace(phases, max_entries=30)
    assert "full after 30 entries" in history(one_step()[0], tmp_path, full).warnings[0]


def test_a_round_number_of_entries_without_phases_is_suspected(tmp_path: Path) -> None:
    trace = Trace()
    for i in range(10_000):
        trace.note("segment_alloc", i, 1)
    assert "it may have been full" in history(trace.snapshot(), tmp_path).warnings[0]


def test_a_step_that_failed_has_the_phases_that_began(tmp_path: Path) -> None:
    trace = Trace().mark().alloc(1, 5).mark().alloc(2, 100).note("oom", 0, 999).free(2, 100).free(1, 5)
    phases = Phases(names=("forward", "backward"), boundaries_us=(1_000_000, 1_000_040), error="out of memory")
    made = history(trace.snapshot(), tmp_path, phases)
    assert facts(made)["phase_peak_bytes"] == {"forward": 5, "backward": 105}
    assert facts(made)["at_peak_bytes"]["activations"] == 5


@pytest.mark.parametrize("mode, kept", [("train_step", "activations"), ("forward", "temporaries")])
def test_memory_kept_until_a_forward_pass_failed_is_activations(mode: str, kept: str, tmp_path: Path) -> None:
    """In inference nothing is kept. Memory freed before the failure is temporary."""
    trace = Trace().mark().alloc(1, 5).note("oom", 0, 9).alloc(2, 70).free(2, 70).alloc(3, 100).note("oom", 0, 999)
    trace.free(3, 100).free(1, 5)
    phases = Phases(names=("forward",), boundaries_us=(1_000_000,), error="out of memory", config={"mode": mode})
    made = history(trace.snapshot(), tmp_path, phases)
    assert [(a.size, a.category) for a in made.allocations] == [(5, kept), (70, "temporaries"), (100, kept)]


def test_tensors_that_the_snapshot_does_not_have_are_counted(tmp_path: Path) -> None:
    content, phases = one_step()
    stray = Held(boundary=0, address=12345, category="parameters", name="of another run")
    made = history(content, tmp_path, dataclasses.replace(phases, held=(*phases.held, stray)))
    assert made.warnings == ("1 tensors are not where the snapshot has memory in use",)


def test_an_address_counts_only_while_its_tensor_is_there(tmp_path: Path) -> None:
    """A gradient at the end of the backward pass: not the activation that had its address before."""
    trace = Trace().mark().alloc(1, 10).free(1, 10).alloc(2, 5).mark().alloc(1, 20).free(2, 5).mark()
    held = (Held(boundary=2, address=1, category="gradients", name="g"),)
    phases = Phases(names=("forward", "backward"), boundaries_us=(1, 2, 3), held=held)
    made = history(trace.snapshot((1, 20)), tmp_path, phases)
    assert [(a.size, a.category) for a in made.allocations] == [
        (10, "temporaries"),
        (5, "activations"),
        (20, "gradients"),
    ]


def test_the_line_is_the_projects_innermost_else_one_outside_pytorch() -> None:
    torch = Frame("/env/lib/python3.11/site-packages/torch/nn/functional.py", 5, "linear")
    cpp, user = Frame("??", 0, "at::empty_cuda"), Frame("/home/me/script.py", 3, "main")
    model, bench = Frame("/w/cs336_basics/model.py", 60, "forward"), Frame("/w/cs336_systems/bench/workload.py", 1, "f")
    recording = Frame("/w/cs336_systems/bench/profiling/recording.py", 9, "run")
    assert code_lines((cpp, torch, model, torch, bench, recording, user)) == [
        "cs336_basics/model.py:60 forward",
        "cs336_systems/bench/workload.py:1 f",
    ]
    assert code_lines((cpp, torch, user)) == ["/home/me/script.py:3 main"]
    assert code_lines((cpp, torch, recording)) == []
    relu = Frame("??", 0, "torch::autograd::generated::ReluBackward0::apply(std::vector<at::Tensor>&&)")
    node = Frame("??", 0, "torch::autograd::Node::operator()(std::vector<at::Tensor>&&)")
    assert code_lines((cpp, relu, node)) == ["autograd: ReluBackward0"]
    assert code_lines((cpp, relu, model)) == ["cs336_basics/model.py:60 forward"]
    assert code_lines(()) == []


def test_sizes_are_shown_in_the_unit_that_suits() -> None:
    assert [size_text(size) for size in (0, 1023, 1536, 3 << 30)] == ["0 bytes", "1023 bytes", "1.50 KiB", "3.00 GiB"]


def test_phases_come_back_as_they_were_saved(tmp_path: Path) -> None:
    phases = one_step()[1]
    phases.save(tmp_path / "phases.json")
    assert read_phases(tmp_path / "phases.json") == phases
    content = json.loads((tmp_path / "phases.json").read_text())
    del content["max_entries"], content["error"]  # None is their value there
    (tmp_path / "phases.json").write_text(json.dumps(content))
    assert read_phases(tmp_path / "phases.json") == phases
