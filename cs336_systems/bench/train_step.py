"""The time of one training step of a named size: the training loop as it is, beside Hugging Face's Llama.

Both take the same step: float32 weights, autocast, torch.compile, fused AdamW, random tokens. Ours is
`Trainer.train_step` with everything it does in a real run: batches from a token file, the gradient norm, clipping, and
the wait for it. The peer is compiled as a whole, which is what its users do, and is spared norm, clipping and wait.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cs336_basics.data import token_dtype
from cs336_basics.model import TransformerLM

from ..accounting import training_flops
from ..config import DataConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig
from ..hardware import device_peak_flops, select_device, use_device
from ..kernels.attention import get_attention
from ..training.loop import Trainer
from ..training.metrics import summarise
from .case import Row, append_row, check_row_file

CASE = "train-step"
_PROGRAM = "python -m cs336_systems.bench.train_step"
VARIANTS = ("cs336", "cs336_graph", "hf_llama")


def step_config(model: ModelConfig, **train: Any) -> RunConfig:
    """The run whose step is measured; `train` are fields of TrainConfig."""
    return RunConfig(
        model=model,
        data=DataConfig(source="random"),
        optimizer=OptimizerConfig(implementation="torch_fused"),
        train=TrainConfig(**train),
    )


def measure_cs336(config: RunConfig, warmup: int, steps: int) -> dict[str, Any]:
    """Times of `Trainer.train_step`, step by step."""
    device, shape = use_device(config.train.device), config.model.shape
    tokens = np.random.default_rng(0).integers(0, shape.vocab_size, 1 << 20).astype(token_dtype(shape.vocab_size))
    started = time.perf_counter()
    torch.manual_seed(config.train.seed)
    with device:
        model = TransformerLM(**asdict(shape), attention=get_attention(config.model.attention))
    trainer = Trainer(config, model, tokens, device)
    trainer.train_step()
    _wait(device)
    startup_s = time.perf_counter() - started
    for _ in range(warmup):
        trainer.train_step()
    _wait(device)
    trainer.reset_clock()
    rows = [trainer.train_step() for _ in range(steps)]
    trainer.close()
    times = summarise([row["step_ms"] for row in rows[1:]])  # the first was timed from a device that had nothing to do
    data_wait_ms = float(np.mean([row["data_wait_ms"] for row in rows]))
    return {
        "step_ms": times,
        "startup_s": startup_s,
        "data_wait_ms": data_wait_ms,
        "peak_memory_bytes": trainer.memory_bytes(),
    }


def measure_hf_llama(config: RunConfig, warmup: int, steps: int) -> dict[str, Any]:
    """The mean time of a step of transformers' LlamaForCausalLM of the same shape; one wait for all steps."""
    from transformers import LlamaConfig, LlamaForCausalLM

    device, shape = use_device(config.train.device), config.model.shape
    started = time.perf_counter()
    with device:
        model: Any = LlamaForCausalLM(
            LlamaConfig(  # type: ignore[call-arg]
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
    adamw = config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), adamw.lr, adamw.betas, adamw.eps, weight_decay=adamw.weight_decay, fused=True
    )
    tokens = torch.randint(0, shape.vocab_size, (config.train.batch_size, shape.context_length), device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=config.train.precision == "bf16"):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    _wait(device)
    startup_s = time.perf_counter() - started
    for _ in range(warmup):
        step()
    _wait(device)
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    _wait(device)
    mean = (time.perf_counter() - begin) / steps * 1e3
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {"step_ms": {"mean": mean}, "startup_s": startup_s, "peak_memory_bytes": peak}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(config: RunConfig, variant: str, warmup: int = 5, steps: int = 20) -> Row:
    """One row of a variant: step time, tokens/s, MFU, start-up with compilation, peak memory."""
    metrics = (measure_hf_llama if variant == "hf_llama" else measure_cs336)(config, warmup, steps)
    shape, train = config.model.shape, config.train
    seconds = metrics["step_ms"]["mean"] / 1e3
    peak = device_peak_flops(select_device(train.device), train.precision)
    metrics["tokens_per_s"] = train.batch_size * shape.context_length / seconds
    flops = training_flops(shape, train.batch_size, shape.context_length)
    metrics["mfu"] = flops / seconds / peak if peak else None
    return Row(case=CASE, variant=variant, config=config.to_dict(), metrics=metrics)


def main() -> None:
    """Measure each size and variant in a process of its own, with an empty compiler cache, and append the rows.

    Exits with 1 where one of them failed, with 2 and one line for a wrong option.
    """
    try:
        sys.exit(_main())
    except (ValueError, FileNotFoundError) as error:
        print(f"{_PROGRAM}: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


def _main() -> int:
    parser = argparse.ArgumentParser(prog=_PROGRAM, description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", nargs="+", default=["small", "xl", "2.7B"])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--context_length", type=int, default=1024)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--out", type=Path, default=Path("results/train-step.jsonl"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()

    def config(size: str, variant: str) -> RunConfig:
        return step_config(
            ModelConfig(size=size, context_length=arguments.context_length),
            batch_size=arguments.batch_size,
            compile=not arguments.eager,
            precision=arguments.precision,
            device=arguments.device,
            cuda_graph=variant == "cs336_graph",
        )

    if arguments.one:
        size, variant = arguments.one.split(":")
        append_row(arguments.out, measure(config(size, variant), variant))
        return 0
    for size in arguments.sizes:  # all of them before the first is measured
        for variant in arguments.variants:
            select_device(config(size, variant).train.device)
    check_row_file(arguments.out)
    failed = False
    for size in arguments.sizes:
        for variant in arguments.variants:
            with tempfile.TemporaryDirectory() as cache:
                environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": cache}
                command = [
                    sys.executable,
                    "-m",
                    "cs336_systems.bench.train_step",
                    *sys.argv[1:],
                    "--one",
                    f"{size}:{variant}",
                ]
                code = subprocess.run(command, env=environ).returncode
            if code == 0:
                metrics = json.loads(arguments.out.read_text().splitlines()[-1])["metrics"]
                print(f"{size} {variant}: {json.dumps(metrics)}", flush=True)
            else:
                failed = True
                print(f"{size} {variant}: failed", flush=True)
    return int(failed)


if __name__ == "__main__":
    main()
