"""Pickles of plain data, read without executing what is in them: numbers, text, lists, tuples, dicts with text as keys."""

import io
import pickle
from pathlib import Path
from typing import Any, NoReturn

_MOST_BYTES = 2**30
# Python's own names of the opcodes that make plain values, and of those that ask for more, which is then named.
_PLAIN = """
    PROTO FRAME STOP MARK POP POP_MARK NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT
    UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 EMPTY_LIST APPEND APPENDS LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
    EMPTY_DICT DICT SETITEM SETITEMS GET BINGET LONG_BINGET PUT BINPUT LONG_BINPUT MEMOIZE
""".split()
_ASKING = "GLOBAL STACK_GLOBAL INST PERSID BINPERSID EXT1 EXT2 EXT4".split()


class _Refused(ValueError):
    """What a pickle asks for and does not get."""


class PlainUnpickler(pickle._Unpickler):
    """An unpickler that calls nothing. Raises ValueError naming what else was asked for.

    Python's own implementation, not the one in C: that one allocates as much as an index in the file tells it to.
    """

    dispatch = {ord(getattr(pickle, n)): pickle._Unpickler.dispatch[ord(getattr(pickle, n))] for n in _PLAIN + _ASKING}

    def find_class(self, module: str, name: str) -> NoReturn:
        raise _Refused(f"asks for {str(module)[:100]}.{str(name)[:100]}")

    def persistent_load(self, pid: object) -> NoReturn:
        raise _Refused("asks for an object by a persistent id")

    def get_extension(self, code: int) -> NoReturn:
        raise _Refused(f"asks for the registered extension {code}")

    # Keys are looked at before they are hashed: a tuple of few bytes can take for ever to hash.

    def load_dict(self) -> None:
        self.append(_text_keyed(self.pop_mark()))

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

    dispatch[ord(pickle.DICT)] = load_dict  # type: ignore[assignment]
    dispatch[ord(pickle.SETITEMS)] = load_setitems  # type: ignore[assignment]
    dispatch[ord(pickle.SETITEM)] = load_setitem  # type: ignore[assignment]


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
