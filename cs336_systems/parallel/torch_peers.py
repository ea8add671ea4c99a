"""PyTorch's own data parallelism as strategies, to measure against, with its own limits.

`DistributedDataParallel` raises if a parameter is not used; `fully_shard` keeps parameters as DTensors.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from .strategy import Strategy

_COMPRESS = {torch.bfloat16: default_hooks.bf16_compress_hook, torch.float16: default_hooks.fp16_compress_hook}


class TorchDDP(Strategy):
    """`torch.nn.parallel.DistributedDataParallel`, with gradients as views of its buckets."""

    needs_float32 = True  # its buckets hold gradients in the dtype of the weights only

    def __init__(self, module: nn.Module, bucket_size_mb: float = 25.0, grad_dtype: torch.dtype | None = None) -> None:
        super().__init__(module, grad_dtype)
        self._ddp: Any = None
        if dist.is_initialized():
            if grad_dtype == torch.bfloat16 and not all(p.is_cuda for p in module.parameters()):
                raise ValueError("parallel.grad_dtype is bf16: it must be same, fp32 or fp16 with parallel.strategy "
                                 "torch_ddp on a CPU, where PyTorch's DDP does not compress to bfloat16")  # fmt: skip
            ddp = DistributedDataParallel(module, bucket_cap_mb=bucket_size_mb, gradient_as_bucket_view=True)
            others = [name for name, p in module.named_parameters() if p.requires_grad and p.dtype != grad_dtype]
            if grad_dtype not in (None, *_COMPRESS) and others:
                raise ValueError(f"grad_dtype is {grad_dtype}: PyTorch's DDP sends gradients as they are, in bfloat16 "
                                 f"or in float16, but {others[0]} has another dtype")  # fmt: skip
            if grad_dtype in _COMPRESS:
                ddp.register_comm_hook(None, _COMPRESS[grad_dtype])
            object.__setattr__(self, "_ddp", ddp)  # as a submodule it would name every parameter twice

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return (self._ddp or self.module)(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients made inside stay on this process."""
        inside: AbstractContextManager = self._ddp.no_sync() if self._ddp else nullcontext()
        with inside:
            yield


class TorchFSDP(Strategy):
    """`torch.distributed.fsdp.fully_shard` on every element of a ModuleList, and on the module itself."""

    needs_float32 = True  # it casts them to `compute_dtype`

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        grad_dtype: torch.dtype | None = None,
        reshard_after_forward: bool = True,
    ) -> None:
        super().__init__(module, grad_dtype)
        if dist.is_initialized():
            policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=grad_dtype)
            device = next((p.device for p in module.parameters()), torch.device("cpu"))
            options: Any = dict(
                mp_policy=policy,
                # None, PyTorch's default, means true for all modules but the root.
                reshard_after_forward=None if reshard_after_forward else False,
                # Without a mesh, the module would move to the GPU if there is one.
                mesh=init_device_mesh(device.type, (dist.get_world_size(),)),
            )
            for layers in [m for m in module.modules() if isinstance(m, nn.ModuleList)]:
                for layer in layers:
                    fully_shard(layer, **options)
            fully_shard(module, **options)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients made inside stay whole on this process."""
        outer = self._synchronizing
        with super().no_sync():
            self._set_sync(False)
            try:
                yield
            finally:
                self._set_sync(outer)

    @property
    def sharded(self) -> bool:
        """True in a process group. `shards` is empty, because DTensors describe themselves."""
        return dist.is_initialized()

    def _set_sync(self, wanted: bool) -> None:
        if dist.is_initialized():
            self.module.set_requires_gradient_sync(wanted)  # type: ignore[operator]

    def clip_gradient(self, max_norm: float = math.inf) -> Tensor:
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _gather_whole(self, parts: Sequence[Tensor], keep: Callable[[Tensor], Tensor]) -> dict[Tensor, Tensor]:
        return {p: keep((p.full_tensor() if isinstance(p, DTensor) else p).detach()) for p in parts}
