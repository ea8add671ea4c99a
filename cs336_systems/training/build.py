"""Builds a model for training: draws or loads weights, casts, compiles, checkpoints, wraps; and its optimizer."""

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cs336_basics.attention import Documents
from cs336_basics.model import Embedding, LayerCache, Linear, LMHead, TransformerLM
from cs336_basics.optimizer import AdamW

from ..config.checks import require, shown
from ..config.run import OptimizerConfig, ParallelConfig, RunConfig, TrainConfig
from ..kernels.attention import get_attention, is_attention
from ..kernels.fp8_linear import use_fp8
from ..kernels.linear_cross_entropy import chunked_linear_cross_entropy, loss_and_gradient
from ..kernels.packed_linear import use_packed
from ..machine.flat import flatten
from ..machine.hardware import DTYPES
from ..parallel import Options, StrategyFactory, comm, get_strategy
from ..parallel.strategy import Strategy
from ..planner.accounting import orthogonalization_flops
from .load import LoadedModel
from .muon import Muon
from .offload import Offload
from .optimizer import FusedAdamW

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


def prepare_model(model: TransformerLM, config: TrainConfig) -> None:
    """Cast, compile and checkpoint a model in place, as the configuration says. A strategy wraps it afterwards.

    Raises ValueError for a model that another Trainer has made 16-bit: it lacks the float32 weights.
    """
    if config.weight_dtype == "bf16":
        cast_weights(model, torch.bfloat16)
    elif narrow := {str(p.dtype) for p in model.parameters() if p.dtype.itemsize < 4}:
        raise ValueError(f"the model has weights in {', '.join(sorted(narrow))}: they must be float32")
    if config.precision == "fp8":
        use_fp8(model.layers)
    prepare_blocks(model, config)
    if config.loss_chunk_tokens is not None:
        rows_loss = Compiled(loss_and_gradient) if config.compile else loss_and_gradient
        settings: dict[str, Any] = dict(chunk_tokens=config.loss_chunk_tokens, rows_loss=rows_loss)
        model.lm_head.loss = functools.partial(chunked_linear_cross_entropy, **settings)


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters to a dtype. The rotary tables stay float32: bfloat16 is too coarse for far positions."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def narrow_matrices(model: TransformerLM, config: TrainConfig) -> dict[str, Tensor]:
    """Make the weights of linear layers 16-bit, in place; return the float32 ones by name, rank 0's on all ranks.

    In bfloat16 the residual stream is 16-bit too, from the embedding's output on, as it is with sharded weights. In
    float16 it might overflow. A head that is tied to the embedding stays float32. The gradients are 16-bit too, except
    for sums of 16-bit products: those of several micro-batches, and of the head whose loss is computed in chunks. FSDP
    rounds the latter to 16 bits to send it.
    """
    masters: dict[str, Tensor] = {}
    dtype = DTYPES[config.precision]
    embeddings = {module.weight for module in model.modules() if isinstance(module, Embedding)}
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module.weight not in embeddings:
            masters[f"{name}.weight"] = module.weight.data
            module.weight.data = module.weight.data.to(dtype)
            is_chunked = isinstance(module, LMHead) and config.loss_chunk_tokens is not None
            if config.gradient_accumulation_steps > 1 or is_chunked:
                module.weight.grad_dtype = torch.float32
    if dtype == torch.bfloat16:
        model.token_embeddings.register_forward_hook(_in_bfloat16)
    comm.broadcast(list(masters.values()), "broadcast of the master weights")
    with torch.no_grad():
        for name, master in masters.items():
            model.get_parameter(name).copy_(master)
    return masters


def pack_matrices(model: TransformerLM) -> None:
    """Move the weights of each block's linear layers into one tensor, so that those with one input are one product.

    They stay the same parameters. Sorted by width, q, k and v are neighbours, and so are w1 and w3, unless d_ff is
    d_model.
    """
    for layer in model.layers:
        weights = [module.weight for module in layer.modules() if isinstance(module, Linear)]
        flatten(sorted(weights, key=lambda weight: weight.shape[1]))


def _in_bfloat16(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:  # a lambda could not be pickled
    return output.bfloat16()


def masters_of(strategy: Strategy, whole: dict[str, Tensor]) -> dict[nn.Parameter, Tensor]:
    """The master weights by parameter; of a sharded one, this rank's rows. Empties `whole`, which has them by name."""
    shards, masters = strategy.shards(), {}
    for name, p in strategy.module.named_parameters():
        if name in whole:
            master = whole.pop(name)
            if name in shards:
                first_row = shards[name][1]
                master = master[first_row : first_row + len(p)].clone()
            masters[p] = master
    return masters


def build_optimizer(
    model: TransformerLM,
    config: OptimizerConfig,
    sharded: bool | Literal["simple"] = False,
    **fused: Any,
) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices and none on vectors (norm weights); with muon, Muon for the blocks' matrices.

    sharded: each rank keeps a part of the state (ZeRO-1); "simple" is the version to read first. fused: further
    arguments of `FusedAdamW`, used by the implementation "fused" (and so by muon) alone.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices: dict[Tensor, None] = {}  # Muon's, in order
    if config.name == "muon":
        matrices = {p: None for p in model.layers.parameters() if p.requires_grad and p.ndim == 2}
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2 and p not in matrices], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    if matrices:
        ratio = 1.0 if config.muon_lr is None else config.muon_lr / config.lr
        muon = {"weight_decay": config.weight_decay, "momentum": config.muon_momentum, "lr_ratio": ratio}
        groups.append({"params": list(matrices), **muon})
    common: dict[str, Any] = dict(lr=config.lr, betas=config.betas, eps=config.eps)
    cls: type[torch.optim.Optimizer] = AdamW
    if config.implementation == "fused":
        cls = Muon if config.name == "muon" else FusedAdamW
        common |= fused
    elif config.implementation != "own":
        cls = torch.optim.AdamW
        common |= {name: config.implementation == f"torch_{name}" for name in ("fused", "foreach")}
    if sharded == "simple":
        from ..parallel.zero1_simple import SimpleShardedOptimizer

        return SimpleShardedOptimizer(groups, cls, **common)
    if sharded:
        from ..parallel.zero1 import ShardedOptimizer

        work = {p: orthogonalization_flops(*p.shape) for p in matrices}
        return ShardedOptimizer(groups, cls, work=work, **common)
    return cls(groups, **common)


class Compiled(Generic[P, T]):
    """torch.compile, with a backward pass that computes in the dtypes of its tensors, as in eager mode.

    By default PyTorch traces the backward pass under the autocast around the forward pass, even for code that had
    switched autocast off: `naive` attention would get its gradients from 16-bit products (PyTorch's issue 179804). The
    setting belongs to a thread (in older versions, to the process), so it is made in the thread that calls.

    A copy has a copy of the function: the compiled blocks of a copied model compute with its own weights.
    """

    def __init__(self, function: Callable[P, T]) -> None:
        self.function, self._call = function, torch.compile(function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        if torch._functorch.config.backward_pass_autocast != "off":
            torch._functorch.config.backward_pass_autocast = "off"
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return Compiled, (self.function,)


def _within_budget(function: Callable[..., T], memory_budget: float, *inputs: Any) -> T:
    # The first call compiles, and reads the setting.
    with torch._functorch.config.patch(activation_memory_budget=memory_budget):
        return function(*inputs)


def _keep_attention(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_attention(operator) else CheckpointPolicy.PREFER_RECOMPUTE


# Blocks draw no random numbers, so the generators' states need not be saved.
_checkpointed = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
_selective = functools.partial(create_selective_checkpoint_contexts, _keep_attention)


def prepare_blocks(model: TransformerLM, config: TrainConfig) -> None:
    """Compile and checkpoint the blocks in place, as the configuration says, and compile the final norm.

    Compiled blocks share one compilation, so start-up does not grow with depth. A strategy's hooks stay outside. A
    block's products with one input are one, except in FP8.

    Checkpointed blocks keep only the input of each block, or of each group, and recompute the rest in the backward pass
    (Chen et al. 2016). A group is checkpointed around its blocks, so FSDP gathers its weights again. A block that keeps
    attention's outputs is checkpointed inside its compiled graph: around it, the outputs would be kept in memory that
    compiled code may reuse. Offloading goes around everything else, so what it copies is what a block keeps.
    """
    if config.compile and config.keeps_attention:  # PyTorch would warn of in-place operations, which blocks lack
        logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    policy, number = config.checkpointed or ("none", 1)
    chosen = {"first": slice(number), "every": slice(None, None, number)}.get(policy, slice(0))
    checkpointed_layers = set(list(model.layers)[chosen])
    offload = Offload(model, config.offloaded_blocks(len(model.layers)), number if policy == "groups" else 1)
    for i, layer in enumerate(model.layers):
        is_checkpointed, budget = layer in checkpointed_layers, config.compile_memory_budget
        if is_checkpointed and config.keeps_attention:
            keep = _selective if config.compile or i >= offload.count else offload.keep_attention
            layer.forward = functools.partial(_checkpointed, layer.forward, context_fn=keep)
            budget = 1.0  # the rule alone says what is kept: PyTorch fails to compile it under a budget
        if config.compile:
            layer.forward = Compiled(layer.forward)
            if budget < 1:
                layer.forward = functools.partial(_within_budget, layer.forward, budget)
            if config.packs:
                layer.forward = use_packed(layer, layer.forward)
        if is_checkpointed and not config.keeps_attention:
            layer.forward = functools.partial(_checkpointed, layer.forward)
        if offload.count and policy != "groups":
            layer.forward = functools.partial(offload.run, layer.forward, i, layer)
    if config.compile:
        model.ln_final.compile()
    if policy != "groups":
        return
    group = functools.partial(_checkpointed, model.through_blocks)
    firsts = range(0, len(model.layers), number)
    model.through_blocks = functools.partial(_in_groups, group, firsts, offload)  # type: ignore[method-assign]


def _in_groups(
    group: Callable[..., Tensor], firsts: range, offload: Offload, x: Tensor,
    cache: list[LayerCache] | None = None, documents: Documents | None = None,
) -> Tensor:  # fmt: skip
    for first in firsts:
        x = offload.run(group, first, None, x, cache, first, first + firsts.step, documents)
    return x


def strategy_of(config: RunConfig) -> StrategyFactory:
    """The configuration's strategy, which is resolved.

    Raises ValueError if there is none, or if it does not take an option that is set. A strategy may ignore the bucket
    size, which matters only for speed.
    """
    parallel, defaults = config.parallel, ParallelConfig()
    strategy = get_strategy(parallel.strategy)
    for option in ("grad_dtype", "reshard_after_forward"):
        value, default = getattr(parallel, option), getattr(defaults, option)
        accepted = f"{shown(default)} with parallel.strategy {parallel.strategy!r}, which does not take it"
        require(value == default or option in strategy.options, f"parallel.{option}", value, accepted)
    return strategy


def wrap_model(config: RunConfig, model: TransformerLM) -> Strategy:
    """The model in the configuration's strategy. Raises ValueError as `strategy_of` does."""
    options = Options(
        bucket_size_mb=config.parallel.bucket_size_mb,
        grad_dtype=DTYPES.get(config.parallel.grad_dtype),
        compute_dtype=None if config.train.precision == "fp32" else DTYPES[config.train.precision],
        reshard_after_forward=config.parallel.reshard_after_forward,
    )
    return strategy_of(config)(model, options)


def initial_model(config: RunConfig, device: torch.device, weights: LoadedModel | None) -> TransformerLM:
    """A newly initialized model, or one with the given weights. A strategy later sends rank 0's to all ranks."""
    torch.manual_seed(config.train.seed)
    with device:  # initialize the weights where they stay: 2.7 billion of them take a minute on a CPU
        attention = get_attention(config.model.attention)
        model = TransformerLM(**dataclasses.asdict(config.model.shape), attention=attention)
    if weights is not None:
        model.load_state_dict(weights.state_dict)
        logger.info("weights: from %s", weights.checkpoint)
    return model
