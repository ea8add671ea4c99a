"""The time of a step: parts by hand, limits, and the effect of each option."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cs336_systems.config.model import ModelConfig
from cs336_systems.planner.accounting import (
    attention_product_flops,
    block_matrices,
    matmul_parameters,
    num_parameters,
    orthogonalization_flops,
    training_flops,
)
from cs336_systems.planner.cards import CARDS, Card, get_card
from cs336_systems.planner.job import Job
from cs336_systems.planner.products import (
    gradients_of,
    product_seconds,
    products,
    products_seconds,
    rounded_up,
    rounding_bytes,
)
from cs336_systems.planner.step import (
    MIXED_RATE,
    attention_seconds,
    elementwise_bytes,
    orthogonalization_seconds,
    step_seconds,
    step_sections,
    step_terms,
)

from .helpers import rows

XL = ModelConfig(size="xl", context_length=512).shape
H200 = CARDS["H200"]
RESULTS = Path(__file__).parents[2] / "results/h200"


def parts(card: Card = H200, **given: Any) -> dict[str, float]:
    return {term.name: term.value for term in step_terms(Job(**({"shape": XL, "compile": True} | given)), card)}


def test_a_product_in_tiles_and_waves_by_hand() -> None:
    # 2048 x 1600: in 128 x 256 tiles 16 x 7 = 112, one wave of 132: 132 x 32768 / (2048 x 1600) = 1.32; 256 x 128 tiles
    # are 8 x 13 = 104, the same; of 128 x 128 there are 208, two waves, 264 x 16384 / (2048 x 1600) = 1.32.
    assert rounded_up(2048, 1600, 132) == pytest.approx(1.32)
    # 132 whole tiles of 128 x 256 are one full wave.
    assert rounded_up(128 * 132, 256, 132) == 1
    # One number keeps one multiprocessor busy with a tile of 128 x 128.
    assert rounded_up(1, 1, 132) == 132 * 128 * 128
    # In float32 32 tiles of 128 x 128 leave three quarters idle; 128 of 64 x 64 fill one wave, at 0.85 of the rate.
    assert rounded_up(512, 1024, 132) == pytest.approx(132 / 32)
    assert rounded_up(512, 1024, 132, number_bytes=4) == pytest.approx(132 / 128 / 0.85)


def test_a_product_is_bound_by_operations_or_by_bytes() -> None:
    card = replace(H200, multiprocessors=1, matmul=1e12, bandwidth=1e12)
    # 256 x 256 x 256: 2 x 256^3 operations at 1e12 are 33.55 us; 3 x 2 x 256^2 bytes 0.39 us.
    assert product_seconds(256, 256, 256, 2, card) == pytest.approx(33.554e-6, rel=1e-4)
    # Bandwidth of 1e9: 393,216 bytes are 393 us.
    assert product_seconds(256, 256, 256, 2, replace(card, bandwidth=1e9)) == pytest.approx(393.2e-6, rel=1e-4)


def test_the_products_of_a_step_are_all_operations_with_weights() -> None:
    job = Job(shape=XL)
    forward = sum(count * 2 * m * n * k for count, (m, n, k) in products(job))
    assert forward == 2 * matmul_parameters(XL) * job.tokens
    for _, (m, n, k) in products(job):
        assert [2 * a * b * c for a, b, c in gradients_of(m, n, k)] == [2 * m * n * k] * 2


def test_a_card_without_waves_and_bytes_takes_operations_by_rate() -> None:
    ideal = replace(H200, multiprocessors=1, bandwidth=1e30)
    shape = replace(XL, vocab_size=10240, d_model=2560, d_ff=10240, num_heads=32)  # all multiples of 256
    job = Job(shape=shape)
    forward, backward = products_seconds(job, ideal)
    assert forward == pytest.approx(2 * matmul_parameters(shape) * 2048 / 790e12)
    assert backward == pytest.approx(2 * forward)


def test_fp8_halves_the_products_of_a_block() -> None:
    ideal = replace(H200, multiprocessors=1, bandwidth=1e30)
    shape = replace(XL, vocab_size=10240, d_model=2560, d_ff=10240, num_heads=32)
    head = shape.vocab_size * shape.d_model
    blocks = matmul_parameters(shape) - head
    forward, backward = products_seconds(Job(shape=shape, precision="fp8"), ideal)
    assert forward == pytest.approx(2 * 2048 * (blocks / 2 + head) / 790e12)
    assert backward == pytest.approx(2 * 2048 * (blocks + 2 * head) / 790e12)


def test_rounding_to_fp8_by_hand() -> None:
    # A token's inputs: 3 of 1,600 and one of 6,400; gradients of outputs: 5 of 1,600 and 2 of 6,400. P = 40,960,000.
    of_inputs = 48 * 5 * 2048 * 11_200
    rest = 48 * (5 * 2048 * 20_800 + 3 * 2048 * (11_200 + 20_800) + 7 * 40_960_000)
    assert rounding_bytes(Job(shape=XL, precision="fp8")) == (of_inputs, rest)
    assert parts(precision="fp8")["rounding to FP8"] == pytest.approx((of_inputs + rest) / 4.3e12)
    sharded = Job(shape=XL, precision="fp8", strategy="fsdp", world_size=2)  # rounds weights at both uses
    assert rounding_bytes(sharded) == (of_inputs + 48 * 5 * 40_960_000, rest)
    assert "rounding to FP8" not in parts()


def test_recomputed_blocks_round_again_what_is_not_kept() -> None:
    again = {
        (precision, strategy): parts(
            precision=precision, strategy=strategy, world_size=size, activation_checkpointing="block"
        )
        for precision in ("bf16", "fp8")
        for strategy, size in (("none", 1), ("fsdp", 2))
    }
    inputs, weights = 48 * 5 * 2048 * 11_200, 48 * 5 * 40_960_000
    for strategy, rounded in (("none", inputs), ("fsdp", inputs + weights)):
        job = Job(shape=XL, compile=True, strategy=strategy, world_size=2 if strategy == "fsdp" else 1)
        faster = products_seconds(job, H200)[0] - products_seconds(replace(job, precision="fp8"), H200)[0]
        found = again["fp8", strategy]["forward again"] - again["bf16", strategy]["forward again"]
        assert found == pytest.approx(rounded / 4.3e12 - faster)


def test_the_optimizer_moves_28_bytes_a_parameter() -> None:
    # 28 x 1,998,235,200 = 55.95 GB at 4.3 TB/s: 13.01 ms; with its state over 4 GPUs a quarter.
    assert parts()["optimizer"] == pytest.approx(13.01e-3, rel=1e-3)
    assert parts(world_size=4, strategy="overlap", shard_optimizer=True)["optimizer"] == pytest.approx(
        13.01e-3 / 4, rel=1e-3
    )
    assert "optimizer" not in parts(optimizer=False)
    assert parts()["gradient norm and clipping"] == pytest.approx(12 * num_parameters(XL) / 4.3e12)
    assert "gradient norm and clipping" not in parts(clip=False)


def test_muon_takes_the_time_of_its_products() -> None:
    """On a card without waves and bytes, that of its operations; with the state over 4 GPUs a quarter."""
    ideal = replace(H200, multiprocessors=1, bandwidth=1e30)
    shape = replace(XL, d_model=2560, d_ff=10240, num_heads=32)  # multiples of 256
    operations = 48 * (4 * orthogonalization_flops(2560, 2560) + 3 * orthogonalization_flops(10240, 2560))
    alone = Job(shape=shape, muon=True)
    assert orthogonalization_seconds(alone, ideal) == pytest.approx(operations / 790e12)
    zero1 = replace(alone, strategy="overlap", world_size=4, shard_optimizer=True)
    assert orthogonalization_seconds(zero1, ideal) == pytest.approx(operations / 790e12 / 4)
    assert parts(muon=True)["orthogonalization"] > 0


def test_muon_moves_30_bytes_a_number_of_a_matrix_and_copies_between_products() -> None:
    blocks = XL.num_layers * block_matrices(XL)
    assert parts(muon=True)["optimizer"] - parts()["optimizer"] == pytest.approx((30 - 28) * blocks / 4.3e12)
    # On a card that computes in no time, products take as long as their bytes.
    fast = replace(H200, matmul=1e30, bandwidth=4e12)
    d, f = XL.d_model, XL.d_ff
    copied = 5 * 4 * (4 * 2 * d * d + 3 * (d * d + d * f))
    products = 5 * 2 * (4 * (3 * 3 * d * d) + 3 * ((d * d + 2 * d * f) + 3 * d * d + (d * d + 2 * d * f)))
    expected = XL.num_layers * (copied + products) / 4e12
    assert orthogonalization_seconds(Job(shape=XL, muon=True), fast) == pytest.approx(expected)


def test_the_fused_optimizer_reads_gradients_once_for_their_norm_and_nothing_is_cast() -> None:
    # 28 bytes a parameter, as without masters; the 16-bit gradient and the 16-bit weight replace a float32 gradient.
    # 26 in bfloat16, where both halves of the master are read and written as one float32 weight.
    n, matrices = num_parameters(XL), matmul_parameters(XL)
    found, before = parts(fused=True), parts()
    assert parts(fused=True, precision="fp16")["optimizer"] == before["optimizer"]
    assert before["optimizer"] - found["optimizer"] == pytest.approx(2 * matrices / 4.3e12)
    assert found["gradient norm and clipping"] == pytest.approx((2 * matrices + 4 * (n - matrices)) / 4.3e12)
    assert (found["casts of weights and gradients"], before["casts of weights and gradients"] > 0) == (0, True)
    assert parts(fused=True, precision="fp32")["gradient norm and clipping"] == pytest.approx(4 * n / 4.3e12)
    fsdp = parts(fused=True, strategy="fsdp", world_size=2)
    assert fsdp["gradient norm and clipping"] == found["gradient norm and clipping"] / 2
    assert fsdp["casts of weights and gradients"] == 0
    # PyTorch's FSDP casts its float32 shards for each gather, and their gradients are float32.
    peer: dict[str, Any] = dict(strategy="torch_fsdp", world_size=2)
    assert parts(fused=True, **peer)["gradient norm and clipping"] == pytest.approx(4 * n / 2 / 4.3e12)
    cast = "casts of weights and gradients"
    assert parts(fused=True, **peer)[cast] == parts(**peer)[cast] > 0


def test_elementwise_bytes_by_hand() -> None:
    # T d = 2048 x 1600 = 3,276,800, T d_ff four times that. Compiled, bf16: forward 16 + 22 + 6 x 4 = 62 T d, backward
    # 40 + 32 + 10 x 4 = 112. Eager: 56 + 30 + 76 + 4 + 20 + 10 x 4 = 226, and twice that.
    td = 2048 * 1600
    assert elementwise_bytes(Job(shape=XL, compile=True)) == (62 * td, 112 * td)
    assert elementwise_bytes(Job(shape=XL)) == (226 * td, 452 * td)
    # The residual stream in bfloat16: 8 less, 20 less; with a budget 12 T d and 6 T d_ff, d_ff = 4 d, more.
    narrow = Job(shape=XL, compile=True, weight_dtype="bf16", compile_memory_budget=0.75)
    assert elementwise_bytes(narrow) == (54 * td, (92 + 12 + 24) * td)
    assert elementwise_bytes(replace(narrow, precision="fp8", compile_memory_budget=1.0)) == elementwise_bytes(narrow)


def test_attention_by_hand() -> None:
    # 48 x 4 x 2 x 512^2 x 1600 = 0.16106 TFLOP forward, at half the rate of 1024 positions, 103 TFLOP/s: 1.5637 ms.
    forward, backward, _ = attention_seconds(Job(shape=XL), H200)
    assert forward == pytest.approx(1.5637e-3, rel=1e-3)
    assert backward == pytest.approx(2.5 * forward)
    assert sum(attention_seconds(Job(shape=XL, attention="naive"), H200)[:2]) > 3 * (forward + backward)


def test_the_rate_of_attention_between_measured_lengths() -> None:
    assert H200.attention_rate(1024) == 206e12
    assert H200.attention_rate(2048) == pytest.approx((206e12 + 391e12) / 2)  # half way by the logarithm
    assert H200.attention_rate(512) == 103e12
    assert H200.attention_rate(1 << 20) == 434e12


def test_attention_in_float32_is_as_slow_as_its_rows_within_a_factor_of_two() -> None:
    shape = ModelConfig(size="xl", context_length=65536).shape
    forward, backward, _ = attention_seconds(Job(shape=shape, precision="fp32"), H200)
    rate = 3.5 * attention_product_flops(shape, 4, 65536) / (forward + backward)
    measured = [
        3.5 * 2 * row.config["length"] ** 2 * row.config["head_size"] / row.metrics["forward_backward_ms"]["p50"] * 1e3
        for row in rows("flash")
        if (row.variant, row.config["dtype"], row.config["length"]) == ("flash_triton", "fp32", 65536)
        and row.config["head_size"] >= 64
    ]
    assert len(measured) == 2
    assert all(found / 2 < rate < found for found in measured)


def test_checkpointing_computes_the_forward_pass_again() -> None:
    all_of_them, half = (parts(activation_checkpointing=policy)["forward again"] for policy in ("block", "every_2"))
    assert all_of_them == pytest.approx(2 * half)
    without = parts()
    assert "forward again" not in without
    (found,) = (
        t.working for t in step_terms(Job(shape=XL, activation_checkpointing="every_2"), H200) if "again" in t.name
    )
    # Products 12.70 ms, attention 1.564 ms, a third of the elementwise 24.80 ms at the full bandwidth, at 0.55 of it.
    assert found == "24 / 48 blocks x (12.7 + 1.564 + 15.03) ms of products, attention, elementwise"
    # One more of three parts: the forward pass's products, a third of the elementwise bytes and of attention.
    assert without["products, forward"] < all_of_them < (without["step"] - without["optimizer"]) / 3


def test_attention_is_not_computed_again_where_its_output_is_kept() -> None:
    terms = {t.name: t for t in step_terms(Job(shape=XL, activation_checkpointing="every_2_but_attention"), H200)}
    assert terms["forward again"].working == "24 / 48 blocks x (12.7 + 15.03) ms of products, elementwise"
    saved = (
        parts(activation_checkpointing="every_2")["step"]
        - parts(activation_checkpointing="every_2_but_attention")["step"]
    )
    assert saved == pytest.approx(
        terms["attention"].value / 3.5 / 2
    )  # half of the blocks' forward passes, 1 of 3.5 parts


@pytest.mark.parametrize("phase", [0, 1], ids=["forward", "backward"])
@pytest.mark.parametrize("file", ["profile-kernels", "2.7B/profile-kernels"])
def test_the_rate_of_mixed_types_is_that_of_the_kernel_profiles(file: str, phase: int) -> None:
    """The bytes of blocks over the time of small kernels, without casts of weights, the loss and attention."""
    lines = (RESULTS / f"{file}.jsonl").read_text().splitlines()
    (row,) = (row for line in lines if (row := json.loads(line))["variant"] == "train_step")
    names = ("vocab_size", "context_length", "d_model", "d_ff", "num_layers", "num_heads")
    job = Job(shape=ModelConfig(size=None, **{name: row["config"][name] for name in names}).shape, attention="naive")
    name, small = ("forward", "backward")[phase], ("elementwise", "copy", "reduction")
    of_all = row["metrics"]["spans"][name]["class_ms"]
    of_attention = [part.get(name, {}) for part in row["metrics"]["attention"].values()]
    ms = sum(of_all[kind] - sum(part.get(kind, 0.0) for part in of_attention) for kind in small)
    others = 6 * matmul_parameters(job.shape) + 40 * job.tokens * job.shape.vocab_size * (1 + phase) / 3
    moved = job.shape.num_layers * elementwise_bytes(job)[phase]
    rate = moved / (ms / 1e3 - others / H200.bandwidth) / H200.bandwidth
    assert rate == pytest.approx(MIXED_RATE, abs=0.02)


def test_float32_casts_nothing_and_computes_on_the_plain_cores() -> None:
    full, half = parts(precision="fp32"), parts()
    assert full["casts of weights and gradients"] == 0
    assert full["products, forward"] > 10 * half["products, forward"]


def test_one_gpu_sends_nothing_and_transfers_after_backward_are_exposed() -> None:
    assert "communication exposed" not in parts()
    # 4 x 1,998,235,200 bytes by the link, and one overhead a parameter's tensor, of which there are 435.
    exposed = parts(strategy="naive", world_size=2)["communication exposed"]
    assert exposed == pytest.approx(4 * num_parameters(XL) / H200.link + 435 * H200.latency_s)


def test_buckets_expose_the_last_one_and_the_overheads() -> None:
    job = dict(strategy="bucketed", world_size=2, bucket_size_mb=100.0)
    calls = 98
    exposed = parts(**job)["communication exposed"]
    assert exposed == pytest.approx(4 * num_parameters(XL) / calls / H200.link + calls * H200.latency_s)


def test_interference_and_copies_by_hand() -> None:
    # 4 N = 7,992,940,800 bytes. Of their 27.98 ms the last of 98 buckets is not hidden, and 24 of 132 multiprocessors
    # send. Four passes of 2 (2 - 1) / 2 x 4 N bytes through memory at 4.3 TB/s are 7.435 ms.
    graph = parts(strategy="bucketed", world_size=2, cuda_graph=True, copy_engines=False)
    hidden = 7_992_940_800 / H200.link * 97 / 98
    assert graph["cost of hiding the rest"] == pytest.approx(hidden * 24 / 132 + 7.435e-3, rel=1e-4)
    # Gradients are copied into buckets, 8 bytes a parameter; without a graph they are zeroed and added to, 16.
    assert graph["copies of gradients"] == pytest.approx(8 * num_parameters(XL) / 4.3e12)
    assert parts(strategy="bucketed", world_size=2)["copies of gradients"] == 2 * graph["copies of gradients"]
    # Flattened and copied back: 16. Nothing is hidden.
    flat = parts(strategy="flat", world_size=2)
    assert flat["copies of gradients"] == pytest.approx(16 * num_parameters(XL) / 4.3e12)
    assert flat["cost of hiding the rest"] == 0
    # In bfloat16 half of that each; cast to float32 for the way and back, 2 (2 + 4) bytes more.
    narrow: dict[str, Any] = dict(world_size=2, weight_dtype="bf16")
    assert parts(strategy="flat", **narrow)["copies of gradients"] == flat["copies of gradients"] / 2
    buckets = parts(strategy="bucketed", cuda_graph=True, **narrow)
    assert buckets["copies of gradients"] == graph["copies of gradients"] / 2
    cast = parts(strategy="overlap", grad_dtype="fp32", **narrow)
    assert cast["copies of gradients"] == pytest.approx(12 * num_parameters(XL) / 4.3e12)
    masters = parts(strategy="overlap", grad_dtype="fp32", world_size=2, fused=True)
    assert masters["copies of gradients"] == pytest.approx(12 * matmul_parameters(XL) / 4.3e12)


def test_the_sharded_optimizer_sends_weights() -> None:
    # Each of 4 GPUs gets three quarters of the 4 N bytes.
    sending = parts(strategy="overlap", world_size=4, shard_optimizer=True)["sending weights"]
    assert sending == pytest.approx(4 * num_parameters(XL) * 0.75 / H200.link)
    narrow = parts(strategy="overlap", world_size=4, shard_optimizer=True, weight_dtype="bf16")["sending weights"]
    assert narrow == pytest.approx(sending / 2)
    masters = parts(strategy="overlap", world_size=4, shard_optimizer=True, fused=True)["sending weights"]
    assert masters == pytest.approx(sending - 2 * matmul_parameters(XL) * 0.75 / H200.link)


def test_fsdp_exposes_its_last_unit_and_the_overheads() -> None:
    # 2 N bytes are gathered in 50 units, half of each from the other; 3 x 50 calls of half an all-reduce's overhead.
    exposed = parts(strategy="fsdp", world_size=2)["communication exposed"]
    assert exposed == pytest.approx(2 * num_parameters(XL) / 2 / 50 / H200.link + 150 * H200.latency_s / 2)


def test_copy_engines_leave_multiprocessors_to_the_products() -> None:
    # 2 N = 3,996,470,400 bytes, half of them from the other GPU, gathered twice and reduced once. All but the last of
    # 50 units is hidden. NCCL takes 24 of 132 multiprocessors for that time, and four passes through memory. Copies
    # take two passes, and the mean of gradients, a third of the bytes, takes three more.
    seconds, nbytes = 3 * 3_996_470_400 / 2 / H200.link, 3 * 3_996_470_400 / 2
    hidden = seconds - seconds / 3 / 50
    job: dict[str, Any] = dict(strategy="fsdp", world_size=2, fused=True)
    by_nccl = parts(**job, copy_engines=False)["cost of hiding the rest"]
    assert by_nccl == pytest.approx(hidden * 24 / 132 + 4 * nbytes / 4.3e12)
    assert parts(**job)["cost of hiding the rest"] == pytest.approx((2 + 3 / 3) * nbytes / 4.3e12)
    # Float32 gradients are two thirds of the bytes if weights are gathered once.
    once = parts(**job, reshard_after_forward=False, grad_dtype="fp32")["cost of hiding the rest"]
    assert once == pytest.approx((2 + 3 * 2 / 3) * nbytes / 4.3e12)
    # Half of an all-reduce is a reduce-scatter. Each half sends half of the gradients, of which 16,155,200 are float32.
    overlap = parts(strategy="overlap", world_size=2, fused=True)["cost of hiding the rest"]
    assert overlap == pytest.approx((2 + 3 / 2) * (3_996_470_400 + 2 * 16_155_200) / 4.3e12)


def test_transfers_longer_than_the_backward_pass_are_exposed() -> None:
    slow = get_card("H200", link=1e9)  # 8 s
    assert parts(slow, strategy="bucketed", world_size=2)["communication exposed"] > 7.5


@pytest.mark.parametrize(("compile", "rate", "passes"), [(False, 0.64, (10, 13)), (True, 0.8, (4, 7))])
def test_plain_attention_by_hand(compile: bool, rate: float, passes: tuple[int, int]) -> None:
    # 48 layers, 4 sequences, 25 heads, 512 x 512 scores: 5.03 GB; two products of 2 x 512 x 512 x 64 for each head.
    found = attention_seconds(Job(shape=XL, attention="naive", compile=compile), H200)[:2]
    heads = 48 * 4 * 25
    for seconds, products_of_a_head, times in zip(found, (2, 4), passes, strict=True):
        flops = products_of_a_head * 2 * 512 * 512 * 64 * heads
        nbytes = times * 4 * 512 * 512 * heads
        assert seconds == pytest.approx(flops / (rate * H200.matmul_fp32) + nbytes / H200.bandwidth)


def test_mfu_is_useful_operations_by_time_by_the_datasheet() -> None:
    job = Job(shape=XL, compile=True, activation_checkpointing="block")
    rates = step_sections(job, H200)[-1]
    assert rates.value("MFU") == pytest.approx(training_flops(XL, 4, 512) / step_seconds(job, H200) / 989e12)
    assert working(2, "MFU", precision="fp8", compile=True) == "of the datasheet's 989 TFLOP/s in bf16"


def working(section: int, name: str, card: Card = H200, **given: Any) -> str:
    terms = step_sections(Job(**({"shape": XL} | given)), card)[section].terms
    return next(term.working for term in terms if term.name == name)


def test_a_precision_that_a_card_does_not_have_is_refused() -> None:
    t4 = get_card("T4")
    with pytest.raises(ValueError, match="precision is 'bf16': it must be fp32 or fp16 on T4"):
        t4.check("bf16")
    for precision in ("fp16", "fp32"):
        t4.check(precision)
        assert step_sections(Job(shape=XL, precision=precision), t4)[-1].value("MFU") > 0


@pytest.mark.parametrize("given", [{}, {"compile": True, "weight_dtype": "bf16", "compile_memory_budget": 0.75}])
def test_the_working_of_elementwise_bytes_gives_their_value(given: dict[str, Any]) -> None:
    found = working(0, "bytes of elementwise", **given)
    layers, d, td, d_ff, tf = map(
        int, re.findall(r"= (\d+) x \((\d+) x (\d+) \+ (\d+) x (\d+)\)", found.replace(",", ""))[0]
    )
    assert layers * (d * td + d_ff * tf) == 48 * sum(elementwise_bytes(Job(shape=XL, **given)))
