"""The case `residuals`: hooks find the counted bytes, and every storage once."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cs336_basics.model import RotaryEmbedding, TransformerBlock
from cs336_basics.shape import ModelShape
from cs336_systems.bench.case import configurations
from cs336_systems.bench.cases import residuals
from cs336_systems.bench.cases.residuals import CASE, ResidualsBench, measure
from cs336_systems.bench.instruments.saved_tensors import Saved, SavedTensors
from cs336_systems.kernels.attention import get_attention
from cs336_systems.planner.accounting import activation_bytes, weight_copy_bytes
from cs336_systems.planner.activations import block_parts
from cs336_systems.planner.job import Job
from cs336_systems.report.views import rows_table

pytestmark = pytest.mark.usefixtures("one_thread")


def quick(**fields: Any) -> ResidualsBench:
    (config,) = configurations(CASE, {"precision": ("fp32",), "attention": ("naive",)}, quick=True)
    return ResidualsBench(**{**config.__dict__, **fields})


def metrics_of(config: ResidualsBench) -> dict[str, Any]:
    return measure(config)[1]


# Counts


@pytest.mark.parametrize("batch_size, context_length", [(1, 16), (3, 24)])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("attention", ["naive", "flash_torch", "sdpa"])
def test_hooks_find_the_counted_bytes(attention: str, precision: str, batch_size: int, context_length: int) -> None:
    how = dict(attention=attention, precision=precision, batch_size=batch_size, context_length=context_length)
    config = quick(**how)
    metrics, shape = metrics_of(config), config.workload.shape
    assert metrics["parts"] == activation_bytes(shape, batch_size, context_length, precision, attention)
    assert metrics["saved_bytes"] == sum(metrics["parts"].values()) == metrics["counted_bytes"]
    assert metrics["weight_copy_bytes"] == weight_copy_bytes(shape, precision)
    assert metrics["input_bytes"] == 4 * batch_size * context_length * shape.d_model
    assert sum(t["count"] * t["bytes"] for t in metrics["tensors"]) == metrics["saved_bytes"]


BLOCK = ModelShape(vocab_size=9, context_length=24, d_model=32, d_ff=64, num_layers=1, num_heads=4)


KERNELS = ("naive", "flash_torch", "auto")
SHAPES: list[dict[str, Any]] = [
    dict(num_kv_heads=2), dict(head_dim=16), dict(num_kv_heads=1, head_dim=12, qk_norm=True), dict(window=5)
]  # fmt: skip
BLOCKS = [
    *((kernel, precision, options) for kernel in KERNELS for precision in ("fp32", "bf16") for options in SHAPES
      if (kernel, options) != ("auto", SHAPES[-1])),  # on a CPU it keeps a mask
    pytest.param("compiled auto", "fp32", SHAPES[0], marks=pytest.mark.slow),
    ("compiled auto", "bf16", SHAPES[2]),
]  # fmt: skip


@pytest.mark.parametrize("attention, precision, options", BLOCKS, ids=str)
def test_blocks_of_other_architectures_save_the_counted_bytes(
    attention: str, precision: Any, options: dict[str, Any]
) -> None:
    shape = dataclasses.replace(BLOCK, **options)
    kernel = attention.removeprefix("compiled ")
    rope = RotaryEmbedding(shape.context_length, shape.head_size)
    block = TransformerBlock(32, 4, 64, rope, get_attention(kernel), **options)
    if is_compiled := kernel != attention:
        torch._dynamo.reset()  # it may have given up on a block in another test
        # The partitioner of inductor, without its code generation.
        block.forward = torch.compile(block.forward, backend="aot_eager_decomp_partition")  # type: ignore[method-assign]
    x = torch.randn(2, shape.context_length, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        block(x).sum().backward()
        with SavedTensors(block, [x], named=not is_compiled) as saved:
            block(x)
    job = Job(shape=shape, batch_size=2, precision=precision, attention=kernel, compile=is_compiled)
    assert saved.bytes("activation") + saved.bytes("input") == sum(block_parts(job).values())
    assert saved.bytes("weight copy") == weight_copy_bytes(shape, precision)


def test_tensors_have_module_and_operation() -> None:
    tensors = {(t["what"], tuple(t["shape"]), t["count"]) for t in metrics_of(quick())["tensors"]}
    assert ("attn softmax", (2, 2, 16, 16), 1) in tensors
    assert ("ln1 rsqrt", (2, 16, 1), 1) in tensors
    assert ("ffn silu", (2, 16, 64), 1) in tensors
    assert ("ffn.w2 linear", (32, 64), 1) in tensors
    flash = metrics_of(quick(attention="flash_torch"))["tensors"]
    assert [t["count"] for t in flash if t["what"] == "attn flash_torch"] == [4, 1]  # q, k, v and o; the logsumexp


def test_compiled_code_saves_less(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()  # it may have given up on a block in another test
    # The partitioner of inductor, without its code generation.
    compile = functools.partial(torch.compile, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(residuals.torch, "compile", compile)
    metrics = metrics_of(quick(compile=True))
    assert set(metrics["parts"]) == {"compiled"}
    assert 0 < metrics["saved_bytes"] < metrics["counted_bytes"]
    assert {t["what"] for t in metrics["tensors"]} == {"compiled"}


# Hooks


def saved_by(module: nn.Module, *inputs: Tensor, autocast: bool = False) -> list[Saved]:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), SavedTensors(module, inputs) as saved:
        module(*inputs)
    return saved.found


def test_a_storage_is_found_once_with_its_first_user() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    x = torch.ones(4, 3, requires_grad=True)
    first, weight, middle = sorted(
        [saved for saved in saved_by(model, x) if saved.module != "2" or saved.kind == "activation"],
        key=lambda saved: ("input", "weight", "activation").index(saved.kind),
    )[:3]
    assert first == Saved("input", "0", "linear", (4, 3), torch.float32, 4 * 3 * 4)
    assert (weight.kind, weight.bytes) == ("weight", 5 * 3 * 4)
    # tanh saves its output, which the next layer reads
    assert middle == Saved("activation", "1", "tanh", (4, 5), torch.float32, 4 * 5 * 4)


class Sliced(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x + 1
        return y[0].exp() * y[1, :2].sum() * y[1]


def test_a_view_keeps_its_whole_storage() -> None:
    found = saved_by(Sliced(), torch.ones(2, 8, requires_grad=True))
    assert [saved.bytes for saved in found if saved.bytes == 2 * 8 * 4] == [64]


@pytest.mark.parametrize("rows", [4, 5])  # 5: input and weight have the same shape
def test_weight_copies_are_recognized(rows: int) -> None:
    found = saved_by(nn.Linear(5, 5, bias=False), torch.randn(rows, 5, requires_grad=True), autocast=True)
    assert sorted((saved.kind, saved.bytes) for saved in found) == [
        ("activation", rows * 5 * 2),
        ("weight copy", 5 * 5 * 2),
    ]


def test_hooks_are_removed() -> None:
    config = quick()
    bench = residuals.BlockBench(config)
    bench.saved()
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in bench.block.modules()]
    assert not any(hooks)


# Tables and errors


def test_the_quick_form_has_a_table_and_the_tensors_of_each_row() -> None:
    rows = list(CASE.measure(configurations(CASE, quick=True)))
    assert [row.status for row in rows] == ["ok"] * 4
    table = rows_table(rows)
    assert "| saved (MiB) | counted (MiB) | ln1 (MiB) | qkv proj (MiB) |" in table
    assert table.count("saved tensors:") == 4
    assert "| attn softmax | 2x2x16x16 | float32 | 1 | 0.003906 |" in table


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["naive", "flash_triton"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_on_a_gpu_the_saved_bytes_stay_allocated(precision: str, attention: str) -> None:
    how = dict(size="small", context_length=256, precision=precision, attention=attention, device="cuda")
    metrics = metrics_of(quick(**how))
    assert metrics["saved_bytes"] == metrics["counted_bytes"]
    output = metrics["input_bytes"]
    assert metrics["held_bytes"] == pytest.approx(
        metrics["saved_bytes"] + metrics["weight_copy_bytes"] + output, rel=0.01
    )
