"""Kernels from outside of the package, in styles that no kernel of ours has: the tests ask only for the contract."""

import math
from typing import Any

import torch
from torch import Tensor

from cs336_basics.attention import without_autocast
from cs336_systems.kernels.attention.contract import FLOATING_DTYPES, check_qkv, repeat_heads
from tests.kernels.attention_cases import QUICK_CASES, KernelTests


def probabilities(q: Tensor, k: Tensor, is_causal: bool) -> Tensor:
    scores = torch.einsum("...qd,...kd->...qk", q.float(), k.float()) / math.sqrt(q.shape[-1])
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1)


def einsum(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """PyTorch's operations; without keys, zeros that depend on nothing."""
    check_qkv(q, k, v, is_causal, dtypes=FLOATING_DTYPES)
    if not k.shape[-2]:
        return torch.zeros_like(q)
    k, v = repeat_heads(q, k, v)
    with without_autocast(q.device.type):
        return torch.einsum("...qk,...kd->...qd", probabilities(q, k, is_causal), v.float()).to(q.dtype)


class KeepsProbabilities(torch.autograd.Function):
    """Saves the probabilities, and no logsumexp."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        p = probabilities(q, k, is_causal)
        ctx.save_for_backward(q, k, v, p)
        return (p @ v.float()).to(q.dtype)

    @staticmethod
    def backward(ctx: Any, dO: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, p = ctx.saved_tensors
        dP = dO.float() @ v.float().mT
        dS = p * (dP - (dP * p).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
        gradients = dS @ k.float(), dS.mT @ q.float(), p.mT @ dO.float()
        return *(gradient.to(q.dtype) for gradient in gradients), None


def own_function(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """An autograd.Function of one's own."""
    check_qkv(q, k, v, is_causal, dtypes=FLOATING_DTYPES, equal_heads="own_function")
    with without_autocast(q.device.type):
        return KeepsProbabilities.apply(q, k, v, is_causal)


def online(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """PyTorch's operations key tile by key tile: without keys nothing but the initial zeros is left."""
    check_qkv(q, k, v, is_causal, dtypes=FLOATING_DTYPES)
    k, v = repeat_heads(q, k, v)
    with without_autocast(q.device.type):
        wide_q, o, place = q.float() / math.sqrt(q.shape[-1]), torch.zeros(q.shape), torch.arange(q.shape[-2])[:, None]
        maximum, denominator = torch.full((*q.shape[:-1], 1), -math.inf), torch.zeros(*q.shape[:-1], 1)
        for first in range(0, k.shape[-2], 32):
            keys, values = (x[..., first : first + 32, :].float() for x in (k, v))
            scores = wide_q @ keys.mT
            if is_causal:
                scores = scores.masked_fill(first + torch.arange(keys.shape[-2]) > place, -math.inf)
            before, maximum = maximum, torch.maximum(maximum, scores.amax(-1, keepdim=True))
            p, kept = (scores - maximum).exp(), (before - maximum).exp()
            o, denominator = kept * o + p @ values, kept * denominator + p.sum(-1, keepdim=True)
        return (o / denominator.clamp_min(1e-30)).to(q.dtype)


class OwnKernelTests(KernelTests):
    cases = QUICK_CASES
    random_examples = 10


class TestEinsum(OwnKernelTests):
    name = f"{__name__}:einsum"


class TestOwnFunction(OwnKernelTests):
    name = f"{__name__}:own_function"
    equal_heads = True


class TestOnline(OwnKernelTests):
    name = f"{__name__}:online"
