"""`flash_function` by itself, around a kernel that only writes down how it was called."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from cs336_systems.kernels.attention.contract import attention_flops, check_qkv
from cs336_systems.kernels.attention.flash_torch import flash_torch
from cs336_systems.kernels.attention.function import Saved, flash_function, new_gradients, new_outputs

calls: list[tuple[Any, ...]] = []


def forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    check_qkv(q, k, v, is_causal)
    calls.append(("forward", is_causal))
    o, logsumexp = new_outputs(q)
    return o.copy_(q + k + v), logsumexp.copy_(q.sum(-1))


def backward(dO: Tensor, saved: Saved, *needs: bool) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, o, logsumexp, is_causal, _ = saved
    calls.append(("backward", is_causal, *needs))
    assert torch.equal(logsumexp, q.sum(-1))
    assert torch.equal(o, q + k + v)
    dq, dk, dv = new_gradients(q, k, v, *needs)
    for i, gradient in enumerate((dq, dk, dv), 1):
        if gradient.numel():
            gradient.copy_(dO * i)
    return dq, dk, dv


Toy = flash_function("toy", forward, backward)


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    calls.clear()
    torch._dynamo.reset()


def inputs(needs: str = "qkv", shape: tuple[int, ...] = (2, 4, 8)) -> list[Tensor]:
    return [torch.randn(shape).requires_grad_(name in needs) for name in "qkv"]


@pytest.mark.parametrize("needs", ["q", "k", "v", "qk", "qv", "kv", "qkv"])
@pytest.mark.parametrize("way", ["eager", "operator", "compiled"])
def test_only_needed_gradients_are_requested(needs: str, way: str) -> None:
    q, k, v = inputs(needs)
    if way == "operator":
        o, logsumexp = torch.ops.cs336.toy_forward(q, k, v, True)
        assert not logsumexp.requires_grad
    elif way == "compiled":
        o = torch.compile(Toy.apply, fullgraph=True, backend="aot_eager")(q, k, v, True)
    else:
        o = Toy.apply(q, k, v, True)
    o.sum().backward()
    flags = (True, "q" in needs, "k" in needs or "v" in needs)
    assert calls == [("forward", True), ("backward", *flags)]
    for name, x, factor in zip("qkv", (q, k, v), (1, 2, 3), strict=True):
        if name in needs:
            assert torch.equal(x.grad, torch.full_like(x, factor))
        else:
            assert x.grad is None


def test_nothing_is_saved_or_called_backward_without_gradients() -> None:
    q, k, v = inputs("")
    assert Toy.apply(q, k, v).grad_fn is None
    assert calls == [("forward", False)]


def test_eager_calls_do_not_go_through_the_dispatcher() -> None:
    with torch.profiler.profile() as profile:
        Toy.apply(*inputs()).sum().backward()
    assert not [event.key for event in profile.key_averages() if "cs336" in event.key]


def test_fake_tensors_do_not_reach_the_kernel() -> None:
    with FakeTensorMode():
        q, k, v = inputs()
        o = Toy.apply(q, k, v, True)
        o.sum().backward()
    assert (o.shape, q.grad.shape) == ((2, 4, 8), (2, 4, 8))
    assert calls == []


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("needs, products", [("qkv", 5), ("q", 3), ("k", 4), ("kv", 4)])
def test_useful_operations_are_counted(needs: str, products: int, is_causal: bool) -> None:
    q, k, v = inputs(needs)
    with FlopCounterMode(display=False) as counter:
        o = Toy.call(q, k, v, is_causal)
    assert counter.get_total_flops() == attention_flops(q.shape, 4, is_causal, products=2)
    with FlopCounterMode(display=False) as counter:
        o.sum().backward()
    assert counter.get_total_flops() == attention_flops(q.shape, 4, is_causal, products)


def test_one_tensor_as_keys_and_values_compiles() -> None:
    q, k, _ = inputs()
    o = torch.compile(Toy.call, fullgraph=True, backend="aot_eager")(q, k, k, True)
    o.sum().backward()
    assert torch.equal(k.grad, torch.full_like(k, 2 + 3))


def test_wrong_inputs_are_refused_in_every_way() -> None:
    q, k, v = inputs()
    for wrong in (None, [1.0], v.detach().numpy()):
        with pytest.raises(ValueError, match=r"^v is a \w+: it must be a tensor"):
            Toy.call(q, k, wrong, True)
    with FakeTensorMode(), pytest.raises(ValueError, match=r"^k has 3 heads"):
        Toy.call(*inputs()[:1], *inputs(shape=(3, 4, 8))[1:], True)
    # PyTorch 2.11 wraps the error that an operator raises while it is traced; 2.13 passes it on.
    wrapped = torch._dynamo.exc.TorchRuntimeError
    with pytest.raises((ValueError, wrapped), match="v has 2 positions: it must have as many as k"):
        torch.compile(Toy.call, backend="aot_eager")(q, k, v[:, :2], True)


def test_one_compilation_serves_all_lengths() -> None:
    compiled = torch.compile(Toy.apply, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for n in (4, 5, 17):
            q, k, v = inputs(shape=(2, n, 8))
            assert torch.equal(compiled(q, k, v, True), q + k + v)


@pytest.mark.parametrize("way", [Toy.apply, lambda *args: torch.ops.cs336.toy_forward(*args)[0]])
def test_second_derivatives_are_refused(way: Any) -> None:
    q, k, v = inputs()
    with pytest.raises(RuntimeError, match="toy has no second derivatives"):
        torch.autograd.grad(way(q, k, v, True).sum(), q, create_graph=True)


@pytest.mark.parametrize("dtype, wide", [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_outputs_have_the_memory_layout_of_their_inputs(dtype: torch.dtype, wide: torch.dtype) -> None:
    q = torch.ones(2, 7, 3, 8, dtype=dtype).transpose(1, 2)
    o, logsumexp = new_outputs(q)
    assert (o.shape, o.stride(), o.dtype) == (q.shape, q.stride(), dtype)
    assert (logsumexp.shape, logsumexp.dtype, logsumexp.is_contiguous()) == (q.shape[:-1], wide, True)
    dq, dk, dv = new_gradients(q, q, q, True, False)
    assert (dq.stride(), dk.numel(), dv.numel()) == (q.stride(), 0, 0)


def test_outputs_of_five_dimensions_can_be_written_through_four() -> None:
    q = torch.ones(3, 2, 4, 5, 8).transpose(0, 1)
    assert all(x.is_contiguous() for x in (*new_outputs(q), *new_gradients(q, q, q, True, True)))


def test_groups_are_counted_and_faked_by_the_heads_of_q() -> None:
    q, k, v = (torch.randn(2, heads, n, 8, requires_grad=True) for heads, n in ((6, 5), (2, 7), (2, 7)))
    for mode in (FlopCounterMode(display=False), FakeTensorMode(allow_non_fake_inputs=True)):
        with mode:
            o = flash_torch(q, k, v, True)
            gradients = torch.autograd.grad(o.sum(), (q, k, v))
        assert [x.shape for x in (o, *gradients)] == [q.shape, q.shape, k.shape, v.shape]
        if isinstance(mode, FlopCounterMode):
            assert mode.get_total_flops() == attention_flops(q.shape, 7, True, products=2 + 5)


def test_groups_compile_for_all_lengths() -> None:
    compiled = torch.compile(flash_torch, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (5, 9):
        q, k, v = (torch.randn(2, heads, n, 8, requires_grad=True) for heads in (6, 2, 2))
        for x, expected in zip(
            torch.autograd.grad(compiled(q, k, v, True).sum(), (q, k, v)),
            torch.autograd.grad(flash_torch(q, k, v, True).sum(), (q, k, v)),
            strict=True,
        ):
            torch.testing.assert_close(x, expected)
