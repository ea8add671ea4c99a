"""The names of the attention kernels."""

import importlib.util
import sys
import types
from typing import Any

import pytest
import torch

from cs336_basics import model
from cs336_basics.attention import Documents
from cs336_systems.kernels import attention, recording
from cs336_systems.kernels.attention import ATTENTION, get_attention, peers


def test_every_name_gives_a_function() -> None:
    assert {"naive", "vectorized_torch", "flash_torch", "flash_triton", "flash_cuda", "sdpa", "fa4"} < set(ATTENTION)
    has_triton = importlib.util.find_spec("triton") is not None
    for name in ATTENTION:
        if has_triton or "triton" not in name:
            assert get_attention(name) is ATTENTION[name]
            assert callable(ATTENTION[name])


def test_naive_under_both_its_names_is_the_models_default_with_checks() -> None:
    q, k, v = (torch.randn(2, 9, 4) for _ in range(3))
    for name in ("naive", "scaled_dot_prod_attention"):
        assert torch.equal(get_attention(name)(q, k, v, True), model.scaled_dot_product_attention(q, k, v, True))


@pytest.mark.parametrize("name", ["", "Naive", "sdpa ", "flash"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    accepted = "auto or one of naive, .*flash_triton.*, or module:function$"
    with pytest.raises(ValueError, match=f"^model.attention is {name!r}: it must be {accepted}"):
        get_attention(name)


def test_a_kernel_that_cannot_be_imported_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, f"{attention.__name__}.flash_triton", None)  # as if Triton were not there
    with pytest.raises(ValueError, match=r"^model.attention is 'flash_triton', which cannot be imported here: "):
        get_attention("flash_triton")


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="it is installed")
def test_fa4_names_its_package() -> None:
    with pytest.raises(ImportError, match=r"^fa4 needs the package flash-attn-4: "):
        get_attention("fa4")(*(torch.zeros(1, 16, 64),) * 3)


MASKED = dict(window=4), dict(documents=Documents.from_numbers(torch.zeros(4)))


@pytest.mark.parametrize(
    "device, capability, has_triton, length, dtype, masked, unmasked, recorded",
    [
        ("cuda", (9, 0), True, 4096, torch.bfloat16, "flash_triton", "flash_triton", "flash_triton"),
        ("cuda", (9, 0), True, 4095, torch.bfloat16, "flash_triton", "sdpa", "flash_triton"),
        ("cuda", (9, 0), True, 512, torch.bfloat16, "flash_triton", "sdpa", "flash_triton"),
        ("cuda", (9, 0), True, 511, torch.bfloat16, "flash_triton", "sdpa", "sdpa"),
        ("cuda", (9, 0), True, 4096, torch.float32, "flash_triton", "sdpa", "sdpa"),
        ("cuda", (10, 0), True, 4096, torch.bfloat16, "flash_triton", "sdpa", "sdpa"),
        ("cuda", (8, 0), True, 4096, torch.bfloat16, "flash_triton", "sdpa", "sdpa"),
        ("cuda", (7, 5), True, 4096, torch.bfloat16, "sdpa", "sdpa", "sdpa"),
        ("cuda", (9, 0), False, 4096, torch.bfloat16, "sdpa", "sdpa", "sdpa"),
        ("cpu", None, True, 4096, torch.bfloat16, "sdpa", "sdpa", "sdpa"),
    ],
)
def test_auto_takes_the_faster_kernel_that_runs_on_the_device(
    device: str,
    capability: Any,
    has_triton: bool,
    length: int,
    dtype: torch.dtype,
    masked: str,
    unmasked: str,
    recorded: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q: Any = types.SimpleNamespace(device=torch.device(device), shape=(2, 16, length, 64), dtype=dtype)
    flash_triton = types.SimpleNamespace(flash_triton=lambda *_, **mask: ("flash_triton", mask))
    monkeypatch.setitem(sys.modules, f"{attention.__name__}.flash_triton", flash_triton)
    monkeypatch.setattr(peers, "sdpa", lambda *_, **mask: ("sdpa", mask))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if has_triton else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    none = dict(window=None, documents=None)
    for mask in MASKED:
        assert get_attention("auto")(q, q, q, True, **mask) == (masked, none | mask)
    assert get_attention("auto")(q, q, q, True) == (unmasked, none)
    with recording.on():
        assert get_attention("auto")(q, q, q, True) == (recorded, none)


def test_auto_compiles_without_a_graph_break() -> None:
    q, documents = torch.randn(1, 2, 16, 8), Documents.from_numbers(torch.arange(16)[None] // 5)
    auto = get_attention("auto")
    compiled = torch.compile(auto, backend="eager", fullgraph=True)
    for mask in (dict(), dict(window=3), dict(documents=documents)):
        assert torch.equal(compiled(q, q, q, True, **mask), auto(q, q, q, True, **mask))
