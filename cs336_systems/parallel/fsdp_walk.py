"""When fully sharded training communicates: a walk through the model, the same on all ranks.

`fsdp.py` says where the method comes from, `fsdp_units.py` what is sent.
"""

from collections.abc import Callable, Container
from typing import NamedTuple

from .fsdp_units import Unit


class Place(NamedTuple):
    """A place in a walk: a stage, the units gathered for it, and those whose gradients are complete after it."""

    number: int
    gathered: list[Unit]
    due: list[Unit]


class Walk:
    """One pass through all places of a plan, in order.

    Arriving at a place starts the all-gather of the next one. Gradients that are due at a place are sent in their order
    as soon as they are complete, the rest when leaving it, which also frees its units, but for those to keep. A rank
    passes in the same way over places that it does not use. So all ranks start the same transfers in the same order,
    which is all that collectives need, except those of stages called out of turn, which all ranks must call alike.
    """

    def __init__(
        self, places: list[Place], scatter: Callable[[Unit], None] = lambda unit: None, keep: Container[Unit] = ()
    ) -> None:
        self.places, self.at, self._scatter, self._keep = places, -1, scatter, keep

    def is_at(self, number: int) -> bool:
        return self.at >= 0 and self.places[self.at].number == number

    def at_end(self) -> bool:
        return self.at == len(self.places) - 1

    def knows(self, number: int) -> bool:
        return any(place.number == number for place in self.places)

    def visit(self, number: int) -> bool:
        """Go to the next place of this stage and wait for its weights. False if there is none ahead."""
        for i in range(self.at + 1, len(self.places)):
            if self.places[i].number == number:
                self._go(i)
                return True
        return False

    def to_end(self) -> None:
        self._go(len(self.places) - 1)

    def restart(self) -> None:
        """Begin again, as after one more pass: every gradient will be sent again, zeros where none has come."""
        self.to_end()
        self.leave()
        self.at = -1
        for place in self.places:
            for unit in place.due:
                unit.scattered = False

    def send_ready(self) -> None:
        """Send what is due here up to the first unit whose gradients are not complete; on this rank they may never be.

        What is complete but due later has to wait for its place: another rank may not have it yet.
        """
        for unit in self.places[self.at].due if self.at >= 0 else ():
            if not unit.scattered:
                if unit.arrived < len(unit.trainable):
                    return
                self._scatter(unit)

    def leave(self) -> None:
        if self.at < 0:
            return
        here = self.places[self.at]
        for unit in here.due:
            if not unit.scattered:  # not used on this rank, or not all of it
                self._scatter(unit)
        following = [] if self.at_end() else self.places[self.at + 1].gathered
        for unit in here.gathered:
            if unit not in following and unit not in self._keep:
                unit.free()

    def _go(self, to: int) -> None:
        while self.at < to:
            if self.at >= 0:
                self.leave()
            self.at += 1
            for unit in self.places[self.at].gathered:
                unit.start_gather()  # starts only those of the first place; the others are under way
                if self.at == to:
                    unit.wait_gather()
            if not self.at_end():
                for unit in self.places[self.at + 1].gathered:
                    unit.start_gather()


def insert(order: list[int], number: int, folders: list[str]) -> None:
    """Insert a stage that was not called among its neighbours: those of the same list, or those registered beside."""
    near = [other for other in order if folders[other] == folders[number]] if folders[number] else []
    near = near or order
    if before := [other for other in near if other < number]:
        order.insert(len(order) - order[::-1].index(max(before)), number)
    else:
        order.insert(order.index(min(near)) if near else 0, number)
