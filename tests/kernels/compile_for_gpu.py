"""Compiles the kernels of `flash_triton`, and the one in Gluon, for GPUs that need not be there.

Run by `test_triton_compiles.py`.
"""

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cs336_systems.kernels.attention import flash_gluon_kernels, flash_triton
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


class Hopper:
    """As much of a driver as a launch needs that is only compiled."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def compile_gluon() -> None:
    triton.runtime.driver.set_active(Hopper())
    flash_triton._heads_together = lambda walked: 8  # asks the device
    for d, dtype, is_causal in ((128, torch.bfloat16, True), (80, torch.float16, False)):
        q, k = torch.zeros(2, 3, 100, d, dtype=dtype), torch.zeros(2, 3, 333, d, dtype=dtype)
        launch = flash_triton.gluon_forward_launch(q, k, k, q, is_causal)
        arguments = launch.arguments(q, k, k, q, torch.zeros(2, 3, 100))
        compiled = flash_gluon_kernels.forward_kernel.warmup(*arguments, grid=(6,), **launch.options)
        assert "setmaxnreg.dec" in compiled.asm["ptx"]
        # In every walk: when the scores have come, all exponentials are taken before the product that goes on meanwhile
        # is waited for. A thread has 128 / 2 of them, and one for each of two rows. (Triton 3.6 shows the first 64 KB.)
        after_the_scores = compiled.asm["sass"].split("DEPBAR.LE gsb0, 0x1")[1:]
        beside = [part.split("DEPBAR.LE gsb0, 0x0")[0] for part in after_the_scores if "DEPBAR.LE gsb0, 0x0" in part]
        assert len(beside) >= 2, (d, dtype)
        assert {part.count("MUFU.EX2") for part in beside} == {66}, (d, dtype)
        print("gluon", d, dtype, "compiled")


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
