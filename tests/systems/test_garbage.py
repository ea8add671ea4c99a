import gc
import weakref
from collections.abc import Iterator

import pytest

from cs336_systems.machine.garbage import gc_frozen
from tests import garbage


@pytest.fixture(autouse=True)
def _nothing_is_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gc, "unfreeze", garbage.unfreeze)
    gc.unfreeze()
    yield
    gc.freeze()


class Knot:
    """Refers to itself, so only garbage collection frees it."""

    def __init__(self) -> None:
        self.me = self


def test_old_objects_are_exempt_and_new_ones_are_collected() -> None:
    before = Knot()
    with gc_frozen():
        assert not any(x is before for x in gc.get_objects())
        after = Knot()
        assert any(x is after for x in gc.get_objects())
        gone = weakref.ref(after)
        del after
        gc.collect()
        assert gone() is None
    assert any(x is before for x in gc.get_objects())


def test_the_exemption_ends_after_an_error() -> None:
    with pytest.raises(KeyError), gc_frozen():
        raise KeyError
    assert gc.get_freeze_count() == 0


def test_the_exemption_ends_where_some_objects_were_exempt_before() -> None:
    """Else a model that is part of a cycle stays on the GPU."""
    gc.freeze()
    with gc_frozen():
        knot = Knot()
        gc.freeze()
    gone = weakref.ref(knot)
    del knot
    gc.collect()
    assert gone() is None
