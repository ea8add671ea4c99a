"""A problem of the handout as data: its question, what is shown of the rows, and the sentences made of them."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...bench.row import Row
from ...planner.working import Section
from ..plots import redraw
from ..selection import latest
from ..tables import table
from ..views import VIEWS, rows_table
from .claims import Evidence


@dataclass(frozen=True)
class RowFile:
    """Rows of a case, and the file that they are in."""

    path: Path
    rows: Sequence[Row]


def evidence_of(problem: str, files: Mapping[str, Sequence[RowFile]]) -> Evidence:
    """What a problem's sentences are made of: the rows of files, by case.

    A date has no time of day, so that of two files of one day the folders decide: what lies right in a folder is the
    current measurement, and folders in it hold earlier ones and further launches. The deeper file counts as the older.
    """
    ordered = {case: sorted(own, key=lambda file: -len(file.path.parts)) for case, own in files.items()}
    return Evidence(problem, {case: [file.rows for file in own] for case, own in ordered.items()})


Drawing = Callable[[Sequence[RowFile], Path], None]
"""Draws rows, or what a run has left beside them, into a PNG; or makes none where there is nothing to draw."""


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """A table, and pictures, of the rows of a case."""

    case: str
    command: str
    """What measures the rows, after "cs336 "."""
    also: tuple[str, ...] = ()
    """Further commands for more of them."""
    keep: Callable[[Row], bool] = lambda row: True
    """Which rows are shown."""
    is_about: Callable[[Row], bool] = lambda row: True
    """Which of them it is shown for: of a file that has none, the others, which stand beside them, are not shown."""
    is_asked: Callable[[Row], bool] = lambda row: True
    """Which of them are of what the commands measure; as long as there are none, the commands stand below the table.

    Else below it stands what each command that names settings has and no row is of.
    """
    together: bool = False
    """Whether rows of all files stand in one table: where each call writes a file, or some compare with others."""
    measures: Callable[[Row], Hashable] | None = None
    """What a row measures, where only the last file that measures it is shown; the others are named below the table."""
    rank: Callable[[Row], int] = lambda row: 0
    """Of such files those with a row of a higher rank go before those that were measured later."""
    show: Callable[[Sequence[Row]], str] = rows_table
    """The table, in Markdown."""
    plots: tuple[str, ...] = ()
    """Plots of the case's view, by name."""
    pictures: tuple[tuple[str, Drawing], ...] = ()
    """Other pictures: what they show, and what draws them."""

    @property
    def commands(self) -> tuple[str, ...]:
        """All commands."""
        return (self.command, *self.also)

    def draw(self, files: Sequence[RowFile], stem: Path) -> list[tuple[str, Path]]:
        """Draw the pictures into files whose names begin with `stem`: what each shows, and the file.

        files: rows that are kept, where they are. What would show nothing is left out.
        """
        stem.parent.mkdir(parents=True, exist_ok=True)
        found = []
        for number, (caption, drawing) in enumerate(self.pictures):
            file = stem.with_name(f"{stem.name}-{self.case}-{number}.png")
            file.unlink(missing_ok=True)  # of rows that were there before
            drawing(files, file)
            found += [(caption, file)] if file.exists() else []
        if self.plots:
            view = VIEWS[self.case]
            shown = view.derive(latest([row for file in files for row in file.rows], view.keys))
            for plot in (plot for plot in view.plots if plot.name in self.plots):
                path = stem.with_name(f"{stem.name}-{self.case}-{plot.name}.png")
                caption = f"{plot.y.name} by {plot.x.replace('_', ' ')}"
                found += [(caption, file) for file in redraw(plot, shown, path, view.keys)]
        return found


@dataclass(frozen=True, kw_only=True)
class Sentence:
    """Part of an answer. `say` gives None where the rows do not hold what it is about, such as a second precision."""

    say: Callable[[Evidence], str | None]
    needs: tuple[str, ...]
    """Cases that it takes its figures from; without rows of each it is left out."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A problem of the handout."""

    name: str
    section: str
    places: tuple[str, str]
    """The sections of the handout in which it is, of 2025 and of 2026; "" where it is not in that edition."""
    question: str
    """In our own words, a line."""
    exhibits: tuple[Exhibit, ...] = ()
    sentences: tuple[Sentence, ...] = ()
    sketch: str = ""
    """Code that is part of the answer to (a)."""
    working: Callable[[], Sequence[Section]] | None = None
    """What follows by arithmetic, with the command that prints it in `plan`."""
    plan: str = ""
    code: tuple[str, ...] = ()
    """Files in which it is solved, and those that test them."""


def says(say: Callable[[Evidence], str | None], *needs: str) -> Sentence:
    """A sentence and the cases that it needs."""
    return Sentence(say=say, needs=needs)


def without_details(case: str) -> Callable[[Sequence[Row]], str]:
    """The table of a case without what follows it for each row."""

    def show(rows: Sequence[Row]) -> str:
        view = VIEWS[case]
        return table(view.derive(latest(rows, view.keys)), replace(view, details=None))

    return show
