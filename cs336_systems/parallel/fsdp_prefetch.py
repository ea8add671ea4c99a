"""When FSDP communicates: a schedule of the modules of a pass, which is the same on all ranks.

`fsdp.py` gives the overview and the papers; `fsdp_param_group.py` does the communication.
"""

from collections.abc import Callable, Container
from typing import NamedTuple

from .fsdp_param_group import ParamGroup


class ScheduleStep(NamedTuple):
    """A module's turn: the groups that it needs unsharded, and those whose gradients are complete after it."""

    number: int  # of the module
    needed: list[ParamGroup]
    due: list[ParamGroup]


class PrefetchSchedule:
    """One pass through a schedule.

    Arriving at a step prefetches the groups of the next one. Gradients due at a step are sent in their order as soon as
    they are complete, and the rest when the pass leaves the step, which also reshards its groups, except those in
    `keep`. A rank that does not use a module passes over its step in the same way. So all ranks start the same
    collectives in the same order. Modules called out of turn are an exception: all ranks must call them alike.
    """

    def __init__(
        self,
        steps: list[ScheduleStep],
        reduce: Callable[[ParamGroup], None] = lambda group: None,
        keep: Container[ParamGroup] = (),
    ) -> None:
        self._steps, self._at, self._reduce, self._keep = steps, -1, reduce, keep

    def is_at(self, number: int) -> bool:
        return self._at >= 0 and self._steps[self._at].number == number

    def at_end(self) -> bool:
        return self._at == len(self._steps) - 1

    def knows(self, number: int) -> bool:
        return any(step.number == number for step in self._steps)

    def visit(self, number: int) -> bool:
        """Go to the next step of this module and wait for its weights. False if no such step is ahead."""
        for i in range(self._at + 1, len(self._steps)):
            if self._steps[i].number == number:
                self._advance(i)
                return True
        return False

    def to_end(self) -> None:
        self._advance(len(self._steps) - 1)

    def restart(self) -> None:
        """Go to the end and begin again. Every gradient is sent once more, as zeros if none has come."""
        self.to_end()
        self.leave()
        self._at = -1
        for step in self._steps:
            for group in step.due:
                group.reduced = False

    def send_ready(self) -> None:
        """Send the due gradients up to the first group that is not complete; on this rank it may never be.

        Complete gradients of later steps wait for their turn, because another rank may not have them yet.
        """
        for group in self._steps[self._at].due if self._at >= 0 else ():
            if not group.reduced:
                if group.num_gradients < len(group.trainable):
                    return
                self._reduce(group)

    def leave(self) -> None:
        """Send the remaining gradients of this step, and reshard the groups that the next one does not need."""
        if self._at < 0:
            return
        here = self._steps[self._at]
        for group in here.due:
            if not group.reduced:  # this rank does not use all of the group
                self._reduce(group)
        following = [] if self.at_end() else self._steps[self._at + 1].needed
        for group in here.needed:
            if group not in following and group not in self._keep:
                group.reshard()

    def _advance(self, to: int) -> None:
        while self._at < to:
            self.leave()
            self._at += 1
            for group in self._steps[self._at].needed:
                group.unshard()  # prefetched already, except at the first step
                if self._at == to:
                    group.wait_for_unshard()
            if not self.at_end():
                for group in self._steps[self._at + 1].needed:
                    group.unshard()
