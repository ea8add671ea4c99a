"""The command line: what fills a field, and that every mistake of a user is one line that says what to mend."""

import contextlib
import dataclasses
import json
import logging
import os
import re
import signal
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cs336_basics.stories import stories
from cs336_basics.tokenizer import Tokenizer
from cs336_systems.bench.row import Row, append_row
from cs336_systems.cli import load_config
from cs336_systems.cli.arguments import in_our_words
from cs336_systems.cli.main import main
from cs336_systems.cli.train import parse_run_config, train_parser
from cs336_systems.config.run import (
    CheckpointConfig,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    SampleConfig,
    TrainConfig,
)
from cs336_systems.machine.console import Ended
from cs336_systems.planner.accounting import least_training_bytes

GROUPS: dict[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "train": TrainConfig,
    "parallel": ParallelConfig,
    "checkpoint": CheckpointConfig,
    "sample": SampleConfig,
    "log": LogConfig,
}
MODEL: dict[str, Any] = dict(vocab_size=300, context_length=16, d_model=32, d_ff=64, num_layers=1, num_heads=2)
TINY = [f"--model.{name}={value}" for name, value in MODEL.items()]
SHORT = ["--train.max_steps=2", "--train.batch_size=4", "--train.validation_sequences=4", "--data.story_chars=10000"]

Run = Callable[..., tuple[int, str, str]]
WriteConfig = Callable[..., str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def write_config(tmp_path: Path) -> WriteConfig:
    """Writes a JSON file with a tiny model and more, or a text as it is; returns its path."""

    def write(content: Any, name: str = "config.json") -> str:
        text = content if isinstance(content, str) else json.dumps({"model": MODEL} | content)
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


@pytest.fixture
def cs336(capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """The command in this process: exit code, stdout, stderr."""
    log = logging.getLogger("cs336_systems")
    before = log.handlers[:], log.level

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    yield run
    log.handlers[:], log.level = before


def process(*arguments: str, code: str = "from cs336_systems.cli.main import main; main()") -> tuple[int, str, str]:
    """The command in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


def the_line(result: tuple[int, str, str], code: int = 2) -> str:
    """The one line of a failed command, without its `cs336: `."""
    returned, _, err = result
    assert err.startswith("cs336: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    assert returned == code, err
    return err.removeprefix("cs336: ").strip()


def error_of(*arguments: str) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        parse_run_config(arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


# What fills a field


def test_the_file_fills_fields_and_the_command_line_goes_before_it(write_config: WriteConfig) -> None:
    file = write_config({"train": {"max_steps": 7, "batch_size": 6}})
    config, print_only = parse_run_config(["--config", file, "--train.max_steps", "9"])
    assert (config.train.max_steps, config.train.batch_size, config.train.seed) == (9, 6, 0)
    assert not print_only


def test_the_command_line_goes_before_the_file_in_any_order(write_config: WriteConfig) -> None:
    file = write_config({"train": {"max_steps": 7}})
    config, _ = parse_run_config(["--train.max_steps", "9", "--config", file])
    assert config.train.max_steps == 9


def test_the_later_of_two_files_and_of_two_options_counts(write_config: WriteConfig) -> None:
    first = write_config({"train": {"max_steps": 7, "batch_size": 6}})
    second = write_config('{"train": {"max_steps": 8}}', "second.json")
    config, _ = parse_run_config(["--config", first, "--config", second, "--train.seed=1", "--train.seed=2"])
    assert (config.train.max_steps, config.train.batch_size, config.train.seed) == (8, 6, 2)


@pytest.mark.parametrize(
    "given, expected",
    [([], False), (["--skip_data"], True), (["--skip_data", "true"], True), (["--skip_data=false"], False)],
)
def test_skip_data_works_alone_and_with_a_value(given: list[str], expected: bool) -> None:
    config, _ = parse_run_config([*given, *TINY])
    assert config.skip_data is expected


def test_the_file_may_be_a_pipe_which_can_be_read_once() -> None:
    end, other = os.pipe()
    os.write(other, json.dumps({"model": MODEL, "train": {"max_steps": 7}}).encode())
    os.close(other)
    with open(end, "rb"):
        assert parse_run_config(["--config", f"/dev/fd/{end}"])[0].train.max_steps == 7


def test_skip_data_on_the_command_line_goes_before_the_file(write_config: WriteConfig) -> None:
    file = write_config({"skip_data": True})
    assert parse_run_config(["--config", file])[0].skip_data is True
    assert parse_run_config(["--config", file, "--skip_data", "false"])[0].skip_data is False


@pytest.mark.parametrize("text", ["ROMEO:", "123", "1e5", "null", "true", "{a: b}", "[1", "'q'", "# no", " x ", "a\nb"])
def test_a_prompt_is_taken_as_it_is_written(text: str) -> None:
    assert parse_run_config([*TINY, f"--sample.prompt={text}"])[0].sample.prompt == text


def test_clipping_can_be_turned_off_as_the_help_says() -> None:
    assert parse_run_config([*TINY, "--train.max_grad_norm=null"])[0].train.max_grad_norm is None


@pytest.mark.parametrize(
    "name, value",
    [
        ("train.max_steps", 5),
        ("optimizer.lr", 1e-5),
        ("optimizer.betas", (0.1, 0.2)),
        ("train.compile", True),
        ("skip_data", True),
        ("sample.prompt", "5"),
        ("sample.top_p", None),
        ("run_dir", "somewhere"),
    ],
)
def test_load_config_overrides_fields_by_dotted_name(write_config: WriteConfig, name: str, value: Any) -> None:
    found: Any = load_config(write_config({}), **{name: value})
    for part in name.split("."):
        found = getattr(found, part)
    assert found == value


# --print_config


def test_print_config_prints_what_gives_the_same_configuration(
    cs336: Run, write_config: WriteConfig, folder: Path
) -> None:
    arguments = ["--config", write_config({"train": {"seed": 3}}), "--train.max_steps", "9", "--sample.prompt=é:"]
    code, out, err = cs336("train", *arguments, "--print_config")
    assert (code, err) == (0, "")
    printed = write_config(out, "printed.json")
    assert parse_run_config(["--config", printed]) == (parse_run_config(arguments)[0], False)
    assert not (folder / "runs").exists()


def test_print_config_prints_resolved_values(cs336: Run) -> None:
    _, out, _ = cs336("train", "--model.size", "small", "--print_config")
    printed = json.loads(out)
    assert printed["model"]["d_model"] == 768
    assert printed["model"]["vocab_size"] == 10_000
    assert printed["data"]["train_tokens"] == "data/stories/train.npy"
    assert printed["optimizer"]["min_lr"] == 1e-4


def test_print_config_without_clipping_can_be_fed_back(cs336: Run, write_config: WriteConfig) -> None:
    for no_clipping in ("null", "1e999"):
        file = write_config(f'{{"train": {{"max_grad_norm": {no_clipping}}}}}')
        code, out, _ = cs336("train", "--config", file, *TINY, "--print_config")
        assert code == 0
        assert parse_run_config(["--config", write_config(out)])[0].train.max_grad_norm is None


def test_print_config_refuses_an_impossible_value(cs336: Run) -> None:
    assert "train.max_steps is 0" in the_line(cs336("train", *TINY, "--train.max_steps=0", "--print_config"))


# Unknown fields


@pytest.mark.parametrize(
    "written, near",
    [
        ("train.max_stepz", "train.max_steps"),
        ("trian.max_steps", "train.max_steps"),
        ("max_steps", "train.max_steps"),
        ("model.n_layers", "model.num_layers"),
        ("zzzzzzzz", ""),
        ("skip_dat", "skip_data"),
        ("rundir", "run_dir"),
    ],
)
def test_an_unknown_field_on_the_command_line_brings_the_near_one(written: str, near: str) -> None:
    message = error_of(*TINY, f"--{written}=5")
    assert message.startswith(f"unknown field {written}")
    assert message.endswith(f": did you mean {near}?" if near else written)


@pytest.mark.parametrize(
    "content, name, near",
    [
        ({"train": {"max_stepz": 5}}, "train.max_stepz", "train.max_steps"),
        ({"sample": {"max_steps": 5}}, "sample.max_steps", "train.max_steps"),
        ({"trian": {"max_steps": 5}}, "trian", "train"),
        ({"max_steps": 5}, "max_steps", "train.max_steps"),
        ({"rundir": "x"}, "rundir", "run_dir"),
    ],
)
def test_an_unknown_field_in_the_file_brings_the_near_one(
    write_config: WriteConfig, content: dict[str, Any], name: str, near: str
) -> None:
    message = error_of("--config", write_config(content))
    assert message.startswith(f"unknown field {name}")
    assert f"did you mean {near}" in message


@pytest.mark.parametrize(
    "content, name",
    [('{"train": {"max_steps": 1, "max_steps": 2}}', "max_steps"), ('{"train": {}, "data": {}, "train": {}}', "train")],
)
def test_a_field_that_the_file_has_twice_is_refused(write_config: WriteConfig, content: str, name: str) -> None:
    assert f"it has '{name}' twice: it must be given once" in error_of("--config", write_config(content))


def test_a_field_that_the_file_has_in_two_spellings_is_refused(write_config: WriteConfig) -> None:
    message = error_of("--config", write_config({"train.max_steps": 1, "train": {"max_steps": 2}}))
    assert "config.json has 'train.max_steps' twice: it must be given once" in message


def test_a_folder_is_no_config_file(tmp_path: Path) -> None:
    assert error_of("--config", str(tmp_path)) == f"config file {tmp_path} is a folder: it must be a JSON file"


def test_a_config_file_may_begin_with_a_byte_order_mark(write_config: WriteConfig) -> None:
    path = write_config({"train": {"max_steps": 3}})
    Path(path).write_bytes(b"\xef\xbb\xbf" + Path(path).read_bytes())
    assert load_config(path).train.max_steps == 3


def test_a_shortened_field_is_not_guessed() -> None:
    # It would change its meaning on the day that another field begins the same.
    assert "train.max_s" in error_of(*TINY, "--train.max_s=3")


@pytest.mark.parametrize("stray", ["stray", "-x"])
def test_an_argument_that_is_no_field_is_an_error(stray: str) -> None:
    assert stray in error_of(*TINY, stray)


def test_a_field_without_its_value_is_an_error() -> None:
    assert "train.max_steps" in error_of(*TINY, "--train.max_steps")


# Wrong types and values


WRONG: dict[str, list[str]] = {
    "train.max_steps": ["abc", "1.5", "null", "[1]", "true", ""],
    "optimizer.lr": ["abc", "nan", "null", "[1]", "-1", ".nan", ".inf", ""],
    "optimizer.betas": ["0.9", "[0.9]", "[0, 0, 0]", "[a, b]", "[0.9, 1.5]"],
    "model.rope_theta": ["nan", "0"],
    "checkpoint.keep_last": ["abc", "0", "1.5"],
    "train.compile": ["maybe", "null"],
    "skip_data": ["maybe", "null"],
    "train.precision": ["fp8"],
    "data.source": ["web"],
    "optimizer.implementation": ["sgd"],
    "log.wandb": ["on"],
    "model.size": ["huge"],
}
SHOWN_AS = {
    "null": "None",
    "true": "True",
    ".nan": "nan",
    ".inf": "inf",
    "[a, b]": "a",
    "[0.9, 1.5]": "1.5",
}


@pytest.mark.parametrize("field, written", [(field, value) for field, values in WRONG.items() for value in values])
def test_a_wrong_value_on_the_command_line_is_named_with_its_field(field: str, written: str) -> None:
    message = error_of(*TINY, f"--{field}={written}")
    assert message.startswith(field)
    assert SHOWN_AS.get(written, written) in message


@pytest.mark.parametrize(
    "field, accepted",
    [
        ("train.precision", ["fp32", "bf16", "fp16"]),
        ("data.source", ["random", "stories", "text", "tinystories"]),
        ("log.wandb", ["off", "offline", "online"]),
        ("model.size", ["small", "medium", "2.7B"]),
    ],
)
def test_a_choice_that_does_not_exist_brings_those_that_do(field: str, accepted: list[str]) -> None:
    message = error_of(*TINY, f"--{field}=other")
    assert all(name in message for name in accepted)


@pytest.mark.parametrize("value", [3, 3.0, "3", "3.0", "3e0"])
def test_a_whole_number_fills_an_integer_however_it_is_written(write_config: WriteConfig, value: Any) -> None:
    fields = ("train.max_steps", "sample.top_k")
    content = {"model": MODEL, "train": {"max_steps": value}, "sample": {"top_k": value}}
    for arguments in (
        ["--config", write_config(content)],
        [*TINY, *(f"--{field}={value}" for field in fields)],
        [*TINY, *(word for field in fields for word in (f"--{field}", str(value)))],
        [*TINY, "--train", json.dumps(content["train"]), "--sample", json.dumps(content["sample"])],
    ):
        config = parse_run_config(arguments)[0]
        found = (config.train.max_steps, config.sample.top_k)
        assert (found, [type(number) for number in found]) == ((3, 3), [int, int])


def test_text_that_looks_like_a_number_stays_as_it_is() -> None:
    config = parse_run_config([*TINY, "--run_dir", "1e3", "--sample.prompt=2.0", "--optimizer.lr=1e-3"])[0]
    assert (config.run_dir, config.sample.prompt, config.optimizer.lr) == ("1e3", "2.0", 1e-3)


@pytest.mark.parametrize("value", ["abc", [1], {}, 1.5, True])
def test_a_wrong_type_in_the_file_names_the_field(write_config: WriteConfig, value: Any) -> None:
    assert error_of("--config", write_config({"train": {"max_steps": value}})).startswith("train.max_steps")


FIELDS = {f"{group}.{name}": hint for group, cls in GROUPS.items() for name, hint in typing.get_type_hints(cls).items()}
FIELDS |= {name: hint for name, hint in typing.get_type_hints(RunConfig).items() if name not in GROUPS}
NOT_OF_THE_TYPE: dict[Any, list[Any]] = {  # annotation -> values that JSON can hold and the field cannot
    int: ["abc", "", 1.5, True, [1], {"a": 1}, [None, 1]],
    float: ["abc", "", True, [1], {"a": 1}, [None, 1]],
    bool: ["abc", "", 1.5, 5, [1], {"a": 1}],
    str: [1.5, 5, True, [1], {"a": 1}],
    tuple: ["abc", "", 1.5, True, [1], {"a": 1}, [1, 2, 3], [None, 1]],
    typing.Literal: ["abc", "", 1.5, True, [1], {"a": 1}],
}
IN_WORDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    tuple: "a list of 2 numbers, such as [0.5, 0.5]",
}


def _kind(hint: Any) -> Any:
    """The type of a field without its null: int, float, bool, str, tuple or Literal."""
    (kind,) = [k for k in typing.get_args(hint) if k is not type(None)] if _takes_null(hint) else [hint]
    return typing.get_origin(kind) or kind


def _check_type_error(message: str, field: str, value: Any) -> None:
    kind = _kind(FIELDS[field])
    accepted = IN_WORDS.get(kind) or f"one of {', '.join(typing.get_args(FIELDS[field]))}"
    assert message.startswith(f"{field} ")
    assert message.endswith(f"it must be {accepted}{' or null' if _takes_null(FIELDS[field]) else ''}")
    inner = None if value == [None, 1] and kind is tuple else value
    shown = [str(inner), json.dumps(inner)] if inner != "" else ["''"]
    assert any(f" {text}: " in message for text in shown), message
    for leak in ("<class", "typing", "NoneType", "Expected", "Traceback", "\n"):
        assert leak not in message


@pytest.mark.parametrize("field", FIELDS)
def test_a_wrong_type_on_the_command_line_says_in_words_what_is_accepted(field: str) -> None:
    kind = _kind(FIELDS[field])
    for value in NOT_OF_THE_TYPE[kind] if kind is not str else []:  # there every word is text
        written = value if isinstance(value, str) else json.dumps(value)
        _check_type_error(error_of(*TINY, f"--{field}={written}"), field, value)


@pytest.mark.parametrize("field", FIELDS)
def test_a_wrong_type_in_the_file_says_in_words_what_is_accepted(field: str, write_config: WriteConfig) -> None:
    group, _, name = field.rpartition(".")
    for value in NOT_OF_THE_TYPE[_kind(FIELDS[field])]:
        content: dict[str, Any] = {"model": dict(MODEL)}
        (content.setdefault(group, {}) if group else content)[name] = value
        _check_type_error(error_of("--config", write_config(content)), field, value)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "abc"], "model is abc: it must be a JSON object"),
        (["--train", "[1]"], "train is [1]: it must be a JSON object"),
        (["--train", '{"seed": "x"}'], "train.seed is x: it must be an integer"),
        (["--train", '{"seeds": 1}'], "unknown field train.seeds: did you mean train.seed?"),
        (["--train.seed.x=1"], "unknown field train.seed.x: did you mean train.seed?"),
        (["--parallel.device=2"], "unknown field parallel.device: did you mean parallel.devices?"),
        (["--train.seed=a\nb"], "train.seed is a b: it must be an integer"),
        (["--sample.top_k=a\nb"], "sample.top_k is a b: it must be an integer or null"),
    ],
)
def test_a_group_and_what_lies_in_a_field_are_named_too(arguments: list[str], message: str) -> None:
    assert error_of(*TINY, *arguments) == message


@pytest.mark.parametrize("written", ["1" + "0" * 400, "1" * 5000, "[" * 5000], ids=["400 digits", "5000", "nested"])
@pytest.mark.parametrize("field", ["train.max_steps", "model.d_model", "optimizer.lr", "model.rope_theta"])
def test_a_value_beyond_all_measure_is_one_line(field: str, written: str, write_config: WriteConfig) -> None:
    assert error_of(*TINY, f"--{field}={written}")
    group, name = field.split(".")
    with_model = {"model": MODEL} | {group: {**(MODEL if group == "model" else {}), name: "@"}}
    assert error_of("--config", write_config(json.dumps(with_model).replace('"@"', written)))


def _takes_null(hint: Any) -> bool:
    return type(None) in typing.get_args(hint)


@pytest.mark.parametrize("group", GROUPS)
def test_null_in_the_file_is_an_error_for_fields_that_have_no_null(
    group: str, write_config: WriteConfig, tmp_path: Path
) -> None:
    slipped_through = []
    for name, hint in typing.get_type_hints(GROUPS[group]).items():
        if _takes_null(hint):
            continue
        content = {"model": MODEL}
        content = {**content, group: {**content.get(group, {}), name: None}}
        try:
            parse_run_config(["--config", write_config(json.dumps(content))])
        except ValueError as error:
            assert str(error).startswith(f"{group}.{name}")  # noqa: PT017
        else:
            slipped_through.append(name)
    assert slipped_through == []


@pytest.mark.parametrize("value", [None, 5, [1], "x"])
@pytest.mark.parametrize("group", ["train", "model"])
def test_a_group_in_the_file_that_is_no_object_is_one_line(
    cs336: Run, write_config: WriteConfig, group: str, value: Any
) -> None:
    assert group in the_line(cs336("train", "--config", write_config({group: value}), "--print_config"))


# The file itself


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        '{"train": {"max_steps": 5}',
        '{"train" {}}',
        '{"model": {"size": "small"}} x',
        "[1, 2]",
        "5",
        "null",
        '"x"',
    ],
)
def test_a_file_that_is_no_json_object_is_one_line_that_names_it(
    cs336: Run, write_config: WriteConfig, content: str
) -> None:
    file = write_config(content, "broken.json")
    assert "broken.json" in the_line(cs336("train", "--config", file, *TINY, "--print_config"))


def test_a_file_that_is_no_text_is_one_line_that_names_it(cs336: Run, tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00\x01")
    assert "binary.json" in the_line(cs336("train", "--config", str(tmp_path / "binary.json"), "--print_config"))


def test_without_a_model_the_file_that_could_have_it_is_named(cs336: Run) -> None:
    line = the_line(cs336("train", "--data.source", "text"))
    assert "model.d_model is missing" in line
    assert "--config FILE" in line
    assert "did you mean train.max_steps?" in the_line(cs336("train", "--train.max_stps", "3"))


def test_a_forgotten_option_or_word_is_named(cs336: Run) -> None:
    assert "by --config configs/demo.json" in the_line(cs336("train", "configs/demo.json"))
    assert "did you mean config?" in the_line(cs336("train", "--confg", "configs/demo.json"))
    assert "case is missing: it must be one of model, warmup" in the_line(cs336("bench"))


def test_a_missing_file_is_one_line_that_names_it(cs336: Run) -> None:
    assert "no/such.json" in the_line(cs336("train", "--config", "no/such.json"))


def test_a_folder_as_file_is_one_line_that_names_it(cs336: Run, tmp_path: Path) -> None:
    assert str(tmp_path) in the_line(cs336("train", "--config", str(tmp_path)))


@pytest.mark.parametrize("file", sorted((Path(__file__).parents[2] / "configs").glob("*.json")), ids=lambda f: f.stem)
def test_a_configuration_of_the_repository_is_valid_json_and_parses(file: Path) -> None:
    json.loads(file.read_text())
    parse_run_config(["--config", str(file)])


# The command


@pytest.mark.parametrize("arguments", [["--help"], ["-h"]])
def test_help_names_the_commands(cs336: Run, arguments: list[str]) -> None:
    code, out, err = cs336(*arguments)
    assert (code, err) == (0, "")
    assert "train" in out


@pytest.mark.parametrize("arguments", [[], ["--nonsense"]])
def test_without_a_command_the_usage_is_shown_with_2(cs336: Run, arguments: list[str]) -> None:
    code, out, err = cs336(*arguments)
    assert (code, out) == (2, "")
    assert "usage: cs336" in err


@pytest.mark.parametrize(
    "words, wrong, near",
    [
        (["trian"], "trian", "train"),
        (["Train", "--config", "x.json"], "Train", "train"),
        (["import"], "import", "import-hf"),
        (["bench", "modl"], "modl", "model"),
        (["profile", "kernel"], "kernel", "kernels"),
        (["plan", "memry"], "memry", "memory"),
        (["report", "run", "runs/x"], "run", "runs"),
        (["export", "runs/x", "--format", "hff"], "hff", "hf"),
    ],
)
def test_a_mistyped_command_is_named_with_the_nearest(cs336: Run, words: list[str], wrong: str, near: str) -> None:
    assert f"is {wrong!r}: did you mean {near}? it must be one of " in the_line(cs336(*words))


def test_a_command_like_no_other_brings_them_all(cs336: Run) -> None:
    assert the_line(cs336("xyzzy")) == f"the word after cs336 is 'xyzzy': it must be one of {', '.join(COMMANDS)}"


def test_every_field_has_its_own_help(cs336: Run) -> None:
    actions = {action.dest: action for action in train_parser()._actions}
    fields = [f.name for f in dataclasses.fields(RunConfig) if f.name not in GROUPS]
    fields += [f"{group}.{f.name}" for group, cls in GROUPS.items() for f in dataclasses.fields(cls)]
    code, out, _ = cs336("train", "--help")
    assert code == 0
    shown = " ".join(out.split())
    for field in fields:
        text = actions[field].help
        assert text
        assert len(text) > 8, field
        assert f"--{field}" in shown
        assert " ".join(text.replace("%%", "%").split()[:3]) in shown, field


COMMANDS = ("train", "speedrun", "generate", "export", "import-hf", "bench", "profile", "plan", "report")


def test_the_help_names_every_command(cs336: Run) -> None:
    assert re.findall(r"^  (\S+)  ", cs336("--help")[1], re.M) == list(COMMANDS)


def test_the_help_of_every_command_ends_with_0_and_imports_no_torch() -> None:
    code = """
import sys
from cs336_systems.cli.main import main
for command in sys.argv[1:]:
    try:
        main([command, "--help"])
    except SystemExit as exit:
        print("ENDED", command, exit.code)
print("HEAVY", [name for name in ("torch", "numpy", "tokenizers", "matplotlib", "triton") if name in sys.modules])
"""
    returned, out, err = process(*COMMANDS, code=code)
    assert (returned, err) == (0, "")
    assert [line for line in out.splitlines() if line.startswith("ENDED")] == [f"ENDED {name} 0" for name in COMMANDS]
    assert out.splitlines()[-1] == "HEAVY []"


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["generate"], "run"),
        (["generate", "no/such"], "no/such"),
        (["generate", "no/such", "--temperature=-1"], "temperature is -1"),
        (["generate", "no/such", "--tempreature=1"], "did you mean temperature?"),
        (["export", "no/such"], "no/such"),
        (["export", "no/such", "--format=gguf"], "hf"),
        (["import-hf", "no/such"], "out"),
        (["import-hf", "no/such", "--out=out"], "no/such"),
        (["profile"], "what"),
        (["profile", "everything"], "memory"),
        (["profile", "memory", "--snapshot=no/such.pickle"], "no/such.pickle"),
        (["profile", "memory", "--quick", "--detail=-1"], "detail is -1"),
        (["report"], "what"),
        (["report", "everything", "no/such"], "runs"),
        (["report", "runs", "no/such"], "no/such"),
        (["report", "rows", "no/such.jsonl"], "no/such.jsonl"),
        (["report", "summary", "no/such"], "no/such"),
        (["report", "update", "no/such.md"], "no/such.md"),
    ],
)
def test_a_mistake_with_another_command_is_one_line(cs336: Run, folder: Path, arguments: list[str], named: str) -> None:
    assert named in the_line(cs336(*arguments))
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["train", *TINY, "--train.max_stepz=5"], "unknown field train.max_stepz: did you mean train.max_steps?"),
        (["train", *TINY, "--train.batch_size=0"], "train.batch_size is 0: it must be at least 1"),
        (["train", "--config", "no/such.json"], "no/such.json"),
    ],
)
def test_a_mistake_in_a_process_is_one_line_and_2(arguments: list[str], expected: str) -> None:
    assert expected in the_line(process(*arguments))


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "cs336_systems", "nonsense"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "the word after cs336 is 'nonsense'" in done.stderr


# Names of others


def test_a_configuration_has_our_names_whatever_was_written(
    cs336: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []

    def run_case(case: Any, configs: list[Any], path: Path, **_: Any) -> Iterator[Row]:
        found.append((configs, path))
        append_row(path, row := Row(case="model", variant="v", config={}, env={}, status="error", error="not measured"))
        yield row

    monkeypatch.setattr("cs336_systems.bench.runner.run_case", run_case)
    theirs = ["--configs=quick", "--seq_lens", "8", "16", "--mode", "full_step", "--n_warmup", "0", "--n_steps=1"]
    cs336("bench", "model", "--quick", *theirs, "--precision", "torch.float32", "--output-dir", "mine")
    ((configs, path),) = found
    assert path == Path("mine/model.jsonl")
    ours = {"size": "quick", "mode": "train_step", "warmup": 0, "steps": 1, "precision": "fp32"}
    assert [config.context_length for config in configs] == [8, 16]
    assert all(vars(config).items() >= ours.items() for config in configs)


def test_two_names_of_one_option_are_refused(cs336: Run, folder: Path) -> None:
    for first, second in (("--seq_len", "--context_length"), ("--context_length", "--seq_lens")):
        line = the_line(cs336("bench", "model", "--quick", first, "16", second, "32"))
        assert line == f"{first} and {second} are one option: give one of them"


def test_an_option_of_several_values_is_given_once(cs336: Run, folder: Path) -> None:
    line = the_line(cs336("bench", "model", "--quick", "--steps", "1", "--steps", "2"))
    assert line == "--steps is given twice: give all its values after one"


def test_without_a_stdout_a_command_ends_as_with_one(folder: Path) -> None:
    """As a shell has it after `>&-`."""
    code = "import os, sys; sys.stdout = None; from cs336_systems.cli.main import main; main()"
    assert process("bench", "precision-accumulation", "--quick", code=code) == (0, "", "")
    assert (folder / "runs/quick/bench/precision-accumulation.jsonl").exists()


def test_a_picture_that_cannot_be_written_names_plot(cs336: Run, folder: Path) -> None:
    (folder / "is a folder").mkdir()
    for plot in ("", "is a folder"):
        line = the_line(cs336("report", "runs", str(Path(__file__).parents[2] / "results/cpu/demo"), "--plot", plot))
        assert line.startswith(f"plot is {plot!r}: it must be a file that can be written (")
    line = the_line(cs336("report", "runs", str(Path(__file__).parents[2] / "results/cpu/demo"), "--plot", "a.pdf"))
    assert line == "plot is 'a.pdf': it must be a PNG file (.png)"
    assert sorted(path.name for path in folder.iterdir()) == ["is a folder"]


@pytest.mark.parametrize("words", [("tables", "rows.jsonl"), ("headline", "rows.jsonl"), ("writeup", "--results", ".")])
@pytest.mark.parametrize("out, reason", [("", "a folder"), ("file", "file exists"), ("/proc/x", "no such file")])
def test_a_report_that_cannot_be_written_names_out(
    cs336: Run, folder: Path, words: tuple[str, ...], out: str, reason: str
) -> None:
    (folder / "file").write_text("")
    (folder / "rows.jsonl").write_text("")
    line = the_line(cs336("report", *words, "--out", out))
    assert line.startswith(f"out is {out!r}: it must be a folder")
    assert reason in line


@pytest.mark.parametrize("theirs, ours", [("float32", "fp32"), ("bfloat16", "bf16"), ("torch.float16", "fp16")])
def test_types_have_pytorchs_names_too(cs336: Run, folder: Path, theirs: str, ours: str) -> None:
    plan = [cs336("plan", "activation", f"--precision={name}") for name in (theirs, ours)]
    assert plan[0] == plan[1]
    assert plan[0][0] == 0
    profile = ("profile", "kernels", "--quick", "--tool", "none", "--precision")  # precision is looked at before tool
    assert "tool is 'none'" in the_line(cs336(*profile, theirs))
    assert "precision is" in the_line(cs336(*profile, theirs + "s"))


def test_a_type_is_renamed_only_where_a_type_is_asked_for() -> None:
    parser = train_parser()
    words = ["--sample.prompt", "float16", "--config", "float16", "--config=full_step"]
    assert in_our_words(words, parser) == words


def test_a_switch_without_a_value_is_on(cs336: Run) -> None:
    line = the_line(cs336("bench", "model", "--quick", "--compile", "--steps", "0"))
    assert "steps is 0" in line
    assert "compile" in the_line(cs336("bench", "model", "--quick", "--compile", "maybe"))


@pytest.mark.parametrize(
    "arguments, near",
    [
        (["bench", "model", "--n_step=1"], "steps"),
        (["bench", "model", "--seq_lenz=1"], "context_length"),
        (["bench", "model", "--output-dirs=x"], "out"),
        (["bench", "lm-matrix", "--wrapper=naive"], "strategy"),
        (["bench", "attention-sweep", "--tierz=1:2"], "tier"),
        (["bench", "attention-sweep", "--CAUSAL"], "is_causal"),
        (["profile", "memory", "--seq_lenz=1"], "context_length"),
        (["train", "--seq_len=1"], "model.context_length"),
        (["train", "--configs=small"], "model.size"),
    ],
)
def test_a_near_miss_of_another_name_brings_ours(cs336: Run, folder: Path, arguments: list[str], near: str) -> None:
    assert the_line(cs336(*arguments)).endswith(f": did you mean {near}?")


def test_help_names_no_option_of_others(cs336: Run) -> None:
    told = cs336("bench", "model", "--help")[1]
    assert "--context_length" in told
    assert "seq_len" not in told


# Bad input, end to end


def test_a_good_run_ends_with_0_and_says_what_came_of_it(cs336: Run, folder: Path) -> None:
    code, out, err = cs336("train", *TINY, *SHORT, "--run_dir", "run")
    assert code == 0, err
    for word in ("validation loss", "unigram entropy", "bigram model", "sample:", "run folder", "checkpoint"):
        assert word in out
    assert (folder / "run" / "result.json").is_file()
    assert parse_run_config(["--config", "run/config.json"])[0].run_dir == "run"


def test_the_speed_of_a_resumed_run_says_of_which_steps_it_is(cs336: Run, folder: Path) -> None:
    arguments = ["train", *TINY, *SHORT, "--run_dir=run"]
    _, out, _ = cs336(*arguments, "--train.max_steps=10")
    assert re.search(r"^speed +[\d,]+ tokens/s$", out, re.M)
    _, out, _ = cs336(*arguments, "--train.max_steps=20", "--resume=auto")
    assert re.search(r"^speed +[\d,]+ tokens/s, of steps 11 to 20$", out, re.M)
    assert json.loads((folder / "run" / "result.json").read_text())["first_step"] == 11


@pytest.fixture
def train_text(cs336: Run, folder: Path) -> Callable[..., str]:
    """Trains on the bytes of a file input.txt (None: there is none) and returns the one line of its failure."""

    def train(content: bytes | None, *more: str) -> str:
        if content is not None:
            (folder / "input.txt").write_bytes(content)
        return the_line(cs336("train", *TINY, *SHORT, "--data.source=text", "--data.train_text=input.txt", *more))

    return train


GOOD_TEXT = "".join(stories(0, 10_000)).encode()


def test_a_missing_text_is_named(train_text: Callable[..., str]) -> None:
    assert train_text(None) == "text file input.txt does not exist"


def test_a_missing_validation_text_is_named(train_text: Callable[..., str]) -> None:
    assert train_text(GOOD_TEXT, "--data.valid_text=valid.txt") == "text file valid.txt does not exist"


def test_a_folder_as_text_is_named(train_text: Callable[..., str], folder: Path) -> None:
    (folder / "input.txt").mkdir()
    assert train_text(None) == "text file input.txt is not a regular file"


def test_an_unreadable_text_is_named(train_text: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    # By a patch, because permissions do not bind the superuser, who often runs tests.
    open_ = Path.open

    def refuse(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self.name == "input.txt":
            raise PermissionError(13, "Permission denied", str(self))
        return open_(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with open("input.txt", "wb") as file:
        file.write(GOOD_TEXT)
    assert train_text(None) == "text file input.txt cannot be read: Permission denied"


def test_an_empty_text_is_named(train_text: Callable[..., str]) -> None:
    assert train_text(b"") == "text file input.txt is empty"


@pytest.mark.parametrize("wrong", [b"\xff", b"\xc3(", b"\xed\xa0\x80"])
def test_text_that_is_not_utf8_says_at_which_byte(train_text: Callable[..., str], wrong: bytes) -> None:
    message = train_text(GOOD_TEXT[:5000] + wrong + GOOD_TEXT[5000:])
    assert message.startswith("text file input.txt must be UTF-8 text: ")
    assert message.endswith(" at byte 5000")


def test_text_that_ends_inside_a_character_says_at_which_byte(train_text: Callable[..., str]) -> None:
    assert train_text(GOOD_TEXT + "é".encode()[:1]).endswith(f" at byte {len(GOOD_TEXT)}")


def test_invalid_utf8_far_in_the_file_says_at_which_byte(train_text: Callable[..., str]) -> None:
    text = GOOD_TEXT * (3_000_000 // len(GOOD_TEXT))
    assert train_text(text[:2_500_000] + b"\xfe" + text[2_500_000:]).endswith(" at byte 2500000")


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
def test_a_part_to_validate_on_that_is_shorter_than_a_context_names_the_fields_that_say_it(
    train_text: Callable[..., str], more: tuple[str, ...], fields: str
) -> None:
    Path("valid.txt").write_text("Once.")
    message = train_text(b"one two three " * 30, *more)
    assert message.startswith(f"data.valid_tokens data/text/valid.npy, made from {fields}, holds ")


@pytest.mark.parametrize("text", [b"\xc3\xa9", "日本語".encode(), b"x"])
def test_a_text_of_a_few_characters_is_too_short_and_not_called_broken(
    train_text: Callable[..., str], text: bytes
) -> None:
    assert ": at least 17 are needed" in train_text(text)


def test_a_vocabulary_without_room_for_every_byte_says_how_much_is_needed(train_text: Callable[..., str]) -> None:
    message = train_text(GOOD_TEXT, "--model.vocab_size=256")
    assert message.startswith("model.vocab_size is 256: it must be at least 257 to train a tokenizer")
    assert not Path("data/text/tokenizer.json.stamp.json").exists()
    assert "at least 257 to train a tokenizer" in train_text(GOOD_TEXT, "--model.vocab_size=0")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32-be"])
def test_text_of_another_encoding_is_refused_and_says_what_is_read(
    train_text: Callable[..., str], encoding: str
) -> None:
    message = train_text(GOOD_TEXT.decode().encode(encoding))
    assert message.startswith("text file input.txt must be UTF-8 text: ")


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
def test_a_token_file_of_another_type_says_what_it_holds(
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


def test_a_tokenizer_larger_than_the_vocabulary_of_the_model_says_both(train_tokens: Callable[..., str]) -> None:
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


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "CPU", "", "cuda0"])
def test_a_bad_device_name_brings_those_accepted(cs336: Run, folder: Path, name: str) -> None:
    message = the_line(cs336("train", *TINY, *SHORT, f"--train.device={name}"))
    assert message == f"train.device is '{name}': it must be auto, cpu, cuda or cuda:N"


def test_a_cuda_device_that_is_not_there_says_what_is(cs336: Run, folder: Path) -> None:
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
def test_what_cannot_fit_into_memory_is_refused_at_once(cs336: Run, folder: Path, field: str, value: int) -> None:
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
def test_what_just_fits_into_memory_is_not_refused(
    options: list[str], counted: dict[str, int], cs336: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = least_training_bytes(ModelConfig(**MODEL).shape, batch_size=4, micro_batch=4, **counted)
    for there, code in ((needed - 1, 2), (needed, 0)):
        monkeypatch.setattr("cs336_systems.training.fits.memory_bytes", lambda device, there=there: there)
        assert cs336("train", *TINY, *SHORT, *options, "--train.device=cpu", "--run_dir=run")[0] == code


def test_an_attention_kernel_that_does_not_exist_brings_those_that_do(cs336: Run, folder: Path) -> None:
    message = the_line(cs336("train", *TINY, *SHORT, "--model.attention=flash9"))
    assert message.startswith("model.attention is 'flash9': it must be auto or one of naive, ")
    assert " sdpa" in message
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["fa4", "flash_cuda", "sdpa_cudnn"])
def test_an_attention_kernel_that_cannot_run_here_is_named_before_anything_is_written(
    name: str, cs336: Run, folder: Path
) -> None:
    message = the_line(cs336("train", *TINY, *SHORT, "--train.device=cpu", f"--model.attention={name}"))
    assert message.startswith(f"model.attention is '{name}', which cannot be used here: ")
    assert list(folder.iterdir()) == []


def test_a_precision_the_device_has_not_brings_those_it_has(
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
def test_a_seed_runs_or_is_one_line_that_names_it(cs336: Run, folder: Path, field: str, seed: int) -> None:
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


def _caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


def test_ctrl_c_before_the_first_step_ends_without_a_traceback(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cs336_systems.training.prepare.prepare_data", interrupted)
    with pytest.raises(BaseException) as ended:  # noqa: PT011 - a KeyboardInterrupt would end the test session
        main(["train", *TINY, *SHORT])
    assert ended.type is SystemExit
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "raised, code, line",
    [
        (Ended(signal.SIGTERM), 143, "cs336: ended by SIGTERM"),
        (Ended(signal.SIGHUP), 129, "cs336: ended by SIGHUP"),
        (KeyboardInterrupt(), 130, "cs336: interrupted"),
        (_caused(RuntimeError("Error calling __set_name__"), KeyboardInterrupt()), 130, "cs336: interrupted"),
        (_caused(RuntimeError("a fault"), KeyError()), 1, "cs336: a fault"),
    ],
    ids=repr,
)
def test_what_a_signal_raises_is_told_by_the_exit_code(
    raised: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: Any) -> None:
        raise raised

    monkeypatch.setattr("cs336_systems.training.pipeline.train", ended)
    with pytest.raises(SystemExit) as exited:
        main(["train", *TINY, *SHORT])
    assert (exited.value.code, capsys.readouterr().err) == (code, f"{line}\n")


def test_any_json_text_comes_through_a_file(write_config: WriteConfig) -> None:
    """Escapes, and words that another notation would take for something else."""
    for prompt in ("😀", "yes", "null", "1e3", "a: b", "\u2028"):
        config, _ = parse_run_config(
            ["--config", write_config({"model": {"size": "small"}, "sample": {"prompt": prompt}})]
        )
        assert config.sample.prompt == prompt


@pytest.mark.parametrize(
    "environment, message",
    [
        (
            {"RANK": "x"},
            "RANK is 'x' in the environment: it must be a whole number from 0 on, below WORLD_SIZE, which is 2",
        ),
        ({"RANK": "2"}, "RANK is '2' in the environment"),
        ({"RANK": "-1"}, "RANK is '-1' in the environment"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is '' in the environment"),
    ],
)
def test_an_environment_that_no_launcher_has_made_is_refused(
    environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"} | environment).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stop:
        main(["plan", "memory"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith(f"cs336: {message}")
