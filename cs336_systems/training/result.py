"""The result of a run, written as result.json."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of a run. Losses and entropies are in nats per token."""

    run_dir: str
    checkpoint: str
    loss_curve: str
    step: int
    interrupted: str | None
    """Name of the signal that stopped the run before its last step, or None; also None if its time was up."""
    train_loss: float | None
    valid_loss: float | None
    unigram_entropy: float
    bigram_entropy: float
    """Entropy of the validation text's own pairs. A model may beat it: a short text repeats few of its pairs."""
    bigram_model_loss: float
    """Loss on the validation text of a smoothed table of the training text's pair counts."""
    sample: str | None = field(repr=False)
    first_step: int = 1
    """First step of this process, above 1 after a resume. Times, rates and memory below cover the steps from it on."""
    skipped_steps: int
    startup_s: float | None
    """From building the model to the end of the first step, compilation included."""
    step_ms: dict[str, float]
    """p20, p50, p80, mean and std over the steps of this process, without its first five."""
    data_wait_ms: float | None
    tokens_per_s: float | None
    mfu: float | None
    peak_memory_bytes: int
    env: dict[str, Any] = field(repr=False)
