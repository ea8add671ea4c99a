"""The adapter for the lm-evaluation-harness against the harness's own class for Hugging Face's models."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
import torch

from cs336_systems.cli.main import run_command
from cs336_systems.training import train
from cs336_systems.training.load import export_run, load_model

from .helpers import make_config

TASK = """
task: cats
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
doc_to_choice: [" sat on the mat", " rain"]
metric_list: [{metric: acc}]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("harness")
    (folder / "text.txt").write_text("the cat sat on the mat. " * 300)
    data = dict(source="text", train_text=str(folder / "text.txt"), data_dir=str(folder / "data"))
    return train(make_config(folder, data=data)).run_dir


def put_a_token_before_each_text(exported: Path) -> None:
    """Make "!" the token that begins a text, as <|begin_of_text|> does for Llama 3."""
    path, config_path = exported / "tokenizer.json", exported / "tokenizer_config.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    begin = ("!", tokenizer.token_to_id("!"))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="! $A", special_tokens=[begin])
    tokenizer.save(str(path))
    config_path.write_text(json.dumps(json.loads(config_path.read_text()) | {"bos_token": "!"}))


def test_tasks_need_the_package(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ValueError, match=r"tasks is piqa: it needs the package lm_eval: pip install lm_eval$"):
        run_command("evaluate", [run, "--tasks", "piqa", "--device", "cpu"])


@pytest.mark.parametrize("begins", [False, True])
def test_answers_are_those_of_the_harness_for_the_exported_model(run: str, begins: bool, tmp_path: Path) -> None:
    huggingface = pytest.importorskip("lm_eval.models.huggingface", reason="needs lm_eval[hf]")
    from cs336_systems.training.harness import HarnessModel

    _, exported = export_run(run, tmp_path / "exported")
    if begins:
        put_a_token_before_each_text(exported)
    loaded = load_model(exported)
    assert loaded.tokenizer is not None
    length = loaded.shape.context_length
    ours = HarnessModel(loaded.build("cpu"), loaded.tokenizer, length, batch_size=2)
    how = dict(device="cpu", dtype=torch.float32, max_length=length, batch_size=1)
    theirs = huggingface.HFLM(pretrained=str(exported), **how)

    def requests(*of: tuple) -> list[SimpleNamespace]:
        return [SimpleNamespace(args=arguments) for arguments in of]

    pairs = requests(
        ("the cat", " sat on"), ("", "the mat"), ("the rain " * 9, "fell"), ("the cat ", "sat"), ("a", "é"), ("!a", "é")
    )
    for found, expected in zip(ours.loglikelihood(pairs), theirs.loglikelihood(pairs), strict=True):
        assert found == (pytest.approx(expected[0], abs=1e-4), expected[1])
    texts = requests(("the cat sat on the mat. " * 9,), ("rain",))
    assert ours.loglikelihood_rolling(texts) == pytest.approx(theirs.loglikelihood_rolling(texts), abs=1e-3)
    until = {"until": [" mat"], "max_gen_toks": 6}
    prompts = requests(
        ("the cat", until), ("the cat sat on the mat. the cat sat on", until), ("on", {"max_gen_toks": 3})
    )
    assert ours.generate_until(prompts) == theirs.generate_until(prompts)


def test_the_command_does_a_task_on_two_ranks(run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.chdir(tmp_path)
    Path("cats.yaml").write_text(TASK)
    questions = [{"question": "the cat", "answer": answer} for answer in (0, 0, 1)]
    Path("questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    words = [run, "--tasks", "cats.yaml", "--device", "cpu", "--devices", "2", "--out", "found.json"]
    assert run_command("evaluate", words) == 0
    assert json.loads(Path("found.json").read_text())["tasks"]["cats"]["acc,none"] == pytest.approx(2 / 3)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **_: SimpleNamespace(task_index={}))
    with pytest.raises(ValueError, match=r"tasks is cats\.yaml,dogs: dogs is no file and no task"):
        run_command("evaluate", [run, "--tasks", "cats.yaml,dogs", "--device", "cpu"])
