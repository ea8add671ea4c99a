"""The profile `kernels` by NVIDIA Nsight Systems: runs a step under `nsys profile`, reads it with `nsys stats`.

`nsys profile` runs this file: `python -m cs336_systems.bench.profiling.nsys CONFIG_JSON FACTS_FILE`.

`nvtx_kern_sum` counts a kernel in every range that contains its launch on the same thread. The backward pass has a
thread of its own, so backward is everything outside the other phases, and its attention is not split. Copies are not in
these reports. Source: the descriptions of the reports in the Nsight Systems post-collection analysis guide.
"""

import csv
import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from ..outcome import Found
from .kernel_profile import KernelProfile, attention_operations, wall_times, warm_bench
from .kernel_totals import KernelTotal, kernel_metrics
from .kernel_trace import ATTENTION_RANGES, OUTSIDE

_RANGE, _NAMES = "NVTX Range", ("Kernel Name", "Name")
_COUNTS, _TIME = ("Kern Inst", "Instances"), "Total Time (ns)"


def check_nsys(device: torch.device) -> None:
    """Raise ValueError if Nsight Systems is not installed, or does not see this kind of device."""
    if shutil.which("nsys") is None:
        raise ValueError("tool is 'nsys', which is not on the PATH: install Nsight Systems, or use --tool torch")
    if device.type != "cuda":
        raise ValueError(f"tool is 'nsys', which sees GPUs only, and device is {device.type!r}: use --tool torch")


def nsys_command(config: KernelProfile) -> list[str]:
    """The command that profiles: `nsys profile` of this module, after the warm-up. Writes nsys_MODE.*."""
    fields = asdict(config)
    changed = {name: value for name, value in fields.items() if value != getattr(KernelProfile(), name)}
    facts = Path(config.folder, f"nsys_{config.mode}.json")
    program = [sys.executable, "-m", "cs336_systems.bench.profiling.nsys", json.dumps(changed), str(facts)]
    return [*record_command(facts.with_suffix("")), *program]


def record_command(out: Path) -> list[str]:
    """The words before a command that record it between its calls of cudaProfilerStart and -Stop."""
    return [
        "nsys",
        "profile",
        "--trace=cuda,nvtx",
        "--cuda-memory-usage=true",  # a line of its own below the kernels when a person opens the recording
        "--sample=none",
        "--cpuctxsw=none",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
        "--force-overwrite=true",
        f"--output={out}",
    ]


def stats_command(report: str, recorded: Path) -> list[str]:
    """The command that prints a report of a recording as CSV."""
    return ["nsys", "stats", f"--report={report}", "--format=csv", "--force-export=true", str(recorded)]


def profile_with_nsys(config: KernelProfile) -> Found:
    """Profile under `nsys profile`; the recording is `nsys_MODE.nsys-rep` in the folder."""
    _output(nsys_command(config))
    recorded = Path(config.folder, f"nsys_{config.mode}.nsys-rep")
    kernels, ranges = (_output(stats_command(name, recorded)) for name in ("cuda_gpu_kern_sum", "nvtx_kern_sum"))
    facts = json.loads(recorded.with_suffix(".json").read_text())
    totals = nsys_totals(kernels, ranges, config.mode, config.steps)
    metrics = facts["times"] | {
        "profiled_wall_ms": None,
        "kernel_ms": sum(total.ms for total in totals),
        "busy_ms": None,
        "streams": None,
        "attention_operations": attention_operations(config),
    }
    return facts["ran"], metrics | kernel_metrics(totals, config.mode)


def _output(command: list[str]) -> str:
    """The output of a command. If it fails, raises OutOfMemoryError or RuntimeError with the line that says why."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        for line in f"{done.stderr}\n{done.stdout}".splitlines():
            if "out of memory" in line.lower():
                raise torch.OutOfMemoryError(line.strip())
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise RuntimeError(f"{' '.join(command[:2])} ended with code {done.returncode}: {' '.join(said)}")
    return done.stdout


def nsys_totals(kernels: str, ranges: str, mode: str, steps: int) -> list[KernelTotal]:
    """Kernel totals per step, from the CSV of `cuda_gpu_kern_sum` and of `nvtx_kern_sum`; times there are in ns.

    Raises ValueError for a text that is not such a CSV.
    """
    rows, rest = _read_csv(ranges), _sum_by_name(_read_csv(kernels))
    for row in rows:
        row[_RANGE] = (row.get(_RANGE) or "").lstrip(":")  # the domain is before the colon; PyTorch's has no name
    found: dict[tuple[str, str | None], dict[str, list[float]]] = {}
    for phase in ("forward", "optimizer"):
        found[phase, None] = _sum_by_name([row for row in rows if row[_RANGE] == phase])
        _subtract(rest, found[phase, None])
    # A forward pass that checkpointing repeats has the same ranges, on the thread of the backward pass.
    threads = {row.get("TID") for row in rows if row[_RANGE] == "forward"}
    for part in ATTENTION_RANGES:
        inside = [row for row in rows if row[_RANGE] == part and row.get("TID") in threads]
        found["forward", part] = _sum_by_name(inside)
        _subtract(found["forward", None], found["forward", part])
    found[OUTSIDE if mode == "forward" else "backward", None] = rest
    totals = [
        KernelTotal(name, phase, part, count / steps, ns / 1e6 / steps)
        for (phase, part), sums in found.items()
        for name, (count, ns) in sums.items()
        if count > 0
    ]
    return sorted(totals, key=lambda total: -total.ms)


def _read_csv(text: str) -> list[dict[str, str]]:
    """The rows of a report, without the lines that nsys prints before it."""
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if _TIME in line and any(name in line for name in _NAMES):
            return list(csv.DictReader(filter(None, lines[i:])))
    raise ValueError(f"nsys stats has printed no CSV with {_TIME!r} and a name: {' '.join(lines[-1:])!r}")


def _sum_by_name(rows: list[dict[str, str]]) -> dict[str, list[float]]:
    """Count and ns of each kernel."""
    found: dict[str, list[float]] = {}
    for row in rows:
        name, count = (next(row[key] for key in keys if key in row) for keys in (_NAMES, _COUNTS))
        sums = found.setdefault(name, [0.0, 0.0])
        sums[0] += float(count)
        sums[1] += float(row[_TIME])
    return found


def _subtract(sums: dict[str, list[float]], part: dict[str, list[float]]) -> None:
    for name, (count, ns) in part.items():
        if name in sums:
            sums[name] = [max(0.0, sums[name][0] - count), max(0.0, sums[name][1] - ns)]


def main() -> None:
    """Run the steps that `nsys profile` records; write the configuration that ran and its times without recording."""
    config = KernelProfile(**json.loads(sys.argv[1]))
    bench, annotated = warm_bench(config)
    times = wall_times(bench, config.steps)
    facts = {"ran": bench.read_back() | {"attention_ranges": annotated}, "times": times}
    Path(sys.argv[2]).write_text(json.dumps(facts))
    torch.cuda.profiler.start()
    for _ in range(config.steps):
        bench.step()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
