"""Products of float32 are as exact as PyTorch is told; those of 16-bit types also in Triton's interpreter."""

from collections.abc import Iterator

import pytest
import torch

from cs336_systems.kernels.attention import get_attention
from tests.kernels.attention_cases import Case, check_case, compute_truth, gradients

pytest.importorskip("triton", reason="Triton is only there on Linux")
flash_triton = pytest.importorskip("cs336_systems.kernels.attention.flash_triton")


@pytest.fixture(autouse=True)
def _precision_afterwards() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


def test_only_float32_products_follow_pytorchs_precision() -> None:
    torch.set_float32_matmul_precision("high")
    precisions = {dtype: flash_triton._precision(torch.empty(1, dtype=dtype)) for dtype in flash_triton.DTYPES}
    assert precisions == {torch.float32: "tf32", torch.bfloat16: "ieee", torch.float16: "ieee"}
    torch.set_float32_matmul_precision("highest")
    assert flash_triton._precision(torch.empty(1)) == ("ieee" if flash_triton.INTERPRET else "bf16x6")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name, case, exact, rounded",
    [
        ("flash_triton", Case(129, 129, 64, is_causal=True), 1e-5, (0, 1e-2)),  # backward in one launch
        ("flash_triton", Case(4096, 4096, 64, is_causal=True), 1e-5, (0, 1e-2)),  # in two
        ("flash_cuda", Case(300, 1000, 64), 2e-6, (2e-5, 2e-3)),
    ],
    ids=str,
)
def test_float32_products_are_as_exact_as_pytorch_is_told(
    name: str, case: Case, exact: float, rounded: tuple[float, float]
) -> None:
    q, k, v, dO = case.inputs(torch.float32, "cuda")
    truth = compute_truth(q, k, v, dO, case.is_causal).results
    off = {}
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        found = gradients(get_attention(name)(q, k, v, case.is_causal), [q, k, v], dO)
        off[precision] = {x: float((found[x] - truth[x]).norm() / truth[x].norm()) for x in truth}
    for x, error in off["highest"].items():
        assert error < exact, x
        assert max(10 * error, rounded[0]) < off["high"][x] < rounded[1], x


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled where there is a GPU")
@pytest.mark.parametrize("name", ["flash_triton", "flash_triton_simple"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [Case(65, 140, 59), Case(140, 65, 16, is_causal=True, expanded_dO=True)], ids=str)
def test_low_precision_interpreted(case: Case, dtype: torch.dtype, name: str) -> None:
    # The interpreter truncates float32 to bfloat16 where hardware rounds, so the errors of a sum do not cancel.
    check_case(get_attention(name), case, dtype, "cpu", times_plain=8 if dtype == torch.bfloat16 else 2)
