"""The code of docs/extending.md, and its strategy on ranks, which import no more than they need."""

import re
import sys
from pathlib import Path
from types import ModuleType

from torch import Tensor

from cs336_systems import parallel
from cs336_systems.parallel import STRATEGIES, Options, comm
from tests.parallel.models import adamw, batch_of, build, train_step

DOCUMENT = (Path(__file__).parents[1] / "docs/extending.md").read_text()
STEPS = 4


def code(name: str) -> str:
    """The block of the document under the comment with this name."""
    found = re.search(rf"^<!-- {re.escape(name)} -->\n\n```python\n(.*?)^```$", DOCUMENT, re.M | re.S)
    assert found, name
    return found[1]


def module_of(name: str, package: ModuleType) -> ModuleType:
    """The block as the module that a file of this name in a package would be."""
    module = ModuleType(f"{package.__name__}.{name.removesuffix('.py')}")
    module.__package__ = package.__name__
    exec(compile(code(name), name, "exec"), module.__dict__)
    return module


def train_together(model: str, micro_batches: int) -> dict[str, Tensor]:
    """On a rank, whose process ends with the test: steps 1 and 2 of a strategy; the weights after some training."""
    written = module_of("together.py", parallel)
    sys.modules[written.__name__] = written
    exec(code("STRATEGIES"), parallel.__dict__)
    module = build(model, seed=comm.rank())
    strategy = STRATEGIES["together"](module, Options())
    optimizer = adamw(module.parameters())
    for step in range(STEPS):
        train_step(strategy, optimizer, batch_of(step).chunk(comm.world_size())[comm.rank()], micro_batches)
    return strategy.full_state_dict()
