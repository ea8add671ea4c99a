"""Choose the model to train in a given time, by published scaling laws for loss, batch size and learning rate.

This is arithmetic. The caller measures how fast each size trains.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from cs336_basics.shape import ModelShape

from ...bench.row import Row
from ...config.model import MODEL_SIZES
from ...planner.accounting import num_parameters, training_flops

# From a minute on a CPU to a full card. The first sizes have heads of 32 or 64 and feed-forward layers of about
# 8/3 d_model, as is usual with SwiGLU (Shazeer 2020). Then come the named sizes.
SIZES: dict[str, dict[str, int]] = {
    "nano": dict(d_model=128, d_ff=384, num_layers=4, num_heads=4),
    "micro": dict(d_model=256, d_ff=704, num_layers=6, num_heads=4),
    "mini": dict(d_model=384, d_ff=1024, num_layers=8, num_heads=6),
    "base": dict(d_model=512, d_ff=1408, num_layers=10, num_heads=8),
    "mid": dict(d_model=768, d_ff=2048, num_layers=10, num_heads=12),
    **{name: MODEL_SIZES[name] for name in ("small", "medium", "large", "xl", "2.7B")},
}
TOKENS_A_PARAMETER = 20
MOST_EPOCHS = 16  # after that, a pass is worth a third of the first, and the model memorises the text
_LEAST_GAIN = 0.01  # nats; the search stops at a size that gains less over the smaller one
_FIRST_SEQUENCES = 8  # per GPU, until its speed is known
_LARGEST_LR = 3e-3


def expected_loss(parameters: float, tokens: float, unique_tokens: float = math.inf) -> float:
    """E + A / N^a + B / D^b: the loss of N parameters after D tokens (Hoffmann et al. 2022, approach 3).

    The constants come from the new fit by Besiroglu et al. 2024. If a text of U tokens is repeated, N and D count for
    less (Muennighoff et al. 2023): D counts as U + U R (1 - exp(-r / R)) with R = 15.4 after r repetitions. N counts
    likewise, with R = 5.3, above the number of parameters that suits U. The law was fitted to models of 70 M to 16 B
    parameters on at least 5 B tokens of web text. For smaller models it still orders them, but its values mean nothing:
    a million parameters after a million tokens get 19 nats, far more than a uniform guess. So never show them.
    """

    def worth(amount: float, unique: float, decay: float) -> float:
        if amount <= unique:
            return amount
        return unique - unique * decay * math.expm1(-(amount / unique - 1) / decay)

    tokens = worth(tokens, unique_tokens, 15.4)
    parameters = worth(parameters, unique_tokens / TOKENS_A_PARAMETER, 5.3)
    return 1.8172 + 482.01 / parameters**0.3478 + 2085.43 / tokens**0.3658


def batch_tokens(flops: float) -> float:
    """Tokens per step for a run of C operations: 0.2920 C^0.3271 (Bi et al. 2024, DeepSeek LLM, for C >= 1e17)."""
    return 0.2920 * flops**0.3271


def learning_rate(flops: float) -> float:
    """Peak learning rate for a run of C operations: 0.3118 C^-0.1250 (Bi et al. 2024), at most 3e-3."""
    return min(_LARGEST_LR, 0.3118 * flops**-0.1250)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A step to time: size, kernel and batch."""

    size: str
    kernel: str
    sequences: int
    """Sequences per step and GPU."""
    micro_batches: int = 1
    """Number of parts in which the sequences pass through the model."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A trial that worked, and the run it would lead to."""

    trial: Trial
    step_s: float
    """Time of a step."""
    row: Row
    shape: ModelShape
    tokens: float
    """Tokens that the run would train on."""
    loss: float
    """`expected_loss` of the run, to compare candidates."""
    why: str = ""
    """Reason for the size, batch and kernel. Set for the candidate to train."""

    @property
    def tokens_a_parameter(self) -> float:
        return self.tokens / num_parameters(self.shape)

    @property
    def flops(self) -> float:
        return run_flops(self.shape, self.tokens)


@dataclass(frozen=True, kw_only=True)
class Task:
    """The choices of a search, and the time or the number of tokens for the run."""

    shapes: Mapping[str, ModelShape]
    """Shapes by name, smallest first."""
    kernels: tuple[str, ...]
    devices: int
    unique_tokens: int
    """Tokens in the training text."""
    seconds: float = math.inf
    """Time for the steps of the run, which makes at most MOST_EPOCHS passes."""
    tokens: float | None = None
    """Tokens that the run trains on. None: as many as the time allows."""
    most_sequences: Callable[[ModelShape], int]
    """Returns how many sequences fit on a GPU at once; 0 if not even one fits."""
    measure: Callable[[Trial], Row]
    """Times a trial."""
    tell: Callable[[Candidate], None]
    """Called for each candidate that is found."""
    is_time_left: Callable[[float], bool]
    """Whether there is time for a trial whose steps take this many seconds each."""


def run_flops(shape: ModelShape, tokens: float) -> float:
    """Matrix-product operations of training on this many tokens."""
    return training_flops(shape, 1, shape.context_length) * tokens / shape.context_length


def search(task: Task) -> Candidate:
    """The candidate to train.

    Sizes are tried from the smallest up, as long as the expected loss falls; then the kernels are tried at the best
    size. With a number of tokens, only the largest size with `TOKENS_A_PARAMETER` tokens per parameter is tried (or the
    smallest of all). Raises RuntimeError if no size works.
    """
    sizes = list(task.shapes)
    why = "the size is given" if len(sizes) == 1 else "there is no larger size"
    if len(sizes) > 1 and task.tokens is not None:
        for size, shape in reversed(list(task.shapes.items())):
            if TOKENS_A_PARAMETER * num_parameters(shape) <= task.tokens and task.most_sequences(shape):
                sizes, why = [size], f"it is the largest size with {TOKENS_A_PARAMETER} tokens a parameter"
                break
        else:
            sizes, why = sizes[:1], f"there is no size with {TOKENS_A_PARAMETER} tokens a parameter"

    best: Candidate | None = None
    for size in sizes:
        if best is not None and not task.is_time_left(_expected_step_s(task, size, best)):
            why = f"{size} would take too long to time"
            break
        found = _try(task, size, task.kernels[0], None if best is None else best.flops)
        if found is None:  # a larger size needs even more memory
            why = f"{size} cannot be trained here"
            break
        if best is not None and found.loss > best.loss - _LEAST_GAIN:
            why = f"{size}, with {found.tokens_a_parameter:.2g} tokens a parameter, is no better by Chinchilla's law"
            break
        best = found
    if best is None:
        raise RuntimeError("no model of any size could be trained here; the reasons stand above")

    if not task.is_time_left(_expected_step_s(task, best.trial.size, best)):
        return replace(best, why=f"{why}; there is no time to time another batch")
    tried = [_try(task, best.trial.size, kernel, best.flops, known=best) for kernel in task.kernels]
    of_best = [found for found in tried if found is not None]
    if not of_best:
        return replace(best, why=f"{why}; no other batch works")
    why += f"; the batch is DeepSeek LLM's for {best.flops:.1e} operations"
    why += "; of its kernels it is the fastest" if len(task.kernels) > 1 else ""
    return replace(min(of_best, key=lambda found: found.step_s / found.trial.sequences), why=why)


def _expected_step_s(task: Task, size: str, known: Candidate) -> float:
    """Time of a step if this size computes at the same rate as a known candidate."""
    shape = task.shapes[size]
    ratio = run_flops(shape, shape.context_length) / run_flops(known.shape, known.shape.context_length)
    return known.step_s * ratio * _batch(task, shape, known.flops) / known.trial.sequences


def _batch(task: Task, shape: ModelShape, flops: float | None) -> int:
    """Sequences per step and GPU for a run of this many operations, rounded to a power of two."""
    sequences = _FIRST_SEQUENCES if flops is None else batch_tokens(flops) / shape.context_length / task.devices
    return 2 ** max(0, round(math.log2(sequences)))


def _try(task: Task, size: str, kernel: str, flops: float | None, known: Candidate | None = None) -> Candidate | None:
    """Try a size with the batch for a run of this many operations. If memory is short, use more micro-batches."""
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
        row = task.measure(trial)
        if row.status == "error":
            return None
        if row.status == "ok":
            step_s, tokens = row.metrics["step_ms"]["p50"] / 1e3, task.tokens
            if tokens is None:
                rate = whole * task.devices * shape.context_length / step_s
                tokens = min(task.seconds * rate, MOST_EPOCHS * task.unique_tokens)
            loss = expected_loss(num_parameters(shape), tokens, task.unique_tokens)
            found = Candidate(trial=trial, step_s=step_s, row=row, shape=shape, tokens=tokens, loss=loss)
            task.tell(found)
            return found
        at_once //= 2
    return None
