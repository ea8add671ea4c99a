"""`cs336 bench CASE`: reads the case's options, measures, appends rows and prints their tables."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import make_parser, parse
from .console import say

if TYPE_CHECKING:  # the rest, and with it PyTorch, when something is measured: --help is to be quick
    from .bench.case import Row


def bench(arguments: Sequence[str]) -> int:
    """Run the command; the exit code. Raises ValueError for what is wrong with its arguments."""
    if arguments and arguments[0] in _CASES:
        return _CASES[arguments[0]](arguments[1:])
    parser = make_parser("bench", "Measure, and write one row a measurement.")
    parser.add_argument("case", choices=[*_CASES, "list"], help="What to measure; list names the cases.")
    parse(parser, arguments)
    from .bench import attention, ddp

    for name, module in (("attention", attention), ("ddp", ddp)):
        say(f"{name:<10} {(module.__doc__ or '').splitlines()[0]}")
    return 0


def _given(options: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def _tell(case: str, out: str | None, measure: "Callable[[Path], Iterable[Row]]") -> int:
    """Print what is measured, as it comes, and then the tables of it."""
    from .bench.case import check_row_file
    from .report.tables import rows_table

    path = check_row_file(f"runs/bench/{case}.jsonl" if out is None else out)
    rows = []
    for row in measure(path):
        rows.append(row)
        what = row.config.get("shape", "")
        say(" ".join(f"{what} {row.variant}: {row.status} {row.error or ''}".split()))
    say("")
    say(rows_table(rows))
    say(f"\nrows are in {path}")
    return 0


def _attention(arguments: Sequence[str]) -> int:
    parser = make_parser("bench attention", "Every attention kernel beside the others, at some shapes.")
    parser.add_argument("--kernels", nargs="+", type=str, default=None, help="Attention kernels (default: all).")
    parser.add_argument("--shapes", nargs="+", type=str, default=None, help="BxHxNxD, such as 1x16x1024x64.")
    parser.add_argument("--dtype", type=str, default=None, help="bf16, fp16 or fp32 (default: bf16).")
    parser.add_argument(
        "--is_causal", type=bool, default=None, help="Whether a query sees only the keys up to it (default: true)."
    )
    parser.add_argument("--device", type=str, default=None, help="auto, cpu, cuda or cuda:N (default: auto).")
    parser.add_argument("--rounds", type=int, default=None, help="How often the kernels take turns (default: 3).")
    parser.add_argument(
        "--rep_ms", type=float, default=None, help="Time for each measurement of a round (default: 50)."
    )
    parser.add_argument(
        "--quick", action="store_true", help="Small shapes in float32, seconds on a CPU; other options win over it."
    )
    parser.add_argument("--out", type=str, default=None, help="Row file (default: runs/bench/attention.jsonl).")
    options = parse(parser, arguments)
    from .bench import attention
    from .bench.case import append_row

    given: dict[str, Any] = {}
    if options.quick:
        given = {"dtype": "fp32", "rounds": 1, "rep_ms": 1.0, "warmup_ms": 0.0, "shapes": attention.QUICK_SHAPES}
    given |= _given(options, "dtype", "is_causal", "device", "rounds", "rep_ms")
    if options.shapes is not None:
        given["shapes"] = attention.parse_shapes(options.shapes)
    if options.kernels is not None:
        given["kernels"] = tuple(options.kernels)
    config = attention.AttentionBench(**given)

    def measure(path: Path) -> "Iterable[Row]":
        for row in attention.measure(config):
            append_row(path, row)
            yield row

    return _tell("attention", options.out, measure)


def _ddp(arguments: Sequence[str]) -> int:
    parser = make_parser("bench ddp", "A training step on several GPUs, strategy by strategy, beside one GPU alone.")
    parser.add_argument("--devices", type=int, default=None, help="Processes, one a GPU (default: 2).")
    parser.add_argument("--size", type=str, default=None, help="Named size of the model (default: xl).")
    parser.add_argument("--context_length", type=int, default=None, help="Tokens a sequence (default: 512).")
    parser.add_argument("--batch_size", type=int, default=None, help="Sequences a process (default: 4).")
    parser.add_argument(
        "--variants",
        nargs="+",
        type=str,
        default=None,
        help="alone, or STRATEGY[:BUCKET_MB], with +zero1, +bf16 or +graph, such as bucketed:100+zero1 (default: "
        "every strategy).",
    )
    parser.add_argument(
        "--compile", nargs="+", type=bool, default=None, help="Eager, compiled or both (default: false true)."
    )
    parser.add_argument("--precision", type=str, default=None, help="bf16 or fp32 (default: bf16).")
    parser.add_argument("--device", type=str, default=None, help="auto, cpu or cuda (default: auto).")
    parser.add_argument("--warmup", type=int, default=None, help="Steps before the measured ones (default: 5).")
    parser.add_argument("--steps", type=int, default=None, help="Measured steps (default: 10).")
    parser.add_argument(
        "--traces", type=str, default=None, help="Folder for what ran when in one step of naive and bucketed."
    )
    parser.add_argument(
        "--quick", action="store_true", help="A tiny model, seconds on a CPU; other options win over it."
    )
    parser.add_argument("--out", type=str, default=None, help="Row file (default: runs/bench/ddp.jsonl).")
    options = parse(parser, arguments)
    from .bench import ddp

    given = dict(ddp.QUICK) if options.quick else {}
    names = ("devices", "size", "context_length", "batch_size", "precision", "device", "warmup", "steps", "traces")
    given |= _given(options, *names)
    given |= {name: tuple(value) for name, value in _given(options, "variants", "compile").items()}
    config = ddp.DDPBench(**given)
    return _tell("ddp", options.out, lambda path: ddp.measure(config, path))


_CASES: dict[str, Callable[[Sequence[str]], int]] = {"attention": _attention, "ddp": _ddp}
