"""Fixtures for tests of the command line."""

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cs336_systems.config.run import RunConfig
from cs336_systems.training.prepare import prepare_data
from tests.systems.command import MODEL, WriteConfig
from tests.systems.preparation import TEXT, VALID_TEXT


@pytest.fixture(autouse=True)
def _fast_reports(unrendered: None) -> None:
    """Drawing the loss curve takes longer than training these models."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def two_texts(folder: Path) -> Path:
    """input.txt and valid.txt in the working directory."""
    (folder / "input.txt").write_text(TEXT)
    (folder / "valid.txt").write_text(VALID_TEXT)
    return folder


@pytest.fixture
def stages(two_texts: Path, caplog: pytest.LogCaptureFixture) -> Callable[[RunConfig], tuple[set[str], set[str]]]:
    """Prepares a configuration's data; the names of the files that the log says were made, and those skipped."""

    def prepare_and_read_log(config: RunConfig) -> tuple[set[str], set[str]]:
        caplog.clear()
        with caplog.at_level(logging.INFO, "cs336_systems"):
            prepare_data(config)
        assert list(two_texts.rglob("writing-*")) == []
        made = [re.fullmatch(r"\w+: making (\S+), (which|because) .*", message) for message in caplog.messages]
        skipped = [re.fullmatch(r"\w+: (.*) is up to date, skipped", message) for message in caplog.messages]
        return {Path(m[1]).name for m in made if m}, {Path(m[1]).name for m in skipped if m}

    return prepare_and_read_log


@pytest.fixture
def write_config(tmp_path: Path) -> WriteConfig:
    """Writes a JSON file with a tiny model and more fields, or a text as it is; returns its path."""

    def write(content: Any, name: str = "config.json") -> str:
        text = content if isinstance(content, str) else json.dumps({"model": MODEL} | content)
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write
