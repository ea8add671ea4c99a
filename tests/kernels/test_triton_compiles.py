"""The Triton kernels compile for GPUs that are not there, as `flash_triton` launches them, with the Triton at hand.

Their names in Triton's cache are checked in the same process, because an interpreter takes seconds to start.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.machine_code import unset_registers

pytest.importorskip("triton", reason="Triton is only there on Linux")


@pytest.mark.parametrize("options, kernels", [([], 8), pytest.param(["--all"], 50, marks=pytest.mark.slow)])
def test_every_kernel_compiles_to_the_instructions_it_is_written_for(
    options: list[str], kernels: int, tmp_path: Path
) -> None:
    # In a process of its own: this one may have Triton's interpreter instead of its compiler.
    environ = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.kernels.compile_for_gpu", *options]
    root = Path(__file__).parents[2]
    ran = subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.count("compiled") == kernels


@pytest.mark.parametrize(
    "skip, sets, reads, is_named",
    [
        ("@P0 BRA `(.L_x_1)", "UMOV UR8, UR4", "UMOV UR5, UR8", True),
        ("NOP", "UMOV UR8, UR4", "UMOV UR5, UR8", False),
        ("BRA UP0, `(.L_x_1)", "UMOV UR8, UR4", "UMOV UR5, UR8", True),
        ("BRA.U.ANY `(.L_x_1)", "UMOV UR8, UR4", "UMOV UR5, UR8", True),
        ("NOP", "UMOV UR8, UR4", "UMOV UR5, UR9", True),
        ("NOP", "UIADD3.64 UR8, UR4, 0x2, URZ", "UMOV UR5, UR9", False),
        ("@P0 BRA `(.L_x_1)", "UMOV UR7, UR4", "HGMMA.64x64x16.F32 R24, gdesc[UR4], R24", True),
        ("@P0 BRA `(.L_x_1)", "UMOV UR7, UR4", "HGMMA.64x64x16.F32 R24, R56, gdesc[UR4], R24", True),
        ("@P0 BRA `(.L_x_1)", "UMOV UR3, UR4", "HGMMA.64x64x16.F32 R24, R56, gdesc[UR2], R24", False),
    ],
)
def test_a_register_that_a_skipped_loop_would_have_set_is_named(
    skip: str, sets: str, reads: str, is_named: bool
) -> None:
    """Also if it is the second half of a descriptor, and in the second kernel of a listing."""
    before = ("UMOV UR4, 0x400", "UMOV UR5, URZ", "UMOV UR6, URZ")
    kernel = (".section .text.name", *before, skip, sets, ".L_x_0:", "@P1 BRA `(.L_x_0)", ".L_x_1:", reads, "EXIT")
    healthy = (".section .text.other", *before, "EXIT")
    listing = "\n".join(x if x[0] == "." else f"        /*0000*/    {x} ;" for x in (*healthy, *kernel))
    assert unset_registers(listing) == ([reads] if is_named else [])
