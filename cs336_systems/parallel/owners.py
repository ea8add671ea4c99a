"""Which rank owns which parameter, where each has one owner."""

from collections.abc import Mapping

from torch import Tensor

from . import comm


def assign_owners(work: Mapping[Tensor, float], owners: dict[Tensor, int]) -> None:
    """Add an owner for each parameter that has none, so that the ranks' sums of work are about equal.

    Greedy: the rank with the least work gets the next parameter, so no rank is ahead by more than the last parameter it
    got. Those with the most work go first, so that this difference is small.
    """
    loads = [sum(work[p] for p in work if owners.get(p) == rank) for rank in range(comm.world_size())]
    for p in sorted((p for p in work if p not in owners), key=work.__getitem__, reverse=True):
        owners[p] = loads.index(min(loads))
        loads[owners[p]] += work[p]
