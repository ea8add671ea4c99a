"""Pictures carry a hash of their content, and the committed ones match the committed rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cs336_systems.bench.row import read_rows
from cs336_systems.report.kernel_profiles import plot_shares
from cs336_systems.report.memory_parts import draw_parts
from cs336_systems.report.pictures import drawn_hash, hash_in, save_picture
from cs336_systems.report.plots import draw
from cs336_systems.report.selection import latest
from cs336_systems.report.step_streams import plot_streams
from cs336_systems.report.views import VIEWS

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "results/h200"
# Drawn by the training loop and the memory profiler, not by the report.
WITHOUT_HASH = {"one-gpu-memory.png", "tinyshakespeare.png"}
STEPS = ("naive", "bucketed-100", "naive-graph-compiled", "bucketed-100-graph-compiled")
TRACED = ("naive", "overlap")


def picture(**changes: Any) -> Any:
    """A figure with a line, bars, a span, an annotation, words and fixed ticks."""
    from matplotlib.figure import Figure

    values = dict(
        y=2.0, bar=3.0, span=1.0, label="a", title="t", tick="x", note="n", above="u", color="C0", scale="linear"
    )
    values |= changes
    figure = Figure()
    left, right = figure.subplots(1, 2)
    left.plot([1, 2], [1.0, values["y"]], label=values["label"], color=values["color"])
    left.set_title(values["title"])
    left.set_yscale(values["scale"])
    right.bar([0], [values["bar"]])
    right.set_xticks([0], [values["tick"]])
    right.broken_barh([(0, values["span"])], (0, 1))
    right.annotate(values["note"], (0, 0))
    figure.suptitle(values["above"])
    return figure


CHANGES = dict(y=2.001, bar=3.001, span=1.001, label="b", title="u", tick="y", note="m", above="v", scale="log")


@pytest.mark.parametrize("name", CHANGES)
def test_the_hash_changes_with_the_content(name: str) -> None:
    assert drawn_hash(picture(**{name: CHANGES[name]})) != drawn_hash(picture())


def test_the_hash_ignores_colours_and_the_last_bits(tmp_path: Path) -> None:
    assert drawn_hash(picture(color="C3", y=2.0 + 1e-15)) == drawn_hash(picture())
    assert hash_in(save_picture(picture(), tmp_path / "new" / "a.png")) == drawn_hash(picture())


def test_other_pictures_have_no_hash(tmp_path: Path) -> None:
    picture().savefig(tmp_path / "a.png")
    assert hash_in(tmp_path / "a.png") is None


def drawn(case: str, name: str, document: str = "one-gpu") -> Callable[[Path], None]:
    """A function that draws one plot of a case, with all its files."""

    def make(path: Path) -> None:
        view = VIEWS[case]
        plot = next(plot for plot in view.plots if plot.name == name)
        rows = view.derive(latest(read_rows(ROWS / f"{case}.jsonl"), view.keys))
        draw(plot, rows, path.with_name(f"{document}-{case}-{name}.png"), view.keys)

    return make


def drawn_parts(path: Path) -> None:
    (made,) = draw_parts(read_rows(ROWS / "fsdp-accounting.jsonl"), path.parent)
    made.replace(path)


PICTURES = {
    "one-gpu-model-step.png": drawn("model", "step"),
    "one-gpu-warmup-steps.png": drawn("warmup", "steps"),
    "one-gpu-attention-forward.png": drawn("attention", "forward"),
    "one-gpu-flash-both-bf16.png": drawn("flash", "both"),
    "one-gpu-flash-both-fp32.png": drawn("flash", "both"),
    "one-gpu-checkpointing-peak.png": drawn("checkpointing", "peak"),
    "one-gpu-shares.png": lambda path: plot_shares(read_rows(ROWS / "profile-kernels.jsonl"), path),
    "two-gpus-all-reduce-bandwidth.png": drawn("all-reduce", "bandwidth", "two-gpus"),
    "two-gpus-overlap.png": lambda path: plot_streams([ROWS / f"overlap-trace/xl-512-{s}.json" for s in TRACED], path),
    "two-gpus-overlap-2.7B.png": lambda path: plot_streams(
        [ROWS / f"2.7B/overlap-trace/2-7B-512-{s}.json" for s in (*TRACED, "fsdp")], path
    ),
    "two-gpus-bucket-size-added.png": drawn("bucket-size", "added", "two-gpus"),
    "two-gpus-fsdp-accounting-parts.png": drawn_parts,
    "two-gpus-lm-matrix-throughput.png": drawn("lm-matrix", "throughput", "two-gpus"),
    "ddp-streams.png": lambda path: plot_streams([ROWS / f"ddp-streams/{step}.json" for step in STEPS], path),
}


@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize("name", PICTURES)
def test_committed_pictures_are_not_stale(name: str, tmp_path: Path) -> None:
    PICTURES[name](tmp_path / name)
    assert hash_in(ROOT / "docs" / name) == hash_in(tmp_path / name), f"{name} is stale: draw it again"


def test_every_committed_picture_is_tested() -> None:
    headlines = {"headline-attention.png", "headline-training.png"}  # tests/report/test_headline.py
    assert {path.name for path in (ROOT / "docs").glob("*.png")} == {*PICTURES, *headlines, *WITHOUT_HASH}
