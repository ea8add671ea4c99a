"""Pickles of plain data, read without executing what is in them: numbers, text, lists, tuples, dicts keyed by text."""

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NoReturn

_MOST_BYTES = 2**30
# Opcodes that make plain values, and those that ask for more, which the error then names; all others are unknown here.
_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.INT, pickle.BININT, pickle.BININT1, pickle.BININT2),
    *(pickle.LONG, pickle.LONG1, pickle.LONG4, pickle.FLOAT, pickle.BINFLOAT),
    *(pickle.UNICODE, pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINUNICODE8),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.LIST),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_DICT, pickle.DICT, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.GET, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.PUT, pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.INST, pickle.PERSID, pickle.BINPERSID),
    *(pickle.EXT1, pickle.EXT2, pickle.EXT4),
)


class _Refused(ValueError):
    """A pickle asks for what it does not get."""


class PlainUnpickler(pickle._Unpickler):
    """An unpickler that calls nothing. Raises ValueError naming what else was asked for.

    It builds on the implementation in Python, because the one in C allocates as much as an index in the file says.
    """

    dispatch: ClassVar[dict[int, Any]] = {ord(code): pickle._Unpickler.dispatch[ord(code)] for code in _OPCODES}
    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def find_class(self, module: str, name: str) -> NoReturn:
        raise _Refused(f"asks for {str(module)[:100]}.{str(name)[:100]}")

    def persistent_load(self, pid: object) -> NoReturn:
        raise _Refused("asks for an object by a persistent id")

    def get_extension(self, code: int) -> NoReturn:
        raise _Refused(f"asks for the registered extension {code}")

    # Keys are checked before they are hashed, because a tuple of few bytes can take forever to hash.

    def load_dict(self) -> None:
        items = self.pop_mark()  # first: it sets self.append anew
        self.append(_text_keyed(items))

    def load_setitems(self) -> None:
        items = self.pop_mark()
        self._target().update(_text_keyed(items))

    def load_setitem(self) -> None:
        items = [self.stack.pop(-2), self.stack.pop()]
        self._target().update(_text_keyed(items))

    def _target(self) -> dict[str, Any]:
        target = self.stack[-1]
        if type(target) is not dict:
            raise _Refused("sets an item of what is no dict")
        return target

    dispatch[ord(pickle.DICT)] = load_dict
    dispatch[ord(pickle.SETITEMS)] = load_setitems
    dispatch[ord(pickle.SETITEM)] = load_setitem


def _text_keyed(items: list[Any]) -> dict[str, Any]:
    keys = items[::2]
    if len(items) % 2 or any(type(key) is not str for key in keys):
        raise _Refused("has a dict with keys that are not text")
    return dict(zip(keys, items[1::2], strict=True))


def load_plain(path: Path) -> Any:
    """What is pickled in a file. Raises ValueError naming the file for one that holds anything but plain data."""
    if not path.is_file():
        raise FileNotFoundError(f"snapshot {path} does not exist, or is no file")
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"snapshot {path} has {path.stat().st_size:,} bytes: it must be at most {_MOST_BYTES:,}")
    try:
        return PlainUnpickler(io.BytesIO(path.read_bytes())).load()
    except _Refused as error:
        raise ValueError(f"snapshot {path} {error}: it must be plain data, nothing in it is executed") from error
    except KeyError as error:
        raise ValueError(f"snapshot {path} is no pickle of plain data (opcode or memo {error})") from error
    except MemoryError as error:
        raise ValueError(f"snapshot {path} does not fit into memory") from error
    except Exception as error:  # whatever a damaged stack of values leads to
        raise ValueError(f"snapshot {path} is no pickle, or was cut short ({type(error).__name__}: {error})") from error
