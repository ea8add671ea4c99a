"""Checkpoints of several ranks: any division over ranks resumes from any other; other programs can read the files."""

import dataclasses
import functools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from cs336_systems.parallel import comm
from cs336_systems.parallel.zero1 import ShardedOptimizer
from cs336_systems.training import tensor_files, train
from cs336_systems.training.checkpoint import save_checkpoint
from cs336_systems.training.load import export_run, load_model
from cs336_systems.training.manifest import Manifest, checkpoint_name, verify_checkpoint
from cs336_systems.training.state import collect_state, restore_state
from cs336_systems.training.tensor_files import Rows, read_tensors, tensor_shapes

from ..distributed import run_ranks
from .helpers import REST, assert_same_tensors, error_of, make_config, read_independently

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
# One run, divided in several ways

SHAPES = {"embedding": (7, 3), "block.weight": (5, 4), "norm": (6,), "row": (1, 2), "nothing": (0, 2)}


class PartialAdamW(torch.optim.AdamW):
    """Keeps the state of every world_size-th parameter, as a sharded optimizer does."""

    def owner_of(self, parameter: Tensor) -> int:
        (index,) = (i for i, p in enumerate(self.param_groups[0]["params"]) if p is parameter)
        return index % comm.world_size()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        indices = range(len(self.param_groups[0]["params"]))
        assert all(index in indices and index % comm.world_size() == comm.rank() for index in state_dict["state"])
        super().load_state_dict(state_dict)


def expected_state() -> dict[str, Tensor]:
    """All tensors of the run, by the names that one process gives them."""
    generator = torch.Generator().manual_seed(5)
    tensors: dict[str, Tensor] = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        tensors[f"model.{name}"] = torch.randn(shape, generator=generator)
        tensors[f"optimizer.{name}.step"] = torch.tensor(float(number))
        tensors[f"optimizer.{name}.exp_avg"] = torch.randn(shape, generator=generator)
        tensors[f"optimizer.{name}.exp_avg_sq"] = torch.rand(shape, generator=generator)
    tensors["rng.cpu"] = torch.Generator().manual_seed(9).get_state()
    return tensors


def rows_by_ceiling(rows: int) -> tuple[int, int]:
    """This rank's first row and number of rows, the last ranks having fewer or none."""
    each = -(-rows // comm.world_size())
    first = min(rows, each * comm.rank())
    return first, min(rows - first, each)


def rows_mostly_last(rows: int) -> tuple[int, int]:
    """The first rank has none, the last all that single rows for the others leave."""
    between = min(rows, comm.world_size() - 2)
    if comm.rank() == comm.world_size() - 1:
        return between, rows - between
    return min(between, max(0, comm.rank() - 1)), int(0 < comm.rank() <= between)


ROWS = {"ceiling": rows_by_ceiling, "mostly last": rows_mostly_last}
DIVISIONS = [(1, "replicated")] + [(w, d) for w in (2, 4) for d in ("replicated", "owners", *ROWS)]


def divided(division: str, state: dict[str, Tensor]) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """This rank's model and optimizer of that state, and the shards."""
    shards: dict[str, tuple[torch.Size, int]] = {}
    parts: dict[str, slice] = {}
    for name, shape in SHAPES.items():
        first, count = ROWS[division](shape[0]) if division in ROWS else (0, shape[0])
        parts[name] = slice(first, first + count)
        if division in ROWS:
            shards[name] = torch.Size(shape), first
    model = nn.Module()
    model.block = nn.Module()
    for name, part in parts.items():
        where, _, last = name.rpartition(".")
        parameter = nn.Parameter(state[f"model.{name}"][part].clone())
        model.get_submodule(where).register_parameter(last, parameter)
    optimizer = (PartialAdamW if division == "owners" else torch.optim.AdamW)(model.parameters())
    for name, parameter in model.named_parameters():
        if division == "owners" and optimizer.owner_of(parameter) != comm.rank():  # type: ignore[attr-defined]
            continue
        prefix = f"optimizer.{name}."
        values = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        optimizer.state[parameter] = {k: (v[parts[name]] if v.dim() else v).clone() for k, v in values.items()}
    return model, optimizer, shards or None


def save_divided(folder_of: dict[str, Path]) -> None:
    state = expected_state()
    for division, folder in folder_of.items():
        model, optimizer, shards = divided(division, state)
        torch.set_rng_state(state["rng.cpu"] if comm.rank() == 0 else torch.Generator().manual_seed(1).get_state())
        save_checkpoint(folder, collect_state(model, optimizer, CPU, shards), Manifest(step=1, **REST))


def restore_each(sources: dict[str, list[str]]) -> dict[str, list[dict[str, tuple[Tensor, int | None]]]]:
    return {division: restore_divided(paths, division) for division, paths in sources.items()}


def restore_divided(paths: list[str], division: str) -> list[dict[str, tuple[Tensor, int | None]]]:
    """This rank's tensors after a restore from each path, with the first row of those that are parts."""
    other = {name: torch.full_like(tensor, 77) for name, tensor in expected_state().items()}
    results = []
    for path in paths:
        model, optimizer, shards = divided(division, other)
        addresses = [p.data_ptr() for p in model.parameters()]
        torch.manual_seed(comm.rank())
        restore_state(Path(path), model, optimizer, CPU, shards)
        assert [p.data_ptr() for p in model.parameters()] == addresses
        found: dict[str, tuple[Tensor, int | None]] = {"rng.cpu": (torch.get_rng_state(), None)}
        for name, tensor in collect_state(model, optimizer, CPU, shards).items():
            is_part = isinstance(tensor, Rows)
            found[name] = (tensor.local, tensor.first_row) if is_part else (tensor.detach(), None)  # type: ignore[union-attr]
        results.append(found)
    return results


def gathered(parts: list[dict[str, tuple[Tensor, int | None]]]) -> dict[str, Tensor]:
    """Whole tensors from the parts of all ranks. Tensors that several ranks have must be the same."""
    whole: dict[str, Tensor] = {}
    pieces: dict[str, list[tuple[int, Tensor]]] = {}
    for part in parts:
        for name, (tensor, first_row) in part.items():
            if first_row is not None:
                pieces.setdefault(name, []).append((first_row, tensor))
            else:
                assert torch.equal(whole.setdefault(name, tensor), tensor), name
    for name, these in pieces.items():
        whole[name] = torch.cat([tensor for _, tensor in sorted(these, key=lambda piece: piece[0])])
    return whole


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], Path]:
    """A checkpoint of each division, of the same state."""
    folders = {which: tmp_path_factory.mktemp("saved") for which in DIVISIONS}
    for world_size in {world_size for world_size, _ in DIVISIONS}:
        run_ranks(save_divided, world_size, {d: folder for (w, d), folder in folders.items() if w == world_size})
    return {which: folder / checkpoint_name(1) for which, folder in folders.items()}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_division_over_ranks_goes_on_from_every_other(
    saved: dict[tuple[int, str], Path], world_size: int
) -> None:
    """Each from every second, so from each kind of division: DIVISIONS has an odd number of them."""
    paths = [str(path) for path in saved.values()]
    sources = {d: (paths[i:] + paths[:i])[::2] for i, (w, d) in enumerate(DIVISIONS) if w == world_size}
    results = run_ranks(restore_each, world_size, sources)
    for division, paths in sources.items():
        for number, source in enumerate(paths):
            parts = [result[division][number] for result in results]
            assert_same_tensors(gathered(parts), expected_state())
            if division == "owners":
                owned = [{name for name in part if name.startswith("optimizer.")} for part in parts]
                assert sum(map(len, owned)) == len(set.union(*owned)), f"state on more than its owner, from {source}"


def assemble_independently(path: Path) -> dict[str, Tensor]:
    """Whole tensors by the safetensors library alone; every element must be in exactly one file."""
    pieces: dict[str, list[tuple[list[int], Tensor]]] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as reader:
            places = json.loads(reader.metadata()["DCP_SHARDING_INFO"])
            for name in reader.keys():  # noqa: SIM118
                pieces.setdefault(name, []).append((places[name]["saved_offsets"], reader.get_tensor(name)))
    whole = {}
    for name, these in pieces.items():
        shape = [
            max(sizes) for sizes in zip(*(map(sum, zip(at, t.shape, strict=True)) for at, t in these), strict=True)
        ]
        whole[name] = torch.zeros(shape, dtype=these[0][1].dtype)
        written = torch.zeros(shape)
        for at, tensor in these:
            place = tuple(slice(o, o + s) for o, s in zip(at, tensor.shape, strict=True))
            whole[name][place] = tensor
            written[place] += 1
        assert bool((written == 1).all()), name
    return whole


@pytest.mark.parametrize("world_size, division", DIVISIONS)
def test_a_checkpoint_of_several_ranks_is_whole_by_safetensors_alone_and_by_the_manifest(
    saved: dict[tuple[int, str], Path], world_size: int, division: str
) -> None:
    path = saved[world_size, division]
    assert_same_tensors(assemble_independently(path), expected_state())
    assert verify_checkpoint(path).files.keys() == {file.name for file in path.glob("*.safetensors")}
    assert tensor_shapes(path) == {name: (t.shape, t.dtype) for name, t in expected_state().items()}
    into = {name: torch.empty_like(tensor) for name, tensor in expected_state().items()}
    read_tensors(path, into)
    assert_same_tensors(into, expected_state())


def save_as_rows(run: str) -> None:
    """The weights of a run's newest checkpoint again, a step later, by several ranks."""
    loaded = load_model(run)
    tensors: dict[str, Tensor | Rows] = {}
    for name, whole in loaded.state_dict.items():
        first, count = rows_by_ceiling(len(whole))
        tensors[f"model.{name}"] = Rows(whole[first : first + count], whole.shape, first)
    manifest = dataclasses.replace(loaded.manifest, step=loaded.manifest.step + 1)
    save_checkpoint(loaded.checkpoint.parent, tensors, manifest)


def test_a_model_that_several_ranks_saved_is_loaded_and_exported_by_one_process(tmp_path: Path) -> None:
    config = make_config(tmp_path, train=dict(max_steps=1))
    one = load_model(train(config).run_dir)
    run_ranks(save_as_rows, 3, str(config.run_dir))
    three = load_model(str(config.run_dir))
    assert three.checkpoint.name == checkpoint_name(2)
    assert len(three.manifest.files) == 3
    assert_same_tensors(three.state_dict, one.state_dict)
    checkpoint, folder = export_run(str(config.run_dir))
    assert checkpoint == three.checkpoint
    exported = read_independently(folder)
    embedding = one.state_dict["token_embeddings.weight"]
    assert any(tensor.shape == embedding.shape and torch.equal(tensor, embedding) for tensor in exported.values())


# Parts that each rank writes and reads


def save_replicated(folder: str, file_bytes: int) -> None:
    tensor_files._FILE_BYTES = file_bytes
    tensors = {f"t{i}": torch.full((100 + i,), float(i)) for i in range(40)}
    save_checkpoint(Path(folder), tensors, Manifest(step=1, **REST))


@pytest.mark.parametrize("file_bytes", [1 << 31, 1500])
def test_tensors_that_all_ranks_have_are_written_once_evenly_in_files_of_bounded_size(
    tmp_path: Path, file_bytes: int
) -> None:
    run_ranks(save_replicated, 4, str(tmp_path), file_bytes)
    path = tmp_path / checkpoint_name(1)
    by_rank: Counter[str] = Counter()
    names: list[str] = []
    for file in path.glob("*.safetensors"):
        with safe_open(str(file), framework="pt") as reader:
            sizes = {name: reader.get_tensor(name).nbytes for name in reader.keys()}  # noqa: SIM118
        assert sum(sizes.values()) <= file_bytes
        names += sizes
        by_rank[file.name.partition("-model")[0]] += sum(sizes.values())
    assert sorted(names) == sorted(f"t{i}" for i in range(40)), "a tensor is written twice, or not"
    assert len(by_rank) == 4
    assert max(by_rank.values()) - min(by_rank.values()) < 2 * 140 * 4
    assert_same_tensors(read_independently(path), {f"t{i}": torch.full((100 + i,), float(i)) for i in range(40)})


def save_dtensors(folder: str) -> None:
    mesh = init_device_mesh("cpu", (comm.world_size(),))

    def dtensor(whole: Tensor) -> DTensor:
        first, count = rows_by_ceiling(len(whole))
        local = whole[first : first + count]
        return DTensor.from_local(local, mesh, [Shard(0)], shape=whole.shape, stride=whole.stride())

    tensors = {name: t for name, t in expected_state().items() if name != "rng.cpu"}
    save_checkpoint(
        Path(folder), {name: dtensor(t) if t.dim() else t for name, t in tensors.items()}, Manifest(step=1, **REST)
    )
    into = {name: dtensor(torch.zeros_like(t)) for name, t in tensors.items() if t.dim()}
    read_tensors(Path(folder) / checkpoint_name(1), into)
    for name, part in into.items():
        assert torch.equal(part.to_local(), dtensor(tensors[name]).to_local()), name


@pytest.mark.parametrize("world_size", [2, 4])
def test_dtensors_with_uneven_and_empty_parts_are_saved_and_read(tmp_path: Path, world_size: int) -> None:
    run_ranks(save_dtensors, world_size, str(tmp_path))
    expected = {name: tensor for name, tensor in expected_state().items() if name != "rng.cpu"}
    assert_same_tensors(assemble_independently(tmp_path / checkpoint_name(1)), expected)


def freeze_and_resume(folder: str, sharded: bool) -> list[dict[str, Tensor]]:
    """State of all parameters saved after one of them was frozen, and as a resumed run has it once it is thawed."""
    path, found = Path(folder) / checkpoint_name(1), []
    for resume in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 5)

        def step(optimizer: torch.optim.Optimizer, model: nn.Linear = model) -> None:
            for parameter in model.parameters():
                parameter.grad = parameter.detach() * 2 if parameter.requires_grad else None
            optimizer.step()

        make: Any = (
            functools.partial(ShardedOptimizer, optimizer_cls=torch.optim.AdamW) if sharded else torch.optim.AdamW
        )
        model.bias.requires_grad = not resume
        optimizer = make(model.parameters())
        if resume:
            restore_state(path, model, optimizer, CPU)
            model.bias.requires_grad = True
        else:
            step(optimizer)
            model.bias.requires_grad = False
            save_checkpoint(Path(folder), collect_state(model, optimizer, CPU), Manifest(step=1, **REST))
            model.bias.requires_grad = True
        step(optimizer)
        found.append({name: p.detach() for name, p in model.named_parameters()})
    return found


@pytest.mark.parametrize("sharded", [False, True])
def test_a_frozen_parameters_state_is_there_when_a_resumed_run_thaws_it(sharded: bool, tmp_path: Path) -> None:
    for went_on, resumed in run_ranks(freeze_and_resume, 2, str(tmp_path), sharded):
        assert_same_tensors(resumed, went_on)


def train_frozen_and_resume(folder: str, how: str) -> list[dict[str, Tensor]]:
    """Weights that a run saves, those of its resumed run, and those after another step.

    The bias of the resumed run is frozen, and that of the first run too, unless `how` trains both.
    """
    found = []
    for resume in (False, True):
        torch.manual_seed(int(resume))
        model = nn.Linear(3, 5)
        model.bias.requires_grad = how == "train both, then freeze" and not resume
        trained = [p for p in model.parameters() if p.requires_grad]  # as build_optimizer
        optimizer = ShardedOptimizer(trained, torch.optim.AdamW)
        if resume:
            restore_state(Path(folder) / checkpoint_name(1), model, optimizer, CPU)
            found.append({name: p.detach().clone() for name, p in model.named_parameters()})
        for parameter in trained:
            parameter.grad = parameter.detach() * 2
        optimizer.step()
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
        if not resume:
            save_checkpoint(Path(folder), collect_state(model, optimizer, CPU), Manifest(step=1, **REST))
    return found


@pytest.mark.parametrize("how", ["freeze from the start", "train both, then freeze"])
def test_parameters_that_the_optimizer_does_not_hold_are_saved_and_restored(how: str, tmp_path: Path) -> None:
    for saved, restored, after in run_ranks(train_frozen_and_resume, 2, str(tmp_path), how):
        assert_same_tensors(restored, saved)
        assert_same_tensors({"bias": after["bias"]}, {"bias": saved["bias"]})
        assert not torch.equal(after["weight"], saved["weight"])


def count_read_bytes(path: str, division: str) -> int:
    """Bytes of tensors that a restore asks the files for."""
    total = 0
    process = tensor_files.dcp.HuggingFaceStorageReader._process_read_request

    def counting(self: Any, file: Any, request: Any, planner: Any) -> None:
        nonlocal total
        total += torch.Size(request.lengths).numel()
        process(self, file, request, planner)

    tensor_files.dcp.HuggingFaceStorageReader._process_read_request = counting  # type: ignore
    model, optimizer, shards = divided(division, expected_state())
    restore_state(Path(path), model, optimizer, CPU, shards)
    return total


@pytest.mark.parametrize("division", ["owners", "ceiling"])
def test_each_rank_reads_only_its_part(saved: dict[tuple[int, str], Path], division: str) -> None:
    elements = {name: tensor.numel() for name, tensor in expected_state().items()}
    everything = sum(elements.values())
    (alone,) = run_ranks(count_read_bytes, 1, str(saved[4, "replicated"]), "replicated")
    assert alone == everything
    on_all = {"owners": ("model.", "rng."), "ceiling": ("rng.",)}[division]
    read_by_all = sum(count for name, count in elements.items() if name.startswith(on_all))
    if division == "ceiling":
        read_by_all += len(SHAPES)  # the step counters
    several = run_ranks(count_read_bytes, 4, str(saved[2, "ceiling"]), division)
    assert sum(several) == everything + 3 * read_by_all


def save_with_a_gap(folder: str) -> str:
    rows = Rows(torch.ones(2, 2), (6, 2), 2 * comm.rank())  # two ranks: rows 4 and 5 are nobody's
    return str(error_of(lambda: save_checkpoint(Path(folder), {"t": rows}, Manifest(step=1, **REST))))


def test_rows_that_nobody_has_are_a_checkpoint_error(tmp_path: Path) -> None:
    for message in run_ranks(save_with_a_gap, 2, str(tmp_path)):
        assert "could not be written" in message
        assert "key:t" in message
    assert list(tmp_path.iterdir()) == []


def restore_where_one_cannot_read(path: str) -> str:
    model, optimizer, _ = divided("replicated", expected_state())
    if comm.rank() == 1:
        tensor_files.dcp.HuggingFaceStorageReader.read_data = lambda *_: (_ for _ in ()).throw(  # type: ignore
            OSError(5, "Input/output error")
        )
    return repr(error_of(lambda: restore_state(Path(path), model, optimizer, CPU)))


def test_a_tensor_that_one_rank_cannot_read_is_an_error_on_all(saved: dict[tuple[int, str], Path]) -> None:
    for message in run_ranks(restore_where_one_cannot_read, 2, str(saved[2, "replicated"]), timeout_s=30):
        assert "Input/output error" in message
