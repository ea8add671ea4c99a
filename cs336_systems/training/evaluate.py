"""How well a model predicts a text: nats and bits for each token and byte, document by document.

Each document is predicted from its first token on, after the token that begins a text, such as Llama's, or else after
an end of text, as in training. Windows of the context length overlap, so that every token but the first ones has at
least context_length - stride tokens before it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import TypeVar

import torch

from cs336_basics.model import TransformerLM
from cs336_basics.nn_utils import cross_entropy
from cs336_basics.tokenizer import Tokenizer

from ..parallel import comm

Item = TypeVar("Item")
Result = TypeVar("Result")
Window = tuple[list[int], int]
"""Neighbouring tokens, up to one more than the context length, and the first position whose prediction counts."""


@dataclass
class Score:
    """The loss over some text: the number of tokens and UTF-8 bytes, and the sum of the tokens' nats."""

    tokens: int = 0
    bytes: int = 0
    nats: float = 0.0

    def __add__(self, other: "Score") -> "Score":
        return Score(self.tokens + other.tokens, self.bytes + other.bytes, self.nats + other.nats)

    def rates(self) -> dict[str, float]:
        """Nats and bits a token, their perplexity, and nats and bits a byte, which compare different tokenizers."""
        nats = self.nats / self.tokens
        return {
            "nats_per_token": nats,
            "bits_per_token": nats / math.log(2),
            "perplexity": math.exp(min(nats, 700)),  # a number even where exp overflows
            "nats_per_byte": self.nats / self.bytes,
            "bits_per_byte": self.nats / self.bytes / math.log(2),
        }


def over_ranks(function: Callable[[Iterable[Item]], list[Result]], items: Iterable[Item]) -> list[Result]:
    """`function(items)`, which has a result for each item. The items are dealt out over the ranks of the process group.

    All ranks call it together with the same items, and get all results.
    """
    own = function(islice(items, comm.rank(), None, comm.world_size()))
    dealt = zip_longest(*comm.all_gather_objects(own, "results of all ranks"))
    return [result for turn in dealt for result in turn if result is not None]


def score_documents(
    model: TransformerLM,
    tokenizer: Tokenizer,
    documents: Iterable[str],
    context_length: int,
    stride: int,
    batch_size: int = 4,
    special_tokens: bool = False,
) -> list[Score]:
    """The score of each document that has tokens, in windows of the context length, by all ranks together.

    special_tokens: whether those in a document are tokens; otherwise they are text.
    Raises ValueError for a context_length that the model lacks, and for a stride that is not from 1 to it.
    """
    if not 1 <= context_length <= model.context_length:
        accepted = f"from 1 to the model's, {model.context_length}"
        raise ValueError(f"context_length is {context_length}: it must be {accepted}")
    if not 1 <= stride <= context_length:
        raise ValueError(f"stride is {stride}: it must be from 1 to the context_length, {context_length}")

    encode = tokenizer.encode if special_tokens else tokenizer.encode_document

    def score_own(documents: Iterable[str]) -> list[Score]:
        scores: list[Score] = []

        def windows_of_all() -> Iterator[tuple[Score, Window]]:
            for document in documents:
                ids = [tokenizer.text_start_id, *encode(document)]
                scores.append(Score(tokens=len(ids) - 1, bytes=len(document.encode())))
                yield from ((scores[-1], window) for window in windows(ids, context_length, stride))

        remaining = windows_of_all()
        while batch := list(islice(remaining, batch_size)):
            for (score, _), (nats, _) in zip(batch, score_windows(model, [w for _, w in batch]), strict=True):
                score.nats += nats
        return scores

    return [score for score in over_ranks(score_own, documents) if score.tokens]


def windows(ids: list[int], length: int, stride: int) -> Iterator[Window]:
    """Windows of up to length + 1 tokens, in which each token but the first counts once."""
    counted = start = 0
    while counted < len(ids) - 1:
        window = ids[start : start + length + 1]
        yield window, counted - start
        counted = start + len(window) - 1
        start += stride


@torch.no_grad()
def score_windows(model: TransformerLM, windows: Sequence[Window]) -> list[tuple[float, bool]]:
    """The nats of each window's tokens that count, and whether all of them are the model's first choices."""
    device = model.lm_head.weight.device
    rows = [torch.tensor(window) for window, _ in windows]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)  # what follows does not change a row
    x = model.ln_final(model.through_blocks(model.token_embeddings(tokens[:, :-1])))
    scores = []
    # The head takes a row at a time: the logits of all may not fit into memory.
    for row, targets, (window, first) in zip(x, tokens[:, 1:], windows, strict=True):
        counts = slice(first, len(window) - 1)
        logits = model.lm_head(row[counts])
        nats = cross_entropy(logits, targets[counts], reduction="none").cpu().double().sum().item()
        scores.append((nats, bool((logits.argmax(-1) == targets[counts]).all())))
    return scores
