"""The training loop on several ranks: the same global batch, so the same weights as one process has."""

import functools
import re
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.config.run import RunConfig
from cs336_systems.parallel import comm
from cs336_systems.parallel.strategy import Strategy
from cs336_systems.training import sample as sample_module
from tests.distributed import run_ranks
from tests.parallel.models import for_each
from tests.training.helpers import make_config, random_tokens, tiny_trainer

STEPS = 5
EPS = 1e-4
"""Above rounding noise. At 1e-8 the first steps of AdamW are as large where a gradient is noise as anywhere."""
DDP = ("naive", "flat", "overlap", "bucketed")
STRATEGIES = (*DDP, "fsdp", "fsdp_simple")
VARIANTS = [(name, False) for name in STRATEGIES] + [(name, True) for name in DDP] + [("naive", "simple")]


def every_variant(first: Any, second: Any) -> list[Any]:
    """Most with the first value, some with the second too; the others with -m slow: tests/parallel has how they send.

    A sharded optimizer is the same under each strategy that leaves the weights whole: bucketed has it here.
    """
    some = [("bucketed", True), ("fsdp", False)]
    slow = [(variant, first) for variant in VARIANTS if variant[1] is True and variant not in some]
    slow += [(variant, second) for variant in VARIANTS if variant not in some]
    every = [(variant, value) for value in (first, second) for variant in VARIANTS]
    return [pytest.param(*v, value, marks=pytest.mark.slow if (v, value) in slow else ()) for v, value in every]


def config_of(
    strategy: str = "auto", shard_optimizer: bool | str = False, num_layers: int = 2, eps: float = 1e-8, **train: Any
) -> RunConfig:
    parallel = dict(strategy=strategy, shard_optimizer=shard_optimizer, bucket_size_mb=0.01)
    model, optimizer = dict(num_layers=num_layers), dict(eps=eps)
    train = dict(batch_size=8, max_steps=STEPS) | train
    return make_config(Path("unused"), parallel=parallel, model=model, optimizer=optimizer, train=train)


def train_some(
    config: RunConfig, steps: int = STEPS, device: str = "cpu"
) -> tuple[dict[str, Tensor], list[Any], float]:
    """The whole state dict after some steps, the rows of the steps, and a validation loss."""
    with tiny_trainer(config, device=device) as trainer:
        rows = [trainer.train_step() for _ in range(steps)]
        valid = trainer.evaluate(random_tokens(700, seed=1))
        state = {name: tensor.float().cpu().clone() for name, tensor in trainer.strategy.full_state_dict().items()}
        told = [{name: row[name] for name in ("step", "loss", "grad_norm", "lr")} for row in rows]
        return state, told, valid


@functools.cache
def train_alone(config: RunConfig, steps: int = STEPS) -> tuple[dict[str, Tensor], list[Any], float]:
    """`train_some` in one process, once for each configuration."""
    return train_some(config, steps)


def assert_same(actual: Any, expected: Any, rtol: float, atol: float) -> None:
    state, rows, valid = actual
    for name, tensor in expected[0].items():
        torch.testing.assert_close(state[name], tensor, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
    for row, wanted in zip(rows, expected[1], strict=True):
        assert row == pytest.approx(wanted, rel=max(rtol, 1e-3))
    assert valid == pytest.approx(expected[2], rel=rtol)


def _with_norms_together(state: dict[str, Tensor]) -> dict[str, Tensor]:
    matrices = {name: tensor for name, tensor in state.items() if tensor.ndim > 1}
    return matrices | {"norms": torch.cat([tensor for tensor in state.values() if tensor.ndim == 1])}


def assert_near(actual: Any, expected: Any, config: RunConfig) -> None:
    """No matrix is off by more than a tenth of the distance that training has moved it; losses are within 1 %.

    With 16 bits some gradients are rounding noise, and AdamW's first steps are as large for them as for any other, so
    that single elements may be anywhere. The norms' weights are taken together: each has 32 elements, and if those are
    16-bit, one that is rounded the other way is off by a twentieth. Training on half of the batch is off by half and
    more.
    """
    start, _, _ = train_alone(config, 0)
    state, rows, valid = actual
    for name, tensor in _with_norms_together(expected[0]).items():
        moved, off = (
            float(torch.linalg.vector_norm(tensor - _with_norms_together(other)[name])) for other in (start, state)
        )
        assert off <= 0.1 * moved, f"{name}: {off:.3g} off, moved by {moved:.3g}"
    for row, wanted in zip(rows, expected[1], strict=True):
        assert row == pytest.approx(wanted, rel=0.01)
    assert valid == pytest.approx(expected[2], rel=0.01)


def assert_ranks_equal(results: list[Any]) -> None:
    """Weights, rows and losses are equal to the last bit."""
    for state, rows, valid in results[1:]:
        assert (rows, valid) == results[0][1:]
        assert all(torch.equal(tensor, results[0][0][name]) for name, tensor in state.items())


@pytest.mark.parametrize("strategy, shard_optimizer, world_size", every_variant(2, 4))
def test_weights_losses_and_norms_are_those_of_one_process(
    strategy: str, shard_optimizer: bool, world_size: int
) -> None:
    config = config_of(strategy, shard_optimizer, eps=EPS, gradient_accumulation_steps=2)
    results = run_ranks(train_some, world_size, config, 2)
    assert_ranks_equal(results)
    alone = train_alone(config_of(eps=EPS, gradient_accumulation_steps=2), 2)
    assert_same(results[0], alone, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("strategy, shard_optimizer, precision", every_variant("bf16", "fp16"))
def test_mixed_precision(strategy: str, shard_optimizer: bool, precision: str) -> None:
    config = config_of(strategy, shard_optimizer, precision=precision)
    results = run_ranks(train_some, 2, config)
    assert_ranks_equal(results)
    alone = config_of(precision=precision)
    assert_near(results[0], train_alone(alone), alone)
    with pytest.raises(AssertionError, match="off, moved by"):
        assert_near(train_alone(config_of(precision=precision, batch_size=4)), train_alone(alone), alone)


@pytest.mark.parametrize(
    "strategy, train",
    [
        pytest.param("fsdp", dict(compile=True), marks=pytest.mark.slow),
        ("fsdp", dict(activation_checkpointing="groups_2")),
        pytest.param("fsdp", dict(activation_checkpointing="groups_2", compile=True), marks=pytest.mark.slow),
        ("bucketed", dict(activation_checkpointing="groups_3")),
        ("fsdp", dict(activation_checkpointing="first_1", loss_chunk_tokens=5)),
        ("fsdp_simple", dict(activation_checkpointing="groups_2", loss_chunk_tokens=5)),
        ("torch_fsdp", dict(loss_chunk_tokens=5)),
        pytest.param(
            "fsdp",
            dict(compile=True, compile_memory_budget=0.75, activation_checkpointing="first_1", loss_chunk_tokens=8),
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_compiled_and_checkpointed_blocks(strategy: str, train: dict[str, Any]) -> None:
    results = run_ranks(train_some, 2, config_of(strategy, num_layers=3, eps=EPS, **train), 2, timeout_s=150)
    assert_ranks_equal(results)
    assert_same(results[0], train_alone(config_of(num_layers=3, eps=EPS), 2), rtol=1e-3, atol=1e-5)


def test_sharded_weights_in_bfloat16_are_those_of_one_process() -> None:
    train: dict[str, Any] = dict(precision="bf16", weight_dtype="bf16", loss_chunk_tokens=8)
    results = run_ranks(train_some, 2, config_of("fsdp", **train))
    assert_ranks_equal(results)
    alone = config_of(**train)
    assert_near(results[0], train_alone(alone), alone)


@pytest.mark.multigpu
@pytest.mark.parametrize("strategy, shard_optimizer", VARIANTS)
def test_weights_are_those_of_one_process_on_gpus(strategy: str, shard_optimizer: bool) -> None:
    config = config_of(strategy, shard_optimizer, device="cuda", gradient_accumulation_steps=2)
    results = run_ranks(train_some, 2, config, STEPS, "cuda", device="cuda")
    assert_ranks_equal(results)
    assert_same(results[0], train_alone(config_of(gradient_accumulation_steps=2)), rtol=1e-3, atol=1e-4)


class Forgets(Strategy):
    """Averages no gradients."""


def train_without_averaging() -> str:
    config = config_of(f"{__name__}:Forgets")
    with tiny_trainer(config) as trainer, pytest.raises(ValueError, match=r"^parallel\.strategy is 'tests") as raised:
        trainer.train_step()
    return str(raised.value)


def test_a_strategy_that_does_not_average_is_named_in_its_first_step() -> None:
    for rank, told in enumerate(run_ranks(train_without_averaging, 2)):
        assert re.search(rf"in step 1 their norm is [\d.]+ on rank {rank}, and [\d.]+ on average$", told), told


# The sample at the end


def draw_samples(strategy: str) -> list[tuple[Any, int]]:
    return [draw_sample(strategy, full_devices) for full_devices in (0, 1)]


def draw_sample(strategy: str, full_devices: int) -> tuple[Any, int]:
    """Logits of the model that a run samples from, where so many tries meet with a device that has no room for it, and
    how many whole tensors this rank has gathered for it."""
    tries, gathered = 0, 0

    def logits_of(model: Any, tokenizer: Any, sampling: Any) -> Tensor:
        nonlocal tries
        tries += 1
        if tries <= full_devices:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return model(torch.arange(16)[None]).detach()

    sample_module.sample_text = logits_of  # type: ignore[assignment]
    with tiny_trainer(config_of(strategy)) as trainer:
        trainer.train_step()
        gather = trainer.strategy.full_state_dict

        def counting(*args: Any, **kwargs: Any) -> dict[str, Tensor]:
            nonlocal gathered
            state = gather(*args, **kwargs)
            gathered = len(state)
            return state

        trainer.strategy.full_state_dict = counting  # type: ignore[method-assign]
        return sample_module.sample_of_trainer(trainer, None), gathered  # type: ignore[arg-type]


def test_the_first_rank_alone_has_the_whole_model_to_sample_from() -> None:
    ((expected, _),) = run_ranks(draw_sample, 1, "none", 0)
    first, second = run_ranks(for_each, 2, ["fsdp", "fsdp_simple", "torch_fsdp"], draw_samples)
    for strategy, samples in first.items():
        for logits, gathered in samples:
            torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4, msg=lambda m, n=strategy: f"{n}: {m}")
            assert gathered > 0, strategy
        assert second[strategy] == [(None, 0)] * 2, strategy


# Agreement between ranks


def stops(asking_rank: int) -> list[bool]:
    with tiny_trainer(config_of("bucketed")) as trainer:
        seen = []
        for step in range(3):
            trainer.finish_step(trainer.start_step(lambda step=step: step == 1 and comm.rank() == asking_rank))
            seen.append(trainer.stopping)
        return seen


@pytest.mark.parametrize("asking_rank", [0, 1])
def test_all_ranks_stop_after_the_step_in_which_one_was_asked_to(asking_rank: int) -> None:
    assert run_ranks(stops, 2, asking_rank) == [[False, True, False]] * 2


def infinite_loss_scale(strategy: str) -> list[Any]:
    """fp16 with a loss scale that overflows at first: it comes down on all ranks alike."""
    with tiny_trainer(config_of(strategy, precision="fp16")) as trainer:
        assert trainer.scale is not None
        trainer.scale.load_state_dict({"scale": 2.0**40, "_growth_tracker": 0})
        told = []
        for _ in range(12):
            row = trainer.train_step()
            told.append((row["skipped_steps"], trainer.scale.loss_scale))
        return told


@pytest.mark.parametrize("strategy", ["bucketed", "fsdp"])
def test_loss_scales_are_the_same_on_all_ranks(strategy: str) -> None:
    first, second = run_ranks(infinite_loss_scale, 2, strategy)
    assert first == second
    assert first[0][0] == 1
    assert first[-1][0] < 40


def prepare_slowly(root: str, slow_rank: int, times_out: float) -> int:
    """The data of a run of which one rank takes longer than a step may."""
    from cs336_systems.training import prepare as module

    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=times_out), dist.group.WORLD)
    prepare = module.prepare_data

    def slow(config: RunConfig, *_: Any) -> Any:
        if comm.rank() == slow_rank:
            time.sleep(2 * times_out)  # longer than the limit
        return prepare(config)

    module.prepare_data = slow
    data = module.prepare_on_every_rank(make_config(Path(root)))
    comm.check_same({"tokens": len(data.train)}, "data")
    return len(data.train)


@pytest.mark.parametrize("slow_rank", [0, 1])
def test_data_may_take_longer_than_a_step(slow_rank: int, tmp_path: Path) -> None:
    assert run_ranks(prepare_slowly, 2, str(tmp_path), slow_rank, 1.5) == [5000, 5000]


def fail_to_prepare(root: str) -> str:
    from cs336_systems.training import prepare as module

    prepare = module.prepare_data

    def failing(config: RunConfig, *_: Any) -> Any:
        if comm.rank() == 1:
            raise FileNotFoundError("valid.npy is not on this machine")
        return prepare(config)

    module.prepare_data = failing
    with pytest.raises(FileNotFoundError) as error:
        module.prepare_on_every_rank(make_config(Path(root)))
    return str(error.value)


def test_an_error_in_the_data_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    assert run_ranks(fail_to_prepare, 2, str(tmp_path)) == ["valid.npy is not on this machine"] * 2


def be_refused(root: str) -> str:
    """The error if every rank's own device is too small."""
    from cs336_systems.training import pipeline, resume

    def check(config: RunConfig, device: torch.device) -> None:
        raise ValueError(f"cuda:{comm.rank()} has 1 GiB")

    resume.check_config = check
    with pytest.raises(ValueError) as error:  # noqa: PT011
        pipeline.train_on(make_config(Path(root)), torch.device("cpu"))
    return str(error.value)


def test_an_error_on_every_rank_is_that_of_the_first(tmp_path: Path) -> None:
    assert run_ranks(be_refused, 2, str(tmp_path)) == ["cuda:0 has 1 GiB"] * 2


def validation_sequences() -> dict[int, list[int]]:
    """By size of the batch."""
    found = {}
    for batch_size in (4, 8, 32):
        with tiny_trainer(config_of(batch_size=batch_size, validation_sequences=22)) as trainer:
            starts = trainer.validation_starts(2000)
            assert starts.shape[1] <= trainer.micro_batch
            found[batch_size] = starts.ravel().tolist()
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_any_number_of_ranks_validates_on_the_same_sequences(world_size: int) -> None:
    assert run_ranks(validation_sequences, world_size) == [validation_sequences()] * world_size


def validation_loss(_: int) -> float:
    with tiny_trainer(config_of(batch_size=4, validation_sequences=3)) as trainer:
        return trainer.evaluate(random_tokens(700, seed=1))


def test_a_rank_without_a_batch_adds_nothing_to_the_validation_loss() -> None:
    expected = validation_loss(0)
    for loss in run_ranks(validation_loss, 2, 0):
        assert loss == pytest.approx(expected, rel=1e-6)
