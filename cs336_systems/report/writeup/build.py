"""The document: Markdown made of row files, and the files it is written into."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...bench.case import Row, read_rows
from ...planner.working import Section, show
from ..tables import markdown_table
from ..view import machine
from .claims import ClaimError, Evidence
from .problem import Exhibit, Problem
from .problems import PROBLEMS
from .render import html_page
from .typeset import to_typst, write_pdf

TITLE = "CS336 Assignment 2: systems"
PICTURES = "pictures"
MARKDOWN, HTML, PDF = "writeup.md", "writeup.html", "writeup.pdf"
NO_TYPST = f"{PDF} is left out: the package typst is not installed (pip install typst)"


@dataclass(frozen=True)
class RowFile:
    """Rows of a case, and the file that they are in."""

    path: Path
    rows: Sequence[Row]


def find_rows(results: Path) -> dict[str, list[RowFile]]:
    """The files of rows of the cases that problems ask for, anywhere below a folder, by case.

    Raises ValueError where that is no folder, and as `read_rows` does.
    """
    if not results.is_dir():
        raise ValueError(f"results is {str(results)!r}: it must be a folder with row files")
    found: dict[str, list[RowFile]] = {}
    for case in dict.fromkeys(exhibit.case for problem in PROBLEMS for exhibit in problem.exhibits):
        # rows.jsonl is what `cs336 profile` writes.
        paths = [*results.rglob(f"{case}.jsonl"), *results.rglob("rows.jsonl")]
        for path in sorted(paths, key=lambda path: (len(path.parts), path)):
            if rows := [row for row in read_rows(path) if row.case == case]:
                found.setdefault(case, []).append(RowFile(path, rows))
    return found


def write_writeup(results: Path, out: Path, problems: Sequence[Problem] = PROBLEMS) -> list[Path | str]:
    """Write the document into a folder as Markdown, HTML and, where typst is installed, PDF; the files, or why not.

    Raises ClaimError for a sentence that the rows do not bear out.
    """
    files = find_rows(results)
    out.mkdir(parents=True, exist_ok=True)
    text = document(files, out, problems)
    (out / MARKDOWN).write_text(text, "utf-8")
    (out / HTML).write_text(html_page(TITLE, text, out), "utf-8")
    try:
        write_pdf(to_typst(TITLE, text), out, out / PDF)
    except ModuleNotFoundError as error:
        if error.name != "typst":
            raise
        return [out / MARKDOWN, out / HTML, NO_TYPST]
    return [out / MARKDOWN, out / HTML, out / PDF]


def document(files: Mapping[str, Sequence[RowFile]], out: Path, problems: Sequence[Problem] = PROBLEMS) -> str:
    """The document in Markdown; draws its pictures into a folder in `out`."""
    parts = [
        f"# {TITLE}",
        "Every figure, in sentences too, is made of measured rows or of the planner's arithmetic: `cs336 report "
        "writeup` makes this document again. Under each table stand the file of its rows, the command that measures "
        "them, the commit and the machine.",
    ]
    section = ""
    for problem in problems:
        if problem.section != section:
            section = problem.section
            parts.append(f"## {section}")
        parts += problem_parts(problem, files, out)
    return "\n\n".join(parts) + "\n"


def problem_parts(problem: Problem, files: Mapping[str, Sequence[RowFile]], out: Path) -> list[str]:
    """Heading, question, answer, tables and pictures, working and code of a problem."""
    parts = [f"### {problem.name}", f"*{problem.question}*"]
    if answer := answer_of(problem, files):
        parts.append(" ".join(answer))
    for exhibit in problem.exhibits:
        parts += _exhibit_parts(problem, exhibit, files.get(exhibit.case, ()), out)
    if problem.working is not None:
        parts += [_section_text(each) for each in problem.working()]
        parts += [f"Working: `cs336 {problem.plan}`."] if problem.plan else []
    if problem.code:
        parts.append(f"Code: {', '.join(f'`{path}`' for path in problem.code)}.")
    return parts


def answer_of(problem: Problem, files: Mapping[str, Sequence[RowFile]]) -> list[str]:
    """The sentences that there are rows for. Raises ClaimError, and ValueError for rows that lack what one needs."""
    evidence = Evidence(problem.name, {case: [r for file in own for r in file.rows] for case, own in files.items()})
    try:
        said = [each.say(evidence) for each in problem.sentences if all(files.get(case) for case in each.needs)]
    except ClaimError:
        raise
    except (KeyError, TypeError, AttributeError, IndexError, ArithmeticError) as error:
        raise ValueError(f"{problem.name}: a row is not as a sentence needs it: {error!r}") from error
    return [text[0].upper() + text[1:] for text in said if text]


def _exhibit_parts(problem: Problem, exhibit: Exhibit, files: Sequence[RowFile], out: Path) -> list[str]:
    parts = []
    for number, file in enumerate(files):
        rows = [row for row in file.rows if exhibit.keep(row)]
        if not rows:
            continue
        shown = [text] if (text := exhibit.show(rows)) else []
        stem = out / PICTURES / (problem.name if number == 0 else f"{problem.name}-{number + 1}")
        for caption, picture in exhibit.draw(rows, file.path.parent, stem):
            shown.append(f"![{problem.name}: {caption}]({PICTURES}/{picture.name})")
        if shown:
            # Rows of a file beside that of the command are of other settings, which stand above their table.
            command = exhibit.command if number == 0 else " ".join([*exhibit.command.split()[:2], "..."])
            parts += [*shown, _source(file.path, rows, command, out)]
    return parts or [f"Not measured yet; this measures it: `cs336 {exhibit.command}`."]


def _source(path: Path, rows: Sequence[Row], command: str, out: Path) -> str:
    """Where rows are, what measures them, of which commits and machines they are."""
    link = Path(os.path.relpath(path.resolve(), out.resolve())).as_posix()
    commits = dict.fromkeys(str(row.env.get("commit") or "unknown") for row in rows)
    machines = dict.fromkeys(map(machine, rows))
    return (
        f"Rows: [{path.parent.name}/{path.name}]({link}) ({len(rows)}), measured by `cs336 {command}`; "
        f"commit {', '.join(f'`{commit}`' for commit in commits)}; {', '.join(machines)}."
    )


def _section_text(section: Section) -> str:
    """A calculation as a table, with its notes below."""
    lines = [[term.name, term.working or "-", show(term.value, term.unit)] for term in section.terms]
    notes = "\n".join(f"- {note}" for note in section.notes)
    table = markdown_table(["term", "working", "value"], _without_markup(lines), left=2)
    return "\n\n".join(filter(None, (f"**{section.title}**", table, notes)))


def _without_markup(lines: Sequence[Sequence[str]]) -> list[list[str]]:
    """Formulas hold asterisks and underscores, which are no emphasis."""
    return [[cell.replace("*", "\\*").replace("_", "\\_") for cell in line] for line in lines]
