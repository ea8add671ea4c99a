"""Export to and import from Hugging Face's Llama: the same model under other names.

`config.json`, `model.safetensors` and the tokenizer's files make a folder that `LlamaForCausalLM.from_pretrained`
loads. Only the rotary embedding differs: ours rotates the interleaved pairs (2i, 2i+1) of a head, Llama's the pairs
(i, i + D/2). So the rows of the query and key projections are permuted into that order. Scores are sums over a head and
do not change.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from .files import replaced, write_json
from .model import TransformerLM
from .shape import ModelShape
from .tokenizer import END_OF_TEXT, Tokenizer

_NORM_EPS = 1e-5  # of cs336_basics.model.RMSNorm

_SIZES = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
"""Our name -> the name in Llama's config.json."""
_TOP_NAMES = {
    "token_embeddings.weight": "model.embed_tokens.weight",
    "ln_final.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn.q_proj.weight": "self_attn.q_proj.weight",
    "attn.k_proj.weight": "self_attn.k_proj.weight",
    "attn.v_proj.weight": "self_attn.v_proj.weight",
    "attn.output_proj.weight": "self_attn.o_proj.weight",
    "ln1.weight": "input_layernorm.weight",
    "ln2.weight": "post_attention_layernorm.weight",
    "ffn.w1.weight": "mlp.gate_proj.weight",
    "ffn.w2.weight": "mlp.down_proj.weight",
    "ffn.w3.weight": "mlp.up_proj.weight",
}
_TURNED = ("attn.q_proj.weight", "attn.k_proj.weight")


def _names(num_layers: int) -> dict[str, str]:
    """Our name -> Llama's name, of every weight."""
    blocks = {
        f"layers.{i}.{ours}": f"model.layers.{i}.{theirs}"
        for i in range(num_layers)
        for ours, theirs in _BLOCK_NAMES.items()
    }
    return {**_TOP_NAMES, **blocks}


def _to_halves(weight: Tensor, num_heads: int) -> Tensor:
    """Reorder the rows of each head from interleaved pairs to two halves."""
    return weight.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def _to_pairs(weight: Tensor, num_heads: int) -> Tensor:
    """Reorder the rows of each head from two halves to interleaved pairs: the inverse of `_to_halves`."""
    return weight.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def export_hf(
    state_dict: dict[str, Tensor], shape: ModelShape, tokenizer: Tokenizer | None, folder: str | os.PathLike[str]
) -> None:
    """Write config.json, model.safetensors and the tokenizer's files, each complete or not at all.

    The weights keep the type that they have in the state dict, one type for all.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {}
    for ours, theirs in _names(shape.num_layers).items():
        weight = state_dict[ours].detach().cpu()
        weights[theirs] = _to_halves(weight, shape.num_heads) if ours.endswith(_TURNED) else weight.contiguous()
    with replaced(folder / "model.safetensors") as beside:
        try:
            safetensors.torch.save_file(weights, beside, metadata={"format": "pt"})
        except safetensors.SafetensorError as error:  # a full disk, for example
            raise OSError(f"{folder / 'model.safetensors'} could not be written: {error}") from error

    end = None if tokenizer is None else tokenizer.end_of_text_id
    write_json(folder / "config.json", _llama_config(shape, end, weights["lm_head.weight"].dtype))
    # safetensors lets only its owner read a file
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode & 0o777)

    if tokenizer is not None:
        tokenizer.save(folder / "tokenizer.json")
        write_json(
            folder / "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": END_OF_TEXT,
                "eos_token": END_OF_TEXT,
                "model_max_length": shape.context_length,
                "clean_up_tokenization_spaces": False,
            },
        )


def check_export_folder(folder: str | os.PathLike[str]) -> None:
    """Raise ValueError if the folder holds a model that `export_hf` has not written, because it would replace it.

    An earlier export is recognised by the fields of its config.json, which other models lack or exceed.
    """
    try:
        found = json.loads(Path(folder, "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        found = None
    fields = _llama_config(ModelShape(**dict.fromkeys(_SIZES, 1), rope_theta=1.0), None, torch.float32).keys()
    if Path(folder, "model.safetensors").exists() and not (isinstance(found, dict) and found.keys() == fields):
        raise ValueError(f"{folder} holds a model that is no earlier export of ours: give another folder")


def _llama_config(shape: ModelShape, end_of_text_id: int | None, dtype: torch.dtype) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{theirs: getattr(shape, ours) for ours, theirs in _SIZES.items()},
        "num_key_value_heads": shape.num_heads,
        "head_dim": shape.d_model // shape.num_heads,
        "hidden_act": "silu",
        "rms_norm_eps": _NORM_EPS,
        # transformers 5 reads rope_parameters, 4 read rope_theta.
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": end_of_text_id,
        "eos_token_id": end_of_text_id,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def import_hf(folder: str | os.PathLike[str]) -> tuple[ModelShape, dict[str, Tensor], Tokenizer | None]:
    """Read a folder with a Llama model of our kind: shape, state dict in float32 and the tokenizer, if any.

    Raises FileNotFoundError or ValueError naming the file and the field if the model is of another kind: grouped
    queries, tied embeddings, biases, scaled rotary frequencies, another norm epsilon, missing or misshapen weights.
    """
    folder = Path(folder)
    shape = _read_config(folder / "config.json")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} has no .safetensors file")
    weights: dict[str, Tensor] = {}
    for file in files:
        try:
            weights.update(safetensors.torch.load_file(file))
        except (OSError, safetensors.SafetensorError) as error:
            raise ValueError(f"{file} cannot be read: {error}") from error

    with torch.device("meta"):
        model = TransformerLM(**asdict(shape)).state_dict()
    names = _names(shape.num_layers)
    expected = {theirs: tuple(model[ours].shape) for ours, theirs in names.items()}
    # Older versions of transformers also saved the rotary frequencies, which follow from rope_theta.
    found = {name: tuple(w.shape) for name, w in weights.items() if not name.endswith("rotary_emb.inv_freq")}
    for name in sorted(found.keys() | expected.keys()):
        here, there = found.get(name, "none"), expected.get(name, "none")
        if here != there:
            raise ValueError(f"{folder}: {name} has shape {here}, and config.json means {there}")
    state = {ours: weights[theirs].float() for ours, theirs in names.items()}
    state = {name: _to_pairs(w, shape.num_heads) if name.endswith(_TURNED) else w for name, w in state.items()}

    tokenizer_path = folder / "tokenizer.json"
    tokenizer = Tokenizer.load(tokenizer_path) if tokenizer_path.is_file() else None
    if tokenizer is not None and tokenizer.vocab_size > shape.vocab_size:
        raise ValueError(f"{tokenizer_path} has {tokenizer.vocab_size} tokens, config.json says {shape.vocab_size}")
    return shape, state, tokenizer


def _read_config(path: Path) -> ModelShape:
    """The shape in a config.json. Raises FileNotFoundError or ValueError naming the file and the unsupported field."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: a folder with config.json and model.safetensors is needed")
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} is no JSON object: it must be the configuration of a Llama model")
    for name in ("model_type", *_SIZES.values()):
        if name not in config:
            raise ValueError(f"{path} has no {name}: it must be the configuration of a Llama model")
        value = config[name]
        if name != "model_type" and not (_is_positive(value) and isinstance(value, int)):
            raise ValueError(f"{path}: {name} is {value!r}: it must be a positive integer")
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(name) or {}, dict):
            raise ValueError(f"{path}: {name} is {config[name]!r}: it must be an object or null")
    rope = config.get("rope_parameters") or {}
    theta: Any = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    if not _is_positive(theta):
        raise ValueError(f"{path}: rope_theta is {theta!r}: it must be a positive number")
    shape = ModelShape(**{ours: config[theirs] for ours, theirs in _SIZES.items()}, rope_theta=float(theta))
    for name, (accepted, found) in _fixed_settings(config, shape).items():
        if found != accepted:
            raise ValueError(f"{path}: {name} is {found!r}, and only {accepted!r} can be imported")
    return shape


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1 << 63


def _fixed_settings(config: dict[str, Any], shape: ModelShape) -> dict[str, tuple[Any, Any]]:
    """Settings that this model fixes: the accepted value, and the one in config.json or LlamaConfig's default."""
    rope, scaling = (config.get(name) or {} for name in ("rope_parameters", "rope_scaling"))
    heads, head_dim = shape.num_heads, shape.d_model // shape.num_heads
    return {
        "model_type": ("llama", config["model_type"]),
        "num_key_value_heads": (heads, config.get("num_key_value_heads") or heads),
        "head_dim": (head_dim, config.get("head_dim") or head_dim),
        "hidden_act": ("silu", config.get("hidden_act", "silu")),
        "rms_norm_eps": (_NORM_EPS, config.get("rms_norm_eps", 1e-6)),
        "partial_rotary_factor": (1.0, rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))),
        "attention_bias": (False, config.get("attention_bias", False)),
        "mlp_bias": (False, config.get("mlp_bias", False)),
        "tie_word_embeddings": (False, config.get("tie_word_embeddings", False)),
        "rope type": ("default", scaling.get("rope_type", scaling.get("type", rope.get("rope_type", "default")))),
    }
