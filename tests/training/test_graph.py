"""The recorded step against the step as it is."""

import contextlib
import importlib
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from cs336_basics.model import CausalMultiHeadSelfAttention, RotaryEmbedding
from cs336_systems.config.run import RunConfig
from cs336_systems.kernels import recording
from cs336_systems.kernels.attention import ATTENTION, check_attention, get_attention, peers
from cs336_systems.kernels.attention.reference import naive
from cs336_systems.training import launch, train
from cs336_systems.training.graph import RecordedStep
from cs336_systems.training.metrics import read_metrics
from tests.training.helpers import make_config, tiny_trainer
from tests.training.test_launch import BY_COPIES, START


def config(folder: Path, cuda_graph: bool, device: str = "cuda", **groups: Any) -> RunConfig:
    settings: dict[str, Any] = dict(batch_size=8, device=device, precision="bf16", cuda_graph=cuda_graph)
    settings |= dict(deterministic=device == "cuda") | groups.pop("train", {})
    model = dict(context_length=32, d_model=64, d_ff=128, num_layers=2) | groups.pop("model", {})
    optimizer = dict(implementation="torch_fused", warmup_steps=2)
    return make_config(folder, f"graph-{cuda_graph}", model=model, optimizer=optimizer, train=settings, **groups)


@pytest.mark.gpu
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])  # with the update in the recording, and without
def test_recorded_step_gives_the_same_losses_bit_for_bit(
    tmp_path: Path, precision: str, compile: bool, accumulation: int
) -> None:
    losses = []
    settings = dict(precision=precision, compile=compile, gradient_accumulation_steps=accumulation)
    for cuda_graph in (False, True):
        torch._dynamo.reset()  # else the second run compiles for any batch size, because validation had another one
        result = train(config(tmp_path, cuda_graph, train=settings))
        rows = read_metrics(Path(result.run_dir) / "metrics.jsonl")
        losses.append([(row.get("loss"), row.get("grad_norm"), row.get("valid_loss")) for row in rows])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 10 + 3


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("kernel", ["flash_triton", "auto"])
def test_blocks_that_keep_attentions_outputs_learn_the_same(
    kernel: str, cuda_graph: bool, compile: bool, tmp_path: Path
) -> None:
    """To the bit unless they are compiled: the compiler fuses what it computes again with what reads it."""
    losses = []
    for policy in ("none", "first_1_but_attention"):
        how = dict(precision="bf16", compile=compile, activation_checkpointing=policy, max_steps=5)
        model = dict(d_model=128, num_layers=2, attention=kernel)
        result = train(config(tmp_path / policy, cuda_graph, model=model, train=how))
        losses.append([row["loss"] for row in read_metrics(Path(result.run_dir) / "metrics.jsonl") if "loss" in row])
    assert losses[0] == (pytest.approx(losses[1], rel=1e-3) if compile else losses[1])


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", list(ATTENTION))
def test_every_attention_kernel_can_be_recorded(kernel: str, tmp_path: Path) -> None:
    try:
        check_attention(kernel, 64, torch.bfloat16, torch.device("cuda"))
    except ValueError as error:
        pytest.skip(str(error))
    settings = dict(model=dict(d_model=128, attention=kernel), train=dict(deterministic=False, max_steps=5))
    losses = []
    for cuda_graph in (False, True):
        result = train(config(tmp_path, cuda_graph, **settings))
        losses.append([row["loss"] for row in read_metrics(Path(result.run_dir) / "metrics.jsonl") if "loss" in row])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.multigpu
@pytest.mark.parametrize(
    "strategy",
    ["naive", "flat", "overlap", "overlap by copies", "bucketed", "bucketed by copies", "fsdp", "fsdp gathered once",
     "fsdp_simple"],
)  # fmt: skip
def test_recorded_steps_of_two_processes_give_the_same_losses(
    tmp_path: Path, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _, how = strategy.partition(" ")
    if how == "by copies":
        monkeypatch.setattr(launch, "CALL", ["-c", BY_COPIES + START])
    options: dict[str, Any] = dict(strategy=name, bucket_size_mb=0.05, reshard_after_forward=how != "gathered once")
    losses = []
    for cuda_graph in (False, True):
        parallel = dict(devices=2, step_timeout_s=60, **options)
        result = train(config(tmp_path, cuda_graph, train=dict(gradient_accumulation_steps=2), parallel=parallel))
        rows = read_metrics(Path(result.run_dir) / "metrics.jsonl")
        losses.append([row.get("loss") or row.get("valid_loss") for row in rows])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert len(losses[0]) == 10 + 3


def test_the_recording_is_forgotten_with_its_trainer(tmp_path: Path) -> None:
    # NCCL waits at its end for recordings of its transfers. The test before this one sees it, with two GPUs.
    class Graph:
        resets = 0

        def reset(self) -> None:
            self.resets += 1

    graph = Graph()
    with tiny_trainer(make_config(tmp_path, train=dict(cuda_graph=True))) as trainer:
        assert trainer._recorded is not None
        trainer._recorded._graph = graph  # type: ignore[assignment]
    assert graph.resets == 1
    gone = weakref.ref(trainer)
    del trainer
    assert gone() is None  # without a garbage collection


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording runs as it is, and a replay does nothing."""
    graph = type("Graph", (), {"replay": lambda _: None, "reset": lambda _: None})
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


@pytest.mark.usefixtures("on_a_cpu")
def test_kernels_are_chosen_for_the_recording_in_the_warm_up_calls_and_in_every_thread() -> None:
    seen = []

    def compute(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(1) as pool:  # as autograd calls a GPU's backward passes
            seen.append(pool.submit(lambda: recording.is_on).result())
        return inputs

    step = RecordedStep(compute, lambda: None)
    for calls in (1, 2, 3, 3):  # two to warm up, the recording, a replay
        step(torch.zeros(1), torch.zeros(1))
        assert seen == [True] * calls
        assert not recording.is_on


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("call", [1, 3])
def test_no_recording_is_on_after_an_error(call: int) -> None:
    calls = []

    def compute(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        calls.append(recording.is_on)
        if len(calls) == call:
            raise KeyError("here")
        return inputs

    step = RecordedStep(compute, lambda: None)
    for _ in range(call - 1):
        step(torch.zeros(1), torch.zeros(1))
    with pytest.raises(KeyError, match="here"):
        step(torch.zeros(1), torch.zeros(1))
    assert calls == [True] * call
    assert not recording.is_on


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("validates_first", [False, True])
def test_compiled_attention_is_chosen_anew_where_nothing_is_recorded(
    validates_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="Triton is only there on Linux")
    module = "cs336_systems.kernels.attention"
    flash_triton = importlib.import_module(f"{module}.flash_triton")
    monkeypatch.setattr(
        importlib.import_module(f"{module}.auto"), "_capability", torch.compiler.assume_constant_result(lambda _: 90)
    )
    # Another function of the same inputs, so that the numbers show which one ran.
    monkeypatch.setattr(flash_triton, "flash_triton", lambda q, k, v, *args, **mask: naive(q, k, -v, *args, **mask))
    monkeypatch.setattr(peers, "sdpa", naive)
    torch.manual_seed(0)
    block = CausalMultiHeadSelfAttention(64, 1, RotaryEmbedding(10_000.0, 64, 512), get_attention("auto")).bfloat16()
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    x = torch.randn(1, 512, 64, dtype=torch.bfloat16)

    def compute(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        o = compiled(inputs)
        o.backward(targets)
        return o.detach()

    def check_validation() -> None:
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), block(x))
        torch.testing.assert_close(compiled(x), block(x))  # a step that is not recorded

    if validates_first:
        check_validation()
    step = RecordedStep(compute, block.zero_grad)
    with recording.on():
        expected = block(x)
    expected.backward(x)
    gradients = {name: weight.grad for name, weight in block.named_parameters()}
    for _ in range(3):
        torch.testing.assert_close(step(x, x), expected.detach())
        for name, weight in block.named_parameters():
            torch.testing.assert_close(weight.grad, gradients[name])
        check_validation()
    assert not torch.allclose(block(x), expected)


def test_cuda_graph_on_a_cpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train\.cuda_graph is true: it needs a CUDA device"):
        train(config(tmp_path, cuda_graph=True, device="cpu"))
