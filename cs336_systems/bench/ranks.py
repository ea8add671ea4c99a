"""What each process of a case on several ranks does: measures every variant with the others; rank 0 writes the rows."""

import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cs336_basics.data import token_dtype
from cs336_basics.model import TransformerLM

from ..kernels.attention import get_attention
from ..parallel import comm
from ..training.launch import one_of_several, use_device_of_rank
from ..training.loop import Trainer
from ..training.metrics import summarise
from .case import Row, append_row
from .cases import get_case
from .launched import RanksBench
from .outcome import free_memory, measured
from .streams import record_step
from .sweep import Case, as_json
from .timing import Stopwatch, wait_for


def measure_on_rank(case: Case, configs: Sequence[Any], device: torch.device, at_work: Path) -> Iterator[Row]:
    """Measure every variant, in turns, together with the other ranks; the rows are the same on all."""
    everything: dict[Any, list[dict[str, Any]]] = {config: [] for config in configs}
    for round_ in range(configs[0].rounds):
        for config in configs:
            if comm.rank() == 0:
                at_work.write_text(case.variant(config))
            is_last = round_ == config.rounds - 1
            with comm.alone() if config.is_alone else nullcontext():
                everything[config].append(_measure_variant(config, case.variant(config), device, is_last))
            free_memory()  # what the variant before has held, compiled code's references too
            if is_last:
                ranks = comm.gather_objects(merged(everything[config]), "what was measured")
                ran = {**everything[config][-1]["ran"], "run": config.run_config().to_dict()}
                metrics = slowest(ranks)
                yield measured(case.name, case.variant(config), as_json(config), ran, metrics | config.derive(metrics))


def _measure_variant(config: RanksBench, name: str, device: torch.device, is_last: bool) -> dict[str, Any]:
    run = config.run_config()
    shape, held = run.model.shape, 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)  # by a variant before, should it not have given back all
    tokens = np.random.default_rng(0).integers(0, shape.vocab_size, 1 << 20).astype(token_dtype(shape.vocab_size))
    torch.manual_seed(0)
    with device:
        model = TransformerLM(**asdict(shape), attention=get_attention(run.model.attention))
    with closing(Trainer(run, model, tokens, device)) as trainer:
        free_memory()  # of weights as they were drawn, whole
        started = time.perf_counter()
        loss = trainer.train_step()["loss"]
        wait_for(device)
        startup_s = time.perf_counter() - started
        for _ in range(config.warmup - 1):
            trainer.train_step()
        comm.barrier("start of the measurement")
        times = _time_calls(trainer, config.steps) if config.is_timed_by_call else _time_steps(trainer, config.steps)
        peak = trainer.memory_bytes() - held
        ran = config.read_back(trainer)
        if config.traces and is_last:
            file = Path(config.traces, re.sub(r"\W", "-", name) + ".json")
            record_step(trainer.train_step, file if comm.rank() == 0 else None, device)
    memory = {"peak_memory_bytes": peak, "held_before_bytes": held}
    return {"steps_ms": times, **memory, "first_loss": loss, "startup_s": startup_s, "ran": ran}


def _time_steps(trainer: Trainer, count: int) -> list[float]:
    """Steps one after another, from the wait for the loss in one to that in the next, in ms."""
    trainer.reset_clock()
    return [trainer.train_step()["step_ms"] for _ in range(count + 1)][1:]


def _time_calls(trainer: Trainer, count: int) -> list[float]:
    """Each step by itself, from a device that has nothing to do to one that has done it all, in ms."""
    stopwatch = Stopwatch(trainer.device)
    times = []
    for _ in range(count):
        trainer.train_step()
        times.append(stopwatch.lap_ms())
    return times


def merged(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What one rank has measured, over its rounds."""
    times = [time for each in rounds for time in each["steps_ms"]]
    memory = {name: max(each[name] for each in rounds) for name in ("peak_memory_bytes", "held_before_bytes")}
    first = {"first_loss": rounds[0]["first_loss"], "startup_s": max(each["startup_s"] for each in rounds)}
    return {"step_ms": summarise(times), "steps_ms": times, **first, **memory}


def slowest(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The times of the rank that took longest, the largest memory, and how far apart the ranks were."""
    medians = [metrics["step_ms"]["p50"] for metrics in ranks]
    times = max(ranks, key=lambda metrics: metrics["step_ms"]["p50"])
    memory = {name: max(each[name] for each in ranks) for name in ("peak_memory_bytes", "held_before_bytes")}
    return {**times, "spread_ms": max(medians) - min(medians), **memory}


def main() -> None:
    """Measure: `CASE FOLDER PARENT`, the folder with configs.json."""
    case, folder, parent = get_case(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    configs = [case.config(**fields) for fields in json.loads((folder / "configs.json").read_text())]
    with one_of_several(parent):
        device = use_device_of_rank(configs[0].device)
        with comm.process_group(device, step_timeout_s=configs[0].step_timeout_s):
            for row in measure_on_rank(case, configs, device, folder / "at_work"):
                if comm.rank() == 0:
                    append_row(folder / "rows.jsonl", row)


if __name__ == "__main__":
    main()
