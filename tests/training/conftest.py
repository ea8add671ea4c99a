"""Fixtures for tests of training."""

import pytest
import torch

from cs336_systems.config.run import RunConfig
from cs336_systems.training import train

from .helpers import make_config
from .runs import EVERY_FIVE


@pytest.fixture
def drawn() -> None:
    """Asks for the loss curve to be drawn."""


@pytest.fixture(autouse=True)
def _fast_reports(request: pytest.FixtureRequest) -> None:
    """Drawing takes longer than training these models: only the tests of a run's pictures do it."""
    if "drawn" not in request.fixturenames:
        request.getfixturevalue("unrendered")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A run of ten steps with checkpoints 5 and 10. Not to be written to: `copy_of` makes one that may be."""
    config = make_config(tmp_path_factory.mktemp("finished"), checkpoint=EVERY_FIVE)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    train(config)
    torch.set_num_threads(threads)
    return config
