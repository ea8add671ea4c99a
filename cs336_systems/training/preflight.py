"""Checks before anything is made: does the run fit its device, its processes and the installed packages?"""

import torch

from ..config.checks import is_import_path, require_field
from ..config.run import SHARDED, RunConfig
from ..kernels.attention import check_attention
from ..machine.hardware import DTYPES, autocast, check_precision, memory_bytes
from ..parallel import comm
from ..parallel.ranks import local_world_size
from ..planner.accounting import least_training_bytes
from ..planner.job import MASTER_BYTES
from .auto import choose_offload, why_not_compiled
from .batches import micro_batch_size
from .build import strategy_of
from .metrics import check_packages


def check_config(config: RunConfig, device: torch.device) -> None:
    """Raise ValueError if the run cannot train on this device, with this number of processes or these packages."""
    config.check_world_size(comm.world_size())
    config = config.resolved_for(comm.world_size())
    check_precision(device, config.train.precision)
    if config.train.cuda_graph is True and device.type != "cuda":
        raise ValueError(
            f"train.cuda_graph is true: it needs a CUDA device, and train.device is {device.type!r}; give "
            "--train.cuda_graph false, or a configuration for a CPU"
        )
    if config.train.compile is True or config.train.compile_memory_budget < 1:
        reason = why_not_compiled(device)
        accepted = f"false, with train.compile_memory_budget 1, because PyTorch cannot compile here: {reason}"
        require_field(config.train, "train.compile", reason is None, accepted)
    if shortage := memory_shortage(config, device):
        raise ValueError(shortage)
    choose_offload(config, device)
    strategy_of(config)
    shape = config.model.shape
    group = shape.num_heads // shape.kv_heads
    dtype, has_window = DTYPES[config.train.precision], shape.num_windowed > 0
    attention = config.model.attention
    limits = has_window, config.data.documents
    length = min(shape.context_length, 256)
    with autocast(device, config.train.precision if config.train.has_masters else "fp32"):  # as in the training loop
        check_attention(attention, shape.head_size, dtype, device, group, *limits, config.train.keeps_attention, length)
    check_packages(config.log)


def memory_shortage(config: RunConfig, device: torch.device) -> str:
    """The message for a run that cannot fit into memory, or "". Builds no model: a huge one takes long to fail."""
    shape, train = config.model.shape, config.train
    world_size = comm.world_size()
    parallel = config.parallel
    sharded = parallel.strategy in SHARDED or is_import_path(parallel.strategy)  # a plug-in may shard
    needed = least_training_bytes(
        shape,
        train.batch_size // world_size,
        micro_batch_size(train, world_size),
        weight_parts=world_size if sharded else 1,
        state_parts=world_size if sharded or parallel.shard_optimizer else 1,
        weight_bytes=2 if train.weight_dtype == "bf16" else 4,
        master_bytes=MASTER_BYTES[train.precision] if train.has_masters else 0,
        loss_chunk_tokens=train.loss_chunk_tokens,
        muon=config.optimizer.name == "muon",
    )
    available = memory_bytes(device)
    if device.type == "cpu" and available is not None:
        available //= local_world_size()
    if available is None or needed <= available:
        return ""
    names = ("vocab_size", "context_length", "d_model", "d_ff", "num_layers")
    sizes = [f"model.{name} {getattr(shape, name)}" for name in names]
    sizes += [f"train.{name} {getattr(train, name)}" for name in ("batch_size", "gradient_accumulation_steps")]
    return (
        f"{', '.join(sizes)}: to train this needs at least {needed / 2**30:,.1f} GiB, and {device} has "
        f"{available / 2**30:,.1f} GiB"
    )
