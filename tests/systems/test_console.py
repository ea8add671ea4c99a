"""Any text can be printed to any stdout: a character that its encoding lacks becomes "?"."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked

PROMPT = "日本 — é"
ENCODINGS = {"latin-1": "?? ? é", "ascii": "?? ? ?", "utf-8": PROMPT}
# An ASCII locale, also for files, which Python would otherwise replace by UTF-8.
ASCII_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def run_python(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python; decode its output. A locale needs an interpreter that starts in it."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHONIO")}
    start = subprocess.Popen if "LC_ALL" in environment else forked.Popen
    encoding = environment.get("PYTHONIOENCODING", "ascii")
    how = dict(cwd=folder, env=inherited | environment, encoding=encoding)
    return forked.run([sys.executable, *arguments], 300, start, **how)


def cs336(folder: Path, *arguments: str, **environment: str) -> str:
    """Run the command, which must succeed; return its decoded output."""
    done = run_python(folder, "-m", "cs336_systems", *arguments, **environment)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run with a non-ASCII sample, trained in an ASCII locale: its parent folder, and the printed output."""
    folder = tmp_path_factory.mktemp("ascii")
    model = dict(vocab_size=300, context_length=32, d_model=32, d_ff=64, num_layers=1, num_heads=2)
    short = dict(max_steps=2, batch_size=4, validation_sequences=4, device="cpu")
    config = dict(run_dir="run", model=model, train=short, data=dict(story_chars=10_000, data_dir="d"))
    (folder / "c.json").write_text(json.dumps(config | {"sample": dict(prompt=PROMPT, max_new_tokens=1)}))
    return folder, cs336(folder, "train", "--config", "c.json", **ASCII_LOCALE)


def test_a_run_in_an_ascii_locale_succeeds_and_keeps_its_sample(trained: tuple[Path, str]) -> None:
    folder, printed = trained
    assert ENCODINGS["ascii"] in printed
    assert (folder / "run" / "sample.txt").read_bytes().startswith(PROMPT.encode())


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_samples_and_summaries_are_printed_in_any_encoding(trained: tuple[Path, str], encoding: str) -> None:
    folder, _ = trained
    for command in (["generate", "run", "--prompt", PROMPT, "--max_new_tokens", "0"], ["report", "summary", "run"]):
        assert ENCODINGS[encoding] in cs336(folder, *command, PYTHONIOENCODING=encoding), command


def test_a_rank_prints_in_any_encoding_too(tmp_path: Path) -> None:
    code = f"""
import os
from cs336_systems.training.launch import child_process
with child_process(str(os.getppid())):
    print({PROMPT!r}, flush=True)
    os._exit(0)
"""
    done = run_python(tmp_path, "-c", code, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout) == (0, f"{ENCODINGS['ascii']}\n")
