"""What sentences are made of: rows, figures as text, and claims that are checked against the figures."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ...bench.row import Row
from ...planner.rows import is_of_cpu
from ..selection import grouped, latest, machine, runs, value_of
from ..views import VIEWS

GIB = 2**30
XL_2026 = "2.7B"
"""What the handout of 2026 calls xl; ours is that of 2025."""
PROFILERS = {"torch": "torch.profiler", "nsys": "Nsight Systems"}
"""What a row calls the profiler that it was made with, and what that is."""


class ClaimError(ValueError):
    """A sentence claims what its rows do not show."""


class Evidence:
    """The rows that a problem's sentences are about: by case, of one machine, those measured again as they were last.

    Of several machines it is a GPU rather than a CPU, then the one with most rows.

    files: the rows of each file, by case. Rows are ordered by date, which has no time of day: of one date those of a
    later file are taken for the later ones.
    """

    def __init__(self, problem: str, files: Mapping[str, Sequence[Sequence[Row]]]) -> None:
        self.problem = problem
        self.asked: set[str] = set()
        """The cases whose rows have been asked for."""
        self._files = files
        rows = {case: [row for run in _by_date(own) for row in run] for case, own in files.items()}
        self._rows = {case: _of_one_machine(latest(own, _keys(case, own))) for case, own in rows.items()}

    def all(self, case: str) -> list[Row]:
        """All rows of a case, also those of what failed."""
        self.asked.add(case)
        return list(self._rows.get(case, ()))

    def ok(self, case: str, *metrics: str, **config: Any) -> list[Row]:
        """The rows of a case that were measured, have these metrics and these values of their configuration."""
        return [
            row
            for row in self.all(case)
            if row.status == "ok"
            and all(name in row.metrics for name in metrics)
            and all(row.config.get(name) == value for name, value in config.items())
        ]

    def runs(self, case: str) -> list[list[Row]]:
        """The rows of a case that were measured, run by run, by date: what was not measured again is there of each."""
        of_one = {machine(row) for row in self.all(case)}
        done = [[row for row in file if row.status == "ok"] for file in self._files.get(case, ())]
        return [latest(run, _keys(case, run)) for run in _by_date(done) if machine(run[0]) in of_one]

    def where(self, keep: Callable[[Row], bool]) -> "Evidence":
        """Some of the rows, of the same machine as all of them."""
        part = {}
        for case, files in self._files.items():
            of_one = {machine(row) for row in self._rows[case]}
            part[case] = [[row for row in file if machine(row) in of_one and keep(row)] for file in files]
        found = Evidence(self.problem, {case: list(filter(None, files)) for case, files in part.items()})
        found.asked = self.asked
        return found

    def claim(self, text: str, holds: bool, **figures: Any) -> str:
        """The text, if it holds. Raises ClaimError naming problem, claim and figures if it does not."""
        if not holds:
            told = ", ".join(f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
                             for name, value in figures.items())  # fmt: skip
            raise ClaimError(f"{self.problem}: the rows do not bear out {text!r}: {told}")
        return text


def _by_date(files: Sequence[Sequence[Row]]) -> list[list[Row]]:
    """The runs of all files by date, those of one date in the order of the files."""
    return sorted((run for file in files for run in runs(file)), key=lambda run: str(run[0].env.get("date", "")))


def _keys(case: str, rows: Sequence[Row]) -> Sequence[str]:
    """Fields that tell the rows of a case apart: those of its view, or all that are plain values."""
    if case in VIEWS:
        return VIEWS[case].keys
    return list(dict.fromkeys(name for row in rows for name, v in row.config.items() if not isinstance(v, dict)))


def _of_one_machine(rows: Sequence[Row]) -> list[Row]:
    return max(grouped(rows, ()), key=lambda group: (not is_of_cpu(group[0]), len(group)), default=[])


def one_setting(rows: Sequence[Row], *fields: str) -> list[Row]:
    """Of rows, those that are alike in these fields: of several such groups the largest, the last of equal ones."""
    groups = grouped(rows, fields)
    return max(reversed(groups), key=len) if groups else []


def is_alike(row: Row, other: Row, fields: Iterable[str]) -> bool:
    """Whether two rows have the same values of these fields."""
    return all(value_of(row, name) == value_of(other, name) for name in fields)


def is_xl_2026(row: Row) -> bool:
    """Whether a row is of the size that the handout of 2026 calls xl."""
    return row.config.get("size") == XL_2026


def of_each_size(*says: Callable[[Evidence], str | None], part: str = "") -> Callable[[Evidence], str | None]:
    """A paragraph on what each edition of the handout calls xl, that on 2025's, or on what else there is, first."""

    def say(e: Evidence) -> str | None:
        sizes = (e.where(lambda row: not is_xl_2026(row)), e.where(is_xl_2026))
        told = [" ".join(filter(None, (each(rows) for each in says))) for rows in sizes]
        text = "\n\n".join(filter(None, told))
        return f"{part}{text}" if text else None

    return say


def of_2026(rows: Sequence[Row]) -> list[Row]:
    """Of rows those of 2026's xl, where there are any."""
    return [row for row in rows if is_xl_2026(row)] or list(rows)


def p50(row: Row, name: str = "step") -> float:
    """The median of a time in ms."""
    return row.metrics[f"{name}_ms"]["p50"]


def mean(row: Row, name: str = "step") -> float:
    """The mean of a time in ms."""
    return row.metrics[f"{name}_ms"].get("mean", p50(row, name))


def peak(row: Row) -> float:
    """The peak memory in bytes."""
    return row.metrics["peak_memory_bytes"]


def ms(value: float) -> str:
    """Three digits of a time in ms, or more where it is longer."""
    return f"{_digits(value)} ms"


def gib(nbytes: float) -> str:
    """Bytes in GiB, or in the smaller unit that reads better."""
    for unit, size in (("GiB", GIB), ("MiB", 2**20)):
        if abs(nbytes) >= size / 10:
            return f"{_digits(nbytes / size)} {unit}"
    return f"{_digits(nbytes / 2**10)} KiB"


def mib(nbytes: float) -> str:
    """Bytes in MiB."""
    return f"{_digits(nbytes / 2**20)} MiB"


def gb_s(rate: float) -> str:
    """Bytes/s in GB/s."""
    return f"{_digits(rate / 1e9)} GB/s"


def percent(share: float) -> str:
    """A share: whole percent, of less than ten one digit more."""
    if 0 < abs(share) < 0.0005:
        return "less than 0.1%"
    return f"{share:.0%}" if abs(share) >= 0.0995 else f"{share:.1%}"


def times(ratio: float) -> str:
    """A ratio: "1.25 times", "12 times", "1,000 times"."""
    return f"{ratio:,.0f} times" if ratio >= 9.95 else f"{ratio:.1f} times" if ratio >= 1.95 else f"{ratio:.2f} times"


def span(values: Iterable[float], form: Callable[[float], str]) -> str:
    """From the least to the largest, with the unit once; or one value where both read the same."""
    found = sorted(values)
    low, high = form(found[0]), form(found[-1])
    unit = f" {high.rpartition(' ')[2]}"
    return high if low == high else f"{low.removesuffix(unit)} to {high}"


def listing(names: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def ends(names: Sequence[str]) -> str:
    """ "a", "a and b", and of more "from a to d", where a table has all of them."""
    return f"from {names[0]} to {names[-1]}" if len(names) > 2 else listing(names)


def about(row: Row, *fields: str) -> str:
    """What a row is of: size, length and precision, or other fields of its configuration."""
    words = {"context_length": "{} tokens", "length": "length {}", "head_size": "head size {}", "kernel": "`{}`"}
    names = fields or ("size", "context_length", "precision")
    return ", ".join(words.get(name, "{}").format(_grouped(row.config.get(name))) for name in names)


def _grouped(value: Any) -> Any:
    """A long number with commas: 16,384."""
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else value


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
