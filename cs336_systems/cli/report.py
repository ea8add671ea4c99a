"""`cs336 report`: tables, plots and documents from runs and row files. Reads arguments and calls `report/`."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..config.checks import folder_to_write, require, shown
from .arguments import make_parser, parse

_OPTIONS = {
    "plot": (("runs", "streams"), "also draw them into this PNG."),
    "results": (("writeup",), "folder of rows (default: results)."),
    "links_from": (
        ("writeup",),
        "the folder from which links to row files start, if the document will be moved (default: --out).",
    ),
    "out": (
        ("tables", "headline", "writeup"),
        "the folder to write to (default: runs/tables or runs/writeup; headline then draws no pictures). Files that no "
        "report wrote are not replaced.",
    ),
    "card": (("writeup",), "the GPU whose rows are preferred, as rows name it (default: the one with the most rows)."),
    "name": (("writeup",), "your name, for the title."),
    "date": (("writeup",), "a date, for the title."),
    "problems": (("writeup",), "a folder with your own templates, named as ours. They replace ours."),
    "eject": (("writeup",), "only copy our templates into this folder, where you can change them for --problems."),
    "full": (("writeup",), "put the tables of all rows into the PDF too."),
    "measure": (
        ("writeup",),
        "first measure the rows that are missing. This needs a GPU and an hour or more; a second call continues.",
    ),
}
"""Options of `cs336 report`: the reports that take each, and its help."""
_FLAGS = ("full", "measure")


def report(arguments: Sequence[str]) -> int:
    """Run `cs336 report` and return its exit code."""
    print(make_report(arguments))
    return 0


def make_report(arguments: Sequence[str]) -> str:
    """The text that `cs336 report ARGUMENTS` prints. `update` puts such texts into documents."""
    options = _options(arguments)
    if options.measure:
        from ..assignment.measure import check_gpu

        check_gpu()
    from ..report.documents import update_documents
    from ..report.headline import headline, write_pictures
    from ..report.outputs import write_into
    from ..report.run_folders import plot_runs, runs_table, summary_block
    from ..report.step_streams import plot_streams, streams_table
    from ..report.views import rows_table, show_files, write_views

    out = Path(f"runs/{options.what}" if options.out is None else options.out)
    if options.what in ("tables", "writeup") or options.out is not None:
        folder_to_write(options.out if options.out is not None else str(out))
    paths = [Path(path) for path in options.paths]
    match options.what:
        case "writeup":
            return _writeup(options, out)
        case "update":
            return "\n".join(update_documents(paths, make_report))
        case "summary":
            return "\n\n".join(map(summary_block, paths))
        case "rows":
            return show_files(paths, rows_table)
        case "tables":
            written = write_into(out, lambda folder: show_files(paths, lambda rows: write_views(rows, folder)))
            return "\n".join(map(str, written))
        case "headline":
            table = headline(paths)
            if options.out is None:
                return table
            return "\n".join([table, "", *map(str, write_into(out, lambda folder: write_pictures(paths, folder)))])
    make_table, plot = (streams_table, plot_streams) if options.what == "streams" else (runs_table, plot_runs)
    text = make_table(paths)
    if options.plot is not None:
        plotted = Path(options.plot)
        is_png = plotted.suffix.lower() in ("", ".png") and not plotted.is_dir()  # another name: of another file
        require(is_png, "plot", options.plot, "a PNG file (.png)")
        folder_to_write(str(plotted.parent), "the folder of plot")
        plot(paths, plotted)
        text += f"\n\n{plotted}"
    return text


def _options(arguments: Sequence[str]) -> Any:
    """Parse arguments. Raises ValueError for a path or an option that the report does not take."""
    parser = make_parser("report", "Tables, plots and documents from runs and measurements.")
    parser.add_argument(
        "what",
        choices=["runs", "rows", "tables", "headline", "streams", "summary", "update", "writeup"],
        help="runs: a table of run folders. rows: tables of row files (.jsonl). tables: the same in --out, with CSV "
        "and plots. headline: measurements beside a peer's from the same run; with --out also two pictures. streams: "
        "overlap of the GPU's streams in a step of cs336 bench ddp --traces. summary: the end of a run. update: "
        "regenerate the tables in Markdown documents. writeup: answers to the handout's problems, with figures from "
        "the row files in --results, as Markdown, HTML and PDF in --out.",
    )
    parser.add_argument("paths", nargs="*", type=str, help="Run folders, row files or documents; none with writeup.")
    for name, (used, text) in _OPTIONS.items():
        kind: dict[str, Any] = {"action": "store_true"} if name in _FLAGS else {"type": str, "default": None}
        parser.add_argument(f"--{name}", help=f"With {' or '.join(used)}: {text}", **kind)
    options = parse(parser, arguments)
    if bool(options.paths) is (options.what == "writeup"):
        accepted = "left out with writeup" if options.paths else f"given with {options.what}"
        raise ValueError(f"paths is {options.paths}: it must be {accepted}")
    for name, (used, _) in _OPTIONS.items():
        if (value := getattr(options, name)) not in (None, False) and options.what not in used:
            raise ValueError(f"{name} is {shown(value)}: it must be left out with {options.what}")
    return options


def _writeup(options: Any, out: Path) -> str:
    from rich.console import Console

    from ..assignment.build import WriteUp, build, eject, write
    from ..assignment.measure import measure_missing
    from ..report.outputs import write_into

    if options.eject is not None:
        folder_to_write(options.eject, "eject")
        return "\n".join(map(str, write_into(Path(options.eject), eject)))
    results = Path("results" if options.results is None else options.results)
    problems = None if options.problems is None else Path(options.problems)
    links_from = out if options.links_from is None else Path(options.links_from)

    def made(folder: Path) -> WriteUp:
        with Console(stderr=True).status("") as status:
            return build(results, folder, problems, options.card, links_from, lambda name: status.update(name))

    def writeup() -> list[Path | str]:
        byline = (options.name or "", options.date or "")
        return write_into(out, lambda folder: write(made(folder), folder, byline, options.full))

    def missing() -> list[str]:
        with TemporaryDirectory(prefix="cs336-") as folder:
            return made(Path(folder)).missing

    failed: list[str] = []
    # Measuring takes hours, so first try whether the write-up can be made, if there is a folder of rows.
    written = writeup() if results.is_dir() or not options.measure else []
    if options.measure:
        failed = measure_missing(results, missing)
        written = writeup()
    return "\n".join(map(str, [*written, *(f"not measured, see above: {each}" for each in failed)]))
