"""Profiles of several workloads, one after the other, each in its own process and folder.

As in `cs336 bench`, memory that one leaves behind cannot disturb the next, and a profile that does not fit, or ends
its process, becomes a row.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ...machine.console import ended_in_order
from ..case import Case
from ..outcome import failed
from ..row import Row, append_row
from ..worker import Worker, WorkerEndedError
from ..workload import Workload

SEVERAL = ("size", "context_length", "mode", "precision")
"""Fields of a workload for which the commands take several values."""


@dataclass(frozen=True, kw_only=True)
class IsolatedProfile:
    """A workload, and the function that profiles it."""

    case: str
    workload: Workload
    run: Callable[[Path, Path], Row]
    """Profiles into a folder, and appends the row to a file. Called in another process, so it must be picklable."""
    out: Path
    """The folder of rows.jsonl, with the rows of all profiles, and of their folders."""

    @property
    def folder(self) -> Path:
        """The folder of this profile, named by the fields in SEVERAL."""
        return self.out / "-".join(str(getattr(self.workload, name)) for name in SEVERAL)

    @property
    def rows(self) -> Path:
        """The file with the rows of all profiles."""
        return self.out / "rows.jsonl"


def profile_each(profiles: Iterable[IsolatedProfile]) -> Iterator[tuple[IsolatedProfile, Row]]:
    """Yield each profile with its row when it is done."""
    for profile in profiles:
        profile.folder.mkdir(parents=True, exist_ok=True)
        with ended_in_order(), Worker(__name__) as worker:
            try:
                (row,) = list(worker.measure([profile]))
            except WorkerEndedError as error:
                asked = asdict(profile.workload) | asdict(profile.workload.shape)
                row = failed(profile.case, profile.workload.mode, asked, error)
                append_row(profile.rows, row)
        yield profile, row


def _measure(profiles: Sequence[IsolatedProfile]) -> Iterator[Row]:
    for profile in profiles:
        yield profile.run(profile.folder, profile.rows)


CASE = Case(
    name="profile",
    about="A workload looked at from inside.",
    module=__name__,
    config=IsolatedProfile,
    variant=lambda profile: profile.workload.mode,
    measure=_measure,
    isolated=True,
)
"""The worker process that profiles imports this."""
