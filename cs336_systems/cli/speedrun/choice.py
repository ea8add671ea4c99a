"""Which model to train in a given time: sizes, their expected losses, batch sizes and learning rates.

This is arithmetic with published scaling laws; the caller measures how fast a size trains.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from cs336_basics.shape import ModelShape

from ...config.model import MODEL_SIZES
from ...planner.accounting import num_parameters, training_flops

# From what a CPU trains in a minute to what fills a card: heads of 32 or 64 and feed-forward layers of about 8/3
# d_model, as is usual with SwiGLU (Shazeer 2020); then the named sizes.
SIZES: dict[str, dict[str, int]] = {
    "nano": dict(d_model=128, d_ff=384, num_layers=4, num_heads=4),
    "micro": dict(d_model=256, d_ff=704, num_layers=6, num_heads=4),
    "mini": dict(d_model=384, d_ff=1024, num_layers=8, num_heads=6),
    "base": dict(d_model=512, d_ff=1408, num_layers=10, num_heads=8),
    "mid": dict(d_model=768, d_ff=2048, num_layers=10, num_heads=12),
    **{name: MODEL_SIZES[name] for name in ("small", "medium", "large", "xl", "2.7B")},
}
TOKENS_A_PARAMETER = 20
MOST_EPOCHS = 16  # after which another pass over the text is worth a third of the first, and the model memorises it
_LEAST_GAIN = 0.01  # in nats; the search stops at a size that gains less than this over the smaller one
_FIRST_SEQUENCES = 8  # per GPU, until its speed is known
_LARGEST_LR = 3e-3


def expected_loss(parameters: float, tokens: float, unique_tokens: float = math.inf) -> float:
    """E + A / N^a + B / D^b: the loss of N parameters after D tokens (Hoffmann et al. 2022, approach 3).

    The constants are those of the new fit by Besiroglu et al. 2024. If a text of U tokens is read several times, both N
    and D count for less (Muennighoff et al. 2023): D counts as U + U R (1 - exp(-r / R)) with R = 15.4,
    where r is how often U is repeated after the first pass; N likewise with R = 5.3, as far as it exceeds the number of
    parameters that suits U. The law was fitted to models of 70 M to 16 B parameters on at least 5 B tokens of web text.
    Below that, and on other text, it orders models, but its values mean nothing: a million parameters after a million
    tokens get 19 nats, three times those of a model that knows nothing. So they are compared and never shown.
    """
    tokens = _worth(tokens, unique_tokens, 15.4)
    parameters = _worth(parameters, unique_tokens / TOKENS_A_PARAMETER, 5.3)
    return 1.8172 + 482.01 / parameters**0.3478 + 2085.43 / tokens**0.3658


def _worth(amount: float, unique: float, decay: float) -> float:
    """The amount, of which the part above `unique` counts less and less: an exponential saturation."""
    if amount <= unique:
        return amount
    return unique - unique * decay * math.expm1(-(amount / unique - 1) / decay)


def batch_tokens(flops: float) -> float:
    """Tokens per step for a run of C operations: 0.2920 C^0.3271 (Bi et al. 2024, DeepSeek LLM; from 1e17 on)."""
    return 0.2920 * flops**0.3271


def learning_rate(flops: float) -> float:
    """Peak learning rate for a run of C operations: 0.3118 C^-0.1250 (source: see `batch_tokens`), at most 3e-3."""
    return min(_LARGEST_LR, 0.3118 * flops**-0.1250)


class TrialFailed(RuntimeError):
    """A trial failed for another reason than memory."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What to time: a size, its batch and its kernel."""

    size: str
    kernel: str
    sequences: int
    """Per step and GPU."""
    micro_batches: int = 1
    """Parts in which the sequences go through the model."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How fast a trial ran."""

    step_s: float
    startup_s: float
    peak_memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A trial that worked, and what its run would reach."""

    trial: Trial
    timing: Timing
    shape: ModelShape
    tokens: float
    """Tokens that the run would train on."""
    loss: float
    """The `expected_loss` of the run, to compare candidates by."""
    why: str = field(default="", compare=False)
    """Of the candidate to train: why it is of this size, has this batch and this kernel."""

    @property
    def tokens_a_parameter(self) -> float:
        """Tokens that the run would train on, for each parameter."""
        return self.tokens / num_parameters(self.shape)

    @property
    def flops(self) -> float:
        """Operations of the run."""
        return run_flops(self.shape, self.tokens)


@dataclass(frozen=True, kw_only=True)
class Task:
    """The task of a search: what there is to choose from, and how long, or on how many tokens, the run will train."""

    shapes: Mapping[str, ModelShape]
    """By name, smallest first."""
    kernels: tuple[str, ...]
    devices: int
    unique_tokens: int
    """Tokens in the training text."""
    seconds: float | None = None
    """Time for the steps of the run, which makes at most MOST_EPOCHS passes; None if `tokens` is given."""
    tokens: float | None = None
    """Tokens that the run trains on."""
    most_sequences: Callable[[ModelShape], int]
    """How many sequences fit on a GPU at once; 0 if not even one does."""
    measure: Callable[[Trial], Timing | None]
    """Times a trial; None if memory does not suffice. Raises TrialFailed for any other failure."""
    is_time_left: Callable[[float], bool]
    """Whether there is time for a trial whose steps take so many seconds each."""


def run_flops(shape: ModelShape, tokens: float) -> float:
    """Matrix-product operations of training on this many tokens."""
    return training_flops(shape, 1, shape.context_length) * tokens / shape.context_length


def search(task: Task) -> Iterator[Candidate]:
    """Yield candidates as they are found; the last one is the one to train.

    Sizes are tried from the smallest on, as long as the expected loss falls; then the kernels, at the best size. With a
    number of tokens, the size is the largest that gets `TOKENS_A_PARAMETER` tokens per parameter (or the smallest there
    is). Raises RuntimeError if not even the smallest works.
    """
    best: Candidate | None = None
    sizes, why = _sizes(task)
    for size in sizes:
        if best is not None and not task.is_time_left(_expected_step_s(task, size, best)):
            why = f"{size} would take too long to time"
            break
        found = _try(task, size, task.kernels[0], None if best is None else best.flops)
        if found is None:  # a larger one needs even more memory
            why = f"{size} cannot be trained here"
            break
        yield found
        if best is not None and found.loss > best.loss - _LEAST_GAIN:
            why = f"{size}, with {found.tokens_a_parameter:.2g} tokens a parameter, is no better by Chinchilla's law"
            break
        best = found
    if best is None:
        raise RuntimeError("no model of any size could be trained here; the reasons stand above")
    if not task.is_time_left(_expected_step_s(task, best.trial.size, best)):
        yield replace(best, why=f"{why}; there is no time to time another batch")
        return
    of_best = [
        found
        for kernel in task.kernels
        if (found := _try(task, best.trial.size, kernel, best.flops, known=best)) is not None
    ]
    yield from (found for found in of_best if found is not best)
    if not of_best:
        yield replace(best, why=f"{why}; no other batch works")
        return
    why += f"; the batch is DeepSeek LLM's for {best.flops:.1e} operations"
    why += "; of its kernels it is the fastest" if len(task.kernels) > 1 else ""
    yield replace(min(of_best, key=lambda found: found.timing.step_s / found.trial.sequences), why=why)


def _sizes(task: Task) -> tuple[list[str], str]:
    """The sizes to try, in order, and why the last is trained if each is better than the one before it.

    With a number of tokens, only the size that suits it is tried.
    """
    names = list(task.shapes)
    if len(names) == 1:
        return names, "the size is given"
    if task.tokens is None:
        return names, "there is no larger size"
    for name, shape in reversed(list(task.shapes.items())):
        if TOKENS_A_PARAMETER * num_parameters(shape) <= task.tokens and task.most_sequences(shape):
            return [name], f"it is the largest size with {TOKENS_A_PARAMETER} tokens a parameter"
    return names[:1], f"there is no size with {TOKENS_A_PARAMETER} tokens a parameter"


def _expected_step_s(task: Task, size: str, known: Candidate) -> float:
    """How long a step of a size takes if it computes as fast as a known one."""
    shape = task.shapes[size]
    ratio = run_flops(shape, shape.context_length) / run_flops(known.shape, known.shape.context_length)
    return known.timing.step_s * ratio * _batch(task, shape, known.flops) / known.trial.sequences


def _batch(task: Task, shape: ModelShape, flops: float | None) -> int:
    """Sequences per step and GPU for a run of this many operations: a power of two."""
    sequences = _FIRST_SEQUENCES if flops is None else batch_tokens(flops) / shape.context_length / task.devices
    return 2 ** max(0, round(math.log2(sequences)))


def _try(task: Task, size: str, kernel: str, flops: float | None, known: Candidate | None = None) -> Candidate | None:
    """Try a size with the batch for a run of this many operations; if memory is short, in ever smaller pieces."""
    shape = task.shapes[size]
    most = task.most_sequences(shape)
    if task.tokens is not None:
        flops = run_flops(shape, task.tokens)
    whole = _batch(task, shape, flops)
    at_once = min(whole, 2 ** int(math.log2(most))) if most else 0
    while at_once:
        trial = Trial(size=size, kernel=kernel, sequences=whole, micro_batches=whole // at_once)
        if known is not None and trial == known.trial:
            return known
        try:
            timing = task.measure(trial)
        except TrialFailed:
            return None
        if timing is not None:
            rate = whole * task.devices * shape.context_length / timing.step_s
            tokens = task.tokens
            if task.seconds is not None:
                tokens = min(task.seconds * rate, MOST_EPOCHS * task.unique_tokens)
            assert tokens is not None
            loss = expected_loss(num_parameters(shape), tokens, task.unique_tokens)
            return Candidate(trial=trial, timing=timing, shape=shape, tokens=tokens, loss=loss)
        at_once //= 2
    return None
