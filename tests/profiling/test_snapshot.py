"""Reading snapshots: nothing in them is executed, and damage is one line that names the file."""

import copy
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
    with pytest.raises(ValueError, match=r"evil\.pickle: it asks for (posix|nt)\.system"):
        read_snapshot(path)
    assert not proof.exists()
    pickle.loads(path.read_bytes())
    assert proof.exists(), "this pickle runs nothing at all, so the test shows nothing"


@pytest.mark.parametrize(
    "written, said",
    [
        (b"\x80\x04cos\nsystem\n.", "asks for os.system"),
        (b"(S'ls'\nios\nsystem\n.", "asks for os.system"),
        (b"(ios\nsystem\n.", "asks for os.system"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "asks for os.system"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.", "asks for os.system"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93)\x81.", "asks for os.system"),
        (b"Pname\n.", "no pickle of plain data.*persistent"),
        (b"\x80\x02\x82\x01.", "no pickle of plain data.*extension"),
        (b"\x80\x04\x8c\x01a)R.", "no pickle of plain data"),
        (b"\x80\x04\x8c\x01a)\x81.", "no pickle of plain data"),
        (b"\x80\x04}\x8c\x01a\x8c\x01b\x85b.", "no pickle"),
    ],
)
def test_a_pickle_with_anything_but_plain_data_is_refused(written: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "a.pickle"
    path.write_bytes(written)
    with pytest.raises(ValueError, match=rf"^snapshot .*a\.pickle:? .*{said}"):
        read_snapshot(path)


def test_a_memo_index_of_gigabytes_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "memo.pickle"
    path.write_bytes(b"\x80\x02]r\xff\xff\xff\xff.")
    with pytest.raises(ValueError, match="it holds a list, not a dict"):
        read_snapshot(path)


def test_nesting_without_end_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "nested.pickle"
    path.write_bytes(b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".")
    with pytest.raises(ValueError, match="it holds a list, not a dict"):
        read_snapshot(path)


def test_a_list_that_is_there_a_million_times_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cs336_systems.bench.profiling.snapshot._MOST_ENTRIES", 50_000)
    segment = {"address": 0, "blocks": [dict(size=1, state="inactive")] * 10_000}
    content = Trace().alloc(1, 1).snapshot() | {"segments": [segment] * 10_000}
    with pytest.raises(ValueError, match="more than 50,000 entries"):
        read_snapshot(save(tmp_path / "a.pickle", content))


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.pickle"
    with path.open("wb") as file:
        file.truncate(1 << 31)
    with pytest.raises(ValueError, match=r"huge\.pickle has 2,147,483,648 bytes: it must be at most 1,073,741,824"):
        read_snapshot(path)


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "no.pickle", tmp_path):
        with pytest.raises(FileNotFoundError, match=str(path)):
            read_snapshot(path)


def without(name: str, *where: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: Any) -> None:
        for key in where:
            content = content[key]
        del content[name]

    return change


def setting(value: Any, *where: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: Any) -> None:
        for key in where[:-1]:
            content = content[key]
        content[where[-1]] = value

    return change


ENTRY, BLOCK = ("device_traces", 0, 3), ("segments", 0, "blocks", 0)


@pytest.mark.parametrize(
    "change, said",
    [
        (without("segments"), "the snapshot has no segments"),
        (without("device_traces"), "the snapshot has no device_traces"),
        (setting([], "device_traces"), "its traces are empty"),
        (setting([[], []], "device_traces"), "its traces are empty"),
        (setting(5, "device_traces", 0), r"device_traces\[0\] is 5: it must be a list"),
        (setting({}, "segments"), "segments of the snapshot is a dict: it must be a list"),
        (setting("x", "segments", 0), "a segment is 'x': it must be a dict"),
        (without("blocks", "segments", 0), "a segment has no blocks"),
        (without("size", *BLOCK), "a block has no size"),
        (without("state", *BLOCK), "a block has no state"),
        (setting(-1, *BLOCK, "requested_size"), "requested_size of a block is -1: it must be at least 0"),
        (setting(None, *ENTRY), "a trace entry is None: it must be a dict"),
        (without("action", *ENTRY), "a trace entry has no action"),
        (without("time_us", *ENTRY), "a trace entry has no time_us"),
        (without("addr", *ENTRY), "a trace entry has no addr"),
        (setting(1.5, *ENTRY, "size"), "size of a trace entry is 1.5: it must be a int"),
        (setting(True, *ENTRY, "size"), "size of a trace entry is True: it must be a int"),
        (setting(10**5000, *ENTRY, "size"), "size of a trace entry is an integer of many digits"),
        (setting("x", *ENTRY, "frames"), "frames is 'x': it must be a list"),
        (setting([5], *ENTRY, "frames"), "a frame is 5: it must be a dict"),
        (setting([dict(filename="a", line=1)], *ENTRY, "frames"), "a frame has no name"),
        (setting([dict(filename=1, line=1, name="f")], *ENTRY, "frames"), "filename of a frame is 1"),
    ],
)
def test_a_missing_or_mistyped_entry_is_named(change: Any, said: str, tmp_path: Path) -> None:
    content = copy.deepcopy(one_step()[0])
    change(content)
    with pytest.raises(ValueError, match=rf"^snapshot .*a\.pickle: .*{said}") as raised:
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


def test_blocks_without_addresses_lie_one_behind_the_other(tmp_path: Path) -> None:
    content = Trace().alloc(1, 1).snapshot()
    blocks = [dict(size=s, state=st, frames=[]) for s, st in ((512, "inactive"), (1024, "active_allocated"))]
    content["segments"] = [dict(address=4096, blocks=blocks)]
    (block,) = read_snapshot(save(tmp_path / "a.pickle", content)).blocks
    assert (block.address, block.size) == (4096 + 512, 1024)


def test_the_busiest_of_several_devices_is_read_with_a_warning(tmp_path: Path) -> None:
    content = Trace().alloc(1, 1).snapshot()
    content["device_traces"] = [content["device_traces"][0], Trace().alloc(2, 5).alloc(3, 7).events]
    content["segments"] += [
        dict(address=2, device=1, blocks=[dict(size=512, requested_size=5, state="active_allocated")])
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
