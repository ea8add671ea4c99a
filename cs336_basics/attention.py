"""Attention as the formula is written, and its contract: which query sees which keys.

In a model any function that follows the contract of `scaled_dot_product_attention` can replace it.
"""

import contextlib
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

Attention = Callable[..., Tensor]
"""attention(q, k, v, is_causal, *, window=None, documents=None) -> o"""


class Documents(NamedTuple):
    """The documents in sequences of N positions. Each position has its document's first position and the end after it.

    int32. The leading dimensions are those of the sequences.
    """

    starts: Int[Tensor, "... N"]
    ends: Int[Tensor, "... N"]

    @classmethod
    def from_numbers(cls, numbers: Int[Tensor, "... N"]) -> "Documents":
        """From a number for each position: a document begins where it changes."""
        positions = torch.arange(numbers.shape[-1], dtype=torch.int32, device=numbers.device)
        changes = numbers[..., 1:] != numbers[..., :-1]
        is_first, is_last = (nn.functional.pad(changes, side, value=True) for side in ((1, 0), (0, 1)))
        starts = torch.where(is_first, positions, 0).cummax(-1).values
        ends = torch.where(is_last, positions + 1, numbers.shape[-1]).flip(-1).cummin(-1).values.flip(-1)
        return cls(starts, ends)

    @classmethod
    def from_tokens(cls, token_ids: Int[Tensor, "... N"], end_of_text: int) -> "Documents":
        """From the tokens: an `end_of_text` is the first token of the document after it, as in an empty prompt."""
        return cls.from_numbers((token_ids == end_of_text).cumsum(-1))


def scaled_dot_product_attention(
    q: Float[Tensor, "... queries d"],
    k: Float[Tensor, "... keys d"],
    v: Float[Tensor, "... keys d"],
    is_causal: bool = False,
    *,
    window: int | None = None,
    documents: Documents | None = None,
) -> Float[Tensor, "... queries d"]:
    """softmax(q k^T / sqrt(d)) v, computed as the formula is written (Vaswani et al. 2017, equation 1).

    Causal means that query i sees key j when j <= i, counted from the first query and the first key (top-left aligned).
    Scores and softmax are float32 for every input dtype but float64, which stays. Holds all queries x keys scores.

    k and v may have fewer heads, the dimension before the positions, if their number divides that of q: each serves as
    many neighbouring heads of q (Ainslie et al. 2023, grouped-query attention).

    window: a query sees only the last `window` keys up to its own position (Beltagy et al. 2020, Longformer).
    documents: a query sees only keys of its own document. Their shape is q's without heads and head size.
    Both need is_causal and as many queries as keys, so each query sees at least its own key.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    if q.ndim > 2 and q.shape[-3] != k.shape[-3]:
        k, v = (x.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3) for x in (k, v))
    with without_autocast(q.device.type):  # autocast would compute the products in its own dtype
        scores = (q.to(dtype) / math.sqrt(q.shape[-1])) @ k.to(dtype).mT
        if is_causal:
            visible = visible_keys(q.shape[-2], k.shape[-2], q.device, window, documents)
            scores = scores.masked_fill(~visible, float("-inf"))
        return (scores.softmax(dim=-1) @ v.to(dtype)).to(q.dtype)


def visible_keys(
    n_q: int, n_k: int, device: torch.device, window: int | None = None, documents: Documents | None = None
) -> Bool[Tensor, "*batch_and_1 queries keys"]:
    """True where a query sees a key in causal attention. With documents of a batch it has an axis of 1 for heads."""
    visible = torch.ones(n_q, n_k, dtype=torch.bool, device=device).tril()
    if window is not None:
        visible = visible.triu(1 - window)
    if documents is not None:
        starts = documents.starts if documents.starts.ndim == 1 else documents.starts.unsqueeze(-2)
        visible = visible & (torch.arange(n_k, device=device) >= starts[..., None])
    return visible


def without_autocast(device_type: str) -> contextlib.AbstractContextManager:
    """A context in which operations compute in the dtypes of their tensors, even if autocast is on outside."""
    # The meta device has no autocast. torch.amp.is_autocast_available would tell, but breaks the graph in PyTorch 2.11.
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()
