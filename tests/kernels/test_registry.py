import importlib
import sys

import pytest
import torch

from cs336_basics import model
from cs336_systems.kernels import attention
from cs336_systems.kernels.attention import ATTENTION, get_attention, peers


def installed(name: str) -> bool:
    try:
        ATTENTION[name]
    except ImportError:
        return False
    return True


def test_every_name_is_that_of_a_function_or_of_what_is_not_installed() -> None:
    assert {"naive", "vectorized_torch", "flash_torch", "flash_triton", "sdpa", "flex", "fa4"} <= set(ATTENTION)
    assert len(ATTENTION) == len(list(ATTENTION))
    for name in ATTENTION:
        assert name in ATTENTION
        if installed(name):
            assert get_attention(name) is ATTENTION[name]
            assert callable(ATTENTION[name])


def test_the_models_default_is_naive_under_both_its_names() -> None:
    for name in ("naive", "scaled_dot_prod_attention"):
        assert get_attention(name) is model.scaled_dot_product_attention


@pytest.mark.parametrize("name", ["", "Naive", "sdpa ", "flash"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(
        ValueError, match=r"^model.attention is .*: it must be auto or one of naive, .*flash_triton"
    ) as e:
        get_attention(name)
    assert "\n" not in str(e.value)
    with pytest.raises(KeyError):
        ATTENTION[name]


def test_a_kernel_that_cannot_be_imported_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, f"{attention.__name__}.flash_triton", None)  # as if Triton were not there
    with pytest.raises(ValueError, match=r"^model.attention is 'flash_triton', which cannot be imported here: "):
        get_attention("flash_triton")


@pytest.mark.parametrize("device", [None, torch.device("cpu"), torch.device("meta")])
def test_auto_is_sdpa_without_cuda(device: torch.device | None) -> None:
    assert get_attention("auto", device) is peers.sdpa


@pytest.mark.parametrize(
    "capability, d, dtype, expected",
    [
        ((7, 5), 16, torch.float32, "sdpa"),
        ((8, 0), 16, torch.float32, "flash_triton"),
        ((9, 0), 256, torch.bfloat16, "flash_triton"),
        ((9, 0), 257, torch.bfloat16, "sdpa"),
        ((9, 0), 16, torch.float64, "sdpa"),
    ],
)
def test_auto_on_cuda_goes_by_the_capability_and_by_what_the_kernel_serves(
    capability: tuple[int, int], d: int, dtype: torch.dtype, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="Triton is only there on Linux")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    called = []
    for module, name in (("flash_triton", "flash_triton"), ("peers", "sdpa")):
        module = importlib.import_module(f"{attention.__name__}.{module}")
        monkeypatch.setattr(module, name, lambda *_, name=name: called.append(name))
    q = torch.ones(1, 4, d, dtype=dtype)
    get_attention("auto", torch.device("cuda"))(q, q, q, True)
    assert called == [expected]


def test_auto_on_cuda_is_sdpa_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, f"{attention.__name__}.flash_triton", None)
    assert get_attention("auto", torch.device("cuda")) is peers.sdpa
