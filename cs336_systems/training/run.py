"""One pass through the steps of a run, with its validations, checkpoints and reports."""

import contextlib
import logging
import math
import time
from dataclasses import asdict

import numpy as np
import torch

from cs336_basics.data import bigram_model_loss, unigram_bigram_entropy
from cs336_basics.files import write_json

from ..machine.files import write_whole
from ..machine.garbage import gc_frozen
from ..machine.hardware import environment, why_fp8_is_slow
from ..parallel import comm
from ..parallel.failure import CollectiveError
from ..planner.accounting import num_parameters
from .async_saver import AsyncSaver
from .build import initial_model
from .checkpoint import prune_together, save_checkpoint
from .folder import CHECKPOINTS, LOSS_CURVE, RESULT, SAMPLE
from .load import LoadedModel
from .loop import Trainer
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
from .result import RunResult
from .resume import Plan, identity_of
from .sample import sample_of_trainer
from .signals import StopRequest
from .state import collect_state
from .together import on_first_rank

logger = logging.getLogger(__name__)

# A token read for the 16th time teaches 38 % of a new one: exp(-15 / 15.4), by the fit of Muennighoff et al. (2023).
_MANY_PASSES = 16
_OVERFITTED = 0.1  # nats that the validation loss has risen
_SLOW_ON_A_CPU = 1e12  # floating-point operations of a step: ten seconds on a laptop


class Run:
    """A run: builds the trainer, takes it through the steps, reports. Every rank has one; rank 0 writes the files."""

    def __init__(self, plan: Plan, data: PreparedData, device: torch.device, weights: LoadedModel | None) -> None:
        on_first_rank(lambda: plan.prepare_folder(data, weights))
        self.started = time.perf_counter()
        self.plan, self.config, self.run_dir, self.data = plan, plan.config, plan.run_dir, data
        self.checkpoints = plan.run_dir / CHECKPOINTS
        self.identity = identity_of(plan.config, data)
        self.env = environment()
        end_of_text = None if data.tokenizer is None else data.tokenizer.end_of_text_id
        model = initial_model(plan.config, device, weights)
        self.trainer = Trainer(plan.config, model, data.train, device, end_of_text)
        self.first_step = plan.step + 1
        self.saved_step = plan.step if plan.continues_own_folder() else None
        self.validated: tuple[int, float] | None = None  # the last validation: its step, its loss in nats
        self.startup_s: float | None = None
        self.rows: list[Row] = []
        self.sinks: list[Sink] = []
        self.progress: Progress | None = None
        self.saver: AsyncSaver | None = None

    def train(self) -> RunResult:
        """Train to the last step, to train.max_minutes or to a signal; save, validate and report."""
        trainer, settings = self.trainer, self.config.train
        interval = self.config.checkpoint.checkpointing_interval
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.closing(trainer))
            self.plan.restore(trainer)
            position = trainer.position
            on_first_rank(
                lambda: self.sinks.extend(open_sinks(self.run_dir, self.config, position.step)), "start of the log"
            )
            self._log_start()
            if settings.deterministic:
                stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
                torch.use_deterministic_algorithms(True)
                # Otherwise the compiler times kernels and takes the fastest, which may be others on a busy GPU.
                stack.enter_context(torch._inductor.config.patch(deterministic=True))
            for sink in self.sinks:
                stack.callback(sink.close)
            stop = stack.enter_context(StopRequest())
            if self.config.checkpoint.async_save:
                self.saver = stack.enter_context(AsyncSaver())
            if comm.rank() == 0:
                self.progress = stack.enter_context(Progress(position.step, settings.max_steps))
            trainer.reset_clock()
            # Several ranks agree during a step whether to stop; a single one stops between any two.
            while position.step < settings.max_steps and not trainer.stopping:
                if comm.world_size() == 1 and stop.requested():
                    break
                intervals = [n for n in (settings.validation_interval, interval) if n > 0]
                last = min([settings.max_steps, *((position.step // n + 1) * n for n in intervals)])  # validate or save
                for row in trainer.train_steps(last, lambda: stop.requested() or self._time_is_up()):
                    if self.startup_s is None:
                        self.startup_s = time.perf_counter() - self.started
                        stack.enter_context(gc_frozen())
                    self.rows.append(row)
                    self._write(row)
                step = position.step
                if settings.validation_interval and step % settings.validation_interval == 0:
                    self._validate()
                if interval > 0 and step % interval == 0:
                    self._save()
            interrupted = None
            if position.step < settings.max_steps:
                signals = comm.all_gather_objects(stop.signal, "reason of the stop")
                interrupted = next((name for name in signals if name is not None), None)
                if interrupted is None and self._time_is_up():
                    where = f"step {position.step} of {settings.max_steps}"
                    logger.info("time is up: train.max_minutes %g, at %s", settings.max_minutes, where)
            if self.saved_step != position.step:  # save first: after its signal, a scheduler soon kills the run
                self._save()
            if self.validated is None or self.validated[0] != position.step:
                self._validate()
        return self._report(interrupted)

    def _time_is_up(self) -> bool:
        minutes = self.config.train.max_minutes
        return minutes is not None and time.perf_counter() - self.started >= 60 * minutes

    def _log_start(self) -> None:
        config = self.trainer.config
        shape, train, parallel = config.model.shape, config.train, config.parallel
        where = {"cuda": self.env["gpu"], "mps": "Apple's GPU"}.get(
            self.trainer.device.type, f"{self.env['cpu_threads']} CPU threads"
        )
        if comm.world_size() > 1:
            sharded = ", sharded optimizer" if parallel.shard_optimizer else ""
            kept = "" if parallel.reshard_after_forward else " that keeps weights whole"
            where = f"{comm.world_size()} x {where} ({parallel.strategy}{kept}{sharded})"
        logger.info(
            f"model: {num_parameters(shape):,} parameters, {shape.num_layers} layers, on {where} in {train.precision}"
            f"{', compiled' if train.compile else ''}{', recorded' if train.cuda_graph else ''}"
        )
        if self.trainer.device.type == "cpu" and self.trainer.step_flops > _SLOW_ON_A_CPU:
            logger.warning(
                f"there is no GPU, and a step has {self.trainer.step_flops:.1e} operations, many seconds on a CPU: "
                "configs/demo.json and configs/text.json have models for one"
            )
        slow = why_fp8_is_slow(self.trainer.device, shape.d_model) if train.precision == "fp8" else ""
        if slow:
            logger.warning(f"train.precision is 'fp8', which may gain nothing here: {slow}")
        if self.first_step > train.max_steps:
            logger.info(
                f"training: nothing to do, the checkpoint is of step {self.first_step - 1} and train.max_steps is "
                f"{train.max_steps}"
            )
            return
        logger.info(
            f"training: steps {self.first_step} to {train.max_steps} of {train.batch_size} sequences of "
            f"{shape.context_length} tokens, from {len(self.data.train):,} tokens"
        )
        passes = train.max_steps * train.batch_size * shape.context_length / len(self.data.train)
        if passes > _MANY_PASSES:
            logger.warning(
                f"training: that is {passes:.0f} passes over these tokens; beyond about {_MANY_PASSES}, more passes "
                "teach little, or only the text by heart. Give a longer text or fewer train.max_steps"
            )

    def _write(self, row: Row) -> None:
        for sink in self.sinks:
            sink.write(row)
        if self.progress is not None:
            self.progress.update(row)

    def _validate(self) -> None:
        step = self.trainer.position.step
        self.validated = step, self.trainer.evaluate(self.data.valid)
        self._write({"step": step, "valid_loss": self.validated[1]})
        self.trainer.reset_clock()

    def _save(self) -> None:
        position, trainer = self.trainer.position, self.trainer
        tensors = collect_state(trainer.model, trainer.optimizer, trainer.device, trainer.strategy.shards())
        manifest = Manifest(
            step=position.step,
            sequences=position.sequences,
            identity=self.identity,
            trainer={
                "skipped_steps": position.skipped_steps,
                "scaler": {} if trainer.scale is None else trainer.scale.state_dict(),
            },
            config=self.config.to_dict(),
            versions=self.env,
        )
        keep_last = self.config.checkpoint.keep_last
        if self.saver is not None:
            self.saver.save(self.checkpoints, tensors, manifest, keep_last)
        else:
            save_checkpoint(self.checkpoints, tensors, manifest)
            prune_together(self.checkpoints, keep_last)
        self.saved_step = position.step
        trainer.reset_clock()

    def _report(self, interrupted: str | None) -> RunResult:
        """Sample a text and plot the losses; return the result of the run, which rank 0 also writes."""
        sample = self._sample() if interrupted is None else None
        unigram, bigram, bigram_loss = on_first_rank(self._compare_with_baselines, "drawing of the losses")
        timed = self.rows[5:]  # without the warm-up
        step_ms = summarise([row["step_ms"] for row in timed])
        tokens = self.config.train.batch_size * self.config.model.shape.context_length
        result = RunResult(
            run_dir=str(self.run_dir),
            checkpoint=str(self.checkpoints / checkpoint_name(self.trainer.position.step)),
            loss_curve=str(self.run_dir / LOSS_CURVE),
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
            peak_memory_bytes=self.trainer.peak_memory_bytes(),
            env=self.env,
        )
        if comm.rank() == 0:
            write_json(self.run_dir / RESULT, asdict(result))
        return result

    def _sample(self) -> str | None:
        """A sample of text, on rank 0, which also writes it. All ranks call it together."""
        if self.data.tokenizer is None:
            logger.info("sample: none, because the run has no tokenizer")
            return None
        try:
            sample = sample_of_trainer(self.trainer, self.data.tokenizer)
        except CollectiveError:
            raise
        except Exception as error:  # also of a kernel of your own. Rank 0 alone draws, so no other rank waits
            logger.warning("sample: none, because %s", error)
            return None
        if sample is not None:
            write_whole(self.run_dir / SAMPLE, sample)
        return sample

    def _compare_with_baselines(self) -> tuple[float, float, float]:
        """Plot the losses. Returns the unigram and bigram entropy of the validation, a bigram model's loss; nats."""
        shape = self.config.model.shape
        starts = self.trainer.validation_starts(len(self.data.valid))
        measured = self.data.valid[: starts.size * shape.context_length + 1]  # the tokens that the loss covers
        unigram, bigram = unigram_bigram_entropy(measured)
        bigram_loss = bigram_model_loss(self.data.train, measured, shape.vocab_size)
        rows = read_metrics(self.run_dir / METRICS_FILE)
        baselines = {"unigram entropy": unigram, "bigram model": bigram_loss}
        plot_loss_curves({self.run_dir.name: rows}, self.run_dir / LOSS_CURVE, baselines)
        validated = [(row["valid_loss"], row["step"]) for row in rows if row.get("valid_loss") is not None]
        lowest, step = min(validated, default=(math.inf, 0))
        if validated and validated[-1][0] > lowest + _OVERFITTED:
            message = "the validation loss rose from %.3f at step %d to %.3f: take fewer steps, or more text"
            logger.warning(message, lowest, step, validated[-1][0])
        return unigram, bigram, bigram_loss
