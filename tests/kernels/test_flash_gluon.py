"""The kernels in Gluon on the CPU, launched by `flash_triton` itself. On a GPU: `test_flash_triton.py`."""

import contextlib
import math
from typing import Any

import pytest
import torch

from tests.kernels import gluon_interpreter
from tests.kernels.attention_cases import Case, check_case

pytest.importorskip("triton", reason="Triton is only there on Linux")
flash_triton = pytest.importorskip("cs336_systems.kernels.attention.flash_triton")
tiles = pytest.importorskip("cs336_systems.kernels.attention.flash_triton_tiles")

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled where there is a GPU")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Use the Gluon kernels wherever descriptors can move the tensors. Collects the names of the launched kernels."""
    names: list[str] = []
    launch = flash_triton.Launch

    def make(kernel: Any, *arguments: Any, **options: Any) -> Any:
        in_gluon = options.get("layouts") is not None
        made = (gluon_interpreter.Launch if in_gluon else launch)(kernel, *arguments, **options)

        def call(tensors: dict[str, torch.Tensor]) -> None:
            names.append(f"{kernel.__name__} in {'Gluon' if in_gluon else 'Triton'}")
            made(tensors)

        call.tensors = made.tensors  # type: ignore[attr-defined]
        call.compiling = lambda tensors: contextlib.nullcontext()  # type: ignore[attr-defined]
        return call

    modules = flash_triton.gluon, flash_triton.gluon_forward, flash_triton.gluon_backward
    _, forward, backward = gluon_interpreter.interpreted(*modules)
    monkeypatch.setattr(flash_triton, "gluon_forward", forward)
    monkeypatch.setattr(flash_triton, "gluon_backward", backward)
    monkeypatch.setattr(flash_triton, "_use_gluon", lambda q, tma: tma)
    monkeypatch.setattr(flash_triton, "TMA_FROM_SCORES", 0)
    monkeypatch.setattr(flash_triton, "ONE_LAUNCH_BELOW_SCORES", 0)
    monkeypatch.setattr(flash_triton, "_LAUNCHES", {})
    monkeypatch.setattr(flash_triton, "Launch", make)
    return names


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "n_q, n_k, d",
    [(1, 1, 128), (65, 65, 80), (130, 300, 128), (300, 130, 96), (1, 257, 128), (257, 1, 72), (520, 520, 128)],
)
def test_both_passes_equal_the_truth(n_q: int, n_k: int, d: int, is_causal: bool, launched: list[str]) -> None:
    case = Case(n_q, n_k, d, leading=(1, 3), is_causal=is_causal)  # the interpreter takes the heads in groups of two
    check_case(flash_triton.flash_triton, case, torch.bfloat16, "cpu")
    assert launched == ["forward_kernel in Gluon", "dq_kernel in Gluon", "dkv_kernel in Gluon"]


@pytest.mark.parametrize(
    "case",
    [
        Case(200, 200, 128, leading=(2, 2), is_causal=True, layout="heads_inside", expanded_dO=True),
        Case(130, 70, 80, leading=(2, 2), layout="leading_swapped"),
        Case(70, 130, 96, is_causal=True, layout="rows_apart"),
        Case(130, 130, 128, is_causal=True, largest_score=1e4),  # masked scores whose exponentials are infinite
        Case(130, 130, 128, leading=(2, 1, 2, 1), is_causal=True),
    ],
    ids=str,
)
def test_other_layouts_and_numbers_equal_the_truth(case: Case, launched: list[str]) -> None:
    check_case(flash_triton.flash_triton, case, torch.float16, "cpu")
    assert {"dq_kernel in Gluon", "dkv_kernel in Gluon"} < set(launched)


@pytest.mark.parametrize(
    "needs, expected",
    [
        ("q", ["dq_kernel in Gluon"]),
        ("kv", ["dq_kernel in Triton", "dkv_kernel in Gluon"]),
        ("v", ["dq_kernel in Triton", "dkv_kernel in Gluon"]),
    ],
)
def test_unneeded_gradients_are_not_computed(needs: str, expected: list[str], launched: list[str]) -> None:
    case = Case(130, 200, 128, leading=(1, 3), is_causal=True, needs=needs)
    check_case(flash_triton.flash_triton, case, torch.bfloat16, "cpu")
    assert launched == ["forward_kernel in Gluon", *expected]


def test_the_vectors_equal_tritons(launched: list[str]) -> None:
    """`dkv_kernel` reads them from either kernel, including the part beyond the queries."""
    q, k, v, do = (
        x.detach()[None] for x in Case(200, 70, 128, leading=(3,), is_causal=True).inputs(torch.float16, "cpu")
    )
    o, logsumexp = flash_triton.flash_forward(q, k, v, True)
    found, expected = (flash_triton.new_vectors(q).fill_(math.nan) for _ in range(2))
    x = dict(q_=q, k_=k, v_=v, o_=o, do_=do, dq_=torch.empty_like(q))
    flash_triton.gluon_launch("dq", x, True)(x | dict(L=logsumexp, VECTORS=found))
    launch = flash_triton.triton_launch("dq", x, True, tiles.choose_tile("dq", q, True, False), True, need_dq=False)
    launch(x | dict(L=logsumexp, VECTORS=expected))
    torch.testing.assert_close(found, expected)
    assert torch.equal(found[:3, 200:], torch.full((3, 56), math.inf))


@pytest.mark.usefixtures("launched")
def test_keys_whose_scores_are_minus_infinity_weigh_nothing() -> None:
    """Even if the last tiles, which come first, have no other keys."""
    q, k, v, _ = (x.detach() for x in Case(130, 300, 128, leading=(1, 3)).inputs(torch.bfloat16, "cpu"))
    q[:], k[..., 120:, :] = q.abs(), -math.inf
    o, logsumexp = flash_triton.flash_forward(q, k, v, False)
    expected, expected_logsumexp = flash_triton.flash_forward(q, k[..., :120, :], v[..., :120, :], False)
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(logsumexp, expected_logsumexp)
