"""flash_cuda's kernels for Hopper without a GPU: their sources under an emulator of Hopper's asynchronous units."""

import shutil
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from cs336_systems.kernels.attention.flash_cuda import FlashAttentionCuda, flash_cuda
from tests.kernels.attention_cases import (
    CASES,
    Case,
    check_case,
    check_hidden_tiles_are_skipped,
    gradients,
    plain_attention,
)
from tests.kernels.emulated_flash_cuda import Change
from tests.kernels.emulated_flash_cuda_hopper import emulated

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ on PATH")

CORNERS = (
    Case(300, 300, 64, leading=(1,), is_causal=True),
    Case(17, 200, 64, is_causal=True),  # keys that no query sees
    Case(200, 200, 128),
    Case(300, 140, 64, leading=(1,), is_causal=True, layout="off_by_one"),
    Case(129, 129, 59, is_causal=True, layout="columns_apart"),
    Case(33, 40, 128, leading=(2, 2), layout="heads_inside"),
    Case(70, 33, 100, leading=(1, 6), key_heads=2),
    Case(65, 65, 64, largest_score=1e4),
    Case(70, 300, 64, leading=(1,), largest_score=40),  # maxima that grow by less and by more than SLACK
    Case(70, 300, 128, leading=(1,), largest_score=40),
    Case(400, 400, 64, leading=(1,), is_causal=True, window=150),
    Case(400, 400, 128, leading=(1, 2), key_heads=1, is_causal=True, documents=(100, 1, 299)),
)
ALL_CASES = [case for case in CASES if case.d <= 128]


def dtype_of(d: int) -> torch.dtype:
    """One for each size that the kernels are built for: each build takes seconds."""
    return torch.bfloat16 if d <= 64 else torch.float16


def check(case: Case, dtype: torch.dtype) -> None:
    with emulated():
        has_band = case.window or case.documents
        check_case(flash_cuda if has_band else FlashAttentionCuda.apply, case, dtype, "cpu")


@pytest.mark.parametrize("case", CORNERS, ids=str)
def test_corners(case: Case) -> None:
    check(case, dtype_of(case.d))


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL_CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_all_cases(dtype: torch.dtype, case: Case) -> None:
    check(case, dtype)


@pytest.mark.parametrize("d", [64, 128])
def test_hidden_tiles_are_skipped(d: int) -> None:
    with emulated():
        check_hidden_tiles_are_skipped(flash_cuda, dtype_of(d), d)


FAULTS: dict[str, tuple[Change, str]] = {
    "keys before their barrier": (
        ("hopper/forward.cu", "F::k_full(step).wait(F::parity(step));\n            fence_registers();",
         "fence_registers();"),
        "shared memory read before the barrier of its load",
    ),
    "values before their barrier": (
        ("hopper/forward.cu", "F::v_full(step).wait(F::parity(step));\n            fence_registers();",
         "fence_registers();"),
        "shared memory read before the barrier of its load",
    ),
    "keys loaded while a product reads": (
        ("hopper/forward.cu",
         "wait_for_products<1>();\n            claim(s);\n            release(F::k_empty(step + 1));",
         "release(F::k_empty(step + 1));\n            wait_for_products<1>();"),
        "an operand written while a product reads it",
    ),
    "values loaded while a product reads": (
        ("hopper/forward.cu", "wait_for_products<0>();\n            claim(o);\n            release(F::v_empty(step));\n"
         "            softmax",
         "release(F::v_empty(step));\n            wait_for_products<0>();\n            softmax"),
        "an operand written while a product reads it",
    ),
    "keys loaded without waiting": (
        ("hopper/forward.cu", "empty.wait(F::parity(step) ^ 1);", ""),
        "more arrivals than a barrier expects",
    ),
    "o written before its store has read": (
        ("hopper/forward.cu", "if (is_first) wait_until_stores_have_read();\n        meet", "meet"),
        "shared memory written before a store has read it",
    ),
    "o stored without a fence": (
        ("hopper/forward.cu", "fence_async();\n        F::next_ready", "F::next_ready"),
        "shared memory used without fence_async",
    ),
    "o stored without a barrier": (
        ("hopper/forward.cu", "meet(F::own(group), 128);\n        if (is_first) {", "if (is_first) {"),
        "shared memory read without a barrier",
    ),
    "barriers without a fence": (
        ("hopper/forward.cu", "fence_async();\n    }\n    __syncthreads();", "}\n    __syncthreads();"),
        "shared memory used without fence_async",
    ),
    "accumulators touched early": (
        ("hopper/forward.cu", "wait_for_products<1>();\n            claim(s);", "wait_for_products<1>();\n o[0] *= 2;"),
        "an accumulator written while a product adds to it",
    ),
    "an operand in registers touched early": (
        ("hopper/forward.cu", "release(F::k_empty(step + 1));\n            wait_for_products<0>();",
         "release(F::k_empty(step + 1));\n            pack_probabilities();\n            wait_for_products<0>();"),
        "an operand in registers written while a product reads it",
    ),
    "registers not fenced": (
        ("hopper/forward.cu", "F::v_full(step).wait(F::parity(step));\n            fence_registers();",
         "F::v_full(step).wait(F::parity(step));"),
        "a product without fence_registers",
    ),
    "too few bytes expected": (
        ("hopper/forward.cu", "full.expect(F::Keys::BYTES)", "full.expect(F::Keys::BYTES / 2)"),
        "every thread waits",
    ),
    "a turn not passed on": (("hopper/forward.cu", "pass_turn();\n            wait_for_products<1>();",
                              "wait_for_products<1>();"), "every thread waits"),
    "too many registers": (
        ("hopper/forward.cu", "take_registers<F::REGISTERS>", "take_registers<F::REGISTERS + 8>"), "every thread waits",
    ),
    "too little memory": (("hopper/forward.cu", "F::SHARED_BYTES,", "F::SHARED_BYTES - 1024,"), "an address beyond"),
}  # fmt: skip


OF_EACH_KIND = (
    "keys loaded while a product reads",
    "accumulators touched early",
    "a turn not passed on",
    "dS of the other warpgroup",
)
"""Faults that the default tests have, because each takes a build. The other kinds are in `test_hopper_blocks.py`."""


def in_default_tests(faults: Iterable[str]) -> list[Any]:
    return [pytest.param(x, marks=() if x in OF_EACH_KIND else pytest.mark.slow) for x in faults]


@pytest.mark.parametrize("fault", in_default_tests(FAULTS))
def test_the_emulator_finds_faults(fault: str) -> None:
    change, found = FAULTS[fault]
    q, k, v, _ = Case(600, 600, 64, leading=(1,)).inputs(torch.bfloat16, "cpu")
    with emulated(change), pytest.raises(RuntimeError, match=f"^hopper_forward was not launched: {found}"):
        flash_cuda(q, k, v)


BACKWARD = "hopper/backward.cu"
BACKWARD_FAULTS: dict[str, tuple[Change, str]] = {
    "dq written before TMA has added it": (
        (BACKWARD, "claim(dq);\n            if (is_first) wait_until_stores_have_read();", "claim(dq);"),
        "shared memory written before a store has read it",
    ),
    "dq added without a fence": (
        (BACKWARD, "fence_async();\n            meet(B::own(group), 128);\n            if (is_first) {\n"
         "                const int64_t", "meet(B::own(group), 128);\n            if (is_first) {\n"
         "                const int64_t"),
        "shared memory used without fence_async",
    ),
    "dS without a fence": ((BACKWARD, "fence_async();\n        release(", "release("),
                           "shared memory used without fence_async"),
    "dS of a warp's other lanes": ((BACKWARD, "__syncwarp();", ""),
                                   "shared memory read without a barrier"),
    "dS of the other warpgroup": ((BACKWARD, "B::ds_full(step).wait(B::parity(step));", ""),
                                  "shared memory read without a barrier"),
    "dS written while a product reads": ((BACKWARD, "B::ds_empty(step + 1).wait(B::parity(step + 1) ^ 1);", ""),
                                         "an operand written while a product reads it"),
    "queries before their barrier": ((BACKWARD, "B::full(step).wait(B::parity(step));", ""),
                                     "shared memory read before"),
    "keys given back too early": (
        (BACKWARD, "B::kv_full().wait(i & 1);",
         "B::kv_full().wait(i & 1); release(B::kv_empty());"),
        "shared memory read before the barrier of its load",
    ),
    "dK written before TMA has added dQ": (
        (BACKWARD, "to{B::sums(group)};\n            if (is_first) wait_until_stores_have_read();",
         "to{B::sums(group)};"),
        "shared memory written before a store has read it",
    ),
}  # fmt: skip
HALVES_FAULTS: dict[str, tuple[Change, str]] = {
    "a half's operands touched early": (
        (BACKWARD, "wait_for_products<2>();\n                claim(dv), claim(dk);\n                make_p(",
         "p[0][0]++;\n                wait_for_products<2>();\n                claim(dv), claim(dk);\n"
         "                make_p("),
        "an operand in registers written while a product reads it",
    ),
    "the second half before its product": (
        (BACKWARD, "wait_for_products<1>();\n                make_ds();\n                store_ds(step + 1, 1, ds);",
         "dp[0] = 0;\n                wait_for_products<1>();\n                make_ds();\n"
         "                store_ds(step + 1, 1, ds);"),
        "an accumulator written while a product adds to it",
    ),
    "dS published before its second half": (
        (BACKWARD, "publish_ds(step + 1);  // its", "publish_ds(step + 1); store_ds(step + 1, 1, ds);  // its"),
        "shared memory used without fence_async",
    ),
    "queries given back while products read": (
        (BACKWARD, "store_dq();\n                wait_for_products<0>();\n                claim(dv), claim(dk);\n"
         "                release(B::empty(step));",
         "store_dq();\n                release(B::empty(step));\n                wait_for_products<0>();\n"
         "                claim(dv), claim(dk);"),
        "an operand written while a product reads it",
    ),
}  # fmt: skip
BACKWARD_FAULTS |= HALVES_FAULTS


@pytest.mark.parametrize("fault", in_default_tests(BACKWARD_FAULTS))
def test_the_emulator_finds_faults_of_the_backward_pass(fault: str) -> None:
    change, found = BACKWARD_FAULTS[fault]
    q, k, v, dO = Case(300, 300, 64, leading=(1,)).inputs(torch.bfloat16, "cpu")
    with emulated(change), pytest.raises(RuntimeError, match=f"^hopper_backward was not launched: {found}"):
        gradients(flash_cuda(q, k, v), [q, k, v], dO)


@pytest.mark.parametrize(
    "change",
    [
        ("hopper/swizzle.cuh", "(row % 8)) * 16 + column % 8", "(row % 4)) * 16 + column % 8"),
        pytest.param(("hopper/swizzle.cuh", "step % 4 * 32", "step % 4 * 16"), marks=pytest.mark.slow),
        pytest.param(("hopper/swizzle.cuh", "step * 2 * ATOM", "step * ATOM"), marks=pytest.mark.slow),
        pytest.param(
            ("hopper/swizzle.cuh", "step * 2 * ATOM, BLOCK_BYTES", "step * 2 * ATOM, 1024"), marks=pytest.mark.slow
        ),
    ],
    ids=["elements", "columns", "rows", "blocks"],
)
def test_a_wrong_layout_gives_a_wrong_result(change: Change) -> None:
    q, k, v, _ = (x.detach() for x in Case(70, 130, 128, leading=(1,)).inputs(torch.float16, "cpu"))
    with emulated(change):
        o = flash_cuda(q, k, v)
    expected = plain_attention(q.float(), k.float(), v.float(), False)
    assert not torch.allclose(o.float(), expected, rtol=0.1, atol=0.1)
