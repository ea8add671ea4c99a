"""Cases as data: what a configuration is, which ones are measured, and which of them take turns.

A case's configuration is a frozen dataclass, each field one value. On the command line a field takes several; their
product is what is measured.
"""

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, get_args, get_type_hints

from ..console import say
from ..hardware import gpu_count
from .case import Row

logger = logging.getLogger(__name__)


def swept(
    *values: Any,
    sweep: Sequence[Any] = (),
    quick: Any = (),
    parse: Callable[[str], Any] | None = None,
    also: str | None = None,
    beside: str | None = None,
) -> Any:
    """A field of a configuration whose default is the first of some values, all of which are measured by default.

    sweep: those that are measured where the field is named by `--sweep`. quick: the value, or a tuple of those, in a
    quick run, which takes seconds on a CPU. parse: makes a value of what is written on the command line. also: another
    name for it there. beside: of a path, which says nothing of what is measured, its name in the folder of the rows,
    where the command takes it to be unless told otherwise.
    """
    quick = quick if isinstance(quick, tuple) else (quick,)
    metadata = {"values": values, "sweep": tuple(sweep) or values, "quick": quick, "parse": parse, "also": also,
                "beside": beside}  # fmt: skip
    return dataclasses.field(default=values[0], metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Something to measure, over and over at different configurations."""

    name: str
    about: str
    """One line for a person."""
    module: str
    """Where the case stands, as CASE: a process that measures imports it."""
    config: type[Any]
    """The dataclass of one configuration; raises ValueError naming a field that is wrong."""
    measure: Callable[[Sequence[Any]], Iterable[Row]]
    """Rows of some configurations, at least one each, as they are done. What fails is a row too."""
    variant: Callable[[Any], str]
    """The name of a configuration among those it is compared with."""
    together: tuple[str, ...] = ()
    """Fields whose values are measured by one call, to take turns; all other fields are the same within it."""
    isolated: bool = False
    """Whether each call has a process of its own: where memory or compiled code of those before would show."""
    empty_caches: bool = False
    """With isolated: whether the caches of compiled code are empty at the start of each."""
    check: Callable[[Any], None] = lambda config: None
    """Raises ValueError for those of a product of fields that are left out, where not all of them mean something."""

    @property
    def quick_is_on_cpu(self) -> bool:
        """Whether a quick run takes a CPU, because the usual sizes are those of a GPU."""
        return any(f.name == "device" and "cpu" in f.metadata.get("quick", ()) for f in dataclasses.fields(self.config))


def check_sized_for_gpu(what: str, device: str) -> None:
    """What is sized for a GPU and not quick, a CPU measures only where it is asked to; what that means is said.

    Raises ValueError where `auto` would be a CPU.
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
    """The type of a field's values: of `X | None` X, of a Literal that of its alternatives."""
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

    Of a field these are the given ones; else, where it is in `sweep`, all of its sweep; else, in a quick run, the quick
    ones; else its own. Those that the case's `check` is against are left out. beside: values of paths that are not
    given, for the configurations that can do with them; what keeps others from it is logged. Raises ValueError for a
    field that there is not, and where nothing is left, of all or of a value that is given.
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
            config = case.config(**asked)  # which raises the same where it is not what is beside
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
    """Configurations that are measured by one call, in their order."""
    found: dict[Any, list[Any]] = {}
    for config in configs:
        key = tuple(
            getattr(config, field.name) for field in dataclasses.fields(config) if field.name not in case.together
        )
        found.setdefault(key if case.together else config, []).append(config)
    return list(found.values())


def is_of(row: Row, config: Any) -> bool:
    """Whether a row is of this configuration, wherever its files are. It may say more of itself than it was asked.

    Of a field that there was not yet when it was measured it has the default.
    """
    asked = as_json(config)
    return all(
        row.config.get(field.name, field.default) == asked[field.name]
        for field in dataclasses.fields(config)
        if not field.metadata.get("beside")
    )


def is_of_fewer_rounds(row: Row, config: Any) -> bool:
    """Whether a row is of this configuration but for its rounds, of which there were fewer when it was made."""
    asked, had = getattr(config, "rounds", 1), row.config.get("rounds")
    if not isinstance(had, int) or had >= asked:
        return False
    return is_of(dataclasses.replace(row, config={**row.config, "rounds": asked}), config)


def as_json(config: Any) -> dict[str, Any]:
    """A configuration, or the fields of one, as a row that was read has it."""
    fields = config if isinstance(config, Mapping) else dataclasses.asdict(config)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


def differing(configs: Sequence[Any]) -> list[str]:
    """The fields in which some configurations differ."""
    everyone = [as_json(config) for config in configs]
    return [name for name, value in everyone[0].items() if any(other[name] != value for other in everyone)]


def describe_among(configs: Sequence[Any], without: Sequence[str] = ()) -> Callable[[Any], str]:
    """What names a configuration, or that of a row, among some: the fields in which they differ, but for some."""
    told = [name for name in differing(configs) if name not in without]

    def describe(config: Any) -> str:
        return ", ".join(f"{name} {value}" for name, value in as_json(config).items() if name in told)

    return describe
