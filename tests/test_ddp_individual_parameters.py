"""The assignment's test of 2025 of data parallelism parameter by parameter, under the handout's name."""

from tests.test_ddp import check


def test_DistributedDataParallelIndividualParameters() -> None:
    check("get_ddp_individual_parameters", (), "ddp_individual_parameters_on_after_backward")
