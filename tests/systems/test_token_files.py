"""Token files of the user's own, and their tokenizer."""

import functools
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cs336_basics.tokenizer import Tokenizer
from cs336_systems.training.prepare import prepare_data
from tests.systems.preparation import (
    VALID_TEXT,
    contents,
    random_config,
    run_config,
    stories_config,
    text_config,
)

# Token files as they are

NO_TOKENIZER = "data: no tokenizer is known for {}, so no text will be sampled: give --data.tokenizer"


def test_skip_data_takes_files_given_by_path_and_needs_no_tokenizer(
    two_texts: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids = np.arange(100, dtype=np.uint16)
    np.save("x.npy", ids)
    np.save("y.npy", ids[::-1].astype(np.uint32))
    with caplog.at_level(logging.INFO, "cs336_systems"):
        data = prepare_data(run_config(skip_data=True, train_tokens="x.npy", valid_tokens="y.npy"))
    assert np.array_equal(data.train, ids)
    assert np.array_equal(data.valid, ids[::-1])
    assert data.tokenizer is None
    assert caplog.messages == ["data: as it is (--skip_data)", NO_TOKENIZER.format("x.npy")]
    assert {p.name for p in two_texts.iterdir()} == {"input.txt", "valid.txt", "x.npy", "y.npy"}


@pytest.fixture
def own_tokens(two_texts: Path) -> dict[str, str]:
    """Token files without a sidecar, beside the data of an earlier run that have nothing to do with them."""
    prepare_data(text_config())
    for name in ("x.npy", "y.npy"):
        np.save(name, np.arange(100, dtype=np.uint16))
    return dict(train_tokens="x.npy", valid_tokens="y.npy")


@pytest.mark.parametrize("skip_data", [True, False])
def test_token_files_of_ones_own_have_the_tokenizer_that_is_named_or_none(
    own_tokens: dict[str, str], caplog: pytest.LogCaptureFixture, skip_data: bool
) -> None:
    before = contents()
    # A text that has changed would have the tokenizer made again, if that were of any use here.
    config = functools.partial(text_config, train_text="valid.txt", skip_data=skip_data, **own_tokens)
    assert prepare_data(config()).tokenizer is None
    assert NO_TOKENIZER.format("x.npy") in caplog.messages
    caplog.clear()
    named = prepare_data(config(tokenizer="d/tokenizer.json"))
    assert named.tokenizer is not None
    assert named.tokenizer.sha256 == Tokenizer.load("d/tokenizer.json").sha256
    assert NO_TOKENIZER.format("x.npy") not in caplog.messages
    assert np.array_equal(named.train, np.arange(100))
    assert contents() == before


def test_a_tokenizer_that_is_named_and_not_there_is_refused(own_tokens: dict[str, str]) -> None:
    with pytest.raises(FileNotFoundError, match=r"^data\.tokenizer z\.json does not exist: "):
        prepare_data(text_config(tokenizer="z.json", **own_tokens))
    assert not Path("z.json").exists()


@pytest.mark.parametrize("skip_data", [True, False])
@pytest.mark.parametrize("name", ["train_tokens", "valid_tokens"])
def test_one_token_file_of_ones_own_and_one_made_here_are_refused(
    own_tokens: dict[str, str], name: str, skip_data: bool
) -> None:
    with pytest.raises(ValueError, match="are not known to be of one tokenizer"):
        prepare_data(text_config(skip_data=skip_data, **{name: "x.npy"}))


def test_token_files_elsewhere_that_were_made_here_keep_their_tokenizer(two_texts: Path) -> None:
    elsewhere = dict(train_tokens="there/x.npy", valid_tokens="there/y.npy")
    made = prepare_data(text_config(**elsewhere)).tokenizer
    for skip_data in (False, True):
        found = prepare_data(text_config(skip_data=skip_data, **elsewhere)).tokenizer
        assert made is not None
        assert found is not None
        assert found.sha256 == made.sha256
    Tokenizer.train([VALID_TEXT], 290).save("d/tokenizer.json")
    assert prepare_data(text_config(skip_data=True, **elsewhere)).tokenizer is None


def test_skip_data_takes_the_files_and_the_tokenizer_of_a_run_before(two_texts: Path) -> None:
    made = prepare_data(text_config())
    before = contents()
    Path("input.txt").unlink()
    taken = prepare_data(text_config(skip_data=True))
    assert np.array_equal(taken.train, made.train)
    assert taken.train_sha256 == made.train_sha256
    assert made.tokenizer is not None
    assert taken.tokenizer is not None
    assert taken.tokenizer.sha256 == made.tokenizer.sha256
    assert contents() == before


@pytest.mark.parametrize("missing", ["train_tokens", "valid_tokens"])
def test_skip_data_names_the_file_that_is_missing(two_texts: Path, missing: str) -> None:
    prepare_data(text_config())
    name = missing.removesuffix("_tokens")
    Path(f"d/{name}.npy").unlink()
    with pytest.raises(FileNotFoundError, match=rf"^data\.{missing} d/{name}\.npy does not exist, and --skip_data"):
        prepare_data(text_config(skip_data=True))


@pytest.mark.parametrize("name", ["tokenizer", "train_tokens", "valid_tokens"])
def test_a_folder_where_a_file_of_the_data_goes_is_refused(two_texts: Path, name: str) -> None:
    Path("there").mkdir()
    with pytest.raises(ValueError, match=rf"^data\.{name} there is a folder: "):
        prepare_data(text_config(**{name: "there"}))
    assert not Path("d").exists()
    assert not list(Path("there").iterdir())


def test_skip_data_refuses_tokens_that_another_tokenizer_made(two_texts: Path) -> None:
    # The sidecar knows its tokenizer: with another the text that is sampled would be nonsense.
    prepare_data(text_config())
    Tokenizer.train([VALID_TEXT], 290).save("other.json")
    with pytest.raises(ValueError, match=r"d/train\.npy.*tokenizer"):
        prepare_data(text_config(skip_data=True, tokenizer="other.json"))


# Token files of one's own


def test_two_token_files_of_ones_own_need_no_text(own_tokens: dict[str, str]) -> None:
    data = prepare_data(run_config(source="text", **own_tokens))
    assert np.array_equal(data.train, np.arange(100))
    Path("mine").mkdir()
    for name in ("train", "valid"):
        shutil.copy("x.npy", f"mine/{name}.npy")
    assert len(prepare_data(run_config(source="text", data_dir="mine")).train) == 100


@pytest.mark.parametrize("train_text", [None, ""])
@pytest.mark.parametrize("name", [None, "train_tokens", "valid_tokens"])
def test_a_text_is_needed_where_tokens_are_to_be_made(
    own_tokens: dict[str, str], train_text: str | None, name: str | None
) -> None:
    given = {} if name is None else {name: "x.npy"}
    with pytest.raises(ValueError, match=r"^data\.train_text is (null|''): it must be a path, because data\.source is"):
        prepare_data(run_config(source="text", data_dir="new", train_text=train_text, **given))
    assert not Path("new").exists()


@pytest.mark.parametrize("skip_data", [True, False])
@pytest.mark.parametrize("again", ["x.npy", "link.npy"])
def test_one_token_file_for_both_is_used_and_that_is_said(
    own_tokens: dict[str, str], caplog: pytest.LogCaptureFixture, again: str, skip_data: bool
) -> None:
    Path("link.npy").symlink_to("x.npy")
    data = prepare_data(run_config(skip_data=skip_data, train_tokens="x.npy", valid_tokens=again))
    assert np.array_equal(data.train, data.valid)
    assert any("validation is on the training tokens" in message for message in caplog.messages)


@pytest.mark.parametrize("config", [text_config, stories_config, random_config])
def test_one_token_file_for_both_is_not_made(two_texts: Path, config: Any) -> None:
    with pytest.raises(ValueError, match=r"^data\.valid_tokens is 'x\.npy': it must differ from data\.train_tokens"):
        prepare_data(config(train_tokens="x.npy", valid_tokens="x.npy"))
    assert not Path("d").exists()


@pytest.mark.parametrize(
    "content", ['[{"text": "a"}]', '{"text": "a"}\n{"text": "b"}\n', '{"count": 3, "sha256": "0"}', ""]
)
def test_a_file_of_another_kind_under_the_name_of_a_sidecar_is_ignored_and_said(
    own_tokens: dict[str, str], caplog: pytest.LogCaptureFixture, content: str
) -> None:
    Path("x.json").write_text(content)
    with caplog.at_level(logging.INFO, "cs336_systems"):
        data = prepare_data(run_config(source="text", **own_tokens))
    assert np.array_equal(data.train, np.arange(100))
    assert "data: x.json is no sidecar of x.npy, ignored" in caplog.messages
    assert Path("x.json").read_text() == content
