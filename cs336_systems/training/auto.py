"""Decides `train.compile` and `train.cuda_graph` where they are auto."""

import dataclasses
import importlib.util
import logging
import math
from typing import Any

import torch

from ..config.checks import is_import_path
from ..config.run import NOT_RECORDED, RunConfig
from ..machine.hardware import device_peak_flops
from ..parallel import comm
from ..planner.accounting import training_flops

logger = logging.getLogger(__name__)

COMPILATION_PAYS_AFTER_S = 30.0
"""Training time from which on compilation pays: it takes some 15 s, and halves the step of a small model."""
USUAL_MFU = 0.3
SLOW_GPU_FLOPS = 100e12
"""Peak of a GPU that is not known."""
_HINT = ", which may wait for the GPU (--train.cuda_graph true records it all the same)"


def resolve(config: RunConfig, device: torch.device) -> RunConfig:
    """The configuration with true or false for each auto, on this device and with this number of processes."""
    train = config.train
    decided: dict[str, Any] = {}
    if train.compile == "auto":
        decided["compile"] = train.compile_memory_budget < 1 or compilation_pays(config, device)
    if train.cuda_graph == "auto":
        reason = why_not_recorded(config)
        decided["cuda_graph"] = device.type == "cuda" and reason is None
        if device.type == "cuda" and reason is not None:
            logger.info(f"the step is not recorded as a CUDA graph: {reason}")
    return dataclasses.replace(config, train=dataclasses.replace(train, **decided))


def compilation_pays(config: RunConfig, device: torch.device) -> bool:
    """Whether the whole run takes longer on this GPU than compilation pays back. Never true on a CPU."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    train, shape = config.train, config.model.shape
    flops = train.max_steps * training_flops(shape, train.batch_size, shape.context_length) / comm.world_size()
    peak = device_peak_flops(device, train.precision) or SLOW_GPU_FLOPS
    seconds = min(flops / (USUAL_MFU * peak), 60 * (train.max_minutes or math.inf))
    return seconds > COMPILATION_PAYS_AFTER_S


def why_not_recorded(config: RunConfig) -> str | None:
    """What of the run a CUDA graph cannot hold, or may not: code of the user's own may wait for the GPU."""
    strategy, attention = config.parallel.strategy_for(comm.world_size()), config.model.attention
    if strategy in NOT_RECORDED or is_import_path(strategy):
        hint = "" if strategy in NOT_RECORDED else _HINT
        return f"parallel.strategy is {strategy}{hint}"
    has_band = config.model.window is not None or config.data.documents
    waits = {"flash_torch": has_band, "flash_triton_compiled": has_band, "fa4": config.data.documents}
    if waits.get(attention):
        return f"model.attention is {attention}, which waits for the GPU to know what a window or documents hide"
    return f"model.attention is {attention}{_HINT}" if is_import_path(attention) else None
