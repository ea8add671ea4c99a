"""A byte-level BPE tokenizer: trained and run by the `tokenizers` library, fed from files that may not fit in memory.

A tokenizer that is trained here has GPT-2's pre-tokenizer and one special token, `<|endoftext|>`; every UTF-8 text
decodes back exactly. Any other tokenizer.json of the library can be loaded too, if its documents end with one of
`ENDS_OF_TEXT`, which then stands for `<|endoftext|>` in texts.
"""

import codecs
import copy
import functools
import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from .files import replaced

END_OF_TEXT = "<|endoftext|>"
ENDS_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>")
"""The token after a document: of GPT-2, SmolLM and Qwen; of Llama 3; of Llama 2, TinyLlama and Mistral."""
COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json")
"""Files beside a tokenizer.json of Hugging Face, such as its chat template. They go with it from folder to folder."""
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
DOCUMENT_END = "\n\uffff"
"""Stands after each document of a text in which `<|endoftext|>` and other special tokens are text like any other.

Unicode reserves U+FFFF for programs' own use. The newline lets the text be cut here, whatever the pre-tokenizer.
"""
MIN_VOCAB_SIZE = 256 + 1  # every byte, and END_OF_TEXT

_READ_BYTES = 1 << 20  # bytes per read
_PIECE_CHARS = 1 << 16  # a piece of text ends at the first possible place after this many characters
_BATCH_CHARS = 1 << 22  # characters that the library encodes in parallel
_LONGEST_WORD = 1 << 10  # for training, a very long word is cut into parts of this length
_LONGEST_PIECE = 1 << 27  # takes 19 GB, because the library needs about 140 bytes per character

# Where a text may be cut: a piece ends where the pattern begins.
_WORD = re.compile(r"(?<=\S)[ \n]")  # Python's \s covers all of Unicode's White_Space, so \S is always visible text
_DOCUMENT = re.compile(re.escape(END_OF_TEXT))
_NOWHERE = re.compile(r"(?!)")


def check_vocab_size(vocab_size: int, name: str = "vocab_size") -> None:
    """Raise ValueError, naming the field, for a vocabulary too small to train a tokenizer to."""
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(
            f"{name} is {vocab_size}: it must be at least {MIN_VOCAB_SIZE} to train a tokenizer, for 256 bytes and "
            f"{END_OF_TEXT}"
        )


def read_utf8(
    path: str | os.PathLike[str], start: int = 0, end: int | None = None, name: str = "text file"
) -> Iterator[str]:
    """Yield the text of bytes start to end of a file (end None: to its end), in pieces of about a megabyte.

    Raises FileNotFoundError or ValueError with name and path if it is missing, not a regular file, empty, or not UTF-8
    (with the offset of the first invalid byte).
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{name} {path} does not exist")
    if not path.is_file():
        raise ValueError(f"{name} {path} is not a regular file")
    size = path.stat().st_size
    if size == 0:
        raise ValueError(f"{name} {path} is empty")
    end = size if end is None else min(end, size)
    decoder = codecs.getincrementaldecoder("utf-8")()
    with path.open("rb") as file:
        file.seek(start)
        position = start
        while position < end:
            pending = len(decoder.getstate()[0])  # bytes of an incomplete character, left from the previous read
            block = file.read(min(_READ_BYTES, end - position))
            if not block:
                raise ValueError(f"{name} {path} became shorter while it was read")
            try:
                text = decoder.decode(block, final=position + len(block) == end)
            except UnicodeDecodeError as error:
                offset = position - pending + error.start
                raise ValueError(f"{name} {path} must be UTF-8 text: {error.reason} at byte {offset}") from error
            position += len(block)
            if text:
                yield text


def _batches(pieces: Iterable[str]) -> Iterator[list[str]]:
    """Lists of pieces, each of at least _BATCH_CHARS characters but for the last."""
    batch: list[str] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece)
        if characters >= _BATCH_CHARS:
            yield batch
            batch, characters = [], 0
    yield batch


def split_pieces(
    blocks: Iterable[str],
    piece_chars: int = _PIECE_CHARS,
    cut: re.Pattern[str] = _WORD,
    longest_piece: float = math.inf,
    name: str = "the text",
) -> Iterator[str]:
    """Cut a stream of text into pieces of about piece_chars that tokenize separately to the same IDs as together.

    By default it cuts where visible text is followed by a space or a newline. GPT-2's pre-tokenizer always ends a word
    there: none of its patterns looks further back, and its only look-ahead concerns the end of a run of white space.
    Text without such a place stays in one piece. Raises ValueError, with the name of the text, if that grows longer
    than longest_piece characters.
    """
    held: list[str] = []
    held_chars = 0
    for block in blocks:
        held.append(block)
        held_chars += len(block)
        if held_chars < piece_chars or not cut.search(block):
            if held_chars > longest_piece:
                raise ValueError(
                    f"{name} has more than {longest_piece:,} characters that the tokenizer must encode together: put "
                    f"{END_OF_TEXT} between documents"
                )
            continue
        text = "".join(held)
        start = 0
        while found := cut.search(text, start + piece_chars):
            yield text[start : found.start()]
            start = found.start()
        held, held_chars = [text[start:]], len(text) - start
    if held_chars:
        yield "".join(held)


def documents_of(blocks: Iterable[str]) -> Iterator[str]:
    """The documents of a stream of text, which END_OF_TEXT separates. Those of white space are left out."""
    for piece in split_pieces(blocks, 1, _DOCUMENT):
        yield from (document for document in piece.split(END_OF_TEXT) if document.strip())


def _break_up(part: str) -> Iterator[str]:
    """Yield the text itself, or pieces of it if it is a word too long to learn pairs from in reasonable time."""
    if len(part) <= 2 * _PIECE_CHARS:
        yield part
    else:
        yield from (part[start : start + _LONGEST_WORD] for start in range(0, len(part), _LONGEST_WORD))


def sample_evenly(blocks: Iterable[str], sample_bytes: int, text_bytes: int) -> Iterator[str]:
    """Yield every n-th piece of a stream of text_bytes, so that the pieces add up to about sample_bytes.

    A piece is taken whenever the share of the sample already taken does not exceed the share of the text already seen.
    So the sample deviates from an even spread by at most one piece. Pieces begin and end where `split_pieces` cuts.
    """
    seen = taken = 0
    for piece in split_pieces(blocks):
        for part in _break_up(piece):
            size = len(part.encode())
            if taken * text_bytes <= seen * sample_bytes:
                taken += size
                yield part
            seen += size


def _where_to_cut(tokenizer: tokenizers.Tokenizer, end_of_text: str) -> re.Pattern[str]:
    """Where a text may be cut for this tokenizer, so that its pieces have the IDs of the whole.

    GPT-2's pre-tokenizer lets it be cut between words. Others may join a newline to the word before it, or treat the
    start of a text in their own way. But the library takes end_of_text out of a text before it normalizes and
    pre-tokenizes the parts in between. So a text can be cut before an end_of_text that no other token reaches into.
    """
    words, added = tokenizer.pre_tokenizer, tokenizer.get_added_tokens_decoder().values()
    if (
        isinstance(words, pre_tokenizers.ByteLevel)
        and (words.use_regex, words.add_prefix_space, tokenizer.normalizer) == (True, False, None)
        and not any(token.rstrip or _WORD.search(token.content) for token in added)
    ):
        return _WORD
    for token in added:
        tails = [token.content[start:] for start in range(1, len(token.content))]
        if token.content == end_of_text:
            if token.lstrip or (token.normalized and tokenizer.normalizer is not None):
                return _NOWHERE
        elif any(end_of_text.startswith(tail) or tail.startswith(end_of_text) for tail in tails):
            return _NOWHERE
    return _DOCUMENT


class Tokenizer:
    """Text to token IDs and back. `train` or `load` creates one; `save` writes the library's own tokenizer.json.

    Encoding is complete and deterministic: truncation and padding, which transformers may leave in a file, are switched
    off, and BPE dropout is refused.
    """

    def __init__(self, library_tokenizer: tokenizers.Tokenizer) -> None:
        library_tokenizer.no_truncation()
        library_tokenizer.no_padding()
        self._tokenizer = library_tokenizer
        ends = {end: number for end in ENDS_OF_TEXT if (number := library_tokenizer.token_to_id(end)) is not None}
        if not ends:
            raise ValueError(f"the tokenizer has no token {END_OF_TEXT} (or {', '.join(ENDS_OF_TEXT[1:])})")
        self.end_of_text, end = next(iter(ends.items()))
        if dropout := getattr(library_tokenizer.model, "dropout", None):
            raise ValueError(f"model.dropout is {dropout:g}: it must be null, or a text has other tokens each time")
        if self.encode(f"a{END_OF_TEXT}a").count(end) != 1:
            raise ValueError(
                f"the tokenizer does not find {self.end_of_text} in a text: it must be in added_tokens, single_word "
                "false"
            )
        self.end_of_text_id: int = end
        self.companions: dict[str, bytes] = {}
        self.special_ids: dict[str, int | list[int]] = dict.fromkeys(_SPECIAL_IDS[:2], end)
        self._cut = _where_to_cut(library_tokenizer, self.end_of_text)

    @classmethod
    def train(cls, blocks: Iterable[str], vocab_size: int, separator: str = END_OF_TEXT) -> "Tokenizer":
        """Train on a stream of text until the vocabulary has vocab_size tokens (fewer if the text runs out of pairs).

        separator: stands between documents, END_OF_TEXT or DOCUMENT_END.
        Raises ValueError for a vocabulary too small for the 256 bytes and the special token.
        """
        check_vocab_size(vocab_size)
        tokenizer = tokenizers.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        # The trainer does not remove special tokens from the text, so they are removed here.
        documents = (
            word for piece in split_pieces(blocks) for part in piece.split(separator) for word in _break_up(part)
        )
        tokenizer.train_from_iterator(documents, trainer)
        return cls(tokenizer)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """Read a tokenizer.json and its companions. Raises FileNotFoundError or ValueError naming the file."""
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"tokenizer file {path} does not exist")
        try:
            tokenizer = cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"tokenizer file {path} cannot be loaded: {error}") from error
        beside = [path.with_name(name) for name in COMPANIONS]
        tokenizer.companions = {file.name: file.read_bytes() for file in beside if file.is_file()}
        tokenizer._find_special_ids(path.parent)
        return tokenizer

    def _find_special_ids(self, folder: Path) -> None:
        """Read the IDs in generation_config.json, or make that of those in config.json, as transformers does."""
        for name in ("generation_config.json", "config.json"):
            try:
                found = json.loads((folder / name).read_bytes())
                ids = {key: found[key] for key in _SPECIAL_IDS if found.get(key) is not None}
            except (OSError, ValueError, AttributeError, RecursionError):
                continue
            if ids:
                self.special_ids = ids
                self.companions.setdefault("generation_config.json", json.dumps(ids, indent=2).encode())
                return

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write tokenizer.json and its companions, each whole. Raises OSError naming the file."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as beside:
            beside.write_text(self._tokenizer.to_str(pretty=True), encoding="utf-8")
        for name, content in self.companions.items():
            with replaced(Path(path).with_name(name)) as beside:
                beside.write_bytes(content)

    @property
    def vocab_size(self) -> int:
        """Number of token IDs, including the special token."""
        return self._tokenizer.get_vocab_size()

    @property
    def stop_ids(self) -> list[int]:
        """The tokens that end a text: the model's own, such as the end of a turn in a chat, and the end of text."""
        eos = self.special_ids.get("eos_token_id", [])
        return [*(eos if isinstance(eos, list) else [eos]), self.end_of_text_id]

    @property
    def sha256(self) -> str:
        """SHA-256 of the tokenizer's JSON form. Tokenizers that give different IDs have different hashes.

        Truncation and padding settings of a loaded file do not change it.
        """
        return hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The token IDs of a text; each `<|endoftext|>` in it becomes the special token's ID."""
        return self._tokenizer.encode(self._with_own_end(text), add_special_tokens=False).ids

    @functools.cached_property
    def beginning(self) -> list[int]:
        """The tokens that go before every text, such as Llama's; none for most tokenizers."""
        whole = self._tokenizer.encode("a")
        before = itertools.takewhile(lambda token: token[1], zip(whole.ids, whole.special_tokens_mask, strict=True))
        return [number for number, _ in before]

    @functools.cached_property
    def between(self) -> list[int]:
        """The tokens between two texts: an end of text, and the `beginning` of the next if it is another token."""
        return [self.end_of_text_id, *(token for token in self.beginning if token != self.end_of_text_id)]

    @property
    def text_start_id(self) -> int:
        """The token after which a text begins, the last one `between` texts."""
        return self.between[-1]

    def encode_prompt(self, text: str) -> list[int]:
        """The IDs of a text to continue, after the `beginning`, which a chat's template may have put there already.

        Without such a token an empty text is an end of text, after which a new one begins.
        """
        ids, beginning = self.encode(text), self.beginning
        return (ids if ids[: len(beginning)] == beginning else [*beginning, *ids]) or [self.end_of_text_id]

    def _with_own_end(self, text: str) -> str:
        return text if self.end_of_text == END_OF_TEXT else text.replace(END_OF_TEXT, self.end_of_text)

    def encode_document(self, text: str) -> list[int]:
        """The token IDs of a text in which special tokens are text like any other."""
        return self._literal.encode(text, add_special_tokens=False).ids

    def encode_stream(
        self, blocks: Iterable[str], name: str = "the text", separator: str | None = None, first: int = 0
    ) -> Iterator[list[int]]:
        """Yield the IDs of a stream of text, one list per piece; concatenated they equal `encode` of the whole text.

        first: the piece, counted from 0, at which to begin.

        With a separator, END_OF_TEXT or DOCUMENT_END, they are those of `encode_document` of what stands between, with
        the tokens `between` texts in place of each separator, and those of a `beginning` before the first text.

        Pieces go to the library in batches, which it spreads over the cores. With GPT-2's pre-tokenizer a piece ends
        after a word, with another one before an `<|endoftext|>`. Raises ValueError, naming the text, if a piece would
        have more than 2^27 characters.
        """
        cut, encode = self._cut, self._encode_batch
        if separator is not None:
            document_end = re.compile(f"({re.escape(separator)})")
            cut = cut if cut == _WORD else document_end
            encode = functools.partial(self._encode_parts, separator)
        pieces = split_pieces(blocks, cut=cut, longest_piece=_LONGEST_PIECE, name=name)
        if separator is not None:
            pieces = (part for piece in pieces for part in document_end.split(piece))
        opening = [] if separator is None or first else self.between[1:]
        for batch in _batches(itertools.islice(pieces, first, None)):
            for ids in encode(batch):
                yield [*opening, *ids]
                opening = []

    def _encode_batch(self, batch: list[str]) -> Iterator[list[int]]:
        for encoding in self._tokenizer.encode_batch_fast([*map(self._with_own_end, batch)], add_special_tokens=False):
            yield encoding.ids

    def _encode_parts(self, separator: str, parts: list[str]) -> Iterator[list[int]]:
        for part, encoding in zip(parts, self._literal.encode_batch_fast(parts, add_special_tokens=False), strict=True):
            yield self.between if part == separator else encoding.ids

    @functools.cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """The library's tokenizer, but special tokens in a text are text to it."""
        literal = copy.deepcopy(self._tokenizer)
        literal.encode_special_tokens = True
        return literal

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of token IDs, special tokens included. Bytes that are not UTF-8 become U+FFFD."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
