"""Export to and import from Hugging Face's Llama, Qwen 3 and Mistral: the same models under other names.

`config.json`, `model.safetensors` and the tokenizer's files make a folder that `AutoModelForCausalLM.from_pretrained`
loads. Only the rotary embedding differs: ours rotates the interleaved pairs (2i, 2i+1) of a head, theirs the pairs
(i, i + D/2). So the rows of the query and key projections are permuted into that order, and the weights of their norms.
Scores are sums over a head and do not change.
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
from .tokenizer import COMPANIONS, Tokenizer

_SIZES = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
"""Our name -> the name in config.json."""
OF_HUB = "from the Hub: hf download NAME --local-dir FOLDER"
_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_OPTIONS = {
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "window": "sliding_window",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "rope_scaling": f"[{', '.join(_SCALING)}]",
}
_NUMBERS: dict[str, Any] = {
    **dict.fromkeys((*_SIZES.values(), "num_key_value_heads", "head_dim", "sliding_window", "max_window_layers"), int),
    **dict.fromkeys(("rms_norm_eps", "rope_theta", *_SCALING), int | float),
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
}
"""The architectures that can be imported, with the values that transformers gives to fields that are missing."""
_DEFAULT_NUMBERS = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}
"""The same for all of them; transformers fails if one is null."""
_OF_SOME = {"pad_token_id", "rope_scaling", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}
"""Fields that only some exports have."""
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
    "attn.q_norm.weight": "self_attn.q_norm.weight",
    "attn.k_norm.weight": "self_attn.k_norm.weight",
    "ln1.weight": "input_layernorm.weight",
    "ln2.weight": "post_attention_layernorm.weight",
    "ffn.w1.weight": "mlp.gate_proj.weight",
    "ffn.w2.weight": "mlp.down_proj.weight",
    "ffn.w3.weight": "mlp.up_proj.weight",
}
_TURNED = ("attn.q_proj.weight", "attn.k_proj.weight", "attn.q_norm.weight", "attn.k_norm.weight")


def _names(shape: ModelShape) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Our name -> their name, and the shape, of every weight."""
    with torch.device("meta"):
        ours = TransformerLM(**asdict(shape)).state_dict()
    names = {}
    for name, weight in ours.items():
        block = name.split(".", 2)
        theirs = _TOP_NAMES[name] if name in _TOP_NAMES else f"model.layers.{block[1]}.{_BLOCK_NAMES[block[2]]}"
        names[name] = theirs, tuple(weight.shape)
    return names


def _to_halves(weight: Tensor, head_size: int) -> Tensor:
    """Reorder the rows of each head from interleaved pairs to two halves."""
    return weight.unflatten(0, (-1, head_size // 2, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def _to_pairs(weight: Tensor, head_size: int) -> Tensor:
    """Reorder the rows of each head from two halves to interleaved pairs: the inverse of `_to_halves`."""
    return weight.unflatten(0, (-1, 2, head_size // 2)).transpose(1, 2).flatten(0, 2).contiguous()


def export_hf(
    state_dict: dict[str, Tensor], shape: ModelShape, tokenizer: Tokenizer | None, folder: str | os.PathLike[str]
) -> None:
    """Write config.json, model.safetensors and the tokenizer's files, each complete or not at all.

    The weights keep the type that they have in the state dict, one type for all. Raises ValueError for a model that
    none of theirs equals: with a window in only some blocks, unless queries and keys have norms.
    """
    if shape.window_every > 1 and not shape.qk_norm:
        raise ValueError(f"window_every is {shape.window_every}: it must be 1 without qk_norm, as in older Mistrals")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {}
    for ours, (theirs, _) in _names(shape).items():
        weight = state_dict[ours].detach().cpu()
        weights[theirs] = _to_halves(weight, shape.head_size) if ours.endswith(_TURNED) else weight.contiguous()
    with replaced(folder / "model.safetensors") as beside:
        try:
            safetensors.torch.save_file(weights, beside, metadata={"format": "pt"})
        except safetensors.SafetensorError as error:  # a full disk, for example
            raise OSError(f"{folder / 'model.safetensors'} could not be written: {error}") from error

    ids = {} if tokenizer is None else tokenizer.special_ids
    write_json(folder / "config.json", _config_of(shape, ids, weights["model.embed_tokens.weight"].dtype))
    # safetensors lets only its owner read a file
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode & 0o777)

    for name in COMPANIONS:  # of an earlier export
        (folder / name).unlink(missing_ok=True)
    if tokenizer is not None:
        tokenizer.save(folder / "tokenizer.json")
    if tokenizer is not None and "tokenizer_config.json" not in tokenizer.companions:
        write_json(
            folder / "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": tokenizer.end_of_text,
                "eos_token": tokenizer.end_of_text,
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
    sizes: dict[str, Any] = dict.fromkeys(_SIZES, 1)
    fields = _config_of(ModelShape(**sizes), {}, torch.float32).keys()
    if Path(folder, "model.safetensors").exists() and not (
        isinstance(found, dict) and found.keys() - _OF_SOME == fields
    ):
        raise ValueError(f"{folder} holds a model that is no earlier export of ours: give another folder")


def _config_of(shape: ModelShape, special_ids: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The fields of config.json: of a Qwen 3 if queries and keys have norms, of a Mistral with a window, or a Llama."""
    name = "Qwen3" if shape.qk_norm else "Llama" if shape.window is None else "Mistral"
    window: dict[str, Any] = {} if shape.window is None else {"sliding_window": shape.window}
    if window and shape.qk_norm:
        blocks = range(shape.num_layers)
        kinds = ["full_attention" if i % shape.window_every else "sliding_attention" for i in blocks]
        window |= {"use_sliding_window": True, "max_window_layers": 0, "layer_types": kinds}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": shape.rope_theta}
    if shape.rope_scaling is not None:
        rope |= {"rope_type": "llama3", **dict(zip(_SCALING, shape.rope_scaling, strict=True))}
        rope["original_max_position_embeddings"] = round(shape.rope_scaling[3])  # transformers wants an integer
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": name.lower(),
        **{theirs: getattr(shape, ours) for ours, theirs in _SIZES.items()},
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        # transformers 5 reads rope_parameters, 4 read rope_theta and rope_scaling.
        "rope_theta": shape.rope_theta,
        **({} if shape.rope_scaling is None else {"rope_scaling": rope}),
        "rope_parameters": rope,
        **window,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": shape.tie_embeddings,
        **{"bos_token_id": None, "eos_token_id": None, **special_ids},
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def is_hf_folder(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder has a config.json of Hugging Face's kind."""
    try:
        return "model_type" in json.loads(Path(folder, "config.json").read_bytes())
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def import_hf(folder: str | os.PathLike[str]) -> tuple[ModelShape, dict[str, Tensor], Tokenizer | None]:
    """Read a folder with a Llama, Qwen 3 or Mistral: shape, state dict in float32 and the tokenizer, if any.

    Raises FileNotFoundError or ValueError naming the file and the field if the model is of another kind: with biases,
    windows in other blocks than every so many from the first, another scaling of the rotary frequencies than Llama 3's,
    or missing or misshapen weights.
    """
    folder = Path(folder)
    shape = read_shape(folder)
    weights: dict[str, Tensor] = {}
    for file in _weight_files(folder):
        try:
            weights.update(safetensors.torch.load_file(file))
        except (OSError, safetensors.SafetensorError) as error:
            raise ValueError(f"{file} cannot be read: {error}") from error

    names = _names(shape)
    expected = dict(names.values())
    # Older versions of transformers also saved the rotary frequencies, which follow from rope_theta.
    left_out = ("rotary_emb.inv_freq", "lm_head.weight") if shape.tie_embeddings else ("rotary_emb.inv_freq",)
    found = {name: tuple(w.shape) for name, w in weights.items() if not name.endswith(left_out)}
    for name in sorted(found.keys() | expected.keys()):
        here, there = found.get(name, "none"), expected.get(name, "none")
        if here != there:
            raise ValueError(f"{folder}: {name} has shape {here}, and config.json means {there}")
    embedding = weights["model.embed_tokens.weight"]
    if shape.tie_embeddings and not torch.equal(weights.get("lm_head.weight", embedding), embedding):
        raise ValueError(f"{folder}: tie_word_embeddings is True, but lm_head.weight is not model.embed_tokens.weight")
    state = {ours: weights[theirs].float() for ours, (theirs, _) in names.items()}
    state = {name: _to_pairs(w, shape.head_size) if name.endswith(_TURNED) else w for name, w in state.items()}

    tokenizer_path = folder / "tokenizer.json"
    tokenizer = Tokenizer.load(tokenizer_path) if tokenizer_path.is_file() else None
    if tokenizer is not None and tokenizer.vocab_size > shape.vocab_size:
        raise ValueError(f"{tokenizer_path} has {tokenizer.vocab_size} tokens, config.json says {shape.vocab_size}")
    return shape, state, tokenizer


def _weight_files(folder: Path) -> list[Path]:
    """model.safetensors, or the files of its index: a folder may hold the same weights in another form beside them."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file() or not index.is_file():
        if not whole.is_file():
            raise FileNotFoundError(f"{folder} has no {whole.name} and no {index.name}")
        return [whole]
    try:
        return [folder / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        accepted = "it must be a JSON object whose weight_map names the file of each weight"
        raise ValueError(f"{index} cannot be read: {accepted}") from error


def read_shape(folder: str | os.PathLike[str]) -> ModelShape:
    """The shape in a folder's config.json.

    Raises FileNotFoundError or ValueError naming the file and the unsupported field.
    """
    path = Path(folder, "config.json")
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: a folder with it and model.safetensors is needed ({OF_HUB})")
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    kinds = f"the configuration of a model of type {', '.join(_DEFAULTS)}"
    for name in ("model_type", *_SIZES.values()):
        if name not in config:
            raise ValueError(f"{path} has no {name}: it must be {kinds}")
        if name == "model_type" and config[name] not in [*_DEFAULTS]:
            raise ValueError(f"{path}: model_type is {config[name]!r}: it must be one of {', '.join(_DEFAULTS)}")
    config = {**_DEFAULT_NUMBERS, **_DEFAULTS[config["model_type"]], **config}
    rope: dict[str, Any] = {}
    places: dict[str, str] = {}  # what messages call its keys
    for group in ("rope_parameters", "rope_scaling"):  # the second, older one has the last word, as in transformers
        rope |= config.get(group) or {}
        places |= {name: f"{group}.{name}" for name in config.get(group) or {}}
        if "type" in rope:
            rope["rope_type"], places["rope_type"] = rope.pop("type"), f"{group}.type"
    if nested := [name for name, value in rope.items() if isinstance(value, dict)]:
        raise ValueError(f"{path}: rope_parameters has {nested[0]}: parameters for kinds of layers cannot be imported")
    rope_type = rope.get("rope_type") or "default"
    needed = (*_SIZES.values(), *_DEFAULT_NUMBERS, *(_SCALING if rope_type == "llama3" else ()))
    for name, kind in _NUMBERS.items():
        value = (config | rope).get(name)
        if not isinstance(value, kind) and (value is not None or name in needed):
            accepted = "an integer" if kind is int else "a number"
            raise ValueError(f"{path}: {places.get(name, name)} is {value!r}: it must be {accepted}")
    for name, (accepted, found) in _fixed_settings(config, rope).items():
        if found != accepted:
            raise ValueError(f"{path}: {places.get(name, name)} is {found!r}, and only {accepted!r} can be imported")

    if rope_type not in ("default", "llama3"):
        only = "only 'default' and 'llama3' can be imported"
        raise ValueError(f"{path}: {places['rope_type']} is {rope_type!r}, and {only}")
    window, window_every = _window(path, config)
    scaling: Any = tuple(float(rope[name]) for name in _SCALING) if rope_type == "llama3" else None
    shape = ModelShape(
        **{ours: config[theirs] for ours, theirs in _SIZES.items()},
        num_kv_heads=config.get("num_key_value_heads"),
        head_dim=config.get("head_dim"),
        qk_norm=config["model_type"] == "qwen3",
        window=window,
        window_every=window_every,
        tie_embeddings=config.get("tie_word_embeddings", False),
        norm_eps=float(config["rms_norm_eps"]),
        rope_theta=float((config | rope)["rope_theta"]),
        rope_scaling=scaling,
    )
    names = _SIZES | _OPTIONS
    try:
        shape.check(lambda ours: places.get(names[ours], names[ours]))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return shape


def _window(path: Path, config: dict[str, Any]) -> tuple[int | None, int]:
    """The window and every how many blocks it is. In Qwen 3 the last blocks have it.

    None if no block has one, or if it is as long as the context and in blocks that `ModelShape` cannot describe.
    """
    is_qwen, num_layers = config["model_type"] == "qwen3", config["num_hidden_layers"]
    if config["model_type"] == "llama" or config["sliding_window"] is None:
        return None, 1
    if is_qwen and not config.get("use_sliding_window", False):
        return None, 1
    full, sliding = "full_attention", "sliding_attention"
    first = config["max_window_layers"] if is_qwen else 0
    kinds = config.get("layer_types") or [full if i < first else sliding for i in range(num_layers)]
    if len(kinds) != num_layers or not all(kind in (full, sliding) for kind in kinds):
        raise ValueError(f"{path}: layer_types is {kinds!r}: it must have {full} or {sliding} for each of {num_layers}")
    with_window = [i for i, kind in enumerate(kinds) if kind == sliding]
    window = config["sliding_window"]
    if not with_window:
        return None, 1
    every = (*with_window, num_layers)[1]
    if with_window == [*range(0, num_layers, every)]:
        return window, every  # also if it hides nothing: the context may be made longer
    if window >= config["max_position_embeddings"]:
        return None, 1
    accepted = "only a window in all, or in every so many from the first, can be imported"
    raise ValueError(f"{path}: sliding_window is {window} in the blocks {with_window}, counted from 0: {accepted}")


def _fixed_settings(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings that this model fixes: the accepted value, and the one in config.json or transformers' default."""
    return {
        "hidden_act": ("silu", config.get("hidden_act", "silu")),
        "partial_rotary_factor": (1.0, rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))),
        "attention_bias": (False, config.get("attention_bias", False)),
        "mlp_bias": (False, config.get("mlp_bias", False)),
        "quantization_config": (None, config.get("quantization_config")),
    }
