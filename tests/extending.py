"""The code of docs/extending.md, and its strategy on ranks, which import no more than they need."""

import re
from pathlib import Path

from torch import Tensor

from cs336_systems.parallel import Options, comm, get_strategy
from tests.parallel.models import adamw, batch_of, build, train_step

DOCUMENT = (Path(__file__).parents[1] / "docs/extending.md").read_text()
STEPS = 4


def code(name: str) -> str:
    """The block of the document under the comment with this name."""
    found = re.search(rf"^<!-- {re.escape(name)} -->\n\n```python\n(.*?)^```$", DOCUMENT, re.M | re.S)
    assert found, name
    return found[1]


def train_together(model: str, micro_batches: int) -> dict[str, Tensor]:
    """On a rank in the folder of together.py: the weights after some training."""
    module = build(model, seed=comm.rank())
    strategy = get_strategy("together:TogetherDDP")(module, Options())
    optimizer = adamw(module.parameters())
    for step in range(STEPS):
        train_step(strategy, optimizer, batch_of(step).chunk(comm.world_size())[comm.rank()], micro_batches)
    return strategy.full_state_dict()
