"""What a problem's template may call: queries over measured rows, formats, tables, claims and the planner's arithmetic.

A query names a case of `cs336 bench` or `cs336 profile` and the fields that its rows must have. A template reads the
fields of the row that comes back:

    {% set step = row("model", size="xl", mode="train_step", precision="bf16") %}
    A step takes {{ step.step_ms.p50 | ms }}.
"""

import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bench.case import option_words
from ..bench.row import Row, read_rows
from ..planner.working import Section, Term
from ..report.fields import faster
from ..report.markdown import markdown_table, plain
from ..report.memory_parts import predicted_today
from ..report.selection import machine
from ..report.views import VIEWS

Fields = dict[str, Any]
"""One row as a template sees it: its configuration and metrics, and `variant`, `machine`, `status`, `path` (its file).

`metrics` has the metrics alone, for a name that the configuration has too.
"""
_PROFILES = ("profile-kernels", "profile-memory")
_MEMORY = ("checkpointing", "optimizer-sharding", "fsdp-accounting")
"""Cases whose rows have a prediction of the planner's memory."""
_KEYS = {case: view.keys for case, view in VIEWS.items()}
"""The fields that tell settings of a case apart, beside the variant."""
_NAMED_BY_VARIANT = ("variant", "bucket_size_mb", "cuda_graph", "nccl_max_ctas", "copy_engines")
"""Fields in which the variants of one launch may differ."""


class NoRows(LookupError):
    """A query found nothing. The message is the command that measures it."""


class ClaimError(ValueError):
    """The rows contradict claims of the templates. The message names problem, claim and figures."""


@dataclass(frozen=True)
class Source:
    """A row and the file that holds it."""

    path: Path
    row: Row


class Figures:
    """The rows below a folder, of the card if it has them, else of any machine.

    card: a machine as rows name it (default: the GPU with the most rows). Raises ValueError if results is no folder or
    has a file that cannot be read as rows.
    """

    def __init__(self, results: Path, card: str | None = None) -> None:
        if not results.is_dir():
            raise ValueError(f"results is {str(results)!r}: it must be a folder with row files")
        paths = [path for path in results.rglob("*.jsonl") if path.name == "rows.jsonl" or path.stem in _KEYS]
        sources = [Source(path, row) for path in sorted(paths) for row in read_rows(path) if row.case in _KEYS]
        # Folders inside a folder hold earlier measurements, so a deeper file of the same day counts as older.
        sources.sort(key=lambda source: (source.row.env.get("date", ""), -len(source.path.parts)))
        self.sources = sources
        self.machines = Counter(machine(source.row) for source in sources)
        """Number of rows of each machine."""
        most = max(self.machines, key=lambda name: (not name.startswith("CPU"), self.machines[name]), default="CPU")
        self.card = card or most
        self.used: list[Source] = []
        """Rows that queries returned since `begin`."""
        self.problem = ""
        self.contradictions: list[str] = []
        """Claims that the rows contradict: problem, claim and figures."""

    def begin(self, problem: str) -> None:
        """Count rows and report claims for this problem from now on."""
        self.problem, self.used = problem, []

    def rows(self, case: str, command: str = "", **where: Any) -> list[Fields]:
        """The newest row of each setting, in the order of the values that `where` lists.

        where: a value, or a list of values, for each field; `status="any"` includes runs that failed or did not fit.
        command: measures such rows (default: the case with the fields of `where` as options).
        Raises NoRows if there is none.
        """
        return [_shown(source) for source in self._find(case, where, command)]

    def every(self, case: str, command: str = "", **where: Any) -> list[Fields]:
        """As `rows`, but the machine must have a row for each combination of the values in `where`: else NoRows."""
        count = math.prod(len(value) for value in where.values() if isinstance(value, list))
        return [_shown(source) for source in self._find(case, where, command, count)]

    def row(self, case: str, command: str = "", **where: Any) -> Fields:
        """The only row that matches. Raises NoRows if there is none, and ValueError if several settings match."""
        found = self._find(case, where, command)
        if len(found) > 1:
            settings = [{name: source.row.config.get(name) for name in _KEYS[case]} for source in found]
            differing = [name for name in _KEYS[case] if len({str(each[name]) for each in settings}) > 1]
            raise ValueError(f"{len(found)} rows match {_command(case, where)}: they differ in {', '.join(differing)}")
        return _shown(found[0])

    def launch(self, case: str, variants: Sequence[str], command: str = "", **where: Any) -> dict[str, Fields]:
        """The rows of several variants that one launch measured, by variant: only these may be compared closely.

        A launch is the rows of one file, commit, machine and setting. The newest that has all variants is returned; if
        none has, NoRows is raised. command: as in `rows`.
        """
        launches: dict[tuple[str, ...], dict[str, Source]] = {}
        where |= {"variant": list(variants)}
        for source in self._matching(case, where):
            row = source.row
            setting = (str(row.config.get(name)) for name in _KEYS[case] if name not in _NAMED_BY_VARIANT)
            key = (str(source.path), str(row.env.get("commit")), machine(row), *setting)
            launches.setdefault(key, {})[row.variant] = source
        whole = [found for found in launches.values() if len(found) == len(set(variants))]
        if not whole:
            raise NoRows(command or _command(case, where))
        own = [found for found in whole if self._is_own(next(iter(found.values())))]
        chosen = (own or whole)[-1]
        self.used += chosen.values()
        return {variant: _shown(chosen[variant]) for variant in variants}

    def claim(self, holds: bool, text: str, **figures: Any) -> str:
        """Return the text. If it does not hold, add problem, claim and figures to `contradictions`."""
        if not holds:
            seen = ", ".join(f"{name} {value}" for name, value in figures.items())
            self.contradictions.append(f"{self.problem}: {text!r}{': ' if seen else ''}{seen}")
        return text

    def _find(self, case: str, where: Mapping[str, Any], command: str, count: int = 1) -> list[Source]:
        """The newest row of each setting on the card; if those are fewer than `count`, on the machine with the most."""
        newest: dict[str, dict[tuple[str, ...], Source]] = {}
        for source in self._matching(case, where):
            setting = (source.row.variant, *(str(source.row.config.get(name)) for name in _KEYS[case]))
            newest.setdefault(machine(source.row), {})[setting] = source
        on_card = newest.get(self.card, {})
        most = on_card if len(on_card) >= count else max(newest.values(), key=len, default={})
        found = sorted(most.values(), key=lambda source: _place(source.row, where))
        if len(found) < count:
            raise NoRows(command or _command(case, where))
        self.used += found
        return found

    def _matching(self, case: str, where: Mapping[str, Any]) -> list[Source]:
        """Rows of a case that fit, oldest first; those of the card last, so that they win.

        Raises ValueError for an unknown case.
        """
        if case not in _KEYS:
            raise ValueError(f"case is {case!r}: it must be one of {', '.join(_KEYS)}")
        wanted = {"status": "ok", **where}
        if wanted["status"] == "any":
            del wanted["status"]
        found = [source for source in self.sources if source.row.case == case and _fits(source.row, wanted)]
        return sorted(found, key=self._is_own)

    def _is_own(self, source: Source) -> bool:
        return machine(source.row) == self.card


def _shown(source: Source) -> Fields:
    """The fields of a row and the path of its file, with the predictions of today's planner."""
    rows = predicted_today([source.row]) if source.row.case in _MEMORY else [source.row]
    return {**_fields(*rows), "path": source.path}


def _fields(row: Row) -> Fields:
    own = {"variant": row.variant, "machine": machine(row), "status": row.status, "metrics": row.metrics}
    return {**row.metrics, **row.config, **own}


def _fits(row: Row, where: Mapping[str, Any]) -> bool:
    fields = _fields(row)
    return all(fields.get(name) in (value if isinstance(value, list) else [value]) for name, value in where.items())


def _place(row: Row, where: Mapping[str, Any]) -> list[int]:
    fields = _fields(row)
    return [value.index(fields[name]) for name, value in where.items() if isinstance(value, list)]


def _command(case: str, where: Mapping[str, Any]) -> str:
    words = ["cs336", *(case.split("-") if case in _PROFILES else ("bench", case))]
    fields = {name: value for name, value in where.items() if name not in ("status", "machine")}
    return shlex.join([*words, *option_words(fields)])


def beside(rows: Iterable[Fields], by: str, keys: Sequence[str]) -> list[Fields]:
    """A row for each machine and setting of `keys`, with the rows of that setting by their value of the field `by`.

    `beside(rows, "kernel", ["length"])[0].naive.step_ms` is a field of the row whose kernel is naive. Of a flag, the
    values are named `on` and `off`.
    """
    found: dict[tuple[Any, ...], Fields] = {}
    for row in rows:
        setting = {name: row[name] for name in (*keys, "machine")}
        name = {"True": "on", "False": "off"}.get(str(row[by]), str(row[by]))
        found.setdefault(tuple(setting.values()), {"status": "ok", **setting})[name] = row
    return [*found.values()]


def number(value: float) -> str:
    """At most three significant digits, all digits from 1,000 on: 0.012, 17, 1,264."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def three_digits(value: float) -> str:
    """Three significant digits of a measured value: 0.0120, 17.0, 1,264."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:#.3g}".rstrip(".")


def ms(value: float) -> str:
    """Milliseconds in the unit that reads best: "12.0 µs", "17.9 ms", "5.00 s"."""
    scale, unit = (1e-3, "s") if value >= 1000 else (1, "ms") if value >= 0.1 else (1e3, "µs")
    return f"{three_digits(value * scale)} {unit}"


def gib(value: float) -> str:
    """Bytes in GiB."""
    return f"{three_digits(value / 2**30)} GiB"


def mib(value: float) -> str:
    """Bytes in MiB."""
    return f"{three_digits(value / 2**20)} MiB"


def percent(share: float) -> str:
    """A share in percent, with two significant digits."""
    return f"{100 * share:.0f}%" if abs(share) >= 0.095 else f"{100 * share:.2g}%"


def times(ratio: float) -> str:
    """A ratio: "1.8x", "24.1x"."""
    return f"{ratio:#.3g}".rstrip(".") + "x" if ratio >= 10 else f"{ratio:#.2g}x"


def span(values: Iterable[float], form: Callable[[float], str] = number) -> str:
    """The least and the largest of some values: "1.8 to 2.1"."""
    low, high = min(shown := list(values)), max(shown)
    return form(low) if form(low) == form(high) else f"{form(low)} to {form(high)}"


def compared(ours: Mapping[str, float], theirs: Mapping[str, float], other: str = "") -> str:
    """Two timings compared by their medians, as in `faster`, with a note if their 20th to 80th percentiles overlap."""
    found = faster(ours["p50"], theirs["p50"], other)
    overlap = ours["p20"] <= theirs["p80"] and theirs["p20"] <= ours["p80"]
    return f"{found} (within the spread of the steps)" if overlap and not found.startswith("as fast") else found


def mean_std(times: Mapping[str, float]) -> str:
    """The mean and the standard deviation of a time, to the same decimal: "17.92 ± 0.13", "79 ± 86"."""
    decimals = 0 if times["std"] >= 10 else 1 if times["std"] >= 1 else 2
    return f"{times['mean']:,.{decimals}f} ± {times['std']:.{decimals}f}"


FORMATS = {each.__name__: each for each in (number, three_digits, ms, gib, mib, percent, times, span, mean_std)}


def plan(command: str, **options: Any) -> list[Section]:
    """The sections of `cs336 plan COMMAND` for the benchmarks' step: float32 weights under autocast.

    memory, activation and checkpointing take the size of a model, its context_length and the fields of
    `planner.job.Job`; scaling and parallelism those of `Layer` and `Mesh`; ddp-overhead the run of a row, the bandwidth
    (bytes/s) and overhead_s (s a call) of an all-reduce. Two have no command: forward is the peak of a forward pass
    alone, with the options of memory; attention is the memory of plain attention for a batch_size, length and
    head_size.
    """
    from ..config.model import ModelConfig
    from ..planner import activations, memory
    from ..planner.communication import overhead_sections
    from ..planner.forward_memory import forward_peak_bytes
    from ..planner.job import Job
    from ..planner.parallelism import FeedForward, Mesh, parallelism_sections
    from ..planner.rows import gradient_bytes_of
    from ..planner.scaling import Layer, scaling_sections

    model = {field: options.pop(field) for field in ("size", "context_length") if field in options}
    match command:
        case "memory":
            return memory.memory_sections(Job(shape=ModelConfig(**model).shape, **options))
        case "forward":
            job = Job(shape=ModelConfig(**model).shape, optimizer=False, **options)
            return [Section("Forward pass", (Term("peak", "", forward_peak_bytes(job)),))]
        case "activation" | "checkpointing":
            of_job = getattr(activations, f"{command}_sections")
            return of_job(Job(shape=ModelConfig(**model).shape, **options))
        case "scaling":
            return scaling_sections(Layer(**options))
        case "parallelism":
            return parallelism_sections(FeedForward(), Mesh(**options))
        case "ddp-overhead":
            return overhead_sections(float(gradient_bytes_of(options.pop("run"))), **options)
        case "attention":
            return activations.attention_sections(**options)
    raise ValueError(
        f"plan is {command!r}: it must be memory, forward, activation, checkpointing, scaling, "
        "parallelism, ddp-overhead or attention"
    )


def working(sections: Sequence[Section]) -> str:
    """The planner's arithmetic as a table: each quantity, its working and its value."""
    from ..planner.working import shown

    lines = [
        (plain(term.name), f"`{term.working}`" if term.working else "", value)
        for section in sections
        for term, value in zip(section.terms, shown(section.terms), strict=True)
    ]
    return markdown_table(("quantity", "working", "value"), lines, left=2)
