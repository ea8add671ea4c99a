"""The attention kernels by name. All follow the contract of `cs336_basics.attention.scaled_dot_product_attention`."""

import contextlib
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from cs336_basics.attention import Attention, Documents

from ...config.checks import import_object, is_import_path, require

_IMPORT_PATHS = {
    "naive": "reference:naive",
    "vectorized_torch": "reference:vectorized_torch",
    "flash_torch": "flash_torch:flash_torch",
    "flash_triton": "flash_triton:flash_triton",
    "flash_triton_simple": "flash_triton_simple:flash_triton_simple",
    "flash_triton_compiled": "flash_triton:flash_triton_compiled",
    "flash_cuda": "flash_cuda:flash_cuda",
    "sdpa": "peers:sdpa",
    "sdpa_flash": "peers:sdpa_flash",
    "sdpa_cudnn": "peers:sdpa_cudnn",
    "sdpa_math": "peers:sdpa_math",
    "flex": "peers:flex",
    "fa4": "peers:fa4",
    # The handout's names.
    "scaled_dot_prod_attention": "reference:naive",
    "flash_attention_triton": "flash_triton:flash_triton",
}
"""Names, and "module:function" of each in this package.

A module is imported only when its kernel is requested, because not every machine has the packages that it imports.
"""


class _Kernels(Mapping[str, Attention]):
    """The functions by name. Reading a name imports its module."""

    def __getitem__(self, name: str) -> Attention:
        module, _, function = _IMPORT_PATHS[name].partition(":")
        return getattr(importlib.import_module(f".{module}", __name__), function)

    def __contains__(self, name: object) -> bool:
        return name in _IMPORT_PATHS  # Mapping's own would import

    def __iter__(self) -> Iterator[str]:
        return iter(_IMPORT_PATHS)

    def __len__(self) -> int:
        return len(_IMPORT_PATHS)


ATTENTION = _Kernels()


def get_attention(name: str) -> Attention:
    """The kernel registered as `name`, or your own at "module:function". "auto" is the faster one of two for each call.

    These are flash_triton and PyTorch's own choice, `sdpa`: see `auto.py`.

    Raises ValueError naming `model.attention` if no kernel has the name or its module cannot be imported. A kernel that
    needs a GPU or a package raises its error when it is called; `check_attention` calls it.
    """
    if is_import_path(name):
        attention = import_object("model.attention", name)
        is_one = callable(attention) and not (isinstance(attention, torch.nn.Module) and attention.state_dict())
        accepted = "a function, attention(q, k, v, is_causal), without parameters and buffers"
        require(is_one, "model.attention", name, accepted)
        return attention
    if name == "auto":
        from .auto import auto

        return auto
    require(name in ATTENTION, "model.attention", name, f"auto or one of {', '.join(ATTENTION)}, or module:function")
    try:
        return ATTENTION[name]
    except ImportError as error:
        raise ValueError(f"model.attention is {name!r}, which cannot be imported here: {error}") from error


def is_attention(operator: Any) -> bool:
    """Whether an operator computes attention's output: that of a `flash_function`, or one of PyTorch's."""
    pattern = r"cs336::\w+_forward|aten::_scaled_dot_product_\w+(?<!_backward)"
    return re.fullmatch(pattern, operator.name()) is not None


def check_limits(name: str, *limits: str) -> None:
    """Raise ValueError naming `model.attention` if the kernel lacks one of these arguments: window, documents."""
    attention = get_attention(name)
    if inspect.isbuiltin(attention):  # a function of a C++ extension does not say what it takes
        return
    for argument in limits:
        try:
            inspect.signature(attention).bind_partial(**{argument: None})
        except TypeError:
            field = {"window": "model.window", "documents": "data.documents"}[argument]
            accepted = f"a kernel with the argument {argument}, such as flash_torch, because {field} is set"
            require(False, "model.attention", name, accepted)


def check_attention(
    name: str,
    head_size: int,
    dtype: torch.dtype,
    device: torch.device,
    group: int = 1,
    has_window: bool = False,
    has_documents: bool = False,
    is_kept: bool = False,
    length: int = 16,
) -> None:
    """Call the kernel once on small tensors. Raises ValueError naming `model.attention` if it cannot serve them.

    One of your own must also compute what `naive` does on so many positions, gradients included. group: query heads for
    each head of keys and values. is_kept: checkpointing must be able to keep its outputs.
    """
    attention, is_own = get_attention(name), is_import_path(name)
    positions = torch.arange(length if is_own else 16, device=device)
    generator = torch.Generator(device).manual_seed(0)

    def random(heads: int) -> Tensor:
        """In the memory layout of the model: the heads of a position are neighbours."""
        shape = 2, len(positions), heads, head_size
        return torch.randn(shape, device=device, generator=generator).to(dtype).transpose(1, 2)

    q, k, v = random(2 * group), random(2), random(2)
    limits: dict[str, Any] = {"window": 4} if has_window else {}
    if has_documents:
        ends = torch.tensor([[5], [9]], device=device)  # in each sequence another
        limits["documents"] = Documents.from_numbers(positions > ends)
    check_limits(name, *limits)
    seen: list[bool] = []

    def note(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen.append(is_attention(operator))
        return CheckpointPolicy.PREFER_RECOMPUTE

    with _as_unusable(name), create_selective_checkpoint_contexts(note)[0] if is_kept else contextlib.nullcontext():
        o = attention(q.clone(), k.clone(), v.clone(), True, **limits)
    is_like_q = isinstance(o, Tensor) and (o.shape, o.dtype) == (q.shape, q.dtype)
    require(is_like_q, "model.attention", name, "a function that returns a tensor of q's shape and dtype")
    if is_own:
        qkv, do = [x.requires_grad_() for x in (q, k, v)], random(2 * group)
        check_results(name, qkv, do, True, **limits)
        if has_window:  # not all blocks may have it, and a model that generates text does without
            check_results(name, qkv, do, True)
    accepted = "one operator, such as auto or flash_torch, for train.activation_checkpointing to keep its outputs"
    require(not is_kept or any(seen), "model.attention", name, accepted)


def check_results(name: str, qkv: Sequence[Tensor], do: Tensor, is_causal: bool, **limits: Any) -> None:
    """Raise ValueError naming `model.attention` unless the kernel computes what `naive` does.

    Its gradients for the output gradient `do` are compared too if qkv require them. In no head may the error be above a
    twentieth (2-norms): rounding in bfloat16 makes half a hundredth, a wrong mask or scale much more.
    """
    both: list[tuple[Tensor, ...]] = []
    for attention in (ATTENTION["naive"], get_attention(name)):
        with _as_unusable(name):
            o = attention(*(x.clone() for x in qkv), is_causal, **limits)  # a kernel may overwrite them
            gradients = torch.autograd.grad(o, qkv, do, allow_unused=True) if o.requires_grad else ()
        has_all = bool(gradients) and all(gradient is not None for gradient in gradients)
        accepted = "a function that gives q, k and v gradients"
        require(has_all or not qkv[0].requires_grad, "model.attention", name, accepted)
        both.append((o.detach(), *gradients))
    for what, theirs, mine in zip(("output", "dq", "dk", "dv"), *both, strict=False):
        error, size = (x.flatten(-2).norm(dim=-1) for x in (mine.float() - theirs.float(), theirs.float()))
        share = float((error / (size + 1e-3)).max())
        accepted = f"a function that computes what naive does: its {what} differs by {share:.0%} on random tensors"
        require(share <= 0.05, "model.attention", name, accepted)


@contextlib.contextmanager
def _as_unusable(name: str) -> Iterator[None]:
    """Turns what a kernel raises into a ValueError naming `model.attention`: one from outside may raise anything."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise ValueError(f"model.attention is {name!r}, which cannot be used here: {error}") from error
