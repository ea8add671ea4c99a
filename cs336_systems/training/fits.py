"""Whether a run fits its device and its number of processes, before a model is built."""

import torch

from ..config.checks import is_place
from ..config.run import SHARDED, RunConfig
from ..kernels.attention import check_attention
from ..machine.hardware import DTYPES, check_precision, memory_bytes
from ..parallel import comm
from ..parallel.ranks import local_world_size
from ..planner.accounting import least_training_bytes
from .build import strategy_of


def check_config(config: RunConfig, device: torch.device) -> None:
    """Raise ValueError if the run cannot train on this device or with this number of processes."""
    config.check_world_size(comm.world_size())
    check_precision(device, config.train.precision)
    if config.train.cuda_graph and device.type != "cuda":
        raise ValueError(f"train.cuda_graph is true: it needs a CUDA device, and train.device is {device.type!r}")
    if lacking := lacking_memory(config, device):
        raise ValueError(lacking)
    strategy_of(config)
    shape = config.model.shape
    check_attention(config.model.attention, shape.d_model // shape.num_heads, DTYPES[config.train.precision], device)


def lacking_memory(config: RunConfig, device: torch.device) -> str:
    """A message if the run cannot fit into memory, else "". Needs no model: a huge one takes long to fail."""
    shape, train = config.model.shape, config.train
    world_size = comm.world_size()
    strategy = config.parallel.strategy_for(world_size)
    sharded = strategy in SHARDED or is_place(strategy)  # a plug-in may shard
    needed = least_training_bytes(
        shape,
        train.batch_size // world_size,
        train.batch_size // train.gradient_accumulation_steps // world_size,
        weight_parts=world_size if sharded else 1,
        state_parts=world_size if sharded or config.parallel.shard_optimizer else 1,
        weight_bytes=2 if train.weight_dtype == "bf16" else 4,
        loss_chunk_tokens=train.loss_chunk_tokens,
    )
    there = memory_bytes(device)
    if device.type == "cpu" and there is not None:
        there //= local_world_size()
    if there is None or needed <= there:
        return ""
    names = ("vocab_size", "context_length", "d_model", "d_ff", "num_layers")
    sizes = [f"model.{name} {getattr(shape, name)}" for name in names]
    sizes += [f"train.{name} {getattr(train, name)}" for name in ("batch_size", "gradient_accumulation_steps")]
    return (
        f"{', '.join(sizes)}: to train this needs at least {needed / 2**30:,.1f} GiB, and {device} has "
        f"{there / 2**30:,.1f} GiB"
    )
