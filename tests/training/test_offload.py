"""Activations in host memory: nothing changes but the memory, whenever the copies happen."""

import functools
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cs336_basics.model import TransformerLM
from cs336_basics.shape import ModelShape
from cs336_systems.config.run import RunConfig, TrainConfig
from cs336_systems.kernels.attention import get_attention
from cs336_systems.parallel import comm
from cs336_systems.planner.activations import offloaded_bytes
from cs336_systems.planner.job import Job
from cs336_systems.planner.memory import peak_bytes
from cs336_systems.planner.rows import training_job
from cs336_systems.training import auto, offload
from cs336_systems.training.build import prepare_blocks
from cs336_systems.training.offload import Block, Copier, View, host_memory
from cs336_systems.training.preflight import check_config
from tests.distributed import run_ranks

from .helpers import assert_same_tensors, make_config, random_tokens, tiny_trainer
from .test_blocks import INDUCTOR_WITHOUT_ITS_CODE

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS, GPU = 5, torch.device("cuda", 0)
POLICIES = [
    "none",
    "block",
    "every_2",
    "first_2",
    "groups_1",
    "groups_2",
    "block_but_attention",
    "first_1_but_attention",
]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """All activations of tiny models count as large. Nothing is compiled yet."""
    torch._dynamo.reset()
    monkeypatch.setattr(offload, "copier_of", Copier)  # a new one for each model: nothing is pinned
    if "real_size" not in request.fixturenames:
        monkeypatch.setattr(offload, "SMALLEST_OFFLOADED", 1)


@pytest.fixture
def real_size() -> None:
    """As a user's: `SMALLEST_OFFLOADED` is what it is."""


class LateCopier(Copier):
    """Copies only when the device must wait for it, as a slow link would, and nothing may be freed before that."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.queue: list[tuple[object, list[tuple[weakref.ref, weakref.ref]]]] = []

    def start(self, pairs: list[tuple[Tensor, Tensor]]) -> Any:
        event = object()
        self.queue.append((event, [(weakref.ref(target), weakref.ref(source)) for target, source in pairs]))
        return event

    def wait(self, copied: Any) -> None:
        while copied in [event for event, _ in self.queue]:
            for target, source in self.queue.pop(0)[1]:
                there, here = target(), source()
                assert there is not None, "memory was freed before the copy to it"
                assert here is not None, "memory was freed before the copy from it"
                there.copy_(here)


def model_of(policy: str, count: int, compile: bool = False, **shape: Any) -> TransformerLM:
    torch.manual_seed(0)
    model = TransformerLM(32, 16, 32, LAYERS, 4, 64, attention=get_attention("flash_torch"), **shape)
    how = dict(activation_checkpointing=policy, compile=compile)
    prepare_blocks(model, TrainConfig(activation_offload=f"first_{count}" if count else "none", **how))
    return model


def gradients(model: TransformerLM, steps: int = 2) -> dict[str, Tensor]:
    """Gradients of the last of several steps, and its loss."""
    torch.manual_seed(1)
    for _ in range(steps):
        model.zero_grad()
        tokens = torch.randint(32, (2, 17))
        loss = model(tokens[:, :-1], targets=tokens[:, 1:])
        loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None} | {"loss": loss.detach()}


@pytest.mark.parametrize("copier", [Copier, LateCopier])
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_the_same_to_the_bit(policy: str, copier: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "copier_of", copier)
    truth = gradients(model_of(policy, 0))
    for count in (2, 4) if policy == "groups_2" else (1, 2, 3, 4):
        assert_same_tensors(gradients(model_of(policy, count)), truth)


@pytest.mark.parametrize("policy", ["none", "first_1", "block_but_attention"])
def test_compiled_blocks_too_and_they_share_one_compilation(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=INDUCTOR_WITHOUT_ITS_CODE))
    torch._dynamo.utils.counters.clear()
    truth = gradients(model_of(policy, 0, compile=True))
    for copier in (Copier, LateCopier):
        monkeypatch.setattr(offload, "copier_of", copier)
        assert_same_tensors(gradients(model_of(policy, 2, compile=True)), truth)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # a block, and the last norm


@pytest.mark.slow
def test_inductors_own_code_may_overwrite_what_it_saved() -> None:
    truth = gradients(model_of("none", 0, compile=True))
    assert_same_tensors(gradients(model_of("none", 3, compile=True)), truth)


@pytest.mark.parametrize(
    "count, policy, expected",
    [
        # L - K - 1 = 2 blocks run while one is copied.
        (2, "none", "f0 >0 f1 >1 f2 x0 f3 x1 f4 | b4 <1 b3 <0 b2 b1 b0"),
        # At least one does: the copy of block 3 comes back during the backward pass of the last block.
        (4, "none", "f0 >0 f1 >1 x0 f2 >2 x1 f3 >3 x2 f4 x3 | <3 b4 <2 b3 <1 b2 <0 b1 b0"),
        # Blocks 2 and 3 are the group after the offloaded one; block 4 is the last group.
        (2, "groups_2", "f0 f1 >0 f2 f3 x0 f4 | f4 b4 <0 f2 f3 b3 b2 f0 f1 b1 b0"),
        (4, "groups_2", "f0 f1 >0 f2 f3 >2 x0 f4 x2 | <2 f4 b4 <0 f2 f3 b3 b2 f0 f1 b1 b0"),
    ],
)
def test_copies_begin_and_end_in_their_turn(
    count: int, policy: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """f, b: forward and backward of a block. > and <: a copy begins. x: its memory on the device is free."""
    log, model = [], model_of(policy, count)
    blocks: dict[Block, int] = {}

    class Log(Block):
        def offload(self) -> None:
            super().offload()
            blocks[self] = int(next(entry for entry in reversed(log) if entry[0] == "f")[1:])
            if policy == "groups_2":
                blocks[self] -= 1
            log.append(f">{blocks[self]}")

        def release(self) -> None:
            super().release()
            log.append(f"x{blocks[self]}")

        def prefetch(self) -> None:
            if any(saved.on_device is None for saved in self._by_address.values()):
                log.append(f"<{blocks[self]}")
            super().prefetch()

    def watch(i: int) -> Any:
        def after(module: nn.Module, inputs: Any, output: Tensor) -> None:
            output.register_hook(lambda _: log.append(f"b{i}"))

        return after

    monkeypatch.setattr(offload, "Block", Log)
    for i, layer in enumerate(model.layers):
        layer.ln1.register_forward_pre_hook(lambda *_, i=i: log.append(f"f{i}"))
        if policy == "none":
            layer.register_forward_hook(watch(i))
        else:  # outputs of recomputed blocks are not those that backward passes; their inputs are
            layer.ln1.register_full_backward_hook(lambda *_, i=i: log.append(f"b{i}"))
    tokens = torch.randint(32, (2, 17))
    loss = model(tokens[:, :-1], targets=tokens[:, 1:])
    log.append("|")
    loss.backward()
    # A hook on a block's output that offloading has registered comes before the test's own.
    assert " ".join(log) == expected


def test_a_storage_is_copied_once_and_weights_and_small_tensors_never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "SMALLEST_OFFLOADED", 1024)
    copier, x, weight = Copier(torch.device("cpu")), torch.randn(16, 32), torch.randn(64, 64)
    block = Block(copier, {weight.untyped_storage().data_ptr()})
    views = [x, x.T, x[3:, ::2], x.view(8, 64).unflatten(1, (8, 8)).transpose(0, 1)]
    packed: list[Any] = [block.pack(view) for view in views]
    assert len({id(each.saved) for each in packed}) == 1
    stays = [weight.T, torch.randn(255), x.to("meta")]
    assert all(block.pack(tensor) is tensor for tensor in stays)
    block.offload()
    block.release()
    assert packed[0].saved.on_device is None
    truth = [view.clone() for view in views]
    x.fill_(torch.nan)
    for each, view, right in zip(packed, views, truth, strict=True):
        assert isinstance(each, View)
        found = block.unpack(each)
        assert torch.equal(found, right)
        assert (found.stride(), found.storage_offset()) == (view.stride(), view.storage_offset())
    assert copier._free == {2048: []}
    del packed, each
    assert [len(buffers) for buffers in copier._free.values()] == [1]


def test_a_models_weights_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: set[int] = set()

    class Seen(Block):
        def pack(self, tensor: Tensor) -> Tensor | View:
            if isinstance(packed := super().pack(tensor), View):
                copied.add(tensor.untyped_storage().data_ptr())
            return packed

    monkeypatch.setattr(offload, "Block", Seen)
    model = model_of("none", 2)
    gradients(model, steps=1)
    assert copied
    assert copied.isdisjoint(p.untyped_storage().data_ptr() for p in model.parameters())


def test_memory_that_is_dropped_on_its_way_back_is_not_free_before_the_copy() -> None:
    copier = LateCopier(torch.device("cpu"))
    block = Block(copier, set())
    packed = block.pack(torch.randn(64))
    block.offload()
    block.release()
    block.prefetch()
    assert len(copier.queue) == 1
    del packed  # as if the rest of the backward pass had failed
    assert copier.queue == []


def test_host_memory_is_reused_from_step_to_step_even_without_a_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(offload, "host_memory", lambda n, **how: sizes.append(n) or host_memory(n, **how))
    model = model_of("every_2", 3)
    gradients(model, steps=1)
    first = sum(sizes)
    assert first > 0
    tokens = torch.randint(32, (2, 16))
    model(tokens)  # its graph is dropped
    with torch.no_grad():
        model(tokens)
    gradients(model, steps=3)
    assert sum(sizes) == first


@pytest.mark.usefixtures("real_size")
@pytest.mark.parametrize(
    "policy, attention, compile",
    [
        ("none", "sdpa", False),
        ("none", "sdpa", True),
        ("block", "sdpa", False),
        pytest.param("block", "sdpa", True, marks=pytest.mark.slow),  # keeps the input alone, compiled or not
        ("block_but_attention", "sdpa", False),
        ("block_but_attention", "sdpa", True),
        ("none", "naive", False),
        ("none", "naive", True),
    ],
)
def test_the_plan_counts_the_bytes_in_host_memory(
    policy: str, attention: str, compile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T d numbers of 4 bytes are the smallest that is copied; 1/rms and logsumexp stay."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=INDUCTOR_WITHOUT_ITS_CODE))
    sizes: list[int] = []
    monkeypatch.setattr(offload, "host_memory", lambda n, **how: sizes.append(n) or host_memory(n, **how))
    torch._dynamo.reset()
    shape = ModelShape(
        vocab_size=32, context_length=1024, d_model=256, num_layers=2, num_heads=2, d_ff=256, rope_theta=1e4
    )
    model = TransformerLM(32, 1024, 256, 2, 2, 256, attention=get_attention(attention))
    how: Any = dict(activation_checkpointing=policy, activation_offload="first_1", compile=compile)
    prepare_blocks(model, TrainConfig(**how))
    model(torch.randint(32, (1, 1024)))
    job = Job(shape=shape, batch_size=1, precision="fp32", attention=attention, **how)
    assert sum(sizes) == sum(offloaded_bytes(job)) >= 2**20
    assert min(sizes) >= 2**20


# Failures


def test_a_copy_that_fails_is_an_error_and_the_next_step_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    model, start = model_of("none", 2), Copier.start
    truth = gradients(model)
    for failing in range(1, 5):  # two copies to host memory, two back
        count = 0

        def fail(self: Copier, pairs: Any) -> Any:
            nonlocal count
            count += 1
            if count == failing:  # noqa: B023
                raise RuntimeError("the copy failed")
            return start(self, pairs)

        with monkeypatch.context() as patched:
            patched.setattr(Copier, "start", fail)
            with pytest.raises(RuntimeError, match="the copy failed"):
                gradients(model)
        assert_same_tensors(gradients(model), truth)


def test_host_memory_that_is_not_to_be_had_is_named() -> None:
    with pytest.raises(
        torch.OutOfMemoryError, match=r"^train\.activation_offload: .* MiB more .*: offload fewer blocks"
    ):
        host_memory(1 << 60, is_pinned=False)


# The configuration


@pytest.mark.parametrize("policy", ["first_0", "first", "all", "", "first_1_but_attention", "block"])
def test_an_unknown_policy_is_refused(policy: str) -> None:
    with pytest.raises(ValueError, match=r"^train\.activation_offload is .*: it must be none, auto or first_K"):
        TrainConfig(activation_offload=policy)


@pytest.mark.parametrize(
    "policy, checkpointing, accepted",
    [
        ("first_4", "none", "K below 4, because the backward pass begins with the last block"),
        ("first_1", "groups_2", "a multiple of 2, with train.activation_checkpointing 'groups_2'"),
    ],
)
def test_blocks_that_cannot_be_offloaded_are_refused(
    policy: str, checkpointing: str, accepted: str, tmp_path: Path
) -> None:
    how = dict(activation_offload=policy, activation_checkpointing=checkpointing)
    with pytest.raises(ValueError, match=rf"^train\.activation_offload is '{policy}': .*{accepted}"):
        make_config(tmp_path, model=dict(num_layers=4), train=how)
    assert make_config(tmp_path, model=dict(num_layers=4), train=how | {"activation_offload": "auto"})


def on_gpu(folder: Path, policy: str = "auto", **groups: Any) -> RunConfig:
    """A run for a GPU whose activations are larger than its state."""
    model = dict(num_layers=6, d_model=64, context_length=1024, d_ff=256, attention="sdpa") | groups.pop("model", {})
    how = dict(batch_size=16, activation_offload=policy, compile=False) | groups.pop("train", {})
    return make_config(folder, model=model, train=how, **groups)


def job_on(config: RunConfig, policy: str) -> Job:
    run = config.to_dict()
    return training_job(
        "train-step", "", run | {"train": run["train"] | {"activation_offload": policy, "cuda_graph": True}}
    )


@pytest.fixture
def gpu_memory(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    memory = {"cuda": 1e12, "cpu": 1e12}
    monkeypatch.setattr(auto, "memory_bytes", lambda device: memory[device.type])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    return memory


def test_auto_takes_the_fewest_blocks_that_fit(
    gpu_memory: dict[str, float], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config = on_gpu(tmp_path)
    peaks = {policy: peak_bytes(job_on(config, policy)) for policy in ("none", *(f"first_{k}" for k in range(1, 6)))}
    assert peaks["none"] > peaks["first_1"] > peaks["first_2"] > peaks["first_3"]
    for policy in ("none", "first_1", "first_2", "first_3"):
        gpu_memory["cuda"] = peaks[policy] / 0.9 + 1
        assert auto.choose_offload(config, GPU)[0] == policy
        assert auto.resolve(config, GPU).train.activation_offload == policy
        assert f"activation_offload {policy}: " in caplog.messages[-1]
    gpu_memory["cuda"] = min(peaks.values()) / 0.9 - 1
    with pytest.raises(ValueError, match=r"^train\.activation_offload is 'auto': .* even with first_5"):
        check_offload(config)


def check_offload(config: RunConfig) -> None:
    auto.choose_offload(config, GPU)


def test_auto_needs_a_plan(gpu_memory: dict[str, float], tmp_path: Path) -> None:
    for groups in (
        dict(train=dict(gradient_accumulation_steps=2)),
        dict(model=dict(attention="tests.training.test_blocks:counted")),
    ):
        with pytest.raises(ValueError, match=r"^train\.activation_offload is 'auto': .* for a run without a plan"):
            check_offload(on_gpu(tmp_path, **groups))
        assert auto.choose_offload(on_gpu(tmp_path, "first_2", **groups), GPU)[0] == "first_2"


def test_the_plan_is_of_the_strategy_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm, "world_size", lambda: 2)
    monkeypatch.setattr(comm, "by_nccl", lambda device: True)
    for micro_batches, given, strategy in ((1, "auto", "fsdp"), (2, "auto", "overlap"), (1, "torch_ddp", "torch_ddp")):
        train = dict(gradient_accumulation_steps=micro_batches)
        config = on_gpu(tmp_path, "first_2", train=train, parallel=dict(devices=2, strategy=given))
        job = auto.planned_job(config.resolved_for(2), GPU)
        assert (job.strategy, job.cuda_graph) == (strategy, given == "auto")


def test_too_little_host_memory_is_said_before_the_run(
    gpu_memory: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = on_gpu(tmp_path, "first_2")
    needed = sum(offloaded_bytes(job_on(config, "first_2")))
    assert needed > 2**20
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    gpu_memory["cpu"] = 2 * needed
    policy, note = auto.choose_offload(config, GPU)
    assert policy == "first_2"
    assert note.startswith(f"activation_offload first_2: {needed / 2**30:.2f} GiB of pinned host memory a GPU")
    assert "a link of 53.5 GB/s is too slow to hide the copies: the step waits" in note
    gpu_memory["cpu"] -= 1
    with pytest.raises(
        ValueError, match=r"^train\.activation_offload is 'first_2': it must be fewer blocks: .* each of 2"
    ):
        check_offload(config)


def test_a_cpu_says_that_it_saves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cpu = torch.device("cpu")
    with caplog.at_level("INFO"):
        assert auto.resolve(on_gpu(tmp_path), cpu).train.activation_offload == "none"
        assert caplog.messages == []
        config = on_gpu(tmp_path, "first_2")
        check_config(config, cpu)
        assert auto.resolve(config, cpu).train.activation_offload == "first_2"
    assert caplog.messages == [
        "train.activation_offload is 'first_2': it saves nothing on cpu, whose memory is the host's"
    ]


# Several ranks


def trained(
    config_groups: list[dict[str, Any]], device: str = "cpu", steps: int = 2
) -> list[tuple[dict[str, Tensor], list[float]]]:
    """For each configuration: the weights after some steps of two micro-batches, and the losses."""
    offload.SMALLEST_OFFLOADED, found = 1, []  # in a process of its own
    for groups in config_groups:
        config = make_config(Path("unused"), **groups)
        with tiny_trainer(config, random_tokens(), device) as trainer:
            losses = [trainer.train_step()["loss"] for _ in range(steps)]
            state = {name: tensor.cpu().clone() for name, tensor in trainer.strategy.full_state_dict().items()}
            found.append((state, losses))
    return found


EACH = ["none", "groups_2", "block", "first_1_but_attention"]
RANKS: list[tuple[dict[str, Any], list[str]]] = [
    (dict(strategy="overlap"), ["none"]),
    (dict(strategy="bucketed", shard_optimizer=True), ["groups_2"]),
    (dict(strategy="fsdp"), EACH),
    (dict(strategy="fsdp", reshard_after_forward=False), ["none"]),
    (dict(strategy="fsdp_simple"), ["groups_2"]),
    (dict(strategy="torch_ddp"), ["none"]),
]
"""Strategies, with the policies of checkpointing. FSDP gathers weights again to recompute: it has every policy."""


def test_several_ranks_learn_the_same_to_the_bit() -> None:
    """With all strategies in one process group."""
    train = dict(batch_size=8, gradient_accumulation_steps=2, precision="bf16")
    groups = [
        dict(parallel=parallel, model=dict(num_layers=3), train=train | how | dict(activation_checkpointing=policy))
        for parallel, policies in RANKS
        for policy in policies
        for how in (dict(), dict(activation_offload="first_2"))
    ]
    for results in run_ranks(trained, 2, groups):
        for i, (weights, losses) in enumerate(results[::2]):
            same_weights, same_losses = results[2 * i + 1]
            assert same_losses == losses, groups[2 * i]
            assert_same_tensors(same_weights, weights)
