"""The architecture of a model as data. Imports no PyTorch, so that the command line starts quickly."""

import math
from collections.abc import Callable
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
        if self.head_dim is not None and self.head_dim * self.num_heads == self.d_model:
            object.__setattr__(self, "head_dim", None)

    def check(self, name: Callable[[str], str]) -> None:
        """Raise ValueError for a value that no model can have. name: what the message calls a field."""

        def require(condition: bool, field: str, accepted: str) -> None:
            if not condition:
                value = getattr(self, field)
                shown = list(value) if isinstance(value, tuple) else value
                raise ValueError(f"{name(field)} is {shown!r}: it must be {accepted}")

        counts = ("context_length", "d_model", "d_ff", "num_layers", "num_heads", "num_kv_heads", "head_dim", "window")
        for field in (*counts, "window_every"):
            value = getattr(self, field)
            above = " and below 2^63" if value is not None and value > 1 else ""
            require(value is None or 1 <= value < 1 << 63, field, f"at least 1{above}")
        require(1 <= self.vocab_size <= 1 << 24, "vocab_size", "from 1 to 2^24, and at least 257 to train a tokenizer")
        require(self.window_every == 1 or self.window is not None, "window_every", f"1 without {name('window')}")
        require(0 < self.rope_theta < math.inf, "rope_theta", "above 0 and finite")
        require(0 <= self.norm_eps < 1, "norm_eps", "from 0 to below 1")
        scaling = self.rope_scaling
        is_possible = scaling is None or (all(0 < x < math.inf for x in scaling) and scaling[1] < scaling[2])
        require(is_possible, "rope_scaling", "4 numbers above 0, the second below the third")
        is_whole = self.head_dim is not None or self.d_model % self.num_heads == 0
        require(is_whole, "d_model", f"divisible by {name('num_heads')}, {self.num_heads}")
        if self.head_size % 2:
            head = f"{name('d_model')} / {name('num_heads')}" if self.head_dim is None else name("head_dim")
            why = "the size of a head must be even, because rotary embedding turns pairs"
            raise ValueError(f"{head} is {self.head_size}: {why}")
        is_divisor = self.num_heads % self.kv_heads == 0
        require(is_divisor, "num_kv_heads", f"a divisor of {name('num_heads')}, {self.num_heads}")

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
        """Blocks whose attention has a window that hides keys."""
        if self.window is None or self.window >= self.context_length:
            return 0
        return -(-self.num_layers // self.window_every)

    def to_dict(self) -> dict[str, Any]:
        """All fields, in JSON's types."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The fields that have a default, with it."""
        return {f.name: f.default for f in fields(cls) if f.default is not MISSING}
