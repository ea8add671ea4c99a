"""The Triton kernels compile for GPUs that are not there, as `flash_triton` launches them, with the Triton at hand.

Their names in Triton's cache are checked in the same process, because an interpreter takes seconds to start.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is only there on Linux")


@pytest.mark.parametrize("options, kernels", [([], 8), pytest.param(["--all"], 45, marks=pytest.mark.slow)])
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
