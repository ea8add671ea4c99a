"""Our results beside others' in equal work: a table of comparisons and two pictures.

Rows are compared if they are from one run, which means one file and one environment (machine, software, commit). Who is
faster plays no role in the choice. If something was measured again, the last run counts.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..bench.row import Row, read_rows
from ..planner.rows import naming
from .attention_tables import PEERS
from .fields import faster
from .markdown import markdown_table
from .pictures import save_picture
from .plots import figure_of, put_title
from .selection import grouped, machine
from .spec import Column, Plot

ATTENTION_PICTURE, TRAINING_PICTURE = "headline-attention.png", "headline-training.png"
_PRECISION = "bf16"  # the usual precision for training
_KERNELS = ("flash_triton", "flash_cuda")  # this project's fast kernels
_HEADS = 16  # models that people train have at least as many
_LENGTH = 4096  # the length in the table; the picture has all
# Only steps recorded as CUDA graphs: others wait for the host, so their order changes from launch to launch.
_TRAINER = "cs336_graph"
_PAIRS = [
    ("overlap:100+graph", "torch_ddp", "PyTorch's DDP"),
    ("bucketed:100+graph", "torch_ddp", "PyTorch's DDP"),
    ("fsdp+zero2+graph", "torch_ddp", "PyTorch's DDP"),  # ours by default
    ("fsdp+graph", "torch_fsdp", "PyTorch's FSDP2"),
    ("fsdp+zero2+graph", "torch_fsdp+zero2", "PyTorch's FSDP2"),
]
_STRATEGIES = {ours for ours, *_ in _PAIRS}
_PEERS = ("hf_llama", *dict.fromkeys(theirs for _, theirs, _ in _PAIRS))
_SHAPE_FIELDS = ("batch_size", "num_heads", "head_size", "length", "is_causal")
_STEP_FIELDS = ("size", "context_length", "batch_size", "precision", "compile")
_PARALLEL_FIELDS = (*_STEP_FIELDS, "devices", "nccl_max_ctas", "copy_engines")


_Compared = Iterator[tuple[str, dict[str, float], list[tuple[str, str, str]]]]
"""For each work: its name, times by name, and the pairs to compare as (ours, theirs, role)."""


def _attention(rows: Sequence[Row]) -> _Compared:
    for group in grouped(_of_training(rows), _SHAPE_FIELDS):
        c = group[0].config
        if c["length"] == _LENGTH:
            times = {row.config["kernel"]: row.metrics["forward_backward_ms"]["p50"] for row in group}
            mask = "" if c["is_causal"] else ", not causal"
            work = (
                f"attention, {c['batch_size']} x {c['num_heads']} heads of {c['head_size']}, {_LENGTH:,} tokens{mask}"
            )
            peer = min((name for name in PEERS if name in times), key=lambda name: times[name], default="")
            yield work, times, [(name, peer, "the fastest of the others") for name in _KERNELS]


def _of_training(rows: Iterable[Row]) -> list[Row]:
    """Rows of `kernels` with at least 16 heads, with the sizes of their shape and a name for it as fields."""
    named = []
    for row in rows:
        if row.case == "kernels" and row.config["shape"][1] >= _HEADS:
            sizes = dict(zip(("batch_size", "num_heads", "length", "head_size"), row.config["shape"], strict=True))
            work = "{batch_size} x {num_heads}\n{length:,} x {head_size}".format(**sizes)
            work += "" if row.config["is_causal"] else "\nnot causal"
            named.append(replace(row, config={**row.config, **sizes, "work": work}))
    return named


def _training(rows: Sequence[Row]) -> _Compared:
    for group in grouped(rows, _STEP_FIELDS):
        c = group[0].config
        times = {row.variant: row.metrics["step_ms"]["mean"] for row in group}
        yield f"training step, {_batch(c)}{_compiled(c)}", times, [(_TRAINER, "hf_llama", "Hugging Face's Llama")]


def _parallel(rows: Sequence[Row]) -> _Compared:
    for group in grouped(rows, _PARALLEL_FIELDS):
        c = group[0].config
        times = {row.config["variant"]: row.metrics["step_ms"]["p50"] for row in group}
        yield f"training step, {_batch(c)} on each of {c['devices']} GPUs{_compiled(c)}", times, _PAIRS


_CASES = {"kernels": _attention, "train-step": _training, "ddp": _parallel}


def _batch(config: dict[str, Any]) -> str:
    return f"{config['size']}, {config['batch_size']} x {config['context_length']}"


def _compiled(config: dict[str, Any]) -> str:
    return ", compiled" if config["compile"] else ", eager"


def _runs(files: Sequence[Path]) -> list[list[Row]]:
    """Successful rows in bf16, by file and run: one environment, except for the command and the state of the GPU."""
    groups: dict[str, list[Row]] = {}
    for file in files:
        for row in read_rows(file):
            if row.status == "ok" and _PRECISION in (row.config.get("precision"), row.config.get("dtype")):
                env = {name: value for name, value in row.env.items() if not isinstance(value, dict)}
                env.pop("command", None)
                groups.setdefault(f"{file} {sorted(env.items())}", []).append(row)
    return list(groups.values())


def headline(files: Sequence[Path]) -> str:
    """The Markdown table of all comparisons that the rows of some files allow. Raises ValueError if there is none."""
    found: dict[tuple[str, str], dict[tuple[str, str], list[str]]] = {}
    read = _runs(files)
    for case, compare in _CASES.items():
        for run in read:
            with naming(", ".join(map(str, files))):
                for work, times, pairs in compare([row for row in run if row.case == case]):
                    for ours, theirs, role in pairs:
                        if ours in times and theirs in times:
                            cells = [f"`{ours}` {times[ours]:.4g} ms", f"{role} (`{theirs}`) {times[theirs]:.4g} ms"]
                            line = [*cells, faster(times[ours], times[theirs])]
                            found.setdefault((machine(run[0]), work), {})[ours, role] = line  # the last run counts
    if not found:
        raise ValueError(
            f"paths is {[str(path) for path in files]}: there must be rows of one run and of {_PRECISION} with a peer "
            f"beside ours, of the cases {', '.join(_CASES)}"
        )
    lines = [[work, on, *line] for (on, work), by_name in found.items() for line in by_name.values()]
    table = markdown_table(("work", "on", "ours", "peer", "ours is"), lines, left=4)
    about = "attention: forward and backward; both times of a line are from one run"
    return f"{_PRECISION}; {about}:\n\n{table}"


def write_pictures(files: Sequence[Path], folder: Path) -> list[Path]:
    """Draw the two pictures into a folder; return the files. An empty picture is left out."""
    with naming(", ".join(map(str, files))):
        read = _runs(files)
        figures = {ATTENTION_PICTURE: _attention_figure(read), TRAINING_PICTURE: _training_figure(read)}
    return [save_picture(figure, folder / name) for name, figure in figures.items() if figure is not None]


def _last_groups(
    read: Iterable[Sequence[Row]], case: str, fields: Sequence[str], ours: Iterable[str], peers: Iterable[str]
) -> list[dict[str, Row]]:
    """Rows by name for each setting of the fields, from the last run that has one of ours and a peer."""
    found = {}
    for run in read:
        for group in grouped([row for row in run if row.case == case], fields):
            named = {row.config.get("variant", row.variant): row for row in group}
            if named.keys() & set(ours) and named.keys() & set(peers):
                found[str([group[0].config.get(name) for name in fields])] = named
    return list(found.values())


def _attention_figure(read: Sequence[Sequence[Row]]) -> Any:
    """TFLOP/s at each shape."""
    groups = _last_groups([_of_training(run) for run in read], "kernels", _SHAPE_FIELDS, _KERNELS, PEERS)
    rows = [row for group in groups for row in group.values()]
    if not rows:
        return None
    y = Column("forward + backward (TFLOP/s)", "forward_backward_tflops")
    figure = figure_of(Plot(name="headline", y=y, x="work", lines=("kernel",), kind="bar"), rows, ())
    figure.set_size_inches(9, 3.6)
    (axes,) = figure.axes
    axes.set_xlabel("batch x heads, length x head size")
    axes.tick_params("x", rotation=0, labelsize=7.5)
    names = [name for name in _KERNELS if any(row.config["kernel"] == name for row in rows)]
    ours = f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'}"
    put_title(figure, f"{machine(rows[0])}, {_PRECISION}. {ours} this project's; the rest are others'")
    return figure


_COLORS = {
    "here": "#ff9f1c",
    "here, step recorded as a CUDA graph": "#d62728",
    "PyTorch's, Hugging Face's": "#1f4ea8",
    "one GPU alone": "#8a8a8a",
}


def _color(name: str) -> str:
    if name in _PEERS:
        return _COLORS["PyTorch's, Hugging Face's"]
    if name.startswith("alone"):
        return _COLORS["one GPU alone"]
    return _COLORS["here, step recorded as a CUDA graph" if name.endswith("graph") else "here"]


def _training_figure(read: Sequence[Sequence[Row]]) -> Any:
    """On the left the MFU of one GPU by size, on the right the step of every strategy on several GPUs."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    sizes = [  # not on a GPU of unknown peak
        group
        for group in _last_groups(read, "train-step", _STEP_FIELDS, ("cs336", _TRAINER), _PEERS)
        if all(row.metrics.get("mfu") is not None for row in group.values())
    ]
    steps = _last_groups(read, "ddp", _PARALLEL_FIELDS, _STRATEGIES, _PEERS)
    if not sizes and not steps:
        return None
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    columns = 2 if sizes and steps else 1
    grid = figure.add_gridspec(max(1, len(steps)), columns, width_ratios=(4, 6)[:columns],
                               height_ratios=[len(group) + 1 for group in steps] or [1])  # fmt: skip
    if sizes:
        _draw_sizes(figure.add_subplot(grid[:, 0]), sizes)
    axes = None
    for i, group in enumerate(steps):
        axes = figure.add_subplot(grid[i, -1], sharex=axes)
        _draw_steps(axes, group)
    if axes is not None:
        axes.set_xlabel("step (ms); line: 20th to 80th percentile")
    patches = [Patch(color=color) for color in _COLORS.values()]
    figure.legend(patches, [*_COLORS], frameon=False, fontsize=8, loc="outside lower center", ncols=len(_COLORS))
    put_title(figure, f"Training steps in {_PRECISION}. Bars of one size, or on the right of one panel, are of one run")
    return figure


def _draw_sizes(axes: Any, sizes: Sequence[dict[str, Row]]) -> None:
    """Draw a group of bars for each size. MFU can be compared between sizes, unlike times."""
    labels = []
    for i, group in enumerate(sizes):
        names = [name for name in ("cs336", _TRAINER, *_PEERS) if name in group]
        for k, name in enumerate(names):
            place, percent = i + 0.27 * (k - (len(names) - 1) / 2), 100 * group[name].metrics["mfu"]
            axes.bar_label(axes.bar(place, percent, 0.25, color=_color(name)), fmt="%.0f", fontsize=8)
        c = group[names[0]].config
        labels.append(f"{_batch(c)}{_compiled(c)}".replace(", ", "\n"))
    axes.set_xticks(range(len(sizes)), labels)
    machines = dict.fromkeys(machine(row) for group in sizes for row in group.values())
    axes.set_title(f"one {' or '.join(machines)}", fontsize=9)
    axes.set_ylabel("MFU (%)")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_steps(axes: Any, group: dict[str, Row]) -> None:
    """Draw a bar for the step of each strategy, the longest on top."""
    rows = sorted(group.items(), key=lambda each: each[1].metrics["step_ms"]["p50"])
    for i, (name, row) in enumerate(rows):
        low, middle, high = (row.metrics["step_ms"][quantile] for quantile in ("p20", "p50", "p80"))
        axes.barh(i, middle, 0.7, color=_color(name))
        axes.plot([low, high], [i, i], color="black", lw=1)
        axes.annotate(f"{middle:.0f}", (high, i), (3, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    c, on = rows[0][1].config, machine(rows[0][1])
    axes.set_title(f"{_batch(c)} on each of {c['devices']} {on}{_compiled(c)}", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
