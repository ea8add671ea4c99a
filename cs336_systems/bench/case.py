"""A case: something to measure, as data.

A configuration of a case is a frozen dataclass with one value per field. The command line takes several values per
field and measures their product.
"""

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import NoneType
from typing import Any, get_args, get_type_hints

import torch

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
    """A dataclass field with the values that are measured by default; the first is the field's default.

    sweep: the values measured if `--sweep` names the field. quick: the value, or a tuple of values, of a quick run,
    which takes seconds on a CPU. parse: makes a value from text on the command line. also: a second option name.
    beside: for a path, its default name in the folder of the rows; such a field does not tell configurations apart.
    """
    quick = quick if isinstance(quick, tuple) else (quick,)
    metadata = {"values": values, "sweep": tuple(sweep) or values, "quick": quick, "parse": parse, "also": also,
                "beside": beside}  # fmt: skip
    return dataclasses.field(default=values[0], metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Something to measure in many configurations."""

    name: str
    config: type[Any]
    """The dataclass of one configuration, in the case's module; it raises ValueError naming a wrong field."""
    rows: Callable[["Case", Sequence[Any]], Iterable[Row]]
    """Yields at least one row per configuration, each as soon as it is measured. A failure is a row too. `outcome.each`
    makes it from a function that measures one configuration."""
    measure_on_rank: Callable[[Sequence[Any], torch.device, Callable[[Any], None]], Iterator[Row]] | None = None
    """If several ranks measure together (`rows` is then `ranks.launched`): yields the rows, the same on all ranks.
    Its last argument is called with each configuration that begins."""
    variant: Callable[[Any], str]
    """The name of a configuration in tables and plots."""
    together: tuple[str, ...] = ()
    """Fields that may differ within one call of `measure`, so that their values take turns."""
    isolated: bool = False
    """Whether each call has its own process, for measurements that memory or compiled code of earlier calls changes."""
    empty_caches: bool = False
    """Whether the process of an isolated call starts with empty caches of compiled code."""
    check: Callable[[Any], None] = lambda config: None
    """Raises ValueError for combinations of fields without meaning; the product leaves them out."""

    @property
    def place(self) -> str:
        """Where `load_case` finds the case in the process that measures: "module:name"."""
        return f"{self.config.__module__}:{self.name}"

    def measure(self, configs: Sequence[Any]) -> Iterable[Row]:
        """The rows of configurations."""
        return self.rows(self, configs)


def load_case(place: str) -> Case:
    """Import "module" of "module:name" and return the case of that name in its PRESETS, or else its CASE."""
    module, _, name = place.partition(":")
    found = import_module(module)
    return getattr(found, "PRESETS", {}).get(name) or found.CASE


def check_sized_for_gpu(command: str, device: str) -> None:
    """Warn of GPU sizes on a CPU that `--device cpu` asks for; raise ValueError if auto finds no GPU."""
    if device == "auto" and not gpu_count():
        raise ValueError(
            "device is 'auto', and there is no GPU: give --quick, which takes seconds, or --device cpu; "
            f"{command} is sized for one"
        )
    if device == "cpu":
        say(f"{command} is sized for a GPU unless told otherwise: a CPU may take hours or be short of memory; "
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
    """The configurations to measure: the product of the values of all fields.

    The values of a field are, in this order of preference: those in `given`, its sweep if `sweep` names it, its quick
    values in a quick run, its default values. Configurations that the case's `check` rejects are left out. beside:
    paths of fields that are not given; a configuration that cannot use them goes without, and the reason is logged.
    Raises ValueError for an unknown field, and if no configuration is left, overall or for a given value.
    """
    given, beside = given or {}, beside or {}
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
    rejected: list[tuple[dict[str, Any], ValueError]] = []
    measured: set[tuple[str, Any]] = set()
    useless_paths: dict[str, None] = {}
    for combination in itertools.product(*map(values, fields.values())):
        asked = dict(zip(fields, combination, strict=True))
        try:
            config = case.config(**{**asked, **beside})
        except (ValueError, OSError) as error:
            config = case.config(**asked)  # raises again unless a path in `beside` was the reason
            useless_paths[str(error)] = None
        try:
            case.check(config)
        except ValueError as error:
            rejected.append((asked, error))
        else:
            found[config] = None
            measured |= asked.items()
    for asked, reason in rejected:
        if not found or not measured.issuperset((name, asked[name]) for name in given):
            raise reason
    for message in useless_paths:
        logger.info("the file beside the rows is not used: %s", message)
    return list(found)


def groups(case: Case, configs: Iterable[Any]) -> list[list[Any]]:
    """Configurations grouped by the call of `measure` that takes them, in their order."""
    found: dict[Any, list[Any]] = {}
    for config in configs:
        key = tuple(
            getattr(config, field.name) for field in dataclasses.fields(config) if field.name not in case.together
        )
        found.setdefault(key if case.together else config, []).append(config)
    return list(found.values())


def is_of(row: Row, config: Any) -> bool:
    """Whether a row measures a configuration, wherever its files are. A field that it lacks counts as its default."""
    asked = row_config(config)
    return all(
        row.config.get(field.name, field.default) == asked[field.name]
        for field in dataclasses.fields(config)
        if not field.metadata.get("beside")
    )


def rounds_of(row: Row, config: Any) -> int:
    """How many of a configuration's rounds are in a row; 0 for a row of another configuration."""
    asked, had = getattr(config, "rounds", 1), row.config.get("rounds", 1)
    same = had <= asked and is_of(dataclasses.replace(row, config={**row.config, "rounds": asked}), config)
    return had if same else 0


def is_of_fewer_rounds(row: Row, config: Any) -> bool:
    """Whether a row measures this configuration after fewer rounds."""
    return 0 < rounds_of(row, config) < getattr(config, "rounds", 1)


def option_words(fields: Mapping[str, Any]) -> list[str]:
    """The words of a command line that set these fields. A list is several values."""
    words = []
    for name, value in fields.items():
        values = value if isinstance(value, list) else [value]
        words += [f"--{name}", *(str(each).lower() if isinstance(each, bool) else str(each) for each in values)]
    return words


def row_config(config: Any) -> dict[str, Any]:
    """The fields of a configuration as in a row read from JSON: a dict, with lists for tuples."""
    fields = config if isinstance(config, Mapping) else dataclasses.asdict(config)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


def differing(configs: Sequence[Any]) -> list[str]:
    """The fields in which the configurations differ."""
    first, *others = map(row_config, configs)
    return [name for name, value in first.items() if any(other[name] != value for other in others)]


def describe_among(configs: Sequence[Any], without: Sequence[str] = ()) -> Callable[[Any], str]:
    """A function that names a configuration (or a row's) by the fields that differ, except those in `without`."""
    names = [name for name in differing(configs) if name not in without]

    def describe(config: Any) -> str:
        return ", ".join(f"{name} {value}" for name, value in row_config(config).items() if name in names)

    return describe
