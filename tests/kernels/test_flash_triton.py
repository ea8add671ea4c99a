import dataclasses
import itertools
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cs336_systems.kernels import recording
from cs336_systems.kernels.attention import get_attention
from cs336_systems.kernels.attention.function import Saved, new_gradients
from cs336_systems.kernels.attention.reference import naive
from cs336_systems.training.graph import RecordedStep
from tests.kernels.attention_cases import (
    BAND_CASES,
    CASES,
    LARGE_CASES,
    LAYOUTS,
    NAMES,
    QUICK_CASES,
    Case,
    FlashKernelTests,
    check_case,
    check_close,
    check_hidden_tiles_are_skipped,
    compute_truth,
    gradients,
    plain_attention,
)

pytest.importorskip("triton", reason="Triton is only there on Linux")
flash_triton = pytest.importorskip("cs336_systems.kernels.attention.flash_triton")
tiles = pytest.importorskip("cs336_systems.kernels.attention.flash_triton_tiles")

on_cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled where there is a GPU")


@on_cpu_only
class TestFlashTritonInterpreted(FlashKernelTests):
    name = "flash_triton"
    bands = True
    function = flash_triton.FlashAttentionTriton
    dtypes = (torch.float32,)
    cases = QUICK_CASES
    random_examples = 3
    random_length = 90


@pytest.mark.gpu
class TestFlashTriton(FlashKernelTests):
    name = "flash_triton"
    bands = True
    function = flash_triton.FlashAttentionTriton
    device = "cuda"
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    cases = CASES + LARGE_CASES
    random_examples = 100


# The size decides which kernels are launched: (TMA_FROM_SCORES, ONE_LAUNCH_BELOW_SCORES) for each way at every size.
NEVER, ALWAYS = 2**62, 0
WAYS = {"one launch": (NEVER, NEVER), "pointers": (NEVER, ALWAYS), "descriptors": (ALWAYS, ALWAYS)}


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    tma_from, one_launch_below = WAYS[request.param]
    monkeypatch.setattr(flash_triton, "TMA_FROM_SCORES", tma_from)
    monkeypatch.setattr(flash_triton, "ONE_LAUNCH_BELOW_SCORES", one_launch_below)
    monkeypatch.setattr(flash_triton, "_LAUNCHES", {})


@on_cpu_only
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("way", ["pointers", "descriptors"], indirect=True)
@pytest.mark.parametrize(
    "case",
    [
        Case(65, 70, 16, leading=(2, 3), is_causal=True),
        Case(130, 65, 40),
        Case(129, 129, 64, leading=(1, 2), layout="heads_inside", is_causal=True, expanded_dO=True),
        Case(33, 40, 59, is_causal=True, needs="q"),
        Case(40, 33, 16, is_causal=True, needs="kv"),
    ],
    ids=str,
)
def test_every_way_equals_the_truth_interpreted(case: Case) -> None:
    check_case(flash_triton.flash_triton, case, torch.float32, "cpu")


@pytest.mark.gpu
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("way, dtype", [("pointers", torch.float16), ("descriptors", torch.bfloat16)], indirect=["way"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_way_equals_the_truth(case: Case, dtype: torch.dtype) -> None:
    check_case(flash_triton.flash_triton, case, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("d", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_equals_the_truth_at_every_head_size(layout: str, d: int, dtype: torch.dtype) -> None:
    """Tiles are tuned on contiguous tensors, and the compiler generates different code for each layout."""
    for n_q, n_k, is_causal in ((100, 130, True), (129, 33, False)):
        check_case(flash_triton.flash_triton, Case(n_q, n_k, d, (2, 3), is_causal, layout), dtype, "cuda")


def reaching_far(x: torch.Tensor, axis: int) -> torch.Tensor:
    """x in a tensor of 2^31 elements and more: a tile along the axis has the first and the last of them."""
    strides = [0, 0]
    strides[axis] = -(-(2**31) // (x.shape[axis] - 1))
    strides[1 - axis] = 1
    memory = torch.empty((x.shape[axis] - 1) * strides[axis] + x.shape[1 - axis], dtype=x.dtype, device=x.device)
    return memory.as_strided(x.shape, strides).copy_(x)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("way", ["one launch", "pointers"], indirect=True)
@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=on_cpu_only), pytest.param("cuda", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("axis", [0, 1], ids=["rows", "columns"])
def test_elements_of_a_tile_may_be_further_apart_than_32_bit_offsets(axis: int, device: str) -> None:
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 6e9:
        pytest.skip("needs 6 GB of free GPU memory")
    given = [x.detach() for x in Case(33, 33, 16, leading=()).inputs(torch.float16, device)]

    def found(*inputs: torch.Tensor) -> list[torch.Tensor]:
        q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
        o = flash_triton.flash_triton(q, k, v, True)
        return [o, *torch.autograd.grad(o, (q, k, v), inputs[3])]

    expected = found(*given)
    for i in range(4 if axis == 0 else 3):  # a dO with columns apart is copied
        inputs = list(given)
        inputs[i] = reaching_far(given[i], axis)
        # Elements read elsewhere differ by about 1; a kernel with 64 bits may round sums of products in another order.
        torch.testing.assert_close(
            found(*inputs), expected, rtol=2**-10, atol=1e-5, msg=lambda text, i=i: f"input {i}: {text}"
        )


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
def test_gives_the_same_bits_twice_at_the_sizes_of_training(d: int) -> None:
    q, k, v, dO = Case(4096, 4096, d, leading=(2, 8), is_causal=True).inputs(torch.bfloat16, "cuda")
    outputs = (flash_triton.flash_triton(q, k, v, True, deterministic=True) for _ in range(4))
    first, *others = (gradients(o, [q, k, v], dO) for o in outputs)
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


HOPPER, BLACKWELL, AMPERE = (9, 0), (10, 0), (8, 0)
IN_GLUON = ["forward", "prepare", "gradients", "finish"]
ALL_IN_GLUON = ", ".join(f"gluon {phase}" for phase in IN_GLUON)


def name_of(kernel: Any) -> str:
    """The language and the phase of a kernel."""
    modules = {
        "gluon": (flash_triton.gluon_forward, flash_triton.gluon_backward, flash_triton.gluon_sums),
        "triton": (flash_triton,),
    }
    return next(
        f"{language} {phase}"
        for language, places in modules.items()
        for phase in (*IN_GLUON, "dq", "dkv", "backward")
        for module in places
        if getattr(module, f"{phase}_kernel", None) is kernel
    )


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels for which launches are made from now on."""
    names: list[str] = []
    launch = flash_triton.Launch

    def make(kernel: Any, *arguments: Any, **options: Any) -> Any:
        names.append(name_of(kernel))
        return launch(kernel, *arguments, **options)

    monkeypatch.setattr(flash_triton, "Launch", make)
    monkeypatch.setattr(flash_triton, "_LAUNCHES", {})
    return names


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
def test_the_sizes_of_training_equal_the_truth(d: int, made: list[str]) -> None:
    """Long enough for descriptors without a changed threshold."""
    case = Case(4096, 4096, d, leading=(2, 8), is_causal=True, layout="heads_inside")
    assert flash_triton.TMA_FROM_SCORES <= 16 * 4096 * 4096
    check_case(flash_triton.flash_triton, case, torch.bfloat16, "cuda")
    in_gluon = [f"gluon {phase}" for phase in IN_GLUON]
    on_hopper = torch.cuda.get_device_capability() == HOPPER
    assert made == (in_gluon if on_hopper else ["triton forward", "triton dq", "triton dkv"])


# The Gluon kernels serve head sizes that are padded to 64 or 128. They get all cases that descriptors can move.
MOVABLE = ("contiguous", "heads_inside", "leading_swapped", "rows_apart")
GLUON_CASES = [
    case if 32 < case.d <= 128 else dataclasses.replace(case, d=64)
    for case in (*CASES, *LARGE_CASES)
    if case.layout in MOVABLE and case.n_q * case.n_k * math.prod(case.leading) and case.d in (32, 64, 80, 96, 128)
]
on_hopper_only = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != HOPPER, reason="it is written for Hopper"
)


@pytest.mark.gpu
@on_hopper_only
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("way", ["descriptors"], indirect=True)
class TestInGluon:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("case", GLUON_CASES, ids=str)
    def test_equals_the_truth(self, case: Case, dtype: torch.dtype, made: list[str]) -> None:
        check_case(flash_triton.flash_triton, case, dtype, "cuda")
        if case.needs not in ("q", "k", "v", "kv"):
            assert made == [f"gluon {phase}" for phase in IN_GLUON]
        else:
            assert made == ["gluon forward", "triton dq", "triton dkv"][: 2 if case.needs == "q" else 3]

    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize("d", [40, 48, 72, 88, 104, 120])
    def test_other_head_sizes_equal_the_truth(self, d: int, is_causal: bool, made: list[str]) -> None:
        case = Case(300, 200, d, leading=(2, 3), is_causal=is_causal, layout="heads_inside")
        check_case(flash_triton.flash_triton, case, torch.bfloat16, "cuda")
        assert made == [f"gluon {phase}" for phase in IN_GLUON]

    @pytest.mark.parametrize("d", [64, 128])
    def test_one_gradient_alone_equals_it_beside_the_others(self, d: int) -> None:
        q, k, v, do = (x.detach() for x in Case(300, 333, d, leading=(2, 3)).inputs(torch.bfloat16, "cuda"))
        saved = Saved(q, k, v, *flash_triton.flash_forward(q, k, v, True), True)
        together = flash_triton.flash_backward(do, saved, True, True)
        dq, _, _ = flash_triton.flash_backward(do, saved, True, False)
        _, dk, dv = flash_triton.flash_backward(do, saved, False, True)
        torch.testing.assert_close((dq, dk, dv), together, rtol=1e-2, atol=1e-3)

    def test_scores_of_minus_infinity_weigh_nothing(self) -> None:
        """Even if the last tile, which comes first, has no other keys."""
        q, k, v = (torch.randn(2, 3, 300, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        q, k = q.abs(), k.abs()
        k[..., 200:, :] = -math.inf
        expected = flash_triton.flash_triton(q, k[..., :200, :], v[..., :200, :])
        torch.testing.assert_close(flash_triton.flash_triton(q, k, v), expected, rtol=2e-2, atol=2e-2)

    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize("d", [64, 128])
    def test_gives_the_same_bits_every_time(self, d: int, is_causal: bool, made: list[str]) -> None:
        q, k, v, do = (torch.randn(1, 16, 4096, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        first, *others = (flash_triton.flash_forward(q, k, v, is_causal) for _ in range(4))
        assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
        saved = Saved(q, k, v, *first, is_causal)
        gradients, *others = (flash_triton.flash_backward(do, saved, True, True) for _ in range(4))
        assert made == [f"gluon {phase}" for phase in IN_GLUON]
        assert all(torch.equal(a, b) for other in others for a, b in zip(gradients[1:], other[1:], strict=True))
        gradients, *others = (flash_triton.deterministic_backward(do, saved, True, True) for _ in range(4))
        assert all(torch.equal(a, b) for other in others for a, b in zip(gradients, other, strict=True))


@pytest.fixture
def chosen_on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make `flash_triton` choose kernels for a card of a capability. A launch is its kernel's name."""

    def choose_on(capability: tuple[int, int]) -> None:
        device = SimpleNamespace(
            shared_memory_per_block_optin=227 * 1024, L2_cache_size=50 * 2**20, multi_processor_count=132
        )
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: device)
        for module in (flash_triton, tiles):
            monkeypatch.setattr(module, "INTERPRET", False)
        monkeypatch.setattr(flash_triton, "TMA_FROM_SCORES", 2 * 64 * 64)
        monkeypatch.setattr(flash_triton, "Launch", lambda kernel, *_, **__: name_of(kernel))

    return choose_on


@pytest.mark.parametrize(
    "capability, case, dtype, expected",
    [
        (HOPPER, Case(d=128), torch.bfloat16, ALL_IN_GLUON),
        (HOPPER, Case(d=80, layout="heads_inside"), torch.float16, ALL_IN_GLUON),
        (HOPPER, Case(d=128, needs="kv"), torch.bfloat16, "gluon forward, triton dq, triton dkv"),
        (HOPPER, Case(d=64), torch.bfloat16, ALL_IN_GLUON),
        (HOPPER, Case(d=32), torch.bfloat16, "triton forward, triton dq, triton dkv"),
        (HOPPER, Case(d=256), torch.bfloat16, "triton forward, triton dq, triton dkv"),
        # rows of 200 bytes, which TMA cannot move
        (HOPPER, Case(d=100), torch.bfloat16, "triton forward, triton backward"),
        (HOPPER, Case(d=64), torch.float32, "triton forward, triton backward"),
        # tiles that fill a third of the multiprocessors: not in one launch, which is too slow; otherwise small ones
        (HOPPER, Case(n_q=704, d=128), torch.float32, "triton forward, triton backward"),
        (HOPPER, Case(n_q=705, d=128), torch.float32, "triton forward, triton dq, triton dkv"),
        (HOPPER, Case(n_q=2816, d=16), torch.float32, "triton forward, triton backward"),
        (HOPPER, Case(n_q=2817, d=32), torch.float32, "triton forward, triton dq, triton dkv"),
        (HOPPER, Case(n_k=2817, d=32), torch.float32, "triton forward, triton dq, triton dkv"),
        (HOPPER, Case(d=256), torch.float32, "triton forward, triton dq, triton dkv"),  # takes long to compile
        (HOPPER, Case(d=128, layout="columns_apart"), torch.bfloat16, "triton forward, triton backward"),
        (HOPPER, Case(d=128, layout="columns_apart"), torch.float32, "triton forward, triton backward"),
        (HOPPER, Case(n_q=63, d=128), torch.bfloat16, "triton forward, triton backward"),  # too short
        (BLACKWELL, Case(d=128), torch.bfloat16, "triton forward, triton dq, triton dkv"),
        (AMPERE, Case(d=128), torch.bfloat16, "triton forward, triton backward"),
    ],
    ids=str,
)
def test_the_choice_of_kernels(
    capability: tuple[int, int], case: Case, dtype: torch.dtype, expected: str, chosen_on: Any
) -> None:
    chosen_on(capability)
    assert chosen(case, dtype) == expected


def chosen(case: Case, dtype: torch.dtype) -> str:
    """The launches of both passes, on the card of `chosen_on`."""
    q, k, v, do = (x.detach()[None] for x in case.inputs(dtype, "cpu"))
    x = dict(q_=q, k_=k, v_=v, o_=torch.empty_like(q))
    forward = flash_triton._forward_launch(x, True, None)
    dq, dk, dv = new_gradients(q, k, v, True, True)
    x |= dict(do_=do, dq_=dq, dk_=dk, dv_=dv)
    backward = flash_triton._backward_launches(
        x, True, None, need_dq="q" in case.needs, need_dkv=True, deterministic=False
    )
    return ", ".join((forward, *backward))


BY_POINTERS = "triton forward by pointers, triton backward by pointers"


@pytest.mark.parametrize(
    "capability, case, dtype, eager, recorded",
    [
        (HOPPER, Case(1, 1, 64, leading=(1,)), torch.bfloat16, BY_POINTERS, ALL_IN_GLUON),
        (HOPPER, Case(d=80, layout="heads_inside"), torch.float16, BY_POINTERS, ALL_IN_GLUON),
        (HOPPER, Case(d=128, key_heads=1), torch.bfloat16, BY_POINTERS, ALL_IN_GLUON),
        (
            HOPPER,
            Case(d=128, needs="kv"),
            torch.bfloat16,
            "triton forward by pointers, triton dq by pointers, triton dkv by pointers",
            "gluon forward, triton dq by pointers, triton dkv by pointers",
        ),
        *(
            (capability, case, dtype, BY_POINTERS, BY_POINTERS)
            for capability, case, dtype in (
                (HOPPER, Case(d=32), torch.bfloat16),
                (HOPPER, Case(d=100), torch.bfloat16),
                (HOPPER, Case(d=64), torch.float32),
                (BLACKWELL, Case(d=64), torch.bfloat16),
                (AMPERE, Case(d=64), torch.bfloat16),
            )
        ),
    ],
    ids=str,
)
def test_any_number_of_scores_is_for_gluon_in_a_recording(
    capability: tuple[int, int],
    case: Case,
    dtype: torch.dtype,
    eager: str,
    recorded: str,
    chosen_on: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def launch(kernel: Any, _: int, constants: dict[str, Any], *__: Any, **___: Any) -> str:
        return " by ".join([name_of(kernel), *([constants["MOVE"]] if "MOVE" in constants else [])])

    chosen_on(capability)
    monkeypatch.setattr(flash_triton, "TMA_FROM_SCORES", NEVER)
    monkeypatch.setattr(flash_triton, "Launch", launch)
    assert chosen(case, dtype) == eager
    with recording.on():
        assert chosen(case, dtype) == recorded
    assert chosen(case, dtype) == eager


@pytest.mark.gpu
@on_hopper_only
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("name", ["flash_triton", "auto"])
def test_a_recording_in_gluon_equals_the_truth(name: str, compile: bool, deterministic: bool, made: list[str]) -> None:
    """And the eager result, by other kernels."""
    case = Case(1024, 1024, 64, leading=(2, 3), is_causal=True, layout="heads_inside")
    q, k, v, dO = case.inputs(torch.bfloat16, "cuda")
    attention = torch.compile(get_attention(name)) if compile else get_attention(name)

    def compute(dO: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        o = attention(q, k, v, True)
        o.backward(dO)
        return o.detach()

    def clear() -> None:
        q.grad = k.grad = v.grad = None

    torch.use_deterministic_algorithms(deterministic)
    try:
        step = RecordedStep(compute, clear)
        for x in (*[torch.zeros_like(dO)] * 3, dO):  # recorded with zeros
            o = step(x, x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert ", ".join(made) == ALL_IN_GLUON
    made.clear()
    recorded = {name: x.clone() for name, x in zip(NAMES, (o, q.grad, k.grad, v.grad), strict=True)}
    step.close()
    eager = gradients(attention(q, k, v, True), [q, k, v], dO)
    assert made == (["triton forward", "triton backward"] if name == "flash_triton" else [])
    truth = compute_truth(q, k, v, dO, True)
    plain = gradients(plain_attention(q, k, v, True), [q, k, v], dO)
    for name, expected in truth.results.items():
        check_close(name, recorded[name], expected, plain[name], truth)
        check_close(name, recorded[name], eager[name].double(), plain[name], truth)


@pytest.mark.parametrize("of", range(3), ids=["q", "k", "v"])
def test_float32_tiles_are_small_where_columns_are_apart(of: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With larger tiles Triton 3.6 generates kernels for Hopper that read beyond the tensors."""
    device = SimpleNamespace(shared_memory_per_block_optin=227 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: device)
    monkeypatch.setattr(tiles, "INTERPRET", False)
    wide = torch.zeros(1, 2, 64, 128)
    tensors = [wide[..., :64], wide[..., :64], wide[..., 64:]]
    tuned = {phase: tiles.choose_tile(phase, tensors[0], False, tiles.needs_small_tiles(*tensors))
             for phase in ("forward", "dq", "dkv", "backward")}  # fmt: skip
    tensors[of] = wide[..., ::2]
    for phase, tile in tuned.items():
        small = tiles.choose_tile(phase, tensors[0], False, tiles.needs_small_tiles(*tensors))
        assert max(small.BM, small.BN) <= 32 < max(tile.BM, tile.BN)
        assert small.num_stages == 1


def test_descriptors_are_for_gradients_that_tma_can_move(chosen_on: Any) -> None:
    """Keys with gaps between them have gradients without gaps, whose rows are not 16-byte aligned."""
    q, k = torch.zeros(1, 1, 1, 100).half(), torch.zeros(1, 1, 2 * 64 * 64, 104).half()[..., :100]
    chosen_on(HOPPER)
    dq, dk, dv = new_gradients(q, k, k, True, True)
    x = dict(q_=q, k_=k, v_=k, o_=q)
    assert flash_triton._forward_launch(x, False, None) == "gluon forward"
    x |= dict(do_=q, dq_=dq, dk_=dk, dv_=dv)
    assert flash_triton._backward_launches(x, False, None, True, True, False) == ("triton backward",)


FIRST_CALL = """
import sys, time
import torch
from cs336_systems.kernels.attention.flash_triton import flash_triton
d, dtype, heads, n = int(sys.argv[1]), getattr(torch, sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
q, k, v = (torch.randn(1, heads, n, d, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
(q * q).sum().backward()  # PyTorch loads its own kernels for a sum once per process
torch.cuda.synchronize()
begun = time.perf_counter()
flash_triton(q, k, v, True).sum().backward()
torch.cuda.synchronize()
print(time.perf_counter() - begun)
"""


@pytest.mark.gpu
@pytest.mark.timing
@pytest.mark.parametrize(
    "d, dtype, heads, n",
    [
        *itertools.product((64, 128, 256), ("bfloat16", "float32"), (16,), (512, 4096)),
        (32, "float32", 1, 512),  # few programs: small tiles
        (128, "float32", 1, 512),
    ],
)
def test_the_first_call_takes_ten_seconds_with_an_empty_cache_and_one_with_a_full_one(
    d: int, dtype: str, heads: int, n: int, tmp_path: Path
) -> None:
    environ = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", FIRST_CALL, str(d), dtype, str(heads), str(n)]
    for limit in (10.0, 1.0):
        ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=True)
        assert float(ran.stdout) < limit


@on_cpu_only
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("way", ["pointers", "descriptors"], indirect=True)
@pytest.mark.parametrize(
    "case",
    [Case(65, 130, 16, leading=(1, 3), key_heads=1, is_causal=True), Case(130, 33, 16, leading=(1, 4), key_heads=2)],
    ids=str,
)
def test_every_way_serves_groups_interpreted(case: Case) -> None:
    check_case(flash_triton.flash_triton, case, torch.float32, "cpu")


@on_cpu_only
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("case", BAND_CASES[:4], ids=str)
def test_every_way_serves_windows_and_documents_interpreted(case: Case) -> None:
    check_case(flash_triton.flash_triton, case, torch.float32, "cpu")


@on_cpu_only
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("way", ["one launch", "descriptors"], indirect=True)
def test_hidden_tiles_are_skipped_interpreted() -> None:
    check_hidden_tiles_are_skipped(flash_triton.flash_triton, torch.float32, 16)


@pytest.mark.gpu
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("d", [64, 128])
def test_hidden_tiles_are_skipped(d: int) -> None:
    check_hidden_tiles_are_skipped(flash_triton.flash_triton, torch.bfloat16, d, "cuda")


@on_cpu_only
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("way", ["one launch"], indirect=True)
def test_calls_that_differ_in_their_groups_alone_do_not_share_a_launch(made: list[str]) -> None:
    q, k, v, dO = (x.detach() for x in Case(70, 50, 64, leading=(1, 4)).inputs(torch.float32, "cpu"))
    for heads in (4, 2, 1):
        inputs = [x.clone().requires_grad_() for x in (q, k[:, :heads], v[:, :heads])]
        found = gradients(flash_triton.flash_triton(*inputs, True), inputs, dO)
        expected = gradients(naive(*inputs, True), inputs, dO)
        for name, x in found.items():
            torch.testing.assert_close(x, expected[name], rtol=1e-4, atol=1e-4)
    assert made == ["triton forward", "triton backward"] * 3


def test_heads_whose_keys_share_the_cache_are_counted_by_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_triton, "INTERPRET", False)
    device = SimpleNamespace(L2_cache_size=2 * 4 * 2 * 64 * 16 * 4)  # a half has four heads of keys and values
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: device)
    q, k = torch.zeros(1, 6, 64, 16), torch.zeros(1, 2, 64, 16)
    assert flash_triton._heads_together(k, k, 2) == 4
    assert flash_triton._heads_together(q, k, 2) == 12
    assert flash_triton._heads_together(k, q, 2) == 1
