"""Sibling layers as one product: against float64 and separate products, wherever the weights lie."""

import dataclasses
import functools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cs336_basics.model import Linear, TransformerLM
from cs336_systems.config.run import TrainConfig
from cs336_systems.kernels import packed_linear
from cs336_systems.kernels.attention import get_attention
from cs336_systems.kernels.packed_linear import PackedLinear
from cs336_systems.training.build import pack_matrices, prepare_model
from cs336_systems.training.load import load_model
from cs336_systems.training.loop import Trainer
from cs336_systems.training.pipeline import train

from ..distributed import run_ranks
from ..training.helpers import assert_same_tensors, make_config, random_tokens, tiny_trainer
from ..training.test_blocks import INDUCTOR_WITHOUT_ITS_CODE

pytestmark = pytest.mark.usefixtures("one_thread")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
D_IN, ROWS = 32, (64, 16, 16)  # heads of queries, and fewer of keys and values


def layers_of(dtype: torch.dtype, is_packed: bool, device: str = "cpu") -> list[Linear]:
    torch.manual_seed(0)
    layers = [Linear(D_IN, rows) for rows in ROWS]
    whole = torch.cat([layer.weight.data for layer in layers]).to(device, dtype)
    for layer, part in zip(layers, whole.split(ROWS), strict=True):
        layer.weight.data = part if is_packed else part.clone()
    return layers


def packed_outputs(layers: list[Linear], x: Tensor, copies_last: bool = False) -> Any:
    """The outputs, and whether they come from one product."""
    project = PackedLinear(nn.ModuleList(layers), "012", copies_last)
    project.find_weight()
    return list(project(x, layers)), project.packed is not None


def inputs(dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x, *dys = (torch.randn(2, 24, d, generator=generator).to(device, dtype) for d in (D_IN, *ROWS))
    return x.requires_grad_(), dys


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_outputs_and_gradients_are_as_exact_as_those_of_separate_products(
    dtype: torch.dtype, is_packed: bool, device: str
) -> None:
    def found(dtype: torch.dtype, packed: bool) -> list[Tensor]:
        layers, (x, dys) = layers_of(dtype, is_packed, device), inputs(dtype, device)
        ys, is_one = packed_outputs(layers, x) if packed else ([layer(x) for layer in layers], False)
        assert is_one == (packed and is_packed)
        torch.autograd.backward(ys, dys)
        tensors = [*ys, x.grad, *(layer.weight.grad for layer in layers)]
        assert {t.dtype for t in tensors if t is not None} == {dtype}
        return [t.detach().double() for t in tensors if t is not None]

    layers, (x, dys) = layers_of(dtype, False, device), inputs(dtype, device)
    wide, ws = x.detach().double(), [layer.weight.detach().double() for layer in layers]
    truth = [wide @ w.T for w in ws]
    truth.append(sum(dy.double() @ w for dy, w in zip(dys, ws, strict=True)))
    truth += [dy.double().flatten(0, 1).T @ wide.flatten(0, 1) for dy in dys]
    for one, own, exact in zip(found(dtype, True), found(dtype, False), truth, strict=True):
        assert (one - exact).norm() <= 2 * (own - exact).norm() + 1e-14 * exact.norm()


def test_gradients_are_views_of_one_product() -> None:
    layers, (x, dys) = layers_of(torch.float32, True), inputs(torch.float32)
    torch.autograd.backward(packed_outputs(layers, x)[0], dys)
    starts = [layer.weight.grad.data_ptr() for layer in layers]  # type: ignore[union-attr]
    assert [start - starts[0] for start in starts] == [0, 4 * 64 * D_IN, 4 * 80 * D_IN]
    assert len({layer.weight.grad.untyped_storage().data_ptr() for layer in layers}) == 1  # type: ignore[union-attr]


def test_gradients_add_up_in_their_own_type() -> None:
    layers, (x, dys) = layers_of(torch.bfloat16, True), inputs(torch.bfloat16)
    for layer in layers:
        layer.weight.grad_dtype = torch.float32
    for _ in range(2):
        torch.autograd.backward(packed_outputs(layers, x)[0], dys)
    for layer, dy in zip(layers, dys, strict=True):
        once = dy.flatten(0, 1).T @ x.detach().flatten(0, 1)
        torch.testing.assert_close(layer.weight.grad, 2 * once.float(), rtol=0.01, atol=0.1)


@pytest.mark.parametrize("frozen", ["x", "first weight", "all weights"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    layers, (x, dys) = layers_of(torch.float32, True), inputs(torch.float32)
    if frozen == "x":
        x = x.detach()
    for layer in {"x": [], "first weight": layers[:1], "all weights": layers}[frozen]:
        layer.weight.requires_grad_(False)
    torch.autograd.backward(packed_outputs(layers, x)[0], dys)
    assert (x.grad is None) == (frozen == "x")
    for layer, dy in zip(layers, dys, strict=True):
        if not layer.weight.requires_grad:
            assert layer.weight.grad is None
        else:
            torch.testing.assert_close(layer.weight.grad, dy.flatten(0, 1).T @ x.detach().flatten(0, 1))


def test_weights_that_have_moved_have_products_of_their_own() -> None:
    def is_one(change: Any) -> bool:
        layers, (x, _) = layers_of(torch.float32, True), inputs(torch.float32)
        change(layers)
        ys, one = packed_outputs(layers, x)
        for y, layer in zip(ys, layers, strict=True):
            torch.testing.assert_close(y, x @ layer.weight.T)
        return one

    def replace(layers: list[Linear]) -> None:
        layers[1].weight.data = 2 * layers[1].weight.data

    def assign(layers: list[Linear]) -> None:
        layers[2].load_state_dict({"weight": torch.randn(16, D_IN)}, assign=True)

    def load(layers: list[Linear]) -> None:
        layers[2].load_state_dict({"weight": torch.randn(16, D_IN)})

    def in_other_order(layers: list[Linear]) -> None:
        layers[1].weight.data, layers[2].weight.data = layers[2].weight.data, layers[1].weight.data

    def transposed(layers: list[Linear]) -> None:
        layers[2].weight.data = layers[2].weight.data.view(D_IN, 16).t()

    assert is_one(lambda layers: None)
    assert is_one(load)  # copies into the same memory
    assert not any(map(is_one, (replace, assign, in_other_order, transposed)))


def test_float32_weights_under_autocast_have_products_of_their_own() -> None:
    layers, (x, _) = layers_of(torch.float32, True), inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ys, is_one = packed_outputs(layers, x)
    assert not is_one
    assert {y.dtype for y in ys} == {torch.bfloat16}


# Blocks


def products(run: Any) -> int:
    """How many products with weights run."""
    with torch.profiler.profile() as profile:
        run()
    return Counter(event.name for event in profile.events())["aten::mm"]


def losses_of(**train: Any) -> tuple[list[float], int, dict[str, Tensor]]:
    """Losses of three steps, the products of the last of them, and the state dict, of two compiled blocks."""
    torch._dynamo.reset()
    how = dict(compile=True, **train)
    with tiny_trainer(make_config(Path("unused"), train=how, model=dict(num_layers=2, num_kv_heads=1))) as trainer:
        losses = [trainer.train_step()["loss"] for _ in range(2)]
        count = products(lambda: losses.append(trainer.train_step()["loss"]))
        losses.append(trainer.evaluate(random_tokens(700, seed=1)))
        return losses, count, {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


@pytest.fixture
def _without_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, but without the minutes that Inductor's C++ takes."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=INDUCTOR_WITHOUT_ITS_CODE))


@pytest.mark.usefixtures("_without_code")
@pytest.mark.parametrize(
    "how, again, separately_again",
    [
        (dict(precision="fp32"), 0, 0),
        (dict(precision="bf16"), 0, 0),
        (dict(precision="fp16"), 0, 0),
        (dict(precision="bf16", weight_dtype="bf16"), 0, 0),
        (dict(precision="bf16", activation_checkpointing="block"), 4, 7),
        (dict(precision="bf16", compile_memory_budget=0.75), 0, 0),
    ],
    ids=str,
)
def test_a_block_has_12_products_in_a_step_and_trains_as_with_21(
    how: Any, again: int, separately_again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, count, weights = losses_of(**how)
    monkeypatch.setattr(packed_linear, "packed_view", lambda weights: None)
    separate_losses, separate_count, separate_weights = losses_of(**how)
    of_head = 3
    assert (count, separate_count) == (2 * (12 + again) + of_head, 2 * (21 + separately_again) + of_head)
    assert losses == pytest.approx(separate_losses, rel=1e-6 if how["precision"] == "fp32" else 1e-3)  # sums differ
    assert list(weights) == list(separate_weights)


@pytest.mark.usefixtures("_without_code")
def test_micro_batches_add_up_gradients_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    how = dict(precision="bf16", gradient_accumulation_steps=2)
    losses, count, _ = losses_of(**how)
    monkeypatch.setattr(packed_linear, "packed_view", lambda weights: None)
    assert count == 2 * (2 * 12 + 3)
    assert losses == pytest.approx(losses_of(**how)[0], rel=1e-3)


@pytest.mark.usefixtures("_without_code")
@pytest.mark.parametrize("attention", ["flash_torch", "sdpa"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_block_keeps_no_more_for_its_backward_pass(
    attention: str, qk_norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept() -> int:
        torch._dynamo.reset()
        model = TransformerLM(8, 64, 32, 1, 4, 64, attention=get_attention(attention), num_kv_heads=2, qk_norm=qk_norm)
        prepare_model(model, TrainConfig(compile=True))
        pack_matrices(model)
        own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        found: dict[int, tuple[int, Tensor]] = {}

        def keep(t: Tensor) -> Tensor:
            storage = t.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes(), t
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            y = model.layers[0](torch.randn(2, 64, 32, requires_grad=True))
        assert y.requires_grad
        return sum(nbytes for address, (nbytes, _) in found.items() if address not in own)

    packed = kept()
    monkeypatch.setattr(packed_linear, "packed_view", lambda weights: None)
    assert packed == kept()


@pytest.mark.usefixtures("_without_code")
def test_blocks_share_one_compilation() -> None:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    how = dict(compile=True, precision="bf16")
    with tiny_trainer(make_config(Path("unused"), train=how, model=dict(num_layers=4))) as trainer:
        trainer.train_step()
    assert counters["stats"]["unique_graphs"] == 3  # a block, the last norm and the loss


def test_a_packed_model_has_the_same_parameters_in_one_tensor_a_block(tmp_path: Path) -> None:
    config = make_config(tmp_path, model=dict(num_layers=2, d_ff=96))
    torch.manual_seed(0)
    model = TransformerLM(**dataclasses.asdict(config.model.shape))
    before, parameters = {k: v.clone() for k, v in model.state_dict().items()}, dict(model.named_parameters())
    pack_matrices(model)
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in parameters.items()}
    assert_same_tensors(model.state_dict(), before)
    assert list(model.state_dict()) == list(before)
    for layer in model.layers:
        assert len({p.untyped_storage().data_ptr() for p in layer.parameters() if p.ndim == 2}) == 1
        assert layer.ffn.w2.weight.data_ptr() > layer.ffn.w3.weight.data_ptr() > layer.ffn.w1.weight.data_ptr()


@pytest.mark.usefixtures("_without_code")
def test_a_run_goes_on_from_a_checkpoint_of_separate_products(tmp_path: Path) -> None:
    def weights(run: str, steps: int, compile: bool) -> dict[str, Tensor]:
        torch._dynamo.reset()
        how = dict(compile=compile, precision="bf16", max_steps=steps)
        optimizer = dict(warmup_steps=1, lr=1e-3, min_lr=1e-3)
        train(make_config(tmp_path, run=run, resume="auto", train=how, optimizer=optimizer))
        return load_model(tmp_path / run).state_dict

    weights("other", 2, compile=False)
    expected, found = weights("one", 4, compile=True), weights("other", 4, compile=True)
    assert list(found) == list(expected)
    for name, weight in expected.items():
        assert torch.linalg.vector_norm(found[name] - weight) < 2e-3 * torch.linalg.vector_norm(weight), name


class Adapter(nn.Module):
    """Adds 1 to a layer's output, and has no weight of its own."""

    def __init__(self, base: Linear) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 1


class LinearAndMore(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def plus_one(block: Any, how: str) -> None:
    """Add 1 to what q_proj gives."""
    q_proj = block.attn.q_proj
    if how == "wrapper":
        block.attn.q_proj = Adapter(q_proj)
    elif how == "subclass":
        block.attn.q_proj = LinearAndMore(q_proj.weight.shape[1], len(q_proj.weight))
        block.attn.q_proj.weight = q_proj.weight
    elif how == "forward":
        q_proj.forward = lambda x: nn.functional.linear(x, q_proj.weight) + 1
    else:
        q_proj.register_forward_hook(lambda module, inputs, output: output + 1)


@pytest.mark.parametrize("how", ["wrapper", "subclass", "forward", "hook"])
def test_a_layer_that_does_more_than_its_product_does_so_in_packed_blocks_too(how: str) -> None:
    x, found = torch.randn(2, 16, 32), []
    for compile in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = TransformerLM(16, 16, 32, 1, 2, 64)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "compile", functools.partial(torch.compile, backend=INDUCTOR_WITHOUT_ITS_CODE))
            prepare_model(model, TrainConfig(compile=compile))
        pack_matrices(model)
        (block,) = model.layers
        before = block(x)
        assert not compile or block.attn.project.packed is None  # between calls
        plus_one(block, how)
        found += [before, block(x)]
    plain, changed, packed_plain, packed_changed = found
    torch.testing.assert_close(packed_plain, plain)
    torch.testing.assert_close(packed_changed, changed)
    assert not torch.allclose(plain, changed)


@pytest.mark.parametrize("how, packs", [({}, True), (dict(precision="fp8"), False), (dict(compile=False), False)])
def test_compiled_blocks_are_packed_but_not_in_fp8(how: Any, packs: bool) -> None:
    model = TransformerLM(16, 16, 32, 1, 2, 64)
    prepare_model(model, TrainConfig(**dict(compile=True) | how))
    attn, ffn = model.layers[0].attn, model.layers[0].ffn
    assert {isinstance(each.project, PackedLinear) for each in (attn, ffn)} == {packs}


def products_of_ranks(strategy: str, shard_optimizer: bool) -> tuple[int, list[float]]:
    """Products of the second of two steps, and the losses."""
    torch.compile = functools.partial(torch.compile, backend=INDUCTOR_WITHOUT_ITS_CODE)  # in a process of its own
    parallel, train = dict(strategy=strategy, shard_optimizer=shard_optimizer), dict(compile=True, precision="bf16")
    config = make_config(Path("unused"), train=train, parallel=parallel, model=dict(num_layers=2))
    torch.manual_seed(0)
    model = TransformerLM(**dataclasses.asdict(config.model.shape))
    trainer = Trainer(config, model, random_tokens(), torch.device("cpu"))
    losses = [trainer.train_step()["loss"]]
    count = products(lambda: losses.append(trainer.train_step()["loss"]))
    trainer.close()
    return count, losses


@pytest.mark.parametrize("strategy, shard_optimizer", [("fsdp", False), ("overlap", False), ("overlap", True)])
def test_ranks_have_12_products_a_block_too(strategy: str, shard_optimizer: bool) -> None:
    with tiny_trainer(make_config(Path("unused"), train=dict(precision="bf16"), model=dict(num_layers=2))) as trainer:
        expected = [trainer.train_step()["loss"] for _ in range(2)]
    for count, losses in run_ranks(products_of_ranks, 2, strategy, shard_optimizer):
        assert count == 2 * 12 + 3
        assert losses == pytest.approx(expected, rel=1e-3)
