"""Building a model for training: the type of its weights, the loss in chunks, activations kept or computed again."""

import dataclasses
import functools
import threading
from typing import Any

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition, nop
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes

from cs336_basics.model import RotaryEmbedding, TransformerLM
from cs336_systems.config.run import RunConfig, TrainConfig
from cs336_systems.kernels.attention import get_attention
from cs336_systems.parallel.ddp import DDP
from cs336_systems.parallel.fsdp import FSDP
from cs336_systems.training.build import cast_weights, prepare_blocks, wrap_model
from cs336_systems.training.load import load_model
from cs336_systems.training.loop import Trainer
from cs336_systems.training.pipeline import train

from .helpers import assert_same_tensors, make_config, random_tokens, tiny_trainer, weights_of

pytestmark = pytest.mark.usefixtures("one_thread")


def steps_of(config: RunConfig, count: int = 3) -> tuple[list[Any], float, dict[str, Tensor]]:
    """Losses and norms of some steps, a validation loss, and the weights."""
    with tiny_trainer(config) as trainer:
        rows = [trainer.train_step() for _ in range(count)]
        valid = trainer.evaluate(random_tokens(700, seed=1))
        return [(row["loss"], row["grad_norm"]) for row in rows], valid, dict(trainer.model.state_dict())


@pytest.mark.parametrize("chunk", [1, 7, 10_000])
def test_a_loss_in_chunks_is_the_same_loss(chunk: int, tmp_path: Any) -> None:
    accumulating: dict[str, Any] = dict(gradient_accumulation_steps=2)
    plain = steps_of(make_config(tmp_path, train=accumulating))
    chunked = steps_of(make_config(tmp_path, train=accumulating | dict(loss_chunk_tokens=chunk)))
    torch.testing.assert_close(torch.tensor(chunked[0]), torch.tensor(plain[0]), rtol=1e-5, atol=0)
    assert chunked[1] == pytest.approx(plain[1], rel=1e-5)
    for name, weight in plain[2].items():
        torch.testing.assert_close(chunked[2][name], weight, rtol=1e-4, atol=1e-6)


def test_with_a_loss_in_chunks_nobody_has_all_logits(tmp_path: Any) -> None:
    config = make_config(tmp_path, train=dict(loss_chunk_tokens=7))
    largest = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal largest
        largest = max(largest, tensor.numel())
        return tensor

    with tiny_trainer(config) as trainer, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        trainer.train_step()
    assert largest < config.train.batch_size * config.model.shape.context_length * config.model.shape.vocab_size


@pytest.mark.parametrize("strategy", ["naive", "flat", "overlap", "bucketed", "fsdp"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_strategy_gets_the_types_and_the_size_of_the_configuration(
    strategy: str, precision: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one process the strategy is `none`, so it is told that there are two, and nothing is sent."""
    parallel: dict[str, Any] = dict(strategy=strategy, grad_dtype="bf16", devices=2)
    if strategy in ("overlap", "bucketed"):
        parallel["bucket_size_mb"] = 3.0
    if strategy == "fsdp":
        parallel["reshard_after_forward"] = False
    config = make_config(tmp_path, train=dict(precision=precision), parallel=parallel)
    monkeypatch.setattr(type(config.parallel), "strategy_for", lambda self, _: self.strategy)
    wrapped = wrap_model(config, TransformerLM(**dataclasses.asdict(config.model.shape)))
    assert wrapped.grad_dtype == torch.bfloat16
    if isinstance(wrapped, DDP):
        assert wrapped._max_bytes == 3 * 2**20
    if isinstance(wrapped, FSDP):
        computed = torch.bfloat16 if precision == "bf16" else torch.float32
        assert {weight.full.dtype for unit in wrapped._groups for weight in unit.params} == {computed}
        assert not wrapped._reshards


def test_weights_in_bfloat16_leave_positions_as_they_are(tmp_path: Any) -> None:
    rope = RotaryEmbedding(32_768, 8)
    before = rope.cos.clone()
    block = torch.nn.ModuleDict({"rope": rope, "linear": torch.nn.Linear(2, 2)})
    cast_weights(block, torch.bfloat16)
    assert torch.equal(rope.cos, before)
    assert {p.dtype for p in block.parameters()} == {torch.bfloat16}


def test_training_in_bfloat16_is_close_to_training_in_float32(tmp_path: Any) -> None:
    narrow: dict[str, Any] = dict(precision="bf16", weight_dtype="bf16")
    with tiny_trainer(make_config(tmp_path, train=narrow)) as trainer:
        trainer.train_step()
        kinds = {t.dtype for p in trainer.model.parameters() for t in (p, *trainer.optimizer.state[p].values())}
        assert kinds <= {torch.bfloat16, torch.float32}  # a step's number is float32
        assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}
    wide, found = steps_of(make_config(tmp_path)), steps_of(make_config(tmp_path, train=narrow))
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(wide[0]), rtol=0.02, atol=0)
    assert found[1] == pytest.approx(wide[1], rel=0.01)


def test_a_run_in_bfloat16_goes_on_from_its_checkpoint_and_keeps_its_type(tmp_path: Any) -> None:
    def config(run: str, steps: int, resume: str = "none") -> RunConfig:
        narrow: dict[str, Any] = dict(precision="bf16", weight_dtype="bf16", max_steps=steps)
        return make_config(tmp_path, run=run, resume=resume, train=narrow, optimizer=dict(warmup_steps=1, lr=1e-2,
                                                                                          min_lr=1e-2))  # fmt: skip

    train(config("whole", 4))
    train(config("halves", 2))
    train(config("halves", 4, resume="auto"))
    whole, halves = (load_model(tmp_path / run).state_dict for run in ("whole", "halves"))
    for name, weight in whole.items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, halves[name]), name


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(weight_dtype="bf16"), "train.weight_dtype is 'bf16': it must be 'fp32' with train.precision 'fp32'"),
        (dict(weight_dtype="bf16", precision="fp16"), "train.weight_dtype is 'bf16'"),
        (dict(loss_chunk_tokens=0), "train.loss_chunk_tokens is 0"),
        (
            dict(compile_memory_budget=0.5, compile=False),
            "train.compile_memory_budget is 0.5: .* 1 without train.compile",
        ),
        (dict(compile_memory_budget=1.5, compile=True), "train.compile_memory_budget is 1.5"),
    ],
    ids=str,
)
def test_impossible_training_settings_are_refused(fields: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**fields)


def partition(joint: Any, inputs: Any, **how: Any) -> Any:
    """Inductor's choice of activations to keep, made after its own passes over the graph."""
    joint_graph_passes(joint)
    return min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **how)


INDUCTOR_WITHOUT_ITS_CODE = aot_autograd(fw_compiler=nop, partition_fn=partition, decompositions=select_decomp_table())


def saved_numbers(budget: float) -> tuple[int, Tensor]:
    """How many numbers a compiled block keeps for backward, besides its weights, and the gradient of its input."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = TransformerLM(8, 64, 32, 1, 2, 64, attention=get_attention("sdpa"))
    prepare_blocks(model, TrainConfig(compile=True, compile_memory_budget=budget))
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    saved: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes() // t.itemsize
        return t

    x = torch.randn(2, 64, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = model.layers[0](x)
    y.square().sum().backward()
    assert x.grad is not None
    return sum(saved.values()), x.grad


def test_below_a_budget_of_one_a_compiled_block_keeps_only_the_results_of_its_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Recomputed: 3 of 9 tensors of T d numbers (norms, attention by tokens), 1 of 3 of T d_ff (the gated product)."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=INDUCTOR_WITHOUT_ITS_CODE))
    (everything, truth), (less, gradient) = (saved_numbers(budget) for budget in (1.0, 0.75))
    td, tf, inverse_rms, logsumexp = 2 * 64 * 32, 2 * 64 * 64, 2 * 2 * 64, 2 * 2 * 64
    assert everything == 9 * td + 3 * tf + inverse_rms + logsumexp
    assert less == 6 * td + 2 * tf + inverse_rms + logsumexp
    torch.testing.assert_close(gradient, truth, rtol=1e-4, atol=1e-5)


def gradients_under_autocast(dtype: torch.dtype, compile: bool) -> list[Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = TransformerLM(8, 64, 32, 1, 2, 64, attention=get_attention("naive"))
    prepare_blocks(model, TrainConfig(compile=compile))

    def step() -> None:
        with torch.autocast("cpu", dtype):
            loss = model(torch.arange(64).view(2, 32) % 8).square().mean()
        loss.backward()

    thread = threading.Thread(target=step)  # one in which nothing was set when the model was made
    thread.start()
    thread.join()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_compiled_backward_pass_computes_in_the_types_of_the_uncompiled_one(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit: `naive` switches autocast off for its products, whose gradients are products of float32 too."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    eager, compiled = (gradients_under_autocast(dtype, compile) for compile in (False, True))
    assert len(eager) == 12
    assert all(map(torch.equal, compiled, eager))


# Activation checkpointing


def blocks_computed(trainer: Trainer) -> int:
    """How often a block's attention runs in a step."""
    calls = []
    handles = [layer.attn.register_forward_hook(lambda *_: calls.append(1)) for layer in trainer.model.layers]
    trainer.train_step()
    for handle in handles:
        handle.remove()
    return len(calls)


@pytest.mark.parametrize(
    "kind, again",
    [
        ("none", 0),
        ("block", 5),
        ("every_1", 5),
        ("every_2", 3),
        ("every_5", 1),
        ("groups_1", 5),
        ("groups_2", 5),
        ("groups_5", 5),
        ("first_2", 2),
        ("first_5", 5),
    ],
)
def test_checkpointed_blocks_are_computed_again_and_give_the_same_weights(kind: str, again: int, tmp_path: Any) -> None:
    weights, losses = [], []
    for activation_checkpointing in ("none", kind):
        train = dict(activation_checkpointing=activation_checkpointing)
        with tiny_trainer(make_config(tmp_path, train=train, model=dict(num_layers=5))) as trainer:
            computed = blocks_computed(trainer)
            losses.append(trainer.train_step()["loss"])
            weights.append(weights_of(trainer))
    assert computed == 5 + again
    assert losses[0] == losses[1]
    assert_same_tensors(*weights)


@pytest.mark.parametrize(
    "kind, kept",
    [("none", 4 * 5), ("block", 5), ("every_2", 3 + 4 * 2), ("groups_2", 3), ("groups_5", 1), ("first_2", 2 + 4 * 3)],
)
def test_a_group_of_checkpointed_blocks_keeps_only_its_input(kind: str, kept: int, tmp_path: Any) -> None:
    """Counts the saved tensors as large as the input. A block saves 4: the inputs and the outputs of its norms."""
    train = dict(activation_checkpointing=kind)
    tokens = torch.zeros(3, 16, dtype=torch.long)
    saved: dict[int, Tensor] = {}
    with tiny_trainer(make_config(tmp_path, train=train, model=dict(num_layers=5))) as trainer:
        x = trainer.model.token_embeddings(tokens)
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(t.data_ptr(), t), lambda t: t)
        with hooks:
            trainer.model.through_blocks(x)
    assert len([t for t in saved.values() if t.shape == x.shape]) == kept


@pytest.mark.parametrize(
    "kind", ["", "every_0", "every_-1", "every_x", "blocks", "every_", "groups_0", "groups", "group_2"]
)
def test_an_unknown_kind_of_activation_checkpointing_is_refused(kind: str) -> None:
    with pytest.raises(
        ValueError, match=r"train\.activation_checkpointing is .* none, block, first_K, every_K or groups_K"
    ):
        TrainConfig(activation_checkpointing=kind)
