"""The model settings of a run, and the named model sizes."""

import dataclasses
from dataclasses import dataclass

from cs336_basics.shape import ModelShape

from .checks import check_types, require

DEFAULT_VOCAB_SIZE = 10_000
DEFAULT_CONTEXT_LENGTH = 256
FP8_MULTIPLE = 16
"""Sizes of FP8 products are multiples of 16. With another number of tokens dW is a 16-bit product."""

# Table 1 of the 2025 handout, its 10B model, and the 8B model of the 2026 leaderboard.
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
SIZE_FIELDS = ("d_model", "d_ff", "num_layers", "num_heads")
"""Fields that a named size sets."""
SHAPE_FIELDS = ("vocab_size", "context_length", *SIZE_FIELDS)
"""Fields that decide the number of parameters and the work of a step: those of a ModelShape without a default."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture, by name (`size`) or field by field."""

    size: str | None = None
    """Named size: small, medium, large, xl, 2.7B, 10B or 8B. Sets d_model, d_ff, num_layers and num_heads."""
    vocab_size: int | None = None
    """Size of the vocabulary, also of a new tokenizer (default: the named size's, else 10,000)."""
    context_length: int | None = None
    """Tokens per sequence (default: the named size's, else 256)."""
    d_model: int | None = None
    """Width of the residual stream."""
    d_ff: int | None = None
    """Width of the feed-forward layer."""
    num_layers: int | None = None
    """Number of Transformer blocks."""
    num_heads: int | None = None
    """Number of attention heads. d_model / num_heads must be even."""
    num_kv_heads: int | None = None
    """Heads of keys and values, a divisor of num_heads (default: num_heads)."""
    head_dim: int | None = None
    """Size of a head, an even number (default: d_model / num_heads)."""
    qk_norm: bool = False
    """Normalise each head's queries and keys (Qwen 3)."""
    window: int | None = None
    """Keys that a query sees at most, its own and those before it (Mistral's sliding window; default: all)."""
    window_every: int = 1
    """With window: only every so many blocks has it, beginning with the first."""
    tie_embeddings: bool = False
    """Use the embedding's weight for the head too."""
    norm_eps: float = ModelShape.norm_eps
    """Added to the mean square in each norm."""
    rope_theta: float = ModelShape.rope_theta
    """Base of the frequencies of the rotary embedding."""
    rope_scaling: tuple[float, float, float, float] | None = None
    """Llama 3's scaled frequencies: factor, low_freq_factor, high_freq_factor, original_max_position_embeddings
    (default: no scaling)."""
    attention: str = "auto"
    """Attention kernel: a registered name, or your own function as module:function. auto is sdpa, which lets PyTorch
    choose among its kernels, and flash_triton on GPUs where it is faster (docs/kernels.md)."""

    def __post_init__(self) -> None:
        check_types(self, "model.")
        preset: dict[str, int] = {}
        if self.size is not None:
            require(self.size in MODEL_SIZES, "model.size", self.size, f"one of {', '.join(MODEL_SIZES)}")
            preset = MODEL_SIZES[self.size]
        defaults = {"vocab_size": DEFAULT_VOCAB_SIZE, "context_length": DEFAULT_CONTEXT_LENGTH}
        for name in SHAPE_FIELDS:
            given = getattr(self, name)
            if given is None:
                object.__setattr__(self, name, preset.get(name, defaults.get(name)))
            elif name in SIZE_FIELDS and name in preset and given != preset[name]:
                raise ValueError(
                    f"model.{name} is {given}, but model.size {self.size!r} means {preset[name]}: give the size, or "
                    f"leave it out and give {', '.join(SIZE_FIELDS)}"
                )
            if getattr(self, name) is None:
                raise ValueError(f"model.{name} is missing: give it, or model.size (one of {', '.join(MODEL_SIZES)})")
        self.shape.check("model.{}".format)

    @property
    def shape(self) -> ModelShape:
        """The resolved architecture."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(ModelShape)}
        return ModelShape(**values)


def check_fp8(shape: ModelShape) -> None:
    """Raise ValueError naming a width of the blocks that FP8 products do not take."""
    widths = {
        "model.d_model": shape.d_model,
        "model.d_ff": shape.d_ff,
        "model.num_heads times the head size": shape.num_heads * shape.head_size,
        "model.num_kv_heads times the head size": shape.kv_heads * shape.head_size,
    }
    for name, width in widths.items():
        require(width % FP8_MULTIPLE == 0, name, width, f"a multiple of {FP8_MULTIPLE} with train.precision 'fp8'")
