"""The tests of every attention kernel: the cases, the truth, the criterion, and the tests as a class to inherit.

The truth is float64. The criterion is relative, in the 2-norm: a kernel's error may be twice the error of PyTorch's
plain computation in the same dtype, plus the rounding of scores of this size in float32.

A kernel's test file says `class TestX(KernelTests): name = "x"`, and which dtypes and head sizes the kernel accepts.
"""

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cs336_basics.attention import Documents, visible_keys
from cs336_basics.model import CausalMultiHeadSelfAttention, RotaryEmbedding
from cs336_systems.kernels.attention import get_attention
from cs336_systems.kernels.attention.contract import repeat_heads
from cs336_systems.kernels.attention.function import FlashFunction
from cs336_systems.kernels.attention.reference import attention_with_logsumexp

LENGTHS = (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200)
HEAD_SIZES = (1, 16, 40, 59, 64, 80, 96, 128, 256)
LAYOUTS = ("heads_inside", "leading_swapped", "transposed", "rows_apart", "columns_apart", "off_by_one", "expanded")
NAMES = ("o", "dq", "dk", "dv")


@dataclasses.dataclass(frozen=True)
class Case:
    n_q: int = 64
    n_k: int = 64
    d: int = 32
    leading: tuple[int, ...] = (2,)
    is_causal: bool = False
    layout: str = "contiguous"
    expanded_dO: bool = False
    largest_score: float | None = None  # approximate; None: normal inputs, unscaled
    needs: str = "qkv"
    seed: int = 0
    key_heads: int | None = None  # None: as many as q has
    window: int | None = None
    documents: tuple[int, ...] = ()  # their lengths in the first sequence; the others have them in other orders

    def __str__(self) -> str:
        given = ((field, getattr(self, field.name)) for field in dataclasses.fields(self))
        changed = [f"{field.name}={value}" for field, value in given if value != field.default]
        return ",".join(changed).replace(" ", "") or "plain"

    def inputs(self, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, which require gradients where `needs` says so, and dO. The same numbers on every device."""
        generator = torch.Generator().manual_seed(self.seed)

        def draw(n: int, leading: tuple[int, ...]) -> Tensor:
            return _lay_out(lambda *shape: torch.randn(shape, generator=generator), leading, n, self.d, self.layout)

        of_k = self.leading if self.key_heads is None else (*self.leading[:-1], self.key_heads)
        q, k, v = draw(self.n_q, self.leading), draw(self.n_k, of_k), draw(self.n_k, of_k)
        dO = draw(self.n_q, self.leading)
        if self.largest_score is not None:  # the largest of normal scores is about 4
            q = q * (self.largest_score / 4)
        if self.expanded_dO:  # as .sum().backward() passes it
            dO = torch.ones(()).expand(q.shape)
        q, k, v, dO = (_to(x, dtype, device) for x in (q, k, v, dO))
        for name, x in (("q", q), ("k", k), ("v", v)):
            x.requires_grad_(name in self.needs)
        return q, k, v, dO

    def mask(self, device: str) -> dict[str, Any]:
        """The arguments `window` and `documents`, if it has any."""
        mask: dict[str, Any] = {} if self.window is None else {"window": self.window}
        if self.documents:
            orders = [self.documents[i:] + self.documents[:i] for i in range(math.prod(self.leading[:-1]))]
            numbers = torch.stack([torch.arange(len(each)).repeat_interleave(torch.tensor(each)) for each in orders])
            numbers = numbers.view(*self.leading[:-1], self.n_q)
            mask["documents"] = Documents.from_numbers(numbers.to(device))
        return mask


def _lay_out(draw: Callable[..., Tensor], leading: tuple[int, ...], n: int, d: int, layout: str) -> Tensor:
    """(*leading, n, d) numbers in one of the memory layouts that callers use."""
    if layout == "heads_inside" and leading:  # (B, N, H, D) seen as (B, H, N, D)
        return draw(*leading[:-1], n, leading[-1], d).transpose(-2, -3)
    if layout == "leading_swapped" and len(leading) > 1:
        return draw(leading[1], leading[0], *leading[2:], n, d).transpose(0, 1)
    if layout == "transposed":
        return draw(*leading, d, n).mT
    if layout == "rows_apart":
        return draw(*leading, 2 * n, d)[..., ::2, :]
    if layout == "columns_apart":
        return draw(*leading, n, 2 * d)[..., ::2]
    if layout == "off_by_one":  # contiguous, but not aligned to 16 bytes
        return draw(math.prod(leading) * n * d + 1)[1:].view(*leading, n, d)
    if layout == "expanded" and leading:
        return draw(*leading[:-1], 1, n, d).expand(*leading, n, d)
    return draw(*leading, n, d)


def _to(x: Tensor, dtype: torch.dtype, device: str) -> Tensor:
    """x in another dtype on another device, with the same strides and offset."""
    span = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1 if x.numel() else 0
    storage = x.as_strided((x.storage_offset() + span,), (1,), 0).to(dtype).to(device)
    return storage.as_strided(x.shape, x.stride(), x.storage_offset()).detach()


def _both(*cases: Case) -> tuple[Case, ...]:
    return tuple(dataclasses.replace(case, is_causal=is_causal) for case in cases for is_causal in (False, True))


GROUPED_CASES = (
    Case(33, 70, leading=(1, 4), key_heads=2, is_causal=True),
    Case(70, 33, leading=(6,), key_heads=2, layout="heads_inside"),
    Case(65, 65, 64, leading=(2, 3), key_heads=1, is_causal=True, expanded_dO=True),
    Case(17, 129, 40, leading=(2, 1, 2), key_heads=1, layout="rows_apart", needs="kv"),
    Case(33, 20, leading=(4,), key_heads=2, is_causal=True, layout="columns_apart", needs="q"),
    Case(0, 16, leading=(2,), key_heads=1),
    Case(16, 0, leading=(4,), key_heads=2, is_causal=True),
)
"""The same head of k and v for several heads of q. Not for kernels with `equal_heads`."""

BAND_CASES = tuple(
    dataclasses.replace(case, is_causal=True)
    for case in (
        Case(130, 130, leading=(1, 2), key_heads=1, window=40),
        Case(130, 130, leading=(2, 1), documents=(1, 64, 2, 63), layout="heads_inside"),
        Case(100, 100, 40, leading=(2, 1, 1), documents=(60, 40), window=30, needs="kv"),
        Case(129, 129, 64, window=64, largest_score=1e4),  # hidden scores whose exponentials are infinite
        Case(200, 200, leading=(2, 4), key_heads=2, documents=(70, 1, 1, 128), expanded_dO=True),
        Case(65, 65, window=1),
        Case(65, 65, window=1000),
        Case(0, 0, window=3),
        Case(33, 33, leading=(), documents=(33,), needs="q"),
        Case(17, 17, leading=(2, 1), documents=(1,) * 17),
    )
)
"""Windows and documents. For kernels that serve them."""

CASES: tuple[Case, ...] = (
    *_both(*(Case(n, n) for n in LENGTHS)),
    *_both(*(Case(*n) for n in ((17, 200), (200, 17), (1, 129), (129, 1), (64, 128), (128, 64), (0, 16), (16, 0)))),
    *(Case(65, 65, d, is_causal=True) for d in HEAD_SIZES),
    *(Case(33, 70, leading=leading, is_causal=True) for leading in ((), (2, 3), (2, 1, 3), (2, 2, 2), (1, 1), (0, 2))),
    *(Case(33, 70, leading=(2, 2), layout=layout) for layout in LAYOUTS),
    *(Case(33, 40, leading=(2, 2, 2), layout=layout) for layout in ("heads_inside", "leading_swapped", "expanded")),
    *(Case(70, 70, leading=(), layout=layout, is_causal=True) for layout in ("rows_apart", "off_by_one")),
    *_both(Case(65, 65, leading=(1, 2), expanded_dO=True)),
    *_both(Case(65, 65, largest_score=1e4)),
    *(Case(33, 33, is_causal=True, needs=needs) for needs in ("q", "k", "v", "qk", "kv")),
    *GROUPED_CASES,
    *BAND_CASES,
)
"""The fixed corners, for every kernel and dtype."""

QUICK_CASES: tuple[Case, ...] = (
    *_both(*(Case(n, n, leading=()) for n in (1, 17, 65))),
    *_both(*(Case(*n) for n in ((1, 129), (129, 1), (0, 16), (16, 0)))),
    *(Case(*n, leading=(), is_causal=True) for n in ((129, 129), (64, 128), (64, 64), (0, 0))),
    *(Case(65, 33, d, leading=(), is_causal=True) for d in (1, 16, 59, 128)),
    *(Case(33, 70, leading=leading, is_causal=True) for leading in ((2, 3), (2, 1, 3), (0, 2))),
    *(Case(33, 40, leading=(2, 2), layout=layout) for layout in LAYOUTS),
    *(Case(33, 40, leading=(2, 2, 2), layout=layout) for layout in ("heads_inside", "leading_swapped", "expanded")),
    Case(33, 33, leading=(1, 2), is_causal=True, expanded_dO=True),
    *_both(Case(65, 65, leading=(), largest_score=1e4)),
    *(Case(33, 33, is_causal=True, needs=needs) for needs in ("q", "v", "qk", "kv")),
)
"""Each edge and each path once: for an interpreter, and for kernels in PyTorch that divide nothing into tiles."""

LARGE_CASES = _both(
    Case(4096, 4096, 64, leading=(1, 2)),
    Case(4096, 4096, 128, leading=(2, 1), layout="heads_inside", expanded_dO=True),
    Case(2049, 4100, 64, leading=(3,)),
    Case(4100, 2049, 80, leading=(3,)),
    Case(1000, 1000, 256, leading=(2, 2)),
    Case(2049, 2049, 128, leading=(1, 8), key_heads=2),
) + tuple(
    dataclasses.replace(case, is_causal=True)
    for case in (
        Case(4100, 4100, 64, leading=(2, 4), key_heads=1, window=1000),
        Case(4100, 4100, 128, leading=(2, 4), documents=(1, 1500, 99, 2500)),
        Case(4100, 4100, 128, leading=(2, 4), key_heads=2, documents=(2000, 2100), window=300),
        Case(2100, 2100, 256, leading=(2, 2), documents=(100, 2000), window=1500),
    )
)
"""Sizes that fill a GPU's grid and its pipelines."""


def random_cases(longest: int) -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        n_q=st.integers(0, longest),
        n_k=st.integers(0, longest),
        d=st.sampled_from(HEAD_SIZES),
        leading=st.sampled_from([(), (1,), (3,), (2, 2), (2, 2, 2)]),
        is_causal=st.booleans(),
        layout=st.sampled_from(["contiguous", *LAYOUTS]),
        expanded_dO=st.booleans(),
        largest_score=st.sampled_from([None, 1e-2, 1e2]),
        needs=st.sampled_from(["qkv", "q", "kv"]),
        seed=st.integers(0, 100),
    )


@dataclasses.dataclass(frozen=True)
class Truth:
    results: dict[str, Tensor]
    """o and the needed gradients, in float64."""
    logsumexp: Tensor
    rounding: dict[str, float]
    """The 2-norm of the terms of each sum. It bounds rounding where terms cancel: with one key, dq and dk are 0."""
    o_rounding: dict[str, float]
    """The change of dq and dk if each o_id were off by its own size: backward reads a rounded o."""
    largest_exponent: float
    """The largest score or logsumexp. Both are rounded before their difference becomes an exponent."""


def compute_truth(q: Tensor, k: Tensor, v: Tensor, dO: Tensor, is_causal: bool, **mask: Any) -> Truth:
    """Attention and its gradients in float64."""
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in (q, k, v)]
    o, logsumexp = attention_with_logsumexp(*wide, is_causal, **mask)
    results = gradients(o, wide, dO.double())
    logsumexp, (q, k, v) = logsumexp.detach(), (x.detach() for x in wide)
    k, v = repeat_heads(q, k, v)  # the norm of all terms is the same, whatever sums they are in
    scores, dO = q @ k.mT / math.sqrt(q.shape[-1]), dO.double()
    p = (scores - logsumexp[..., None]).exp()
    if is_causal:
        p = p.masked_fill(~visible_keys(q.shape[-2], k.shape[-2], q.device, **mask), 0.0)
    # dP and delta are sums of D terms, which may be small while their terms are not.
    dP, delta = ((dO @ v.mT) ** 2 + dO**2 @ (v**2).mT).sqrt(), dO * results["o"]
    delta = (delta.sum(-1, keepdim=True) ** 2 + delta.square().sum(-1, keepdim=True)).sqrt()
    dS = p * (dP + delta) / math.sqrt(q.shape[-1])
    squares = {"o": p**2 @ v**2, "dq": dS**2 @ k**2, "dk": (dS**2).mT @ q**2, "dv": (p**2).mT @ dO**2}
    by_o = p**2 * (dO * results["o"]).square().sum(-1, keepdim=True) / q.shape[-1]
    squares_by_o = {"dq": by_o @ k**2, "dk": by_o.mT @ q**2}
    return Truth(
        results,
        logsumexp,
        {name: float(x.sum().sqrt()) for name, x in squares.items()},
        {name: float(x.sum().sqrt()) for name, x in squares_by_o.items()},
        max((float(x.abs().max()) for x in (scores, logsumexp[logsumexp.isfinite()]) if x.numel()), default=0.0),
    )


def gradients(o: Tensor, q_k_v: list[Tensor], dO: Tensor) -> dict[str, Tensor]:
    """o and the gradients of the inputs that need one, by name: zeros if o does not depend on the input.

    Without keys o depends on no input, and need not have a graph.
    """
    needed = {name: x for name, x in zip(NAMES[1:], q_k_v, strict=True) if x.requires_grad}
    found = [torch.zeros_like(x) for x in needed.values()]
    if o.requires_grad:
        found = torch.autograd.grad(o, list(needed.values()), dO.to(o.dtype), materialize_grads=True)
    return {"o": o.detach(), **dict(zip(needed, found, strict=True))}


def plain_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, **mask: Any) -> Tensor:
    """PyTorch's plain computation, every step in the inputs' dtype: the yardstick."""
    k, v = repeat_heads(q, k, v)
    scores = (q / math.sqrt(q.shape[-1])) @ k.mT
    if is_causal:
        scores = scores.masked_fill(~visible_keys(q.shape[-2], k.shape[-2], q.device, **mask), -math.inf)
    return scores.softmax(dim=-1) @ v


def check_case(
    attention: Callable[..., Tensor], case: Case, dtype: torch.dtype, device: str, times_plain: float = 2
) -> None:
    """Compare o, the gradients and, if the kernel saves it, the logsumexp with the truth."""
    q, k, v, dO = case.inputs(dtype, device)
    mask = case.mask(device)
    before = [x.detach().clone() for x in (q, k, v, dO)]
    o = attention(q, k, v, case.is_causal, **mask)
    truth = compute_truth(q, k, v, dO, case.is_causal, **mask)
    saved = saved_logsumexp(o, q)
    if saved is not None:
        check_logsumexp(saved, truth, dtype)
    results = gradients(o, [q, k, v], dO)
    plain = gradients(plain_attention(q, k, v, case.is_causal, **mask), [q, k, v], dO)
    for name, expected in truth.results.items():
        check_close(name, results[name], expected, plain[name], truth, times_plain)
        like = {"o": q, "dq": q, "dk": k, "dv": v}[name]
        assert (results[name].shape, results[name].dtype) == (like.shape, like.dtype), name
    for name, x, was in zip(("q", "k", "v", "dO"), (q, k, v, dO), before, strict=True):
        assert torch.equal(x, was), f"{name} was written to"


def check_hidden_tiles_are_skipped(
    attention: Callable[..., Tensor], dtype: torch.dtype, d: int, device: str = "cpu"
) -> None:
    """Keys before the middle third and queries after it are NaN, which would spread from tiles that are only masked."""
    third = slice(128, 256)
    documents = Documents.from_numbers(torch.arange(384, device=device) // 128)
    for mask in ({"window": 1}, {"documents": documents}):
        clean, poisoned = {}, {}
        for results, number in ((clean, 0.0), (poisoned, math.nan)):
            q, k, v, dO = (x.detach() for x in Case(384, 384, d, leading=(1,)).inputs(dtype, device))
            for x in (k, v):
                x[:, : third.start] = number
            for x in (q, dO):
                x[:, third.stop :] = number
            inputs = [x.requires_grad_() for x in (q, k, v)]
            results |= gradients(attention(*inputs, True, **mask), inputs, dO)
        for name in NAMES:
            assert torch.equal(poisoned[name][:, third], clean[name][:, third]), (name, mask)


def check_close(
    name: str, result: Tensor, expected: Tensor, plain: Tensor, truth: Truth, times_plain: float = 2
) -> None:
    """Compare one result with the truth. A plain computation that overflows allows no error of its own."""
    unit = torch.finfo(torch.promote_types(result.dtype, torch.float32)).eps
    error, plain_error = (float((x.double() - expected).norm()) for x in (result, plain))
    by_rounding = 2 * unit * (truth.largest_exponent * float(expected.norm()) + truth.rounding[name])
    if result.dtype == torch.float64:  # the truth is rounded too: half a unit each
        by_rounding += unit * float(expected.norm())
    # o is rounded, and so is p before it: a quarter of a unit is a little more than their deviation.
    by_rounding += torch.finfo(result.dtype).eps / 4 * truth.o_rounding.get(name, 0.0)
    allowed = by_rounding + (times_plain * plain_error if math.isfinite(plain_error) else 0.0)
    assert error <= allowed, f"{name} is off by {error:.3g}, allowed {allowed:.3g} (plain: {plain_error:.3g})"


def check_logsumexp(saved: Tensor, truth: Truth, dtype: torch.dtype) -> None:
    assert saved.dtype == torch.promote_types(dtype, torch.float32)
    finite = truth.logsumexp > -math.inf  # at least one key
    assert torch.equal(saved > -math.inf, finite)
    if finite.any():
        size = max(1.0, truth.largest_exponent)
        # The truth is no more exact than a float64 kernel.
        assert float((saved - truth.logsumexp)[finite].abs().max()) <= 8 * torch.finfo(saved.dtype).eps * size


def saved_logsumexp(o: Tensor, q: Tensor) -> Tensor | None:
    """The logsumexp that a kernel made by `flash_function` saves for its backward pass; None for any other kernel."""
    if not issubclass(getattr(o.grad_fn, "_forward_cls", object), FlashFunction):
        return None
    saved = (x for x in o.grad_fn.saved_tensors if x is not None and x.is_floating_point())
    found = [x for x in saved if x.shape == q.shape[:-1]]
    assert len(found) == 1, f"{len(found)} saved tensors have the logsumexp's shape"
    return found[0]


WRONG_INPUTS: dict[str, tuple[Callable[..., tuple[Tensor, Tensor, Tensor]], str]] = {
    "one dimension": (lambda q, k, v: (q[0, 0, 0], k, v), "^q .*length"),
    "k of another head size": (lambda q, k, v: (q, k[..., :-1], v), "^k .*head size"),
    "v of another head size": (lambda q, k, v: (q, k, v[..., :-1]), "^v .*head size"),
    "v of another length": (lambda q, k, v: (q, k, v[..., :-1, :]), "^v .*positions"),
    "k of another batch": (lambda q, k, v: (q, k[:1], v), "^k .*leading"),
    "k of another rank": (lambda q, k, v: (q, k[0], v), "^k .*leading"),
    "heads that do not divide": (lambda q, k, v: (q, k[:, :2], v[:, :2]), "^k has 2 heads: .*divide q's, which has 3$"),
    "more heads of k": (lambda q, k, v: (q[:, :1], k, v), "^k has 3 heads: .*divide q's, which has 1$"),
    "v of other heads": (lambda q, k, v: (q, k, v[:, :1]), "^v has 1 heads: .*as many as k, which has 3$"),
    "k of another dtype": (lambda q, k, v: (q, k.double() if k.dtype != torch.double else k.float(), v), "^k "),
    "whole numbers": (lambda q, k, v: (q.long(), k.long(), v.long()), "^q .*int64"),
    "no head size": (lambda q, k, v: (q[..., :0], k[..., :0], v[..., :0]), "^q .*head size 0"),
}
"""Calls that a kernel must refuse, by their fault: a change of q, k and v, and a pattern of the error."""


NOT_DENSE: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse_coo": lambda x: x.to_sparse(),
    "sparse_csr": lambda x: x.to_sparse_csr(),
    "sparse_csc": lambda x: x.to_sparse_csc(),
    "sparse_bsr": lambda x: x.to_sparse_bsr((1, 1)),
    "sparse_bsc": lambda x: x.to_sparse_bsc((1, 1)),
    "nested": lambda x: torch.nested.nested_tensor(list(x)),
    "jagged": lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged),
}


class KernelTests:
    """The tests of every kernel; see the module's docstring. `pytest_generate_tests` gives them their cases."""

    name: str
    device: str = "cpu"
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    cases: tuple[Case, ...] = CASES
    max_head_size: int = 256
    equal_heads: bool = False
    """Whether the kernel refuses fewer heads of k and v."""
    bands: bool = False
    """Whether the kernel serves windows and documents."""
    random_examples: int = 30
    random_length: int = 260
    times_plain: float = 2

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        if "case" in metafunc.fixturenames:
            cases = [case for case in cls.cases if case.d <= cls.max_head_size]
            cases = [case for case in cases if case.key_heads is None or not cls.equal_heads]
            cases = [case for case in cases if not (case.window or case.documents) or cls.bands]
            metafunc.parametrize("case", cases, ids=str)
        if "dtype" in metafunc.fixturenames:
            metafunc.parametrize("dtype", cls.dtypes, ids=lambda dtype: str(dtype).removeprefix("torch."))

    @property
    def attention(self) -> Callable[..., Tensor]:
        return get_attention(self.name)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> list[Tensor]:
        """q, k and v of one shape, which require gradients."""
        generator = torch.Generator().manual_seed(0)
        kind = dict(dtype=dtype or self.dtypes[0], device=self.device)
        return [torch.randn(shape, generator=generator).to(**kind).requires_grad_() for _ in range(3)]

    def test_equals_the_truth(self, case: Case, dtype: torch.dtype) -> None:
        check_case(self.attention, case, dtype, self.device, self.times_plain)

    def test_equals_the_truth_in_random_cases(self, dtype: torch.dtype) -> None:
        checks, examples = list(HealthCheck), self.random_examples

        @settings(max_examples=examples, derandomize=True, database=None, deadline=None, suppress_health_check=checks)
        @given(case=random_cases(self.random_length).filter(lambda case: case.d <= self.max_head_size))
        def check(case: Case) -> None:
            check_case(self.attention, case, dtype, self.device, self.times_plain)

        check()

    @pytest.mark.parametrize("is_causal", [False, True])
    def test_gives_the_same_bits_twice(self, is_causal: bool, dtype: torch.dtype) -> None:
        case = Case(65, 129, is_causal=is_causal)
        first, second = (
            gradients(self.attention(q, k, v, is_causal), [q, k, v], dO)
            for q, k, v, dO in (case.inputs(dtype, self.device) for _ in range(2))
        )
        assert all(torch.equal(first[name], second[name]) for name in NAMES)

    @pytest.mark.parametrize("wrong", WRONG_INPUTS)
    def test_refuses_wrong_inputs(self, wrong: str) -> None:
        change, message = WRONG_INPUTS[wrong]
        q, k, v = (x.detach() for x in self.normal(2, 3, 8, 16))
        with pytest.raises(ValueError, match=message):
            self.attention(*change(q, k, v))

    @pytest.mark.parametrize("layout", NOT_DENSE)
    def test_refuses_tensors_that_are_not_dense(self, layout: str) -> None:
        dense = [x.detach() for x in self.normal(2, 8, 16)]
        for i, name in enumerate("qkv"):
            given = [*dense[:i], NOT_DENSE[layout](dense[i]), *dense[i + 1 :]]
            with pytest.raises(ValueError, match=rf"^{name} is .*: it must be dense$"):
                self.attention(*given, True)

    def test_is_not_changed_by_autocast(self) -> None:
        dtype = torch.float32 if torch.float32 in self.dtypes else torch.float16
        q, k, v = self.normal(2, 2, 33, 32, dtype=dtype)
        expected = gradients(self.attention(q, k, v, True), [q, k, v], torch.ones_like(q))
        with torch.autocast(self.device, torch.bfloat16):
            o = self.attention(q, k, v, True)
        results = gradients(o, [q, k, v], torch.ones_like(q))
        assert all(torch.equal(results[name], expected[name]) for name in NAMES)

    def test_compiles_with_a_layer_without_graph_break(self) -> None:
        dtype = self.dtypes[0]
        torch._dynamo.reset()  # other tests count towards the limit of recompilations
        torch.manual_seed(0)
        layer = CausalMultiHeadSelfAttention(32, 2, RotaryEmbedding(32, 16), self.attention).to(self.device, dtype)
        eager, (x, dy, _) = copy.deepcopy(layer), self.normal(2, 32, 32)
        results = []
        for function in (torch.compile(layer, fullgraph=True, backend="aot_eager"), eager):
            y = function(x)
            results.append([y, *torch.autograd.grad(y, [x, *function.parameters()], dy)])
        tolerance = 1e-5 if dtype in (torch.float32, torch.float64) else 2e-2
        for compiled, expected in zip(*results, strict=True):  # a few 16-bit gradients may be near zero
            assert (compiled - expected).norm() <= tolerance * expected.norm()


class FlashKernelTests(KernelTests):
    """More tests for a kernel made by `flash_function`: its Function, its operators, its count of operations."""

    function: type[torch.autograd.Function]

    def test_is_causal_may_be_left_out(self) -> None:
        q, k, v = self.normal(2, 17, 16)
        for o in (self.function.apply(q, k, v), self.attention(q, k, v)):
            assert torch.equal(o, self.attention(q, k, v, False))
            assert saved_logsumexp(o, q) is not None  # so that `check_case` compares it

    @pytest.mark.parametrize("layout", ["heads_inside", "expanded"])
    def test_operators_keep_pytorchs_rules(self, layout: str) -> None:
        name = self.function.__name__
        forward, backward = (getattr(torch.ops.cs336, f"{name}_{which}").default for which in ("forward", "backward"))
        key_heads = 1 if layout == "heads_inside" and not self.equal_heads else None
        case = Case(17, 20, 16, leading=(1, 2), key_heads=key_heads, is_causal=True, layout=layout)
        q, k, v, dO = case.inputs(self.dtypes[0], self.device)
        o, logsumexp = (x.detach() for x in forward(q, k, v, True))
        torch.library.opcheck(forward, (q, k, v, True))
        q, k, v = (x.detach() for x in (q, k, v))
        for need_dq, need_dkv in ((True, True), (True, False), (False, True)):
            arguments = (dO, q, k, v, o, logsumexp, True, need_dq, need_dkv)
            torch.library.opcheck(backward, arguments, test_utils=("test_schema", "test_faketensor"))

    def test_lazily_negated_tensors(self) -> None:
        """In the imaginary part of a conjugate, memory has the other sign."""
        plain = [x.detach() for x in Case(17, 40, 16).inputs(self.dtypes[0], self.device)]
        given = [torch._neg_view(x) for x in plain]
        negative = [-x for x in plain]
        found, expected = (
            gradients(self.attention(*(x.requires_grad_() for x in inputs), True), inputs, dO)
            for *inputs, dO in (given, negative)
        )
        assert all(torch.equal(found[name], expected[name]) for name in NAMES)

    @pytest.mark.parametrize("is_causal", [1, [True], "no", None], ids=str)
    def test_is_causal_is_checked_for_repeated_shapes_too(self, is_causal: Any) -> None:
        q, k, v = self.normal(2, 17, 16)
        self.attention(q, k, v, True)
        with pytest.raises(ValueError, match=r"^is_causal is .*: it must be True or False"):
            self.attention(q, k, v, is_causal)

    def test_memory_does_not_grow_with_the_square_of_the_length(self) -> None:
        if self.device != "cuda":
            pytest.skip("PyTorch keeps no record of the CPU's memory")
        q, k, v = self.normal(1, 2, 16384, 64)
        # The first call may compile, and torch.compile allocates memory to try its kernels.
        gradients(self.attention(q, k, v, True), [q, k, v], torch.ones_like(q))
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        gradients(self.attention(q, k, v, True), [q, k, v], torch.ones_like(q))
        peak = torch.cuda.max_memory_allocated() - before
        assert peak < 2 * 16384**2 * 4 / 10  # a tenth of the scores in float32

    def test_scores_of_minus_infinity_weigh_nothing(self) -> None:
        """Even if the first tiles have no other scores."""
        q, k, v = (x.detach() for x in self.normal(1, 128, 16))
        q, k = q.abs(), k.abs()
        k[:, :100] = -math.inf
        q, v = q.requires_grad_(), v.requires_grad_()
        found = gradients(self.attention(q, k, v, False), [q, k, v], torch.ones_like(q))
        expected, _ = attention_with_logsumexp(q.double(), k[:, 100:].double(), v[:, 100:].double())
        torch.testing.assert_close(found["o"].double(), expected, rtol=2e-2, atol=2e-2)
        assert found["dv"].isfinite().all()
        assert not found["dv"][:, :100].any()

    def test_saved_tensors_may_come_back_with_other_strides(self) -> None:
        q, k, v = self.normal(2, 40, 16)
        expected = gradients(self.attention(q, k, v, True), [q, k, v], v)
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x.repeat_interleave(2, -1)[..., ::2]):
            o = self.attention(q, k, v, True)
        found = gradients(o, [q, k, v], v)
        for name in NAMES:
            torch.testing.assert_close(found[name], expected[name])
