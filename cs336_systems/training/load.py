"""Load a trained model from its run folder or checkpoint, export it to Hugging Face's format, and import from that."""

import logging
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cs336_basics.files import write_json
from cs336_basics.huggingface import export_hf, import_hf, is_hf_folder
from cs336_basics.model import TransformerLM
from cs336_basics.shape import ModelShape
from cs336_basics.tokenizer import Tokenizer

from ..config.checks import from_json
from ..config.model import ModelConfig
from ..kernels.attention import check_limits, get_attention
from ..machine.hardware import environment
from .checkpoint import save_checkpoint
from .folder import CHECKPOINTS, CONFIG, TOKENIZER
from .manifest import MANIFEST, Manifest, newest_whole_checkpoint, verify_checkpoint
from .metrics import METRICS_FILE
from .optimizer import LOWER_HALF, joined
from .tensor_files import read_tensors, tensor_shapes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """The weights of a run, with the shape and the tokenizer to use them."""

    checkpoint: Path
    manifest: Manifest = field(repr=False)
    shape: ModelShape
    state_dict: dict[str, Tensor] = field(repr=False)
    """In the run's train.weight_dtype."""
    tokenizer: Tokenizer | None

    def build(self, device: str | torch.device, attention: str = "auto") -> TransformerLM:
        """The model, in float32, on a device. Raises ValueError for a kernel that lacks the window of its blocks."""
        if self.shape.num_windowed:
            check_limits(attention, "window")
        with torch.device(device):
            model = TransformerLM(**asdict(self.shape), attention=get_attention(attention))
        model.load_state_dict(self.state_dict)
        return model


def load_model(path: str | Path) -> LoadedModel:
    """Load a checkpoint, the newest one of a run folder, or a Hugging Face folder, with its tokenizer, onto the CPU.

    Raises ValueError or FileNotFoundError naming the path if there is no whole one, or if the run's tokenizer is not
    the checkpoint's; for a Hugging Face folder as `import_hf` does.
    """
    path = Path(path)
    if is_hf_folder(path):
        return _load_hf(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: a run folder, a checkpoint or a Hugging Face folder is needed")
    is_checkpoint = (path / MANIFEST).exists()
    found = (path, verify_checkpoint(path)) if is_checkpoint else newest_whole_checkpoint(path / CHECKPOINTS)
    if found is None:
        raise ValueError(f"{path} is no checkpoint and has no whole one in {path / CHECKPOINTS}")
    checkpoint, manifest = found
    values: dict[str, Any] = {f.name: manifest.identity.get(f"model.{f.name}") for f in fields(ModelShape)}
    shape = from_json(ModelConfig, {k: v for k, v in values.items() if v is not None}).shape
    with torch.device("meta"):
        names = TransformerLM(**asdict(shape)).state_dict()
    stored = tensor_shapes(checkpoint)
    dtypes = {name: stored[f"model.{name}"][1] for name in names if f"model.{name}" in stored}
    tensors = {f"model.{name}": torch.empty(meta.shape, dtype=dtypes.get(name)) for name, meta in names.items()}
    lower = {name: place for name in names if (place := f"optimizer.{name}.{LOWER_HALF}") in stored}
    tensors |= {place: torch.empty(names[name].shape, dtype=torch.int16) for name, place in lower.items()}
    read_tensors(checkpoint, tensors)
    tokenizer = None
    if (expected := manifest.identity.get("tokenizer")) is not None:
        tokenizer_path = checkpoint.resolve().parent.parent / TOKENIZER
        tokenizer = Tokenizer.load(tokenizer_path)
        if tokenizer.sha256 != expected:
            raise ValueError(f"{tokenizer_path} is not the tokenizer that {checkpoint} was made with")
    state_dict = {name: tensors.pop(f"model.{name}") for name in names}
    for name, place in lower.items():
        state_dict[name] = joined(state_dict[name], tensors.pop(place))
    return LoadedModel(checkpoint, manifest, shape, state_dict, tokenizer)


def _load_hf(folder: Path) -> LoadedModel:
    shape, state_dict, tokenizer = import_hf(folder)
    identity = {f"model.{name}": value for name, value in shape.to_dict().items()}
    manifest = Manifest(
        step=0,
        sequences=0,
        identity={**identity, "tokenizer": tokenizer.sha256 if tokenizer else None},
        trainer={},
        config={"model": shape.to_dict()},
        versions=environment(),
    )
    return LoadedModel(folder, manifest, shape, state_dict, tokenizer)


def export_run(path: str | Path, out: str | Path | None = None) -> tuple[Path, Path]:
    """Write a run's newest model as a Hugging Face folder (default: hf in the run folder), in its train.weight_dtype.

    Returns its checkpoint and the folder. The log says if it replaces an earlier export. Raises ValueError for a folder
    of a run, or with other files and no model.safetensors.
    """
    loaded = load_model(path)
    if out is None and is_hf_folder(path):
        raise ValueError(f"{path} is a Hugging Face folder: give --out, the folder to write")
    out = Path(out) if out is not None else loaded.checkpoint.resolve().parent.parent / "hf"
    is_run = any((out / name).exists() for name in (CHECKPOINTS, MANIFEST, METRICS_FILE))
    is_export = (out / "model.safetensors").exists()
    is_new = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    if is_run or not (is_export or is_new):
        raise ValueError(f"{out} holds files that are not of an export: give another folder")
    export_hf(loaded.state_dict, loaded.shape, loaded.tokenizer, out)
    if is_export:
        logger.warning("export: the model that was in %s is replaced", out)
    return loaded.checkpoint, out


def import_run(folder: str | Path, run_dir: str | Path) -> Path:
    """Make a run folder, at step 0, from a Hugging Face folder; return its checkpoint.

    Raises ValueError if run_dir is not empty or the folder holds another model.
    """
    run_dir = Path(run_dir)
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise ValueError(f"{run_dir} is not empty: give a new folder for the run")
    loaded = _load_hf(Path(folder))
    run_dir.mkdir(parents=True, exist_ok=True)
    write_json(run_dir / CONFIG, loaded.manifest.config)
    if loaded.tokenizer is not None:
        loaded.tokenizer.save(run_dir / TOKENIZER)
    else:
        logger.warning("%s has no tokenizer.json: the run can be trained on token files, but gives no text", folder)
    tensors = {f"model.{name}": tensor for name, tensor in loaded.state_dict.items()}
    return save_checkpoint(run_dir / CHECKPOINTS, tensors, loaded.manifest)
