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


@pytest.mark.parametrize("is_skipped", [True, False])
def test_a_register_that_a_skipped_loop_would_have_set_is_named(is_skipped: bool) -> None:
    skip = "@P0 BRA `(.L_x_1)" if is_skipped else "NOP"
    loop = (
        skip,
        "UIADD3 UR8, UR4, 0x2, URZ",
        ".L_x_0:",
        "HGMMA.64x64x16.F32 R24, gdesc[UR8], R24",
        "@P1 BRA `(.L_x_0)",
    )
    lines = ("UMOV UR4, 0x400", *loop, ".L_x_1:", "UMOV UR5, UR8", "EXIT")
    listing = "\n".join(line if line.endswith(":") else f"        /*0000*/    {line} ;" for line in lines)
    assert unset_registers(listing) == (["UMOV UR5, UR8"] if is_skipped else [])
