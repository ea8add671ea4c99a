"""`cs336 plan`: memory, time and communication by arithmetic."""

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ..config.checks import require
from ..config.model import MODEL_SIZES, SHAPE_FIELDS, SIZE_FIELDS, ModelConfig
from ..config.run import ParallelConfig
from ..planner.cards import CARDS, Card, fit_transfer, get_card
from ..planner.job import ALIASES, Job
from ..planner.working import Section, as_json, as_text
from .arguments import Commands, check_png, make_parser, parse, run_subcommand

_JOB = {
    "batch_size": (int, "Sequences per GPU (default: 4)."),
    "precision": (str, "Autocast type: fp32, bf16 or fp16 (default: bf16)."),
    "weight_dtype": (str, "Type of weights, gradients and optimizer state: fp32 or bf16 (default: fp32)."),
    "loss_chunk_tokens": (int, "Number of tokens whose logits are in memory at a time (default: all)."),
    "compile_memory_budget": (float, "Share of a compiled block's activations that may be kept (default: 1)."),
    "attention": (str, "naive, flash, or a kernel's registered name (default: flash)."),
    "activation_checkpointing": (str, "none, block, first_K, every_K or groups_K (default: none)."),
    "compile": (bool, "Use torch.compile, block by block."),
    "cuda_graph": (bool, "Record the step as a CUDA graph."),
    "strategy": (str, "How GPUs share the work (default: none; for several, overlap with bucket_size_mb 100)."),
    "world_size": (int, "Number of GPUs (default: 1)."),
    "shard_optimizer": (bool, "Each GPU keeps the optimizer state of only its part of the parameters."),
    "reshard_after_forward": (bool, "fsdp: free weights after the forward pass and gather them again (default: true)."),
    "bucket_size_mb": (
        float,
        "Size of the groups in which gradients are sent, in MiB (default: 100; torch_ddp: 25; overlap: one by one).",
    ),
    "grad_dtype": (str, "Type in which gradients are sent: same, fp32, bf16 or fp16 (default: same)."),
}
_OPTIONS: dict[str, tuple[Any, str]] = {
    "vocab_size": (int, "Size of the vocabulary (default: the size's, else 10,000)."),
    "context_length": (int, "Tokens per sequence (default: the size's, else 512)."),
    "d_model": (int, "Width of the residual stream, if no size is given."),
    "d_ff": (int, "Width of the feed-forward layer."),
    "num_layers": (int, "Number of Transformer blocks."),
    "num_heads": (int, "Number of attention heads."),
    **_JOB,
}


def _parser(command: str, description: str, *names: str) -> Any:
    parser = make_parser(f"plan {command}", description)
    if "context_length" in names:
        parser.add_argument("--size", type=str, default=None, help="Named size of the model (default: small).")
    for name in names:
        kind, text = _OPTIONS[name]
        flags = ["--context_length", "--context"] if name == "context_length" else [f"--{name}"]
        if kind is bool:
            parser.add_argument(*flags, type=bool, nargs="?", const=True, default=None, help=text)
        else:
            parser.add_argument(*flags, type=kind, default=None, help=text)
    parser.add_argument("--json", type=bool, nargs="?", const=True, default=False, help="Print JSON.")
    return parser


def _in_range(name: str, value: float | None, least: str = "1e-6") -> None:
    require(value is None or float(least) <= value < 1e9, name, value, f"at least {least} and below 1e9")


def _job(options: Any) -> Job:
    """The job that the options describe. Raises ValueError naming the wrong option."""
    given = {name: value for name in _JOB if (value := getattr(options, name, None)) is not None}
    if "strategy" in given:
        given["strategy"] = ALIASES.get(given["strategy"], given["strategy"])
    elif (world_size := given.get("world_size", 1)) > 1:
        auto = ParallelConfig()
        given = {"strategy": auto.strategy_for(world_size), "bucket_size_mb": auto.group_size_mb()} | given
    size = _size(options)
    model: dict[str, Any] = {"context_length": MODEL_SIZES.get(size or "", {}).get("context_length", 512)}
    model |= {name: value for name in SHAPE_FIELDS if (value := getattr(options, name)) is not None}
    try:
        shape = ModelConfig(size=size, **model).shape
    except ValueError as error:
        raise ValueError(str(error).replace("model.", "")) from error
    return Job(shape=shape, **given)


def _size(options: Any) -> str | None:
    """The named size; small if neither a name nor a shape is given."""
    has_shape = any(getattr(options, name) is not None for name in SIZE_FIELDS)
    return options.size or (None if has_shape else "small")


def _print(sections: Sequence[Section], options: Any) -> int:
    print(json.dumps(as_json(sections), indent=2) if options.json else as_text(sections))
    return 0


def _print_plan(
    sections: Sequence[Section], summary: dict[str, Any], job: Job, card: Card, memory_gib: float, options: Any
) -> int:
    """Print the assumptions, then the sections. JSON also has a summary with stable names."""
    from ..planner.summary import planned, planned_section

    assumed = (job, _size(options), card.name, memory_gib)
    if options.json:
        print(json.dumps({"planned": planned(*assumed), "summary": summary, "sections": as_json(sections)}, indent=2))
        return 0
    first = planned_section(*assumed)
    if job.world_size == 1 and (job.strategy != "none" or job.shard_optimizer):
        note = "one GPU shares nothing: set the number of GPUs with --world_size"
        first = replace(first, notes=(*first.notes, note))
    return _print([first, *sections], options)


def _memory(arguments: Sequence[str]) -> int:
    parser = _parser("memory", "Memory of a training step on each GPU, and the largest batch.", *_OPTIONS)
    parser.add_argument("--card", type=str, default="H200", help=f"{', '.join(CARDS)} (default: H200).")
    parser.add_argument("--memory_gib", type=float, default=None, help="Memory of a GPU (default: the card's).")
    options = parse(parser, arguments)
    from ..planner.memory import memory_sections
    from ..planner.summary import memory_summary

    limit, card = options.memory_gib, get_card(options.card)
    require(limit is None or 0 < limit < 1e6, "memory_gib", limit, "above 0 and below 1e6")
    job = _job(options)
    memory = limit or card.memory_gib
    return _print_plan(memory_sections(job, memory), memory_summary(job, memory), job, card, memory, options)


def _step(arguments: Sequence[str]) -> int:
    parser = _parser("step", "Operations, bytes and time of a training step, and MFU.", *_OPTIONS)
    parser.add_argument("--card", type=str, default="H200", help=f"{', '.join(CARDS)} (default: H200).")
    ceilings = {
        "matmul_tflops": ("matmul", 1e12, "Rate of large 16-bit products."),
        "bandwidth_tb_s": ("bandwidth", 1e12, "Bandwidth of memory, reads and writes together."),
        "link_gb_s": ("link", 1e9, "Bytes of a large all-reduce between two GPUs, divided by its time."),
        "latency_us": ("latency_s", 1e-6, "Time of a small all-reduce between two GPUs."),
    }
    for name, (_, _, text) in ceilings.items():
        parser.add_argument(f"--{name}", type=float, default=None, help=f"{text} (default: the card's).")
    options = parse(parser, arguments)
    from ..planner.step import step_sections
    from ..planner.summary import step_summary

    job = _job(options)
    given: dict[str, float] = {}
    for name, (field, unit, _) in ceilings.items():
        value = getattr(options, name)
        _in_range(name, value)
        if value is not None:
            given[field] = value * unit
    card = get_card(options.card, **given)
    return _print_plan(step_sections(job, card), step_summary(job, card), job, card, card.memory_gib, options)


def _activation(arguments: Sequence[str]) -> int:
    names = (*SHAPE_FIELDS, "batch_size", "precision", "attention", "compile")
    parser = _parser("activation", "The size of one activation, and the activations that a block saves.", *names)
    options = parse(parser, arguments)
    from ..planner.activations import activation_sections

    return _print(activation_sections(_job(options)), options)


def _checkpointing(arguments: Sequence[str]) -> int:
    names = (*SHAPE_FIELDS, "batch_size", "precision", "attention")
    parser = _parser("checkpointing", "Activation checkpointing: memory by group size.", *names)
    options = parse(parser, arguments)
    from ..planner.activations import checkpointing_sections

    job = _job(options)
    most = 100_000  # every group size is tried
    require(job.shape.num_layers <= most, "num_layers", job.shape.num_layers, f"at most {most:,}")
    return _print(checkpointing_sections(job), options)


def _ddp_overhead(arguments: Sequence[str]) -> int:
    parser = _parser("ddp-overhead", "Time that gradient buckets add to a step, and the best size.", *SHAPE_FIELDS)
    parser.add_argument("--world_size", type=int, default=2, help="Number of GPUs.")
    parser.add_argument("--gradient_bytes", type=float, default=None, help="s, in bytes (default: 4 per parameter).")
    parser.add_argument("--rows", type=str, default=None, help="Row file of all-reduces to fit o and w to.")
    parser.add_argument(
        "--bandwidth_gb_s",
        type=float,
        default=None,
        help="w, bandwidth of an all-reduce (default: from two H200 over NVLink).",
    )
    parser.add_argument("--overhead_ms", type=float, default=None, help="o, overhead of a call (default: as for w).")
    parser.add_argument(
        "--measured", type=str, default=None, help="Row file of the case ddp or bucket-size to compare with."
    )
    parser.add_argument("--plot", type=str, default=None, help="PNG to draw.")
    options = parse(parser, arguments)
    from ..planner.accounting import num_parameters
    from ..planner.communication import collective_section, overhead_sections
    from ..planner.overhead_plot import plot_overhead
    from ..planner.rows import overheads_beside

    world_size = options.world_size
    require(2 <= world_size < 1 << 31, "world_size", world_size, "at least 2 and below 2^31")
    options.world_size = None  # the model does not depend on it
    nbytes = options.gradient_bytes
    require(nbytes is None or 0 < nbytes < 1e18, "gradient_bytes", nbytes, "above 0 and below 1e18")
    n = num_parameters(_job(options).shape)
    nbytes, gradients = (nbytes, "as given") if nbytes else (4.0 * n, f"4 N = 4 x {n:,}")
    overhead_s, bandwidth = _transfer(options, world_size)
    measured: list[tuple[str, float, float]] = []
    left_out = ""
    if options.measured:
        rows = _read(options.measured)
        try:
            measured, left_out = overheads_beside(rows, nbytes, world_size)
        except ValueError as error:
            raise ValueError(f"measured is {options.measured!r}: {error}") from error
    if options.plot:
        check_png("plot", options.plot)
        plot_overhead(nbytes, bandwidth, overhead_s, measured, Path(options.plot))
    beta = bandwidth * 2 * (world_size - 1) / world_size
    ring = collective_section(nbytes, world_size, replace(CARDS["H200"], latency_s=overhead_s, link=beta))
    *sections, last = overhead_sections(nbytes, bandwidth, overhead_s, measured, gradients)
    last = replace(last, notes=(*last.notes, *filter(None, [left_out])))
    return _print([*sections, last, ring], options)


def _transfer(options: Any, world_size: int) -> tuple[float, float]:
    """o in s and w in bytes/s: as given, fitted to rows, or from two H200."""
    from ..planner.communication import all_reduce_cost
    from ..planner.rows import transfer_points

    overhead_s, bandwidth = all_reduce_cost(CARDS["H200"], world_size)
    if options.rows:
        rows = _read(options.rows)
        try:
            overhead_s, bandwidth = fit_transfer(*transfer_points(rows, world_size))
        except ValueError as error:
            raise ValueError(f"rows is {options.rows!r}: {error}") from error
    _in_range("overhead_ms", options.overhead_ms, least="0")
    _in_range("bandwidth_gb_s", options.bandwidth_gb_s)
    if options.overhead_ms is not None:
        overhead_s = options.overhead_ms * 1e-3
    if options.bandwidth_gb_s is not None:
        bandwidth = options.bandwidth_gb_s * 1e9
    return overhead_s, bandwidth


def _parallelism(arguments: Sequence[str]) -> int:
    from ..planner.parallelism import FeedForward, Mesh, parallelism_sections

    parser = _parser(
        "parallelism", "Feed-forward layers on many devices: memory, and when products hide communication."
    )
    parser.add_class_arguments(FeedForward)
    parser.add_class_arguments(Mesh)
    parser.add_argument("--device_gb", type=float, default=95.0, help="Memory of a device in (b), in 10^9 bytes.")
    parser.add_argument("--gpu_gb", type=float, default=80.0, help="Memory of a GPU in (a), in 10^9 bytes.")
    options = parse(parser, arguments)
    for name in ("device_gb", "gpu_gb"):
        _in_range(name, getattr(options, name))
    model = FeedForward(**{field.name: getattr(options, field.name) for field in fields(FeedForward)})
    mesh = Mesh(**{field.name: getattr(options, field.name) for field in fields(Mesh)})
    return _print(parallelism_sections(model, mesh, options.device_gb, options.gpu_gb), options)


def _scaling(arguments: Sequence[str]) -> int:
    from ..planner.scaling import Layer, scaling_sections

    parser = _parser("scaling", "A gated feed-forward layer: on how many devices products hide communication.")
    parser.add_class_arguments(Layer)
    options = parse(parser, arguments)
    layer = Layer(**{field.name: getattr(options, field.name) for field in fields(Layer)})
    return _print(scaling_sections(layer), options)


def _check(arguments: Sequence[str]) -> int:
    parser = _parser(
        "check",
        "Predicted memory and step time beside measured rows, and how many meet the planner's aims: peak memory within "
        "5 %, step time within 15 % for models of size large and above on one H200.",
    )
    parser.add_argument("results", nargs="+", type=str, help="Row files, or folders: all row files below.")
    options = parse(parser, arguments)
    from ..planner.check import check_json, check_text, compare

    files = [file for path in options.results for file in _row_files(path)]
    found = [replace(compare(row), file=file if len(files) > 1 else "") for file in files for row in _read(file)]
    print(json.dumps(check_json(found), indent=2) if options.json else check_text(found))
    return 0


def _row_files(path: str) -> list[str]:
    """The file itself, or all row files below a folder, sorted. Raises ValueError for a folder without one."""
    if not Path(path).is_dir():
        return [path]
    found = []
    for file in sorted(Path(path).rglob("*.jsonl")):
        if file.is_file():
            with file.open("rb") as opened:
                if b'"case"' in opened.readline():  # a run's metrics.jsonl has none
                    found.append(str(file))
    require(bool(found), "results", path, "a row file, or a folder with row files (.jsonl) below it")
    return found


def _read(path: str) -> list[Any]:
    from ..bench.row import read_rows

    return list(read_rows(Path(path)))


_COMMANDS: Commands = {
    "memory": (_memory, "memory of a training step, and the largest batch"),
    "step": (_step, "operations, bytes, time and MFU of a training step"),
    "activation": (_activation, "the size of one activation, and the activations that a block saves"),
    "checkpointing": (_checkpointing, "memory by the size of the checkpointed groups"),
    "ddp-overhead": (_ddp_overhead, "time that gradient buckets add to a step, and the best size"),
    "parallelism": (_parallelism, "feed-forward layers on many devices"),
    "scaling": (_scaling, "a gated feed-forward layer: how many devices, by strategy"),
    "check": (_check, "predictions beside measured rows"),
}


def plan(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code. Raises ValueError for wrong arguments."""
    return run_subcommand(
        "plan", "Memory, time and communication of a training step, by arithmetic.", _COMMANDS, arguments
    )
