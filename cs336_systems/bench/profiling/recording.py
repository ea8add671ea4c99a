"""Records the memory of a step: the allocator's own history on a GPU, tensors' storages on a CPU.

Both write the same two files: `snapshot.pickle`, which pytorch.org/memory_viz opens as well, and `phases.json`.
"""

import contextlib
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cs336_basics.files import replaced

from ..outcome import current_gpu_state
from ..row import stamp
from ..workload import Workbench, Workload
from .phases import GRADIENTS, OPTIMIZER, OTHER, PARAMETERS, PHASES_FILE, SNAPSHOT_FILE, Held, Phases
from .storage_recorder import StorageRecorder

MAX_ENTRIES = 1_000_000


def record(config: Workload, warmup: int, folder: Path) -> None:
    """Run `warmup` steps, record one more, write both files. A step out of memory is recorded up to that point."""
    bench = Workbench(config)
    device, on_gpu = bench.device, bench.device.type == "cuda"
    before = current_gpu_state()
    with contextlib.suppress(torch.OutOfMemoryError):  # the recorded step will show why
        for _ in range(warmup):
            bench.step()
    bench.model.zero_grad(set_to_none=True)
    gc.collect()
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    boundaries_us: list[int] = []
    held: list[Held] = []

    def note_boundary() -> None:
        """Mark a boundary between phases; note its time and the tensors there."""
        if on_gpu:  # so that a phase lasts until its work is done
            torch.cuda.synchronize(device)
        mark_boundary(device)
        for category, name, tensor in held_tensors(bench):
            storage = tensor.untyped_storage()
            if storage.nbytes() and tensor.device.type == device.type:
                place = dict(boundary=len(boundaries_us), address=storage.data_ptr())
                held.append(Held(**place, category=category, name=name))
        boundaries_us.append(time.time_ns() // 1000)

    error = None
    tensors = (tensor for *_, tensor in held_tensors(bench))
    recording: Any = AllocatorRecorder() if on_gpu else StorageRecorder(tensors)
    with recording as recorder:
        try:
            note_boundary()
            bench.step(after=lambda phase: note_boundary() if phase in bench.phases else None)
        except torch.OutOfMemoryError as short:
            error = str(short).splitlines()[0]
        states = {"gpu_before": before, "gpu_after": current_gpu_state()}
        recorder.save(folder / SNAPSHOT_FILE)
    stats: dict[str, Any] = torch.cuda.memory_stats(device) if on_gpu else {}
    names = ("allocated", "requested", "reserved") if on_gpu else ()
    phases = Phases(
        names=bench.phases[: len(boundaries_us)],
        boundaries_us=tuple(boundaries_us),
        held=tuple(held),
        counts="allocator" if on_gpu else "storages",
        max_entries=MAX_ENTRIES if on_gpu else None,
        error=error,
        config={**bench.read_back(), "warmup": warmup},
        env=stamp() | {name: state for name, state in states.items() if state},
        allocator={f"peak_{name}_bytes": int(stats[f"{name}_bytes.all.peak"]) for name in names},
    )
    phases.save(folder / PHASES_FILE)


def mark_boundary(device: torch.device) -> None:
    """Leave a marker in the trace: an allocation, freed at once, known by this function's name in its stack."""
    torch.empty(1, dtype=torch.uint8, device=device)


def held_tensors(bench: Workbench) -> Iterator[tuple[str, str, Tensor]]:
    """Category, name and tensor of everything that a workload itself holds now."""
    names: dict[Tensor, str] = {}
    for name, parameter in bench.model.named_parameters():
        names[parameter] = name
        yield PARAMETERS, name, parameter.detach()
        if parameter.grad is not None:
            yield GRADIENTS, f"gradient of {name}", parameter.grad
    for owner, state in () if bench.optimizer is None else bench.optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                yield OPTIMIZER, f"{key} of {names.get(owner, 'a parameter')}", value
    for name, buffer in bench.model.named_buffers():
        yield OTHER, f"buffer {name}", buffer
    yield OTHER, "inputs", bench.inputs
    yield OTHER, "targets", bench.targets


class AllocatorRecorder:
    """While entered, PyTorch's allocator records its history on a GPU."""

    def __enter__(self) -> "AllocatorRecorder":
        torch.cuda.memory._record_memory_history(None)  # drop earlier records
        # C++ frames too: the backward pass has no others.
        torch.cuda.memory._record_memory_history("all", context="alloc", stacks="all", max_entries=MAX_ENTRIES)
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.memory._record_memory_history(None)

    def save(self, path: Path) -> None:
        with replaced(path) as beside:
            torch.cuda.memory._dump_snapshot(str(beside))
