"""Notebooks run to their end on a CPU, in every form that a CPU can run, and are committed without outputs."""

import ast
import copy
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import forked

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted(path for under in ("*.ipynb", "lessons/*.ipynb") for path in (ROOT / "notebooks").glob(under))
_LONGEST_S = 240
_PRETEND = {"import torch\n": "from tests.as_on_gpus import pretend\npretend()\nimport torch\n"}
_TINY = {
    'SOURCE = "tinystories"': 'SOURCE = "stories"',
    "FIELDS = []": 'FIELDS = ["--size", "nano", "--data.story_chars", "10000", "--model.context_length", "32"]',
}
_TIME = "MINUTES, EPOCHS = 20, None"
FORMS: dict[str, tuple[str, dict[str, str]]] = {
    "demo on a CPU": ("demo_benchmark", {}),
    "demo as on two GPUs": ("demo_benchmark", _PRETEND),
    "speedrun of minutes": ("speedrun_tinystories", {**_TINY, _TIME: "MINUTES, EPOCHS = 100, None"}),
    "speedrun of a pass": ("speedrun_tinystories", {**_TINY, _TIME: "MINUTES, EPOCHS = None, 1"}),
}
"""Each notebook, with changes that a reader would make, or that a test needs without GPUs."""
SLOW = ("demo as on two GPUs", "speedrun of minutes", "speedrun of a pass")


def merging(m: str) -> str:
    """An answer to lesson 1, which subtracts m from the logsumexps."""
    return f"""    m = {m}
    a, b = ((x - m).exp()[:, None] for x in (logsumexp_a, logsumexp_b))
    return (a * o_a + b * o_b) / (a + b), m + (a + b).log().squeeze(1)"""


def dividing(ranks: str) -> str:
    """An answer to lesson 3, which divides by `ranks`."""
    return f"""    fsdp, zero1 = ({ranks} if method in divided else 1 for divided in (["FSDP"], ["FSDP", "ZeRO-1"]))
    size = 4 * parameters
    return {{"parameters": size / fsdp, "gradients": size / fsdp, "optimizer_state": 2 * size / zero1}}"""


_OUTPUT_OF_A, _ZEROS = "    return o_a", '    return {"parameters": 0, "gradients": 0, "optimizer_state": 0}'
_SEND, _FINISH = "        # Your code: use comm.start_mean here.", "        # Your code."
_START = 'self.transfers.append(comm.start_mean([p.grad], "all-reduce"))'
_WAIT = """        for transfer in self.transfers:
            transfer.wait()
        self.transfers.clear()"""
_SEND_LATE = f"        for p in self.trainable():\n            {_START}\n{_WAIT}"
LESSONS: dict[str, list[tuple[dict[str, str], str]]] = {
    "1_flash_attention": [
        ({}, "Not yet: merge must return two tensors"),
        ({_OUTPUT_OF_A: merging("torch.zeros(())")}, "Not yet: the output overflows"),
        ({_OUTPUT_OF_A: merging("torch.maximum(logsumexp_a, logsumexp_b)")}, "Correct"),
    ],
    "2_data_parallelism": [
        ({}, "Not yet: nothing is sent."),
        ({_FINISH: _SEND_LATE}, "Not yet: the gradients are right, but nothing is sent before"),
        ({_FINISH: _WAIT, _SEND: f"        {_START}"}, "Correct"),
    ],
    "3_memory": [
        ({}, "Not yet: one process, parameters: predicted 0.0 MB"),
        ({_ZEROS: dividing("2")}, "Not yet: ZeRO-1 on 1 process"),
        ({_ZEROS: dividing("ranks")}, "Correct"),
    ],
}
"""Answers to the exercise of each lesson as changes of its cell, and the beginning of the message of its check."""
SMALLER = {
    "1_flash_attention": {},
    "2_data_parallelism": {"WIDTH, BATCH, BUCKET_MB = 6, 512, 512, 2.5": "WIDTH, BATCH, BUCKET_MB = 3, 256, 128, 0.3"},
    "3_memory": {"WIDTH, LAYERS, BATCH = 1024, 64, 128, 6, 2": "WIDTH, LAYERS, BATCH = 1024, 16, 128, 1, 2"},
}
"""Changes of a lesson's models: what the exercises are about takes no large one."""

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def files_of(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


def code_of(notebook: Mapping[str, Any]) -> Iterator[str]:
    """The code of each cell, without the `%%writefile` that may stand above it."""
    cells = ("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    return (re.sub(r"\A%%writefile .*\n", "", cell) for cell in cells)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The project's files in a folder of their own, without files that git ignores."""
    left_out = shutil.ignore_patterns(".*", "__pycache__", "runs", "data", "wandb", "*.egg-info")
    return Path(shutil.copytree(ROOT, tmp_path / "clone", ignore=left_out))


def opened(path: Path) -> Any:
    """A notebook, valid and not yet run."""
    nbformat = pytest.importorskip("nbformat", reason="pip install '.[dev]'")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def outputs_of(notebook: Any, folder: Path, out: Path) -> list[Any]:
    """The outputs of a notebook's cells with code, run in a folder by `tests/run_notebook.py`."""
    pytest.importorskip("ipykernel", reason="pip install '.[dev]'")
    (folder / "run.ipynb").write_text(json.dumps(notebook))
    file = out.parent / "outputs.json"
    program = [sys.executable, "-m", "tests.run_notebook", str(folder / "run.ipynb"), str(file)]
    result = forked.run(program, _LONGEST_S, cwd=folder, env=dict(os.environ))
    (folder / "run.ipynb").unlink()
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(file.read_text())


@pytest.fixture
def out(clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that notebooks of the clone are told to write into, on a machine without GPUs."""
    out = tmp_path / "out"
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    for name, value in {"OUT": str(out), "CUDA_VISIBLE_DEVICES": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(clone), prepend=os.pathsep)
    return out


@pytest.mark.parametrize("form", [pytest.param(form, marks=pytest.mark.slow if form in SLOW else ()) for form in FORMS])
def test_a_notebook_runs_to_its_end_and_writes_only_where_it_is_told(form: str, clone: Path, out: Path) -> None:
    before = files_of(clone)
    name, changes = FORMS[form]
    notebook = opened(clone / f"notebooks/{name}.ipynb")
    for old, new in changes.items():
        (cell,) = (cell for cell in notebook.cells if cell.cell_type == "code" and old in cell.source)
        cell.source = cell.source.replace(old, new)
    outputs = outputs_of(notebook, clone / "notebooks", out)

    shown = [data for output in outputs for data in output["shown"]]
    assert [data for data in shown if len(data.get("image/png", "")) > 1000]
    assert [data for data in shown if "| --- |" in data.get("text/markdown", "")]
    rows = [row for file in out.rglob("*.jsonl") for row in file.read_text().splitlines()]
    assert not [row for row in rows if '"status": "error"' in row]
    assert files_of(clone) == before


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson_runs_with_its_exercise_open_wrong_and_right(lesson: str, clone: Path, out: Path) -> None:
    before = files_of(clone)
    notebook = opened(clone / f"notebooks/lessons/{lesson}.ipynb")
    cells = {cell.id: cell for cell in notebook.cells}
    for old, new in SMALLER[lesson].items():
        assert cells["program"].source.count(old) == 1
        cells["program"].source = cells["program"].source.replace(old, new)
    for i, (changes, _) in enumerate(LESSONS[lesson][1:]):
        exercise, check = (copy.deepcopy(cells[name]) for name in ("exercise", "check"))
        exercise.id, check.id = f"exercise-{i}", f"check-{i}"
        for old, new in changes.items():
            assert exercise.source.splitlines().count(old) == 1
            exercise.source = re.sub(rf"^{re.escape(old)}$", lambda _, new=new: new, exercise.source, flags=re.M)
        notebook.cells += [exercise, check]
    outputs = outputs_of(notebook, clone / "notebooks/lessons", out)

    with_code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    said = [o["text"] for cell, o in zip(with_code, outputs, strict=True) if cell.id.startswith("check")]
    answers = [answer for _, answer in LESSONS[lesson]]
    assert [text[: len(answer)] for text, answer in zip(said, answers, strict=True)] == answers
    assert [data for output in outputs for data in output["shown"] if len(data.get("image/png", "")) > 1000]
    assert files_of(clone) == before


@each_notebook
def test_every_path_that_a_notebook_names_exists(path: Path) -> None:
    """Files of the project, which begin with one of its folders, in code as in text."""
    notebook = json.loads(path.read_text())
    text = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown"]
    words = [word for each in text for word in re.findall(r"[\w./-]+", each)]
    literals = [node.value for code in code_of(notebook) for node in ast.walk(ast.parse(code))
                if isinstance(node, ast.Constant) and isinstance(node.value, str)]  # fmt: skip
    folders = [folder.name for folder in ROOT.iterdir() if folder.is_dir() and folder.name not in ("runs", "data")]
    named = [name for name in (*words, *literals) if name.partition("/")[0] in folders and "/" in name]
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


@each_notebook
def test_a_notebook_is_committed_without_outputs_and_with_stable_ids(path: Path) -> None:
    notebook = json.loads(path.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not [cell for cell in cells if cell["outputs"] or cell["execution_count"] is not None]
    for cell, before in zip(notebook["cells"][1:], notebook["cells"], strict=False):
        told = cell["cell_type"] == "markdown" or before["cell_type"] == "markdown"
        assert told, f"cell {cell['id']} has no explanation"


def test_every_notebook_is_run() -> None:
    assert {path.stem for path in NOTEBOOKS} == {name for name, _ in FORMS.values()} | set(LESSONS)
