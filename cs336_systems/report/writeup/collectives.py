"""What collectives take: the problem distributed_communication_single_node."""

from collections.abc import Sequence

from ...bench.row import Row
from .claims import Evidence, gb_s, listing, ms, one_setting, p50, span, times
from .problem import Exhibit, Problem, says

_ASKED = (2, 4, 6)
"""Processes that the handout asks for."""


def bandwidths(e: Evidence) -> str | None:
    """What an all-reduce of the largest buffer reaches, by backend, over the fewest and the most ranks."""
    rows = e.ok("all-reduce", "time_ms", collective="all-reduce")
    if not rows:
        return None
    size = max(row.config["bytes"] for row in rows)
    large = []
    for own in _by_backend(e):
        found = sorted((row for row in own if row.config["bytes"] == size), key=lambda row: row.config["world_size"])
        large += [found[0], found[-1]] if len(found) > 1 else found
    told = [
        f"{ms(p50(row, 'time'))} with {row.config['backend']} over {row.config['world_size']} "
        f"({gb_s(row.metrics['bus_bytes_per_s'])} on the bus)"
        for row in large
    ]
    return f"An all-reduce of {size / 1e6:,.0f} MB takes {listing(told)}."


def small_and_large(e: Evidence) -> str | None:
    """What the smallest all-reduce takes beyond its share of the largest one's time, over a backend's most ranks."""
    told: dict[str, list[tuple[str, str]]] = {}
    for rows in _by_backend(e):
        own = one_setting([row for row in rows if row.config["world_size"] == _most_ranks(rows)], "world_size")
        small, large = min(own, key=lambda r: r.config["bytes"]), max(own, key=lambda r: r.config["bytes"])
        least, most = (f"{row.config['bytes'] / 1e6:,g} MB" for row in (small, large))
        at_rate = p50(large, "time") * small.config["bytes"] / large.config["bytes"]
        if at_rate < p50(small, "time"):
            pair = f"{ms(at_rate)} with {_over(large)}", ms(p50(small, "time"))
            told.setdefault(f"At the rate of {most}, {least}", []).append(pair)
    if not told:
        return None
    return " ".join(
        f"{what} would take {listing([rate for rate, _ in pairs])}; it takes {listing([taken for _, taken in pairs])}, "
        "of which the rest is the overhead of a call."
        for what, pairs in told.items()
    )


def by_ranks(e: Evidence) -> str | None:
    """How the time of the largest all-reduce grows with the ranks, beside the bytes that a ring sends."""
    told: list[str] = []
    for rows in _by_backend(e):
        size, most = max(row.config["bytes"] for row in rows), _most_ranks(rows)
        large = {row.config["world_size"]: row for row in rows if row.config["bytes"] == size}
        few = min(large)
        if 1 < few < most and most in large:
            longer = p50(large[most], "time") / p50(large[few], "time")
            ring = times(_ring_share(most) / _ring_share(few))
            told.append(
                f"from {few} to {most} ranks {large[few].config['backend']} takes {times(longer)} as long"
                + (f" for the largest, where a ring sends {ring} the bytes" if not told else f", for {ring} the bytes")
            )
    return f"{'; '.join(told)[0].upper()}{'; '.join(told)[1:]}." if told else None


def _by_backend(e: Evidence) -> list[list[Row]]:
    rows = e.ok("all-reduce", "time_ms", collective="all-reduce")
    return [[row for row in rows if row.config["backend"] == name]
            for name in dict.fromkeys(row.config["backend"] for row in rows)]  # fmt: skip


def _most_ranks(rows: Sequence[Row]) -> int:
    return max(row.config["world_size"] for row in rows)


def _over(row: Row) -> str:
    return f"{row.config['backend']} over {row.config['world_size']} ranks"


def _ring_share(ranks: int) -> float:
    """Bytes that a rank sends in a ring all-reduce, of those of the buffer."""
    return 2 * (ranks - 1) / ranks


def not_there(e: Evidence) -> str | None:
    """For which of the handout's numbers of processes there were not enough GPUs."""
    rows = [row for row in e.ok("all-reduce", "time_ms", collective="all-reduce") if row.config["backend"] == "nccl"]
    missing = [str(n) for n in _ASKED if rows and n > _most_ranks(rows)]
    return f"NCCL over {listing(missing)} ranks needs as many GPUs, and was not measured." if missing else None


def backends(e: Evidence) -> str | None:
    """NCCL beside gloo at equal size and ranks."""
    rows = e.ok("all-reduce", "time_ms", collective="all-reduce")
    by = {(r.config["backend"], r.config["world_size"], r.config["bytes"]): p50(r, "time") for r in rows}
    ratios = [
        by["gloo", n, size] / t for (backend, n, size), t in by.items() if backend == "nccl" and ("gloo", n, size) in by
    ]
    if not ratios:
        return None
    return f"NCCL between GPUs is {span(ratios, times)} as fast as gloo between the CPUs of such a machine."


DISTRIBUTED_COMMUNICATION = Problem(
    name="distributed_communication_single_node",
    section="Communication",
    places=("2.1", "5.1"),
    question="What does an all-reduce take, by backend, size and number of processes?",
    exhibits=(
        Exhibit(
            case="all-reduce",
            command="bench all-reduce --collective all-reduce",
            keep=lambda row: row.config.get("collective") == "all-reduce",
            plots=("time",),
        ),
    ),
    sentences=tuple(says(each, "all-reduce") for each in (bandwidths, small_and_large, by_ranks, backends, not_there)),
)
