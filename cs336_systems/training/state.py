"""The state of a run as named tensors, collected from ranks that share it in any way, and restored to them.

A float16 parameter of the optimizer is saved as its master weight. A bfloat16 one is saved itself, with the lower half
of its master (`optimizer.halves`). So runs of any precision continue it.

Names and shapes are the same as in a single process, so a run can resume with another number of ranks or another
strategy.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..parallel import comm
from .optimizer import LOWER_HALF, MASTER, assign, joined, local_part, rest_of
from .tensor_files import Rows, read_tensors, tensor_shapes
from .together import on_every_rank

Shards = Mapping[str, tuple[torch.Size, int]]
"""By parameter name: the shape of the whole parameter, and the first of this rank's rows."""


def collect_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, shards: Shards | None = None
) -> dict[str, Tensor | Rows]:
    """This rank's tensors by name: `model.*`, `optimizer.PARAMETER.STATE`, and on rank 0 the generators' `rng.*`.

    Parameters in `shards`, and optimizer state of the same local shape, become Rows of whole tensors. A sharded
    optimizer contributes only the state that it keeps, and no parameters of other ranks.
    """
    shards = shards or {}
    others = _of_other_ranks(optimizer)
    tensors = {f"model.{name}": _as_rows(tensor, shards.get(name)) for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        if parameter in others:
            del tensors[f"model.{name}"]
        for key, value in optimizer.state.get(parameter, {}).items():
            value = torch.as_tensor(value)
            if key == MASTER:
                tensors[f"model.{name}"] = _as_rows(value, shards.get(name))
                continue
            is_shard = name in shards and value.dim() > 0
            if is_shard and value.shape != parameter.shape:
                raise ValueError(f"optimizer state {key} of {name} has shape {tuple(value.shape)}: only scalars and "
                                 "state divided as its parameter can be saved from several ranks")  # fmt: skip
            tensors[f"optimizer.{name}.{key}"] = _as_rows(value, shards[name] if is_shard else None)
    if comm.rank() == 0:
        tensors["rng.cpu"] = torch.get_rng_state()
        if device.type == "cuda":
            tensors["rng.cuda"] = torch.cuda.get_rng_state(device)
    return tensors


def _of_other_ranks(optimizer: torch.optim.Optimizer) -> set[Tensor]:
    """The parameters whose state a sharded optimizer keeps on other ranks.

    One still frozen has no owner yet: every rank keeps its state.
    """
    owner_of = getattr(optimizer, "owner_of", lambda parameter: None)
    return {p for group in optimizer.param_groups for p in group["params"] if owner_of(p) not in (None, comm.rank())}


def _as_rows(tensor: Tensor, shard: tuple[torch.Size, int] | None) -> Tensor | Rows:
    """This rank's part of a sharded tensor, with its place in the whole; another tensor as it is."""
    if isinstance(tensor, DTensor):  # PyTorch's own sharding, which needs no `shards`
        (chunk,) = tensor.__create_chunk_list__()
        return Rows(tensor.to_local(), tensor.shape, chunk.offsets[0]) if tensor.dim() else tensor.to_local()
    return tensor if shard is None else Rows(tensor, *shard)


def restore_state(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    shards: Shards | None = None,
) -> None:
    """Restore the state that `collect_state` collected: parameters in place, optimizer state, generators.

    All ranks call it together. Each reads its rows, and the optimizer state of its own parameters: those of `optimizer`
    that belong to no other rank (see `optimizer.owner_of`, if there is one). If one rank cannot read its part, all
    raise its error. State of parameters that are not in `optimizer` is left out, also the rest of a 16-bit master.
    """
    found: list[tuple[dict[str, Tensor], bool]] = []
    on_every_rank(lambda: found.append(_read(path, model, optimizer, shards or {})), f"reading {path}")
    tensors, has_new_state = found[0]
    with torch.no_grad():
        for parameter in model.parameters():
            if (master := optimizer.state.get(parameter, {}).get(MASTER)) is not None:
                parameter.copy_(master)
    torch.set_rng_state(tensors["rng.cpu"])
    if device.type == "cuda" and "rng.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng.cuda"], device)
    if not has_new_state:
        return

    index_of = {parameter: i for i, parameter in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    parameters = dict(model.named_parameters())
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            parameter_name, _, key = name.removeprefix("optimizer.").rpartition(".")
            state.setdefault(index_of[parameters[parameter_name]], {})[key] = tensor
    groups = [
        {**group, "params": [index_of[parameter] for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    # Through load_state_dict, because a fused optimizer needs its step counters on the device.
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _read(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, shards: Shards
) -> tuple[dict[str, Tensor], bool]:
    """This rank's tensors from a checkpoint, and whether any is new to the optimizer. The others are filled in place.

    A weight whose checkpoint has a lower half where the optimizer has none, or the reverse, is converted.
    """
    parameters = dict(model.named_parameters())
    own = {p for group in optimizer.param_groups for p in group["params"]} - _of_other_ranks(optimizer)
    wanted: dict[str, Tensor | Rows] = {}
    has_new_state = False
    stored = tensor_shapes(path)
    for name, (shape, dtype) in stored.items():
        group, _, key = name.partition(".")
        if group == "optimizer":
            parameter_name, _, state_name = key.rpartition(".")
            parameter = parameters[parameter_name]
            if state_name == LOWER_HALF or parameter not in own:
                continue
            there = optimizer.state.get(parameter, {}).get(state_name)
            has_new_state = has_new_state or not isinstance(there, Tensor)
            shard = shards.get(parameter_name) if len(shape) else None
            local_shape = shape if shard is None else parameter.shape
            where = parameter.device if len(shape) else torch.device("cpu")
            if isinstance(there, Tensor):
                wanted[name] = there if isinstance(there, DTensor) else _as_rows(there, shard)
            elif isinstance(parameter, DTensor) and len(shape):
                wanted[name] = torch.empty_like(parameter, dtype=dtype)
            else:
                wanted[name] = _as_rows(torch.empty(local_shape, dtype=dtype, device=where), shard)
        elif group == "rng":
            wanted[name] = torch.empty(shape, dtype=dtype)
    converted: list[tuple[str, Tensor, Tensor]] = []
    for name, weight in model.state_dict().items():
        state = optimizer.state.get(parameters.get(name, weight), {})
        place, lower = f"optimizer.{name}.{LOWER_HALF}", state.get(LOWER_HALF)
        if place in stored and lower is not None:
            wanted[place] = _as_rows(lower, shards.get(name))
        elif lower is not None or (place in stored and weight.dtype != torch.bfloat16):
            converted.append((name, weight, rest_of(weight, state)))
            continue
        tensor = state.get(MASTER, weight)
        wanted[f"model.{name}"] = tensor if isinstance(tensor, DTensor) else _as_rows(tensor, shards.get(name))
    read_tensors(path, wanted)
    for name, weight, rest in converted:
        _read_converted(path, name, weight, rest, shards.get(name), stored)
    tensors = {name: tensor.local if isinstance(tensor, Rows) else tensor for name, tensor in wanted.items()}
    return tensors, has_new_state


@torch.no_grad()
def _read_converted(
    path: Path,
    name: str,
    weight: Tensor,
    rest: Tensor,
    shard: tuple[torch.Size, int] | None,
    stored: Mapping[str, tuple[torch.Size, torch.dtype]],
) -> None:
    """Read a parameter from halves, or split what is read into halves. One at a time saves memory."""
    like, found = _as_rows(weight, shard), dict[str, Tensor]()
    wanted: dict[str, Tensor | Rows] = {}
    for place in (f"model.{name}", f"optimizer.{name}.{LOWER_HALF}"):
        if place in stored:
            found[place] = torch.empty(local_part(weight).shape, dtype=stored[place][1])
            wanted[place] = Rows(found[place], like.shape, like.first_row) if isinstance(like, Rows) else found[place]
    read_tensors(path, wanted)
    first, *others = found.values()
    weights = (joined(first, *others) if others else first).to(weight.device, torch.float32)
    assign(weights, local_part(weight), local_part(rest))
