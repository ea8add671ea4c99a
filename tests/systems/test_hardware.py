"""Peaks, devices, memory, precisions and the environment stamp; errors for missing devices."""

import contextlib
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cs336_basics.model import TransformerLM
from cs336_systems.machine import hardware
from cs336_systems.machine.hardware import (
    check_precision,
    device_peak_flops,
    environment,
    gpu_name,
    memory_bytes,
    peak_flops,
    select_device,
    to_host,
    why_fp8_is_slow,
    with_index,
)
from cs336_systems.training.optimizer import FusedAdamW


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes PyTorch see GPUs with a name."""

    def pretend(count: int, name: str = "NVIDIA H200", bf16: bool = True, capability: tuple[int, int] = (9, 0)) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation=True: bf16 or including_emulation
        )

    return pretend


@pytest.fixture
def empty_cache() -> Iterator[None]:
    """Clears the cache of program outputs before and after a test."""
    hardware._output.cache_clear()
    yield
    hardware._output.cache_clear()


# Peak rates


DATASHEETS = {
    "bf16": {"NVIDIA H200": 989, "NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA H100 NVL": 835,
             "NVIDIA B200": 2250, "NVIDIA GB200": 2500, "NVIDIA A100-SXM4-80GB": 312, "NVIDIA L4": 121,
             "NVIDIA L40S": 362, "NVIDIA A10G": 70, "NVIDIA GeForce RTX 4090": 165},
    "fp8": {"NVIDIA H100 80GB HBM3": 1979, "NVIDIA L40S": 733},
    "tf32": {"NVIDIA H200": 494},
    "fp32": {"NVIDIA H200": 67, "NVIDIA GeForce RTX 3090": 35.6},
    "fp16": {"NVIDIA A100-PCIE-40GB": 312, "Tesla T4": 65, "Tesla V100-SXM2-16GB": 125},
}  # fmt: skip


@pytest.mark.parametrize("precision, name", [(kind, name) for kind, peaks in DATASHEETS.items() for name in peaks])
def test_the_peak_of_a_device_comes_from_its_datasheet(precision: str, name: str) -> None:
    assert peak_flops(name, precision) == pytest.approx(DATASHEETS[precision][name] * 1e12)


@pytest.mark.parametrize("name", ["", "NVIDIA X9000", "NVIDIA H2000", "NVIDIA GH200 480GB", "NVIDIA L40", "NVIDIA A10"])
def test_an_unknown_device_has_no_peak(name: str) -> None:
    assert peak_flops(name, "bf16") is None


PARTS = [
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A100-SXM4-40GB MIG 7g.40gb", "NVIDIA H200 MIG 1g.18gb+me",
    "GRID T4-8Q", "NVIDIA A100-4C", "NVIDIA A100-1-5CME", "NVIDIA H100-20C", "GRID A100D-10C", "GRID V100-16A",
    "NVIDIA L40S-1B",
]  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_a_card_has_no_peak(name: str) -> None:
    """Instances of MIG, and virtual GPUs with and without it."""
    assert peak_flops(name, "fp16") is None


@pytest.mark.parametrize("name, precision", [("Tesla T4", "bf16"), ("Tesla V100-SXM2-16GB", "tf32"), ("A100", "fp8")])
def test_a_precision_that_the_device_lacks_has_no_peak(name: str, precision: str) -> None:
    assert peak_flops(name, precision) is None


@pytest.mark.parametrize(
    "name, that_of",
    [
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090"),
        ("NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090"),
        ("NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 3090"),
        ("NVIDIA H200 NVL", "NVIDIA H200"),
    ],
)
def test_a_device_does_not_get_the_peak_of_another_whose_name_its_own_holds(name: str, that_of: str) -> None:
    assert peak_flops(name, "bf16") != peak_flops(that_of, "bf16")


def test_the_cpu_has_no_peak() -> None:
    assert device_peak_flops(torch.device("cpu"), "fp32") is None


@pytest.mark.parametrize("allowed, tflops", [("highest", 67), ("high", 494), ("medium", 494)])
def test_fp32_is_measured_against_tf32_where_tf32_is_allowed(
    gpus: Any, monkeypatch: pytest.MonkeyPatch, allowed: str, tflops: float
) -> None:
    gpus(1)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: allowed)
    assert device_peak_flops(torch.device("cuda"), "fp32") == tflops * 1e12
    assert device_peak_flops(torch.device("cuda"), "bf16") == 989e12


@pytest.mark.parametrize("how", ["torch.backends.cuda.matmul", "torch.backends"])
def test_the_newer_setting_of_precision_is_read_too(how: str) -> None:
    """In an interpreter of its own: the settings must not be mixed, and a forked process has those of other tests."""
    program = (
        "import torch; from cs336_systems.machine.hardware import allows_tf32\n"
        f"print(allows_tf32()); {how}.fp32_precision = 'tf32'; print(allows_tf32())\n"
        f"{how}.fp32_precision = 'ieee'; print(allows_tf32())"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "True", "False"]


# Devices


def test_auto_takes_the_gpu_if_there_is_one_and_a_device_that_is_there_is_taken(gpus: Any) -> None:
    gpus(0)
    assert select_device("auto") == torch.device("cpu")
    gpus(2)
    assert select_device("auto") == torch.device("cuda")
    for name in ("cpu", "cuda", "cuda:0", "cuda:1"):
        assert select_device(name) == torch.device(name)


def test_auto_takes_the_gpu_of_an_apple_computer_where_the_caller_can_use_it(
    gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(0)
    with pytest.raises(ValueError, match=r"^train\.device is 'mps': it must be auto, cpu, cuda or cuda:N$"):
        select_device("mps", or_mps=True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert select_device("auto") == torch.device("cpu")  # as in benchmarks, and for several processes
    for name in ("auto", "mps"):
        assert select_device(name, or_mps=True) == torch.device("mps")
    with pytest.raises(ValueError, match=r"^train\.device is 'tpu': it must be auto, cpu, mps, cuda or cuda:N$"):
        select_device("tpu", or_mps=True)


class _NoFloat64(TorchDispatchMode):
    """Fails where an operation on the device meta, which stands for an Apple GPU, has a result in float64."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        wide = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.dtype == torch.float64 and x.is_meta]
        assert not wide, function
        return result


def test_a_training_step_has_no_float64_on_the_device_which_apples_gpus_lack() -> None:
    with torch.device("meta"), _NoFloat64():
        model = TransformerLM(vocab_size=300, context_length=8, d_model=16, num_layers=1, num_heads=2, d_ff=32)
        tokens = torch.zeros(2, 8, dtype=torch.long)
        model(tokens, targets=tokens).backward()
        lr = FusedAdamW(model.parameters(), factor=torch.ones(()), masters={}).param_groups[0]["lr"]
        assert (lr.dtype, lr.device.type) == (torch.float64, "cpu")
        assert {buffer.device.type for buffer in model.buffers()} == {"meta"}
        with pytest.raises(AssertionError):
            torch.zeros(1, dtype=torch.float64)


@pytest.mark.parametrize(
    "count, name, there",
    [(0, "cuda", "no CUDA device"), (1, "cuda:1", "cuda:0 to cuda:0"), (8, "cuda:99", "cuda:0 to cuda:7")],
)
def test_a_missing_device_is_an_error_that_lists_those_that_exist(gpus: Any, count: int, name: str, there: str) -> None:
    gpus(count)
    with pytest.raises(ValueError, match=rf"^train\.device is '{name}': PyTorch \S+ sees {there} here \(cpu always"):
        select_device(name)


@pytest.mark.parametrize(
    "name", ["", "tpu", "gpu", "CPU", "cpu:0", "cuda:", "cuda:-1", "cuda:x", "cuda:0 ", "mps", "meta"]
)
def test_a_wrong_device_name_is_an_error_that_lists_the_accepted_ones(gpus: Any, name: str) -> None:
    gpus(1)
    with pytest.raises(ValueError, match=rf"^train\.device is '{name}': it must be auto, cpu, cuda or cuda:N$"):
        select_device(name)


# Memory


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="needs /proc/meminfo")
def test_the_cpus_memory_is_the_kernels_total(monkeypatch: pytest.MonkeyPatch) -> None:
    total = re.search(r"MemTotal: +(\d+) kB", Path("/proc/meminfo").read_text())
    assert total
    monkeypatch.setattr(hardware, "_cgroup_limits", list)
    assert memory_bytes(torch.device("cpu")) == int(total[1]) * 1024


@pytest.mark.parametrize(
    "groups, files, limit",
    [
        ("0::/\n", {"memory.max": "4096\n"}, 4096),  # inside a container
        ("0::/job/step\n", {"job/memory.max": "8192\n", "job/step/memory.max": "max\n"}, 8192),  # of a batch system
        ("0::/job/step\n", {"job/memory.max": "8192\n", "job/step/memory.max": "4096\n"}, 4096),
        ("0::/elsewhere\n", {"memory.max": "4096\n"}, 4096),
        ("5:cpu:/\n4:hugetlb,memory:/job\n0::/\n", {"memory/job/memory.limit_in_bytes": "8192\n"}, 8192),
        ("4:cpu:/job\n", {"cpu/job/memory.limit_in_bytes": "8192\n", "memory.max": "4096\n"}, None),
        ("0::/\n", {"memory.max": f"{1 << 60}\n"}, None),  # more than there is
        ("0::/\n", {}, None),
        (None, {"memory.max": "4096\n"}, None),
    ],
)
def test_a_containers_or_a_jobs_limit_is_the_cpus_memory(
    groups: str | None, files: dict[str, str], limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(hardware, "_CGROUPS", tmp_path / "sys")
    all_of_it = memory_bytes(torch.device("cpu"))
    for path, text in {
        **({"proc/cgroup": groups} if groups else {}),
        **{f"sys/{k}": v for k, v in files.items()},
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert memory_bytes(torch.device("cpu")) == (limit or all_of_it)


def test_the_gpus_memory_is_all_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=device.index))
    assert memory_bytes(torch.device("cuda:7")) == 7


def test_unknown_memory_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> int:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(hardware.os, "sysconf", unknown)
    monkeypatch.setattr(hardware, "_cgroup_limits", list)
    assert memory_bytes(torch.device("cpu")) is None


# Precisions


def test_bf16_needs_a_gpu_that_computes_in_it(gpus: Any) -> None:
    gpus(1, "Tesla T4", bf16=False)
    with pytest.raises(ValueError, match=r"^train\.precision is 'bf16': Tesla T4 .* must be fp16 or fp32"):
        check_precision(torch.device("cuda"), "bf16")
    for device, precision in (("cuda", "fp16"), ("cuda", "fp32"), ("cpu", "bf16")):
        check_precision(torch.device(device), precision)
    gpus(1)
    check_precision(torch.device("cuda"), "bf16")


@pytest.mark.parametrize(
    "device, name, bf16, capability, lacks",
    [
        ("cuda", "NVIDIA A100", True, (8, 0), "NVIDIA A100 has no FP8 .* 8.9; it must be bf16, fp16 or fp32 here"),
        ("cuda", "RTX 3090", True, (8, 6), "RTX 3090 has no FP8 .* 8.9; it must be bf16, fp16 or fp32 here"),
        ("cuda", "Tesla T4", False, (7, 5), "Tesla T4 has no bfloat16 arithmetic; it must be fp16 or fp32 here"),
        ("mps", "", True, (0, 0), "mps has no FP8 .* 8.9; it must be bf16, fp16 or fp32 here"),
        ("cuda", "L4", True, (8, 9), None),
        ("cuda", "H100", True, (9, 0), None),
        ("cpu", "", True, (0, 0), None),
    ],
)
def test_fp8_needs_a_gpu_that_multiplies_in_it(
    gpus: Any, device: str, name: str, bf16: bool, capability: tuple[int, int], lacks: str | None
) -> None:
    gpus(1, name, bf16, capability)
    accepted = contextlib.nullcontext()
    refused = pytest.raises(ValueError, match=rf"^train\.precision is 'fp8': {lacks}$")
    with refused if lacks else accepted:
        check_precision(torch.device(device), "fp8")


def test_fp8_has_the_peak_of_bf16(gpus: Any) -> None:
    gpus(1)
    assert device_peak_flops(torch.device("cuda"), "fp8") == peak_flops("NVIDIA H200", "bf16")


@pytest.mark.parametrize(
    "device, d_model, why",
    [
        ("cuda", 1599, "model.d_model is 1599, and below 1,600"),
        ("cuda", 1600, ""),
        ("cpu", 4096, "a CPU rounds to FP8"),
    ],
)
def test_fp8_may_gain_nothing_on_a_cpu_and_where_no_gain_was_measured(device: str, d_model: int, why: str) -> None:
    found = why_fp8_is_slow(torch.device(device), d_model)
    assert found.startswith(why) and bool(found) == bool(why)  # noqa: PT018


# The environment stamp

KEYS = {*("gpu", "gpu_count", "cpu_threads", "platform", "python", "torch"), *("triton", "cuda", "driver", "commit")}


def test_the_environment_is_json_and_has_its_keys() -> None:
    env = environment()
    assert set(env) == KEYS
    assert json.loads(json.dumps(env)) == env
    assert env["torch"] == torch.__version__
    assert env["cpu_threads"] >= 1


def test_the_environment_names_gpus_and_the_driver(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_output", lambda *command: "570.1\n570.1" if command[0] == "nvidia-smi" else None)
    for count, expected in ((0, (None, 0, None, None)), (4, ("NVIDIA H200", 4, "570.1", None))):
        gpus(count, "NVIDIA H200")
        env = environment()
        assert (env["gpu"], env["gpu_count"], env["driver"], env["commit"]) == expected


def test_a_gpu_is_called_by_its_own_name(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(0)
    assert gpu_name() is gpu_name(torch.device("cpu")) is None
    gpus(2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"of {device}")
    assert gpu_name() == gpu_name(torch.device("cpu")) == "of None"
    assert gpu_name(torch.device("cuda:1")) == "of cuda:1"


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("changed, expected", [("", "abc123"), (" M file", "abc123+changes")])
def test_the_commit_says_whether_the_tree_was_changed(
    monkeypatch: pytest.MonkeyPatch, changed: str, expected: str
) -> None:
    def git(command: tuple[str, ...], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, "abc123\n" if "rev-parse" in command else changed)

    monkeypatch.delenv("CS336_COMMIT", raising=False)
    monkeypatch.setattr(subprocess, "run", git)
    assert environment()["commit"] == expected
    monkeypatch.setenv("CS336_COMMIT", "of a copy")
    assert environment()["commit"] == "of a copy"


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("error", [FileNotFoundError("git"), subprocess.TimeoutExpired("git", 20)])
def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(subprocess, "run", fail)
    assert environment()["commit"] is None


def test_the_state_of_a_gpu_is_that_of_the_one_with_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    pynvml = pytest.importorskip("pynvml")
    asked: list[str] = []
    answers = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetCurrentClocksEventReasons": pynvml.nvmlClocksEventReasonSwPowerCap
        | pynvml.nvmlClocksEventReasonHwThermalSlowdown
        | pynvml.nvmlClocksEventReasonGpuIdle,
        "nvmlDeviceGetTemperature": 61,
        "nvmlDeviceGetPowerUsage": 650_500,
        "nvmlDeviceGetComputeRunningProcesses": ["this one", "another"],
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, lambda *_, answer=answer: answer)
    clocks = {pynvml.NVML_CLOCK_SM: 1755, pynvml.NVML_CLOCK_MEM: 3201}
    monkeypatch.setattr(pynvml, "nvmlDeviceGetClockInfo", lambda handle, kind: clocks[kind])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", asked.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="ab-cd"))
    state = hardware.gpu_state(torch.device("cuda", 1))
    assert asked == ["GPU-ab-cd"]
    assert state == {
        "sm_mhz": 1755,
        "memory_mhz": 3201,
        "temperature_c": 61,
        "power_w": 650.5,
        "slowed_by": ["power cap", "heat (hardware)"],
        "other_processes": 1,
    }

    def not_told(handle: object) -> list[Any]:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", not_told)
    assert hardware.gpu_state(torch.device("cuda", 1)) == {k: v for k, v in state.items() if k != "other_processes"}


def test_a_gpu_with_unknown_state_gives_an_empty_state(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("NVML Shared Library Not Found")

    monkeypatch.setattr(torch.cuda, "get_device_properties", refuse)
    assert hardware.gpu_state(torch.device("cuda")) == {}
    assert hardware.gpu_state(torch.device("cpu")) == {}


@pytest.mark.gpu
def test_a_real_gpu_tells_its_state() -> None:
    pytest.importorskip("pynvml")
    torch.ones(1, device="cuda")
    state = hardware.gpu_state(torch.device("cuda", 0))
    assert 200 < state["sm_mhz"] < 5000
    assert 10 < state["temperature_c"] < 120
    assert isinstance(state["slowed_by"], list)
    assert isinstance(state["other_processes"], int)


def test_with_index_numbers_only_a_gpu_that_has_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    given = ("cpu", "cuda", "cuda:0", "cuda:1")
    assert [str(with_index(torch.device(name))) for name in given] == ["cpu", "cuda:3", "cuda:0", "cuda:1"]


# Reading values of a GPU


def test_on_a_cpu_values_are_not_copied() -> None:
    x = torch.ones(3)
    assert to_host(x) is x


@pytest.mark.gpu
def test_values_come_when_they_are_computed_and_let_other_threads_at_the_gpu_meanwhile() -> None:
    """A thread launches a kernel and lets go of an event while this one waits for a longer one."""
    other, events = torch.cuda.Stream(), [torch.cuda.Event()]
    events[0].record(other)
    x, y = torch.ones(3, device="cuda"), torch.ones(3, device="cuda")
    to_host(x)  # pins memory
    x.add_(x)  # loads the kernels: later that would wait for all that runs
    y.add_(1)
    torch.cuda.synchronize()
    done_at: list[float] = []

    def beside() -> None:
        torch.cuda.set_device(x.device)
        time.sleep(0.05)
        with torch.cuda.stream(other):
            y.add_(1)
        events.clear()
        done_at.append(time.monotonic())

    thread = threading.Thread(target=beside)
    torch.cuda._sleep(10**9)  # half a second
    x.add_(x)
    thread.start()
    values = to_host(x).tolist()
    came_at = time.monotonic()
    thread.join()
    assert values == [4, 4, 4]
    assert done_at[0] < came_at
