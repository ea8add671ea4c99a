"""Measures the configurations of a case group by group, in separate processes, and appends each row to a file."""

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
    isolated: bool | None = None,
    progress: Callable[[int, int, str], None] = lambda done, count, label: None,
) -> Iterator[Row]:
    """Measure the configurations; append each row to the file at `path`, then yield it.

    If a process that measures ends, its configuration gets a row of status error, and another process measures the
    rest. While configurations take turns, the file holds the rounds so far; only rows of all rounds are yielded.

    resume: skip configurations that `rows_on_this_gpu` has without an error. isolated: whether each group has its own
    process (default: the case decides). progress: called with the number of configurations done, the number of all,
    and the current one as `describe_among` names it.
    """
    if path.exists():
        read_rows(path)  # refuse a damaged file before measuring
    known = rows_on_this_gpu(case, path) if resume else []
    left = [config for config in configs if not any(is_of(row, config) and row.status != "error" for row in known)]
    if there := len(configs) - len(left):
        logger.info("%d of %d configurations are in %s already", there, len(configs), path.parent)
    waiting, describe = groups(case, left), describe_among(configs)
    describe_shared = describe_among(configs, without=case.together)
    isolated = case.isolated if isolated is None else isolated

    def done() -> int:
        return len(configs) - sum(map(len, (missing, *waiting)))

    worker: Worker | None = None
    try:
        while waiting:
            missing = waiting.pop(0)
            first, last = done() + 1, done() + len(missing)
            variants = ", ".join(dict.fromkeys(map(case.variant, missing)))
            words = filter(None, (case.name, variants, describe_shared(missing[0])))
            numbers = f"{first}" if first == last else f"{first} to {last}"
            logger.info("measuring %s of %d: %s", numbers, len(configs), "; ".join(words))
            progress(done(), len(configs), describe(missing[0]))
            worker = worker or Worker(case.place, case.empty_caches)
            is_over = isolated
            try:
                for row in _kept(worker.measure(missing), missing, path):
                    missing = [config for config in missing if not is_of(row, config)]
                    progress(done(), len(configs), describe(row.config))
                    yield row
            except WorkerEndedError as error:
                is_over = True
                if len(missing) > 1:  # one of them ended the process: measure each by itself
                    waiting[:0] = [[config] for config in missing]
                elif missing:
                    row = failed(case.name, case.variant(missing[0]), row_config(missing[0]), error)
                    append_row(path, row)
                    yield row
            missing = []
            if is_over or not worker.is_sound:
                worker.close()
                worker = None
            progress(done(), len(configs), "")
    except BaseException:
        if worker is not None:
            worker.kill()  # it may be busy for long
        raise
    finally:
        if worker is not None:
            worker.close()


def rows_on_this_gpu(case: Case, path: Path) -> list[Row]:
    """A case's rows from this kind of GPU, in files of the same name in folders below, then in the file itself."""
    files = [*sorted(path.parent.glob(f"*/**/{path.name}")), *([path] if path.exists() else [])]
    return [row for file in files for row in read_rows(file)
            if row.case == case.name and row.env.get("gpu") == _gpu_here(row)]  # fmt: skip


def _gpu_here(row: Row) -> str | None:
    """The name of this machine's GPU if the row's configuration asks for one; None without a GPU."""
    try:
        return gpu_name(select_device(str(row.config.get("device", "auto"))))
    except ValueError:
        return None


def _kept(rows: Iterable[Row], configs: Sequence[Any], path: Path) -> Iterator[Row]:
    """Append each row; yield rows of all rounds. One of fewer rounds stays until the next that is ok replaces it."""
    known = [row for row in (read_rows(path) if path.exists() else []) if row.status == "ok"]
    most = {config: max((rounds_of(row, config) for row in known), default=0) for config in configs}
    so_far: dict[Any, Row] = {}
    for row in rows:
        config = next((config for config in configs if is_of_fewer_rounds(row, config)), None)
        if config is None:
            before = so_far.pop(next((config for config in so_far if is_of(row, config)), None), None)
            append_row(path, row, instead_of=before if row.status == "ok" else None)
            yield row
        # After a failure the others start over; until they have caught up, the earlier row has more rounds.
        elif row.config["rounds"] > most[config]:
            append_row(path, row, instead_of=so_far.get(config))
            so_far[config], most[config] = row, row.config["rounds"]
