"""The kernels in Gluon on the CPU, launched by `flash_triton` itself. On a GPU: `test_flash_triton.py`."""

import contextlib
import functools
import math
from typing import Any

import pytest
import torch

from cs336_systems.kernels import recording
from cs336_systems.kernels.attention.reference import attention_with_logsumexp
from tests.kernels import gluon_interpreter
from tests.kernels.attention_cases import Case, check_case, check_hidden_tiles_are_skipped, gradients

pytest.importorskip("triton", reason="Triton is only there on Linux")
flash_triton = pytest.importorskip("cs336_systems.kernels.attention.flash_triton")

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled where there is a GPU")


ALL = ["forward_kernel", "prepare_kernel", "gradients_kernel", "finish_kernel"]


def launch_in_gluon(monkeypatch: pytest.MonkeyPatch, fault: tuple[str, str] = ("", "")) -> list[str]:
    """Use the Gluon kernels wherever descriptors can move the tensors. Collects the names of the launched kernels."""
    names: list[str] = []
    launch = flash_triton.Launch

    def make(kernel: Any, *arguments: Any, **options: Any) -> Any:
        made = (gluon_interpreter.Launch if options.get("layouts") else launch)(kernel, *arguments, **options)

        def call(tensors: dict[str, torch.Tensor]) -> None:
            names.append(kernel.__name__)
            made(tensors)

        call.tensors = made.tensors  # type: ignore[attr-defined]
        call.compiling = lambda tensors: contextlib.nullcontext()  # type: ignore[attr-defined]
        return call

    modules = flash_triton.gluon, flash_triton.gluon_forward, flash_triton.gluon_backward
    _, forward, backward = gluon_interpreter.interpreted(*modules, fault=fault)
    monkeypatch.setattr(flash_triton, "gluon_forward", forward)
    monkeypatch.setattr(flash_triton, "gluon_backward", backward)
    monkeypatch.setattr(flash_triton, "_is_for_gluon", lambda q: True)
    monkeypatch.setattr(flash_triton, "TMA_FROM_SCORES", 0)
    monkeypatch.setattr(flash_triton, "ONE_LAUNCH_BELOW_SCORES", 0)
    monkeypatch.setattr(flash_triton, "_LAUNCHES", {})
    monkeypatch.setattr(flash_triton, "Launch", make)
    return names


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return launch_in_gluon(monkeypatch)


@pytest.mark.parametrize(
    "n_q, n_k, d, is_causal, heads",  # which the interpreter takes in groups of four
    [
        (1, 1, 128, False, 3),
        (65, 65, 80, True, 5),
        (130, 300, 64, False, 1),
        (130, 300, 64, True, 3),
        (300, 130, 96, False, 3),
        (130, 300, 128, False, 1),
        (300, 130, 96, True, 1),
        (1, 257, 128, True, 3),
        (257, 1, 40, False, 3),
        (520, 520, 128, True, 1),
    ],
)
def test_both_passes_equal_the_truth(
    n_q: int, n_k: int, d: int, is_causal: bool, heads: int, launched: list[str]
) -> None:
    case = Case(n_q, n_k, d, leading=(1, heads), is_causal=is_causal)
    check_case(flash_triton.flash_triton, case, torch.bfloat16, "cpu")
    assert launched == ALL


@pytest.mark.parametrize(
    "case",
    [
        Case(200, 200, 64, leading=(2, 2), is_causal=True, layout="heads_inside", expanded_dO=True),
        Case(130, 70, 80, leading=(2, 2), layout="leading_swapped"),
        Case(70, 130, 96, is_causal=True, layout="rows_apart"),
        Case(130, 130, 128, is_causal=True, largest_score=1e4),  # masked scores whose exponentials are infinite
        Case(400, 400, 64, is_causal=True, largest_score=1e4),
        Case(130, 130, 128, leading=(2, 1, 2, 1), is_causal=True),
    ],
    ids=str,
)
def test_other_layouts_and_numbers_equal_the_truth(case: Case, launched: list[str]) -> None:
    check_case(flash_triton.flash_triton, case, torch.float16, "cpu")
    assert launched == ALL


@pytest.mark.parametrize(
    "needs, expected",
    [("q", ["dq_kernel"]), ("kv", ["dq_kernel", "dkv_kernel"]), ("v", ["dq_kernel", "dkv_kernel"])],
)
def test_unneeded_gradients_are_not_computed(needs: str, expected: list[str], launched: list[str]) -> None:
    case = Case(130, 200, 128, leading=(1, 3), is_causal=True, needs=needs)
    check_case(flash_triton.flash_triton, case, torch.bfloat16, "cpu")
    assert launched == ["forward_kernel", *expected]


@pytest.mark.parametrize("band", [dict(), dict(window=30), dict(documents=(40, 25))])
def test_a_recording_and_other_calls_share_no_launches(
    band: dict[str, Any], launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash_triton, "TMA_FROM_SCORES", 2**62)
    for is_recorded in (False, True, False):
        launched.clear()
        with recording.on() if is_recorded else contextlib.nullcontext():
            check_case(flash_triton.flash_triton, Case(65, 65, 64, is_causal=True, **band), torch.float16, "cpu")
        assert launched == (ALL if is_recorded else ["forward_kernel", "dq_kernel", "dkv_kernel"])


def check_same_bits(case: Case, times: int = 2) -> None:
    """Of dk, dv, and of the float32 sums of dq: rounded to 16 bits, most sums in other orders are the same."""
    q, k, v, dO = case.inputs(torch.bfloat16, "cpu")
    first: list[torch.Tensor] = []
    for _ in range(times):
        with pytest.MonkeyPatch.context() as patch:
            sums = flash_triton.new_sums(q.view(1, -1, *q.shape[-2:]))
            patch.setattr(flash_triton, "new_sums", lambda q, sums=sums: sums)
            o = flash_triton.flash_triton(q, k, v, case.is_causal, **case.mask("cpu"), deterministic=True)
            found = [sums, *gradients(o, [q, k, v], dO).values()]
        first = first or found
        assert all(torch.equal(x, y) for x, y in zip(first, found, strict=True))


@pytest.mark.parametrize(
    "case",
    [
        Case(130, 200, 64, leading=(1, 3), is_causal=True),
        Case(300, 300, 64, leading=(1, 2), is_causal=True),
        Case(300, 300, 128, leading=(), is_causal=True),
        Case(300, 400, 128, leading=()),
        Case(200, 300, 64, leading=(1, 4), key_heads=2, is_causal=True),
        Case(520, 520, 128, leading=(), is_causal=True, documents=(200, 100, 220), window=150),
    ],
    ids=str,
)
def test_a_deterministic_backward_pass_gives_the_same_bits(case: Case, launched: list[str]) -> None:
    deterministic = functools.partial(flash_triton.flash_triton, deterministic=True)
    check_case(deterministic, case, torch.bfloat16, "cpu")
    assert launched == ALL
    check_same_bits(case)


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("is_set", [False, True])
def test_pytorchs_flag_makes_the_backward_pass_deterministic(is_set: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ordered, launch = [], flash_triton.gluon_launch
    monkeypatch.setattr(flash_triton, "gluon_launch", lambda *args: ordered.append(args[4:]) or launch(*args))
    torch.use_deterministic_algorithms(is_set)
    try:
        check_case(flash_triton.flash_triton, Case(130, 130, 64), torch.bfloat16, "cpu")
    finally:
        torch.use_deterministic_algorithms(False)
    assert (True,) in ordered if is_set else (True,) not in ordered


FAULTS = {
    "no fence before the dS is read": (" fence_async_shared()\n        _tell(", " _tell("),
    "no fence before TMA reads dQ": ("    fence_async_shared()\n    if ORDERED", "    if ORDERED"),
    "dQ overwritten before TMA has read it": ("    tma.store_wait(0)\n    buffer.store(_", "    buffer.store(_"),
    "dS of the other group not waited for": ("    _wait_told(ds_ready, step, group, D_PAD)\n", ""),
    "keys overwritten by the next tile's": ("        mbarrier.wait(kv_empty.index(0), i & 1 ^ 1)\n", ""),
    "queries not waited for": ("        wait_ready(ready, step)\n", ""),
    "scores used before they are there": ("s = warpgroup_mma_wait(1, [s])", "s = warpgroup_mma_wait(2, [s])"),
}
FAULTS_BY_HEAD_SIZE = {
    64: {
        "dS overwritten before both groups have read it": ("        wait_empty(empty, step + 1)  #", "        #"),
        "queries overwritten too early": (
            "                    wait_empty(empty, step)\n",
            "                    pass\n",
        ),
        "a stage never released": ("        mbarrier.arrive(empty.index(stage))\n", ""),
    },
    128: {
        "dS overwritten before the other group has read it": ("[2 if D_PAD == 64 else 4, ", "[2, "),
        "queries overwritten too early": (
            "                    wait_released(_READ, step, _GROUPS)\n",
            " " * 20 + "pass\n",
        ),
        "a stage never released": ("        release(_READ, step, _GROUPS)\n", ""),
    },
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "d, fault",
    [
        pytest.param(d, fault, marks=[pytest.mark.slow] if d == 64 and fault in FAULTS else [])
        for d, of_head_size in FAULTS_BY_HEAD_SIZE.items()
        for fault in FAULTS | of_head_size
    ],
)
def test_the_interpreter_finds_missing_waits(d: int, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon_interpreter, "PATIENCE", 0.5)
    launch_in_gluon(monkeypatch, (FAULTS | FAULTS_BY_HEAD_SIZE[d])[fault])

    def check_with_lags() -> None:
        for lag in (0.002, 0.02, 0.1):  # a busy machine hides a fault from the shorter ones
            monkeypatch.setattr(gluon_interpreter, "LAG", lag)
            check_case(flash_triton.flash_triton, Case(450, 300, d, leading=()), torch.bfloat16, "cpu")

    with pytest.raises(AssertionError):
        check_with_lags()


OUT_OF_TURN = {
    "dQ added before its turn": ("        wait_for_count(ADDED + block, seen, turn)\n", "        pass\n"),
    "dQ counted before it is in memory": ("        wait_for_memory()\n    tma", "        pass\n    tma"),
    "the last dQ counted before it is in memory": ("wait_for_memory()\n                    barrier()", "barrier()"),
}


@pytest.mark.parametrize("fault", OUT_OF_TURN)
def test_sums_out_of_turn_give_other_bits(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon_interpreter, "DELAY", 0.4)
    monkeypatch.setattr(flash_triton, "_num_multiprocessors", lambda x: 4)
    launch_in_gluon(monkeypatch, OUT_OF_TURN[fault])
    with pytest.raises(AssertionError):
        check_same_bits(Case(700, 700, 128, leading=(), is_causal=True, window=300), times=40)


def test_keys_stay_in_registers_with_triton_3_6(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's functions have the names of Triton 3.9."""
    launched = launch_in_gluon(monkeypatch, ('gl.constexpr(hasattr(tma, "async_load"))\n', "False\n"))
    check_case(flash_triton.flash_triton, Case(300, 300, 64, leading=(1, 2), is_causal=True), torch.bfloat16, "cpu")
    assert launched == ALL


@pytest.mark.usefixtures("launched")
def test_keys_whose_scores_are_minus_infinity_weigh_nothing() -> None:
    """Even if the last tiles, which come first, have no other keys."""
    q, k, v, _ = (x.detach() for x in Case(130, 300, 128, leading=(1, 3)).inputs(torch.bfloat16, "cpu"))
    q[:], k[..., 120:, :] = q.abs(), -math.inf
    o, logsumexp = flash_triton.flash_forward(q, k, v, False)
    expected, expected_logsumexp = flash_triton.flash_forward(q, k[..., :120, :], v[..., :120, :], False)
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(logsumexp, expected_logsumexp)


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("is_causal", [False, True])
def test_keys_beyond_the_last_weigh_nothing(is_causal: bool) -> None:
    """Even if their score, 0, is so far above all others that its exponential is infinite."""
    q, k, v, dO = (x.detach() for x in Case(300, 130, 64, leading=(1,)).inputs(torch.bfloat16, "cpu"))
    inputs = [x.requires_grad_() for x in (30 * q.abs(), -30 * k.abs(), v)]
    found = gradients(flash_triton.flash_triton(*inputs, is_causal), inputs, dO)
    assert all(x.isfinite().all() for x in found.values())


@pytest.mark.parametrize(
    "case",
    [
        Case(200, 150, 64, leading=(2, 2), key_heads=1, is_causal=True),  # the last keys are seen by no query
        Case(65, 300, 128, leading=(1, 6), key_heads=2, is_causal=True, layout="heads_inside"),
        Case(300, 130, 80, leading=(3,), key_heads=1),
        Case(130, 65, 128, leading=(4,), key_heads=2, is_causal=True, needs="kv"),
    ],
    ids=str,
)
def test_groups_equal_the_truth(case: Case, launched: list[str]) -> None:
    check_case(flash_triton.flash_triton, case, torch.bfloat16, "cpu")
    assert launched == (ALL if case.needs == "qkv" else ["forward_kernel", "dq_kernel", "dkv_kernel"])


@pytest.mark.parametrize(
    "case",
    [
        Case(300, 300, 64, leading=(1,), is_causal=True, window=100),
        Case(300, 300, 128, leading=(1, 2), is_causal=True, window=150),
        Case(400, 400, 64, leading=(2, 2), key_heads=1, is_causal=True, documents=(100, 130, 1, 169)),
        Case(400, 400, 128, leading=(2, 1), is_causal=True, documents=(200, 1, 199), window=140),
    ],
    ids=str,
)
def test_windows_and_documents_equal_the_truth(case: Case, launched: list[str]) -> None:
    check_case(flash_triton.flash_triton, case, torch.bfloat16, "cpu")
    assert launched == ALL


@pytest.mark.parametrize("d", [64, 128])
def test_hidden_tiles_are_skipped(d: int, launched: list[str]) -> None:
    check_hidden_tiles_are_skipped(flash_triton.flash_triton, torch.bfloat16, d)
    assert launched == ALL * 4


BETWEEN_HEADS = {
    "zeros over the dS before the last one": "                wait_empty(empty, start + 1)\n",
    "dS over the last one of the head before": "                wait_ready(ds_ready, start + passes)\n",
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("fault", BETWEEN_HEADS)
def test_the_interpreter_finds_missing_waits_between_heads(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon_interpreter, "PATIENCE", 0.5)
    monkeypatch.setattr(gluon_interpreter, "LAG", 0.02)
    launch_in_gluon(monkeypatch, (BETWEEN_HEADS[fault], "                pass\n"))
    with pytest.raises(AssertionError):
        check_case(flash_triton.flash_triton, Case(130, 130, 64, leading=(4,), key_heads=1), torch.bfloat16, "cpu")


def test_the_interpreter_finds_a_second_arrival_before_the_first_has_been_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """At one of four named barriers, for the first and the last of five heads whose queries see none of the keys."""
    monkeypatch.setattr(gluon_interpreter, "PATIENCE", 0.5)
    launch_in_gluon(monkeypatch, ("if D_PAD == 64 or end > first:", "if True:"))
    case = Case(64, 200, 128, leading=(5,), key_heads=1, is_causal=True)
    with pytest.raises(AssertionError, match="the same warps arrived twice"):
        check_case(flash_triton.flash_triton, case, torch.bfloat16, "cpu")


KEYS_READ = "            release(_K_READ, step + 1, GROUPS)\n"
FORWARD = {
    "keys not waited for": ("    wait_ready(k_ready, step)\n    k =", "    k ="),
    "values not waited for": ("    wait_ready(v_ready, step)\n    return", "    return"),
    "queries overwritten by the next tile's": ("            mbarrier.wait(q_empty.index(group), i & 1 ^ 1)\n", ""),
    "o overwritten before TMA has read it": ("        tma.store_wait(0)  # the tile before has left the buffer\n", ""),
    "keys of other warpgroups never released": ("        release(_K_READ, step, GROUPS)\n        wait", "        wait"),
    "values of other warpgroups never released": ("        release(_V_READ, step, GROUPS)\n\n", "\n"),
    "keys and values overwritten too early": ("    wait_released(read, step, GROUPS)\n", ""),
    "the turn never passed on": ("            arrive(_TURN + 1 - group, 256)\n", "            pass\n"),
    "keys released before they are read, with turns": (
        f"        s = warpgroup_mma_wait(1, [scores])\n        if TURNS:\n{KEYS_READ}",
        f"        if TURNS:\n{KEYS_READ}        s = warpgroup_mma_wait(1, [scores])\n        if TURNS:\n",
    ),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("fault", FORWARD)
def test_the_interpreter_finds_faults_of_the_forward_pass(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon_interpreter, "PATIENCE", 0.5)
    monkeypatch.setattr(gluon_interpreter, "LAG", 0.002)
    monkeypatch.setattr(gluon_interpreter, "LATENCY", 0.02)
    launch_in_gluon(monkeypatch, FORWARD[fault])
    d = 128 if "turn" in fault else 64
    q, k, v, _ = (x.detach() for x in Case(450, 450, d, leading=(1, 2)).inputs(torch.bfloat16, "cpu"))
    expected, _ = attention_with_logsumexp(q.double(), k.double(), v.double(), True)
    if "not waited for" in fault:
        monkeypatch.setattr(gluon_interpreter, "LATE", (k if "keys" in fault else v).data_ptr())

    def check() -> None:
        o, _ = flash_triton.flash_forward(q, k, v, True)
        torch.testing.assert_close(o.double(), expected, rtol=2e-2, atol=2e-2)

    with pytest.raises(AssertionError):
        check()
