"""Building a model for training: the type of its weights, the loss in chunks, and the type of gradients."""

import dataclasses
import functools
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cs336_basics.model import RotaryEmbedding, TransformerLM
from cs336_systems.config.run import RunConfig, TrainConfig
from cs336_systems.kernels.attention import get_attention
from cs336_systems.parallel.ddp import DDP
from cs336_systems.parallel.fsdp import FSDP
from cs336_systems.planner.job import Job
from cs336_systems.training.build import cast_weights, prepare_blocks, wrap_model
from cs336_systems.training.load import load_model
from cs336_systems.training.loop import Trainer
from cs336_systems.training.pipeline import train

from ..distributed import run_ranks
from .helpers import make_config, random_tokens, tiny_trainer

pytestmark = pytest.mark.usefixtures("one_thread")


def steps_of(config: RunConfig, count: int = 3) -> tuple[list[Any], float, dict[str, Tensor]]:
    """Losses and norms of some steps, a validation loss, and the weights."""
    with tiny_trainer(config) as trainer:
        rows = [trainer.train_step() for _ in range(count)]
        valid = trainer.evaluate(random_tokens(700, seed=1))
        return [(row["loss"], row["grad_norm"]) for row in rows], valid, dict(trainer.model.state_dict())


@pytest.mark.parametrize("chunk", [1, 7, 10_000])
def test_a_loss_in_chunks_is_the_same_loss(chunk: int, tmp_path: Any) -> None:
    accumulating: dict[str, Any] = dict(gradient_accumulation_steps=2)
    plain = steps_of(make_config(tmp_path, train=accumulating))
    chunked = steps_of(make_config(tmp_path, train=accumulating | dict(loss_chunk_tokens=chunk)))
    torch.testing.assert_close(torch.tensor(chunked[0]), torch.tensor(plain[0]), rtol=1e-5, atol=0)
    assert chunked[1] == pytest.approx(plain[1], rel=1e-5)
    for name, weight in plain[2].items():
        torch.testing.assert_close(chunked[2][name], weight, rtol=1e-4, atol=1e-6)


def test_with_a_loss_in_chunks_nobody_has_all_logits(tmp_path: Any) -> None:
    config = make_config(tmp_path, train=dict(loss_chunk_tokens=7))
    largest = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal largest
        largest = max(largest, tensor.numel())
        return tensor

    with tiny_trainer(config) as trainer, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        trainer.train_step()
    assert largest < config.train.batch_size * config.model.shape.context_length * config.model.shape.vocab_size


@pytest.mark.parametrize("strategy", ["naive", "flat", "overlap", "bucketed", "fsdp"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_strategy_gets_the_types_and_the_size_of_the_configuration(
    strategy: str, precision: str, tmp_path: Any
) -> None:
    parallel: dict[str, Any] = dict(strategy=strategy, grad_dtype="bf16", devices=2)
    if strategy in ("overlap", "bucketed"):
        parallel["bucket_size_mb"] = 3.0
    if strategy == "fsdp":
        parallel["reshard_after_forward"] = False
    config = make_config(tmp_path, train=dict(precision=precision), parallel=parallel)
    wrapped = wrap_model(config, TransformerLM(**dataclasses.asdict(config.model.shape)))
    assert wrapped.grad_dtype == torch.bfloat16
    if isinstance(wrapped, DDP):
        assert wrapped._max_bytes == 3 * 2**20
    if isinstance(wrapped, FSDP):
        computed = torch.bfloat16 if precision == "bf16" else torch.float32
        assert {weight.full.dtype for unit in wrapped._groups for weight in unit.params} == {computed}
        assert not wrapped._reshards


def test_weights_in_bfloat16_leave_positions_as_they_are(tmp_path: Any) -> None:
    rope = RotaryEmbedding(32_768, 8)
    before = rope.cos.clone()
    block = torch.nn.ModuleDict({"rope": rope, "linear": torch.nn.Linear(2, 2)})
    cast_weights(block, torch.bfloat16)
    assert torch.equal(rope.cos, before)
    assert {p.dtype for p in block.parameters()} == {torch.bfloat16}


def test_training_in_bfloat16_is_close_to_training_in_float32(tmp_path: Any) -> None:
    narrow: dict[str, Any] = dict(precision="bf16", weight_dtype="bf16")
    with tiny_trainer(make_config(tmp_path, train=narrow)) as trainer:
        trainer.train_step()
        kinds = {t.dtype for p in trainer.model.parameters() for t in (p, *trainer.optimizer.state[p].values())}
        assert kinds <= {torch.bfloat16, torch.float32}  # a step's number is float32
        assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}
    wide, found = steps_of(make_config(tmp_path)), steps_of(make_config(tmp_path, train=narrow))
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(wide[0]), rtol=0.02, atol=0)
    assert found[1] == pytest.approx(wide[1], rel=0.01)


def test_a_run_in_bfloat16_goes_on_from_its_checkpoint_and_keeps_its_type(tmp_path: Any) -> None:
    def config(run: str, steps: int, resume: str = "none") -> RunConfig:
        narrow: dict[str, Any] = dict(precision="bf16", weight_dtype="bf16", max_steps=steps)
        return make_config(tmp_path, run=run, resume=resume, train=narrow, optimizer=dict(warmup_steps=1, lr=1e-2,
                                                                                          min_lr=1e-2))  # fmt: skip

    train(config("whole", 4))
    train(config("halves", 2))
    train(config("halves", 4, resume="auto"))
    whole, halves = (load_model(tmp_path / run).state_dict for run in ("whole", "halves"))
    for name, weight in whole.items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, halves[name]), name


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(weight_dtype="bf16"), "train.weight_dtype is 'bf16': it must be 'fp32' unless train.precision is bf16"),
        (dict(weight_dtype="bf16", precision="fp16"), "train.weight_dtype is 'bf16'"),
        (dict(loss_chunk_tokens=0), "train.loss_chunk_tokens is 0"),
        (
            dict(compile_memory_budget=0.5, compile=False),
            "train.compile_memory_budget is 0.5: .* 1 without train.compile",
        ),
        (dict(compile_memory_budget=1.5, compile=True), "train.compile_memory_budget is 1.5"),
    ],
    ids=str,
)
def test_impossible_training_settings_are_refused(fields: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**fields)


def gradients_under_autocast(dtype: torch.dtype, compile: bool) -> list[Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = TransformerLM(8, 64, 32, 1, 2, 64, attention=get_attention("naive"))
    prepare_blocks(model, TrainConfig(compile=compile))

    def step() -> None:
        with torch.autocast("cpu", dtype):
            loss = model(torch.arange(64).view(2, 32) % 8).square().mean()
        loss.backward()

    thread = threading.Thread(target=step)  # one in which nothing was set when the model was made
    thread.start()
    thread.join()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_compiled_backward_pass_computes_in_the_types_of_the_uncompiled_one(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit: `naive` switches autocast off for its products, whose gradients are products of float32 too."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    eager, compiled = (gradients_under_autocast(dtype, compile) for compile in (False, True))
    assert len(eager) == 12
    assert all(map(torch.equal, compiled, eager))


WAYS = [("bf16", "fp32"), ("fp8", "fp32"), ("fp16", "fp32"), ("fp32", "fp32"), ("bf16", "bf16"), ("fp8", "bf16")]
"""Precisions and types of weights."""


def residual_dtypes(strategy: str) -> list[list[torch.dtype]]:
    """The type of the residual stream at its end, for each of WAYS."""
    found: list[list[torch.dtype]] = []
    for precision, weight_dtype in WAYS:
        train = dict(precision=precision, weight_dtype=weight_dtype)
        with tiny_trainer(make_config(Path("unused"), train=train, parallel=dict(strategy=strategy))) as trainer:
            seen: list[torch.dtype] = []
            trainer.model.ln_final.register_forward_pre_hook(
                lambda module, inputs, seen=seen: seen.append(inputs[0].dtype)
            )
            trainer.train_step()
            found.append(seen)
    return found


@pytest.mark.parametrize("strategy, fp16", [("none", 4), ("bucketed", 4), ("torch_ddp", 4), ("fsdp", 2),
                                            ("fsdp_simple", 2), ("torch_fsdp", 2)])  # fmt: skip
def test_the_residual_stream_is_16_bit_where_the_planner_says_so(strategy: str, fp16: int) -> None:
    bf16, world_size = 4 if strategy == "torch_ddp" else 2, 1 if strategy == "none" else 2
    expected = [bf16, bf16, fp16, 4, 2, 2]
    for of_rank in run_ranks(residual_dtypes, world_size, strategy):
        assert [[dtype.itemsize for dtype in seen] for seen in of_rank] == [[size] for size in expected]
    for (precision, weight_dtype), size in zip(WAYS, expected, strict=True):
        how: Any = dict(precision=precision, weight_dtype=weight_dtype, strategy=strategy, world_size=world_size)
        config = make_config(Path("unused"), train=dict(precision=precision, weight_dtype=weight_dtype))
        job = Job(shape=config.model.shape, fused=config.optimizer.implementation == "fused", **how)
        assert job.residual_number_bytes == size, how


def test_a_model_in_training_can_be_pickled(tmp_path: Any) -> None:
    with tiny_trainer(make_config(tmp_path, train=dict(precision="bf16"))) as trainer, trainer.autocast():
        again, tokens = pickle.loads(pickle.dumps(trainer.model)), torch.arange(16)[None]
        assert torch.equal(again(tokens), trainer.model(tokens))


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_model_that_was_made_16_bit_is_refused(precision: str, tmp_path: Any) -> None:
    """A float32 run would train 16-bit weights without masters."""
    with tiny_trainer(make_config(tmp_path, train=dict(precision="bf16"))) as trainer:
        again = make_config(tmp_path, train=dict(precision=precision))
        with pytest.raises(ValueError, match=r"the model has weights in torch\.bfloat16: they must be float32"):
            Trainer(again, trainer.model, random_tokens(), "cpu")
