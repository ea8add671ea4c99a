"""The `cs336` command: help, mistyped words, names from other solutions, exit codes."""

import json
import re
import signal
import subprocess
import sys
from argparse import SUPPRESS
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cs336_systems.bench.cases import CASES
from cs336_systems.bench.row import Row, append_row
from cs336_systems.cli.arguments import in_our_words
from cs336_systems.cli.train import USUAL, train_parser
from cs336_systems.machine.console import Ended
from tests.systems.command import SHORT, TINY, Run, process, the_line

# The command


COMMANDS = ("train", "speedrun", "generate", "evaluate", "export", "import-hf", "bench", "profile", "plan", "report")


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_lists_every_command(cs336: Run, option: str) -> None:
    code, out, err = cs336(option)
    assert (code, err) == (0, "")
    assert re.findall(r"^  (\S+)  ", out, re.M) == list(COMMANDS)


def check_help(text: str, lines: int) -> None:
    assert len(text.splitlines()) <= lines
    assert max(map(len, text.splitlines())) <= 80


def test_the_first_help_fits_one_screen_and_starts_with_three_commands(cs336: Run) -> None:
    told = cs336("--help")[1]
    check_help(told, lines=24)
    assert cs336() == (2, "", told)
    train, bench, report = (line.split() for line in re.findall(r"^  cs336 (.* .*)$", told, re.M))
    assert train[0] == "train"
    run = next(word for word in train if word.startswith("runs/"))
    assert json.loads(cs336(*train, "--print_config")[1])["run_dir"] == run
    assert the_line(cs336(*bench, "--steps", "0")).startswith("steps is 0")
    assert report[-1] == run
    assert cs336(*report[:-1], str(Path(__file__).parents[2] / "results/cpu/demo"))[0] == 0


def test_the_short_help_of_train_has_one_or_two_lines_for_each_option(cs336: Run) -> None:
    code, told, _ = cs336("train", "--help")
    assert code == 0
    assert cs336("train", "-h")[1] == told
    check_help(told, lines=75)
    entries = re.findall(r"^  (--[\w.]+)  +\S.*((?:\n {30}\S.*)*)$", told, re.M)
    assert max(more.count("\n") for _, more in entries) == 1
    assert told.count("(") == told.count(")")  # no text is cut within a sentence
    shown = [option for option, _ in entries]
    assert 20 <= len(shown) <= 30
    assert set(shown) == set(USUAL)  # so that every option that is named exists
    assert {"--config", "--run_dir", "--resume", "--model.size", "--train.max_steps", "--parallel.devices"} <= set(
        shown
    )
    assert "cs336 train --help_all" in told


def test_help_all_of_train_shows_every_option(cs336: Run) -> None:
    code, told, _ = cs336("train", "--help_all")
    assert code == 0
    shown = [action for action in train_parser()._actions if action.help != SUPPRESS]
    options = {option for action in shown for option in action.option_strings}
    assert len(options) > 70
    assert options == set(re.findall(r"^  (?:-h, )?(--[\w.]+)", told, re.M)) | {"-h"}


@pytest.mark.parametrize("command", ["train --help_all", "plan step --help", *(f"bench {c} --help" for c in CASES)])
def test_no_help_shows_an_unset_default(cs336: Run, command: str) -> None:
    told = cs336(*command.split())[1]
    assert "default:" in told
    assert re.findall(r"default:\s+(?:None|null|\))", told) == []


def test_the_help_of_bench_lists_every_case_in_one_line(cs336: Run) -> None:
    code, told, _ = cs336("bench", "--help")
    assert code == 0
    check_help(told, lines=48)
    assert re.findall(r"^  ([\w-]+)  +\S", told, re.M) == list(CASES)
    assert "cs336 bench CASE --help" in told
    assert cs336("bench", "list")[1].strip() in told


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
def test_a_mistyped_command_suggests_the_nearest(cs336: Run, words: list[str], wrong: str, near: str) -> None:
    assert f"is {wrong!r}: did you mean {near}? it must be one of " in the_line(cs336(*words))


def test_a_case_behind_its_options_is_told_to_come_first(cs336: Run) -> None:
    assert the_line(cs336("bench", "--quick", "ddp")).startswith("case is 'ddp': it must come before the options")


def test_an_unknown_command_lists_all(cs336: Run) -> None:
    assert the_line(cs336("xyzzy")) == f"the word after cs336 is 'xyzzy': it must be one of {', '.join(COMMANDS)}"


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
    returned, out, err = process(*COMMANDS, code=code, fresh=True)
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
        (["evaluate", "no/such"], "text"),
        (["evaluate", "no/such", "--text=no.txt"], "no/such"),
        (["evaluate", "no/such", "--text=no.txt", "--batch_size=0"], "batch_size is 0"),
        (["export", "no/such"], "no/such"),
        (["export", "no/such", "--format=gguf"], "hf"),
        (["import-hf", "no/such"], "out"),
        (["import-hf", "no/such", "--out=out"], "no/such"),
        (["profile"], "what"),
        (["profile", "everything"], "memory"),
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
    "words", [["evaluate", "run", "--text"], ["train", "--data.train_text"], ["speedrun", "--data.train_text"]]
)
def test_a_pattern_that_the_shell_has_expanded_needs_quotes(cs336: Run, two_texts: Path, words: list[str]) -> None:
    needed = "valid.txt is given without its option: a pattern of several files needs quotes, as in 'books/*.txt'"
    assert the_line(cs336(*words, *sorted(path.name for path in two_texts.glob("*.txt")))) == needed
    assert the_line(cs336(*words, "input.txt", "more")) == "unrecognized arguments: more"


def test_a_mistake_in_a_process_is_one_line_and_2() -> None:
    line = the_line(process("train", *TINY, "--train.batch_size=0"))
    assert line == "train.batch_size is 0: it must be at least 1"


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "cs336_systems", "nonsense"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "the word after cs336 is 'nonsense'" in done.stderr


# Names from other solutions


def test_names_and_values_from_other_solutions_become_ours(
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


def test_a_list_option_is_given_once(cs336: Run, folder: Path) -> None:
    line = the_line(cs336("bench", "model", "--quick", "--steps", "1", "--steps", "2"))
    assert line == "--steps is given twice: give all its values after one"


def test_a_command_works_without_stdout(folder: Path) -> None:
    """A shell closes it with `>&-`."""
    code = "import os, sys; sys.stdout = None; from cs336_systems.cli.main import main; main()"
    assert process("bench", "precision-accumulation", "--quick", code=code) == (0, "", "")
    assert (folder / "runs/quick/bench/precision-accumulation.jsonl").exists()


def test_a_picture_of_another_kind_is_refused(cs336: Run, folder: Path) -> None:
    line = the_line(cs336("report", "runs", str(Path(__file__).parents[2] / "results/cpu/demo"), "--plot", "a.pdf"))
    assert line == "plot is 'a.pdf': it must be a PNG file (.png)"
    line = the_line(cs336("report", "runs", str(Path(__file__).parents[2] / "results/cpu/demo"), "--plot", "/proc/x/a"))
    assert line.startswith("the folder of plot is '/proc/x': it must be a folder that can be written")
    assert not list(folder.iterdir())


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
def test_dtypes_have_pytorchs_names_too(cs336: Run, folder: Path, theirs: str, ours: str) -> None:
    plan = [cs336("plan", "activation", f"--precision={name}") for name in (theirs, ours)]
    assert plan[0] == plan[1]
    assert plan[0][0] == 0
    profile = ("profile", "kernels", "--quick", "--tool", "none", "--precision")  # precision is checked before tool
    assert "tool is 'none'" in the_line(cs336(*profile, theirs))
    assert "precision is" in the_line(cs336(*profile, theirs + "s"))


def test_only_values_of_dtype_options_are_renamed() -> None:
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
def test_a_near_miss_of_another_solutions_name_suggests_ours(
    cs336: Run, folder: Path, arguments: list[str], near: str
) -> None:
    assert the_line(cs336(*arguments)).endswith(f": did you mean {near}?")


def test_help_does_not_list_other_solutions_names(cs336: Run) -> None:
    told = cs336("bench", "model", "--help")[1]
    assert "--context_length" in told
    assert "seq_len" not in told


@pytest.mark.parametrize(
    "raised, code, line",
    [
        (Ended(signal.SIGTERM), 143, "ended by SIGTERM"),
        (Ended(signal.SIGHUP), 129, "ended by SIGHUP"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (RuntimeError("a fault"), 1, "a fault (RuntimeError at "),
    ],
    ids=repr,
)
def test_a_signal_sets_the_exit_code(
    raised: BaseException, code: int, line: str, cs336: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: Any) -> None:
        raise raised

    monkeypatch.setattr("cs336_systems.training.pipeline.train", ended)
    said = the_line(cs336("train", *TINY, *SHORT), code)
    assert said.startswith(line)
    assert (__file__ in said) == isinstance(raised, RuntimeError)


def test_a_command_runs_in_a_thread_too() -> None:
    code = "import threading; from cs336_systems.cli.main import main; threading.Thread(target=main).start()"
    assert process("plan", "parallelism", code=code, fresh=True)[::2] == (0, "")


INTERRUPTED = """
from cs336_systems.cli import main as cli
def command(*_):
    try:
        import interrupted
    except KeyboardInterrupt:
        return 0
    import os, signal
    os.kill(os.getpid(), signal.SIGINT)
cli.run_command = command
cli.main(["train"])
"""


@pytest.mark.parametrize("is_in_import", [True, False])
def test_an_interrupt_ends_the_command_even_if_an_import_swallows_it(is_in_import: bool, folder: Path) -> None:
    (folder / "interrupted.py").write_text("import os\nos.kill(os.getpid(), 2)\n" if is_in_import else "")
    assert process(code=INTERRUPTED, fresh=True) == (130, "", "cs336: interrupted\n")


@pytest.mark.parametrize(
    "environment, message",
    [
        ({"RANK": "x"}, "RANK is 'x' in the environment: it must be a whole number from 0 on, below WORLD_SIZE"),
        ({"RANK": "2"}, "RANK is '2' in the environment"),
        ({"RANK": "-1"}, "RANK is '-1' in the environment"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is '' in the environment"),
    ],
)
def test_a_wrong_rank_in_the_environment_is_refused(
    environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch, cs336: Run
) -> None:
    for name, value in ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"} | environment).items():
        monkeypatch.setenv(name, value)
    assert the_line(cs336("plan", "memory")).startswith(message)
