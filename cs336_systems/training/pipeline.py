"""The main job: from a configuration to a trained model and a sample from it."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from ..config.run import RunConfig
from ..machine.console import check_single_process
from ..machine.hardware import use_device
from ..parallel import comm
from ..parallel.ranks import environment_rank, launched
from .launch import check_launch, launch, use_device_of_rank
from .prepare import prepare_on_every_rank
from .result import RunResult
from .resume import plan_run
from .run import Run


def train(config: RunConfig) -> RunResult:
    """Run everything that the configuration describes and return the result.

    With `parallel.devices` above 1, this process starts that many processes. Under torchrun, every rank calls this.

    Raises ValueError or FileNotFoundError for a mistake that the user can fix, NonFiniteError for a loss or gradient
    norm that is not finite, CheckpointError if a checkpoint cannot be written, and CollectiveError if another rank is
    gone or hangs.
    """
    if not launched():
        check_single_process()
        if config.parallel.devices > 1:
            return launch(config)
        return train_on(config, use_device(config.train.device, or_mps=True))
    check_launch(config)
    device = use_device_of_rank(config.train.device)
    parallel = config.parallel
    with comm.process_group(
        device,
        init_timeout_s=parallel.init_timeout_s,
        step_timeout_s=parallel.step_timeout_s,
        nccl_max_ctas=parallel.nccl_max_ctas,
        copy_engines=parallel.copy_engines,
    ):
        return train_on(config, device)


def train_on(config: RunConfig, device: torch.device) -> RunResult:
    """The whole run on this rank's device. All ranks call it together, and rank 0 writes the files."""
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first use
    with contextlib.ExitStack() as stack:  # holds the lock of the run folder
        plan, weights = plan_run(config, device, stack)
        data = prepare_on_every_rank(plan.config, plan.protect_data)
        plan.check_data(data)
        if (result := plan.finished_result()) is not None:
            return result
        run = Run(plan, data, device, weights)
        del weights  # as large as the model
        return run.train()


def train_one_rank(files: Sequence[str]) -> None:
    """Train the configuration in the first file as one of several processes. Rank 0 writes the result to the second."""
    config_file, result_file = map(Path, files)
    result = train(RunConfig.from_dict(json.loads(config_file.read_text())))
    if environment_rank() == 0:  # the process group is gone
        result_file.write_text(json.dumps(dataclasses.asdict(result)))
