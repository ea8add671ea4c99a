"""The loss on a text, against the sum over its tokens written out."""

import json
import math
from pathlib import Path

import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st

from cs336_basics.model import TransformerLM
from cs336_basics.tokenizer import Tokenizer, documents_of
from cs336_systems.cli.main import run_command
from cs336_systems.training import train
from cs336_systems.training.evaluate import Score, score_documents, windows

from .helpers import make_config

TEXTS = ["the cat sat on the mat. " * 6, "a", "the dog sat. "]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["the cat sat on the mat. " * 50], 290)


@pytest.fixture(scope="module")
def model() -> TransformerLM:
    torch.manual_seed(0)
    return TransformerLM(vocab_size=300, context_length=8, d_model=16, num_layers=1, num_heads=2, d_ff=32)


@pytest.mark.parametrize("stride", [1, 3, 8])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_every_token_is_predicted_once_from_what_its_window_shows(
    stride: int, batch_size: int, model: TransformerLM, tokenizer: Tokenizer
) -> None:
    found = score_documents(model, tokenizer, TEXTS, 8, stride, batch_size)
    for text, score in zip(TEXTS, found, strict=True):
        ids = [tokenizer.end_of_text_id, *tokenizer.encode(text)]
        nats = 0.0
        for i in range(1, len(ids)):
            windows_before = max(0, math.ceil((i - model.context_length) / stride))
            seen = torch.tensor([ids[windows_before * stride : i]])
            nats -= model(seen)[0, -1].log_softmax(-1)[ids[i]].item()
        assert (score.tokens, score.bytes) == (len(ids) - 1, len(text))
        assert score.nats == pytest.approx(nats, rel=1e-5)


def test_a_document_follows_the_token_that_begins_a_text(model: TransformerLM, tokenizer: Tokenizer) -> None:
    """As Llama's documents do."""
    library = tokenizers.Tokenizer.from_str(tokenizer._tokenizer.to_str())
    library.add_special_tokens(["<s>"])
    begin = library.token_to_id("<s>")
    library.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    [score] = score_documents(model, Tokenizer(library), ["the cat"], 8, 8)
    ids = tokenizer.encode("the cat")
    log_p = model(torch.tensor([[begin, *ids[:-1]]])).log_softmax(-1)
    assert score.tokens == len(ids)
    assert score.nats == pytest.approx(-log_p[0, range(len(ids)), ids].sum().item(), rel=1e-5)


@pytest.mark.parametrize("are_tokens", [False, True])
def test_special_tokens_in_a_document_are_what_the_caller_says(
    are_tokens: bool, model: TransformerLM, tokenizer: Tokenizer
) -> None:
    text = "the<|endoftext|>cat"
    ids = tokenizer.encode(text) if are_tokens else tokenizer.encode_document(text)
    assert (tokenizer.end_of_text_id in ids) == are_tokens
    assert tokenizer.decode(ids) == text
    [score] = score_documents(model, tokenizer, [text], 8, 8, special_tokens=are_tokens)
    assert score.tokens == len(ids)


@given(st.integers(1, 40), st.integers(1, 10), st.data())
def test_windows_count_each_token_once(count: int, length: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, length))
    ids = list(range(count))
    counted = [token for window, first in windows(ids, length, stride) for token in window[first + 1 :]]
    assert counted == ids[1:]
    assert all(len(window) <= length + 1 for window, _ in windows(ids, length, stride))


def test_documents_end_also_where_two_blocks_meet() -> None:
    blocks = ["ab<|endof", "te", "xt|>c<|endoftext|> <|endoftext|>\nd", "e" * 20, "<|endoftext|>\n"]
    assert list(documents_of(blocks)) == ["ab", "c", "\nd" + "e" * 20]


def test_rates() -> None:
    rates = (Score(2, 8, 3 * math.log(2)) + Score(2, 8, 5 * math.log(2))).rates()
    assert rates == pytest.approx(
        dict(
            nats_per_token=2 * math.log(2),
            bits_per_token=2,
            perplexity=4,
            nats_per_byte=math.log(2) / 2,
            bits_per_byte=0.5,
        )
    )


def test_a_stride_beyond_the_context_is_refused(model: TransformerLM, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="stride is 9: it must be from 1 to the context_length, 8"):
        score_documents(model, tokenizer, TEXTS, 8, 9)
    with pytest.raises(ValueError, match="context_length is 9: it must be from 1 to the model's, 8"):
        score_documents(model, tokenizer, TEXTS, 9, 4)


def test_the_command_prints_the_rates_and_writes_every_document_also_on_two_ranks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("<|endoftext|>".join([*TEXTS * 29, *TEXTS[:2]]))  # odd
    data = dict(source="text", train_text=str(text), data_dir=str(tmp_path / "data"))
    run = train(make_config(tmp_path, data=data, train=dict(max_steps=2))).run_dir
    capfd.readouterr()
    words = ("--text", text, "--out", tmp_path / "scores.json", "--device", "cpu", "--stride", "4")
    assert run_command("evaluate", [str(word) for word in (run, *words)]) == 0
    printed = capfd.readouterr().out
    written = json.loads((tmp_path / "scores.json").read_text())
    assert len(written["by_document"]) == written["documents"] == 89
    assert sum(score["nats"] for score in written["by_document"]) == pytest.approx(
        written["nats_per_token"] * written["tokens"]
    )
    assert f"{written['bits_per_byte']:.4f}" in printed
    words = (*words, "--devices", "2", "--out", tmp_path / "two.json")
    assert run_command("evaluate", [str(word) for word in (run, *words)]) == 0
    assert capfd.readouterr().out == printed  # once
    two = json.loads((tmp_path / "two.json").read_text())
    for one_score, score in zip(written.pop("by_document"), two.pop("by_document"), strict=True):
        assert score == pytest.approx(one_score, rel=1e-5)
    assert [two.pop(name) for name in ("model", "text")] == [written.pop(name) for name in ("model", "text")]
    assert two == pytest.approx(written, rel=1e-5)
    records = tmp_path / "text.jsonl"
    records.write_text("".join(json.dumps({"body": each}) + "\n" for each in text.read_text().split("<|endoftext|>")))
    words = ("--text", records, "--text_field", "body", "--device", "cpu", "--stride", "4")
    assert run_command("evaluate", [str(word) for word in (run, *words)]) == 0
    assert capfd.readouterr().out == printed
    plain, gathered = "the cat\r\n", '"the \\ud83d cat"'  # 9 bytes each, as in training
    text.write_bytes(plain.encode())
    records.write_text(f'{{"text": " "}}\n{{"text": {gathered}}}')
    for path in (text, records):
        assert run_command("evaluate", [run, "--text", str(path), "--device", "cpu", "--stride", "4"]) == 0
        documents, _, bytes_ = (line.split()[-1] for line in capfd.readouterr().out.splitlines()[:3])
        assert (documents, bytes_) == ("1", "9")
    records.write_text('{"text": "the cat"}\n{"story": "the cat"}')
    (tmp_path / "empty.txt").write_text("<|endoftext|>")
    for wrong, message in (
        (["--text", records], "text is .*text.jsonl: .*text.jsonl, record 2 has no text in 'text': delete it, or name"),
        (["--text", ""], "text and tasks: give exactly one of the two"),
        (["--text", tmp_path / "empty.txt"], r"text is .*empty.txt: it must have text besides"),
        (["--text", text, "--out", tmp_path], f"out is {tmp_path}, a folder: it must be a JSON file"),
    ):
        with pytest.raises(ValueError, match=message):
            run_command("evaluate", [run, *map(str, wrong), "--device", "cpu"])
