"""The history of a snapshot: its allocations, each with its lifetime and its category."""

from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate

from .phases import ACTIVATIONS, CATEGORIES, OTHER, TEMPORARIES, Phases
from .snapshot import Frame, Snapshot

MARKER = "mark_boundary"  # the function of recording.py whose allocations are boundaries
LIFETIMES = ("alive all along", "alive before, freed", "allocated, kept", "allocated, freed")


@dataclass(slots=True)
class Allocation:
    """A piece of memory, from its allocation until it could be used again.

    It is alive at moments `start` to `end` - 1; moment 0 is before the first event of the trace, moment i after the
    i-th.
    """

    address: int
    size: int
    start: int
    end: int
    frames: tuple[Frame, ...]
    category: str = ""
    name: str = ""


@dataclass(frozen=True)
class History:
    """All allocations of a recording, in the order of their starts, and the phases that its moments fall into."""

    allocations: list[Allocation]
    times_us: list[int]
    """Time of each moment from the first boundary on, in us; on the clock of the host, which runs ahead of a GPU."""
    phases: tuple[str, ...]
    boundaries: tuple[int, ...]
    """The moment at which each phase begins, then the end of the last one."""
    categories: tuple[str, ...]
    warnings: tuple[str, ...]

    def phase_at(self, moment: int) -> str:
        """The phase of a moment; outside all phases, the nearest one."""
        return self.phases[max(i for i, start in enumerate(self.boundaries[:-1]) if start <= moment or i == 0)]


def history_of(snapshot: Snapshot, phases: Phases | None) -> History:
    """Follow the trace. With phases, categories come from the known tensors; without, from lifetimes alone."""
    allocations, markers = _follow(snapshot)
    warnings = list(snapshot.warnings)
    last = len(snapshot.events)
    if phases is None:
        if last % 10_000 == 0:
            warnings.append(f"the trace has exactly {last:,} entries: it may have been full, and its beginning lost")
        names: tuple[str, ...] = ("recorded",)
        boundaries: tuple[int, ...] = (0, last)
        for a in allocations:
            a.category = LIFETIMES[2 * (a.start > 0) + (a.end <= last)]
    else:
        names = phases.names[: len(phases.boundaries_us)]
        expected = len(phases.boundaries_us)
        boundaries = (*[0] * (expected - len(markers)), *markers[-expected:])
        if expected == len(names):  # the last phase did not end
            boundaries = (*boundaries, last)
        is_cut = len(markers) < expected
        if is_cut or (phases.max_entries is not None and last >= phases.max_entries):
            warnings.append(
                f"the trace was full after {last:,} entries and its beginning is lost: memory allocated there counts "
                "as alive before, and earlier phases are cut"
            )
        oom = [moment for moment, event in enumerate(snapshot.events) if event.action == "oom"]
        if missing := _categorize(allocations, phases, boundaries, failed=oom[-1] if oom else last):
            warnings.append(f"{missing:,} tensors are not where the snapshot has memory in use")
    times = list(accumulate((e.time_us for e in snapshot.events), max, initial=snapshot.events[0].time_us))
    origin = times[boundaries[0]]
    return History(
        sorted(allocations, key=lambda a: (a.start, a.address)),
        [time - origin for time in times],
        names,
        boundaries,
        LIFETIMES if phases is None else CATEGORIES,
        tuple(warnings),
    )


def _follow(snapshot: Snapshot) -> tuple[list[Allocation], list[int]]:
    """The allocations of a snapshot, and the moments of the markers between phases."""
    allocations: list[Allocation] = []
    markers: list[int] = []
    alive: dict[int, Allocation] = {}
    requested: dict[int, int] = {}  # by address: the moment of a free that has not been completed
    never = len(snapshot.events) + 1  # the end of an allocation that is not freed

    def close(address: int, moment: int) -> None:
        alive.pop(address).end = moment
        requested.pop(address, None)

    for moment, event in enumerate(snapshot.events, start=1):
        address = event.address
        if event.action == "alloc":
            if address in alive:  # its free was not completed in the trace
                close(address, requested.get(address, moment))
            alive[address] = Allocation(address, event.size, moment, never, event.frames)
            if any(frame.function == MARKER for frame in event.frames):
                markers.append(moment)  # tracked so that its free is matched, but not memory of the step
            else:
                allocations.append(alive[address])
        elif event.action in ("free_requested", "free_completed"):
            if address not in alive:  # it was alive before the recording
                alive[address] = Allocation(address, event.size, 0, never, ())
                allocations.append(alive[address])
            if event.action == "free_requested":
                requested[address] = moment
            else:
                close(address, moment)
    blocks = {block.address: block for block in snapshot.blocks}  # in use at the end
    for address in requested.keys() - blocks.keys():
        close(address, requested[address])
    unseen = (block for address, block in blocks.items() if address not in alive)
    return [*allocations, *(Allocation(b.address, b.size, 0, never, b.frames) for b in unseen)], markers


def _categorize(allocations: list[Allocation], phases: Phases, boundaries: tuple[int, ...], failed: int) -> int:
    """Set categories by the tensors, or by lifetime; return the number of tensors without memory in the snapshot.

    Activations are alive when the backward pass begins or, if it did not, at the moment when the step `failed`.
    """
    at_address: dict[int, list[Allocation]] = defaultdict(list)
    for a in allocations:
        at_address[a.address].append(a)
    missing = 0
    for held in phases.held:
        moment = boundaries[held.boundary]
        owner = next((a for a in at_address[held.address] if a.start <= moment < a.end), None)
        if owner is None:
            missing += 1
        elif not owner.category:
            owner.category, owner.name = held.category, held.name
    begins: int | None = None
    if "backward" in phases.names:
        begins = boundaries[phases.names.index("backward")]
    elif phases.error is not None and phases.config.get("mode") != "forward":
        begins = failed
    for a in allocations:
        if not a.category:
            is_kept = begins is not None and a.start <= begins < a.end
            a.category = OTHER if a.start == 0 else ACTIVATIONS if is_kept else TEMPORARIES
    return missing
