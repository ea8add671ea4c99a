"""Training with 16-bit matrices: their float32 masters, steps that are skipped on the device, and accumulation."""

import contextlib
import copy
import dataclasses
import math
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cs336_basics.model import TransformerLM
from cs336_basics.optimizer import AdamW
from cs336_basics.tokenizer import Tokenizer
from cs336_systems.config.data import DataConfig
from cs336_systems.config.model import ModelConfig
from cs336_systems.config.run import OptimizerConfig, RunConfig, TrainConfig
from cs336_systems.parallel import comm, get_strategy
from cs336_systems.parallel.strategy import Strategy
from cs336_systems.planner.accounting import (
    block_matrices,
    bytes_of_kinds,
    least_training_bytes,
    matmul_parameters,
    num_parameters,
    sizes_of,
)
from cs336_systems.planner.job import Job
from cs336_systems.training import loop
from cs336_systems.training.batches import BatchLoader
from cs336_systems.training.build import initial_model
from cs336_systems.training.load import load_model
from cs336_systems.training.loop import NonFiniteError, StartedStep, Trainer
from cs336_systems.training.optimizer import (
    LOWER_HALF,
    MASTER,
    FusedAdamW,
    GradientScale,
    adamw_torch,
    joined,
    learning_rate,
    local_part,
    rest_of,
    set_learning_rate,
)
from cs336_systems.training.pipeline import train
from tests.distributed import run_ranks
from tests.training.helpers import assert_same_tensors, make_config, tiny_trainer

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
STEPS, BAD_STEP = 6, 4


def config_of(
    precision: str = "bf16", parallel: dict[str, Any] | None = None, name: str = "adamw", **train: Any
) -> RunConfig:
    groups = dict(parallel=parallel or {}, model=dict(num_layers=2), optimizer=dict(name=name))
    return make_config(Path("unused"), **groups, train=dict(batch_size=8, precision=precision, max_steps=STEPS) | train)


def weights_and_masters(trainer: Trainer) -> dict[str, Tensor]:
    found = {name: p.detach().cpu().clone() for name, p in trainer.model.named_parameters()}
    for name, p in trainer.model.named_parameters():
        found |= {f"{name}.{key}": value.cpu().clone() for key, value in trainer.optimizer.state.get(p, {}).items()}
    return found


# What is 16-bit


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_matrices_are_16_bit_and_their_masters_have_the_weights_that_were_drawn(precision: str) -> None:
    config = config_of(precision)
    with tiny_trainer(config_of("fp32")) as wide, tiny_trainer(config) as trainer:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        for (name, p), drawn in zip(trainer.model.named_parameters(), wide.model.parameters(), strict=True):
            is_matrix = p.ndim == 2 and "embeddings" not in name
            assert p.dtype == (dtype if is_matrix else torch.float32), name
            state = trainer.optimizer.state[p]
            assert ({MASTER, LOWER_HALF} & state.keys() != set()) == is_matrix
            assert torch.equal(joined(p.detach(), rest_of(p, state)), drawn)
            assert torch.equal(p, drawn.to(p.dtype))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_of_one_micro_batch_are_16_bit_and_those_of_several_add_up_in_float32(accumulation: int) -> None:
    found = set()
    with tiny_trainer(config_of(gradient_accumulation_steps=accumulation)) as trainer:
        trainer.optimizer.register_step_pre_hook(
            lambda *_: found.update(p.grad.dtype for p in trainer.model.parameters() if p.dtype == torch.bfloat16)
        )
        trainer.train_step()
    assert found == {torch.bfloat16 if accumulation == 1 else torch.float32}


def bytes_of_a_step(config: RunConfig) -> int:
    """Weights, gradients and optimizer state of this rank, when the optimizer has its turn."""
    with tiny_trainer(config) as trainer:
        parameters, found = list(trainer.model.parameters()), list[int]()

        def count(*_: Any) -> None:
            states = [trainer.optimizer.state.get(p, {}) for p in parameters]
            state = [t for each in states for t in each.values() if t.ndim]
            gradients = [p.grad for p in parameters if p.grad is not None]
            found.append(sum(local_part(t).nbytes for t in (*parameters, *gradients, *state)))

        trainer.optimizer.register_step_pre_hook(count)
        trainer.train_step()
    return found[0]


@pytest.mark.parametrize(
    "strategy, shard, chunk, name",
    [
        ("naive", False, None, "adamw"),
        ("naive", True, 5, "adamw"),
        ("naive", True, None, "muon"),
        ("fsdp", False, None, "adamw"),
        ("fsdp", False, 5, "muon"),
        ("fsdp_simple", False, None, "adamw"),
        ("torch_ddp", False, None, "adamw"),
        ("torch_ddp", False, 5, "adamw"),
        ("torch_fsdp", False, 5, "adamw"),
    ],
)
def test_the_planner_knows_weights_gradients_and_state(
    strategy: str, shard: bool, chunk: int | None, name: str
) -> None:
    config = config_of(parallel=dict(strategy=strategy, shard_optimizer=shard), name=name, loss_chunk_tokens=chunk)
    shape, matrices = config.model.shape, matmul_parameters(config.model.shape)
    how: dict[str, Any] = dict(strategy=strategy, world_size=2, shard_optimizer=shard, loss_chunk_tokens=chunk)
    job = Job(shape=shape, fused=True, muon=name == "muon", **how)
    assert get_strategy(strategy).strategy.needs_float32 == (not job.has_masters)
    kept = sum(bytes_of_kinds(shape, sizes_of(types))[2] for types in (job.weight_dtypes, job.gradient_dtypes))
    state = 8 * num_parameters(shape) + job.master_bytes * matrices
    state -= 4 * shape.num_layers * block_matrices(shape) * job.muon
    found = run_ranks(bytes_of_a_step, 2, config)
    norms = (2 * shape.num_layers + 1) * shape.d_model if strategy.startswith("fsdp") else 0  # each rank has them whole
    assert sum(found) == 2 * (kept // job.weight_parts + state // job.state_parts) + 16 * norms
    # The bound that refuses a run, without the rotary tables.
    how = dict(weight_parts=job.weight_parts, state_parts=job.state_parts, master_bytes=2, muon=job.muon)
    least = least_training_bytes(shape, 0, 0, **how) - 4 * shape.context_length * shape.d_model // shape.num_heads
    assert max(found) >= least > 0


def test_validation_sees_no_gradients() -> None:
    """Dynamo compiles no product of a 16-bit weight that has a float32 gradient."""
    with tiny_trainer(config_of(parallel=dict(strategy="bucketed"), gradient_accumulation_steps=2)) as trainer:
        trainer.train_step()
        seen = list[bool]()
        trainer.model.register_forward_pre_hook(
            lambda *_: seen.append(any(p.grad is not None for p in trainer.model.parameters()))
        )
        trainer.evaluate(trainer.loader._tokens)
    assert set(seen) == {False}


# The same numbers as autocast over float32 weights, with the same residual stream


class AutocastTrainer(Trainer):
    """The step as autocast does it: float32 weights, float32 gradients, clipped in place, and the readable AdamW."""

    def reset(self) -> None:
        for p in self.model.parameters():
            if p.dtype == torch.bfloat16:
                p.grad_dtype = None
                p.data = joined(p.detach(), self.optimizer.state[p][LOWER_HALF])
                p.grad_dtype = torch.float32
        settings, self.scale = self.config.optimizer, None
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)


def check_beside_autocast(config: RunConfig, monkeypatch: pytest.MonkeyPatch, tolerance: float = 0) -> None:
    """Compare the losses and norms of some steps, and the masters after them if nothing may differ."""
    with tiny_trainer(config) as trainer:
        rows = [trainer.train_step() for _ in range(STEPS)]
        masters = {
            name: joined(p.detach(), rest_of(p, trainer.optimizer.state[p]))
            for name, p in trainer.model.named_parameters()
        }
    monkeypatch.setattr("tests.training.helpers.Trainer", AutocastTrainer)
    with tiny_trainer(config) as other:
        assert isinstance(other, AutocastTrainer)
        other.reset()
        for row in rows:
            again = other.train_step()
            for name in ("loss", "grad_norm"):
                assert again[name] == pytest.approx(row[name], rel=tolerance, abs=0)
        for name, p in other.model.named_parameters() if tolerance == 0 else ():
            torch.testing.assert_close(p.detach(), masters[name], rtol=2**-22, atol=0)  # see `halves`


@pytest.mark.parametrize(
    "train",
    [
        {},
        dict(gradient_accumulation_steps=4, activation_checkpointing="block"),
        dict(loss_chunk_tokens=5),
    ],
    ids=str,
)
def test_losses_and_norms_have_the_bits_of_autocast(monkeypatch: pytest.MonkeyPatch, train: dict[str, Any]) -> None:
    check_beside_autocast(config_of(**train), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("packs, tolerance", [(False, 0), (True, 1e-3)])
def test_compiled_losses_and_norms_are_those_of_autocast(
    packs: bool, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed, the gradient of an input is rounded once; autocast rounds it for each of q, k and v, and gate and up."""
    if not packs:
        monkeypatch.setattr(loop, "pack_matrices", lambda model: None)
    check_beside_autocast(config_of(compile=True), monkeypatch, tolerance)


def losses_on_sources(device: str, steps: int = 200, **sizes: Any) -> tuple[list[float], list[float]]:
    """Losses on the sources of Python's library: of the default options, and of autocast with PyTorch's AdamW."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    tokenizer = Tokenizer.train(text, 4096)
    tokens = np.array([i for part in text for i in tokenizer.encode(part)], dtype=np.uint16)
    settings = dict(lr=3e-4, betas=(0.9, 0.95), eps=1e-8, warmup_steps=steps // 4)
    config = RunConfig(
        model=ModelConfig(vocab_size=tokenizer.vocab_size, **sizes),
        data=DataConfig(source="text", train_text="sources"),
        optimizer=OptimizerConfig(**settings),
        train=TrainConfig(device=device, precision="bf16", max_steps=steps, batch_size=16),
    ).resolved_for(1)
    model = initial_model(config, torch.device(device), None)
    plain = copy.deepcopy(model)
    with contextlib.closing(Trainer(config, model, tokens, torch.device(device))) as trainer:
        ours = [row["loss"] for row in trainer.train_steps(steps)]

    parameters = list(plain.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.optimizer.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    losses = list[float]()
    with contextlib.closing(BatchLoader(tokens, plain.context_length, 0, torch.device(device))) as loader:
        for step in range(1, steps + 1):
            x, y = loader.get((step - 1) * 16, 16)
            set_learning_rate(optimizer, learning_rate(config, step))
            with torch.autocast(device, torch.bfloat16):
                loss = nn.functional.cross_entropy(plain(x).float().flatten(0, 1), y.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return ours, losses


@pytest.mark.gpu
def test_losses_of_200_steps_on_real_text_are_those_of_autocast() -> None:
    """At the assignment's small size, 120 M parameters."""
    ours, autocast = losses_on_sources("cuda", size="small", context_length=512)
    apart = max(abs(a - b) for a, b in zip(ours, autocast, strict=True))
    print(f"losses from {autocast[0]:.4f} to {autocast[-1]:.4f}, at most {apart:.5f} apart")
    assert autocast[-1] < autocast[0] - 3
    assert apart < 1e-3


# Steps that are not finite


def train_with_a_bad_step(config: RunConfig, device: str) -> list[dict[str, Tensor]]:
    """Weights and state after step 4, after the bad step 5, and at the end."""
    found = []
    with tiny_trainer(config, device=device) as trainer:
        weight = trainer.model.ln_final.weight
        for step in range(1, STEPS + 1):
            if step == BAD_STEP:
                found.append(weights_and_masters(trainer))
                with torch.no_grad():
                    before = weight.clone()
                    weight[3] = math.nan if comm.rank() == comm.world_size() - 1 else weight[3]
            row = trainer.train_step()
            assert row["skipped_steps"] == (step >= BAD_STEP)
            if step == BAD_STEP:
                with torch.no_grad():
                    weight.copy_(before)
                found.append(weights_and_masters(trainer))
        found.append(weights_and_masters(trainer))
    return found


def test_the_loss_of_a_step_is_read_when_the_next_one_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    start, finish, events = Trainer.start_step, Trainer.finish_step, list[str]()

    def poisoned(trainer: Trainer, *stop: Any) -> StartedStep:
        kept = trainer.model.ln_final.weight.detach().clone()
        if trainer.position.step + 1 == BAD_STEP:
            trainer.model.ln_final.weight.data[3] = math.nan
        started = start(trainer, *stop)
        if started.step == BAD_STEP:
            trainer.model.ln_final.weight.data.copy_(kept)
        events.append(f"start {started.step}")
        return started

    def finished(trainer: Trainer, started: StartedStep) -> dict[str, Any]:
        events.append(f"finish {started.step}")
        return finish(trainer, started)

    monkeypatch.setattr(Trainer, "start_step", poisoned)
    monkeypatch.setattr(Trainer, "finish_step", finished)
    results = []
    for late in (True, False):
        with tiny_trainer(config_of(skip_nonfinite=True)) as trainer:
            assert not trainer.reads_late  # on a CPU
            trainer.reads_late = late
            rows = list(trainer.train_steps(STEPS))
            assert [row["skipped_steps"] for row in rows] == [int(step >= BAD_STEP) for step in range(1, STEPS + 1)]
            results.append(weights_and_masters(trainer))
    assert events[:5] == ["start 1", "start 2", "finish 1", "start 3", "finish 2"]
    assert events[2 * STEPS - 2 : 2 * STEPS + 2] == [f"finish {STEPS - 1}", f"finish {STEPS}", "start 1", "finish 1"]
    assert_same_tensors(*results)


def losses_of(config: RunConfig) -> list[float]:
    with tiny_trainer(config) as trainer:
        return [trainer.train_step()["loss"] for _ in range(5)]


@pytest.mark.parametrize(
    "train, grad_dtype",
    [({}, "same"), (dict(gradient_accumulation_steps=4), "fp32"), (dict(loss_chunk_tokens=5), "same")],
    ids=str,
)
def test_pytorchs_ddp_takes_float32_weights_and_trains_alike(train: dict[str, Any], grad_dtype: str) -> None:
    ours, theirs = (
        run_ranks(losses_of, 2, config_of(parallel=dict(strategy=strategy, grad_dtype=grad_dtype), **train))[0]
        for strategy in ("naive", "torch_ddp")
    )
    assert theirs == pytest.approx(ours, rel=1e-4)


def assert_skipped(found: list[dict[str, Tensor]]) -> None:
    before, after, end = found
    assert_same_tensors(before, after)
    assert not any(tensor.isnan().any() for tensor in end.values())
    steps = {int(tensor) for name, tensor in end.items() if name.endswith(".step")}
    assert steps <= {STEPS - 1}
    assert not torch.equal(end["lm_head.weight"], after["lm_head.weight"])


@pytest.mark.parametrize("precision, name", [("bf16", "adamw"), ("fp16", "muon"), ("fp32", "adamw")])
def test_a_bad_step_changes_nothing(precision: str, name: str) -> None:
    config = config_of(precision, name=name, skip_nonfinite=True)
    if precision == "fp32":
        config = dataclasses.replace(config, optimizer=OptimizerConfig(implementation="fused", warmup_steps=0))
    assert_skipped(train_with_a_bad_step(config, "cpu"))


@pytest.mark.parametrize(
    "strategy, shard, name",
    [
        ("naive", False, "adamw"),
        ("bucketed", True, "adamw"),
        ("overlap", "simple", "muon"),
        ("fsdp", False, "adamw"),
        ("fsdp", False, "muon"),
        ("torch_ddp", False, "adamw"),
    ],
)
def test_a_bad_step_of_one_rank_changes_nothing_on_two(strategy: str, shard: Any, name: str) -> None:
    config = config_of(parallel=dict(strategy=strategy, shard_optimizer=shard), name=name, skip_nonfinite=True)
    for found in run_ranks(train_with_a_bad_step, 2, config, "cpu"):
        assert_skipped(found)


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("precision, name", [("bf16", "adamw"), ("bf16", "muon"), ("fp16", "adamw")])
def test_a_bad_step_changes_nothing_on_a_gpu(precision: str, name: str, cuda_graph: bool) -> None:
    config = config_of(precision, name=name, skip_nonfinite=True, cuda_graph=cuda_graph, device="cuda")
    assert_skipped(train_with_a_bad_step(config, "cuda"))


@pytest.mark.multigpu
@pytest.mark.parametrize("strategy, shard", [("overlap", False), ("bucketed", True), ("fsdp", False)])
@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("cuda_graph", [False, True])
def test_a_bad_step_of_one_rank_changes_nothing_on_two_gpus(
    strategy: str, shard: bool, name: str, cuda_graph: bool
) -> None:
    parallel = dict(strategy=strategy, shard_optimizer=shard)
    config = config_of(parallel=parallel, name=name, skip_nonfinite=True, cuda_graph=cuda_graph, device="cuda")
    for found in run_ranks(train_with_a_bad_step, 2, config, "cuda", device="cuda"):
        assert_skipped(found)


@pytest.mark.gpu
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_losses_on_a_gpu_are_those_of_the_plain_form(
    monkeypatch: pytest.MonkeyPatch, precision: str, accumulation: int
) -> None:
    losses = []
    for is_plain in (False, True):
        if is_plain:
            monkeypatch.setattr(
                "cs336_systems.kernels.adamw.adamw",
                lambda gradients, states, tables, **hyper: adamw_torch(gradients, states, **hyper),
            )
        config = config_of(precision, gradient_accumulation_steps=accumulation, cuda_graph=False)
        with tiny_trainer(config, device="cuda") as trainer:
            losses.append([trainer.train_step()["loss"] for _ in range(STEPS)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_bad_step_is_reported_with_its_batch() -> None:
    with tiny_trainer(config_of()) as trainer:
        for _ in range(3):
            trainer.train_step()
        with torch.no_grad():
            trainer.model.ln_final.weight[0] = math.nan
        with pytest.raises(NonFiniteError, match=r"step 4: loss nan, gradient norm nan, .* sequences 24 to 31"):
            trainer.train_step()


# The optimizer by itself


def test_the_loss_scale_grows_after_many_good_steps_and_is_kept() -> None:
    model = TransformerLM(10, 4, 8, 1, 2, 16)
    strategy, scale = Strategy(model), GradientScale(CPU, scales_loss=True)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    scale.load_state_dict({"scale": 8.0, "growth_factor": 2.0, "_growth_tracker": 1998})
    seen = []
    for loss in (1.0, 1.0, 1.0, math.inf, 1.0):
        scale.decide(torch.tensor(loss), strategy)
        seen.append((scale.state_dict(), float(scale.factor)))
    assert [state["scale"] for state, _ in seen] == [8, 16, 16, 8, 8]
    assert [state["_growth_tracker"] for state, _ in seen] == [1999, 0, 1, 0, 1]
    assert [factor for _, factor in seen] == [1 / 8, 1 / 8, 1 / 16, 0, 1 / 8]


def test_a_narrow_parameter_without_master_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a parameter of shape \(3,\) is torch.bfloat16"):
        FusedAdamW([nn.Parameter(torch.ones(3).bfloat16())], factor=torch.ones(()), masters={})


def test_state_that_was_replaced_is_refused() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = FusedAdamW([p], factor=torch.ones(()), masters={})
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(RuntimeError, match="the state of a FusedAdamW was replaced"):
        optimizer.step()


def test_a_16_bit_run_saves_float32_weights_under_their_names(tmp_path: Path) -> None:
    results = {}
    for precision in ("fp32", "bf16"):
        config = make_config(tmp_path, precision, train=dict(precision=precision, max_steps=2))
        results[precision] = load_model(train(config).run_dir).state_dict
    assert results["bf16"].keys() == results["fp32"].keys()
    assert {tensor.dtype for tensor in results["bf16"].values()} == {torch.float32}
    head = results["bf16"]["lm_head.weight"]
    assert not torch.equal(head, head.bfloat16().float())
