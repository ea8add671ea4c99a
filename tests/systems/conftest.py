"""Fixtures for tests of the command line."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cs336_systems.cli.main import main
from tests.systems.command import MODEL, Run, WriteConfig


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def write_config(tmp_path: Path) -> WriteConfig:
    """Writes a JSON file with a tiny model and more fields, or a text as it is; returns its path."""

    def write(content: Any, name: str = "config.json") -> str:
        text = content if isinstance(content, str) else json.dumps({"model": MODEL} | content)
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


@pytest.fixture
def cs336(capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs the command in this process; returns exit code, stdout and stderr."""
    log = logging.getLogger("cs336_systems")
    before = log.handlers[:], log.level

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    yield run
    log.handlers[:], log.level = before
