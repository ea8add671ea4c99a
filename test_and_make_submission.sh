#!/usr/bin/env bash
# Runs the tests and writes what is to be submitted: code.zip and, where it can be made or is there, writeup.pdf.
#
#   ./test_and_make_submission.sh [--skip-tests] [--out FOLDER]
#
# code.zip holds what git tracks, as it is in the working tree; unzipped elsewhere, this script runs there again.
# Links of a writeup.pdf that is made here begin at the project's root: beside what is unzipped they lead to its rows.

set -euo pipefail

fail() {
    echo "test_and_make_submission.sh: $1" >&2
    exit "${2:-1}"
}

out=. tests=yes
while [ $# -gt 0 ]; do
    case "$1" in
        --skip-tests) tests=no ;;
        --out) [ $# -gt 1 ] || fail "--out: a folder must follow" 2; out=$2; shift ;;
        *) fail "unknown option $1: --skip-tests and --out FOLDER are known" 2 ;;
    esac
    shift
done
mkdir -p "$out" 2>/dev/null && [ -w "$out" ] || fail "--out is $out: it must be a folder that can be written" 2
out=$(cd "$out" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")"

if [ $tests = yes ]; then
    make test || fail "the tests failed; nothing was written (--skip-tests writes all the same)"
fi

if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python
fi
command -v "$PYTHON" >/dev/null || fail "$PYTHON is not there: install Python, or give PYTHON=..."

"$PYTHON" - "$out/code.zip" <<'PYTHON_END' || exit 1
import os
import subprocess
import sys
import zipfile
from pathlib import Path

LARGEST_RESULT = 1 << 20
NOT_SOURCE = {".git", ".venv", ".hypothesis", "runs", "data", "wandb", "dist", "build", "__pycache__", "uv.lock"}
SUBMITTED = {"code.zip", "writeup.pdf"}


def tracked():
    """What git tracks here; where this is no checkout (it was unzipped), everything but what runs leave behind."""
    try:
        asked = ["git", "ls-files", "-z", "--error-unmatch", "pyproject.toml", "."]
        listed = subprocess.run(asked, capture_output=True, check=True, text=True).stdout
        return sorted({Path(name) for name in listed.split("\0") if name})
    except (OSError, subprocess.CalledProcessError):
        return sorted(walked(Path(".")))


def walked(folder):
    for path in folder.iterdir():
        if path.name in NOT_SOURCE | SUBMITTED or path.name.endswith(("_cache", ".egg-info")):
            continue
        if path.is_dir():
            yield from walked(path)
        else:
            yield path


def is_large_result(path):
    return path.parts[0] == "results" and path.stat().st_size > LARGEST_RESULT


target = Path(sys.argv[1])
partial = target.with_name(f".{target.name}.{os.getpid()}")
try:
    files = [path for path in tracked() if path.is_file()]
    kept = [path for path in files if not is_large_result(path)]
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
        for path in kept:
            archive.write(path)
    partial.replace(target)
except OSError as error:
    sys.exit(f"test_and_make_submission.sh: {error.filename or target}: {error.strerror}")
finally:
    partial.unlink(missing_ok=True)
print(f"{target}: {len(kept)} files, {target.stat().st_size / 2**20:.1f} MiB")
for path in files:
    if is_large_result(path):
        print(f"left out, above {LARGEST_RESULT >> 20} MiB: {path}")
PYTHON_END

made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
why="put one here, or docs/one-gpu.md and docs/two-gpus.md through pandoc"
if [ -f writeup.pdf ]; then
    [ writeup.pdf -ef "$out/writeup.pdf" ] || cp writeup.pdf "$out/"
    echo "$out/writeup.pdf: as it is here; without it, cs336 report writeup is asked for one"
elif "$PYTHON" -m cs336_systems report --help 2>/dev/null | grep -w writeup >/dev/null; then
    why=$("$PYTHON" -m cs336_systems report writeup --out "$made" --links_from . | tail -n 1) || exit 1
fi
if [ -f "$made/writeup.pdf" ]; then
    cp "$made/writeup.pdf" "$out/"
    echo "$out/writeup.pdf: made by cs336 report writeup"
elif [ ! -f writeup.pdf ]; then
    echo "no writeup.pdf: $why"
fi
