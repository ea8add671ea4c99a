"""Tiny runs, an independent reader of checkpoints, damage to them, faults in the file system and real processes."""

import builtins
import dataclasses
import hashlib
import io
import json
import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import cs336_systems
from cs336_basics.model import TransformerLM
from cs336_systems.config.run import (
    CheckpointConfig,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    SampleConfig,
    TrainConfig,
)
from cs336_systems.training.checkpoint import prune_checkpoints, save_checkpoint
from cs336_systems.training.loop import Trainer
from cs336_systems.training.manifest import MANIFEST, Manifest
from cs336_systems.training.metrics import METRICS_FILE, Row, read_metrics
from cs336_systems.training.optimizer import LOWER_HALF, joined
from cs336_systems.training.tensor_files import read_tensors, tensor_shapes
from tests import forked
from tests.distributed import processes

REPOSITORY = Path(cs336_systems.__file__).parents[1]
VOCAB_SIZE, CONTEXT_LENGTH = 300, 16
_MODEL = dict(
    vocab_size=VOCAB_SIZE, context_length=CONTEXT_LENGTH, d_model=32, d_ff=64, num_layers=1, num_heads=2
)  # fmt: skip
_OPTIMIZER = dict(lr=1e-2, warmup_steps=3)
_TRAIN = dict(max_steps=10, batch_size=4, device="cpu", validation_interval=4, validation_sequences=8)
REST: dict[str, Any] = dict(sequences=0, identity={}, trainer={}, config={}, versions={})
"""The fields of a manifest, beside its step."""
NO_SPACE = OSError(28, "No space left on device")
MEASURED_ALWAYS_ANEW = {"step_ms", "data_wait_ms", "tokens_per_s", "mfu", "memory_bytes"}


# Runs


def make_config(
    root: Path, run: str = "run", resume: str = "none", skip_data: bool = False, **groups: Any
) -> RunConfig:
    """A tiny run in root/run on random tokens in root/data; groups are dicts of fields to have otherwise."""
    data = dict(source="random", data_dir=str(root / "data"), random_tokens=5000) | groups.get("data", {})
    return RunConfig(
        run_dir=str(root / run),
        resume=resume,
        skip_data=skip_data,
        model=ModelConfig(**_MODEL | groups.get("model", {})),
        data=DataConfig(**data),
        optimizer=OptimizerConfig(**_OPTIMIZER | groups.get("optimizer", {})),
        train=TrainConfig(**_TRAIN | groups.get("train", {})),
        parallel=ParallelConfig(**groups.get("parallel", {})),
        checkpoint=CheckpointConfig(**groups.get("checkpoint", {})),
        sample=SampleConfig(**groups.get("sample", {})),
        log=LogConfig(**groups.get("log", {})),
    )


def random_tokens(length: int = 2000, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).astype(np.uint16)


@contextmanager
def tiny_trainer(
    config: RunConfig, tokens: np.ndarray | None = None, device: str = "cpu"
) -> Iterator[Trainer]:  # fmt: skip
    """A Trainer on a freshly drawn tiny model, without any folder."""
    torch.manual_seed(config.train.seed)
    model = TransformerLM(**dataclasses.asdict(config.model.shape)).to(device)
    trainer = Trainer(config, model, random_tokens() if tokens is None else tokens, torch.device(device))
    try:
        yield trainer
    finally:
        trainer.close()


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def checkpoint_path(config: RunConfig, step: int) -> Path:
    return Path(str(config.run_dir)) / "checkpoints" / f"step_{step:08d}"


def checkpoint_names(config: RunConfig) -> list[str]:
    """Everything in the checkpoint folder, leftovers too."""
    folder = Path(str(config.run_dir)) / "checkpoints"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def loss_rows(config: RunConfig) -> list[Row]:
    """The rows of the steps, without the times and rates that differ from run to run."""
    rows = read_metrics(Path(str(config.run_dir)) / METRICS_FILE)
    return [{k: v for k, v in row.items() if k not in MEASURED_ALWAYS_ANEW} for row in rows if "loss" in row]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings of this project (torch's checkpointing logs its own)."""
    records = [record for record in caplog.records if record.name.startswith("cs336_systems")]
    return [record.getMessage() for record in records if record.levelno >= logging.WARNING]


# Checkpoints


def read_independently(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint by the safetensors library alone."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as reader:
            tensors |= {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
    return tensors


def whole(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint, those that ranks have written in pieces too. Halves of weights are joined."""
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in tensor_shapes(path).items()}
    read_tensors(path, tensors)
    for place in [name for name in tensors if name.endswith(f".{LOWER_HALF}")]:
        name = place.replace("optimizer.", "model.", 1).removesuffix(f".{LOWER_HALF}")
        tensors[name] = joined(tensors[name], tensors.pop(place))
    return tensors


def raw_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def assert_same_tensors(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Same names, types, shapes and bits (NaN equals NaN, 0.0 is not -0.0)."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape), name
        assert raw_bytes(tensor) == raw_bytes(other[name]), name


def tensor_file(checkpoint: Path) -> Path:
    (file,) = checkpoint.glob("*.safetensors")
    return file


def _flip(path: Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 1
    path.write_bytes(content)


def _truncate(path: Path, size: int) -> None:
    os.truncate(path, size)


def change_manifest(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = checkpoint / MANIFEST
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest, indent=2) + "\n")


def forge_manifest(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """As `change_manifest`, with the checksum that the changed manifest must have."""

    def change_and_sign(manifest: dict[str, Any]) -> None:
        manifest.pop("checksum")
        change(manifest)
        manifest["checksum"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()

    change_manifest(checkpoint, change_and_sign)


# Faults of a checkpoint -> a function that makes them. The error must name the file.
TENSOR_DAMAGE: dict[str, Callable[[Path], Any]] = {
    "no tensor file": lambda c: tensor_file(c).unlink(),
    "empty tensor file": lambda c: _truncate(tensor_file(c), 0),
    "tensor file without its last byte": lambda c: _truncate(tensor_file(c), tensor_file(c).stat().st_size - 1),
    "half a tensor file": lambda c: _truncate(tensor_file(c), tensor_file(c).stat().st_size // 2),
    "tensor file too long": lambda c: tensor_file(c).write_bytes(tensor_file(c).read_bytes() + b"\0"),
    "first byte flipped": lambda c: _flip(tensor_file(c), 0),
    "a byte flipped": lambda c: _flip(tensor_file(c), 0.5),
    "last byte flipped": lambda c: _flip(tensor_file(c), 1),
}
MANIFEST_DAMAGE: dict[str, Callable[[Path], Any]] = {
    "no manifest": lambda c: (c / MANIFEST).unlink(),
    "empty manifest": lambda c: _truncate(c / MANIFEST, 0),
    "half a manifest": lambda c: _truncate(c / MANIFEST, (c / MANIFEST).stat().st_size // 2),
    "manifest is not UTF-8": lambda c: (c / MANIFEST).write_bytes(b"\xff" + (c / MANIFEST).read_bytes()[1:]),
    "manifest is a list": lambda c: (c / MANIFEST).write_text("[1]"),
    "manifest of another format": lambda c: change_manifest(c, lambda m: m.update(format=3)),
    "manifest without a field": lambda c: change_manifest(c, lambda m: m.pop("sequences")),
    "manifest with an unknown field": lambda c: change_manifest(c, lambda m: m.update(sequence=1)),
    "manifest whose files have no size": lambda c: change_manifest(
        c, lambda m: [file.update(bites=file.pop("bytes")) for file in m["files"].values()]
    ),
    "manifest whose files have no hash": lambda c: change_manifest(
        c, lambda m: [file.update(sha255=file.pop("sha256")) for file in m["files"].values()]
    ),
    "manifest whose files are a list": lambda c: change_manifest(c, lambda m: m.update(files=list(m["files"]))),
}
MANIFEST_DAMAGE["nested without end"] = lambda c: (c / MANIFEST).write_text("[" * 100_000)
DAMAGE = TENSOR_DAMAGE | MANIFEST_DAMAGE


def tensors_of(step: int, elements: int = 50_000) -> dict[str, Tensor]:
    """Tensors that tell which step they are of in every element."""
    return {
        "model.weight": torch.arange(elements, dtype=torch.float32) + step,
        "optimizer.weight.exp_avg": torch.full((elements,), float(-step)),
        "optimizer.weight.step": torch.tensor(float(step)),
        "rng.cpu": torch.full((64,), step % 256, dtype=torch.uint8),
    }


def save_step(folder: Path, step: int, elements: int = 50_000) -> Path:
    """`save_checkpoint` of the tensors of a step, with the rest filled in."""
    manifest = Manifest(
        step=step,
        sequences=4 * step,
        identity={"model.d_model": 32},
        trainer={"skipped_steps": 0, "scaler": {}},
        config={},
        versions={},
    )
    return save_checkpoint(folder, tensors_of(step, elements), manifest)


def save_without_end(folder: str, first_step: int, elements: int, events: Connection) -> None:
    """Work of a child process until it is killed: save, prune, and send an event when each save begins and ends."""
    torch.set_num_threads(1)
    for step in count(first_step):
        events.send(("begins", step))
        save_step(Path(folder), step, elements)
        prune_checkpoints(Path(folder), 2)
        events.send(("ended", step))


# Faults


def error_of(function: Callable[[], Any]) -> BaseException | None:
    """The error that a function raises, also a BaseException such as torch's CheckpointException."""
    try:
        function()
    except BaseException as error:
        return error
    return None


class Killed(BaseException):
    """The process is gone: nothing that cleans up after an ordinary error may be relied on."""


class FaultyFileSystem:
    """While active, the n-th call (from 1) that opens, makes, flushes, renames or deletes a file raises `error`, once.

    `calls` lists the calls, so that a test can go through all steps of a save without knowing them beforehand.
    """

    _FUNCTIONS = ("mkdir", "rename", "replace", "fsync", "open", "unlink", "rmdir")

    def __init__(self, n: int | None = None, error: BaseException | None = None) -> None:
        self._n, self._error = n, error
        self._monkeypatch = pytest.MonkeyPatch()
        self.calls: list[str] = []

    @property
    def struck(self) -> bool:
        return self._n is not None and len(self.calls) >= self._n

    def _wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            subject = args[0]
            if isinstance(subject, int):
                subject = os.readlink(f"/proc/self/fd/{subject}")
            self.calls.append(f"{name} {Path(subject).name}")
            if len(self.calls) == self._n and self._error is not None:
                raise self._error
            return function(*args, **kwargs)

        return wrapped

    def __enter__(self) -> "FaultyFileSystem":
        for name in self._FUNCTIONS:
            self._monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))
        opened = self._wrap("open file", builtins.open)
        self._monkeypatch.setattr(io, "open", opened)
        self._monkeypatch.setattr(builtins, "open", opened)
        return self

    def __exit__(self, *exception: object) -> None:
        self._monkeypatch.undo()


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file of this process may grow beyond size bytes (Python ignores SIGXFSZ, so that write fails with EFBIG)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def small_disk(mount_point: Path, size_bytes: int) -> Iterator[Path]:
    """A file system of its own of size_bytes; skips the test where none may be mounted."""
    mount_point.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(mount_point)]
    try:
        mounted = subprocess.run(["mount", *options], capture_output=True, text=True, timeout=20)
    except OSError as error:
        pytest.skip(f"no mount command: {error}")
    if mounted.returncode:
        pytest.skip(f"mounting a tmpfs is not permitted here: {mounted.stderr.strip()}")
    try:
        yield mount_point
    finally:
        subprocess.run(["umount", "-l", str(mount_point)], check=True, timeout=20)


# Processes

_MAIN = "from cs336_systems.cli.main import main; main()"


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WANDB") and k != "COVERAGE_PROCESS_START"}
    path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TERM": "dumb"}


def start_train(
    config: RunConfig, code: str = _MAIN, start: type[subprocess.Popen] = forked.Popen, **popen: Any
) -> subprocess.Popen:
    """`cs336 train` with this configuration in a process of its own, which is forked or started otherwise."""
    file = Path(f"{config.run_dir}.config.json")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(config.to_dict()))
    return start(
        [sys.executable, "-c", code, "train", "--config", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(),
        cwd=file.parent,
        **popen,
    )


@contextmanager
def running_train(config: RunConfig, code: str = _MAIN, **popen: Any) -> Iterator[subprocess.Popen]:
    """As `start_train`; the process and all it has started are gone afterwards, whatever happens."""
    process = start_train(config, code, **popen)
    try:
        yield process
    finally:
        if process.poll() is None:
            for pid in [*_started_by(process.pid), process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=30)


def _started_by(pid: int) -> list[int]:
    """The processes below this one."""
    children = [process.pid for process in processes() if process.parent == pid]
    return children + [below for child in children for below in _started_by(child)]


def run_train(config: RunConfig, code: str = _MAIN, timeout: float = 120, **popen: Any) -> subprocess.CompletedProcess:
    """`cs336 train` in a process of its own, to its end."""
    with running_train(config, code, **popen) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as error:
            pytest.fail(f"not done after {timeout} s: {error.output!r}, {error.stderr!r}")
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def has_rows(config: RunConfig, at_least: int) -> Callable[[], bool]:
    path = Path(str(config.run_dir)) / METRICS_FILE
    return lambda: path.exists() and len(read_metrics(path)) >= at_least
