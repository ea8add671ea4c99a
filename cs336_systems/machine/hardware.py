"""What the machine is and could do at best: devices, number types, peak rates by GPU name, the environment stamp."""

import contextlib
import functools
import logging
import os
import platform
import re
import subprocess
from contextlib import AbstractContextManager, nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .peaks import peak_flops

logger = logging.getLogger(__name__)

_PROC, _CGROUPS = Path("/proc/self"), Path("/sys/fs/cgroup")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# Reasons for a lowered GPU clock, by the names of NVML's constants.
_SLOWED_BY = {
    "SwPowerCap": "power cap",
    "SwThermalSlowdown": "heat",
    "HwThermalSlowdown": "heat (hardware)",
    "HwPowerBrakeSlowdown": "power brake",
    "HwSlowdown": "hardware",
}


def device_peak_flops(device: torch.device, precision: str) -> float | None:
    """`peak_flops` of a torch device; fp32 counts as tf32 where float32 matrix products are allowed to use it."""
    if device.type != "cuda":
        return None
    if precision == "fp32" and allows_tf32():
        precision = "tf32"
    return peak_flops(torch.cuda.get_device_name(device), precision)


def allows_tf32() -> bool:
    """Whether a GPU's float32 matrix products may use TF32, by whichever of PyTorch's two settings was used."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # once the newer one is set, the older one cannot be read
        return torch.backends.cuda.matmul.fp32_precision == "tf32"


def select_device(name: str) -> torch.device:
    """The torch device of `train.device`: auto, cpu, cuda or cuda:N. Raises ValueError for one that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    match = re.fullmatch(r"cpu|cuda(?::(\d+))?", name)
    if match is None:
        raise ValueError(f"train.device is {name!r}: it must be auto, cpu, cuda or cuda:N")
    if name != "cpu":
        count = gpu_count()
        if int(match[1] or 0) >= count:
            there = f"cuda:0 to cuda:{count - 1}" if count else "no CUDA device"
            raise ValueError(
                f"train.device is {name!r}: PyTorch {torch.__version__} sees {there} here (cpu always works)"
            )
    return torch.device(name)


def use_device(name: str) -> torch.device:
    """`select_device`, and make it the current device, because streams and graphs are made on the current one."""
    device = select_device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
        torch.cuda.reset_peak_memory_stats(device)
    return device


def with_index(device: torch.device) -> torch.device:
    """The device with its index, if it is a GPU: without one it is the current one, and each thread has its own."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def use_device_in_thread(device: torch.device) -> None:
    """Make the device that the process uses current in this new thread too, which begins on GPU 0.

    Otherwise whatever the thread asks of CUDA, even whether an event has passed, makes a context on GPU 0: half a GB of
    its memory for every rank of the machine.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)


def to_host(tensor: Tensor) -> Tensor:
    """A tensor's values in main memory, once the device has computed them. Other threads may use it meanwhile.

    They cannot during `tolist` or a copy to memory that is not pinned. Those hold CUDA's lock until what is queued
    before them is done, and whatever another thread then launches, or frees, waits as long.
    """
    if not tensor.is_cuda:
        return tensor
    copy = tensor.to("cpu", non_blocking=True)  # to pinned memory
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(tensor.device))
    copied.synchronize()
    return copy


def memory_bytes(device: torch.device) -> int | None:
    """Total memory of a GPU, or for the CPU what this process may have of the machine's; None if nothing tells."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    limits = _cgroup_limits()
    with contextlib.suppress(ValueError, OSError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(limits, default=None)


def _cgroup_limits() -> list[int]:
    """Memory that the control groups of this process allow it in bytes: a container's, a batch system's. Linux only."""
    found = []
    with contextlib.suppress(OSError):
        for line in (_PROC / "cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers == "":
                root, name = _CGROUPS, "memory.max"
            elif "memory" in controllers.split(","):
                root, name = _CGROUPS / "memory", "memory.limit_in_bytes"
            else:
                continue
            # Inside a container its own group is the root, whatever its path outside. Outer groups limit inner ones.
            path = Path(group.lstrip("/"))
            for folder in {root, *(root / part for part in (path, *path.parents))}:
                with contextlib.suppress(OSError, ValueError):  # "max" where there is no limit
                    found.append(int((folder / name).read_text()))
    return found


def requested_gpu_bytes(device: torch.device, peak: bool = False) -> int:
    """Bytes that tensors on a GPU have requested, now or at most since the last `reset_peak_memory_stats`.

    `torch.cuda.memory_allocated` counts what they were given: blocks that can be up to 1 MiB larger.
    """
    return torch.cuda.memory_stats(device)[f"requested_bytes.all.{'peak' if peak else 'current'}"]


def check_precision(device: torch.device, precision: str) -> None:
    """Raise ValueError if the device does not compute in `train.precision` natively."""
    if device.type == "cuda" and precision == "bf16":
        with torch.cuda.device(device):
            if not torch.cuda.is_bf16_supported(including_emulation=False):
                raise ValueError(
                    f"train.precision is 'bf16': {torch.cuda.get_device_name(device)} has no bfloat16 arithmetic; "
                    "it must be fp16 or fp32 here"
                )


def autocast(device: torch.device, precision: str) -> AbstractContextManager:
    """torch.autocast to a 16-bit precision; nothing for fp32."""
    return nullcontext() if precision == "fp32" else torch.autocast(device.type, DTYPES[precision])


def gpu_count() -> int:
    """How many GPUs PyTorch sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def gpu_name(device: torch.device | None = None) -> str | None:
    """The name of a GPU, or where no GPU is given of the one that is current; None where PyTorch sees none."""
    if not gpu_count():
        return None
    return torch.cuda.get_device_name(device if device is not None and device.type == "cuda" else None)


def environment() -> dict[str, Any]:
    """What a measurement was made with: GPU name and count, versions, commit. Plain JSON types."""
    return {
        "gpu": gpu_name(),
        "gpu_count": gpu_count(),
        "cpu_threads": torch.get_num_threads(),
        "platform": platform.machine(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        "driver": _driver_version() if gpu_count() else None,
        "commit": _commit(),
    }


def gpu_state(device: torch.device) -> dict[str, Any]:
    """Clocks in MHz, temperature in degrees Celsius, power in W, and what slows a GPU down now; empty if unknown.

    What slows it down is a list of reasons (power cap, heat, ...); an idle GPU's low clock is not one. Other processes
    that use the GPU are counted, if the system tells, because they take its time.
    """
    if device.type != "cuda":
        return {}
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
            active = pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
            return {
                "sm_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
                "memory_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
                "temperature_c": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
                "power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
                "slowed_by": [
                    reason
                    for name, reason in _SLOWED_BY.items()
                    if active & getattr(pynvml, f"nvmlClocksEventReason{name}")
                ],
                **_other_processes(pynvml, handle),
            }
        finally:
            pynvml.nvmlShutdown()
    except Exception as error:  # NVML is not there, or does not tell: a measurement goes without
        logger.debug("no state of the GPU: %s", error)
        return {}


def _other_processes(pynvml: Any, handle: Any) -> dict[str, int]:
    """How many processes compute on a GPU besides this one, which does too, perhaps listed under another number."""
    try:
        return {"other_processes": max(0, len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle)) - 1)}
    except Exception as error:  # whatever it is, the rest of the state is known
        logger.debug("no processes of the GPU: %s", error)
        return {}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@functools.cache  # every row asks
def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=Path(__file__).parent)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _driver_version() -> str | None:
    found = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found.splitlines()[0] if found else None


def _commit() -> str | None:
    """The commit that runs; CS336_COMMIT names it if the code is a copy without its history."""
    if given := os.environ.get("CS336_COMMIT"):
        return given
    commit = _output("git", "rev-parse", "--short=12", "HEAD")
    if commit and _output("git", "status", "--porcelain", "--untracked-files=no"):
        return f"{commit}+changes"
    return commit
