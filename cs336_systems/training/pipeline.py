"""The main job: get the text, train the tokenizer, tokenize, train the model, sample from it."""

import contextlib
import dataclasses
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import torch

from cs336_basics.data import sha256_of_file, write_json
from cs336_basics.model import TransformerLM
from cs336_basics.optimizer import get_cosine_lr
from cs336_basics.tokenizer import Tokenizer

from ..config.checks import is_place, require
from ..config.data import without_derived_paths
from ..config.run import SHARDED, RunConfig, SampleConfig
from ..kernels.attention import check_attention, get_attention
from ..machine.console import check_by_itself
from ..machine.hardware import DTYPES, check_precision, memory_bytes, use_device
from ..parallel import comm
from ..parallel.ranks import launched, local_world_size
from ..planner.accounting import least_training_bytes
from .build import strategy_of
from .checkpoint import set_newer_aside
from .folder import CHECKPOINTS, CONFIG, RESULT, TOKENIZER, check_run_dir, locked
from .launch import check_launch, launch, use_device_of_rank
from .load import LoadedModel, load_model
from .loop import Position, Trainer
from .manifest import Manifest, check_identity, find_checkpoints, newest_whole_checkpoint, verify_checkpoint
from .metrics import METRICS_FILE
from .prepare import PreparedData, is_own, prepare_data
from .run import Run, RunResult
from .state import restore_state
from .together import file_group, on_every_rank, on_first_rank

T = TypeVar("T")

logger = logging.getLogger(__name__)


def train(config: RunConfig) -> RunResult:
    """Run everything that the configuration describes and return the result.

    With `parallel.devices` above 1, this process starts that many of its own and waits for them. A process that
    torchrun has started is one of all ranks, each of which calls this.

    Raises ValueError or FileNotFoundError for what the user can fix, NonFiniteError for a loss or gradient norm that is
    not finite, CheckpointError if a checkpoint cannot be written, and CollectiveError if another rank is gone or hangs.
    """
    if not launched():
        check_by_itself()
        if config.parallel.devices > 1:
            return launch(config)
        return _train(config, use_device(config.train.device))
    check_launch(config)
    device = use_device_of_rank(config.train.device)
    options = {name: getattr(config.parallel, name) for name in ("init_timeout_s", "step_timeout_s", "nccl_max_ctas")}
    with comm.process_group(device, **options):
        return _train(config, device)


def _train(config: RunConfig, device: torch.device) -> RunResult:
    """The whole run on this rank's device. All ranks call it together; what it writes, rank 0 writes."""
    comm.check_same(_flat(config), "configurations")
    on_every_rank(lambda: _check(config, device), "check of the configuration")
    run_dir = Path(on_first_rank(lambda: config.run_dir or default_run_dir(config)))
    config = dataclasses.replace(config, run_dir=str(run_dir))
    with contextlib.ExitStack() as stack:
        on_first_rank(lambda: _take_run_dir(config, run_dir, stack))
        resumed = on_first_rank(lambda: _find_resume(config, run_dir))
        first_weights = _kept_on_first_rank(lambda: _first_weights(config, resumed))
        if resumed is not None:  # config.json says what the run began with, whether this command does or not
            config = dataclasses.replace(config, init_from=resumed[1].config.get("init_from"))
        data = _prepare(config, resumed)
        if data.tokenizer is not None:
            _check_prompt(data.tokenizer, config.sample, config.model.shape.context_length)
        identity = _identity(config, data)
        comm.check_same(identity, "data")
        if resumed is not None:
            check_identity(*resumed, identity, _changed_data(config, resumed[1]))
            if (finished := on_first_rank(lambda: _finished_result(config, run_dir, resumed))) is not None:
                return finished
        on_first_rank(lambda: _begin(config, run_dir, data, resumed, first_weights, identity))
        started = time.perf_counter()
        trainer = stack.enter_context(contextlib.closing(_build(config, data, device, first_weights)))
        del first_weights
        if resumed is not None:
            _restore(trainer, *resumed)
            _tell_of_new_rate(trainer, resumed[1])
        run = Run(config, run_dir, trainer, data, identity, started, resumed)
        with _determinism(config.train.deterministic):
            interrupted = run.run()
        result = run.report(interrupted)
        if comm.rank() == 0:
            write_json(run_dir / RESULT, dataclasses.asdict(result))
    return result


def default_run_dir(config: RunConfig) -> str:
    """The folder of a run that names none."""
    return f"runs/{config.data.source}-{datetime.now():%Y%m%d-%H%M%S}"


def _flat(config: RunConfig) -> dict[str, Any]:
    """The configuration's fields by dotted name."""
    fields: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        fields |= {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
    return fields


def _check(config: RunConfig, device: torch.device) -> None:
    """Raise ValueError for what cannot be trained on this device, or by this many processes."""
    config.check_world_size(comm.world_size())
    check_precision(device, config.train.precision)
    if config.train.cuda_graph and device.type != "cuda":
        raise ValueError(f"train.cuda_graph is true: it needs a CUDA device, and train.device is {device.type!r}")
    if lacking := lacking_memory(config, device):
        raise ValueError(lacking)
    strategy_of(config)
    shape = config.model.shape
    check_attention(config.model.attention, shape.d_model // shape.num_heads, DTYPES[config.train.precision], device)


def _prepare(config: RunConfig, resumed: tuple[Path, Manifest] | None = None) -> PreparedData:
    """The data: made, or found, by rank 0 and then by the others, whose disks may be different ones.

    A download, or training a tokenizer on a large text, may take long, so ranks wait for each other for days if need
    be.
    """
    group = file_group(wait_h=24 * 7)
    made: list[PreparedData] = []

    def prepare() -> None:
        if not made:
            made.append(prepare_data(config, lambda: _check_may_make(resumed, config)))

    on_first_rank(prepare, "preparation of the data", group)
    on_every_rank(prepare, "preparation of the data", group)
    return made[0]


def _changed_data(config: RunConfig, manifest: Manifest) -> list[str]:
    """The fields of the data in which a run differs from the one that wrote the checkpoint."""
    here, there = (
        without_derived_paths(data) for data in (dataclasses.asdict(config.data), manifest.config.get("data", {}))
    )
    return [
        f"data.{name} is {here.get(name)!r} here and {there.get(name)!r} there"
        for name in sorted({*here, *there})
        if here.get(name) != there.get(name)
    ]


def _check_may_make(resumed: tuple[Path, Manifest] | None, config: RunConfig) -> None:
    """Refuse to make a tokenizer or tokens if a run that is resumed has, or had, others.

    Raises ValueError, or FileNotFoundError where the run has a copy of the file.
    """
    if resumed is None:
        return
    checkpoint, manifest = resumed
    tokenizer, copy = Path(config.data.tokenizer_path), checkpoint.parent.parent / TOKENIZER
    if not is_own(config.data, tokenizer) and not tokenizer.is_file() and copy.is_file():
        raise FileNotFoundError(f"data.tokenizer {tokenizer} does not exist: {copy} is the run's copy of it")
    changed = _changed_data(config, manifest)
    tokens = Path(str(config.data.train_tokens))
    if changed and tokens.is_file() and sha256_of_file(tokens) == manifest.identity.get("training tokens"):
        raise ValueError(
            f"checkpoint {checkpoint} is of a run on {tokens}, which would be made again: {'; '.join(changed)}"
        )


def _kept_on_first_rank(function: Callable[[], T]) -> T | None:
    """What the function returns on rank 0, where it stays, since it may be large; None on the others, which wait."""
    results: list[T] = []
    on_first_rank(lambda: results.append(function()))
    return results[0] if results else None


def _take_run_dir(config: RunConfig, run_dir: Path, stack: contextlib.ExitStack) -> None:
    """Lock the run folder until the stack is left."""
    check_run_dir(run_dir, own={Path(config.data.tokenizer_path)})
    stack.enter_context(locked(run_dir))


def _first_weights(config: RunConfig, resumed: tuple[Path, Manifest] | None) -> LoadedModel | None:
    """The weights to begin with, if given.

    Raises ValueError for those, or a checkpoint, of another architecture, and for weights that a run that is resumed
    did not begin with.
    """
    if resumed is not None:
        began_with = resumed[1].config.get("init_from")
        if config.init_from not in (None, began_with):
            raise ValueError(
                f"init_from is {config.init_from!r}: checkpoint {resumed[0]}, from which the run goes on, is of a run "
                f"that began with {began_with or 'random weights'}; leave it out, or give another run_dir"
            )
        _check_shared(*resumed, _own_identity(config), _changed_data(config, resumed[1]))
        return None
    if config.init_from is None:
        return None
    weights = load_model(config.init_from)
    _check_shared(weights.checkpoint, weights.manifest, _architecture(config))
    return weights


def _begin(
    config: RunConfig,
    run_dir: Path,
    data: PreparedData,
    resumed: tuple[Path, Manifest] | None,
    first_weights: LoadedModel | None,
    identity: dict[str, Any],
) -> None:
    """Make the run folder this run's, after the last check that can still refuse it."""
    if first_weights is not None:
        _check_shared(first_weights.checkpoint, first_weights.manifest, {"tokenizer": identity["tokenizer"]})
    set_newer_aside(run_dir / CHECKPOINTS, resumed[1].step if resumed is not None else -1)
    # Whether to resume is each command's own, and no part of what the run is.
    write_json(run_dir / CONFIG, dataclasses.replace(config, resume="none").to_dict())
    if data.tokenizer is not None:
        data.tokenizer.save(run_dir / TOKENIZER)


def _build(config: RunConfig, data: PreparedData, device: torch.device, weights: LoadedModel | None) -> Trainer:
    """The Trainer of a freshly initialized model, or of one with these weights, which all ranks get from rank 0."""
    torch.manual_seed(config.train.seed)
    with device:  # initialize the weights where they stay: 2.7 billion of them take a minute on a CPU
        attention = get_attention(config.model.attention)
        model = TransformerLM(**dataclasses.asdict(config.model.shape), attention=attention)
    if weights is not None:
        model.load_state_dict(weights.state_dict)
        logger.info("weights: from %s", weights.checkpoint)
    return Trainer(config, model, data.train, device)


def lacking_memory(config: RunConfig, device: torch.device) -> str:
    """Why a run cannot fit, if so: said before it is built, since a billion layers would not fail, but take forever."""
    shape, train = config.model.shape, config.train
    world_size = comm.world_size()
    strategy = config.parallel.strategy_for(world_size)
    sharded = strategy in SHARDED or is_place(strategy)  # one from outside may be, so it is let through
    needed = least_training_bytes(
        shape,
        train.batch_size // world_size,
        train.batch_size // train.gradient_accumulation_steps // world_size,
        weight_parts=world_size if sharded else 1,
        state_parts=world_size if sharded or config.parallel.shard_optimizer else 1,
        weight_bytes=2 if train.weight_dtype == "bf16" else 4,
        loss_chunk_tokens=train.loss_chunk_tokens,
    )
    there = memory_bytes(device)
    if device.type == "cpu" and there is not None:
        there //= local_world_size()
    if there is None or needed <= there:
        return ""
    names = ("vocab_size", "context_length", "d_model", "d_ff", "num_layers")
    sizes = [f"model.{name} {getattr(shape, name)}" for name in names]
    sizes += [f"train.{name} {getattr(train, name)}" for name in ("batch_size", "gradient_accumulation_steps")]
    return (
        f"{', '.join(sizes)}: to train this needs at least {needed / 2**30:,.1f} GiB, and {device} has "
        f"{there / 2**30:,.1f} GiB"
    )


@contextlib.contextmanager
def _determinism(wanted: bool) -> Iterator[None]:
    """Use PyTorch's deterministic algorithms, if wanted, for the time of a run."""
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
    accepted = "none, auto or the folder of a checkpoint"
    require(path.is_dir(), "resume", config.resume, f"{accepted}, which is not there")
    within = [*find_checkpoints(path), *find_checkpoints(path / CHECKPOINTS)]
    require(not within, "resume", config.resume, f"{accepted}, such as {within[0] if within else ''}")
    if taken and path.resolve().parent != checkpoints.resolve():
        raise ValueError(f"run_dir {run_dir} holds another run than resume, {path}: give another run_dir")
    return path, verify_checkpoint(path)


def _finished_result(config: RunConfig, run_dir: Path, resumed: tuple[Path, Manifest]) -> RunResult | None:
    """The result of the run, if it is being resumed after its last step."""
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
    # The run may have been moved since.
    curve = run_dir / Path(known.loss_curve).name
    return dataclasses.replace(known, run_dir=str(run_dir), checkpoint=str(resumed[0]), loss_curve=str(curve))


def _architecture(config: RunConfig) -> dict[str, Any]:
    return {f"model.{name}": value for name, value in dataclasses.asdict(config.model.shape).items()}


def _own_identity(config: RunConfig) -> dict[str, Any]:
    """What of a run's identity is known before its data is."""
    return {**_architecture(config), "train.seed": config.train.seed}


def _identity(config: RunConfig, data: PreparedData) -> dict[str, Any]:
    return {
        **_own_identity(config),
        "tokenizer": data.tokenizer.sha256 if data.tokenizer else None,
        "training tokens": data.train_sha256,
    }


def _check_shared(path: Path, manifest: Manifest, wanted: dict[str, Any], why: Iterable[str] = ()) -> None:
    """`check_identity` for these fields alone."""
    known = {name: value for name, value in manifest.identity.items() if name in wanted}
    check_identity(path, dataclasses.replace(manifest, identity=known), wanted, why)


def _check_prompt(tokenizer: Tokenizer, sample: SampleConfig, context_length: int) -> None:
    """Refuse, before training, a sample that cannot be drawn after it."""
    length = len(tokenizer.encode(sample.prompt)) or 1
    if length + (sample.max_new_tokens or 0) > context_length:
        raise ValueError(
            f"sample.prompt has {length} tokens and sample.max_new_tokens is {sample.max_new_tokens}: together they "
            f"must be at most model.context_length, {context_length}"
        )


def _restore(trainer: Trainer, path: Path, manifest: Manifest) -> None:
    try:
        restore_state(path, trainer.model, trainer.optimizer, trainer.device, trainer.strategy.shards())
        trainer.position = Position(manifest.step, manifest.sequences, manifest.trainer["skipped_steps"])
        if trainer.scaler.is_enabled() and manifest.trainer["scaler"]:
            trainer.scaler.load_state_dict(manifest.trainer["scaler"])
    except KeyError as error:
        raise ValueError(f"checkpoint {path} does not hold all that a run goes on from: no {error}") from error
    logger.info("resume: from %s, step %d", path, manifest.step)


def _tell_of_new_rate(trainer: Trainer, manifest: Manifest) -> None:
    """Say from which step on the learning rate is another than the checkpoint's own configuration gives it."""
    try:
        before = RunConfig.from_dict(manifest.config)
    except (TypeError, ValueError):  # of another version
        return
    config = trainer.config
    for step in range(manifest.step + 1, config.train.max_steps + 1):
        was, now = get_cosine_lr(step, *before.schedule.values()), trainer.learning_rate(step)
        if f"{was:.3g}" != f"{now:.3g}":
            break
    else:
        return
    changed = {name: old for name, old in before.schedule.items() if old != config.schedule[name]}
    shown = {"optimizer.cosine_steps": "train.max_steps"} if config.optimizer.cosine_steps is None else {}
    why = (f"{shown.get(name, name)} is {config.schedule[name]}, not {old}" for name, old in changed.items())
    logger.warning(
        "resume: step %d has a learning rate of %.3g instead of %.3g, because %s; to keep the earlier schedule: %s",
        step,
        now,
        was,
        " and ".join(why),
        " ".join(f"--{name} {old}" for name, old in changed.items()),
    )
