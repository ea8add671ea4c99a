"""Tables of profiles: where the time of a step goes."""

from collections.abc import Sequence
from typing import Any

from ..bench.profiling.annotated_attention import SCORES, SOFTMAX, VALUES
from ..bench.profiling.kernel_classes import CLASSES
from ..bench.row import Row
from ..config.model import DEFAULT_VOCAB_SIZE, MODEL_SIZES
from .tables import markdown_table, row_fields
from .view import OUTCOMES, latest

_PARTS = (  # label, range, and what counts: True its matrix products, False all but them, None everything
    ("scores: Q K^T", SCORES, True),
    ("scores: scaling, mask, casts", SCORES, False),
    ("softmax", SOFTMAX, None),
    ("values: P V", VALUES, True),
    ("values: casts", VALUES, False),
)
_NAME_LENGTH = 90
_NOISE = ("void ", "at::native::", "(anonymous namespace)::", "at_cuda_detail::")


def short_name(kernel: str) -> str:
    """A kernel's name without common parts, cut if it is long, because what tells kernels apart comes first."""
    for noise in _NOISE:
        kernel = kernel.replace(noise, "")
    return kernel if len(kernel) <= _NAME_LENGTH else kernel[: _NAME_LENGTH - 3] + "..."


def kernels_table(rows: Sequence[Row]) -> str:
    """For each configuration: kernel time and shares of classes, the longest kernel of each span, attention's parts."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(setting(row), []).append(row)
    return "\n\n".join(_group_tables(name, latest(group, ())) for name, group in groups.items())


def setting(row: Row) -> str:
    """What a row is a profile of, besides the mode: "xl, 4 x 512, fp32, attention naive, NVIDIA H200"."""
    config, get = row.config, row_fields(row).get
    on = row.env.get("gpu") if config.get("device") != "cpu" else "CPU"
    parts = [
        get("config.size"),
        f"{get('config.batch_size')} x {get('config.context_length')}",
        get("config.precision"),
        f"attention {get('config.attention')}",
        "compiled" if config.get("compile") else "",
        f"vocabulary {config.get('vocab_size')}" if config.get("vocab_size") not in (None, DEFAULT_VOCAB_SIZE) else "",
        f"optimizer {config.get('optimizer')}" if config.get("optimizer") not in (None, "torch_fused") else "",
        f"checkpointing {checkpointing}" if (checkpointing := config.get("activation_checkpointing")) != "none" else "",
        on or config.get("device"),
        "nsys" if config.get("tool") == "nsys" else "",
    ]
    return ", ".join(str(part) for part in parts if part)


def _group_tables(name: str, rows: Sequence[Row]) -> str:
    measured = [row for row in rows if row.status == "ok"]
    texts = [f"{name}:"]
    texts += [f"{row.variant}: {OUTCOMES[row.status]}" for row in rows if row.status != "ok"]
    if measured:
        texts += [_times(measured), _shares(measured), _longest(measured)]
        if any(row_fields(row).get("metrics.attention") for row in measured):
            texts.append(_attention(measured))
    return "\n\n".join(texts)


def _ms(value: Any) -> str:
    return "n/a" if value is None else f"{value:.3g}" if value < 100 else f"{value:.1f}"


def _times(rows: Sequence[Row]) -> str:
    header = "mode,step (ms),the same profiled (ms),kernels together (ms),at least one running (ms),steps"
    names = ("wall_ms", "profiled_wall_ms", "kernel_ms", "busy_ms")
    lines = []
    for row in rows:
        get = row_fields(row).get
        lines.append((row.variant, *(_ms(get(f"metrics.{name}")) for name in names), str(get("config.steps"))))
    return markdown_table(header.split(","), lines)


def _spans(rows: Sequence[Row]) -> list[tuple[str, dict[str, Any], float | None]]:
    """Columns: name of the span, its metrics, and the time of its phases by the host's clock."""
    columns = []
    for row in rows:
        phases = row_fields(row).get("metrics.phase_wall_ms")
        whole = {"inference": phases.get("forward"), "training step": sum(phases.values())}
        whole["forward + backward"] = phases.get("forward", 0.0) + phases.get("backward", 0.0)
        for name, span in row_fields(row).get("metrics.spans").items():
            columns.append((name, span, phases.get(name, whole.get(name))))
    return columns


def _shares(rows: Sequence[Row]) -> str:
    columns = _spans(rows)
    shown = [cls for cls in CLASSES if any(span["share"].get(cls) for _, span, _ in columns)]
    lines = [(cls, *(f"{span['share'].get(cls, 0.0):.1%}" for _, span, _ in columns)) for cls in shown]
    lines.append(("kernel time (ms)", *(_ms(span["kernel_ms"]) for _, span, _ in columns)))
    lines.append(("time by the clock (ms)", *(_ms(clock) for _, _, clock in columns)))
    return "Shares of kernel time:\n\n" + markdown_table(["class", *(name for name, _, _ in columns)], lines)


def _longest(rows: Sequence[Row]) -> str:
    lines = [(name, *_kernel_cells(span["top"][0])) for name, span, _ in _spans(rows) if span["top"]]
    header = ["in", "class", "calls a step", "ms a step", "share", "kernel with the most time"]
    return markdown_table(header, lines)


def _kernel_cells(kernel: dict[str, Any]) -> tuple[str, ...]:
    numbers = f"{kernel['calls']:g}", _ms(kernel["ms"]), f"{kernel['share']:.1%}"
    return kernel["class"], *numbers, f"`{short_name(kernel['kernel'])}`"


def top_kernels_tables(row: Row) -> str:
    """The kernels with the most time in each phase of a profile, and in all together."""
    header = ["#", "class", "calls a step", "ms a step", "share", "kernel"]
    tables = []
    for name, span in row_fields(row).get("metrics.spans").items():
        if name != "forward + backward" or row.variant == "forward_backward":
            lines = [(str(i + 1), *_kernel_cells(kernel)) for i, kernel in enumerate(span["top"])]
            tables.append(f"{name}: {_ms(span['kernel_ms'])} ms of kernels a step\n\n" + markdown_table(header, lines))
    return "\n\n".join(tables)


def _attention(rows: Sequence[Row]) -> str:
    """Time and operations of attention's parts, with products apart from what surrounds them."""
    operations = row_fields(rows[0]).get("metrics.attention_operations")
    columns = [
        (row, phase)
        for row in rows
        for phase in row_fields(row).get("metrics.phase_wall_ms")
        if any(phase in of_phase for of_phase in row_fields(row).get("metrics.attention").values())
    ]
    lines = []
    for label, part, products in _PARTS:
        counted = "-" if products is False else f"{operations[part] / 1e9:.3g}"
        lines.append((label, counted, *(_ms(attention_part_ms(row, phase, part, products)) for row, phase in columns)))
    heads = [
        "inference" if row.variant == "forward" else f"{phase}, {row.variant.replace('_', ' ')}"
        for row, phase in columns
    ]
    table = markdown_table(["attention", "GFLOP forward", *(f"{head} (ms)" for head in heads)], lines)
    of_products = attention_part_ms(*columns[0], SCORES, True) + attention_part_ms(*columns[0], VALUES, True)
    if not of_products:
        return table
    ratio = attention_part_ms(*columns[0], SOFTMAX, None) / of_products
    work = operations[SOFTMAX] / (operations[SCORES] + operations[VALUES])
    told = f"softmax takes {ratio:.2f} of the time of the two products, for {work:.3f} of their operations"
    return f"{table}\n\nIn {heads[0]}, {told}."


def shares_in_short(rows: Sequence[Row]) -> str:
    """A line for each setting: by mode its time, its kernels' time and the parts of matrix products and attention."""
    lines: dict[str, dict[str, tuple[str, ...]]] = {}
    names: dict[str, str] = {}
    for row in sorted((row for row in rows if row.status == "ok"), key=_place_in_short):
        name, span = _whole(row)
        names[row.variant] = name
        others = {cls: share for cls, share in span["share"].items() if cls != "matmul"}
        most = max(others, key=lambda cls: others[cls], default=None)
        lines.setdefault(setting(row), {})[row.variant] = (
            _ms(row_fields(row).get("metrics.wall_ms")),
            _ms(span["kernel_ms"]),
            f"{span['share'].get('matmul', 0.0):.0%}",
            "-" if most is None else f"{most} {others[most]:.0%}",
            _attention_share(row, span["kernel_ms"]),
        )
    if not lines:
        return ""
    words = [each.split(", ") for each in lines]
    common = [word for word in words[0] if all(word in other for other in words)] if len(words) > 1 else []
    header = ["setting"]
    for name in names.values():
        header += [f"{name} (ms)", "kernels (ms)", "matmul", "most of the rest", "attention"]
    cells = [
        (
            ", ".join(word for word in own if word not in common),
            *(c for mode in names for c in by_mode.get(mode, _NONE)),
        )
        for own, by_mode in zip(words, lines.values(), strict=True)
    ]
    also = f" ({', '.join(common)})" if common else ""
    return (
        f"Other settings in short{also}: the time of a pass, of its kernels together, and what share of that matrix "
        "products, the next class of kernels, and attention with all its kernels have.\n\n"
        + markdown_table(header, cells)
    )


_NONE = ("-",) * 5


def _place_in_short(row: Row) -> tuple[Any, ...]:
    get, sizes = row_fields(row).get, list(MODEL_SIZES)
    size = get("config.size")
    place = sizes.index(size) if size in sizes else len(sizes)
    return get("config.precision") != "fp32", place, get("config.context_length"), setting(row), row.variant


def _whole(row: Row) -> tuple[str, dict[str, Any]]:
    """The span of a profile that has all of its kernels, and its name."""
    spans = row_fields(row).get("metrics.spans")
    name = max(spans, key=lambda each: spans[each]["kernel_ms"])
    return name, spans[name]


def _attention_share(row: Row, kernel_ms: float) -> str:
    parts = row_fields(row).get("metrics.attention")
    total = sum(ms for by_phase in parts.values() for of_class in by_phase.values() for ms in of_class.values())
    return f"{total / kernel_ms:.0%}" if total and kernel_ms else "-"


def attention_part_ms(row: Row, phase: str, part: str, products: bool | None) -> float:
    """Time in a range of attention: of its matrix products, of all else, or (None) of everything."""
    of_class = row_fields(row).get("metrics.attention").get(part, {}).get(phase, {})
    return sum(ms for cls, ms in of_class.items() if products is None or (cls == "matmul") is products)
