"""The document: Markdown made of row files, and the files it is written into."""

import contextlib
import os
import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from urllib.parse import quote

from ...bench.row import read_rows
from ...config.model import MODEL_SIZES
from ...machine.files import write_whole
from ...planner.working import Section, show
from ..fields import UNFIT, in_words, naming_the_files
from ..markdown import markdown_table
from ..selection import machine
from .claims import XL_2026, ClaimError
from .commands import measured_by, not_measured, settings_in_short
from .problem import Exhibit, Problem, RowFile, evidence_of
from .problems import PROBLEMS
from .render import html_page
from .typeset import to_typst, write_pdf

TITLE = "CS336 Assignment 2: systems"
PICTURES = "pictures"
MARKDOWN, HTML, PDF = "writeup.md", "writeup.html", "writeup.pdf"
_PART = re.compile(r"(?:^|(?<=\.) )(?=\([a-f](?:, [a-f])*\) )")
_PART_NAME = re.compile(r"^(\([a-f](?:, [a-f])*\))")
_MARKUP = re.compile(r"[\\`*<\[\]]")
NO_TYPST = f"{PDF} is left out: the package typst is not installed (pip install typst)"


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


def write_writeup(
    results: Path, out: Path, problems: Sequence[Problem] = PROBLEMS, links_from: Path | None = None
) -> list[Path | str]:
    """Write the document into a folder as Markdown, HTML and, where typst is installed, PDF; the files, or why not.

    links_from: the folder that links to row files begin at (default: out).
    Raises ClaimError for a sentence that the rows do not bear out, and ValueError naming files whose rows cannot be
    shown.
    """
    files = find_rows(results)
    out.mkdir(parents=True, exist_ok=True)
    text = document(files, out, problems, links_from)
    write_whole(out / MARKDOWN, text)
    write_whole(out / HTML, html_page(TITLE, text, out))
    try:
        write_pdf(to_typst(TITLE, text), out, out / PDF)
    except ModuleNotFoundError as error:
        if error.name != "typst":
            raise
        return [out / MARKDOWN, out / HTML, NO_TYPST]
    return [out / MARKDOWN, out / HTML, out / PDF]


def document(
    files: Mapping[str, Sequence[RowFile]],
    out: Path,
    problems: Sequence[Problem] = PROBLEMS,
    links_from: Path | None = None,
) -> str:
    """The document in Markdown; draws its pictures into a folder in `out`. Links begin at that or another folder."""
    parts = [f"# {TITLE}", *_foreword()]
    section, given = "", dict[tuple[str, ...], str]()
    for problem in problems:
        if problem.section != section:
            section = problem.section
            parts.append(f"## {section}")
        parts += problem_parts(problem, files, out, links_from, given)
    return "\n\n".join(parts) + "\n"


def _foreword() -> list[str]:
    """What holds for all problems: where figures come from, and what the handout's sizes are called."""

    def told(name: str) -> str:
        return " / ".join(str(MODEL_SIZES[name][field]) for field in ("d_model", "d_ff", "num_layers", "num_heads"))

    return [
        "Every figure, in sentences too, comes from measured rows or from the planner's arithmetic: `cs336 report "
        "writeup` makes this document again. Below each table stand the files of its rows, the command that measured "
        "them, the commit and the machine. Older rows do not record their command; for them one is given that "
        "measures the same settings.",
        f"Sizes have the names of 2025 (d_model / d_ff / layers / heads): `xl` is {told('xl')}. What the handout of "
        f"2026 calls xl, {told(XL_2026)}, is `{XL_2026}` here, and its 10B is `10B`. Where both editions ask about xl, "
        f"answers on several GPUs have a paragraph on each of the two; the others are about `{XL_2026}`.",
        "MFU is the share of the card's peak rate for matrix products of the row's own type. The peak of float32 is "
        "far lower than that of bfloat16, so its MFU can be larger at fewer TFLOP/s.",
        "Times in tables are medians unless they are given with a standard deviation.",
        "Sentences compare steps over several GPUs within one launch only (one file, commit and machine): the one with "
        "the most steps, or the last of equal ones. In brackets stands what the other launches show.",
    ]


def problem_parts(
    problem: Problem,
    files: Mapping[str, Sequence[RowFile]],
    out: Path,
    links_from: Path | None = None,
    given: dict[tuple[str, ...], str] | None = None,
) -> list[str]:
    """Heading, question, answer, tables and pictures, working and code of a problem.

    given: commands that stand in the document already, and the problem in which they do; those of this one are added.
    """
    parts = [f"### {problem.name}", f"*{_places(problem)}. {problem.question}*"]
    for paragraph in paragraphs(answer_of(problem, files)):
        parts.append(paragraph)
        if problem.sketch and paragraph.startswith("**(a)**"):
            parts.append(_code_block(problem.sketch.splitlines()))
    for exhibit in problem.exhibits:
        shown = files.get(exhibit.case, ())
        with _naming_rows(problem, files, (exhibit.case,)):
            parts += _exhibit_parts(problem, exhibit, shown, out, links_from, {} if given is None else given)
    if problem.working is not None:
        parts += [_section_text(each) for each in problem.working()]
        parts += [f"Working: `cs336 {problem.plan}`."] if problem.plan else []
    if problem.code:
        parts.append(f"Code: {', '.join(f'`{path}`' for path in problem.code)}.")
    return parts


def _places(problem: Problem) -> str:
    editions = (f"{year}: {place}" for year, place in zip((2025, 2026), problem.places, strict=True) if place)
    return "; ".join(editions)


def paragraphs(sentences: Sequence[str]) -> list[str]:
    """An answer with a paragraph for each part of the problem: "(a)" begins one."""
    parts = _PART.split(" ".join(sentences))
    return [_PART_NAME.sub(r"**\1**", part) for part in parts if part]


def _code_block(lines: Sequence[str]) -> str:
    return "\n".join(["```", *lines, "```"])


def answer_of(problem: Problem, files: Mapping[str, Sequence[RowFile]]) -> list[str]:
    """The sentences that there are rows for. Raises ClaimError, and ValueError for rows that lack what one needs."""
    evidence = evidence_of(problem.name, files)
    said = []
    for each in problem.sentences:
        if all(files.get(case) for case in each.needs):
            evidence.asked.clear()
            with _naming_rows(problem, files, evidence.asked):
                said.append(each.say(evidence))
    return [text[0].upper() + text[1:] for text in said if text]


@contextlib.contextmanager
def _naming_rows(problem: Problem, files: Mapping[str, Sequence[RowFile]], cases: Collection[str]) -> Iterator[None]:
    """Say of an error which problem's it is and of which rows of some cases, as `naming_the_files` does."""
    try:
        yield
    except ClaimError:
        raise
    except (ValueError, *UNFIT) as error:
        paths = list(dict.fromkeys(file.path for case in cases for file in files.get(case, ())))
        with naming_the_files(paths):
            raise ValueError(f"rows are not as {problem.name} needs them: {in_words(error)}") from error


def _exhibit_parts(
    problem: Problem,
    exhibit: Exhibit,
    files: Sequence[RowFile],
    out: Path,
    links_from: Path | None,
    given: dict[tuple[str, ...], str],
) -> list[str]:
    kept = _kept(exhibit, files)
    parts, (kept, further) = [], _measured_last(exhibit, kept)
    for number, shown in enumerate([kept] if exhibit.together and kept else [[file] for file in kept]):
        rows = [row for file in shown for row in file.rows]
        made = [text] if (text := exhibit.show(rows)) else []
        stem = out / PICTURES / (problem.name if number == 0 else f"{problem.name}-{number + 1}")
        for caption, picture in exhibit.draw(shown, stem):
            made.append(f"![{problem.name}: {caption}]({PICTURES}/{picture.name})")
        if made:
            parts += [*made, _source(shown, measured_by(exhibit, shown, is_first=number == 0), links_from or out)]
    if further:
        parts.append(f"Measured before: {', '.join(_links(further, links_from or out))}.")
    if not parts or not any(exhibit.is_asked(row) for file in kept for row in file.rows):
        what = "Not measured yet" if not parts else "Not measured yet as 2026 asks for it"
        return parts + _to_be_measured(what, exhibit, problem.name, given)
    rows = [row for file in kept for row in file.rows]
    for command, (settings, is_all) in not_measured(exhibit, rows).items():
        what = "" if is_all else f": {settings_in_short(settings, command)}"
        parts.append(f"Not measured yet{what}; this measures it: `cs336 {command}`.")
    return parts


def _kept(exhibit: Exhibit, files: Sequence[RowFile]) -> list[RowFile]:
    """The rows that an exhibit shows, by file."""
    found = [RowFile(file.path, [row for row in file.rows if exhibit.keep(row)]) for file in files]
    return [file for file in found if any(map(exhibit.is_about, file.rows))]


def _measured_last(exhibit: Exhibit, files: Sequence[RowFile]) -> tuple[list[RowFile], list[RowFile]]:
    """Files, the last one first, that have what none before has of what they are shown for; and the others.

    Of one date the deeper file is the older one, as in `evidence_of`.
    """
    if exhibit.measures is None:
        return list(files), []
    shown: list[RowFile] = []
    further: list[RowFile] = []
    seen: set[Hashable] = set()
    by_depth = sorted(files, key=lambda file: len(file.path.parts))

    def order(file: RowFile) -> tuple[int, str]:
        return max(map(exhibit.rank, file.rows)), max(str(row.env.get("date", "")) for row in file.rows)

    for file in sorted(by_depth, key=order, reverse=True):
        own = {
            (machine(row), exhibit.measures(row) if row.status == "ok" else f"{row.status} {row.variant}")
            for row in file.rows
            if exhibit.is_about(row)
        }
        (shown if own - seen else further).append(file)
        seen |= own
    return shown, further


def _to_be_measured(what: str, exhibit: Exhibit, problem: str, given: dict[tuple[str, ...], str]) -> list[str]:
    """The commands of an exhibit, or where they have been given already: in which problem, by commands."""
    first = given.setdefault(exhibit.commands, problem)
    commands = [f"cs336 {command}" for command in exhibit.commands]
    if first != problem:
        return [f"{what}; what measures it stands below [{first}](#{first})."]
    if len(commands) == 1:
        return [f"{what}; this measures it: `{commands[0]}`."]
    return [f"{what}; these measure it:", _code_block(commands)]


def _source(files: Sequence[RowFile], measured: str, links_from: Path) -> str:
    """Where rows are, by what they were measured, of which commits and machines they are."""
    rows = [row for file in files for row in file.rows]
    commits = dict.fromkeys(str(row.env.get("commit") or "unknown") for row in rows)
    machines = dict.fromkeys(map(machine, rows))
    return (
        f"Rows: {', '.join(_links(files, links_from))}, {measured}; "
        f"commit {', '.join(f'`{commit}`' for commit in commits)}; {', '.join(machines)}."
    )


def _links(files: Sequence[RowFile], links_from: Path) -> list[str]:
    """A link to each file, with the number of its rows."""
    links = []
    short = Counter(file.path.parts[-2:] for file in files)
    for file in files:
        link = quote(Path(os.path.relpath(file.path.resolve(), links_from.resolve())).as_posix())
        parts = file.path.parts[-2 if short[file.path.parts[-2:]] == 1 else -3 :]
        name = _MARKUP.sub(r"\\\g<0>", "/".join(parts))
        links.append(f"[{name}]({link}) ({len(file.rows)})")
    return links


def _section_text(section: Section) -> str:
    """A calculation as a table, with its notes below; those that are indented are formulas."""
    lines = [[term.name, term.working or "-", show(term.value, term.unit)] for term in section.terms]
    blocks = groupby(section.notes, key=lambda note: note.startswith(" "))
    notes = "\n\n".join(
        _code_block([note.strip() for note in block]) if is_formula else "\n".join(f"- {note}" for note in block)
        for is_formula, block in blocks
    )
    table = markdown_table(["term", "working", "value"], _without_markup(lines), left=2)
    return "\n\n".join(filter(None, (f"**{section.title}**", table, notes)))


def _without_markup(lines: Sequence[Sequence[str]]) -> list[list[str]]:
    """Formulas hold asterisks and underscores, which are no emphasis."""
    return [[cell.replace("*", "\\*").replace("_", "\\_") for cell in line] for line in lines]
