"""Models of other architectures than the handout's: their memory, counts and time, and what is not predicted."""

import functools
import re
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from cs336_basics.model import TransformerLM
from cs336_basics.shape import ModelShape
from cs336_systems.kernels.linear_cross_entropy import chunked_linear_cross_entropy, loss_and_gradient
from cs336_systems.planner.accounting import matmul_parameters, num_parameters, training_flops
from cs336_systems.planner.cards import CARDS
from cs336_systems.planner.communication import sent
from cs336_systems.planner.job import Job
from cs336_systems.planner.memory import moments
from cs336_systems.planner.products import products
from cs336_systems.planner.step import elementwise_bytes, step_seconds, step_sections, step_terms

H200 = CARDS["H200"]
QWEN = ModelShape(vocab_size=151_936, context_length=1024, d_model=1024, d_ff=3072, num_layers=28, num_heads=16,
                  num_kv_heads=8, head_dim=128, qk_norm=True, tie_embeddings=True)  # fmt: skip
"""Qwen3-0.6B."""
LLAMA = ModelShape(vocab_size=1000, context_length=64, d_model=64, d_ff=128, num_layers=2, num_heads=4, num_kv_heads=2,
                   tie_embeddings=True)  # fmt: skip


def terms_at(moment: str, **given: Any) -> dict[str, float]:
    return {term.name: term.value for term in moments(Job(**({"shape": LLAMA} | given)))[moment]}


def test_a_tied_head_has_one_table_and_a_gradient_beside_the_embeddings() -> None:
    end, n, table = terms_at("the end of backward"), num_parameters(LLAMA), 4 * 1000 * 64
    assert end["weights"] == end["gradients"] == pytest.approx(4 * n, rel=0.01)
    assert end["gradient of the embedding"] == table
    # Its weight stays float32 beside 16-bit matrices, so autocast copies it.
    masters = terms_at("the loss", fused=True)
    assert masters["weight copies"] == table / 2
    assert masters["lower halves of masters"] == pytest.approx(2 * (n - 1000 * 64 - 5 * 64), rel=0.01)
    # In buckets the head's gradient waits for the embedding's.
    assert "gradient of the head" not in end
    shared = dict(strategy="bucketed", world_size=2)
    assert terms_at("the end of backward", **shared)["gradient of the head"] == table
    # FSDP sends it once, and computes with 16-bit rows of it, without a copy.
    sharded: dict[str, Any] = dict(strategy="fsdp", world_size=2, fused=True)
    assert sent(Job(shape=LLAMA, **sharded), H200).calls == 3 * (LLAMA.num_layers + 1)
    assert terms_at("the loss", **sharded)["weight copies"] == 0
    assert terms_at("backward of the first block", **sharded)["gradient of the head"] == table / 2
    end = terms_at("the end of backward", **sharded)
    assert end["whole units, gradients"] == (1 + 1 / 2) * table / 2


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("loss_chunk_tokens", [None, 2])
def test_the_two_gradients_of_a_tied_weight_are_added_where_the_count_says(
    loss_chunk_tokens: int | None, precision: Any
) -> None:
    model, tokens = TransformerLM(**asdict(LLAMA)), torch.zeros(1, 4, dtype=torch.long)
    if loss_chunk_tokens is not None:
        how: dict[str, Any] = dict(chunk_tokens=loss_chunk_tokens, rows_loss=loss_and_gradient)
        model.lm_head.loss = functools.partial(chunked_linear_cross_entropy, **how)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        loss = model(tokens, targets=tokens)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        loss.backward()
    sums = [event.name for event in profile.events() if event.input_shapes[:2] == [[1000, 64]] * 2]
    (how_added,) = [name for name in sums if name in ("aten::add", "aten::add_")]
    end = terms_at("the end of backward", precision=precision, loss_chunk_tokens=loss_chunk_tokens)
    tables = {"aten::add_": 1, "aten::add": 2}[how_added]
    assert end["gradient of the embedding"] == tables * 4 * 1000 * 64


def test_what_is_not_predicted_is_named() -> None:
    with pytest.raises(ValueError, match=r"^strategy is 'torch_fsdp': .* with tie_embeddings true"):
        Job(shape=LLAMA, strategy="torch_fsdp", world_size=2)
    with pytest.raises(ValueError, match=r"^attention is 'sdpa': it must be one of .*flash_triton.* with window 8"):
        Job(shape=replace(LLAMA, window=8), attention="sdpa")


def parts(shape: ModelShape) -> dict[str, float]:
    return {term.name: term.value for term in step_terms(Job(shape=shape, compile=True), H200)}


def test_grouped_heads_take_less_time_and_head_norms_more() -> None:
    full, plain = replace(QWEN, num_kv_heads=None), replace(QWEN, qk_norm=False)
    times, of_full, of_plain = (parts(shape) for shape in (QWEN, full, plain))
    assert times["products, forward"] < of_full["products, forward"]
    assert times["attention"] == of_full["attention"]  # as many scores
    # Compiled: a norm's backward pass reads its input, 2 bytes for each of 2,048 + 1,024 numbers of a token.
    assert (times["elementwise"] - of_plain["elementwise"]) * H200.bandwidth == pytest.approx(28 * 4096 * 2 * 3072)
    forward = 26 * 1024 + 8 * 2048 + 4 * 1024 + 6 * 3072  # bytes of a token: 16 + 5 c, 4 c, 2 c, 3 c for c = 2
    backward = 60 * 1024 + 10 * 2048 + 6 * 1024 + 10 * 3072  # 40 + 10 c, 5 c, 3 c, 5 c
    assert elementwise_bytes(Job(shape=QWEN, compile=True)) == (4096 * forward, 4096 * backward)


def test_the_products_are_all_operations_with_weights() -> None:
    job = Job(shape=QWEN)
    forward = sum(count * 2 * m * n * k for count, (m, n, k) in products(job))
    assert forward == 2 * matmul_parameters(QWEN) * job.tokens


def test_a_window_has_counts_and_no_time() -> None:
    windowed = replace(QWEN, window=256)
    (counts,) = step_sections(Job(shape=windowed), H200)
    assert counts.value("operations") == training_flops(windowed, 4, 1024) < training_flops(QWEN, 4, 1024)
    assert counts.notes[0].startswith("no time: window is 256, below context_length 1024")
    with pytest.raises(ValueError, match=r"^no prediction for the time: window is 256"):
        step_seconds(Job(shape=windowed), H200)
    for job in (Job(shape=replace(QWEN, window=1024)), Job(shape=windowed, attention="naive")):
        without = replace(job, shape=replace(job.shape, window=None))
        assert step_seconds(job, H200) == step_seconds(without, H200)


@pytest.mark.parametrize("kernel", ["flash_torch", "flash_triton_simple", "flash_triton_compiled"])
def test_kernels_that_are_slower_than_the_cards_rates_have_no_time(kernel: str) -> None:
    (counts,) = step_sections(Job(shape=QWEN, attention=kernel), H200)
    assert counts.notes == (f"no time: attention is {kernel}: the rates of cards are those of faster kernels",)


def test_formulas_give_the_numbers_beside_them() -> None:
    letters = dict(
        V=151_936, d=1024, L=28, D=128, H=16, H_kv=8, d_ff=3072, B=4, N_ctx=1024, L_full=14, L_windowed=14, w=256
    )
    for shape in (QWEN, replace(QWEN, window=256, window_every=2), replace(QWEN, tie_embeddings=False)):
        counts = {term.name: term for term in step_sections(Job(shape=shape), H200)[0].terms}
        letters |= {"N_m": counts["N_m, in products"].value, "T": 4096}
        for name in ("N, parameters", "operations"):
            formula, filled = counts[name].working.split(" = ")
            products_of = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", formula).replace("^", "**")
            by_numbers = re.sub(r"(\d|\)) ?\((?=\d)", r"\1 * (", filled.replace(",", "").replace(" x ", " * "))
            assert eval(products_of, {}, letters) == counts[name].value, formula
            assert eval(by_numbers.replace("^", "**")) == counts[name].value, filled
