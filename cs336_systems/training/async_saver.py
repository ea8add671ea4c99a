"""Saving while training goes on: the state is copied at once, and a thread writes the copy with `save_checkpoint`.

The copy is in the host's memory, pinned if the state is on a GPU. The training thread only starts the transfer.
"""

import copy
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from ..machine.hardware import use_device_in_thread
from ..parallel import comm
from ..parallel.failure import CollectiveError
from .checkpoint import prune_together, save_checkpoint
from .manifest import Manifest, checkpoint_name
from .tensor_files import Rows
from .together import file_group

logger = logging.getLogger(__name__)


class AsyncSaver:
    """Saves one checkpoint at a time in a background thread. All ranks make, use and close one together.

    The next `save`, `wait` or `close` raises an error of the background thread. If a process ends without `close`, the
    unfinished checkpoint does not count as one.
    """

    def __init__(self) -> None:
        self._group = file_group()
        self._buffers: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self, folder: Path, tensors: Mapping[str, Tensor | Rows], manifest: Manifest, keep_last: int | None = None
    ) -> Path:
        """Copy the tensors, write them later and prune older checkpoints. Returns the checkpoint's path.

        Waits for the previous save and raises its CheckpointError.
        """
        self.wait()
        own = _own_part(tensors)
        copies = {name: self._copy(name, tensor) for name, tensor in own.items()}
        gpu = next((_local(tensor).device for tensor in own.values() if _local(tensor).is_cuda), None)
        copied = None
        if gpu is not None:
            copied = torch.cuda.Event(blocking=True)  # blocking: the waiting thread sleeps
            copied.record(torch.cuda.current_stream(gpu))
        manifest = copy.deepcopy(manifest)

        def write() -> None:
            try:
                if gpu is not None and copied is not None:
                    use_device_in_thread(gpu)
                    copied.synchronize()
                save_checkpoint(folder, copies, manifest, self._group)
                prune_together(folder, keep_last, self._group)
            except BaseException as error:
                self._error = error

        # A daemon: if another rank is gone, the end of the process must not wait for it.
        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()
        return folder / checkpoint_name(manifest.step)

    def wait(self) -> None:
        """Return when the last save is on the disk. Raises CheckpointError if it has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """`wait`, and release the copies. PyTorch keeps the pinned memory for later use."""
        try:
            self.wait()
        finally:
            self._buffers.clear()

    def __enter__(self) -> "AsyncSaver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, CollectiveError):
            return  # the save in the background waits for the same lost rank
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            logger.error("%s", failure)  # the error that ended the block is the one to raise

    def _copy(self, name: str, tensor: Tensor | Rows) -> Tensor | Rows:
        source = _local(tensor).detach()
        buffer = self._buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (source.shape, source.dtype):
            buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            self._buffers[name] = buffer
        buffer.copy_(source, non_blocking=source.is_cuda)
        return Rows(buffer, tensor.shape, tensor.first_row) if isinstance(tensor, Rows) else buffer


def _own_part(tensors: Mapping[str, Tensor | Rows]) -> Mapping[str, Tensor | Rows]:
    """The tensors that this rank writes, chosen before the copy: else main memory would hold all of them once per rank.

    A tensor that several ranks have goes to the least loaded of them.
    """
    if comm.world_size() == 1:
        return tensors
    sizes = {name: tensor.nbytes for name, tensor in tensors.items() if not isinstance(tensor, Rows)}
    everyone = comm.all_gather_objects(sizes, "sizes of the state")
    loads = [0] * len(everyone)
    mine = {name for name in tensors if name not in sizes}
    for name in sorted(set().union(*everyone)):
        holders = [rank for rank, theirs in enumerate(everyone) if name in theirs]
        owner = min(holders, key=lambda rank: loads[rank])
        loads[owner] += everyone[owner][name]
        if owner == comm.rank():
            mine.add(name)
    return {name: tensor for name, tensor in tensors.items() if name in mine}


def _local(tensor: Tensor | Rows) -> Tensor:
    return tensor.local if isinstance(tensor, Rows) else tensor
