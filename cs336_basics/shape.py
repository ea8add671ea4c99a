"""The architecture of a model as data. Imports no PyTorch, so that the command line starts quickly."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The arguments of `TransformerLM` except the attention. Models of equal shape can share weights."""

    vocab_size: int
    context_length: int
    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    rope_theta: float = 10000.0
