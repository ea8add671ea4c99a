"""The data settings of a run: source, files, tokenizer."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .checks import check_types, require_at_least, require_field

_FILES = {"tokenizer": "tokenizer.json", "train_tokens": "train.npy", "valid_tokens": "valid.npy"}
_NAMES = ("train_text", "hf_path", "hf_name")


def _default_folder(source: str, *names: str | None) -> str:
    """data/SOURCE, then the path of the user's text or dataset as folders."""
    text = Path(*(str(name) for name in names if name))
    parts = (part.replace("*", "all") for part in text.parts if part not in ("/", ".."))
    return "/".join(("data", str(source), *parts))


def _default_paths(folder: str, train_tokens: str | None) -> dict[str, str]:
    """Default paths of fields that are not set."""
    paths = {name: f"{folder}/{file}" for name, file in _FILES.items()}
    if train_tokens not in (None, paths["train_tokens"]):
        del paths["tokenizer"]  # a file from elsewhere may come from another tokenizer
    return paths


def without_default_paths(data: dict[str, Any]) -> dict[str, Any]:
    """Remove default paths from a configuration file's `data` group, which a resolved file contains.

    Then they follow a --data.source or --data.data_dir on the command line.
    """
    source, folder = data.get("source"), data.get("data_dir")
    if source is None or folder is None:
        return data
    defaults = _default_paths(folder, data.get("train_tokens"))
    default = _default_folder(source, *(data.get(name) for name in _NAMES))
    earlier = str(Path(default).with_suffix(""))  # before folders had the whole name
    defaults["data_dir"] = earlier if folder == earlier else default
    return {name: value for name, value in data.items() if name not in defaults or value != defaults[name]}


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the text comes from, and where its tokenizer and token files are kept."""

    source: Literal["random", "stories", "text", "tinystories", "hf"] = "stories"
    """stories (generated), tinystories, text (your own), hf (a dataset) or random."""
    data_dir: str | None = None
    """Folder for text, tokenizer and token files (default: data/SOURCE, for your own text or dataset
    data/SOURCE/NAME)."""
    train_text: str | None = None
    """Text to train on, for source text: a file, a folder or a pattern such as 'books/*.txt'. Files may be text, .jsonl
    or .parquet, compressed as .gz or .zst too. Not needed if you provide both token files."""
    valid_text: str | None = None
    """Text to validate on, for source text (default: the last valid_fraction of train_text)."""
    text_field: str = "text"
    """Field of .jsonl and .parquet records, or column of a dataset, that has the text."""
    special_tokens_in_text: bool = False
    """Whether <|endoftext|> and other special tokens in texts, records and datasets are tokens, not text. In text files
    <|endoftext|> always separates documents."""
    hf_path: str | None = None
    """Dataset to train on, for source hf: its name on the Hugging Face Hub, or a local folder or file."""
    hf_name: str | None = None
    """Configuration of the dataset, if it has several."""
    hf_split: str = "train"
    """Split of the dataset. Its last valid_fraction is for validation."""
    hf_max_bytes: int | None = None
    """Read only the dataset's first documents, up to this many bytes of text."""
    valid_fraction: float = 0.1
    """Fraction of the text held out for validation if there is no valid_text."""
    tokenizer: str | None = None
    """Tokenizer file, trained if it is missing and tokens must be made (default: DATA_DIR/tokenizer.json; train_tokens
    from another folder use it only if their sidecar says that it made them)."""
    train_tokens: str | None = None
    """Token file to train on, made from the source if it is missing (default: DATA_DIR/train.npy)."""
    valid_tokens: str | None = None
    """Token file to validate on, made from the source if it is missing (default: DATA_DIR/valid.npy)."""
    documents: bool = False
    """Keep attention within each document. Documents end with the tokenizer's end of text."""
    tokenizer_sample_bytes: int = 1 << 28
    """Train the tokenizer on at most this many bytes. A longer text is sampled in evenly spaced pieces."""
    story_chars: int = 4_000_000
    """Number of characters to generate, for source stories."""
    random_tokens: int = 1 << 24
    """Number of tokens to draw, for source random."""
    seed: int = 0
    """Seed of the generated stories or random tokens."""

    def __post_init__(self) -> None:
        check_types(self, "data.")
        require_at_least(self, "data", 1, "hf_max_bytes")
        if self.source != "text":
            accepted = f"left out unless data.source is 'text' (it is {self.source!r})"
            require_field(self, "data.train_text", self.train_text is None, accepted)
            require_field(self, "data.valid_text", self.valid_text is None, accepted)
        if self.source != "hf":
            accepted = f"left out unless data.source is 'hf' (it is {self.source!r})"
            for name in ("hf_path", "hf_name", "hf_split", "hf_max_bytes"):
                require_field(self, f"data.{name}", getattr(self, name) == getattr(DataConfig, name), accepted)
        accepted = "false with data.source 'random', whose tokens are no documents"
        require_field(self, "data.documents", not (self.documents and self.source == "random"), accepted)
        require_field(self, "data.valid_fraction", 0 < self.valid_fraction < 1, "above 0 and below 1")
        require_at_least(self, "data", 10_000, "story_chars")
        require_at_least(self, "data", 2, "random_tokens")
        require_at_least(self, "data", 1 << 16, "tokenizer_sample_bytes")  # one piece of text, see sample_evenly
        require_at_least(self, "data", 0, "seed")
        folder = self.data_dir or _default_folder(self.source, *(getattr(self, name) for name in _NAMES))
        object.__setattr__(self, "data_dir", folder)
        for name, path in _default_paths(folder, self.train_tokens).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, path)
        is_other = self.valid_text is None or os.path.abspath(self.valid_text) != os.path.abspath(self.train_text or "")
        accepted = "another file than data.train_text, or left out to validate on its last data.valid_fraction"
        require_field(self, "data.valid_text", is_other, accepted)

    @property
    def tokenizer_path(self) -> str:
        """The tokenizer file to read, or to write if a tokenizer is trained."""
        return f"{self.data_dir}/{_FILES['tokenizer']}" if self.tokenizer is None else self.tokenizer
