"""Transfers by copy engines: on two GPUs; and on a CPU, between processes that share memory and wait for each copy."""

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cs336_systems.parallel import comm, peer_memory
from cs336_systems.parallel.fsdp import FSDP
from tests.distributed import run_ranks
from tests.parallel.models import check_training, sgd, train_on_ranks


def test_a_cpu_does_not_read_peers_and_a_gpu_only_if_it_is_allowed_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_memory, "world_size", lambda: 2)
    monkeypatch.setattr(peer_memory, "_can_read_peers", lambda device, ranks: True)
    assert not peer_memory.can_read_peers(torch.device("cpu"))
    assert peer_memory.can_read_peers(torch.device("cuda", 0))
    monkeypatch.setattr(comm, "allows_copy_engines", False)
    assert not peer_memory.can_read_peers(torch.device("cuda", 0))


def test_tensors_of_a_buffer_begin_at_multiples_of_512_bytes() -> None:
    assert peer_memory.bytes_of([torch.Size([3, 5]), torch.Size([256])], torch.bfloat16) == 512 + 512
    assert peer_memory.bytes_of([torch.Size([257])], torch.bfloat16) == 1024


# On a CPU


class SharedMemory(peer_memory.PeerBuffer):
    """A file for each rank, which all of them map."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        (folder, *_) = comm.all_gather_objects(tempfile.mkdtemp(), "folder of the memory")
        files = [Path(folder, str(rank)) for rank in range(comm.world_size())]
        files[comm.rank()].write_bytes(b"\xff" * nbytes)  # NaN
        comm.barrier("all files are there")
        self._of_ranks = [torch.from_file(str(file), True, nbytes, dtype=torch.uint8) for file in files]

    def tensors(self, shapes: Sequence[torch.Size], dtype: torch.dtype) -> list[list[Tensor]]:
        found, start = [], 0
        for shape in shapes:
            end = start + shape.numel() * dtype.itemsize
            found.append([memory[start:end].view(dtype).view(shape) for memory in self._of_ranks])
            start += peer_memory.bytes_of([shape], dtype)
        return found


def train_in_shared_memory(*args: Any, **kwargs: Any) -> dict[str, Tensor]:
    peers: Any = peer_memory  # in a process of its own
    peers.PeerBuffer, peers.can_read_peers = SharedMemory, lambda device: True
    peers.start_reading = lambda outputs, parts, name: peers.copy_parts(outputs, parts) or comm.Transfer(name)
    return train_on_ranks(*args, **kwargs)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_copies_between_processes_equal_one_process(reshard_after_forward: bool, world_size: int) -> None:
    train = functools.partial(train_in_shared_memory, micro_batches=2)
    check_training("fsdp", "transformer", world_size, sgd, train=train, reshard_after_forward=reshard_after_forward)


# On GPUs


def gathered() -> list[tuple[bool, bool]]:
    """For a module of each number of rows: whether its shards are read by peers, and whether its weight is right."""
    device, found = torch.device("cuda", comm.rank()), []
    for rows in (64, 63):
        torch.manual_seed(0)
        module = nn.Linear(16, rows, device=device)
        x, expected = torch.ones(2, 16, device=device), module(torch.ones(2, 16, device=device)).detach()
        strategy = FSDP(module)
        for _ in range(3):  # a weight that the other rank updates late must not be read before
            torch.cuda._sleep(10**8 * comm.rank())
            with torch.no_grad():
                module.weight += 1
            expected = expected + 16
            right = torch.allclose(strategy(x), expected, atol=1e-4)
            comm.barrier("reading")  # in training, the mean of the replicated gradients
        found.append((strategy._groups[0].is_read_by_peers, right))
    return found


@pytest.mark.multigpu
def test_weights_are_read_after_all_ranks_have_updated_them_and_padded_ones_are_sent() -> None:
    for found in run_ranks(gathered, 2, device="cuda"):
        assert found == [(True, True), (False, True)]
