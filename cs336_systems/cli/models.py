"""Commands that use a trained model: `cs336 generate`, `evaluate`, `export` and `import-hf`."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cs336_basics.files import write_json

from ..config.checks import require_at_least
from ..config.run import SampleConfig
from ..machine.console import visible
from .arguments import make_parser, parse

if TYPE_CHECKING:
    from cs336_basics.tokenizer import Tokenizer

    from ..training.load import LoadedModel


def generate(arguments: Sequence[str]) -> int:
    """Run `cs336 generate`, which prints a sample, and return the exit code."""
    parser = make_parser("generate", "Sample from a trained model.")
    parser.add_argument("run", type=str, help="Run folder, checkpoint or Hugging Face folder.")
    parser.add_argument("--device", type=str, default="auto", help="auto, cpu, cuda or cuda:N.")
    parser.add_class_arguments(SampleConfig)
    options = vars(parse(parser, arguments))
    from ..machine.hardware import use_device
    from ..training.load import load_model
    from ..training.sample import sample_text

    device, run = use_device(options.pop("device")), options.pop("run")
    sampling = SampleConfig(**options)
    loaded = load_model(run)
    text = sample_text(loaded.build(device), _tokenizer_of(loaded), sampling)
    print(visible(text) if sys.stdout is not None and sys.stdout.isatty() else text)
    return 0


def evaluate(arguments: Sequence[str]) -> int:
    """Run `cs336 evaluate`, which prints the loss on a text, and return the exit code."""
    parser = make_parser("evaluate", "Measure how well a trained model predicts a text.")
    parser.add_argument("run", type=str, help="Run folder, checkpoint or Hugging Face folder.")
    parser.add_argument("--text", type=str, required=True,
                        help="UTF-8 file. <|endoftext|> separates its documents.")  # fmt: skip
    parser.add_argument("--context_length", type=int, default=None,
                        help="Tokens of a window (default: the model's context length, at most 2,048).")  # fmt: skip
    parser.add_argument("--stride", type=int, default=None,
                        help="Tokens between overlapping windows (default: half the context length).")  # fmt: skip
    parser.add_argument("--batch_size", type=int, default=4, help="Windows at once.")
    parser.add_argument("--device", type=str, default="auto", help="auto, cpu, cuda or cuda:N.")
    parser.add_argument("--out", type=str, default=None, help="JSON file to write, with every document.")
    options = parse(parser, arguments)
    from cs336_basics.tokenizer import documents_of, read_utf8

    from ..machine.hardware import use_device
    from ..training.evaluate import Score, score_documents
    from ..training.load import load_model

    require_at_least(options, "", 1, "batch_size")
    if options.out is not None and not Path(options.out).resolve().parent.is_dir():
        raise ValueError(f"out is {options.out}: its folder does not exist")
    device, loaded = use_device(options.device), load_model(options.run)
    length = min(loaded.shape.context_length, 2048) if options.context_length is None else options.context_length
    stride = max(1, length // 2) if options.stride is None else options.stride
    documents = documents_of(read_utf8(options.text))
    how = dict(context_length=length, stride=stride)
    model, tokenizer = loaded.build(device), _tokenizer_of(loaded)
    scores = score_documents(model, tokenizer, documents, **how, batch_size=options.batch_size)
    total = sum(scores, Score())
    if not total.tokens:
        raise ValueError(f"text is {options.text}: it must have text besides <|endoftext|>")
    result = {"documents": len(scores), "tokens": total.tokens, "bytes": total.bytes, **total.rates()}
    for name, value in result.items():
        print(f"{name.replace('_per_', ' a '):<15}{value:>16{',.4f' if isinstance(value, float) else ','}}")
    if options.out is not None:
        each = [{**dataclasses.asdict(score), **score.rates()} for score in scores]
        of = {"model": str(loaded.checkpoint), "text": options.text}
        write_json(options.out, {**of, **how, **result, "by_document": each})
    return 0


def _tokenizer_of(loaded: "LoadedModel") -> "Tokenizer":
    if loaded.tokenizer is None:
        raise ValueError(
            f"{loaded.checkpoint} was trained without a tokenizer, so it cannot take or give text (a run on token "
            "files has one if --data.tokenizer names it)"
        )
    return loaded.tokenizer


def export(arguments: Sequence[str]) -> int:
    """Run `cs336 export` and return the exit code."""
    parser = make_parser("export", "Write a trained model in another format.")
    parser.add_argument("run", type=str, help="Run folder or checkpoint.")
    parser.add_argument(
        "--format", choices=["hf"], default="hf", help="hf: a folder that AutoModelForCausalLM.from_pretrained loads."
    )
    parser.add_argument("--out", type=str, default=None, help="Folder to write (default: hf in the run folder).")
    parser.add_argument("--overwrite", type=bool, nargs="?", const=True, default=False,
                        help="Also replace a model in --out that is not an earlier export.")  # fmt: skip
    options = parse(parser, arguments)
    from cs336_basics.huggingface import check_export_folder

    from ..training.load import export_run

    if options.out is not None and not options.overwrite:
        try:
            check_export_folder(options.out)
        except ValueError as error:
            raise ValueError(f"{error}, or --overwrite true") from error
    checkpoint, out = export_run(options.run, options.out)
    print(f"{checkpoint} -> {out}")
    return 0


def import_hf(arguments: Sequence[str]) -> int:
    """Run `cs336 import-hf` and return the exit code."""
    parser = make_parser("import-hf", "Make a run folder from a Llama, Qwen 3 or Mistral in Hugging Face's format.")
    parser.add_argument("folder", type=str, help="Folder with config.json and model.safetensors.")
    parser.add_argument("--out", type=str, required=True, help="Run folder to make; train it with --init_from.")
    options = parse(parser, arguments)
    from ..training.load import import_run

    print(f"{options.folder} -> {import_run(options.folder, options.out)}")
    return 0
