"""The table of tiles that `tune.py` writes, from given times."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is only there on Linux")
tune = pytest.importorskip("cs336_systems.kernels.attention.tune")


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["tune"])
    with pytest.raises(SystemExit) as stop:
        tune.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.endswith("tiles are measured on a CUDA GPU, and there is none\n")


def test_the_table_takes_the_fastest_tiles_and_keeps_other_entries(tmp_path: Path) -> None:
    fast, slow = tune.Tile(128, 64, 8, 2, True), tune.Tile(64, 64, 4, 2)
    found = {"forward-64-float": [(1.5, fast), (2.5, slow)], "dkv-256-float": [], "backward-256-float": []}
    tune.update_table(iter([found]), tmp_path / "tiles.json")
    before, after = (
        json.loads(file.read_text())
        for file in (Path(tune.__file__).with_name("flash_triton_tiles.json"), tmp_path / "tiles.json")
    )
    assert after.pop("forward-64-float") == {"BM": 128, "BN": 64, "num_warps": 8, "num_stages": 2, "TOGETHER": True}
    assert {*before} - {*after} <= {"forward-64-float", "backward-256-float"}
    assert all(before[key] == tile for key, tile in after.items())


@pytest.mark.parametrize("ms, is_kept", [(4.4, True), (4.6, False)])
def test_a_slow_single_launch_is_left_out(ms: float, is_kept: bool, tmp_path: Path) -> None:
    tile = tune.Tile(32, 32, 8, 1)
    found = {"dq-64-float": [(1.0, tile)], "backward-64-float": [(ms, tile)], "dkv-64-float": [(2.0, tile)]}
    tune.update_table(iter([found]), tmp_path / "tiles.json")
    assert ("backward-64-float" in json.loads((tmp_path / "tiles.json").read_text())) is is_kept


@pytest.mark.parametrize("kind", ["half-tma", "half", "float"])
@pytest.mark.parametrize("d", tune.HEAD_SIZES)
def test_every_entry_has_candidates(d: int, kind: str) -> None:
    tried = tune.candidates(d, kind)
    assert len(tried) == len(set(tried))
    table = tune.tile_table()
    keys = {phase: tune.tile_key(phase, d, tune.KINDS[kind].dtype, tune.KINDS[kind].tma) for phase in tune._PHASES}
    assert {(phase, table[key]) for phase, key in keys.items() if key in table} <= {(x.phase, x.tile) for x in tried}
    in_one_launch = {"backward"} if kind != "half-tma" else set()
    assert {each.phase for each in tried} == {"forward", "dq", "dkv"} | in_one_launch
