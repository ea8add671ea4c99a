"""Python's garbage collector: now and then it looks at every object there is, and a training step waits for it."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def objects_set_aside() -> Iterator[None]:
    """Spare collections the objects that there are now: modules, and what compilers keep, some hundred thousand.

    To look at them takes 0.1 to 0.3 s, in one of ten steps or so where steps make many objects. Enter it when a step
    has been done, so that what is made once is there. What comes later is collected as ever.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
