"""The assignment's test of the sharded optimizer under the handout's name, through the adapter.

Its own tests, which ask for much more, are in `tests/parallel/test_zero1.py`.
"""

import pytest
import torch
from torch import Tensor

from tests.adapters import get_sharded_optimizer
from tests.distributed import run_ranks
from tests.parallel.models import batch_of, build, mean_loss


def weights_after_ten_steps(model_name: str, sharded: bool) -> dict[str, Tensor]:
    model = build(model_name)
    make = get_sharded_optimizer if sharded else lambda params, cls, **kwargs: cls(params, **kwargs)
    optimizer = make(model.parameters(), torch.optim.AdamW, lr=0.1, weight_decay=0.1, betas=(0.9, 0.999), eps=1e-8)
    for step in range(10):
        optimizer.zero_grad()
        mean_loss(model, batch_of(step)).backward()
        optimizer.step()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("model_name", ["transformer", "awkward"])
def test_sharded_optimizer(model_name: str) -> None:
    """All ranks train on the same batches, so their weights are those of one process to the last bit."""
    expected = run_ranks(weights_after_ten_steps, 1, model_name, False)[0]
    for weights in run_ranks(weights_after_ten_steps, 2, model_name, True):
        for name, weight in expected.items():
            assert torch.equal(weights[name], weight), name
