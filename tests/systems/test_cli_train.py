"""`cs336 train` from end to end: a good run, and one line for texts, token files, devices and models that are wrong."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cs336_basics.stories import stories
from cs336_basics.tokenizer import Tokenizer
from cs336_systems.cli.train import parse_run_config
from cs336_systems.config.run import ModelConfig
from cs336_systems.planner.accounting import least_training_bytes
from tests import forked
from tests.systems.command import MODEL, SHORT, TINY, Run, process, the_line

# A good run


def test_a_good_run_exits_with_0_and_prints_its_results(cs336: Run, folder: Path) -> None:
    code, out, err = cs336("train", *TINY, *SHORT, "--run_dir", "run")
    assert code == 0, err
    for word in ("validation loss", "unigram entropy", "bigram model", "sample:", "run folder", "checkpoint"):
        assert word in out
    assert (folder / "run" / "result.json").is_file()
    assert parse_run_config(["--config", "run/config.json"])[0].run_dir == "run"


def test_the_speed_of_a_resumed_run_names_its_steps(cs336: Run, folder: Path) -> None:
    arguments = ["train", *TINY, *SHORT, "--run_dir=run"]
    _, out, _ = cs336(*arguments, "--train.max_steps=10")
    assert re.search(r"^speed +[\d,]+ tokens/s$", out, re.M)
    _, out, _ = cs336(*arguments, "--train.max_steps=20", "--resume=auto")
    assert re.search(r"^speed +[\d,]+ tokens/s, of steps 11 to 20$", out, re.M)
    assert json.loads((folder / "run" / "result.json").read_text())["first_step"] == 11


# Wrong texts


@pytest.fixture
def train_text(cs336: Run, folder: Path) -> Callable[..., str]:
    """Trains on the bytes of a file input.txt (None: there is none) and returns the one line of its failure."""

    def train(content: bytes | None, *more: str) -> str:
        if content is not None:
            (folder / "input.txt").write_bytes(content)
        return the_line(cs336("train", *TINY, *SHORT, "--data.source=text", "--data.train_text=input.txt", *more))

    return train


GOOD_TEXT = "".join(stories(0, 10_000)).encode()


WRONG_TEXTS: dict[str, tuple[bytes | None, list[str], str]] = {
    "missing": (None, [], "data.train_text input.txt does not exist"),
    "missing for validation": (GOOD_TEXT, ["--data.valid_text=valid.txt"], "data.valid_text valid.txt does not exist"),
    "a folder": (GOOD_TEXT, ["--data.valid_text=data"], "data.valid_text data has no files: .*"),
    "empty": (b"", [], "data.train_text input.txt is empty"),
    "0xff": (GOOD_TEXT[:5000] + b"\xff" + GOOD_TEXT[5000:], [], ".*input.txt must be UTF-8 text: .* at byte 5000"),
    "utf-16": (GOOD_TEXT.decode().encode("utf-16"), [], "data.train_text input.txt must be UTF-8 text: .*"),
}


@pytest.mark.parametrize("wrong", WRONG_TEXTS)
def test_a_text_that_cannot_be_used_is_named(train_text: Callable[..., str], wrong: str) -> None:
    content, more, message = WRONG_TEXTS[wrong]
    assert re.fullmatch(message, train_text(content, *more))


@pytest.mark.parametrize(
    "text, valid_text, field",
    [
        (b"once upon a time, twice upon a dime", None, "data.train_tokens data/text/input.txt/train.npy"),
        ("日本語".encode(), None, "data.train_tokens data/text/input.txt/train.npy"),
        (b"one two three " * 30, "Once.", "data.valid_tokens data/text/input.txt/valid.npy"),
    ],
)
def test_text_shorter_than_a_context_says_how_much_is_needed(
    train_text: Callable[..., str], text: bytes, valid_text: str | None, field: str
) -> None:
    if valid_text is not None:
        Path("valid.txt").write_text(valid_text)
    message = train_text(text, *(["--data.valid_text=valid.txt"] if valid_text is not None else []))
    assert message.startswith(f"{field} holds ")
    assert " tokens: at least 17 are needed, one more than model.context_length" in message


def test_a_vocabulary_without_room_for_every_byte_is_refused(train_text: Callable[..., str]) -> None:
    message = train_text(GOOD_TEXT, "--model.vocab_size=256")
    assert message.startswith("model.vocab_size is 256: it must be at least 257 to train a tokenizer")
    assert not Path("data/text/input.txt/tokenizer.json.stamp.json").exists()
    assert "at least 257 to train a tokenizer" in train_text(GOOD_TEXT, "--model.vocab_size=0")


# Wrong token files


@pytest.fixture
def train_tokens(cs336: Run, folder: Path) -> Callable[..., str]:
    """Trains on train.npy and valid.npy as they are, and returns the one line of its failure."""
    np.save("valid.npy", np.zeros(100, dtype=np.uint16))

    def train(*more: str) -> str:
        files = ["--data.train_tokens=train.npy", "--data.valid_tokens=valid.npy"]
        return the_line(cs336("train", "--skip_data", *TINY, *SHORT, *files, *more))

    return train


def test_a_missing_or_truncated_token_file_is_named(train_tokens: Callable[..., str]) -> None:
    message = train_tokens()
    assert message.startswith("data.train_tokens train.npy does not exist")
    assert "--skip_data" in message
    np.save("train.npy", np.zeros(1000, dtype=np.uint16))
    Path("train.npy").write_bytes(Path("train.npy").read_bytes()[:-500])
    assert train_tokens().startswith("token file train.npy is truncated or not a .npy array")


@pytest.mark.parametrize("file, dtype", [("train", np.uint16), ("train", np.uint32), ("valid", np.uint16)])
def test_an_id_outside_the_vocabulary_is_named_with_file_and_offset(
    train_tokens: Callable[..., str], file: str, dtype: Any
) -> None:
    ids = np.arange(1000, dtype=dtype) % 300
    np.save("train.npy", ids)
    ids[[777, 888]] = 300
    np.save(f"{file}.npy", ids)
    message = train_tokens()
    assert message.startswith(f"token file {file}.npy has ID 300 at offset 777: ")
    assert message.endswith(" 300")


def test_a_tokenizer_larger_than_the_models_vocabulary_names_both(train_tokens: Callable[..., str]) -> None:
    Tokenizer.train(stories(0, 10_000), 400).save("tokenizer.json")
    np.save("train.npy", np.zeros(100, dtype=np.uint16))
    message = train_tokens("--data.tokenizer=tokenizer.json")
    assert message.startswith(
        "model.vocab_size is 300: it must be at least 400, the size of the tokenizer tokenizer.json"
    )


@pytest.mark.parametrize("content", ["", "{}"])
def test_a_tokenizer_file_that_cannot_be_loaded_is_named(train_tokens: Callable[..., str], content: str) -> None:
    Path("tokenizer.json").write_text(content)
    np.save("train.npy", np.zeros(100, dtype=np.uint16))
    message = train_tokens("--data.tokenizer=tokenizer.json")
    assert message.startswith("tokenizer file tokenizer.json cannot be loaded: ")


# A wrong machine or model


def test_a_missing_cuda_device_lists_those_that_exist(cs336: Run, folder: Path) -> None:
    message = the_line(cs336("train", *TINY, *SHORT, "--train.device=cuda:99"))
    assert message.startswith("train.device is 'cuda:99': ")
    assert "no CUDA device" in message or "cuda:0 to cuda:" in message
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "field, value",
    [
        ("model.num_layers", 10**9),
        ("model.d_model", 10**7),
        ("model.d_ff", 2**63 - 1),
        ("model.context_length", 10**12),
        ("train.batch_size", 2**63 - 1),
    ],
)
def test_a_model_that_cannot_fit_into_memory_is_refused_at_once(
    cs336: Run, folder: Path, field: str, value: int
) -> None:
    message = the_line(cs336("train", *TINY, *SHORT, f"--{field}={value}", "--train.device=cpu", "--run_dir=run"))
    assert f"{field} {value}" in message
    assert re.search(r": to train this needs at least [\d,.]+ GiB, and cpu has [\d,.]+ GiB$", message)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "options, counted",
    [
        ([], {}),
        (["--train.precision=bf16", "--train.weight_dtype=bf16"], {"weight_bytes": 2}),
        (["--train.precision=bf16"], {"master_bytes": 2}),
        (["--train.loss_chunk_tokens=16"], {"loss_chunk_tokens": 16}),
    ],
)
def test_a_model_that_just_fits_into_memory_is_not_refused(
    options: list[str], counted: dict[str, int], cs336: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = least_training_bytes(ModelConfig(**MODEL).shape, batch_size=4, micro_batch=4, **counted)
    for there, code in ((needed - 1, 2), (needed, 0)):
        monkeypatch.setattr("cs336_systems.training.preflight.memory_bytes", lambda device, there=there: there)
        assert cs336("train", *TINY, *SHORT, *options, "--train.device=cpu", "--run_dir=run")[0] == code


@pytest.mark.parametrize(
    "name, why",
    [
        ("flash9", "it must be auto or one of naive, .* sdpa"),
        *((name, "which cannot be used here: ") for name in ("fa4", "flash_cuda", "sdpa_cudnn")),
    ],
)
def test_an_attention_kernel_that_cannot_run_here_is_refused_before_anything_is_written(
    name: str, why: str, cs336: Run, folder: Path
) -> None:
    message = the_line(cs336("train", *TINY, *SHORT, "--train.device=cpu", f"--model.attention={name}"))
    assert re.match(rf"model\.attention is '{name}'[:,] {why}", message)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("field", ["train.seed", "data.seed", "sample.seed"])
def test_the_largest_seed_works_and_others_are_refused_by_name(cs336: Run, folder: Path, field: str) -> None:
    small = ["--data.source=random", "--data.random_tokens=100"]
    assert cs336("train", *TINY, *SHORT, *small, f"--{field}={(1 << 63) - 1}")[0] == 0
    for seed in (-1, 1 << 63):
        with pytest.raises(ValueError, match=field):
            parse_run_config([*TINY, f"--{field}={seed}"])


@pytest.mark.parametrize(
    "field, path", [("run_dir", "a_file"), ("data.data_dir", "a_file"), ("data.data_dir", "a_file/below")]
)
def test_a_file_where_a_folder_should_be_is_one_line_that_names_the_file(
    cs336: Run, folder: Path, field: str, path: str
) -> None:
    (folder / "a_file").touch()
    code, out, err = cs336("train", *TINY, *SHORT, f"--{field}={path}")
    assert code in (1, 2)
    assert "a_file" in the_line((code, out, err), code)


@pytest.mark.parametrize(
    "field, value",
    [
        ("sample.max_new_tokens", "999"),
        ("sample.prompt", "A prompt of more characters than a context of 16 tokens holds."),
    ],
)
def test_a_sample_that_does_not_fit_the_context_is_refused_before_training(
    cs336: Run, folder: Path, field: str, value: str
) -> None:
    the_line(cs336("train", *TINY, *SHORT, "--run_dir=run", f"--{field}={value}"))
    assert not (folder / "run" / "checkpoints").exists()


HIDDEN = "import sys; sys.modules['triton'] = sys.modules['resource'] = None"


def test_all_but_kernels_in_triton_can_be_imported_without_it(folder: Path) -> None:
    """`harness` stands on lm_eval."""
    code = f"""{HIDDEN}
import importlib, pkgutil, cs336_systems
for module in pkgutil.walk_packages(cs336_systems.__path__, "cs336_systems."):
    if not module.name.startswith("cs336_systems.kernels.") and not module.name.endswith(("__main__", ".harness")):
        importlib.import_module(module.name)
"""
    done = forked.run([sys.executable, "-c", code], 60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_needs_no_triton(folder: Path, precision: str) -> None:
    """As on macOS."""
    code = f"{HIDDEN}; from cs336_systems.cli.main import main; main()"
    words = [*TINY, *SHORT, f"--train.precision={precision}", "--train.device=cpu", "--run_dir=run"]
    returned, out, err = process("train", *words, code=code)
    assert (returned, err) == (0, "")
    assert "validation loss" in out
