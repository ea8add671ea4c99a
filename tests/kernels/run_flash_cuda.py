"""Runs every kernel of the set that CS336_FLASH_CUDA names, on small corner cases, under a checker.

The expected results are computed on the CPU, because the checkers are slow and check PyTorch's kernels too.
"""

import itertools
import os
import sys
from typing import Any

import torch

from cs336_systems.kernels.attention import flash_cuda_ampere, flash_cuda_hopper
from cs336_systems.kernels.attention.flash_cuda import KERNELS, flash_cuda
from tests.kernels.attention_cases import NAMES, Case, gradients, plain_attention

HEAD_SIZES = (1, 40, 64, 80, 128, 200)
LENGTHS = ((1, 1), (64, 200), (128, 128), (129, 129), (200, 17))
AMPERE_CASES = tuple(
    Case(n_q, n_k, d, is_causal=is_causal, layout=layout)
    for d, (n_q, n_k), is_causal in itertools.product(HEAD_SIZES, LENGTHS, (False, True))
    # Copied 16 bytes at a time, and one by one.
    for layout in (("contiguous", "off_by_one") if n_q == 129 else ("contiguous",))
)

LARGEST = Case(129, 129, 128)
HOPPER_CASES = (
    *(case for case in AMPERE_CASES if case.d <= 128),
    *(
        Case(n_q, n_k, d, (1, 3), is_causal)
        for (n_q, n_k), d, is_causal in itertools.product(((500, 700), (700, 300)), (64, 128), (False, True))
    ),
)
CASES = {"ampere": AMPERE_CASES, "hopper": HOPPER_CASES}


def run(*given: Case) -> int:
    """Run both passes of each case and compare them roughly. Returns the number of cases."""
    name, count = os.environ["CS336_FLASH_CUDA"], 0
    for case, dtype in itertools.product(given or CASES[name], KERNELS[name].DTYPES):
        q, k, v, dO = case.inputs(dtype, "cuda")
        found = gradients(flash_cuda(q, k, v, case.is_causal), [q, k, v], dO)
        *inputs, dO = (x.detach().cpu().float() for x in (q, k, v, dO))
        inputs = [x.requires_grad_() for x in inputs]
        expected = gradients(plain_attention(*inputs, case.is_causal), inputs, dO)
        for name in NAMES:
            torch.testing.assert_close(found[name].cpu().float(), expected[name], rtol=0.05, atol=0.05)
        count += 1
    return count


def run_beyond_the_end() -> None:
    """Read one key too many, which a memory checker has to find."""
    sizes = flash_cuda_ampere._Sizes

    def one_more(batch: int, heads: int, n_q: int, n_k: int, *others: Any) -> Any:
        return sizes(batch, heads, n_q, n_k + 1, *others)

    flash_cuda_ampere._Sizes = one_more  # type: ignore[assignment,misc]
    run(LARGEST)


def compile_for_racecheck() -> None:
    """Let all lanes of a warp arrive at barriers: racecheck does not see that one arrives for the others."""
    flash_cuda_hopper.FLAGS = (*flash_cuda_hopper.FLAGS, "-DLANES_THAT_ARRIVE=32")


if __name__ == "__main__":
    if sys.argv[1:] == ["beyond_the_end"]:
        run_beyond_the_end()
    else:
        if sys.argv[1:] == ["for_racecheck"]:
            compile_for_racecheck()
        print(f"{run()} cases ran")
