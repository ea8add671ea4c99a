"""`cs336 profile TOOL`: where the time and the memory of a workload go."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from .arguments import make_parser, parse
from .console import say


def profile(arguments: Sequence[str]) -> int:
    """Run the command; the exit code. Raises ValueError for what is wrong with its arguments."""
    if arguments and arguments[0] in _TOOLS:
        return _TOOLS[arguments[0]](arguments[1:])
    parser = make_parser("profile", "Where the time and the memory of a workload go.")
    parser.add_argument("tool", choices=list(_TOOLS), help="memory: what fills a GPU's memory over a step.")
    parse(parser, arguments)
    return 0


def _memory(arguments: Sequence[str]) -> int:
    from .bench.workload import Workload
    from .profiling import memory

    parser = _memory_parser()
    parser.set_defaults({"mode": "train_step", **(memory.QUICK if "--quick" in arguments else {})})
    options = vars(parse(parser, arguments))
    for name in ("detail", "min_bytes", "warmup"):
        if options[name] < 0:
            raise ValueError(f"{name} is {options[name]}: it must be at least 0")
    workload = {field.name: options[field.name] for field in fields(Workload)}
    folder, drawn = Path(options["out"]), dict(detail=options["detail"], min_bytes=options["min_bytes"])
    if options["snapshot"] is not None:
        _refuse_workload(parser, {**workload, "warmup": options["warmup"]})
        row = memory.draw(Path(options["snapshot"]), folder, **drawn)
    else:
        row = memory.profile(Workload(**workload), folder, options["warmup"], **drawn)
    from .report.memory_tables import memory_summary

    (folder / memory.SUMMARY_FILE).write_text(memory_summary(row) + "\n", encoding="utf-8")
    say(memory_summary(row))
    if row.metrics:
        say(f"\nto look at: {folder / memory.PAGE_FILE} (any browser), {folder / memory.PICTURE_FILE}")
    return 0


def _memory_parser() -> Any:
    from .bench.workload import Workload

    parser = make_parser("profile memory", "What fills memory over a forward pass or a training step, and when.")
    parser.add_class_arguments(Workload)
    parser.add_argument("--warmup", type=int, default=2, help="Steps before the recorded one.")
    parser.add_argument("--out", type=str, default="runs/profile/memory", help="Folder for all that is written.")
    parser.add_argument(
        "--detail", type=int, default=5000, help="How many of the largest allocations are drawn one by one."
    )
    parser.add_argument("--min_bytes", type=int, default=0, help="How large those must be.")
    parser.add_argument("--snapshot", type=str, default=None, help="Draw this file, on any machine; record nothing.")
    parser.add_argument("--quick", action="store_true", help="A tiny model, seconds on a CPU; options win over it.")
    return parser


def _refuse_workload(parser: Any, given: dict[str, Any]) -> None:
    for name, value in given.items():
        if value != parser.get_default(name):
            raise ValueError(f"{name} is {value!r}: with snapshot nothing is run, so it must be left out")


_TOOLS: dict[str, Callable[[Sequence[str]], int]] = {"memory": _memory}
