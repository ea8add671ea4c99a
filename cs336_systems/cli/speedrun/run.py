"""A speedrun up to its training: make the data, search, write the configuration, print the commands."""

import dataclasses
import json
import logging
import math
import shlex
import time
from collections.abc import Callable, Mapping, Sequence, Set
from datetime import datetime
from pathlib import Path
from typing import Any

from cs336_basics.files import write_json
from cs336_basics.shape import ModelShape

from ...bench.row import Row, append_row
from ...config.checks import folder_to_write, require
from ...config.model import DEFAULT_VOCAB_SIZE, SIZE_FIELDS
from ...config.run import RunConfig
from ...kernels.attention import get_attention
from ...machine.console import program, say
from ...machine.hardware import check_precision, gpu_count, gpu_name, memory_bytes, select_device
from ...planner.accounting import num_parameters
from ...planner.memory import largest_batch, peak_bytes
from ...planner.rows import training_job
from ...training.launch import check_devices
from ...training.prepare import prepare_data
from .choice import MOST_EPOCHS, SIZES, Candidate, Task, Trial, learning_rate, search
from .measure import time_trial, trial_s

logger = logging.getLogger(__name__)

_SHAPE = {f"model.{name}" for name in ("size", *SIZE_FIELDS)}
# Fields that the user may not set, and why.
_CHOSEN = {
    "parallel.devices": "--devices sets it",
    **dict.fromkeys(("train.batch_size", "train.gradient_accumulation_steps"), "the search chooses the batch"),
    **dict.fromkeys(("train.max_steps", "train.max_minutes"), "--minutes or --epochs sets it"),
}
# By source: the size of the vocabulary, and the prompt for the sample at the end.
_VOCAB_SIZES = {"text": 4096, "stories": 768}
_PROMPTS = {"tinystories": "Once upon a time", "stories": "One day"}
_GIVEN = "given"  # the name of a size that the user gives field by field
_SEARCH_SHARE = 0.2  # of the time goes to the search, at most
_STEPS_SHARE = 0.93  # of the rest goes to training steps; validations, a checkpoint and the sample take the remainder
_VALIDATIONS = 10
_MEMORY_SHARE = 0.85  # of the memory is planned for, because the planner does not count the allocator's waste


class Speedrun:
    """One search for the best model, and the run that follows from it.

    make_config: makes a run from arguments of `cs336 train` and the user's own fields, whose names are in `given`.
    options: those of the command, with at most one of minutes and epochs. Raises ValueError that names a wrong option
    or field.
    """

    def __init__(self, make_config: Callable[[Sequence[str]], RunConfig], given: Set[str], options: Any) -> None:
        self.make_config, self.minutes, self.epochs = make_config, options.minutes, options.epochs
        size, devices, out = options.size, options.devices, options.out
        if self.minutes is None and self.epochs is None:
            self.minutes = 20.0
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
        first = self._config(self.sizes[0])
        source = first.data.source
        self.fields |= {
            "model.vocab_size": _VOCAB_SIZES.get(source, DEFAULT_VOCAB_SIZE),
            "sample.prompt": _PROMPTS.get(source, ""),
        }
        self.device = select_device(first.train.device)
        accepted = "auto, cpu or cuda (CUDA_VISIBLE_DEVICES selects cards)"
        require(self.device.index is None, "train.device", first.train.device, accepted)
        self.fields["train.device"] = self.device.type  # auto could be an Apple GPU, which the trials do not time
        self.devices = devices if devices is not None else max(1, gpu_count()) if self.device.type == "cuda" else 1
        require(self.devices >= 1, "devices", self.devices, "at least 1")
        check_devices(first.train.device, self.devices, "devices")
        if self.devices > 1:
            self.fields["parallel.devices"] = self.devices
        # flash_triton is faster than PyTorch's choice on some cards and at some lengths.
        self.kernels: tuple[str, ...] = ("auto", "flash_triton") if self.device.type == "cuda" else ("auto",)
        if "model.attention" in given:
            self.kernels = (first.model.attention,)
            get_attention(*self.kernels)
        # Ways to compute a step, fastest first: precision, compiled, as a CUDA graph. Trials drop those that do not
        # work here: not every machine can compile.
        self.ways = [("fp32", False, False)]
        if self.device.type == "cuda":
            try:
                check_precision(self.device, "bf16")
                half = "bf16"
            except ValueError:  # a T4 has only float16
                half = "fp16"
            self.ways = [(half, True, True), (half, True, False), (half, False, False)]
        self.out = Path("runs")
        if out is not None:
            self.out = folder_to_write(out)
            self.fields["data.data_dir"] = f"{out}/{first.data.data_dir}"  # one for each text, as without out
        self.started = 0.0
        self.not_planned = ""  # why the planner cannot predict the memory of a trial

    def _config(self, size: str, fields: Mapping[str, Any] | None = None) -> RunConfig:
        """The run of a size with some fields. The user's fields override them."""
        shape = {f"model.{name}": value for name, value in SIZES.get(size, {}).items()}
        chosen = {**self.fields, **shape, **(fields or {})}
        return self.make_config(
            [f"--{name}={v if isinstance(v, str) else json.dumps(v)}" for name, v in chosen.items()]
        )

    def prepare(self) -> Path:
        """Make the data, search, and print the commands. Returns the configuration file of the run to train."""
        shapes = {size: self._config(size).model.shape for size in self.sizes}
        tokens = len(prepare_data(self._config(self.sizes[0])).train)
        self.started = time.perf_counter()
        self.folder = self.out / f"speedrun-{datetime.now():%Y%m%d-%H%M%S}"
        self.folder.mkdir(parents=True)
        self.fields["run_dir"] = str(self.folder / "run")
        config = self._final(self._search(shapes, tokens), tokens)
        file = self.folder / "speedrun.json"
        write_json(file, config.to_dict())

        train = f"{program()} train --config {shlex.quote(str(file))}"
        if config.parallel.devices > 1:
            many = f"{program('torchrun')} --nproc-per-node {config.parallel.devices} -m cs336_systems"
            train = train.replace(program(), many, 1)
        say(f"\ncommands:\n  {train}                 # trains it\n  {train} --resume auto   # continues after a stop")
        if config.data.source != "random":  # random tokens have no tokenizer
            words = [program(), "generate", str(config.run_dir), "--prompt", config.sample.prompt or "The"]
            say(f"  {shlex.join(words)}")
        say("")
        return file

    def _search(self, shapes: Mapping[str, ModelShape], unique_tokens: int) -> Candidate:
        """Search, printing each candidate. Returns the candidate to train."""
        seconds = math.inf if self.minutes is None else 60 * self.minutes

        def is_time_left(step_s: float) -> bool:
            end = time.perf_counter() - self.started + trial_s(step_s, self.device.type)
            return end < _SEARCH_SHARE * seconds

        def tell(found: Candidate) -> None:
            say(
                f"  {found.trial.size:<7}{num_parameters(found.shape) / 1e6:7,.1f} M parameters, {self._step(found)}: "
                f"{found.step_s * 1e3:,.1f} ms, {found.row.metrics['peak_memory_bytes'] / 2**30:.1f} GiB; would train "
                f"on {found.tokens / 1e6:,.1f} M tokens, {found.tokens_a_parameter:.2g} a parameter"
            )

        where = f"{self.devices} x {gpu_name()}" if self.device.type == "cuda" else "the CPU"
        say(f"searching, on {where}, with {unique_tokens:,} tokens of text:")
        return search(
            Task(
                shapes=shapes,
                kernels=self.kernels,
                devices=self.devices,
                unique_tokens=unique_tokens,
                seconds=(1 - _SEARCH_SHARE / 2) * seconds,
                tokens=None if self.epochs is None else self.epochs * unique_tokens,
                most_sequences=self._most_sequences,
                measure=self._measure,
                tell=tell,
                is_time_left=is_time_left,
            )
        )

    def _step(self, found: Candidate) -> str:
        """The kernel and the batch of a step, in words."""
        trial = found.trial
        pieces = f" in {trial.micro_batches} parts" if trial.micro_batches > 1 else ""
        batch = trial.sequences * self.devices
        return f"{trial.kernel}, {batch} x {found.shape.context_length} tokens a step{pieces}"

    def _fields_of(self, trial: Trial) -> dict[str, Any]:
        """The fields of a run that a trial and the fastest way set."""
        precision, compiled, graph = self.ways[0]
        return {
            "model.attention": trial.kernel,
            "train.batch_size": trial.sequences * self.devices,
            "train.gradient_accumulation_steps": trial.micro_batches,
            "train.precision": precision,
            "train.compile": compiled,
            "train.cuda_graph": graph,
        }

    def _measure(self, trial: Trial) -> Row:
        """Time a trial in the first way that works. All later trials use that way."""
        while True:
            is_last = len(self.ways) == 1
            try:
                config = self._config(trial.size, self._fields_of(trial))
            except ValueError:  # fields that the user gave do not allow this way
                if is_last:
                    raise
            else:
                row = time_trial(trial, config, self.device.type)
                append_row(self.folder / "rows.jsonl", row)
                if row.status != "ok":
                    say(f"  {row.variant}: {row.status} {row.error}")
                if row.status != "error" or is_last:
                    self.ways = self.ways[:1]
                    return row
            self.ways = self.ways[1:]

    def _most_sequences(self, shape: ModelShape) -> int:
        """How many sequences fit on a GPU at once, according to the planner."""
        unlimited = 1 << 20
        there = memory_bytes(self.device)
        if there is None:
            return unlimited
        if self.device.type == "cpu":
            there //= 2 * self.devices  # half of main memory, shared by the processes
        shape_fields = {f"model.{name}": value for name, value in dataclasses.asdict(shape).items()}
        precision, compiled, graph = self.ways[0]
        fields = shape_fields | {"train.precision": precision, "train.compile": compiled, "train.cuda_graph": graph}
        config = self._config(_GIVEN, fields | {"train.batch_size": self.devices})
        try:
            job = training_job(
                "speedrun", "alone" if self.devices == 1 else "", {"run": config.to_dict(), "devices": self.devices}
            )
        except ValueError as error:  # the planner does not know this configuration
            if str(error) != self.not_planned:  # say it once, not for every trial
                self.not_planned = str(error)
                logger.warning("how much fits into memory is found by trying: %s", error)
            return unlimited
        most = largest_batch(job, _MEMORY_SHARE * there)
        if not most:
            needed, gib = peak_bytes(job) / 2**30, there / 2**30
            say(f"  {num_parameters(shape) / 1e6:,.1f} M parameters need {needed:,.1f} GiB; {gib:,.1f} GiB are there")
        return most

    def _final(self, best: Candidate, unique_tokens: int) -> RunConfig:
        """The run of the candidate, with as many steps as fit into the remaining time or as its tokens need."""
        step_s, start_s = best.step_s, best.row.metrics["startup_s"]
        batch = best.trial.sequences * self.devices * best.shape.context_length
        fields = self._fields_of(best.trial) | {"optimizer.lr": round(learning_rate(best.flops), 6)}
        if self.minutes is None:
            steps = math.ceil(best.tokens / batch)
        else:
            elapsed = time.perf_counter() - self.started
            left = 60 * self.minutes - elapsed
            steps = int((_STEPS_SHARE * left - start_s) / step_s)
            if steps < _VALIDATIONS:
                needed = ((start_s + _VALIDATIONS * step_s) / _STEPS_SHARE + elapsed) / 60
                raise ValueError(
                    f"minutes is {self.minutes:g}: timing took {elapsed:.0f} s and a start takes {start_s:.0f} s, so "
                    f"it must be at least {math.ceil(10 * needed + 1) / 10:.1f}"
                )
            passes = math.ceil(MOST_EPOCHS * unique_tokens / batch)
            if passes < steps:
                say(f"{MOST_EPOCHS} passes over the text take less than the time: a longer text would be worth more")
            steps = min(steps, passes)
            fields["train.max_minutes"] = round(left / 60, 3)
        seconds = steps * step_s
        # A token of validation costs a third of one of training. All validations together may take 3 % of the time.
        tokens = 0.03 * seconds / _VALIDATIONS * 3 * batch / step_s
        fields |= {
            "train.max_steps": steps,
            "train.validation_interval": max(1, steps // _VALIDATIONS),
            "train.validation_sequences": min(1024, max(16, int(tokens / best.shape.context_length))),
            "checkpoint.checkpointing_interval": max(1, steps // 4),
        }
        say(f"to train: {best.trial.size}, {self._step(best)}, because {best.why}")
        whole = seconds + start_s
        duration = f"{whole / 60:.1f} minutes" if whole >= 60 else f"{whole:.0f} seconds"
        say(f"{steps:,} step{'s' * (steps != 1)} on {steps * batch / 1e6:,.1f} M tokens, about {duration}")
        return self._config(best.trial.size, fields)
