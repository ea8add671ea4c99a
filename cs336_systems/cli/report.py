"""`cs336 report`: tables, plots and documents from runs and row files. Reads arguments and calls `report/`."""

from collections.abc import Sequence
from pathlib import Path

from ..config.checks import folder_to_write, require, shown
from .arguments import check_png, make_parser, parse

_OPTIONS = {
    "plot": ("runs", "streams"),
    "out": ("tables", "headline", "writeup"),
    "results": ("writeup",),
    "links_from": ("writeup",),
    "measure": ("writeup",),
}
"""Options of `cs336 report`, and the reports that take each."""


def report(arguments: Sequence[str]) -> int:
    """Run `cs336 report` and return its exit code."""
    print(make_report(arguments))
    return 0


def make_report(arguments: Sequence[str]) -> str:
    """The text that `cs336 report ARGUMENTS` prints. `update` puts such texts into documents."""
    parser = make_parser("report", "Tables, plots and documents from runs and measurements.")
    parser.add_argument(
        "what",
        choices=["runs", "rows", "tables", "headline", "streams", "summary", "update", "writeup"],
        help="runs: a table of run folders. rows: tables of row files (.jsonl). tables: the same in --out, with CSV "
        "and plots. headline: measurements beside a peer's from the same run; with --out also two pictures. streams: "
        "overlap of the GPU's streams in a step of cs336 bench ddp --traces. summary: the end of a run. update: "
        "regenerate the tables in Markdown documents. writeup: answers to the handout's problems, from the row files "
        "in --results, as Markdown, HTML and PDF in --out.",
    )
    parser.add_argument("paths", nargs="*", type=str, help="Run folders, row files or documents; none with writeup.")
    parser.add_argument("--plot", type=str, default=None, help="With runs or streams: also draw them into this PNG.")
    parser.add_argument("--results", type=str, default=None, help="With writeup: folder of rows (default: results).")
    parser.add_argument(
        "--links_from",
        type=str,
        default=None,
        help="With writeup: the folder from which links to row files start, if the document will be moved (default: "
        "--out).",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="With writeup: first measure the rows that the folder lacks. This needs a GPU and an hour or more; a "
        "second call continues.",
    )
    parser.add_argument(
        "--out",
        type=str,
        default=None,
        help="Folder to write to (default: runs/tables for tables, runs/writeup for writeup, no pictures for "
        "headline). Files that no report wrote are not replaced.",
    )
    options = parse(parser, arguments)
    if bool(options.paths) is (options.what == "writeup"):
        accepted = "left out with writeup" if options.paths else f"given with {options.what}"
        raise ValueError(f"paths is {options.paths}: it must be {accepted}")
    for name, used in _OPTIONS.items():
        if (value := getattr(options, name)) not in (None, False) and options.what not in used:
            raise ValueError(f"{name} is {shown(value)}: it must be left out with {options.what}")
    if options.measure:
        from ..report.writeup.measure import check_gpu

        check_gpu()
    from ..report.outputs import write_into

    out = Path(f"runs/{options.what}" if options.out is None else options.out)
    if options.what in ("tables", "writeup") or options.out is not None:
        folder_to_write(options.out if options.out is not None else str(out))
    if options.what == "writeup":
        from ..report.writeup.build import write_writeup
        from ..report.writeup.measure import measure_missing

        require(options.results != "", "results", options.results, "the path of a folder, or left out")
        results = Path("results" if options.results is None else options.results)
        links_from = out if options.links_from is None else Path(options.links_from)

        def write() -> list[Path | str]:
            return write_into(out, lambda folder: write_writeup(results, folder, links_from=links_from))

        written, failed = write(), []
        if options.measure:  # measuring takes hours, so try first whether the report can be written
            failed = measure_missing(results)
            written = write()
        return "\n".join(map(str, [*written, *(f"not measured, see above: {each}" for each in failed)]))
    from ..report.documents import update_documents
    from ..report.headline import headline, write_pictures
    from ..report.streams import plot_streams, streams_table
    from ..report.tables import plot_runs, runs_table, summary_block
    from ..report.views import rows_table, show_files, write_views

    paths = [Path(path) for path in options.paths]
    if options.what == "update":
        return "\n".join(update_documents(paths, make_report))
    if options.what == "summary":
        return "\n\n".join(map(summary_block, paths))
    if options.what == "rows":
        return show_files(paths, rows_table)
    if options.what == "tables":
        return "\n".join(map(str, write_into(out, lambda to: show_files(paths, lambda rows: write_views(rows, to)))))
    if options.what == "headline":
        table = headline(paths)
        drawn = write_into(out, lambda to: write_pictures(paths, to)) if options.out is not None else None
        return table if drawn is None else "\n".join([table, "", *map(str, drawn)])
    text = (streams_table if options.what == "streams" else runs_table)(paths)
    if options.plot is not None:
        check_png("plot", options.plot)
        try:
            (plot_streams if options.what == "streams" else plot_runs)(paths, Path(options.plot))
        except OSError as error:
            where = f"plot is {options.plot!r}: it must be a file that can be written"
            raise ValueError(f"{where} ({error.strerror})") from error
    return text
