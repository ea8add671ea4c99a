"""Measures the configurations of a case, one group after another, and keeps every row as it comes."""

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from ..hardware import gpu_name, select_device
from .case import Row, append_row, read_rows
from .outcome import failed
from .sweep import Case, describe_among, groups, is_of, is_of_fewer_rounds, row_config
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
    rest. If configurations that take turns end before their last round, rows of the finished rounds are appended but
    not yielded.

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
                with closing(_of_all_rounds(workplace.worker().measure(missing, timeout_s), missing, path)) as rows:
                    for row in rows:
                        append_row(path, row)
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


def _of_all_rounds(rows: Iterator[Row], configs: Sequence[Any], path: Path) -> Generator[Row]:
    """The rows of all rounds; rows of fewer rounds are kept, and written if the row of all rounds does not come.

    The reason may be an interrupt, a failure, or the end of the process that measures.
    """
    kept: dict[Any, Row] = {}
    try:
        for row in rows:
            of = next((config for config in configs if is_of_fewer_rounds(row, config)), None)
            if of is None:
                for config in [config for config in kept if is_of(row, config)]:
                    so_far = kept.pop(config)
                    if row.status != "ok":
                        _append_unless_known(path, so_far, config)
                yield row
            # After a failure the others start over: until they have come as far, the earlier row has more rounds.
            elif of not in kept or row.config["rounds"] >= kept[of].config["rounds"]:
                kept[of] = row
    finally:
        for config, row in kept.items():
            _append_unless_known(path, row, config)


def _append_unless_known(path: Path, row: Row, config: Any) -> None:
    """Append a row of fewer rounds unless there is one of all rounds, in whose place it would be shown."""
    if not any(is_of(known, config) and known.status == "ok" for known in (read_rows(path) if path.exists() else [])):
        append_row(path, row)


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
