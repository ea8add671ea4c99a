"""The guides run from top to bottom: every block of commands or Python, in quick form, on a CPU, in an empty folder.

A comment before a block says how it is tested:

    <!-- needs a GPU -->, <!-- takes minutes -->    its commands are only parsed, bench and train with their options
    <!-- quick: OPTIONS -->                         its commands get these options too, which make them tiny
    <!-- FILE.py -->                                the block becomes this file, which later blocks use

Commands of `cs336` and `torchrun`, their ranks and programs are forked, which saves seconds for each.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from cs336_systems.bench.cases import NAMES
from cs336_systems.cli.train import parse_run_config
from tests import forked
from tests.assignment.test_build import GPUS, configurations_of

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
GUIDES = ("train", "measure", "parallel", "kernels")
PARSED = ("needs a GPU", "takes minutes")
BLOCK = re.compile(r"^(?:<!-- (?P<note>[^\n]*) -->\n\n)?^```(?P<kind>\w+)\n(?P<code>.*?)^```$", re.M | re.S)
COMMANDS = {"cs336": "cs336_systems", "torchrun": "torch.distributed.run"}  # and the modules that they run
LONGEST_S = 60
each_guide = pytest.mark.parametrize("guide", GUIDES)


class Block(NamedTuple):
    """A block of code, with the line of its guide on which the code begins."""

    line: int
    note: str
    kind: str
    code: str


def text_of(guide: str) -> str:
    return (ROOT / "docs" / f"{guide}.md").read_text()


def blocks_of(text: str) -> list[Block]:
    found = BLOCK.finditer(text)
    return [Block(text[: m.start("code")].count("\n") + 1, m["note"] or "", m["kind"], m["code"]) for m in found]


def commands_of(block: Block) -> list[tuple[int, list[str]]]:
    """Each command of a block with its line, in words."""
    lines, found, first, command = block.code.splitlines(), [], block.line, ""
    for number, line in enumerate(lines, block.line):
        first = first if command else number
        command += line.removesuffix("\\")
        if not line.endswith("\\"):
            if words := shlex.split(command, comments=True):
                found.append((first, words))
            command = ""
    return found


def run_words(words: Sequence[str], folder: Path) -> str | None:
    """Run a command. Returns its output if it fails."""
    environ = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    if words[0] in COMMANDS:
        words = [sys.executable, "-m", COMMANDS[words[0]], *words[1:]]
    start = forked.Popen if words[0] == sys.executable else subprocess.Popen
    pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with start(words, cwd=folder, env=environ, **pipes) as process:
        try:
            output = process.communicate(timeout=LONGEST_S)[0]
        finally:
            process.kill()
    return output if process.returncode else None


def run_guide(text: str, folder: Path, name: str) -> None:
    """Run all blocks of a guide. Fails with guide, line and output at the first that fails."""
    for block in blocks_of(text):
        if block.note in PARSED:
            continue
        if block.kind == "python":
            file = folder / (block.note or "block.py")
            file.write_text(block.code)
            commands = [] if block.note else [(block.line, [sys.executable, file.name])]
        else:
            quick = shlex.split(block.note.removeprefix("quick: "))
            commands = [(line, [*words, *quick]) for line, words in commands_of(block)]
        for line, words in commands:
            if (output := run_words(words, folder)) is not None:
                pytest.fail(f"{name}:{line}: {shlex.join(words)}\n{output}", pytrace=False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with the repository's configurations and rows."""
    for name in ("configs", "results"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # or each process compiles PyTorch's modules again
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # a guide says itself when to set it
    return tmp_path


@pytest.mark.usefixtures("unrendered")
@each_guide
def test_a_guide_runs_from_top_to_bottom(guide: str, folder: Path) -> None:
    run_guide(text_of(guide), folder, f"docs/{guide}.md")


@each_guide
def test_every_block_of_a_guide_is_run_or_says_why_not(guide: str) -> None:
    text = text_of(guide)
    blocks = blocks_of(text)
    assert text.count("\n```") == 2 * len(blocks)
    for block in blocks:
        assert block.kind in ("bash", "python")
        known = [*PARSED, ""] if block.kind == "bash" else [""]
        is_named = re.fullmatch(r"quick: --.*" if block.kind == "bash" else r"\w+\.py", block.note)
        assert block.note in known or is_named, f"docs/{guide}.md:{block.line}: {block.note}"
        if block.kind == "bash":
            subprocess.run(["bash", "-n"], input=block.code, text=True, check=True)
    assert len(re.findall(r"^<!-- (.*) -->$", text, re.M)) == sum(bool(b.note) for b in blocks)


@each_guide
def test_commands_for_a_gpu_have_valid_options(guide: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for name, value in GPUS.items():
        monkeypatch.setattr(torch.cuda, name, value)
    blocks = [block for block in blocks_of(text_of(guide)) if block.note == "needs a GPU"]
    for _, words in (command for block in blocks for command in commands_of(block)):
        if words[:2] == ["cs336", "bench"]:
            assert configurations_of(shlex.join(words))[1]
        elif "train" in words:
            parse_run_config(words[words.index("train") + 1 :])


@pytest.mark.parametrize(
    ("block", "line", "message"),
    [
        ("```bash\nls .\ncs336 bench nothing\n```\n", 4, "cs336 bench nothing\n.*it must be one of model"),
        ("```python\nimport sys\n\nsys.exit('wrong')\n```\n", 3, ".*block.py\nwrong"),
        ("```bash\nls . \\\n  nowhere\n```\n", 3, "ls . nowhere\n(.*\n)*ls: .*nowhere"),
    ],
)
def test_a_block_that_fails_is_named_with_its_line(block: str, line: int, message: str, folder: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match=rf"^guide\.md:{line}: {message}"):
        run_guide(f"# Title\n{block}", folder, "guide.md")


def test_the_guide_to_measuring_lists_every_case() -> None:
    assert sorted(re.findall(r"^\| `([a-z0-9-]+)` \| ", text_of("measure"), re.M)) == sorted(NAMES)
