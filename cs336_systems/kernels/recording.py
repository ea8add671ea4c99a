"""Whether the present calls are recorded as a CUDA graph, or prepare it: then the time of launches does not count.

Kernels compile in their first call, and none may compile while a graph is recorded. So the calls before the recording
must choose the same kernels.
"""

import contextlib
from collections.abc import Iterator

is_on = False
"""A global of the process: autograd calls backward passes in threads of its own. Compiled code has a guard on it."""


@contextlib.contextmanager
def on() -> Iterator[None]:
    """The context of a recording, and of the calls that prepare it."""
    global is_on
    before, is_on = is_on, True
    try:
        yield
    finally:
        is_on = before
