"""Batches of token sequences, prepared in the background."""

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cs336_basics.data import count_starts, gather_sequences, sequence_starts

from ..config.run import TrainConfig
from ..machine.hardware import use_device_in_thread

Tokens = npt.NDArray[np.unsignedinteger]


class BatchLoader:
    """The batches of a run, addressed by their first sequence. A background thread prepares the next one."""

    def __init__(self, tokens: Tokens, context_length: int, seed: int, device: torch.device) -> None:
        self._tokens, self._context_length, self._seed, self._device = tokens, context_length, seed, device
        self._num_starts = count_starts(tokens, context_length)
        self._pool = ThreadPoolExecutor(1, "batches", initializer=use_device_in_thread, initargs=(device,))
        self._next: tuple[tuple[int, int], Future[tuple[Tensor, Tensor]]] | None = None

    def starts(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Positions in the token file at which sequences first .. first+count-1 of the run begin."""
        return sequence_starts(self._seed, first, count, self._num_starts)

    def get(self, first: int, count: int, stride: int | None = None) -> tuple[Tensor, Tensor]:
        """Inputs and targets (count, T) of sequences first .. first+count-1, on the device.

        Also starts to prepare the following batch, which begins `stride` sequences later (default: count).
        """
        if self._next is None or self._next[0] != (first, count):
            self._next = (first, count), self._pool.submit(self._prepare, first, count)
        batch = self._next[1].result()
        after = first + (stride or count), count
        self._next = after, self._pool.submit(self._prepare, *after)
        return batch

    def _prepare(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        sequences = gather_sequences(self._tokens, self.starts(first, count), self._context_length)
        if self._device.type == "cuda":
            # A copy from pinned, contiguous memory queues on the GPU, and this thread does not wait for it.
            sequences = sequences.pin_memory().to(self._device, non_blocking=True)
        return sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()

    def close(self) -> None:
        """Stop the background thread."""
        self._pool.shutdown(cancel_futures=True)


def micro_batch_size(train: TrainConfig, world_size: int) -> int:
    """Sequences that each process takes through the model at once."""
    return train.batch_size // train.gradient_accumulation_steps // world_size
