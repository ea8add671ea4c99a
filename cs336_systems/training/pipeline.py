"""The main job: get the text, train the tokenizer, tokenize, train the model, sample from it."""

import contextlib
import dataclasses
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cs336_basics.data import bigram_model_loss, unigram_bigram_entropy, write_json
from cs336_basics.generate import generate
from cs336_basics.model import TransformerLM
from cs336_basics.tokenizer import Tokenizer

from ..accounting import least_training_bytes, num_parameters
from ..config import RunConfig, SampleConfig
from ..hardware import check_precision, environment, memory_bytes, use_device
from ..kernels.attention import check_attention, get_attention
from .checkpoint import (
    Manifest,
    check_identity,
    checkpoint_name,
    collect_state,
    find_checkpoints,
    newest_whole_checkpoint,
    prune_checkpoints,
    restore_state,
    save_checkpoint,
    set_newer_aside,
    verify_checkpoint,
)
from .folder import CHECKPOINTS, CONFIG, LOSS_CURVE, RESULT, SAMPLE, TOKENIZER, check_run_dir, locked
from .load import LoadedModel, load_model
from .loop import AUTOCAST_DTYPES, Position, StopRequest, Trainer, validation_starts
from .metrics import METRICS_FILE, Progress, Row, finite_or_none, open_sinks, plot_loss_curves, read_metrics, summarise
from .prepare import PreparedData, prepare_data

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run came to. Losses and entropies in nats a token; written as result.json."""

    run_dir: str
    checkpoint: str
    loss_curve: str
    step: int
    interrupted: str | None
    """Name of the signal that stopped the run before its last step, or None."""
    train_loss: float | None
    valid_loss: float | None
    unigram_entropy: float
    bigram_entropy: float
    bigram_model_loss: float
    """What a smoothed table of the training text's pair counts scores on the validation text."""
    sample: str | None
    first_step: int = 1
    """Of this process, above 1 after a resume: times, rates and memory below are of the steps from it on."""
    skipped_steps: int
    startup_s: float | None
    """From building the model to the end of the first step, compilation included."""
    step_ms: dict[str, float]
    """p20, p50, p80, mean and std over the steps of this process, without its first five."""
    data_wait_ms: float | None
    tokens_per_s: float | None
    mfu: float | None
    peak_memory_bytes: int
    env: dict[str, Any]


def train(config: RunConfig) -> RunResult:
    """Run everything that the configuration describes and return what it came to.

    Raises ValueError or FileNotFoundError for what the user can mend, NonFiniteError for a loss that is no number, and
    CheckpointError where a checkpoint cannot be written.
    """
    device = use_device(config.train.device)
    check_precision(device, config.train.precision)
    if config.train.cuda_graph and device.type != "cuda":
        raise ValueError(f"train.cuda_graph is true: it needs a CUDA device, and train.device is {device.type!r}")
    _check_memory(config, device)
    shape = config.model.shape
    dtype = AUTOCAST_DTYPES.get(config.train.precision, torch.float32)
    check_attention(config.model.attention, shape.d_model // shape.num_heads, dtype, device)
    run_dir = Path(config.run_dir or f"runs/{config.data.source}-{datetime.now():%Y%m%d-%H%M%S}")
    config = dataclasses.replace(config, run_dir=str(run_dir))
    check_run_dir(run_dir, own={Path(str(config.data.tokenizer))})
    with locked(run_dir):
        resumed = _find_resume(config, run_dir)
        first_weights = load_model(config.init_from) if config.init_from is not None and resumed is None else None
        data = prepare_data(config)
        if data.tokenizer is not None:
            _check_prompt(data.tokenizer, config.sample, config.model.shape.context_length)
        identity = _identity(config, data)
        if resumed is not None:
            check_identity(*resumed, identity)
            if (finished := _finished_result(config, run_dir, resumed)) is not None:
                return finished
        set_newer_aside(run_dir / CHECKPOINTS, resumed[1].step if resumed is not None else -1)
        if first_weights is not None:
            _check_first_weights(first_weights, identity)
        write_json(run_dir / CONFIG, config.to_dict())
        if data.tokenizer is not None:
            data.tokenizer.save(run_dir / TOKENIZER)
        started = time.perf_counter()
        torch.manual_seed(config.train.seed)
        with device:  # drawing the weights where they stay: 2.7 billion of them take a minute on a CPU
            model = TransformerLM(**dataclasses.asdict(shape), attention=get_attention(config.model.attention))
        if first_weights is not None:
            model.load_state_dict(first_weights.state_dict)
            logger.info("weights: from %s", first_weights.checkpoint)
            del first_weights
        with contextlib.closing(Trainer(config, model, data.train, device)) as trainer:
            if resumed is not None:
                _restore(trainer, *resumed)
            run = _Run(config, run_dir, trainer, data, identity, started, resumed)
            with _determinism(config.train.deterministic):
                interrupted = run.run()
            result = run.report(interrupted)
        write_json(run_dir / RESULT, dataclasses.asdict(result))
    return result


def _check_memory(config: RunConfig, device: torch.device) -> None:
    """Refuse what cannot fit before it is built: a billion layers would not fail, but take for ever."""
    shape, train = config.model.shape, config.train
    needed = least_training_bytes(shape, train.batch_size, train.batch_size // train.gradient_accumulation_steps)
    there = memory_bytes(device)
    if there is not None and needed > there:
        names = ("vocab_size", "context_length", "d_model", "d_ff", "num_layers")
        sizes = [f"model.{name} {getattr(shape, name)}" for name in names]
        sizes += [f"train.{name} {getattr(train, name)}" for name in ("batch_size", "gradient_accumulation_steps")]
        raise ValueError(
            f"{', '.join(sizes)}: to train this needs at least {needed / 2**30:,.1f} GiB, and {device} has "
            f"{there / 2**30:,.1f} GiB"
        )


@contextlib.contextmanager
def _determinism(wanted: bool) -> Iterator[None]:
    """PyTorch's deterministic algorithms, if wanted, for the time of a run."""
    before = torch.are_deterministic_algorithms_enabled()
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs for it; read at its first use
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _find_resume(config: RunConfig, run_dir: Path) -> tuple[Path, Manifest] | None:
    checkpoints = run_dir / CHECKPOINTS
    if config.resume == "auto":
        found = newest_whole_checkpoint(checkpoints)
        if found is None:
            logger.info("resume: no whole checkpoint in %s, starting from the beginning", checkpoints)
        return found
    taken = (run_dir / METRICS_FILE).exists() or bool(find_checkpoints(checkpoints))
    if config.resume == "none":
        if taken:
            raise ValueError(
                f"run_dir {run_dir} holds a run already: give --resume auto to go on with it, or another run_dir"
            )
        return None
    path = Path(config.resume)
    if taken and path.resolve().parent != checkpoints.resolve():
        raise ValueError(f"run_dir {run_dir} holds another run than resume, {path}: give another run_dir")
    return path, verify_checkpoint(path)


def _finished_result(config: RunConfig, run_dir: Path, resumed: tuple[Path, Manifest]) -> RunResult | None:
    """What the run came to, where it is being resumed after its last step."""
    path, step = run_dir / RESULT, resumed[1].step
    if step < config.train.max_steps or not path.is_file():
        return None
    try:
        known = RunResult(**json.loads(path.read_text()))
    except (ValueError, TypeError):  # of another version, or damaged: made again
        return None
    if known.step != step or known.interrupted is not None:
        return None
    logger.info("resume: %s is finished, at step %d", run_dir, step)
    return known


def _identity(config: RunConfig, data: PreparedData) -> dict[str, Any]:
    return {
        **{f"model.{name}": value for name, value in dataclasses.asdict(config.model.shape).items()},
        "train.seed": config.train.seed,
        "tokenizer": data.tokenizer.sha256 if data.tokenizer else None,
        "training tokens": data.train_sha256,
    }


def _check_first_weights(weights: LoadedModel, identity: dict[str, Any]) -> None:
    """Refuse weights of another architecture or tokenizer. Seed and data may differ: that is what this is for."""
    wanted = {name: value for name, value in identity.items() if name.startswith("model.") or name == "tokenizer"}
    known = {name: value for name, value in weights.manifest.identity.items() if name in wanted}
    check_identity(weights.checkpoint, dataclasses.replace(weights.manifest, identity=known), wanted)


def _check_prompt(tokenizer: Tokenizer, sample: SampleConfig, context_length: int) -> None:
    """Tell before training of a sample that cannot be drawn after it."""
    length = len(tokenizer.encode(sample.prompt)) or 1
    if length + (sample.max_new_tokens or 0) > context_length:
        raise ValueError(
            f"sample.prompt has {length} tokens and sample.max_new_tokens is {sample.max_new_tokens}: together they "
            f"must be at most model.context_length, {context_length}"
        )


def _restore(trainer: Trainer, path: Path, manifest: Manifest) -> None:
    try:
        restore_state(path, trainer.model, trainer.optimizer, trainer.device)
        trainer.position = Position(manifest.step, manifest.sequences, manifest.trainer["skipped_steps"])
        if trainer.scaler.is_enabled() and manifest.trainer["scaler"]:
            trainer.scaler.load_state_dict(manifest.trainer["scaler"])
    except KeyError as error:
        raise ValueError(f"checkpoint {path} does not hold all that a run goes on from: no {error}") from error
    logger.info("resume: from %s, step %d", path, manifest.step)


class _Run:
    """One pass through the steps of a run, with its validations, checkpoints and reports."""

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
        self.sinks = open_sinks(run_dir, config, trainer.position.step)

    def run(self) -> str | None:
        """Train to the last step, or to a signal, whose name is returned; then save."""
        position, max_steps = self.trainer.position, self.config.train.max_steps
        self._describe()
        try:
            with StopRequest() as stop, Progress(position.step, max_steps) as progress:
                self.trainer.reset_clock()
                while position.step < max_steps and stop.signal is None:
                    self._step(progress)
                interrupted = stop.signal if position.step < max_steps else None
                if interrupted is None and (self.validated is None or self.validated[0] != position.step):
                    self._validate(progress)
                if self.saved_step != position.step:
                    self._save()
        finally:
            for sink in self.sinks:
                sink.close()
        return interrupted

    def _describe(self) -> None:
        shape, train, trainer = self.config.model.shape, self.config.train, self.trainer
        logger.info(
            "model: %s parameters, %d layers, on %s in %s%s",
            f"{num_parameters(shape):,}",
            shape.num_layers,
            self.env["gpu"] if trainer.device.type == "cuda" else f"{self.env['cpu_threads']} CPU threads",
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

    def _write(self, row: Row, progress: Progress) -> None:
        for sink in self.sinks:
            sink.write(row)
        progress.update(row)

    def _step(self, progress: Progress) -> None:
        row = self.trainer.train_step()
        if self.startup_s is None:
            self.startup_s = time.perf_counter() - self.started
        self.rows.append(row)
        self._write(row, progress)
        step, train = row["step"], self.config.train
        if step == train.max_steps or (train.validation_interval and step % train.validation_interval == 0):
            self._validate(progress)
        interval = self.config.checkpoint.checkpointing_interval
        if interval > 0 and step % interval == 0:
            self._save()

    def _validate(self, progress: Progress) -> None:
        step = self.trainer.position.step
        self.validated = step, self.trainer.evaluate(self.data.valid)
        self._write({"step": step, "valid_loss": self.validated[1]}, progress)
        self.trainer.reset_clock()

    def _save(self) -> None:
        position, trainer = self.trainer.position, self.trainer
        save_checkpoint(
            self.checkpoints,
            collect_state(trainer.model, trainer.optimizer, trainer.device),
            step=position.step,
            sequences=position.sequences,
            identity=self.identity,
            trainer={"skipped_steps": position.skipped_steps, "scaler": trainer.scaler.state_dict()},
            config=self.config.to_dict(),
            versions=self.env,
        )
        self.saved_step = position.step
        prune_checkpoints(self.checkpoints, self.config.checkpoint.keep_last)
        trainer.reset_clock()

    def report(self, interrupted: str | None) -> RunResult:
        """Plot, sample and put together what the run came to."""
        train, shape = self.config.train, self.config.model.shape
        micro_batch = train.batch_size // train.gradient_accumulation_steps
        starts = validation_starts(len(self.data.valid), shape.context_length, train.validation_sequences, micro_batch)
        measured = self.data.valid[: starts.size * shape.context_length + 1]  # the tokens that the loss is of
        unigram, bigram = unigram_bigram_entropy(measured)
        bigram_loss = bigram_model_loss(self.data.train, measured, shape.vocab_size)
        loss_curve = self.run_dir / LOSS_CURVE
        baselines = {"unigram entropy": unigram, "bigram model": bigram_loss, "bigram entropy": bigram}
        plot_loss_curves({self.run_dir.name: read_metrics(self.run_dir / METRICS_FILE)}, loss_curve, baselines)
        sample = None
        if interrupted is None and self.data.tokenizer is not None:
            sample = sample_text(self.trainer.model, self.data.tokenizer, self.config.sample)
            (self.run_dir / SAMPLE).write_text(sample)
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


def sample_text(model: TransformerLM, tokenizer: Tokenizer, config: SampleConfig) -> str:
    """The prompt and what the model makes of it; an empty prompt starts a new document."""
    prompt = tokenizer.encode(config.prompt) or [tokenizer.end_of_text_id]
    with torch.compiler.set_stance("force_eager"):  # every length would be compiled by itself
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
