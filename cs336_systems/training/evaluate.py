"""How well a model predicts a text: nats and bits for each token and byte, document by document.

Each document is predicted from its first token on, after an end of text, as in training. Windows of the context length
overlap, so that every token but the first ones has at least context_length - stride tokens before it.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from cs336_basics.model import TransformerLM
from cs336_basics.nn_utils import cross_entropy
from cs336_basics.tokenizer import Tokenizer


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
            "perplexity": math.exp(min(nats, 700)),  # a number even where exp overflows
            "bits_per_byte": self.nats / self.bytes / math.log(2),
        }


@torch.no_grad()
def score_documents(
    model: TransformerLM,
    tokenizer: Tokenizer,
    documents: Iterable[str],
    context_length: int,
    stride: int,
    batch_size: int = 4,
) -> list[Score]:
    """The score of each document that has tokens, in windows of the context length.

    Raises ValueError for a context_length that the model lacks, and for a stride that is not from 1 to it.
    """
    if not 1 <= context_length <= model.context_length:
        accepted = f"from 1 to the model's, {model.context_length}"
        raise ValueError(f"context_length is {context_length}: it must be {accepted}")
    if not 1 <= stride <= context_length:
        raise ValueError(f"stride is {stride}: it must be from 1 to the context_length, {context_length}")
    scores: list[Score] = []
    batch: list[tuple[Score, list[int], int]] = []
    for document in documents:
        ids = [tokenizer.end_of_text_id, *tokenizer.encode(document)]
        if len(ids) == 1:
            continue
        scores.append(Score(tokens=len(ids) - 1, bytes=len(document.encode())))
        for window, scored_from in windows(ids, context_length, stride):
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
    x = model.ln_final(model.through_blocks(model.token_embeddings(tokens[:, :-1])))
    # The head takes a row at a time: the logits of all may not fit into memory.
    for row, targets, (score, window, scored_from) in zip(x, tokens[:, 1:], batch, strict=True):
        nats = cross_entropy(model.lm_head(row), targets, reduction="none")
        score.nats += nats[scored_from : len(window) - 1].double().sum().item()
