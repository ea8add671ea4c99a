"""Parallel strategies by name. Each wraps a module; the training loop does not know which one it has."""

import inspect
from dataclasses import dataclass, fields

import torch
from torch import nn

from ..config.checks import import_object, require
from ..config.run import STRATEGIES as STRATEGY_PATHS
from .strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the strategies. Each strategy takes the options that its constructor names."""

    bucket_size_mb: float | None = None
    """Size of the gradients that are sent together, in 2^20 bytes (default: the strategy's)."""
    grad_dtype: torch.dtype | None = None
    """Dtype in which gradients are sent (default: their own; PyTorch FSDP2: reduce_dtype)."""
    compute_dtype: torch.dtype | None = None
    """Dtype of sharded weights in communication and computation (default: their own; PyTorch FSDP2: param_dtype)."""
    reshard_after_forward: bool = True
    """Whether sharded weights are freed after the forward pass and gathered again for the backward pass."""


_OPTIONS = tuple(field.name for field in fields(Options))


@dataclass(frozen=True)
class StrategyFactory:
    """Makes the strategy at "module:Class". The module is imported at first use."""

    import_path: str

    @property
    def strategy(self) -> type[Strategy]:
        """The class. Raises ValueError naming `parallel.strategy` if there is none."""
        found = import_object("parallel.strategy", self.import_path)
        is_one = isinstance(found, type) and issubclass(found, Strategy)
        require(is_one, "parallel.strategy", self.import_path, f"a subclass of {Strategy.__module__}.Strategy")
        return found

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the `Options` that the strategy takes."""
        named = inspect.signature(self.strategy).parameters
        return tuple(name for name in _OPTIONS if name in named)

    def __call__(self, module: nn.Module, options: Options) -> Strategy:
        """The strategy around a module, with the options that it takes."""
        given = {name: value for name in self.options if (value := getattr(options, name)) is not None}
        return self.strategy(module, **given)


STRATEGIES = {name: StrategyFactory(f"{__name__}.{path}") for name, path in STRATEGY_PATHS.items()}


def get_strategy(name: str) -> StrategyFactory:
    """The factory of a registered strategy, or of your own at "module:Class".

    Raises ValueError naming `parallel.strategy` if it cannot be imported, is no Strategy or needs other arguments.
    """
    factory = STRATEGIES.get(name, StrategyFactory(name))
    try:
        inspect.signature(factory.strategy).bind(None, **dict.fromkeys(factory.options))
    except TypeError as error:
        accepted = f"a class whose constructor needs only a module, and perhaps {', '.join(_OPTIONS)}"
        raise ValueError(f"parallel.strategy is {name!r}: it must be {accepted}: {error}") from error
    return factory
