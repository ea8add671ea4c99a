"""Annotated attention computes the same as the model's own, in three ranges, and replaces only plain attention."""

from typing import Any

import pytest
import torch

from cs336_basics.attention import scaled_dot_product_attention
from cs336_systems.bench.profiling.kernel_profile import annotate_attention, annotated_attention
from cs336_systems.bench.profiling.kernel_trace import ATTENTION_RANGES
from cs336_systems.bench.workload import Workbench, Workload


def quick(**fields: Any) -> Workload:
    return Workload(**{**dict(size="quick", context_length=16, batch_size=2, device="cpu"), **fields})


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_it_is_the_plain_attention_bit_for_bit(is_causal: bool, dtype: torch.dtype, autocast: bool) -> None:
    results = []
    for attention in (scaled_dot_product_attention, annotated_attention):
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 3, n, 8, dtype=dtype, requires_grad=True) for n in (5, 7, 7))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            o = attention(q, k, v, is_causal)
        o.sum().backward()
        results.append((o, q.grad, k.grad, v.grad))
    for expected, actual in zip(*results, strict=True):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)


def test_its_ranges_are_seen_by_the_profiler_once_a_block() -> None:
    bench = Workbench(quick(mode="forward"))
    assert annotate_attention(bench)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        bench.step()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert {name: counts.get(name) for name in ATTENTION_RANGES} == dict.fromkeys(ATTENTION_RANGES, 2)


@pytest.mark.parametrize("fields", [dict(compile=True), dict(attention="sdpa"), dict(attention="vectorized_torch")])
def test_compiled_attention_and_other_kernels_are_left_as_they_are(fields: dict[str, Any]) -> None:
    bench = Workbench(quick(**fields))
    before = [block.attn.attention for block in bench.model.layers]
    assert not annotate_attention(bench)
    assert [block.attn.attention for block in bench.model.layers] == before
