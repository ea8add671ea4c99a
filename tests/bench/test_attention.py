"""The case `attention`: rows of kernels that run, of those that cannot, and of what runs out of memory."""

import pytest
import torch

from cs336_systems.bench import attention as bench
from cs336_systems.bench.attention import AttentionBench, measure, parse_shapes
from cs336_systems.bench.case import Row
from cs336_systems.bench.timing import time_ms
from cs336_systems.cli import main
from cs336_systems.kernels.attention.contract import visible_pairs
from cs336_systems.report.tables import rows_table

QUICK = dict(shapes=((1, 2, 32, 16),), dtype="fp32", device="cpu", rounds=2, rep_ms=0.5, warmup_ms=0.0)


def test_a_row_says_what_ran_and_its_rates_follow_from_its_times() -> None:
    (row,) = measure(AttentionBench(kernels=("naive",), **QUICK))
    assert (row.case, row.variant, row.status, row.error) == ("attention", "naive", "ok", None)
    assert (row.config["shape"], row.config["dtype"], row.config["is_causal"]) == ([1, 2, 32, 16], "fp32", True)
    for name, products in (("forward", 2), ("backward", 5), ("forward_backward", 7), ("forward_sum_backward", 7)):
        times = row.metrics[f"{name}_ms"]
        assert 0 < times["p20"] <= times["p50"] <= times["p80"]
        flops = products * 2 * 16 * visible_pairs(32, 32, True) * 2  # two heads
        assert row.metrics[f"{name}_tflops"] == pytest.approx(flops / times["p50"] / 1e9)


def test_a_kernel_that_cannot_run_is_a_row_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(name: str, device: torch.device) -> object:
        def short_of_memory(*_: object) -> None:
            raise torch.OutOfMemoryError("Tried to allocate 8.00 GiB\nof which nothing is there")

        return short_of_memory if name == "vectorized_torch" else real(name, device)

    real = bench.get_attention
    monkeypatch.setattr(bench, "get_attention", get)
    rows = list(measure(AttentionBench(kernels=("vectorized_torch", "sdpa_cudnn", "sdpa"), **QUICK)))
    assert [row.status for row in rows] == ["oom", "error", "ok"]
    assert rows[0].error == "Tried to allocate 8.00 GiB"
    assert rows[1].error is not None
    assert rows[1].error.startswith("ValueError: q is on cpu")
    table = rows_table(rows)
    assert "| vectorized_torch | out of memory |" in table
    assert "| sdpa_cudnn | not served |" in table


def test_the_table_has_a_line_a_kernel_and_the_newest_row_of_a_shape() -> None:
    def row(kernel: str, shape: list[int], ms: float) -> Row:
        times = {f"{n}_ms": {"p50": ms} for n in ("forward", "backward", "forward_backward", "forward_sum_backward")}
        metrics = {**times, "forward_backward_tflops": 7.0, "first_call_s": 1.5, "extra_memory_bytes": 2**21}
        return Row(case="attention", variant=kernel, config={"shape": shape}, metrics=metrics, env={})

    table = rows_table([row("a", [1, 1, 8, 8], 9.0), row("a", [1, 1, 8, 8], 2.0), row("b", [1, 1, 16, 8], 3.0)])
    assert "| B x H x N x D | 1x1x8x8 | 1x1x16x8 |" in table
    assert "| a | 2 / 2 / 2 (7) | - |" in table
    assert "| b | - | 3 / 3 / 3 (7) |" in table
    assert "| a | 2 / 2.0 / 1.5 | - |" in table


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(kernels=("flash",)), "kernels has 'flash'"),
        (dict(dtype="int8"), "dtype is 'int8'"),
        (dict(shapes=((1, 2, 0, 4),)), "shapes has"),
        (dict(rounds=0), "rounds is 0"),
        (dict(rep_ms=-1.0), "rep_ms is -1.0"),
    ],
)
def test_a_wrong_field_is_named(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        AttentionBench(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["1x2x3", "1x2x3x0", "axbxcxd", "", "1x2x-3x4", "1x2x3x4x5"])
def test_a_shape_that_is_none_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"^shapes has '.*BxHxNxD"):
        parse_shapes([text])


def test_times_are_of_the_work_and_gradients_are_not_added_up() -> None:
    x = torch.ones(3, requires_grad=True)
    calls = []

    def work() -> None:
        calls.append(x.grad)
        x.sum().backward()

    times = time_ms(work, torch.device("cpu"), warmup_ms=0.0, rep_ms=1.0, gradients_of=[x])
    assert len(calls) == 1 + len(times)  # one to see how long a call takes
    assert all(grad is None for grad in calls)


def test_the_command_measures_appends_and_shows(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    out = tmp_path / "rows.jsonl"
    arguments = ["bench", "attention", "--quick", "--kernels", "naive", "sdpa", "--device", "cpu", "--out", str(out)]
    for expected in (4, 8):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 0
        assert len(out.read_text().splitlines()) == expected
    assert "| sdpa |" in capsys.readouterr().out


def test_list_names_the_cases(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "list"])
    assert capsys.readouterr().out.startswith("attention ")
