import gc
import weakref

import pytest

from cs336_systems.machine.garbage import objects_set_aside


class Knot:
    """Refers to itself: only a collection takes it away."""

    def __init__(self) -> None:
        self.me = self


def test_what_was_there_is_not_looked_at_and_what_comes_is_collected() -> None:
    before = Knot()
    with objects_set_aside():
        assert not any(x is before for x in gc.get_objects())
        after = Knot()
        assert any(x is after for x in gc.get_objects())
        gone = weakref.ref(after)
        del after
        gc.collect()
        assert gone() is None
    assert any(x is before for x in gc.get_objects())


def test_all_is_looked_at_again_after_an_error() -> None:
    with pytest.raises(KeyError), objects_set_aside():
        raise KeyError
    assert gc.get_freeze_count() == 0
