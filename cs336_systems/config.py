"""The configuration of a run: frozen dataclasses, validated where they are built, and the named model sizes.

One JSON file fills them, the command line overrides any field, and the resolved form is written into the run folder.
Imports nothing heavy, so that `cs336 --help` is quick.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from cs336_basics.shape import ModelShape

DEFAULT_VOCAB_SIZE = 10_000
DEFAULT_CONTEXT_LENGTH = 256

# The handout's table 1 (2025), its 10B and the 2026 leaderboard's model.
MODEL_SIZES: dict[str, dict[str, int]] = {
    "small": dict(d_model=768, d_ff=3072, num_layers=12, num_heads=12),
    "medium": dict(d_model=1024, d_ff=4096, num_layers=24, num_heads=16),
    "large": dict(d_model=1280, d_ff=5120, num_layers=36, num_heads=20),
    "xl": dict(d_model=1600, d_ff=6400, num_layers=48, num_heads=25),
    "2.7B": dict(d_model=2560, d_ff=10240, num_layers=32, num_heads=32),
    "10B": dict(d_model=4608, d_ff=12288, num_layers=50, num_heads=36),
    "8B": dict(
        d_model=4096, d_ff=11008, num_layers=34, num_heads=32, vocab_size=151_936, context_length=32_768
    ),
}  # fmt: skip
_SHAPE_FIELDS = ("d_model", "d_ff", "num_layers", "num_heads")


def _require(condition: bool, name: str, value: object, accepted: str) -> None:
    if not condition:
        raise ValueError(f"{name} is {value!r}: it must be {accepted}")


def _check_types(config: Any, group: str) -> None:
    """Hold every field to its annotation, as the command line's parser does, for JSON's null and for Python."""
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        accepted = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        if not any(_is_a(value, kind) for kind in accepted):
            raise ValueError(f"{group}{name} is {value!r}: it must be {describe_type(hint)}")


def _is_a(value: object, kind: Any) -> bool:
    if isinstance(value, float) and math.isnan(value):
        return kind in (int, float)  # left to the check of the range, which no NaN passes
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(_is_a, value, kinds))
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def describe_type(hint: Any) -> str:
    """What a field of this annotation accepts, in words: int | None is "an integer or null"."""
    if isinstance(hint, UnionType):
        return " or ".join(map(describe_type, get_args(hint)))
    if get_origin(hint) is Literal:
        return f"one of {', '.join(get_args(hint))}"
    if get_origin(hint) is tuple:
        return f"a list of {len(get_args(hint))} numbers"
    names = {int: "an integer", float: "a number", str: "text", bool: "true or false", NoneType: "null"}
    return names.get(hint, f"a {hint.__name__}")


def _require_at_least(config: Any, group: str, minimum: float, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        # Above that bound an integer fits neither a tensor nor, soon after, a float.
        if value is not None and not minimum <= value < 1 << 63:
            above = " and below 2^63" if value > minimum else ""
            raise ValueError(f"{group}.{name} is {value!r}: it must be at least {minimum:g}{above}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture: by name with `size`, or field by field."""

    size: str | None = None
    """Named size: small, medium, large, xl, 2.7B, 10B or 8B. Gives d_model, d_ff, num_layers and num_heads."""
    vocab_size: int | None = None
    """Size of the vocabulary, also what the tokenizer is trained to (default: the size's, else 10,000)."""
    context_length: int | None = None
    """Tokens a sequence (default: the size's, else 256)."""
    d_model: int | None = None
    """Width of the residual stream."""
    d_ff: int | None = None
    """Width of the feed-forward layer."""
    num_layers: int | None = None
    """Number of Transformer blocks."""
    num_heads: int | None = None
    """Number of attention heads; d_model / num_heads must be even."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    attention: str = "auto"
    """Attention kernel by its registered name; auto is sdpa, PyTorch's choice among its own."""

    def __post_init__(self) -> None:
        _check_types(self, "model.")
        preset: dict[str, int] = {}
        if self.size is not None:
            _require(self.size in MODEL_SIZES, "model.size", self.size, f"one of {', '.join(MODEL_SIZES)}")
            preset = MODEL_SIZES[self.size]
        defaults = {"vocab_size": DEFAULT_VOCAB_SIZE, "context_length": DEFAULT_CONTEXT_LENGTH}
        for name in ("vocab_size", "context_length", *_SHAPE_FIELDS):
            given = getattr(self, name)
            if given is None:
                object.__setattr__(self, name, preset.get(name, defaults.get(name)))
            elif name in _SHAPE_FIELDS and name in preset and given != preset[name]:
                raise ValueError(
                    f"model.{name} is {given}, but model.size {self.size!r} means {preset[name]}: give the size, or "
                    f"leave it out and give {', '.join(_SHAPE_FIELDS)}"
                )
            if getattr(self, name) is None:
                raise ValueError(f"model.{name} is missing: give it, or model.size (one of {', '.join(MODEL_SIZES)})")
        _require_at_least(self, "model", 1, "vocab_size", "context_length", *_SHAPE_FIELDS)
        _require(0 < self.rope_theta < math.inf, "model.rope_theta", self.rope_theta, "above 0 and finite")
        s = self.shape
        _require(s.vocab_size <= 1 << 24, "model.vocab_size", s.vocab_size, "at most 2^24")
        if s.d_model % s.num_heads:
            raise ValueError(f"model.d_model is {s.d_model}: it must be divisible by model.num_heads, {s.num_heads}")
        if (s.d_model // s.num_heads) % 2:
            raise ValueError(
                f"model.d_model / model.num_heads is {s.d_model // s.num_heads}: the size of a head must be even, "
                "because rotary embedding turns pairs"
            )

    @property
    def shape(self) -> ModelShape:
        """The resolved architecture, nothing of it None."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(ModelShape)}
        return ModelShape(**values)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the text comes from, and where its tokenizer and token files are kept."""

    source: Literal["random", "stories", "text", "tinystories"] = "stories"
    """random: seeded random tokens. stories: the embedded generator. text: your files. tinystories: downloaded."""
    data_dir: str | None = None
    """Folder for text, tokenizer and token files (default: data/SOURCE)."""
    train_text: str | None = None
    """Text file to train on (source text)."""
    valid_text: str | None = None
    """Text file to validate on (source text; default: the last valid_fraction of train_text)."""
    valid_fraction: float = 0.1
    """Share of train_text that is cut off for validation where there is no valid_text."""
    tokenizer: str | None = None
    """Tokenizer file (default: DATA_DIR/tokenizer.json)."""
    train_tokens: str | None = None
    """Token file to train on (default: DATA_DIR/train.npy)."""
    valid_tokens: str | None = None
    """Token file to validate on (default: DATA_DIR/valid.npy)."""
    tokenizer_sample_bytes: int = 1 << 28
    """Bytes of text to train the tokenizer on, at most: of a longer text, an evenly spaced sample of that size."""
    story_chars: int = 4_000_000
    """Characters of text to generate (source stories)."""
    random_tokens: int = 1 << 24
    """Tokens to draw (source random)."""
    seed: int = 0
    """Seed of the stories or of the random tokens."""

    def __post_init__(self) -> None:
        _check_types(self, "data.")
        if self.source == "text":
            _require(bool(self.train_text), "data.train_text", self.train_text, "a path, because data.source is 'text'")
        else:
            for name in ("train_text", "valid_text"):
                _require(
                    getattr(self, name) is None,
                    f"data.{name}",
                    getattr(self, name),
                    f"left out unless data.source is 'text' (it is {self.source!r})",
                )
        _require(0 < self.valid_fraction < 1, "data.valid_fraction", self.valid_fraction, "above 0 and below 1")
        _require_at_least(self, "data", 10_000, "story_chars")
        _require_at_least(self, "data", 2, "random_tokens")
        _require_at_least(self, "data", 1 << 16, "tokenizer_sample_bytes")  # one piece of text, see sample_evenly
        _require(0 <= self.seed < 1 << 63, "data.seed", self.seed, "at least 0 and below 2^63")
        folder = self.data_dir or f"data/{self.source}"
        object.__setattr__(self, "data_dir", folder)
        for name, file in (
            ("tokenizer", "tokenizer.json"),
            ("train_tokens", "train.npy"),
            ("valid_tokens", "valid.npy"),
        ):
            if getattr(self, name) is None:
                object.__setattr__(self, name, f"{folder}/{file}")
        taken: dict[str, str] = {f"{folder}/stories.txt": "the generated text"}
        for name in ("train_text", "valid_text", "tokenizer", "train_tokens", "valid_tokens"):
            path = getattr(self, name)
            if path is not None and taken.setdefault(path, f"data.{name}") != f"data.{name}":
                raise ValueError(f"data.{name} is {path!r}: it must be another file than {taken[path]}")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule: linear warm-up, then half a cosine down to min_lr at the last step."""

    implementation: Literal["own", "torch", "torch_foreach", "torch_fused"] = "own"
    """own: the readable one of cs336_basics. The others are torch.optim.AdamW; torch_fused is the fastest."""
    lr: float = 1e-3
    """Largest learning rate."""
    min_lr: float | None = None
    """Learning rate at the end (default: lr / 10)."""
    warmup_steps: int | None = None
    """Steps of linear warm-up (default: a tenth of train.max_steps, at most 100)."""
    weight_decay: float = 0.1
    """Decay of matrices; norm weights are not decayed."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the two moments."""
    eps: float = 1e-8
    """Added to the root of the second moment."""

    def __post_init__(self) -> None:
        _check_types(self, "optimizer.")
        _require_at_least(self, "optimizer", 0, "lr", "min_lr", "warmup_steps", "weight_decay", "eps")
        for i, beta in enumerate(self.betas):
            _require(0 <= beta < 1, f"optimizer.betas[{i}]", beta, "at least 0 and below 1")
        if self.min_lr is None:
            object.__setattr__(self, "min_lr", self.lr / 10)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The training loop."""

    max_steps: int = 1000
    """Optimizer steps in all."""
    batch_size: int = 32
    """Sequences an optimizer step, over all micro-batches and processes."""
    gradient_accumulation_steps: int = 1
    """Micro-batches an optimizer step; must divide batch_size."""
    max_grad_norm: float | None = 1.0
    """Gradients are scaled down to this global norm; null only measures it."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N; auto takes the GPU if there is one."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Autocast type. Weights stay float32; fp16 scales the loss."""
    compile: bool = False
    """torch.compile, block by block."""
    cuda_graph: bool = False
    """Record forward and backward as a CUDA graph and replay it: no launch overhead, which decides for small models."""
    deterministic: bool = False
    """Deterministic algorithms on the GPU too (slower), for runs that must repeat bit for bit."""
    validation_interval: int = 100
    """Validate every this many steps, and at the last one; 0: only at the last."""
    validation_sequences: int = 256
    """Sequences a validation, from the start of the validation file."""
    skip_nonfinite: bool = False
    """Skip and count steps with a non-finite loss or gradient instead of stopping."""
    seed: int = 0
    """Seed of the weights and of the order of the data."""

    def __post_init__(self) -> None:
        _check_types(self, "train.")
        _require_at_least(
            self, "train", 1, "max_steps", "batch_size", "gradient_accumulation_steps", "validation_sequences"
        )
        _require_at_least(self, "train", 0, "validation_interval")
        _require(0 <= self.seed < 1 << 63, "train.seed", self.seed, "at least 0 and below 2^63")
        _require(
            not (self.cuda_graph and self.precision == "fp16"),
            "train.cuda_graph",
            self.cuda_graph,
            "false with train.precision 'fp16', whose loss scaling decides on the host",
        )
        if self.max_grad_norm == math.inf:  # which JSON cannot say
            object.__setattr__(self, "max_grad_norm", None)
        limit = self.max_grad_norm
        _require(limit is None or limit > 0, "train.max_grad_norm", limit, "above 0, or null: do not clip")
        _require(
            self.batch_size % self.gradient_accumulation_steps == 0,
            "train.gradient_accumulation_steps",
            self.gradient_accumulation_steps,
            f"a divisor of train.batch_size, {self.batch_size}",
        )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save, and how much to keep."""

    checkpointing_interval: int = 0
    """Save every this many steps; 0 or less: only the last step, which is always saved."""
    keep_last: int | None = None
    """Keep only this many of the newest checkpoints (default: all)."""

    def __post_init__(self) -> None:
        _check_types(self, "checkpoint.")
        _require_at_least(self, "checkpoint", 1, "keep_last")


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """The text that is sampled at the end of a run, and by `cs336 generate`."""

    prompt: str = ""
    """Text to continue; empty starts a new document."""
    max_new_tokens: int | None = None
    """Tokens to add (default: until the context is full)."""
    temperature: float = 0.8
    """0 takes the likeliest token."""
    top_k: int | None = None
    """Keep only the k likeliest tokens."""
    top_p: float | None = 0.95
    """Keep only the likeliest tokens that together reach this probability."""
    seed: int = 0
    """Seed of the draws."""

    def __post_init__(self) -> None:
        _check_types(self, "sample.")
        _require_at_least(self, "sample", 0, "max_new_tokens", "temperature")
        _require_at_least(self, "sample", 1, "top_k")
        _require(0 <= self.seed < 1 << 63, "sample.seed", self.seed, "at least 0 and below 2^63")
        if any("\ud800" <= character <= "\udfff" for character in self.prompt):
            raise ValueError(f"sample.prompt is {self.prompt!r}: it must be valid UTF-8")
        _require(self.top_p is None or 0 < self.top_p <= 1, "sample.top_p", self.top_p, "above 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What is written while training, besides metrics.jsonl."""

    tensorboard: bool = False
    """Also write TensorBoard event files into the run folder."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Also log to Weights & Biases."""
    wandb_project: str = "cs336"
    """Project name at Weights & Biases."""

    def __post_init__(self) -> None:
        _check_types(self, "log.")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that describes one run, from a text to a sampled model."""

    model: ModelConfig
    run_dir: str | None = None
    """Folder of the run (default: runs/SOURCE-DATE-TIME)."""
    resume: str = "none"
    """none; auto: the newest whole checkpoint in run_dir, if there is one; or the path of a checkpoint."""
    init_from: str | None = None
    """Run or checkpoint to take the first weights from, and nothing else (default: draw them)."""
    skip_data: bool = False
    """Use the token files as they are; make nothing."""
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        _check_types(self, "")
        if self.resume == "auto":
            _require(self.run_dir is not None, "run_dir", self.run_dir, "given where resume is 'auto'")
        room = self.model.shape.context_length - 1
        _require(
            (self.sample.max_new_tokens or 0) <= room,
            "sample.max_new_tokens",
            self.sample.max_new_tokens,
            f"at most {room}, so that a prompt and it fit into model.context_length",
        )
        if self.optimizer.warmup_steps is None:
            warmup_steps = min(100, self.train.max_steps // 10)
            object.__setattr__(self, "optimizer", dataclasses.replace(self.optimizer, warmup_steps=warmup_steps))

    def to_dict(self) -> dict[str, Any]:
        """The resolved configuration as plain JSON types."""
        return dataclasses.asdict(self)
