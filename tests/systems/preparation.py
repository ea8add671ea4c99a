"""Texts and configurations for tests of the data's preparation."""

import functools
from pathlib import Path
from typing import Any

from cs336_basics.stories import stories
from cs336_systems.config.run import DataConfig, ModelConfig, RunConfig

TEXT = "".join(stories(0, 10_000))
VALID_TEXT = "".join(stories(1, 10_000))


def run_config(vocab_size: int = 300, skip_data: bool = False, **data: Any) -> RunConfig:
    model = ModelConfig(vocab_size=vocab_size, context_length=16, d_model=32, d_ff=64, num_layers=1, num_heads=2)
    return RunConfig(model=model, skip_data=skip_data, data=DataConfig(**data))


text_config = functools.partial(run_config, source="text", data_dir="d", train_text="input.txt")
two_texts_config = functools.partial(text_config, valid_text="valid.txt")
stories_config = functools.partial(run_config, source="stories", data_dir="d", story_chars=10_000)
random_config = functools.partial(run_config, source="random", data_dir="d", random_tokens=1000)

TOKENIZER, TRAIN, VALID, STORIES = "tokenizer.json", "train.npy", "valid.npy", "stories.txt"


def contents(folder: str = "d") -> dict[str, tuple[bytes, int]]:
    """Every file with its bytes and the time it was written."""
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(Path(folder).iterdir()) if p.is_file()}


ALL = {STORIES, TOKENIZER, TRAIN, VALID}
