"""Token files and batches: a memory-mapped array of token IDs in, input and target sequences out.

A token file is a plain .npy array of uint16 (uint32 where the vocabulary needs it) with a JSON sidecar beside it.
"""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .files import continued, sha256_of_file, write_json


@dataclass(frozen=True, kw_only=True)
class TokenFileInfo:
    """The sidecar of a token file. `tokenizer_sha256` is empty if the tokens did not come from a tokenizer."""

    count: int
    vocab_size: int
    sha256: str
    tokenizer_sha256: str
    source: str


def sidecar_path(path: str | os.PathLike[str]) -> Path:
    """The path of a token file's JSON sidecar: train.npy -> train.json, train -> train.json."""
    return Path(f"{str(path).removesuffix('.npy')}.json")


def has_sidecar(path: str | os.PathLike[str]) -> bool:
    """Whether a token file has a sidecar, recognised by the field tokenizer_sha256.

    Another JSON file may have the sidecar's name, such as a data set's own train.json. It may be large, so only its
    beginning is read.
    """
    sidecar = sidecar_path(path)
    if not sidecar.is_file():
        return False
    with sidecar.open("rb") as file:
        return b'"tokenizer_sha256"' in file.read(1 << 12)


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned type of a token file that holds every ID below vocab_size."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def write_tokens(
    path: str | os.PathLike[str],
    chunks: Callable[[int], Iterable[npt.ArrayLike]],
    vocab_size: int,
    *,
    tokenizer_sha256: str = "",
    source: str,
    inputs: dict[str, Any],
) -> TokenFileInfo:
    """Write a stream of lists of token IDs as a token file with its sidecar, without holding it in memory.

    chunks: gives the lists from a number on. If it breaks off, the next call with equal inputs goes on there. Both
    files appear complete or not at all; the sidecar is written last. Raises ValueError for an ID that is not from 0 to
    vocab_size - 1, and OSError naming the file.
    """
    dtype, sidecar = token_dtype(vocab_size), sidecar_path(path)
    with continued(path, inputs) as tokens:
        done, count = tokens.state or (0, 0)
        if not done:
            # NumPy leaves room in the header for the count to grow, so the header can be rewritten at the end.
            _write_header(tokens.file, 0, dtype)
        for number, chunk in enumerate(chunks(done), done + 1):
            ids = np.asarray(chunk)
            wrong = ids[(ids < 0) | (ids >= vocab_size)]
            if wrong.size:
                raise ValueError(f"token ID {wrong[0]} for {path}: it must be from 0 to {vocab_size - 1}")
            tokens.file.write(ids.astype(dtype).tobytes())
            count += len(ids)
            tokens.mark((number, count))
        tokens.file.seek(0)
        _write_header(tokens.file, count, dtype)
        tokens.file.flush()
        info = TokenFileInfo(
            count=count,
            vocab_size=vocab_size,
            sha256=sha256_of_file(tokens.file.name),
            tokenizer_sha256=tokenizer_sha256,
            source=source,
        )
        sidecar.unlink(missing_ok=True)  # never an old sidecar beside a new array
    write_json(sidecar, asdict(info))
    return info


def _write_header(file: BinaryIO, count: int, dtype: np.dtype) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, header)


def read_info(path: str | os.PathLike[str]) -> TokenFileInfo:
    """Read the sidecar of a token file. Raises FileNotFoundError or ValueError naming the file."""
    sidecar = sidecar_path(path)
    if not sidecar.is_file():
        raise FileNotFoundError(f"token file {path} has no sidecar {sidecar}")
    try:
        return TokenFileInfo(**json.loads(sidecar.read_bytes()))
    except (ValueError, TypeError, RecursionError) as error:
        names = ", ".join(field.name for field in fields(TokenFileInfo))
        raise ValueError(f"token sidecar {sidecar} must be a JSON object with {names}: {error}") from error


def load_tokens(path: str | os.PathLike[str], vocab_size: int) -> npt.NDArray[np.unsignedinteger]:
    """Memory-map a token file and check all of it: dtype, count, and that every ID is below vocab_size.

    Also works without a sidecar (for an array from elsewhere). Raises FileNotFoundError or ValueError naming the file
    and, for an ID that is too large, its offset.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"token file {path} does not exist")
    try:
        tokens = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"token file {path} is truncated or not a .npy array: {error}") from error
    if tokens.ndim != 1 or tokens.dtype not in (np.uint16, np.uint32):
        raise ValueError(
            f"token file {path} holds {tokens.dtype} of shape {tokens.shape}: it must be a one-dimensional array of "
            "uint16 or uint32"
        )
    if has_sidecar(path) and (expected := read_info(path).count) != len(tokens):
        raise ValueError(f"token file {path} holds {len(tokens)} tokens but its sidecar says {expected}")
    for start in range(0, len(tokens), 1 << 24):
        block = tokens[start : start + (1 << 24)]
        if block.max() >= vocab_size:
            offset = start + int((block >= vocab_size).argmax())
            raise ValueError(
                f"token file {path} has ID {tokens[offset]} at offset {offset}: IDs must be below the vocabulary size "
                f"of {vocab_size}"
            )
    return tokens


def get_batch(
    tokens: npt.NDArray[np.integer],
    batch_size: int,
    context_length: int,
    device: str | torch.device = "cpu",
    rng: np.random.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw batch_size sequences at random: inputs, and targets one token later, both (B, T) int64 on `device`."""
    rng = rng or np.random.default_rng()
    starts = rng.integers(0, count_starts(tokens, context_length), size=batch_size)
    both = gather_sequences(tokens, starts, context_length).to(device)
    return both[:, :-1], both[:, 1:]


def count_starts(tokens: npt.NDArray[np.integer], context_length: int) -> int:
    """The number of places at which a sequence with its targets can start. Raises ValueError if there are none."""
    count = len(tokens) - context_length
    if count < 1:
        raise ValueError(
            f"{len(tokens)} tokens are too few for context_length {context_length}: at least {context_length + 1} "
            "are needed"
        )
    return count


def gather_sequences(tokens: npt.NDArray[np.integer], starts: npt.NDArray[np.integer], context_length: int) -> Tensor:
    """The sequences at `starts`, each with one more token, (B, T + 1) int64: inputs are [:, :-1], targets [:, 1:]."""
    windows = np.stack([tokens[s : s + context_length + 1] for s in starts.tolist()]).astype(np.int64)
    return torch.from_numpy(windows)


def sequence_starts(seed: int, first: int, count: int, num_starts: int) -> npt.NDArray[np.int64]:
    """Where sequences first .. first+count-1 of a run start: a pure function of (seed, k), uniform below num_starts.

    So the position in the data is one integer, and any division of a batch over processes gives the same sequences. The
    function is SplitMix64 (Steele, Lea & Flood 2014): its k-th output is a
    mix of seed' + k * gamma and does not depend on earlier outputs.
    """
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is intended
        k = np.arange(first, first + count, dtype=np.uint64) + np.uint64(1)
        # Mix the seed first, so that seeds s and s+1 do not give neighbouring sequences.
        state = _mix64(np.array([seed], dtype=np.int64).astype(np.uint64)) + k * np.uint64(0x9E3779B97F4A7C15)
        return (_mix64(state) % np.uint64(num_starts)).astype(np.int64)


def _mix64(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def divergence_of_kind(
    train: npt.NDArray[np.integer], valid: npt.NDArray[np.integer], vocab_size: int, max_tokens: int = 1 << 20
) -> tuple[float, float]:
    """Divergence of token frequencies between validation and training text, and within the training text.

    Both are Jensen-Shannon divergences in nats (Lin 1991), from 0 to log 2. The second compares each of eight evenly
    spaced parts of the training text with the other seven, and is their median. The validation text counts up to
    max_tokens and an eighth of the training text; a part is as long. Short texts diverge more, so the first number
    means something only beside the second.
    """
    length = min(len(valid), len(train) // 8, max_tokens)
    if length == 0:
        return 0.0, 0.0
    starts = np.linspace(0, len(train) - length, 8, dtype=np.int64)
    parts = np.stack([np.bincount(train[start : start + length], minlength=vocab_size) for start in starts])
    rests = parts.sum(0) - parts
    between = [_jensen_shannon(part, rest) for part, rest in zip(parts, rests, strict=True)]
    return _jensen_shannon(np.bincount(valid[:length], minlength=vocab_size), parts.sum(0)), float(np.median(between))


def _jensen_shannon(counts: npt.NDArray[np.int64], others: npt.NDArray[np.int64]) -> float:
    p, q = counts / counts.sum(), others / others.sum()
    middle = (p + q) / 2
    return float(sum((r[r > 0] * np.log(r[r > 0] / middle[r > 0])).sum() for r in (p, q)) / 2)


def unigram_bigram_entropy(tokens: npt.NDArray[np.integer], max_tokens: int = 10_000_000) -> tuple[float, float]:
    """Unigram and bigram entropy of a text in nats per token: H(x_t) and H(x_t | x_{t-1}).

    Both are plug-in estimates from the text's own counts (of its first max_tokens), so no unigram or bigram model can
    score lower on this text. On a short text with a large vocabulary the bigram entropy is far below the loss of any
    model that has not seen the text; `bigram_model_loss` is the loss of such a model.
    """
    ids = np.asarray(tokens[:max_tokens], dtype=np.int64)

    def entropy(symbols: npt.NDArray[np.int64]) -> float:
        counts = np.unique(symbols, return_counts=True)[1]
        p = counts / counts.sum()
        return float(-(p * np.log(p)).sum())

    if len(ids) < 2:
        return 0.0, 0.0
    pairs = ids[:-1] * (ids.max() + 1) + ids[1:]
    return entropy(ids), entropy(pairs) - entropy(ids[:-1])


def bigram_model_loss(
    train: npt.NDArray[np.integer], valid: npt.NDArray[np.integer], vocab_size: int, max_tokens: int = 10_000_000
) -> float:
    """Loss of a bigram model, a table of the training text's pair counts, on the validation text, in nats per token.

    Witten-Bell smoothing (1991, method C): p(b | a) = (c(a b) + T(a) p(b)) / (c(a) + T(a)), where T(a) is the number of
    different tokens that followed a, and p(b) = (c(b) + 1) / (N + V). Uses the first max_tokens of each text.
    """
    seen = np.asarray(train[:max_tokens], dtype=np.int64)
    pairs, pair_counts = np.unique(seen[:-1] * vocab_size + seen[1:], return_counts=True)
    followers = np.bincount(pairs // vocab_size, minlength=vocab_size)
    before = np.bincount(seen[:-1], minlength=vocab_size)
    unigram = (np.bincount(seen, minlength=vocab_size) + 1) / (len(seen) + vocab_size)

    text = np.asarray(valid[:max_tokens], dtype=np.int64)
    a, b = text[:-1], text[1:]
    index = np.searchsorted(pairs, a * vocab_size + b).clip(max=len(pairs) - 1)
    count = np.where(pairs[index] == a * vocab_size + b, pair_counts[index], 0)
    known = before[a] + followers[a]
    p = np.where(known > 0, (count + followers[a] * unigram[b]) / np.maximum(known, 1), unigram[b])
    return float(-np.log(p).mean())
