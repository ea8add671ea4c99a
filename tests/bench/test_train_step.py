"""The case `train-step` on a model that a CPU times in a moment."""

import pytest

from cs336_systems.bench.case import configurations
from cs336_systems.bench.cases.train_step import CASE
from cs336_systems.report.views import rows_table
from cs336_systems.training import preflight


def test_a_row_has_its_run_and_rates_from_its_time() -> None:
    configs = configurations(CASE, {"batch_size": (2,), "steps": (4,)}, quick=True)
    rows = list(CASE.measure(configs))
    assert [(row.case, row.variant, row.status) for row in rows] == [
        ("train-step", "cs336", "ok"),
        ("train-step", "hf_llama", "ok"),
    ]
    for row, config in zip(rows, configs, strict=True):
        assert row.config["run"] == config.run_config().to_dict()
        assert row.config["run"]["train"]["batch_size"] == 2
        mean = row.metrics["step_ms"]["mean"]
        assert mean > 0
        assert row.metrics["startup_s"] > 0
        assert row.metrics["tokens_per_s"] == pytest.approx(2 * 16 / (mean / 1e3))
        assert row.metrics["mfu"] is None  # the peak of a CPU is unknown
    assert rows_table(rows).count("\n| ") == 4


def test_a_model_too_large_for_a_cpu_is_an_oom_row_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "memory_bytes", lambda device: 1 << 20)
    given = {"variant": ("cs336", "hf_llama"), "size": ("xl",)}
    for row in CASE.measure(configurations(CASE, given, quick=True)):
        assert (row.status, row.error is not None and "to train this needs at least" in row.error) == ("oom", True)


def test_fp8_with_the_peer_and_a_graph_without_a_gpu_are_left_out() -> None:
    given = {"precision": ("bf16", "fp8"), "steps": (2,), "size": ("quick",)}
    configs = configurations(CASE, given, quick=True)
    found = [(c.variant, c.precision) for c in configs]
    assert found == [("cs336", "bf16"), ("cs336", "fp8"), ("hf_llama", "bf16")]
    (row,) = CASE.measure(configs[1:2])
    assert (row.status, row.config["precision"], row.config["run"]["train"]["precision"]) == ("ok", "fp8", "fp8")
    with pytest.raises(ValueError, match=r"^precision is 'fp8': it must be fp32 or bf16 with variant hf_llama$"):
        configurations(CASE, {"precision": ("fp8",), "variant": ("hf_llama",)}, quick=True)
    with pytest.raises(ValueError, match=r"^device is 'cpu': it must be a GPU with variant cs336_graph$"):
        configurations(CASE, {"variant": ("cs336_graph",)}, quick=True)


def test_only_cs336_graph_has_a_cuda_graph() -> None:
    for variant in ("cs336", "cs336_graph", "hf_llama"):
        config = CASE.config(size="quick", variant=variant, device="cpu")
        assert config.run_config().train.cuda_graph == (variant == "cs336_graph")
