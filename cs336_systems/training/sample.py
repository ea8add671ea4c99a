"""A sample of text from a model, also from one whose weights are spread over ranks."""

import contextlib
import logging
from dataclasses import asdict

import torch
from torch import Tensor

from cs336_basics.generate import generate
from cs336_basics.model import TransformerLM
from cs336_basics.tokenizer import Tokenizer

from ..config.run import SampleConfig
from ..kernels.attention import get_attention
from ..parallel import comm
from .loop import Trainer

logger = logging.getLogger(__name__)


def sample_text(model: TransformerLM, tokenizer: Tokenizer, config: SampleConfig) -> str:
    """The prompt and the model's continuation. An empty prompt starts a new document."""
    prompt = tokenizer.encode_prompt(config.prompt)
    with torch.compiler.set_stance("force_eager"):  # compiled, every new length would compile again
        (new,) = generate(
            model,
            [prompt],
            config.max_new_tokens,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            stop_tokens=tokenizer.stop_ids,
            seed=config.seed,
        )
    return config.prompt + tokenizer.decode(new)


def sample_of_trainer(trainer: Trainer, tokenizer: Tokenizer) -> str | None:
    """A sample from the trained model, on rank 0. All ranks call it, because they hold parts of a sharded model."""
    config = trainer.config
    state = trainer.strategy.full_state_dict(to_rank=0) if trainer.strategy.sharded else None
    if comm.rank() != 0:
        return None
    if state is None:
        with trainer.autocast():
            return sample_text(trainer.model, tokenizer, config.sample)
    with contextlib.suppress(torch.OutOfMemoryError), trainer.autocast():
        model = _whole_model(trainer, state, trainer.device, config.model.attention)
        return sample_text(model, tokenizer, config.sample)
    logger.info("sample: drawn on the CPU, %s has no room for the whole model", trainer.device)
    cpu = torch.device("cpu")
    with trainer.autocast(cpu):
        return sample_text(_whole_model(trainer, state, cpu, "auto"), tokenizer, config.sample)


def _whole_model(trainer: Trainer, state: dict[str, Tensor], device: torch.device, attention: str) -> TransformerLM:
    """A single-process model with these weights."""
    with torch.device("meta"):  # neither memory nor time for weights that exist already
        model = TransformerLM(**asdict(trainer.config.model.shape), attention=get_attention(attention))
    model.load_state_dict(state, assign=True)
    for name, buffer in trainer.model.named_buffers():  # the rotary tables, which no state dict contains
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(owner), key, buffer)
    return model.to(device)
