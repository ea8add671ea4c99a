"""Blocks that are compiled and checkpointed: what they keep, what they compute again, and that nothing else changes."""

import copy
import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition, nop
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch.utils._python_dispatch import TorchDispatchMode

from cs336_basics.attention import Documents
from cs336_basics.model import TransformerLM
from cs336_systems.config.run import TrainConfig
from cs336_systems.kernels.attention import check_attention, flash_torch, get_attention, is_attention
from cs336_systems.kernels.attention.contract import band_of
from cs336_systems.kernels.attention.function import flash_function
from cs336_systems.kernels.fp8_linear import use_fp8
from cs336_systems.training.build import prepare_blocks
from cs336_systems.training.loop import Trainer
from cs336_systems.training.preflight import check_config
from tests.distributed import run_ranks

from .helpers import assert_same_tensors, make_config, random_tokens, tiny_trainer, weights_of

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = 3


def partition(joint: Any, inputs: Any, **how: Any) -> Any:
    """Inductor's choice of activations to keep, made after its own passes over the graph."""
    joint_graph_passes(joint)
    return min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **how)


INDUCTOR_WITHOUT_ITS_CODE = aot_autograd(fw_compiler=nop, partition_fn=partition, decompositions=select_decomp_table())


def saved_numbers(budget: float, policy: str = "none", compile: bool = True, fp8: bool = False) -> tuple[int, Tensor]:
    """How many numbers a block keeps for backward, besides its weights, and the gradient of its input."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = TransformerLM(8, 64, 32, 1, 2, 64, attention=get_attention("sdpa"))
    how = TrainConfig(compile=compile, compile_memory_budget=budget, activation_checkpointing=policy)
    if fp8:
        use_fp8(model.to(torch.bfloat16).layers)
    prepare_blocks(model, how)
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    saved: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes() // t.itemsize
        return t

    x = torch.randn(2, 64, 32, dtype=torch.bfloat16 if fp8 else torch.float32, requires_grad=True)
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


def test_a_compiled_block_with_fp8_keeps_them_alone_at_a_budget_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products read what is rounded from norms and the gated product, and rounding is recomputed, too."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=INDUCTOR_WITHOUT_ITS_CODE))
    td, tf, inverse_rms, logsumexp = 2 * 64 * 32, 2 * 64 * 64, 2 * 2 * 64, 2 * 2 * 64
    scales = 7 + 4  # of weights and inputs
    assert saved_numbers(1.0, fp8=True)[0] == 6 * td + 2 * tf + scales + inverse_rms + logsumexp


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
    "kind",
    [
        "",
        "every_0",
        "every_-1",
        "every_x",
        "blocks",
        "every_",
        "groups_0",
        "groups",
        "group_2",
        "groups_2_but_attention",
        "none_but_attention",
        "_but_attention",
        "block_but",
        "block_but_attention_but_attention",
    ],
)
def test_an_unknown_kind_of_activation_checkpointing_is_refused(kind: str) -> None:
    with pytest.raises(
        ValueError, match=r"train\.activation_checkpointing is .* none, block, first_K, every_K or groups_K"
    ):
        TrainConfig(activation_checkpointing=kind)


# Blocks that keep attention's outputs

runs: list[int] = []
"""One entry for each run of the forward pass of `counted`."""


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    runs.append(1)
    return flash_torch._forward(*arguments)


Counted = flash_function("counted", _forward, flash_torch._backward)


def counted(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, window: int | None = None, documents: Documents | None = None
) -> Tensor:
    return Counted.call(q, k, v, is_causal, band_of(window, documents))


class AttentionRuns(TorchDispatchMode):
    """Counts the operators of attention that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += is_attention(operator)
        return operator(*args, **(kwargs or {}))


def step_of(
    policy: str, attention: Any, precision: str = "fp32", with_documents: bool = False, compile: bool = False,
    budget: float = 1.0, **shape: Any,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """The loss and the gradients of a model of LAYERS blocks."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = TransformerLM(32, 16, 32, LAYERS, 4, 64, attention=attention, **shape)
    how = dict(activation_checkpointing=policy, compile=compile, compile_memory_budget=budget)
    prepare_blocks(model, TrainConfig(**how))
    tokens = torch.randint(32, (2, 17))
    documents = Documents.from_numbers(torch.arange(16).repeat(2, 1) // 5) if with_documents else None
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        loss = model(tokens[:, :-1], targets=tokens[:, 1:], documents=documents)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "how",
    [dict(compile=True), dict(compile=True, activation_checkpointing="block"),
     dict(compile=True, activation_checkpointing="block_but_attention"), dict(compile=True, compile_memory_budget=0.5),
     dict(compile=True, activation_checkpointing="groups_2"), dict(activation_offload="first_1")],
    ids=str,
)  # fmt: skip
def test_a_copy_of_a_model_computes_with_its_own_weights(how: dict[str, Any]) -> None:
    torch._dynamo.reset()
    plain, model = (TransformerLM(32, 16, 32, LAYERS, 4, 64, attention=get_attention("sdpa")) for _ in range(2))
    prepare_blocks(model, TrainConfig(**how))
    tokens = torch.randint(32, (2, 17))
    model(tokens[:, :-1], targets=tokens[:, 1:]).backward()
    model.zero_grad()

    copied = copy.deepcopy(model)
    copied.load_state_dict(plain.state_dict())
    losses = [each(tokens[:, :-1], targets=tokens[:, 1:]) for each in (copied, plain)]
    torch.testing.assert_close(*losses)
    sum(losses).backward()
    for actual, expected in zip(copied.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    "how",
    [dict(), dict(precision="bf16"), dict(num_kv_heads=2, qk_norm=True), dict(window=5, window_every=2),
     dict(with_documents=True)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("attention", ["counted", "sdpa"])
def test_attention_runs_once_and_the_gradients_are_the_same_to_the_bit(attention: str, how: dict[str, Any]) -> None:
    kernel = counted if attention == "counted" else get_attention(attention)
    found, results = {}, []
    for policy in ("none", "block", "block_but_attention", "first_2_but_attention"):
        with AttentionRuns() as attention_runs:
            results.append(step_of(policy, kernel, **how))
        found[policy] = attention_runs.count
        assert torch.equal(results[-1][0], results[0][0])
        assert_same_tensors(results[-1][1], results[0][1])
    assert found == {"none": 3, "block": 6, "block_but_attention": 3, "first_2_but_attention": 3}


def test_a_compiled_block_keeps_its_input_and_attentions_output_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the memory budget, which PyTorch would apply to a part of the block."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=INDUCTOR_WITHOUT_ITS_CODE))
    (_, truth), (kept, gradient) = saved_numbers(1.0, compile=False), saved_numbers(0.75, "first_1_but_attention")
    td, logsumexp = 2 * 64 * 32, 2 * 2 * 64
    assert kept == 2 * td + logsumexp
    torch.testing.assert_close(gradient, truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "policy, how",
    [
        ("first_2_but_attention", dict()),
        ("block_but_attention", dict(precision="bf16", budget=0.75, with_documents=True)),
    ],
    ids=str,
)
def test_attention_runs_once_in_compiled_blocks(
    policy: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=INDUCTOR_WITHOUT_ITS_CODE))
    loss, truth = step_of("none", counted, **how | dict(budget=1.0))
    runs.clear()
    compiled_loss, gradients = step_of(policy, counted, compile=True, **how)
    assert len(runs) == LAYERS
    torch.testing.assert_close(compiled_loss, loss, rtol=1e-3 if how else 1e-6, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, truth[name], rtol=1e-2 if how else 1e-5, atol=1e-5)


@pytest.mark.slow
def test_inductor_compiles_blocks_of_both_kinds_below_a_memory_budget_of_one() -> None:
    loss, truth = step_of("none", counted)
    runs.clear()
    compiled_loss, gradients = step_of("first_1_but_attention", counted, compile=True, budget=0.75)
    assert len(runs) == LAYERS
    torch.testing.assert_close(compiled_loss, loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, truth[name], rtol=1e-4, atol=1e-5)


def train_counted(
    strategy: str, policies: list[str], how: dict[str, Any]
) -> list[tuple[dict[str, Tensor], list[float], int]]:
    """For each policy: the weights after two steps of two micro-batches, the losses, and the runs of attention."""
    found = []
    for policy in policies:
        train = dict(activation_checkpointing=policy, batch_size=8, gradient_accumulation_steps=2, **how)
        parallel, model = dict(strategy=strategy, bucket_size_mb=0.01), dict(num_layers=LAYERS)
        config = make_config(Path("unused"), train=train, parallel=parallel, model=model)
        torch.manual_seed(0)
        built = TransformerLM(**dataclasses.asdict(config.model.shape), attention=counted)
        trainer = Trainer(config, built, random_tokens(), torch.device("cpu"))
        runs.clear()
        losses = [trainer.train_step()["loss"] for _ in range(2)]
        state = {name: tensor.clone() for name, tensor in trainer.strategy.full_state_dict().items()}
        found.append((state, losses, len(runs)))
        trainer.close()
    return found


@pytest.mark.parametrize("strategy", ["overlap", "fsdp"])
def test_several_ranks_that_keep_attentions_outputs_learn_the_same_to_the_bit(strategy: str) -> None:
    policies, once = ["none", "block_but_attention", "every_2_but_attention"], 2 * 2 * LAYERS
    for results in run_ranks(train_counted, 2, strategy, policies, dict(precision="bf16")):
        (weights, losses, _), *others = results
        for state, same_losses, _ in others:
            assert same_losses == losses
            assert_same_tensors(state, weights)
        assert [count for *_, count in results] == [once] * 3


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp_simple"])
def test_sharded_weights_meet_compiled_blocks_that_keep_attentions_outputs(strategy: str) -> None:
    how = dict(compile=True, compile_memory_budget=0.75, loss_chunk_tokens=8)
    ((weights, losses, _),) = train_counted("none", ["none"], {})
    results = run_ranks(train_counted, 2, strategy, ["block_but_attention"], how, timeout_s=250)
    for ((state, same_losses, count),) in results:
        assert same_losses == pytest.approx(losses, rel=1e-4)
        for name, tensor in weights.items():  # as a whole: AdamW's first steps make 1e-4 of a gradient's rounding noise
            off = torch.linalg.vector_norm(state[name] - tensor) / torch.linalg.vector_norm(tensor)
            assert off < 1e-3, name
        assert count == 2 * 2 * LAYERS


@pytest.mark.parametrize("attention", ["naive", "sdpa_math", "tests.training.test_blocks:by_products"])
def test_attention_that_is_not_one_operator_cannot_be_kept(attention: str) -> None:
    how: Any = (8, torch.float32, torch.device("cpu"))
    check_attention(attention, *how)
    for kept in ("auto", "flash_torch", "tests.training.test_blocks:counted"):
        check_attention(kept, *how, is_kept=True)
    with pytest.raises(ValueError, match=rf"^model\.attention is '{attention}': it must be one operator, such as auto"):
        check_attention(attention, *how, is_kept=True)


def test_a_run_whose_attention_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    train = dict(activation_checkpointing="first_1_but_attention")
    config = make_config(tmp_path, train=train, model=dict(attention="naive"))
    with pytest.raises(
        ValueError, match=r"^model\.attention is 'naive': .* for train\.activation_checkpointing to keep"
    ):
        check_config(config, torch.device("cpu"))
    check_config(make_config(tmp_path, train=train), torch.device("cpu"))


def by_products(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf).softmax(dim=-1) @ v
