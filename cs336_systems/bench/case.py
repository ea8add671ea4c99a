"""Cases as data: what a configuration is, which ones are measured, and which of them take turns.

A case's configuration is a frozen dataclass, each field one value. On the command line a field takes several values;
their product is measured.
"""

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, get_args, get_type_hints

from ..machine.console import say
from ..machine.hardware import gpu_count
from .row import Row

logger = logging.getLogger(__name__)


def swept(
    *values: Any,
    sweep: Sequence[Any] = (),
    quick: Any = (),
    parse: Callable[[str], Any] | None = None,
    also: str | None = None,
    beside: str | None = None,
) -> Any:
    """A field of a configuration with several values: all are measured by default, and the first is its default.

    sweep: the values that are measured if `--sweep` names the field. quick: the value, or a tuple of values, in a quick
    run, which takes seconds on a CPU. parse: makes a value from text on the command line. also: another name for the
    field there. beside: for a path, which says nothing about what is measured, its name in the folder of the rows,
    where the command expects it unless told otherwise.
    """
    quick = quick if isinstance(quick, tuple) else (quick,)
    metadata = {"values": values, "sweep": tuple(sweep) or values, "quick": quick, "parse": parse, "also": also,
                "beside": beside}  # fmt: skip
    return dataclasses.field(default=values[0], metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Something to measure, in many configurations."""

    name: str
    about: str
    """One line for a person."""
    module: str
    """The module that has the case as CASE; a process that measures imports it."""
    config: type[Any]
    """The dataclass of one configuration; raises ValueError naming a field that is wrong."""
    measure: Callable[[Sequence[Any]], Iterable[Row]]
    """Yields rows of configurations, at least one each, as they are done. A failure is a row too."""
    variant: Callable[[Any], str]
    """The name of a configuration among those it is compared with."""
    together: tuple[str, ...] = ()
    """Fields whose values are measured by one call, to take turns; all other fields are the same within a call."""
    isolated: bool = False
    """Whether each call has a process of its own, for when memory or compiled code of earlier calls would show."""
    empty_caches: bool = False
    """With isolated: whether the caches of compiled code are empty at the start of each call."""
    check: Callable[[Any], None] = lambda config: None
    """Raises ValueError for combinations of fields that mean nothing; they are left out of the product."""

    @property
    def quick_is_on_cpu(self) -> bool:
        """Whether a quick run uses a CPU, because the usual sizes are for a GPU."""
        return any(f.name == "device" and "cpu" in f.metadata.get("quick", ()) for f in dataclasses.fields(self.config))


def check_sized_for_gpu(what: str, device: str) -> None:
    """Let a CPU measure what is sized for a GPU and not quick only if it is asked to, and say what that means.

    Raises ValueError if `auto` would be a CPU.
    """
    if device == "auto" and not gpu_count():
        raise ValueError(
            "device is 'auto', and there is no GPU: give --quick, which takes seconds, or --device cpu; "
            f"{what} is sized for one"
        )
    if device == "cpu":
        say(f"{what} is sized for a GPU unless told otherwise: a CPU may take hours or be short of memory; "
            "--quick takes seconds")  # fmt: skip


def value_type(case: Case, name: str) -> Any:
    """The type of a field's values: X for `X | None`, and for a Literal the type of its alternatives."""
    hint = get_type_hints(case.config)[name]
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    first = kinds[0] if kinds else hint
    return first if isinstance(first, type) else type(first)


def configurations(
    case: Case,
    given: Mapping[str, Sequence[Any]] | None = None,
    sweep: Sequence[str] = (),
    quick: bool = False,
    beside: Mapping[str, Any] | None = None,
) -> list[Any]:
    """The configurations to measure: the product of each field's values.

    A field's values are the given ones; else, if it is in `sweep`, all of its sweep; else, in a quick run, the quick
    ones; else its own. Configurations that the case's `check` rejects are left out. beside: values for paths that are
    not given, used by the configurations that can; why others cannot is logged. Raises ValueError for an unknown field,
    and if nothing is left, overall or for a value that was given.
    """
    given, beside = given or {}, beside or {}
    lacking: dict[str, None] = {}
    fields = {field.name: field for field in dataclasses.fields(case.config)}
    for name in (*given, *sweep):
        if name not in fields:
            raise ValueError(f"sweep has {name!r}: it must be one of {', '.join(fields)}")

    def values(field: dataclasses.Field) -> Sequence[Any]:
        if field.name in given:
            return given[field.name]
        if field.name in sweep:
            return field.metadata.get("sweep", (field.default,))
        if quick and field.metadata.get("quick"):
            return field.metadata["quick"]
        return field.metadata.get("values", (field.default,))

    found: dict[Any, None] = {}
    against: list[tuple[dict[str, Any], ValueError]] = []
    measured: set[tuple[str, Any]] = set()
    for each in itertools.product(*map(values, fields.values())):
        asked = dict(zip(fields, each, strict=True))
        try:
            config = case.config(**{**asked, **beside})
        except (ValueError, OSError) as error:
            config = case.config(**asked)  # raises again if the reason is not what is beside
            lacking[str(error)] = None
        try:
            case.check(config)
        except ValueError as error:
            against.append((asked, error))
        else:
            found[config] = None
            measured |= asked.items()
    for asked, why in against:
        if not found or not measured.issuperset((name, asked[name]) for name in given):
            raise why
    for what in lacking:
        logger.info("goes without what is beside the rows: %s", what)
    return list(found)


def groups(case: Case, configs: Iterable[Any]) -> list[list[Any]]:
    """Configurations grouped by the call that measures them, in their order."""
    found: dict[Any, list[Any]] = {}
    for config in configs:
        key = tuple(
            getattr(config, field.name) for field in dataclasses.fields(config) if field.name not in case.together
        )
        found.setdefault(key if case.together else config, []).append(config)
    return list(found.values())


def is_of(row: Row, config: Any) -> bool:
    """Whether a row is of this configuration, wherever its files are. The row may have more fields.

    A field that did not exist yet when the row was measured counts as its default.
    """
    asked = row_config(config)
    return all(
        row.config.get(field.name, field.default) == asked[field.name]
        for field in dataclasses.fields(config)
        if not field.metadata.get("beside")
    )


def is_of_fewer_rounds(row: Row, config: Any) -> bool:
    """Whether a row is of this configuration except that it was made after fewer rounds."""
    asked, had = getattr(config, "rounds", 1), row.config.get("rounds")
    if not isinstance(had, int) or had >= asked:
        return False
    return is_of(dataclasses.replace(row, config={**row.config, "rounds": asked}), config)


def rounds_of(row: Row, config: Any) -> int:
    """How many of a configuration's rounds a row has; 0 for a row of another one."""
    if is_of(row, config):
        return getattr(config, "rounds", 1)
    return row.config["rounds"] if is_of_fewer_rounds(row, config) else 0


def row_config(config: Any) -> dict[str, Any]:
    """A configuration, or its fields, as a row that was read has them: a dict, with lists for tuples."""
    fields = config if isinstance(config, Mapping) else dataclasses.asdict(config)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


def differing(configs: Sequence[Any]) -> list[str]:
    """The fields in which the configurations differ."""
    everyone = [row_config(config) for config in configs]
    return [name for name, value in everyone[0].items() if any(other[name] != value for other in everyone)]


def describe_among(configs: Sequence[Any], without: Sequence[str] = ()) -> Callable[[Any], str]:
    """A function that names a configuration, or that of a row, by the fields that differ, except those in `without`."""
    told = [name for name in differing(configs) if name not in without]

    def describe(config: Any) -> str:
        return ", ".join(f"{name} {value}" for name, value in row_config(config).items() if name in told)

    return describe
