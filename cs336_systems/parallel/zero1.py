"""ZeRO stage 1: each rank keeps optimizer state for a part of the parameters, updates it, and broadcasts it.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.1. AdamW in
float32 holds 8 bytes per parameter; with N ranks each rank holds 8 / N. `zero1_simple.py` is the same without overlap;
`zero1_buckets.py` has the buckets.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import comm
from .owners import assign_owners
from .zero1_buckets import BroadcastBucket, cut, find_immovable
from .zero1_checks import check_parameters

# By arithmetic, for xl (2 * 10^9 parameters in float32) on two H200: a rank updates 4 GB in 7 ms (28 bytes per
# parameter at 4 TB/s) and sends them in 13 ms (at 300 GB/s). Two costs are not hidden: the update of the first bucket,
# 1 ms at 512 MB, and a slow host, which spends 1 ms per bucket, while the transfer of a bucket takes 0.9 ms at 256 MB
# and 1.8 ms at 512 MB.
BUCKET_SIZE_MB = 512


class ShardedOptimizer(Optimizer):
    """`optimizer_cls(params, **kwargs)` with its state sharded over ranks; the updates are the same to the last bit.

    Any optimizer works that updates each parameter from its own gradient and state alone. Whole parameters are assigned
    to ranks (`owner_of`), so that the element counts of two ranks differ by at most the size of the largest parameter.
    Those that are in `work` are spread by themselves, by the work of an update that it states.
    Frozen parameters are assigned at the first step after they are unfrozen.

    `step` goes bucket by bucket. Each rank's share of a bucket is at most `bucket_size_mb` times 2^20 bytes, or one
    parameter. While the ranks update the next bucket, this one is broadcast. All ranks must have equal parameters and
    gradients beforehand, and must call `step` and `add_param_group` together.

    With more than one rank, parameters are moved when they are assigned: each rank's share of a bucket becomes one flat
    tensor per dtype, except for parameters in a larger storage, which stay there. Parameters stay the same objects, but
    build anything that knows their addresses or shares their memory afterwards, and do not move them again.

    `param_groups` hold all parameters, and changes to them take effect, so a scheduler sees an ordinary optimizer.
    `state`, and so `state_dict`, hold this rank's own part.

    Raises ValueError if the parameters differ between ranks or cannot be sent.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[Optimizer],
        *,
        bucket_size_mb: float = BUCKET_SIZE_MB,
        work: Mapping[Tensor, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if not bucket_size_mb > 0:
            raise ValueError(f"bucket_size_mb is {bucket_size_mb}: it must be above 0")
        self._optimizer_cls, self._kwargs, self._work = optimizer_cls, kwargs, work or {}
        self._bucket_bytes = bucket_size_mb * 2**20 if comm.world_size() > 1 else float("inf")
        self._local: Optimizer | None = None  # updates this rank's own parameters
        self._owners: dict[Tensor, int] = {}
        self._unassigned: list[Tensor] = []
        self._buckets: list[BroadcastBucket] = []
        super().__init__(params, {})
        self._assign()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # copy.deepcopy and torch.save call this too. A copy would send parameters that its model does not have.
        raise TypeError("a ShardedOptimizer cannot be copied or pickled: save its state_dict")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters and assign them to ranks. Earlier ones stay where they are."""
        super().add_param_group(param_group)
        if self._local is not None:  # not in the constructor, which assigns all groups together
            self._assign()

    def owner_of(self, parameter: Tensor) -> int | None:
        """The rank with a parameter's state, None for one still frozen. Raises ValueError for an unknown parameter."""
        if parameter not in self._owners and not any(parameter is p for p in self._unassigned):
            raise ValueError(f"a parameter of shape {tuple(parameter.shape)} does not belong to this optimizer")
        return self._owners.get(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update all parameters. Evaluates the closure once and returns its loss; passes kwargs on."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if any(p.requires_grad for p in self._unassigned):
            self._assign()
        assert self._local is not None
        for bucket in self._buckets:
            bucket.check_addresses()
        self._local.state = self.state  # loading a state dict replaces `self.state`
        transfers = []
        for i, bucket in enumerate(self._buckets):
            groups = zip(self.param_groups, bucket.own, strict=False)  # later groups are in later buckets
            self._local.param_groups = [{**group, "params": own} for group, own in groups if own]
            if self._local.param_groups:
                self._local.step(**kwargs)
            # Parameters without a gradient here are sent too: all ranks must start the same transfers.
            transfers.append(comm.start_broadcasts(bucket.sent, f"updated parameters, bucket {i + 1}"))
        for transfer in transfers:
            transfer.wait()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's own part of a state dict, which may be a full one, and the state of parameters still frozen.

        Raises ValueError if its groups do not match those of this optimizer.
        """
        names = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        rank = comm.rank()
        own = {name for name, p in zip(names, self._parameters(), strict=False) if self._owners.get(p, rank) == rank}
        state = {name: state for name, state in state_dict["state"].items() if name in own}
        super().load_state_dict({**state_dict, "state": state})
        assert self._local is not None
        # In __setstate__ optimizers repair states that their older versions have saved.
        self._local.__setstate__({"state": self.state, "param_groups": self.param_groups})

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _assign(self) -> None:
        """Assign an owner to each parameter that is not frozen and has none, and put them into new buckets."""
        parameters = list(dict.fromkeys(self._parameters()))
        check_parameters(parameters)
        new = [p for p in parameters if p.requires_grad and p not in self._owners]
        owners, all_owned = dict(self._owners), [*self._owners, *new]
        assign_owners({p: self._work[p] for p in all_owned if p in self._work}, owners)
        assign_owners({p: p.numel() for p in all_owned if p not in self._work}, owners)
        self._make_state({p for p in new if owners[p] == comm.rank()})
        immovable = find_immovable(new)
        parts = [cut([p for p in new if owners[p] == rank], self._bucket_bytes) for rank in range(comm.world_size())]
        self._buckets += [
            BroadcastBucket(shares, self.param_groups, immovable) for shares in zip_longest(*parts, fillvalue=[])
        ]
        for p in new:
            if owners[p] != comm.rank():
                self.state.pop(p, None)
        self._owners = owners
        self._unassigned = [p for p in parameters if p not in owners]

    def _make_state(self, new: set[Tensor]) -> None:
        """Make an optimizer of this rank's new parameters. The first one is kept; later ones give initial state."""
        groups = [{**group, "params": [p for p in group["params"] if p in new]} for group in self.param_groups]
        made = self._optimizer_cls(groups, **self._kwargs)
        if self._local is None:
            self._local, self.state, self.defaults = made, made.state, made.defaults
            for group, with_defaults in zip(self.param_groups, made.param_groups, strict=True):
                for key, value in with_defaults.items():
                    group.setdefault(key, value)
        else:  # some optimizers create state on construction; state loaded while frozen stays
            self.state.update({p: state for p, state in made.state.items() if p not in self.state})
