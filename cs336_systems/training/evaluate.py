"""How well a model predicts a text: nats and bits for each token and byte, document by document.

Each document is predicted from its first token on, after an end of text, as in training. Windows of the context length
overlap, so that every token but the first ones has at least context_length - stride tokens before it.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cs336_basics.model import TransformerLM
from cs336_basics.nn_utils import cross_entropy
from cs336_basics.tokenizer import END_OF_TEXT, Tokenizer


@dataclass
class Score:
    """The loss over some text: the number of tokens and UTF-8 bytes, and the sum of the tokens' nats."""

    tokens: int = 0
    bytes: int = 0
    nats: float = 0.0

    def __add__(self, other: "Score") -> "Score":
        return Score(self.tokens + other.tokens, self.bytes + other.bytes, self.nats + other.nats)

    def rates(self) -> dict[str, float]:
        """Nats and bits a token, their perplexity, and bits a byte, which compares models of different tokenizers."""
        nats = self.nats / self.tokens
        return {
            "nats_per_token": nats,
            "bits_per_token": nats / math.log(2),
            "perplexity": math.exp(nats),
            "bits_per_byte": self.nats / self.bytes / math.log(2),
        }


def documents_of(blocks: Iterable[str]) -> Iterator[str]:
    """The documents of a stream of text, which `<|endoftext|>` separates. Empty ones are left out."""
    held = ""
    for block in blocks:
        *whole, held = (held + block).split(END_OF_TEXT)
        yield from filter(None, whole)
    yield from filter(None, [held])


@torch.no_grad()
def score_documents(
    model: TransformerLM, tokenizer: Tokenizer, documents: Iterable[str], stride: int, batch_size: int = 4
) -> list[Score]:
    """The score of each document. Raises ValueError for a stride that is not from 1 to the model's context_length."""
    if not 1 <= stride <= model.context_length:
        raise ValueError(f"stride is {stride}: it must be from 1 to the model's context_length, {model.context_length}")
    scores: list[Score] = []
    batch: list[tuple[Score, list[int], int]] = []
    for document in documents:
        ids = [tokenizer.end_of_text_id, *tokenizer.encode(document)]
        scores.append(Score(tokens=len(ids) - 1, bytes=len(document.encode())))
        for window, scored_from in windows(ids, model.context_length, stride):
            batch.append((scores[-1], window, scored_from))
            if len(batch) == batch_size:
                _score(model, batch)
                batch = []
    if batch:
        _score(model, batch)
    return scores


def windows(ids: list[int], length: int, stride: int) -> Iterator[tuple[list[int], int]]:
    """Parts of up to length + 1 neighbouring tokens, and the first position of each whose prediction counts.

    A part's last `length` tokens are predicted from those before them. Each token but the first counts once.
    """
    counted = start = 0
    while counted < len(ids) - 1:
        window = ids[start : start + length + 1]
        yield window, counted - start
        counted = start + len(window) - 1
        start += stride


def _score(model: TransformerLM, batch: list[tuple[Score, list[int], int]]) -> None:
    device = model.lm_head.weight.device
    rows = [torch.tensor(window) for _, window, _ in batch]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)  # what follows does not change a row
    nats: Tensor = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], reduction="none").double().cpu()
    for row, (score, window, scored_from) in zip(nats, batch, strict=True):
        score.nats += row[scored_from : len(window) - 1].sum().item()
