import math

import pytest
import torch

from cs336_systems.kernels.attention.reference import attention_with_logsumexp
from tests.kernels.gluon_interpreter import Descriptor, Pointer, interpreted, run

kernels = pytest.importorskip(
    "cs336_systems.kernels.attention.flash_gluon_kernels", reason="Triton is only there on Linux"
)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "n_q, n_k, d", [(1, 1, 128), (65, 65, 80), (130, 300, 128), (300, 130, 96), (1, 257, 128), (520, 520, 128)]
)
def test_the_forward_kernel_interpreted(
    n_q: int, n_k: int, d: int, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gluon = interpreted(kernels, monkeypatch)
    generator = torch.Generator().manual_seed(n_q)
    q, k, v = (torch.randn(1, 3, n, d, generator=generator).bfloat16() for n in (n_q, n_k, n_k))
    if n_k == 300 and not is_causal:  # scores of minus infinity in all of the tiles that come first
        q, k[..., 120:, :] = q.abs(), -math.inf
    o, logsumexp = torch.full_like(q, math.nan), torch.full((1, 3, n_q), math.nan)
    blocks = [Descriptor(x, [1, 1, rows, gluon.D_PAD]) for x, rows in ((q, 64), (k, gluon.BN), (v, gluon.BN), (o, 64))]
    scalars = [1 / math.sqrt(d), *(torch.tensor(x) for x in (3, n_q, n_k, 2))]  # heads in groups of two
    programs = 3 * -(-n_q // (gluon.GROUPS * gluon.ROWS))
    run(gluon.forward_kernel, programs, *blocks, Pointer(logsumexp), *scalars, is_causal)
    keys = slice(0, 120) if k.isinf().any() else slice(None)
    expected, expected_logsumexp = attention_with_logsumexp(
        q.double(), k[..., keys, :].double(), v[..., keys, :].double(), is_causal
    )
    torch.testing.assert_close(o.double(), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(logsumexp.double(), expected_logsumexp, rtol=1e-5, atol=1e-5)
