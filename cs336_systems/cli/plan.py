"""`cs336 plan`: memory, time and communication by arithmetic."""

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from cs336_basics.shape import ModelShape

from ..config.checks import require, without_groups
from ..config.model import MODEL_SIZES, SHAPE_FIELDS, SIZE_FIELDS, ModelConfig
from ..config.run import ParallelConfig
from ..planner.accounting import bytes_of_kinds, sizes_of
from ..planner.activations import activation_sections, checkpointing_sections
from ..planner.cards import CARDS, Card, fit_transfer, get_card
from ..planner.check import check_json, check_text, compare
from ..planner.communication import all_reduce_cost, collective_section, overhead_sections
from ..planner.job import ALIASES, Job
from ..planner.memory import RESERVE, memory_sections, peak_bytes, verdict
from ..planner.offload import largest_offload, offload_note, smallest_offload
from ..planner.parallelism import FeedForward, Mesh, parallelism_sections
from ..planner.rows import naming, overheads_beside, transfer_points
from ..planner.scaling import Layer, scaling_sections
from ..planner.step import step_sections
from ..planner.working import GIB, Section, as_json, as_text, show
from .arguments import Commands, make_parser, parse, run_subcommand

_MODEL = {
    "size": "Named size of the model (default: small).",
    "vocab_size": "Size of the vocabulary (default: the size's, else 10,000).",
    "context_length": "Tokens per sequence (default: the size's, else 512).",
    "d_model": "Width of the residual stream, if no size is given.",
    "d_ff": "Width of the feed-forward layer.",
    "num_layers": "Number of Transformer blocks.",
    "num_heads": "Number of attention heads.",
}
_OPTIONS = ("num_kv_heads", "head_dim", "qk_norm", "tie_embeddings", "window", "window_every")
"""Further fields of the model that a plan takes."""
_JOB = [field.name for field in fields(Job) if field.name not in ("shape", "optimizer", "fused", "clip")]
_BY_GPUS = ("strategy", "bucket_size_mb", "shard_optimizer", "reshard_after_forward")
"""Fields whose defaults depend on the number of GPUs."""
_BLOCK = ("batch_size", "precision", "attention")


def _parser(command: str) -> Any:
    about = _COMMANDS[command][1]
    parser = make_parser(f"plan {command}", f"{about[0].upper()}{about[1:]}.")
    parser.add_argument("--json", type=bool, nargs="?", const=True, default=False, help="Print JSON.")
    return parser


def _job_parser(command: str, *names: str) -> Any:
    """A parser with options for the model and for these fields of `Job`; docstrings of fields become the help."""
    from docstring_parser import parse_from_object

    parser = _parser(command)
    for name, text in _MODEL.items():
        flags = ["--context_length", "--context"] if name == "context_length" else [f"--{name}"]
        parser.add_argument(*flags, type=str if name == "size" else int, default=None, help=text)
    for cls, of_cls in ((ModelConfig, _OPTIONS), (Job, names)):
        told = {param.arg_name: param.description for param in parse_from_object(cls).params}
        hints = get_type_hints(cls)
        for name in of_cls:
            default = None if name in _BY_GPUS else getattr(cls, name)
            is_flag: dict[str, Any] = {"nargs": "?", "const": True} if hints[name] is bool else {}
            parser.add_argument(f"--{name}", type=hints[name], default=default, help=told[name], **is_flag)
    return parser


def _size(options: Any) -> str | None:
    """The named size; small if neither a name nor a shape is given."""
    has_shape = any(getattr(options, name) is not None for name in SIZE_FIELDS)
    return options.size or (None if has_shape else "small")


def _shape(options: Any) -> ModelShape:
    size = _size(options)
    model: dict[str, Any] = {"context_length": MODEL_SIZES.get(size or "", {}).get("context_length", 512)}
    model |= {name: value for name in SHAPE_FIELDS if (value := getattr(options, name)) is not None}
    model |= {name: getattr(options, name) for name in _OPTIONS}
    with without_groups():
        shape = ModelConfig(size=size, **model).shape
    most = 100_000  # a plan looks at each block, and at each size of groups of blocks
    require(shape.num_layers <= most, "num_layers", shape.num_layers, f"at most {most:,}")
    return shape


def _job(options: Any, memory_gib: float | None = None) -> Job:
    """The job that the options describe. Raises ValueError naming the wrong option.

    memory_gib: a GPU's, for which activation_offload auto is decided.
    """
    given = {name: value for name, value in vars(options).items() if name in _JOB and value is not None}
    if "strategy" in given:
        given["strategy"] = ALIASES.get(given["strategy"], given["strategy"])
    elif (world_size := given.get("world_size", 1)) > 1:
        options_of_overlap = {name: given[name] for name in ("bucket_size_mb", "shard_optimizer") if name in given}
        with without_groups():
            auto = ParallelConfig(**options_of_overlap).resolved(world_size)
        given = {name: getattr(auto, name) for name in _BY_GPUS} | given
    if memory_gib is None or given.get("activation_offload") != "auto":
        return _as_trained(Job(shape=_shape(options), **given))
    job = _as_trained(Job(shape=_shape(options), **given | {"activation_offload": "none"}))
    return replace(job, activation_offload=smallest_offload(job, memory_gib * GIB) or largest_offload(job))


def _as_trained(job: Job) -> Job:
    """The job with the optimizer that `cs336 train` takes for it."""
    return replace(job, fused=job.muon or (job.precision != "fp32" and job.weight_dtype == "fp32"))


def _print(sections: Sequence[Section], options: Any) -> int:
    print(json.dumps(as_json(sections), indent=2) if options.json else as_text(sections))
    return 0


def _planned(job: Job, options: Any, card: Card, memory_gib: float) -> Section:
    """The assumptions of a plan, and whether its peak fits the card.

    Raises ValueError for a precision that the card lacks, or for a host memory that cannot be.
    """
    card.check(job.precision)
    host = options.host_memory_gib
    require(host is None or 0 < host < 1e6, "host_memory_gib", host, "above 0 and below 1e6")
    shape = [f"{name} {getattr(job.shape, name):,}" for name in (*SIZE_FIELDS, "vocab_size", "context_length")]
    defaults = ModelShape.defaults()
    shape += [f"{name} {value}" for name in _OPTIONS if (value := getattr(job.shape, name)) != defaults[name]]
    usual = ("batch_size", "precision", "attention", "world_size", "strategy")
    values = {field.name: (getattr(job, field.name), field.default) for field in fields(Job) if field.name in _JOB}
    chosen = (f"{name} {value}" for name, (value, default) in values.items() if name in usual or value != default)
    needed, usable = peak_bytes(job), f"{(1 - RESERVE) * memory_gib:.4g} GiB"
    found = verdict(needed, memory_gib * GIB)
    why = {
        "fits": f"is within {usable}, {1 - RESERVE:.0%} of the card's memory",
        "may not fit": f"is above {usable}; the other {RESERVE:.0%} are for the CUDA context and fragmentation",
        "does not fit": "is above the card's memory",
    }
    notes = [f"{_size(options) or 'own shape'}: {', '.join(shape)}", f"a GPU's step: {', '.join(chosen)}"]
    notes.append(f"{card.name} of {memory_gib:g} GiB, {found}: the peak of {show(needed, 'bytes')} {why[found]}")
    if job.offloaded_blocks:
        notes.append(offload_note(job, card, host and host * GIB))
    if job.world_size == 1 and (job.strategy != "none" or job.shard_optimizer):
        notes.append("one GPU shares nothing: set the number of GPUs with --world_size")
    return Section("Planned", (), tuple(notes))


def _step_parser(command: str) -> Any:
    parser = _job_parser(command, *_JOB)
    parser.add_argument("--card", type=str, default="H200", help=f"{', '.join(CARDS)}.")
    of_host = "Main memory for all GPUs together, to compare with what activation_offload takes."
    parser.add_argument("--host_memory_gib", type=float, default=None, help=of_host)
    return parser


def _memory(arguments: Sequence[str]) -> int:
    parser = _step_parser("memory")
    parser.add_argument("--memory_gib", type=float, default=None, help="Memory of a GPU (default: the card's).")
    options = parse(parser, arguments)
    card, memory = get_card(options.card), options.memory_gib
    require(memory is None or 0 < memory < 1e6, "memory_gib", memory, "above 0 and below 1e6")
    memory = memory or card.memory_gib
    job = _job(options, memory)
    return _print([_planned(job, options, card, memory), *memory_sections(job, memory)], options)


def _step(arguments: Sequence[str]) -> int:
    parser = _step_parser("step")
    ceilings = {
        "matmul_tflops": ("matmul", 1e12, "Rate of large 16-bit products."),
        "bandwidth_tb_s": ("bandwidth", 1e12, "Bandwidth of memory, reads and writes together."),
        "link_gb_s": ("link", 1e9, "Bytes of a large all-reduce between two GPUs, divided by its time."),
        "host_link_gb_s": ("host_link", 1e9, "Bytes of a copy between host memory and GPU, divided by its time."),
        "latency_us": ("latency_s", 1e-6, "Time of a small all-reduce between two GPUs."),
    }
    for name, (_, _, text) in ceilings.items():
        parser.add_argument(f"--{name}", type=float, default=None, help=f"{text} (default: the card's).")
    options = parse(parser, arguments)
    given: dict[str, float] = {}
    for name, (field, unit, _) in ceilings.items():
        value = getattr(options, name)
        require(value is None or 1e-6 <= value < 1e9, name, value, "at least 1e-6 and below 1e9")
        if value is not None:
            given[field] = value * unit
    card = get_card(options.card, **given)
    job = _job(options, card.memory_gib)
    return _print([_planned(job, options, card, card.memory_gib), *step_sections(job, card)], options)


def _activation(arguments: Sequence[str]) -> int:
    options = parse(_job_parser("activation", *_BLOCK, "compile"), arguments)
    return _print(activation_sections(_job(options)), options)


def _checkpointing(arguments: Sequence[str]) -> int:
    options = parse(_job_parser("checkpointing", *_BLOCK), arguments)
    require(options.precision != "fp8", "precision", "fp8", "fp32, bf16 or fp16, as in cs336 bench checkpointing")
    return _print(checkpointing_sections(_job(options)), options)


def _ddp_overhead(arguments: Sequence[str]) -> int:
    parser = _job_parser("ddp-overhead")
    for name, kind, default, text in (
        ("precision", str, "fp32", "Type of computation; with bf16 and fp16, gradients of matrices are 16-bit."),
        ("world_size", int, 2, "Number of GPUs."),
        ("rows", str, None, "Row file of all-reduces to fit o and w to (default: two H200 over NVLink)."),
        ("measured", str, None, "Row file of the case ddp or bucket-size to compare with."),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default, help=text)
    options = parse(parser, arguments)
    world_size, job = options.world_size, _as_trained(Job(shape=_shape(options), precision=options.precision))
    formula, filled, nbytes = bytes_of_kinds(job.shape, sizes_of(job.gradient_dtypes))
    require(2 <= world_size < 1 << 31, "world_size", world_size, "at least 2 and below 2^31")
    overhead_s, bandwidth = all_reduce_cost(CARDS["H200"], world_size)
    if options.rows:
        rows = _read(options.rows)
        with naming(f"rows is {options.rows!r}"):
            overhead_s, bandwidth = fit_transfer(*transfer_points(rows, world_size))
    measured: list[tuple[str, float, float]] = []
    left_out = ""
    if options.measured:
        rows = _read(options.measured)
        with naming(f"measured is {options.measured!r}"):
            measured, left_out = overheads_beside(rows, nbytes, world_size)
    *sections, last = overhead_sections(nbytes, bandwidth, overhead_s, measured, f"{formula} = {filled}")
    if left_out:
        last = replace(last, notes=(*last.notes, left_out))
    beta = bandwidth * 2 * (world_size - 1) / world_size
    ring = collective_section(nbytes, world_size, replace(CARDS["H200"], latency_s=overhead_s, link=beta))
    return _print([*sections, last, ring], options)


def _of_fields(command: str, sections: Callable[..., list[Section]], classes: Any, words: Sequence[str]) -> int:
    """Print the sections of objects whose fields are the options."""
    parser = _parser(command)
    for cls in classes:
        parser.add_class_arguments(cls)
    options = parse(parser, words)
    given = [cls(**{field.name: getattr(options, field.name) for field in fields(cls)}) for cls in classes]
    return _print(sections(*given), options)


_parallelism = functools.partial(_of_fields, "parallelism", parallelism_sections, (FeedForward, Mesh))
_scaling = functools.partial(_of_fields, "scaling", scaling_sections, (Layer,))


def _check(arguments: Sequence[str]) -> int:
    parser = _parser("check")
    parser.add_argument("results", nargs="+", type=str, help="Row files, or folders: all row files below.")
    options = parse(parser, arguments)
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

    return read_rows(Path(path))


_COMMANDS: Commands = {
    "memory": (_memory, "memory of a training step on each GPU, and the largest batch"),
    "step": (_step, "operations, bytes, time and MFU of a training step"),
    "activation": (_activation, "the size of one activation, and the activations that a block saves"),
    "checkpointing": (_checkpointing, "memory by the size of the checkpointed groups"),
    "ddp-overhead": (_ddp_overhead, "time that gradient buckets add to a step, and the best size"),
    "parallelism": (_parallelism, "feed-forward layers on many devices: memory, and when products hide communication"),
    "scaling": (_scaling, "a gated feed-forward layer: on how many devices products hide communication"),
    "check": (_check, "predictions beside measured rows, and how many are as good as the planner aims to be"),
}


def plan(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code. Raises ValueError for wrong arguments."""
    about = "Memory, time and communication of a training step, by arithmetic."
    return run_subcommand("plan", about, _COMMANDS, arguments)
