"""Where a run's text and tokens come from. Imports nothing heavy, so that `cs336 --help` is fast."""

import os
from dataclasses import dataclass
from typing import Any, Literal

from .checks import check_types, require, require_at_least

_FILES = {"tokenizer": "tokenizer.json", "train_tokens": "train.npy", "valid_tokens": "valid.npy"}
_TEXTS_AND_TOKENS = ("train_text", "valid_text", "train_tokens", "valid_tokens")


def _derived_paths(folder: str, train_tokens: str | None) -> dict[str, str]:
    """The paths in data_dir that fields have which are not given."""
    paths = {name: f"{folder}/{file}" for name, file in _FILES.items()}
    if train_tokens not in (None, paths["train_tokens"]):
        del paths["tokenizer"]  # whose tokens are in a file elsewhere is not known
    return paths


def without_derived_paths(data: dict[str, Any]) -> dict[str, Any]:
    """The group `data` of a configuration file, without the paths that follow from its own source and data_dir.

    The resolved form holds them all. Where the command line gives another source or data_dir, they are to follow that.
    """
    source, folder = data.get("source"), data.get("data_dir")
    if source is None or folder is None:
        return data
    derived = {"data_dir": f"data/{source}", **_derived_paths(folder, data.get("train_tokens"))}
    return {name: value for name, value in data.items() if name not in derived or value != derived[name]}


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the text comes from, and where its tokenizer and token files are kept."""

    source: Literal["random", "stories", "text", "tinystories"] = "stories"
    """random: seeded random tokens. stories: the built-in generator. text: your files. tinystories: downloaded."""
    data_dir: str | None = None
    """Folder for text, tokenizer and token files (default: data/SOURCE)."""
    train_text: str | None = None
    """Text file to train on (source text); not needed with both token files of your own."""
    valid_text: str | None = None
    """Text file to validate on (source text; default: the last valid_fraction of train_text)."""
    valid_fraction: float = 0.1
    """Share of train_text to cut off for validation when there is no valid_text."""
    tokenizer: str | None = None
    """Tokenizer file, trained and written there if it is missing and tokens are made (default: DATA_DIR/tokenizer.json;
    for train_tokens elsewhere, only if it has made them)."""
    train_tokens: str | None = None
    """Token file to train on, made if it is missing (default: DATA_DIR/train.npy)."""
    valid_tokens: str | None = None
    """Token file to validate on, made if it is missing (default: DATA_DIR/valid.npy)."""
    tokenizer_sample_bytes: int = 1 << 28
    """Train the tokenizer on at most this many bytes; of a longer text, on an evenly spaced sample of this size."""
    story_chars: int = 4_000_000
    """Characters of text to generate (source stories)."""
    random_tokens: int = 1 << 24
    """Number of tokens to draw (source random)."""
    seed: int = 0
    """Seed of the stories or of the random tokens."""

    def __post_init__(self) -> None:
        check_types(self, "data.")
        if self.source != "text":
            for name in ("train_text", "valid_text"):
                require(
                    getattr(self, name) is None,
                    f"data.{name}",
                    getattr(self, name),
                    f"left out unless data.source is 'text' (it is {self.source!r})",
                )
        require(0 < self.valid_fraction < 1, "data.valid_fraction", self.valid_fraction, "above 0 and below 1")
        require_at_least(self, "data", 10_000, "story_chars")
        require_at_least(self, "data", 2, "random_tokens")
        require_at_least(self, "data", 1 << 16, "tokenizer_sample_bytes")  # one piece of text, see sample_evenly
        require(0 <= self.seed < 1 << 63, "data.seed", self.seed, "at least 0 and below 2^63")
        folder = self.data_dir or f"data/{self.source}"
        object.__setattr__(self, "data_dir", folder)
        for name, path in _derived_paths(folder, self.train_tokens).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, path)
        files = {"the generated text": f"{folder}/stories.txt", "data.tokenizer": self.tokenizer_path}
        files |= {f"data.{name}": getattr(self, name) for name in _TEXTS_AND_TOKENS}
        taken: dict[str, str] = {}
        for name, path in files.items():
            first = name if path is None else taken.setdefault(os.path.realpath(path), name)
            if first == name or (first, name) == ("data.train_tokens", "data.valid_tokens"):
                continue  # one token file for both can be used, but not made: see prepare.py
            accepted = f"another file than {first}"
            if (first, name) == ("data.train_text", "data.valid_text"):
                accepted += ", or left out to validate on the last data.valid_fraction of that file"
            raise ValueError(f"{name} is {path!r}: it must be {accepted}")

    @property
    def tokenizer_path(self) -> str:
        """The file in which the tokenizer is, or is made where there is none."""
        return f"{self.data_dir}/{_FILES['tokenizer']}" if self.tokenizer is None else self.tokenizer
