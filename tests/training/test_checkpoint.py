"""A checkpoint gives back the saved state. A damaged one, or one of another run, is refused."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from cs336_basics.optimizer import AdamW
from cs336_systems.training.checkpoint import prune_checkpoints, save_checkpoint
from cs336_systems.training.manifest import (
    MANIFEST,
    Manifest,
    check_identity,
    checkpoint_name,
    find_checkpoints,
    newest_whole_checkpoint,
    verify_checkpoint,
)
from cs336_systems.training.state import collect_state, restore_state
from cs336_systems.training.tensor_files import read_tensors, tensor_shapes

from .helpers import (
    DAMAGE,
    REST,
    TENSOR_DAMAGE,
    assert_same_tensors,
    change_manifest,
    read_independently,
    save_step,
    tensor_file,
    warnings_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
# Writing


def test_a_checkpoint_is_safetensors_and_one_json_file_and_nothing_that_could_be_unpickled(tmp_path: Path) -> None:
    path = save_step(tmp_path, 1)
    assert path == tmp_path / "step_00000001"
    names = [path.name for path in path.iterdir()]
    assert MANIFEST in names
    assert all(name.endswith(".safetensors") for name in names if name != MANIFEST)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45]),
        torch.tensor(3.0),
        torch.zeros(0),
        torch.arange(12, dtype=torch.bfloat16).view(3, 4),
        torch.tensor([2**63 - 1, -(2**63)]),
        torch.tensor([True, False]),
        torch.arange(256, dtype=torch.uint8),
    ],
    ids=["specials", "scalar", "empty", "bf16", "int64", "bool", "uint8"],
)
def test_any_tensor_comes_back_bit_for_bit(tmp_path: Path, tensor: torch.Tensor) -> None:
    path = save_checkpoint(tmp_path, {"t": tensor, "other": torch.ones(2)}, Manifest(step=1, **REST))
    assert tensor_shapes(path)["t"] == (tensor.shape, tensor.dtype)
    into = {"t": torch.empty(tensor.shape, dtype=tensor.dtype)}
    read_tensors(path, into)
    assert_same_tensors(into, {"t": tensor})


def test_the_manifest_has_the_given_fields(tmp_path: Path) -> None:
    given = dict(
        step=3,
        sequences=12,
        identity={"model.d_model": 32, "tokenizer": None},
        trainer={"skipped_steps": 1, "scaler": {"scale": 65536.0}},
        config={"train": {"seed": 0}},
        versions={"torch": "2"},
    )
    path = save_checkpoint(tmp_path, {"t": torch.ones(2)}, Manifest(**given))
    for manifest in (vars(verify_checkpoint(path)), json.loads((path / MANIFEST).read_text())):
        assert {name: manifest[name] for name in given} == given
        file = tensor_file(path)
        assert manifest["files"][file.name]["bytes"] == file.stat().st_size


def test_saving_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, {"t": torch.zeros(2)}, Manifest(step=1, **REST))
    path = save_checkpoint(tmp_path, {"t": torch.ones(2)}, Manifest(step=1, **REST))
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert read_independently(path)["t"].tolist() == [1, 1]


# The state of a run


def tiny_model_and_optimizer(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    optimizer = AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_restoring_gives_back_weights_optimizer_and_random_numbers(tmp_path: Path) -> None:
    model, optimizer = tiny_model_and_optimizer(seed=1)
    saved = {name: tensor.clone() for name, tensor in collect_state(model, optimizer, CPU).items()}
    assert {name.split(".")[0] for name in saved} == {"model", "optimizer", "rng"}
    path = save_checkpoint(tmp_path, saved, Manifest(step=1, **REST))
    drawn_next = torch.rand(5)

    other_model, other_optimizer = tiny_model_and_optimizer(seed=2)
    restore_state(path, other_model, other_optimizer, CPU)
    assert_same_tensors(collect_state(other_model, other_optimizer, CPU), saved)
    assert other_optimizer.param_groups[0]["params"] == list(other_model.parameters())
    assert torch.equal(torch.rand(5), drawn_next)


@pytest.mark.parametrize("writer", ["own", "fused", "foreach"])
@pytest.mark.parametrize("reader", ["own", "fused", "foreach"])
def test_one_checkpoint_serves_every_implementation_of_the_optimizer(tmp_path: Path, writer: str, reader: str) -> None:
    def make(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 4)
        if kind == "own":
            return model, AdamW(model.parameters(), lr=0.1)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.01, **{kind: True})

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.arange(6.0).view(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = make(writer)
    step(model, optimizer)
    path = save_checkpoint(tmp_path, collect_state(model, optimizer, CPU), Manifest(step=1, **REST))
    step(model, optimizer)

    resumed, resumed_optimizer = make(reader)
    restore_state(path, resumed, resumed_optimizer, CPU)
    step(resumed, resumed_optimizer)
    for name, tensor in resumed.state_dict().items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-6, atol=1e-6)


# Damage


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_name_and_the_newest_whole_one_is_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    _, second, third = (save_step(tmp_path, step, elements=1000) for step in (1, 2, 3))
    name = tensor_file(third).name if damage in TENSOR_DAMAGE else MANIFEST
    DAMAGE[damage](third)
    with pytest.raises(ValueError, match=str(third)) as caught:
        verify_checkpoint(third)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value).strip()

    found = newest_whole_checkpoint(tmp_path)
    assert found is not None
    assert (found[0], found[1].step) == (second, 2)
    (warning,) = warnings_of(caplog)
    assert third.name in warning
    assert name in warning


def test_a_tensor_file_that_the_manifest_does_not_list_is_not_read_unverified(tmp_path: Path) -> None:
    path = save_step(tmp_path, 2, elements=10)
    (path / "more.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"more\.safetensors is not in the manifest"):
        verify_checkpoint(path)


@pytest.mark.parametrize("field", ["step", "sequences"])
def test_a_changed_digit_in_the_manifest_is_noticed(tmp_path: Path, field: str) -> None:
    path = save_step(tmp_path, 5)
    change_manifest(path, lambda manifest: manifest.update({field: manifest[field] ^ 1}))
    with pytest.raises(ValueError, match=MANIFEST):
        verify_checkpoint(path)


def test_a_path_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere.* does not exist"):
        verify_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=rf"it has no {MANIFEST}"):
        verify_checkpoint(tmp_path)


def test_a_folder_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert newest_whole_checkpoint(tmp_path) is None
    assert newest_whole_checkpoint(tmp_path / "nowhere") is None


def test_checkpoints_are_found_newest_first_by_number_and_nothing_else_is(tmp_path: Path) -> None:
    steps = [5, 99_999_999, 100_000_000, 10]
    for name in [*(checkpoint_name(s) for s in steps), ".saving-step_00000011", ".deleting-step_00000003", "notes"]:
        (tmp_path / name).mkdir()
    found = find_checkpoints(tmp_path)
    assert [path.name for path in found] == [checkpoint_name(s) for s in sorted(steps, reverse=True)]


# Checkpoints of another run


def test_every_differing_field_is_named_with_both_values(tmp_path: Path) -> None:
    path = save_step(tmp_path, 1)
    manifest = verify_checkpoint(path)
    check_identity(path, manifest, {"model.d_model": 32})
    with pytest.raises(ValueError, match="of another run") as caught:
        check_identity(path, manifest, {"model.d_model": 64, "tokenizer": "abc"})
    message = str(caught.value)
    assert "model.d_model is 64 here and 32 there" in message
    assert "the tokenizer differs" in message


# Pruning


@pytest.mark.parametrize("keep_last, kept", [(None, [1, 2, 3, 4]), (1, [4]), (3, [2, 3, 4]), (9, [1, 2, 3, 4])])
def test_pruning_keeps_the_newest(tmp_path: Path, keep_last: int | None, kept: list[int]) -> None:
    for step in (2, 4, 1, 3):
        save_step(tmp_path, step, elements=10)
    prune_checkpoints(tmp_path, keep_last)
    assert sorted(path.name for path in tmp_path.iterdir()) == [checkpoint_name(step) for step in kept]
