"""A strategy as one may write it outside of the package, in another style than ours."""

import torch

from cs336_systems.parallel import comm
from cs336_systems.parallel.strategy import Strategy, UsedParameters


class Gathering(Strategy):
    """All ranks get all gradients and average them themselves. It takes no option, and its transfers have own names."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)

    def finish_gradient_synchronization(self) -> None:
        used = UsedParameters(self.trainable())
        flags = used.fill_missing_gradients()
        for tensor in (flags, *(p.grad for p in self.trainable() if p.grad is not None)):
            everyones = tensor.new_empty(comm.world_size() * len(tensor), *tensor.shape[1:])
            comm.start_all_gather([everyones], [tensor.contiguous()], "everyone's share").wait()
            tensor.copy_(everyones.view(comm.world_size(), *tensor.shape).mean(0))
        used.drop_unused_gradients()
