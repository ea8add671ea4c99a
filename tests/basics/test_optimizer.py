"""AdamW against torch.optim.AdamW, and the learning-rate schedule against values worked out by hand."""

import copy
import math

import pytest
import torch
from torch import nn

from cs336_basics.optimizer import AdamW, get_cosine_lr, get_wsd_lr

SHAPES = ((4, 3), (7,), ())


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def gradients(step: int) -> list[torch.Tensor]:
    """Gradients of very different sizes, the same for both optimizers."""
    generator = torch.Generator().manual_seed(step)
    return [10.0 ** (i - 1) * torch.randn(shape, generator=generator) for i, shape in enumerate(SHAPES)]


def walk(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], first: int, steps: int) -> None:
    for step in range(first, first + steps):
        for p, g in zip(params, gradients(step), strict=True):
            p.grad = g
        optimizer.step()


def assert_equal(ours: list[nn.Parameter], theirs: list[nn.Parameter]) -> None:
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(lr=0.1, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.0),
        dict(lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.5),
        dict(lr=0.01, betas=(0.0, 0.0), eps=1e-2, weight_decay=0.1),
        dict(lr=0.0),
    ],
    ids=["defaults", "no decay", "much decay", "no memory", "lr 0"],
)
def test_100_steps_equal_torch(options):
    ours, theirs = parameters(), parameters()
    # torch's own defaults are the same, but its weight decay is spelled out so that this does not rest on it.
    walk(AdamW(ours, **options), ours, 0, 100)
    walk(torch.optim.AdamW(theirs, **(dict(lr=1e-3, weight_decay=0.01) | options)), theirs, 0, 100)
    assert_equal(ours, theirs)
    moved = any(not torch.equal(p, q) for p, q in zip(ours, parameters(), strict=True))
    assert moved == (options.get("lr") != 0.0)


def test_the_first_step_moves_by_lr_against_the_sign():
    p = nn.Parameter(torch.tensor([1.0, 1.0, 1.0]))
    p.grad = torch.tensor([1e-3, -20.0, 0.0])
    AdamW([p], lr=0.1, eps=1e-12, weight_decay=0.5).step()
    torch.testing.assert_close(p.data, torch.tensor([0.95 - 0.1, 0.95 + 0.1, 0.95]))


def test_param_groups_with_their_own_options_equal_torch():
    def build(kind, params):
        return kind(
            [
                {"params": params[:1], "weight_decay": 0.3},
                {"params": params[1:2], "lr": 0.05, "betas": (0.5, 0.9)},
                {"params": params[2:], "eps": 0.1},
            ],
            lr=0.01,
            weight_decay=0.0,
        )

    ours, theirs = parameters(), parameters()
    walk(build(AdamW, ours), ours, 0, 100)
    walk(build(torch.optim.AdamW, theirs), theirs, 0, 100)
    assert_equal(ours, theirs)


def test_a_learning_rate_changed_between_steps_equals_torch():
    ours, theirs = parameters(), parameters()
    for kind, params in ((AdamW, ours), (torch.optim.AdamW, theirs)):
        optimizer = kind(params, lr=1.0, weight_decay=0.1)
        for step in range(20):
            optimizer.param_groups[0]["lr"] = 0.01 * step
            walk(optimizer, params, step, 1)
    assert_equal(ours, theirs)


def test_a_parameter_without_gradient_stays_and_counts_no_steps():
    ours, theirs = parameters(), parameters()
    for kind, params in ((AdamW, ours), (torch.optim.AdamW, theirs)):
        optimizer = kind(params, lr=0.1, weight_decay=0.1)
        for step in range(10):
            walk_gradients = gradients(step)
            for i, p in enumerate(params):
                p.grad = None if i == 0 or (i == 1 and step < 5) else walk_gradients[i]
            optimizer.step()
        assert params[0] not in optimizer.state
        assert [float(optimizer.state[p]["step"]) for p in params[1:]] == [5, 10]
    assert torch.equal(ours[0], parameters()[0])
    assert_equal(ours, theirs)


def test_a_closure_is_called_with_gradients_on_and_its_loss_returned():
    results = []
    for kind in (AdamW, torch.optim.AdamW):
        p = nn.Parameter(torch.tensor([2.0, -3.0]))
        optimizer = kind([p], lr=0.1, weight_decay=0.01)

        def closure(p=p, optimizer=optimizer):
            optimizer.zero_grad()
            loss = (p**2).sum()
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(20)]
        assert losses[0] == 13.0
        assert losses[-1] < 4.0
        results.append(losses)
    assert results[0] == pytest.approx(results[1], rel=1e-6)


@pytest.mark.parametrize("first", [AdamW, torch.optim.AdamW], ids=["own", "torch"])
@pytest.mark.parametrize("second", [AdamW, torch.optim.AdamW], ids=["own", "torch"])
def test_a_state_dict_continues_in_either_optimizer(first, second, tmp_path):
    options = dict(lr=0.02, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2)
    whole = parameters()
    walk(torch.optim.AdamW(whole, **options), whole, 0, 60)

    params = parameters()
    optimizer = first(params, **options)
    walk(optimizer, params, 0, 30)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")  # and through a file
    continued = copy.deepcopy(params)
    other = second(continued, lr=9.0)  # every option comes from the state dict
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    walk(other, continued, 30, 30)
    assert_equal(continued, whole)


def test_the_state_has_torchs_names_and_kinds():
    ours, theirs = parameters(), parameters()
    own, torchs = AdamW(ours), torch.optim.AdamW(theirs)
    walk(own, ours, 0, 3)
    walk(torchs, theirs, 0, 3)
    for a, b in zip(own.state_dict()["state"].values(), torchs.state_dict()["state"].values(), strict=True):
        assert a.keys() == b.keys()
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=1e-6, atol=1e-7)


# The schedule


@pytest.mark.parametrize(
    "step, expected",
    [
        (0, 0.0),
        (1, 0.25),
        (3, 0.75),
        (4, 1.0),  # the top, where the cosine begins
        (6, 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2),  # a quarter of the way
        (8, 0.55),  # half
        (10, 0.1 + 0.9 * (1 - math.sqrt(0.5)) / 2),
        (12, 0.1),
        (13, 0.1),
        (1000, 0.1),
    ],
)
def test_the_schedule_has_these_values(step, expected):
    assert get_cosine_lr(step, 1.0, 0.1, 4, 12) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "steps, warmup_steps, total_steps, expected",
    [
        ((0, 5, 10, 11), 0, 10, [1.0, 0.65, 0.3, 0.3]),  # starts at the top
        ((0, 4, 5, 6), 5, 5, [0.0, 0.8, 0.3, 0.3]),  # rises, and never reaches it
        ((0,), 0, 0, [0.3]),
    ],
    ids=["no warm-up", "all warm-up", "no steps"],
)
def test_schedules_at_the_edges(steps, warmup_steps, total_steps, expected):
    assert [get_cosine_lr(step, 1.0, 0.3, warmup_steps, total_steps) for step in steps] == pytest.approx(
        expected, rel=1e-12
    )


def test_warm_up_stable_decay() -> None:
    rates = [get_wsd_lr(step, 1.0, 0.2, 2, 10, 4) for step in range(13)]
    assert rates == pytest.approx([0, 0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])
    assert get_wsd_lr(1000, 1.0, 0.2, 2, 10, 0) == 1.0
