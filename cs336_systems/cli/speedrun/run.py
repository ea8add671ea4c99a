"""One speedrun up to its training: the data, the search, the configuration, and the commands to train it."""

import contextlib
import dataclasses
import json
import logging
import math
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from cs336_basics.data import write_json
from cs336_basics.shape import ModelShape

from ...bench.row import Row, append_row
from ...config.checks import folder_to_write, require
from ...config.model import SIZE_FIELDS
from ...config.run import RunConfig
from ...kernels.attention import get_attention
from ...machine.console import program, say
from ...machine.hardware import check_precision, gpu_count, gpu_name, memory_bytes, select_device
from ...planner.accounting import num_parameters
from ...planner.memory import largest_batch, peak_bytes
from ...planner.rows import training_job
from ...training.launch import check_devices
from ...training.prepare import prepare_data
from .choice import MOST_EPOCHS, SIZES, Candidate, Task, Timing, Trial, TrialFailed, learning_rate, search
from .measure import time_trial, trial_s

logger = logging.getLogger(__name__)

_SHAPE = {f"model.{name}" for name in ("size", *SIZE_FIELDS)}
_CHOSEN = {
    "parallel.devices": "--devices says it",
    **dict.fromkeys(("train.batch_size", "train.gradient_accumulation_steps"), "the batch is what is looked for"),
    **dict.fromkeys(("train.max_steps", "train.max_minutes"), "--minutes or --epochs says it"),
}
# By source: the tokenizer's vocabulary size, and the prompt of the sample at the end.
_VOCAB_SIZES = {"tinystories": 10_000, "text": 4096, "stories": 768, "random": 10_000}
_PROMPTS = {"tinystories": "Once upon a time", "stories": "One day"}
_GIVEN = "given"  # the name of a size that the command line gives field by field
_SEARCH_SHARE = 0.2  # of the time, in which all trials are to be over
_STEPS_SHARE = 0.93  # of what is left: the rest is for validations, a checkpoint and the sample
_VALIDATIONS = 10
_MEMORY_SHARE = 0.85  # of a card's, or of half a machine's, because the planner does not count what an allocator wastes


@dataclasses.dataclass(frozen=True)
class _Way:
    """How steps are computed on a device."""

    precision: str
    compile: bool
    cuda_graph: bool


class Speedrun:
    """One search, and the run that it leads to.

    make_config: makes a run from arguments of `cs336 train` and adds those of the user, whose names are in `given`.
    Exactly one of `minutes` (for search and training together) and `epochs` (passes over the text) is a number. Raises
    ValueError naming what is wrong.
    """

    def __init__(
        self,
        make_config: Callable[[Sequence[str]], RunConfig],
        given: Set[str],
        *,
        minutes: float | None,
        epochs: float | None = None,
        size: str | None = None,
        devices: int | None = None,
        out: str | None = None,
    ) -> None:
        self.make_config, self.minutes, self.epochs = make_config, minutes, epochs
        require(size in (None, *SIZES), "size", size, f"one of {', '.join(SIZES)}")
        own_shape = sorted(given & _SHAPE)
        if own_shape and size is not None:
            raise ValueError(f"size is {size!r}: it must be left out where {own_shape[0]} is given")
        for name in sorted(given & _CHOSEN.keys()):
            raise ValueError(f"{name} is given: it must be left out, {_CHOSEN[name]}")
        self.sizes = [_GIVEN] if own_shape else [size] if size else list(SIZES)
        self.fields: dict[str, Any] = {
            "data.source": "tinystories",
            "optimizer.implementation": "torch_fused",
            "checkpoint.keep_last": 2,
        }
        first = self._config(self.sizes[0], {})
        source = first.data.source
        self.fields |= {"model.vocab_size": _VOCAB_SIZES[source], "sample.prompt": _PROMPTS.get(source, "")}
        self.device = select_device(first.train.device)
        accepted = "auto, cpu or cuda (CUDA_VISIBLE_DEVICES says which)"
        require(self.device.index is None, "train.device", first.train.device, accepted)
        self.devices = devices if devices is not None else max(1, gpu_count()) if self.device.type == "cuda" else 1
        require(self.devices >= 1, "devices", self.devices, "at least 1")
        check_devices(first.train.device, self.devices, "devices")
        if self.devices > 1:
            self.fields["parallel.devices"] = self.devices
        # flash_triton is tried too, because it is faster than PyTorch's choice on some cards and at some lengths.
        self.kernels: tuple[str, ...] = ("auto", "flash_triton") if self.device.type == "cuda" else ("auto",)
        if "model.attention" in given:
            self.kernels = (first.model.attention,)
            get_attention(*self.kernels)
        self.ways = _ways(self.device)
        self.out = Path("runs")
        if out is not None:
            self.out = folder_to_write(out)
            self.fields["data.data_dir"] = f"{out}/data/{source}"
        self.folder = self.out
        self.started = 0.0
        self.not_planned = ""  # why the planner does not say what a GPU has room for

    def _config(self, size: str, fields: Mapping[str, Any]) -> RunConfig:
        """The run of a size with some fields; those given on the command line override them."""
        shape = {f"model.{name}": value for name, value in SIZES.get(size, {}).items()}
        chosen = {**self.fields, **shape, **fields}
        words = [f"--{name}={v if isinstance(v, str) else json.dumps(v)}" for name, v in chosen.items()]
        return self.make_config(words)

    def prepare(self) -> Path:
        """Make the data, search, print the commands; return the configuration file of the run to train."""
        shapes = {size: self._config(size, {}).model.shape for size in self.sizes}
        tokens = len(prepare_data(self._config(self.sizes[0], {})).train)
        self.started = time.perf_counter()
        self.folder = _new_folder(self.out)
        self.fields["run_dir"] = str(self.folder / "run")
        config = self._final(self._search(shapes, tokens), tokens)
        file = self.folder / "speedrun.json"
        write_json(file, config.to_dict())
        self._say_commands(file, config)
        return file

    def _search(self, shapes: Mapping[str, ModelShape], unique_tokens: int) -> Candidate:
        """The candidate to train; all candidates are printed as they are found."""
        seconds = None if self.minutes is None else 60 * self.minutes
        task = Task(
            shapes=shapes,
            kernels=self.kernels,
            devices=self.devices,
            unique_tokens=unique_tokens,
            seconds=None if seconds is None else (1 - _SEARCH_SHARE / 2) * seconds,
            tokens=None if self.epochs is None else self.epochs * unique_tokens,
            most_sequences=self._most_sequences,
            measure=self._measure,
            is_time_left=lambda step_s: (
                seconds is None or self._elapsed() + trial_s(step_s, self.device.type) < _SEARCH_SHARE * seconds
            ),
        )
        where = f"{self.devices} x {gpu_name()}" if self.device.type == "cuda" else "the CPU"
        say(f"searching, on {where}, with {unique_tokens:,} tokens of text:")
        found = list(self._said(search(task)))
        return found[-1]

    def _said(self, candidates: Iterator[Candidate]) -> Iterator[Candidate]:
        known: list[Candidate] = []
        for each in candidates:
            if each not in known:
                known.append(each)
                say(f"  {self._describe(each)}")
            yield each

    def _describe(self, found: Candidate) -> str:
        timing = found.timing
        return (
            f"{found.trial.size:<7}{num_parameters(found.shape) / 1e6:7,.1f} M parameters, {self._step(found)}: "
            f"{timing.step_s * 1e3:,.1f} ms, {timing.peak_memory_bytes / 2**30:.1f} GiB; would train on "
            f"{found.tokens / 1e6:,.1f} M tokens, {found.tokens_a_parameter:.2g} a parameter"
        )

    def _step(self, found: Candidate) -> str:
        trial = found.trial
        pieces = f" in {trial.micro_batches} parts" if trial.micro_batches > 1 else ""
        batch = trial.sequences * self.devices
        return f"{trial.kernel}, {batch} x {found.shape.context_length} tokens a step{pieces}"

    def _fields_of(self, trial: Trial, way: _Way) -> dict[str, Any]:
        """The fields of a run that a trial determines."""
        return {
            "model.attention": trial.kernel,
            "train.batch_size": trial.sequences * self.devices,
            "train.gradient_accumulation_steps": trial.micro_batches,
            "train.precision": way.precision,
            "train.compile": way.compile,
            "train.cuda_graph": way.cuda_graph,
        }

    def _measure(self, trial: Trial) -> Timing | None:
        """Time a trial in the first way that works; all later trials use that one."""
        while True:
            way = self.ways[0]
            try:
                config = self._config(trial.size, self._fields_of(trial, way))
                timing = time_trial(trial, config, self.device.type, self._keep)
            except (ValueError, TrialFailed):
                if len(self.ways) == 1:
                    raise
                self.ways = self.ways[1:]
                continue
            self.ways = [way]
            return timing

    def _keep(self, row: Row) -> None:
        append_row(self.folder / "rows.jsonl", row)
        if row.status != "ok":
            say(f"  {row.variant}: {row.status} {row.error}")

    def _most_sequences(self, shape: ModelShape) -> int:
        """How many sequences fit on a GPU at once, according to the planner."""
        there = memory_bytes(self.device)
        if there is None:
            return 1 << 20
        there = there if self.device.type == "cuda" else there // (2 * self.devices)
        way = self.ways[0]
        one = {"train.batch_size": self.devices, "train.precision": way.precision, "train.compile": way.compile}
        shape_fields = {f"model.{name}": value for name, value in dataclasses.asdict(shape).items()}
        config = self._config(_GIVEN, {**shape_fields, **one})
        try:
            job = training_job(
                "speedrun", "alone" if self.devices == 1 else "", {"run": config.to_dict(), "devices": self.devices}
            )
        except ValueError as error:  # of what the planner does not know
            if str(error) != self.not_planned:  # it is asked of every trial
                self.not_planned = str(error)
                logger.warning("how much fits into memory is found by trying: %s", error)
            return 1 << 20
        most = largest_batch(job, _MEMORY_SHARE * there)
        if not most:
            needed, gib = peak_bytes(job) / 2**30, there / 2**30
            say(f"  {num_parameters(shape) / 1e6:,.1f} M parameters need {needed:,.1f} GiB; {gib:,.1f} GiB are there")
        return most

    def _elapsed(self) -> float:
        return time.perf_counter() - self.started

    def _final(self, best: Candidate, unique_tokens: int) -> RunConfig:
        """The run of the candidate, with the steps for the remaining time or for the tokens."""
        batch = best.trial.sequences * self.devices * best.shape.context_length
        fields = self._fields_of(best.trial, self.ways[0]) | {"optimizer.lr": round(learning_rate(best.flops), 6)}
        if self.minutes is None:
            steps = math.ceil(best.tokens / batch)
            seconds = steps * best.timing.step_s
        else:
            elapsed, start = self._elapsed(), best.timing.startup_s
            left = 60 * self.minutes - elapsed
            steps = int((_STEPS_SHARE * left - start) / best.timing.step_s)
            if steps < _VALIDATIONS:
                needed = ((start + _VALIDATIONS * best.timing.step_s) / _STEPS_SHARE + elapsed) / 60
                raise ValueError(
                    f"minutes is {self.minutes:g}: timing took {elapsed:.0f} s and a start takes {start:.0f} s, so it "
                    f"must be at least {math.ceil(10 * needed + 1) / 10:.1f}"
                )
            passes = math.ceil(MOST_EPOCHS * unique_tokens / batch)
            if passes < steps:
                say(f"{MOST_EPOCHS} passes over the text take less than the time: a longer text would be worth more")
            steps = min(steps, passes)
            seconds = steps * best.timing.step_s
            fields["train.max_minutes"] = round(left / 60, 3)
        # A token of validation costs a third of one of training; all validations may take 3 % of the time together.
        tokens = 0.03 * seconds / _VALIDATIONS * 3 * batch / best.timing.step_s
        fields |= {
            "train.max_steps": steps,
            "train.validation_interval": max(1, steps // _VALIDATIONS),
            "train.validation_sequences": min(1024, max(16, int(tokens / best.shape.context_length))),
            "checkpoint.checkpointing_interval": max(1, steps // 4),
        }
        say(f"to train: {best.trial.size}, {self._step(best)}, because {best.why}")
        count = f"{steps:,} step{'s' * (steps != 1)} on {steps * batch / 1e6:,.1f} M tokens"
        say(f"{count}, about {_minutes(seconds + best.timing.startup_s)}")
        return self._config(best.trial.size, fields)

    def _say_commands(self, file: Path, config: RunConfig) -> None:
        train = f"{program()} train --config {shlex.quote(str(file))}"
        if config.parallel.devices > 1:
            many = f"{program('torchrun')} --nproc-per-node {config.parallel.devices} -m cs336_systems"
            train = train.replace(program(), many, 1)
        say("\ncommands:")
        say(f"  {train}                 # trains it")
        say(f"  {train} --resume auto   # goes on where it was stopped")
        if config.data.source != "random":  # it has no tokenizer
            words = [program(), "generate", str(config.run_dir), "--prompt", config.sample.prompt or "The"]
            say(f"  {shlex.join(words)}")
        say("")


def _new_folder(out: Path) -> Path:
    """Make a new folder for this speedrun, named by the time."""
    stamp = f"speedrun-{datetime.now():%Y%m%d-%H%M%S}"
    for name in (stamp, *(f"{stamp}-{i}" for i in range(2, 100))):
        with contextlib.suppress(FileExistsError):
            (out / name).mkdir(parents=True)
            return out / name
    raise ValueError(f"out is {str(out)!r}: it has a hundred speedruns of this second")


def _ways(device: torch.device) -> list[_Way]:
    """Ways to compute steps on a device, the fastest first, because not every machine can compile."""
    if device.type != "cuda":
        return [_Way("fp32", False, False)]
    try:
        check_precision(device, "bf16")
    except ValueError:  # a T4 has only float16, whose loss scaling no graph can record
        return [_Way("fp16", True, False), _Way("fp16", False, False)]
    return [_Way("bf16", True, True), _Way("bf16", True, False), _Way("bf16", False, False)]


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{seconds:.0f} seconds"
