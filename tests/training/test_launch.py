"""Runs of several processes as a user starts them: the same model comes out, and whatever happens to a rank, all end.

The processes are real, on gloo; faults are put into them by a program of ours that takes the place of the launched one.
Most are forked. A run that a signal stops and one of torchrun's start interpreters, as users' do.
"""

import ctypes
import dataclasses
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing import SignalException

from cs336_systems.cli.main import main
from cs336_systems.config.run import RunConfig
from cs336_systems.training import launch, pipeline, train
from cs336_systems.training.load import load_model
from cs336_systems.training.loop import Trainer
from cs336_systems.training.metrics import METRICS_FILE, read_metrics
from tests import forked
from tests.distributed import processes_of, run_ranks, wait_until
from tests.training.helpers import (
    _environment,
    checkpoint_names,
    has_rows,
    loss_rows,
    make_config,
    run_train,
    running_train,
)

# The program of each rank: one of them has an accident in a step of the run's first try.
FAULTY = """
import os, signal, sys, time
from cs336_systems.training.loop import Trainer
step, fault, rank = Trainer.start_step, sys.argv.pop(1), int(os.environ["RANK"])
def broken(*arguments):
    raise RuntimeError("the dog ate my gradients")
def accident(self, *arguments):
    first_try = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if rank == 1 and self.position.step == 6 and first_try:
        if fault == "raises":
            self._compute = broken
        if fault == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hangs":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # PyTorch's agent waits 30 s before it sends SIGKILL
            time.sleep(1000)
        if fault == "is busy":
            time.sleep(1000)
        if fault == "is told to stop":
            os.kill(os.getpid(), signal.SIGTERM)
    return step(self, *arguments)
Trainer.start_step = accident
if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and rank == 0:
    time.sleep(1.5)  # a restart may not depend on who is back first: rank 1 must not find where rank 0 was
if fault == "differs" and rank == 1:
    sys.argv += ["--train.max_steps", "11"]
if fault == "all mistype" or fault == "one mistypes" and rank == 1:
    sys.argv += ["--train.max_stepz", "11"]
if fault == "all find no checkpoint":
    sys.argv += ["--resume", "nowhere/step_00000001"]
"""
BY_COPIES = "from cs336_systems.parallel import peer_memory; peer_memory.LEAST_BYTES = 0\n"
START = "from cs336_systems.training.one_rank import main; main()"
LAUNCHED = FAULTY + START
BY_TORCHRUN = FAULTY + "from cs336_systems.cli.main import main; main()"
# The command, with the faulty program in the place of the launched one.
COMMAND = """
import sys
from cs336_systems.training import launch
launch.CALL = ["-c", open({program!r}).read(), {fault!r}]
from cs336_systems.cli.main import main; main()
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A finished run of one process, to compare with. Not to be written to."""
    config = config_for(tmp_path_factory.mktemp("alone"))
    train(config)
    return config


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, str]:
    """A finished run of two processes, and its output. Not to be written to."""
    return trained(config_for(tmp_path_factory.mktemp("pair"), devices=2))


def trained(config: RunConfig) -> tuple[RunConfig, str]:
    done = run_train(config)
    assert done.returncode == 0, done.stderr
    return config, done.stdout


def config_for(root: Path, devices: int = 1, **groups: Any) -> RunConfig:
    parallel = dict(devices=devices, step_timeout_s=20.0) | groups.pop("parallel", {})
    return make_config(root, parallel=parallel, checkpoint=dict(checkpointing_interval=5), **groups)


def assert_same_losses(config: RunConfig, expected: RunConfig, rel: float = 1e-4) -> None:
    rows, wanted = loss_rows(config), loss_rows(expected)
    assert [row["step"] for row in rows] == [row["step"] for row in wanted]
    for row, other in zip(rows, wanted, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=rel)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=10 * rel)


@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_one_command_trains_the_same_model_on_several_processes(
    devices: int, alone: RunConfig, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if devices == 2:
        config, said = request.getfixturevalue("pair")
    else:
        config, said = trained(config_for(tmp_path, devices, parallel=dict(strategy="overlap", shard_optimizer=True)))
    assert_same_losses(config, alone)
    assert said.count("validation loss") == 1
    assert said.count("training: steps") == 1
    assert checkpoint_names(config) == checkpoint_names(alone)
    weights, expected = (load_model(str(run.run_dir)).state_dict for run in (config, alone))
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    result, wanted = (json.loads((Path(str(run.run_dir)) / "result.json").read_text()) for run in (config, alone))
    assert result["valid_loss"] == pytest.approx(wanted["valid_loss"], rel=1e-4)
    assert result["checkpoint"].endswith("step_00000010")


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("torch_fsdp", marks=pytest.mark.slow)])
def test_the_sample_of_a_sharded_model_is_that_of_a_whole_one(strategy: str, tmp_path: Path) -> None:
    data = dict(source="stories", story_chars=20_000)
    whole = make_config(tmp_path, run="whole", data=data)
    train(whole)
    sharded = make_config(tmp_path, data=data, parallel=dict(devices=2, strategy=strategy))
    run_ranks(pipeline.train_on, 2, sharded, torch.device("cpu"))
    samples = [(Path(str(config.run_dir)) / "sample.txt").read_text() for config in (whole, sharded)]
    assert samples[0] == samples[1]


STANDALONE = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-addr=localhost"]


def torchrun(
    config: RunConfig, code: str, *options: str, fault: str = "none", start: type[subprocess.Popen] = forked.Popen
) -> subprocess.CompletedProcess:
    file = Path(f"{config.run_dir}.config.json")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(config.to_dict()))
    program = file.with_suffix(".py")
    program.write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", *STANDALONE]
    command += [*options, str(program), fault, "train", "--config", str(file)]
    return forked.run(command, 120, start, env=_environment(), cwd=file.parent)


FAULTS = {  # fate of rank 1 in step 7 -> the message
    "raises": r"^cs336: rank 1: training at step 7 failed: the dog ate my gradients$",
    "is killed": r"^cs336: rank 1 was ended by SIGKILL; rank 0: .* at step 7 failed",
    "hangs": r"^cs336: rank 0: gather .* at step 7 failed",
}


@pytest.mark.parametrize(
    "fault",  # under torchrun, below, one raises and one is killed
    [pytest.param(each, marks=() if each == "hangs" else pytest.mark.slow) for each in FAULTS],
)
def test_when_a_rank_fails_all_end_with_one_message_and_the_run_can_go_on(
    fault: str, alone: RunConfig, tmp_path: Path
) -> None:
    config = config_for(tmp_path, devices=2, parallel=dict(step_timeout_s=4.0))
    program = tmp_path / "program.py"
    program.write_text(LAUNCHED)
    failed = run_train(config, COMMAND.format(program=str(program), fault=fault), timeout=100)
    assert failed.returncode == 1
    lines = failed.stderr.strip().splitlines()
    assert len(lines) == 1, failed.stderr
    assert re.search(FAULTS[fault], lines[0])
    assert not processes_of(str(tmp_path))
    assert checkpoint_names(config) == ["step_00000005"]

    train(resumed(dataclasses.replace(config, parallel=alone.parallel)))
    assert_same_losses(config, alone)


@pytest.mark.multigpu
@pytest.mark.parametrize(
    "cuda_graph, transfer",
    [(False, "all-reduce of the gradient of lm_head.weight and 11 more"), (True, "replay of the recorded step")],
)
def test_when_a_rank_hangs_on_a_gpu_the_other_names_the_transfer(
    cuda_graph: bool, transfer: str, tmp_path: Path
) -> None:
    train, parallel = dict(device="cuda", cuda_graph=cuda_graph), dict(strategy="overlap", bucket_size_mb=100.0)
    config = config_for(tmp_path, devices=2, parallel=parallel | dict(step_timeout_s=4.0), train=train)
    program = tmp_path / "program.py"
    stuck = "from cs336_systems.parallel.failure import Watchdog; Watchdog.STUCK_S = 20\n"
    program.write_text(BY_COPIES + stuck + LAUNCHED)
    failed = run_train(config, COMMAND.format(program=str(program), fault="hangs"), timeout=120)
    assert failed.returncode == 1
    assert f"cs336: rank 0: {transfer} at step 7 was not done after 4 s: another rank is" in failed.stderr


APART = """
from cs336_systems.parallel.ddp import DDP
start, calls = DDP._start_next_bucket, []
def accident(self):
    calls.append(0)
    return broken() if len(calls) == 50 + rank else start(self)
DDP._start_next_bucket = accident
"""


@pytest.mark.multigpu
def test_ranks_that_raise_at_different_places_on_gpus_end(tmp_path: Path) -> None:
    """One rank's GPU waits for a bucket that the other never sends."""
    config = config_for(
        tmp_path,
        devices=2,
        parallel=dict(strategy="overlap", bucket_size_mb=0.01, step_timeout_s=4.0),
        train=dict(device="cuda", cuda_graph=False),
    )
    program = tmp_path / "program.py"
    program.write_text(BY_COPIES + FAULTY + APART + START)
    failed = run_train(config, COMMAND.format(program=str(program), fault="none"), timeout=120)
    assert failed.returncode == 1
    assert "the dog ate my gradients" in failed.stderr
    assert not processes_of(str(tmp_path))


def test_the_third_interrupt_kills_ranks_that_are_busy(tmp_path: Path) -> None:
    config = config_for(tmp_path, devices=2, parallel=dict(step_timeout_s=60.0))
    program = tmp_path / "program.py"
    program.write_text(LAUNCHED)
    with running_train(config, COMMAND.format(program=str(program), fault="is busy")) as process:
        wait_until(has_rows(config, 6), process)
        for _ in range(3):
            time.sleep(1)
            process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=20)[1]
    assert (process.returncode, err) == (130, "cs336: interrupted\n")
    wait_until(lambda: not processes_of(str(tmp_path)), timeout_s=5)


@pytest.mark.parametrize(
    "is_second, interrupted, reason",
    [(False, None, None), (False, "SIGTERM", "SIGINT"), (True, "SIGTERM", "SIGTERM")],
)
def test_the_first_signal_is_the_reason_unless_the_run_was_finished(
    is_second: bool,
    interrupted: str | None,
    reason: str | None,
    alone: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Processes see SIGINT as SIGTERM. is_second: SIGINT came while they ended because of a SIGTERM."""

    def run_processes(program: list[str], *_: Any) -> None:
        result = json.loads((Path(str(alone.run_dir)) / "result.json").read_text())
        Path(program[-1]).write_text(json.dumps(result | {"interrupted": interrupted}))
        try:
            if is_second:
                raise SignalException("ended", signal.SIGTERM)
        finally:
            raise launch._Interrupt

    monkeypatch.setattr(launch, "run_processes", run_processes)
    assert train(config_for(tmp_path, devices=2)).interrupted == reason


def resumed(config: RunConfig) -> RunConfig:
    return dataclasses.replace(config, resume="auto")


def test_torchrun_restarts_a_run_that_goes_on_from_its_last_checkpoint(
    pair: tuple[RunConfig, str], alone: RunConfig, tmp_path: Path
) -> None:
    undisturbed, config = pair[0], config_for(tmp_path)
    done = torchrun(resumed(config), BY_TORCHRUN, "--nproc-per-node=2", "--max-restarts=3", fault="is killed")
    assert done.returncode == 0, done.stderr
    assert loss_rows(config) == loss_rows(undisturbed)
    assert_same_losses(config, alone)


def test_ranks_with_different_configurations_are_told_the_difference(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    failed = torchrun(config, BY_TORCHRUN, "--nproc-per-node=2", fault="differs")
    assert failed.returncode != 0
    assert "the ranks have different configurations: train.max_steps is 11 on rank 1 and 10 on rank 0" in failed.stderr
    assert not Path(str(config.run_dir)).exists()


MISTAKES = {  # mistakes that torchrun's ranks find -> the message of one of them
    "all mistype": r"unknown field train.max_stepz: did you mean train.max_steps\?",
    "one mistypes": r"unknown field train.max_stepz: did you mean train.max_steps\?",
    "all find no checkpoint": r".*nowhere/step_00000001.*",
    "raises": r"training at step 7 failed: the dog ate my gradients \(RuntimeError at \S+/run\.config\.py:6\)",
}


@pytest.mark.parametrize(
    "fault",
    [pytest.param(each, marks=() if each == "raises" else pytest.mark.slow) for each in MISTAKES],
)
def test_one_of_torchruns_processes_reports_a_mistake(fault: str, tmp_path: Path) -> None:
    failed = torchrun(config_for(tmp_path), BY_TORCHRUN, "--nproc-per-node=2", fault=fault)
    assert failed.returncode != 0
    said = re.findall(rf"^rank (\d): {MISTAKES[fault]}$", failed.stderr, re.MULTILINE)
    assert len(said) == 1, failed.stderr
    if fault in ("one mistypes", "raises"):
        assert said == ["1"]
    assert re.search(rf"^ *traceback : (?:rank 1: )?{MISTAKES[fault]}$", failed.stderr, re.MULTILINE), (
        "not in torchrun's summary"
    )


@pytest.mark.parametrize(
    "number, code",  # torchrun's ranks are told to stop by SIGTERM below, one process in test_signals.py
    [pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow), (signal.SIGINT, 0)],
)
def test_a_signal_to_the_command_stops_all_ranks_after_the_same_step(
    number: signal.Signals, code: int, alone: RunConfig, tmp_path: Path
) -> None:
    config = config_for(tmp_path, devices=2, train=dict(max_steps=100_000, validation_interval=0))
    with running_train(config) as process:
        wait_until(has_rows(config, 5), process)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert (err, set(re.findall(r"SIG\w+|\w+ signal", out))) == ("", {number.name})
    assert "stopping after this step" in out
    last = loss_rows(config)[-1]["step"]
    rows = read_metrics(Path(str(config.run_dir)) / METRICS_FILE)
    assert [row["step"] for row in rows if "valid_loss" in row] == [last]
    (again,) = re.findall(rf"stopped by {number.name} at step {last}; to go on: cs336 (train .*)", out)
    assert RunConfig.from_dict(json.loads(Path(again.split()[2]).read_text())).parallel.devices == 2
    assert f"step_{last:08d}" in checkpoint_names(config)
    assert not processes_of(str(tmp_path))


def test_who_started_torchrun_is_told_to_start_it_again(
    alone: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_for(tmp_path)
    stopped = torchrun(config, BY_TORCHRUN, "--nproc-per-node=2", fault="is told to stop")
    assert stopped.returncode != 0
    (line,) = [line for line in stopped.stdout.splitlines() if "to go on" in line]
    hint = r"start torchrun as before with -m cs336_systems (train --config \S+ --resume auto)"
    found = re.fullmatch(f"stopped by SIGTERM at step 7; to go on: {hint}", line)
    assert found is not None, line
    with pytest.raises(SystemExit) as ended:  # the command itself, here in one process; with torchrun: the test above
        main(found[1].split())
    assert ended.value.code == 0
    assert capsys.readouterr().out.count("validation loss") == 1
    assert_same_losses(config, alone)


def test_when_the_command_is_killed_its_processes_end(tmp_path: Path) -> None:
    config = config_for(tmp_path, devices=2, train=dict(max_steps=100_000, validation_interval=0))
    with running_train(config) as process:
        wait_until(has_rows(config, 3), process)
        process.kill()
        process.wait(timeout=10)
    deadline = time.monotonic() + 30
    while rows_grow(config):
        assert time.monotonic() < deadline, "the processes go on"


def rows_grow(config: RunConfig) -> bool:
    before = len(loss_rows(config))
    time.sleep(1.0)  # many steps of these models
    return len(loss_rows(config)) > before


def train_until(step: int, config: RunConfig) -> None:
    """A run on this rank that ends after a step as if it had been told to."""
    real = Trainer.train_steps
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Trainer, "train_steps", lambda self, last, _: real(self, last, lambda: self.position.step == step)
        )
        assert pipeline.train_on(config, torch.device("cpu")).step == step


def test_a_run_of_one_strategy_and_size_goes_on_with_another(alone: RunConfig, tmp_path: Path) -> None:
    """1 process -> 4 with FSDP -> 2 with a sharded optimizer, five steps or fewer each."""
    train_until(5, config_for(tmp_path))
    chain = [dict(devices=4, strategy="fsdp"), dict(devices=2, shard_optimizer=True)]
    for step, parallel in zip((8, 10), chain, strict=True):
        config = config_for(tmp_path, parallel=parallel, resume="auto")
        run_ranks(train_until, parallel["devices"], step, config)
    assert_same_losses(config, alone)


# Mistakes


def test_a_process_of_several_that_nothing_has_numbered_is_refused_and_does_not_train_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError, match=r"^WORLD_SIZE is 2 in the environment, without LOCAL_RANK: set "):
        train(config_for(tmp_path))
    monkeypatch.delenv("RANK")
    with pytest.raises(ValueError, match=r"^WORLD_SIZE is 2 in the environment, without RANK and LOCAL_RANK: "):
        train(config_for(tmp_path))
    assert not any(tmp_path.rglob("metrics.jsonl"))
    for name in ("RANK", "WORLD_SIZE"):  # as some shells leave them
        monkeypatch.setenv(name, "1")
    assert train(config_for(tmp_path, train=dict(max_steps=1))).step == 1


# Two hosts


@pytest.fixture
def two_hosts() -> Any:
    """Two network namespaces joined by a veth pair: their names, addresses and interfaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    # Ports and addresses are the namespaces' own, so fixed ones are in nobody's way.
    names = [f"cs336-{os.getpid()}-{i}" for i in range(2)]
    ends = [f"v{os.getpid()}-{i}"[:15] for i in range(2)]

    def ip(*words: str) -> None:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)
        if done.returncode:
            pytest.skip(f"ip {' '.join(words)}: {done.stderr.strip()}")

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for i, (name, end) in enumerate(zip(names, ends, strict=True)):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"10.36.36.{i + 1}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield [(name, f"10.36.36.{i + 1}", end) for i, (name, end) in enumerate(zip(names, ends, strict=True))]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


def enter_namespace(name: str) -> None:
    with open(f"/run/netns/{name}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")


def test_two_hosts_train_together_over_their_network(two_hosts: Any, alone: RunConfig, tmp_path: Path) -> None:
    config = config_for(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config.to_dict()))
    first = two_hosts[0][1]
    hosts = []
    for i, (name, address, end) in enumerate(two_hosts):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        command += [f"--node-rank={i}", f"--master-addr={first}", "--master-port=29500", f"--local-addr={address}"]
        command += ["-m", "cs336_systems", "train", "--config", str(file)]
        pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        pipes |= dict(env=_environment() | {"GLOO_SOCKET_IFNAME": end}, cwd=tmp_path)
        hosts.append(forked.Popen(command, preexec_fn=functools.partial(enter_namespace, name), **pipes))
    try:
        outputs = [host.communicate(timeout=120) for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert [host.returncode for host in hosts] == [0, 0], outputs
    assert sum(out.count("validation loss") for out, _ in outputs) == 1
    assert_same_losses(config, alone)
