"""docs/hopper.md shows lines of the sources and machine code: both have to be as they are."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cs336_systems.kernels.attention import flash_cuda_hopper

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/hopper.md").read_text()


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", GUIDE, re.M | re.S)


def test_its_lines_are_in_the_sources() -> None:
    sources = {line.strip() for path in flash_cuda_hopper.SOURCES.iterdir() for line in path.read_text().splitlines()}
    shown = [line.strip() for block in blocks("cpp") for line in block.splitlines()]
    assert shown
    assert set(shown) <= sources


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on PATH")
def test_its_commands_print_its_listing(tmp_path: Path) -> None:
    triton = pytest.importorskip("triton")
    release = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    if "release 13.0" not in release:
        pytest.skip("the listing is by CUDA 13.0")
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    environment = {**os.environ, "PATH": f"{os.environ['PATH']}{os.pathsep}{tools}"}
    (tmp_path / "cs336_systems").symlink_to(ROOT / "cs336_systems")
    command = ["bash", "-e", "-o", "pipefail", "-c", blocks("bash")[0]]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    listing = [line.partition("//")[0].rstrip() for line in blocks("text")[-1].splitlines()]
    assert "\n".join(listing) in done.stdout
