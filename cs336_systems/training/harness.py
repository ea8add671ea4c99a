"""A model for EleutherAI's lm-evaluation-harness, which asks for likelihoods and continuations.

It gives the figures of the harness's own class for the exported model. The package lm_eval must be installed.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby, islice
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from cs336_basics.generate import generate
from cs336_basics.model import TransformerLM
from cs336_basics.tokenizer import Tokenizer

from .evaluate import Window, over_ranks, score_windows


class HarnessModel(TemplateLM):
    """Every rank of a process group gets all requests and does its share; all of them have all answers."""

    def __init__(self, model: TransformerLM, tokenizer: Tokenizer, context_length: int, batch_size: int = 4) -> None:
        super().__init__()
        self.model, self.tokenizer = model, tokenizer
        self.context_length, self.batch_size = context_length, batch_size

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.end_of_text_id

    @property
    def prefix_token_id(self) -> int:
        return self.tokenizer.text_start_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        is_prompt = string and add_special_tokens is not False
        return self.tokenizer.encode_prompt(string) if is_prompt else self.tokenizer.encode(string)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        windows: list[Window] = []
        for _texts, context, continuation in requests:
            window = [*context, *continuation][-self.context_length - 1 :]
            windows.append((window, max(0, len(window) - 1 - len(continuation))))
        order = sorted(range(len(windows)), key=lambda i: len(windows[i][0]))  # batches of one length
        scores = dict(zip(order, over_ranks(self._score, (windows[i] for i in order)), strict=True))
        return [scores[i] for i in range(len(windows))]

    def _score(self, windows: Iterable[Window]) -> list[tuple[float, bool]]:
        scores: list[tuple[float, bool]] = []
        remaining = iter(windows)
        while batch := list(islice(remaining, self.batch_size)):
            scores += [(-nats, is_greedy) for nats, is_greedy in score_windows(self.model, batch)]
        return scores

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """The log-likelihood of whole texts, each after the prefix, in windows that count every token once."""
        texts = []
        for request in requests:
            ids = self.tok_encode(*request.args)
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.context_length, context_len=1)
            texts.append([(None, *make_disjoint_window(window)) for window in windows])
        scores = iter(self._loglikelihood_tokens([window for text in texts for window in text]))
        return [sum(log_likelihood for log_likelihood, _ in islice(scores, len(text))) for text in texts]

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        """Continuations up to a stop text. A prompt keeps its end, at least half of the context."""
        return over_ranks(self._generate, (request.args for request in requests))

    def _generate(self, requests: Any) -> list[str]:
        answers: list[str] = []
        for options, group in groupby(requests, key=lambda request: request[1]):
            how = normalize_gen_kwargs(options)
            new = min(how["max_gen_toks"], self.context_length // 2)
            sampling = {name: how.get(name) for name in ("top_k", "top_p")}
            sampling["temperature"] = how.get("temperature", 1.0 if how.get("do_sample") else 0.0)
            while batch := list(islice(group, self.batch_size)):
                whole = (self.tok_encode(text) or [self.eot_token_id] for text, _ in batch)
                prompts = [ids[new - self.context_length :] for ids in whole]
                found = generate(self.model, prompts, new, stop_tokens=self.tokenizer.stop_ids, **sampling)
                texts = map(self.tokenizer.decode, found)
                answers += [postprocess_generated_text(text, how.get("until"), None) for text in texts]
        return answers
