"""The architecture of a model as data. Imports no PyTorch, so that the command line starts quickly."""

from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The arguments of `TransformerLM` except the attention. Models of equal shape can share weights.

    The defaults are those of the handout's model.
    """

    vocab_size: int
    context_length: int
    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    rope_theta: float = 10000.0
    rope_scaling: tuple[float, float, float, float] | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    qk_norm: bool = False
    window: int | None = None
    window_every: int = 1
    tie_embeddings: bool = False
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.num_kv_heads == self.num_heads:  # one form of each architecture
            object.__setattr__(self, "num_kv_heads", None)
        if self.head_dim == self.d_model / self.num_heads:
            object.__setattr__(self, "head_dim", None)

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_size(self) -> int:
        """Size of a head."""
        return self.head_dim or self.d_model // self.num_heads

    @property
    def num_windowed(self) -> int:
        """Blocks whose attention has the window."""
        return 0 if self.window is None else -(-self.num_layers // self.window_every)

    @property
    def is_standard(self) -> bool:
        """Whether it is the handout's architecture: only sizes, rope and norm_eps differ."""
        options = self.num_kv_heads, self.head_dim, self.qk_norm, self.tie_embeddings, self.window
        return options == (None, None, False, False, None)

    def to_dict(self) -> dict[str, Any]:
        """All fields, in JSON's types."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The fields that have a default, with it."""
        return {f.name: f.default for f in fields(cls) if f.default is not MISSING}
