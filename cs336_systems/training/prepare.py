"""The data of a run: text -> tokenizer -> token files, each made by a stage that is skipped if it is up to date."""

import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cs336_basics.data import (
    divergence_of_kind,
    has_sidecar,
    load_tokens,
    read_info,
    sidecar_path,
    write_tokens,
)
from cs336_basics.files import sha256_of_file
from cs336_basics.tokenizer import Tokenizer, check_vocab_size, sample_evenly

from ..config.checks import shown
from ..config.run import RunConfig
from .batches import Tokens
from .stages import in_data_dir, is_kept, one_at_a_time, run_stage
from .texts import TextSpan, find_texts
from .together import file_group, on_every_rank, on_first_rank

logger = logging.getLogger(__name__)

BeforeMaking = Callable[[], None] | None
"""Called before a tokenizer or training tokens are made. It may prevent that by raising an error."""


@dataclass(frozen=True)
class PreparedData:
    """The tokens to train and to validate on, and their tokenizer, if it is known."""

    train: Tokens
    valid: Tokens
    tokenizer: Tokenizer | None
    train_sha256: str


def prepare_on_every_rank(config: RunConfig, before_making: BeforeMaking = None) -> PreparedData:
    """`prepare_data` on rank 0, then on the other ranks, which may have other disks. All ranks call it together.

    Ranks wait for each other for up to a week, because a download or a tokenizer's training may take long.
    """
    group = file_group(wait_h=24 * 7)
    made: list[PreparedData] = []

    def prepare() -> None:
        if not made:
            made.append(prepare_data(config, before_making))

    on_first_rank(prepare, "preparation of the data", group)
    on_every_rank(prepare, "preparation of the data", group)
    return made[0]


def prepare_data(config: RunConfig, before_making: BeforeMaking = None) -> PreparedData:
    """Run the stages whose files are missing or stale, then load and check the data.

    Raises FileNotFoundError or ValueError naming the file or the field.
    """
    data = config.data
    tokenizer_path, train_path, valid_path = _paths(config)
    for name, path in (("tokenizer", tokenizer_path), ("train_tokens", train_path), ("valid_tokens", valid_path)):
        if path.is_dir():
            raise ValueError(f"data.{name} {path} is a folder: it must be a file, or the name of a new one")
        if config.skip_data and name != "tokenizer" and not path.is_file():
            raise FileNotFoundError(
                f"data.{name} {path} does not exist, and --skip_data was given: leave it out to make the file"
            )
    if config.skip_data:
        logger.info("data: as it is (--skip_data)")
        return _load(config)
    if is_kept(data, train_path) and is_kept(data, valid_path):
        logger.info("data: %s and %s exist and are used as they are", train_path, valid_path)
        return _load(config)
    if train_path.resolve() == valid_path.resolve():
        raise ValueError(
            f"data.valid_tokens is {data.valid_tokens!r}: it must differ from data.train_tokens, because both files "
            "are made (--skip_data uses an existing file as it is)"
        )
    for source, name, accepted in (("text", "train_text", "a path"), ("hf", "hf_path", "a dataset's name or folder")):
        if data.source == source and not getattr(data, name):
            raise ValueError(
                f"data.{name} is {shown(getattr(data, name))}: it must be {accepted}, because data.source is "
                f"{source!r} and {train_path} and {valid_path} are not both files of your own"
            )
    make = _make_random_tokens if data.source == "random" else _make_tokens_from_text
    with one_at_a_time(train_path.parent):
        make(config, before_making)
        return _load(config)  # in the lock: later, another run may replace the files, but these are mapped by then


def _paths(config: RunConfig) -> tuple[Path, Path, Path]:
    """The files of the tokenizer, the training tokens and the validation tokens."""
    data = config.data
    return Path(data.tokenizer_path), Path(str(data.train_tokens)), Path(str(data.valid_tokens))


def _make_random_tokens(config: RunConfig, before_making: BeforeMaking) -> None:
    data, shape = config.data, config.model.shape
    _, train_path, valid_path = _paths(config)
    # A tenth is enough to validate on, but never less than two sequences.
    for split, (path, count) in enumerate(((train_path, data.random_tokens), (valid_path, data.random_tokens // 10))):
        count = max(count, 2 * shape.context_length + 2)
        inputs = {"random_tokens": count, "seed": data.seed, "split": split, "vocab_size": shape.vocab_size}
        make = functools.partial(_draw_tokens, path, inputs)
        check = before_making if path == train_path else None
        run_stage(data, "tokens", path, inputs, make, sidecar=sidecar_path(path), before_making=check)


def _draw_tokens(path: Path, inputs: dict[str, int]) -> None:
    count, seed, vocab_size = inputs["random_tokens"], inputs["seed"], inputs["vocab_size"]
    rng = np.random.default_rng((seed, inputs["split"]))
    chunks = (rng.integers(0, vocab_size, min(1 << 22, count - n)) for n in range(0, count, 1 << 22))
    write_tokens(
        path,
        lambda first: itertools.islice(chunks, first, None),
        vocab_size,
        source=f"random, seed {seed}",
        inputs=inputs,
    )


def _make_tokens_from_text(config: RunConfig, before_making: BeforeMaking) -> None:
    data, vocab_size = config.data, config.model.shape.vocab_size
    tokenizer_path, train_path, valid_path = _paths(config)
    if not is_kept(data, tokenizer_path):
        check_vocab_size(vocab_size, "model.vocab_size")  # before anything is fetched
    train_text, valid_text = find_texts(config)
    inputs = {"text": train_text.fingerprint, "vocab_size": vocab_size, "algorithm": "byte-level BPE, GPT-2 words"}
    # The tokenizer's training holds every distinct word and the places of its pairs: memory grows with the text.
    if train_text.size > data.tokenizer_sample_bytes:
        inputs["sample_bytes"] = data.tokenizer_sample_bytes
    make = functools.partial(_train_tokenizer, config, train_text)
    run_stage(data, "tokenizer", tokenizer_path, inputs, make, before_making=before_making)
    tokenizer = Tokenizer.load(tokenizer_path)
    for text, path in ((train_text, train_path), (valid_text, valid_path)):
        inputs = {"text": text.fingerprint, "tokenizer": tokenizer.sha256, "vocab_size": tokenizer.vocab_size}
        inputs["special_tokens"] = text.special_tokens
        make = functools.partial(_encode, tokenizer, tokenizer_path, text, path, inputs)
        check = before_making if path == train_path else None
        run_stage(data, "tokens", path, inputs, make, sidecar=sidecar_path(path), before_making=check)


def _train_tokenizer(config: RunConfig, text: TextSpan) -> None:
    vocab_size, sample_bytes = config.model.shape.vocab_size, config.data.tokenizer_sample_bytes
    blocks = text.blocks()
    if text.size > sample_bytes:
        logger.info(
            f"tokenizer: trained on an evenly spaced sample of {sample_bytes:,} of the text's {text.size:,} bytes "
            "(data.tokenizer_sample_bytes)"
        )
        blocks = sample_evenly(blocks, sample_bytes, text.size)
    tokenizer = Tokenizer.train(blocks, vocab_size, text.separator)
    tokenizer.save(config.data.tokenizer_path)
    if tokenizer.vocab_size < vocab_size:
        logger.warning(
            f"the text has words for a vocabulary of {tokenizer.vocab_size}, not {vocab_size}: the rest of the model's "
            "vocabulary stays unused"
        )


def _encode(tokenizer: Tokenizer, tokenizer_path: Path, text: TextSpan, path: Path, inputs: dict[str, Any]) -> None:
    def tokens_from(first: int) -> Iterator[list[int]]:
        if first:
            logger.info("tokens: %s pieces of the text are here already", f"{first:,}")
        separator = None if text.special_tokens else text.separator
        return tokenizer.encode_stream(text.blocks(), f"{text.name} {text.path}", separator, first)

    made_with = dict(tokenizer_sha256=tokenizer.sha256, source=str(text.path))
    info = write_tokens(path, tokens_from, tokenizer.vocab_size, **made_with, inputs=inputs)
    bytes_per_token = text.size / max(info.count, 1)
    logger.info("tokens: %s has %s tokens, %.1f bytes a token", path, f"{info.count:,}", bytes_per_token)
    # A byte-level tokenizer gives at most a token a byte, and a token is rarely more than a word.
    if not 0.95 <= bytes_per_token < 16:
        logger.warning(
            f"tokens: {bytes_per_token:.1f} bytes a token is far from the usual 1 to 6: is {tokenizer_path} the right "
            f"tokenizer for {text.path}?"
        )


def _load(config: RunConfig) -> PreparedData:
    """Load the token files and their tokenizer. Raises ValueError if they do not fit each other or the model."""
    shape = config.model.shape
    tokenizer_path, train_path, valid_path = _paths(config)
    for path in dict.fromkeys((train_path, valid_path)):
        if sidecar_path(path).is_file() and not has_sidecar(path):
            logger.info("data: %s is no sidecar of %s, ignored", sidecar_path(path), path)
    # The SHA-256 of the tokenizer that made each file, by its sidecar; empty if it is not known.
    made_with = {
        path: read_info(path).tokenizer_sha256 if has_sidecar(path) else "" for path in (train_path, valid_path)
    }
    tokenizer = _find_tokenizer(config, made_with[train_path])
    if tokenizer is not None and tokenizer.vocab_size > shape.vocab_size:
        raise ValueError(
            f"model.vocab_size is {shape.vocab_size}: it must be at least {tokenizer.vocab_size}, the size of the "
            f"tokenizer {tokenizer_path}"
        )
    is_users_own = tokenizer is not None and is_kept(config.data, tokenizer_path)  # the user vouches for it
    if not is_users_own and config.data.source != "random" and len(set(made_with.values())) > 1:
        raise ValueError(
            f"token files {train_path} and {valid_path} are not known to be of one tokenizer: give data.train_tokens "
            "and data.valid_tokens that are, or data.tokenizer"
        )
    for path, sha256 in made_with.items():
        if tokenizer is not None and sha256 and sha256 != tokenizer.sha256:
            raise ValueError(f"token file {path} was not made with the tokenizer {tokenizer_path}, its sidecar says")
    train, valid = (load_tokens(path, shape.vocab_size) for path in (train_path, valid_path))
    for name, path, tokens in (("train", train_path, train), ("valid", valid_path, valid)):
        if len(tokens) <= shape.context_length:
            raise ValueError(
                f"data.{name}_tokens {path} holds {len(tokens)} tokens: at least "
                f"{shape.context_length + 1} are needed, one more than model.context_length: give a longer text or a "
                "smaller model.context_length"
            )
    if train_path.resolve() == valid_path.resolve():
        logger.warning("data: validation is on the training tokens themselves, so its loss says nothing about new text")
    # Measured on some 60 texts: the divergence was at most 2.1 times that between parts of the training text if both
    # were of one kind (plays, stories, a project's code, JSON), and at least 2.7 times if the kinds differed.
    found, usual = divergence_of_kind(train, valid, shape.vocab_size)
    if found > max(2.5 * usual, usual + 0.05):
        logger.warning(
            f"data: {valid_path} is another kind of text than {train_path}: their token frequencies differ by "
            f"{found:.2f} nats, parts of the training text by {usual:.2f}. Shuffle the documents before the text is "
            "split, or validate on text of the same kind"
        )
    return PreparedData(train, valid, tokenizer, sha256_of_file(train_path))


def _find_tokenizer(config: RunConfig, made_train_tokens: str) -> Tokenizer | None:
    """The tokenizer that the user names or, if it has made the training tokens, the one in data_dir.

    Raises FileNotFoundError if the user names a file that does not exist.
    """
    data = config.data
    path, train_path, _ = _paths(config)
    if data.source == "random" and in_data_dir(data, path):
        return None
    if path.is_file():
        tokenizer = Tokenizer.load(path)
        if data.tokenizer is not None or made_train_tokens == tokenizer.sha256:
            return tokenizer
    elif data.tokenizer is not None and not in_data_dir(data, path):
        raise FileNotFoundError(
            f"data.tokenizer {path} does not exist: it must be the tokenizer that made {train_path}"
        )
    logger.warning("data: no tokenizer is known for %s, so no text will be sampled: give --data.tokenizer", train_path)
    return None
