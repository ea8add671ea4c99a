"""Memory: the counts by hand, their limits, and the measured rows that are met."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cs336_basics.shape import ModelShape
from cs336_systems.config.model import ModelConfig
from cs336_systems.planner.accounting import KINDS, matmul_parameters, num_parameters
from cs336_systems.planner.activations import block_parts, kept_blocks, saved_bytes
from cs336_systems.planner.cards import CARDS
from cs336_systems.planner.job import ATTENTION, Job
from cs336_systems.planner.memory import (
    LARGEST_BATCH,
    allocated_bytes,
    largest_batch,
    memory_sections,
    moments,
    parameter_bytes,
    peak_bytes,
    verdict,
)
from cs336_systems.planner.rows import training_job
from cs336_systems.planner.working import MIB

SHAPE = ModelShape(vocab_size=100, context_length=8, d_model=16, d_ff=32, num_layers=6, num_heads=2, rope_theta=10000.0)
RESULTS = Path(__file__).parents[2] / "results/h200"
XL = ModelConfig(size="xl", context_length=512).shape


def job(**given: Any) -> Job:
    return Job(**({"shape": SHAPE, "batch_size": 2} | given))


@pytest.mark.parametrize(
    "nbytes, expected",
    [
        (0, 0),
        (1, 512),
        (513, 1024),
        # 1600 x 6400 float32: 39.0625 MiB, a segment of 40 of which 0.9375 are left, too little for another tensor.
        (40_960_000, 40 * MIB),
        # 12.5 MiB: 1.5 MiB of the 14 are left, enough.
        (12.5 * MIB, 12.5 * MIB),
        # 9.765625 MiB: two in 20 MiB, of which the second takes the 0.46875 that are left: 10 each.
        (10_240_000, 10 * MIB),
        # 9 MiB: two in 20 leave 2 MiB, which stay.
        (9 * MIB, 9 * MIB),
        # Exactly 1 MiB left is still too little: `remaining > kSmallSize`.
        (25 * MIB, 26 * MIB),
    ],
)
def test_the_allocator_rounds_to_its_segments(nbytes: float, expected: float) -> None:
    assert allocated_bytes(nbytes) == expected


def test_a_compiled_block_saves_the_tensors_seen_by_hooks() -> None:
    # torch.compile, PyTorch 2.11, a block of d 64, d_ff 256, 2 heads on (2, 256) tokens, bf16: T d = 32768.
    shape = replace(SHAPE, context_length=256, d_model=64, d_ff=256)
    # Input 4 T d, four matrices of 2 T d, q k v o of 2 T d, three of 8 T d, 1/rms twice 2048, logsumexp 4096 bytes.
    flash = sum(block_parts(job(shape=shape, compile=True)).values())
    assert flash == (4 + 8 + 8 + 24) * 32768 + 2 * 2048 + 4096
    # Without o once, but softmax 32 T d, mask 2 T d, maximum and sum of 4096 bytes each.
    naive = sum(block_parts(job(shape=shape, compile=True, attention="naive")).values())
    assert naive == (4 + 8 + 6 + 24 + 32 + 2) * 32768 + 2 * 2048 + 2 * 4096


def test_an_eager_block_keeps_its_input_too() -> None:
    shape = replace(SHAPE, context_length=256, d_model=64, d_ff=256)
    parts = block_parts(job(shape=shape))
    assert parts["input"] == 4 * 32768
    assert sum(parts.values()) == 68 * 32768 + 2 * 2048 + 4096  # as the hooks show: 68.25 T d, T d = 32768


@pytest.mark.parametrize(
    "policy, expected",
    [("none", (6, 0, 0)), ("block", (0, 6, 1)), ("every_2", (3, 3, 1)), ("every_4", (4, 2, 1)), ("groups_4", (0, 2, 4)),
     ("groups_6", (0, 1, 6)), ("first_2", (4, 2, 1)), ("first_6", (0, 6, 1))],
)  # fmt: skip
def test_checkpointing_keeps_inputs(policy: str, expected: tuple[int, int, int]) -> None:
    checkpointed = job(activation_checkpointing=policy)
    assert kept_blocks(checkpointed) == expected
    whole, entry = sum(block_parts(checkpointed).values()), 4 * 2 * 8 * 16
    kept, inputs, again = expected
    again = 0 if policy == "first_2" else again  # the last blocks have freed theirs by then
    assert saved_bytes(checkpointed) == (kept * whole + inputs * entry, max(0, again * whole - entry))


def test_blocks_may_keep_attentions_output_beside_their_input() -> None:
    """2 bytes for each of 16 x 16 numbers of the output, and 4 for each of 16 x 2 of the logsumexp."""
    outputs, narrow = 2 * 16 * 16 + 4 * 16 * 2, dict(compile=True, compile_memory_budget=0.75)
    for policy, count in (("block", 6), ("every_4", 2), ("first_2", 2)):
        held, again = saved_bytes(job(activation_checkpointing=policy))
        kept = job(activation_checkpointing=f"{policy}_but_attention")
        assert saved_bytes(kept) == (held + count * outputs, again - outputs if again else 0)
        assert f"{count} inputs of blocks, each with attention's output" in str(moments(kept)["the loss"])
    # No budget limits the code of such a block, so all is there when it is recomputed.
    without, within = (job(activation_checkpointing="block_but_attention", compile=True), job(**narrow))
    assert saved_bytes(replace(without, compile_memory_budget=0.75)) == saved_bytes(without)
    assert sum(block_parts(within).values()) < sum(block_parts(without).values())


def test_state_is_16_bytes_a_parameter_at_the_end_of_backward() -> None:
    # xl's tensors are rounded up by 2.4 %, see above; the embeddings (61.04 MiB to 62) by 1.6 %.
    n = num_parameters(XL)
    end = {term.name: term.value for term in moments(Job(shape=XL))["the end of backward"]}
    assert end["weights"] == end["gradients"] == end["optimizer state"] / 2
    assert 4 * n * 1.023 < end["weights"] < 4 * n * 1.025
    assert end["weights"] == parameter_bytes(XL, dict.fromkeys(KINDS, 4))


def held(**given: Any) -> dict[str, float]:
    """Terms at the end of the backward pass of xl with the optimizer `fused`."""
    return {term.name: term.value for term in moments(Job(shape=XL, fused=True, **given))["the end of backward"]}


def test_matrices_take_14_bytes_a_parameter_in_bfloat16_and_16_in_float16() -> None:
    n, matrices = num_parameters(XL), matmul_parameters(XL)
    found, before = held(), moments(Job(shape=XL))["the end of backward"]
    assert found["weights"] == found["gradients"] == pytest.approx(2 * matrices + 4 * (n - matrices), rel=0.03)
    assert found["lower halves of masters"] == pytest.approx(2 * matrices, rel=0.03)
    assert found["optimizer state"] == pytest.approx(8 * n, rel=0.03)
    in_float16 = held(precision="fp16")
    assert in_float16["masters"] == pytest.approx(2 * found["lower halves of masters"], rel=0.001)
    assert sum(in_float16.values()) == pytest.approx(sum(term.value for term in before), rel=0.01)
    at_loss = {term.name: term.value for term in moments(Job(shape=XL, fused=True))["the loss"]}
    assert at_loss["weight copies"] == 0
    # Activations are smaller too, because the residual stream is 16-bit.
    saved = peak_bytes(Job(shape=XL, fused=True, precision="fp16")) - peak_bytes(Job(shape=XL, fused=True))
    assert saved > 2 * matrices


def test_muon_has_one_moment_of_the_blocks_matrices() -> None:
    blocks = 48 * (4 * 1600**2 + 3 * 1600 * 6400)
    assert held()["optimizer state"] - held(muon=True)["optimizer state"] == pytest.approx(4 * blocks, rel=0.03)


def test_sharding_divides_masters() -> None:
    alone, zero1 = held(), held(strategy="overlap", world_size=4, shard_optimizer=True)
    assert zero1["lower halves of masters"] == alone["lower halves of masters"] / 4
    assert zero1["gradients"] == alone["gradients"]
    assert zero1["weights"] == 2 * num_parameters(XL) + 2 * (num_parameters(XL) - matmul_parameters(XL))
    fsdp = held(strategy="fsdp", world_size=4)
    for name in ("weights", "gradients", "lower halves of masters", "optimizer state"):
        assert fsdp[name] == pytest.approx(alone[name] / 4, rel=0.03)
    # PyTorch's strategies get float32 weights.
    for strategy in ("torch_ddp", "torch_fsdp"):
        how: dict[str, Any] = dict(shape=XL, strategy=strategy, world_size=4)
        assert moments(Job(**how, fused=True)) == moments(Job(**how))


def test_float32_has_no_masters() -> None:
    assert moments(Job(shape=XL, precision="fp32", fused=True)) == moments(Job(shape=XL, precision="fp32"))


def test_a_loss_in_chunks_has_a_float32_gradient_of_the_head_and_no_copy() -> None:
    weight = 10_000 * 1600
    how: dict[str, Any] = dict(shape=XL, compile=True, fused=True, loss_chunk_tokens=256)
    at = {when: {term.name: term.value for term in terms} for when, terms in moments(Job(**how)).items()}
    assert at["the loss"]["logits and loss"] == 8 * weight + 2 * 256 * 10_000
    assert at["backward of the loss"]["gradient of the head"] == 4 * weight
    assert at["backward of the last block"]["gradient of the head"] == 4 * weight
    assert held(loss_chunk_tokens=256)["gradients"] == pytest.approx(held()["gradients"] + 2 * weight, rel=0.001)


@pytest.mark.parametrize(
    "grad_dtype, matrices, others", [("same", 0, 0), ("bf16", 0, 2), ("fp16", 2, 2), ("fp32", 4, 0)]
)
def test_only_gradients_of_another_type_are_copied_for_the_way(grad_dtype: Any, matrices: int, others: int) -> None:
    n, products = num_parameters(XL), matmul_parameters(XL)
    found = held(strategy="overlap", world_size=2, grad_dtype=grad_dtype)
    assert found["gradients in transit"] == matrices * products + others * (n - products)


def test_sharding_divides_state() -> None:
    alone = moments(Job(shape=XL))["the end of backward"]
    fsdp = moments(Job(shape=XL, strategy="fsdp", world_size=4))["the end of backward"]
    zero1 = moments(Job(shape=XL, strategy="overlap", world_size=4, shard_optimizer=True))["the end of backward"]
    for name, parts in (("weights", 4), ("gradients", 4), ("optimizer state", 4)):
        one = next(term.value for term in alone if term.name == name)
        assert next(term.value for term in fsdp if term.name == name) == pytest.approx(one / parts, rel=0.03)
    one = {term.name: term.value for term in alone}
    divided = {term.name: term.value for term in zero1}
    assert divided["optimizer state"] == one["optimizer state"] / 4
    assert divided["gradients"] == one["gradients"]
    assert divided["weights"] == 4 * num_parameters(XL)  # moved into large tensors


def test_fsdp_of_one_gpu_divides_nothing() -> None:
    one, two = (moments(Job(shape=XL, strategy="fsdp", world_size=w))["the end of backward"] for w in (1, 2))
    assert one[0].value == parameter_bytes(XL, dict.fromkeys(KINDS, 4))
    assert two[0].value < 0.52 * one[0].value


def test_gradients_in_buckets_stay() -> None:
    naive = peak_bytes(Job(shape=XL, strategy="naive", world_size=2))
    by_nccl: dict[str, Any] = dict(strategy="bucketed", world_size=2, copy_engines=False)
    large, small = (peak_bytes(Job(shape=XL, bucket_size_mb=size, **by_nccl)) for size in (1000, 1))
    assert large - naive == pytest.approx(4 * num_parameters(XL), rel=0.01)
    # Buckets of one gradient are rounded up as gradients are: 2.4 % of 8 GB. The measured rows differ by 0.189 GB.
    assert small - large == pytest.approx(0.189e9, rel=0.03)


@pytest.mark.parametrize(
    "how, nbytes",
    [
        (dict(strategy="fsdp"), 2 * 40_960_000 / 2),  # of a block's 4 d^2 + 3 d d_ff numbers
        (dict(strategy="fsdp", grad_dtype="fp32"), 4 * 40_960_000 / 2),
        (dict(strategy="overlap"), 4 * 10_000 * 1_600),  # the embedding's
        (dict(strategy="overlap", bucket_size_mb=100), 100 * 2**20),
        (dict(strategy="naive"), 0),
    ],
)
def test_gradients_that_come_by_copies_have_a_place(how: dict[str, Any], nbytes: float) -> None:
    of_kernel = dict(shape=XL, world_size=2, fused=True, **how)
    assert peak_bytes(Job(**of_kernel)) - peak_bytes(Job(**of_kernel, copy_engines=False)) == nbytes


def test_recomputed_blocks_have_copies_of_weights() -> None:
    def again(**given: Any) -> float:
        terms = moments(job(activation_checkpointing="groups_2", **given))["backward of the last block"]
        return next(term.value for term in terms if term.name == "recomputed")

    saved = saved_bytes(job(activation_checkpointing="groups_2"))[1]
    assert again() == saved + 2 * 2 * (4 * 16 * 16 + 3 * 16 * 32)  # two blocks, two bytes a number
    # The weights themselves are in the type of computation, and so is the residual stream: in each block 4 T d more in
    # ln1, 4 less for q, k and v, 2 less in ffn, and 4 less for the input, which none keeps; the first one's was there.
    narrow = job(activation_checkpointing="groups_2", strategy="fsdp")
    assert again(strategy="fsdp") == saved_bytes(narrow)[1] == saved - 2 * (4 + 2 + 4 - 4) * 16 * 16 + 4 * 16 * 16


def test_gradients_that_are_copied_for_the_way() -> None:
    n = num_parameters(XL)
    end = moments(Job(shape=XL, strategy="overlap", world_size=2, grad_dtype="bf16"))["the end of backward"]
    assert end[-1].value == 2 * n
    assert moments(Job(shape=XL, strategy="overlap", world_size=2))["the end of backward"][-1].value == 0
    flat = Job(shape=XL, strategy="flat", world_size=2)
    assert moments(flat)["gradients flattened"][-1].value == 4 * n
    # Weights, moments, gradients and all of these once more: 20 bytes a parameter, which is the peak.
    assert peak_bytes(flat) == pytest.approx(20 * n, rel=0.025)


@pytest.mark.parametrize("grad_dtype, copied", [("same", 0), ("bf16", 0), ("fp16", 2), ("fp32", 4)])
def test_gradients_of_bfloat16_weights_are_bfloat16(grad_dtype: Any, copied: int) -> None:
    n = num_parameters(XL)
    narrow = Job(shape=XL, strategy="flat", world_size=2, weight_dtype="bf16", grad_dtype=grad_dtype)
    assert moments(narrow)["gradients flattened"][-1].value == 2 * n
    assert moments(narrow)["the end of backward"][-1].value == copied * n


def test_small_things_by_hand() -> None:
    # Sine and cosine of 8 positions and 4 pairs, 4 bytes each, and two token IDs of 8 bytes for each of 16 tokens.
    held = {term.name: term.value for term in moments(job())["the loss"]}
    assert held["rotary tables, tokens"] == 2 * 8 * 4 * 4 + 2 * 8 * 16


def test_fsdp_has_two_whole_units_and_their_gradients() -> None:
    # P = 4 x 1600^2 + 3 x 1600 x 6400 = 40,960,000, 2 bytes each, and the head's 10,000 x 1600.
    at = moments(Job(shape=XL, strategy="fsdp", world_size=2))
    forward, backward = at["the loss"][-1], at["backward of the last block"][-1]
    assert forward.value == 32_000_000
    assert at["backward of the loss"][-1].value == 32_000_000 + 81_920_000
    assert at["the end of backward"][-2].value == 1.5 * 32_000_000  # the embedding's gradient, and the half that came
    assert backward.value == 5 * 81_920_000  # two units, two blocks' gradients, half of one sent and half of one come
    assert moments(job())["the loss"][-1].value == 0
    # If weights stay whole, all 48 blocks' are there when the backward pass begins, and none is when it ends.
    kept = moments(Job(shape=XL, strategy="fsdp", world_size=2, reshard_after_forward=False))
    for when in ("the loss", "backward of the loss"):
        assert kept[when][-1].value == 32_000_000 + 48 * 81_920_000
    assert kept["backward of the last block"][-1].value == (48 + 3) * 81_920_000
    for when in ("backward of the first block", "the end of backward"):
        assert kept[when] == at[when]


def test_without_an_optimizer_there_is_no_state() -> None:
    assert "optimizer state" not in {term.name for term in moments(job(optimizer=False))["the loss"]}


def test_float32_has_no_copies_of_weights() -> None:
    names = {term.name: term.value for term in moments(job(precision="fp32"))["the loss"]}
    assert names["weight copies"] == 0
    both = {term.name: term.value for term in moments(job())["the loss"]}
    # 6 blocks of 2 (4 x 16 x 16 + 3 x 16 x 32) bytes and 2 x 100 x 16 of the head, at 512 bytes a tensor at least.
    assert both["weight copies"] >= 6 * 2 * 2560 + 3200


def test_autocast_keeps_the_copies_of_checkpointed_blocks_until_the_loss_unless_compiled() -> None:
    def copies(when: str, **given: Any) -> float:
        terms = moments(Job(shape=XL, activation_checkpointing="block", **given))[when]
        return next(term.value for term in terms if term.name == "weight copies")

    head = 2 * 10_000 * 1600
    assert copies("backward of the loss") == head
    assert copies("the loss", compile=True) == head
    assert copies("the loss") == pytest.approx(2 * 48 * 40_960_000 + head, rel=0.03)


def test_eager_cross_entropy_holds_float32_copies_of_the_logits() -> None:
    numbers = 2 * 8 * 100
    eager = {term.name: term.value for term in moments(job())["backward of the loss"]}
    assert eager["logits and loss"] == (2 + 4 + 12) * numbers
    compiled = {term.name: term.value for term in moments(job(compile=True))["backward of the loss"]}
    # As torch.compile's output code shows: the bfloat16 logits, their gradient, and zeros of float32 to scatter into.
    assert compiled["logits and loss"] == (2 + 2 + 4) * numbers
    full = {term.name: term.value for term in moments(job(precision="fp32"))["backward of the loss"]}
    assert full["logits and loss"] == (4 + 12) * numbers  # there is nothing to convert


def test_weights_in_bfloat16_halve_the_state() -> None:
    wide, narrow = (
        {t.name: t.value for t in moments(Job(shape=XL, weight_dtype=dtype))["the end of backward"]}
        for dtype in ("fp32", "bf16")
    )
    for name in ("weights", "gradients", "optimizer state"):
        assert narrow[name] == pytest.approx(wide[name] / 2, rel=0.03)


def test_a_loss_in_chunks_holds_the_logits_of_a_chunk() -> None:
    def terms(when: str, **given: Any) -> dict[str, float]:
        how: dict[str, Any] = dict(shape=XL, compile=True, weight_dtype="bf16", loss_chunk_tokens=256) | given
        return {term.name: term.value for term in moments(Job(**how))[when]}

    weight, logits = 10_000 * 1600, 256 * 10_000
    # The weight's gradient in float32, and a product that is added to it, larger than logits and their gradient.
    assert terms("the loss")["logits and loss"] == 4 * weight + max(4 * logits, 4 * weight + 2 * logits)
    assert terms("backward of the loss")["gradient of the head"] == 2 * weight
    assert terms("backward of the last block")["logits"] == 0
    assert terms("the loss", weight_dtype="fp32")["logits and loss"] == 10 * weight + 2 * logits  # a copy of the weight


def test_below_a_budget_of_one_a_compiled_block_saves_no_norm_and_no_product() -> None:
    """As counted with hooks in tests/training/test_blocks.py: 6 T d and 2 T d_ff numbers, and small ones."""
    shape = replace(SHAPE, context_length=64, d_model=32, d_ff=64)
    how: dict[str, Any] = dict(shape=shape, compile=True, weight_dtype="bf16")
    td, tf, small = 2 * 2 * 64 * 32, 2 * 2 * 64 * 64, 8 * 128 + 4 * 128 * 2
    assert sum(block_parts(job(**how)).values()) == 9 * td + 3 * tf + small
    assert sum(block_parts(job(**how, compile_memory_budget=0.75)).values()) == 6 * td + 2 * tf + small
    assert sum(block_parts(job(**how, precision="fp8")).values()) == 6 * td + 2 * tf + small
    whole = sum(block_parts(job(**how)).values()) - td - 8 * 128
    assert sum(block_parts(job(**how, compile_memory_budget=0.25)).values()) == td + 8 * 128 + whole // 4
    fp8 = job(**how, precision="fp8", compile_memory_budget=0.5)
    assert sum(block_parts(fp8).values()) == td + 8 * 128 + (5 * td + 2 * tf + 4 * 128 * 2) // 2


def test_an_eager_block_of_narrow_weights_as_the_hooks_show() -> None:
    torch = pytest.importorskip("torch")
    from cs336_basics.model import RotaryEmbedding, TransformerBlock
    from cs336_systems.kernels.attention import get_attention

    block = TransformerBlock(32, 2, 64, RotaryEmbedding(64, 16), get_attention("sdpa"))
    for p in block.parameters():
        p.data = p.data.bfloat16()
    own = {t.untyped_storage().data_ptr() for t in (*block.parameters(), *block.buffers())}
    saved: dict[int, int] = {}

    def keep(t: Any) -> Any:
        if t.untyped_storage().data_ptr() not in own:
            saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    x = torch.randn(2, 64, 32, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = block(x)
    assert y.dtype == torch.bfloat16
    parts = block_parts(job(shape=replace(SHAPE, context_length=64, d_model=32, d_ff=64), weight_dtype="bf16"))
    assert x.untyped_storage().data_ptr() not in saved
    assert parts["input"] == 0
    assert sum(saved.values()) == pytest.approx(sum(parts.values()), rel=0.02)


@pytest.mark.parametrize(
    "given",
    [{}, {"fused": True}, {"attention": "naive"}, {"precision": "fp32"}, {"compile": True},
     {"strategy": "fsdp", "world_size": 2}, {"loss_chunk_tokens": 256, "activation_checkpointing": "block"}],
)  # fmt: skip
def test_a_working_of_sums_and_products_gives_the_value(given: dict[str, Any]) -> None:
    found = 0
    for terms in moments(Job(**({"shape": replace(XL, context_length=4096)} | given))).values():
        for term in terms:
            formula, _, filled = term.working.partition(" = ")
            if "," not in formula and re.fullmatch(r"[\d, x+]+", filled):  # without the allocator's share
                parts = filled.replace(",", "").split(" + ")
                products = ([int(factor) for factor in part.split(" x ")] for part in parts)
                assert sum(map(math.prod, products)) == term.value, term
                found += 1
    assert found > 8


def test_the_largest_batch_fits_and_the_next_does_not() -> None:
    limit = 60 * 2**30
    batch = largest_batch(Job(shape=XL), limit)
    assert batch > 1
    assert peak_bytes(Job(shape=XL, batch_size=batch)) <= limit < peak_bytes(Job(shape=XL, batch_size=batch + 1))
    tiny = replace(XL, d_model=8, d_ff=8, num_layers=1, num_heads=1, context_length=1, vocab_size=8)
    assert largest_batch(Job(shape=tiny), 1e15) == LARGEST_BATCH
    assert largest_batch(Job(shape=XL), 20 * 2**30) == 0  # weights and state alone are 22.9 GiB


def test_a_tenth_of_a_cards_memory_is_kept_back() -> None:
    assert [verdict(needed, 100.0) for needed in (90.0, 90.1, 100.0, 100.1)] == [
        "fits", "may not fit", "may not fit", "does not fit"
    ]  # fmt: skip
    section = memory_sections(Job(shape=XL), 80)[-1]
    assert section.value("sequences a GPU") == largest_batch(Job(shape=XL), 72 * 2**30)
    assert "10% of 80 GiB is kept back" in section.notes[0]


def test_the_8b_step_that_needs_part_of_the_reserve_may_not_fit_and_the_others_fit() -> None:
    """It ran, in segments that grow; before, it ran out of memory."""
    rows = [json.loads(line) for line in (RESULTS / "leaderboard-2026.jsonl").read_text().splitlines()]
    limit = CARDS["H200"].memory_gib * 2**30
    for row in rows:
        expected = "may not fit" if row["variant"] == "fsdp none budget 0.75" else "fits"
        assert verdict(peak_bytes(training_job(row["case"], row["variant"], row["config"])), limit) == expected


def test_fp8_takes_a_byte_more_for_each_weight_of_the_blocks() -> None:
    own, narrow = (peak_bytes(job(shape=XL, precision=precision)) for precision in ("bf16", "fp8"))
    # Of a block's weights, four have 2.44 MB and three 9.77: 8 and 2 of them share a segment of 20 MiB.
    assert narrow - own == pytest.approx(48 * (4 * 2.5 + 3 * 10) * MIB)
    sharded = dict(shape=XL, strategy="fsdp", world_size=2)  # rounds the weights at each use
    assert peak_bytes(job(**sharded, precision="fp8")) == peak_bytes(job(**sharded))


def test_the_peak_is_the_sum_of_its_terms_and_the_largest_moment() -> None:
    sections = memory_sections(job(), 1)
    shown = sections[0].terms
    assert shown[-1].value == sum(term.value for term in shown[:-1]) == max(term.value for term in sections[1].terms)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"batch_size": 0}, "batch_size is 0: it must be at least 1"),
        ({"muon": True, "weight_dtype": "bf16"}, "muon is true: it must be false with weight_dtype 'bf16'"),
        ({"fused": True, "weight_dtype": "bf16"}, "fused is true: it must be false with weight_dtype 'bf16'"),
        ({"attention": "none"}, "attention is 'none': it must be one of naive"),
        ({"precision": "fp4"}, "precision is 'fp4'"),
        ({"strategy": "ddp"}, "strategy is 'ddp': it must be one of none"),
        ({"world_size": 2}, "strategy is 'none': it must be another than 'none' with world_size 2"),
        ({"activation_checkpointing": "every_0"}, "activation_checkpointing is 'every_0': it must be none, block"),
        ({"activation_checkpointing": "groups_2_but_attention"}, "all but groups_K may end in _but_attention"),
        (
            {"activation_checkpointing": "block_but_attention", "attention": "naive"},
            "activation_checkpointing is 'block_but_attention': it must be one without _but_attention, because",
        ),
        ({"weight_dtype": "bf16", "precision": "fp32"}, "weight_dtype is 'bf16': it must be fp32 with precision"),
        ({"compile_memory_budget": 0.5}, "compile_memory_budget is 0.5: it must be from 0 to 1"),
        ({"loss_chunk_tokens": 0}, "loss_chunk_tokens is 0: it must be at least 1"),
        ({"strategy": "fsdp", "shard_optimizer": True}, "shard_optimizer is true: it must be false with strategy"),
        ({"reshard_after_forward": False}, "reshard_after_forward is false: it must be true with strategy 'none'"),
        ({"strategy": "bucketed", "bucket_size_mb": 0.0}, "bucket_size_mb is 0.0: it must be above 0"),
    ],
)
def test_impossible_values_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        job(**given)


def test_every_kernel_that_is_named_is_counted() -> None:
    for name in ATTENTION:
        assert sum(block_parts(job(attention=name)).values()) > sum(
            block_parts(job(attention=name, batch_size=1)).values()
        )
