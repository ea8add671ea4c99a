"""Sampling from a language model, with a key-value cache.

Prompts of different lengths share a batch without padding. The first pass reads as many tokens of every row as the
shortest prompt has. After that all rows advance together, one position at a time; a row that is still inside its prompt
takes the prompt's next token instead of a sampled one. So every row sees exactly what it would see alone.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .model import TransformerLM


def filter_logits(
    logits: Float[Tensor, "... vocab"], temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Float[Tensor, "... vocab"]:
    """Logits divided by temperature (above 0), with all but the allowed tokens set to -inf.

    top_k keeps the k most likely tokens (and ties with the k-th). top_p keeps the smallest set of most likely tokens
    whose probability reaches p (Holtzman et al. 2020). With both, top_k is applied first. At least one token stays.
    """
    logits = logits.float() / temperature
    if top_k is not None:
        smallest = logits.topk(min(top_k, logits.shape[-1])).values[..., -1:]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    if top_p is not None:
        ordered, order = logits.sort(descending=True)
        probability = ordered.softmax(dim=-1)
        before = probability.cumsum(dim=-1) - probability
        dropped = torch.zeros_like(before, dtype=torch.bool).scatter(
            -1, order, before >= max(top_p, torch.finfo(torch.float32).tiny)
        )
        logits = logits.masked_fill(dropped, float("-inf"))
    return logits


def _check_prompts(model: TransformerLM, prompts: Sequence[Sequence[int]], max_new_tokens: int | None) -> None:
    if not prompts or any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("prompts: at least one is needed, each of at least one token")
    for token in (token for prompt in prompts for token in prompt):
        if not 0 <= token < model.vocab_size:
            raise ValueError(f"prompt token {token}: it must be from 0 to {model.vocab_size - 1}, the vocabulary")
    longest = max(len(prompt) for prompt in prompts)
    room = model.context_length - longest
    if room < 0:
        raise ValueError(f"prompt of {longest} tokens: the model's context_length is {model.context_length}")
    if max_new_tokens is not None and not 0 <= max_new_tokens <= room:
        raise ValueError(
            f"max_new_tokens is {max_new_tokens}: it must be from 0 to {room}, the room that the context_length of "
            f"{model.context_length} leaves after a prompt of {longest}"
        )


@torch.no_grad()
def generate(
    model: TransformerLM,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | None = None,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_tokens: Sequence[int] = (),
    seed: int = 0,
) -> list[list[int]]:
    """Continue each prompt; returns the new tokens of each, without the prompt and without the stop token.

    A row ends at a stop token or after max_new_tokens; with max_new_tokens=None, where the model's context is full.
    temperature 0 takes the most likely token. The same seed gives the same tokens on the same device. Raises ValueError
    for an empty or too long prompt, for impossible limits, and if the model's logits are not finite.
    """
    _check_prompts(model, prompts, max_new_tokens)
    if temperature < 0 or (top_k is not None and top_k < 1) or (top_p is not None and not 0 < top_p <= 1):
        raise ValueError(
            f"temperature is {temperature}, top_k {top_k} and top_p {top_p}: they must be at least 0, at least 1, and "
            "above 0 and at most 1"
        )
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    ends = torch.full_like(lengths, model.context_length) if max_new_tokens is None else lengths + max_new_tokens
    stops = torch.tensor(stop_tokens, dtype=torch.long, device=device)
    rows = torch.zeros(len(prompts), int(ends.max()), dtype=torch.long, device=device)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt, device=device)

    position = int(lengths.min())  # the first position at which some row is sampled
    seen, cache = 0, model.new_cache(rows.shape[1])
    while position < int(ends.max()):
        logits = model(rows[:, seen:position], cache)[:, -1]
        if not logits.amax(dim=-1).isfinite().all():  # NaN or inf; a single logit may be -inf
            raise ValueError("the model's logits are not finite: its weights are broken, or too large for its dtype")
        seen = position
        sampled = _sample(logits, temperature, top_k, top_p, generator)
        in_prompt = position < lengths
        rows[:, position] = torch.where(in_prompt, rows[:, position], sampled)
        stopped = ~in_prompt & (position < ends) & torch.isin(sampled, stops)
        ends = torch.where(stopped, position, ends)
        position += 1
    return [row[start:end].tolist() for row, start, end in zip(rows, lengths.tolist(), ends.tolist(), strict=True)]


def _sample(
    logits: Float[Tensor, "B vocab"],
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator,
) -> Int[Tensor, " B"]:
    if temperature == 0:
        return logits.argmax(dim=-1)
    # Subtracting the maximum keeps a small temperature from overflowing; the lower bound keeps a temperature below
    # float32's range from dividing by zero.
    logits, temperature = logits - logits.amax(dim=-1, keepdim=True), max(temperature, torch.finfo(torch.float32).tiny)
    probability = filter_logits(logits, temperature, top_k, top_p).softmax(dim=-1)
    return probability.multinomial(1, generator=generator).squeeze(-1)
