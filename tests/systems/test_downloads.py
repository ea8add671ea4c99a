"""TinyStories are downloaded from a server that answers as huggingface.co does."""

import contextlib
import functools
import hashlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from cs336_systems.training import texts as sources
from cs336_systems.training.prepare import prepare_data
from cs336_systems.training.texts import fetch_tinystories
from tests import forked
from tests.distributed import wait_until
from tests.systems.preparation import (
    TEXT,
    TOKENIZER,
    TRAIN,
    VALID,
    VALID_TEXT,
    run_config,
)

# TinyStories, from a server that answers as huggingface.co does

REVISION = "0123456789abcdef0123456789abcdef01234567"
TRAIN_FILE, VALID_FILE = sources.TINYSTORIES_SHA256
SERVED = {TRAIN_FILE: (TEXT * 20).encode(), VALID_FILE: VALID_TEXT.encode()}


class Hub(ThreadingHTTPServer):
    """A small Hub: files by name, every request in `requests`.

    Once each: a body cut off after `break_after` bytes, and one that waits for `go_on` after `stall_after` bytes.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.files = dict(SERVED)
        self.requests: list[tuple[str, str, str | None]] = []
        self.knows_ranges = True
        self.break_after: int | None = None
        self.stall_after: int | None = None
        self.go_on = threading.Event()
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"

    def ranges(self) -> list[str | None]:
        """The Range header of every GET of a file."""
        return [range_ for method, name, range_ in self.requests if method == "GET" and name in SERVED]


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_HEAD(self) -> None:
        self._answer(send_body=False)

    def do_GET(self) -> None:
        self._answer(send_body=True)

    def _answer(self, send_body: bool) -> None:
        hub = self.server
        prefix, _, name = urlsplit(self.path).path.rpartition("/")  # a proxy is sent the whole URL
        hub.requests.append((self.command, name, self.headers.get("Range")))
        body = hub.files.get(name)
        if body is None or prefix != f"/datasets/roneneldan/TinyStories/resolve/{REVISION}":
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "") if hub.knows_ranges else None
        start = int(wanted[1]) if wanted else 0
        if wanted and start >= len(body):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(body)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("X-Repo-Commit", REVISION)
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        if not send_body:
            return
        if hub.break_after is not None:
            self.wfile.write(body[start : start + hub.break_after])
            hub.break_after = None
            self.close_connection = True
        elif hub.stall_after is not None:
            middle = start + hub.stall_after
            hub.stall_after = None
            self.wfile.write(body[start:middle])
            hub.go_on.wait(60)
            with contextlib.suppress(OSError):  # nobody may be there any more
                self.wfile.write(body[middle:])
        else:
            self.wfile.write(body[start:])


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub without the proxies, the cache and the settings of this machine."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 12)  # less than the files that are served
    monkeypatch.setattr(sources, "TINYSTORIES_REVISION", REVISION)
    hashes = {name: hashlib.sha256(body).hexdigest() for name, body in SERVED.items()}
    monkeypatch.setattr(sources, "TINYSTORIES_SHA256", hashes)


@pytest.fixture
def hub(library: None) -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_tinystories_are_fetched_as_they_are_served(hub: Hub, tmp_path: Path) -> None:
    span = fetch_tinystories(TRAIN_FILE, tmp_path / "new" / "folder", hub.endpoint)
    assert span.path == tmp_path / "new" / "folder" / TRAIN_FILE
    assert span.path.read_bytes() == SERVED[TRAIN_FILE]
    assert "".join(span.blocks()) == TEXT * 20
    assert hub.ranges() == [None]


def test_tinystories_that_are_there_make_no_request(hub: Hub, tmp_path: Path) -> None:
    first = fetch_tinystories(TRAIN_FILE, tmp_path, hub.endpoint)
    hub.requests.clear()
    assert fetch_tinystories(TRAIN_FILE, tmp_path, hub.endpoint) == first
    assert hub.requests == []


def test_a_download_whose_connection_broke_goes_on_where_it_stopped(hub: Hub, tmp_path: Path) -> None:
    hub.break_after = 20_000
    span = fetch_tinystories(TRAIN_FILE, tmp_path, hub.endpoint)
    assert span.path.read_bytes() == SERVED[TRAIN_FILE]
    first, second = hub.ranges()
    assert first is None
    assert second is not None
    resumed_at = int(second.removeprefix("bytes=").removesuffix("-"))
    assert 0 < resumed_at <= 20_000


def test_a_file_with_a_wrong_hash_is_removed_and_fetched_anew(hub: Hub, tmp_path: Path) -> None:
    hub.files[TRAIN_FILE] = b"something else"
    with pytest.raises(ValueError, match=r"has SHA-256 \w{64}, not \w{64}: it was removed, run again") as caught:
        fetch_tinystories(TRAIN_FILE, tmp_path, hub.endpoint)
    assert str(tmp_path / TRAIN_FILE) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / TRAIN_FILE).exists()

    hub.files[TRAIN_FILE] = SERVED[TRAIN_FILE]
    assert fetch_tinystories(TRAIN_FILE, tmp_path, hub.endpoint).path.read_bytes() == SERVED[TRAIN_FILE]


# A download that goes on


FETCH = """
import logging, sys
from pathlib import Path
from huggingface_hub import constants
from cs336_systems.training import texts

name, revision, sha256, folder = sys.argv[1:]
logging.basicConfig(level=logging.INFO, format="%(message)s")
constants.DOWNLOAD_CHUNK_SIZE = 1 << 12
texts.TINYSTORIES_REVISION, texts.TINYSTORIES_SHA256 = revision, {name: sha256}
texts.fetch_tinystories(name, Path(folder))
"""


@pytest.fixture
def fetching(hub: Hub, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a process that fetches the training file into `folder`."""
    started: list[subprocess.Popen[str]] = []

    def start(**environment: str) -> subprocess.Popen[str]:
        kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        kept |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.endpoint}
        kept |= {"HF_HUB_DOWNLOAD_TIMEOUT": "60"} | environment  # the second process may be slow to start
        sha256 = hashlib.sha256(SERVED[TRAIN_FILE]).hexdigest()
        arguments = [TRAIN_FILE, REVISION, sha256, str(tmp_path / "folder")]
        started.append(
            forked.Popen([sys.executable, "-c", FETCH, *arguments], env=kept, stderr=subprocess.PIPE, text=True)
        )
        return started[-1]

    yield start
    hub.go_on.set()
    for process in started:
        process.kill()
        process.communicate()


def test_a_download_whose_process_was_killed_goes_on_in_another_one(hub: Hub, fetching: Any, tmp_path: Path) -> None:
    partial = tmp_path / "folder" / f"{TRAIN_FILE}.partial"
    hub.stall_after = 100_000
    process = fetching()
    wait_until(lambda: partial.is_file() and partial.stat().st_size > 50_000)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    here = partial.stat().st_size
    assert SERVED[TRAIN_FILE].startswith(partial.read_bytes())

    second = fetching()
    errors = second.communicate(timeout=60)[1]
    assert second.returncode == 0, errors
    assert f"text: {here:,} bytes of it are here already" in errors
    assert hub.ranges() == [None, f"bytes={here}-"]
    assert (tmp_path / "folder" / TRAIN_FILE).read_bytes() == SERVED[TRAIN_FILE]
    assert not partial.exists()


def test_two_processes_that_fetch_a_file_at_once_fetch_it_once(hub: Hub, fetching: Any, tmp_path: Path) -> None:
    hub.stall_after = 100_000
    first = fetching()
    wait_until(lambda: hub.ranges() == [None])
    second = fetching()
    assert second.stderr is not None
    assert second.stderr.readline().startswith("data: waiting for another process")
    hub.go_on.set()
    assert [first.wait(60), second.wait(60)] == [0, 0]
    assert hub.ranges() == [None]
    assert (tmp_path / "folder" / TRAIN_FILE).read_bytes() == SERVED[TRAIN_FILE]


def test_the_download_goes_through_a_proxy(hub: Hub, fetching: Any, tmp_path: Path) -> None:
    process = fetching(HF_ENDPOINT="http://hub.invalid", http_proxy=hub.endpoint)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 0, errors
    assert (tmp_path / "folder" / TRAIN_FILE).read_bytes() == SERVED[TRAIN_FILE]


def left_over(folder: Path, content: bytes) -> Path:
    """The file of a download that broke off."""
    partial = folder / f"{TRAIN_FILE}.partial"
    partial.write_bytes(content)
    return partial


def test_a_server_that_knows_no_ranges_is_asked_for_all_of_it(hub: Hub, tmp_path: Path) -> None:
    hub.knows_ranges = False
    left_over(tmp_path, SERVED[TRAIN_FILE][:1000])
    assert fetch_tinystories(TRAIN_FILE, tmp_path, hub.endpoint).path.read_bytes() == SERVED[TRAIN_FILE]
    assert hub.ranges() == ["bytes=1000-"]


def test_a_download_that_only_lacks_its_name_is_given_it(hub: Hub, tmp_path: Path) -> None:
    partial = left_over(tmp_path, SERVED[TRAIN_FILE])
    assert fetch_tinystories(TRAIN_FILE, tmp_path, hub.endpoint).path.read_bytes() == SERVED[TRAIN_FILE]
    assert hub.ranges() == [f"bytes={len(SERVED[TRAIN_FILE])}-"]
    assert not partial.exists()


def test_a_download_that_fails_keeps_its_partial_file(hub: Hub, no_waiting: None, tmp_path: Path) -> None:
    partial = left_over(tmp_path, SERVED[TRAIN_FILE][:1000])
    body = hub.files.pop(TRAIN_FILE)
    the_connection_error(tmp_path, hub.endpoint)
    assert partial.read_bytes() == body[:1000]


def test_offline_nothing_is_asked_for(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in the_connection_error(tmp_path, hub.endpoint)
    assert hub.requests == []


def the_connection_error(folder: Path, endpoint: str) -> str:
    with pytest.raises(ConnectionError) as caught:
        fetch_tinystories(TRAIN_FILE, folder, endpoint)
    message = str(caught.value)
    assert message.startswith(f"{TRAIN_FILE} of roneneldan/TinyStories could not be fetched: ")
    instead = f"copy the file to {folder / TRAIN_FILE}, or take --data.source stories, a text that is generated here"
    assert message.endswith(f"(without a network, {instead})")
    assert "\n" not in message
    assert not (folder / TRAIN_FILE).exists()
    return message


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's retries, without the pauses between them."""
    from huggingface_hub.utils import _http

    monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)


def test_a_server_that_is_down_is_one_clear_line(library: None, no_waiting: None, tmp_path: Path) -> None:
    with socket.socket() as taken:  # bound but not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        the_connection_error(tmp_path, f"http://127.0.0.1:{taken.getsockname()[1]}")


def test_a_file_that_is_not_on_the_server_is_said(hub: Hub, no_waiting: None, tmp_path: Path) -> None:
    del hub.files[TRAIN_FILE]
    assert "404" in the_connection_error(tmp_path, hub.endpoint)


def test_tinystories_are_prepared_whole_for_training_and_validation(
    hub: Hub, stages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "fetch_tinystories", functools.partial(fetch_tinystories, endpoint=hub.endpoint))
    config = run_config(source="tinystories", data_dir="d")
    assert stages(config) == ({TOKENIZER, TRAIN, VALID}, set())
    data = prepare_data(config)
    assert data.tokenizer is not None
    assert data.tokenizer.decode(data.train).encode() == SERVED[TRAIN_FILE]
    assert data.tokenizer.decode(data.valid).encode() == SERVED[VALID_FILE]
    hub.requests.clear()
    assert stages(config) == (set(), {TOKENIZER, TRAIN, VALID})
    assert hub.requests == []
