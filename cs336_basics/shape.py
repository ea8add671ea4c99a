"""The architecture of a model as data. Imports no PyTorch, so that a command line can use it before that is loaded."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What determines the parameters of a `TransformerLM` and their meaning: its arguments, except the attention.

    Two runs can share weights if their shapes are equal.
    """

    vocab_size: int
    context_length: int
    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    rope_theta: float = 10000.0
