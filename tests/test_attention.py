"""The assignment's tests of attention under the handout's names, through the adapters.

The kernels' own tests, which ask for much more, are in `tests/kernels`.
"""

import pytest
import torch

from tests.adapters import (
    get_flashattention_autograd_function_pytorch,
    get_flashattention_autograd_function_triton,
)
from tests.kernels.attention_cases import Case, check_case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton's interpreter runs its kernels
CAUSAL = pytest.mark.parametrize("is_causal", [False, True])


def check(function: type[torch.autograd.Function], is_causal: bool, device: str, needs: str) -> None:
    case = Case(128, 128, 64, leading=(4,), is_causal=is_causal, needs=needs)
    check_case(function.apply, case, torch.float32, device)


@CAUSAL
def test_flash_forward_pass_pytorch(is_causal: bool) -> None:
    check(get_flashattention_autograd_function_pytorch(), is_causal, "cpu", needs="q")


@CAUSAL
def test_flash_forward_pass_triton(is_causal: bool) -> None:
    check(get_flashattention_autograd_function_triton(), is_causal, DEVICE, needs="q")


@CAUSAL
def test_flash_backward_pytorch(is_causal: bool) -> None:
    check(get_flashattention_autograd_function_pytorch(), is_causal, "cpu", needs="qkv")


@CAUSAL
def test_flash_backward_triton(is_causal: bool) -> None:
    check(get_flashattention_autograd_function_triton(), is_causal, DEVICE, needs="qkv")
