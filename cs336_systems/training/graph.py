"""A training step, or its forward and backward, recorded once as a CUDA graph and replayed.

A step of a small model is hundreds of kernels of a few microseconds each. It is host-bound: launching them one by one
from Python takes the host longer than the GPU needs to run them. A replay is one launch. The recorded shapes, addresses
and kernels are fixed, so inputs are copied to where the recording reads them, and gradients stay where it writes them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..kernels import recording
from ..parallel import comm


class RecordedStep:
    """`compute(inputs, targets)`, which leaves gradients in `.grad`, replayed from its third call on.

    The first two calls run as they are, because compilation and the libraries' own set-up must not be recorded. They
    choose the kernels of the recording (`kernels.recording`), which may not be those of other calls. Each replay
    overwrites the gradients and does not add to them, so nothing needs to zero them. If the optimizer is not in the
    recording, nothing may set them to None.
    """

    WARMUP_CALLS = 2

    def __init__(self, compute: Callable[[Tensor, Tensor], Tensor], clear_gradients: Callable[[], None]) -> None:
        self._compute, self._clear_gradients = compute, clear_gradients
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if self._graph is None:
            self._clear_gradients()
            with recording.on():
                if self._calls < self.WARMUP_CALLS:
                    self._calls += 1
                    return self._compute(inputs, targets)
                self._record(inputs, targets)  # computes nothing yet: the replay below does
        assert self._graph is not None
        self._inputs.copy_(inputs)
        self._targets.copy_(targets)
        with comm.watched("replay of the recorded step"):  # the transfers in it have no names
            self._graph.replay()
        return self._output

    def close(self) -> None:
        """Drop the recording. While there is one with transfers, NCCL does not end: the process would hang."""
        if self._graph is not None:
            self._graph.reset()
            self._graph = None

    def _record(self, inputs: Tensor, targets: Tensor) -> None:
        self._inputs, self._targets = inputs.clone(), targets.clone()
        torch.cuda.empty_cache()  # the recording has its own memory: release what the first calls used for it
        graph = torch.cuda.CUDAGraph()
        # thread_local: the loader's thread goes on copying batches meanwhile.
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._output = self._compute(self._inputs, self._targets)
        except torch.AcceleratorError as error:
            raise RuntimeError("the step cannot be recorded as a CUDA graph: give --train.cuda_graph false") from error
        self._graph = graph
