"""The recorded step against the step as it is."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cs336_systems.config.run import DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, RunConfig, TrainConfig
from cs336_systems.training import train
from cs336_systems.training.metrics import read_metrics
from tests.training.helpers import make_config, tiny_trainer


def config(
    folder: Path,
    *,
    cuda_graph: bool,
    compile: bool,
    accumulation: int = 1,
    device: str = "cuda",
    parallel: ParallelConfig | None = None,
) -> RunConfig:
    return RunConfig(
        parallel=parallel or ParallelConfig(),
        run_dir=str(folder / f"graph-{cuda_graph}"),
        model=ModelConfig(vocab_size=300, context_length=32, d_model=64, d_ff=128, num_layers=2, num_heads=2),
        data=DataConfig(source="random", data_dir=str(folder / "data"), random_tokens=10_000),
        optimizer=OptimizerConfig(implementation="torch_fused", warmup_steps=2),
        train=TrainConfig(
            max_steps=10,
            batch_size=8,
            gradient_accumulation_steps=accumulation,
            device=device,
            precision="bf16",
            compile=compile,
            cuda_graph=cuda_graph,
            deterministic=device == "cuda",
            validation_interval=4,
        ),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("compile", [False, True])
def test_recorded_step_gives_the_same_losses_bit_for_bit(tmp_path: Path, compile: bool, accumulation: int) -> None:
    losses = []
    for cuda_graph in (False, True):
        result = train(config(tmp_path, cuda_graph=cuda_graph, compile=compile, accumulation=accumulation))
        rows = read_metrics(Path(result.run_dir) / "metrics.jsonl")
        losses.append([(row.get("loss"), row.get("grad_norm"), row.get("valid_loss")) for row in rows])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 10 + 3


@pytest.mark.multigpu
@pytest.mark.parametrize(
    "strategy", ["naive", "flat", "overlap", "bucketed", "fsdp", "fsdp gathered once", "fsdp_simple"]
)
def test_recorded_steps_of_two_processes_give_the_same_losses(tmp_path: Path, strategy: str) -> None:
    name, _, once = strategy.partition(" ")
    options: dict[str, Any] = dict(strategy=name, bucket_size_mb=0.05, reshard_after_forward=not once)
    losses = []
    for cuda_graph in (False, True):
        parallel = ParallelConfig(devices=2, step_timeout_s=60, **options)
        result = train(config(tmp_path, cuda_graph=cuda_graph, compile=False, accumulation=2, parallel=parallel))
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


def test_cuda_graph_on_a_cpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train\.cuda_graph is true: it needs a CUDA device"):
        train(config(tmp_path, cuda_graph=True, compile=False, device="cpu"))


def test_cuda_graph_with_fp16_is_refused() -> None:
    with pytest.raises(ValueError, match=r"train\.cuda_graph is true: it must be false with train\.precision 'fp16'"):
        TrainConfig(cuda_graph=True, precision="fp16")


@pytest.mark.gpu
def test_a_recorded_step_leaves_gradients_where_the_optimizer_reads_them(tmp_path: Path) -> None:
    before = config(tmp_path, cuda_graph=True, compile=False)
    result = train(before)
    first, last = (read_metrics(Path(result.run_dir) / "metrics.jsonl")[i]["loss"] for i in (0, -2))
    assert last != first
    assert torch.isfinite(torch.tensor(last))
