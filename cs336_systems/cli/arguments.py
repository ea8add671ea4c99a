"""Command-line parsing with jsonargparse. A mistake becomes one line that names the field."""

import difflib
import json
import os
import re
import textwrap
from argparse import SUPPRESS, Action, ArgumentError
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args, get_origin

from jsonargparse import ArgumentParser, DefaultHelpFormatter, set_parsing_settings

from ..config.checks import describe_type

# Option names that other solutions of the assignment use, and ours. They work, but the help does not list them.
_OURS = {
    "seq_len": "context_length",
    "seq_lens": "context_length",
    "config": "size",
    "configs": "size",
    "n_warmup": "warmup",
    "n_steps": "steps",
    "wrappers": "strategy",
    "custom_tiers": "tier",
    "DTYPE": "dtype",
    "IS_CAUSAL": "is_causal",
    "output-dir": "out",
    "output_dir": "out",
    "out_dir": "out",
}
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_DTYPE_FIELDS = ("dtype", "precision", "weight_dtype", "grad_dtype")


def make_parser(
    command: str, description: str, help_text: Callable[[ArgumentParser], str] | None = None
) -> ArgumentParser:
    """The parser of `cs336 COMMAND`. The docstring under each field of a dataclass becomes its help.

    help_text: makes the text that --help prints, instead of argparse's list of all options.
    """
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(
        prog=f"cs336 {command}",
        description=description,
        exit_on_error=False,
        parser_mode="json",
        print_config=None,
        allow_abbrev=False,
        add_help=help_text is None,
        formatter_class=_Help,
    )
    if help_text is not None:
        about = "Show this help message and exit."
        parser.add_argument("-h", "--help", action=_PrintHelp, help_text=help_text, help=about)
    return parser


class _Help(DefaultHelpFormatter):
    """jsonargparse's help, without the default of a field that is unset or empty: its text says what that means."""

    def _get_help_string(self, action: Action) -> str:
        text = super()._get_help_string(action)
        return text.replace(", default: %(default)s", "") if action.default in (None, "") else text


class _PrintHelp(Action):
    """The option --help of a command that has a help text of its own."""

    def __init__(self, option_strings: Sequence[str], help_text: Callable[[Any], str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, default=SUPPRESS, help=help)
        self.help_text = help_text

    def __call__(self, parser: Any, *_: Any) -> None:
        print(self.help_text(parser))
        parser.exit()


def help_lines(parser: ArgumentParser, options: Sequence[str]) -> list[str]:
    """The help of some of a parser's options, in its groups, at most 80 columns wide.

    Each option takes one or two lines: its text is cut after the last sentence that fits, but not within the first.
    """
    lines: list[str] = []
    for group in parser._action_groups:
        found = [(option, action) for action in group._group_actions for option in action.option_strings
                 if option in options]  # fmt: skip
        if found:
            lines += ["", f"{group.title}:"]
        for option, action in found:
            sentences = re.split(r"(?<=\.) (?=\w)", (action.help or "").replace("%%", "%"))
            while len(wrapped := _wrap_help(option, " ".join(sentences), action)) > 2 and len(sentences) > 1:
                sentences.pop()
            lines += wrapped
    return lines


def _wrap_help(option: str, text: str, action: Action) -> list[str]:
    """Lines of an option's help, with its choices and its default if the text has none."""
    notes = []
    hint, default = getattr(action, "_typehint", None), action.default
    if get_origin(hint) is Literal and any(choice not in text for choice in get_args(hint)):
        notes.append(describe_type(hint))
    if action.nargs != 0 and default not in (None, "", SUPPRESS) and "(default:" not in text:
        notes.append(f"default: {default if isinstance(default, str) else json.dumps(default)}")
    text = text.removesuffix(".") + (f" ({'; '.join(notes)})" if notes else "") + "."
    return textwrap.wrap(
        text, 80, initial_indent=f"  {option:<26}  ", subsequent_indent=" " * 30, break_on_hyphens=False
    )


def parse(parser: ArgumentParser, arguments: Sequence[str]) -> Any:
    """Parse arguments into options. Raises ValueError with one line that names the wrong field."""
    try:
        words = _positionals_first(in_our_words(arguments, parser), parser)
        return parser.instantiate(parser.parse_args(words))
    except ArgumentError as error:
        raise ValueError(_one_line(str(error), parser)) from error


Commands = dict[str, tuple[Callable[[Sequence[str]], int], str]]
"""Subcommands by name: the function that runs each, and its description."""


def run_subcommand(command: str, description: str, commands: Commands, arguments: Sequence[str]) -> int:
    """Run `cs336 COMMAND WHAT ...` and return its exit code. Raises ValueError for wrong arguments."""
    if arguments and arguments[0] in commands:
        return commands[arguments[0]][0](arguments[1:])
    about = "; ".join(f"{name}: {text}" for name, (_, text) in commands.items())
    parser = make_parser(command, description)
    parser.add_argument("what", choices=list(commands), help=f"{about}. cs336 {command} WHAT --help explains each.")
    parse(parser, arguments)
    return 2


def in_our_words(arguments: Sequence[str], parser: ArgumentParser) -> list[str]:
    """Translate other solutions' names of options and values to ours.

    A name that the parser itself knows is kept: `--config` is a file in `cs336 train`. Raises ValueError for an option
    given under two names, and for a list option given twice, because only the last would count.
    """
    known = {option: action.dest for action in parser._actions for option in action.option_strings}
    lists = {action.dest for action in parser._actions if action.nargs in ("+", "*")}
    names: dict[str, str] = {}
    words: list[str] = []
    field = ""
    for word in arguments:
        if not word.startswith("--"):
            words.append(_our_value(field, word))
            continue
        option, equals, value = word.partition("=")
        ours = f"--{_OURS.get(option[2:])}"
        given, option = option, ours if option not in known and ours in known else option
        field = known.get(option, "")
        name = field or option
        if name in names and name in lists and names[name] == given:
            raise ValueError(f"{given} is given twice: give all its values after one")
        if names.setdefault(name, given) != given:
            raise ValueError(f"{names[name]} and {given} are one option: give one of them")
        words.append(f"{option}{equals}{_our_value(field, value)}")
    return words


def _our_value(field: str, text: str) -> str:
    if field in _DTYPE_FIELDS:
        return _DTYPES.get(text.removeprefix("torch."), text)
    return "train_step" if (field, text) == ("mode", "full_step") else text


def _positionals_first(words: Sequence[str], parser: ArgumentParser) -> list[str]:
    """Move positionals to the front, because argparse fills a `*` positional at its first chance, even with nothing."""
    if not any(action.nargs == "*" and not action.option_strings for action in parser._actions):
        return list(words)
    takes_value = {option for action in parser._actions for option in action.option_strings if action.nargs is None}
    found: list[str] = []
    options: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            return [*options, word, *found, *left]
        (options if word.startswith("-") else found).append(word)
        if word in takes_value:
            options += left[:1]
            left = left[1:]
    return [*found, *options]


def field_names(parser: ArgumentParser) -> list[str]:
    """The names of a parser's fields, without its built-in options."""
    return sorted({action.dest for action in parser._actions} - {"help", "help_all", "config", "print_config"})


def unknown_field(name: str, parser: ArgumentParser) -> str:
    """The message for an unknown field. Suggests the nearest known field, also by the names of other solutions."""
    known = {field: field for field in field_names(parser)}
    known |= {option.lstrip("-"): action.dest for action in parser._actions for option in action.option_strings
              if action.dest in known}  # fmt: skip
    known |= {theirs: ours for theirs, ours in _OURS.items() if ours in known and theirs not in known}
    last = name.rpartition(".")[2]
    same_last = [field for field in known if field.rpartition(".")[2] in (last, _OURS.get(last))]
    nearly = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.9)
    options = [*known, *(action.dest for action in parser._actions if action.dest in ("config", "help_all"))]
    near = nearly or same_last or difflib.get_close_matches(name.lower(), options, n=1, cutoff=0.5)
    return f"unknown field {name}" + (f": did you mean {known.get(near[0], near[0])}?" if near else "")


def wrong_choice(name: str, given: str, choices: Sequence[str]) -> str:
    """The message for a value that is not among the choices. Suggests the nearest one."""
    near = difflib.get_close_matches(given.lower(), choices, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{name} is {given!r}: {hint}it must be one of {', '.join(choices)}"


def _one_line(message: str, parser: ArgumentParser) -> str:
    """Rewrite jsonargparse's message as one line without Python types."""
    message = " ".join(message.split())
    if found := re.search(r"unrecognized arguments: --([\w.-]+)", message):
        return unknown_field(found[1], parser)
    if found := re.search(r"unrecognized arguments: (\S+\.json)(?: |$)", message):
        return f"{found[1]} is given without its option: a configuration file is given by --config {found[1]}"
    if (found := re.search(r"unrecognized arguments: (\S+)", message)) and os.path.exists(found[1]):
        # The shell makes several words of a pattern.
        return f"{found[1]} is given without its option: a pattern of several files needs quotes, as in 'books/*.txt'"
    if found := re.search(r"arguments are required: (\w+)", message):
        choices = next(list(action.choices or ()) for action in parser._actions if action.dest == found[1])
        return f"{found[1]} is missing: it must be one of {', '.join(choices)}" if choices else message
    if found := re.match(r"argument (?P<option>--)?(?P<name>\w+): invalid choice: '(?P<given>.*)' \(", message):
        choices = next(list(action.choices or ()) for action in parser._actions if action.dest == found["name"])
        name = found["name"] if found["option"] else f"the word after {parser.prog}"
        return wrong_choice(name, found["given"], choices)
    if found := re.match(r"Group '(\w+)' does not accept option '(\w+)'", message):
        return unknown_field(f"{found[1]}.{found[2]}", parser)
    # The last key is the field: a group given as JSON repeats the message of its field.
    if found := re.match(r'.*Parser key "(?P<name>[^"]+)"(?: element \d+)?: (?P<rest>.*)', message):
        return _wrong_type(found["name"], found["rest"], parser)
    return message


def _wrong_type(name: str, said: str, parser: ArgumentParser) -> str:
    """The message for a field or group of the wrong type. `said` is jsonargparse's message."""
    hints = {action.dest: action._typehint for action in parser._actions if hasattr(action, "_typehint")}
    if name not in hints:
        given = re.search(r"Unable to load config (['\"])(?P<value>.*?)\1", said)
        return f"{name} is {given['value']}: it must be a JSON object" if given else f"{name}: {said}"
    if inside := re.search(r"NestedArg\(key='(\w+)'", said):
        return unknown_field(f"{name}.{inside[1]}", parser)
    # For a union, the messages of all its types come before the value.
    value = re.search(r"Given value type: .*?Given value:(.*)", said) or re.search(r"Got value:(.*)", said)
    if value is None:  # Python refuses to print an integer of thousands of digits
        return f"{name} must be {describe_type(hints[name])}"
    part = get_origin(hints[name]) is tuple and not re.match(r"Expected a (<class ')?tuple", said)
    shown = value[1].strip() or "''"
    return f"{name} {'holds' if part else 'is'} {shown}: it must be {describe_type(hints[name])}"
