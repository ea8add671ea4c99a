"""Configurations check their values: a wrong one is a ValueError with field, value and accepted values."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from cs336_basics.shape import ModelShape
from cs336_basics.tokenizer import MIN_VOCAB_SIZE
from cs336_systems.cli.train import parse_run_config
from cs336_systems.config.checks import without_groups
from cs336_systems.config.model import MODEL_SIZES, SIZE_FIELDS
from cs336_systems.config.run import (
    GROUPS,
    CheckpointConfig,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    SampleConfig,
    TrainConfig,
)

NAN, INF = math.nan, math.inf
TINY = dict(vocab_size=300, context_length=16, d_model=32, d_ff=64, num_layers=1, num_heads=2)


# Sizes


def test_sizes_are_the_shapes_of_the_handout() -> None:
    shapes = {
        "small": (768, 3072, 12, 12, 10_000, 256),
        "medium": (1024, 4096, 24, 16, 10_000, 256),
        "large": (1280, 5120, 36, 20, 10_000, 256),
        "xl": (1600, 6400, 48, 25, 10_000, 256),
        "2.7B": (2560, 10240, 32, 32, 10_000, 256),
        "10B": (4608, 12288, 50, 36, 10_000, 256),
        "8B": (4096, 11008, 34, 32, 151_936, 32_768),
    }
    names = ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size", "context_length")
    assert list(MODEL_SIZES) == list(shapes)
    for size, values in shapes.items():
        shape = dict(zip(names, values, strict=True)) | ModelShape.defaults()
        assert ModelConfig(size=size).shape.to_dict() == shape


@pytest.mark.parametrize("field", SIZE_FIELDS)
@pytest.mark.parametrize("size", ["small", "8B"])
def test_a_field_may_repeat_its_size_and_not_contradict_it(size: str, field: str) -> None:
    meant = MODEL_SIZES[size][field]
    assert ModelConfig(size=size, **{field: meant}) == ModelConfig(size=size)
    with pytest.raises(ValueError, match=rf"^model\.{field} is {meant * 2}, but model\.size '{size}' means {meant}"):
        ModelConfig(size=size, **{field: meant * 2})


@pytest.mark.parametrize("size", ["small", "8B"])
def test_vocabulary_and_context_can_be_chosen_beside_a_size(size: str) -> None:
    shape = ModelConfig(size=size, vocab_size=500, context_length=64).shape
    assert (shape.vocab_size, shape.context_length) == (500, 64)
    assert shape.d_model == MODEL_SIZES[size]["d_model"]


@pytest.mark.parametrize("missing", SIZE_FIELDS)
def test_without_a_size_every_field_of_the_shape_is_needed(missing: str) -> None:
    with pytest.raises(ValueError, match=rf"^model\.{missing} is missing: give it, or model\.size \(one of small, "):
        ModelConfig(**{name: value for name, value in TINY.items() if name != missing})


# Impossible values

AT_LEAST_1, AT_LEAST_0, ABOVE_0 = "at least 1", "at least 0", "above 0"


def _cases(group: str, names: str, values: tuple[Any, ...], accepted: str) -> list[tuple[str, str, Any, str]]:
    return [(group, name, value, accepted) for name in names.split() for value in values]


IMPOSSIBLE: list[tuple[str, str, Any, str]] = [
    ("model", "size", "huge", "one of small, medium, large, xl, 2.7B, 10B, 8B"),
    ("model", "size", "", "one of small"),
    *_cases("model", "vocab_size", (0, -1, NAN, 1 << 25), f"from 1 to 2^24, and at least {MIN_VOCAB_SIZE} to train a"),
    *_cases("model", "context_length d_model d_ff num_layers num_heads", (0, -1, NAN), AT_LEAST_1),
    *_cases("model", "rope_theta", (0.0, -1.0, NAN, INF), ABOVE_0),
    ("data", "source", "web", "one of random, stories, text, tinystories"),
    *_cases("data", "valid_fraction", (0.0, 1.0, -0.5, NAN), "above 0 and below 1"),
    *_cases("data", "story_chars", (9_999, -1, NAN), "at least 10000"),
    *_cases("data", "random_tokens", (1, -1, NAN), "at least 2"),
    *_cases("data", "hf_max_bytes", (0, -1, NAN), AT_LEAST_1),
    ("data", "hf_path", "mine", "left out unless data.source is 'hf' (it is 'stories')"),
    *_cases("data", "hf_name hf_split", ("mine",), "left out unless data.source is 'hf' (it is 'stories')"),
    ("data", "hf_max_bytes", 9, "left out unless data.source is 'hf' (it is 'stories')"),
    ("optimizer", "muon_momentum", 0.5, "0.95 unless optimizer.name is 'muon'"),
    ("model", "window_every", 2, "1 without model.window"),
    *_cases("optimizer", "lr min_lr muon_lr weight_decay", (-1e-9, NAN, INF), AT_LEAST_0),
    *_cases("optimizer", "eps", (-1e-9, 0.0, NAN, INF), "at least 1e-20"),
    *_cases("optimizer", "muon_momentum", (-0.1, 1.0, NAN), "at least 0 and below 1"),
    ("optimizer", "name", "sgd", "one of adamw, muon"),
    ("optimizer", "muon_lr", 0.02, "left out unless optimizer.name is 'muon'"),
    *_cases("optimizer", "warmup_steps", (-1, NAN), AT_LEAST_0),
    *_cases("train", "max_steps batch_size gradient_accumulation_steps validation_sequences", (0, -1, NAN), AT_LEAST_1),
    *_cases("train", "validation_interval", (-1, NAN), AT_LEAST_0),
    ("optimizer", "implementation", "sgd", "one of own, torch, torch_foreach, torch_fused, fused"),
    ("train", "precision", "fp4", "one of fp32, bf16, fp16, fp8"),
    ("log", "wandb", "on", "one of off, offline, online"),
    *_cases("train", "max_grad_norm", (0.0, -1.0, NAN), ABOVE_0),
    *_cases("train", "max_minutes", (0.0, -1.0, NAN, INF), ABOVE_0),
    # NumPy refuses negative seeds, and Python's generator treats -1 as 1.
    ("data", "seed", -1, AT_LEAST_0),
    ("train", "seed", -1, AT_LEAST_0),
    *_cases("checkpoint", "keep_last", (0, -1, NAN), AT_LEAST_1),
    *_cases("sample", "max_new_tokens", (-1, NAN), AT_LEAST_0),
    *_cases("sample", "temperature", (-0.1, NAN, INF), AT_LEAST_0),
    *_cases("sample", "top_k", (0, -1, NAN), AT_LEAST_1),
    *_cases("sample", "top_p", (0.0, -0.1, 1.1, NAN, INF), "above 0 and at most 1"),
]


@pytest.mark.parametrize("group, field, value, accepted", IMPOSSIBLE)
def test_an_impossible_value_is_named_with_its_field_and_the_accepted_values(
    group: str, field: str, value: Any, accepted: str
) -> None:
    base = TINY if group == "model" and field != "size" else {}
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        GROUPS[group](**{**base, field: value})
    message = str(caught.value)
    assert message.startswith(f"{group}.{field} is {value!r}: it must be {accepted}")
    assert "\n" not in message


@pytest.mark.parametrize("beta", [-0.1, 1.0, 2.0, NAN, INF])
@pytest.mark.parametrize("place", [0, 1])
def test_each_beta_is_at_least_0_and_below_1(place: int, beta: float) -> None:
    betas = (beta, 0.95) if place == 0 else (0.9, beta)
    with pytest.raises(ValueError, match=rf"^optimizer\.betas\[{place}\] is {beta!r}: it must be at least 0 and below"):
        OptimizerConfig(betas=betas)


TWO_TEXTS = dict(source="text", train_text="x", valid_text="x")
TOGETHER: list[tuple[type, dict[str, Any], str]] = [
    (ModelConfig, TINY | {"num_heads": 3}, r"model\.d_model is 32: .* divisible by model\.num_heads, 3$"),
    (ModelConfig, TINY | {"d_model": 30}, r"model\.d_model / model\.num_heads is 15: .* must be even"),
    (ModelConfig, TINY | {"d_model": 8, "num_heads": 8}, r"model\.d_model / model\.num_heads is 1: .* must be even"),
    *[(TrainConfig, dict(batch_size=batch, gradient_accumulation_steps=parts),
       rf"train\.gradient_accumulation_steps is {parts}: .* divisor of train\.batch_size, {batch}")
      for batch, parts in ((32, 3), (4, 8))],
    *[(DataConfig, {"source": source, field: "a.txt"}, rf"data\.{field} is 'a\.txt': .* left out unless data\.source")
      for source in ("random", "stories", "tinystories") for field in ("train_text", "valid_text")],
    (DataConfig, TWO_TEXTS, r"data\.valid_text is 'x': .* another file than data\.train_text, .*data\.valid_fraction"),
    (DataConfig, TWO_TEXTS | dict(valid_text="y/../x"), "data.valid_text is .*: it must be another file"),
    (RunConfig, dict(model=ModelConfig(**TINY), sample=SampleConfig(max_new_tokens=16)),
     r"sample\.max_new_tokens is 16: .* at most 15, .* model\.context_length, 16"),
    (OptimizerConfig, dict(name="muon", muon_lr=0.02, lr=0.0),
     r"optimizer\.lr is 0\.0: .* above 0 with optimizer\.muon_lr, 0\.02, whose schedule it sets"),
    (RunConfig, dict(model=ModelConfig(**TINY), optimizer=OptimizerConfig(name="muon"),
                     train=TrainConfig(precision="bf16", weight_dtype="bf16")),
     r"train\.weight_dtype is 'bf16': it must be 'fp32' with optimizer\.name 'muon'"),
    (RunConfig, dict(model=ModelConfig(**TINY), run_dir=""), "run_dir is '': it must be a folder, or left out"),
    (RunConfig, dict(model=ModelConfig(**TINY), resume="auto"), "run_dir is null: .* where resume is 'auto'"),
]  # fmt: skip


@pytest.mark.parametrize("cls, values, message", TOGETHER)
def test_values_that_do_not_fit_together_are_named(cls: type, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        cls(**values)


# Values at the edge that are allowed, and defaults


@pytest.mark.parametrize(
    "group, values",
    [
        ("data", dict(story_chars=10_000)),
        ("data", dict(random_tokens=2)),
        ("optimizer", dict(lr=0.0, warmup_steps=0, weight_decay=0.0, eps=1e-20, betas=(0.0, 0.0))),
        ("train", dict(max_steps=1, batch_size=1, validation_interval=0, validation_sequences=1)),
        ("train", dict(max_grad_norm=None)),
        ("checkpoint", dict(checkpointing_interval=0, keep_last=1)),
        ("checkpoint", dict(checkpointing_interval=-1)),
        ("sample", dict(temperature=0.0, top_k=1, top_p=1.0, max_new_tokens=0)),
    ],
)
def test_values_at_the_edge_are_kept_as_given(group: str, values: dict[str, Any]) -> None:
    config = GROUPS[group](**values)
    assert {name: getattr(config, name) for name in values} == values


def test_files_lie_in_the_data_dir_unless_given() -> None:
    data = DataConfig(data_dir="d", valid_tokens="elsewhere.npy")
    assert (data.tokenizer, data.train_tokens, data.valid_tokens) == (
        "d/tokenizer.json",
        "d/train.npy",
        "elsewhere.npy",
    )
    assert DataConfig(source="random").data_dir == "data/random"


@pytest.mark.parametrize(
    "text, folder",
    [
        (None, "data/text"),
        ("input.txt", "data/text/input.txt"),
        ("a/input.parquet", "data/text/a/input.parquet"),
        ("../b/*.txt", "data/text/b/all.txt"),
        ("/c/input", "data/text/c/input"),
    ],
)
def test_each_text_has_a_data_dir_of_its_own(text: str | None, folder: str) -> None:
    assert DataConfig(source="text", train_text=text).data_dir == folder


def test_each_configuration_of_a_dataset_has_a_data_dir_of_its_own() -> None:
    for name in ("20231101.en", "20231101.fr"):
        data = DataConfig(source="hf", hf_path="wikimedia/wikipedia", hf_name=name)
        assert data.data_dir == f"data/hf/wikimedia/wikipedia/{name}"


def test_training_tokens_elsewhere_have_no_default_tokenizer() -> None:
    elsewhere = DataConfig(data_dir="d", train_tokens="mine.npy")
    assert (elsewhere.tokenizer, elsewhere.tokenizer_path) == (None, "d/tokenizer.json")
    named = DataConfig(data_dir="d", train_tokens="mine.npy", tokenizer="d/tokenizer.json")
    assert named.tokenizer == named.tokenizer_path == "d/tokenizer.json"


@pytest.mark.parametrize(
    "policy, checkpointed",
    [
        ("none", None),
        ("block", ("every", 1)),
        ("every_12", ("every", 12)),
        ("groups_3", ("groups", 3)),
        ("first_7", ("first", 7)),
        ("block_but_attention", ("every", 1)),
        ("first_7_but_attention", ("first", 7)),
    ],
)
def test_a_policy_of_checkpointing_is_a_kind_and_a_number(policy: str, checkpointed: tuple[str, int] | None) -> None:
    config = TrainConfig(activation_checkpointing=policy)
    assert (config.checkpointed, config.keeps_attention) == (checkpointed, "attention" in policy)


@pytest.mark.parametrize("policy", ["first_3", "every_3", "groups_3"])
def test_no_more_blocks_are_checkpointed_than_the_model_has(policy: str) -> None:
    model, allowed = ModelConfig(**{**TINY, "num_layers": 2}), policy.replace("3", "2")
    assert RunConfig(model=model, train=TrainConfig(activation_checkpointing=allowed))
    message = f"train.activation_checkpointing is '{policy}': it must be none, .* K from 1 to 2, the number of blocks; "
    with pytest.raises(ValueError, match=f"^{message}all but groups_K may end in _but_attention$"):
        RunConfig(model=model, train=TrainConfig(activation_checkpointing=policy))


def test_an_infinite_gradient_norm_means_no_clipping() -> None:
    assert TrainConfig(max_grad_norm=INF).max_grad_norm is None


def test_the_warm_up_is_a_tenth_of_the_steps_but_at_most_100_unless_given() -> None:
    def warmup(max_steps: int, **optimizer: Any) -> int | None:
        run = RunConfig(
            model=ModelConfig(**TINY), train=TrainConfig(max_steps=max_steps), optimizer=OptimizerConfig(**optimizer)
        )
        return run.optimizer.warmup_steps

    assert [warmup(steps) for steps in (5, 50, 1000, 5000)] == [0, 5, 100, 100]
    assert warmup(50, warmup_steps=20) == 20
    assert warmup(1000, cosine_steps=50) == 5
    with pytest.raises(
        ValueError, match=r"^optimizer\.cosine_steps is 50: it must be at least optimizer\.warmup_steps, 60"
    ):
        warmup(1000, cosine_steps=50, warmup_steps=60)


def test_min_lr_is_a_tenth_of_lr_unless_given() -> None:
    assert OptimizerConfig(lr=0.5).min_lr == 0.05
    assert OptimizerConfig(lr=0.5, min_lr=0.0).min_lr == 0.0
    with pytest.raises(ValueError, match=r"optimizer\.min_lr is 0\.0001: it must be at most optimizer\.lr, 1e-05 "):
        OptimizerConfig(lr=1e-5, min_lr=1e-4)


# Frozen, and through JSON


@pytest.mark.parametrize(
    "optimizer, message",
    [
        (dict(decay_steps=5), r"decay_steps is 5: it must be left out unless optimizer\.schedule is 'wsd'"),
        (dict(schedule="wsd", decay_steps=11, warmup_steps=10), "decay_steps is 11: it must be at most 10, the steps "),
        (dict(schedule="wsd", decay_steps=1, warmup_steps=30), "it must be at most 0, the steps .* 30, leaves of 20"),
    ],
)
def test_a_decay_that_does_not_fit_is_refused(optimizer: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunConfig(model=ModelConfig(**TINY), optimizer=OptimizerConfig(**optimizer), train=TrainConfig(max_steps=20))


@pytest.mark.parametrize("group", [*GROUPS, ""])
def test_a_group_is_frozen_and_keyword_only(group: str) -> None:
    cls = (GROUPS | {"": RunConfig})[group]
    config = cls(**{"model": TINY, "": {"model": ModelConfig(**TINY)}}.get(group, {}))
    field = dataclasses.fields(cls)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, field, None)
    with pytest.raises(TypeError, match="positional"):
        cls("x")


RUNS = {
    "defaults": dict(model=ModelConfig(**TINY)),
    "a size": dict(model=ModelConfig(size="8B")),
    "everything else": dict(
        model=ModelConfig(**{**TINY, "rope_theta": 5e5}, attention="naive"),
        run_dir="runs/é x",
        resume="auto",
        skip_data=True,
        data=DataConfig(source="text", train_text="a b.txt", valid_text="c.txt", valid_fraction=1 / 3, seed=7),
        optimizer=OptimizerConfig(
            implementation="torch_fused", lr=3e-4, min_lr=0.0, warmup_steps=0, betas=(0.8, 0.999), eps=1e-10
        ),
        train=TrainConfig(
            max_steps=5,
            batch_size=6,
            gradient_accumulation_steps=3,
            precision="bf16",
            compile=True,
            skip_nonfinite=True,
        ),
        checkpoint=CheckpointConfig(checkpointing_interval=-1, keep_last=2),
        sample=SampleConfig(prompt='ROMEO: "no"\n\té {a: b}', max_new_tokens=3, top_k=5, top_p=None, temperature=0.0),
        log=LogConfig(tensorboard=True, wandb="offline", wandb_project="p"),
    ),
    "token files elsewhere": dict(
        model=ModelConfig(**TINY),
        data=DataConfig(data_dir="d", tokenizer="d/tokenizer.json", train_tokens="x.npy", valid_tokens="d/valid.npy"),
    ),
    "token files without a tokenizer": dict(
        model=ModelConfig(**TINY), skip_data=True, data=DataConfig(train_tokens="x.npy", valid_tokens="y.npy")
    ),
    "a prompt that looks like JSON": dict(model=ModelConfig(**TINY), sample=SampleConfig(prompt="null")),
    "no clipping": dict(model=ModelConfig(**TINY), train=TrainConfig(max_grad_norm=INF)),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_resolved_form_as_json_parses_to_an_equal_configuration(name: str, tmp_path: Any) -> None:
    config = RunConfig(**RUNS[name])  # type: ignore[arg-type]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config.to_dict()))
    assert parse_run_config(["--config", str(file)]) == (config, False)


def test_the_resolved_form_is_plain_json() -> None:
    config = RunConfig(**RUNS["everything else"])  # type: ignore[arg-type]
    written = json.loads(json.dumps(config.to_dict(), allow_nan=False))
    assert written["model"] == {
        **dict(num_kv_heads=None, head_dim=None, qk_norm=False, tie_embeddings=False, norm_eps=1e-5, rope_scaling=None),
        **dict(window=None, window_every=1),
        **{**TINY, "size": None, "rope_theta": 5e5, "attention": "naive"},
    }
    assert written["data"]["tokenizer"] == "data/text/a b.txt/tokenizer.json"


def _data_of(data: dict[str, Any], file: Any, *arguments: str) -> DataConfig:
    """The data settings of `cs336 train --config FILE ARGUMENTS` if the file contains `data`."""
    file.write_text(json.dumps({"model": TINY, "data": data}))
    return parse_run_config(["--config", str(file), *arguments])[0].data


def test_default_paths_in_a_file_follow_the_command_line(tmp_path: Any) -> None:
    file = tmp_path / "config.json"
    for data in (DataConfig(), DataConfig(source="random"), DataConfig(data_dir="d")):
        resolved = dataclasses.asdict(data)
        assert _data_of(resolved, file) == data
        assert _data_of(resolved, file, "--data.data_dir=new") == dataclasses.replace(
            DataConfig(data_dir="new"), source=data.source
        )
    assert _data_of(dataclasses.asdict(DataConfig()), file, "--data.source=random") == DataConfig(source="random")
    # A folder in the file stays if only the source changes.
    text = dataclasses.asdict(DataConfig(source="text", train_text="a.txt"))
    assert _data_of(text, file, "--data.train_text=b.txt") == DataConfig(source="text", train_text="b.txt")
    found = _data_of(dataclasses.asdict(DataConfig(data_dir="d")), file, "--data.source=random")
    assert found == DataConfig(source="random", data_dir="d")


def test_other_paths_in_a_file_stay(tmp_path: Any) -> None:
    given = DataConfig(data_dir="d", tokenizer="a/t.json", train_tokens="b/x.npy", valid_tokens="d/valid.npy")
    found = _data_of(dataclasses.asdict(given), tmp_path / "config.json", "--data.data_dir=new")
    assert (found.tokenizer, found.train_tokens, found.valid_tokens) == ("a/t.json", "b/x.npy", "new/valid.npy")
    # Without data_dir in the file, no path counts as a default.
    found = _data_of({"train_tokens": "data/stories/train.npy"}, tmp_path / "config.json", "--data.data_dir=new")
    assert (found.train_tokens, found.valid_tokens) == ("data/stories/train.npy", "new/valid.npy")


def test_a_size_on_the_command_line_replaces_the_sizes_in_a_file(tmp_path: Any) -> None:
    file = tmp_path / "config.json"
    for model in (TINY, dataclasses.asdict(ModelConfig(size="small", vocab_size=500))):
        file.write_text(json.dumps({"model": model}))
        found = parse_run_config(["--config", str(file), "--model.size", "medium"])[0].model
        others = {name: model[name] for name in ("vocab_size", "context_length")}
        assert found == ModelConfig(size="medium", **others)
        with pytest.raises(ValueError, match=r"model\.d_model is 8, but model.size 'medium' means 1024"):
            parse_run_config(["--config", str(file), "--model.size=medium", "--model.d_model=8"])


def test_a_default_min_lr_in_a_file_follows_the_command_line(tmp_path: Any) -> None:
    file = tmp_path / "config.json"
    for lr, min_lr, expected in ((1e-3, 1e-4, 3e-6), (1e-3, 2e-5, 2e-5)):
        file.write_text(json.dumps({"model": TINY, "optimizer": {"lr": lr, "min_lr": min_lr}}))
        same = parse_run_config(["--config", str(file)])[0].optimizer
        assert (same.lr, same.min_lr) == (lr, min_lr)
        other = parse_run_config(["--config", str(file), "--optimizer.lr=3e-5"])[0].optimizer
        assert (other.lr, other.min_lr) == (3e-5, expected)


def test_the_data_dir_of_a_run_of_an_earlier_version_is_not_another_texts(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    data = dict(source="text", train_text="a/one.txt", data_dir="data/text/a/one")
    file.write_text(json.dumps({"model": TINY, "data": data}))
    other = parse_run_config(["--config", str(file), "--data.train_text=a/two.txt"])[0].data
    assert other.data_dir == "data/text/a/two.txt"


def test_a_committed_configuration_can_use_data_elsewhere() -> None:
    file = Path(__file__).parents[2] / "results/cpu/demo/config.json"
    data = parse_run_config(["--config", str(file), "--run_dir=new", "--data.data_dir=new/data"])[0].data
    assert data == DataConfig(data_dir="new/data")


@pytest.mark.parametrize(
    "message, ours",
    [
        ("train.precision is 'x': 'fp16' with train.compile", "precision is 'x': 'fp16' with compile"),
        ("model.attention is 'train.flash': no such", "kernel is 'train.flash': no such"),
        ("model.attention is 'x': see a.model.attention", "kernel is 'x': see a.model.attention"),
        ("path is 'a/data.npy'", "path is 'a/data.npy'"),
        ("path is 'data.npy'", "path is 'data.npy'"),
    ],
)
def test_without_groups_renames_fields_but_not_values(message: str, ours: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(ours)}$"), without_groups({"model.attention": "kernel"}):
        raise ValueError(message)


def test_auto_shards_the_gradients_too_unless_they_would_be_sent_for_each_micro_batch() -> None:
    auto, overlap = ParallelConfig(), ParallelConfig(strategy="overlap")
    assert auto.resolved(1) == ParallelConfig(strategy="none")
    assert auto.resolved(2) == ParallelConfig(strategy="fsdp", reshard_after_forward=False)
    in_groups = ParallelConfig(strategy="overlap", bucket_size_mb=100.0, shard_optimizer=True)
    assert auto.resolved(2, micro_batches=4) == in_groups
    assert ParallelConfig(bucket_size_mb=25.0).resolved(2) == dataclasses.replace(in_groups, bucket_size_mb=25.0)
    assert ParallelConfig(shard_optimizer="simple").resolved(2) == dataclasses.replace(
        in_groups, shard_optimizer="simple"
    )
    assert overlap.resolved(2) is overlap
