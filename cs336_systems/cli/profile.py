"""`cs336 profile`: profiles the kernels or the memory of a step, writes files, and prints their tables."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.checks import folder_to_write, require
from ..machine.console import say
from .arguments import Commands, parse, run_subcommand
from .bench import asked, case_parser, measure

if TYPE_CHECKING:  # these bring PyTorch and are imported only to profile, so that --help is fast
    from ..bench.case import Case
    from ..bench.row import Row

_NAMED_BY = ("size", "context_length", "mode", "precision")
ROWS_FILE = "rows.jsonl"


def profile(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code. Raises ValueError for wrong arguments."""
    return run_subcommand("profile", "Profile a forward pass or a training step.", _COMMANDS, arguments)


def _kernels(arguments: Sequence[str]) -> int:
    from ..bench.profiling.kernel_profile import CASE
    from ..report.kernel_profiles import plot_shares

    is_quick, about = "--quick" in arguments, "The time of a forward pass and a training step, by kernel."
    parser = case_parser(CASE, "profile kernels", "profile/kernels", "Folder to write to", is_quick, about)
    options = parse(parser, arguments)
    configs = asked(CASE, "profile kernels", options)
    several = len({dataclasses.replace(config, mode="forward") for config in configs}) > 1
    configs = _into_folders(configs, Path(options.out), several)
    folders = {Path(config.folder) for config in configs}
    rows_file = folder_to_write(options.out) / ROWS_FILE
    if not options.resume:
        for folder in folders:
            for name in ("shares.png", *(f"trace_{config.mode}.json.gz" for config in configs)):
                (folder / name).unlink(missing_ok=True)  # of an earlier run, which this one may fail to replace
    rows = _measured(CASE, configs, rows_file, options)
    for folder in folders:
        measured = [row for row in rows if row.status == "ok" and row.config["folder"] == str(folder)]
        if measured:
            plot_shares(measured, folder / "shares.png")
    if several:
        return _finish(rows, f"shares.png and a trace of each are in a folder of its own in {options.out}")
    return _show_kernels(configs, rows)


def _show_kernels(configs: Sequence[Any], rows: "list[Row]") -> int:
    """Print the longest kernels of one workload in each mode; return the exit code."""
    import shlex

    from ..bench.profiling.nsys import nsys_command
    from ..report.kernel_profiles import top_kernels_tables

    measured = [row for row in rows if row.status == "ok"]
    for row in measured:
        say(f"\n{top_kernels_tables(row)}")
    if measured and not measured[0].config["attention_ranges"]:
        say("attention is split into scores, softmax and values only if it is naive and not compiled")
    for config in configs:
        if config.tool == "torch" and config.device != "cpu":
            say(f"the same with Nsight Systems: {shlex.join(nsys_command(config))}")
    files = "shares.png, rows.jsonl and traces (for ui.perfetto.dev) are" if measured else "rows.jsonl is"
    return _finish(rows, f"{files} in {configs[0].folder}")


def _memory(arguments: Sequence[str]) -> int:
    from ..bench.profiling.memory_profile import CASE, PAGE_FILE, PICTURE_FILE, SUMMARY_FILE, draw
    from ..bench.row import append_row, exit_code
    from ..machine.files import write_whole
    from ..report.memory_profiles import memory_summary

    is_quick, about = "--quick" in arguments, "The memory of a forward pass or a training step over time."
    parser = case_parser(CASE, "profile memory", "profile/memory", "Folder to write to", is_quick, about)
    parser.add_argument("--snapshot", type=str, default=None, help="Draw this file, on any machine; record nothing.")
    options = parse(parser, arguments)
    out, files = Path(options.out), f"{PAGE_FILE} (any browser), {PICTURE_FILE} and {SUMMARY_FILE}"
    several = False
    if options.snapshot is None:
        configs = asked(CASE, "profile memory", options)
        several = len(configs) > 1
        rows_file = folder_to_write(options.out) / ROWS_FILE
        rows = _measured(CASE, _into_folders(configs, out, several), rows_file, options)
        folders = [Path(row.config["folder"]) for row in rows]
    else:
        require(options.snapshot != "", "snapshot", "", "a file")
        for name in (field.name for field in dataclasses.fields(CASE.config)):
            if values := getattr(options, name, None):
                given = values[0] if len(values) == 1 else values
                raise ValueError(f"{name} is {given!r}: with snapshot nothing is run, so it must be left out")
        rows, folders = [draw(Path(options.snapshot), out)], [out]
        append_row(folder_to_write(options.out) / ROWS_FILE, rows[0])
    for row, folder in zip(rows, folders, strict=True):
        write_whole(folder / SUMMARY_FILE, memory_summary(row) + "\n")
    if several:
        return _finish(rows, f"{files} of each are in a folder of its own in {out}")
    for row, folder in zip(rows, folders, strict=True):
        say(f"{memory_summary(row)}\n\nto look at: {files} in {folder}; the numbers are in {out / ROWS_FILE}")
    return exit_code(rows)


def _measured(case: "Case", configs: Sequence[Any], rows_file: Path, options: Any) -> "list[Row]":
    """Measure, and return a row of each configuration; with --resume also those that the file had."""
    from ..bench.case import is_of
    from ..bench.runner import rows_on_this_gpu

    rows = measure(case, configs, rows_file, options)
    there = rows_on_this_gpu(case, rows_file) if options.resume else rows
    there.sort(key=lambda row: row.status != "error")  # the last one counts below, an error only if there is no other
    return list({config: row for config in configs for row in there if is_of(row, config)}.values())


def _into_folders(configs: Sequence[Any], out: Path, several: bool) -> list[Any]:
    """The configurations with their folders: `out`, or if there are several, one each below it."""
    from ..bench.case import differing

    if not several:
        return list(configs)
    names = [*_NAMED_BY, *(name for name in differing(configs) if name not in _NAMED_BY)]
    folders = ["-".join(str(getattr(config, name)) for name in names) for config in configs]
    return [dataclasses.replace(each, folder=str(out / name)) for each, name in zip(configs, folders, strict=True)]


def _finish(rows: "list[Row]", files: str) -> int:
    """Print the table of all rows and the place of the files; return the exit code."""
    from ..bench.row import exit_code
    from ..report.views import rows_table

    if rows:
        say(f"\n{rows_table(rows)}\n")
    say(files)
    return exit_code(rows)


_COMMANDS: Commands = {
    "kernels": (_kernels, "the time, kernel by kernel"),
    "memory": (_memory, "the memory over time"),
}
