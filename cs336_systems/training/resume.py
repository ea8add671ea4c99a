"""How a run starts: new, from the weights of another run, or from a checkpoint.

Rank 0 decides it once. Every rank receives the same frozen `Plan`.
"""

import contextlib
import dataclasses
import json
import logging
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from cs336_basics.files import sha256_of_file, write_json
from cs336_basics.tokenizer import Tokenizer

from ..config.checks import require
from ..config.data import DataConfig, without_default_paths
from ..config.run import RunConfig
from ..parallel import comm
from .checkpoint import set_newer_aside
from .folder import CHECKPOINTS, CONFIG, RESULT, TOKENIZER, check_run_dir, locked
from .load import LoadedModel, load_model
from .loop import Position, Trainer
from .manifest import Manifest, check_identity, find_checkpoints, newest_whole_checkpoint, verify_checkpoint
from .metrics import METRICS_FILE
from .optimizer import learning_rate
from .preflight import check_config
from .prepare import PreparedData
from .result import RunResult
from .stages import in_data_dir, is_kept
from .state import restore_state
from .together import on_every_rank, on_first_rank

logger = logging.getLogger(__name__)

_LEAVE_OUT = "init_from brings its own model: leave out the config file or the fields that describe another"


@dataclass(frozen=True)
class Plan:
    """The start of a run: its configuration, its folder and the checkpoint to continue from."""

    config: RunConfig
    """As given, with run_dir filled in. A resumed run has the init_from that it began with."""
    run_dir: Path
    resumed: tuple[Path, Manifest] | None = None
    """The checkpoint to continue from, with its manifest; None for a new run."""

    @property
    def step(self) -> int:
        """The step after which the run continues; 0 for a new run."""
        return 0 if self.resumed is None else self.resumed[1].step

    def continues_own_folder(self) -> bool:
        """Whether the checkpoint is one of the run folder's own, and not one of another run."""
        own = (self.run_dir / CHECKPOINTS).resolve()
        return self.resumed is not None and self.resumed[0].resolve().parent == own

    def protect_data(self) -> None:
        """Called before a tokenizer or training tokens are made. Keeps a resumed run from losing those that it has.

        Raises ValueError, or FileNotFoundError if the run has a copy of a missing tokenizer.
        """
        if self.resumed is None:
            return
        checkpoint, manifest = self.resumed
        data = self.config.data
        tokenizer, copy = Path(data.tokenizer_path), checkpoint.parent.parent / TOKENIZER
        if not in_data_dir(data, tokenizer) and not tokenizer.is_file() and copy.is_file():
            raise FileNotFoundError(f"data.tokenizer {tokenizer} does not exist: {copy} is the run's copy of it")
        changed = _changed_data(self.config, manifest)
        if any(field.startswith("data.source ") for field in changed):
            hint = f"give its configuration, --config {checkpoint.parent.parent / CONFIG}"
            raise ValueError(f"checkpoint {checkpoint} is of a run on other data: {'; '.join(changed)}; {hint}")
        tokens = Path(str(data.train_tokens))
        if changed and tokens.is_file() and sha256_of_file(tokens) == manifest.identity.get("training tokens"):
            raise ValueError(
                f"checkpoint {checkpoint} is of a run on {tokens}, which would be made again: {'; '.join(changed)}"
            )

    def check_data(self, data: PreparedData) -> None:
        """Raise ValueError if the run cannot draw its sample, or if its data is not the checkpoint's.

        All ranks call it together.
        """
        sample, context_length = self.config.sample, self.config.model.shape.context_length
        if data.tokenizer is not None:
            length = len(data.tokenizer.encode_prompt(sample.prompt))
            if length + (sample.max_new_tokens or 0) > context_length:
                raise ValueError(
                    f"sample.prompt has {length} tokens and sample.max_new_tokens is {sample.max_new_tokens}: together "
                    f"they must be at most model.context_length, {context_length}"
                )
        identity = identity_of(self.config, data)
        comm.check_same(identity, "data")
        if self.resumed is not None:
            checkpoint, manifest = self.resumed
            changed = _changed_data(self.config, manifest)
            text_changed = "the text or its files have changed; init_from takes the weights alone"
            check_identity(checkpoint, manifest, identity, changed or [text_changed])
            for field in changed:
                if field.startswith("data.valid"):
                    logger.warning("resume: %s: validation losses before and after may be of different texts", field)

    def finished_result(self) -> RunResult | None:
        """The result of a run that is resumed after its last step; None if there are steps left.

        All ranks call it together.
        """
        if self.resumed is None or self.step < self.config.train.max_steps:
            return None
        checkpoint = self.resumed[0]

        def read_result() -> RunResult | None:
            try:
                known = RunResult(**json.loads((self.run_dir / RESULT).read_text()))
            except (OSError, ValueError, TypeError):  # missing, damaged, or of another version: the run makes it again
                return None
            if known.step != self.step or known.interrupted is not None:
                return None
            logger.info("resume: %s is finished, at step %d", self.run_dir, self.step)
            curve = self.run_dir / Path(known.loss_curve).name  # the run may have been moved
            return dataclasses.replace(
                known, run_dir=str(self.run_dir), checkpoint=str(checkpoint), loss_curve=str(curve)
            )

        return on_first_rank(read_result)

    def prepare_folder(self, data: PreparedData, weights: LoadedModel | None) -> None:
        """Write config.json and the tokenizer, and set newer checkpoints aside. Rank 0 calls it."""
        if weights is not None:
            _check_is_of_model(identity_of(self.config, data)["tokenizer"], self.config.data, weights)
        set_newer_aside(self.run_dir / CHECKPOINTS, -1 if self.resumed is None else self.step)
        # `resume` belongs to one command, not to the run.
        write_json(self.run_dir / CONFIG, dataclasses.replace(self.config, resume="none").to_dict())
        if data.tokenizer is not None:
            data.tokenizer.save(self.run_dir / TOKENIZER)

    def restore(self, trainer: Trainer) -> None:
        """Load the checkpoint into a trainer, if there is one. All ranks call it together."""
        if self.resumed is None:
            return
        checkpoint, manifest = self.resumed
        try:
            restore_state(checkpoint, trainer.model, trainer.optimizer, trainer.device, trainer.strategy.shards())
            trainer.position = Position(manifest.step, manifest.sequences, manifest.trainer["skipped_steps"])
            if trainer.scale is not None:
                trainer.scale.load_state_dict(manifest.trainer["scaler"])
        except KeyError as error:
            raise ValueError(f"checkpoint {checkpoint} lacks a part of the run's state: no {error}") from error
        logger.info("resume: from %s, step %d", checkpoint, manifest.step)
        _warn_of_new_learning_rate(trainer, manifest)


def plan_run(config: RunConfig, device: torch.device, stack: contextlib.ExitStack) -> tuple[Plan, LoadedModel | None]:
    """Check the configuration and decide how the run starts. `stack` keeps the lock of the run folder.

    All ranks call it together. Also returns the weights of `init_from`, on rank 0 alone, because they may be large.
    Raises ValueError or FileNotFoundError for a run that cannot start.
    """
    fields: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        fields |= {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
    comm.check_same(fields, "configurations")
    on_every_rank(lambda: check_config(config, device), "check of the configuration")
    weights: list[LoadedModel] = []

    def decide() -> Plan:
        run_dir = Path(config.run_dir or f"runs/{config.data.source}-{datetime.now():%Y%m%d-%H%M%S}")
        check_run_dir(run_dir, own={Path(config.data.tokenizer_path)})
        stack.enter_context(locked(run_dir))
        named = dataclasses.replace(config, run_dir=str(run_dir))
        found = _find_resume(config, run_dir)
        if found is None:
            if config.init_from is not None:
                try:
                    model = load_model(config.init_from)
                except (ValueError, FileNotFoundError) as error:
                    raise ValueError(f"init_from is {config.init_from!r}: {error}") from error
                architecture = _architecture(config)
                del architecture["model.context_length"]  # no weight depends on it
                check_identity(model.checkpoint, model.manifest, architecture, [_LEAVE_OUT], partly=True)
                _check_tokenizer(config.data, model)
                own, new = model.shape.context_length, config.model.shape.context_length
                if own != new:
                    logger.info(f"weights: their model has a context of {own}; this run and its export have {new}")
                weights.append(model)
            return Plan(named, run_dir)
        checkpoint, manifest = found
        began_with = manifest.config.get("init_from")
        if config.init_from not in (None, began_with):
            raise ValueError(
                f"init_from is {config.init_from!r}: checkpoint {checkpoint}, from which the run goes on, is of a run "
                f"that began with {began_with or 'random weights'}; leave it out, or give another run_dir"
            )
        # Compare now: preparing the data may take hours.
        check_identity(checkpoint, manifest, _settings(config), _changed_data(config, manifest), partly=True)
        return Plan(dataclasses.replace(named, init_from=began_with), run_dir, found)

    plan = on_first_rank(decide)
    return plan, weights[0] if weights else None


def _check_tokenizer(data: DataConfig, model: LoadedModel) -> None:
    """Raise ValueError before data is made with another tokenizer than the model's, or a new one for a lost one."""
    if data.source == "random":
        return
    tokenizer = Path(data.tokenizer_path)
    if is_kept(data, tokenizer):
        _check_is_of_model(Tokenizer.load(tokenizer).sha256, data, model)
    would_be_made = in_data_dir(data, tokenizer) and not is_kept(data, Path(str(data.train_tokens)))
    if model.tokenizer is None and would_be_made:
        raise ValueError(
            f"data.tokenizer is {data.tokenizer}: it must be the tokenizer.json that init_from {model.checkpoint} was "
            "trained with, because that has none beside it"
        )


def _check_is_of_model(sha256: str | None, data: DataConfig, model: LoadedModel) -> None:
    if model.manifest.identity["tokenizer"] not in (None, sha256):
        raise ValueError(
            f"data.tokenizer is {data.tokenizer}: it must be that of init_from {model.checkpoint}, for whose tokens "
            "the weights were trained; give its tokenizer.json"
        )


def identity_of(config: RunConfig, data: PreparedData) -> dict[str, Any]:
    """The facts that a run and its checkpoints share: architecture, optimizer, seed, tokenizer, training tokens."""
    return {
        **_settings(config),
        "tokenizer": data.tokenizer.sha256 if data.tokenizer else None,
        "training tokens": data.train_sha256,
    }


def _settings(config: RunConfig) -> dict[str, Any]:
    return {**_architecture(config), "optimizer.name": config.optimizer.name, "train.seed": config.train.seed}


def _architecture(config: RunConfig) -> dict[str, Any]:
    return {f"model.{name}": value for name, value in config.model.shape.to_dict().items()}


def _changed_data(config: RunConfig, manifest: Manifest) -> list[str]:
    """The fields of the data that differ from the checkpoint's configuration, for a message."""
    here, there = (
        without_default_paths(data) for data in (dataclasses.asdict(config.data), manifest.config.get("data", {}))
    )
    return [
        f"data.{name} is {here.get(name)!r} here and {there.get(name)!r} there"
        for name in sorted({*here, *there})
        if here.get(name) != there.get(name)
    ]


def _find_resume(config: RunConfig, run_dir: Path) -> tuple[Path, Manifest] | None:
    """The checkpoint that `resume` names or finds, and its manifest; None for a new run."""
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
    accepted = "none, auto or the folder of a checkpoint"
    require(path.is_dir(), "resume", config.resume, f"{accepted}, which is not there")
    within = [*find_checkpoints(path), *find_checkpoints(path / CHECKPOINTS)]
    require(not within, "resume", config.resume, f"{accepted}, such as {within[0] if within else ''}")
    if taken and path.resolve().parent != checkpoints.resolve():
        raise ValueError(f"run_dir {run_dir} holds another run than resume, {path}: give another run_dir")
    return path, verify_checkpoint(path)


def _warn_of_new_learning_rate(trainer: Trainer, manifest: Manifest) -> None:
    """Warn of the first step whose learning rate differs from the schedule in the checkpoint."""
    try:
        before = RunConfig.from_dict(manifest.config)
    except (TypeError, ValueError):  # of another version
        return
    config = trainer.config
    for step in range(manifest.step + 1, config.train.max_steps + 1):
        was, now = learning_rate(before, step), learning_rate(config, step)
        if f"{was:.3g}" != f"{now:.3g}":
            break
    else:
        return
    here = config.schedule
    changed = {name: old for name, old in before.schedule.items() if old != here.get(name)}
    shown = {"optimizer.cosine_steps": "train.max_steps"} if config.optimizer.cosine_steps is None else {}
    why = (f"{shown.get(name, name)} is {here.get(name)}, not {old}" for name, old in changed.items())
    options = " ".join(f"--{name} {old}" for name, old in changed.items())
    logger.warning(
        f"resume: step {step} has a learning rate of {now:.3g} instead of {was:.3g}, because {' and '.join(why)}; to "
        f"keep the earlier schedule: {options}"
    )
