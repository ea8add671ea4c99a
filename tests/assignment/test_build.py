"""The functions of templates, boxes in place of rows, and whole write-ups of several folders of rows."""

import contextlib
import functools
import random
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import torch
import torch.utils.checkpoint

from cs336_systems.assignment import build
from cs336_systems.assignment.build import SECTIONS, TEMPLATES, WriteUp
from cs336_systems.assignment.figures import Figures, NoRows
from cs336_systems.bench.case import row_config
from cs336_systems.bench.cases import get_case
from cs336_systems.bench.profiling import kernel_profile, memory_profile
from cs336_systems.bench.row import Row, append_row, read_rows
from cs336_systems.cli.arguments import parse
from cs336_systems.cli.bench import asked, case_parser

from .conftest import RESULTS, Made, NoPictures, committed, filled

PROBLEMS = [name for names in SECTIONS.values() for name in names]
PROFILES = {"kernels": kernel_profile.CASE, "memory": memory_profile.CASE}
GPUS = dict(
    is_available=lambda: True,
    device_count=lambda: 2,
    get_device_name=lambda *_: "NVIDIA H200",
    is_bf16_supported=lambda **_: True,
    device=lambda _: contextlib.nullcontext(),
)
BOX = "> **Not measured yet.** Measure it with `"
Fill = Callable[..., str]


@pytest.fixture
def fill(tmp_path: Path) -> Fill:
    """Fills a template of the test's own from the rows of two sizes on one GPU, of which one is out of memory."""
    for size, ms in (("small", 2.0), ("xl", None)):
        row = Row(case="ddp", variant="naive", config={"size": size, "variant": "naive"},
                  status="ok" if ms else "oom", metrics={"step_ms": ms} if ms else {}, env={"gpu": "H"})  # fmt: skip
        append_row(tmp_path / "rows/ddp.jsonl", row)

    def fill_text(text: str, name: str = "own") -> str:
        (tmp_path / f"{name}.md").write_text(text)
        env = build.environment(Figures(tmp_path / "rows"), NoPictures(), [tmp_path, TEMPLATES])  # type: ignore[arg-type]
        found = build.fill(env, name)
        assert found.count(BOX) == len(env.missing)
        return found

    return fill_text


def cells(table: str) -> list[list[str]]:
    """The cells of a Markdown table, without the line below the header."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()]
    return [lines[0], *lines[2:]]


def test_a_table_has_a_line_for_each_row_and_shows_what_a_row_lacks(fill: Fill) -> None:
    columns = '{"size": "size", "step": "step_ms | number", "twice": "2 * step_ms", "peak": "peak_memory_bytes"}'
    found = fill('{{ table(rows("ddp", size=["small", "xl"], status="any"), ' + columns + ") }}")
    assert cells(found) == [
        ["size", "step", "twice", "peak"],
        ["small", "2", "4.0", "-"],
        ["xl", "out of memory", "-", "-"],
    ]


def test_a_grid_has_a_column_for_each_value_of_a_second_field(fill: Fill) -> None:
    rows = (
        "[dict(a=1, b='x', v=1, status='ok'), dict(a=1, b='y', v=2, status='ok'), dict(a=2, b='y', v=3, status='oom')]"
    )
    assert cells(fill("{{ grid(" + rows + ", 'a', 'b ~ 1', 'v', corner='c') }}")) == [
        ["c", "x1", "y1"], ["1", "1", "2"], ["2", "-", "3"],
    ]  # fmt: skip
    assert cells(fill("{{ grid(" + rows + ", 'a', 'b', 'w') }}"))[2] == ["2", "-", "out of memory"]


def test_values_leave_out_rows_that_lack_a_field_or_fail_a_condition(fill: Fill) -> None:
    rows = "[dict(a=dict(b=3), n=1), dict(n=2), dict(a=dict(b=5), n=3)]"
    assert fill("{{ values(" + rows + ", 'a.b * 2') }}") == "[6, 10]"
    assert fill("{{ values(" + rows + ", 'n if n > 1') }}") == "[2, 3]"


def test_a_field_comes_before_a_method_of_its_name(fill: Fill) -> None:
    assert fill("{{ dict(copy=7, items=8).copy }} {{ dict(a=1).items() | list }}") == "7 [('a', 1)]"


def test_a_part_without_rows_is_a_box_with_the_command_and_the_rest_stays(fill: Fill) -> None:
    found = fill(
        'before\n{% part %}\nlost {{ row("ddp", size="2.7B").step_ms }}\n{% endpart %}\n'
        '{% part %}\n{{ row("ddp", size="small").step_ms }} stays\n{% endpart %}\nafter\n'
    )
    lines = [line for line in found.splitlines() if line]
    assert lines == ["before", f"{BOX}cs336 bench ddp --size 2.7B`.", "2.0 stays", "after"]
    assert fill('lost {{ row("warmup").step_ms }}') == f"{BOX}cs336 bench warmup`."


@pytest.mark.parametrize(
    "line, said",
    [
        ("{{ misspelt }}", "'misspelt' is undefined"),
        ("{{ row('ddp').misspelt }}", "misspelt"),
        ("{{ 1 | misspelt }}", "misspelt"),
        ("{% if %}", "line 3"),
        ("{{ none | ms }}", "NoneType"),
        ("{{ row('misspelt') }}", "case is 'misspelt'"),
        ("{{ row('ddp', status='any') }}", "2 rows match"),
        ("{{ table(rows('ddp'), {'a': 'size +'}) }}", "unexpected"),
        ("{% part %}{{ 1 / 0 }}{% endpart %}", "division by zero"),
    ],
)
def test_a_mistake_in_a_template_names_template_and_line(line: str, said: str, fill: Fill) -> None:
    with pytest.raises(ValueError, match=r"own\.md, line 3: .+") as error:
        fill(f"text\n\n{line}\n")
    assert said in str(error.value)


def test_the_readers_own_templates_come_first(fill: Fill) -> None:
    assert fill("mine", "tp_calcs") == "mine"
    assert fill("{% include 'tp_calcs.md' %}").startswith("mine")


@pytest.mark.parametrize("folder", ["plain", "with space (and) 100% [of] #it"])
def test_the_write_up_has_the_readers_template_and_links_to_its_rows(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "Pictures", NoPictures)
    (tmp_path / "own").mkdir()
    (tmp_path / "own/tp_calcs.md").write_text('My own answer: {{ row("ddp").variant }}.')
    file = tmp_path / folder / "ddp.jsonl"
    append_row(file, replace(read_rows(RESULTS / "h100/2.7B/ddp.jsonl")[0], env={"gpu": "H"}, variant="naive"))
    document = build.build(tmp_path / folder, tmp_path / "out", tmp_path / "own", say=lambda name: None)
    found = re.search(
        r"### tp_calcs\n\nMy own answer: naive\.\n\n\*Measured on H; .*\]\(([^()\s]+)\)\.\*\n\n### fsdp_tp_calcs\n\n\*",
        document.body(),
    )
    assert found
    assert (tmp_path / "out" / unquote(found[1])).resolve() == file


def test_a_folder_without_a_template_of_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "misspelt.md").write_text("mine")
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ValueError, match=r"problems is '.*': no file there is named .*--eject"):
            build.build(tmp_path, tmp_path / "out", folder)


def test_each_problem_has_a_template_and_there_are_no_others() -> None:
    assert len(set(PROBLEMS)) == len(PROBLEMS)
    assert sorted(path.name for path in TEMPLATES.iterdir()) == sorted(f"{name}.md" for name in [*PROBLEMS, "summary"])


def test_the_committed_rows_answer_every_problem(made: Made) -> None:
    text = (made.folder / build.MARKDOWN).read_text()
    assert made.document.missing == []
    assert BOX not in text
    assert re.findall(r"^### (\w+)$", made.document.body(), re.M) == PROBLEMS
    pictures = re.findall(r"\]\((pictures/[\w-]+\.svg)\)", text)
    assert len(pictures) >= 6
    assert sorted(pictures) == sorted(f"pictures/{path.name}" for path in (made.folder / "pictures").iterdir())


def test_every_column_of_the_write_up_has_values(made: Made) -> None:
    """A misspelt field in the column of a table is no mistake, but a column of dashes."""
    tables = re.findall(r"(?:^\|.*\|\n)+", made.document.body(), re.M)
    assert len(tables) >= 18
    for table in tables:
        header, *lines = cells(table)
        assert lines
        for name, column in zip(header, zip(*lines, strict=True), strict=True):
            assert set(column) - {"-"}, f"{name}: {table}"


def test_answers_link_to_their_rows_and_the_appendix_has_them_all(made: Made) -> None:
    linked = set()
    for answer in (answer for answers in made.document.sections.values() for answer in answers):
        links = re.findall(r"\]\(([^)]*\.jsonl)\)", answer.text)
        assert len(links) == len({source.path for source in answer.sources})
        files = {(made.folder / link).resolve() for link in links}
        assert files == {source.path.resolve() for source in answer.sources}
        linked |= files
    tables = dict(made.document.appendix)
    assert "ddp: strategies" in tables
    in_appendix = [re.findall(r"\]\(([^)]*\.jsonl)\)", text) for text in tables.values()]
    assert all(len(links) == 1 for links in in_appendix)
    assert {(made.folder / link).resolve() for (link,) in in_appendix} == linked
    for text in tables.values():
        assert re.search(r"^\| [^|]+ \|.*\n\| ---", text, re.M)
        assert re.search(r"; (NVIDIA|CPU).*; commit `[0-9a-f]", text)


def without_pictures(results: Path, monkeypatch: pytest.MonkeyPatch) -> WriteUp:
    monkeypatch.setattr(build, "Pictures", NoPictures)
    return build.build(results, results, say=lambda name: None)


@pytest.mark.parametrize("folder", ["h100", "cpu"])
def test_rows_of_a_part_leave_boxes_with_commands(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    document = without_pictures(RESULTS / folder, monkeypatch)
    assert document.body().count(BOX) == len(document.missing) > 20
    assert ("NVIDIA H100" in document.summary) is (folder == "h100")


@pytest.mark.parametrize(
    "share", [pytest.param(0.2, marks=pytest.mark.slow), 0.5, pytest.param(0.8, marks=pytest.mark.slow)]
)
def test_an_interrupted_measurement_leaves_boxes_and_no_mistakes(share: float, made: Made) -> None:
    used = {str(source) for answers in made.document.sections.values() for a in answers for source in a.sources}
    figures, drawn = committed(), random.Random(0)
    figures.sources = [each for each in figures.sources if str(each) in used and drawn.random() < share]
    assert figures.sources
    assert BOX in "".join(filled(figures, problem) for problem in (*PROBLEMS, "summary"))


def test_without_rows_there_are_only_boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = without_pictures(tmp_path, monkeypatch)
    assert document.body().count(BOX) == len(document.missing) > 40
    assert document.appendix == []
    assert not any(answer.sources for answers in document.sections.values() for answer in answers)


def configurations_of(command: str) -> tuple[str, list[dict[str, Any]]]:
    """The case of a command, and the fields of the rows that it measures."""
    cs336, what, name, *options = shlex.split(command)
    assert (cs336, what) in (("cs336", "bench"), ("cs336", "profile"))
    case = get_case(name) if what == "bench" else PROFILES[name]
    given = parse(case_parser(case, f"{what} {name}", name, "", is_quick=False), options)
    return case.name, [{**row_config(each), "variant": case.variant(each)} for each in asked(case, command, given)]


def test_the_command_of_each_query_measures_its_rows_on_two_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries: list[tuple[str, str, Sequence[Any], dict[str, Any]]] = []

    def keeping(kind: str, query: Callable[..., Any]) -> Callable[..., Any]:
        def kept(self: Figures, case: str, *variants: Sequence[str], **where: Any) -> Any:
            queries.append((kind, case, variants, where))
            return query(self, case, *variants, **where)

        return kept

    with monkeypatch.context() as patch:
        for kind in ("rows", "row", "launch"):
            patch.setattr(Figures, kind, keeping(kind, getattr(Figures, kind)))
        without_pictures(RESULTS, patch)
    assert len(queries) > 70
    for name, value in GPUS.items():
        monkeypatch.setattr(torch.cuda, name, value)
    commands = functools.cache(configurations_of)
    for kind, case, variants, where in queries:
        with pytest.raises(NoRows) as missing:
            getattr(Figures(tmp_path), kind)(case, *variants, **where)
        named, configs = commands(str(missing.value))
        assert named == case
        asked_for = {name: value for name, value in where.items() if name not in ("command", "status", "machine")}
        wanted = {name: value if isinstance(value, list) else [value] for name, value in asked_for.items()}
        fitting = [config for config in configs if all(config[name] in values for name, values in wanted.items())]
        assert fitting, f"{missing.value} measures no row of {where}"
        assert {config["variant"] for config in fitting} >= {name for each in variants for name in each}


def test_the_sketch_of_checkpointing_computes_the_gradient_in_as_many_passes_as_it_says() -> None:
    sketch = re.search(r"```python\n(.*?)```", (TEMPLATES / "gradient_checkpointing.md").read_text(), re.S)
    assert sketch
    names: dict[str, Any] = {"checkpoint": torch.utils.checkpoint.checkpoint}
    exec(sketch[1], names)
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    blocks = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(8)]
    for block in blocks:
        block.register_forward_pre_hook(count)
    x = torch.randn(2, 4, requires_grad=True)
    (plain,) = torch.autograd.grad(torch.nn.Sequential(*blocks)(x).sum(), x)
    passes = 0
    (found,) = torch.autograd.grad(names["run"](blocks, x).sum(), x)
    torch.testing.assert_close(found, plain)
    assert passes <= 8 * (3 + 1)  # N (log2 N + 1)
    assert passes > 8 * 2  # one level has 2 N
