"""The kernel and the strategy of docs/extending.md can be tested, measured and trained with by name."""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cs336_systems import parallel
from cs336_systems.bench.case import configurations
from cs336_systems.bench.cases import get_case
from cs336_systems.bench.cases.ddp import DDPBench
from cs336_systems.cli.main import main
from cs336_systems.config import run as config
from cs336_systems.config.run import ParallelConfig
from cs336_systems.kernels import attention
from cs336_systems.kernels.attention import get_attention
from cs336_systems.parallel import STRATEGIES, Options, StrategyFactory, get_strategy
from cs336_systems.report.views import rows_table
from cs336_systems.training.metrics import METRICS_FILE, read_metrics
from tests import forked
from tests.distributed import run_ranks
from tests.extending import DOCUMENT, STEPS, code, train_together
from tests.kernels.attention_cases import QUICK_CASES, check_case
from tests.parallel.models import train_alone

pytestmark = pytest.mark.usefixtures("unrendered")

ROOT = Path(__file__).parents[1]
FILES = ("by_rows.py", "recomputed.py", "together.py")
BY_ROWS, TOGETHER = "by_rows:by_rows", "together:TogetherDDP"
TRAIN = ["train", "--data.source", "random", "--model.vocab_size", "50", "--model.context_length", "16",
         "--model.d_model", "16", "--model.d_ff", "32", "--model.num_layers", "1", "--model.num_heads", "2",
         "--train.device", "cpu", "--train.batch_size", "4", "--train.max_steps", "4"]  # fmt: skip
WRONG = """
import torch
from cs336_systems.kernels.attention.reference import naive
from cs336_systems.parallel.strategy import Strategy
def two_arguments(q, k): ...
def with_logsumexp(q, k, v, is_causal): return q, q[..., 0]
def fails(q, k, v, is_causal): raise RuntimeError("no such unit")
def leaves(q, k, v, is_causal): raise SystemExit(3)
def detached(q, k, v, is_causal): return naive(q, k, v, is_causal).detach()
def without_dv(q, k, v, is_causal): return naive(q, k, v.detach(), is_causal)
def not_causal(q, k, v, is_causal): return naive(q, k, v)
def nan(q, k, v, is_causal): return naive(q, k, v, is_causal) * float("nan")
def overwrites(q, k, v, is_causal): q.data.div_(q.norm()); return naive(q, k, v, is_causal)
def as_if_contiguous(q, k, v, is_causal): return naive(q.as_strided(q.shape, q.contiguous().stride()), k, v, is_causal)
def first_tile(q, k, v, is_causal): return naive(q, k.index_fill(2, torch.arange(16, k.shape[2]), 0), v, is_causal)
def other_heads(q, k, v, is_causal): return naive(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1), is_causal)
def wrong_backward(q, k, v, is_causal): return naive(q, k, v * 2 - v.detach(), is_causal)
a_number = 3

class Remembers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

class Needs(Strategy):
    def __init__(self, module, world): super().__init__(module)

a_module = Remembers()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current directory with the document's files, which is not on Python's path.

    Its bin/cs336 stands for the installed command: a script in a folder other than the current one.
    """
    for name in FILES:
        (tmp_path / name).write_text(code(name))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/cs336").write_text(
        "from cs336_systems.cli.main import main\n\nif __name__ == '__main__':\n    main()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    yield tmp_path
    for name in ("by_rows", "together", "wrong"):
        sys.modules.pop(name, None)


def run(command: list[str], cwd: Path, path: Path = ROOT) -> str:
    """Run a Python script or module in `cwd`, with `path` on Python's path; return its output."""
    environ = {**os.environ, "PYTHONPATH": str(path)}
    ran = forked.run([sys.executable, *command], 200, cwd=cwd, env=environ)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_the_kernel_passes_the_tests_of_all_kernels(folder: Path, one_thread: None) -> None:
    written: dict[str, Any] = {}
    exec(code("test"), written)
    tests = written["TestByRows"]()
    assert Path(sys.modules[tests.attention.__module__].__file__) == folder / "by_rows.py"
    for dtype in tests.dtypes:
        for case in QUICK_CASES:
            check_case(tests.attention, case, dtype, tests.device)
        tests.test_gives_the_same_bits_twice(True, dtype)
    for wrong in ("one dimension", "v of another length", "whole numbers"):
        tests.test_refuses_wrong_inputs(wrong)
    tests.test_is_not_changed_by_autocast()


def test_a_kernel_with_its_own_backward_pass_passes_the_tests_of_all_kernels(folder: Path, one_thread: None) -> None:
    """In a process of its own, because registered operators stay. `test_own_kernels.py` compiles such a kernel."""
    test = folder / "test_recomputed.py"
    test.write_text(code("test of recomputed"))
    run(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not random_cases and not compiles", str(test)],
        ROOT,
        path=folder,
    )


@pytest.mark.parametrize("name", ["kernels", "flash", "attention-sweep"])
def test_benchmarks_take_the_kernel(name: str, folder: Path) -> None:
    case = get_case(name)
    configs = configurations(case, {"kernel": ("naive", BY_ROWS)}, quick=True)
    together = [config for config in configs if {**vars(config), "kernel": ""} == {**vars(configs[0]), "kernel": ""}]
    rows = list(case.measure(together))
    assert [(row.variant, row.status) for row in rows] == [("naive", "ok"), (BY_ROWS, "ok")]
    assert BY_ROWS in rows_table(rows)


def test_the_benchmark_warns_of_a_kernel_that_is_wrong(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "wrong.py").write_text(WRONG)
    case = get_case("kernels")
    for name, warnings in ((BY_ROWS, 0), ("wrong:not_causal", 1)):
        (config, *_) = configurations(case, {"kernel": (name,)}, quick=True)
        (row,) = case.measure([config])
        assert (row.status, len(caplog.messages)) == ("ok", warnings)
        assert ("what naive does: its output differs by" in rows_table([row])) == bool(warnings)
    assert caplog.messages[0].startswith("kernel is 'wrong:not_causal': it must be a function that computes what naive")
    (config, *_) = configurations(case, {"kernel": ("wrong:with_logsumexp",)}, quick=True)
    (row,) = case.measure([config])
    assert row.error is not None
    assert "output is 'tuple': it must be a tensor" in row.error


@pytest.mark.parametrize("model, micro_batches", [("awkward", 1), ("transformer", 2)])
def test_the_strategy_equals_one_process(model: str, micro_batches: int, folder: Path) -> None:
    states, expected = run_ranks(train_together, 2, model, micro_batches), train_alone(model, STEPS)
    for name, tensor in expected.items():
        assert torch.equal(states[0][name], states[1][name]), name
        torch.testing.assert_close(states[0][name], tensor, rtol=1e-4, atol=1e-5)


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run_dir / METRICS_FILE) if "loss" in row]


def test_two_processes_train_with_both_and_resume(folder: Path) -> None:
    """By the command, which lacks the current directory on its path, and by a script from elsewhere."""
    run_dir = folder / "run"
    both = ["--model.attention", BY_ROWS, "--parallel.strategy", TOGETHER, "--parallel.devices", "2"]
    checkpoints = ["--checkpoint.checkpointing_interval", "2"]
    run(["bin/cs336", *TRAIN, *both, *checkpoints, "--run_dir", str(run_dir)], folder)
    kept = json.loads((run_dir / "config.json").read_text())
    assert (kept["model"]["attention"], kept["parallel"]["strategy"]) == (BY_ROWS, TOGETHER)
    whole = losses(run_dir)

    script = folder / "go_on.py"
    script.write_text(
        "import sys\n"
        "from cs336_systems.cli import load_config\n"
        "from cs336_systems.training import train\n"
        "if __name__ == '__main__':\n"
        "    run_dir = sys.argv[1]\n"
        "    checkpoint = f'{run_dir}/checkpoints/step_00000002'\n"
        "    train(load_config(f'{run_dir}/config.json', resume=checkpoint))\n"
    )
    run([str(script), str(run_dir)], ROOT)
    assert losses(run_dir) == whole

    with pytest.raises(SystemExit, match=r"^0$"):
        main([*TRAIN, "--model.attention", "naive", "--run_dir", str(folder / "alone")])
    assert whole == pytest.approx(losses(folder / "alone"), rel=1e-4)


def test_the_benchmark_of_strategies_takes_it(folder: Path) -> None:
    told = run(["bin/cs336", "bench", "ddp", "--quick", "--variant", "alone", f"{TOGETHER}+zero1+bf16"], folder)
    assert f"variant {TOGETHER}+zero1+bf16: ok" in told
    for variant in (f"{TOGETHER}:5", f"{TOGETHER}+zero2"):  # it takes neither
        with pytest.raises(ValueError, match=f"^variant is '{TOGETHER}"):
            DDPBench(variant=variant, size="quick", device="cpu")


@pytest.mark.parametrize(
    "option, name, message",
    [
        ("model.attention", "nowhere:attention", r"nowhere cannot be imported from .* \(ModuleNotFoundError: "),
        ("model.attention", "by_rows:rows", "it must be module:name, and .*by_rows.* has no rows"),
        ("model.attention", "wrong:a_number", "it must be a function, attention"),
        ("model.attention", "wrong:two_arguments", "which cannot be used here: two_arguments"),
        ("model.attention", "wrong:with_logsumexp", "it must be a function that returns a tensor of q's shape"),
        ("model.attention", "wrong:fails", "which cannot be used here: no such unit"),
        ("model.attention", "wrong:leaves", "which cannot be used here: 3"),
        ("model.attention", "wrong:detached", "it must be a function that gives q, k and v gradients"),
        ("model.attention", "wrong:without_dv", "it must be a function that gives q, k and v gradients"),
        ("model.attention", "wrong:not_causal", "it must be .* what naive does: its output differs by "),
        ("model.attention", "wrong:nan", "its output differs by nan%"),
        ("model.attention", "wrong:overwrites", "its output differs by "),
        ("model.attention", "wrong:as_if_contiguous", "its output differs by "),
        ("model.attention", "wrong:first_tile", "its output differs by "),
        ("model.attention", "wrong:other_heads", "its output differs by "),
        ("model.attention", "wrong:wrong_backward", "its dv differs by 100%"),
        ("model.attention", "wrong:a_module", "it must be a function, .* without parameters and buffers"),
        ("model.attention", "leaves:attention", r"leaves cannot be imported from .* \(SystemExit: 5\)"),
        ("model.attention", "by-rows:by_rows", "it must be auto or one of .*, or module:function"),
        ("parallel.strategy", "nowhere:Strategy", r"nowhere cannot be imported from .* \(ModuleNotFoundError: "),
        ("parallel.strategy", "together:Together", "it must be module:name, and .*together.* has no Together"),
        ("parallel.strategy", "by_rows:by_rows", "it must be a subclass of .*Strategy"),
        ("parallel.strategy", "by_rows:Tensor", "it must be a subclass of .*Strategy"),
        ("parallel.strategy", "wrong:Needs", "it must be a class .*: missing a required argument: 'world'"),
        ("parallel.strategy", "together.py", "it must be one of auto, none, .*, or module:Class"),
    ],
)
def test_a_wrong_name_is_refused_in_one_line(
    option: str, name: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "wrong.py").write_text(WRONG)
    (folder / "leaves.py").write_text("import sys\nsys.exit(5)\n")
    with pytest.raises(SystemExit, match=r"^2$"):
        main([*TRAIN, "--model.num_kv_heads", "1", "--model.context_length", "64", f"--{option}", name])
    told = capsys.readouterr().err.strip()
    assert "\n" not in told
    assert re.match(f"cs336: {option} is '{name}'.*{message}", told), told


def test_an_option_that_the_strategy_does_not_take_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main([*TRAIN, "--parallel.strategy", TOGETHER, "--parallel.reshard_after_forward", "false"])
    told = capsys.readouterr().err
    assert f"parallel.reshard_after_forward is false: it must be true with parallel.strategy '{TOGETHER}'" in told


def test_a_strategy_gets_the_options_that_it_names() -> None:
    assert get_strategy("fsdp").options == ("grad_dtype", "compute_dtype", "reshard_after_forward")
    assert get_strategy("bucketed").options == ("bucket_size_mb", "grad_dtype")
    assert get_strategy("individual").options == get_strategy("naive").options == ("grad_dtype",)
    assert get_strategy("tests.parallel.own_strategies:Gathering").options == ()


def test_in_the_package_both_have_short_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package, name, place in ((attention, "by_rows", BY_ROWS), (parallel, "together", TOGETHER)):
        assert f'`"{name}": "{place}"`' in DOCUMENT
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    monkeypatch.setitem(attention._IMPORT_PATHS, "by_rows", BY_ROWS)
    monkeypatch.setitem(STRATEGIES, "together", StrategyFactory(f"{parallel.__name__}.{TOGETHER}"))
    monkeypatch.setitem(config.STRATEGIES, "together", TOGETHER)
    assert get_attention("by_rows").__module__ == f"{attention.__name__}.by_rows"
    strategy = get_strategy(ParallelConfig(strategy="together").resolved(2).strategy)(torch.nn.Linear(2, 2), Options())
    assert type(strategy).__module__ == f"{parallel.__name__}.together"
    for name in (get_attention("by_rows").__module__, type(strategy).__module__):
        del sys.modules[name]
