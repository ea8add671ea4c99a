"""`cs336 train`: a JSON file and command-line options become a RunConfig, which is trained."""

import dataclasses
import functools
import json
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from ..config.checks import from_json
from ..config.data import without_default_paths
from ..config.model import SIZE_FIELDS, ModelConfig
from ..config.run import GROUPS, RunConfig, without_default_min_lr
from ..machine.console import launched_rank, program, say
from .arguments import field_names, help_lines, make_parser, parse, unknown_field

_EXIT_CODES = {"SIGINT": 0, "SIGTERM": 128 + 15, "SIGHUP": 128 + 1}

USUAL = (
    "--config", "--print_config", "--help_all", "--run_dir", "--resume",
    "--model.size", "--model.vocab_size", "--model.context_length", "--model.d_model", "--model.d_ff",
    "--model.num_layers", "--model.num_heads", "--model.attention", "--data.source", "--data.train_text",
    "--optimizer.name", "--optimizer.lr", "--train.max_steps", "--train.batch_size", "--train.device",
    "--train.precision", "--train.compile", "--train.cuda_graph", "--parallel.strategy", "--parallel.devices",
    "--parallel.shard_optimizer", "--checkpoint.checkpointing_interval", "--sample.prompt",
)  # fmt: skip
"""The options that --help shows."""
_HELP = """\
usage: cs336 train --config FILE [--OPTION VALUE ...]

Train a language model: text in, trained model out. FILE is a JSON file, such as
configs/demo.json; options override its fields. The usual options are below:
`cs336 train --help_all` shows all.
{}"""


@functools.cache  # reading the help from the docstrings takes most of the time of a parse
def train_parser() -> ArgumentParser:
    """The parser of `cs336 train`: a JSON file and every field of RunConfig."""
    parser = make_parser(
        "train",
        "Train a language model: text in, trained model out.",
        lambda parser: _HELP.format("\n".join(help_lines(parser, USUAL))),
    )
    parser.add_argument("--help_all", action="help", help="Show all options and exit.")
    parser.add_argument("--config", action="config", help="JSON file with any of the fields below.")
    parser.add_argument("--print_config", action="store_true", help="Print the resolved configuration and stop.")
    parser.add_class_arguments(RunConfig, skip={"skip_data", *GROUPS}, as_group=False)
    parser.add_argument("--skip_data", type=bool, nargs="?", const=True, default=False,
                        help="Use the token files as they are. Do not make any.")  # fmt: skip
    for name, group in GROUPS.items():
        parser.add_class_arguments(group, name)
    return parser


def parse_run_config(arguments: Sequence[str]) -> tuple[RunConfig, bool]:
    """Parse arguments into a RunConfig and whether --print_config is given. Raises ValueError naming a wrong field."""
    parser = train_parser()
    words = _read_config_files(arguments, parser)
    try:
        built = parse(parser, words)
    except ValueError as error:
        if not any(word.startswith(("--config", "--model")) for word in words) and "is missing" in str(error):
            raise ValueError(f"{error}, or give --config FILE, such as configs/text.json") from error
        raise
    fields = {name: built[name] for name in ("run_dir", "resume", "init_from", "skip_data", *GROUPS)}
    return RunConfig(**fields), built.print_config


def _read_config_files(arguments: Sequence[str], parser: ArgumentParser) -> list[str]:
    """Replace --config FILE by the file's content, in front, so that fields on the command line override it."""
    files, others = _split(arguments, "--config")
    given = {word.partition("=")[0] for word in others}
    contents = {file: _read_config(file, parser) for file in files}
    if not any("model" in content for content in contents.values()):
        in_files = [content.get("init_from") for content in contents.values()]
        sources = [Path(path) for path in in_files if isinstance(path, str)] + _split(others, "--init_from")[0]
        if sources:
            contents = {sources[-1]: _fields_of_model(sources[-1], parser)} | contents
    if "--model.size" in given:  # it replaces the sizes in the files
        for content in contents.values():
            content["model"] = {k: v for k, v in content.get("model", {}).items() if k not in SIZE_FIELDS}
    with_folder = [file for file, content in contents.items() if "run_dir" in content]
    if with_folder and "--run_dir" not in given:
        _check_not_moved(with_folder[-1], contents[with_folder[-1]]["run_dir"])
    return [word for content in contents.values() for word in ("--config", json.dumps(content))] + others


def _fields_of_model(path: Path, parser: ArgumentParser) -> dict[str, Any]:
    """The architecture and the tokenizer of a run, a checkpoint or a Hugging Face folder, as fields."""
    from cs336_basics.huggingface import OF_HUB, is_hf_folder, read_shape

    from ..training.folder import CONFIG, TOKENIZER
    from ..training.manifest import MANIFEST

    folder = path.resolve().parent.parent if (path / MANIFEST).exists() else path
    if is_hf_folder(folder):
        shape = read_shape(folder)
    elif (folder / CONFIG).is_file():
        shape = from_json(ModelConfig, _read_config(folder / CONFIG, parser).get("model", {})).shape
    else:
        missing = "" if path.exists() else ", which does not exist"
        accepted = f"a run, a checkpoint inside one, or a model's folder ({OF_HUB})"
        raise FileNotFoundError(f"init_from is {str(path)!r}{missing}: it must be {accepted}")
    tokenizer = {"tokenizer": str(folder / TOKENIZER)} if (folder / TOKENIZER).is_file() else {}
    return {"model": shape.to_dict(), "data": tokenizer}


def _split(arguments: Sequence[str], option: str) -> tuple[list[Path], list[str]]:
    """The paths of an option, given as `--option PATH` or `--option=PATH`, and all other arguments."""
    paths: list[Path] = []
    others: list[str] = []
    words = iter(arguments)
    for word in words:
        if word.startswith(f"{option}="):
            paths.append(Path(word.removeprefix(f"{option}=")))
        elif word == option and (path := next(words, None)) is not None:
            paths.append(Path(path))
        else:
            others.append(word)
    return paths, others


def _check_not_moved(file: Path, run_dir: Any) -> None:
    """Raise ValueError if a configuration file lies in the folder of a run, but names another one."""
    if file.name != "config.json" or not isinstance(run_dir, str):
        return
    from ..training.folder import is_run

    if is_run(file.parent) and Path(run_dir).resolve() != file.parent.resolve():
        raise ValueError(
            f"run_dir is {run_dir!r} in config file {file}, whose run was moved or copied: give --run_dir "
            f"{shlex.quote(str(file.parent))} to continue it there, or another --run_dir for a new run"
        )


def _read_config(path: Path, parser: ArgumentParser) -> dict[str, Any]:
    """Read a configuration file, without values that are derived from other fields."""
    if not path.exists():
        raise FileNotFoundError(f"config file {path} does not exist")
    try:
        # Editors on Windows put a byte-order mark in front.
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"config file {path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"config file {path} does not hold a JSON object")
    for name, value in content.items():
        if name in GROUPS and not isinstance(value, dict):
            raise ValueError(f"config file {path}: {name} is {json.dumps(value)}: it must be a JSON object")
        for field in [f"{name}.{key}" for key in value] if name in GROUPS else [name]:
            if field not in field_names(parser):
                raise ValueError(f"{unknown_field(field, parser)} (in config file {path})")
    if "data" in content:
        content["data"] = without_default_paths(content["data"])
    if "optimizer" in content:
        content["optimizer"] = without_default_min_lr(content["optimizer"])
    return content


def load_config(path: str | Path, **overrides: Any) -> RunConfig:
    """Read a RunConfig from a JSON file. Overrides have dotted names: load_config(p, **{"train.max_steps": 5})."""
    words = [f"--{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in overrides.items()]
    return parse_run_config(["--config", str(path), *words])[0]


def train(arguments: Sequence[str]) -> int:
    """Run `cs336 train`; return its exit code."""
    config, print_only = parse_run_config(arguments)
    if print_only:
        print(json.dumps(config.to_dict(), indent=2))
        return 0
    from ..report.run_folders import summary
    from ..training import pipeline

    started = time.perf_counter()
    result = pipeline.train(config)
    if launched_rank():  # rank 0 reports for all
        return 0 if result.interrupted is None else _EXIT_CODES[result.interrupted]
    if result.interrupted is not None:
        # config.json knows how many processes this command started. torchrun must be told again.
        again = program() if launched_rank() is None else "start torchrun as before with -m cs336_systems"
        command = f"{again} train --config {shlex.quote(f'{result.run_dir}/config.json')} --resume auto"
        say(f"stopped by {result.interrupted} at step {result.step}; to go on: {command}")
        return _EXIT_CODES[result.interrupted]
    say(f"\n{summary(dataclasses.asdict(result))}")
    if result.tokens_per_s is not None:
        part = f", of steps {result.first_step:,} to {result.step:,}" if result.first_step > 1 else ""
        say(f"speed            {result.tokens_per_s:,.0f} tokens/s{part}")
    say(f"time             {time.perf_counter() - started:.0f} s")
    if result.sample is not None:
        prompt = "One day" if config.data.source in ("stories", "tinystories") else "The"
        say(f'\nmore of it: {program()} generate {shlex.quote(result.run_dir)} --prompt "{prompt}"')
    return 0
