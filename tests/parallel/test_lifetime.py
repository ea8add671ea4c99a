"""A wrapped model is freed with the last references to it, so that one can be trained after another."""

import gc
import time
import weakref

import pytest

from cs336_systems.parallel import STRATEGIES, Options, comm
from tests.distributed import run_ranks
from tests.parallel.models import adamw, batch_of, build, train_step

DISTINCT = {make: name for name, make in reversed(STRATEGIES.items())}.values()  # each under its first name


def left_after_training(name: str) -> list[str]:
    """The objects of a strategy that are still alive after two steps and its deletion."""
    module = build("transformer")
    strategy = STRATEGIES[name](module, Options())
    optimizer = adamw(strategy.parameters())
    for step in range(2):
        train_step(strategy, optimizer, batch_of(step).chunk(comm.world_size())[comm.rank()])
    first = next(strategy.parameters())
    references = {"module": module, "strategy": strategy, "parameter": first, "gradient": first.grad}
    weak = {what: weakref.ref(thing) for what, thing in references.items()}
    del module, strategy, optimizer, first, references
    deadline = time.monotonic() + 10
    while True:
        gc.collect()
        left = [what for what, reference in weak.items() if reference() is not None]
        # gloo's thread frees its input a moment after the transfer is done.
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.01)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", DISTINCT)
def test_a_trained_model_is_freed_with_its_strategy(name: str, world_size: int) -> None:
    assert run_ranks(left_after_training, world_size, name) == [[]] * world_size
