"""FSDP on gloo (and NCCL): equal to one process, at most two groups unsharded, the same transfers on all ranks."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from cs336_basics.model import TransformerLM
from cs336_basics.nn_utils import clip_gradient
from cs336_systems.parallel import STRATEGIES, Options, comm
from cs336_systems.parallel.fsdp import FSDP
from cs336_systems.parallel.peer_memory import ALIGNMENT
from tests.distributed import run_ranks
from tests.parallel.blocks import (
    Recorder,
    assert_same_gradients,
    build_blocks,
    gradients,
    inputs_of,
    some_loss,
)
from tests.parallel.models import (
    STEPS,
    assert_ranks_equal,
    batch_of,
    build,
    check_training,
    mean_loss,
    sgd,
    train_alone,
    train_on_ranks,
)

IN_BF16 = (0.05, 0.02)  # bf16 has 8 bits
NAMES = pytest.mark.parametrize("name", ["fsdp", "fsdp_simple"])
MODELS = pytest.mark.parametrize("model", ["awkward", "transformer"])


# Equal to one process


def prepare(module: nn.Module, how: str) -> None:
    """Compile or checkpoint the blocks, as training does: their inner forward."""
    for block in getattr(module, "layers", ()):
        if "checkpoint" in how:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        if "aot_eager" in how or "inductor" in how:
            block.forward = torch.compile(block.forward, backend=how.split()[0], fullgraph="checkpoint" not in how)


def train_prepared(*args: Any, how: str, **given: Any) -> dict[str, Tensor]:
    when = "before_wrapping" if how.endswith("before") else "after_wrapping"
    state = train_on_ranks(*args, **given, **{when: partial(prepare, how=how)})
    if "aot_eager" in how or "inductor" in how:
        # One compilation serves all blocks, forward and backward.
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    return state


@pytest.mark.parametrize("model, world_size", [("awkward", 1), ("awkward", 4), ("transformer", 2)])
@NAMES
def test_equals_one_process(name: str, model: str, world_size: int) -> None:
    check_training(name, model, world_size)


@NAMES
def test_accumulation(name: str) -> None:
    check_training(name, "awkward", micro_batches=4, make_optimizer=sgd)


@MODELS
def test_prefetching_and_weights_that_stay_whole_change_no_bit(model: str) -> None:
    def train(name: str, **options: Any) -> list[dict[str, Tensor]]:
        return run_ranks(partial(train_on_ranks, name, model, 2, **options), 2)

    assert_ranks_equal([*train("fsdp"), *train("fsdp", reshard_after_forward=False), *train("fsdp_simple")])


@pytest.mark.parametrize(
    "name, how",
    [
        ("fsdp", "aot_eager before"),
        ("fsdp", "checkpoint"),
        ("fsdp_simple", "checkpoint"),
        pytest.param("fsdp", "aot_eager", marks=pytest.mark.slow),
        pytest.param("fsdp", "aot_eager checkpoint", marks=pytest.mark.slow),
        pytest.param("fsdp_simple", "aot_eager", marks=pytest.mark.slow),
        pytest.param("fsdp_simple", "aot_eager before", marks=pytest.mark.slow),
        pytest.param("fsdp_simple", "aot_eager checkpoint", marks=pytest.mark.slow),
    ],
)
def test_blocks_that_are_compiled_or_checkpointed(name: str, how: str) -> None:
    check_training(name, "transformer", train=train_prepared, how=how, micro_batches=2)


@pytest.mark.slow
def test_blocks_compiled_by_inductor() -> None:
    check_training("fsdp", "transformer", train=train_prepared, how="inductor")


@pytest.mark.parametrize(
    "options",
    [
        {"compute_dtype": torch.bfloat16},
        {"compute_dtype": torch.bfloat16, "grad_dtype": torch.float32},
        {"grad_dtype": torch.bfloat16},
    ],
    ids=["compute", "compute, gradients float32", "gradients"],
)
@NAMES
def test_bf16(name: str, options: dict[str, Any]) -> None:
    state, *_ = check_training(name, "transformer", 2, sgd, tolerance=IN_BF16, **options)
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    expected = train_alone("transformer", STEPS, sgd)
    assert any(not torch.allclose(state[k], v, rtol=1e-5, atol=1e-6) for k, v in expected.items())


def bf16_under_autocast(name: str) -> dict[str, str]:
    strategy = STRATEGIES[name](build("transformer"), Options(compute_dtype=torch.bfloat16))
    seen = {}
    for name, layer in strategy.module.named_modules():
        if strategy.shards().get(f"{name}.weight"):
            layer.register_forward_pre_hook(lambda m, i, n=name: seen.update({n: f"{m.weight.dtype}"}))
            layer.register_forward_hook(lambda m, i, o, n=name: seen.update({n: f"{seen[n]} {o.dtype}"}))
    with torch.autocast("cpu", torch.bfloat16):
        mean_loss(strategy, batch_of(0)).backward()
    strategy.finish_gradient_synchronization()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in strategy.parameters())
    return seen


@NAMES
def test_weights_are_in_the_compute_type_also_under_autocast(name: str) -> None:
    (seen, _) = run_ranks(bf16_under_autocast, 2, name)
    assert len(seen) == 16
    assert set(seen.values()) == {"torch.bfloat16 torch.bfloat16"}


# Memory of shards


def describe() -> dict[str, Any]:
    module = build("awkward")
    optimizer = sgd(module.parameters())  # before wrapping: parameters stay the objects they were
    whole = {name: p.detach().clone() for name, p in module.named_parameters(remove_duplicate=False)}
    strategy = FSDP(module)
    mine = [p for group in optimizer.param_groups for p in group["params"]]
    assert [id(p) for p in mine] == [id(p) for p in module.parameters()]
    mesh = init_device_mesh("cpu", (comm.world_size(),))
    memory: dict[int, int] = {}  # storage of the shards by address, and the bytes of their rows
    rows_bytes: dict[int, int] = {}
    for name, (shape, first) in strategy.shards().items():
        local = dict(module.named_parameters(remove_duplicate=False))[name].detach()
        memory[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
        rows_bytes[local.data_ptr()] = local.nbytes
        assert torch.equal(local, whole[name][first : first + len(local)])
        stride = whole[name].stride()
        tensor = DTensor.from_local(local, mesh, [Shard(0)], shape=shape, stride=stride, run_check=False)
        assert torch.equal(tensor.full_tensor(), whole[name])
    assert 0 <= sum(memory.values()) - sum(rows_bytes.values()) < ALIGNMENT * len(rows_bytes)
    found = strategy.gather_full_params()
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(found[name], tensor)
    assert list(strategy.full_state_dict()) == list(module.state_dict())
    named = dict(module.named_parameters(remove_duplicate=False))
    return {name: (first, len(named[name])) for name, (_, first) in strategy.shards().items()}


def test_shards_of_a_group_share_one_storage() -> None:
    groups = FSDP(build("transformer"))._groups
    assert max(len(group.params) for group in groups) > 1
    for group in groups:
        assert len({p.shard.untyped_storage().data_ptr() for p in group.params}) == 1


def test_shards_lie_as_torch_chunk_and_dtensor_have_them() -> None:
    places = run_ranks(describe, 4)
    assert "first.bias" not in places[0]
    for name, rows in {"first.weight": 7, "unused.weight": 3, "wide.weight": 40, "head.weight": 11}.items():
        pieces = [len(piece) for piece in torch.arange(rows).chunk(4)]
        pieces += [0] * (4 - len(pieces))
        assert [place[name] for place in places] == [(sum(pieces[:i]), n) for i, n in enumerate(pieces)]


def record_steps(reshard_after_forward: bool = True) -> tuple[int, list[str], list[str], list[str]]:
    strategy = FSDP(build("transformer"), reshard_after_forward=reshard_after_forward)
    recorder = Recorder(strategy)
    mean_loss(strategy, batch_of(0)).backward()
    assert strategy.gathered_bytes() == 0
    strategy.finish_gradient_synchronization()
    first = recorder.take()
    mean_loss(strategy, batch_of(1)).backward()
    strategy.finish_gradient_synchronization()
    second = recorder.take()
    with torch.no_grad():
        mean_loss(strategy, batch_of(1))
    assert strategy.gathered_bytes() == 0
    return recorder.most, first, second, recorder.take()


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_next_group_is_prefetched_and_at_most_two_are_unsharded(world_size: int) -> None:
    most, first, second, evaluation = run_ranks(record_steps, world_size)[0]
    forward = [
        *("gather token_embeddings", "gather 0", "forward token_embeddings"),
        *("gather 1", "forward 0", "gather lm_head", "forward 1", "forward lm_head"),
    ]
    backward = [
        *("gather 1", "backward lm_head", "scatter lm_head", "gather 0", "backward 1", "scatter 1"),
        *("backward 0", "scatter 0"),
        *("backward token_embeddings", "scatter token_embeddings"),
    ]
    assert first == second == forward + backward
    assert evaluation == forward
    assert most == 2


def test_weights_that_stay_whole_for_backward_are_gathered_once() -> None:
    again = run_ranks(record_steps, 2)[0]
    most, first, second, evaluation = run_ranks(record_steps, 2, False)[0]
    at = again[1].index("forward lm_head") + 1
    forward, backward = again[1][:at], [event for event in again[1][at:] if not event.startswith("gather")]
    assert first == second == forward + backward
    assert evaluation == again[3]
    assert most == 3  # all but the embedding, which backward does not need


def learn() -> list[list[str]]:
    strategy = FSDP(build_blocks(in_order=False))
    recorder = Recorder(strategy)
    passes = []
    for step in range(2):
        strategy(inputs_of(0, step)).sum().backward()
        passes.append([e for e in recorder.take() if e.startswith("gather")])
        strategy.finish_gradient_synchronization()
    return passes


def test_the_order_is_learned_in_the_first_forward() -> None:
    (_, second), _ = run_ranks(learn, 2)
    there = ["gather inlet", *(f"gather blocks.{i}" for i in range(4)), "gather head"]
    # The last is kept for backward.
    assert second == [*there, *(f"gather blocks.{i}" for i in (3, 2, 1, 0)), "gather inlet"]


# Norm, errors


def clip(name: str, max_norm: float) -> tuple[Tensor, dict[str, Tensor | None]]:
    strategy = STRATEGIES[name](build_blocks(), Options())
    some_loss(comm.rank(), (0, 1, 2), 0, strategy).backward()
    strategy.finish_gradient_synchronization()
    return strategy.clip_gradient(max_norm), gradients(strategy)


@pytest.mark.parametrize("max_norm", [0.1, float("inf")])
@NAMES
def test_clipping_is_by_the_norm_of_all_shards(name: str, max_norm: float) -> None:
    model = build_blocks()
    (sum(some_loss(rank, (0, 1, 2), 0, model) for rank in range(3)) / 3).backward()
    expected = clip_gradient(model.parameters(), max_norm)
    results = run_ranks(clip, 3, name, max_norm)
    assert len({norm.item() for norm, _ in results}) == 1
    torch.testing.assert_close(results[0][0], expected)
    assert_same_gradients(results[0][1], {name: p.grad for name, p in model.named_parameters()})


def test_embeddings_that_cannot_be_sharded_are_refused() -> None:
    with pytest.raises(ValueError, match=r"0\.weight.*sparse=True"):
        FSDP(nn.Sequential(nn.Embedding(3, 2, sparse=True)))
    with pytest.raises(ValueError, match=r"^weight.*max_norm=1"):
        FSDP(nn.Embedding(3, 2, max_norm=1.0))


def test_nothing_to_shard_or_to_train() -> None:
    strategy = FSDP(nn.LayerNorm(3))
    strategy(torch.randn(2, 3)).sum().backward()
    strategy.finish_gradient_synchronization()
    frozen = FSDP(nn.Linear(3, 3).requires_grad_(False))
    frozen(torch.randn(2, 3, requires_grad=True)).sum().backward()
    frozen.finish_gradient_synchronization()
    assert frozen.module.weight.grad is None
    assert frozen.clip_gradient(1.0) == 0


# On GPUs


@pytest.mark.multigpu
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("how", ["", "inductor", "checkpoint"])
@MODELS
def test_equals_one_process_nccl(model: str, how: str, reshard_after_forward: bool) -> None:
    given: dict[str, Any] = dict(how=how if model == "transformer" else "", reshard_after_forward=reshard_after_forward)
    check_training("fsdp", model, 2, sgd, "cuda", (1e-3, 1e-4), train_prepared, micro_batches=2, **given)


@pytest.mark.multigpu
def test_bf16_nccl() -> None:
    check_training("fsdp", "transformer", 2, sgd, "cuda", IN_BF16, compute_dtype=torch.bfloat16)


def memory_of_a_step(reshard_after_forward: bool) -> tuple[float, float]:
    """Memory in the last step, in groups: between the passes, and at the peak without the shards' gradients."""
    device = torch.device("cuda", comm.rank())
    with device:
        strategy = FSDP(TransformerLM(64, 16, d_model=1024, num_layers=24, num_heads=16, d_ff=4096), torch.bfloat16,
                        reshard_after_forward=reshard_after_forward)  # fmt: skip
    tokens = torch.zeros(1, 17, dtype=torch.int64, device=device)
    for _ in range(6):  # fast steps, in which unreleased memory adds up
        strategy.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = mean_loss(strategy, tokens)
        between = torch.cuda.memory_allocated() - before
        loss.backward()
        strategy.finish_gradient_synchronization()
        torch.cuda.synchronize()
    kept = sum(p.grad.nbytes for p in strategy.parameters() if p.grad is not None)
    group = max(group.unsharded.nbytes for group in strategy._groups)
    return between / group, (torch.cuda.max_memory_allocated() - before - kept) / group


@pytest.mark.multigpu
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_memory_is_that_of_a_few_groups_and_between_the_passes_of_those_that_stay_whole(
    reshard_after_forward: bool,
) -> None:
    stay = 0 if reshard_after_forward else 24
    for between, at_most in run_ranks(memory_of_a_step, 2, reshard_after_forward, device="cuda"):
        assert stay <= between < stay + 4
        assert at_most < 8  # two groups, gradients of two, send buffers, cuBLAS; all would be 24


def test_a_cast_or_a_move_after_wrapping_is_refused_unless_it_changes_nothing() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    strategy = FSDP(module)
    before = [p.data_ptr() for p in module.parameters()]
    strategy.to("cpu").float()
    assert [p.data_ptr() for p in module.parameters()] == before
    with pytest.raises(
        ValueError, match=r"^0\.weight would become torch\.bfloat16 on cpu from torch\.float32 on cpu: "
    ):
        strategy.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"^0\.weight would become torch\.float32 on meta"):
        strategy.to("meta")
    assert module[0].weight.dtype == torch.float32
