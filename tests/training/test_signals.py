"""Real processes and real signals: a run that is stopped or killed goes on to the same end."""

import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from cs336_systems.config.run import RunConfig
from cs336_systems.training import train
from cs336_systems.training.folder import LOCK
from cs336_systems.training.manifest import checkpoint_name, verify_checkpoint
from cs336_systems.training.metrics import METRICS_FILE, read_metrics
from cs336_systems.training.signals import StopRequest
from tests.distributed import wait_until

from .helpers import (
    assert_same_tensors,
    checkpoint_names,
    checkpoint_path,
    has_rows,
    loss_rows,
    make_config,
    running_train,
)
from .runs import (
    end_of,
    resumed,
    run_dir,
)

pytestmark = pytest.mark.usefixtures("one_thread")


# The request to stop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_a_second_sigint_interrupts(number: signal.Signals) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        assert stop.signal is None
        os.kill(os.getpid(), number)
        assert stop.signal == number.name
        os.kill(os.getpid(), signal.SIGTERM)  # a scheduler may repeat itself
        if number != signal.SIGINT:
            os.kill(os.getpid(), signal.SIGINT)  # one Ctrl-C does not stop the save that a SIGTERM has asked for
        assert stop.signal == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_in_another_thread_signals_are_left_alone() -> None:
    before, found = signal.getsignal(signal.SIGINT), []

    def use() -> None:
        with StopRequest() as stop:
            found.extend([stop.signal, signal.getsignal(signal.SIGINT)])

    thread = threading.Thread(target=use)
    thread.start()
    thread.join(timeout=30)
    assert found == [None, before]


# Real processes and real signals

STEPS = 61
LONG = dict(max_steps=STEPS, batch_size=8, gradient_accumulation_steps=4, validation_interval=0)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A run long enough to be hit in its midst."""
    config = make_config(tmp_path_factory.mktemp("undisturbed"), train=LONG)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    train(config)
    torch.set_num_threads(threads)
    return config


def assert_same_long_end(config: RunConfig, undisturbed: RunConfig) -> None:
    assert_same_tensors(end_of(config, STEPS).tensors, end_of(undisturbed, STEPS).tensors)
    assert loss_rows(config) == loss_rows(undisturbed)


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_process_after_its_step_with_a_checkpoint_from_which_the_run_goes_on_to_the_same_end(
    tmp_path: Path, undisturbed: RunConfig, number: signal.Signals, code: int
) -> None:
    config = dataclasses.replace(undisturbed, run_dir=str(tmp_path / "run"))
    with running_train(config) as process:
        wait_until(has_rows(config, 5), process)
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (code, "")
    assert f"{number.name}: stopping after this step" in out
    assert "--resume auto" in out

    result = json.loads((run_dir(config) / "result.json").read_text())
    step = result["step"]
    assert 5 <= step < STEPS, "the signal came too late for this test"
    assert result["interrupted"] == number.name
    assert read_metrics(run_dir(config) / METRICS_FILE)[-1] == {"step": step, "valid_loss": result["valid_loss"]}
    assert [row["step"] for row in loss_rows(config)] == list(range(1, step + 1))
    assert checkpoint_names(config) == [checkpoint_name(step)]
    assert verify_checkpoint(checkpoint_path(config, step)).step == step

    train(resumed(config))
    assert_same_long_end(config, undisturbed)


def test_a_second_process_is_refused_and_a_killed_one_leaves_a_folder_that_goes_on_to_the_same_end(
    tmp_path: Path, undisturbed: RunConfig
) -> None:
    config = dataclasses.replace(
        undisturbed,
        run_dir=str(tmp_path / "run"),
        checkpoint=make_config(tmp_path, checkpoint=dict(checkpointing_interval=3, keep_last=2)).checkpoint,
    )
    with running_train(config) as process:
        wait_until(has_rows(config, 10), process)
        with pytest.raises(ValueError, match="in use by another process") as caught:
            train(resumed(config))
        assert str(config.run_dir) in str(caught.value)
        assert process.poll() is None, "the run ended too soon for this test"
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
    train(resumed(config))
    assert_same_long_end(config, undisturbed)
    assert checkpoint_names(config) == [checkpoint_name(STEPS - 1), checkpoint_name(STEPS)]


HANGING = """
import sys, time
from cs336_systems.cli.main import main
from cs336_systems.training.loop import Trainer
def hang(self, stop):
    print("in the step", flush=True)
    for _ in range(600):
        time.sleep(0.1)
Trainer.start_step = hang
main()
"""


def test_a_second_sigint_ends_a_run_at_once_whose_step_does_not_end(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with running_train(config, HANGING) as process:
        read_until(process, "in the step")
        process.send_signal(signal.SIGINT)
        read_until(process, "SIGINT: stopping after this step")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=15)
    assert process.returncode not in (0, 143)
    assert "Traceback" not in err
    assert checkpoint_names(config) == []
    with (run_dir(config) / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the folder is free


def read_until(process: subprocess.Popen, text: str) -> None:
    """Read the output of a process up to the line with the text."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return
    pytest.fail(f"{text!r} was not printed: {lines}")
