"""Compiles the kernels of `flash_triton`, and the one in Gluon, for GPUs that need not be there.

Run by `test_triton_compiles.py`.
"""

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

from cs336_systems.kernels.attention import flash_gluon_kernels
from cs336_systems.kernels.attention import flash_triton_kernels as kernels
from cs336_systems.kernels.attention.flash_triton import Tile, tile_key, tile_table

WAYS = ((80, 64, torch.bfloat16, False), (90, 128, torch.bfloat16, True), (80, 16, torch.float32, False))
"""Compute capability, head size, dtype, whether by descriptors."""


def source(kernel: Any, phase: str, d: int, dtype: torch.dtype, tma: bool, tile: Tile) -> ASTSource:
    element = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    rows = {"q_": tile.BM, "o_": tile.BM, "do_": tile.BM, "dq_": tile.BM}
    values = dict(tile._asdict(), D=d, D_PAD=d, CAUSAL=True, TMA=tma, PRECISION="ieee", NEED_DQ=True)
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
        elif name in ("L", "VECTORS"):
            signature[name], attributes[i,] = "*fp32", divisible
        elif name.endswith("_") and tma:
            signature[name] = f"tensordesc<{element}[1, 1, {rows.get(name, tile.BN)}, {d}]>"
        elif name.endswith("_"):
            signature[name], attributes[i,] = f"*{element}", divisible
        elif name == "scale":
            signature[name] = "fp32"
        elif name in ("H", "N_q", "N_k", "GROUP"):
            signature[name] = "i32"
        else:
            signature[name], constants[i,] = "constexpr", values[name]
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)


def gluon_source(d: int) -> ASTSource:
    kernel = flash_gluon_kernels.forward_kernel
    rows = {"q_desc": flash_gluon_kernels.ROWS, "k_desc": 128, "v_desc": 128, "o_desc": flash_gluon_kernels.ROWS}
    values = dict(BN=128, D=d, GROUPS=2, STAGES=2, CAUSAL=True, PING_PONG=True)
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    for i, name in enumerate(kernel.arg_names):
        if name in rows:
            signature[name] = f"tensordesc<bf16[1, 1, {rows[name]}, {d}],{layout!r}>"
        elif name in values:
            signature[name], constants[i,] = "constexpr", values[name]
        else:
            signature[name] = {"L": "*fp32", "scale": "fp32"}.get(name, "i32")
    return GluonASTSource(fn=kernel, signature=signature, constexprs=constants)


def compile_gluon() -> None:
    for d in (64, 128):
        compiled = triton.compile(
            gluon_source(d), target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "maxnreg": 168}
        )
        assert "setmaxnreg.dec" in compiled.asm["ptx"]
        # In two walks of two warpgroups: when the scores have come, all exponentials are taken before it is waited for
        # the product that goes on meanwhile. A thread has 128 / 2 of them and one for each of its two rows.
        beside = [after.split("DEPBAR.LE gsb0, 0x0")[0] for after in compiled.asm["sass"].split("DEPBAR.LE gsb0, 0x1")]
        assert [part.count("MUFU.EX2") for part in beside[1:]] == [66] * 4, d
        print("gluon", d, "compiled")


def main(everything: bool) -> None:
    for phase in ("forward", "dq", "dkv", "backward"):
        kernel = getattr(kernels, f"{phase}_kernel")
        for capability, d, dtype, tma in WAYS:
            if (phase == "backward" and tma) or (phase != "forward" and capability == 80 and d == 16):
                continue  # there is none; in float32 the forward pass will do: all have the same product
            if not everything and tma != (phase in ("forward", "dkv")):
                continue  # these have what the others do, with descriptors and without
            tile = tile_table()[tile_key(phase, d, dtype, tma)]
            compiled = triton.compile(
                source(kernel, phase, d, dtype, tma, tile),
                target=GPUTarget("cuda", capability, 32),
                options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
            )
            product = {80: "mma.sync", 90: "wgmma.mma_async"}[capability] if dtype == torch.bfloat16 else "fma.rn.f32"
            assert product in compiled.asm["ptx"], (phase, capability, dtype)
            assert ("cp.async.bulk.tensor" in compiled.asm["ptx"]) == tma, (phase, capability, dtype)
            print(phase, capability, d, dtype, "compiled")
    if everything:
        compile_gluon()


if __name__ == "__main__":
    main(everything="--all" in sys.argv)
