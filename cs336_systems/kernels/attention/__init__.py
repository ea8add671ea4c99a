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
) -> None:
    """Call the kernel once on small tensors. Raises ValueError naming `model.attention` if it cannot serve them.

    One of your own must also compute what `naive` does, gradients included. group: query heads for each head of keys
    and values. is_kept: checkpointing must be able to keep its outputs.
    """
    attention = get_attention(name)
    generator = torch.Generator(device).manual_seed(0)
    heads = (2 * group, 2, 2)
    q, k, v = (torch.randn(2, n, 16, head_size, device=device, generator=generator).to(dtype) for n in heads)
    limits: dict[str, Any] = {"window": 4} if has_window else {}
    if has_documents:
        limits["documents"] = Documents.from_numbers((torch.arange(16, device=device) > 9).expand(2, -1))
    check_limits(name, *limits)
    seen: list[bool] = []

    def note(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen.append(is_attention(operator))
        return CheckpointPolicy.PREFER_RECOMPUTE

    with _as_unusable(name), create_selective_checkpoint_contexts(note)[0] if is_kept else contextlib.nullcontext():
        o = attention(q, k, v, True, **limits)
    is_like_q = isinstance(o, Tensor) and (o.shape, o.dtype) == (q.shape, q.dtype)
    require(is_like_q, "model.attention", name, "a function that returns a tensor of q's shape and dtype")
    if is_import_path(name):
        check_results(name, [x.requires_grad_() for x in (q, k, v)], True, **limits)
    accepted = "one operator, such as auto or flash_torch, for train.activation_checkpointing to keep its outputs"
    require(not is_kept or any(seen), "model.attention", name, accepted)


def check_results(name: str, qkv: Sequence[Tensor], is_causal: bool, **limits: Any) -> None:
    """Raise ValueError naming `model.attention` unless the kernel computes what `naive` does.

    Its gradients are compared too if qkv requires them. They and the output may be off by a tenth (2-norm): rounding in
    16 bits makes a hundredth, a wrong mask or head much more.
    """
    trains = qkv[0].requires_grad
    both: list[tuple[Tensor, ...]] = []
    for attention in (get_attention(name), ATTENTION["naive"]):
        with _as_unusable(name):
            o = attention(*qkv, is_causal, **limits)
            gradients = torch.autograd.grad(o, qkv, qkv[0].detach(), allow_unused=True) if o.requires_grad else ()
        has_all = not trains or (bool(gradients) and all(g is not None for g in gradients))
        require(has_all, "model.attention", name, "a function that gives q, k and v gradients")
        both.append((o.detach(), *gradients))
    for what, mine, theirs in zip(("output", "dq", "dk", "dv"), *both, strict=False):
        share = float((mine.float() - theirs.float()).norm() / theirs.float().norm())
        accepted = f"a function that computes what naive does: its {what} differs by {share:.0%} on random tensors"
        require(share <= 0.1, "model.attention", name, accepted)


@contextlib.contextmanager
def _as_unusable(name: str) -> Iterator[None]:
    """Turns what a kernel raises into a ValueError naming `model.attention`: one from outside may raise anything."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise ValueError(f"model.attention is {name!r}, which cannot be used here: {error}") from error
