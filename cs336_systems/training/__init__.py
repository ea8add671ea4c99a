"""Training: from a configuration to a trained model, with nothing lost on the way."""

from .pipeline import RunResult, train

__all__ = ["RunResult", "train"]
