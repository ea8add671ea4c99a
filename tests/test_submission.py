"""`test_and_make_submission.sh` packs the tracked files, and the archive works where it is unzipped."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = "test_and_make_submission.sh"
# In the place of the package: a command that knows of no writeup, cannot make one, or can.
STUB = """
import sys
from pathlib import Path

if sys.argv[1:] == ["report", "--help"]:
    print("rows, tables" + ", writeup" * Path("knows").exists())
elif Path("can").exists():
    links = Path(sys.argv[sys.argv.index("--links_from") + 1]).resolve()
    Path(sys.argv[sys.argv.index("--out") + 1], "writeup.pdf").write_text(f"links of {links}")
else:
    print("writeup.pdf is left out: something is missing")
"""


def submit(folder: Path, *options: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS", "GIT_"))}
    command = ["bash", f"./{SCRIPT}", *options]
    environ["PYTHON"] = python
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=60)


def names_in(archive: Path) -> set[str]:
    with ZipFile(archive) as file:
        assert file.testzip() is None
        return set(file.namelist())


def test_it_runs_again_where_it_is_unzipped(tmp_path: Path) -> None:
    python = tmp_path / "python"  # which has no cs336 command, so that no writeup is made here
    python.write_text(f'#!/bin/sh\n[ "$1" = -m ] && exit 1\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    done = submit(ROOT, "--skip-tests", "--out", str(tmp_path), python=str(python))
    assert (done.returncode, done.stderr) == (0, "")
    there = tmp_path / "there"
    with ZipFile(tmp_path / "code.zip") as archive:
        archive.extractall(there)
    names = names_in(tmp_path / "code.zip")
    assert {SCRIPT, "Makefile", "pyproject.toml", "constraints.txt", "tests/conftest.py", "docs/design.md"} <= names
    assert not [
        name for name in names if name.startswith((".venv", "runs/", "data/", ".git/")) or "__pycache__" in name
    ]

    code = "import cs336_systems; print(cs336_systems.__file__)"
    environ = {**os.environ, "PYTHONPATH": str(there)}
    for arguments, expected in ((["-c", code], str(there)), (["-m", "cs336_systems", "--version"], "cs336 ")):
        command = [sys.executable, *arguments]
        ran = subprocess.run(command, cwd=there, env=environ, capture_output=True, text=True, timeout=60, check=True)
        assert ran.stdout.startswith(expected)
    again = submit(there, "--skip-tests", "--out", str(tmp_path / "again"), python=str(python))  # no checkout
    assert (again.returncode, again.stderr) == (0, "")
    assert names_in(tmp_path / "again/code.zip") == names


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A small checkout with the script."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    folder = tmp_path / "project"
    files = {
        "pyproject.toml": "",
        "cs336_systems/__init__.py": "",
        "cs336_systems/__main__.py": STUB,
        "results/small.jsonl": "{}",
        "results/large.jsonl": "x" * ((1 << 20) + 1),
        "Makefile": "test:\n\ttest ! -e broken\n",
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    shutil.copy(ROOT / SCRIPT, folder)
    for command in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *command], cwd=folder, check=True, timeout=30)
    return folder


def test_only_what_is_tracked_and_no_large_result(project: Path) -> None:
    (project / "untracked.txt").write_text("")
    (project / "results/small.jsonl").write_text("changed since")
    done = submit(project)
    assert done.returncode == 0, done.stderr
    assert "left out, above 1 MiB: results/large.jsonl" in done.stdout
    package = {"cs336_systems/__init__.py", "cs336_systems/__main__.py"}
    assert names_in(project / "code.zip") == {"pyproject.toml", "results/small.jsonl", "Makefile", SCRIPT} | package
    with ZipFile(project / "code.zip") as archive:
        assert archive.read("results/small.jsonl") == b"changed since"


def test_the_writeup_is_made_or_taken_or_it_is_said_why_there_is_none(project: Path, tmp_path: Path) -> None:
    def last_line(out: str) -> str:
        done = submit(project, "--skip-tests", "--out", str(tmp_path / out))
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.splitlines()[-1]

    assert last_line("unknown").startswith("no writeup.pdf: put one here")
    (project / "knows").touch()
    assert last_line("cannot") == "no writeup.pdf: writeup.pdf is left out: something is missing"
    (project / "can").touch()
    assert last_line("made").endswith("made by cs336 report writeup")
    # A path that is relative to where it was made would be of this machine, and dead beside what is unzipped.
    assert (tmp_path / "made/writeup.pdf").read_text() == f"links of {project}"
    (project / "writeup.pdf").write_text("by hand")  # which nothing is to replace
    assert "as it is here" in last_line("taken")
    assert (tmp_path / "taken/writeup.pdf").read_text() == (project / "writeup.pdf").read_text() == "by hand"
    assert "as it is here" in last_line("project")  # beside itself


def test_errors_are_one_line_and_leave_nothing(project: Path, tmp_path: Path) -> None:
    unknown = submit(project, "--skip")
    assert (unknown.returncode, unknown.stderr.count("\n")) == (2, 1)
    assert "unknown option --skip: " in unknown.stderr
    (tmp_path / "file").touch()
    unwritable = submit(project, "--skip-tests", "--out", str(tmp_path / "file"))
    assert (unwritable.returncode, unwritable.stderr.count("\n")) == (2, 1)
    (project / "broken").touch()
    failed = submit(project)
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1].endswith("nothing was written (--skip-tests writes all the same)")
    assert not (project / "code.zip").exists()
