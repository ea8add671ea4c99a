"""Our results beside those of others: a table of the comparisons that rows allow, and two pictures.

Rows are compared if they are of one run, judged by their file and by all they say of machine, software and commit, and
of equal work. The choice does not depend on who is faster; if something was measured again, the last run is shown.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..bench.row import Row, read_rows
from .attention import ATTENTION_VIEWS, PEERS
from .pictures import save_picture
from .plots import figure_of, put_title
from .tables import markdown_table
from .view import Column, Plot, common_facts, grouped, machine, runs
from .views import naming_the_case, naming_the_files

ATTENTION_PICTURE, TRAINING_PICTURE = "headline-attention.png", "headline-training.png"
_PRECISION = "bf16"  # what models are trained in
_KERNEL = "flash_triton"  # this project's kernel that is made for speed
_SHORTEST = 2048  # for shorter ones the picture would show the host's launch overhead
_TRAINERS = ("cs336", "cs336_graph")
# Recorded steps only: others wait for the host, and their order changes from launch to launch.
_STRATEGIES = ("overlap:100+graph", "bucketed:100+graph", "fsdp+graph", "fsdp+zero2+graph")
_PEERS = ("hf_llama", "torch_ddp", "torch_fsdp", "torch_fsdp+zero2")
_OF_A_SIZE = ("size", "context_length", "batch_size", "precision", "compile")
_OF_A_STEP = ("size", "devices", "context_length", "batch_size", "precision", "compile", "nccl_max_ctas")


@dataclass(frozen=True)
class Comparison:
    """The time of something here and of the same with a peer, in one run."""

    what: str
    ours: str
    ours_ms: float
    role: str
    """What the peer is, or how it was chosen."""
    theirs: str
    theirs_ms: float
    so: str
    """How much faster or slower ours is: "1.49x faster"."""
    machine: str = ""


def comparisons(files: Sequence[Path]) -> list[Comparison]:
    """All that can be compared in the rows of some files, case by case.

    Raises ValueError if nothing can.
    """
    found: dict[tuple[str, ...], Comparison] = {}
    read = _runs(files)
    for case, compare in _CASES.items():
        for run in read:
            with naming_the_files(files, (case,)), naming_the_case(case):
                for each in compare([row for row in run if row.case == case]):
                    on = machine(run[0])
                    found[on, each.what, each.ours, each.role] = replace(each, machine=on)
    if not found:
        raise ValueError(
            f"paths is {[str(path) for path in files]}: there must be rows of one run and of {_PRECISION} with a peer "
            f"beside ours, of the cases {', '.join(_CASES)}"
        )
    order = list(dict.fromkeys((each.machine, each.what) for each in found.values()))
    return sorted(found.values(), key=lambda each: order.index((each.machine, each.what)))


def headline(files: Sequence[Path]) -> str:
    """The table of all comparisons in Markdown, under a line that says how to read it."""
    compared = comparisons(files)
    machines = dict.fromkeys(each.machine for each in compared)
    lines = [
        (
            each.what if len(machines) == 1 else f"{each.what}, {each.machine}",
            f"`{each.ours}` {each.ours_ms:.4g} ms",
            f"{each.role} (`{each.theirs}`) {each.theirs_ms:.4g} ms",
            each.so,
        )
        for each in compared
    ]
    table = markdown_table(("what", "here", "beside it", "here it is"), lines, left=3)
    about = "attention forward and backward; both times of a line are of one run"
    return f"{', '.join(machines)}; {_PRECISION}; {about}:\n\n{table}"


def _runs(files: Sequence[Path]) -> list[list[Row]]:
    """Rows in bf16 that are ok, by file and run."""

    def is_compared(row: Row) -> bool:
        return row.status == "ok" and _PRECISION in (row.config.get("precision"), row.config.get("dtype"))

    return [run for file in files for run in runs(filter(is_compared, read_rows(file)))]


def _leaderboard(rows: Sequence[Row]) -> Iterator[Comparison]:
    for group in grouped(rows, ("num_heads", "length", "head_size", "compile", "rep_ms", "warmup_ms")):
        c = group[0].config
        what = f"attention, {c['num_heads']} heads of {c['head_size']}, {c['length']:,} tokens{_compiled(c)}"
        times = {row.config["kernel"]: row.metrics["forward_sum_backward_ms"]["mean"] for row in group}
        yield from _pair(what, times, _KERNEL, "sdpa_flash", "FlashAttention-2")
        yield from _beside_fastest(what, times)


def _lengths(rows: Sequence[Row]) -> Iterator[Comparison]:
    """For each head size the longest sequence, because short ones measure the host."""
    for group in grouped(rows, ("is_causal", "batch_size", "head_size")):
        times: dict[int, dict[str, float]] = {}
        for row in group:
            times.setdefault(row.config["length"], {})[row.config["kernel"]] = row.metrics["forward_backward_ms"]["p50"]
        c = group[0].config
        mask = "" if c["is_causal"] else ", not causal"
        for length in sorted(times, reverse=True):
            what = f"attention, batch {c['batch_size']}, one head of {c['head_size']}, {length:,} tokens{mask}"
            if found := list(_beside_fastest(what, times[length])):
                yield from found
                break


def _training(rows: Sequence[Row]) -> Iterator[Comparison]:
    for group in grouped(rows, _OF_A_SIZE):
        c = group[0].config
        what = f"training step, {_batch(c)}{_compiled(c)}"
        times = {row.variant: row.metrics["step_ms"]["mean"] for row in group}
        for ours in _TRAINERS:
            yield from _pair(what, times, ours, "hf_llama", "Hugging Face's Llama")


def _parallel(rows: Sequence[Row]) -> Iterator[Comparison]:
    for group in grouped(rows, _OF_A_STEP):
        c = group[0].config
        what = f"training step, {_batch(c)} on each of {c['devices']} GPUs{_compiled(c)}"
        times = {row.config["variant"]: row.metrics["step_ms"]["p50"] for row in group}
        for ours in _STRATEGIES:
            stage = "+zero2" if "+zero2" in ours else ""  # weights are gathered once a step, not twice
            if ours.startswith("fsdp"):
                yield from _pair(what, times, ours, f"torch_fsdp{stage}", "PyTorch's FSDP2")
            else:
                yield from _pair(what, times, ours, "torch_ddp", "PyTorch's DDP")


_CASES = {"leaderboard-2025": _leaderboard, "flash": _lengths, "train-step": _training, "ddp": _parallel}


def _batch(config: dict[str, Any]) -> str:
    return f"{config['size']}, {config['batch_size']} x {config['context_length']}"


def _compiled(config: dict[str, Any]) -> str:
    return ", compiled" if config["compile"] else ", eager"


def _pair(what: str, times: dict[str, float], ours: str, theirs: str, role: str) -> Iterator[Comparison]:
    if ours in times and theirs in times:
        here, there = times[ours], times[theirs]
        so = f"{there / here:.2f}x faster" if here <= there else f"{here / there:.2f}x slower"
        yield Comparison(what, ours, here, role, theirs, there, so)


def _beside_fastest(what: str, times: dict[str, float]) -> Iterator[Comparison]:
    if peers := [name for name in PEERS if name in times]:
        fastest = min(peers, key=lambda name: times[name])
        yield from _pair(what, times, _KERNEL, fastest, "the fastest of the others")


def write_pictures(files: Sequence[Path], folder: Path) -> list[Path]:
    """Draw the two pictures into a folder; return the files. A picture that would show nothing is left out."""
    read = _runs(files)
    written = []
    for name, make in ((ATTENTION_PICTURE, _attention_figure), (TRAINING_PICTURE, _training_figure)):
        with naming_the_files(files, _CASES):
            figure = make(read)
        if figure is not None:
            written.append(save_picture(figure, folder / name))
    return written


def _last(
    read: Iterable[Sequence[Row]], case: str, fields: Sequence[str], ours: Iterable[str], peers: Iterable[str]
) -> list[dict[str, Row]]:
    """Rows by name, for each setting of the fields those of the last run that has one of ours and one of a peer's."""
    found = {}
    with naming_the_case(case):
        for run in read:
            for group in grouped([row for row in run if row.case == case], fields):
                named = {row.config.get("variant", row.variant): row for row in group}
                if named.keys() & set(ours) and named.keys() & set(peers):
                    found[str([group[0].config.get(name) for name in fields])] = named
    return list(found.values())


def _attention_figure(read: Sequence[Sequence[Row]]) -> Any:
    """TFLOP/s over length, a panel per head size."""
    groups = _last(read, "flash", ("batch_size", "head_size", "length", "is_causal"), [_KERNEL], PEERS)
    rows = [row for group in groups for row in group.values() if row.config["length"] >= _SHORTEST]
    if not rows:
        return None
    y = Column("forward + backward (TFLOP/s)", "forward_backward_tflops")
    plot = Plot(name="headline", y=y, x="length", lines=("kernel",), log="x", panels=("head_size",))
    keys = ATTENTION_VIEWS["flash"].keys
    figure = figure_of(plot, rows, keys)
    figure.set_size_inches(9, 5.6)
    for axes in figure.axes:
        if axes.get_xlabel():
            axes.set_xlabel("length (tokens)")
    for line in (line for axes in figure.axes for line in axes.lines if line.get_label() == _KERNEL):
        line.set(linewidth=2.2, zorder=3)
    facts = common_facts(rows, keys)[0].replace("_", " ")
    put_title(
        figure, f"{facts}. flash_*: this project's; naive, vectorized_torch: plain attention; the rest: of others"
    )
    return figure


def _training_figure(read: Sequence[Sequence[Row]]) -> Any:
    """MFU of the training step on one GPU by size, and the step of every strategy on several, eager and compiled."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    sizes = [  # without those of a GPU whose peak is not known
        group
        for group in _last(read, "train-step", _OF_A_SIZE, _TRAINERS, _PEERS)
        if all(row.metrics.get("mfu") is not None for row in group.values())
    ]
    steps = _last(read, "ddp", _OF_A_STEP, _STRATEGIES, _PEERS)
    if not sizes and not steps:
        return None
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    columns = 2 if sizes and steps else 1
    grid = figure.add_gridspec(max(1, len(steps)), columns, width_ratios=(4, 6)[:columns],
                               height_ratios=[len(group) + 1 for group in steps] or [1])  # fmt: skip
    if sizes:
        with naming_the_case("train-step"):
            _draw_sizes(figure.add_subplot(grid[:, 0]), sizes)
    shared = None
    for i, group in enumerate(steps):
        with naming_the_case("ddp"):
            shared = figure.add_subplot(grid[i, -1], sharex=shared)
            _draw_steps(shared, group)
    if shared is not None:
        shared.set_xlabel("step (ms); line: 20th to 80th percentile")
    patches = [Patch(color=color) for color in _COLORS.values()]
    figure.legend(patches, [*_COLORS], frameon=False, fontsize=8, loc="outside lower center", ncols=len(_COLORS))
    machines = dict.fromkeys(machine(row) for group in (*sizes, *steps) for row in group.values())
    put_title(
        figure,
        f"{', '.join(machines)}; {_PRECISION}. Bars of one size, or on the right of one panel, are of one run",
    )
    return figure


def _kind(name: str) -> str:
    if name in _PEERS:
        return "PyTorch's, Hugging Face's"
    if name.startswith("alone"):
        return "one GPU alone"
    return "here, step recorded as a CUDA graph" if name.endswith("graph") else "here"


_COLORS = {
    "here": "#ff9f1c",
    "here, step recorded as a CUDA graph": "#d62728",
    "PyTorch's, Hugging Face's": "#1f4ea8",
    "one GPU alone": "#8a8a8a",
}


def _draw_sizes(axes: Any, sizes: Sequence[dict[str, Row]]) -> None:
    """MFU, because it can be compared between sizes; a group of bars per size."""
    labels = []
    for i, group in enumerate(sizes):
        names = [name for name in (*_TRAINERS, *_PEERS) if name in group]
        for k, name in enumerate(names):
            place, percent = i + 0.27 * (k - (len(names) - 1) / 2), 100 * group[name].metrics["mfu"]
            axes.bar_label(axes.bar(place, percent, 0.25, color=_COLORS[_kind(name)]), fmt="%.0f", fontsize=8)
        c = group[names[0]].config
        labels.append(f"{_batch(c)}{_compiled(c)}".replace(", ", "\n"))
    axes.set_xticks(range(len(sizes)), labels)
    axes.set_title("training step, one GPU", fontsize=9)
    axes.set_ylabel("MFU (%)")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_steps(axes: Any, group: dict[str, Row]) -> None:
    """Time of a step, the longest at the top."""
    rows = sorted(group.items(), key=lambda each: each[1].metrics["step_ms"]["p50"])
    for i, (name, row) in enumerate(rows):
        low, middle, high = (row.metrics["step_ms"][which] for which in ("p20", "p50", "p80"))
        axes.barh(i, middle, 0.7, color=_COLORS[_kind(name)])
        axes.plot([low, high], [i, i], color="black", lw=1)
        axes.annotate(f"{middle:.0f}", (high, i), (3, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    c = rows[0][1].config
    axes.set_title(f"training step, {_batch(c)} on each of {c['devices']} GPUs{_compiled(c)}", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
