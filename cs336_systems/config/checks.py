"""Checks of configuration fields. Each raises a ValueError that names the field, its value and the accepted values."""

import contextlib
import importlib
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

_GROUPS = re.compile(r"""(?<![\w./'"-])(?:model|data|optimizer|train|parallel|sample|checkpoint|log)\.(?=[a-z])""")


def require(condition: bool, name: str, value: object, accepted: str) -> None:
    """Raise ValueError unless the condition holds."""
    if not condition:
        raise ValueError(f"{name} is {shown(value)}: it must be {accepted}")


def require_field(config: Any, field: str, condition: bool, accepted: str) -> None:
    """`require` for the field of a config, given by its full name, such as train.max_steps."""
    require(condition, field, getattr(config, field.rpartition(".")[2]), accepted)


def shown(value: object) -> str:
    """A value as messages show it: true, false, null and lists as in JSON, anything else as in Python."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return repr(list(value) if isinstance(value, tuple) else value)


def check_types(config: Any, group: str) -> None:
    """Check each field against its annotation. The command line's parser does too, but Python callers bypass it."""
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if not any(_is_a(value, kind) for kind in _alternatives(hint)):
            raise ValueError(f"{group}{name} is {shown(value)}: it must be {describe_type(hint)}")


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _is_a(value: object, kind: Any) -> bool:
    if isinstance(value, float) and math.isnan(value):
        return kind in (int, float)  # the range check refuses it, with a better message
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(_is_a, value, kinds))
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def describe_type(hint: Any) -> str:
    """An annotation in words: int | None is "an integer or null"."""
    if len(_alternatives(hint)) > 1:
        return " or ".join(map(describe_type, _alternatives(hint)))
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    if get_origin(hint) is tuple:
        count = len(get_args(hint))
        return f"a list of {count} numbers, such as [{', '.join(['0.5'] * count)}]"
    names = {int: "an integer", float: "a finite number", str: "text", bool: "true or false", NoneType: "null"}
    return names.get(hint, f"a {hint.__name__}")


def from_json(cls: type[T], values: dict[str, Any]) -> T:
    """A dataclass of settings from JSON, which has lists for tuples."""
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def require_at_least(config: Any, group: str, minimum: float, *names: str) -> None:
    """Raise ValueError for a field below the minimum or too large for a 64-bit integer. None passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not minimum <= value < 1 << 63:
            above = " and below 2^63" if value > minimum else ""
            prefix = f"{group}." if group else ""
            raise ValueError(f"{prefix}{name} is {value!r}: it must be at least {minimum:g}{above}")


def is_import_path(name: str) -> bool:
    """Whether a name has the form "module:name", for code of the user's own."""
    module, _, attribute = name.partition(":")
    return all(part.isidentifier() for part in (*module.split("."), attribute))


def import_object(name: str, import_path: str) -> Any:
    """Import the object at "module:name". Modules in the current directory come first.

    Raises ValueError naming the field `name` if the module cannot be imported or lacks the attribute.
    """
    module, _, attribute = import_path.partition(":")
    if module.split(".")[0] not in sys.modules and not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())  # as `python -m` does; the cs336 script has its own folder there instead
    try:
        found = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"{name} is {import_path!r}: {module} cannot be imported from {os.getcwd()} ({reason})"
        ) from error
    require(hasattr(found, attribute), name, import_path, f"module:name, and {found!r} has no {attribute}")
    return getattr(found, attribute)


def folder_to_write(path: str, name: str = "out") -> Path:
    """Make the folder if it is missing. Raises ValueError naming the option if it cannot be written to."""
    if not path:
        raise ValueError(f"{name} is {path!r}: it must be a folder")
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(path, os.W_OK | os.X_OK) else "permission denied"
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
    if reason:
        raise ValueError(f"{name} is {path!r}: it must be a folder that can be written ({reason})")
    return Path(path)


@contextlib.contextmanager
def without_groups(renamed: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Rewrite a ValueError about a run's fields for a command without groups: train.precision becomes precision.

    renamed: full names of fields that the command calls differently, with its name for each.
    """
    try:
        yield
    except ValueError as error:
        message = str(error)
        for full_name, name in renamed.items():
            message = re.sub(rf"(?<![\w.]){re.escape(full_name)}", name, message)  # not within a module's path
        raise ValueError(_GROUPS.sub("", message)) from error


BUT_ATTENTION = "_but_attention"
"""The end of a checkpointing policy by which blocks keep attention's outputs too."""


def checkpointed_blocks(policy: str, group: str, num_layers: int | None = None) -> tuple[str, int] | None:
    """Parse a checkpointing policy: none is None, block is ("every", 1), first_K is ("first", K), and so on.

    All but groups_K may end in BUT_ATTENTION, which changes nothing here.
    Raises ValueError naming the group's activation_checkpointing for any other policy, and for K above num_layers.
    """
    plain = policy.removesuffix(BUT_ATTENTION)
    found = re.fullmatch(r"(first|every|groups)_([1-9]\d{0,8})", "every_1" if plain == "block" else plain)
    is_known = policy == "none" if found is None else plain == policy or found[1] != "groups"
    forms, suffix = "none, block, first_K, every_K or groups_K", f"all but groups_K may end in {BUT_ATTENTION}"
    require(is_known, f"{group}activation_checkpointing", policy, f"{forms} with a number K; {suffix}")
    is_possible = found is None or num_layers is None or int(found[2]) <= num_layers
    accepted = f"{forms} with K from 1 to {num_layers}, the number of blocks; {suffix}"
    require(is_possible, f"{group}activation_checkpointing", policy, accepted)
    return (found[1], int(found[2])) if found else None


def keeps_attention(policy: str) -> bool:
    """Whether the blocks that a policy checkpoints keep attention's outputs."""
    return policy.endswith(BUT_ATTENTION)


def offloaded_blocks(policy: str, group: str, checkpointing: str = "none", num_layers: int | None = None) -> int:
    """Parse train.activation_offload: none is 0, first_K is K.

    Raises ValueError naming the group's activation_offload for any other policy, for K that does not leave the last
    block, and for K that divides a group of checkpointed blocks.
    """
    found = re.fullmatch(r"first_([1-9]\d{0,8})", policy)
    count, name = int(found[1]) if found else 0, f"{group}activation_offload"
    require(policy == "none" or found is not None, name, policy, "none, auto or first_K with a number K")
    if num_layers is not None:
        accepted = f"none or first_K with K below {num_layers}, because the backward pass begins with the last block"
        require(count < num_layers, name, policy, accepted)
    kind, size = checkpointed_blocks(checkpointing, group) or ("none", 1)
    accepted = f"none or first_K with K a multiple of {size}, with {group}activation_checkpointing {checkpointing!r}"
    require(kind != "groups" or count % size == 0, name, policy, accepted)
    return count
