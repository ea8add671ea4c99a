"""Configurations that cannot be measured are refused when they are made, with the field and its value."""

import re
from typing import Any

import pytest

from cs336_systems.bench.case import configurations
from cs336_systems.bench.cases import get_case
from cs336_systems.bench.cases.lm_matrix import LMMatrixBench

QUICK = dict(size="quick")
STRATEGY = dict(strategy="flashddp")
# Fields of a case, of which the last one is wrong, and a pattern of the accepted values where it is worth a look.
WRONG: dict[str, list[tuple[dict[str, Any], str]]] = {
    "model": [
        (dict(size="huge"), ""),
        (QUICK | dict(attention="quick"), ""),
        (QUICK | dict(context_length=0), ""),
        (QUICK | dict(precision="fp8"), ""),
        (QUICK | dict(activation_checkpointing="some"), ""),
        (QUICK | dict(activation_checkpointing="first_3"), "K from 1 to 2"),
        (QUICK | dict(device="tpu"), ""),
        (QUICK | dict(warmup=-1), ""),
        (QUICK | dict(steps=0), ""),
        (QUICK | dict(vocab_size=0), ""),
    ],
    "checkpointing": [
        (QUICK | dict(attention="naive", activation_checkpointing="groups"), ""),
        (QUICK | dict(attention="naive", mode="forward"), ""),
        (QUICK | dict(attention="naive", num_layers=0), ""),
        (QUICK | dict(attention="naive", steps=0), ""),
    ],
    "residuals": [(dict(size="huge"), ""), (QUICK | dict(attention="flash"), ""), (dict(device="tpu"), "")],
    "train-step": [
        (dict(size="huge"), ""),
        (dict(batch_size=0), ""),
        (dict(device="tpu"), ""),
        (dict(steps=1), ""),
        (dict(variant="nobody"), ""),
    ],
    "precision-accumulation": [(dict(count=0), ""), (dict(value=float("inf")), ""), (dict(accumulation="fp8"), "")],
    "autocast-dtypes": [(dict(norm="batch_norm"), ""), (dict(precision="fp8"), ""), (dict(device="tpu"), "")],
    "kernels": [
        (dict(kernel="flash"), "one of naive, "),
        (dict(dtype="int8"), ""),
        (dict(shape=(1, 2, 0, 4)), ""),
        (dict(shape=(1, 2, 3)), ""),
        (dict(shape=(1, 2, 3, 2**31)), ""),
        (dict(rounds=0), ""),
        (dict(rep_ms=float("inf")), ""),
        (dict(rep_ms=-1.0), ""),
        (dict(rep_ms=1e300), "at least 0 and at most 3.6e[+]06, an hour"),
    ],
    "flash": [(dict(length=0), ""), (dict(head_size=2**31), ""), (dict(device="tpu"), "")],
    "attention": [(dict(length=0), ""), (dict(head_size=2**31), ""), (dict(device="tpu"), "")],
    "leaderboard-2025": [(dict(length=0), ""), (dict(num_heads=0), ""), (dict(device="tpu"), "")],
    "all-reduce": [
        (dict(bytes=10), "a multiple of 4"),
        (dict(bytes=0), ""),
        (dict(world_size=1), "2 to 1024"),
        (dict(collective="all-to-all"), "one of all-reduce"),
        (dict(backend="mpi"), ""),
        (dict(calls=0), ""),
        (dict(budget_s=0.0), ""),
    ],
    "ddp": [
        *((dict(variant=variant), "") for variant in ("bucketed:x", "overlap:", "alone:5", "alone+zero1", "overlap+")),
        *((dict(variant=variant), "") for variant in ("overlap+bf16+bf16", "none", "auto", "")),
        (dict(variant="naive:5"), "not after alone, naive, flat, .*, torch_fsdp;"),
        (dict(variant="naive+fast"), r"naive may have \+zero1, \+bf16, \+graph, each once$"),
        (dict(variant="bogus"), "alone, one of naive, .*, torch_fsdp or module:Class;"),
        (dict(variant="fsdp+zero1"), r"fsdp may have \+zero2, \+bf16, \+graph,"),
        (dict(variant="overlap+zero2"), r"overlap may have \+zero1, \+bf16, \+graph,"),
        (dict(variant="overlap+graph"), r"without \+graph"),
        (dict(size="huge"), ""),
        (dict(devices=0), ""),
        (dict(devices=100_000), r"at most \d+ on a CPU of \d+ cores"),
        (dict(steps=0), ""),
        (dict(rounds=0), ""),
        (dict(nccl_max_ctas=0), ""),
        (dict(nccl_max_ctas=8), "left out with device 'cpu'"),
        (dict(device="tpu"), ""),
    ],
    "bucket-size": [(dict(variant=variant), "") for variant in ("overlap", "bucketed", "bucketed:x", "best")],
    "overlap-trace": [(dict(profiler="nsys"), "torch with"), (dict(traces=""), "")],
    "optimizer-sharding": [
        (dict(compile=True), "false on a CPU"),
        (dict(variant="overlap+graph"), r"overlap may have \+zero1, \+bf16, each once$"),
        (dict(rounds=2), ""),
        (dict(built_once=True), ""),
        (dict(warmup=1), "at least 2"),
        (dict(traces="x"), ""),
    ],
    "leaderboard-2026": [
        (dict(strategy="bucketed"), ""),
        (dict(size="9B"), ""),
        (dict(precision="fp32", weight_dtype="bf16"), "'fp32' with precision"),
        (dict(activation_checkpointing="last_3"), ""),
        (dict(attention="none"), ""),
        (dict(compile=False, compile_memory_budget=0.75), "from 0 to 1, and 1 without compile"),
        (dict(loss_chunk_tokens=0), ""),
        (dict(devices=0), ""),
    ],
    "lm-matrix": [
        (STRATEGY | dict(vocab_size=1), "at least 257 to train a tokenizer"),
        (STRATEGY | dict(kernel="flash"), "auto or one of"),
        (STRATEGY | dict(size="quick", kernel="flash"), "auto or one of"),
        (dict(strategy="ddp"), ""),
        (STRATEGY | dict(val_path="x.npy"), "given where train_path is"),
        (STRATEGY | dict(val_path="y.npy", train_path="x.npy"), "a token file"),
        (STRATEGY | dict(batch_size=3), ""),
        (STRATEGY | dict(epochs=0), ""),
        (STRATEGY | dict(tolerance=0.0), ""),
        (STRATEGY | dict(size="huge"), ""),
        (STRATEGY | dict(precision="fp8"), ""),
    ],
}


@pytest.mark.parametrize(
    "name, fields, accepted", [(name, *row) for name, rows in WRONG.items() for row in rows], ids=str
)
def test_a_wrong_field_is_named(name: str, fields: dict[str, Any], accepted: str) -> None:
    config = get_case(name).config
    *_, (field, value) = fields.items()
    on_cpu = {"device": "cpu"} if isinstance(getattr(config, "device", None), str) else {}
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    with pytest.raises(ValueError, match=f"^{field} is {re.escape(shown)}: .*{accepted}"):
        config(**on_cpu | fields)


def test_a_missing_size_is_named() -> None:
    with pytest.raises(ValueError, match=r"^d_ff is missing"):
        LMMatrixBench(device="cpu", strategy="flashddp", d_model=64)


@pytest.mark.parametrize("given", [("first_99",), ("none", "first_99")])
def test_more_checkpointed_blocks_than_the_model_has_are_refused_if_asked_for(given: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"^activation_checkpointing is 'first_99': .* with K from 1 to 8"):
        configurations(get_case("checkpointing"), {"activation_checkpointing": given}, quick=True)
