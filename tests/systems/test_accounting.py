"""The counts against real models, against PyTorch's own counter, and worked out by hand."""

import dataclasses
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from cs336_basics.model import TransformerLM, scaled_dot_product_attention
from cs336_basics.optimizer import AdamW
from cs336_basics.shape import ModelShape
from cs336_systems.accounting import (
    attention_product_flops,
    forward_flops,
    least_training_bytes,
    matmul_parameters,
    naive_attention_bytes,
    num_parameters,
    softmax_flops,
    training_flops,
)
from cs336_systems.model_config import MODEL_SIZES, ModelConfig


def shape_of(vocab: int, context: int, d_model: int, d_ff: int, num_layers: int, num_heads: int) -> ModelShape:
    return ModelShape(
        vocab_size=vocab,
        context_length=context,
        d_model=d_model,
        d_ff=d_ff,
        num_layers=num_layers,
        num_heads=num_heads,
        rope_theta=10000.0,
    )


SHAPES = [
    shape_of(300, 16, 32, 64, 1, 2),
    shape_of(50, 8, 12, 20, 3, 3),
    shape_of(1, 1, 2, 1, 1, 1),
    shape_of(1000, 64, 48, 130, 5, 4),
]


def no_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """Uses all of its inputs, but without a matrix product."""
    return q + k + v


def whole_square(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """Every query with every key, the masked ones too."""
    return (q @ k.mT).softmax(dim=-1) @ v


def model_of(shape: ModelShape, **more: Any) -> TransformerLM:
    with torch.device("meta"):
        return TransformerLM(**dataclasses.asdict(shape), **more)


def counted_flops(shape: ModelShape, batch: int, length: int, attention: Any, backward: bool = False) -> int:
    model = model_of(shape, attention=attention)
    with FlopCounterMode(display=False) as counter:
        logits = model(torch.zeros(batch, length, dtype=torch.long, device="meta"))
        if backward:
            logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("shape", [*SHAPES, *(ModelConfig(size=size).shape for size in MODEL_SIZES)])
def test_num_parameters_is_what_the_model_has(shape: ModelShape) -> None:
    assert num_parameters(shape) == sum(p.numel() for p in model_of(shape).parameters())


@pytest.mark.parametrize("shape", SHAPES)
def test_matmul_parameters_are_those_of_the_linear_layers(shape: ModelShape) -> None:
    model = model_of(shape)
    others = {"token_embeddings.weight"} | {name for name, p in model.named_parameters() if p.ndim == 1}
    assert matmul_parameters(shape) == sum(p.numel() for name, p in model.named_parameters() if name not in others)


def test_parameters_worked_out_by_hand() -> None:
    shape = shape_of(vocab=10, context=8, d_model=4, d_ff=6, num_layers=2, num_heads=2)
    embedding = head = 10 * 4
    block = 4 * (4 * 4) + 3 * (4 * 6) + 4 + 4
    assert num_parameters(shape) == embedding + head + 2 * block + 4 == 372
    assert matmul_parameters(shape) == head + 2 * (64 + 72) == 312


def test_the_sizes_of_the_handout_have_the_parameters_their_names_tell() -> None:
    millions = {size: num_parameters(ModelConfig(size=size).shape) / 1e6 for size in MODEL_SIZES}
    assert millions["small"] == pytest.approx(128.6, abs=0.1)  # 12 (4 * 768^2 + 3 * 768 * 3072) + 2 * 10^4 * 768 + ...
    assert millions["2.7B"] == pytest.approx(3406.8, abs=0.1)  # GPT-3's 2.7B with a third feed-forward matrix


@pytest.mark.parametrize("batch, length", [(1, 1), (1, 8), (3, 5)])
@pytest.mark.parametrize("shape", [s for s in SHAPES if s.context_length >= 8])
def test_the_weights_cost_what_pytorch_counts(shape: ModelShape, batch: int, length: int) -> None:
    attention = shape.num_layers * batch * 2 * length * length * shape.d_model
    counted = counted_flops(shape, batch, length, no_attention)
    assert forward_flops(shape, batch, length) - attention == counted
    assert counted == 2 * matmul_parameters(shape) * batch * length


@pytest.mark.parametrize("shape", [s for s in SHAPES if s.context_length >= 8])
def test_causal_attention_costs_half_of_what_pytorch_counts_for_the_whole_square(shape: ModelShape) -> None:
    weights = counted_flops(shape, 3, 8, no_attention)
    square = counted_flops(shape, 3, 8, whole_square) - weights
    assert forward_flops(shape, 3, 8) - weights == square / 2 > 0


def test_causal_attention_worked_out_by_hand() -> None:
    # One layer of width 4 on 3 tokens. Scores: 3 x 3 of them, each 4 products and 4 sums; values: the same again.
    # The mask leaves half of the square (its diagonal counts as half).
    shape = shape_of(vocab=10, context=8, d_model=4, d_ff=6, num_layers=1, num_heads=2)
    square = 3 * 3 * (4 + 4) + 3 * 3 * (4 + 4)
    weights = 2 * (10 * 4 + 4 * 16 + 3 * 24) * 3
    assert forward_flops(shape, 1, 3) == weights + square // 2 == 1056 + 72


def test_flops_grow_with_sequences_as_they_should() -> None:
    shape = SHAPES[0]
    assert forward_flops(shape, 6, 8) == 6 * forward_flops(shape, 1, 8)
    assert forward_flops(shape, 1, 16) > 2 * forward_flops(shape, 1, 8)


@pytest.mark.parametrize("shape", [s for s in SHAPES if s.context_length >= 8])
def test_training_costs_three_forward_passes_as_pytorch_counts_them(shape: ModelShape) -> None:
    assert training_flops(shape, 3, 8) == 3 * forward_flops(shape, 3, 8)
    forward = counted_flops(shape, 3, 8, whole_square)
    assert counted_flops(shape, 3, 8, whole_square, backward=True) == 3 * forward


@pytest.mark.parametrize("shape", SHAPES)
def test_the_least_memory_is_that_of_the_tensors_a_step_cannot_do_without(shape: ModelShape) -> None:
    batch, micro_batch = 6, 2
    model = TransformerLM(**dataclasses.asdict(shape))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    tokens = torch.zeros(batch, shape.context_length, dtype=torch.long)
    logits = model(tokens[:micro_batch])
    logits.sum().backward()
    optimizer.step()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    moments = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor) and t.ndim]
    rope = next(m for name, m in model.named_modules() if name.endswith("rope"))
    held = [*model.parameters(), *gradients, *moments, *rope.buffers(), tokens, logits.bfloat16()]
    assert least_training_bytes(shape, batch, micro_batch) == sum(t.nbytes for t in held)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_products_of_dense_attention_are_what_attention_adds(shape: ModelShape) -> None:
    length = shape.context_length
    added = counted_flops(shape, 3, length, whole_square) - counted_flops(shape, 3, length, no_attention)
    assert 2 * attention_product_flops(shape, 3, length) == added


def test_softmax_operations_worked_out_by_hand() -> None:
    # 2 layers x 3 sequences x 4 heads x 10 x 10 scores x 5 operations.
    assert softmax_flops(shape_of(50, 10, 8, 20, 2, 4), 3, 10) == 12_000


class LiveBytes(TorchDispatchMode):
    """The memory of the tensors that operations make and that still live, and the most there was of it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {x.untyped_storage()._cdata for x in tree_leaves(args) if isinstance(x, Tensor)}
        results = function(*args, **(kwargs or {}))
        for x in tree_leaves(results):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in self._known | inputs:
                self._add(x.untyped_storage())
        return results

    def _add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("batch, n_q, n_k, d", [(3, 64, 64, 8), (2, 128, 64, 16), (2, 64, 128, 16), (1, 256, 256, 4)])
def test_plain_attention_holds_what_is_counted(batch: int, n_q: int, n_k: int, d: int, is_causal: bool) -> None:
    counted = naive_attention_bytes(batch, n_q, n_k, d, is_causal)
    q = torch.randn(batch, n_q, d, requires_grad=True)
    k, v = (torch.randn(batch, n_k, d, requires_grad=True) for _ in range(2))
    do = torch.randn(batch, n_q, d)
    saved: dict[int, int] = {}
    kept = []  # or the next tensor could have the place of one that is gone

    def pack(x: Tensor) -> Tensor:
        kept.append(x)
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        scaled_dot_product_attention(q, k, v, is_causal)
    assert sum(saved.values()) == counted["saved_for_backward"]
    scores = 4 * batch * n_q * n_k
    assert (counted["scores"], counted["softmax"]) == (scores, scores)
    assert (counted["masked_scores"], counted["masks"]) == ((scores, 2 * n_q * n_k) if is_causal else (0, 0))
    with LiveBytes() as live:
        o = scaled_dot_product_attention(q, k, v, is_causal)
        assert live.peak == counted["forward_peak"] + o.nbytes
        live.peak = live.now
        o.backward(do)
        assert live.peak == counted["backward_peak"] + o.nbytes
