"""The case `train-step`: one training step as the training loop does it, beside Hugging Face's Llama.

Both have torch.compile, AdamW in one kernel, float32 weights that are updated, and random tokens. Ours is
`Trainer.train_steps` with everything it does in a real run. fp8 is bf16 with FP8 products in the blocks; its MFU is the
share of bf16's peak. The peer is compiled as a whole, as its users do; it casts by autocast, and does without norm,
clipping, wait and fp8.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from ...config.checks import check_types, require, require_at_least, without_groups
from ...config.run import RunConfig
from ...machine.garbage import gc_frozen
from ...machine.hardware import device_peak_flops, select_device, use_device
from ...planner.accounting import training_flops
from ...training.metrics import summarise
from ..case import Case, swept
from ..instruments.timing import wait_for
from ..outcome import each
from ..turns import build_trainer, check_host_memory
from ..workload import model_of, random_run


@dataclass(frozen=True, kw_only=True)
class TrainStepBench:
    """A model, its batch, and its trainer."""

    size: str = swept("small", "xl", "2.7B", quick="quick")
    """Named size of the model, or quick."""
    variant: Literal["cs336", "cs336_graph", "hf_llama"] = swept(
        "cs336", "cs336_graph", "hf_llama", quick=("cs336", "hf_llama")
    )
    """cs336: the training loop. cs336_graph: with a CUDA graph. hf_llama: Hugging Face's model."""
    context_length: int = swept(1024, quick=16)
    """Tokens per sequence."""
    batch_size: int = swept(4)
    """Sequences per batch."""
    precision: Literal["fp32", "bf16", "fp8"] = swept("bf16", quick="fp32")
    """Type of computation; the weights that are updated are float32."""
    compile: bool = swept(True, quick=False)
    """Use torch.compile."""
    device: str = swept("auto", quick="cpu")
    """auto, cpu, cuda or cuda:N."""
    warmup: int = swept(5, quick=1)
    """Steps between the first one, which is the start-up, and the measured ones."""
    steps: int = swept(20, quick=3)
    """Measured steps."""

    def __post_init__(self) -> None:
        check_types(self, "")
        require_at_least(self, "", 0, "warmup")
        require_at_least(self, "", 2, "steps")
        with without_groups():
            self.run_config()
            object.__setattr__(self, "device", str(select_device(self.device)))

    def run_config(self) -> RunConfig:
        names = ("batch_size", "compile", "precision", "device")
        train = {name: getattr(self, name) for name in names}
        model = model_of(self.size, context_length=self.context_length)
        return random_run(model, cuda_graph=self.variant == "cs336_graph", **train)


def check(config: TrainStepBench) -> None:
    """Raise ValueError for the peer in fp8, and for a CUDA graph without a GPU."""
    possible = config.variant != "hf_llama" or config.precision != "fp8"
    require(possible, "precision", config.precision, "fp32 or bf16 with variant hf_llama")
    possible = config.variant != "cs336_graph" or torch.device(config.device).type == "cuda"
    require(possible, "device", config.device, "a GPU with variant cs336_graph")


def hf_llama() -> Any:
    """transformers' LlamaForCausalLM. Raises ValueError without the package."""
    try:
        from transformers import LlamaForCausalLM
    except ImportError as error:
        raise ValueError("variant hf_llama needs the package transformers: pip install transformers") from error
    return LlamaForCausalLM


def hf_llama_step(llama: Any, config: RunConfig, device: torch.device) -> Callable[[], None]:
    """Build a LlamaForCausalLM of the run's shape with its optimizer; returns its step, always on the same tokens."""
    check_host_memory(config, device)
    shape, adamw = config.model.shape, config.optimizer
    with device:
        model: Any = llama(
            llama.config_class(
                vocab_size=shape.vocab_size,
                hidden_size=shape.d_model,
                intermediate_size=shape.d_ff,
                num_hidden_layers=shape.num_layers,
                num_attention_heads=shape.num_heads,
                max_position_embeddings=shape.context_length,
                use_cache=False,
                attn_implementation="sdpa",
            )
        )
    if config.train.compile:
        model = torch.compile(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), adamw.lr, adamw.betas, adamw.eps, weight_decay=adamw.weight_decay, fused=True
    )
    tokens = torch.randint(0, shape.vocab_size, (config.train.batch_size, shape.context_length), device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=config.train.precision != "fp32"):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(config: TrainStepBench) -> tuple[dict[str, Any], dict[str, Any]]:
    """The measured run, and its metrics: step time, tokens/s, MFU, start-up with compilation, peak memory.

    The loop times its steps one by one. The peer's steps have one wait at the end, so only their mean is known.
    """
    run, device = config.run_config(), use_device(config.device)
    is_peer = config.variant == "hf_llama"
    llama = hf_llama() if is_peer else None  # before the clock starts, because our own imports are not timed either
    started = time.perf_counter()
    trainer = None if is_peer else build_trainer(run, device)
    step: Callable[[], Any] = hf_llama_step(llama, run, device) if trainer is None else trainer.train_step
    step()
    wait_for(device)
    metrics: dict[str, Any] = {"startup_s": time.perf_counter() - started}
    for _ in range(config.warmup):
        step()
    wait_for(device)
    with gc_frozen():
        begin = time.perf_counter()
        if trainer is not None:
            trainer.reset_clock()
            rows = list(trainer.train_steps(trainer.position.step + config.steps))
        else:
            for _ in range(config.steps):
                step()
        wait_for(device)
        mean_ms = (time.perf_counter() - begin) / config.steps * 1e3
    if trainer is None:
        metrics["step_ms"] = {"mean": mean_ms}
        metrics["peak_memory_bytes"] = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    else:
        trainer.close()
        metrics["step_ms"] = summarise([row["step_ms"] for row in rows[1:]])  # the first began on an idle device
        metrics["data_wait_ms"] = float(np.mean([row["data_wait_ms"] for row in rows]))
        metrics["peak_memory_bytes"] = trainer.peak_memory_bytes()
    shape, seconds = run.model.shape, metrics["step_ms"]["mean"] / 1e3
    peak = device_peak_flops(device, config.precision)
    metrics["tokens_per_s"] = config.batch_size * shape.context_length / seconds
    flops = training_flops(shape, config.batch_size, shape.context_length)
    metrics["mfu"] = flops / seconds / peak if peak else None
    ran = run.to_dict()
    if is_peer:
        ran["optimizer"]["implementation"] = "torch_fused"
    return {"run": ran}, metrics


CASE = Case(
    name="train-step",
    config=TrainStepBench,
    variant=lambda config: config.variant,
    check=check,
    rows=each(measure),
    isolated=True,
    empty_caches=True,
)
