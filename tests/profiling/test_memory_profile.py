"""`cs336 profile memory`: the recording of a real step, on a CPU and on a GPU if there is one."""

import contextlib
import csv
import gc
import inspect
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cs336_systems.bench.profiling.memory_profile import MemoryProfile, counted, draw, profile
from cs336_systems.bench.profiling.recording import MAX_ENTRIES, AllocatorRecorder, record
from cs336_systems.bench.profiling.storage_recorder import StorageRecorder
from cs336_systems.bench.profiling.timeline import COLORS, Timeline
from cs336_systems.bench.row import read_rows
from cs336_systems.bench.workload import Workbench, Workload
from cs336_systems.cli.main import main
from cs336_systems.cli.report import make_report
from cs336_systems.planner.accounting import attention_output_bytes, num_parameters
from cs336_systems.report.memory_profiles import memory_summary
from cs336_systems.report.pictures import hash_in
from cs336_systems.report.views import rows_table, write_views
from tests.systems.command import Run

from .snapshots import one_step, save

SHAPE = Workload(size="quick", context_length=64).shape


def quick(folder: Path, **fields: Any) -> MemoryProfile:
    given = dict(size="quick", context_length=64, batch_size=2, mode="train_step", device="cpu", folder=str(folder))
    return MemoryProfile(**{**given, **fields})


@pytest.fixture(scope="module")
def quick_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the quick command writes."""
    out = tmp_path_factory.mktemp("quick")
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["profile", "memory", "--quick", "--device", "cpu", "--out", str(out)])
    return out


def test_quick_writes_all_files_and_a_row_that_agrees_with_the_counted_model(quick_out: Path) -> None:
    (row,) = read_rows(quick_out / "rows.jsonl")
    assert (row.case, row.variant, row.status) == ("profile-memory", "train_step", "ok")
    parameters = 4 * num_parameters(SHAPE)
    at_peak, m = row.metrics["at_peak_bytes"], row.metrics
    assert at_peak["parameters"] == parameters == m["counted"]["parameter_bytes"]
    # AdamW's two moments a parameter, and a step counter of 4 bytes a tensor.
    tensors = 2 + 9 * 2 + 1
    assert at_peak["optimizer state"] == 2 * parameters + 4 * tensors
    assert sum(at_peak.values()) == m["peak_bytes"] == max(m["phase_peak_bytes"].values())
    assert list(m["phase_peak_bytes"]) == ["forward", "backward", "optimizer"]
    assert m["phase_peak_bytes"]["optimizer"] >= 4 * parameters  # with the gradients
    assert m["warnings"] == []
    assert m["counted"]["residual_stream_bytes"] == 4 * 2 * 64 * 32
    assert row.config["d_model"] == 32
    assert len(m["largest"]) == 10
    assert any("cs336_basics/model.py" in line for entry in m["largest"] for line in entry["code"])


def test_a_row_has_its_timeline_with_the_peak_in_it(quick_out: Path) -> None:
    (row,) = read_rows(quick_out / "rows.jsonl")
    drawn, m = Timeline(**row.metrics["timeline"]), row.metrics
    assert len(drawn.ms) < 400 < 2 * m["allocations"]  # each given and freed: more moments than are kept
    assert all(any(start < ms < end for ms in drawn.ms) for start, end in drawn.phases.values())
    peak = int(drawn.total.argmax())
    assert (drawn.total[peak], drawn.ms[peak]) == (m["peak_bytes"], m["peak_ms"])
    assert {name: sizes[peak] for name, sizes in drawn.in_use.items()} == m["at_peak_bytes"]
    assert list(drawn.phases) == ["forward", "backward", "optimizer"]
    assert drawn.phases["forward"][0] == 0.0
    inside = [start <= drawn.ms[peak] <= end for start, end in drawn.phases.values()]
    assert inside[list(drawn.phases).index(m["peak_phase"])]


def test_the_report_draws_timelines_of_rows_alone(quick_out: Path, tmp_path: Path) -> None:
    (row,) = read_rows(quick_out / "rows.jsonl")
    old = replace(row, metrics={name: value for name, value in row.metrics.items() if name != "timeline"})
    other = replace(row, variant="forward", config=row.config | {"mode": "forward", "compile": True})
    one, several = write_views([row], tmp_path / "one"), write_views([row, other], tmp_path / "several")
    named = [f"profile-memory-timeline{end}.png" for end in ("", "-train_step-eager", "-forward-compiled")]
    assert [file.name for file in (*one[2:], *several[2:])] == named
    assert hash_in(one[2]) == hash_in(several[2]) is not None
    assert [file.name for file in write_views([old], tmp_path / "old")] == ["profile-memory.md", "profile-memory.csv"]
    (line,) = csv.DictReader((tmp_path / "one/profile-memory.csv").open())
    assert line["at_peak_bytes.gradients"] == str(row.metrics["at_peak_bytes"]["gradients"])


def test_quick_writes_a_summary_in_words(quick_out: Path) -> None:
    summary = (quick_out / "summary.md").read_text()
    (row,) = read_rows(quick_out / "rows.jsonl")
    assert f"{row.metrics['peak_bytes']:,} bytes" in summary
    assert f"{4 * num_parameters(SHAPE):,} bytes" in summary
    assert "the storages of tensors that operators returned, on a CPU" in summary
    assert "| train_step | 0.00" in make_report(["rows", str(quick_out / "rows.jsonl")])


def test_quick_draws_each_category_in_its_colour(quick_out: Path) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    pixels = imread(quick_out / "timeline.png")[..., :3]
    for category in ("parameters", "optimizer state", "gradients", "activations", "temporaries"):
        area = (np.abs(pixels - np.array(to_rgb(COLORS[category]))).max(axis=-1) < 0.01).sum()
        assert area > 1500, category  # the key in the legend alone has fewer


def test_the_snapshot_has_the_allocators_format(quick_out: Path) -> None:
    content = pickle.loads((quick_out / "snapshot.pickle").read_bytes())
    assert set(content) >= {"segments", "device_traces"}
    assert {event["action"] for event in content["device_traces"][0]} == {"alloc", "free_requested", "free_completed"}


def test_drawing_a_snapshot_again_gives_the_same_row(quick_out: Path, tmp_path: Path, cs336: Run) -> None:
    snapshot = str(quick_out / "snapshot.pickle")
    assert cs336("profile", "memory", "--snapshot", snapshot, "--out", str(tmp_path))[0] == 0
    assert read_rows(tmp_path / "rows.jsonl") == read_rows(quick_out / "rows.jsonl")


def test_a_snapshot_without_phases_is_drawn_by_lifetimes_and_says_so(tmp_path: Path, cs336: Run) -> None:
    path = save(tmp_path / "somebodys.pickle", one_step()[0])
    code, said, _ = cs336("profile", "memory", "--snapshot", str(path), "--out", str(tmp_path / "out"))
    assert code == 0
    assert "categories are lifetimes within the recording" in said
    (row,) = read_rows(tmp_path / "out" / "rows.jsonl")
    assert (row.variant, row.metrics["categories_from"]) == ("somebodys.pickle", "lifetimes")
    assert row.metrics["at_peak_bytes"]["alive all along"] == 3050
    assert "| somebodys.pickle |" in rows_table([row])


@pytest.mark.usefixtures("unrendered")
def test_a_forward_pass_keeps_nothing_and_a_backward_pass_leaves_gradients(tmp_path: Path) -> None:
    forward = profile(quick(tmp_path / "forward", mode="forward")).metrics
    assert list(forward["phase_peak_bytes"]) == ["forward"]
    assert (forward["at_peak_bytes"]["activations"], forward["at_peak_bytes"]["gradients"]) == (0, 0)
    both = profile(quick(tmp_path / "both", mode="forward_backward")).metrics
    assert list(both["phase_peak_bytes"]) == ["forward", "backward"]
    assert both["at_peak_bytes"]["optimizer state"] == 0
    assert both["at_peak_bytes"]["activations"] > 5 * both["counted"]["residual_stream_bytes"]


@pytest.mark.usefixtures("unrendered")
def test_checkpointing_keeps_fewer_activations(tmp_path: Path) -> None:
    plain = profile(quick(tmp_path / "plain", context_length=128)).metrics
    saved = profile(quick(tmp_path / "saved", context_length=128, activation_checkpointing="block")).metrics
    assert saved["at_peak_bytes"]["activations"] < plain["at_peak_bytes"]["activations"] / 2


@pytest.mark.usefixtures("unrendered")
def test_attentions_outputs_that_blocks_keep_are_activations(tmp_path: Path) -> None:
    how: Any = dict(context_length=128, attention="flash_torch")
    policies = ("block", "block_but_attention")
    block, kept = (
        profile(quick(tmp_path / policy, activation_checkpointing=policy, **how)).metrics["at_peak_bytes"]
        for policy in policies
    )
    outputs = SHAPE.num_layers * attention_output_bytes(SHAPE, tokens=2 * 128, number_bytes=4)
    assert kept == block | {"activations": block["activations"] + outputs}


@pytest.mark.usefixtures("unrendered")
def test_without_warmup_the_optimizer_state_is_made_in_the_step(tmp_path: Path) -> None:
    metrics = profile(quick(tmp_path, warmup=0)).metrics
    parameters = metrics["counted"]["parameter_bytes"]
    assert metrics["phase_peak_bytes"]["optimizer"] >= 4 * parameters
    assert metrics["warnings"] == []


def test_storages_are_seen_from_their_making_to_their_last_reference(tmp_path: Path) -> None:
    """Sizes worked out: a matrix from before, a product, a view of it, a sum; freed in another order."""
    before = torch.ones(8, 8)
    with StorageRecorder([before]) as recorder:
        product = before @ before
        view = product[1:]
        total = view.sum()
        del product
        kept = view
        del view
        recorder.save(tmp_path / "early.pickle")
        del kept
        recorder.save(tmp_path / "late.pickle")
    early, late = (pickle.loads((tmp_path / f"{name}.pickle").read_bytes()) for name in ("early", "late"))
    sizes = [sorted(segment["total_size"] for segment in content["segments"]) for content in (early, late)]
    assert sizes == [[4, 256, 256], [4, 256]]
    assert [(e["action"], e["size"]) for e in late["device_traces"][0]] == [
        ("alloc", 256),
        ("alloc", 4),
        ("free_requested", 256),
        ("free_completed", 256),
    ]
    assert total.item() == 7 * 8 * 8
    assert late["device_traces"][0][0]["frames"][0]["filename"] == __file__  # who asked, not who looked on


def test_memory_freed_after_the_recording_is_alive_in_it(tmp_path: Path) -> None:
    with StorageRecorder([]) as recorder:
        x = torch.ones(8)
        empty = torch.ones(0)
    del x, empty
    recorder.save(tmp_path / "after.pickle")
    content = pickle.loads((tmp_path / "after.pickle").read_bytes())
    assert [event["action"] for event in content["device_traces"][0]] == ["alloc"]
    assert [segment["total_size"] for segment in content["segments"]] == [32]


def test_a_step_that_runs_out_of_memory_is_recorded_up_to_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def backward(self: Workbench, loss: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 GiB\nand more lines")

    monkeypatch.setattr(Workbench, "backward", backward)
    row = profile(quick(tmp_path))
    assert (row.status, row.error) == ("oom", "CUDA out of memory. Tried to allocate 8 GiB")
    assert list(row.metrics["phase_peak_bytes"]) == ["forward", "backward"]
    assert row.metrics["at_peak_bytes"]["parameters"] == 4 * num_parameters(SHAPE)
    assert "ran out of memory" in memory_summary(row)
    assert "| out of memory |" in rows_table([row])


def test_a_model_that_does_not_fit_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("cs336_systems.bench.profiling.memory_profile.record", too_large)
    for name in ("timeline.html", "timeline.png", "snapshot.pickle", "phases.json"):  # of an earlier run
        (tmp_path / name).write_text("")
    row = profile(quick(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert row.status == "oom"
    assert "out of memory before the step" in memory_summary(row)
    assert "| out of memory |" in rows_table([row])


def test_counted_bytes_are_those_of_the_shapes() -> None:
    small = Workload(size="small", batch_size=4, context_length=128)
    config = {**small.__dict__, **small.shape.__dict__}
    assert counted(config) == {"residual_stream_bytes": 4 * 4 * 128 * 768, "parameter_bytes": 4 * 128_625_408}


def test_the_allocators_recording_is_asked_for_as_pytorch_takes_it_and_ends_even_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU: the arguments of the calls fit PyTorch's own signature."""
    takes, calls = inspect.signature(torch.cuda.memory._record_memory_history), []

    def asked(*args: Any, **kwargs: Any) -> None:
        bound = takes.bind(*args, **kwargs)
        bound.apply_defaults()
        calls.append(tuple(bound.arguments[name] for name in ("enabled", "context", "stacks", "max_entries")))

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", asked)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda filename: Path(filename).write_text("snapshot"))
    with contextlib.suppress(RuntimeError), AllocatorRecorder() as recorder:
        recorder.save(tmp_path / "snapshot.pickle")
        raise RuntimeError("the step fails")
    assert (tmp_path / "snapshot.pickle").read_text() == "snapshot"
    assert [enabled for enabled, *_ in calls] == [None, "all", None]
    assert calls[1] == ("all", "alloc", "all", MAX_ENTRIES)


# On a GPU

GPU = dict(size="small", batch_size=8, context_length=512, mode="train_step", device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("fields", [{}, {"precision": "bf16", "attention": "sdpa"}, {"mode": "forward"}], ids=str)
def test_the_snapshots_peak_is_the_allocators_own(fields: dict[str, Any], tmp_path: Path) -> None:
    workload = MemoryProfile(**{**GPU, **fields}, folder=str(tmp_path))
    row = profile(workload)
    own = row.metrics["allocator"]
    assert row.metrics["peak_bytes"] == pytest.approx(own["peak_requested_bytes"], rel=1e-4)
    assert row.metrics["peak_bytes"] <= own["peak_allocated_bytes"]  # which are rounded up
    assert row.metrics["warnings"] == []
    parameters, tensors = 4 * num_parameters(workload.shape), 2 + 12 * 9 + 1
    counted_parameters = row.metrics["at_peak_bytes"]["parameters"]
    assert parameters <= counted_parameters <= parameters + 512 * tensors
    assert list(row.metrics["phase_peak_bytes"]) == list(Workbench(workload).phases)


@pytest.mark.gpu
def test_a_training_step_has_gradients_state_and_activations_of_the_right_size(tmp_path: Path) -> None:
    workload = Workload(**GPU)
    record(workload, 2, tmp_path)
    metrics = draw(tmp_path / "snapshot.pickle", tmp_path).metrics
    parameters = 4 * num_parameters(workload.shape)
    assert metrics["at_peak_bytes"]["optimizer state"] == pytest.approx(2 * parameters, rel=1e-3)
    assert metrics["phase_peak_bytes"]["optimizer"] >= 4 * parameters
    assert metrics["at_peak_bytes"]["activations"] > 12 * 10 * metrics["counted"]["residual_stream_bytes"]
    assert any("cs336_basics/model.py" in line for entry in metrics["largest"] for line in entry["code"])
    backward = [entry["code"] for entry in metrics["largest"] if entry["phase"] == "backward"]
    assert any("Backward" in line for lines in backward for line in lines)  # the operation, by its C++ frame


@pytest.mark.gpu
def test_the_file_is_one_that_memory_viz_takes(tmp_path: Path) -> None:
    record(Workload(**{**GPU, "size": "quick", "context_length": 64}), 2, tmp_path)
    content = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    assert set(content) >= {"segments", "device_traces"}
    events = [event for trace in content["device_traces"] for event in trace]
    assert {"alloc", "free_requested", "free_completed"} <= {event["action"] for event in events}
    assert all("time_us" in event for event in events)
    boundaries = json.loads((tmp_path / "phases.json").read_text())["boundaries_us"]
    markers = [
        e for e in events if any(f["name"] == "mark_boundary" for f in e.get("frames", [])) and e["action"] == "alloc"
    ]
    assert len(markers) == len(boundaries) == 4
    for marker, boundary in zip(markers, boundaries, strict=True):  # one clock
        assert abs(marker["time_us"] - boundary) < 50_000


@pytest.mark.gpu
@pytest.mark.parametrize("fields", [{"compile": True}, {"activation_checkpointing": "block"}], ids=str)
def test_other_ways_to_compute_are_recorded_too(fields: dict[str, Any], tmp_path: Path) -> None:
    row = profile(MemoryProfile(**{**GPU, **fields}, folder=str(tmp_path)))
    assert row.metrics["peak_bytes"] == pytest.approx(row.metrics["allocator"]["peak_requested_bytes"], rel=1e-4)


@pytest.mark.gpu
def test_a_step_that_does_not_fit_a_gpu_is_drawn_up_to_there(tmp_path: Path) -> None:
    gc.collect()
    torch.cuda.empty_cache()  # cached memory counts as held
    held = torch.cuda.memory_reserved() + 2 * 2**30
    torch.cuda.set_per_process_memory_fraction(held / torch.cuda.get_device_properties(0).total_memory)
    try:
        row = profile(MemoryProfile(**GPU, folder=str(tmp_path)))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert row.status == "oom"
    assert (tmp_path / "timeline.png").exists()
    assert 0 < row.metrics["peak_bytes"] <= 3 * 2**30
