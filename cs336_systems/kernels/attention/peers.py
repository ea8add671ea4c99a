"""Attention kernels of other projects, under this project's contract, to compare ours with.

A peer refuses inputs that it masks differently or cannot compute. It never falls back to another kernel.
"""

import functools
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from cs336_basics.attention import Documents, visible_keys, without_autocast

from .contract import FLOATING_DTYPES, as_4d, band_of, check_band, check_qkv, group_size

_LOW_PRECISION = (torch.float16, torch.bfloat16)
# FlexAttention is compiled for up to so many shapes. PyTorch's default limit is 8.
_FLEX_SHAPES = 256


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    *,
    window: int | None = None,
    documents: Documents | None = None,
) -> Tensor:
    """PyTorch's scaled_dot_product_attention, which picks one of its own kernels.

    A window and documents become a mask of N_q x N_k for each sequence, and all scores are computed.
    Raises ValueError if q, k and v do not match or are not floating point.
    """
    check_qkv(q, k, v, is_causal, dtypes=FLOATING_DTYPES)
    window = check_band(q, k, is_causal, band_of(window, documents))
    if q.is_cuda and (q.numel() == 0 or k.numel() == 0):  # PyTorch 2.11 returns no tensor at all here
        return sdpa_math(q, k, v, is_causal)
    if window is None and documents is None:
        return _scaled_dot_product(q, k, v, is_causal)
    visible = visible_keys(q.shape[-2], k.shape[-2], q.device, window, documents)
    return _scaled_dot_product(q, k, v, False, visible.flatten(0, -4) if visible.ndim > 4 else visible)


def sdpa_math(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """PyTorch's plain computation, with all scores in memory. Raises ValueError as `sdpa` does."""
    check_qkv(q, k, v, is_causal, dtypes=FLOATING_DTYPES)
    with sdpa_kernel(SDPBackend.MATH):
        return _scaled_dot_product(q, k, v, is_causal)


def sdpa_flash(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """PyTorch's FlashAttention-2 (on a CPU, its kernel of the same name) and no other kernel.

    Raises ValueError for inputs that it does not serve: on CUDA, dtypes other than float16 and bfloat16, head sizes
    above 256, no queries or no keys, and causal attention with N_q != N_k.
    """
    if q.device.type == "cuda":
        _check_supported("sdpa_flash", q, k, v, is_causal)
    else:
        check_qkv(q, k, v, is_causal, dtypes=FLOATING_DTYPES)
    return _forced(SDPBackend.FLASH_ATTENTION, "sdpa_flash", q, k, v, is_causal)


def sdpa_cudnn(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """cuDNN's attention through PyTorch and no other kernel.

    Raises ValueError for inputs that it does not serve: devices other than CUDA, dtypes other than float16 and
    bfloat16, head sizes above 128 before Hopper and 256 from there on, no queries or no keys, and causal attention with
    N_q != N_k.
    """
    _check_supported("sdpa_cudnn", q, k, v, is_causal)
    return _forced(SDPBackend.CUDNN_ATTENTION, "sdpa_cudnn", q, k, v, is_causal)


def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    *,
    window: int | None = None,
    documents: Documents | None = None,
) -> Tensor:
    """PyTorch's FlexAttention, compiled for every shape; a mask is one of its block masks, which are cached.

    Raises ValueError for inputs that it does not serve: devices other than CUDA, float64, head sizes below 16 and above
    256, and no queries or no keys. Beyond 256 shapes it raises PyTorch's error, because running eagerly would hold all
    scores.
    """
    _check_supported("flex", q, k, v, is_causal, dtypes=(*_LOW_PRECISION, torch.float32), only_square=False)
    if q.shape[-1] < 16:
        raise ValueError(f"q has head size {q.shape[-1]}: flex serves 16 to 256")
    window = check_band(q, k, is_causal, band_of(window, documents))
    return _flex(q, k, v, is_causal, window, documents)


def fa4(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    *,
    window: int | None = None,
    documents: Documents | None = None,
) -> Tensor:
    """FlashAttention-4 (the package flash-attn-4), written in CuTe-DSL. Documents are its sequences of varying length.

    The host must know the number of documents, so the first call with new documents waits for the GPU.

    Raises ImportError if the package is not installed, and ValueError for inputs that it does not serve: devices other
    than CUDA, dtypes other than float16 and bfloat16, head sizes that are not a multiple of 32 up to 256 (on Hopper its
    gradients are wrong for some others, such as 80), no queries or no keys, and causal attention with N_q != N_k, which
    it aligns at the bottom right.
    """
    try:
        from flash_attn.cute import flash_attn_func, flash_attn_varlen_func
    except ImportError as error:
        raise ImportError(f"fa4 needs the package flash-attn-4: {error}") from error
    _check_supported("fa4", q, k, v, is_causal)
    if q.shape[-1] % 32:
        raise ValueError(f"q has head size {q.shape[-1]}: fa4 serves multiples of 32")
    window = check_band(q, k, is_causal, band_of(window, documents))
    mask: dict[str, Any] = dict(causal=is_causal, window_size=(None, None) if window is None else (window - 1, 0))
    by_position = [as_4d(x).transpose(1, 2) for x in (q, k, v)]  # (B, N, H, D)
    if documents is None:
        result = flash_attn_func(*by_position, **mask)
    else:
        packed, n = (x.flatten(0, 1) for x in by_position), q.shape[-2]  # no document is longer than n
        bounds = document_bounds(documents.starts)
        lengths = dict(cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=n, max_seqlen_k=n)
        result = flash_attn_varlen_func(*packed, **lengths, **mask)
    o = result[0] if isinstance(result, tuple) else result  # some versions also return the logsumexp
    return o.reshape(by_position[0].shape).transpose(1, 2).reshape(q.shape)


@torch.compiler.disable  # the compiler would ignore the cache
@functools.lru_cache(maxsize=1)  # all layers get the same tensor
def document_bounds(starts: Int[Tensor, "... N"]) -> Int[Tensor, "documents_and_1"]:
    """Where each document begins if all sequences stand one after another, and where the last one ends. int32."""
    with torch.inference_mode(False):  # a tensor created in inference mode could not be used in training later
        is_first = starts == torch.arange(starts.shape[-1], device=starts.device)
        firsts = is_first.flatten().nonzero().flatten()
        return torch.nn.functional.pad(firsts, (0, 1), value=starts.numel()).int()


def _scaled_dot_product(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mask: Tensor | None = None) -> Tensor:
    # The fast kernels accept only four dimensions, and autocast would cast the inputs down to its own dtype.
    q4, k4, v4 = as_4d(q), as_4d(k), as_4d(v)
    can_be_unaligned = q.is_cuda and not torch.compiler.is_compiling()
    if can_be_unaligned:
        q4, k4, v4 = _aligned(q4), _aligned(k4), _aligned(v4)
    with without_autocast(q.device.type):
        is_grouped = group_size(q, k) > 1
        o = scaled_dot_product_attention(q4, k4, v4, attn_mask=mask, is_causal=is_causal, enable_gqa=is_grouped)
    if can_be_unaligned and o.requires_grad:
        o.register_hook(_aligned)
    return o.reshape(q.shape)


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy if its rows do not start at multiples of 16 bytes.

    PyTorch's kernels read 16 bytes at a time. An unaligned row makes CUDA unusable for the rest of the process.
    """
    row_steps = (step for step, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1)
    steps = row_steps if x.shape[-1] * x.element_size() % 16 == 0 else ()  # PyTorch pads other head sizes itself
    if x.data_ptr() % 16 == 0 and all(step * x.element_size() % 16 == 0 for step in steps):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _forced(backend: SDPBackend, name: str, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    try:
        with sdpa_kernel(backend):
            return _scaled_dot_product(q, k, v, is_causal)
    except RuntimeError as error:
        if "No available kernel" not in str(error) and "No viable backend" not in str(error):
            raise
        shapes = f"q of shape {tuple(q.shape)} and k of shape {tuple(k.shape)}"
        given = f"{shapes}, {q.dtype}, on {q.device}, is_causal={is_causal}"
        raise ValueError(f"{given}: PyTorch has no kernel for {name} that serves this") from error


def _flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    window: int | None = None,
    documents: Documents | None = None,
) -> Tensor:
    block_mask = _block_mask(q.shape[-2], k.shape[-2], q.device, window, documents) if is_causal else None
    run = _flex_attention if torch.compiler.is_compiling() else _run_compiled_flex
    with without_autocast(q.device.type):
        return run(as_4d(q), as_4d(k), as_4d(v), block_mask).reshape(q.shape)


def _flex_attention(q: Tensor, k: Tensor, v: Tensor, block_mask: Any) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(q, k, v, block_mask=block_mask, enable_gqa=group_size(q, k) > 1)


def _run_compiled_flex(q: Tensor, k: Tensor, v: Tensor, block_mask: Any) -> Tensor:
    try:
        return _compiled_flex()(q, k, v, block_mask)
    except torch._dynamo.exc.FailOnRecompileLimitHit:
        with torch._dynamo.config.patch(recompile_limit=_FLEX_SHAPES, accumulated_recompile_limit=_FLEX_SHAPES):
            return _compiled_flex()(q, k, v, block_mask)


@functools.cache
def _compiled_flex() -> Any:
    # With fullgraph PyTorch raises instead of running it eagerly.
    return torch.compile(_flex_attention, dynamic=False, fullgraph=True)


def _block_mask(n_q: int, n_k: int, device: torch.device, window: int | None, documents: Documents | None) -> Any:
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return _new_block_mask(n_q, n_k, device, window, documents)  # a fake mask must not be cached
    return _cached_block_mask(n_q, n_k, device, window, documents)


@functools.lru_cache(maxsize=8)  # all layers get the same documents
def _cached_block_mask(
    n_q: int, n_k: int, device: torch.device, window: int | None, documents: Documents | None
) -> Any:
    with torch.inference_mode(False):  # a tensor created in inference mode could not be used in training later
        return _new_block_mask(n_q, n_k, device, window, documents)


def _new_block_mask(n_q: int, n_k: int, device: torch.device, window: int | None, documents: Documents | None) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    starts = None if documents is None else documents.starts.reshape(-1, n_q)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = query >= key
        if window is not None:
            visible = visible & (query - key < window)
        if starts is not None:
            visible = visible & (key >= starts[batch, query])
        return visible

    return create_block_mask(sees, None if starts is None else len(starts), None, n_q, n_k, device=str(device))


def _check_supported(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    dtypes: tuple[torch.dtype, ...] = _LOW_PRECISION,
    only_square: bool = True,
) -> None:
    """Raise a ValueError for inputs that most CUDA kernels refuse. only_square: causal attention needs N_q = N_k."""
    if q.device.type != "cuda":
        raise ValueError(f"q is on {q.device}: {name} needs a CUDA device")
    check_qkv(q, k, v, is_causal, dtypes=dtypes, max_head_size=256)
    for argument, tensor in (("q", q), ("k", k)):
        if tensor.numel() == 0:
            raise ValueError(f"{argument} has shape {tuple(tensor.shape)}: {name} needs at least one element")
    if only_square and is_causal and q.shape[-2] != k.shape[-2]:
        raise ValueError(
            f"is_causal is True with {q.shape[-2]} queries and {k.shape[-2]} keys: {name} needs as many of both"
        )
