"""`cs336 train` from end to end: a good run, and one line for texts, token files, devices and models that are wrong."""

import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cs336_basics.stories import stories
from cs336_basics.tokenizer import Tokenizer
from cs336_systems.cli.train import parse_run_config
from cs336_systems.config.run import ModelConfig
from cs336_systems.planner.accounting import least_training_bytes
from tests.systems.command import MODEL, SHORT, TINY, Run, the_line

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
    "missing": (None, [], "input.txt does not exist"),
    "missing for validation": (GOOD_TEXT, ["--data.valid_text=valid.txt"], "valid.txt does not exist"),
    "a folder": (GOOD_TEXT, ["--data.valid_text=."], ". is not a regular file"),
    "empty": (b"", [], "input.txt is empty"),
    "0xff": (GOOD_TEXT[:5000] + b"\xff" + GOOD_TEXT[5000:], [], "input.txt must be UTF-8 text: .* at byte 5000"),
    "half a character": (GOOD_TEXT[:5000] + b"\xc3(" + GOOD_TEXT[5000:], [], "input.txt must .* at byte 5000"),
    "a surrogate": (GOOD_TEXT[:5000] + b"\xed\xa0\x80" + GOOD_TEXT[5000:], [], "input.txt must .* at byte 5000"),
    "half a character at the end": (GOOD_TEXT + b"\xc3", [], f"input.txt must .* at byte {len(GOOD_TEXT)}"),
    "far inside": ((GOOD_TEXT * 300)[:2_500_000] + b"\xfe" + GOOD_TEXT, [], "input.txt must .* at byte 2500000"),
    **{
        encoding: (GOOD_TEXT.decode().encode(encoding), [], "input.txt must be UTF-8 text: .*")
        for encoding in ("utf-16", "utf-16-le", "utf-32-be")
    },
}


@pytest.mark.parametrize("wrong", WRONG_TEXTS)
def test_a_text_that_cannot_be_used_is_named(train_text: Callable[..., str], wrong: str) -> None:
    content, more, message = WRONG_TEXTS[wrong]
    assert re.fullmatch(f"text file {message}", train_text(content, *more))


def test_an_unreadable_text_is_named(train_text: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    # A patch, because file permissions do not stop root, who often runs tests.
    open_ = Path.open

    def refuse(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self.name == "input.txt":
            raise PermissionError(13, "Permission denied", str(self))
        return open_(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with open("input.txt", "wb") as file:
        file.write(GOOD_TEXT)
    assert train_text(None) == "text file input.txt cannot be read: Permission denied"


def test_text_shorter_than_a_context_says_how_much_is_needed(train_text: Callable[..., str]) -> None:
    message = train_text(b"once upon a time, twice upon a dime")
    assert message.startswith("data.train_tokens data/text/train.npy, made from data.train_text input.txt, holds ")
    assert " tokens: at least 17 are needed, one more than model.context_length" in message


@pytest.mark.parametrize(
    "more, fields",
    [
        ((), "data.valid_fraction 0.1 and data.train_text input.txt"),
        (("--data.valid_text=valid.txt",), "data.valid_text valid.txt"),
    ],
)
def test_a_validation_text_shorter_than_a_context_names_its_fields(
    train_text: Callable[..., str], more: tuple[str, ...], fields: str
) -> None:
    Path("valid.txt").write_text("Once.")
    message = train_text(b"one two three " * 30, *more)
    assert message.startswith(f"data.valid_tokens data/text/valid.npy, made from {fields}, holds ")


@pytest.mark.parametrize("text", [b"\xc3\xa9", "日本語".encode(), b"x"])
def test_a_text_of_a_few_characters_is_too_short(train_text: Callable[..., str], text: bytes) -> None:
    assert ": at least 17 are needed" in train_text(text)


def test_a_vocabulary_without_room_for_every_byte_is_refused(train_text: Callable[..., str]) -> None:
    message = train_text(GOOD_TEXT, "--model.vocab_size=256")
    assert message.startswith("model.vocab_size is 256: it must be at least 257 to train a tokenizer")
    assert not Path("data/text/tokenizer.json.stamp.json").exists()
    assert "at least 257 to train a tokenizer" in train_text(GOOD_TEXT, "--model.vocab_size=0")


# Wrong token files


@pytest.fixture
def train_tokens(cs336: Run, folder: Path) -> Callable[..., str]:
    """Trains on train.npy and valid.npy as they are, and returns the one line of its failure."""
    np.save("valid.npy", np.zeros(100, dtype=np.uint16))

    def train(*more: str, file: str = "train.npy") -> str:
        files = [f"--data.train_tokens={file}", "--data.valid_tokens=valid.npy"]
        return the_line(cs336("train", "--skip_data", *TINY, *SHORT, *files, *more))

    return train


def test_a_missing_token_file_is_named(train_tokens: Callable[..., str]) -> None:
    message = train_tokens()
    assert message.startswith("data.train_tokens train.npy does not exist")
    assert "--skip_data" in message


def test_a_truncated_token_file_is_named(train_tokens: Callable[..., str]) -> None:
    np.save("train.npy", np.zeros(1000, dtype=np.uint16))
    whole = Path("train.npy").read_bytes()
    Path("train.npy").write_bytes(whole[:-500])
    assert train_tokens().startswith("token file train.npy is truncated or not a .npy array")


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"no array at all" * 10])
def test_a_token_file_that_is_no_array_is_named(train_tokens: Callable[..., str], content: bytes) -> None:
    Path("train.npy").write_bytes(content)
    assert train_tokens().startswith("token file train.npy is truncated or not a .npy array")


def test_an_npz_archive_as_token_file_is_named(train_tokens: Callable[..., str]) -> None:
    np.savez("train.npz", tokens=np.zeros(100, dtype=np.uint16))
    assert train_tokens(file="train.npz").startswith("token file train.npz ")


@pytest.mark.parametrize(
    "array, said",
    [
        (np.zeros(100, np.int64), "int64 of shape (100,)"),
        (np.zeros(100, np.float32), "float32 of shape (100,)"),
        (np.zeros((10, 10), np.uint16), "uint16 of shape (10, 10)"),
        (np.zeros((), np.uint16), "uint16 of shape ()"),
    ],
)
def test_a_token_file_of_another_type_is_described(
    train_tokens: Callable[..., str], array: np.ndarray, said: str
) -> None:
    np.save("train.npy", array)
    assert train_tokens().startswith(f"token file train.npy holds {said}: it must be a one-dimensional array of uint16")


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_an_id_outside_the_vocabulary_is_named_with_file_and_offset(
    train_tokens: Callable[..., str], dtype: Any
) -> None:
    ids = np.arange(1000, dtype=dtype) % 300
    ids[[777, 888]] = 300
    np.save("train.npy", ids)
    message = train_tokens()
    assert message.startswith("token file train.npy has ID 300 at offset 777: ")
    assert message.endswith(" 300")


def test_an_id_outside_the_vocabulary_is_found_in_the_validation_file_too(train_tokens: Callable[..., str]) -> None:
    np.save("train.npy", np.zeros(100, dtype=np.uint16))
    np.save("valid.npy", np.array([5] * 99 + [65535], dtype=np.uint16))
    assert train_tokens().startswith("token file valid.npy has ID 65535 at offset 99: ")


def test_a_token_file_shorter_than_a_context_says_how_much_is_needed(train_tokens: Callable[..., str]) -> None:
    np.save("train.npy", np.zeros(16, dtype=np.uint16))
    accepted = "at least 17 are needed, one more than model.context_length"
    assert train_tokens().startswith(f"data.train_tokens train.npy holds 16 tokens: {accepted}")


def test_a_token_file_that_differs_from_its_sidecar_says_so(train_tokens: Callable[..., str]) -> None:
    np.save("train.npy", np.zeros(100, dtype=np.uint16))
    sidecar = dict(count=99, vocab_size=300, sha256="", tokenizer_sha256="", source="")
    Path("train.json").write_text(json.dumps(sidecar))
    assert train_tokens() == "token file train.npy holds 100 tokens but its sidecar says 99"


@pytest.mark.parametrize("content", ['{"tokenizer_sha256": "', '{"count": 100, "tokenizer_sha256": ""}'])
def test_a_broken_sidecar_is_named(train_tokens: Callable[..., str], content: str) -> None:
    np.save("train.npy", np.zeros(100, dtype=np.uint16))
    Path("train.json").write_text(content)
    assert "train.json" in train_tokens()


def test_a_tokenizer_larger_than_the_models_vocabulary_names_both(train_tokens: Callable[..., str]) -> None:
    Tokenizer.train(stories(0, 10_000), 400).save("tokenizer.json")
    np.save("train.npy", np.zeros(100, dtype=np.uint16))
    message = train_tokens("--data.tokenizer=tokenizer.json")
    assert message.startswith(
        "model.vocab_size is 300: it must be at least 400, the size of the tokenizer tokenizer.json"
    )


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"model": {"type": "BPE", "vocab": {}, "merges": []}}'])
def test_a_tokenizer_file_that_cannot_be_loaded_is_named(train_tokens: Callable[..., str], content: str) -> None:
    Path("tokenizer.json").write_text(content)
    np.save("train.npy", np.zeros(100, dtype=np.uint16))
    message = train_tokens("--data.tokenizer=tokenizer.json")
    assert message.startswith("tokenizer file tokenizer.json cannot be loaded: ")


# A wrong machine or model


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "CPU", "", "cuda0"])
def test_a_wrong_device_name_lists_the_accepted_ones(cs336: Run, folder: Path, name: str) -> None:
    message = the_line(cs336("train", *TINY, *SHORT, f"--train.device={name}"))
    assert message == f"train.device is '{name}': it must be auto, cpu, cuda or cuda:N"


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
        (["--train.loss_chunk_tokens=16"], {"loss_chunk_tokens": 16}),
    ],
)
def test_a_model_that_just_fits_into_memory_is_not_refused(
    options: list[str], counted: dict[str, int], cs336: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = least_training_bytes(ModelConfig(**MODEL).shape, batch_size=4, micro_batch=4, **counted)
    for there, code in ((needed - 1, 2), (needed, 0)):
        monkeypatch.setattr("cs336_systems.training.fits.memory_bytes", lambda device, there=there: there)
        assert cs336("train", *TINY, *SHORT, *options, "--train.device=cpu", "--run_dir=run")[0] == code


def test_an_unknown_attention_kernel_lists_the_known_ones(cs336: Run, folder: Path) -> None:
    message = the_line(cs336("train", *TINY, *SHORT, "--model.attention=flash9"))
    assert message.startswith("model.attention is 'flash9': it must be auto or one of naive, ")
    assert " sdpa" in message
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["fa4", "flash_cuda", "sdpa_cudnn"])
def test_an_attention_kernel_that_cannot_run_here_is_refused_before_anything_is_written(
    name: str, cs336: Run, folder: Path
) -> None:
    message = the_line(cs336("train", *TINY, *SHORT, "--train.device=cpu", f"--model.attention={name}"))
    assert message.startswith(f"model.attention is '{name}', which cannot be used here: ")
    assert list(folder.iterdir()) == []


def test_a_precision_that_the_device_lacks_lists_the_others(
    cs336: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cs336_systems.training.pipeline.use_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla T4")
    message = the_line(cs336("train", *TINY, *SHORT, "--train.precision=bf16"))
    assert message == "train.precision is 'bf16': Tesla T4 has no bfloat16 arithmetic; it must be fp16 or fp32 here"


@pytest.mark.parametrize("field", ["train.seed", "data.seed", "sample.seed"])
@pytest.mark.parametrize("seed", [-1, 1 << 63, 1 << 64])
def test_a_seed_works_or_is_one_line_that_names_it(cs336: Run, folder: Path, field: str, seed: int) -> None:
    small = ["--data.source=random", "--data.random_tokens=100", f"--{field}={seed}"]
    code, _, err = result = cs336("train", *TINY, *SHORT, *small)
    assert code == 0 or field in the_line(result), err


@pytest.mark.parametrize(
    "field, path",
    [("run_dir", "a_file"), ("data.data_dir", "a_file"), ("data.data_dir", "a_file/below")],
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
