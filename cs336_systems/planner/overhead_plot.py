"""The plot of the time that communication adds to a step, over the bucket size."""

import math
from collections.abc import Sequence
from pathlib import Path

from ..machine.files import write_figure
from .communication import added_seconds, best_num_buckets
from .working import MIB


def plot_overhead(
    nbytes: float,
    bandwidth: float,
    overhead_s: float,
    measured: Sequence[tuple[str, float, float]],
    out: Path,
) -> None:
    """Draw s / (w n) + o n over the bytes of a bucket, its minimum, and the measured times, into a PNG.

    measured: how a step ran, bytes of a bucket, seconds added. Raises ValueError if the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    best = best_num_buckets(nbytes, bandwidth, overhead_s)
    sizes = [nbytes / 10 ** (4 * i / 200) for i in range(201)]
    curve = [added_seconds(nbytes, bandwidth, overhead_s, nbytes / size) for size in sizes]
    axis.plot([s / MIB for s in sizes], [t * 1e3 for t in curve], color="C0", label="model: s / (w n) + o n")
    if math.isfinite(best):
        least = added_seconds(nbytes, bandwidth, overhead_s, best)
        label = f"least: {nbytes / best / MIB:.0f} MiB, {least * 1e3:.2f} ms"
        axis.plot(nbytes / best / MIB, least * 1e3, "o", color="C0", label=label)
    for i, how in enumerate(dict.fromkeys(how for how, _, _ in measured)):
        points = sorted((size / MIB, added * 1e3) for each, size, added in measured if each == how)
        axis.plot(*zip(*points, strict=True), marker="s", linestyle="--", color=f"C{i + 1}", label=f"measured, {how}")
    axis.set(xscale="log", yscale="log", xlabel="bucket (MiB)", ylabel="added to the step (ms)")
    axis.set_title(f"{nbytes / 1e9:.2f} GB of gradients, w = {bandwidth / 1e9:.0f} GB/s, o = {overhead_s * 1e6:.0f} us")
    axis.grid(alpha=0.3, which="major")
    axis.legend(frameon=False)
    try:
        write_figure(figure, out)
    except OSError as error:
        raise ValueError(f"plot is {str(out)!r}: it must be a file that can be written ({error.strerror})") from error
