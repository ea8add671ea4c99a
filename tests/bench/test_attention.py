"""The case `attention`: rows of kernels that run, of those that cannot, and of what runs out of memory."""

from pathlib import Path

import pytest
import torch

from cs336_systems.bench import attention as bench
from cs336_systems.bench.attention import AttentionBench, measure, parse_shapes
from cs336_systems.bench.case import Row, read_rows
from cs336_systems.bench.timing import time_ms
from cs336_systems.cli import main
from cs336_systems.kernels.attention.contract import visible_pairs
from cs336_systems.report.views import rows_table

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
    def get(name: str) -> object:
        def short_of_memory(*_: object) -> None:
            raise torch.OutOfMemoryError("Tried to allocate 8.00 GiB\nof which nothing is there")

        return short_of_memory if name == "vectorized_torch" else real(name)

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


@pytest.mark.parametrize("too_large, status", [((1 << 30, 1 << 20, 1, 1), "oom"), ((1 << 30,) * 4, "error")])
def test_a_shape_that_cannot_be_made_is_rows_and_the_others_go_on(too_large: tuple[int, ...], status: str) -> None:
    shapes = (too_large, *QUICK["shapes"])  # type: ignore[misc]
    rows = list(measure(AttentionBench(kernels=("naive", "sdpa"), **(QUICK | dict(shapes=shapes)))))  # type: ignore[arg-type]
    assert [row.status for row in rows] == [status, status, "ok", "ok"]
    assert [row.variant for row in rows] == ["naive", "sdpa"] * 2
    assert rows[0].error
    assert rows[0].config.keys() == rows[2].config.keys()
    assert rows_table(rows)


def test_a_cpu_without_memory_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "get_attention", lambda name: lambda *_: torch.empty(1 << 50))
    (row,) = measure(AttentionBench(kernels=("naive",), **QUICK))
    assert row.status == "oom"


def test_a_compiled_kernel_with_buffers_to_donate_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wasteful(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> torch.Tensor:
        return ((q @ k.mT).exp() @ v).exp()

    compiled = torch.compile(wasteful, backend="aot_eager")
    monkeypatch.setattr(bench, "get_attention", lambda name: compiled)
    (row,) = measure(AttentionBench(kernels=("naive",), **QUICK))
    assert (row.status, row.error) == ("ok", None)


def test_settings_have_tables_of_their_own() -> None:
    def row(gpu: str | None, **config: object) -> Row:
        return Row(case="attention", variant="a", config={"shape": [1], **config}, status="oom", env={"gpu": gpu})

    rows = [
        row("NVIDIA H200", dtype="bf16", is_causal=True, device="cuda"),
        row("NVIDIA H200", dtype="bf16", is_causal=False, device="cuda"),
        row("NVIDIA H200", dtype="fp32", is_causal=True, device="cpu"),
        row("NVIDIA L4", dtype="bf16", is_causal=True, device="cuda"),
        row("NVIDIA H200", dtype="bf16", is_causal=True, device="cuda"),
    ]
    titles = [line.split(", medians")[0] for line in rows_table(rows).splitlines() if "medians" in line]
    assert titles == [
        "bf16, causal, NVIDIA H200",
        "bf16, not causal, NVIDIA H200",
        "fp32, causal, CPU",
        "bf16, causal, NVIDIA L4",
    ]


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
        (dict(shapes=((1, 2, 3, 2**31),)), "shapes has"),
        (dict(device="tpu"), "device is 'tpu'"),
        (dict(rounds=0), "rounds is 0"),
        (dict(rep_ms=float("inf")), "rep_ms is inf"),
        (dict(rep_ms=-1.0), "rep_ms is -1.0"),
    ],
)
def test_a_wrong_field_is_named(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        AttentionBench(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["1x2x3", "1x2x3x0", "axbxcxd", "", "1x2x-3x4", "1x2x3x4x5", "1x1x1x2147483648", "1x1x1x" + 5000 * "9"]
)
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


def test_the_command_measures_appends_and_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    arguments = ["bench", "attention", "--quick", "--kernels", "naive", "sdpa", "--device", "cpu", "--out", str(out)]
    for expected in (4, 8):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 0
        assert len(out.read_text().splitlines()) == expected
    assert "| sdpa |" in capsys.readouterr().out


def test_options_win_over_quick(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    arguments = ["--kernels", "naive", "--device", "cpu", "--out", str(out), "--dtype", "bf16", "--rounds", "2"]
    with pytest.raises(SystemExit) as stop:
        main(["bench", "attention", "--quick", *arguments, "--rep_ms", "0.5", "--is_causal", "false"])
    assert stop.value.code == 0
    for row in read_rows(out):
        config = {name: row.config[name] for name in ("dtype", "rounds", "rep_ms", "warmup_ms", "is_causal")}
        assert config == {"dtype": "bf16", "rounds": 2, "rep_ms": 0.5, "warmup_ms": 0.0, "is_causal": False}


@pytest.mark.parametrize(
    "wrong, message",
    [
        (["--dtype", "int8"], "dtype is 'int8'"),
        (["--rounds", "0"], "rounds is 0"),
        (["--rep_ms", "-1"], "rep_ms is -1"),
        (["--device", "tpu"], "device is 'tpu'"),
        (["--shapes", "1x1x1x4294967296"], "shapes has '1x1x1x4294967296'"),
        (["--out", ""], "out is ''"),
        (["--out", "TMP"], "out is 'TMP'"),
        (["--out", "TMP/file/rows.jsonl"], "out is 'TMP/file/rows.jsonl'"),
        (["--out", "/proc/rows.jsonl"], "out is '/proc/rows.jsonl'"),
    ],
)
def test_the_command_refuses_before_it_measures(
    wrong: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(bench, "measure", None)
    with pytest.raises(SystemExit) as stop:
        main(["bench", "attention", "--quick", *(word.replace("TMP", str(tmp_path)) for word in wrong)])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"cs336: {message.replace('TMP', str(tmp_path))}")
    assert said.count("\n") == 1


def test_list_names_the_cases(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "list"])
    assert capsys.readouterr().out.startswith("attention ")
