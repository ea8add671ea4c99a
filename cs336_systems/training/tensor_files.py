"""Named tensors in safetensors files, written and read by one rank or several, through `torch.distributed.checkpoint`.

A tensor that several ranks have is written by one of them. A divided tensor is written in pieces, each by its rank. A
reader need not know the pieces: every rank reads the part that it asks for.
"""

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.api
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from ..parallel import comm
from ..parallel.failure import named
from .together import RankError, naming_the_rank, reason

_FILE_BYTES = 1 << 31  # the writer copies a whole file in memory, so files are kept to about this size


class Rows:
    """A rank's consecutive rows of a tensor, possibly none. Other ranks have the others.

    `torch.distributed.checkpoint` treats it like a DTensor. A DTensor's rows must be divided as `torch.chunk` does, on
    the device of its mesh; these rows may begin anywhere, on any device.
    """

    def __init__(self, local: Tensor, shape: Sequence[int], first_row: int) -> None:
        self.local, self.shape, self.first_row = local.detach(), torch.Size(shape), first_row

    def size(self) -> torch.Size:
        """The shape of the whole tensor."""
        return self.shape

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if self.local.numel() == 0 and self.shape.numel():
            return []  # PyTorch's reader fails on a piece without rows
        offsets = torch.Size([self.first_row] + [0] * (len(self.shape) - 1))
        return [ChunkStorageMetadata(offsets=offsets, sizes=self.local.shape)]

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]


class _SavePlanner(dcp.DefaultSavePlanner):  # takes Rows beside tensors
    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.local if isinstance(found, Rows) else super().lookup_object(index)


class _LoadPlanner(dcp.DefaultLoadPlanner):  # takes Rows beside tensors
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # The default accepts only tensors, and replaces meta tensors first.
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found = self.state_dict[index.fqn]
        return found.local if isinstance(found, Rows) else super().lookup_tensor(index)


class _Writer(dcp.HuggingFaceStorageWriter):
    """Writes the tensors assigned to this rank into files of bounded size, and remembers the files' names."""

    def __init__(self, folder: Path, from_gpu: bool) -> None:
        super().__init__(str(folder), save_distributed=True)
        self.files: list[str] = []
        if not from_gpu:
            # Copying ahead would wait, every 10 MB, for the training steps queued on the GPU.
            self.per_thread_copy_ahead = 0

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[Any]:
        # Only now is it known which of the tensors that all ranks have are written by this one.
        file_of: dict[str, int] = {}
        index, filled = 1, 0
        for item in plan.items:
            assert item.tensor_data is not None
            size = item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
            if filled and filled + size > _FILE_BYTES:
                index, filled = index + 1, 0
            file_of[item.index.fqn] = index
            filled += size
        storage = {**plan.storage_data, "fqn_to_index_mapping": file_of}
        with naming_the_rank():
            written = super().write_data(dataclasses.replace(plan, storage_data=storage), planner)
        self.files = sorted({result.storage_data.relative_path for result in written.value()})
        return written


def write_tensors(folder: Path, tensors: Mapping[str, Tensor | Rows], group: Any = None) -> list[str]:
    """Write tensors into a folder, as flushed safetensors files of bounded size; return the names of this rank's files.

    All ranks call it together. One of them writes a tensor that several have; each writes its part of a DTensor or of
    Rows. If a rank fails, all raise its error; if one is gone, they raise CollectiveError.
    """
    parts = [tensor.local if isinstance(tensor, Rows) else tensor for tensor in tensors.values()]
    writer = _Writer(folder, from_gpu=any(part.is_cuda for part in parts))
    planner = _SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    alone = comm.world_size() == 1
    with _plain_errors(alone), named("saving"):
        dcp.save(dict(tensors), storage_writer=writer, planner=planner, process_group=group, no_dist=alone)
    return writer.files


def read_tensors(path: Path, into: Mapping[str, Tensor | Rows]) -> None:
    """Fill the tensors of `into` in place from a checkpoint; Rows get only their rows. Each rank reads by itself."""
    planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _plain_errors(alone=True):
        dcp.load(dict(into), storage_reader=dcp.HuggingFaceStorageReader(str(path)), planner=planner, no_dist=True)


@contextlib.contextmanager
def _plain_errors(alone: bool) -> Iterator[None]:
    """Unwraps the errors of torch.distributed.checkpoint, and silences its warning about a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except dcp.api.CheckpointException as error:  # a BaseException without cause: {rank: (exception, traceback)}
            rank, (failure, _) = min(error.failures.items(), key=lambda item: item[0])
            if alone or isinstance(failure, RankError):
                raise failure from None
            raise RankError(f"rank {rank}: {reason(failure)}") from None


def tensor_shapes(path: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shapes and dtypes of a checkpoint's whole tensors, by name."""
    metadata = dcp.HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    return {name: (entry.size, entry.properties.dtype) for name, entry in metadata.items()}  # type: ignore[union-attr]
