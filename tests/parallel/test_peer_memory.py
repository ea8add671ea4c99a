"""Transfers by copy engines: on two GPUs; and on a CPU, between processes that share memory and wait for each copy."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_basics.model import TransformerLM
from cs336_basics.shape import ModelShape
from cs336_systems.parallel import Options, comm, get_strategy, peer_memory
from cs336_systems.parallel.fsdp import FSDP
from cs336_systems.planner.communication import inbox_term
from cs336_systems.planner.job import Job
from tests.distributed import run_ranks
from tests.parallel.models import check_training, sgd, train_on_ranks


def test_a_cpu_does_not_reach_peers_and_a_gpu_only_if_it_is_allowed_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_memory, "world_size", lambda: 2)
    monkeypatch.setattr(peer_memory, "_can_reach_peers", lambda device, ranks: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    assert not peer_memory.can_reach_peers(torch.device("cpu"))
    assert peer_memory.can_reach_peers(torch.device("cuda", 0))
    monkeypatch.setattr(comm, "allows_copy_engines", False)
    assert not peer_memory.can_reach_peers(torch.device("cuda", 0))
    monkeypatch.setattr(comm, "allows_copy_engines", True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:gloo")
    assert not peer_memory.can_reach_peers(torch.device("cuda", 0))


def test_tensors_of_a_buffer_begin_at_multiples_of_512_bytes() -> None:
    assert peer_memory.bytes_of([torch.Size([3, 5]), torch.Size([256])], torch.bfloat16) == 512 + 512
    assert peer_memory.bytes_of([torch.Size([257])], torch.bfloat16) == 1024


# On a CPU


class Files:
    """What PyTorch's symmetric memory offers, in a file for each rank."""

    barriers = 0

    def __init__(self, nbytes: int) -> None:
        (folder, *_) = comm.all_gather_objects(tempfile.mkdtemp(), "folder of the memory")
        files = [Path(folder, str(rank)) for rank in range(comm.world_size())]
        files[comm.rank()].write_bytes(b"\xff" * nbytes)  # NaN
        comm.barrier("all files are there")
        self.of_ranks = [torch.from_file(str(file), True, nbytes, dtype=torch.uint8) for file in files]

    def get_buffer(self, rank: int, shape: torch.Size, dtype: torch.dtype, offset: int) -> Tensor:
        start, nbytes = offset * dtype.itemsize, shape.numel() * dtype.itemsize
        return self.of_ranks[rank][start : start + nbytes].view(dtype).view(shape)

    def barrier(self, timeout_ms: int) -> None:
        comm.barrier("copies")
        Files.barriers += 1


class SharedMemory(peer_memory.PeerBuffer):
    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._memory: Any = Files(nbytes)
        self._own, self._known = self._memory.of_ranks[comm.rank()], {}


class Done:
    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True


def share_memory() -> None:
    peers: Any = peer_memory  # in a process of its own
    peers.PeerBuffer, peers.can_reach_peers, peers.LEAST_BYTES = SharedMemory, lambda device: True, 0
    peers.start = lambda kind, work, device, name: work() or Done()


def train_in_shared_memory(*args: Any, leaves: bool = False, **kwargs: Any) -> dict[str, Tensor]:
    share_memory()
    start, left = peer_memory.AllReduce.start, []

    def start_and_count(*args: Any) -> Any:
        works, rest = start(*args)
        left.extend(rest)
        return works, rest

    peers: Any = peer_memory
    peers.AllReduce.start = start_and_count
    state = train_on_ranks(*args, **kwargs)
    assert bool(left) == leaves
    assert leaves or Files.barriers
    return state


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    "strategy, how",
    [
        ("fsdp", dict(reshard_after_forward=True)),
        ("fsdp", dict(reshard_after_forward=False)),
        ("individual", {}),
        ("overlap", dict(bucket_size_mb=0.01)),
        ("bucketed", dict(bucket_size_mb=0.01)),
        ("bucketed", dict(bucket_size_mb=0.003, grad_dtype=torch.float64)),
    ],
)
def test_copies_between_processes_equal_one_process(strategy: str, how: dict[str, Any], world_size: int) -> None:
    train = functools.partial(train_in_shared_memory, micro_batches=2)
    check_training(strategy, "transformer", world_size, sgd, train=train, **how)


@pytest.mark.parametrize("strategy", ["overlap", "bucketed"])
def test_gradients_of_weights_that_are_cast_after_wrapping_are_averaged(strategy: str) -> None:
    train = functools.partial(train_in_shared_memory, leaves=True, before_wrapping=halved, after_wrapping=whole)
    check_training(strategy, "transformer", 2, sgd, tolerance=(0.05, 0.02), train=train)


def halved(module: nn.Module) -> None:
    module.bfloat16()


def whole(module: nn.Module) -> None:
    module.float()
    for p in module.parameters():
        p.grad_dtype = torch.float32


def incoming_bytes(vocab_size: int, strategy: str, bucket_size_mb: float | None) -> float:
    """Memory for incoming gradients that a strategy takes beyond what the planner says."""
    share_memory()
    size = dict(vocab_size=vocab_size, context_length=16, d_model=64, num_layers=2, num_heads=2, d_ff=128)
    wrapped: Any = get_strategy(strategy)(TransformerLM(**size), Options(bucket_size_mb=bucket_size_mb))
    of_fsdp = (group.by_copies for group in getattr(wrapped, "_groups", ()) if group.by_copies)
    averages = next(of_fsdp) if strategy == "fsdp" else wrapped._all_reduce
    taken = sum(buffer._own.nbytes for buffer in vars(averages).values() if isinstance(buffer, SharedMemory))
    job: Any = dict(strategy=strategy, bucket_size_mb=bucket_size_mb, world_size=2, precision="fp32")
    return taken - inbox_term(Job(shape=ModelShape(**size), **job)).value


@pytest.mark.parametrize("vocab_size", [2048, 2047])
@pytest.mark.parametrize(
    "strategy, bucket_size_mb", [("fsdp", None), ("individual", 1), ("overlap", None), ("overlap", 1)]
)
def test_incoming_gradients_take_the_memory_that_is_planned(
    vocab_size: int, strategy: str, bucket_size_mb: float | None
) -> None:
    for more in run_ranks(incoming_bytes, 2, vocab_size, strategy, bucket_size_mb):
        assert 0 <= more <= 25 * 2 * 512  # 21 parameters


def averaged(device: str) -> list[tuple[Tensor, Tensor]]:
    """What several calls in a row found and should have found, while one rank or another is late."""
    if device == "cpu":
        share_memory()
        peers: Any = peer_memory
        peers.LEAST_BYTES = 8  # the last shape is left to gloo
    here, ranks = torch.device(device, comm.rank() if device == "cuda" else None), comm.world_size()
    shapes = [torch.Size([600, 1000]), torch.Size([7]), torch.Size([])]
    nbytes = peer_memory.bytes_of(shapes, torch.bfloat16)
    reduce_scatter = peer_memory.ReduceScatter(nbytes, here)
    all_reduce = peer_memory.AllReduce(nbytes, len(shapes), here)
    found, transfers = [], []
    for step in range(12):

        def made(rank: int, parts: int, step: int = step) -> list[Tensor]:
            generator = torch.Generator().manual_seed(ranks * step + rank)
            return [torch.randn(parts, *shape, generator=generator).to(here, torch.bfloat16) for shape in shapes]

        def mean(parts: int, made: Any = made) -> list[Tensor]:
            of_tensors = zip(*(made(rank, parts) for rank in range(ranks)), strict=True)
            return [torch.stack(of_ranks).float().mean(0) for of_ranks in of_tensors]

        if device == "cuda" and step % 3 == comm.rank():
            torch.cuda._sleep(10**8)
        outputs = [torch.full((1, *shape), torch.nan, dtype=torch.bfloat16, device=here) for shape in shapes]
        whole = made(comm.rank(), 1)
        transfers.append(reduce_scatter.start(outputs, made(comm.rank(), ranks), "reduce-scatter"))
        transfers.append(comm.start_mean(whole, "all-reduce", by_copies=all_reduce.start))
        if step % 2:
            transfers[-1].wait()
        found += [(o, m[comm.rank()][None]) for o, m in zip(outputs, mean(ranks), strict=True)]
        found += list(zip(whole, mean(1), strict=True))
    for transfer in transfers:
        transfer.wait()
    return [(o.float().cpu(), m.cpu()) for o, m in found]


@pytest.mark.parametrize("device, ranks", [("cpu", 3), pytest.param("cuda", 2, marks=pytest.mark.multigpu)])
def test_averages_by_copies_come_in_order(device: str, ranks: int) -> None:
    for of_rank in run_ranks(averaged, ranks, device, device=device):
        for output, expected in of_rank:
            torch.testing.assert_close(output, expected, rtol=2**-7, atol=1e-2)


# On GPUs


def train_by_copies(*args: Any, **kwargs: Any) -> dict[str, Tensor]:
    peers: Any = peer_memory  # in a process of its own
    peers.LEAST_BYTES = 0
    return train_on_ranks(*args, **kwargs)


@pytest.mark.multigpu
@pytest.mark.parametrize("strategy", ["individual", "overlap", "bucketed"])
def test_copies_between_gpus_equal_one_process(strategy: str) -> None:
    train = functools.partial(train_by_copies, micro_batches=2, bucket_size_mb=0.01)
    check_training(strategy, "transformer", 2, sgd, "cuda", tolerance=(1e-3, 1e-4), train=train)


def gathered() -> list[tuple[bool, bool]]:
    """For a module of each number of rows: whether copy engines send it, and whether its weight is right."""
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
        found.append((strategy._groups[0].peers is not None, right))
    return found


@pytest.mark.multigpu
def test_weights_are_read_after_all_ranks_have_updated_them_and_padded_ones_are_sent() -> None:
    for found in run_ranks(gathered, 2, device="cuda"):
        assert found == [(True, True), (False, True)]
