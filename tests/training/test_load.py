"""Models out of runs: sampling, export, import and starting from other weights, through the command."""

import io
import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from rich.console import Console

from cs336_basics.tokenizer import Tokenizer
from cs336_systems.cli.main import main
from cs336_systems.cli.train import parse_run_config
from cs336_systems.machine.console import say
from cs336_systems.training import train
from cs336_systems.training.load import load_model
from cs336_systems.training.metrics import read_metrics
from tests import forked

from .helpers import forge_manifest, read_independently


def arguments(folder: Path, run: str, **fields: object) -> list[str]:
    values = {
        "run_dir": folder / run,
        "data.data_dir": folder / "data",
        "data.story_chars": 20_000,
        "model.vocab_size": 300,
        "model.context_length": 32,
        "model.d_model": 32,
        "model.d_ff": 64,
        "model.num_layers": 2,
        "model.num_heads": 2,
        "train.max_steps": 3,
        "train.batch_size": 4,
        **fields,
    }
    return [f"--{name}={value}" for name, value in values.items()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(parse_run_config(arguments(folder, "run"))[0])
    return folder / "run"


def run_command(*words: object) -> int:
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    assert isinstance(stop.value.code, int)
    return stop.value.code


def test_a_run_on_token_files_without_a_tokenizer_says_that_it_cannot_sample(
    tmp_path: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {}
    for name in ("train", "valid"):
        files[f"data.{name}_tokens"] = shutil.copy(trained.parent / "data" / f"{name}.npy", tmp_path)
    fields = {**files, "data.data_dir": trained.parent / "data"}
    assert run_command("train", "--skip_data", *arguments(tmp_path, "run", **fields)) == 0
    said = capsys.readouterr()
    assert "sample: none, because the run has no tokenizer" in said.out + said.err
    assert not (tmp_path / "run" / "sample.txt").exists()
    assert not (tmp_path / "run" / "tokenizer.json").exists()
    assert run_command("generate", tmp_path / "run") == 2
    assert "has no tokenizer, so it cannot take or give text" in capsys.readouterr().err
    fields["data.tokenizer"] = trained.parent / "data" / "tokenizer.json"
    assert run_command("train", "--skip_data", *arguments(tmp_path, "named", **fields)) == 0
    assert (tmp_path / "named" / "sample.txt").exists()
    assert run_command("generate", tmp_path / "named") == 0


def test_generate_continues_the_prompt_and_repeats_by_seed(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for seed in (1, 1, 2):
        assert run_command("generate", trained, "--prompt", "One day", "--seed", seed) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]
    assert all(output.startswith("One day") and len(output) > 10 for output in outputs)


def test_generate_escapes_control_characters_for_a_terminal_only(trained: Path, tmp_path: Path) -> None:
    prompt = "\x1b[31m\r\x9b2J\a\té\n"
    words = [sys.executable, "-m", "cs336_systems", "generate", trained, "--prompt", prompt, "--max_new_tokens", "0"]
    with forked.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.communicate(timeout=60)[0] == f"{prompt}\n".encode()
    screen, stdout = pty.openpty()
    assert forked.Popen(words, stdout=stdout).wait(timeout=60) == 0
    assert os.read(screen, 1000).decode() == "\\x1b[31m\\r\\x9b2J\\x07\té\r\n\r\n"  # \r\n is the terminal's newline


def test_a_line_of_text_from_elsewhere_does_not_steer_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_terminal, expected in ((True, "\\x1b[2Jé\n\n"), (False, "\x1b[2Jé\n\n")):
        console = Console(file=io.StringIO(), force_terminal=is_terminal, width=80)
        monkeypatch.setattr("rich.get_console", lambda console=console: console)
        say("\x1b[2Jé\n")
        assert console.file.getvalue() == expected


def test_transformers_loads_an_export(trained: Path, tmp_path: Path) -> None:
    assert run_command("export", trained, "--format", "hf", "--out", tmp_path / "hf") == 0
    llama, ours = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf"), load_model(trained)
    tokens = torch.randint(0, 300, (2, 32))
    with torch.no_grad():
        torch.testing.assert_close(llama(tokens).logits, ours.build(torch.device("cpu"))(tokens), atol=1e-4, rtol=0)
    assert ours.tokenizer is not None
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert theirs("a cat")["input_ids"] == ours.tokenizer.encode("a cat")


def test_export_of_a_run_with_bfloat16_weights_is_bfloat16_and_can_be_imported(trained: Path, tmp_path: Path) -> None:
    fields = {"data.data_dir": trained.parent / "data", "train.precision": "bf16", "train.weight_dtype": "bf16"}
    result = train(parse_run_config(arguments(tmp_path, "run", **fields))[0])
    for words in (("export", tmp_path / "run", "--out", tmp_path / "hf"), ("import-hf", tmp_path / "hf")):
        assert run_command(*words, *(("--out", tmp_path / "back") if words[0] == "import-hf" else ())) == 0
    held = read_independently(Path(result.checkpoint))
    llama = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf")
    assert {parameter.dtype for parameter in llama.parameters()} == {torch.bfloat16}
    assert torch.equal(llama.lm_head.weight, held["model.lm_head.weight"])
    for name, tensor in read_independently(load_model(tmp_path / "back").checkpoint).items():
        assert torch.equal(tensor, held[name].float()), name
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert run_command("generate", tmp_path / "run", "--max_new_tokens", 3) == 0


def test_import_brings_the_same_weights_back(trained: Path, tmp_path: Path) -> None:
    assert run_command("export", trained, "--out", tmp_path / "hf") == 0
    assert run_command("import-hf", tmp_path / "hf", "--out", tmp_path / "back") == 0
    there, back = load_model(trained), load_model(tmp_path / "back")
    assert there.shape == back.shape
    assert there.state_dict.keys() == back.state_dict.keys()
    assert all(torch.equal(tensor, back.state_dict[name]) for name, tensor in there.state_dict.items())
    assert run_command("generate", tmp_path / "back", "--max_new_tokens", 3) == 0


def test_an_import_without_a_tokenizer_warns(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("export", trained, "--out", tmp_path / "hf") == 0
    (tmp_path / "hf" / "tokenizer.json").unlink()
    assert run_command("import-hf", tmp_path / "hf", "--out", tmp_path / "back") == 0
    said = capsys.readouterr()
    assert f"{tmp_path / 'hf'} has no tokenizer.json" in said.out + said.err
    assert load_model(tmp_path / "back").tokenizer is None


def test_a_checkpoint_of_another_tokenizer_is_one_line(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    checkpoint = load_model(tmp_path / "run").checkpoint
    forge_manifest(checkpoint, lambda manifest: manifest["identity"].update(tokenizer="x"))
    for words in (("generate", tmp_path / "run"), ("export", tmp_path / "run")):
        assert run_command(*words) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "is not the tokenizer that" in error
        assert str(checkpoint) in error


def test_init_from_starts_where_the_other_run_ended(trained: Path, tmp_path: Path) -> None:
    """Training on with learning rate 0 must show the trained model's loss, not a new one's."""
    fields = {"data.data_dir": trained.parent / "data", "optimizer.lr": 0, "train.max_steps": 1, "train.seed": 7}
    result = train(parse_run_config(arguments(tmp_path, "on", init_from=trained, **fields))[0])
    expected = next(row["valid_loss"] for row in read_metrics(trained / "metrics.jsonl") if "valid_loss" in row)
    assert result.valid_loss == pytest.approx(expected, rel=1e-6)
    fresh = train(parse_run_config(arguments(tmp_path, "fresh", **fields))[0])
    assert abs(fresh.valid_loss - expected) > 1e-3  # type: ignore[operator]


def test_init_from_another_architecture_or_tokenizer_is_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = arguments(
        tmp_path, "wide", init_from=trained, **{"model.d_ff": 96, "data.data_dir": trained.parent / "data"}
    )
    assert run_command("train", *wide) == 2
    assert "model.d_ff is 96 here and 64 there" in capsys.readouterr().err
    Tokenizer.train(["another text"], 280).save(tmp_path / "own.json")
    other_tokenizer = arguments(tmp_path, "other", init_from=trained, **{"data.tokenizer": tmp_path / "own.json"})
    assert run_command("train", *other_tokenizer) == 2
    error = capsys.readouterr().err
    assert "tokenizer is" in error
    assert not (tmp_path / "other").exists()


def test_another_text_is_encoded_with_the_tokenizer_of_the_first_run(trained: Path, tmp_path: Path) -> None:
    tokenizer = trained / "tokenizer.json"
    before = tokenizer.read_bytes()
    train(parse_run_config(arguments(tmp_path, "other", **{"init_from": trained, "data.seed": 5}))[0])
    assert tokenizer.read_bytes() == before
    assert (tmp_path / "other" / "tokenizer.json").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("generate", "nowhere"), "nowhere does not exist"),
        (("export", "nowhere"), "nowhere does not exist"),
        (("generate", "."), "has no whole one in checkpoints"),
        (("generate", ".", "--top_p", "2"), "cs336: top_p is 2.0"),
        (("import-hf", ".", "--out", "x"), "config.json does not exist"),
        (("export", ".", "--format", "gguf"), "format"),
        (("report", "runs", "nowhere"), "config.json does not exist"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(*words) == 2
    error = capsys.readouterr().err
    assert error.startswith("cs336: ")
    assert error.count("\n") == 1
    assert message in error


def test_an_export_does_not_write_over_a_run_a_checkpoint_or_other_files(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    for out in (trained, load_model(trained).checkpoint, tmp_path / "mine"):
        assert run_command("export", trained, "--out", out) == 2
        assert "give another folder" in capsys.readouterr().err
    assert (tmp_path / "mine" / "config.json").read_text() == "{}"


def test_an_export_replaces_an_earlier_one_but_no_other_model_unless_it_is_told_to(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "hf"
    for said in ("", f"export: the model that was in {out} is replaced\n"):
        assert run_command("export", trained, "--out", out) == 0
        assert capsys.readouterr().out == f"{said}{load_model(trained).checkpoint} -> {out}\n"
    ours = (out / "model.safetensors").read_bytes()
    config = json.loads((out / "config.json").read_text())
    for theirs in (json.dumps({**config, "use_cache": True}), "[]", "{", None):
        (out / "model.safetensors").write_bytes(b"somebody's")
        (out / "config.json").unlink()
        if theirs is not None:
            (out / "config.json").write_text(theirs)
        assert run_command("export", trained, "--out", out) == 2
        error = capsys.readouterr().err
        assert (
            error == f"cs336: {out} holds a model that is no earlier export of ours: give another folder, "
            "or --overwrite true\n"
        )
        assert (out / "model.safetensors").read_bytes() == b"somebody's"
        assert run_command("export", trained, "--out", out, "--overwrite", "true") == 0
        assert (out / "model.safetensors").read_bytes() == ours
    assert run_command("export", trained, "--out", trained, "--overwrite", "true") == 2  # a run all the same


def test_an_exported_checkpoint_is_still_one(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    checkpoint = load_model(tmp_path / "run").checkpoint
    assert run_command("export", checkpoint) == 0
    assert (tmp_path / "run" / "hf" / "model.safetensors").exists()
    (checkpoint / "stray").mkdir()
    assert load_model(tmp_path / "run").checkpoint == checkpoint


def test_an_import_does_not_write_into_a_folder_with_files(trained: Path, tmp_path: Path) -> None:
    assert run_command("export", trained, "--out", tmp_path / "hf") == 0
    before = (tmp_path / "hf" / "config.json").read_bytes()
    assert run_command("import-hf", tmp_path / "hf", "--out", tmp_path / "hf") == 2
    assert (tmp_path / "hf" / "config.json").read_bytes() == before


def test_a_reader_that_goes_away_does_not_end_a_run(tmp_path: Path) -> None:
    """`cs336 train | head -1`."""
    words = arguments(tmp_path, "run", **{"train.max_steps": 20, "train.validation_interval": 1})
    command = [sys.executable, "-m", "cs336_systems", "train", *words]
    with forked.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        process.wait(timeout=120)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["step"] == 20
