"""Builds the write-up: fills the problems' templates and writes Markdown, HTML and PDF."""

import contextlib
import os
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
import torch
from jinja2.ext import Extension

from ..bench.row import Row
from ..machine.files import write_whole
from ..machine.hardware import gpu_name
from ..report.fields import faster
from ..report.markdown import markdown_table
from ..report.selection import OUTCOMES, machine
from ..report.views import rows_table
from .figures import FORMATS, ClaimError, Fields, Figures, NoRows, Source, beside, compared, plan, working
from .pictures import Pictures, styled

TITLE = "CS336 Assignment 2: systems"
TEMPLATES = Path(__file__).parent / "problems"
MARKDOWN, HTML, PDF = "writeup.md", "writeup.html", "writeup.pdf"
SECTIONS: dict[str, tuple[str, ...]] = {
    "Profiling and benchmarking": (
        "benchmarking_script",
        "nsys_profile",
        "mixed_precision_accumulation",
        "benchmarking_mixed_precision",
        "memory_profiling",
    ),
    "Attention": (
        "pytorch_attention",
        "torch_compile",
        "flash_forward",
        "flash_backward",
        "flash_benchmarking",
        "leaderboard_2025",
    ),
    "Data parallelism": (
        "distributed_communication_single_node",
        "naive_ddp",
        "naive_ddp_benchmarking",
        "minimal_ddp_flat_benchmarking",
        "ddp_overlap_individual_parameters",
        "ddp_overlap_individual_parameters_benchmarking",
        "ddp_overlap_bucketed",
        "ddp_bucketed_benchmarking",
        "communication_accounting",
    ),
    "Sharded optimizer state": ("optimizer_state_sharding", "optimizer_state_sharding_accounting"),
    "Activation checkpointing and FSDP": ("gradient_checkpointing", "fsdp", "fsdp_accounting"),
    "Parallelism on paper": (
        "alternate_ring_all_reduce",
        "data_parallel_calcs",
        "fsdp_calcs",
        "tp_calcs",
        "fsdp_tp_calcs",
    ),
    "Leaderboard": ("leaderboard_2026",),
}
"""The problems of both editions of the handout, in order."""


@dataclass
class Answer:
    """One problem: its name, its text in Markdown, and the rows that its figures come from."""

    name: str
    text: str
    sources: list[Source]


@dataclass
class WriteUp:
    """The whole document in Markdown, and the full tables of its rows."""

    summary: str
    sections: dict[str, list[Answer]]
    appendix: list[tuple[str, str]]
    """Title and text of each table."""
    missing: list[str]
    """The commands that would measure the rows that are missing."""
    contradictions: list[str]
    """The claims that the rows contradict."""

    def body(self) -> str:
        """The document without title and appendix."""
        parts = [self.summary]
        for section, answers in self.sections.items():
            parts += [f"## {section}", *(f"### {answer.name}\n\n{answer.text}" for answer in answers)]
        return "\n\n".join(parts) + "\n"


class Environment(jinja2.Environment):
    """Reads `row.copy` as the row's field of that name, also where a dict has a method of the name."""

    missing: list[str]
    """The commands that would measure the rows that queries did not find."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        return obj[attribute] if isinstance(obj, dict) and attribute in obj else super().getattr(obj, attribute)


class PartTag(Extension):
    """`{% part %} ... {% endpart %}`: becomes a box with the command to run if a query inside finds no rows."""

    tags = {"part"}  # noqa: RUF012 (declared in jinja2)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endpart",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_part"), [], [], body).set_lineno(line)

    def _part(self, caller: Callable[[], str]) -> str:
        try:
            return caller()
        except NoRows as missing:
            return f"\n{_box(self.environment, missing)}\n\n"


def build(
    results: Path,
    out: Path,
    problems: Path | None = None,
    card: str | None = None,
    links_from: Path | None = None,
    say: Callable[[str], None] = print,
) -> WriteUp:
    """Fill the templates with the rows below `results`; pictures go into `out`.

    problems: a folder whose templates replace ours. card: as in `Figures`. links_from: the folder from which links to
    row files start (default: out). say: is told each problem's name before it is filled.
    Raises ValueError naming the template for a mistake in it, `problems` if no file there is named as a template, or
    `card` if it has no rows.
    """
    if problems and not any((problems / template.name).is_file() for template in TEMPLATES.iterdir()):
        raise ValueError(
            f"problems is {str(problems)!r}: no file there is named as one of our templates; --eject makes them"
        )
    figures, start = Figures(results, card), out if links_from is None else links_from
    if card is not None and card not in figures.machines:
        known = ", ".join(figures.machines)
        accepted = f"one of {known}, or left out" if known else f"left out, because {results} has no rows"
        raise ValueError(f"card is {card!r}: it must be {accepted}")
    pictures = Pictures(out)
    env = environment(figures, pictures, [*([problems] if problems else []), TEMPLATES])

    def filled(name: str) -> str:
        figures.begin(name)
        pictures.problem = name
        return fill(env, name)

    sections: dict[str, list[Answer]] = {}
    with styled():
        for section, names in SECTIONS.items():
            for name in names:
                say(name)
                text, sources = filled(name), _unique(figures.used)
                sections.setdefault(section, []).append(Answer(name, text + _measured_by(sources, start), sources))
        summary = filled("summary")
    used = _unique(source for answers in sections.values() for answer in answers for source in answer.sources)
    return WriteUp(summary, sections, _appendix(used, start), env.missing, figures.contradictions)


def _unique(sources: Iterable[Source]) -> list[Source]:
    return [*{id(source): source for source in sources}.values()]


def environment(figures: Figures, pictures: Pictures, folders: Sequence[Path]) -> Environment:
    """The functions and filters that templates may use."""
    env = Environment(
        loader=jinja2.FileSystemLoader(folders),
        undefined=jinja2.StrictUndefined,
        extensions=[PartTag, "jinja2.ext.do"],
        trim_blocks=True,
        lstrip_blocks=True,
    )

    env.missing = []

    def evaluate(expression: str) -> Callable[[Fields], Any]:
        compiled = env.compile_expression(expression, undefined_to_none=False)
        return lambda row: compiled(**row)

    def table(rows: Sequence[Fields], columns: Mapping[str, str], left: int = 1) -> str:
        """A line for each row. columns: header -> expression over the row's fields; "-" where a row lacks a field.

        The first such cell of a run that failed says how it ended.
        """
        cells = {header: evaluate(expression) for header, expression in columns.items()}
        lines = [[_cell(text, row) for text in cells.values()] for row in rows]
        for row, line in zip(rows, lines, strict=True):
            for at in [i for i, cell in enumerate(line) if cell == OUTCOMES.get(row["status"])][1:]:
                line[at] = "-"
        return markdown_table([*cells], lines, left=left)

    def grid(rows: Sequence[Fields], down: str, across: str, value: str, corner: str = "") -> str:
        """A table of one value by two fields: a line for each value of `down`, a column for each of `across`."""
        of_line, of_column, of_cell = map(evaluate, (down, across, value))
        columns = [*dict.fromkeys(str(of_column(row)) for row in rows)]
        cells: dict[str, dict[str, str]] = {}
        for row in rows:
            cells.setdefault(str(of_line(row)), {})[str(of_column(row))] = _cell(of_cell, row)
        lines = [[name, *(line.get(column, "-") for column in columns)] for name, line in cells.items()]
        return markdown_table([corner or down, *columns], lines)

    def values(rows: Sequence[Fields], expression: str) -> list[Any]:
        """An expression over each row's fields, without the rows that lack a field, or fail `VALUE if CONDITION`."""
        found, value = [], evaluate(expression)
        for row in rows:
            with contextlib.suppress(jinja2.UndefinedError):
                found.append(value(row))
        return [each for each in found if not isinstance(each, jinja2.Undefined)]

    env.filters |= FORMATS
    env.globals |= {
        **FORMATS,
        "rows": figures.rows,
        "every": figures.every,
        "row": figures.row,
        "launch": figures.launch,
        "claim": figures.claim,
        "card": figures.card,
        "here": gpu_name() or f"CPU, {torch.get_num_threads()} threads",
        "faster": faster,
        "compared": compared,
        "table": table,
        "grid": grid,
        "values": values,
        "beside": beside,
        "plan": plan,
        "working": working,
        "lines": lambda rows, x, y, *text, **options: pictures.lines(rows, evaluate(x), evaluate(y), *text, **options),
        **{name: getattr(pictures, name) for name in ("shares", "stacks", "streams", "timelines")},
        "max": max,
        "min": min,
    }
    return env


def fill(env: Environment, name: str) -> str:
    """A template's text. Raises ValueError naming the template and line for a mistake in it."""
    try:
        return env.get_template(f"{name}.md").render().strip()
    except NoRows as missing:
        return _box(env, missing)
    except (ArithmeticError, LookupError, TypeError, ValueError, jinja2.TemplateError) as error:
        lines = traceback.extract_tb(error.__traceback__)
        places = [(line.filename, line.lineno) for line in lines if line.filename.endswith(f"{name}.md")]
        if isinstance(error, jinja2.TemplateSyntaxError) and error.filename:
            places = [(error.filename, error.lineno)]
        place = "{}, line {}".format(*places[-1]) if places else f"{name}.md"
        text = error.message if isinstance(error, jinja2.TemplateError) else error
        raise ValueError(f"{place}: {text}") from error


def _box(env: Any, missing: NoRows) -> str:
    env.missing.append(str(missing))
    return f"> **Not measured yet.** Measure it with `{missing}`."


def eject(folder: Path) -> list[Path]:
    """Copy the templates into a folder, where a reader can change them; return their paths."""
    templates = sorted(TEMPLATES.glob("*.md"))
    for template in templates:
        write_whole(folder / template.name, template.read_bytes())
    return [folder / template.name for template in templates]


def write(document: WriteUp, out: Path, byline: tuple[str, str] = ("", ""), full: bool = False) -> list[Path | str]:
    """Write the document as Markdown, HTML and PDF; return the files, or a reason instead of the PDF.

    byline: the author's name and the date. full: with the appendix in the PDF.
    Raises ClaimError if the rows contradict claims.
    """
    if document.contradictions:
        found = "; ".join(document.contradictions)
        raise ClaimError(f"the rows contradict {len(document.contradictions)} claims of the templates: {found}")
    from .html import html_page
    from .typeset import NO_TYPST, to_typst, write_pdf

    tables = (f"### {title}\n\n{text}" for title, text in document.appendix)
    appendix = "\n\n".join(["## Appendix: all rows", *tables]) + "\n"
    write_whole(out / MARKDOWN, f"# {TITLE}\n\n{document.body()}\n{appendix}")
    line = ", ".join(filter(None, byline))
    write_whole(out / HTML, html_page(TITLE, line, document.body(), document.appendix, out))
    try:
        typst = to_typst(TITLE, *byline, f"{document.body()}\n{appendix}" if full else document.body())
        write_pdf(typst, out, out / PDF)
    except ModuleNotFoundError as error:
        if error.name != "typst":
            raise
        return [out / MARKDOWN, out / HTML, NO_TYPST]
    return [out / MARKDOWN, out / HTML, out / PDF]


def _cell(text: Callable[[Fields], Any], row: Fields) -> str:
    try:
        return str(text(row))
    except (jinja2.UndefinedError, TypeError):
        return "-" if row["status"] == "ok" else OUTCOMES[row["status"]]


def _measured_by(sources: Sequence[Source], start: Path) -> str:
    """A line that names the machines and the files of an answer's rows."""
    if not sources:
        return ""
    machines = ", ".join(dict.fromkeys(machine(source.row) for source in sources))
    files = ", ".join(_link(path, start) for path in dict.fromkeys(source.path for source in sources))
    return f"\n\n*Measured on {machines}; rows in {files}.*"


def _link(path: Path, start: Path) -> str:
    return f"[{path.parent.name}/{path.name}]({quote(os.path.relpath(path, start))})"


def _appendix(sources: Sequence[Source], start: Path) -> list[tuple[str, str]]:
    """A full table for each case and file, with the commands, commits and machine behind it."""
    files: dict[tuple[str, Path], list[Row]] = {}
    for source in sources:
        files.setdefault((source.row.case, source.path), []).append(source.row)
    tables = []
    for (case, path), rows in sorted(files.items()):
        commands = dict.fromkeys(f"`{row.env['command']}`" for row in rows if "command" in row.env)
        commits = ", ".join(dict.fromkeys(f"`{row.env['commit']}`" for row in rows if "commit" in row.env))
        facts = [f"Rows: {_link(path, start)}; {machine(rows[0])}; commit {commits}."]
        facts += [f"Measured by {', '.join(commands)}."] if commands else []
        tables.append((f"{case}: {path.parent.name}", "\n\n".join([rows_table(rows), *facts])))
    return tables
