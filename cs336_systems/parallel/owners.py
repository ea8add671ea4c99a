"""Which rank owns which parameter, where each has one owner."""

from collections.abc import Mapping

from torch import Tensor


def assign_owners(work: Mapping[Tensor, float], loads: list[float]) -> dict[Tensor, int]:
    """The owner of each parameter, in order of falling work, which is added to the ranks' `loads`.

    Greedy: the rank with the least work gets the next parameter, so no rank is ahead by more than the last parameter it
    got. Those with the most work go first, so that this difference is small.
    """
    owners: dict[Tensor, int] = {}
    for p in sorted(work, key=work.__getitem__, reverse=True):
        owners[p] = loads.index(min(loads))
        loads[owners[p]] += work[p]
    return owners
