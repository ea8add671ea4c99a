"""One pass through the steps of a run, with its validations, checkpoints and reports, and its result."""

import contextlib
import logging
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cs336_basics.data import bigram_model_loss, unigram_bigram_entropy
from cs336_basics.generate import generate
from cs336_basics.model import TransformerLM
from cs336_basics.tokenizer import Tokenizer

from ..config.run import RunConfig, SampleConfig
from ..kernels.attention import get_attention
from ..machine.files import write_whole
from ..machine.garbage import objects_set_aside
from ..machine.hardware import environment
from ..parallel import comm
from ..planner.accounting import num_parameters
from .async_saver import AsyncSaver
from .checkpoint import prune_together, save_checkpoint
from .folder import CHECKPOINTS, LOSS_CURVE, SAMPLE
from .loop import StopRequest, Trainer
from .manifest import Manifest, checkpoint_name
from .metrics import (
    METRICS_FILE,
    Progress,
    Row,
    Sink,
    finite_or_none,
    open_sinks,
    plot_loss_curves,
    read_metrics,
    summarise,
)
from .prepare import PreparedData
from .state import collect_state
from .together import on_first_rank

logger = logging.getLogger(__name__)

# Read for the 16th time, a token teaches 38 % of what a new one does, and ever less: in the fit of Muennighoff et al.
# (2023) as exp(-repetitions / 15.4).
_MANY_PASSES = 16


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of a run, written as result.json. Losses and entropies are in nats per token."""

    run_dir: str
    checkpoint: str
    loss_curve: str
    step: int
    interrupted: str | None
    """Name of the signal that stopped the run before its last step, or None; also None if its time was up."""
    train_loss: float | None
    valid_loss: float | None
    unigram_entropy: float
    bigram_entropy: float
    """Of the validation text's own pairs: no limit for a model, because a short text repeats few of its pairs."""
    bigram_model_loss: float
    """What a smoothed table of the training text's pair counts scores on the validation text."""
    sample: str | None = field(repr=False)
    first_step: int = 1
    """First step of this process, above 1 after a resume: times, rates and memory below cover the steps from it on."""
    skipped_steps: int
    startup_s: float | None
    """From building the model to the end of the first step, compilation included."""
    step_ms: dict[str, float]
    """p20, p50, p80, mean and std over the steps of this process, without its first five."""
    data_wait_ms: float | None
    tokens_per_s: float | None
    mfu: float | None
    peak_memory_bytes: int
    env: dict[str, Any] = field(repr=False)


class Run:
    """One pass through the steps of a run. With several ranks, each makes one; only rank 0 writes and reports."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        trainer: Trainer,
        data: PreparedData,
        identity: dict[str, Any],
        started: float,
        resumed: tuple[Path, Manifest] | None,
    ) -> None:
        self.config, self.run_dir, self.trainer, self.data, self.identity = config, run_dir, trainer, data, identity
        self.started = started
        self.startup_s: float | None = None
        self.env = environment()
        self.first_step = trainer.position.step + 1
        self.rows: list[Row] = []
        self.validated: tuple[int, float] | None = None
        self.checkpoints = run_dir / CHECKPOINTS
        own = resumed is not None and resumed[0].resolve().parent == self.checkpoints.resolve()
        self.saved_step = trainer.position.step if own else None
        self.sinks: list[Sink] = []
        on_first_rank(lambda: self.sinks.extend(open_sinks(run_dir, config, trainer.position.step)), "start of the log")
        self.progress: Progress | None = None
        self.saver: AsyncSaver | None = None

    def run(self) -> str | None:
        """Train to the last step, to train.max_minutes, or to a signal, whose name is returned; save and validate."""
        position, max_steps = self.trainer.position, self.config.train.max_steps
        self._describe()
        with contextlib.ExitStack() as stack:
            for sink in self.sinks:
                stack.callback(sink.close)
            stop = stack.enter_context(StopRequest())
            if self.config.checkpoint.async_save:
                self.saver = stack.enter_context(AsyncSaver())
            if comm.rank() == 0:
                self.progress = stack.enter_context(Progress(position.step, max_steps))
            self.trainer.reset_clock()
            while position.step < max_steps and not self._is_to_stop(stop):
                self._step(stop)
                if position.step == self.first_step:
                    stack.enter_context(objects_set_aside())
            interrupted = self._stopped_by(stop) if position.step < max_steps else None
            if interrupted is None and position.step < max_steps and self._time_is_up():
                minutes = self.config.train.max_minutes
                logger.info("time is up: train.max_minutes %g, at step %d of %d", minutes, position.step, max_steps)
            if self.saved_step != position.step:  # first, because a scheduler may soon end what it has told to stop
                self._save()
            if self.validated is None or self.validated[0] != position.step:
                self._validate()
        return interrupted

    def _is_to_stop(self, stop: StopRequest) -> bool:
        # Several ranks agree during a step; a single one can stop wherever it is asked to.
        return self.trainer.stopping or (comm.world_size() == 1 and stop.wanted())

    def _time_is_up(self) -> bool:
        minutes = self.config.train.max_minutes
        return minutes is not None and time.perf_counter() - self.started >= 60 * minutes

    def _stopped_by(self, stop: StopRequest) -> str | None:
        """The signal that stopped the run, on whichever rank it came first."""
        return next((name for name in comm.gather_objects(stop.signal, "reason of the stop") if name is not None), None)

    def _describe(self) -> None:
        shape, train = self.config.model.shape, self.config.train
        logger.info(
            "model: %s parameters, %d layers, on %s in %s%s",
            f"{num_parameters(shape):,}",
            shape.num_layers,
            self._where(),
            train.precision,
            ", compiled" if train.compile else "",
        )
        logger.info(
            "training: steps %d to %d of %d sequences of %d tokens, from %s tokens",
            self.first_step,
            train.max_steps,
            train.batch_size,
            shape.context_length,
            f"{len(self.data.train):,}",
        )
        passes = train.max_steps * train.batch_size * shape.context_length / len(self.data.train)
        if passes > _MANY_PASSES:
            logger.warning(
                "training: that is %.0f passes over these tokens; beyond about %d, more passes teach little. Give a "
                "longer text or fewer train.max_steps",
                passes,
                _MANY_PASSES,
            )

    def _where(self) -> str:
        """What the run runs on, for a person."""
        one = self.env["gpu"] if self.trainer.device.type == "cuda" else f"{self.env['cpu_threads']} CPU threads"
        if comm.world_size() == 1:
            return one
        parallel = self.config.parallel
        sharded = ", sharded optimizer" if parallel.shard_optimizer else ""
        return f"{comm.world_size()} x {one} ({parallel.strategy_for(comm.world_size())}{sharded})"

    def _write(self, row: Row) -> None:
        for sink in self.sinks:
            sink.write(row)
        if self.progress is not None:
            self.progress.update(row)

    def _step(self, stop: StopRequest) -> None:
        row = self.trainer.train_step(lambda: stop.wanted() or self._time_is_up())
        if self.startup_s is None:
            self.startup_s = time.perf_counter() - self.started
        self.rows.append(row)
        self._write(row)
        step, train = row["step"], self.config.train
        if step == train.max_steps or (train.validation_interval and step % train.validation_interval == 0):
            self._validate()
        interval = self.config.checkpoint.checkpointing_interval
        if interval > 0 and step % interval == 0:
            self._save()

    def _validate(self) -> None:
        step = self.trainer.position.step
        self.validated = step, self.trainer.evaluate(self.data.valid)
        self._write({"step": step, "valid_loss": self.validated[1]})
        self.trainer.reset_clock()

    def _save(self) -> None:
        position, trainer = self.trainer.position, self.trainer
        tensors = collect_state(trainer.model, trainer.optimizer, trainer.device, trainer.strategy.shards())
        manifest: dict[str, Any] = dict(
            step=position.step,
            sequences=position.sequences,
            identity=self.identity,
            trainer={"skipped_steps": position.skipped_steps, "scaler": trainer.scaler.state_dict()},
            config=self.config.to_dict(),
            versions=self.env,
        )
        keep_last = self.config.checkpoint.keep_last
        if self.saver is not None:
            self.saver.save(self.checkpoints, tensors, keep_last=keep_last, **manifest)
        else:
            save_checkpoint(self.checkpoints, tensors, **manifest)
            prune_together(self.checkpoints, keep_last)
        self.saved_step = position.step
        trainer.reset_clock()

    def report(self, interrupted: str | None) -> RunResult:
        """The result of the run; on rank 0 with a plot and a sample."""
        train, shape = self.config.train, self.config.model.shape
        sample = None
        if interrupted is None and self.data.tokenizer is not None:
            sample = self._sample(self.data.tokenizer)
            if sample is not None:
                write_whole(self.run_dir / SAMPLE, sample)
        if interrupted is None and self.data.tokenizer is None:
            logger.info("sample: none, because the run has no tokenizer")
        starts = self.trainer.validation_starts(len(self.data.valid))
        measured = self.data.valid[: starts.size * shape.context_length + 1]  # the tokens that the loss covers
        loss_curve = self.run_dir / LOSS_CURVE

        def compare_with_baselines() -> tuple[float, float, float]:
            """Entropies of what was validated on and the loss of a bigram model; draws them beside the run's losses."""
            unigram, bigram = unigram_bigram_entropy(measured)
            bigram_loss = bigram_model_loss(self.data.train, measured, shape.vocab_size)
            baselines = {"unigram entropy": unigram, "bigram model": bigram_loss}
            plot_loss_curves({self.run_dir.name: read_metrics(self.run_dir / METRICS_FILE)}, loss_curve, baselines)
            return unigram, bigram, bigram_loss

        unigram, bigram, bigram_loss = on_first_rank(compare_with_baselines, "drawing of the losses")
        timed = self.rows[5:]
        step_ms = summarise([row["step_ms"] for row in timed])
        tokens = train.batch_size * shape.context_length
        return RunResult(
            run_dir=str(self.run_dir),
            checkpoint=str(self.checkpoints / checkpoint_name(self.trainer.position.step)),
            loss_curve=str(loss_curve),
            step=self.trainer.position.step,
            interrupted=interrupted,
            train_loss=finite_or_none(self.rows[-1]["loss"]) if self.rows else None,
            valid_loss=finite_or_none(self.validated[1]) if self.validated else None,
            unigram_entropy=unigram,
            bigram_entropy=bigram,
            bigram_model_loss=bigram_loss,
            sample=sample,
            first_step=self.first_step,
            skipped_steps=self.trainer.position.skipped_steps,
            startup_s=self.startup_s,
            step_ms=step_ms,
            data_wait_ms=float(np.mean([row["data_wait_ms"] for row in timed])) if timed else None,
            tokens_per_s=tokens / step_ms["p50"] * 1e3 if timed else None,
            mfu=float(np.median([row["mfu"] for row in timed])) if timed and timed[0]["mfu"] is not None else None,
            peak_memory_bytes=self.trainer.memory_bytes(),
            env=self.env,
        )

    def _sample(self, tokenizer: Tokenizer) -> str | None:
        """What the trained model makes of the prompt, on rank 0; None on the others, which help to gather the model."""
        trainer, sampling = self.trainer, self.config.sample
        state = trainer.strategy.full_state_dict(to_rank=0) if trainer.strategy.sharded else None
        if comm.rank() != 0:
            return None
        if state is None:
            return sample_text(trainer.model, tokenizer, sampling)
        with contextlib.suppress(torch.OutOfMemoryError):
            model = self._whole_model(state, trainer.device, self.config.model.attention)
            return sample_text(model, tokenizer, sampling)
        logger.info("sample: drawn on the CPU, %s has no room for the whole model", trainer.device)
        return sample_text(self._whole_model(state, torch.device("cpu"), "auto"), tokenizer, sampling)

    def _whole_model(self, state: dict[str, Tensor], device: torch.device, attention: str) -> TransformerLM:
        """A single-process model with these weights."""
        with torch.device("meta"):  # the weights exist: initialize none, and use no memory for others beside them
            model = TransformerLM(**asdict(self.config.model.shape), attention=get_attention(attention))
        model.load_state_dict(state, assign=True)
        for name, buffer in self.trainer.model.named_buffers():  # tables, which are no part of a state dict
            owner, _, key = name.rpartition(".")
            setattr(model.get_submodule(owner), key, buffer)
        return model.to(device)


def sample_text(model: TransformerLM, tokenizer: Tokenizer, config: SampleConfig) -> str:
    """The prompt and what the model makes of it; an empty prompt starts a new document."""
    prompt = tokenizer.encode(config.prompt) or [tokenizer.end_of_text_id]
    with torch.compiler.set_stance("force_eager"):  # otherwise every length would be compiled by itself
        (new,) = generate(
            model,
            [prompt],
            config.max_new_tokens,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            stop_token=tokenizer.end_of_text_id,
            seed=config.seed,
        )
    return config.prompt + tokenizer.decode(new)
