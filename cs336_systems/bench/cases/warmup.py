"""The case `warmup`: what the first steps of a process cost, by measuring after none, one, two or five of them."""

from dataclasses import dataclass
from typing import Literal

from ..case import Case, swept
from ..outcome import each
from .model import ModelBench, measure


@dataclass(frozen=True, kw_only=True)
class WarmupBench(ModelBench):
    """A workload whose step times are kept one by one."""

    mode: Literal["forward", "forward_backward", "train_step"] = swept(
        "forward_backward", sweep=("forward", "forward_backward", "train_step")
    )
    """forward: only the loss, without gradients. train_step: with the optimizer step."""
    warmup: int = swept(0, 1, 2, 5, quick=(0, 1))
    """Steps before the measured ones."""


def variant(config: WarmupBench) -> str:
    """How many steps come before."""
    return f"{config.warmup} warm-up steps"


CASE = Case(
    name="warmup",
    about="The first steps of a process, after none, one, two and five warm-up steps.",
    module=__name__,
    config=WarmupBench,
    variant=variant,
    measure=each("warmup", variant, measure),
    isolated=True,
)
