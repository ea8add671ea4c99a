"""docs/extending.md does what it says: its kernel and its strategy are registered, tested, measured, trained with."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import torch

from cs336_systems.bench.cases import get_case
from cs336_systems.bench.cases.ddp import DDPBench
from cs336_systems.bench.sweep import configurations
from cs336_systems.config import ParallelConfig
from cs336_systems.kernels import attention
from cs336_systems.parallel import STRATEGIES
from cs336_systems.report.views import rows_table
from tests.distributed import run_ranks
from tests.extending import STEPS, code, module_of, train_together
from tests.kernels.attention_cases import QUICK_CASES, check_case
from tests.parallel.models import train_alone

ROOT = Path(__file__).parents[1]


@pytest.fixture
def by_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Steps 1 and 2 of a kernel."""
    module = module_of("by_rows.py", attention)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for name, place in eval(code("_PLACES")).items():
        monkeypatch.setitem(attention._PLACES, name, place)
    yield "by_rows"
    monkeypatch.undo()
    assert "by_rows" not in attention.ATTENTION


def test_the_kernel_keeps_the_criterion_of_all_kernels(by_rows: str, one_thread: None) -> None:
    written: dict[str, Any] = {}
    exec(code("test"), written)
    tests = written["TestByRows"]()
    assert tests.attention is importlib.import_module(f"{attention.__name__}.by_rows").by_rows
    for dtype in tests.dtypes:
        for case in QUICK_CASES:
            check_case(tests.attention, case, dtype, tests.device)
        tests.test_gives_the_same_bits_twice(True, dtype)
    for wrong in ("one dimension", "v of another length", "whole numbers"):
        tests.test_refuses_wrong_inputs(wrong)
    tests.test_is_not_changed_by_autocast()


def test_a_kernel_with_a_backward_pass_of_its_own_passes_the_tests_of_all(tmp_path: Path, one_thread: None) -> None:
    """In a process of its own, for what it registers stays."""
    test = tmp_path / "test_recomputed.py"
    test.write_text(
        "import sys\n"
        "from cs336_systems.kernels import attention\n"
        "from tests.extending import module_of\n"
        'written = module_of("recomputed.py", attention)\n'
        "sys.modules[written.__name__] = written\n"
        'attention._PLACES["recomputed"] = "recomputed:recomputed"\n' + code("test of recomputed")
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout


@pytest.mark.parametrize("name", ["kernels", "flash", "attention-sweep"])
def test_benchmarks_have_the_kernel_at_once(name: str, by_rows: str) -> None:
    case = get_case(name)
    configs = configurations(case, {"kernel": ("naive", by_rows)}, quick=True)
    together = [config for config in configs if {**vars(config), "kernel": ""} == {**vars(configs[0]), "kernel": ""}]
    rows = list(case.measure(together))
    assert [(row.variant, row.status) for row in rows] == [("naive", "ok"), (by_rows, "ok")]
    assert by_rows in rows_table(rows)


@pytest.mark.parametrize("model, micro_batches", [("awkward", 1), ("transformer", 2)])
def test_the_strategy_equals_one_process(model: str, micro_batches: int) -> None:
    states, expected = run_ranks(train_together, 2, model, micro_batches), train_alone(model, STEPS)
    for name, tensor in expected.items():
        assert torch.equal(states[0][name], states[1][name]), name
        torch.testing.assert_close(states[0][name], tensor, rtol=1e-4, atol=1e-5)
    assert "together" not in STRATEGIES


def test_training_and_its_benchmark_take_the_strategy_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="strategy is 'together'"):
        ParallelConfig(strategy="together")
    names = get_args(ParallelConfig.__annotations__["strategy"])
    assert {"auto", *STRATEGIES} == set(names)
    monkeypatch.setitem(ParallelConfig.__annotations__, "strategy", Literal[(*names, "together")])
    assert ParallelConfig(strategy="together").strategy_for(2) == "together"
    assert DDPBench(variant="together", size="quick", device="cpu").run_config().parallel.strategy == "together"
