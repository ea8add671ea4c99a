"""Reading snapshots: nothing in them is executed, and damage is one line that names the file."""

import copy
import functools
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cs336_systems.bench.profiling.snapshot import read_snapshot

from .snapshots import Trace, frames, one_step, save


class Command:
    """Unpickled by Python's own means, runs a command of the shell."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.file}",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_would_run_a_command_runs_nothing(protocol: int, tmp_path: Path) -> None:
    proof, path = tmp_path / "proof", tmp_path / "evil.pickle"
    content = {"segments": [Command(proof)], "device_traces": []}
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    with pytest.raises(ValueError, match=r"evil\.pickle.* asks for (posix|nt)\.system"):
        read_snapshot(path)
    assert not proof.exists()
    pickle.loads(path.read_bytes())
    assert proof.exists(), "this pickle runs nothing at all, so the test shows nothing"


@pytest.mark.parametrize(
    "written",
    [
        b"\x80\x04cos\nsystem\n.",
        b"(S'ls'\nios\nsystem\n.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
        b"Pname\n.",  # a persistent object
        b"\x80\x02\x82\x01.",  # an extension
        b"\x80\x04\x8c\x01a)R.",  # a call of a text
        b"\x80\x04}\x8c\x01a\x8c\x01b\x85b.",  # attributes
        b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",  # nesting without end
    ],
    ids=lambda written: repr(written[:20]),
)
def test_a_pickle_with_anything_but_plain_data_is_refused(written: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.pickle"
    path.write_bytes(written)
    with pytest.raises(ValueError, match=r"^snapshot .*a\.pickle") as raised:
        read_snapshot(path)
    assert len(str(raised.value).splitlines()) == 1


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "no.pickle", tmp_path):
        with pytest.raises(FileNotFoundError, match=str(path)):
            read_snapshot(path)


MISSING = object()
ENTRY, BLOCK = ("device_traces", 0, 3), ("segments", 0, "blocks", 0)


@pytest.mark.parametrize(
    "place, value, said",
    [
        (("segments",), MISSING, "segments"),
        (("device_traces",), MISSING, "device_traces"),
        (("device_traces",), [], "its traces are empty"),
        (("device_traces",), [[], []], "its traces are empty"),
        (("device_traces", 0), 5, ""),
        (("segments", 0), "x", ""),
        (("segments", 0, "blocks"), MISSING, "blocks"),
        ((*BLOCK, "state"), MISSING, "state"),
        ((*BLOCK, "requested_size"), MISSING, "requested_size"),
        (ENTRY, None, ""),
        ((*ENTRY, "action"), MISSING, "action"),
        ((*ENTRY, "addr"), MISSING, "addr"),
        ((*ENTRY, "frames"), [5], ""),
        ((*ENTRY, "frames"), [dict(filename="a", line=1)], "name"),
    ],
)
def test_a_missing_or_mistyped_entry_is_one_line(place: tuple[Any, ...], value: Any, said: str, tmp_path: Path) -> None:
    content = copy.deepcopy(one_step()[0])
    *path, last = place
    holder = functools.reduce(lambda inside, key: inside[key], path, content)
    if value is MISSING:
        del holder[last]
    else:
        holder[last] = value
    with pytest.raises(ValueError, match=rf"^snapshot .*a\.pickle.*{said}") as raised:
        read_snapshot(save(tmp_path / "a.pickle", content))
    assert len(str(raised.value).splitlines()) == 1


def test_a_file_cut_anywhere_or_with_any_byte_changed_is_read_or_refused_in_one_line(tmp_path: Path) -> None:
    whole = save(tmp_path / "whole.pickle", one_step()[0]).read_bytes()
    chance, path, messages = random.Random(0), tmp_path / "damaged.pickle", []
    damaged = [whole[: chance.randrange(len(whole))] for _ in range(150)]
    for _ in range(450):
        changed = bytearray(whole)
        for _ in range(chance.choice((1, 1, 3, 10))):
            changed[chance.randrange(len(whole))] = chance.randrange(256)
        damaged.append(bytes(changed))
    damaged += [chance.randbytes(chance.randrange(200)) for _ in range(200)]
    for content in damaged:
        path.write_bytes(content)
        try:
            read_snapshot(path)
        except ValueError as error:
            messages.append(str(error))
    assert len(messages) > 400
    assert all(str(path) in message for message in messages)


def test_the_busiest_of_several_devices_is_read_with_a_warning(tmp_path: Path) -> None:
    content = Trace().alloc(1, 1).snapshot()
    content["device_traces"] = [content["device_traces"][0], Trace().alloc(2, 5).alloc(3, 7).events]
    content["segments"] += [
        dict(address=2, device=1, blocks=[dict(address=2, requested_size=5, state="active_allocated")])
    ]
    snapshot = read_snapshot(save(tmp_path / "a.pickle", content))
    assert [event.size for event in snapshot.events] == [5, 7]
    assert [block.size for block in snapshot.blocks] == [5]
    assert snapshot.warnings == ["2 devices have traces; this is device 1, the busiest"]


def test_stacks_are_read_from_the_innermost_outward(tmp_path: Path) -> None:
    content = Trace().note("alloc", 1, 1, frames=frames(7)).note("oom", 0, 99, device_free=5).snapshot()
    events = read_snapshot(save(tmp_path / "a.pickle", content)).events
    assert [frame.function for frame in events[0].frames] == ["linear", "forward", "main"]
    assert events[1].action == "oom"
