"""`cs336 evaluate`: how well a trained model predicts a text, or does the tasks of EleutherAI's harness."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs336_basics.files import write_json

from ..config.checks import require_at_least, without_groups
from ..machine.console import launched_rank, say
from .arguments import make_parser, parse
from .models import tokenizer_of

if TYPE_CHECKING:
    import torch

    from ..training.load import LoadedModel


def evaluate(arguments: Sequence[str]) -> int:
    """Run `cs336 evaluate` and return the exit code. Under torchrun, every rank calls this."""
    parser = make_parser("evaluate", "Measure a trained model on a text or on standard tasks.")
    parser.add_argument("run", type=str, help="Run folder, checkpoint or Hugging Face folder.")
    parser.add_argument("--text", type=str, default=None,
                        help="What to predict: a text file, whose documents <|endoftext|> separates, records, a "
                        "folder or a pattern, as for training. Other special tokens are text, unless they were tokens "
                        "in the run's training text.")  # fmt: skip
    parser.add_argument("--text_field", type=str, default=None,
                        help="Field of records with the text (default: the run's, or text).")  # fmt: skip
    parser.add_argument("--tasks", type=str, default=None,
                        help="Tasks of lm_eval to do, such as hellaswag,arc_easy, or their YAML files.")  # fmt: skip
    parser.add_argument("--context_length", type=int, default=None,
                        help="Tokens of a window (default: the model's context length, at most 2,048).")  # fmt: skip
    parser.add_argument("--stride", type=int, default=None,
                        help="Tokens between overlapping windows of the text (default: half of one).")  # fmt: skip
    parser.add_argument("--batch_size", type=int, default=4, help="Windows at once.")
    parser.add_argument("--device", type=str, default="auto", help="auto, cpu, mps, cuda or cuda:N.")
    parser.add_argument("--devices", type=int, default=1, help="Number of GPUs, or of processes on a CPU.")
    parser.add_argument("--out", type=str, default=None, help="JSON file to write, with every document or task.")
    options = parse(parser, arguments)
    require_at_least(options, "", 1, "batch_size", "devices")
    if bool(options.text) == bool(options.tasks):
        raise ValueError("text and tasks: give exactly one of the two")
    if options.out is not None and not Path(options.out).resolve().parent.is_dir():
        raise ValueError(f"out is {options.out}: its folder does not exist")
    if options.out is not None and Path(options.out).is_dir():
        raise ValueError(f"out is {options.out}, a folder: it must be a JSON file to write")
    from ..training.launch import call_in_processes, check_devices, device_of_rank
    from ..training.load import load_model

    if options.devices > 1 and launched_rank() is None:
        check_devices(options.device, options.devices, "devices")
        call_in_processes([f"{__name__}:evaluate", *arguments], options.devices)
        return 0
    with without_groups(), device_of_rank(options.device) as device:
        loaded = load_model(options.run)
        length = min(loaded.shape.context_length, 2048) if options.context_length is None else options.context_length
        result = (_on_text if options.text else _on_tasks)(options, loaded, device, length)
        if options.out is not None and not launched_rank():
            write_json(options.out, {"model": str(loaded.checkpoint), "context_length": length, **result})
    return 0


def _on_text(options: Any, loaded: "LoadedModel", device: "torch.device", length: int) -> dict[str, Any]:
    from ..training.evaluate import Score, score_documents

    settings = loaded.manifest.config.get("data", {})  # of the run; a Hugging Face folder has none
    documents = _documents(options.text, options.text_field or settings.get("text_field", "text"))
    stride = max(1, length // 2) if options.stride is None else options.stride
    model, tokenizer = loaded.build(device), tokenizer_of(loaded)
    special = settings.get("special_tokens_in_text", False)
    scores = score_documents(model, tokenizer, documents, length, stride, options.batch_size, special)
    total = sum(scores, Score())
    if not total.tokens:
        raise ValueError(f"text is {options.text}: it must have text besides <|endoftext|>")
    result = {"documents": len(scores), "tokens": total.tokens, "bytes": total.bytes, **total.rates()}
    if not launched_rank():
        for name, value in result.items():
            print(f"{name.replace('_per_', ' a '):<15}{value:>16{',.4f' if isinstance(value, float) else ','}}")
    each = [{**dataclasses.asdict(score), **score.rates()} for score in scores]
    return {"text": options.text, "stride": stride, **result, "by_document": each}


def _documents(text: str, text_field: str) -> Iterator[str]:
    from cs336_basics.tokenizer import documents_of, read_utf8

    from ..training.documents import as_unicode, find_files, is_plain, read_files

    if is_plain(text):  # whose bytes training takes as they are: others lose carriage returns and a byte-order mark
        yield from documents_of(read_utf8(text, name="text"))
        return
    for where, document, _ in read_files(find_files(text, "text"), text_field):
        if document is None:
            accepted = "delete it, or name another text_field"
            raise ValueError(f"text is {text}: {where} has no text in {text_field!r}: {accepted}")
        if document.strip():
            yield as_unicode(document)


def _on_tasks(options: Any, loaded: "LoadedModel", device: "torch.device", length: int) -> dict[str, Any]:
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import make_table
    except ImportError as error:
        raise ValueError(f"tasks is {options.tasks}: it needs the package lm_eval: pip install lm_eval") from error
    from ..training.harness import HarnessModel

    tasks = options.tasks.split(",")
    named = [task for task in tasks if not Path(task).is_file()]
    manager = TaskManager(include_defaults=bool(named))  # reading the descriptions of all tasks takes half a minute
    if unknown := [task for task in named if task not in manager.task_index]:
        raise ValueError(f"tasks is {options.tasks}: {unknown[0]} is no file and no task of `lm_eval ls tasks`")
    model = HarnessModel(loaded.build(device), tokenizer_of(loaded), length, options.batch_size)
    found = simple_evaluate(model, tasks=tasks, task_manager=manager, log_samples=False)
    if found is None:  # not on rank 0
        return {}
    say(make_table(found))
    return {"tasks": found["results"]}
