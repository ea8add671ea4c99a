"""Models of other architectures through the whole pipeline: trained, resumed, sampled, from and to Hugging Face."""

import contextlib
import dataclasses
import functools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from cs336_basics.attention import Documents
from cs336_basics.generate import generate
from cs336_basics.huggingface import export_hf, import_hf
from cs336_basics.model import TransformerLM
from cs336_basics.tokenizer import Tokenizer
from cs336_systems.cli.main import run_command
from cs336_systems.cli.train import load_config, parse_run_config
from cs336_systems.config.run import RunConfig, SampleConfig
from cs336_systems.kernels.attention import get_attention
from cs336_systems.training import train
from cs336_systems.training.evaluate import score_documents
from cs336_systems.training.load import export_run, import_run, load_model
from cs336_systems.training.loop import Trainer
from cs336_systems.training.preflight import check_config
from cs336_systems.training.sample import sample_text
from tests.distributed import run_ranks

from .helpers import VOCAB_SIZE, make_config, random_tokens, tiny_trainer

GROUPED = dict(d_model=32, num_heads=4, num_kv_heads=2, head_dim=16, qk_norm=True, tie_embeddings=True)
SCALED = dict(num_heads=4, num_kv_heads=1, rope_scaling=(4.0, 1.0, 4.0, 8.0), norm_eps=1e-6)
WINDOWED = dict(num_heads=4, num_kv_heads=2, num_layers=2, window=5, window_every=2)
MODELS: dict[str, dict[str, Any]] = {
    "grouped, normed, tied": GROUPED,
    "one key head, scaled": SCALED,
    "window": WINDOWED,
}
LLAMA = dict(
    vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True, rms_norm_eps=1e-5,
)  # fmt: skip


@pytest.mark.parametrize(
    "model, precision", [("grouped, normed, tied", "bf16"), ("one key head, scaled", "fp32"), ("window", "bf16")]
)
def test_it_learns_and_goes_on_where_it_stopped(model: str, precision: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = dict(model=MODELS[model], train=dict(precision=precision))
    whole = train(make_config(tmp_path, "whole", **settings))
    half = make_config(tmp_path, "half", **settings | dict(train=dict(precision=precision, max_steps=5)),
                       optimizer=dict(cosine_steps=10))  # fmt: skip
    train(half)
    config = load_config(tmp_path / "half" / "config.json", resume="auto", **{"train.max_steps": 10})
    assert train(config).valid_loss == whole.valid_loss
    half_way, straight = (load_model(tmp_path / name).state_dict for name in ("half", "whole"))
    for name, weight in straight.items():
        assert torch.equal(half_way[name], weight), name


def test_a_tied_weight_is_saved_once_and_stays_tied(tmp_path: Path) -> None:
    config = make_config(tmp_path, model=GROUPED, train=dict(precision="bf16"))
    with tiny_trainer(config) as trainer:
        before = trainer.model.lm_head.weight.clone()
        trainer.train_step()
        assert trainer.model.lm_head.weight is trainer.model.token_embeddings.weight
        assert trainer.model.lm_head.weight.dtype == torch.float32
        assert not torch.equal(trainer.model.lm_head.weight, before)
        assert "lm_head.weight" not in trainer.model.state_dict()


def losses_of_ranks(folder: Path, parallel: dict[str, Any], precision: str) -> list[float]:
    config = make_config(folder, model=GROUPED, train=dict(precision=precision), parallel=parallel)
    with tiny_trainer(config) as trainer:
        rows = [trainer.train_step()["loss"] for _ in range(3)]
        return [*rows, trainer.evaluate(random_tokens(700, seed=1))]


@pytest.mark.parametrize(
    "parallel, precision",
    [
        (dict(strategy="overlap"), "bf16"),
        (dict(strategy="bucketed", shard_optimizer=True), "fp32"),
        (dict(strategy="bucketed", shard_optimizer=True), "bf16"),
        (dict(strategy="fsdp"), "fp32"),
        (dict(strategy="fsdp"), "bf16"),
        (dict(strategy="fsdp_simple"), "fp32"),
    ],
    ids=str,
)
def test_two_ranks_give_the_losses_of_one(parallel: dict[str, Any], precision: str, tmp_path: Path) -> None:
    alone = losses_of_ranks(tmp_path, {}, precision)
    for found in run_ranks(losses_of_ranks, 2, tmp_path, parallel | dict(devices=2), precision):
        assert found == pytest.approx(alone, rel=1e-5 if precision == "fp32" else 5e-3)


def first_losses(config: RunConfig, end_of_text: int) -> list[float]:
    """Of a step, and of an evaluation after it unless the model is compiled, which each form would be anew."""
    model = TransformerLM(**dataclasses.asdict(config.model.shape))
    trainer = Trainer(config, model, random_tokens() % 6, "cpu", end_of_text)
    with contextlib.closing(trainer):
        loss = trainer.train_step()["loss"]
        return [loss] if config.train.compile else [loss, trainer.evaluate(random_tokens(300, seed=1) % 6)]


def losses_of_documents(folder: Path, parallel: dict[str, Any], train: dict[str, Any]) -> list[float]:
    torch.manual_seed(0)
    data = dict(documents=True, source="stories")
    settings: dict[str, Any] = dict(model=WINDOWED, data=data, train=train, parallel=parallel)
    return first_losses(make_config(folder, **settings), end_of_text=3)


def losses_of_strategies(folder: Path, strategies: Sequence[str]) -> list[list[float]]:
    return [losses_of_documents(folder, dict(strategy=strategy, devices=2), {}) for strategy in strategies]


def test_every_way_of_training_keeps_attention_within_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As plain attention with a mask does, which `tests/basics/test_model.py` compares with documents alone."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    expected = losses_of_documents(tmp_path, {}, {})
    torch.manual_seed(0)
    assert first_losses(make_config(tmp_path, model=WINDOWED), end_of_text=3) != pytest.approx(expected, rel=1e-4)
    for way in (dict(activation_checkpointing="groups_2"), dict(loss_chunk_tokens=7)):
        assert losses_of_documents(tmp_path, {}, way) == pytest.approx(expected, rel=1e-5)
    assert losses_of_documents(tmp_path, {}, dict(compile=True)) == pytest.approx(expected[:1], rel=1e-5)
    for of_rank in run_ranks(losses_of_strategies, 2, tmp_path, ("fsdp", "overlap")):
        for found in of_rank:
            assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("attention", ["auto", "naive", "flash_torch"])
def test_documents_of_an_evaluation_in_inference_mode_do_not_reach_training(attention: str, tmp_path: Path) -> None:
    data = dict(documents=True, source="stories")
    config = make_config(tmp_path, model=WINDOWED | dict(attention=attention), data=data)
    model = TransformerLM(**dataclasses.asdict(config.model.shape), attention=get_attention(attention))
    with contextlib.closing(Trainer(config, model, random_tokens() % 6, "cpu", end_of_text=3)) as trainer:
        with torch.inference_mode():
            trainer.evaluate(random_tokens(300, seed=1) % 6)
        before = trainer.model.lm_head.weight.clone()
        trainer.train_step()
        assert not torch.equal(trainer.model.lm_head.weight, before)


def test_documents_need_the_tokenizers_end_of_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^data\.documents is true: it must be false with data\.source 'random'"):
        make_config(tmp_path, data=dict(documents=True))
    for name in ("train", "valid"):
        np.save(tmp_path / f"{name}.npy", random_tokens())
    tokens = {f"{name}_tokens": str(tmp_path / f"{name}.npy") for name in ("train", "valid")}
    with pytest.raises(ValueError, match=r"^data\.documents is true: it must be false without a tokenizer"):
        train(make_config(tmp_path, data=dict(documents=True, source="text", **tokens)))


def test_packed_documents_are_learned_as_they_are_evaluated(tmp_path: Path) -> None:
    """Each after an end of text, which no other document sees."""
    tokenizer = Tokenizer.train(["the cat sat on the mat. " * 20], 280)
    texts = ["the cat sat", "on", "the mat. the cat"]
    model = TransformerLM(300, 64, 32, 2, 2, 48).double()
    scores = score_documents(model, tokenizer, texts, context_length=64, stride=64)
    end = tokenizer.end_of_text_id
    packed = torch.tensor([[i for text in texts for i in (end, *tokenizer.encode(text))]])
    logits = model(packed, documents=Documents.from_tokens(packed, end))
    counts = packed[0, 1:] != end  # an end of text is no part of a document that is evaluated
    nats = torch.nn.functional.cross_entropy(logits[0, :-1][counts], packed[0, 1:][counts], reduction="sum")
    assert nats.item() == pytest.approx(sum(score.nats for score in scores))


@pytest.mark.parametrize("option", [dict(window=4), dict(documents=True)], ids=str)
def test_a_kernel_that_serves_neither_is_named(option: dict[str, Any], tmp_path: Path) -> None:
    of_data = dict(source="stories", **option) if "documents" in option else {}
    groups: dict[str, Any] = dict(data=of_data, model=dict(attention="sdpa_math", **({} if of_data else option)))
    (argument,) = option
    message = rf"^model\.attention is 'sdpa_math': .* the argument {argument}, .*\.{argument} is set$"
    with pytest.raises(ValueError, match=message):
        check_config(make_config(tmp_path, **groups), torch.device("cpu"))


def test_a_window_that_hides_nothing_needs_no_kernel_for_windows(tmp_path: Path) -> None:
    of = functools.partial(dict, attention="sdpa_math", context_length=16)
    config = make_config(tmp_path, model=of(window=16))
    check_config(config, torch.device("cpu"))
    model = TransformerLM(**dataclasses.asdict(config.model.shape), attention=get_attention("sdpa_math"))
    assert model(torch.arange(16)[None] % VOCAB_SIZE).isfinite().all()
    with pytest.raises(ValueError, match=r"^model\.attention is 'sdpa_math': .* the argument window, "):
        check_config(make_config(tmp_path, model=of(window=15)), torch.device("cpu"))


def test_a_kernel_without_windows_is_refused_for_a_loaded_model_with_one(tmp_path: Path) -> None:
    shape = make_config(tmp_path, model=WINDOWED).model.shape
    model = TransformerLM(**dataclasses.asdict(shape))
    export_hf(model.state_dict(), dataclasses.replace(shape, window_every=1), None, tmp_path / "hf")
    loaded = load_model(tmp_path / "hf")
    loaded.build("cpu", "flash_torch")
    kernel = "tests.kernels.test_own_kernels:einsum"
    with pytest.raises(ValueError, match=rf"^model\.attention is '{kernel}': .* the argument window, .* is set$"):
        loaded.build("cpu", kernel)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with a tokenizer, as transformers saves it."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).save_pretrained(folder)
    Tokenizer.train(["the cat sat on the mat. " * 50], 290).save(folder / "tokenizer.json")
    return folder


def test_a_hugging_face_folder_gives_samples_and_a_new_run(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("generate", [str(llama), "--prompt", "the", "--max_new_tokens", "4", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("the")
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 200)
    arguments = [
        *("--init_from", str(llama), "--data.train_text", str(text), "--data.source", "text"),
        *("--data.data_dir", str(tmp_path / "data"), "--run_dir", str(tmp_path / "run"), "--train.device", "cpu"),
        *("--train.max_steps", "3", "--train.batch_size", "2", "--model.context_length", "16"),
    ]
    config, _ = parse_run_config(arguments)
    assert config.model.num_kv_heads == 2
    assert config.model.tie_embeddings
    assert config.data.tokenizer == str(llama / "tokenizer.json")
    result = train(config)
    assert result.step == 3
    shape = load_model(result.run_dir).shape
    assert (shape.kv_heads, shape.context_length) == (2, 16)
    export_run(result.run_dir)
    again = transformers.AutoModelForCausalLM.from_pretrained(Path(result.run_dir) / "hf")
    assert again.config.tie_word_embeddings
    assert again.config.num_key_value_heads == 2


TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = [{"role": "user", "content": "the cat sat"}]


def save_chat_model(folder: Path, eos: int | list[int], old: bool) -> None:
    """A small Llama with a chat's tokenizer. old: as transformers wrote it before chat_template.jinja."""
    torch.manual_seed(0)
    Tokenizer.train(["the cat sat on the mat. " * 50], 290).save(folder / "plain.json")
    plain = tokenizers.Tokenizer.from_file(str(folder / "plain.json"))
    plain.add_special_tokens(["<|im_start|>"])
    begin = [("<|im_start|>", plain.token_to_id("<|im_start|>"))]
    plain.post_processor = tokenizers.processors.TemplateProcessing("<|im_start|> $A", special_tokens=begin)
    plain.save(str(folder / "plain.json"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "plain.json"), bos_token="<|im_start|>", eos_token="<|im_end|>",
        pad_token="<|im_end|>", unk_token="<|endoftext|>", chat_template=TEMPLATE, model_max_length=64,
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    (folder / "plain.json").unlink()
    ids = dict(bos_token_id=tokenizer.bos_token_id, eos_token_id=eos, pad_token_id=tokenizer.pad_token_id)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, **ids))
    llama.generation_config.update(max_new_tokens=9, do_sample=False)
    llama.save_pretrained(folder)
    if old:
        (folder / "chat_template.jinja").unlink()
        (folder / "generation_config.json").unlink()
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
        (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("way", ["import", "init_from", "init_from import"])
def test_a_chat_model_stays_one_through_training(way: str, old: bool, tmp_path: Path) -> None:
    folder, exported = tmp_path / "chat", tmp_path / "exported"
    folder.mkdir()
    save_chat_model(folder, 0, old)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    free = transformers.AutoModelForCausalLM.from_pretrained(folder).generate(prompt, max_new_tokens=9, do_sample=False)
    stop = free[0, prompt.shape[1] + 5].item()  # a token that it comes to
    save_chat_model(folder, [290, stop], old)

    run = folder
    if "import" in way:
        run = tmp_path / "imported"
        import_run(folder, run)
    if "init_from" in way:
        (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 200)
        arguments = [
            *("--init_from", str(run), "--data.train_text", str(tmp_path / "text.txt"), "--data.source", "text"),
            *("--data.data_dir", str(tmp_path / "data"), "--run_dir", str(tmp_path / "run"), "--train.device", "cpu"),
            *("--train.max_steps", "1", "--train.batch_size", "2", "--optimizer.lr", "1e-20"),
        ]
        run = Path(train(parse_run_config(arguments)[0]).run_dir)
    export_run(run, exported)

    again = transformers.AutoTokenizer.from_pretrained(exported)
    assert again.special_tokens_map == tokenizer.special_tokens_map
    for add in (False, True):
        theirs, ours = (
            t.apply_chat_template(CHAT, add_generation_prompt=add, tokenize=False) for t in (tokenizer, again)
        )
        assert ours == theirs
    models = [transformers.AutoModelForCausalLM.from_pretrained(path) for path in (folder, exported)]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        for values in ([model.config for model in models], [model.generation_config for model in models]):
            assert getattr(values[0], name) == getattr(values[1], name), name
    greedy = [model.generate(prompt, max_new_tokens=9, do_sample=False).tolist() for model in models]
    assert greedy[0] == greedy[1]
    new = greedy[0][0][prompt.shape[1] :]
    assert new[-1] == stop
    assert len(new) <= 6
    loaded = load_model(run)
    assert loaded.tokenizer is not None
    ours = generate(loaded.build("cpu"), prompt.tolist(), 9, temperature=0, stop_tokens=loaded.tokenizer.stop_ids)
    assert ours == [new[:-1]]
    texts = tokenizer("the cat", return_tensors="pt")
    greedy = models[0].generate(**texts, max_new_tokens=9, do_sample=False, eos_token_id=None)
    config = SampleConfig(prompt="the cat", max_new_tokens=9, temperature=0)
    loaded.tokenizer.special_ids.clear()
    sample = sample_text(loaded.build("cpu"), loaded.tokenizer, config)
    assert sample == tokenizer.decode(greedy[0, 1:])


def test_a_model_takes_no_tokenizer_but_its_own(llama: Path, tmp_path: Path) -> None:
    """A new one is refused before it is trained; for a model that has lost its own, the user names it."""
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 200)
    tokenizer = tmp_path / "model" / "tokenizer.json"
    shutil.copytree(llama, tmp_path / "model")
    shutil.move(tokenizer, tmp_path / "its.json")
    Tokenizer.train(["a dog ran. " * 50], 290).save(tmp_path / "other.json")

    def run(name: str, **data: str) -> None:
        of_text = dict(source="text", train_text=str(tmp_path / "text.txt"))
        shape = load_model(llama).shape.to_dict()
        config = make_config(tmp_path, name, model=shape, data=of_text | data, train=dict(max_steps=1))
        train(dataclasses.replace(config, init_from=str(tmp_path / "model")))

    with pytest.raises(ValueError, match=r"^data\.tokenizer is .*: it must be the tokenizer\.json that init_from "):
        run("new")
    assert not (tmp_path / "data" / "train.npy").exists()
    run("its", tokenizer=str(tmp_path / "its.json"))
    shutil.move(tmp_path / "its.json", tokenizer)
    other, made = str(tmp_path / "other.json"), (tmp_path / "data" / "train.npy").stat()
    with pytest.raises(ValueError, match=rf"^data\.tokenizer is {other}: it must be that of init_from .*/model, "):
        run("other", tokenizer=other)
    assert (tmp_path / "data" / "train.npy").stat() == made


def test_an_export_over_a_chat_model_leaves_nothing_of_it(tmp_path: Path) -> None:
    save_chat_model(tmp_path, 290, old=False)
    shape, state, tokenizer = import_hf(tmp_path)
    export_hf(state, shape, tokenizer, tmp_path)
    assert (tmp_path / "chat_template.jinja").read_text() == TEMPLATE
    assert tokenizer is not None
    tokenizer.companions.clear()
    export_hf(state, shape, tokenizer, tmp_path)
    assert not (tmp_path / "chat_template.jinja").exists()
    assert not (tmp_path / "generation_config.json").exists()


def test_another_end_of_text_ends_documents(tmp_path: Path) -> None:
    gpt2 = Tokenizer.train(["the cat sat. " * 50], 280)
    gpt2.save(tmp_path / "tokenizer.json")
    text = (tmp_path / "tokenizer.json").read_text()
    for end in ("<|end_of_text|>", "</s>"):
        (tmp_path / "other.json").write_text(text.replace("<|endoftext|>", end))
        other = Tokenizer.load(tmp_path / "other.json")
        assert other.encode("cat<|endoftext|>sat") == gpt2.encode("cat<|endoftext|>sat")
        assert [i for ids in other.encode_stream(["cat<|endoftext|>sat"]) for i in ids] == other.encode(f"cat{end}sat")


@pytest.mark.parametrize("change", [dict(norm_eps=1e-5), dict(tie_embeddings=False), dict(num_kv_heads=None)])
def test_weights_of_another_architecture_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    """Also where the difference is an option that one of the two does not use."""
    first: dict[str, Any] = GROUPED | dict(norm_eps=1e-6)
    train(make_config(tmp_path, "first", model=first, train=dict(max_steps=1)))
    other = make_config(tmp_path, "other", model=first | change)
    with pytest.raises(ValueError, match=rf"is of another run: model\.{next(iter(change))} is"):
        train(dataclasses.replace(other, init_from=str(tmp_path / "first")))


@pytest.mark.parametrize("what", ["run", "checkpoint", "scaled run"])
def test_a_run_and_its_checkpoint_describe_their_model(what: str, tmp_path: Path) -> None:
    run = train(make_config(tmp_path, "first", model=SCALED if "scaled" in what else GROUPED, train=dict(max_steps=1)))
    where = run.checkpoint if what == "checkpoint" else run.run_dir
    config, _ = parse_run_config(["--init_from", str(where), "--data.source", "random"])
    assert config.model.shape == load_model(where).shape


@pytest.mark.parametrize(
    "content, message",
    [(None, "init_from is .*odd', which does not exist: it must be a run"), ("xx", "odd/config.json is not JSON"),
     ("[]", "does not hold a JSON"), ("{}", "model.d_model is missing"),
     ('{"model": 3}', "odd/config.json: model is 3"),
     ('{"model": {"foo": 1}}', "foo.*odd/config.json")],
)  # fmt: skip
def test_a_folder_that_describes_no_model_is_named(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "odd").mkdir()
        (tmp_path / "odd" / "config.json").write_text(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        parse_run_config(["--init_from", str(tmp_path / "odd")])
