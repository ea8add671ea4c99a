"""The documents describe the code: imports run one way, and files and commands that README and docs name exist."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from argparse import ArgumentError
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from cs336_systems.cli.arguments import parse
from cs336_systems.cli.main import COMMANDS, run_command
from cs336_systems.cli.report import make_report
from cs336_systems.cli.train import parse_run_config, train_parser
from cs336_systems.config.run import ParallelConfig
from cs336_systems.report.documents import fill_blocks

ROOT = Path(__file__).parents[1]
GUIDES = [
    "docs/assignment.md",
    "docs/extending.md",
    "docs/kernels.md",
    "docs/measure.md",
    "docs/parallel.md",
    "docs/train.md",
    "docs/troubleshooting.md",
]
DOCUMENTS = [
    "README.md",
    "docs/design.md",
    "docs/log.md",
    "docs/multi-node.md",
    "docs/one-gpu.md",
    "docs/two-gpus.md",
    *GUIDES,
]

# The parts that each part may import. The longest name that a module begins with is its part.
BASE = {"cs336_basics", "cs336_systems.config", "cs336_systems.machine"}
PLANNER = {"cs336_systems.planner", "cs336_systems.planner.accounting"}
TRAINING = {*BASE, *PLANNER, "cs336_systems.kernels", "cs336_systems.parallel"}
BENCH = {*TRAINING, "cs336_systems.training"}
PROFILING = {*BENCH, "cs336_systems.bench"}
ALLOWED = {
    "cs336_basics": set(),
    "cs336_systems.config": {"cs336_basics"},
    "cs336_systems.machine": {"cs336_basics"},
    "cs336_systems.planner.accounting": {"cs336_basics"},
    "cs336_systems.planner": {*BASE, "cs336_systems.planner.accounting"},
    "cs336_systems.kernels": BASE,
    "cs336_systems.parallel": BASE,
    "cs336_systems.training": TRAINING,
    "cs336_systems.bench": BENCH,
    "cs336_systems.bench.profiling": PROFILING,
    "cs336_systems.report": {*PROFILING, "cs336_systems.bench.profiling"},
    "cs336_systems.assignment": {*PROFILING, "cs336_systems.bench.profiling", "cs336_systems.report"},
}


def part_of(module: str) -> str:
    return max((part for part in ALLOWED if f"{module}.".startswith(f"{part}.")), key=len, default=module)


def imports_of(path: Path) -> set[str]:
    """Absolute names of the project's modules that a file imports, wherever in it."""
    package = path.relative_to(ROOT).parent.parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name.startswith("cs336_")}


@pytest.mark.parametrize("part", ALLOWED)
def test_imports_run_one_way(part: str) -> None:
    place = ROOT / part.replace(".", "/")
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    assert files
    for file in files:
        if part_of(".".join(file.relative_to(ROOT).with_suffix("").parts)) != part:
            continue
        outside = {part_of(name) for name in imports_of(file)} - {part}
        assert outside <= ALLOWED[part], f"{file} imports {outside - ALLOWED[part]}"


def test_the_import_test_sees_relative_imports() -> None:
    assert "cs336_systems.config.run" in imports_of(ROOT / "cs336_systems/training/pipeline.py")


def tree_of_design() -> list[str]:
    """The paths of the tree in docs/design.md."""
    block = re.search(r"### The tree\n\n```text\n(.*?)```", (ROOT / "docs/design.md").read_text(), re.S)
    assert block
    folder, paths = "", []
    for line in block[1].splitlines():
        name = line.split()[0]
        if line.startswith(" "):
            paths.append(folder + name)
        else:
            folder = name
            paths.append(name)
    return paths


def test_the_tree_is_there() -> None:
    missing = [path for path in tree_of_design() if not (ROOT / path).exists()]
    assert not missing


def test_the_tree_leaves_no_module_of_the_packages_out() -> None:
    named = {path.rstrip("/") for path in tree_of_design()}
    for package in ("cs336_basics", "cs336_systems"):
        for path in (ROOT / package).iterdir():
            relative = f"{package}/{path.name}"
            if path.name.startswith("__") or not (path.is_dir() or path.suffix == ".py"):
                continue
            assert any(name == relative or name.startswith(f"{relative}/") for name in named), relative


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_documents_name_are_there(document: str) -> None:
    text = (ROOT / document).read_text()
    names = set(re.findall(r"(?:cs336_basics|cs336_systems|configs|docs|notebooks|results|tests)/[\w./-]*[\w/]", text))
    assert not [name for name in names if not (ROOT / name).exists()]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_and_fields_that_documents_name_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    commands = set(re.findall(r"(?:\.venv/bin/|`|uv run )cs336 ([a-z][a-z-]*)", text))
    assert commands <= set(COMMANDS)
    fields = {option for action in train_parser()._actions for option in action.option_strings}
    assert set(re.findall(r"(--[a-z]+\.\w+)", text)) <= fields
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"\bmake ([a-z-]+)(?= |`|$)", text, re.M)) & {"demo", "test", "help", "lint"} <= targets


def prose_of(text: str) -> str:
    """A document without its blocks of code."""
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def commands_of(text: str) -> set[tuple[str, ...]]:
    """The words after `cs336` of every command in a document's code, up to one that stands for others (`...`)."""
    blocks = "".join(re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)).replace("\\\n", " ")
    found = set()
    for code in (*blocks.splitlines(), *re.findall(r"`([^`]+)`", prose_of(text))):
        start = r"(?:(?:\.venv/bin/|uv run )?cs336|.*torchrun .*-m cs336_systems) ([a-z].*)"
        if command := re.match(start, " ".join(code.split())):
            words = shlex.split(command[1], comments=True)
            found.add(tuple(words[: words.index("...")] if "..." in words else words))
    return found


class _Parsed(Exception):
    pass


class Commands:
    """Parses commands with their own parsers, without running them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.options = {"--help", "--version"}
        for module in ("train", "models", "evaluate", "bench", "plan", "profile", "report", "speedrun.command"):
            monkeypatch.setattr(f"cs336_systems.cli.{module}.parse", self._parse)

    def _parse(self, parser: Any, arguments: list[str]) -> None:
        known = {option for action in parser._actions for option in action.option_strings}
        self.options |= known
        if unknown := [word for word in arguments if word.startswith("--") and word.partition("=")[0] not in known]:
            raise ValueError(f"unknown {unknown}")
        if arguments and arguments[-1].startswith("--"):  # named without its value
            arguments = arguments[:-1]
        if not any(re.fullmatch("[A-Z_]+", word) for word in arguments):  # which stands for a value
            parsed = parser.parse_args(arguments)
            if "parallel" in parsed:  # other fields may need options that the document leaves out
                ParallelConfig(strategy=parsed.parallel.strategy)
        raise _Parsed

    def wrong_with(self, words: Sequence[str]) -> str | None:
        """The error of a command's parser, or None."""
        if len(words) < 2 or words[1].isupper() or "--help" in words:
            return None  # it stands for several
        name, *arguments = words
        for option in {"--config", "--init_from"} & set(arguments) if name == "train" else ():
            at = arguments.index(option)  # a file or folder that need not be there
            del arguments[at : at + 2]
        try:
            run_command(name, arguments)
        except _Parsed:
            return None
        except (KeyError, ValueError, ArgumentError) as error:
            return f"cs336 {shlex.join(words)}: {error!r}"
        raise AssertionError(f"cs336 {shlex.join(words)} was not parsed")


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    return Commands(monkeypatch)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_of_documents_have_their_options(document: str, commands: Commands) -> None:
    text = (ROOT / document).read_text()
    wrong = [commands.wrong_with(words) for words in sorted(commands_of(text))]
    assert not [each for each in wrong if each]
    if document in GUIDES:  # options that stand alone are those of a command that is there too
        ours, _, others = prose_of(text).partition("## Commands of others")
        ours += re.sub(r"^(#.*|\|[^|]*)", "", others, flags=re.M)  # without their own options
        assert set(re.findall(r"`(--[\w.-]+)", ours)) <= commands.options


@pytest.mark.parametrize(
    "stale",
    [
        "`cs336 bench model --sizes small`",
        "`cs336 bench modle --quick`",
        "`cs336 plan memroy --size xl`",
        "```bash\n.venv/bin/cs336 train --config run.json \\\n  --train.step 5\n```",
        "`torchrun --nproc-per-node 2 -m cs336_systems train --parallel.strategy ddp`",
        "`cs336 profile kernels --tools nsys`",
        "`cs336 bench\n  all-reduce --bytes many`",
    ],
)
def test_a_stale_command_is_noticed(stale: str, commands: Commands) -> None:
    assert [commands.wrong_with(words) for words in commands_of(stale)] != [None]
    assert commands_of(stale)


def options_of(command: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options that a `bench` command sets to other values than their defaults."""
    found: list[dict[str, Any]] = []

    def parse_only(parser: Any, arguments: Sequence[str]) -> None:
        usual = vars(parse(parser, []))
        found.append(
            {name: value for name, value in vars(parse(parser, arguments)).items() if value != usual.get(name)}
        )
        raise _Parsed

    monkeypatch.setattr("cs336_systems.cli.bench.parse", parse_only)
    with pytest.raises(_Parsed):
        run_command("bench", shlex.split(command.removeprefix("cs336 bench ")))
    return found[0]


def test_what_is_said_to_work_as_it_is_does_what_stands_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = re.findall(r"^\| (.*) \| as it is, or `(.*?)`", (ROOT / "docs/assignment.md").read_text(), re.M)
    assert len(rows) > 10
    for theirs, ours in rows:
        case, option, meant, named = " ".join(ours.split()[:3]), "", options_of(ours, monkeypatch), set()
        for code in re.findall(r"`(.*?)`", theirs):
            option = code.split()[0] if code.startswith("--") else option  # of which more values may follow
            words = code if code.startswith("--") else f"{option} {code}"
            for name, values in options_of(f"{case} {words}", monkeypatch).items():
                named.add(name)
                if re.fullmatch("[A-Z]+", words.split()[-1].replace("...", "X")) is None:  # which stands for a value
                    assert isinstance(values, str) or set(values) <= set(meant[name]), words
        assert named == set(meant), theirs


def begins(text: str, parts: Sequence[str | None], fillings: Collection[str]) -> bool:
    """Whether an f-string can begin with the text. A part that is None is a hole, which takes one of the fillings."""
    if not text or not parts:
        return not text
    if parts[0] is None:
        return any(begins(text.removeprefix(filling), parts[1:], fillings)
                   for filling in fillings if text.startswith(filling))  # fmt: skip
    return parts[0].startswith(text) or (
        text.startswith(parts[0]) and begins(text.removeprefix(parts[0]), parts[1:], fillings)
    )


def test_messages_of_the_troubleshooting_are_those_of_the_code() -> None:
    # The reasons for tests that are left out are messages too.
    files = [*ROOT.glob("cs336_*/**/*.py"), ROOT / "tests/conftest.py", ROOT / "tests/profiling/test_page.py"]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    said = "\0".join([*texts, (ROOT / "Makefile").read_text()])
    templates = [
        [str(part.value) if isinstance(part, ast.Constant) else None for part in node.values]
        for node in nodes
        if isinstance(node, ast.JoinedStr)
    ]

    def is_said(piece: str) -> bool:
        fillings = [*filter(piece.__contains__, texts), *re.findall(r"\d+", piece)]
        return piece in said or any(
            begins(piece, [part[at:], *parts[index + 1 :]], fillings)
            for parts in templates
            for index, part in enumerate(parts)
            if part
            for at in range(len(part))
        )

    cells = re.findall(r"^\| ([^|]*) \|", (ROOT / "docs/troubleshooting.md").read_text(), re.M)
    quoted = [quote for cell in cells for quote in re.findall(r"`([^`]+)`", cell) if not quote.startswith("make ")]
    assert len(quoted) > 20
    assert not [piece for quote in quoted for piece in quote.split("...") if not is_said(piece.strip())]
    assert not is_said("s: another rank is gone or lost")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_blocks_of_documents_are_up_to_date(document: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / document).read_text()
    assert fill_blocks(text, make_report) == text, f"cs336 report update {document}"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.json")), ids=lambda path: path.name)
def test_configurations_are_valid_and_use_every_field_they_give(path: Path) -> None:
    given, (config, _) = json.loads(path.read_text()), parse_run_config(["--config", str(path)])
    resolved = config.to_dict()
    for group, values in given.items():
        for name, value in values.items():
            assert resolved[group][name] == value


def test_make_help_lists_every_target() -> None:
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True).stdout
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert phony
    assert set(re.findall(r"make ([a-z-]+)", listed)) == set(phony[1].split())


def test_make_says_before_the_first_install_that_it_takes_a_while_and_nothing_later(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for name in ("python", "cs336", "pytest"):  # which do nothing here
        (tmp_path / ".venv/bin" / name).write_text("#!/bin/sh\n")
        (tmp_path / ".venv/bin" / name).chmod(0o755)

    def make(target: str) -> str:
        environ = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
        command = ["make", target]  # as if no other make had called this test
        return subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=30, check=True
        ).stdout

    said = make("demo").splitlines()
    assert re.fullmatch(r"Installing .* this once\. .* a few minutes; PyTorch is the large part.*", said[0])
    assert "pip install" in said[1]
    assert make("demo").splitlines() == [".venv/bin/cs336 train --config configs/demo.json"]
    assert make("test").splitlines()[0] == "Adding to .venv what is missing."
    assert make("test").splitlines() == [".venv/bin/pytest -n auto --maxprocesses 8 --dist worksteal"]
    (tmp_path / ".venv/.installed").unlink()
    (tmp_path / ".venv/.installed-dev").unlink()
    assert "PyTorch is the large part" in make("test").splitlines()[0]


def test_importing_the_packages_does_no_work() -> None:
    code = "import cs336_basics, cs336_systems, cs336_systems.config.run, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=True)


def test_the_planner_needs_no_pytorch() -> None:
    files = (ROOT / "cs336_systems/planner").glob("[a-z]*.py")
    modules = ", ".join(f"cs336_systems.planner.{path.stem}" for path in files)
    code = f"import sys, cs336_systems.cli.plan, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=True)
