"""The counts against real models, against PyTorch's own counter, and worked out by hand."""

import dataclasses
import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from cs336_basics.attention import scaled_dot_product_attention, visible_keys
from cs336_basics.model import TransformerLM
from cs336_basics.optimizer import AdamW
from cs336_basics.shape import ModelShape
from cs336_systems.bench.instruments.live_bytes import LiveBytes
from cs336_systems.config.model import MODEL_SIZES, ModelConfig
from cs336_systems.config.run import TrainConfig
from cs336_systems.kernels.attention import get_attention
from cs336_systems.kernels.linear_cross_entropy import chunked_linear_cross_entropy, loss_and_gradient
from cs336_systems.planner.accounting import (
    activation_bytes,
    attention_output_bytes,
    attention_product_flops,
    best_group,
    block_bytes,
    bytes_of_kinds,
    checkpointed_activation_bytes,
    forward_flops,
    gradient_bytes,
    head_bytes,
    least_training_bytes,
    matmul_parameters,
    naive_attention_bytes,
    num_parameters,
    sizes_of,
    softmax_flops,
    tensors,
    training_flops,
    weight_copy_bytes,
)
from cs336_systems.planner.communication import num_calls
from cs336_systems.planner.job import Job
from cs336_systems.training.build import cast_weights, narrow_matrices, prepare_blocks


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


SMALL = SHAPES[0]
OPTIONS: list[dict[str, Any]] = [
    dict(num_heads=4, num_kv_heads=2),
    dict(head_dim=20, qk_norm=True),
    dict(tie_embeddings=True),
    dict(num_heads=4, num_kv_heads=1, head_dim=6, qk_norm=True, tie_embeddings=True, num_layers=3),
]
OTHERS = [dataclasses.replace(SMALL, **options) for options in OPTIONS]


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


@pytest.mark.parametrize("shape", [*SHAPES, *OTHERS, *(ModelConfig(size=size).shape for size in MODEL_SIZES)])
def test_the_parameters_are_those_of_the_model(shape: ModelShape) -> None:
    parameters = list(model_of(shape).parameters())
    assert num_parameters(shape) == sum(p.numel() for p in parameters)
    counted: Counter[tuple[int, ...]] = Counter()
    for _, count, *sides in tensors(shape):
        counted[tuple(sorted(sides))] += count
    assert counted == Counter(tuple(sorted((*p.shape, 1)[:2])) for p in parameters)


@pytest.mark.parametrize("shape", [*SHAPES, *OTHERS])
def test_the_kinds_of_parameters_have_the_types_that_training_gives_them(shape: ModelShape) -> None:
    job = Job(shape=shape, precision="bf16", fused=True)
    model = TransformerLM(**dataclasses.asdict(shape))
    narrow_matrices(model, TrainConfig(max_steps=1, precision="bf16"))
    sizes = sizes_of(job.weight_dtypes)
    assert bytes_of_kinds(shape, sizes)[2] == sum(p.nbytes for p in model.parameters())
    each_by_itself = dataclasses.replace(job, strategy="naive", world_size=2)
    assert num_calls(each_by_itself) == len(list(model.parameters()))


@pytest.mark.parametrize("shape", [*SHAPES, *OTHERS])
def test_matmul_parameters_are_those_of_the_linear_layers(shape: ModelShape) -> None:
    model = model_of(shape)
    others = {name for name, p in model.named_parameters() if p.ndim == 1}
    if not shape.tie_embeddings:
        others.add("token_embeddings.weight")
    assert matmul_parameters(shape) == sum(p.numel() for name, p in model.named_parameters() if name not in others)


@pytest.mark.parametrize("batch, length", [(1, 1), (1, 8), (3, 5)])
@pytest.mark.parametrize("shape", [s for s in SHAPES if s.context_length >= 8])
def test_the_flops_of_weights_equal_pytorchs_count(shape: ModelShape, batch: int, length: int) -> None:
    attention = shape.num_layers * batch * 2 * length * length * shape.d_model
    counted = counted_flops(shape, batch, length, no_attention)
    assert forward_flops(shape, batch, length) - attention == counted
    assert counted == 2 * matmul_parameters(shape) * batch * length


@pytest.mark.parametrize("shape", [s for s in SHAPES if s.context_length >= 8])
def test_causal_attention_costs_half_of_pytorchs_count_for_the_whole_square(shape: ModelShape) -> None:
    weights = counted_flops(shape, 3, 8, no_attention)
    square = counted_flops(shape, 3, 8, whole_square) - weights
    assert forward_flops(shape, 3, 8) - weights == square / 2 > 0


@pytest.mark.parametrize("shape", [s for s in SHAPES if s.context_length >= 8])
def test_training_costs_three_forward_passes_as_pytorch_counts_them(shape: ModelShape) -> None:
    assert training_flops(shape, 3, 8) == 3 * forward_flops(shape, 3, 8)
    forward = counted_flops(shape, 3, 8, whole_square)
    assert counted_flops(shape, 3, 8, whole_square, backward=True) == 3 * forward


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunk_tokens", [None, 1, 5, 12, 10**6])
def test_the_least_memory_is_that_of_the_tensors_a_step_cannot_do_without(
    shape: ModelShape, chunk_tokens: int | None
) -> None:
    """Whole logits of float32 weights; or bfloat16 weights and the loss in chunks."""
    batch, micro_batch = 6, 2
    model = TransformerLM(**dataclasses.asdict(shape))
    tokens = torch.zeros(batch, shape.context_length, dtype=torch.long)
    inputs, logits = tokens[:micro_batch], list[Tensor]()

    def rows_loss(of_chunk: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits.append(of_chunk)
        return loss_and_gradient(of_chunk, targets)

    if chunk_tokens is None:
        logits.append(model(inputs))
        loss = logits[0].sum()
    else:
        cast_weights(model, torch.bfloat16)
        how = dict(chunk_tokens=chunk_tokens, rows_loss=rows_loss)
        model.lm_head.loss = functools.partial(chunked_linear_cross_entropy, **how)
        loss = model(inputs, targets=inputs)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    loss.backward()
    optimizer.step()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    moments = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor) and t.ndim]
    rope = next(m for name, m in model.named_modules() if name.endswith("rope"))
    held = [*model.parameters(), *gradients, *moments, *rope.buffers(), tokens, max(logits, key=len).bfloat16()]
    sizes = (shape, batch, micro_batch)
    needed = least_training_bytes(*sizes, weight_bytes=4 if chunk_tokens is None else 2, loss_chunk_tokens=chunk_tokens)
    assert needed == sum(t.nbytes for t in held)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_products_of_dense_attention_equal_its_share_of_flops(shape: ModelShape) -> None:
    length = shape.context_length
    added = counted_flops(shape, 3, length, whole_square) - counted_flops(shape, 3, length, no_attention)
    assert 2 * attention_product_flops(shape, 3, length) == added


@pytest.mark.parametrize("window, every", [(3, 1), (3, 2), (8, 1), (100, 1)])
def test_windows_leave_the_scores_that_are_visible(window: int, every: int) -> None:
    shape = dataclasses.replace(SHAPES[3], window=window, window_every=every)
    blocks = [window if i % every == 0 else None for i in range(shape.num_layers)]
    pairs = sum(int(visible_keys(8, 8, torch.device("cpu"), each).sum()) for each in blocks)
    surplus = sum(min(8, each or 8) / 2 for each in blocks)  # n^2 / 2 for a triangle of n (n + 1) / 2
    weights = 2 * matmul_parameters(shape) * 3 * 8
    counted = forward_flops(shape, 3, 8) - weights
    assert counted == 3 * shape.num_heads * 4 * shape.head_size * (pairs - surplus)


def test_softmax_operations_worked_out_by_hand() -> None:
    # 2 layers x 3 sequences x 4 heads x 10 x 10 scores x 5 operations.
    assert softmax_flops(shape_of(50, 10, 8, 20, 2, 4), 3, 10) == 12_000


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("batch, n_q, n_k, d", [(3, 64, 64, 8), (2, 128, 64, 16), (2, 64, 128, 16), (1, 256, 256, 4)])
def test_plain_attention_holds_the_counted_bytes(batch: int, n_q: int, n_k: int, d: int, is_causal: bool) -> None:
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
        live.restart()
        o.backward(do)
        assert live.peak == counted["backward_peak"] + o.nbytes


# Activations. Hooks find the same in real blocks: tests/bench/test_residuals.py and test_checkpointing.py.


BLOCK = shape_of(vocab=10, context=8, d_model=4, d_ff=6, num_layers=5, num_heads=2)
TOKENS, STREAM = 2 * 3, 2 * 3 * 4  # a batch of 2 sequences of 3 tokens, and numbers in the residual stream


def test_activations_of_a_block_worked_out_by_hand() -> None:
    norm = 4 * TOKENS + 4 * STREAM  # 1 / rms of each token, and the normalised x
    factors = 4 * (TOKENS * 6)  # w1 x, its silu, w3 x, their product
    assert activation_bytes(BLOCK, 2, 3) == {
        "ln1": norm,
        "qkv_proj": 4 * STREAM,
        "attention": 4 * 3 * STREAM + 3 * 3 + 4 * (2 * 2 * 3 * 3),
        "output_proj": 4 * STREAM,
        "ln2": 4 * STREAM + norm,
        "ffn": 4 * STREAM + 4 * factors,
    }
    low = activation_bytes(BLOCK, 2, 3, "bf16", "flash_triton")
    assert low["attention"] == 2 * 4 * STREAM + 4 * TOKENS * 2  # q, k, v, o; two heads' logsumexp
    assert low["qkv_proj"] == 3 * 2 * STREAM
    assert low["ffn"] == 2 * 2 * STREAM + 2 * factors
    assert (weight_copy_bytes(BLOCK, "fp32"), weight_copy_bytes(BLOCK, "fp16")) == (0, 2 * (4 * 16 + 3 * 24))


def test_scores_that_only_the_backward_pass_holds_are_in_its_own_memory_alone() -> None:
    how = (BLOCK, 1, 400, "bf16")
    kernels = ("naive", "flash_triton", "flash_triton_compiled")
    naive, flash, compiled = (gradient_bytes(*how, kernel) for kernel in kernels)
    assert activation_bytes(*how, kernels[2]) == activation_bytes(*how, kernels[1])
    assert flash < compiled == naive  # softmax and the gradient of scores, or the gradients of both: 2 x 4 B H N^2


def test_an_unknown_kernel_is_named() -> None:
    with pytest.raises(ValueError, match="attention is 'flex'"):
        activation_bytes(BLOCK, 2, 3, "fp32", "flex")


@pytest.mark.parametrize(
    "checkpointed, inputs, blocks",
    [
        (None, 0, 5),  # kept after forward: inputs of checkpointed blocks, and whole blocks
        (("every", 1), 5, 0),
        (("every", 2), 3, 2),
        (("every", 9), 1, 4),
        (("groups", 2), 3, 0),
        (("groups", 5), 1, 0),
        (("groups", 9), 1, 0),
    ],
)
def test_activations_kept_after_forward(checkpointed: tuple[str, int] | None, inputs: int, blocks: int) -> None:
    how = (BLOCK, 2, 3, "bf16", "naive")
    held, peak = checkpointed_activation_bytes(*how, checkpointed)
    assert held == inputs * 4 * STREAM + blocks * block_bytes(*how) + head_bytes(*how[:4])
    assert peak >= held


def test_attentions_output_and_logsumexp_are_kept_beside_the_input() -> None:
    how, layers = (BLOCK, 2, 3, "bf16", "sdpa"), BLOCK.num_layers
    (held, peak), (more, higher) = (
        checkpointed_activation_bytes(*how, ("every", 1), keeps_attention=kept) for kept in (False, True)
    )
    outputs = 2 * STREAM + 4 * 2 * 3 * BLOCK.num_heads
    assert more - held == higher - peak == layers * outputs


@pytest.mark.parametrize("options", [dict(num_kv_heads=1), dict(head_dim=6)], ids=str)
def test_the_output_that_is_kept_is_as_wide_as_all_query_heads(options: dict[str, Any]) -> None:
    shape, held = dataclasses.replace(BLOCK, **options), []
    tokens = torch.zeros(2, 3, dtype=torch.long)
    for policy in ("block", "block_but_attention"):
        model = TransformerLM(**dataclasses.asdict(shape), attention=get_attention("sdpa"))
        prepare_blocks(model, TrainConfig(activation_checkpointing=policy))
        with LiveBytes() as live:
            loss = model(tokens, targets=tokens)
            held.append(live.now)
        loss.backward()
    assert held[1] - held[0] == shape.num_layers * attention_output_bytes(shape, TOKENS, 4)


@pytest.mark.parametrize(
    "number, inputs, blocks",
    # Where the peak is: five blocks in groups of two, with all inputs but the last one, the second group whole.
    [(1, 5, 1), (2, 2, 2), (3, 1, 3), (4, 1, 4), (5, 1, 5)],
)
def test_the_peak_has_one_group_whole_beside_the_inputs_up_to_it(number: int, inputs: int, blocks: int) -> None:
    shape = dataclasses.replace(BLOCK, vocab_size=1)
    how = (shape, 2, 300, "fp32", "naive")
    entry = 4 * 2 * 300 * 4
    _, peak = checkpointed_activation_bytes(*how, ("groups", number))
    assert peak == (inputs - 1) * entry + blocks * block_bytes(*how) + gradient_bytes(*how)


@pytest.mark.parametrize("num_layers", [64, 1000, 10_000])
def test_the_best_group_is_the_one_of_least_memory(num_layers: int) -> None:
    shape = dataclasses.replace(BLOCK, num_layers=num_layers, vocab_size=1)
    peaks = {k: checkpointed_activation_bytes(shape, 2, 8, checkpointed=("groups", k))[1] for k in range(1, 65)}
    best = best_group(shape, 2, 8)
    least = min(peaks, key=lambda k: peaks[k])
    assert peaks[round(best)] <= 1.05 * peaks[least]
    assert least == pytest.approx(best, rel=0.2, abs=1)


def test_under_autocast_copies_of_all_weights_are_a_floor_of_the_peak() -> None:
    shape = shape_of(vocab=10, context=8, d_model=64, d_ff=128, num_layers=50, num_heads=2)
    held, peak = checkpointed_activation_bytes(shape, 1, 8, "bf16", "sdpa", ("groups", 2))
    # And the logits before they are float32, and as many numbers inside logsumexp.
    assert peak == held + 50 * weight_copy_bytes(shape, "bf16") + (2 + 4) * 8 * 10
