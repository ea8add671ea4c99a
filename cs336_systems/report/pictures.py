"""PNG pictures that carry a hash of their content.

Pixels differ between machines and versions of matplotlib, the points and words do not. A picture is stale if drawing it
again from the rows gives another hash.
"""

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

from ..machine.files import write_figure

_KEYWORD = "Drawn"


def save_picture(figure: Any, path: Path) -> Path:
    """Write a figure as PNG with the hash of its content; return the path."""
    return write_figure(figure, path, **{_KEYWORD: drawn_hash(figure)})


def hash_in(path: Path) -> str | None:
    """The hash in a PNG, or None."""
    from PIL import Image

    with Image.open(path) as image:
        return image.info.get(_KEYWORD)


def drawn_hash(figure: Any) -> str:
    """SHA-256 of a figure's points, bars and words, without colours and sizes. Numbers count to six digits."""
    drawn = [[text.get_text() for text in figure.texts], *map(_axes_content, figure.axes)]
    return hashlib.sha256(json.dumps(drawn).encode()).hexdigest()


def _axes_content(axes: Any) -> list[Any]:
    words = [axes.get_title(where) for where in ("left", "center", "right")] + [text.get_text() for text in axes.texts]
    for axis in (axes.xaxis, axes.yaxis):
        words += [axis.get_label_text(), axis.get_scale(), *_own_tick_labels(axis)]
    lines = [[line.get_label(), _digits(line.get_xydata())] for line in axes.lines]
    bars = [_digits(patch.get_patch_transform().transform(patch.get_path().vertices)) for patch in axes.patches]
    paths = itertools.chain.from_iterable(collection.get_paths() for collection in axes.collections)
    groups = [container.get_label() for container in axes.containers]
    return [words, lines, bars, groups, [_digits(path.vertices) for path in paths]]


def _own_tick_labels(axis: Any) -> list[str]:
    """The tick labels that the plot sets, but not those chosen by matplotlib."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter

    locator, formatter = axis.get_major_locator(), axis.get_major_formatter()
    are_set = isinstance(locator, FixedLocator) and isinstance(formatter, FixedFormatter | FuncFormatter)
    return formatter.format_ticks(locator.locs) if are_set else []


def _digits(points: Any) -> list[str]:
    return [f"{number:.6g}" for point in points for number in point]
