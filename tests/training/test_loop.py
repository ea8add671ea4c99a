"""The step of the loop: loss, gradient, schedule, decay, validation; non-finite values change nothing."""

import dataclasses
import math
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from cs336_basics.data import sequence_starts
from cs336_systems.training.batches import BatchLoader
from cs336_systems.training.loop import NonFiniteError, Trainer
from cs336_systems.training.optimizer import LOWER_HALF, learning_rate

from .helpers import (
    CONTEXT_LENGTH,
    VOCAB_SIZE,
    assert_same_tensors,
    make_config,
    random_tokens,
    tiny_trainer,
    warnings_of,
    weights_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
OPTIMIZERS = ["own", "torch", "torch_foreach", "torch_fused", "fused"]
given_quickly = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def expected_batch(tokens: np.ndarray, first: int, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    starts = sequence_starts(seed, first, count, len(tokens) - CONTEXT_LENGTH)
    inputs = [tokens[s : s + CONTEXT_LENGTH].tolist() for s in starts]
    targets = [tokens[s + 1 : s + 1 + CONTEXT_LENGTH].tolist() for s in starts]
    return torch.tensor(inputs), torch.tensor(targets)


def gradients_of_a_step(trainer: Trainer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The gradients that the optimizer gets in the next step, and the step's metrics."""
    found: dict[str, Tensor] = {}

    def keep(*_: Any) -> None:
        found.update({name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None})

    handle = trainer.optimizer.register_step_pre_hook(keep)
    row = trainer.train_step()
    handle.remove()
    return found, row


# Batches


@given_quickly
@given(
    requests=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 6)), min_size=1, max_size=8),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_the_loader_gives_the_sequences_asked_for_in_any_order(requests: list[tuple[int, int]], seed: int) -> None:
    tokens = random_tokens(200)
    loader = BatchLoader(tokens, CONTEXT_LENGTH, seed, CPU)
    try:
        for first, count in requests:
            for found, expected in zip(
                loader.get(first, count), expected_batch(tokens, first, count, seed), strict=True
            ):
                assert torch.equal(found, expected)
    finally:
        loader.close()


def loader_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("batches")}


def test_the_loaders_thread_ends_when_it_is_closed() -> None:
    before = loader_threads()
    loader = BatchLoader(random_tokens(), CONTEXT_LENGTH, 0, CPU)
    loader.get(0, 2)
    assert len(loader_threads() - before) == 1
    loader.close()
    assert loader_threads() <= before


class BrokenFrom:
    """Tokens that cannot be read once `broken` is set, as on a disk that fails."""

    def __init__(self, tokens: np.ndarray) -> None:
        self._tokens, self.broken = tokens, False

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: Any) -> np.ndarray:
        if self.broken:
            raise OSError(5, "Input/output error")
        return self._tokens[index]


@pytest.mark.parametrize("steps_before", [0, 3])
def test_an_error_in_the_loaders_thread_comes_out_of_the_step_that_needs_the_batch(
    tmp_path: Any, steps_before: int
) -> None:
    tokens = BrokenFrom(random_tokens())
    with tiny_trainer(make_config(tmp_path), tokens) as trainer:  # type: ignore[arg-type]
        for _ in range(steps_before):
            trainer.train_step()
        trainer.loader.get(trainer.position.sequences, 4)  # the batch after this one is begun
        tokens.broken = True
        trainer.position.sequences += 8
        with pytest.raises(OSError, match="Input/output error"):
            trainer.train_step()
        assert trainer.position.step == steps_before


# Loss and gradients


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_loss_of_a_step_is_the_mean_over_its_tokens_before_the_update(tmp_path: Any, accumulation: int) -> None:
    tokens = random_tokens()
    with tiny_trainer(make_config(tmp_path, train=dict(gradient_accumulation_steps=accumulation)), tokens) as trainer:
        for step in range(3):
            x, y = expected_batch(tokens, 4 * step, 4)
            with torch.no_grad():
                expected = functional.cross_entropy(trainer.model(x).flatten(0, 1), y.flatten()).item()
            row = trainer.train_step()
            assert row["loss"] == pytest.approx(expected, rel=1e-5)
            assert row["step"] == trainer.position.step == step + 1
            assert trainer.position.sequences == 4 * (step + 1)


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("max_norm", [math.inf, 0.1])
def test_the_optimizer_gets_the_clipped_gradient_of_the_whole_batch(
    tmp_path: Any, accumulation: int, max_norm: float
) -> None:
    tokens = random_tokens()
    train = dict(gradient_accumulation_steps=accumulation, max_grad_norm=max_norm)
    with tiny_trainer(make_config(tmp_path, train=train), tokens) as trainer:
        for step in range(2):  # in the second, no gradient of the first may be left
            x, y = expected_batch(tokens, 4 * step, 4)
            loss = functional.cross_entropy(trainer.model(x).flatten(0, 1), y.flatten())
            names, parameters = zip(*trainer.model.named_parameters(), strict=True)
            expected = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
            norm = torch.cat([g.flatten() for g in expected.values()]).norm().item()
            assert norm > 0.1
            scale = min(1.0, max_norm / norm)

            found, row = gradients_of_a_step(trainer)
            assert row["grad_norm"] == pytest.approx(norm, rel=1e-4)  # before clipping
            for name, gradient in expected.items():
                torch.testing.assert_close(found[name], gradient * scale, rtol=1e-3, atol=1e-6, msg=name)


def test_a_tiny_model_learns_a_repeated_sequence_by_heart(tmp_path: Any) -> None:
    sequence = np.random.default_rng(0).permutation(VOCAB_SIZE)[:20].astype(np.uint16)
    tokens = np.tile(sequence, 10)
    config = make_config(tmp_path, train=dict(max_steps=80), optimizer=dict(lr=1e-2, warmup_steps=5, weight_decay=0.0))
    with tiny_trainer(config, tokens) as trainer:
        first = trainer.train_step()["loss"]
        last = [trainer.train_step()["loss"] for _ in range(79)][-1]
        assert first > math.log(VOCAB_SIZE) - 1
        assert last < 0.05
        assert trainer.evaluate(tokens) < 0.05


# Schedule and decay


def expected_rate(step: int, lr: float, min_lr: float, warmup: int, total: int) -> float:
    if step < warmup:
        return lr * step / warmup
    return min_lr + (lr - min_lr) * (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2


@given_quickly
@given(st.data())
def test_the_rate_rises_linearly_falls_as_half_a_cosine_and_ends_at_min_lr(tmp_path: Any, data: st.DataObject) -> None:
    total = data.draw(st.integers(1, 500), label="max_steps")
    end = data.draw(st.none() | st.integers(1, 2 * total), label="cosine_steps")
    warmup = data.draw(st.integers(0, min(total, end or total) - 1), label="warmup_steps")
    lr, share = data.draw(st.floats(1e-6, 1)), data.draw(st.floats(0, 1))
    optimizer = dict(lr=lr, min_lr=lr * share, warmup_steps=warmup, cosine_steps=end)
    config = make_config(tmp_path, train=dict(max_steps=total), optimizer=optimizer)
    rates = [learning_rate(config, step) for step in range(1, total + 1)]
    last = end or total
    expected = [expected_rate(min(step, last), lr, lr * share, warmup, last) for step in range(1, total + 1)]
    assert rates == pytest.approx(expected, rel=1e-9, abs=1e-15)
    assert set(rates[last - 1 :]) <= {lr * share}


@pytest.mark.parametrize(
    "schedule, expected",
    [
        (dict(schedule="wsd"), [0.5, *[1] * 7, 0.6, 0.2]),
        (dict(schedule="wsd", decay_steps=4), [0.5, *[1] * 5, 0.8, 0.6, 0.4, 0.2]),
        (dict(schedule="wsd", cosine_steps=8, decay_steps=1), [0.5, *[1] * 6, 0.2, 0.2, 0.2]),
        (dict(schedule="constant"), [0.5, *[1] * 9]),
    ],
)
def test_the_rate_of_other_schedules(schedule: dict[str, Any], expected: list[float], tmp_path: Any) -> None:
    config = make_config(tmp_path, optimizer=dict(lr=1.0, min_lr=0.2, warmup_steps=2) | schedule)
    assert [learning_rate(config, step) for step in range(1, 11)] == pytest.approx(expected)


def test_every_group_of_the_optimizer_gets_the_rate_that_the_row_says(tmp_path: Any) -> None:
    with tiny_trainer(make_config(tmp_path)) as trainer:
        for step in range(1, 11):
            row = trainer.train_step()
            assert row["lr"] == pytest.approx(expected_rate(step, 1e-2, 1e-3, 3, 10), rel=1e-12)
            assert {group["lr"] for group in trainer.optimizer.param_groups} == {row["lr"]}
        assert row["lr"] == 1e-3


@pytest.mark.parametrize("implementation", OPTIMIZERS)
def test_matrices_decay_and_norm_weights_do_not(tmp_path: Any, implementation: str) -> None:
    lr, decay, after = 1e-2, 0.5, []
    for weight_decay in (0.0, decay):
        optimizer = dict(
            implementation=implementation, lr=lr, min_lr=lr, warmup_steps=0, weight_decay=weight_decay
        )  # fmt: skip
        with tiny_trainer(make_config(tmp_path, optimizer=optimizer)) as trainer:
            before = weights_of(trainer)
            trainer.train_step()
            after.append(weights_of(trainer))
    for name, start in before.items():
        if start.ndim == 1:
            assert torch.equal(after[0][name], after[1][name]), name
            assert not torch.equal(after[0][name], start), name
        else:
            torch.testing.assert_close(after[1][name], after[0][name] - lr * decay * start, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", OPTIMIZERS[1:])
def test_all_implementations_of_the_optimizer_train_alike(tmp_path: Any, implementation: str) -> None:
    losses = []
    for name in ("own", implementation):
        with tiny_trainer(make_config(tmp_path, optimizer=dict(implementation=name))) as trainer:
            losses.append([trainer.train_step()["loss"] for _ in range(10)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


# Validation


@pytest.fixture(scope="module")
def any_trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with tiny_trainer(make_config(tmp_path_factory.mktemp("run"))) as trainer:
        yield trainer


@given_quickly
@given(
    length=st.integers(CONTEXT_LENGTH + 1, 40 * CONTEXT_LENGTH),
    sequences=st.integers(1, 50),
    micro_batch=st.integers(1, 9),
    accumulation=st.integers(1, 3),
)
def test_validation_is_the_mean_over_consecutive_windows_in_whole_micro_batches(
    any_trainer: Trainer, length: int, sequences: int, micro_batch: int, accumulation: int
) -> None:
    tokens = random_tokens(length, seed=length)
    any_trainer.config = dataclasses.replace(
        any_trainer.config,
        train=dataclasses.replace(
            any_trainer.config.train,
            validation_sequences=sequences,
            batch_size=micro_batch * accumulation,
            gradient_accumulation_steps=accumulation,
        ),
    )
    count = min(sequences, (length - 1) // CONTEXT_LENGTH)
    if count > micro_batch:
        count -= count % micro_batch
    windows = torch.tensor(
        [tokens[i * CONTEXT_LENGTH : (i + 1) * CONTEXT_LENGTH + 1].tolist() for i in range(count)]
    )  # fmt: skip
    with torch.no_grad():
        logits = any_trainer.model(windows[:, :-1])
    expected = functional.cross_entropy(logits.flatten(0, 1).double(), windows[:, 1:].flatten()).item()
    assert any_trainer.evaluate(tokens) == pytest.approx(expected, rel=1e-5)


def test_validation_changes_nothing(tmp_path: Any) -> None:
    losses = []
    for validate in (False, True):
        with tiny_trainer(make_config(tmp_path)) as trainer:
            for _ in range(4):
                losses.append(trainer.train_step()["loss"])
                if validate:
                    trainer.evaluate(random_tokens(300, seed=1))
            assert all(p.grad is None for p in trainer.model.parameters())
    assert losses[:4] == losses[4:]


# Precision


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_keeps_float32_weights_and_trains_alike(tmp_path: Any, precision: str) -> None:
    losses: dict[str, list[float]] = {}
    for name in ("fp32", precision):
        with tiny_trainer(make_config(tmp_path, train=dict(precision=name))) as trainer:
            losses[name] = [trainer.train_step()["loss"] for _ in range(5)]
            wide = {name for name, p in trainer.model.named_parameters() if p.dtype == torch.float32}
            assert all("norm" in n or "ln" in n or "emb" in n for n in wide) == (name != "fp32")
            state = [(key, t.dtype) for s in trainer.optimizer.state.values() for key, t in s.items()]
            assert all(dtype == torch.float32 or key == LOWER_HALF for key, dtype in state)
    assert losses[precision] != losses["fp32"], "autocast is not on"
    assert losses[precision] == pytest.approx(losses["fp32"], rel=0.02)


# Non-finite values


def poison_weight(trainer: Trainer) -> Any:
    with torch.no_grad():
        trainer.model.lm_head.weight[0, 0] = math.inf


def poison_with_nan(trainer: Trainer) -> Any:
    with torch.no_grad():
        trainer.model.ln_final.weight[3] = math.nan


def poison_gradient(trainer: Trainer) -> Any:
    return trainer.model.lm_head.weight.register_hook(lambda g: g * math.inf)


POISONS = [poison_weight, poison_with_nan, poison_gradient]


@pytest.mark.parametrize(
    "poison, implementation, accumulation",
    [*((poison, name, 1) for poison in POISONS for name in OPTIMIZERS), (poison_gradient, "own", 2)],
)
def test_a_loss_or_gradient_that_is_not_finite_stops_before_the_update(
    tmp_path: Any, poison: Any, implementation: str, accumulation: int
) -> None:
    config = make_config(
        tmp_path,
        optimizer=dict(implementation=implementation),
        train=dict(gradient_accumulation_steps=accumulation),
    )
    tokens = random_tokens()
    with tiny_trainer(config, tokens) as trainer:
        for _ in range(2):
            trainer.train_step()
        poison(trainer)
        weights = weights_of(trainer)
        moments = [{k: v.clone() for k, v in state.items()} for state in trainer.optimizer.state.values()]
        with pytest.raises(NonFiniteError) as caught:
            trainer.train_step()
        assert_same_tensors(weights_of(trainer), weights)
        for before, after in zip(moments, trainer.optimizer.state.values(), strict=True):
            assert_same_tensors(after, before)
        message = str(caught.value)
        assert "step 3:" in message
        assert "sequences 8 to 11" in message
        assert str(sequence_starts(0, 8, 4, len(tokens) - CONTEXT_LENGTH).tolist()) in message
        assert "skip_nonfinite" in message


@pytest.mark.parametrize("poison", POISONS)
def test_skip_nonfinite_skips_the_step_counts_it_and_goes_on_as_if_it_had_not_been(
    tmp_path: Any, caplog: pytest.LogCaptureFixture, poison: Any
) -> None:
    config = make_config(tmp_path, train=dict(skip_nonfinite=True))
    with tiny_trainer(config) as trainer:
        trainer.train_step()
        healthy = weights_of(trainer)
        handle = poison(trainer)
        poisoned = weights_of(trainer)
        row = trainer.train_step()
        assert (row["step"], row["skipped_steps"]) == (2, 1)
        assert not (math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]))
        assert_same_tensors(weights_of(trainer), poisoned)
        (warning,) = warnings_of(caplog)
        assert "step 2 skipped" in warning

        trainer.model.load_state_dict(healthy)
        if handle is not None:
            handle.remove()
        row = trainer.train_step()
        assert (row["step"], row["skipped_steps"]) == (3, 1)
        after = weights_of(trainer)

    with tiny_trainer(config) as other:  # the same without the step in between
        other.train_step()
        other.position.step, other.position.sequences = 2, 8
        other.train_step()
        assert_same_tensors(weights_of(other), after)


# Loss scaling


def set_scale(trainer: Trainer, scale: float) -> None:
    assert trainer.scale is not None
    trainer.scale.load_state_dict({"scale": scale, "_growth_tracker": 0})


def test_an_overflow_in_fp16_halves_the_scale_and_skips_and_the_run_goes_on(tmp_path: Any) -> None:
    with tiny_trainer(make_config(tmp_path, train=dict(precision="fp16", max_steps=40))) as trainer:
        set_scale(trainer, 2.0**40)
        skipped, losses = 0, []
        for _ in range(40):
            weights = weights_of(trainer)
            row = trainer.train_step()
            assert math.isfinite(row["loss"])
            if row["skipped_steps"] > skipped:
                skipped += 1
                assert not math.isfinite(row["grad_norm"])
                assert_same_tensors(weights_of(trainer), weights)
            else:
                losses.append(row["loss"])
                assert not torch.equal(weights_of(trainer)["lm_head.weight"], weights["lm_head.weight"])
            assert row["skipped_steps"] == skipped
            assert trainer.scale is not None
            assert trainer.scale.loss_scale == 2.0 ** (40 - skipped)
        assert 5 < skipped < 30
        assert losses[-1] < losses[0]


def test_scaling_the_loss_changes_neither_loss_nor_norm(tmp_path: Any) -> None:
    rows = []
    for scale in (1.0, 1024.0):
        with tiny_trainer(make_config(tmp_path, train=dict(precision="fp16"))) as trainer:
            set_scale(trainer, scale)
            rows.append(trainer.train_step())
    assert rows[0]["loss"] == rows[1]["loss"]
    assert rows[0]["grad_norm"] == pytest.approx(rows[1]["grad_norm"], rel=1e-2)


@pytest.mark.parametrize("poison, scale", [(poison_gradient, 2.0**-10), (poison_with_nan, 65536.0)])
def test_a_nan_loss_or_infinite_gradients_at_the_smallest_scale_are_no_overflow(
    tmp_path: Any, poison: Any, scale: float
) -> None:
    with tiny_trainer(make_config(tmp_path, train=dict(precision="fp16"))) as trainer:
        set_scale(trainer, scale)
        poison(trainer)
        weights = weights_of(trainer)
        with pytest.raises(NonFiniteError):
            trainer.train_step()
        assert_same_tensors(weights_of(trainer), weights)
