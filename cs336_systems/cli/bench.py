"""`cs336 bench CASE`: measures configurations, appends their rows to a file, and makes tables and plots."""

import contextlib
import dataclasses
import functools
from argparse import SUPPRESS
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.checks import folder_to_write
from ..machine.console import ended_in_order, say
from .arguments import make_parser, parse

if TYPE_CHECKING:  # PyTorch is imported only to measure, so that --help is fast
    from ..bench.case import Case
    from ..bench.row import Row

_HELP = """\
usage: cs336 bench CASE [--quick] [--FIELD VALUE ...]

Measure every combination of the values given. Each measurement is a row in
runs/bench/CASE.jsonl. First try: cs336 bench model --quick
{}

`cs336 bench CASE --help` lists the fields of a case. --quick is a tiny run,
seconds on a CPU."""


def bench(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code. Raises ValueError for wrong arguments."""
    from ..bench.cases import CASES, GROUPS, get_case

    if arguments and arguments[0] in CASES:
        return _run(get_case(arguments[0]), arguments[1:])
    if named := [word for word in arguments if word in CASES]:
        raise ValueError(f"case is {named[0]!r}: it must come before the options, as in cs336 bench {named[0]} --quick")
    table = "\n".join(
        f"\n{subject}:\n" + "\n".join(f"  {name:<22}  {about}" for name, (_, about) in group.items())
        for subject, group in GROUPS.items()
    )
    parser = make_parser("bench", "Measure, and write one row per measurement.", lambda _: _HELP.format(table))
    parser.add_argument("case", choices=[*CASES, "list"])
    parse(parser, arguments)
    say(table.strip())
    return 0


def asked(case: "Case", command: str, options: Any) -> list[Any]:
    """The configurations that the options of `case_parser` ask for. Raises ValueError naming a wrong value."""
    from ..bench.case import check_sized_for_gpu, configurations

    fields = dataclasses.fields(case.config)
    given: dict[str, tuple[Any, ...]] = {}
    for field in fields:
        if (values := getattr(options, field.name, None)) is not None:
            given[field.name] = tuple(values) or (True,)
    # A case whose quick run uses a CPU has default sizes for a GPU.
    if not options.quick and any(f.name == "device" and "cpu" in f.metadata.get("quick", ()) for f in fields):
        for device in given.get("device", ("auto",)):
            check_sized_for_gpu(command, device)
    for field in fields:
        if field.name in given and (parse_value := field.metadata.get("parse")):
            given[field.name] = tuple(map(parse_value, given[field.name]))
    beside = {field.name: str(Path(options.out, field.metadata["beside"])) for field in fields
              if field.metadata.get("beside") and field.name not in given}  # fmt: skip
    return configurations(case, given, options.sweep, options.quick, beside)


def _run(case: "Case", arguments: Sequence[str]) -> int:
    from ..bench.case import differing, is_of
    from ..bench.cases import CASES
    from ..bench.row import exit_code, read_rows
    from ..bench.runner import rows_on_this_gpu
    from ..planner.rows import naming
    from ..report.outputs import write_into
    from ..report.views import rows_table, write_views

    command = f"bench {case.name}"
    is_quick, about = "--quick" in arguments, f"Measure {CASES[case.name][1]}."
    parser = case_parser(case, command, "bench", "Folder of rows, tables and plots", is_quick, about)
    options = parse(parser, arguments)
    configs = asked(case, command, options)
    folder = folder_to_write(options.out)
    path = folder / f"{case.name}.jsonl"
    say(f"{len(configs)} to measure; rows go to {path} as they come")
    rows = measure(case, configs, path, options)
    known = [row for row in read_rows(path) if row.case == case.name] if path.exists() else []
    there = rows_on_this_gpu(case, path) if options.resume else known
    wanted = [row for row in there if any(is_of(row, config) for config in configs)]
    swept = differing(configs)
    with naming(str(path)):
        say(f"\n{rows_table(wanted or rows, swept)}\n")
    if options.quick:
        say("A quick run shows that it works; its times mean little.")
    if known:
        write = naming(str(path))(write_views)
        files = ", ".join(map(str, write_into(folder, lambda to: write(known, to, swept))))
        say(f"All rows ({len(known)}) are in {path}; their tables and plots: {files}")
    return exit_code(rows)


def measure(case: "Case", configs: Sequence[Any], path: Path, options: Any) -> list["Row"]:
    """Run the case and print each row as it comes."""
    from ..bench.case import describe_among
    from ..bench.runner import run_case

    describe, rows = describe_among(configs), []
    isolated = False if options.quick else None
    with ended_in_order(), _progress_bar() as progress:
        measuring = run_case(case, configs, path, resume=options.resume, isolated=isolated, progress=progress)
        try:
            for row in measuring:
                rows.append(row)
                say(f"{describe(row.config) or row.variant}: {row.status} {row.error or ''}".strip() + _disturbed(row))
        except KeyboardInterrupt:
            there = f"stopped; the rows so far are in {path}, and --resume goes on from there"
            say(there if path.exists() else "stopped; there are no rows yet")
            raise
    return rows


def _disturbed(row: "Row") -> str:
    """A warning to print after a row if the state of its GPU makes the times doubtful."""
    before, after = (row.env.get(name, {}) for name in ("gpu_before", "gpu_after"))
    slowed = ", ".join(after.get("slowed_by", []))
    others = max(state.get("other_processes", 0) for state in (before, after))
    text = f"; the GPU was slowed by {slowed}" if slowed else ""
    return text + (f"; other processes on the GPU, which take its time: {others}" if others else "")


def case_parser(case: "Case", command: str, folder: str, help: str, is_quick: bool, about: str = "") -> Any:
    """The parser of a command that measures a case and writes to `--out`, usually `runs/FOLDER`."""
    from ..bench.case import value_type

    config: Any = case.config
    parser, help_texts = make_parser(command, about), _help_texts(config)
    for field in dataclasses.fields(config):
        if field.metadata.get("beside") == ".":  # the folder itself, which is --out
            continue
        quick = field.metadata.get("quick") if is_quick else ()
        values = " ".join("x".join(map(str, value)) if isinstance(value, tuple) else str(value)
                          for value in quick or field.metadata.get("values", (field.default,)))  # fmt: skip
        text = help_texts.get(field.name) or field.name
        text += "" if "(default:" in text or values in ("None", "") else f" (default: {values})"
        kind = str if field.metadata.get("parse") else value_type(case, field.name)
        options = [f"--{name}" for name in (field.name, field.metadata.get("also")) if name]
        count = "*" if kind is bool else "+"  # true, if no value is given
        parser.add_argument(*options, nargs=count, type=kind, default=SUPPRESS, help=text)
    swept = "Fields to measure at all their usual values instead of the default."
    parser.add_argument("--sweep", nargs="+", type=str, default=[], help=swept)
    parser.add_argument("--quick", action="store_true", help="A tiny run, seconds on a CPU; other options override it.")
    resume = "Skip configurations that the row file, or one of the same name in a folder below, already has."
    parser.add_argument("--resume", action="store_true", help=resume)
    usual, quick = f"runs/{folder}", f"runs/quick/{folder}"  # to keep the two apart
    parser.add_argument("--out", type=str, default=quick if is_quick else usual, help=f"{help}; with --quick {quick}.")
    return parser


@functools.cache  # reading the help from the docstrings takes most of the time of a parse
def _help_texts(config: type) -> dict[str, str | None]:
    """What the docstrings of a configuration's class and of its bases say about each field."""
    from docstring_parser import parse_from_object

    return {param.arg_name: param.description for cls in config.__mro__[::-1] if cls is not object
            for param in parse_from_object(cls).params}  # fmt: skip


@contextlib.contextmanager
def _progress_bar() -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar with the time left, on a terminal only; yields the function that updates it."""
    import rich
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = rich.get_console()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, count, label: bar.update(task, completed=done, total=count, description=label)
