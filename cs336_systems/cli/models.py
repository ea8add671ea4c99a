"""Commands that use a trained model: `cs336 generate`, `export` and `import-hf`."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..config.checks import without_groups
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
    parser.add_argument("--device", type=str, default="auto", help="auto, cpu, mps, cuda or cuda:N.")
    parser.add_class_arguments(SampleConfig)
    options = vars(parse(parser, arguments))
    from ..machine.hardware import use_device
    from ..training.load import load_model
    from ..training.sample import sample_text

    run = options.pop("run")
    with without_groups():
        device = use_device(options.pop("device"), or_mps=True)
        sampling = SampleConfig(**options)
    loaded = load_model(run)
    text = sample_text(loaded.build(device), tokenizer_of(loaded), sampling)
    print(visible(text) if sys.stdout is not None and sys.stdout.isatty() else text)
    return 0


def tokenizer_of(loaded: "LoadedModel") -> "Tokenizer":
    """The tokenizer of a model. Raises ValueError if it has none."""
    if loaded.tokenizer is None:
        raise ValueError(
            f"{loaded.checkpoint} has no tokenizer, so it cannot take or give text (a run on token files has one if "
            "--data.tokenizer names it, a Hugging Face folder if it holds tokenizer.json)"
        )
    return loaded.tokenizer


def export(arguments: Sequence[str]) -> int:
    """Run `cs336 export` and return the exit code."""
    parser = make_parser("export", "Write a trained model in another format.")
    parser.add_argument("run", type=str, help="Run folder, checkpoint, or Hugging Face folder.")
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
