"""Activations of the first blocks, copied to host memory in the forward pass and back ahead of their backward pass.

The backward pass reaches the first blocks last, so their activations wait longest. Whatever a block keeps for its
backward pass is copied: all activations of a plain block, the input of a checkpointed one, and attention's outputs
with it if the policy keeps them.

    computation   forward 0 | forward 1 | forward 2 | ... | backward 2 | backward 1 | backward 0
    copies                  | 0 to host | 1 to host | ... | 1 to GPU   | 0 to GPU   |

The first K of L blocks are offloaded. A copy may take as long as L - K - 1 blocks compute: the picture shows one. Then
no more than L - K blocks are on the GPU at any time, as at the end of the forward pass (`accounting.offload_window`).

Copies run in a CUDA stream of their own. Memory is allocated and freed on the computing stream alone, and freed only
after that stream waits for the copy. So the caching allocator reuses it in order, without `record_stream`, and the host
never waits. Host memory is pinned in the first step and reused, because nothing may be pinned while a step is recorded.

Rhu et al. 2016, "vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural Network Design".
"""

import functools
import mmap
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from cs336_basics.model import TransformerLM

from ..kernels.attention import is_attention
from ..planner.accounting import SMALLEST_OFFLOADED, offload_window


class Copier:
    """Copies between a device and host memory: on a GPU in a stream of its own, elsewhere at once."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._is_gpu = device, device.type == "cuda"
        self._free: dict[int, list[Tensor]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return copier_of, (self.device,)  # of a copied model too

    @functools.cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def take(self, nbytes: int) -> Tensor:
        """Host memory of this size, pinned for a GPU."""
        free = self._free.setdefault(nbytes, [])
        return free.pop() if free else host_memory(nbytes, is_pinned=self._is_gpu)

    def give_back(self, buffer: Tensor) -> None:
        """Copies follow one another, so one that still reads the buffer is done before the next writes to it."""
        self._free[buffer.numel()].append(buffer)

    def start(self, pairs: list[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
        """Copy the second of each pair to the first, after the work that is queued so far."""
        if not self._is_gpu:
            for target, source in pairs:
                target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def wait(self, copied: torch.cuda.Event) -> None:
        """Let work that is queued from now on wait for copies."""
        torch.cuda.current_stream(self.device).wait_event(copied)


copier_of = functools.cache(Copier)
"""The only copier of a device in a process. Its memory stays pinned until the process ends, for all models."""


def host_memory(nbytes: int, is_pinned: bool) -> Tensor:
    """A tensor of bytes in host memory. Raises OutOfMemoryError if there is no more, or if it cannot be pinned.

    Pinned memory must stay until the process ends. PyTorch's own allocator of it would take the next power of two.
    """
    try:
        buffer = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        if is_pinned:
            runtime = torch.cuda.cudart()
            if status := int(runtime.cudaHostRegister(buffer.data_ptr(), nbytes, 0)):
                raise OSError(f"cudaHostRegister returned {status}")
    except (OSError, OverflowError) as error:
        raise torch.OutOfMemoryError(
            f"train.activation_offload: {nbytes / 2**20:,.1f} MiB more of host memory are not to be had ({error}): "
            "offload fewer blocks"
        ) from error
    return buffer


@dataclass(eq=False)
class Saved:
    """A storage in host memory, and on the device while it is needed there. Autograd holds it, through `View`."""

    block: "Block"
    on_host: Tensor
    on_device: Any  # a tensor, or None

    def __del__(self) -> None:
        self.block.wait()  # a copy to the device may be under way, and its memory is free from here on
        self.block.copier.give_back(self.on_host)


@dataclass(frozen=True)
class View:
    """A saved tensor, as a view of its storage."""

    saved: Saved
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class Block:
    """Tensors that a block, or a group of checkpointed blocks, saves for backward in one forward pass."""

    def __init__(self, copier: Copier, stays: set[int]) -> None:
        self.copier, self._stays = copier, stays
        self._by_address: weakref.WeakValueDictionary[int, Saved] = weakref.WeakValueDictionary()
        self._copied: torch.cuda.Event | None = None

    def pack(self, tensor: Tensor) -> Tensor | View:
        """Replace a tensor by a view of its storage, which is copied once. Weights and small tensors stay."""
        storage = tensor.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if nbytes < SMALLEST_OFFLOADED or address in self._stays or tensor.device != self.copier.device:
            return tensor
        saved = self._by_address.get(address)
        if saved is None:
            on_device = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            saved = self._by_address[address] = Saved(self, self.copier.take(nbytes), on_device)
        return View(saved, tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    def unpack(self, packed: Tensor | View) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self.prefetch()
        self.wait()
        where = packed.saved.on_device.untyped_storage(), packed.offset, packed.size, packed.stride
        return torch.empty(0, dtype=packed.dtype, device=self.copier.device).set_(*where)

    def offload(self) -> None:
        """Start the copies to host memory."""
        found = self._by_address.values()
        self._copied = self.copier.start([(saved.on_host, saved.on_device) for saved in found])

    def release(self) -> None:
        """Free the memory on the device once it is copied."""
        self.wait()
        for saved in self._by_address.values():
            saved.on_device = None

    def prefetch(self) -> None:
        """Start the copies to the device, if they have not begun."""
        away = [saved for saved in self._by_address.values() if saved.on_device is None]
        if away:
            pairs = [(torch.empty_like(saved.on_host, device=self.copier.device), saved.on_host) for saved in away]
            self._copied = self.copier.start(pairs)
            for saved, (on_device, _) in zip(away, pairs, strict=True):
                saved.on_device = on_device

    def wait(self) -> None:
        """Let work that is queued from now on wait for the copies."""
        if self._copied is not None:
            self.copier.wait(self._copied)
            self._copied = None


class Offload:
    """Runs the blocks of a model so that what the first `count` save is copied to host memory and back.

    group: number of blocks that are run, and checkpointed, together.
    """

    def __init__(self, model: TransformerLM, count: int, group: int = 1) -> None:
        self.count, self._window = count, offload_window(count, len(model.layers), group)
        self._copier = copier_of(next(model.parameters()).device)
        self._blocks: dict[int, Block] = {}  # that are still on the device
        self._running = Block(self._copier, set())

    def run(
        self, function: Callable[..., Tensor], number: int, block: nn.Module | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Call `function` with the given arguments. It runs the block of this number, or several from it on.

        block: its weights stay on the device. None if they are not saved, as by blocks that are checkpointed together.
        """
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if number >= self.count:
            output = function(*args, **kwargs)
        else:
            weights = () if block is None else (*block.parameters(), *block.buffers())
            running = Block(self._copier, {t.untyped_storage().data_ptr() for t in weights})
            self._running = self._blocks[number] = running
            with saved_tensors_hooks(running.pack, running.unpack):
                output = function(*args, **kwargs)
            running.offload()
        earlier = self._blocks.pop(number - self._window, None)
        if earlier is not None:
            earlier.release()
            output.register_hook(lambda _: earlier.prefetch())
        return output

    def keep_attention(self) -> tuple["KeptAttention", "KeptAttention"]:
        """Contexts for `checkpoint` that keep attention's outputs with the tensors that the running block saves.

        PyTorch's selective checkpointing keeps them where `saved_tensors_hooks` do not reach.
        """
        kept: list[Any] = []
        return KeptAttention(self._running, kept, False), KeptAttention(self._running, kept, True)


class KeptAttention(TorchDispatchMode):
    """Keeps the outputs of attention's operators, in order; when they run again, returns these outputs instead."""

    def __init__(self, block: Block, kept: list[Any], is_again: bool) -> None:
        super().__init__()
        self._block, self._kept, self._is_again = block, kept, is_again

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_again and is_attention(operator):
            return tree_map_only(View, self._block.unpack, self._kept.pop(0))
        outputs = operator(*args, **(kwargs or {}))
        if is_attention(operator):
            self._kept.append(tree_map_only(Tensor, lambda t: self._block.pack(t.detach()), outputs))
        return outputs
