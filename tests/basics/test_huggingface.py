"""Export and import against the real transformers."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from cs336_basics.generate import generate
from cs336_basics.huggingface import check_export_folder, export_hf, import_hf, read_shape
from cs336_basics.model import TransformerLM
from cs336_basics.shape import ModelShape
from cs336_basics.tokenizer import END_OF_TEXT, Tokenizer

SHAPE = ModelShape(
    vocab_size=300, context_length=48, d_model=64, d_ff=160, num_layers=3, num_heads=4, rope_theta=5000.0
)


LLAMA: dict[str, Any] = dict(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    max_position_embeddings=48,
    rms_norm_eps=1e-5,
)


LLAMA_3 = dict(
    rope_type="llama3", rope_theta=5e5, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=16,
)  # fmt: skip


def build(shape: ModelShape = SHAPE, seed: int = 0) -> TransformerLM:
    torch.manual_seed(seed)
    model = TransformerLM(**dataclasses.asdict(shape))
    with torch.no_grad():  # norms that are all 1 would hide a norm in the wrong place
        for name, parameter in model.named_parameters():
            if "ln" in name:
                parameter.uniform_(0.5, 1.5)
    return model


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["the cat sat on the mat. " * 50], 290)


def check_logits(shape: ModelShape, state: dict[str, torch.Tensor], llama: torch.nn.Module) -> None:
    """Check that our model with this state gives the logits of a Llama."""
    model = TransformerLM(**dataclasses.asdict(shape))
    model.load_state_dict(state)
    tokens = torch.randint(0, shape.vocab_size, (2, shape.context_length))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), llama(tokens).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_transformers_gives_the_same_logits(tmp_path: Path, heads: int, tokenizer: Tokenizer) -> None:
    shape = dataclasses.replace(SHAPE, num_heads=heads)
    model = build(shape)
    export_hf(model.state_dict(), shape, tokenizer, tmp_path)
    llama, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    check_logits(shape, model.state_dict(), llama)


def test_transformers_generates_the_same_greedy_continuation(tmp_path: Path, tokenizer: Tokenizer) -> None:
    model = build()
    export_hf(model.state_dict(), SHAPE, tokenizer, tmp_path)
    llama = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    prompt = [5, 17, 200, 3]
    theirs = llama.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert generate(model, [prompt], 20, temperature=0)[0] == theirs[0, len(prompt) :].tolist()


def test_transformers_tokenizes_the_same(tmp_path: Path, tokenizer: Tokenizer) -> None:
    export_hf(build().state_dict(), SHAPE, tokenizer, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = f"the cat  sat\non a héllo 🎉{END_OF_TEXT} mat , .  "
    assert theirs(text)["input_ids"] == tokenizer.encode(text)
    assert theirs.decode(tokenizer.encode(text)) == text
    assert theirs.eos_token_id == tokenizer.end_of_text_id


def test_an_export_that_cannot_be_written_names_the_file_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(weights: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"")
        raise safetensors.SafetensorError("No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match=r"model\.safetensors could not be written: No space left on device"):
        export_hf(build().state_dict(), SHAPE, None, tmp_path)
    assert not list(tmp_path.iterdir())


def test_all_files_of_an_export_can_be_read_by_the_same_users(tmp_path: Path, tokenizer: Tokenizer) -> None:
    export_hf(build().state_dict(), SHAPE, tokenizer, tmp_path)
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1


def test_export_and_import_are_inverse_to_the_bit(tmp_path: Path, tokenizer: Tokenizer) -> None:
    model = build()
    export_hf(model.state_dict(), SHAPE, tokenizer, tmp_path)
    shape, state, again = import_hf(tmp_path)
    assert shape == SHAPE
    assert again is not None
    assert again.sha256 == tokenizer.sha256
    assert state.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_a_model_made_by_transformers_is_imported(tmp_path: Path) -> None:
    torch.manual_seed(1)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, num_attention_heads=4))
    llama.save_pretrained(tmp_path, max_shard_size="200KB")  # several files
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    shape, state, tokenizer = import_hf(tmp_path)
    assert tokenizer is None
    check_logits(shape, state, llama)


def test_weights_in_another_form_beside_are_not_read(tmp_path: Path) -> None:
    """Mistral's folders also have consolidated.safetensors, with names of its own."""
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, num_attention_heads=4))
    llama.save_pretrained(tmp_path, max_shard_size="200KB")
    safetensors.torch.save_file(
        {"layers.0.attention.wq.weight": torch.ones(64, 64)}, tmp_path / "consolidated.safetensors"
    )
    shape, state, _ = import_hf(tmp_path)
    check_logits(shape, state, llama)
    first = min(tmp_path.glob("model-*"))
    first.unlink()
    with pytest.raises(ValueError, match=rf"{first} cannot be read: No such file"):
        import_hf(tmp_path)


def test_the_length_that_frequencies_are_scaled_from_stays_an_integer(tmp_path: Path) -> None:
    shape = dataclasses.replace(SHAPE, rope_scaling=(32.0, 1.0, 4.0, 16.0))
    export_hf(build(shape).state_dict(), shape, None, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("rope_scaling", "rope_parameters"):
        assert type(config[name]["original_max_position_embeddings"]) is int
    assert import_hf(tmp_path)[0] == shape


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "SmolLM2": (
        "Llama",
        dict(num_attention_heads=9, num_key_value_heads=3, hidden_size=72, tie_word_embeddings=True, rope_theta=1e5),
    ),
    "Llama-3.2": (
        "Llama",
        dict(
            num_attention_heads=8,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            rope_parameters=LLAMA_3,
        ),
    ),
    "TinyLlama": ("Llama", dict(num_attention_heads=8, num_key_value_heads=1)),
    "Qwen3": (
        "Qwen3",
        dict(
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            tie_word_embeddings=True,
            rms_norm_eps=1e-6,
            rope_theta=1e6,
        ),
    ),
    "Mistral-v0.3": (
        "Mistral",
        dict(num_attention_heads=4, num_key_value_heads=2, sliding_window=None, rope_theta=1e6),
    ),
    "Mistral-v0.1": ("Mistral", dict(num_attention_heads=4, num_key_value_heads=2, sliding_window=6)),
}
"""The models that people know, each with its own proportions, made small."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_imported_and_exported_with_the_same_logits_and_text(family: str, tmp_path: Path) -> None:
    name, settings = FAMILIES[family]
    torch.manual_seed(1)
    theirs = getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**LLAMA | settings, bos_token_id=None, eos_token_id=None)
    )
    with torch.no_grad():  # norms that are all 1 would hide a permutation
        for key, parameter in theirs.named_parameters():
            if "norm" in key:
                parameter.uniform_(0.5, 1.5)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="100KB")
    shape, state, _ = import_hf(tmp_path / "theirs")
    check_logits(shape, state, theirs)

    ours = TransformerLM(**dataclasses.asdict(shape))
    ours.load_state_dict(state)
    prompt = [5, 17, 200, 3]
    expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :].tolist()
    assert generate(ours, [prompt], 20, temperature=0)[0] == expected

    export_hf(ours.state_dict(), shape, None, tmp_path / "ours")
    again, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"]
    check_logits(shape, state, again)
    assert import_hf(tmp_path / "ours")[0] == shape


LAST_BLOCK = dict(use_sliding_window=True, head_dim=16, sliding_window=6, max_window_layers=1)


@pytest.mark.parametrize(
    "name, settings, expected",
    [
        ("Mistral", dict(layer_types=["sliding_attention", "full_attention"] * 2), (6, 2)),
        ("Mistral", dict(layer_types=["sliding_attention", *["full_attention"] * 3]), (6, 4)),
        ("Mistral", dict(layer_types=["full_attention"] * 4), (None, 1)),
        ("Mistral", dict(layer_types=["sliding_attention"] * 4), (6, 1)),
        ("Qwen3", dict(use_sliding_window=True, max_window_layers=0), (6, 1)),
        ("Qwen3", dict(use_sliding_window=True), (None, 1)),
        ("Qwen3", dict(layer_types=["full_attention"] * 4), (None, 1)),
    ],
)
def test_the_blocks_that_have_a_window(
    name: str, settings: dict[str, Any], expected: tuple[int | None, int], tmp_path: Path
) -> None:
    """As transformers' AutoModel has them; numbers beyond 28 blocks are Qwen 3's default."""
    torch.manual_seed(1)
    common = LLAMA | dict(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    config = getattr(transformers, f"{name}Config")(**common, sliding_window=6, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | {"model_type": name.lower(), **settings}))
    shape, state, _ = import_hf(tmp_path)
    assert (shape.window, shape.window_every) == expected
    check_logits(shape, state, transformers.AutoModelForCausalLM.from_pretrained(tmp_path))


BOTH: dict[str, Any] = dict(
    attention_bias=False, attention_dropout=0.0, bos_token_id=0, eos_token_id=1, hidden_act="silu", use_cache=True,
    hidden_size=64, intermediate_size=160, num_hidden_layers=2, max_position_embeddings=48, vocab_size=300,
)  # fmt: skip
LLAMAS: dict[str, Any] = BOTH | dict(model_type="llama", mlp_bias=False, pretraining_tp=1, rms_norm_eps=1e-05)
MISTRALS: dict[str, Any] = {name: value for name, value in BOTH.items() if name != "attention_bias"} | dict(
    model_type="mistral", num_attention_heads=4, num_key_value_heads=1, rms_norm_eps=1e-05
)
QWENS: dict[str, Any] = BOTH | dict(
    model_type="qwen3", num_attention_heads=4, num_key_value_heads=2, head_dim=32, rms_norm_eps=1e-06,
    max_window_layers=28, sliding_window=None, use_sliding_window=False, tie_word_embeddings=True,
)  # fmt: skip
OLD_SCALING = {name: value for name, value in LLAMA_3.items() if name != "rope_theta"}
WRITTEN: dict[str, dict[str, Any]] = {
    "Llama-3.2": LLAMAS | dict(
        num_attention_heads=4, num_key_value_heads=1, head_dim=16, rope_theta=5e5, rope_scaling=OLD_SCALING,
        tie_word_embeddings=True, torch_dtype="bfloat16", transformers_version="4.45.0.dev0", eos_token_id=[1, 2],
    ),
    "Llama-3.2, transformers 5": LLAMAS | dict(
        num_attention_heads=4, num_key_value_heads=1, head_dim=16, rope_parameters=LLAMA_3, dtype="bfloat16",
    ),
    "SmolLM2": LLAMAS | dict(
        num_attention_heads=4, num_key_value_heads=2, is_llama_config=True, pad_token_id=None, rope_interleaved=False,
        rope_scaling=None, rope_theta=100000, tie_word_embeddings=True,
        **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}},
    ),
    "TinyLlama": {name: value for name, value in LLAMAS.items() if name != "mlp_bias"} | dict(
        num_attention_heads=8, num_key_value_heads=1, rope_scaling=None, tie_word_embeddings=False,
    ),
    "Qwen3": QWENS | dict(rope_scaling=None, rope_theta=1000000, torch_dtype="bfloat16"),
    "Qwen3, transformers 5": QWENS | dict(
        layer_types=["full_attention"] * 2, rope_parameters={"rope_theta": 1000000, "rope_type": "default"},
    ),
    "Mistral-v0.1": MISTRALS | dict(rope_theta=10000.0, sliding_window=16, tie_word_embeddings=False),
    "Mistral-v0.3": MISTRALS | dict(rope_theta=1e6, sliding_window=None, head_dim=None),
}  # fmt: skip
"""config.json as the models' authors have written it, with smaller sizes."""


@pytest.mark.parametrize("model", WRITTEN)
def test_a_configuration_is_read_as_its_authors_wrote_it(model: str, tmp_path: Path) -> None:
    torch.manual_seed(2)
    (tmp_path / "config.json").write_text(json.dumps(WRITTEN[model]))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(WRITTEN[model]))
    shape, state, _ = import_hf(tmp_path)
    check_logits(shape, state, transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))


@pytest.mark.parametrize("every", [1, 2])
def test_windows_beside_norms_of_queries_and_keys_are_exported_as_qwens(every: int, tmp_path: Path) -> None:
    shape = dataclasses.replace(SHAPE, qk_norm=True, window=4, window_every=every)
    model = build(shape)
    export_hf(model.state_dict(), shape, None, tmp_path)
    check_logits(shape, model.state_dict(), transformers.AutoModelForCausalLM.from_pretrained(tmp_path))
    assert import_hf(tmp_path)[0] == shape
    check_export_folder(tmp_path)


@pytest.mark.parametrize("window", [48, 100])
def test_a_window_that_hides_nothing_is_there_when_the_context_is_made_longer(window: int, tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = transformers.MistralConfig(**LLAMA, num_attention_heads=4, num_key_value_heads=2, sliding_window=window)
    theirs = transformers.MistralForCausalLM(config)
    theirs.save_pretrained(tmp_path / "theirs")
    shape, state, _ = import_hf(tmp_path / "theirs")
    check_logits(dataclasses.replace(shape, context_length=128), state, theirs)
    assert (shape.window, shape.num_windowed) == (window, 0)
    export_hf(state, shape, None, tmp_path / "ours")
    assert import_hf(tmp_path / "ours")[0] == shape
    last = config.to_dict() | dict(model_type="qwen3") | LAST_BLOCK | dict(sliding_window=window)
    (tmp_path / "config.json").write_text(json.dumps(last))
    assert read_shape(tmp_path).window is None  # ours cannot be in the last block alone


def test_a_tied_head_may_be_in_the_file_too(tmp_path: Path) -> None:
    shape = dataclasses.replace(SHAPE, tie_embeddings=True)
    export_hf(build(shape).state_dict(), shape, None, tmp_path)
    weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert import_hf(tmp_path)[0] == shape


def test_windows_that_hugging_face_has_otherwise_are_refused(tmp_path: Path) -> None:
    config = transformers.MistralConfig(**LLAMA, num_attention_heads=4, num_key_value_heads=2).to_dict()
    for name, change, message in (
        ("qwen3", LAST_BLOCK, r"sliding_window is 6 in the blocks \[1\], counted from 0: only a window in all, or "),
        ("mistral", dict(layer_types=["sliding_attention"], sliding_window=6), "layer_types is .* for each of 2$"),
        ("mistral", dict(layer_types=["sliding_attention", "linear"], sliding_window=6), "layer_types is .*'linear'"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | dict(model_type=name) | change))
        with pytest.raises(ValueError, match=message):
            read_shape(tmp_path)
    shape = dataclasses.replace(SHAPE, window=4, window_every=2)
    with pytest.raises(ValueError, match=r"^window_every is 2: it must be 1 without qk_norm"):
        export_hf({}, shape, None, tmp_path / "ours")


@pytest.mark.parametrize("place", ["model.layers.1.self_attn.rotary_emb", "model.rotary_emb"])
def test_rotary_frequencies_among_the_weights_are_left_out(tmp_path: Path, place: str) -> None:
    """Older versions of transformers wrote them."""
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, num_attention_heads=2, rope_theta=5e5))
    llama.save_pretrained(tmp_path)
    weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
    weights[f"{place}.inv_freq"] = torch.ones(16)
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shape, state, _ = import_hf(tmp_path)
    check_logits(shape, state, llama)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_key_value_heads", 3, "num_key_value_heads is 3: it must be a divisor of num_attention_heads, 4"),
        ("num_key_value_heads", 2, r"k_proj.weight has shape \(64, 64\), and config.json means \(32, 64\)"),
        ("attention_bias", True, "attention_bias is True"),
        ("mlp_bias", True, "mlp_bias is True"),
        ("tie_word_embeddings", True, "tie_word_embeddings is True, but lm_head.weight is not model.embed_tokens"),
        ("quantization_config", {"bits": 4}, "quantization_config is {'bits': 4}, and only None can be imported"),
        ("hidden_size", "64", "hidden_size is '64': it must be an integer$"),
        ("num_attention_heads", None, "num_attention_heads is None: it must be an integer$"),
        ("vocab_size", 300.5, "vocab_size is 300.5: it must be an integer$"),
        ("rms_norm_eps", "1e-6", "rms_norm_eps is '1e-6': it must be a number$"),
        ("rms_norm_eps", None, "rms_norm_eps is None: it must be a number$"),
        ("rope_parameters", {"rope_theta": None}, "rope_parameters.rope_theta is None: it must be a number$"),
        ("rope_parameters", {"rope_type": "llama3"}, "factor is None: it must be a number$"),
        ("rope_parameters", {"full_attention": {}}, "rope_parameters has full_attention: parameters for kinds"),
        ("rms_norm_eps", 1, "rms_norm_eps is 1.0: it must be from 0 to below 1$"),
        ("rms_norm_eps", math.nan, "rms_norm_eps is nan: it must be from 0 to below 1$"),
        ("vocab_size", 1 << 25, r"vocab_size is 33554432: it must be from 1 to 2\^24"),
        ("rope_parameters", LLAMA_3 | {"factor": 0}, r"factor, .*\] is \[0.0, .*: it must be 4 numbers above 0"),
        ("rope_parameters", LLAMA_3 | {"low_freq_factor": 4}, "low_freq_factor, .* the second below the third$"),
        ("rope_parameters", {"rope_theta": -1.0}, "rope_parameters.rope_theta is -1.0: it must be above 0 and finite$"),
        ("hidden_act", "gelu", "hidden_act is 'gelu'"),
        ("model_type", "gpt2", "model_type is 'gpt2'"),
        ("head_dim", 32, r"k_proj.weight has shape \(64, 64\), and config.json means \(128, 64\)"),
        ("head_dim", 15, "head_dim is 15: the size of a head must be even"),
        ("model_type", ["llama"], "model_type is .'llama'.: it must be one of llama, mistral, qwen3"),
        ("rope_parameters", {"type": "linear", "factor": 2.0}, "rope_parameters.type is 'linear', and only 'default' "),
        ("rope_parameters", {"rope_type": "yarn", "factor": 4.0}, "rope_parameters.rope_type is 'yarn', and only 'def"),
        ("rope_parameters", {"rope_type": "yarn", "factor": "4"}, "rope_parameters.factor is '4': it must be a number"),
        ("rope_parameters", {"partial_rotary_factor": 0.5}, "rope_parameters.partial_rotary_factor is 0.5, and only 1"),
        ("rope_scaling", {"rope_type": "linear", "factor": 2}, "rope_scaling.rope_type is 'linear'"),
        ("rope_scaling", {"type": "linear", "factor": 2.0}, "rope_scaling.type is 'linear'"),
        ("partial_rotary_factor", 0.5, "partial_rotary_factor is 0.5"),
        ("intermediate_size", 96, r"down_proj.weight has shape \(64, 160\), and config.json means \(64, 96\)"),
        ("num_hidden_layers", 4, r"model.layers.3.\S* has shape none"),
        ("num_hidden_layers", 2, r"model.layers.2.\S* has shape \(64,\), and config.json means none"),
        ("num_attention_heads", 0, "num_attention_heads is 0: it must be at least 1"),
    ],
)
def test_an_unsupported_setting_is_refused_by_name(tmp_path: Path, field: str, value: object, message: str) -> None:
    export_hf(build().state_dict(), SHAPE, None, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(ValueError, match=message):
        import_hf(tmp_path)


def test_a_head_size_that_is_left_out_must_be_whole(tmp_path: Path) -> None:
    export_hf(build().state_dict(), SHAPE, None, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"hidden_size": 66}
    del config["head_dim"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="hidden_size is 66: it must be divisible by num_attention_heads, 4"):
        import_hf(tmp_path)


def test_what_can_be_exported_can_be_imported(tmp_path: Path) -> None:
    shape = dataclasses.replace(SHAPE, norm_eps=0.0)
    export_hf(build(shape).state_dict(), shape, None, tmp_path)
    assert import_hf(tmp_path)[0] == shape


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", " has no model_type: it must be the configuration of a model of type llama, mistral, qwen3"),
        ('{"model_type": "llama"}', " has no vocab_size: it must be the configuration of a model of type llama, "),
        ("{", " is not JSON: "),
        ("[" * 100_000, " is not JSON: "),
    ],
    ids=["empty", "llama", "cut", "nested"],
)
def test_a_broken_configuration_names_the_file_and_the_field(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=f"^{tmp_path / 'config.json'}{message}"):
        import_hf(tmp_path)


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
        import_hf(tmp_path)
    export_hf(build().state_dict(), SHAPE, None, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        import_hf(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no model\.safetensors and no model\.safetensors\.index\.json$"):
        import_hf(tmp_path)
    for content in ("version https://git-lfs", "{}", '{"weight_map": "x"}'):
        (tmp_path / "model.safetensors.index.json").write_text(content)
        with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json cannot be read: it must be a JSON"):
            import_hf(tmp_path)
