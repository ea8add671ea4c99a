"""When FSDP communicates: a schedule of the modules of a pass, which is the same on all ranks.

`fsdp.py` gives the overview and the papers; `fsdp_param_group.py` does the communication.
"""

from collections.abc import Container, Sequence
from itertools import dropwhile
from typing import NamedTuple

from .fsdp_modules import EMBEDDINGS
from .fsdp_param_group import FSDPModule, ParamGroup


class ScheduleStep(NamedTuple):
    """A module's turn: the groups that it needs unsharded, and those whose gradients are complete after it."""

    number: int  # of the module
    needed: list[ParamGroup]
    due: list[ParamGroup]


def plan_forward(modules: Sequence[FSDPModule], order: Sequence[int]) -> list[ScheduleStep]:
    """The steps of forward; `order` has the numbers of the modules."""
    return [ScheduleStep(number, modules[number].groups, []) for number in order]


def plan_backward(
    modules: Sequence[FSDPModule], order: Sequence[int], reached: Container[int] = ()
) -> list[ScheduleStep]:
    """The steps of backward, as far back as it goes on any rank. `reached`: modules that it reaches on some rank."""
    seen: set[ParamGroup] = set()
    steps: list[ScheduleStep] = []
    for number in dropwhile(lambda number: number not in reached and not modules[number].trains, order):
        groups = modules[number].groups  # due where they are used first, because backward gets there last
        due = [group for group in groups if group.trainable and group not in seen]
        seen.update(due)
        # The backward of an embedding needs the indices, not the weight.
        needed = [] if isinstance(modules[number].module, EMBEDDINGS) else groups
        steps.append(ScheduleStep(number, needed, due))
    return steps[::-1]


def insert_uncalled_modules(order: list[int], modules: Sequence[FSDPModule]) -> None:
    """Insert the modules that were not called: beside the modules of the same list, or in order of registration."""
    parents = [module.name.rpartition(".")[0] for module in modules]
    for number in set(range(len(modules))).difference(order):
        near = [other for other in order if parents[other] == parents[number]] if parents[number] else []
        near = near or order
        if before := [other for other in near if other < number]:
            order.insert(len(order) - order[::-1].index(max(before)), number)
        else:
            order.insert(order.index(min(near)) if near else 0, number)


class PrefetchSchedule:
    """One pass through a schedule.

    Arriving at a step prefetches the groups of the next one. Gradients due at a step are sent in their order as soon as
    they are complete, and the rest when the pass leaves the step, which also reshards its groups. A rank that does not
    use a module passes over its step in the same way. So all ranks start the same collectives in the same order.
    Modules called out of turn are an exception: all ranks must call them alike.
    """

    def __init__(self, steps: list[ScheduleStep]) -> None:
        self._steps, self._at = steps, -1
        self._group_in_reduction: ParamGroup | None = None

    def is_at(self, number: int) -> bool:
        return self._at >= 0 and self._steps[self._at].number == number

    def at_end(self) -> bool:
        return self._at == len(self._steps) - 1

    def visit(self, number: int) -> bool:
        """Go to the next step of this module and wait for its weights. False if no such step is ahead."""
        for i in range(self._at + 1, len(self._steps)):
            if self._steps[i].number == number:
                self._advance(i)
                return True
        return False

    def visit_again(self, number: int) -> None:
        """As `visit`, but if the module's steps lie behind, begin again: it was called more often than planned."""
        if not self.visit(number) and any(step.number == number for step in self._steps):
            self.restart()
            self.visit(number)

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
            if group not in following and not group.kept:
                group.reshard()

    def finish_gradients(self) -> None:
        """Go to the end, as other ranks may have, send gradients that came after their turn, and wait for all."""
        self.to_end()
        for step in self._steps:
            for group in step.due:
                if group.num_gradients or not group.reduced:
                    self._reduce(group)
        self._wait_for_gradients()

    def drop_gradients(self) -> None:
        """Discard gradients that are being sent."""
        if self._group_in_reduction is not None:
            self._group_in_reduction.drop_gradients()

    def _reduce(self, group: ParamGroup) -> None:
        # Wait for the previous group's gradients only now: their reduce-scatter overlapped this group's backward.
        self._wait_for_gradients()
        group.reduce_gradients()
        self._group_in_reduction = group

    def _wait_for_gradients(self) -> None:
        if self._group_in_reduction is not None:
            self._group_in_reduction.wait_for_gradients()
            self._group_in_reduction = None

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
