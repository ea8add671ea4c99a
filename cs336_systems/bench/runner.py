"""Measures the configurations of a case, one group after another, and keeps every row as it comes."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..machine.hardware import gpu_name, select_device
from .case import Case, describe_among, groups, is_of, is_of_fewer_rounds, rounds_of, row_config
from .outcome import failed
from .row import Row, append_row, read_rows
from .worker import Worker, WorkerEndedError

logger = logging.getLogger(__name__)


def run_case(
    case: Case,
    configs: Sequence[Any],
    path: Path,
    *,
    resume: bool = False,
    timeout_s: float | None = None,
    isolated: bool | None = None,
    progress: Callable[[int, int, str], None] = lambda done, count, label: None,
) -> Iterator[Row]:
    """Measure; append each row to the file at `path`, then yield it.

    Separate processes measure. Whatever ends a process is a row of status error, and the next process measures the
    rest. Of configurations that take turns, the file always has the rounds so far; only rows of all rounds are yielded.

    resume: skip configurations that have a row other than an error from this kind of GPU, in the file or in one of its
    name in a folder below, where further launches are kept. timeout_s: for each configuration. isolated: whether each
    group has a process of its own (default: as the case says). progress: called with the number of configurations done,
    the number of all, and the one at work in the words of `describe_among`.
    """
    if path.exists():
        read_rows(path)  # a damaged file is refused beforehand
    known = rows_on_this_gpu(case, path) if resume else []
    left = [config for config in configs if not any(is_of(row, config) and row.status != "error" for row in known)]
    if there := len(configs) - len(left):
        logger.info("%d of %d configurations are in %s already", there, len(configs), path.parent)
    waiting, describe = groups(case, left), describe_among(configs)
    with _Workplace(case, case.isolated if isolated is None else isolated) as workplace:
        while waiting:
            missing = waiting.pop(0)
            _tell(case, missing, configs, len(configs) - _count([missing, *waiting]))
            try:
                progress(len(configs) - _count([missing, *waiting]), len(configs), describe(missing[0]))
                for row in _kept(workplace.worker().measure(missing, timeout_s), missing, path):
                    missing = [config for config in missing if not is_of(row, config)]
                    progress(len(configs) - _count([missing, *waiting]), len(configs), describe(row.config))
                    yield row
            except WorkerEndedError as error:
                workplace.leave()
                if len(missing) > 1:  # one of them ended it: measure each by itself
                    waiting[:0] = [[config] for config in missing]
                elif missing:
                    row = failed(case.name, case.variant(missing[0]), row_config(missing[0]), error)
                    append_row(path, row)
                    yield row
            workplace.tidy()
            progress(len(configs) - _count(waiting), len(configs), "")


def rows_on_this_gpu(case: Case, path: Path) -> list[Row]:
    """A case's rows from this kind of GPU, in a file and in others of its name in folders below; the file's last."""
    files = [*sorted(path.parent.glob(f"*/**/{path.name}")), *([path] if path.exists() else [])]
    return [row for file in files for row in read_rows(file)
            if row.case == case.name and row.env.get("gpu") == _gpu_here(row)]  # fmt: skip


def _gpu_here(row: Row) -> str | None:
    """The name of the GPU that is here what the row's configuration calls its device; None where there is none."""
    try:
        return gpu_name(select_device(str(row.config.get("device", "auto"))))
    except ValueError:
        return None


def _kept(rows: Iterable[Row], configs: Sequence[Any], path: Path) -> Iterator[Row]:
    """Append each row as it comes; yield those of all rounds.

    A row of fewer rounds is written unless one of as many is in the file, from an earlier launch. The next row
    of its configuration takes its place, unless that is a failure.
    """
    known = [row for row in (read_rows(path) if path.exists() else []) if row.status == "ok"]
    most = {config: max((rounds_of(row, config) for row in known), default=0) for config in configs}
    so_far: dict[Any, Row] = {}
    for row in rows:
        config = next((config for config in configs if is_of_fewer_rounds(row, config)), None)
        if config is None:
            before = so_far.pop(next((config for config in so_far if is_of(row, config)), None), None)
            append_row(path, row, instead_of=before if row.status == "ok" else None)
            yield row
        # After a failure the others start over: until they have come as far, the earlier row has more rounds.
        elif row.config["rounds"] > most[config]:
            append_row(path, row, instead_of=so_far.get(config))
            so_far[config], most[config] = row, row.config["rounds"]


def _tell(case: Case, group: Sequence[Any], configs: Sequence[Any], done: int) -> None:
    """Log what is measured next: one line for configurations measured together, after `done` that are over."""
    which = f"{done + 1}" if len(group) == 1 else f"{done + 1} to {done + len(group)}"
    fields = describe_among(configs, without=case.together)(group[0])
    variants = ", ".join(dict.fromkeys(map(case.variant, group)))
    what = [case.name, variants, *([fields] if fields else [])]
    logger.info("measuring %s of %d: %s", which, len(configs), "; ".join(what))


def _count(left: Sequence[Sequence[Any]]) -> int:
    """Number of configurations in groups."""
    return sum(map(len, left))


class _Workplace:
    """The process that measures: started when there is work, and replaced when the case or a failure requires it."""

    def __init__(self, case: Case, isolated: bool) -> None:
        self._case, self._isolated = case, isolated
        self._worker: Worker | None = None

    def worker(self) -> Worker:
        if self._worker is None:
            self._worker = Worker(self._case.module, self._case.empty_caches)
        return self._worker

    def tidy(self) -> None:
        """After a group."""
        if self._isolated or (self._worker is not None and not self._worker.is_sound):
            self.leave()

    def leave(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._worker = None

    def __enter__(self) -> "_Workplace":
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if kind is not None and self._worker is not None:
            self._worker.kill()  # it may be busy for long
        self.leave()
