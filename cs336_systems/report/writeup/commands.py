"""The commands that have measured rows, or that would measure the same again."""

import itertools
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from ...bench.cases import NAMES, get_case
from ...bench.row import Row
from ...config.model import MODEL_SIZES, ModelConfig
from ..selection import value_of
from .problem import Exhibit, RowFile

_SHOWN = 3
_OF_THE_MACHINE = ("device",)
_PATHS = ("traces", "rows")
"""Fields that name files, which say nothing of what is measured."""


def measured_by(exhibit: Exhibit, files: Sequence[RowFile], is_first: bool) -> str:
    """By what rows were measured, for a sentence: the commands that they bear, of rows of before those that would do.

    A command that would do is the exhibit's, where the first file has what is asked for; else it is put together from
    the rows' own fields. Where no single command gives just these rows, it is said where their settings stand.
    """
    borne, others = [], []
    for file in files:
        borne += [command for row in file.rows if (command := row.env.get("command"))]
        if older := [row for row in file.rows if not row.env.get("command")]:
            others.append(older)
    told = [f"measured by {_listed(borne)}"] if borne else []
    if others:
        told.append(_older(exhibit, others, is_asked=is_first and any(map(exhibit.is_asked, files[0].rows))))
    return ", others ".join(told)


def _older(exhibit: Exhibit, files: Sequence[Sequence[Row]], is_asked: bool) -> str:
    if is_asked and len(files) == 1 and all(_gives(exhibit.command, row) for row in files[0]):
        return f"measured by `cs336 {exhibit.command}`"
    made = [command_for(rows) for rows in files]
    found = [command for command in made if command is not None]
    if len(found) == len(made):
        return f"with the settings of {_listed(found)}"
    return f"measured by `cs336 {' '.join(exhibit.command.split()[:2])}` with the settings in and above the table"


def _listed(commands: Sequence[str]) -> str:
    """The first of some commands, each once, and how many more there are."""
    each = list(dict.fromkeys(map(_as_code, commands)))
    more = [f"{len(each) - _SHOWN} more"] if len(each) > _SHOWN else []
    *most, last = [*each[:_SHOWN], *more]
    return f"{', '.join(most)} and {last}" if most else last


def _as_code(command: str) -> str:
    """A command, which is a line of text, as one span of code: between more backticks than it has in a row."""
    fence = "`" * (max(map(len, re.findall("`+", command)), default=0) + 1)
    return f"`{command}`" if fence == "`" else f"{fence} {command} {fence}"


Setting = Mapping[str, str]
"""Options of a command and a value of each, as they are written."""


def not_measured(exhibit: Exhibit, rows: Sequence[Row]) -> dict[str, tuple[list[Setting], bool]]:
    """By command of an exhibit the settings, of those that it shows, that no row is of; and whether these are all.

    What ran out of memory or failed is measured. Options that are no field of the rows are passed over.
    """
    found = {}
    for command in exhibit.commands:
        asked = [setting for setting in _settings(command) if _is_shown(exhibit, setting)]
        missing = [setting for setting in asked if not any(_is_of(row, setting) for row in rows)]
        if missing:
            found[command] = (missing, len(missing) == len(asked))
    return found


def _settings(command: str) -> list[Setting]:
    """All products of the values that a command names."""
    options: dict[str, list[str]] = {}
    for word in shlex.split(command)[2:]:
        if word.startswith("--"):
            options[word.removeprefix("--")] = values = []
        else:
            values.append(word)
    return [dict(zip(options, each, strict=True)) for each in itertools.product(*options.values())] if options else []


def _is_shown(exhibit: Exhibit, setting: Setting) -> bool:
    typed = {name: int(v) if v.isdecimal() else {"true": True, "false": False}.get(v, v) for name, v in setting.items()}
    row = Row(case=exhibit.case, variant=setting.get("variant", ""), config=typed, env={})
    return exhibit.keep(row) and exhibit.is_about(row)


def _gives(command: str, row: Row) -> bool:
    """Whether a command measures the configuration of a row: what it does not name has its usual value there."""
    settings = _settings(command)
    if settings and not any(_is_of(row, setting) for setting in settings):
        return False
    named = {name for setting in settings for name in setting}
    if row.case not in NAMES:  # a profile: its command has no fields with usual values
        return True
    for field in fields(get_case(row.case).config):
        if field.name in row.config and field.name not in (*named, *_OF_THE_MACHINE, *_PATHS):
            usual = list(field.metadata.get("values", (field.default,)))
            if str(_given(row, field.name, usual)) not in map(str, usual):
                return False
    return True


def _is_of(row: Row, setting: Setting) -> bool:
    own = {"variant": row.variant, **row.config}
    return all(_word(own[name]) == value for name, value in setting.items() if name in own)


def settings_in_short(settings: Sequence[Setting], command: str) -> str:
    """Settings by the options of which a command names several values: the first few, and how many more there are."""
    differing = [name for name in settings[0] if len({setting[name] for setting in _settings(command)}) > 1]
    told = [", ".join(f"{name} {setting[name]}" for name in differing) for setting in settings]
    more = [f"{len(told) - _SHOWN} more"] if len(told) > _SHOWN + 1 else []
    return "; ".join([*(told[:_SHOWN] if more else told), *more])


def command_for(rows: Sequence[Row]) -> str | None:
    """The command of a case that measures just these configurations again; None where no single one does.

    A field's values are options where they are others than the case takes by itself. All their products are measured,
    so they must all be among the rows.
    """
    case = rows[0].case
    if case not in NAMES:
        return None
    options, values = [], []
    for field in fields(get_case(case).config):
        if field.name in (*_OF_THE_MACHINE, *_PATHS):
            continue
        usual = list(field.metadata.get("values", (field.default,)))
        found = list({str(value): value for row in rows for value in [_given(row, field.name, usual)]}.values())
        if not all(field.name in row.config for row in rows):
            if len(usual) > 1 or any(field.name in row.config for row in rows):
                return None  # rows of before there was the field; which of its values they are of, they do not say
            continue
        values.append(found)
        if sorted(map(str, found)) != sorted(map(str, usual)):
            if any(isinstance(value, list | dict | None) for value in found):  # which no option gives
                return None
            options += [f"--{field.name}", *map(_word, found)]
    measured = {str([value_of(row, field.name) for field in fields(get_case(case).config)]) for row in rows}
    if len(measured) != math.prod(map(len, values)):
        return None
    return shlex.join(["cs336", "bench", case, *options])


def _given(row: Row, name: str, usual: Sequence[Any]) -> Any:
    """A field of a row as it was asked for: None where that is the default and the size has the value by itself."""
    value, size = value_of(row, name), row.config.get("size")
    if usual != [None] or size not in MODEL_SIZES:
        return value
    return None if value == getattr(ModelConfig(size=size).shape, name, None) else value


def _word(value: Any) -> str:
    """A value as it is written on the command line."""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
