"""Text -> tokenizer -> token files: the stages before training, each skipped if its inputs have not changed.

Beside every output lies a stamp with the hashes of its inputs and of the output itself, so a stage whose output was
damaged is done again, too.
"""

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cs336_basics.data import (
    divergence_of_kind,
    has_sidecar,
    load_tokens,
    read_info,
    sha256_of_file,
    sidecar_path,
    token_dtype,
    write_json,
    write_tokens,
)
from cs336_basics.stories import stories
from cs336_basics.tokenizer import Tokenizer, check_vocab_size, read_utf8, sample_evenly

from ..config.checks import shown
from ..config.run import DataConfig, RunConfig
from ..machine.files import written_whole
from .batches import Tokens
from .texts import TINYSTORIES_SHA256, TextSpan, fetch_tinystories, find_split, one_at_a_time
from .together import file_group, on_every_rank, on_first_rank

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedData:
    """Tokens to train and validate on, and the tokenizer, where there is one."""

    train: Tokens
    valid: Tokens
    tokenizer: Tokenizer | None
    train_sha256: str


def prepare_on_every_rank(config: RunConfig, check: Callable[[], None] = lambda: None) -> PreparedData:
    """`prepare_data` by rank 0, then by the others, whose disks may be other ones. All ranks call it together.

    Ranks wait for each other for up to a week, because a download or a tokenizer's training may take long.
    """
    group = file_group(wait_h=24 * 7)
    made: list[PreparedData] = []

    def prepare() -> None:
        if not made:
            made.append(prepare_data(config, check))

    on_first_rank(prepare, "preparation of the data", group)
    on_every_rank(prepare, "preparation of the data", group)
    return made[0]


def prepare_data(config: RunConfig, check: Callable[[], None] = lambda: None) -> PreparedData:
    """Do the stages that are missing or stale, then load and check everything.

    Before a tokenizer or training tokens are made, `check` is called, and may refuse it. Raises FileNotFoundError or
    ValueError naming the file or field.
    """
    data = config.data
    tokenizer_path, train_path, valid_path = (
        Path(str(p)) for p in (data.tokenizer_path, data.train_tokens, data.valid_tokens)
    )
    for name, path in (("tokenizer", tokenizer_path), ("train_tokens", train_path), ("valid_tokens", valid_path)):
        if path.is_dir():
            raise ValueError(f"data.{name} {path} is a folder: it must be a file, or a name that is free")
    if config.skip_data:
        for name, path in (("train_tokens", train_path), ("valid_tokens", valid_path)):
            if not path.is_file():
                raise FileNotFoundError(
                    f"data.{name} {path} does not exist, and --skip_data was given: leave it out to make the file"
                )
        logger.info("data: as it is (--skip_data)")
        return _load(config, tokenizer_path, train_path, valid_path)
    if _is_given(config, train_path) and _is_given(config, valid_path):
        logger.info("data: %s and %s were not made here, used as they are", train_path, valid_path)
        return _load(config, tokenizer_path, train_path, valid_path)
    if train_path.resolve() == valid_path.resolve():
        raise ValueError(
            f"data.valid_tokens is {data.valid_tokens!r}: it must be another file than data.train_tokens, because both "
            "are to be made (--skip_data takes a file that is there as it is)"
        )
    if data.source == "text" and not data.train_text:
        raise ValueError(
            f"data.train_text is {shown(data.train_text)}: it must be a path, because data.source is 'text' and "
            f"{train_path} and {valid_path} are not both files of your own"
        )
    make = _make_random_tokens if data.source == "random" else _make_tokens_from_text
    with one_at_a_time(train_path.parent):  # also to load: what is mapped stays, whatever another run makes later
        make(config, check, tokenizer_path, train_path, valid_path)
        return _load(config, tokenizer_path, train_path, valid_path)


def _load(config: RunConfig, tokenizer_path: Path, train_path: Path, valid_path: Path) -> PreparedData:
    shape = config.model.shape
    tokenizer = _find_tokenizer(config, tokenizer_path, train_path)
    if tokenizer is not None and tokenizer.vocab_size > shape.vocab_size:
        raise ValueError(
            f"model.vocab_size is {shape.vocab_size}: it must be at least {tokenizer.vocab_size}, the size of the "
            f"tokenizer {tokenizer_path}"
        )
    for path in dict.fromkeys((train_path, valid_path)):
        if sidecar_path(path).is_file() and not has_sidecar(path):
            logger.info("data: %s is no sidecar of %s, ignored", sidecar_path(path), path)
    made_with = {path: _made_with(path) for path in (train_path, valid_path)}
    is_brought = tokenizer is not None and _is_given(config, tokenizer_path)  # and so vouched for
    if not is_brought and config.data.source != "random" and len(set(made_with.values())) > 1:
        raise ValueError(
            f"token files {train_path} and {valid_path} are not known to be of one tokenizer: give data.train_tokens "
            "and data.valid_tokens that are, or data.tokenizer"
        )
    for path, sha256 in made_with.items():
        if tokenizer is not None and sha256 and sha256 != tokenizer.sha256:
            raise ValueError(f"token file {path} was not made with the tokenizer {tokenizer_path}, its sidecar says")
    train, valid = (load_tokens(path, shape.vocab_size, min_count=0) for path in (train_path, valid_path))
    for name, path, tokens in (("train", train_path, train), ("valid", valid_path, valid)):
        if len(tokens) <= shape.context_length:
            raise ValueError(
                f"data.{name}_tokens {path}{_made_from(config, name, path)} holds {len(tokens)} tokens: at least "
                f"{shape.context_length + 1} are needed, one more than model.context_length: give a longer text or a "
                "smaller model.context_length"
            )
    _compare_kinds(train_path, valid_path, train, valid, shape.vocab_size)
    return PreparedData(train, valid, tokenizer, sha256_of_file(train_path))


def _compare_kinds(train_path: Path, valid_path: Path, train: Tokens, valid: Tokens, vocab_size: int) -> None:
    """Warn if validation is on the training tokens, or on another kind of text.

    Of some 60 texts, the divergence was at most 2.1 times that between parts of the training text where both were of
    one kind (plays, stories, code of a project, JSON), and at least 2.7 times where the last tenth was another kind.
    """
    if train_path.resolve() == valid_path.resolve():
        logger.warning("data: validation is on the training tokens themselves, so its loss says nothing about new text")
    found, usual = divergence_of_kind(train, valid, vocab_size)
    if found > max(2.5 * usual, usual + 0.05):
        logger.warning(
            "data: %s is another kind of text than %s: their token frequencies differ by %.2f nats, those of parts of "
            "the training text by %.2f. Shuffle the documents before the text is split, or validate on text of the "
            "same kind", valid_path, train_path, found, usual
        )  # fmt: skip


def _find_tokenizer(config: RunConfig, path: Path, train_path: Path) -> Tokenizer | None:
    """The tokenizer of the training tokens: the one that is given or, if it has made them, that of data_dir.

    Raises FileNotFoundError for a file that is given and not there.
    """
    data = config.data
    if data.source == "random" and is_own(data, path):
        return None
    if path.is_file():
        tokenizer = Tokenizer.load(path)
        if data.tokenizer is not None or _made_with(train_path) == tokenizer.sha256:
            return tokenizer
    elif data.tokenizer is not None and not is_own(data, path):
        raise FileNotFoundError(
            f"data.tokenizer {path} does not exist: it must be the tokenizer that made {train_path}"
        )
    logger.warning("data: no tokenizer is known for %s, so no text will be sampled: give --data.tokenizer", train_path)
    return None


def _made_with(path: Path) -> str:
    """SHA-256 of the tokenizer that made a token file, as its sidecar says; empty where that is not known."""
    return read_info(path).tokenizer_sha256 if has_sidecar(path) else ""


def _stamp(output: Path) -> Path:
    return output.with_name(f"{output.name}.stamp.json")


def is_own(data: DataConfig, path: Path) -> bool:
    """Whether a file is in data_dir."""
    return path.parent.resolve() == Path(str(data.data_dir)).resolve()


def _is_given(config: RunConfig, output: Path) -> bool:
    """Whether a stage's output is there and not to be made again: not made here, or whole and outside data_dir.

    data_dir's own files follow the text and the vocabulary. What a field names elsewhere, other runs may rely on.
    """
    stamp = _stamp(output)
    if not output.is_file() or not stamp.is_file():
        return output.is_file()
    return not is_own(config.data, output) and _read_stamp(stamp).get("inputs") is not None


def _made_from(config: RunConfig, name: str, path: Path) -> str:
    """What a token file was made from, by the fields that say it; empty if it was not made here."""
    data = config.data
    if config.skip_data or _is_given(config, path) or data.source not in ("stories", "text"):
        return ""
    fields = ["story_chars" if data.source == "stories" else "train_text"]
    if name == "valid":
        fields = ["valid_fraction", *fields] if data.valid_text is None else ["valid_text"]
    return f", made from {' and '.join(f'data.{field} {getattr(data, field)}' for field in fields)},"


def _stage(
    config: RunConfig,
    name: str,
    output: Path,
    inputs: dict[str, Any],
    make: Callable[[], None],
    *companions: Path,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Make `output`, unless it is there as its stamp describes it and was made from the same inputs.

    What `_is_given` is used as it is, and never overwritten. If the output has to be made, `check` may refuse before
    anything is touched. Raises ValueError for a companion that was not made here.
    """
    stamp = _stamp(output)
    if _is_given(config, output):
        logger.info("%s: %s was not made here, used as it is", name, output)
        return
    for companion in companions:
        if companion.is_file() and not stamp.is_file():
            raise ValueError(f"{companion} was not made here, but is to be written beside {output}: move one of them")
    why = "which does not exist"
    if output.is_file():
        known = _read_stamp(stamp)
        if known == {"inputs": inputs, "sha256": _hashes(output, *companions)}:
            logger.info("%s: %s is up to date, skipped", name, output)
            return
        why = "because the text or its settings changed, or the file is damaged"
    check()
    # A person who mistyped the name of a file that they have reads it here.
    logger.info("%s: making %s, %s", name, output, why)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_json(stamp, {"inputs": None, "sha256": None})  # marks it unfinished: if this is cut short, it is made again
    make()
    write_json(stamp, {"inputs": inputs, "sha256": _hashes(output, *companions)})


def _hashes(*paths: Path) -> dict[str, str | None]:
    return {path.name: sha256_of_file(path) if path.is_file() else None for path in paths}


def _read_stamp(path: Path) -> dict[str, Any]:
    try:
        stamp = json.loads(path.read_text())
    except ValueError:
        return {}
    return stamp if isinstance(stamp, dict) else {}


def _require_space(field: str, value: int, sizes: list[tuple[Path, int]]) -> None:
    """Raise a ValueError that names the field if files of these sizes do not fit on the disks of their folders."""
    needed: dict[int, int] = {}
    for path, size in sizes:
        path.parent.mkdir(parents=True, exist_ok=True)
        disk = path.parent.stat().st_dev
        needed[disk] = needed.get(disk, 0) + size
    for path, _ in sizes:
        need, free = needed[path.parent.stat().st_dev], shutil.disk_usage(path.parent).free
        if need > free:
            raise ValueError(
                f"{field} is {value}: the files made from it take up to {need:,} bytes, and the disk of {path.parent} "
                f"has {free:,} bytes free"
            )


def _make_random_tokens(
    config: RunConfig, check: Callable[[], None], tokenizer_path: Path, train_path: Path, valid_path: Path
) -> None:
    data, vocab_size = config.data, config.model.shape.vocab_size
    # A tenth is enough to validate on, but never less than two sequences.
    shares = (train_path, data.random_tokens), (valid_path, data.random_tokens // 10)
    files = [(path, max(count, 2 * config.model.shape.context_length + 2)) for path, count in shares]
    sizes = [(path, count * token_dtype(vocab_size).itemsize) for path, count in files]
    for i, (path, count) in enumerate(files):
        inputs = {"random_tokens": count, "seed": data.seed, "split": i, "vocab_size": vocab_size}

        def make(path: Path = path, count: int = count, seed: tuple[int, int] = (data.seed, i)) -> None:
            rng = np.random.default_rng(seed)
            chunks = (rng.integers(0, vocab_size, min(1 << 22, count - n)) for n in range(0, count, 1 << 22))
            write_tokens(path, chunks, vocab_size, source=f"random, seed {seed}")

        def check_all(i: int = i) -> None:
            if i == 0:
                check()
            _require_space("data.random_tokens", data.random_tokens, sizes[i:])

        _stage(config, "tokens", path, inputs, make, sidecar_path(path), check=check_all)


def _make_tokens_from_text(
    config: RunConfig, check: Callable[[], None], tokenizer_path: Path, train_path: Path, valid_path: Path
) -> None:
    vocab_size = config.model.shape.vocab_size
    if not _is_given(config, tokenizer_path):
        check_vocab_size(vocab_size, "model.vocab_size")  # before anything is fetched
    train_text, valid_text = find_texts(config)
    inputs = {"text": train_text.fingerprint, "vocab_size": vocab_size, "algorithm": "byte-level BPE, GPT-2 words"}
    # Training the tokenizer holds every distinct word of its text with the places of its pairs: memory grows with the
    # text.
    sample_bytes, text_bytes = config.data.tokenizer_sample_bytes, train_text.size
    if text_bytes > sample_bytes:
        inputs["sample_bytes"] = sample_bytes

    def train_tokenizer() -> None:
        blocks = train_text.blocks()
        if text_bytes > sample_bytes:
            logger.info(
                "tokenizer: trained on an evenly spaced sample of %s of the text's %s bytes "
                "(data.tokenizer_sample_bytes)",
                f"{sample_bytes:,}",
                f"{text_bytes:,}",
            )
            blocks = sample_evenly(blocks, sample_bytes, text_bytes)
        tokenizer = Tokenizer.train(blocks, vocab_size)
        tokenizer.save(tokenizer_path)
        if tokenizer.vocab_size < vocab_size:
            logger.warning(
                "the text has words for a vocabulary of %d, not %d: the rest of the model's vocabulary stays unused",
                tokenizer.vocab_size,
                vocab_size,
            )

    _stage(config, "tokenizer", tokenizer_path, inputs, train_tokenizer, check=check)
    tokenizer = Tokenizer.load(tokenizer_path)
    for text, path in ((train_text, train_path), (valid_text, valid_path)):
        inputs = {"text": text.fingerprint, "tokenizer": tokenizer.sha256, "vocab_size": tokenizer.vocab_size}

        def encode(text: TextSpan = text, path: Path = path) -> None:
            info = write_tokens(
                path,
                tokenizer.encode_stream(text.blocks(), f"text file {text.path}"),
                tokenizer.vocab_size,
                tokenizer_sha256=tokenizer.sha256,
                source=str(text.path),
            )
            bytes_per_token = text.size / max(info.count, 1)
            logger.info("tokens: %s has %s tokens, %.1f bytes a token", path, f"{info.count:,}", bytes_per_token)
            # A byte-level tokenizer gives at most a token a byte, and a token is rarely more than a word.
            if not 0.95 <= bytes_per_token < 16:
                logger.warning(
                    "tokens: %.1f bytes a token is far from the usual 1 to 6: is %s the right tokenizer for %s?",
                    bytes_per_token,
                    tokenizer_path,
                    text.path,
                )

        may_refuse = {"check": check} if path == train_path else {}
        _stage(config, "tokens", path, inputs, encode, sidecar_path(path), **may_refuse)


def find_texts(config: RunConfig) -> tuple[TextSpan, TextSpan]:
    """The texts to train and to validate on, generated or fetched if they have to be."""
    data = config.data
    folder = Path(str(data.data_dir))
    if data.source == "tinystories":
        train, valid = (fetch_tinystories(name, folder) for name in TINYSTORIES_SHA256)
        return train, valid
    if data.source == "stories":
        text_path = folder / "stories.txt"
        chars = data.story_chars
        inputs = {"story_chars": chars, "seed": data.seed, "generator": _code_version()}
        # The text is ASCII; how many tokens it makes is known only afterwards, but never more than it has characters.
        width, valid_chars = token_dtype(config.model.shape.vocab_size).itemsize, int(chars * data.valid_fraction)
        sizes = [
            (text_path, chars),
            (Path(str(data.train_tokens)), (chars - valid_chars) * width),
            (Path(str(data.valid_tokens)), valid_chars * width),
        ]
        _stage(
            config,
            "text",
            text_path,
            inputs,
            lambda: _write_stories(text_path, data.seed, chars),
            check=lambda: _require_space("data.story_chars", chars, sizes),
        )
    else:
        text_path = Path(str(data.train_text))
    whole = _whole_text(text_path)
    if data.valid_text is not None:
        return whole, _whole_text(Path(data.valid_text))
    cut = find_split(text_path, data.valid_fraction)
    return TextSpan(text_path, whole.sha256, 0, cut), TextSpan(text_path, whole.sha256, cut)


def _whole_text(path: Path) -> TextSpan:
    first = next(read_utf8(path))  # which fails at once for a file that is missing, empty or not UTF-8
    beginning = first[:1024]
    if beginning.count("\0") > len(beginning) // 4:  # UTF-16 has one beside every ASCII character
        offset = len(beginning[: beginning.index("\0")].encode())
        raise ValueError(f"text file {path} must be UTF-8 text: NUL bytes, from byte {offset} on, look like UTF-16")
    return TextSpan(path, sha256_of_file(path))


def _code_version() -> str:
    from cs336_basics import stories as module

    return sha256_of_file(module.__file__)


def _write_stories(path: Path, seed: int, chars: int) -> None:
    with written_whole(path) as beside, beside.open("w", encoding="utf-8") as file:
        file.writelines(stories(seed, chars))
