"""What a write-up says of how its rows were measured: the commands that they bear, or that would give the same rows."""

import shlex
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from cs336_systems.bench.case import configurations, row_config
from cs336_systems.bench.cases import get_case
from cs336_systems.bench.row import Row, read_rows
from cs336_systems.cli import bench as bench_command
from cs336_systems.report.writeup.commands import command_for, measured_by, not_measured, settings_in_short
from cs336_systems.report.writeup.problem import Exhibit, RowFile
from cs336_systems.report.writeup.render import markdown_parser

RESULTS = Path(__file__).parents[2] / "results"
FILE = Path("model.jsonl")
EXHIBIT = Exhibit(case="model", command="bench model --size small", is_asked=lambda row: row.config["size"] == "small")


def row(size: str = "xl", command: str | None = None, **config: Any) -> Row:
    env = {"gpu": "NVIDIA Made-up", **({"command": command} if command else {})}
    return Row(case="model", variant="v", config={"size": size, **config}, env=env)


def told(*files: Sequence[Row], is_first: bool = True) -> str:
    return measured_by(EXHIBIT, [RowFile(FILE, rows) for rows in files], is_first)


def of_model(**given: Sequence[Any]) -> list[Row]:
    """Rows of all products of some values, as the case makes them."""
    made = configurations(get_case("model"), {"device": ("cpu",), **{k: tuple(v) for k, v in given.items()}})
    return [row(**row_config(config)) for config in made]


def options_of(command: str) -> dict[str, list[Any]]:
    """The fields that a command gives, and their values."""
    cs336, what, name, *options = shlex.split(command)
    assert (cs336, what) == ("cs336", "bench")
    case = get_case(name)
    parsed = bench_command.case_parser(case, "bench", "bench", "", is_quick=False).parse_args(options)
    return {f.name: values for f in fields(case.config) if (values := getattr(parsed, f.name, None)) is not None}


def test_commands_that_rows_bear_are_named_once_in_the_order_of_the_rows() -> None:
    assert told([row(command="cs336 b"), row(command="cs336 a"), row(command="cs336 b")]) == (
        "measured by `cs336 b` and `cs336 a`"
    )
    assert told([row(command="a"), row(command="b")], [row(command="c")]) == "measured by `a`, `b` and `c`"
    assert told([row(command=name) for name in "abcde"]) == "measured by `a`, `b`, `c` and 2 more"


@pytest.mark.parametrize("size", ["'a`*b*` c'", "'``*a*'", "a*b*c"])
def test_a_command_is_one_span_of_code_whatever_is_in_it(size: str) -> None:
    made = markdown_parser().render(told([row(command=f"cs336 bench model --size {size}")]))
    assert made == f"<p>measured by <code>cs336 bench model --size {size}</code></p>\n"


def test_rows_of_before_have_the_exhibits_command_where_they_are_what_it_asks_for() -> None:
    assert told([row("small")]) == "measured by `cs336 bench model --size small`"
    settings = "measured by `cs336 bench model` with the settings in and above the table"
    assert told([row("small")], is_first=False) == settings
    assert told([row("xl")]) == settings
    assert (
        told([row(command="a"), row("small")]) == "measured by `a`, others measured by `cs336 bench model --size small`"
    )


def test_rows_of_before_do_not_have_a_command_that_gives_only_some_of_them() -> None:
    settings = "measured by `cs336 bench model` with the settings in and above the table"
    assert told([row("small"), row("xl")]) == settings
    assert told([row("small"), row("small", warmup=7)]) == settings  # of what it does not name it takes the usual
    assert (
        told([row("small"), row("small", mode="forward", warmup=5)]) == "measured by `cs336 bench model --size small`"
    )


def test_other_rows_of_before_have_the_commands_that_measure_them_again() -> None:
    files = of_model(size=["xl"], mode=["forward"]), of_model(size=["xl"], mode=["train_step"], compile=[True])
    assert told(*files) == (
        "with the settings of `cs336 bench model --size xl --mode forward` "
        "and `cs336 bench model --size xl --mode train_step --compile true`"
    )
    assert told(files[0], [row("xl")]) == "measured by `cs336 bench model` with the settings in and above the table"


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"mode": ["forward"]},
        {"size": ["small", "xl"], "context_length": [512, 1024], "compile": [False, True], "mode": ["train_step"]},
    ],
)
def test_a_made_command_measures_the_same_configurations(given: dict[str, list[Any]]) -> None:
    rows = of_model(**given)
    command = command_for(rows)
    assert command is not None
    again = of_model(**options_of(command))
    assert [each.config for each in again] == [each.config for each in rows]


def test_rows_that_are_no_product_of_their_values_have_no_command() -> None:
    rows = of_model(size=["small", "xl"], compile=[False, True])
    assert command_for(rows[:-1]) is None


def test_rows_of_before_there_was_a_field_have_a_command_where_it_has_one_value_by_default() -> None:
    def without(name: str) -> list[Row]:
        rows = of_model(mode=["forward"])
        return [replace(each, config={k: v for k, v in each.config.items() if k != name}) for each in rows]

    assert command_for(without("attention")) == "cs336 bench model --mode forward"
    assert command_for(without("mode")) is None  # three values by default
    assert command_for([*without("attention"), *of_model(mode=["forward"])]) is None


def test_what_is_no_case_has_no_command() -> None:
    assert command_for([replace(row(), case="profile-kernels")]) is None


@pytest.mark.parametrize("name", ["compiled/model", "modes/model", "warmup", "gloo/all-reduce", "2.7B/checkpointing"])
def test_commands_of_committed_rows_name_the_values_that_these_have(name: str) -> None:
    rows = read_rows(RESULTS / f"h200/{name}.jsonl")
    command = command_for(rows)
    assert command is not None
    for field, values in options_of(command).items():
        assert list(dict.fromkeys(each.config[field] for each in rows)) == values


def test_what_a_command_measures_and_no_row_is_of_is_named() -> None:
    command, also = "bench model --size small xl --context_length 8 16 --compile false", "bench model --size 10B"
    exhibit = Exhibit(case="model", command=command, also=(also,))
    rows = [row("small", context_length=8, compile=False), row("xl", context_length=8, compile=True)]
    failed = Row(case="model", variant="v", config={"size": "xl", "context_length": 16, "compile": False}, status="oom")
    found = not_measured(exhibit, [*rows, failed])
    settings, is_all = found[command]
    assert settings_in_short(settings, command) == "size small, context_length 16; size xl, context_length 8"
    assert not is_all
    assert found[also][1]
    shown = Exhibit(case="model", command=command, keep=lambda each: each.config["size"] == "small")
    assert settings_in_short(not_measured(shown, rows)[command][0], command) == "size small, context_length 16"
    assert not_measured(Exhibit(case="model", command="bench model"), rows) == {}
    many = "bench model --size a b c d e f"
    told = settings_in_short(not_measured(Exhibit(case="model", command=many), [row("a")])[many][0], many)
    assert told == "size b; size c; size d; 2 more"
