"""Every transfer, strategy and checkpoint in process groups of any backend, with tensors on the CPU and on GPUs."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.parallel import comm
from cs336_systems.parallel.failure import CollectiveError, named, set_step
from cs336_systems.training import pipeline
from tests.distributed import run_ranks
from tests.training.helpers import checkpoint_path, loss_rows, make_config

MIXED = "cpu:gloo,cuda:nccl"
PLACES = [
    ("gloo", "cpu"),
    pytest.param("gloo", "cuda", marks=pytest.mark.gpu),
    pytest.param(MIXED, "cpu", marks=pytest.mark.gpu),
    pytest.param(MIXED, "cuda", marks=pytest.mark.multigpu),
    pytest.param("nccl", "cuda", marks=pytest.mark.multigpu),
]


SENT_TYPES = (torch.float64, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.int64, torch.uint32)


def values(rank: int, device: str) -> list[Tensor]:
    """Three tensors of two dtypes, other values on each rank."""
    return [
        torch.arange(6.0, device=device).reshape(2, 3) + rank,
        torch.full((4,), 2.0 * rank, device=device),
        torch.full((3, 2), 1.0 + rank, device=device, dtype=torch.float64),
    ]


def every_transfer(device: str) -> dict[str, list[Any]]:
    rank, world_size = comm.rank(), comm.world_size()
    averaged, sent_in_half = values(rank, device), values(rank, device)[:2]
    comm.start_mean(averaged, "mean").wait()
    comm.start_mean(sent_in_half, "mean in half", torch.float16).wait()
    rows = values(rank, device)[:2]
    gathered = [t.new_empty(world_size * len(t), *t.shape[1:]) for t in rows]
    comm.start_all_gather(gathered, rows, "gather").wait()
    parts = [t[: len(t) // world_size].clone() for t in rows]
    comm.start_reduce_scatter_mean(parts, rows, "scatter").wait()
    sent = [
        values(rank, device)[0].T,
        torch.tensor([rank == 1, True], device=device),
        torch.tensor([rank, 7], device=device, dtype=torch.uint16)[::2],
        *(torch.full((3,), 1.0 + rank, device=device).to(dtype) for dtype in SENT_TYPES),
    ]
    comm.start_broadcasts([(tensor, 1) for tensor in sent], "broadcast").wait()
    comm.check_same({"length": 3}, "facts")
    sent = [t.to(torch.complex64) for t in sent]
    result = dict(averaged=averaged, sent_in_half=sent_in_half, gathered=gathered, parts=parts, sent=sent)
    return {name: [t.tolist() for t in tensors] for name, tensors in result.items()}


@pytest.mark.parametrize("backend, device", PLACES)
def test_transfers(backend: str, device: str) -> None:
    ranks = [values(rank, "cpu") for rank in range(2)]
    mean = [(a + b) / 2 for a, b in zip(*ranks, strict=True)]
    for rank, found in enumerate(run_ranks(every_transfer, 2, device, device=device, backend=backend)):
        expected = dict(
            averaged=mean,
            sent_in_half=mean[:2],
            gathered=[torch.cat(pair) for pair in list(zip(*ranks, strict=True))[:2]],
            parts=[t.chunk(2)[rank] for t in mean[:2]],
            sent=[ranks[1][0].T, torch.ones(2), torch.ones(1), *[torch.full((3,), 2.0)] * len(SENT_TYPES)],
        )
        for name, tensors in expected.items():
            for actual, right in zip(found[name], tensors, strict=True):
                assert actual == right.tolist(), name


# The group that a run makes for itself on GPUs is MIXED: tests/training has it.
TRAINING_ON_GPUS: list[Any] = [PLACES[1], PLACES[2], PLACES[4]]
ON_CPU: list[dict[str, Any]] = [
    dict(strategy="individual"),
    dict(strategy="fsdp", reshard_after_forward=False),
    dict(strategy="bucketed", shard_optimizer=True),
    dict(strategy="torch_ddp"),
]
"""The others train on a CPU in tests/training/test_parallel.py; torch_fsdp also in test_checkpoint_strategies.py."""
VARIANTS: list[dict[str, Any]] = [
    *ON_CPU,
    *(dict(strategy=name) for name in ("overlap", "fsdp", "naive", "flat", "bucketed", "fsdp_simple")),
    dict(strategy="naive", shard_optimizer="simple"),
    dict(strategy="torch_fsdp"),
]


def run_and_resume(root: str, device: str, parallel: dict[str, Any]) -> None:
    """Four steps with validations, checkpoints and a sample, then the last two again from the checkpoint between."""
    groups: dict[str, Any] = dict(
        parallel=parallel | dict(bucket_size_mb=0.01),
        model=dict(num_layers=2),
        train=dict(device=device, max_steps=4, validation_interval=2),
        checkpoint=dict(checkpointing_interval=2),
    )
    first = make_config(Path(root), **groups)
    pipeline.train_on(first, torch.device(device))
    again = make_config(Path(root), run="again", resume=str(checkpoint_path(first, 2)), **groups)
    pipeline.train_on(again, torch.device(device))


def every_variant() -> list[Any]:
    """All on GPUs, and some on a CPU."""
    places = [(*place, variant) for place in PLACES[:1] for variant in ON_CPU]
    return places + [
        pytest.param(*place.values, variant, marks=place.marks) for place in TRAINING_ON_GPUS for variant in VARIANTS
    ]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    """The losses of one process on a device."""

    @functools.cache
    def train(device: str) -> list[dict[str, Any]]:
        root = tmp_path_factory.mktemp("alone")
        run_and_resume(str(root), device, {})
        return loss_rows(make_config(root))

    return train


@pytest.mark.parametrize("backend, device, variant", every_variant(), ids=str)
def test_training(
    backend: str,
    device: str,
    variant: dict[str, Any],
    alone: Callable[[str], list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    run_ranks(run_and_resume, 2, str(tmp_path), device, variant, device=device, backend=backend)
    rows, right = loss_rows(make_config(tmp_path)), alone(device)
    assert len(rows) == 4
    for row, wanted in zip(rows, right, strict=True):
        assert row == pytest.approx(wanted, rel=1e-3)
    resumed = loss_rows(make_config(tmp_path, run="again"))
    for row, wanted in zip(resumed[-2:], rows[2:], strict=True):
        assert row == pytest.approx(wanted, rel=1e-4)


# Which rank is blamed


def send_numbers_that_gloo_lacks() -> str:
    sent = torch.ones(4, dtype=torch.uint16)
    with pytest.raises(CollectiveError) as error:
        comm.start_all_gather([sent], [sent[:2]], "gather").wait()
    return str(error.value)


def test_a_refusal_is_told_as_one() -> None:
    said = run_ranks(send_numbers_that_gloo_lacks, 2)
    assert said == [f"rank {rank}: gather failed: Invalid scalar type" for rank in range(2)]


NCCL = "NCCL error in: /pytorch/NCCLUtils.cpp:94, {}, NCCL version 2.28.9\n{}: ...\nLast error:\n{}\n"


@pytest.mark.parametrize(
    "error, said",
    [
        (
            dist.DistBackendError(NCCL.format("invalid usage", "ncclInvalidUsage", "Duplicate GPU detected")),
            "broadcast failed: Duplicate GPU detected",
        ),
        (
            dist.DistBackendError(NCCL.format("remote process exited", "ncclRemoteError", "socketProgress: closed")),
            "broadcast failed, another rank is gone or late: socketProgress: closed",
        ),
        (
            RuntimeError(
                "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:9"
            ),
            "broadcast failed, another rank is gone or late: Connection closed by peer [::1]:9",
        ),
        (dist.DistNetworkError("socket closed"), "broadcast failed, another rank is gone or late: socket closed"),
    ],
)
def test_only_a_lost_rank_is_blamed(error: RuntimeError, said: str) -> None:
    set_step(None)
    with pytest.raises(CollectiveError, match=f"^rank 0: {re.escape(said)}$"), named("broadcast"):
        raise error


def test_out_of_memory_errors_pass_unchanged() -> None:
    with pytest.raises(torch.OutOfMemoryError), named("broadcast"):
        raise torch.OutOfMemoryError("CUDA out of memory")
