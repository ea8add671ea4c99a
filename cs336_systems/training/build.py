"""What is done to a model before training: cast, compiled, checkpointed, wrapped; and its optimizer."""

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cs336_basics.model import LayerCache, TransformerLM
from cs336_basics.optimizer import AdamW

from ..config.checks import is_place, require, shown
from ..config.run import SHARDED, OptimizerConfig, ParallelConfig, RunConfig, TrainConfig
from ..kernels.attention import check_attention, get_attention
from ..kernels.linear_cross_entropy import chunked_linear_cross_entropy, loss_and_gradient
from ..machine.hardware import DTYPES, check_precision, memory_bytes
from ..parallel import Maker, Options, comm, get_strategy
from ..parallel.ranks import local_world_size
from ..parallel.strategy import Strategy
from ..planner.accounting import least_training_bytes
from .load import LoadedModel

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


def prepare_model(model: TransformerLM, config: TrainConfig) -> None:
    """Do to a model, in place, what the configuration asks for, before a strategy wraps it."""
    if config.weight_dtype == "bf16":
        cast_weights(model, torch.bfloat16)
    if config.compile:
        compile_model(model, config.compile_memory_budget)
    checkpoint_activations(model, config)
    if config.loss_chunk_tokens is not None:
        rows_loss = compiled(loss_and_gradient) if config.compile else loss_and_gradient
        settings: dict[str, Any] = dict(chunk_tokens=config.loss_chunk_tokens, rows_loss=rows_loss)
        model.lm_head.loss = functools.partial(chunked_linear_cross_entropy, **settings)


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast all parameters to a dtype, and nothing else.

    Not `model.to(dtype)`: the rotary tables are float32, because in bfloat16 a far position's angle would be anything.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def build_optimizer(
    model: torch.nn.Module, config: OptimizerConfig, sharded: bool | Literal["simple"] = False
) -> torch.optim.Optimizer:
    """AdamW with decay on matrices and none on vectors (norm weights); sharded: each rank has a part of the state."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    common: dict[str, Any] = dict(lr=config.lr, betas=config.betas, eps=config.eps)
    cls: type[torch.optim.Optimizer] = AdamW
    if config.implementation != "own":
        cls = torch.optim.AdamW
        common |= {name: config.implementation == f"torch_{name}" for name in ("fused", "foreach")}
    if sharded == "simple":
        from ..parallel.zero1_simple import SimpleShardedOptimizer

        return SimpleShardedOptimizer(groups, cls, **common)
    if sharded:
        from ..parallel.zero1 import ShardedOptimizer

        return ShardedOptimizer(groups, cls, **common)
    return cls(groups, **common)


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """torch.compile, with a backward pass that computes in the dtypes of its tensors, as the uncompiled one does.

    By default PyTorch traces the backward pass under the autocast that surrounds the forward pass, even for code that
    had switched autocast off: `naive` attention would get its gradients from 16-bit products (PyTorch's issue 179804).
    The setting belongs to each thread (in older versions, to the process), and compiling takes place in the thread that
    calls first.
    """
    return functools.partial(_in_own_types, torch.compile(function))


def _in_own_types(compiled: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    if torch._functorch.config.backward_pass_autocast != "off":
        torch._functorch.config.backward_pass_autocast = "off"
    return compiled(*args, **kwargs)


def compile_model(model: TransformerLM, memory_budget: float = 1.0) -> None:
    """torch.compile in place, block by block: one compilation serves all, so start-up does not grow with their number.

    Of the blocks only their own forward, so that what a strategy attaches to them from outside stays outside of the
    graphs; the last norm too.
    memory_budget: as in `TrainConfig.compile_memory_budget`.
    """
    for layer in model.layers:
        layer.forward = compiled(layer.forward)
        if memory_budget < 1:
            layer.forward = functools.partial(_within_budget, layer.forward, memory_budget)
    model.ln_final.compile()


def _within_budget(compiled: Callable[..., Any], memory_budget: float, *inputs: Any) -> Any:
    """Call a compiled function; if this call compiles it, that happens with this share of activations to keep."""
    with torch._functorch.config.patch(activation_memory_budget=memory_budget):
        return compiled(*inputs)


def checkpoint_activations(model: TransformerLM, config: TrainConfig) -> None:
    """Make blocks drop their activations and recompute them in the backward pass (Chen et al. 2016).

    What stays in memory is the input of each checkpointed block, or of the first one of a group. Groups are
    checkpointed from outside of their blocks, so the recompute gathers the sharded weights of a whole group.
    """
    if config.checkpointed is None:
        return
    policy, number = config.checkpointed
    # Blocks draw no random numbers, so their state need not be saved.
    again = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if policy != "groups":
        for layer in list(model.layers)[slice(number) if policy == "first" else slice(None, None, number)]:
            layer.forward = functools.partial(again, layer.forward)
        return
    through_blocks = model.through_blocks

    def in_groups(x: Tensor, cache: list[LayerCache] | None = None) -> Tensor:
        for first in range(0, len(model.layers), number):
            x = again(through_blocks, x, cache, first, first + number)
        return x

    model.through_blocks = in_groups  # type: ignore[method-assign, assignment]


def strategy_of(config: RunConfig) -> Maker:
    """The strategy that the configuration asks for, for this number of processes.

    Raises ValueError if there is none, or if it does not take an option that is given. A bucket size is only for speed,
    so that a strategy may do without.
    """
    name = config.parallel.strategy_for(comm.world_size())
    strategy, usual = get_strategy(name), ParallelConfig()
    for option in ("grad_dtype", "reshard_after_forward"):
        value, default = getattr(config.parallel, option), getattr(usual, option)
        accepted = f"{shown(default)} with parallel.strategy {name!r}, which does not take it"
        require(value == default or option in strategy.options, f"parallel.{option}", value, accepted)
    return strategy


def wrap_model(config: RunConfig, model: TransformerLM) -> Strategy:
    """The model in the strategy that the configuration asks for. Raises ValueError as `strategy_of` does."""
    options = Options(
        bucket_size_mb=config.parallel.group_size_mb(),
        grad_dtype=DTYPES.get(config.parallel.grad_dtype),
        compute_dtype=None if config.train.precision == "fp32" else DTYPES[config.train.precision],
        reshard_after_forward=config.parallel.reshard_after_forward,
    )
    return strategy_of(config)(model, options)


def initial_model(config: RunConfig, device: torch.device, weights: LoadedModel | None) -> TransformerLM:
    """A freshly initialized model, or one with these weights. A strategy sends rank 0's weights to all ranks."""
    torch.manual_seed(config.train.seed)
    with device:  # initialize the weights where they stay: 2.7 billion of them take a minute on a CPU
        attention = get_attention(config.model.attention)
        model = TransformerLM(**dataclasses.asdict(config.model.shape), attention=attention)
    if weights is not None:
        model.load_state_dict(weights.state_dict)
        logger.info("weights: from %s", weights.checkpoint)
    return model


def check_config(config: RunConfig, device: torch.device) -> None:
    """Raise ValueError if this run cannot train on this device, or with this many processes."""
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
    """A message if the run cannot fit, else "". Checked before the model is built: huge ones take forever to fail."""
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
