"""Configurations that cannot be measured are refused when they are made, with the field and its value."""

import re
from typing import Any

import pytest

from cs336_systems.bench.case import configurations
from cs336_systems.bench.cases import get_case
from cs336_systems.bench.cases.lm_matrix import LMMatrixBench
from cs336_systems.config.checks import shown

QUICK, NAIVE, FLASHDDP = dict(size="quick"), dict(size="quick", attention="naive"), dict(strategy="flashddp")
# For each case the other fields, and wrong values of a field.
WRONG: dict[str, tuple[dict[str, Any], dict[str, list[Any]]]] = {
    "model": (QUICK, dict(size=["huge"], attention=["quick"], context_length=[0], precision=["fp8"], vocab_size=[0],
                          activation_checkpointing=["some"], device=["tpu"], warmup=[-1], steps=[0])),
    "checkpointing": (NAIVE, dict(activation_checkpointing=["groups"], mode=["forward"], num_layers=[0], steps=[0])),
    "residuals": (QUICK, dict(size=["huge"], attention=["flash"], device=["tpu"])),
    "train-step": ({}, dict(size=["huge"], batch_size=[0], device=["tpu"], steps=[1], variant=["nobody"])),
    "precision-accumulation": ({}, dict(count=[0], value=[float("inf")], accumulation=["fp8"])),
    "autocast-dtypes": ({}, dict(norm=["batch_norm"], precision=["fp8"], device=["tpu"])),
    "kernels": ({}, dict(dtype=["int8"], shape=[(1, 2, 0, 4), (1, 2, 3), (1, 2, 3, 2**31)], rounds=[0],
                         rep_ms=[float("inf"), -1.0], num_kv_heads=[0, 5], window=[0], document_length=[3])),
    "flash": ({}, dict(length=[0], head_size=[2**31], device=["tpu"])),
    "attention": ({}, dict(length=[0], head_size=[2**31], device=["tpu"])),
    "leaderboard-2025": ({}, dict(length=[0], num_heads=[0], device=["tpu"])),
    "all-reduce": ({}, dict(bytes=[0], backend=["mpi"], calls=[0], budget_s=[0.0])),
    "ddp": ({}, dict(variant=["bucketed:x", "overlap:", "alone:5", "alone+zero1", "overlap+", "overlap+bf16+bf16",
                              "none", "auto", ""],
                     size=["huge"], devices=[0], steps=[0], rounds=[0], nccl_max_ctas=[0], device=["tpu"])),
    "bucket-size": ({}, dict(variant=["overlap", "bucketed", "bucketed:x", "best"])),
    "overlap-trace": ({}, dict(traces=[""])),
    "optimizer-sharding": ({}, dict(rounds=[2], built_once=[True], traces=["x"])),
    "leaderboard-2026": ({}, dict(strategy=["bucketed"], size=["9B"], activation_checkpointing=["last_3"],
                                  attention=["none"], loss_chunk_tokens=[0], devices=[0])),
    "lm-matrix": (FLASHDDP, dict(strategy=["ddp"], batch_size=[3], epochs=[0], tolerance=[0.0], size=["huge"],
                                 precision=["fp8"])),
}  # fmt: skip
# The same with a pattern of the accepted values; the last field is wrong.
ACCEPTED: list[tuple[str, dict[str, Any], str]] = [
    ("model", QUICK | dict(activation_checkpointing="first_3"), "K from 1 to 2"),
    ("kernels", dict(kernel="flash"), "one of naive, "),
    ("kernels", dict(shape=(1, 2, 65, 32), num_kv_heads=3), "a divisor of 2, the heads of shape 1x2x65x32$"),
    ("kernels", dict(shape=(1, 2, 65, 32), document_length=16), "a divisor of 65, the length of shape 1x2x65x32$"),
    ("model", dict(size="huge"), "one of small, .*, quick$"),
    ("all-reduce", dict(bytes=10), "a multiple of 4"),
    ("all-reduce", dict(world_size=1), "2 to 1024"),
    ("all-reduce", dict(collective="all-to-all"), "one of all-reduce"),
    ("ddp", dict(variant="naive:5"), "not after alone, naive, flat, .*, torch_fsdp;"),
    ("ddp", dict(variant="overlap:x"), "then :BUCKET_MB, a number above 0, but not after alone, naive"),
    ("ddp", dict(variant="naive+fast"), r"naive may have \+zero1, \+bf16, \+graph, each once$"),
    ("ddp", dict(variant="bogus"), "alone, one of naive, .*, torch_fsdp or module:Class;"),
    ("ddp", dict(variant="fsdp+zero1"), r"fsdp may have \+zero2, \+bf16, \+graph,"),
    ("ddp", dict(variant="overlap+zero2"), r"overlap may have \+zero1, \+bf16, \+graph,"),
    ("ddp", dict(variant="overlap+graph"), r"without \+graph"),
    ("ddp", dict(devices=100_000), r"at most \d+ on a CPU of \d+ cores"),
    ("ddp", dict(nccl_max_ctas=8), "left out with device 'cpu'"),
    ("overlap-trace", dict(profiler="nsys"), "torch with"),
    ("optimizer-sharding", dict(compile=True), "false on a CPU"),
    ("optimizer-sharding", dict(variant="overlap+graph"), r"overlap may have \+zero1, \+bf16, each once$"),
    ("optimizer-sharding", dict(warmup=1), "at least 2"),
    ("leaderboard-2026", dict(precision="fp32", weight_dtype="bf16"), "'fp32' unless precision is bf16 or fp8"),
    ("leaderboard-2026", dict(compile=False, compile_memory_budget=0.75), "from 0 to 1, and 1 without compile"),
    ("lm-matrix", FLASHDDP | dict(vocab_size=1), "at least 257 to train a tokenizer"),
    ("lm-matrix", FLASHDDP | dict(kernel="flash"), "auto or one of"),
    ("lm-matrix", FLASHDDP | QUICK | dict(kernel="flash"), "auto or one of"),
    ("lm-matrix", FLASHDDP | dict(val_path="x.npy"), "given if, and only if, train_path is given"),
    ("lm-matrix", FLASHDDP | dict(val_path="y.npy", train_path="x.npy"), "a token file"),
]
ACCEPTED += [(name, {key: other for key, other in others.items() if key != field} | {field: value}, "")
             for name, (others, fields) in WRONG.items() for field, values in fields.items()
             for value in values]  # fmt: skip


@pytest.mark.parametrize("name, fields, accepted", ACCEPTED, ids=str)
def test_a_wrong_field_is_named(name: str, fields: dict[str, Any], accepted: str) -> None:
    config = get_case(name).config
    *_, (field, value) = fields.items()
    on_cpu = {"device": "cpu"} if isinstance(getattr(config, "device", None), str) else {}
    with pytest.raises(ValueError, match=f"^{field} is {re.escape(shown(value))}: .*{accepted}"):
        config(**on_cpu | fields)


def test_a_missing_size_is_named() -> None:
    with pytest.raises(ValueError, match=r"^d_ff is missing"):
        LMMatrixBench(device="cpu", strategy="flashddp", d_model=64)


@pytest.mark.parametrize("given", [("first_99",), ("none", "first_99")])
def test_more_checkpointed_blocks_than_the_model_has_are_refused_if_asked_for(given: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"^activation_checkpointing is 'first_99': .* with K from 1 to 8"):
        configurations(get_case("checkpointing"), {"activation_checkpointing": given}, quick=True)
