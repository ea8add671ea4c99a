"""The write-up of the committed rows, made once for all test processes, and templates filled without drawing."""

import copy
import fcntl
import functools
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cs336_systems.assignment import build
from cs336_systems.assignment.build import WriteUp
from cs336_systems.assignment.figures import Figures

RESULTS = Path(__file__).parents[2] / "results"
BYLINE = ("A. <b> & Student", "May 2026")


@dataclass
class Made:
    """A write-up, and the folder of its files."""

    document: WriteUp
    folder: Path


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    folder, kept = shared / "assignment", shared / "assignment.pickle"
    with (shared / "assignment.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            document = build.build(RESULTS, folder, say=lambda name: None)
            build.write(document, folder, BYLINE)
            kept.write_bytes(pickle.dumps(document))
    return Made(pickle.loads(kept.read_bytes()), folder)


@functools.cache
def _committed() -> Figures:
    return Figures(RESULTS)


def committed() -> Figures:
    """The committed rows, which are read once, in a list that may be changed."""
    figures = copy.copy(_committed())
    figures.sources, figures.contradictions = [*figures.sources], []
    return figures


class NoPictures:
    """Stands in for `Pictures`, whose drawing takes most of the time of a build."""

    def __init__(self, out: Path = Path()) -> None:
        pass

    def __getattr__(self, kind: str) -> Callable[..., str]:
        return lambda *args, **options: f"![{kind}]()"


def filled(figures: Figures, problem: str, *folders: Path) -> str:
    """A problem's text as one line, without pictures."""
    drawn: Any = NoPictures()
    env = build.environment(figures, drawn, [*folders, build.TEMPLATES])
    figures.begin(problem)
    return " ".join(build.fill(env, problem).split())
