"""The memory that a row of each case measures, and its prediction: from shapes alone, with nothing fitted."""

from cs336_basics.shape import ModelShape

from .accounting import naive_attention_bytes
from .activations import block_parts, counted_activations
from .comparison import HELD_BEFORE_BACKWARD, PEAK, PEAK_OF_ACTIVATIONS, SAVED_BY_BLOCK, Pair
from .forward_memory import forward_peak_bytes
from .job import Job
from .memory import peak_bytes
from .rows import Measured, is_forward, is_of_cpu, job_of, positive, workload_job

NO_STEPS = ("residuals", "attention")
"""Cases whose rows have memory to compare, but no step time."""


def measured_memory(row: Measured) -> tuple[str, Pair | None]:
    """The kind of memory, and its measured and predicted bytes; None if a step's row has no peak.

    Raises ValueError with the reason for a row without a prediction.
    """
    if row.case == "residuals":
        return SAVED_BY_BLOCK, _saved_by_block(row)
    if row.case == "attention":
        return HELD_BEFORE_BACKWARD, _held_before_backward(row)
    if row.case == "checkpointing":  # the peak of forward and backward beyond weights and gradients
        _, predicted = counted_activations(workload_job(row.config), on_gpu=not is_of_cpu(row))
        return PEAK_OF_ACTIVATIONS, (positive("peak_bytes", row.metrics["peak_bytes"]), float(predicted))
    job = workload_job(row.config) if is_forward(row) else job_of(row)
    peak = row.metrics.get("peak_memory_bytes")
    if row.case == "profile-memory":  # its peak_bytes counts requested bytes, this one allocated bytes
        peak = row.metrics["allocator"]["peak_allocated_bytes"]
    if peak is None:
        return PEAK, None
    return PEAK, (
        positive("peak_memory_bytes", peak),
        float(forward_peak_bytes(job) if is_forward(row) else peak_bytes(job)),
    )


def _saved_by_block(row: Measured) -> Pair:
    """The activations that one block saves, including its input and excluding copies of weights.

    Predicted by `activations.block_parts`; measured with saved-tensor hooks.
    """
    names = ("context_length", "d_model", "d_ff", "num_heads")
    shape = ModelShape(**{name: row.config[name] for name in names}, vocab_size=1, num_layers=1)
    same = ("batch_size", "precision", "attention", "compile")
    job = Job(shape=shape, **{name: row.config[name] for name in same})
    saved = positive("saved_bytes", row.metrics["saved_bytes"]) + positive("input_bytes", row.metrics["input_bytes"])
    return saved, float(sum(block_parts(job).values()))


def _held_before_backward(row: Measured) -> Pair:
    """Memory in use between the forward and the backward pass of naive attention, eager or compiled.

    S + M + 6 x 4 B N D bytes, with a matrix of scores S = 4 B N^2 and a mask M = N^2 if it is causal: the saved tensors
    in `accounting.naive_attention_bytes`, of which k and v are inputs, plus q, o and the gradient of o.
    """
    config = row.config
    kernel, dtype = config.get("kernel"), config.get("dtype")
    if kernel != "naive" or dtype != "fp32":
        raise ValueError(f"no prediction for the case attention with kernel {kernel} in {dtype}")
    batch, length, head_size = (config[name] for name in ("batch_size", "length", "head_size"))
    counted = naive_attention_bytes(batch, length, length, head_size, config["is_causal"])
    name = "memory_before_backward_bytes"
    return positive(name, row.metrics[name]), float(counted["saved_for_backward"] + 3 * 4 * batch * length * head_size)
