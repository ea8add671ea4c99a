import importlib.util
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


def test_every_name_gives_a_function_unless_it_is_not_installed() -> None:
    ours = {
        "naive",
        "vectorized_torch",
        "flash_torch",
        "flash_triton",
        "flash_triton_simple",
        "flash_triton_compiled",
        "flash_cuda",
    }
    assert {*ours, "sdpa", "flex", "fa4"} <= set(ATTENTION)
    assert len(ATTENTION) == len(list(ATTENTION))
    for name in ATTENTION:
        assert name in ATTENTION
        if installed(name):
            assert get_attention(name) is ATTENTION[name]
            assert callable(ATTENTION[name])


def test_naive_under_both_its_names_is_the_models_default_with_checks() -> None:
    q, k, v = (torch.randn(2, 9, 4) for _ in range(3))
    for name in ("naive", "scaled_dot_prod_attention"):
        assert torch.equal(get_attention(name)(q, k, v, True), model.scaled_dot_product_attention(q, k, v, True))


@pytest.mark.parametrize("name", ["", "Naive", "sdpa ", "flash"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(
        ValueError, match=r"^model.attention is .*: it must be auto or one of .*naive, .*flash_triton"
    ) as e:
        get_attention(name)
    assert "\n" not in str(e.value)
    with pytest.raises(KeyError):
        ATTENTION[name]


def test_a_kernel_that_cannot_be_imported_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, f"{attention.__name__}.flash_triton", None)  # as if Triton were not there
    with pytest.raises(ValueError, match=r"^model.attention is 'flash_triton', which cannot be imported here: "):
        get_attention("flash_triton")


@pytest.mark.parametrize("place", ["reference:nayve", "reference", "reference:", "nowhere:naive"])
def test_a_wrong_place_is_named(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attention._PLACES, "mine", place)
    with pytest.raises(ValueError, match=rf"^model.attention is 'mine', .*({place}|nowhere)"):
        get_attention("mine")


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="it is installed")
def test_fa4_names_its_package() -> None:
    with pytest.raises(ImportError, match=r"^fa4 needs the package flash-attn-4: "):
        ATTENTION["fa4"](*(torch.zeros(1, 16, 64),) * 3)


def test_auto_is_pytorchs_choice() -> None:
    assert get_attention("auto") is peers.sdpa


def test_an_unknown_name_is_a_key_error_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match="there is no attention kernel 'flash': it must be one of naive, "):
        ATTENTION["flash"]
    assert ATTENTION.get("flash") is None
