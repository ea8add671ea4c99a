"""Decides `parallel.strategy` and, of `train`, `compile`, `cuda_graph` and `activation_offload` where they are auto."""

import dataclasses
import importlib.util
import logging
import math
from typing import Any

import torch

from ..config.checks import is_import_path, require
from ..config.run import NOT_RECORDED, RunConfig
from ..machine.hardware import device_peak_flops, memory_bytes
from ..parallel import comm
from ..parallel.ranks import local_world_size
from ..planner.accounting import training_flops
from ..planner.job import Job
from ..planner.memory import RESERVE, peak_bytes
from ..planner.offload import host_bytes, largest_offload, offload_note, smallest_offload
from ..planner.rows import card_by_name, training_job
from ..planner.working import GIB
from .batches import micro_batch_size

logger = logging.getLogger(__name__)

COMPILATION_PAYS_AFTER_S = {"cuda": 30.0, "cpu": 600.0}
"""Training time from which on compilation pays. On a GPU it takes some 15 s, and halves the step of a small model; on a
CPU it takes 40 s, and saves a fifth of the step."""
USUAL_MFU = 0.3
SLOW_GPU_FLOPS = 100e12
"""Peak of a GPU that is not known."""
CPU_THREAD_FLOPS = 50e9
"""What a thread of a CPU usually reaches."""
_HINT = ", which may wait for the GPU (--train.cuda_graph true records it all the same)"


def resolve(config: RunConfig, device: torch.device) -> RunConfig:
    """The configuration with a decision for each auto, on this device and with this number of processes."""
    config = config.resolved_for(comm.world_size())
    train = config.train
    decided: dict[str, Any] = dict(compile=compiles(config, device), cuda_graph=records(config, device))
    if decided["cuda_graph"] and (optimizer := config.optimizer.implementation) != "fused":
        logger.info(f"the update is not recorded in the CUDA graph: optimizer.implementation is {optimizer}, not fused")
    elif device.type == "cuda" and train.cuda_graph == "auto" and not decided["cuda_graph"]:
        logger.info(f"the step is not recorded as a CUDA graph: {why_not_recorded(config, device)}")
    decided["activation_offload"], note = choose_offload(config, device)
    if note:
        logger.info(note)
    return dataclasses.replace(config, train=dataclasses.replace(train, **decided))


def compiles(config: RunConfig, device: torch.device) -> bool:
    """Whether blocks are compiled."""
    if config.train.compile != "auto":
        return config.train.compile
    return config.train.compile_memory_budget < 1 or compilation_pays(config, device)


def records(config: RunConfig, device: torch.device) -> bool:
    """Whether the step is recorded as a CUDA graph."""
    if config.train.cuda_graph != "auto":
        return config.train.cuda_graph
    return device.type == "cuda" and why_not_recorded(config, device) is None


def choose_offload(config: RunConfig, device: torch.device) -> tuple[str, str]:
    """The policy of `train.activation_offload`, with auto decided by the plan, and a line that says what it takes.

    Raises ValueError where auto has no plan or no number of blocks makes the run fit, and if the processes of this
    machine need more host memory than it has.
    """
    name, policy = "train.activation_offload", config.train.activation_offload
    if policy == "none":
        return policy, ""
    if device.type != "cuda":
        note = f"{name} is {policy!r}: it saves nothing on {device}, whose memory is the host's"
        return ("none", "") if policy == "auto" else (policy, note)
    try:
        job = planned_job(config, device)
    except ValueError as error:
        require(policy != "auto", name, policy, f"none or first_K for a run without a plan ({error})")
        return policy, ""
    if policy == "auto":
        memory = memory_bytes(device) or 0
        most = dataclasses.replace(job, activation_offload=largest_offload(job))
        accepted = (
            f"none or first_K: by the plan, the run takes {peak_bytes(most) / GIB:,.1f} GiB even with "
            f"{most.activation_offload}, of {(1 - RESERVE) * memory / GIB:,.1f} GiB"
        )
        chosen = smallest_offload(job, memory)
        require(chosen is not None, name, policy, accepted)
        job = dataclasses.replace(job, activation_offload=str(chosen))
    processes, there = local_world_size(), memory_bytes(torch.device("cpu"))
    accepted = (
        f"fewer blocks: {job.activation_offload} takes {host_bytes(job) / GIB:,.1f} GiB of host memory for each of "
        f"{processes} processes, and the machine has {(there or 0) / GIB:,.1f} GiB"
    )
    require(there is None or processes * host_bytes(job) <= there, name, policy, accepted)
    return job.activation_offload, offload_note(job, card_by_name(torch.cuda.get_device_name(device)))


def planned_job(config: RunConfig, device: torch.device) -> Job:
    """The planner's job of a run, without offloading if that is auto. Raises ValueError if there is no prediction."""
    train, world_size = config.train, comm.world_size()
    how: dict[str, Any] = dict(compile=compiles(config, device), cuda_graph=records(config, device))
    if train.activation_offload == "auto":
        how |= dict(activation_offload="none")
    else:  # only the activations count, of one micro-batch
        how |= dict(batch_size=micro_batch_size(train, world_size) * world_size, gradient_accumulation_steps=1)
    parallel = dataclasses.replace(config.parallel, nccl_max_ctas=None)
    run = dataclasses.replace(config, train=dataclasses.replace(train, **how), parallel=parallel)
    return training_job("ddp", "", {"run": run.to_dict(), "devices": world_size})


def compilation_pays(config: RunConfig, device: torch.device) -> bool:
    """Whether PyTorch can compile here, and the whole run takes longer on this device than compilation pays back."""
    train, shape = config.train, config.model.shape
    flops = train.max_steps * training_flops(shape, train.batch_size, shape.context_length) / comm.world_size()
    speed = CPU_THREAD_FLOPS * torch.get_num_threads()
    if device.type == "cuda":
        speed = USUAL_MFU * (device_peak_flops(device, train.precision) or SLOW_GPU_FLOPS)
    seconds = min(flops / speed, 60 * (train.max_minutes or math.inf))
    return seconds > COMPILATION_PAYS_AFTER_S.get(device.type, math.inf) and can_compile(device)


def can_compile(device: torch.device) -> bool:
    """Whether torch.compile works. Logs why not."""
    if reason := why_not_compiled(device):
        logger.info("blocks are not compiled, because PyTorch cannot: %s", reason)
    return reason is None


def why_not_compiled(device: torch.device) -> str | None:
    """What torch.compile lacks: on a GPU it needs Triton, on a CPU a C++ compiler and Python's headers."""
    if device.type == "cuda":
        return None if importlib.util.find_spec("triton") else "Triton is not installed"
    try:
        torch.compile(torch.neg)(torch.ones(1))
    except Exception as error:
        return str(error).partition("\n")[0]
    return None


def why_not_recorded(config: RunConfig, device: torch.device) -> str | None:
    """What of the run a CUDA graph cannot hold, or may not: code of the user's own may wait for the GPU."""
    strategy, attention = config.parallel.strategy, config.model.attention
    if comm.world_size() > 1 and not comm.by_nccl(device):
        return "the process group has no NCCL, and gloo waits for the GPU"
    if strategy in NOT_RECORDED or is_import_path(strategy):
        hint = "" if strategy in NOT_RECORDED else _HINT
        return f"parallel.strategy is {strategy}{hint}"
    has_band = config.model.shape.num_windowed > 0 or config.data.documents
    waits = {"flash_torch": has_band, "flash_triton_compiled": has_band, "fa4": config.data.documents}
    if waits.get(attention):
        return f"model.attention is {attention}, which waits for the GPU to know what a window or documents hide"
    return f"model.attention is {attention}{_HINT}" if is_import_path(attention) else None
