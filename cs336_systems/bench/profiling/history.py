"""The history of a snapshot: its allocations, each with its lifetime and its category."""

from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate

from .phases import ACTIVATIONS, CATEGORIES, OTHER, TEMPORARIES, Phases
from .snapshot import Event, Frame, Snapshot

MARKER = "mark_boundary"  # the function of recording.py whose allocations are boundaries
LIFETIMES = ("alive all along", "alive before, freed", "allocated, kept", "allocated, freed")


@dataclass(slots=True)
class Allocation:
    """A piece of memory, from its allocation until it could be used again.

    It is alive at moments `start` to `end` - 1; moment 0 is before the first event of the trace, moment i after the
    i-th. Times are None if it was alive before the recording, or still after it.
    """

    address: int
    size: int
    start: int
    end: int
    start_us: int | None
    end_us: int | None
    frames: tuple[Frame, ...]
    stream: int = 0
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
    walk = _Walk(snapshot)
    warnings = list(snapshot.warnings)
    last = len(snapshot.events)
    if phases is None:
        if last % 10_000 == 0:
            warnings.append(f"the trace has exactly {last:,} entries: it may have been full, and its beginning lost")
        names: tuple[str, ...] = ("recorded",)
        boundaries: tuple[int, ...] = (0, last)
        for a in walk.allocations:
            a.category = LIFETIMES[2 * (a.start > 0) + (a.end <= last)]
    else:
        names = phases.names[: len(phases.boundaries_us)]
        expected = len(phases.boundaries_us)
        boundaries = (*[0] * (expected - len(walk.markers)), *walk.markers[-expected:])
        if expected == len(names):  # the last phase did not end
            boundaries = (*boundaries, last)
        is_cut = len(walk.markers) < expected
        if is_cut or (phases.max_entries is not None and last >= phases.max_entries):
            warnings.append(
                f"the trace was full after {last:,} entries and its beginning is lost: memory allocated there counts "
                "as alive before, and earlier phases are cut"
            )
        oom = [moment for moment, event in enumerate(snapshot.events) if event.action == "oom"]
        if missing := _categorize(walk.allocations, phases, boundaries, failed=oom[-1] if oom else last):
            warnings.append(f"{missing:,} tensors are not where the snapshot has memory in use")
    times = list(accumulate((e.time_us for e in snapshot.events), max, initial=snapshot.events[0].time_us))
    origin = times[boundaries[0]]
    return History(
        sorted(walk.allocations, key=lambda a: (a.start, a.address)),
        [time - origin for time in times],
        names,
        boundaries,
        LIFETIMES if phases is None else CATEGORIES,
        tuple(warnings),
    )


class _Walk:
    """Walks forward through the trace and notes when memory was allocated and when it could be used again."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.allocations: list[Allocation] = []
        self.markers: list[int] = []
        self._alive: dict[int, Allocation] = {}
        self._requested: dict[int, tuple[int, int]] = {}  # frees that have not been completed
        self._never = len(snapshot.events) + 1  # the end of an allocation that is not freed
        for moment, event in enumerate(snapshot.events, start=1):
            if event.action == "alloc":
                self._alloc(moment, event)
            elif event.action in ("free_requested", "free_completed"):
                self._free(moment, event)
        self._finish(snapshot)

    def _alloc(self, moment: int, event: Event) -> None:
        if event.address in self._alive:  # its free was not completed in the trace
            self._close(event.address, *self._requested.get(event.address, (moment, event.time_us)))
        new = Allocation(
            event.address, event.size, moment, self._never, event.time_us, None, event.frames, event.stream
        )
        self._alive[event.address] = new
        if any(frame.function == MARKER for frame in event.frames):
            self.markers.append(moment)  # tracked so that its free is matched, but not memory of the step
        else:
            self.allocations.append(new)

    def _free(self, moment: int, event: Event) -> None:
        if event.address not in self._alive:  # it was alive before the recording
            before = Allocation(event.address, event.size, 0, self._never, None, None, (), event.stream)
            self._alive[event.address] = before
            self.allocations.append(before)
        if event.action == "free_requested":
            self._requested[event.address] = moment, event.time_us
        else:
            self._close(event.address, moment, event.time_us)

    def _close(self, address: int, moment: int, time_us: int) -> None:
        allocation = self._alive.pop(address)
        allocation.end, allocation.end_us = moment, time_us
        self._requested.pop(address, None)

    def _finish(self, snapshot: Snapshot) -> None:
        """Match the allocations alive at the end with the blocks in use then."""
        blocks = {block.address: block for block in snapshot.blocks}
        for address in [address for address in self._requested if address not in blocks]:
            self._close(address, *self._requested[address])
        for address, block in blocks.items():
            if address not in self._alive:
                self.allocations.append(
                    Allocation(address, block.size, 0, self._never, None, None, block.frames, block.stream)
                )


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
