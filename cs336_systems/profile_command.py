"""`cs336 profile WHAT`: reads the options, profiles, writes files and prints the tables of them."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import add_folder, make_parser, parse
from .console import say

if TYPE_CHECKING:  # PyTorch, which is imported when something is profiled: --help is to be quick
    from .bench.case import Row
    from .profiling.kernels import KernelProfile
    from .profiling.summary import KernelTotal


def profile(arguments: Sequence[str]) -> int:
    """Run the command; the exit code. Raises ValueError for what is wrong with its arguments."""
    if arguments and arguments[0] in _TOOLS:
        return _TOOLS[arguments[0]][0](arguments[1:])
    told = " ".join(f"{name}: {what}." for name, (_, what) in _TOOLS.items())
    parser = make_parser("profile", "Look at a forward pass or a training step from inside.")
    parser.add_argument("what", choices=list(_TOOLS), help=f"{told} cs336 profile WHAT --help tells more.")
    parse(parser, arguments)
    return 0


def _kernels(arguments: Sequence[str]) -> int:
    from .bench.sweep import check_sized_for_gpu
    from .bench.workload import Workload
    from .profiling.kernels import MODES, QUICK, KernelProfile

    parser = make_parser("profile kernels", "Where the time of a forward pass and a training step goes, by kernel.")
    fields = parser.add_class_arguments(Workload, skip={"mode"})
    parser.add_argument(
        "--modes",
        nargs="+",
        type=str,
        default=list(MODES),
        help="forward (inference), forward_backward or train_step, one or more.",
    )
    parser.add_argument("--warmup", type=int, default=5, help="Steps before the profiled ones.")
    parser.add_argument("--steps", type=int, default=3, help="Profiled steps.")
    parser.add_argument("--tool", type=str, default="torch", help="torch (torch.profiler) or nsys (Nsight Systems).")
    parser.add_argument(
        "--quick", action="store_true", help="A tiny model, seconds on a CPU; other options win over it."
    )
    add_folder(parser, "profile/kernels", "--quick" in arguments, "Folder to write to")
    if "--quick" in arguments:
        parser.set_defaults(**QUICK, warmup=1, steps=1)
    options = parse(parser, arguments)
    if not options.quick:
        check_sized_for_gpu("profile kernels", options.device)
    config = KernelProfile(
        workload=Workload(**{name: getattr(options, name) for name in fields}),
        modes=tuple(options.modes),
        warmup=options.warmup,
        steps=options.steps,
    )
    return _profile_kernels(config, options.tool, options.out)


def _profile_kernels(config: "KernelProfile", tool: str, where: str) -> int:
    from .bench.case import check_row_file
    from .profiling import nsys
    from .profiling.kernels import measure, profile_with_torch
    from .profiling.summary import write_kernels

    tools = {"torch": profile_with_torch, "nsys": nsys.profile_with_nsys}
    if tool not in tools:
        raise ValueError(f"tool is {tool!r}: it must be one of {', '.join(tools)}")
    device = config.check_device()
    if tool == "nsys":
        nsys.check_nsys(device)
    try:
        out = check_row_file(f"{where}/rows.jsonl").parent
    except ValueError as error:
        reason = str(error).rpartition("(")[2]
        raise ValueError(f"out is {where!r}: it must be a folder that can be written ({reason}") from error
    rows: list[Row] = []
    kernels: dict[str, list[KernelTotal]] = {}
    for row, totals in measure(config, out, tools[tool]):
        rows.append(row)
        kernels[row.variant] = totals
        say(f"{row.variant}: {row.status} {row.error or ''}".rstrip())
    write_kernels(out / "kernels.csv", kernels)
    _tell_kernels(config, rows, tool, out)
    return 0 if any(row.status == "ok" for row in rows) else 1


def _tell_kernels(config: "KernelProfile", rows: "Sequence[Row]", tool: str, out: Path) -> None:
    import shlex

    from .profiling.nsys import nsys_command
    from .report.profile_plots import plot_shares
    from .report.profile_tables import top_kernels_tables
    from .report.views import rows_table

    measured = [row for row in rows if row.status == "ok"]
    for row in measured:
        say(f"\n{top_kernels_tables(row)}")
    say(f"\n{rows_table(rows)}\n")
    (out / "shares.png").unlink(missing_ok=True)  # it may be of an earlier run
    if measured:
        plot_shares(measured, out / "shares.png")
        if not measured[0].config["attention_ranges"]:
            say("attention is not split into scores, softmax, values: only naive attention is, and not where compiled")
    if tool == "torch":
        for mode in dict.fromkeys(config.modes):
            say(f"the same with Nsight Systems: {shlex.join(nsys_command(config, mode, out))}")
    say(f"kernels.csv, shares.png, rows.jsonl and traces (for ui.perfetto.dev) are in {out}")


def _memory(arguments: Sequence[str]) -> int:
    from .bench.sweep import check_sized_for_gpu
    from .bench.workload import Workload
    from .profiling import memory

    parser = _memory_parser("--quick" in arguments)
    parser.set_defaults({"mode": "train_step", **(memory.QUICK if "--quick" in arguments else {})})
    options = vars(parse(parser, arguments))
    for name in ("detail", "min_bytes", "warmup"):
        if options[name] < 0:
            raise ValueError(f"{name} is {options[name]}: it must be at least 0")
    workload = {field.name: options[field.name] for field in dataclasses.fields(Workload)}
    folder, drawn = Path(options["out"]), dict(detail=options["detail"], min_bytes=options["min_bytes"])
    if options["snapshot"] is not None:
        _refuse_workload(parser, {**workload, "warmup": options["warmup"]})
        row = memory.draw(Path(options["snapshot"]), folder, **drawn)
    else:
        if not options["quick"]:
            check_sized_for_gpu("profile memory", options["device"])
        row = memory.profile(Workload(**workload), folder, options["warmup"], **drawn)
    from .report.memory_tables import memory_summary

    (folder / memory.SUMMARY_FILE).write_text(memory_summary(row) + "\n", encoding="utf-8")
    say(memory_summary(row))
    if row.metrics:
        say(f"\nto look at: {folder / memory.PAGE_FILE} (any browser), {folder / memory.PICTURE_FILE}; this text is in "
            f"{folder / memory.SUMMARY_FILE}, its numbers in {folder / memory.ROWS_FILE}")  # fmt: skip
    return 0


def _memory_parser(is_quick: bool) -> Any:
    from .bench.workload import Workload

    parser = make_parser("profile memory", "What fills memory over a forward pass or a training step, and when.")
    parser.add_class_arguments(Workload)
    parser.add_argument("--warmup", type=int, default=2, help="Steps before the recorded one.")
    add_folder(parser, "profile/memory", is_quick, "Folder for all that is written")
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


_TOOLS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "kernels": (_kernels, "where the time goes, kernel by kernel"),
    "memory": (_memory, "what fills memory, and when"),
}
