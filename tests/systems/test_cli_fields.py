"""Fields of a run on the command line and in files: their sources, and errors that name the field in one line."""

import dataclasses
import json
import os
import re
import typing
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from cs336_systems.cli import load_config
from cs336_systems.cli.train import parse_run_config, train_parser
from cs336_systems.config.run import GROUPS, RunConfig
from tests.systems.command import MODEL, TINY, Run, WriteConfig, error_of, the_line

# Sources of a field


def test_the_command_line_overrides_files_in_any_order_and_the_later_of_two_wins(write_config: WriteConfig) -> None:
    first = write_config({"train": {"max_steps": 7, "batch_size": 6}, "skip_data": True})
    second = write_config('{"train": {"max_steps": 8, "seed": 3}}', "second.json")
    files = ["--config", first, "--config", second]
    options = ["--train.seed=1", "--train.seed", "2", "--skip_data", "false"]
    for arguments in ([*files, *options], [*options, *files]):
        config, print_only = parse_run_config(arguments)
        assert (config.train.max_steps, config.train.batch_size, config.train.seed) == (8, 6, 2)
        assert (config.skip_data, print_only) == (False, False)
    assert parse_run_config(files)[0].skip_data is True


@pytest.mark.parametrize(
    "given, expected",
    [([], False), (["--skip_data"], True), (["--skip_data", "true"], True), (["--skip_data=false"], False)],
)
def test_skip_data_works_alone_and_with_a_value(given: list[str], expected: bool) -> None:
    config, _ = parse_run_config([*given, *TINY])
    assert config.skip_data is expected


def test_the_file_may_be_a_pipe() -> None:
    end, other = os.pipe()
    os.write(other, json.dumps({"model": MODEL, "train": {"max_steps": 7}}).encode())
    os.close(other)
    with open(end, "rb"):
        assert parse_run_config(["--config", f"/dev/fd/{end}"])[0].train.max_steps == 7


TEXTS = ["123", "1e5", "2.0", "null", "yes", "{a: b}", "[1", "'q'", "# no", " x ", "a\nb", "😀", "\u2028"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_taken_as_it_is_written(text: str, write_config: WriteConfig) -> None:
    config, _ = parse_run_config([*TINY, f"--sample.prompt={text}", f"--run_dir=x{text}"])
    assert (config.sample.prompt, config.run_dir) == (text, f"x{text}")
    assert load_config(write_config({"sample": {"prompt": text}})).sample.prompt == text


def test_load_config_overrides_fields_by_dotted_name(write_config: WriteConfig) -> None:
    given = {"train.max_steps": 5, "train.compile": True, "optimizer.lr": 1e-5, "optimizer.betas": (0.1, 0.2),
             "skip_data": True, "sample.prompt": "5", "sample.top_p": None, "run_dir": "somewhere"}  # fmt: skip
    config = load_config(write_config({}), **given)
    assert {name: attrgetter(name)(config) for name in given} == given


# --print_config


def test_print_config_can_be_parsed_again(cs336: Run, write_config: WriteConfig, folder: Path) -> None:
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
def test_an_unknown_field_on_the_command_line_suggests_a_near_one(written: str, near: str) -> None:
    message = error_of(*TINY, f"--{written}=5")
    assert message.startswith(f"unknown field {written}")
    assert message.endswith(f": did you mean {near}?" if near else written)


@pytest.mark.parametrize("written, near", [("sample.max_steps", "train.max_steps"), ("trian", "train")])
def test_an_unknown_field_in_the_file_suggests_a_near_one(write_config: WriteConfig, written: str, near: str) -> None:
    message = error_of("--config", write_config(_file_with(written, 5)))
    assert message.startswith(f"unknown field {written}: did you mean {near}")


def test_a_config_file_may_begin_with_a_byte_order_mark(write_config: WriteConfig) -> None:
    path = write_config({"train": {"max_steps": 3}})
    Path(path).write_bytes(b"\xef\xbb\xbf" + Path(path).read_bytes())
    assert load_config(path).train.max_steps == 3


def test_a_shortened_field_is_not_guessed() -> None:
    # A field added later could begin the same.
    assert "train.max_s" in error_of(*TINY, "--train.max_s=3")


@pytest.mark.parametrize("stray", ["stray", "-x", "--train.max_steps"])
def test_a_word_that_is_no_field_and_a_field_without_its_value_are_errors(stray: str) -> None:
    assert stray.lstrip("-") in error_of(*TINY, stray)


# Wrong types and values


@pytest.mark.parametrize(
    "field, written, shown",
    [
        *[("optimizer.lr", written, shown) for written, shown in (("nan", "nan"), (".nan", "nan"), (".inf", "inf"))],
        ("optimizer.lr", "-1", "-1"),
        ("optimizer.betas", "[0.9, 1.5]", "1.5"),
        ("model.rope_theta", "nan", "nan"),
        ("model.size", "huge", "one of small, medium, .*2.7B"),
        ("checkpoint.keep_last", "0", "0"),
    ],
)
def test_a_wrong_value_on_the_command_line_is_named_with_its_field(field: str, written: str, shown: str) -> None:
    assert re.match(f"{field}.*{shown}", error_of(*TINY, f"--{field}={written}"))


def test_text_that_looks_like_a_number_stays_as_it_is() -> None:
    config = parse_run_config([*TINY, "--run_dir", "1e3", "--sample.prompt=2.0", "--optimizer.lr=1e-3"])[0]
    assert (config.run_dir, config.sample.prompt, config.optimizer.lr) == ("1e3", "2.0", 1e-3)


FIELDS = {f"{group}.{name}": hint for group, cls in GROUPS.items() for name, hint in typing.get_type_hints(cls).items()}
FIELDS |= {name: hint for name, hint in typing.get_type_hints(RunConfig).items() if name not in GROUPS}
NOT_OF_THE_TYPE: dict[Any, list[Any]] = {  # annotation -> values that JSON can hold and the field cannot
    int: ["abc", "", 1.5, True, [1], {}, {"a": 1}, [None, 1]],
    float: ["abc", "", True, [1], {"a": 1}, [None, 1]],
    bool: ["abc", "", 1.5, 5, [1], {"a": 1}],
    str: [1.5, 5, True, [1], {"a": 1}],
    tuple: ["abc", "", 1.5, True, [1], {"a": 1}, [1, 2, 3], [None, 1]],
    typing.Literal: ["abc", "", 1.5, True, [1], {"a": 1}],
    typing.Union: ["abc", "", 1.5, 5, [1], {"a": 1}],  # bool | Literal["simple"]
}
IN_WORDS = {
    int: "an integer",
    float: "a finite number",
    bool: "true or false",
    str: "text",
}


def _kind(hint: Any) -> Any:
    """The type of a field without its null: int, float, bool, str, tuple or Literal."""
    (kind,) = [k for k in typing.get_args(hint) if k is not type(None)] if _takes_null(hint) else [hint]
    return typing.get_origin(kind) or kind


def _wrong_values(field: str, one: int) -> list[Any]:
    """All for the first field of an annotation. Others have the same parser: one shows that."""
    values = NOT_OF_THE_TYPE[_kind(FIELDS[field])]
    first = next(other for other, hint in FIELDS.items() if hint == FIELDS[field])
    return values if field == first else [values[one]]


def _check_type_error(message: str, field: str, value: Any) -> None:
    kind = _kind(FIELDS[field])
    choices = typing.get_args(FIELDS[field])
    if kind is tuple:
        numbers = 4 if field == "model.rope_scaling" else 2
        accepted = f"a list of {numbers} numbers, such as [{', '.join(['0.5'] * numbers)}]"
    elif kind is typing.Union:  # of bool and one word
        accepted = f"true or false or {typing.get_args(choices[1])[0]}"
    else:
        accepted = IN_WORDS.get(kind) or f"one of {', '.join(choices)}"
    assert message.startswith(f"{field} ")
    assert message.endswith(f"it must be {accepted}{' or null' if _takes_null(FIELDS[field]) else ''}")
    inner = None if value == [None, 1] and field == "optimizer.betas" else value
    shown = [str(inner), json.dumps(inner)] if inner != "" else ["''"]
    assert any(f" {text}: " in message for text in shown), message
    for leak in ("<class", "typing", "NoneType", "Expected", "Traceback", "\n"):
        assert leak not in message


def _file_with(field: str, value: Any) -> dict[str, Any]:
    group, _, name = field.rpartition(".")
    content: dict[str, Any] = {"model": dict(MODEL)}
    (content.setdefault(group, {}) if group else content)[name] = value
    return content


@pytest.mark.parametrize("field", FIELDS)
def test_a_wrong_type_on_the_command_line_says_in_words_which_type_is_accepted(field: str) -> None:
    kind = _kind(FIELDS[field])
    for value in _wrong_values(field, -1) if kind is not str else []:  # there every word is text
        written = value if isinstance(value, str) else json.dumps(value)
        _check_type_error(error_of(*TINY, f"--{field}={written}"), field, value)


@pytest.mark.parametrize("field", FIELDS)
def test_a_wrong_type_in_the_file_says_in_words_which_type_is_accepted(field: str, write_config: WriteConfig) -> None:
    for value in _wrong_values(field, 0):
        _check_type_error(error_of("--config", write_config(_file_with(field, value))), field, value)
    if not _takes_null(FIELDS[field]):
        assert error_of("--config", write_config(_file_with(field, None))).startswith(field)


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
def test_a_wrong_group_or_a_key_below_a_field_is_named(arguments: list[str], message: str) -> None:
    assert error_of(*TINY, *arguments) == message


def _takes_null(hint: Any) -> bool:
    return type(None) in typing.get_args(hint)


@pytest.mark.parametrize("value", [None, 5, [1], "x"])
@pytest.mark.parametrize("group", ["train", "model"])
def test_a_group_in_the_file_that_is_no_object_is_one_line(
    cs336: Run, write_config: WriteConfig, group: str, value: Any
) -> None:
    assert group in the_line(cs336("train", "--config", write_config({group: value}), "--print_config"))


# The file itself


@pytest.mark.parametrize(
    "content", ["", "{", '{"train": {"max_steps": 5}', '{"train" {}}', '{"model": {}} x', "[1, 2]", "5", "null", '"x"']
)
def test_a_file_that_is_no_json_object_is_one_line_that_names_it(
    cs336: Run, write_config: WriteConfig, content: str
) -> None:
    file = write_config(content, "broken.json")
    assert "broken.json" in the_line(cs336("train", "--config", file, *TINY, "--print_config"))


def test_without_a_model_a_config_file_is_suggested(cs336: Run) -> None:
    line = the_line(cs336("train", "--data.source", "text"))
    assert "model.d_model is missing" in line
    assert "--config FILE" in line
    assert "did you mean train.max_steps?" in the_line(cs336("train", "--train.max_stps", "3"))


def test_a_forgotten_option_or_word_is_named(cs336: Run) -> None:
    assert "by --config configs/demo.json" in the_line(cs336("train", "configs/demo.json"))
    assert "did you mean config?" in the_line(cs336("train", "--confg", "configs/demo.json"))
    assert "case is missing: it must be one of model, warmup" in the_line(cs336("bench"))


def test_a_missing_file_or_a_folder_is_one_line_that_names_it(cs336: Run, tmp_path: Path) -> None:
    assert the_line(cs336("train", "--config", "no/such.json")) == "config file no/such.json does not exist"
    assert the_line(cs336("train", "--config", str(tmp_path))).startswith(f"config file {tmp_path} is not JSON: ")


def test_every_field_has_its_own_help(cs336: Run) -> None:
    assert list(GROUPS) == ["model", "data", "optimizer", "train", "parallel", "checkpoint", "sample", "log"]
    actions = {action.dest: action for action in train_parser()._actions}
    fields = [f.name for f in dataclasses.fields(RunConfig) if f.name not in GROUPS]
    fields += [f"{group}.{f.name}" for group, cls in GROUPS.items() for f in dataclasses.fields(cls)]
    code, out, _ = cs336("train", "--help_all")
    assert code == 0
    shown = " ".join(out.split())
    for field in fields:
        text = actions[field].help
        assert text
        assert len(text) > 8, field
        assert f"--{field}" in shown
        assert " ".join(text.replace("%%", "%").split()[:3]) in shown, field
