"""`cs336 profile`: profiles the kernels or the memory of a step, writes files, and prints their tables."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.checks import folder_to_write, require
from ..machine.console import say
from .arguments import Commands, add_folder, make_parser, parse, run_subcommand

if TYPE_CHECKING:  # these bring PyTorch and are imported only to profile, so that --help is fast
    from ..bench.profiling.isolated_profile import IsolatedProfile
    from ..bench.profiling.kernel_profile import KernelProfile, Tool
    from ..bench.profiling.kernel_totals import KernelTotal
    from ..bench.row import Row
    from ..bench.workload import Workload


def profile(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code. Raises ValueError for wrong arguments."""
    return run_subcommand("profile", "Profile a forward pass or a training step.", _COMMANDS, arguments)


def _kernels(arguments: Sequence[str]) -> int:
    from ..bench.case import check_sized_for_gpu
    from ..bench.profiling import nsys
    from ..bench.profiling.kernel_profile import MODES, QUICK, KernelProfile, profile_with_torch
    from ..bench.row import check_row_file

    parser = make_parser("profile kernels", "The time of a forward pass and a training step, by kernel.")
    _add_workload(parser, "size", "context_length", "precision")
    parser.add_argument(
        "--mode",
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
        "--quick", action="store_true", help="A tiny model, seconds on a CPU; other options override it."
    )
    add_folder(parser, "profile/kernels", "--quick" in arguments, "Folder to write to")
    if "--quick" in arguments:
        parser.set_defaults(**_in_lists(QUICK), warmup=1, steps=1)
    options = parse(parser, arguments)
    if not options.quick:
        check_sized_for_gpu("profile kernels", options.device)
    given = vars(options).copy()
    how = dict(modes=tuple(given.pop("mode")), warmup=options.warmup, steps=options.steps)
    configs = [KernelProfile(workload=each, **how) for each in _workloads(given)]
    tools: dict[str, Tool] = {"torch": profile_with_torch, "nsys": nsys.profile_with_nsys}
    require(options.tool in tools, "tool", options.tool, f"one of {', '.join(tools)}")
    devices = [config.check_device() for config in configs]
    if options.tool == "nsys":
        nsys.check_nsys(devices[0])
    out = folder_to_write(options.out)
    check_row_file(out / "rows.jsonl")
    if len(configs) > 1:
        return _each_kernel_profile(configs, tools[options.tool], out)
    return _one_kernel_profile(configs[0], options.tool, tools[options.tool], out)


def _one_kernel_profile(config: "KernelProfile", name: str, tool: "Tool", out: Path) -> int:
    """Profile in this process, print the tables, and draw the shares; the exit code is as in `bench`."""
    import shlex

    from ..bench.profiling.kernel_profile import measure
    from ..bench.profiling.kernel_totals import KERNELS_FILE, write_kernels
    from ..bench.profiling.nsys import nsys_command
    from ..bench.row import exit_code
    from ..report.kernel_profiles import plot_shares, top_kernels_tables
    from ..report.views import rows_table

    rows: list[Row] = []
    kernels: dict[str, list[KernelTotal]] = {}
    for row, totals in measure(config, out, tool):
        rows.append(row)
        kernels[row.variant] = totals
        say(f"{row.variant}: {row.status} {row.error or ''}".rstrip())
    write_kernels(out / KERNELS_FILE, kernels)
    measured = [row for row in rows if row.status == "ok"]
    for row in measured:
        say(f"\n{top_kernels_tables(row)}")
    say(f"\n{rows_table(rows)}\n")
    (out / "shares.png").unlink(missing_ok=True)  # it may be from an earlier run
    if measured:
        plot_shares(measured, out / "shares.png")
        if not measured[0].config["attention_ranges"]:
            say("attention is split into scores, softmax and values only if it is naive and not compiled")
    if name == "torch":
        for mode in dict.fromkeys(config.modes):
            say(f"the same with Nsight Systems: {shlex.join(nsys_command(config, mode, out))}")
    files = "kernels.csv, shares.png, rows.jsonl and traces (for ui.perfetto.dev) are" if measured else "rows.jsonl is"
    say(f"{files} in {out}")
    return exit_code(rows)


def _each_kernel_profile(configs: "Sequence[KernelProfile]", tool: "Tool", out: Path) -> int:
    from ..bench.profiling.isolated_profile import IsolatedProfile
    from ..bench.profiling.kernel_profile import CASE, profile_alone
    from ..report.kernel_profiles import plot_shares

    profiles = [
        IsolatedProfile(
            case=CASE,
            workload=config.workload_of(mode),
            run=functools.partial(profile_alone, dataclasses.replace(config, modes=(mode,)), tool),
            out=out.resolve(),
        )
        for config in configs
        for mode in dict.fromkeys(config.modes)
    ]

    def draw(row: "Row", folder: Path) -> None:
        if row.status == "ok":
            plot_shares([row], folder / "shares.png")

    return _profile_each(profiles, draw, "kernels.csv, shares.png and a trace")


def _profile_each(profiles: "Sequence[IsolatedProfile]", finish: "Callable[[Row, Path], object]", files: str) -> int:
    """Profile several, print each outcome as it comes and finally a table of all; the exit code is as in `bench`."""
    from ..bench.profiling.isolated_profile import profile_each
    from ..bench.row import exit_code
    from ..report.views import rows_table

    out = profiles[0].out
    say(f"{len(profiles)} to profile, each in a process of its own; rows go to {out / 'rows.jsonl'} as they come")
    rows = []
    for profile, row in profile_each(profiles):
        rows.append(row)
        say(f"{profile.folder.name}: {row.status} {row.error or ''}".rstrip())
        finish(row, profile.folder)
    say(f"\n{rows_table(rows)}\n\n{files} of each are in a folder of its own in {out}")
    return exit_code(rows)


def _memory(arguments: Sequence[str]) -> int:
    from ..bench.case import check_sized_for_gpu
    from ..bench.profiling import memory_profile as memory
    from ..bench.profiling.isolated_profile import IsolatedProfile
    from ..bench.row import exit_code

    is_quick = "--quick" in arguments
    parser = make_parser("profile memory", "The memory of a forward pass or a training step over time.")
    _add_workload(parser, "size", "context_length", "mode", "precision")
    parser.add_argument("--warmup", type=int, default=2, help="Steps before the recorded one.")
    add_folder(parser, "profile/memory", is_quick, "Folder to write to")
    parser.add_argument(
        "--detail", type=int, default=5000, help="Number of the largest allocations to draw one by one."
    )
    parser.add_argument("--min_bytes", type=int, default=0, help="Their minimum size in bytes.")
    parser.add_argument("--snapshot", type=str, default=None, help="Draw this file, on any machine; record nothing.")
    parser.add_argument("--quick", action="store_true", help="A tiny model, seconds on a CPU; options override it.")
    parser.set_defaults(_in_lists({"mode": "train_step", **(memory.QUICK if is_quick else {})}))
    options = vars(parse(parser, arguments))
    for name in ("detail", "min_bytes", "warmup"):
        require(0 <= options[name] < 1 << 63, name, options[name], "at least 0 and below 2^63")
    require(options["snapshot"] != "", "snapshot", "", "a file")
    folder, drawn = Path(options["out"]), dict(detail=options["detail"], min_bytes=options["min_bytes"])
    if options["snapshot"] is not None:
        _refuse_workload(parser, options)
        row = memory.draw(Path(options["snapshot"]), folder, **drawn)
    else:
        if not options["quick"]:
            check_sized_for_gpu("profile memory", options["device"])
        workloads = _workloads(options)
        how: dict[str, Any] = dict(warmup=options["warmup"], **drawn)
        if len(workloads) > 1:
            memory.check_out(folder / memory.ROWS_FILE)
            profiles = [
                IsolatedProfile(
                    case=memory.CASE,
                    workload=each,
                    run=functools.partial(memory.profile, each, **how),
                    out=folder.resolve(),
                )
                for each in workloads
            ]
            files = f"{memory.PAGE_FILE}, {memory.PICTURE_FILE}, {memory.SUMMARY_FILE}"
            return _profile_each(profiles, _write_summary, files)
        row = memory.profile(workloads[0], folder, **how)
    say(_write_summary(row, folder))
    if row.metrics:
        say(f"\nto look at: {folder / memory.PAGE_FILE} (any browser), {folder / memory.PICTURE_FILE}; this text is in "
            f"{folder / memory.SUMMARY_FILE}, its numbers in {folder / memory.ROWS_FILE}")  # fmt: skip
    return exit_code([row])


def _write_summary(row: "Row", folder: Path) -> str:
    from ..bench.profiling.memory_profile import SUMMARY_FILE
    from ..report.memory_profiles import memory_summary

    text = memory_summary(row)
    (folder / SUMMARY_FILE).write_text(text + "\n", encoding="utf-8")
    return text


def _refuse_workload(parser: Any, options: dict[str, Any]) -> None:
    from ..bench.workload import Workload

    for name in (*(field.name for field in dataclasses.fields(Workload)), "warmup"):
        if (value := options[name]) != parser.get_default(name):
            given = value[0] if isinstance(value, list) and len(value) == 1 else value
            raise ValueError(f"{name} is {given!r}: with snapshot nothing is run, so it must be left out")


def _add_workload(parser: Any, *several: str) -> None:
    """Add a workload's fields as options, except SEVERAL. Add the fields in `several` with one or more values."""
    from docstring_parser import parse_from_object

    from ..bench.profiling.isolated_profile import SEVERAL
    from ..bench.workload import Workload

    parser.add_class_arguments(Workload, skip=set(SEVERAL))
    told = {param.arg_name: param.description for param in parse_from_object(Workload).params}
    defaults = {field.name: field.default for field in dataclasses.fields(Workload)}
    for name in several:
        default = defaults[name]
        parser.add_argument(
            f"--{name}", nargs="+", type=type(default), default=[default], help=f"{told[name]} One or more values."
        )


def _in_lists(defaults: dict[str, Any]) -> dict[str, Any]:
    """Defaults in the form of the options of `_add_workload`: lists for the fields in SEVERAL."""
    from ..bench.profiling.isolated_profile import SEVERAL

    return {name: [value] if name in SEVERAL else value for name, value in defaults.items()}


def _workloads(options: dict[str, Any]) -> "list[Workload]":
    """The workloads of the options: the product over all fields with several values."""
    from ..bench.workload import Workload

    given = {field.name: options[field.name] for field in dataclasses.fields(Workload) if field.name in options}
    values = [value if isinstance(value, list) else [value] for value in given.values()]
    return list(dict.fromkeys(Workload(**dict(zip(given, each, strict=True))) for each in itertools.product(*values)))


_COMMANDS: Commands = {
    "kernels": (_kernels, "the time, kernel by kernel"),
    "memory": (_memory, "the memory over time"),
}
