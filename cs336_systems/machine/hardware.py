"""Devices, dtypes, memory and peak rates of this machine, and the environment stamp of measurements."""

import contextlib
import functools
import logging
import os
import platform
import re
import subprocess
from collections.abc import Callable
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
DTYPES["fp8"] = torch.bfloat16  # of everything but the inputs of products
FP8_CAPABILITY = (8, 9)
"""The lowest compute capability with FP8 products."""
FP8_PAYS_FROM = 1600
"""Width of the narrowest model that was measured to be faster in FP8: xl. Rounding costs narrow models most."""

# NVML's names for the reasons of a lowered GPU clock.
_SLOWED_BY = {
    "SwPowerCap": "power cap",
    "SwThermalSlowdown": "heat",
    "HwThermalSlowdown": "heat (hardware)",
    "HwPowerBrakeSlowdown": "power brake",
    "HwSlowdown": "hardware",
}


def device_peak_flops(device: torch.device, precision: str) -> float | None:
    """`peak_flops` of a device. fp32 counts as tf32 if float32 matrix products may use TF32, and fp8 as bf16."""
    if device.type != "cuda":
        return None
    if precision == "fp32" and allows_tf32():
        precision = "tf32"
    if precision == "fp8":
        precision = "bf16"
    return peak_flops(torch.cuda.get_device_name(device), precision)


def allows_tf32() -> bool:
    """Whether float32 matrix products on a GPU may use TF32, by either of PyTorch's two settings."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # once the newer setting is used, PyTorch refuses to read the older one
        return torch.backends.cuda.matmul.fp32_precision == "tf32"


def select_device(name: str, or_mps: bool = False) -> torch.device:
    """The device for `train.device`: auto, cpu, cuda or cuda:N. Raises ValueError if this machine lacks it.

    or_mps: the device may also be mps, the GPU of an Apple computer, which auto takes if there is one.
    """
    or_mps = or_mps and torch.backends.mps.is_available()
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if or_mps else "cpu")
    match = re.fullmatch(r"cpu|cuda(?::(\d+))?", name) or (or_mps and re.fullmatch("mps", name))
    if not match:
        raise ValueError(f"train.device is {name!r}: it must be auto, cpu{', mps' if or_mps else ''}, cuda or cuda:N")
    if name.startswith("cuda"):
        count = gpu_count()
        if int(match[1] or 0) >= count:
            there = f"cuda:0 to cuda:{count - 1}" if count else "no CUDA device"
            raise ValueError(
                f"train.device is {name!r}: PyTorch {torch.__version__} sees {there} here (cpu always works)"
            )
    return torch.device(name)


def use_device(name: str, or_mps: bool = False) -> torch.device:
    """Select a device and make it current, because streams and graphs are created on the current device.

    A GPU's memory is then allocated in segments that can grow, unless the environment says otherwise: in segments of
    fixed size, tensors of many sizes leave gaps (12 of 80 GB, in a step of the 8B model).
    """
    device = select_device(name, or_mps)
    if device.type == "cuda":
        if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
            os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # read at the first allocation
        torch.cuda.set_device(device.index or 0)
        torch.cuda.reset_peak_memory_stats(device)
    return device


def with_index(device: torch.device) -> torch.device:
    """The device with an explicit GPU index. Without one it means the current GPU, which differs between threads."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def use_device_in_thread(device: torch.device) -> None:
    """Make the process's GPU current in a new thread, which starts on GPU 0.

    Otherwise any CUDA call of the thread, even a query of an event, creates a context on GPU 0. That takes half a GB of
    its memory for each rank on the machine.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)


def start_copy_to_host(tensor: Tensor) -> Callable[[], Tensor]:
    """Start to copy a tensor to main memory. The returned function waits for the copy and returns it.

    It does not block CUDA calls of other threads. `tolist` and copies to unpinned memory hold CUDA's lock until all
    queued work is done, so that launches and frees of other threads wait too.
    """
    if not tensor.is_cuda:
        return tensor.cpu
    copy = tensor.to("cpu", non_blocking=True)  # to pinned memory
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(tensor.device))

    def wait() -> Tensor:
        copied.synchronize()
        return copy

    return wait


def to_host(tensor: Tensor) -> Tensor:
    """A copy of a tensor in main memory, as by `start_copy_to_host`."""
    return start_copy_to_host(tensor)()


def memory_bytes(device: torch.device) -> int | None:
    """Total memory of a GPU, or the main memory that this process may use. None if unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    limits = _cgroup_limits()
    with contextlib.suppress(ValueError, OSError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(limits, default=None)


def _cgroup_limits() -> list[int]:
    """Memory limits in bytes from Linux control groups, which containers and batch systems set."""
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
            # Outer groups limit inner ones. Inside a container, the root is its own group, whatever `group` says.
            path = Path(group.lstrip("/"))
            for folder in {root, *(root / part for part in (path, *path.parents))}:
                with contextlib.suppress(OSError, ValueError):  # "max" means no limit
                    found.append(int((folder / name).read_text()))
    return found


def requested_gpu_bytes(device: torch.device, peak: bool = False) -> int:
    """Bytes that tensors on a GPU requested: now, or the peak since `reset_peak_memory_stats`.

    `torch.cuda.memory_allocated` counts the allocator's blocks instead, which are up to 1 MiB larger.
    """
    return torch.cuda.memory_stats(device)[f"requested_bytes.all.{'peak' if peak else 'current'}"]


def check_precision(device: torch.device, precision: str) -> None:
    """Raise ValueError if the device has no native arithmetic for `train.precision`. A CPU has, if slow, all."""
    is_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_gpu else device.type
    if is_gpu and precision in ("bf16", "fp8"):  # fp8 is bf16 but for some products
        with torch.cuda.device(device):
            if not torch.cuda.is_bf16_supported(including_emulation=False):
                raise ValueError(
                    f"train.precision is {precision!r}: {name} has no bfloat16 arithmetic; it must be fp16 or fp32 here"
                )
    if precision != "fp8" or device.type == "cpu":
        return
    if not is_gpu or torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        raise ValueError(
            f"train.precision is 'fp8': {name} has no FP8 products, which need a GPU of compute capability "
            f"{'.'.join(map(str, FP8_CAPABILITY))}; it must be bf16, fp16 or fp32 here"
        )


def why_fp8_is_slow(device: torch.device, d_model: int) -> str:
    """Why FP8 products may make no step of this width faster than bf16 on the device, or ""."""
    if device.type == "cpu":
        return "a CPU rounds to FP8, but does not multiply faster"
    if d_model < FP8_PAYS_FROM:
        return f"model.d_model is {d_model}, and below {FP8_PAYS_FROM:,} no gain was measured"
    return ""


def autocast(device: torch.device, precision: str) -> AbstractContextManager:
    """torch.autocast for 16-bit precisions; no context for fp32."""
    return nullcontext() if precision == "fp32" else torch.autocast(device.type, DTYPES[precision])


def gpu_count() -> int:
    """Number of GPUs that PyTorch sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def gpu_name(device: torch.device | None = None) -> str | None:
    """The name of a GPU, by default the current one. None if PyTorch sees no GPU."""
    if not gpu_count():
        return None
    return torch.cuda.get_device_name(device if device is not None and device.type == "cuda" else None)


def environment() -> dict[str, Any]:
    """The environment of a measurement: GPUs, versions, commit. Plain JSON types."""
    triton = next(iter(metadata.distributions(name="triton")), None)
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if gpu_count() else None
    return {
        "gpu": gpu_name(),
        "gpu_count": gpu_count(),
        "cpu_threads": torch.get_num_threads(),
        "platform": platform.machine(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": triton.version if triton else None,
        "cuda": torch.version.cuda,
        "driver": driver.splitlines()[0] if driver else None,
        "commit": _commit(),
    }


def gpu_state(device: torch.device) -> dict[str, Any]:
    """Current clocks in MHz, temperature in degrees Celsius and power in W of a GPU. Empty if unknown.

    `slowed_by` lists reasons for a lowered clock, such as heat; an idle GPU's low clock has none. `other_processes`
    counts other programs on the GPU, if the system reports them.
    """
    if device.type != "cuda":
        return {}
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
            active = pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
            state = {
                "sm_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
                "memory_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
                "temperature_c": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
                "power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
                "slowed_by": [
                    reason
                    for name, reason in _SLOWED_BY.items()
                    if active & getattr(pynvml, f"nvmlClocksEventReason{name}")
                ],
            }
            with contextlib.suppress(pynvml.NVMLError):  # not all systems report processes
                # NVML lists this process too, perhaps under another number.
                state["other_processes"] = max(0, len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle)) - 1)
            return state
        finally:
            pynvml.nvmlShutdown()
    except Exception as error:  # without NVML, or without its permission, a measurement has no state
        logger.debug("no state of the GPU: %s", error)
        return {}


@functools.cache  # each row needs the outputs
def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=Path(__file__).parent)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _commit() -> str | None:
    """The commit of this code. CS336_COMMIT gives it if the code is a copy without its history."""
    if given := os.environ.get("CS336_COMMIT"):
        return given
    commit = _output("git", "rev-parse", "--short=12", "HEAD")
    if commit and _output("git", "status", "--porcelain", "--untracked-files=no"):
        return f"{commit}+changes"
    return commit
