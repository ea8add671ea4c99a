"""What each process of the case `ddp` does: measures every variant together with the others; rank 0 writes the rows."""

import json
import re
import sys
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
from .cases.ddp import DDPBench, name_of
from .outcome import free_memory, measured
from .streams import record_step
from .sweep import as_json


def measure_on_rank(configs: Sequence[DDPBench], device: torch.device, at_work: Path) -> Iterator[Row]:
    """Measure every variant, in turns, together with the other ranks; the rows are the same on all."""
    everything: dict[DDPBench, list[dict[str, Any]]] = {config: [] for config in configs}
    for round_ in range(configs[0].rounds):
        for config in configs:
            if comm.rank() == 0:
                at_work.write_text(name_of(config))
            is_last = round_ == config.rounds - 1
            with comm.alone() if config.is_alone else nullcontext():
                everything[config].append(_measure_variant(config, device, is_last))
            free_memory()  # what the variant before has held, compiled code's references too
            if is_last:
                ranks = comm.gather_objects(merged(everything[config]), "what was measured")
                ran = {"run": config.run_config().to_dict()}
                yield measured("ddp", name_of(config), as_json(config), ran, slowest(ranks))


def _measure_variant(config: DDPBench, device: torch.device, is_last: bool) -> dict[str, Any]:
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
        for _ in range(config.warmup):
            trainer.train_step()
        comm.barrier("start of the measurement")
        trainer.reset_clock()
        times = [trainer.train_step()["step_ms"] for _ in range(config.steps + 1)][1:]
        peak = trainer.memory_bytes() - held
        if config.traces and is_last:
            file = Path(config.traces, re.sub(r"\W", "-", name_of(config)) + ".json")
            record_step(trainer.train_step, file if comm.rank() == 0 else None, device)
    return {"steps_ms": times, "peak_memory_bytes": peak, "held_before_bytes": held}


def merged(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What one rank has measured, over its rounds."""
    times = [time for each in rounds for time in each["steps_ms"]]
    memory = {name: max(each[name] for each in rounds) for name in ("peak_memory_bytes", "held_before_bytes")}
    return {"step_ms": summarise(times), "steps_ms": times, **memory}


def slowest(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The times of the rank that took longest, the largest memory, and how far apart the ranks were."""
    medians = [metrics["step_ms"]["p50"] for metrics in ranks]
    times = max(ranks, key=lambda metrics: metrics["step_ms"]["p50"])
    memory = {name: max(each[name] for each in ranks) for name in ("peak_memory_bytes", "held_before_bytes")}
    return {**times, "spread_ms": max(medians) - min(medians), **memory}


def main() -> None:
    """Measure: `FOLDER PARENT`, the folder with configs.json."""
    folder, parent = Path(sys.argv[1]), sys.argv[2]
    configs = [DDPBench(**fields) for fields in json.loads((folder / "configs.json").read_text())]
    with one_of_several(parent):
        device = use_device_of_rank(configs[0].device)
        with comm.process_group(device):
            for row in measure_on_rank(configs, device, folder / "at_work"):
                if comm.rank() == 0:
                    append_row(folder / "rows.jsonl", row)


if __name__ == "__main__":
    main()
