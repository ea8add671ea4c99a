"""Training: from a configuration to a trained model, with nothing lost on the way."""

from .pipeline import train
from .result import RunResult

__all__ = ["RunResult", "train"]
