"""One command, `cs336`. Thin: it reads arguments, calls the library and prints.

A user's mistake is one line on stderr and exit code 2, a failed run one line and exit code 1. A run that SIGINT
stopped ends with 0 after it has saved; SIGTERM ends with 143 (128 + 15) and a hang-up with 129, so that a scheduler
sees that it was not finished.
"""

import dataclasses
import difflib
import functools
import json
import logging
import re
import sys
import time
from argparse import ArgumentError
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, get_origin

from jsonargparse import ArgumentParser, set_parsing_settings

from .config import (
    CheckpointConfig,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    SampleConfig,
    TrainConfig,
    describe_type,
)

_GROUPS: dict[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "train": TrainConfig,
    "checkpoint": CheckpointConfig,
    "sample": SampleConfig,
    "log": LogConfig,
}
_EXIT_CODES = {"SIGINT": 0, "SIGTERM": 128 + 15, "SIGHUP": 128 + 1}


@functools.cache  # most of the time of a parse would go into reading the help out of the docstrings
def train_parser() -> ArgumentParser:
    """The parser of `cs336 train`: a JSON file and every field of RunConfig."""
    parser = _parser("train", "Text in, trained language model out.")
    parser.add_argument("--config", action="config", help="JSON file with any of the fields below.")
    parser.add_argument("--print_config", action="store_true", help="Print the resolved configuration and stop.")
    parser.add_class_arguments(RunConfig, skip={"skip_data", *_GROUPS})
    parser.add_argument(
        "--skip_data",
        type=bool,
        nargs="?",
        const=True,
        default=False,
        help="Use the token files as they are; make nothing.",
    )
    for name, cls in _GROUPS.items():
        parser.add_class_arguments(cls, name)
    return parser


def parse_run_config(arguments: Sequence[str]) -> tuple[RunConfig, bool]:
    """The RunConfig of some command-line arguments, and whether it is only to be printed.

    Raises ValueError with one line for an unknown field, a wrong type or an impossible value.
    """
    parser = train_parser()
    built = _parse(parser, _config_files_first(list(arguments), parser))
    fields = {name: built[name] for name in ("run_dir", "resume", "init_from", "skip_data", *_GROUPS)}
    return RunConfig(**fields), built.print_config


def _config_files_first(arguments: list[str], parser: ArgumentParser) -> list[str]:
    """The arguments with --config in front, so that fields of the command line win wherever they stand."""
    files, others = [], []
    while arguments:
        word = arguments.pop(0)
        if word == "--config" and arguments:
            files.append(arguments.pop(0))
        elif word.startswith("--config="):
            files.append(word.removeprefix("--config="))
        else:
            others.append(word)
    for file in files:
        _check_config_file(Path(file), parser)
    return [word for file in files for word in ("--config", file)] + others


def _check_config_file(path: Path, parser: ArgumentParser) -> None:
    """Raise ValueError or FileNotFoundError naming the file, and the field, for one that is no configuration."""
    if not path.exists():
        raise FileNotFoundError(f"config file {path} does not exist")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"config file {path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"config file {path} does not hold a JSON object")
    for name, value in content.items():
        if name in _GROUPS and not isinstance(value, dict):
            raise ValueError(f"config file {path}: {name} is {json.dumps(value)}: it must be a JSON object")
        fields = [f"{name}.{key}" for key in value] if name in _GROUPS else [name]
        for field in fields:
            if field not in _fields(parser):
                raise ValueError(f"{_unknown(field, parser)} (in config file {path})")


def _fields(parser: ArgumentParser) -> list[str]:
    return sorted({action.dest for action in parser._actions} - {"help", "config", "print_config"})


def _unknown(name: str, parser: ArgumentParser) -> str:
    """That a field is unknown, with the nearest name there is."""
    known = _fields(parser)
    same_last = [field for field in known if field.rpartition(".")[2] == name.rpartition(".")[2]]
    near = same_last or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"unknown field {name}" + (f": did you mean {near[0]}?" if near else "")


def load_config(path: str | Path, **overrides: Any) -> RunConfig:
    """A RunConfig from a JSON file, with fields overridden by dotted name: load_config(p, **{"train.max_steps": 5})."""
    arguments = [
        f"--{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in overrides.items()
    ]
    return parse_run_config(["--config", str(path), *arguments])[0]


def _one_line(message: str, parser: ArgumentParser) -> str:
    """jsonargparse's message as a line without Python's types, with the nearest field for one that is unknown."""
    message = " ".join(message.split())
    if found := re.search(r"unrecognized arguments: --([\w.]+)", message):
        return _unknown(found[1], parser)
    if found := re.match(r"Group '(\w+)' does not accept option '(\w+)'", message):
        return _unknown(f"{found[1]}.{found[2]}", parser)
    # Of several keys the last one is the field: a group that is given as JSON repeats what its field says.
    if found := re.match(r'.*Parser key "(?P<name>[^"]+)": (?P<rest>.*)', message):
        return _wrong_type(found["name"], found["rest"], parser)
    return message


def _wrong_type(name: str, said: str, parser: ArgumentParser) -> str:
    """That a field, or a group, is of another type than it must be; `said` is what jsonargparse says of it."""
    hints = {action.dest: action._typehint for action in parser._actions if hasattr(action, "_typehint")}
    if name not in hints:
        given = re.search(r"Unable to load config (['\"])(?P<value>.*?)\1", said)
        return f"{name} is {given['value']}: it must be a JSON object" if given else f"{name}: {said}"
    if inside := re.search(r"NestedArg\(key='(\w+)'", said):
        return _unknown(f"{name}.{inside[1]}", parser)
    # A union lists what each of its types says before it comes to the value.
    value = re.search(r"Given value type: .*?Given value:(.*)", said) or re.search(r"Got value:(.*)", said)
    if value is None:  # one that Python itself does not show, an integer of thousands of digits
        return f"{name} must be {describe_type(hints[name])}"
    part = get_origin(hints[name]) is tuple and not re.match(r"Expected a (<class ')?tuple", said)
    shown = value[1].strip() or "''"
    return f"{name} {'holds' if part else 'is'} {shown}: it must be {describe_type(hints[name])}"


def _train(arguments: Sequence[str]) -> int:
    config, print_only = parse_run_config(arguments)
    if print_only:
        print(json.dumps(config.to_dict(), indent=2))
        return 0
    from .report.tables import summary
    from .training import train
    from .training.metrics import say

    started = time.perf_counter()
    result = train(config)
    if result.interrupted is not None:
        say(
            f"stopped by {result.interrupted} at step {result.step}; to go on: "
            f"{_program()} train --config {result.run_dir}/config.json --resume auto"
        )
        return _EXIT_CODES[result.interrupted]
    say(f"\n{summary(dataclasses.asdict(result))}")
    if result.tokens_per_s is not None:
        part = f", of steps {result.first_step:,} to {result.step:,}" if result.first_step > 1 else ""
        say(f"speed            {result.tokens_per_s:,.0f} tokens/s{part}")
    say(f"time             {time.perf_counter() - started:.0f} s")
    if result.sample is not None:
        say(f'\nmore of it: {_program()} generate {result.run_dir} --prompt "One day"')
    return 0


def _program() -> str:
    """How this command was called, for lines that can be pasted."""
    return sys.argv[0] if Path(sys.argv[0]).name == "cs336" else "cs336"


def _parser(command: str, description: str) -> ArgumentParser:
    # The docstring under each field of a dataclass becomes its help.
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    return ArgumentParser(
        prog=f"cs336 {command}",
        description=description,
        exit_on_error=False,
        parser_mode="json",
        print_config=None,
        allow_abbrev=False,
    )


def _parse(parser: ArgumentParser, arguments: Sequence[str]) -> Any:
    try:
        return parser.instantiate(parser.parse_args(list(arguments)))
    except ArgumentError as error:
        raise ValueError(_one_line(str(error), parser)) from error
    except (OverflowError, RecursionError) as error:
        raise ValueError(f"a value is too large, or nested too deeply: {error}") from error


def _generate(arguments: Sequence[str]) -> int:
    parser = _parser("generate", "Sample from a trained model.")
    parser.add_argument("run", type=str, help="Run folder or checkpoint.")
    parser.add_argument("--device", type=str, default="auto", help="auto, cpu, cuda or cuda:N.")
    parser.add_class_arguments(SampleConfig)
    options = vars(_parse(parser, arguments))
    from .hardware import use_device
    from .training.load import load_model
    from .training.pipeline import sample_text

    device, run = use_device(options.pop("device")), options.pop("run")
    sampling = SampleConfig(**options)
    loaded = load_model(run)
    if loaded.tokenizer is None:
        raise ValueError(f"{loaded.checkpoint} was trained without a tokenizer, so it cannot take or give text")
    print(sample_text(loaded.build(device), loaded.tokenizer, sampling))
    return 0


def _export(arguments: Sequence[str]) -> int:
    parser = _parser("export", "Write a trained model in another format.")
    parser.add_argument("run", type=str, help="Run folder or checkpoint.")
    parser.add_argument(
        "--format", choices=["hf"], default="hf", help="hf: what LlamaForCausalLM.from_pretrained loads."
    )
    parser.add_argument("--out", type=str, default=None, help="Folder to write (default: hf in the run folder).")
    options = _parse(parser, arguments)
    from .training.load import export_run

    checkpoint, out = export_run(options.run, options.out)
    print(f"{checkpoint} -> {out}")
    return 0


def _import_hf(arguments: Sequence[str]) -> int:
    parser = _parser("import-hf", "Make a run folder out of a Hugging Face Llama of our kind.")
    parser.add_argument("folder", type=str, help="Folder with config.json and model.safetensors.")
    parser.add_argument("--out", type=str, required=True, help="Run folder to make; --init_from takes it for training.")
    options = _parse(parser, arguments)
    from .training.load import import_run

    print(f"{options.folder} -> {import_run(options.folder, options.out)}")
    return 0


def make_report(arguments: Sequence[str]) -> str:
    """The text of `cs336 report ARGUMENTS`, also what fills the blocks of the documents."""
    parser = _parser("report", "Text and plots out of what runs and measurements have written.")
    parser.add_argument(
        "what",
        choices=["runs", "rows", "summary", "update"],
        help="runs: a table of run folders. rows: tables of .jsonl files of measurements. summary: how "
        "a run ended. update: make the blocks of Markdown documents again.",
    )
    parser.add_argument("paths", nargs="+", type=str, help="Run folders, row files or documents.")
    parser.add_argument("--plot", type=str, default=None, help="With runs: also draw their loss curves into this PNG.")
    options = _parse(parser, arguments)
    from .bench.case import read_rows
    from .report.documents import update_document
    from .report.tables import plot_runs, rows_table, runs_table, summary_block

    paths = [Path(path) for path in options.paths]
    if options.what == "update":
        changed = {path: update_document(path, make_report) for path in paths}
        return "\n".join(f"{path}: {'made again' if new else 'up to date'}" for path, new in changed.items())
    if options.plot:
        plot_runs(paths, Path(options.plot))
    if options.what == "summary":
        return "\n\n".join(map(summary_block, paths))
    return (
        runs_table(paths) if options.what == "runs" else rows_table([row for path in paths for row in read_rows(path)])
    )


def _report(arguments: Sequence[str]) -> int:
    print(make_report(arguments))
    return 0


def _bench(arguments: Sequence[str]) -> int:
    parser = _parser("bench", "Measure, and write one row a measurement.")
    parser.add_argument("case", choices=["attention", "list"], help="What to measure; list names the cases.")
    parser.add_argument("--kernels", nargs="+", type=str, default=None, help="Attention kernels (default: all).")
    parser.add_argument("--shapes", nargs="+", type=str, default=None, help="BxHxNxD, such as 1x16x1024x64.")
    parser.add_argument("--dtype", type=str, default=None, help="bf16, fp16 or fp32 (default: bf16).")
    parser.add_argument(
        "--is_causal", type=bool, default=None, help="Whether a query sees only the keys up to it (default: true)."
    )
    parser.add_argument("--device", type=str, default=None, help="auto, cpu, cuda or cuda:N (default: auto).")
    parser.add_argument("--rounds", type=int, default=None, help="How often the kernels take turns (default: 3).")
    parser.add_argument(
        "--rep_ms", type=float, default=None, help="Time for each measurement of a round (default: 50)."
    )
    parser.add_argument(
        "--quick", action="store_true", help="Small shapes in float32, seconds on a CPU; other options win over it."
    )
    parser.add_argument("--out", type=str, default=None, help="Row file (default: runs/bench/CASE.jsonl).")
    options = _parse(parser, arguments)
    from .bench import attention
    from .bench.case import append_row, check_row_file
    from .report.tables import rows_table
    from .training.metrics import say

    if options.case == "list":
        say(f"attention  {attention.__doc__.splitlines()[0]}")
        return 0
    given: dict[str, Any] = {}
    if options.quick:
        given = {"dtype": "fp32", "rounds": 1, "rep_ms": 1.0, "warmup_ms": 0.0, "shapes": attention.QUICK_SHAPES}
    names = ("dtype", "is_causal", "device", "rounds", "rep_ms")
    given |= {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.shapes is not None:
        given["shapes"] = attention.parse_shapes(options.shapes)
    if options.kernels is not None:
        given["kernels"] = tuple(options.kernels)
    config = attention.AttentionBench(**given)
    path = check_row_file(f"runs/bench/{options.case}.jsonl" if options.out is None else options.out)
    rows = []
    for row in attention.measure(config):
        append_row(path, row)
        rows.append(row)
        say(f"{row.config['shape']} {row.variant}: {row.status} {row.error or ''}".rstrip())
    say("")
    say(rows_table(rows))
    say(f"\nrows are in {path}")
    return 0


_COMMANDS = {
    "train": (_train, "text in, trained language model out"),
    "generate": (_generate, "sample from a trained model"),
    "export": (_export, "write a trained model as a Hugging Face folder"),
    "import-hf": (_import_hf, "make a run out of a Hugging Face folder"),
    "bench": (_bench, "measure the parts"),
    "report": (_report, "tables and plots of runs and measurements"),
}


def _usage() -> str:
    commands = "\n".join(f"  {name:<11}{what}" for name, (_, what) in _COMMANDS.items())
    return f"usage: cs336 COMMAND ...\n\n{commands}\n\ncs336 COMMAND --help tells more of each."


class _ConsoleHandler(logging.Handler):
    """Log lines through rich's console, so that they do not tear the live progress line."""

    def emit(self, record: logging.LogRecord) -> None:
        from .training.metrics import say

        say(self.format(record))


def main(arguments: Sequence[str] | None = None) -> None:
    """The `cs336` command."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    log = logging.getLogger("cs336_systems")
    if not log.handlers:
        log.addHandler(_ConsoleHandler())
        log.setLevel(logging.INFO)
    if arguments == ["--version"]:
        print(f"cs336 {metadata.version('cs336-systems')}")
        sys.exit(0)
    if not arguments or arguments[0] not in _COMMANDS:
        asked = bool(arguments) and arguments[0] in ("-h", "--help")
        print(_usage(), file=sys.stdout if asked else sys.stderr)
        sys.exit(0 if asked else 2)
    try:
        sys.exit(_COMMANDS[arguments[0]][0](arguments[1:]))
    except KeyboardInterrupt:
        _fail(RuntimeError("interrupted"), 130)
    except (ValueError, FileNotFoundError) as error:
        _fail(error, 2)
    except MemoryError:
        _fail(RuntimeError("out of memory: the configuration asks for more than this machine has"), 1)
    except (RuntimeError, OSError) as error:
        _fail(error, 1)


def _fail(error: Exception, code: int) -> None:
    print(f"cs336: {' '.join(str(error).split())}", file=sys.stderr)
    sys.exit(code)
