"""The Transformer language model: pre-norm blocks, RMSNorm, rotary positions and SwiGLU, no biases.

By default it is the handout's. `ModelShape` has the options of later models: fewer heads of keys and values (Llama 3),
norms of queries and keys (Qwen 3), tied embeddings, scaled rotary frequencies, a window of attention (Mistral).

Attention is an argument of the model: any function `attention(q, k, v, is_causal) -> o` that follows the contract of
`cs336_basics.attention` can replace it without changes to the model. A model with a window also gives it `window`, and
a batch with documents `documents`.

Shapes: B batch, T positions in this call, S positions in the cache, H heads, D head size.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from .attention import Attention, Documents, scaled_dot_product_attention
from .nn_utils import linear_cross_entropy


def _truncated_normal(shape: tuple[int, ...], std: float) -> nn.Parameter:
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(shape), std=std, a=-3 * std, b=3 * std))


class Linear(nn.Module):
    """y = W x without bias. W is (d_out, d_in), a normal with std sqrt(2 / (d_in + d_out)) truncated at 3 std."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.weight = _truncated_normal((d_out, d_in), std=math.sqrt(2 / (d_in + d_out)))

    def forward(self, x: Float[Tensor, "... d_in"]) -> Float[Tensor, "... d_out"]:
        return nn.functional.linear(x, self.weight)


def separately(x: Float[Tensor, "... d_in"], layers: Sequence[Linear]) -> Iterator[Tensor]:
    """The output of each layer for the same x. Any faster function that computes the same can replace it."""
    return (layer(x) for layer in layers)


class LMHead(Linear):
    """The last layer: a Linear that returns logits or, given the targets, their cross-entropy.

    `loss` is `linear_cross_entropy`; any faster function that computes the same can replace it.
    """

    def __init__(self, d_model: int, vocab_size: int) -> None:
        super().__init__(d_model, vocab_size)
        self.loss: Callable[..., Tensor] = linear_cross_entropy

    def forward(self, x: Float[Tensor, "... d_model"], targets: Int[Tensor, "..."] | None = None) -> Tensor:
        """Logits (..., vocab_size); with targets, the sum of their -log softmax(logits)[target] in nats."""
        return super().forward(x) if targets is None else self.loss(x, self.weight, targets, reduction="sum")


class Embedding(nn.Module):
    """One learned row of size d_model per token ID, a normal with std 1 truncated at 3 std."""

    def __init__(self, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.weight = _truncated_normal((vocab_size, d_model), std=1.0)

    def forward(self, token_ids: Int[Tensor, "..."]) -> Float[Tensor, "... d_model"]:
        return nn.functional.embedding(token_ids, self.weight)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019).

    Computes in float32, or in float64 for float64 x, and returns x's dtype.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: Float[Tensor, "... hidden"]) -> Float[Tensor, "... hidden"]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        inverse_rms = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (wide * inverse_rms * self.weight).to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Rotary position embedding on interleaved pairs (Su et al. 2021, RoFormer, equations 14 and 34).

    The pair (x[2i], x[2i+1]) at position p is rotated by the angle p * theta^(-2i/dim). The cosines and sines are
    computed once for `context_length` positions; these tables are not part of the state dict.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, context_length: int, dim: int, theta: float = 10000.0, scaling: Sequence[float] | None = None
    ) -> None:
        if dim % 2:
            raise ValueError(f"dim is {dim}: rotary embedding turns pairs, so it must be even")
        super().__init__()
        device = torch.get_default_device()
        with torch.device("cpu"):  # Apple's GPUs have no float64
            frequency = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
            if scaling is not None:
                frequency = _slower(frequency, *scaling)
            # float64 until the end: a float32 product is off by up to 1e-3 rad at position 16,384.
            angle = torch.outer(torch.arange(context_length, dtype=torch.float64), frequency)
        self.register_buffer("cos", angle.cos().float().to(device), persistent=False)
        self.register_buffer("sin", angle.sin().float().to(device), persistent=False)

    def forward(self, x: Float[Tensor, "... positions dim"], start: int = 0) -> Float[Tensor, "... positions dim"]:
        """Rotate x, whose first position is `start`. Computes in float32, at least, and returns x's dtype."""
        end = start + x.shape[-2]
        if end > self.cos.shape[0]:
            raise ValueError(f"position {end - 1} is beyond the context_length of {self.cos.shape[0]}")
        cos, sin = self.cos[start:end], self.sin[start:end]
        even, odd = x.unflatten(-1, (-1, 2)).unbind(dim=-1)
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
        return turned.flatten(-2).to(x.dtype)


def _slower(frequency: Tensor, factor: float, low: float, high: float, old_context_length: float) -> Tensor:
    """Frequencies for a context that is `factor` times as long as before (Llama 3.1).

    Those with fewer than `low` turns in the old context are divided by the factor, those with more than `high` stay,
    and those between are interpolated.
    """
    turns = old_context_length * frequency / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequency * (kept + (1 - kept) / factor)


class SwiGLU(nn.Module):
    """w2(silu(w1 x) * w3 x) (Shazeer 2020, GLU Variants Improve Transformer, equation 6)."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.project = separately
        self.w1 = Linear(d_model, d_ff)
        self.w2 = Linear(d_ff, d_model)
        self.w3 = Linear(d_model, d_ff)

    def forward(self, x: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_model"]:
        outputs = self.project(x, (self.w1, self.w3))
        return self.w2(nn.functional.silu(next(outputs)) * next(outputs))  # without gradients w1 x is freed first


class LayerCache:
    """The keys and values one attention layer has seen, in buffers allocated once for `room` positions."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self.length = 0

    def append(self, k: Float[Tensor, "B H T D"], v: Float[Tensor, "B H T D"]) -> tuple[Tensor, Tensor]:
        """Append k and v to the cache; return all keys and all values so far, each (B, H, length, D)."""
        if self._keys is None or self._values is None:
            batch, heads, _, dim = k.shape
            self._keys, self._values = (t.new_empty(batch, heads, self._room, dim) for t in (k, v))
        end = self.length + k.shape[-2]
        self._keys[:, :, self.length : end] = k
        self._values[:, :, self.length : end] = v
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]


class CausalMultiHeadSelfAttention(nn.Module):
    """Multi-head causal self-attention with rotary positions on queries and keys.

    num_kv_heads: each of these heads of keys and values serves num_heads / num_kv_heads query heads.
    qk_norm: normalise each query and each key over its head, before the rotation.
    window: as of `scaled_dot_product_attention`.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        rope: RotaryEmbedding,
        attention: Attention,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        qk_norm: bool = False,
        window: int | None = None,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.window = window
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.head_dim = head_dim or d_model // num_heads
        self.rope = rope
        self.attention = attention
        self.project = separately
        self.q_proj = Linear(d_model, self.num_heads * self.head_dim)
        self.k_proj = Linear(d_model, self.num_kv_heads * self.head_dim)
        self.v_proj = Linear(d_model, self.num_kv_heads * self.head_dim)
        self.output_proj = Linear(self.num_heads * self.head_dim, d_model)
        self.q_norm = RMSNorm(self.head_dim, norm_eps) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, norm_eps) if qk_norm else nn.Identity()

    def forward(
        self, x: Float[Tensor, "B T d_model"], cache: LayerCache | None = None, documents: Documents | None = None
    ) -> Float[Tensor, "B T d_model"]:
        def split_heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        q, k, v = map(split_heads, self.project(x, (self.q_proj, self.k_proj, self.v_proj)))
        start = 0 if cache is None else cache.length
        q, k = self.rope(self.q_norm(q), start), self.rope(self.k_norm(k), start)
        if cache is not None:
            # The causal mask is top-left aligned, which is correct only for the first chunk. A later chunk must be a
            # single position, which sees everything in the cache, or in the window, and needs no mask.
            if start and x.shape[1] > 1:
                raise ValueError(f"{x.shape[1]} positions on a cache of {start}: after the first chunk, one at a time")
            k, v = cache.append(k, v)
            if start and self.window is not None:
                k, v = k[:, :, -self.window :], v[:, :, -self.window :]
        limits: dict[str, Any] = {}  # none for attention functions without these arguments
        if start == 0 and self.window is not None and self.window < x.shape[1]:
            limits["window"] = self.window
        if documents is not None:
            limits["documents"] = documents
        o = self.attention(q, k, v, start == 0, **limits)
        return self.output_proj(o.transpose(1, 2).flatten(-2))


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x)) (pre-norm, Xiong et al. 2020)."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int,
        rope: RotaryEmbedding,
        attention: Attention,
        norm_eps: float = 1e-5,
        **of_attention: Any,
    ) -> None:
        super().__init__()
        self.ln1 = RMSNorm(d_model, norm_eps)
        self.attn = CausalMultiHeadSelfAttention(d_model, num_heads, rope, attention, norm_eps=norm_eps, **of_attention)
        self.ln2 = RMSNorm(d_model, norm_eps)
        self.ffn = SwiGLU(d_model, d_ff)

    def forward(
        self, x: Float[Tensor, "B T d_model"], cache: LayerCache | None = None, documents: Documents | None = None
    ) -> Float[Tensor, "B T d_model"]:
        x = x + self.attn(self.ln1(x), cache, documents)
        return x + self.ffn(self.ln2(x))


class TransformerLM(nn.Module):
    """Token IDs in, logits of the next token out; with the next tokens as targets, their loss.

    `attention` may be any faster function that follows the contract of `scaled_dot_product_attention`.
    tie_embeddings: the head has the weight of the embedding, which the state dict contains once.
    window: attention's, in every `window_every`-th block, counted from the first.
    Raises ValueError if d_model does not divide into num_heads heads of even size, unless head_dim is given, and if
    num_kv_heads does not divide num_heads.
    """

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        d_model: int,
        num_layers: int,
        num_heads: int,
        d_ff: int,
        rope_theta: float = 10000.0,
        attention: Attention = scaled_dot_product_attention,
        *,
        rope_scaling: Sequence[float] | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        qk_norm: bool = False,
        window: int | None = None,
        window_every: int = 1,
        tie_embeddings: bool = False,
        norm_eps: float = 1e-5,
    ) -> None:
        if not head_dim and d_model % num_heads:
            raise ValueError(f"d_model is {d_model}: it must be divisible by num_heads, which is {num_heads}")
        if num_kv_heads and num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads is {num_kv_heads}: it must divide num_heads, which is {num_heads}")
        super().__init__()
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.token_embeddings = Embedding(vocab_size, d_model)
        rope = RotaryEmbedding(context_length, head_dim or d_model // num_heads, rope_theta, rope_scaling)
        of_attention = dict(num_kv_heads=num_kv_heads, head_dim=head_dim, qk_norm=qk_norm)
        self.layers = nn.ModuleList(
            TransformerBlock(
                d_model, num_heads, d_ff, rope, attention, norm_eps,
                window=None if i % window_every else window, **of_attention,
            )
            for i in range(num_layers)
        )  # fmt: skip
        self.ln_final = RMSNorm(d_model, norm_eps)
        self.lm_head = LMHead(d_model, vocab_size)
        if tie_embeddings:
            self.token_embeddings.weight = self.lm_head.weight  # whose initial values are small enough for logits
            self.register_state_dict_post_hook(_drop_tied)
            self.register_load_state_dict_pre_hook(_add_tied)

    def forward(
        self,
        token_ids: Int[Tensor, "B T"],
        cache: list[LayerCache] | None = None,
        targets: Int[Tensor, "B T"] | None = None,
        documents: Documents | None = None,
    ) -> Float[Tensor, "B T V"] | Float[Tensor, ""]:
        """Logits for each position; with targets, the sum of their cross-entropies in nats, from `lm_head.loss`.

        With a cache, token_ids continue the sequence that the cache holds. With documents, which need a call without a
        cache, attention stays within each document. Rotary positions go on, as scores depend on distances alone.
        """
        if cache is not None and documents is not None:
            raise ValueError("documents are given with a cache: they need a call without one")
        x = self.ln_final(self.through_blocks(self.token_embeddings(token_ids), cache, documents=documents))
        return self.lm_head(x) if targets is None else self.lm_head(x, targets)

    def through_blocks(
        self,
        x: Float[Tensor, "B T d_model"],
        cache: list[LayerCache] | None = None,
        first: int = 0,
        last: int | None = None,
        documents: Documents | None = None,
    ) -> Float[Tensor, "B T d_model"]:
        """Return x after the blocks first .. last - 1 (default: all of them)."""
        for i, layer in enumerate(list(self.layers)[first:last], first):
            x = layer(x, None if cache is None else cache[i], documents)
        return x

    def new_cache(self, room: int | None = None) -> list[LayerCache]:
        """An empty key-value cache, one entry per layer; the first call that uses it fixes the batch size.

        room: positions that it can hold (default: context_length).
        """
        return [LayerCache(room or self.context_length) for _ in self.layers]


def _drop_tied(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    del state_dict[f"{prefix}lm_head.weight"]


def _add_tied(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    if (weight := state_dict.get(f"{prefix}token_embeddings.weight")) is not None:
        state_dict[f"{prefix}lm_head.weight"] = weight
