"""The profile `memory`: the memory of a step over time, from the recording to the row `profile-memory`."""

import dataclasses
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from cs336_basics.shape import ModelShape

from ...config.checks import folder_to_write, require_at_least
from ...config.model import SHAPE_FIELDS
from ...machine.hardware import select_device
from ...planner.accounting import num_parameters, residual_bytes
from ..case import Case, row_config, swept
from ..outcome import failed
from ..row import Row
from ..workload import Workload
from .history import history_of
from .page import write_page
from .phases import PHASES_FILE, SNAPSHOT_FILE, Phases, read_phases
from .recording import record
from .snapshot import read_snapshot
from .timeline import facts, note_of, plot_timeline, title_of

PICTURE_FILE, PAGE_FILE, SUMMARY_FILE = "timeline.png", "timeline.html", "summary.md"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryProfile(Workload):
    """A workload of which a step's memory is recorded. `Workload` explains the inherited fields."""

    size: str = swept("small", quick="quick")
    context_length: int = swept(512, quick=64)
    batch_size: int = swept(4, quick=2)
    mode: Literal["forward", "forward_backward", "train_step"] = swept("train_step")
    device: str = swept("auto", quick="cpu")
    warmup: int = 2
    """Steps before the recorded one."""
    folder: str = swept(".", beside=".")
    """Folder of the recording and its pictures."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, "", 0, "warmup")

    def check(self) -> None:
        """Raise ValueError for a compiled step on a CPU, where only operators called one by one can be seen."""
        if self.compile and select_device(self.device).type == "cpu":
            raise ValueError("compile is true: it must be false on a CPU, where storages are counted by operator")


def profile(config: MemoryProfile) -> Row:
    """Record a step into the configuration's folder, draw it there, and return its row.

    A model that does not fit even without a step gives a row with status oom and no picture.
    """
    folder = Path(config.folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in (SNAPSHOT_FILE, PHASES_FILE, PICTURE_FILE, PAGE_FILE, SUMMARY_FILE):
        (folder / name).unlink(missing_ok=True)  # of an earlier run, which this one may fail to replace
    try:
        record(config, config.warmup, folder)
        return draw(folder / SNAPSHOT_FILE, folder)
    except Exception as error:  # a driver may raise anything
        return failed(CASE.name, config.mode, row_config(config) | dataclasses.asdict(config.shape), error)


def draw(snapshot: Path, folder: Path) -> Row:
    """Draw a snapshot into a folder, and return its row.

    Phases are read from `phases.json` beside a `snapshot.pickle`. Without them, categories come from lifetimes alone.
    Raises FileNotFoundError, or ValueError naming the file, if it is not a snapshot.
    """
    beside = snapshot.parent / PHASES_FILE
    phases = read_phases(beside) if snapshot.name == SNAPSHOT_FILE and beside.exists() else None
    history = history_of(read_snapshot(snapshot), phases)
    row = _row(snapshot, phases, facts(history))
    folder_to_write(str(folder))
    plot_timeline(history, folder / PICTURE_FILE, title_of(row))
    write_page(history, folder / PAGE_FILE, title_of(row), note_of(row))
    return row


def _row(snapshot: Path, phases: Phases | None, found: dict[str, Any]) -> Row:
    if phases is None:
        metrics = {**found, "categories_from": "lifetimes", "counts": "unknown", "allocator": {}, "counted": {}}
        return Row(case=CASE.name, variant=snapshot.name, config={"snapshot": snapshot.name}, metrics=metrics, env={})
    metrics = {**found, "categories_from": "tensors", "counts": phases.counts, "allocator": phases.allocator}
    return Row(
        case=CASE.name,
        variant=str(phases.config["mode"]),
        config=phases.config,
        status="ok" if phases.error is None else "oom",
        metrics={**metrics, "counted": counted(phases.config)},
        env=phases.env,
        error=phases.error,
    )


def counted(config: dict[str, Any]) -> dict[str, int]:
    """Float32 bytes of one residual-stream activation, 4 B N d, and of the parameters."""
    shape = ModelShape(**{name: config[name] for name in SHAPE_FIELDS})
    return {
        "residual_stream_bytes": residual_bytes(shape, config["batch_size"], shape.context_length),
        "parameter_bytes": 4 * num_parameters(shape),
    }


CASE = Case(
    name="profile-memory",
    config=MemoryProfile,
    variant=attrgetter("mode"),
    rows=lambda case, configs: map(profile, configs),
    isolated=True,
    check=MemoryProfile.check,
)
