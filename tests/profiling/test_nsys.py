"""Nsight Systems: the command line that is built, and its reports, as NVIDIA documents their columns, read right."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch

from cs336_systems.bench.profiling import nsys
from cs336_systems.bench.profiling.kernel_profile import KernelProfile
from cs336_systems.bench.profiling.kernel_totals import KernelTotal
from cs336_systems.bench.profiling.kernel_trace import OUTSIDE, SCORES, SOFTMAX, VALUES
from cs336_systems.bench.profiling.nsys import check_nsys, nsys_command, nsys_totals, profile_with_nsys, stats_command
from cs336_systems.bench.row import Row
from cs336_systems.bench.workload import Workbench, Workload
from cs336_systems.report.views import rows_table

# Two steps. gemm: forward 2 x 2 (one of each in the scores), backward 2 x 3; fill is launched between the phases.
KERNELS = """Processing [report.sqlite] with [/opt/nvidia/nsight-systems/host-linux-x64/reports/cuda_gpu_kern_sum.py]...
Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name
80.0,8000000,10,800000.0,800000.0,100,900,1.0,"void gemm<float, 4>(float *)"
10.0,1000000,2,500000.0,500000.0,100,900,1.0,softmax_forward
10.0,600000,2,300000.0,300000.0,100,900,1.0,multi_tensor_apply
"""
RANGES = """
 Processing...
NVTX Range,Style,PID,TID,NVTX Inst,Kern Inst,Total Time (ns),Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Kernel Name
:forward,PushPop,7,7,2,4,2600000,650000.0,650000.0,100,900,1.0,"void gemm<float, 4>(float *)"
:forward,PushPop,7,7,2,2,1000000,500000.0,500000.0,100,900,1.0,softmax_forward
:attention scores,PushPop,7,7,2,2,1000000,500000.0,500000.0,100,900,1.0,"void gemm<float, 4>(float *)"
:attention scores,PushPop,7,9,2,2,1200000,500000.0,500000.0,100,900,1.0,"void gemm<float, 4>(float *)"
:attention softmax,PushPop,7,7,2,2,1000000,500000.0,500000.0,100,900,1.0,softmax_forward
:optimizer,PushPop,7,7,2,2,600000,300000.0,300000.0,100,900,1.0,multi_tensor_apply
"""
GEMM = "void gemm<float, 4>(float *)"


def test_kernels_outside_the_main_threads_ranges_are_backward() -> None:
    totals = nsys_totals(KERNELS, RANGES, "train_step", steps=2)
    assert totals == [
        KernelTotal(GEMM, "backward", None, 3.0, pytest.approx(2.7)),
        KernelTotal(GEMM, "forward", None, 1.0, pytest.approx(0.8)),
        KernelTotal(GEMM, "forward", SCORES, 1.0, pytest.approx(0.5)),
        KernelTotal("softmax_forward", "forward", SOFTMAX, 1.0, pytest.approx(0.5)),
        KernelTotal("multi_tensor_apply", "optimizer", None, 1.0, pytest.approx(0.3)),
    ]
    assert not any(total.part == VALUES for total in totals)


def test_in_inference_there_is_no_backward_pass() -> None:
    totals = nsys_totals(KERNELS, RANGES.replace(":optimizer", ":other"), "forward", steps=2)
    assert {total.phase for total in totals} == {"forward", OUTSIDE}


@pytest.mark.parametrize("text", ["", "SKIPPED: report.sqlite does not contain CUDA kernel data.\n"])
def test_a_text_that_is_no_report_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="nsys stats has printed no CSV"):
        nsys_totals(text, RANGES, "forward", 1)


def test_the_command_profiles_this_program_from_after_its_warm_up(tmp_path: Path) -> None:
    how = dict(size="quick", precision="bf16", mode="train_step", warmup=2, steps=4, folder=str(tmp_path))
    command = nsys_command(KernelProfile(**how))  # type: ignore[arg-type]
    assert command[:3] == ["nsys", "profile", "--trace=cuda,nvtx"]
    asked = {"--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--cuda-memory-usage=true"}
    assert asked <= set(command)
    assert f"--output={tmp_path}/nsys_train_step" in command
    program, given, facts = command[-3:]
    assert (program, facts) == ("cs336_systems.bench.profiling.nsys", f"{tmp_path}/nsys_train_step.json")
    assert json.loads(given) == how | {"vocab_size": 300}
    recorded = tmp_path / "nsys_train_step.nsys-rep"
    assert stats_command("nvtx_kern_sum", recorded)[:4] == ["nsys", "stats", "--report=nvtx_kern_sum", "--format=csv"]


def test_without_nsys_or_a_gpu_the_error_names_the_alternative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ValueError, match=r"tool is 'nsys', which is not on the PATH.*--tool torch"):
        check_nsys(torch.device("cuda"))
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/nsys")
    check_nsys(torch.device("cuda"))
    with pytest.raises(ValueError, match=r"device is 'cpu'.*--tool torch"):
        check_nsys(torch.device("cpu"))


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program called nsys that profiles nothing: it leaves the profiled program's file and prints the reports."""
    ran = Workload(size="quick", mode="train_step", device="cpu")
    times = {"wall_ms": 5.0, "phase_wall_ms": {"forward": 2.0, "backward": 2.0, "optimizer": 1.0}}
    facts = {"ran": dataclasses.asdict(ran) | {"attention_ranges": True}, "times": times}
    for name, text in (("facts", json.dumps(facts)), ("kernels", KERNELS), ("ranges", RANGES)):
        (tmp_path / name).write_text(text)
    program = tmp_path / "nsys"
    program.write_text(f"""#!/bin/sh
case "$1 $2" in
  profile*) for last; do :; done; cp {tmp_path}/facts "$last";;
  *cuda_gpu_kern_sum) cat {tmp_path}/kernels;;
  *nvtx_kern_sum) cat {tmp_path}/ranges;;
esac
""")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return program


def test_nsys_fills_the_same_tables_as_torch(stand_in: Path, tmp_path: Path) -> None:
    config = KernelProfile(size="quick", device="cpu", mode="train_step", steps=2, folder=str(tmp_path))
    ran, metrics = profile_with_nsys(config)
    assert metrics["kernel_ms"] == pytest.approx(4.8)
    table = rows_table([Row(case="profile-kernels", variant="train_step", config=ran | {"steps": 2}, metrics=metrics)])
    assert "| train_step | 5 | 4.8 |" in table
    assert "| attention part | GFLOP forward | time (ms) |\n" in table


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.mark.parametrize(
    "script, error, message",
    [
        ("echo Traceback >&2; echo boom >&2", RuntimeError, "nsys profile ended with code 3: boom$"),
        (f"echo Traceback >&2; echo '{OOM}' >&2", torch.OutOfMemoryError, f"^{OOM}$"),
        (f"echo '{OOM}' >&2; echo 'Failed to write the report.' >&2", torch.OutOfMemoryError, f"^{OOM}$"),
        (f"echo '{OOM}'; echo Generated report; echo boom >&2", torch.OutOfMemoryError, f"^{OOM}$"),
    ],
)
def test_a_program_that_fails_under_nsys_says_why(
    script: str, error: type[Exception], message: str, stand_in: Path, tmp_path: Path
) -> None:
    stand_in.write_text(f"#!/bin/sh\n{script}\nexit 3\n")
    config = KernelProfile(size="quick", device="cpu", folder=str(tmp_path))
    with pytest.raises(error, match=message):
        profile_with_nsys(config)


def test_nsys_records_only_the_steps_after_the_warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: calls.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: calls.append("stop"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    monkeypatch.setattr(Workbench, "step", lambda self, after=None: calls.append("step"))
    how = dict(size="quick", context_length=16, batch_size=1, device="cpu", optimizer="own", mode="train_step")
    config = KernelProfile(**how, warmup=2, steps=3, folder=str(tmp_path))  # type: ignore[arg-type]
    monkeypatch.setattr("sys.argv", nsys_command(config)[-3:])
    nsys.main()
    assert calls == ["step"] * (2 + 3 + 3) + ["start", "step", "step", "step", "wait", "stop"]
    facts = json.loads((tmp_path / "nsys_train_step.json").read_text())
    assert (facts["ran"]["optimizer"], facts["ran"]["attention_ranges"]) == ("own", True)
    assert list(facts["times"]["phase_wall_ms"]) == ["forward", "backward", "optimizer"]
