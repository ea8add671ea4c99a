"""Objects that live as long as a test process are not scanned by its collections, which take 0.3 s with PyTorch.

And they lie in huge pages, whose tables a fork copies in a third of the time.
"""

import contextlib
import ctypes
import gc
import re
from pathlib import Path

unfreeze = gc.unfreeze
"""The function itself, which `freeze_for_good` replaces."""

_HUGE, _COLLAPSE = 2**21, 25  # the size of a page, MADV_COLLAPSE


def freeze_for_good() -> None:
    """Exempt all objects that exist now from garbage collection, whatever the tested code unfreezes."""
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None
    _lie_in_huge_pages()


def _lie_in_huge_pages() -> None:
    """Ask Linux, which may refuse, to put all memory that is neither shared nor a file's into huge pages."""
    with contextlib.suppress(OSError):
        maps = Path("/proc/self/maps").read_text()
        for first, end in re.findall(r"^(\w+)-(\w+) rw-p \w+ 00:00 0 *(?:\[heap\])?$", maps, re.MULTILINE):
            start = -(-int(first, 16) // _HUGE) * _HUGE
            if (size := int(end, 16) // _HUGE * _HUGE - start) > 0:
                ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _COLLAPSE)
