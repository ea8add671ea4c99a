"""Compiles the Triton and Gluon kernels of `flash_triton`, `adamw` and `muon` without a GPU.

Run by `test_triton_compiles.py`.
"""

import multiprocessing
import re
import subprocess
import sys
import tempfile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cs336_basics.attention import Documents
from cs336_systems.kernels import adamw, muon
from cs336_systems.kernels.attention import flash_triton
from cs336_systems.kernels.attention import flash_triton_kernels as kernels
from cs336_systems.kernels.attention.contract import band_of
from cs336_systems.kernels.attention.flash_triton_tiles import Tile, tile_key, tile_table
from cs336_systems.kernels.launch import Launch
from tests.kernels.machine_code import unset_registers

WAYS = (
    (80, 64, torch.bfloat16, "pointers"),
    (90, 128, torch.bfloat16, "descriptors"),
    (90, 64, torch.bfloat16, "far pointers"),
    (80, 16, torch.float32, "pointers"),
    (80, 128, torch.float32, "pointers"),
)
"""Compute capability, head size, dtype, how tiles are moved."""

PHASES = ["forward", "dq", "dkv", "backward"]


def source(
    kernel: Any, phase: str, d: int, dtype: torch.dtype, move: str, tile: Tile, G: int = 1, band: str = "none"
) -> ASTSource:
    element = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    rows = {"q_": tile.BM, "o_": tile.BM, "do_": tile.BM, "dq_": tile.BM}
    tma, precision = move == "descriptors", flash_triton._precision(torch.empty(0, dtype=dtype))
    values = dict(
        tile._asdict(), D=d, D_PAD=d, G=G, CAUSAL=True, BAND=band, MOVE=move, PRECISION=precision, NEED_DQ=True
    )
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    divisible = [["tt.divisibility", 16]]
    for i, name in enumerate(kernel.arg_names):
        if name.endswith("_strides"):
            signature[name], constants[i, 3] = ("i32", "i32", "i32", "constexpr"), 1
            attributes.update({(i, j): divisible for j in range(3)})
        elif name == "VECTORS" and tma and phase == "dkv":
            signature[name] = f"tensordesc<fp32[1, {tile.BM}]>"
        elif name.startswith("DOCUMENT"):
            signature[name], attributes[i,] = "*i32", divisible
        elif name in ("L", "VECTORS"):
            signature[name], attributes[i,] = "*fp32", divisible
        elif name.endswith("_") and tma:
            signature[name] = f"tensordesc<{element}[1, 1, {rows.get(name, tile.BN)}, {d}]>"
        elif name.endswith("_"):
            signature[name], attributes[i,] = f"*{element}", divisible
        elif name == "scale":
            signature[name] = "fp32"
        elif name in ("H", "N_q", "N_k", "WINDOW", "HEADS"):
            signature[name] = "i32"
        else:
            signature[name], constants[i,] = "constexpr", values[name]
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)


class Hopper:
    """A driver for launches that are only compiled."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


EXPONENTIAL, WAIT_FOR_PRODUCTS = "MUFU.EX2", "DEPBAR.LE gsb0, "
TURN = re.compile(r"BAR\.SYNC\S* 0x([ab]), 0x100 ;(.*?)BAR\.ARV 0x([ab]), 0x100 ;", re.DOTALL)
"""From the wait for a turn to where it is passed on."""
SPILLED, SPILLED_ELSEWHERE = 33, 2
"""The most loads and stores of spilled registers in a loop, with documents or in order, and elsewhere: Triton 3.9."""
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}
"""A program's limit, by compute capability. The tiles were measured on Hopper, and must fit an A100 too."""


def dumped(cubin: bytes, what: str, tool: Any = triton.knobs.nvidia.cuobjdump) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool.path, what, file.name], capture_output=True, text=True, check=True).stdout


def listed(cubin: bytes) -> str:
    """The machine code with labels."""
    return dumped(cubin, "-c", triton.knobs.nvidia.nvdisasm)


def spilled(cubin: bytes) -> int:
    """The bytes of a thread that did not fit into its registers."""
    said = dumped(cubin, "--dump-resource-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return int(found[2])


def spilled_in_loops(cubin: bytes) -> list[int]:
    """How many loads and stores of spilled registers each inner loop with products has.

    A loop ends with a conditional branch backwards. (Those without a condition return from waiting for a barrier.)
    """
    code = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/ +(.+?) *;", dumped(cubin, "-sass"))]
    branches = [(re.fullmatch(r"@!?U?P\d BRA.*(0x\w+)", text), at) for at, text in code]
    ends = [(int(branch[1], 16), at) for branch, at in branches if branch and int(branch[1], 16) < at]
    loops = {(first, last): [text for at, text in code if first <= at <= last] for first, last in ends}
    loops = {ends: body for ends, body in loops.items() if any("HGMMA" in text for text in body)}
    inner = [x for x in loops if not any(x != y and x[0] <= y[0] and y[1] <= x[1] for y in loops)]
    return [sum(bool(re.search(r"\b(STL|LDL)\b", text)) for text in loops[x]) for x in inner]


def exponentials(sass: str, products_left: int) -> list[int]:
    """The number of exponentials between each wait that leaves so many products running and the next wait.

    Triton 3.6 shows the first 64 KB, where the last part may be cut off.
    """
    parts = sass.split(WAIT_FOR_PRODUCTS)[1:]
    assert parts
    return [part.count(EXPONENTIAL) for part in parts[:-1] if part.startswith(f"0x{products_left}")]


def compile_gluon() -> None:
    triton.runtime.driver.set_active(Hopper())
    flash_triton._heads_together = lambda tiled, looped_over, parts: 8  # asks the device, as does the next one
    flash_triton._num_multiprocessors = lambda x: 132
    documents = Documents.from_numbers(torch.zeros(2, 333))
    for d, dtype, is_causal, key_heads, band in (
        (64, torch.bfloat16, True, 3, None),
        (128, torch.bfloat16, True, 3, None),
        (80, torch.float16, False, 1, None),
        (64, torch.bfloat16, False, 3, None),
        (64, torch.bfloat16, True, 1, band_of(None, documents)),
        (128, torch.bfloat16, True, 3, band_of(100, documents)),
    ):
        q = torch.zeros(2, 3, 100 if band is None else 333, d, dtype=dtype)
        k = torch.zeros(2, key_heads, 333, d, dtype=dtype)
        x = dict(q_=q, k_=k, v_=k, o_=q, do_=q, dq_=q, dk_=k, dv_=k)
        more = dict(L=torch.zeros(q.shape[:-1]), COUNTER=torch.zeros(1, dtype=torch.int32))
        flash_triton._add_documents(more, band)
        more |= dict(INITIAL=flash_triton.new_vectors(q), DQ=flash_triton.new_sums(q))
        for phase in ("forward", "prepare", "gradients", "gradients in order", "finish"):
            launch = flash_triton.gluon_launch(phase.split()[0], x, is_causal, band, is_ordered=" " in phase)
            compiled = launch._kernel.warmup(*launch.arguments(x | more), grid=(6,), **launch.options)
            case = phase, d, dtype, flash_triton._kind(band)
            if phase not in ("prepare", "finish"):
                assert "setmaxnreg.dec" in compiled.asm["ptx"], case
                assert compiled.metadata.shared <= SHARED_MEMORY[90], case
                spills = spilled_in_loops(compiled.asm["cubin"])
                assert len(spills) >= 2, case  # every warpgroup that computes has such loops
                most = SPILLED_ELSEWHERE if band is None and " " not in phase else SPILLED
                assert max(spills) <= most, (case, spills)
                unset = unset_registers(listed(compiled.asm["cubin"]))
                assert not unset, (case, unset)
                sass = compiled.asm["sass"]
                assert sass.count(WAIT_FOR_PRODUCTS) < sass.count("HGMMA") / 4, case  # no product is waited for alone
            if phase == "forward" and flash_triton.padded_head_size(d) == 128 and band is None:
                # In its turn, a warpgroup starts two products, of 8 instructions each, and waits for neither.
                turns = TURN.findall(listed(compiled.asm["cubin"]))
                assert sorted((taken, passed) for taken, _, passed in turns) == [("a", "b"), ("b", "a")], case
                started = [(code.count("HGMMA"), code.count(WAIT_FOR_PRODUCTS)) for _, code, _ in turns]
                assert started == [(16, 0), (16, 0)], (case, started)
            elif phase == "forward":
                # Every inner loop computes the exponentials while another product runs. A thread has a 128th of the
                # tile: 64, and one for each of two rows.
                beside = [count for count in exponentials(sass, products_left=1) if count]
                assert set(beside) == {66}, (case, beside)
                assert len(beside) >= 2, case
            print("gluon", *case, "compiled")


def compile_adamw_and_muon(everything: bool) -> None:
    triton.runtime.driver.set_active(Hopper())
    scalar, wide = torch.zeros(()), torch.zeros(64, 64)
    cases = [("square_sum", torch.float16), *((name, torch.bfloat16) for name in ("adamw", "directions", "move"))]
    cases += [(name, torch.float32) for name, _ in cases[1:]] if everything else []
    for name, dtype in cases:
        gradient = torch.zeros(64, 64, dtype=dtype)
        kernel, state, rest = {
            "square_sum": (adamw._square_sum_kernel, [], [scalar]),
            "adamw": (adamw._adamw_kernel, [scalar, wide, wide, wide, gradient], [scalar, scalar.double(), *[0.5] * 8]),
            "directions": (muon._directions_kernel, [wide], [scalar, wide.bfloat16(), 0.5, 0.5]),
            "move": (muon._move_kernel, [wide, gradient], [scalar, scalar.double(), 0.5, 0.5]),
        }[name]
        table = adamw._Table([gradient], [state], [0], aligned=dtype != torch.float32)
        compiled = kernel.warmup(table.addresses, table.blocks, 1, *rest, grid=(1,), num_warps=8, **table.constants)
        assert spilled(compiled.asm["cubin"]) == 0, (name, dtype)
        # Of 16-bit gradients, of 16-bit halves of weights, of float32 moments.
        four_at_once = {"square_sum": "LDG.E.64", "move": "STG.E.64"}.get(name, "LDG.E.128")
        assert (four_at_once in compiled.asm["sass"]) == (dtype != torch.float32), (name, dtype)
        assert ("STS" in compiled.asm["sass"]) == (name == "square_sum"), (name, dtype)  # no layout is converted
        print(name, dtype, "compiled")


def names_in_the_cache(phases: list[str]) -> dict[str, str]:
    """The names of kernels in Triton's cache by their phase, where the first of them is launched first."""
    first, *others = (getattr(kernels, f"{phase}_kernel") for phase in phases)
    Launch(first, 1, dict.fromkeys(name for name in first.arg_names if name not in ("q_", "k_", "v_")), {}, 4, 1)
    assert all(each.hash is not None for each in others)
    return {phase: each.cache_key for phase, each in zip(phases, (first, *others), strict=True)}


def check_names() -> None:
    """A name does not depend on which kernel was first. In Triton 3.6 it would.

    Two kernels compile at once, so a cached kernel was sometimes compiled again.
    """
    fork = multiprocessing.get_context("fork")  # each order in a process where nothing has been first yet
    one, other = (fork.Pool(1).apply(names_in_the_cache, (order,)) for order in (PHASES, PHASES[::-1]))
    assert one == other


def main(everything: bool) -> None:
    check_names()
    compile_adamw_and_muon(everything)
    for phase in PHASES:
        kernel = getattr(kernels, f"{phase}_kernel")
        for capability, d, dtype, move in WAYS:
            tma = move == "descriptors"
            if (phase == "backward" and tma) or (phase != "forward" and dtype == torch.float32):
                continue  # there is no such kernel; in float32 all phases have the same product
            usual = "descriptors" if phase in ("forward", "dkv") else "pointers"
            if not everything and (move != usual or dtype == torch.float32):
                continue  # two ways are enough, with descriptors and without
            tile = tile_table()[tile_key(phase, d, dtype, tma)]
            compiled = triton.compile(
                source(kernel, phase, d, dtype, move, tile),
                target=GPUTarget("cuda", capability, 32),
                options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
            )
            assert compiled.metadata.shared <= SHARED_MEMORY[capability], (phase, capability, d, dtype)
            product = {80: "mma.sync", 90: "wgmma.mma_async"}[capability]
            assert product in compiled.asm["ptx"], (phase, capability, dtype)
            assert ".bf16.bf16" in compiled.asm["ptx"], (phase, capability, dtype)  # float32 products consist of them
            assert ("cp.async.bulk.tensor" in compiled.asm["ptx"]) == tma, (phase, capability, dtype)
            assert not unset_registers(listed(compiled.asm["cubin"])), (phase, capability, d, dtype)
            print(phase, capability, d, dtype, move, "compiled")
    if everything:
        compile_gluon()


if __name__ == "__main__":
    main(everything="--all" in sys.argv)
