"""torch-vmm replay: reads anyone's memory history, and shows it beside the same program under this allocator."""

from __future__ import annotations

import json
import os
import pickle
import re
import sys
import threading
import xml.etree.ElementTree as ElementTree
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import torch_vmm
from tests.helpers import GIB, KIB, MIB
from tests.python.memory_history import History, write
from tests.python.test_command_line import cli
from torch_vmm import _C
from torch_vmm.__main__ import main
from torch_vmm.replay import dump as dumps
from torch_vmm.replay.outcome import Outcome, replay
from torch_vmm.replay.picture import svg
from torch_vmm.replay.report import text
from torch_vmm.replay.trace import Program, programs

BASE = 0x7F00_0000_0000


def short_history() -> History:
    """20 MiB and 2 MiB segments; 15 MiB, then 5 MiB beside it, then the first is freed and 10 MiB take its place."""
    device = History()
    device.segment(BASE, 20 * MIB)
    device.alloc(BASE, 15 * MIB)
    device.alloc(BASE + 15 * MIB, 5 * MIB)
    device.segment(BASE + GIB, 2 * MIB, stream=7)
    device.alloc(BASE + GIB, 100, stream=7)
    device.free(BASE)
    device.alloc(BASE, 10 * MIB)
    return device


def program_of(path: Path, device: int = 0) -> Program:
    (program,) = programs(dumps.read(path), [device])
    return program


class Done(NamedTuple):
    status: int
    out: str
    err: str


Command = Callable[..., Done]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """torch-vmm replay in this process: another one imports torch first, for seconds."""

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["torch-vmm", "replay", *arguments])
        try:
            status = main()
        except SystemExit as left:
            status = int(left.code or 0)
        return Done(status, *capsys.readouterr())

    return run


def outcome_of(path: Path, limit: int | None = None) -> Outcome:
    return replay(program_of(path), limit)


# -- What a history says -----------------------------------------------------------------------------------------------


def test_a_whole_history(tmp_path: Path) -> None:
    program = program_of(write(tmp_path / "dump", short_history()))
    assert (program.opening, program.steps, program.notes) == (0, 5, [])
    assert list(program.op) == [0, 0, 0, 1, 0]
    assert list(program.size) == [15 * MIB, 5 * MIB, 100, 15 * MIB, 10 * MIB]
    assert list(program.stream) == [0, 0, 1, 0, 0]
    assert program.id[3] == program.id[0] != program.id[4]
    assert list(program.allocated) == [0, 15 * MIB, 20 * MIB, 20 * MIB + 512, 5 * MIB + 512, 15 * MIB + 512]
    assert program.reserved is not None
    assert list(program.reserved) == [0, 20 * MIB, 20 * MIB, 22 * MIB, 22 * MIB, 22 * MIB]
    assert list(program.segment_events) == [0, 1, 1, 2, 2, 2]


def test_recording_that_began_in_the_middle(tmp_path: Path) -> None:
    device = short_history()
    device.forget()
    device.free(BASE + 15 * MIB)  # from before, freed now
    device.alloc(BASE + 15 * MIB, MIB)
    device.free(BASE + 15 * MIB)  # BASE and the small one live on, of which the history says nothing
    program = program_of(write(tmp_path / "dump", device))
    assert (program.opening, program.steps) == (3, 3)
    assert sorted(program.size[:3]) == [100, 5 * MIB, 10 * MIB]
    assert list(program.op) == [0, 0, 0, 1, 0, 1]
    assert program.allocated[0] == 15 * MIB + 512
    assert program.reserved is not None
    assert list(program.reserved) == [22 * MIB] * 4


def test_the_stream_of_what_lived_before(tmp_path: Path) -> None:
    device = short_history()
    device.forget()
    device.alloc(BASE + 10 * MIB, 512, stream=7)
    program = program_of(write(tmp_path / "dump", device))
    streams = dict(zip(program.size, program.stream, strict=True))
    assert streams[100] == streams[512] != streams[10 * MIB] == 0


def test_memory_serves_again_when_its_free_is_completed(tmp_path: Path) -> None:
    device = short_history()
    device.request_free(BASE + 15 * MIB)
    device.alloc(BASE + 10 * MIB, MIB)  # meanwhile
    device.complete_free(BASE + 15 * MIB)
    program = program_of(write(tmp_path / "dump", device))
    assert list(program.op[5:]) == [0, 1]
    assert program.size[6] == 5 * MIB


def test_a_history_without_completed_frees(tmp_path: Path) -> None:
    device = short_history()
    device.entries = [entry for entry in device.entries if entry["action"] != "free_completed"]
    assert list(program_of(write(tmp_path / "dump", device)).op) == [0, 0, 0, 1, 0]


def test_what_was_reserved_between_two_steps_counts_for_the_peak(tmp_path: Path) -> None:
    device = short_history()
    device.segment(BASE + 2 * GIB, 40 * MIB, how="segment_map")
    device.drop_segment(BASE + 2 * GIB, how="segment_unmap")
    device.free(BASE)
    device.free(BASE + 15 * MIB)
    device.drop_segment(BASE)
    program = program_of(write(tmp_path / "dump", device))
    assert program.reserved is not None
    assert (program.reserved_peak, program.reserved[5], program.reserved[-1]) == (62 * MIB, 22 * MIB, 2 * MIB)


def test_where_events_of_segments_are_missing_the_rest_is_told(tmp_path: Path) -> None:
    device = short_history()
    device.free(BASE)
    device.free(BASE + 15 * MIB)
    device.drop_segment(BASE)
    device.entries = [entry for entry in device.entries if not entry["action"].startswith("segment")]
    outcome = outcome_of(write(tmp_path / "dump", device))
    assert outcome.program.reserved is None
    assert outcome.recorded_peak is None
    assert outcome.totals()["recorded"]["ratio"] is None
    assert "the history lacks events of segments" in text(outcome, 3)
    assert "reserved then," not in svg([outcome], "x")


def test_frees_that_are_missing(tmp_path: Path) -> None:
    device = short_history()
    device.entries = [entry for entry in device.entries if not entry["action"].startswith("free")]
    program = program_of(write(tmp_path / "dump", device))
    assert list(program.op) == [0, 0, 0, 1, 0]
    assert program.notes == ["1 free is not in the history: taken to come before the next use"]


def test_a_free_of_what_was_freed_is_passed_over(tmp_path: Path) -> None:
    device = short_history()
    device.entries += [entry for entry in device.entries if entry["action"].startswith("free")] * 2
    program = program_of(write(tmp_path / "dump", device))
    assert (program.opening, program.steps) == (0, 6)
    assert program.notes == ["1 free of a block that was not live: passed over"]


# -- The replay --------------------------------------------------------------------------------------------------------


def test_a_replay_has_a_number_for_each_step(tmp_path: Path) -> None:
    outcome = outcome_of(write(tmp_path / "dump", short_history()))
    assert len(outcome.reserved) == len(outcome.driver_calls) == 6
    assert outcome.reserved[0] == outcome.driver_calls[0] == 0
    assert all(have >= live for have, live in zip(outcome.reserved, outcome.program.allocated, strict=True))
    assert outcome.reserved_peak == max(outcome.reserved) == 22 * MIB
    assert outcome.driver_calls[-1] == sum(outcome.calls.values()) > 0
    assert outcome.refused is None
    assert [each.up_to for each in outcome.samples(3)] == [1, 3, 5]
    assert [each.allocated for each in outcome.samples(3)] == [15 * MIB, 20 * MIB + 512, 15 * MIB + 512]
    assert len(outcome.samples(100)) == 6


def test_what_lived_before_is_there_at_the_start(tmp_path: Path) -> None:
    device = short_history()
    device.forget()
    device.free(BASE)
    outcome = outcome_of(write(tmp_path / "dump", device))
    assert len(outcome.reserved) == 2
    assert outcome.reserved[0] >= outcome.program.allocated[0] == 15 * MIB + 512


def test_the_allocator_counts_as_the_history_is_counted(tmp_path: Path) -> None:
    program = program_of(write(tmp_path / "dump", short_history()))
    done = _C.replay(program.op, program.id, program.size, program.stream, GIB)
    assert array("Q", done["allocated"]) == program.allocated[1:]
    assert done["allocated_peak"] == program.allocated_peak
    assert done["left"] == 0


def test_a_program_that_does_not_fit(tmp_path: Path, command: Command) -> None:
    path = write(tmp_path / "dump", short_history())
    assert outcome_of(path, 24 * MIB).refused is None
    outcome = outcome_of(path, 18 * MIB)
    assert outcome.refused == 2
    assert len(outcome.reserved) == 2
    assert outcome.samples(3)[-1].ours is None
    assert outcome.totals()["torch_vmm"]["ratio"] is None
    assert "out of memory under torch_vmm at step 2" in text(outcome, 3)
    done = command(str(path), "--limit", "18MiB")
    assert (done.status, done.err) == (1, "")


@pytest.mark.parametrize(
    "columns",
    [
        (array("B", [0]), array("Q", [1]), array("Q", [1]), array("Q")),
        (array("Q", [0]), array("Q", [1]), array("Q", [1]), array("Q", [0])),
        (array("B", [0]), array("d", [1]), array("Q", [1]), array("Q", [0])),
    ],
)
def test_columns_that_cannot_be(columns: tuple[object, ...]) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError, match="column"):
        _C.replay(*columns, GIB)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("time_us", "said"),
    [([1], "columns of one length"), ([2, 1], "step 1 is at 1"), ([0, 2**53 + 1], "nor be more than")],
)
def test_times_that_cannot_be(time_us: list[int], said: str) -> None:
    columns = array("B", [0, 1]), array("Q", [1, 1]), array("Q", [512, 0]), array("Q", [0, 0])
    with pytest.raises(torch_vmm.InvalidArgumentError, match=said):
        _C.replay(*columns, GIB, time_us=array("Q", time_us))


def test_times_are_read_and_never_fall(tmp_path: Path) -> None:
    device = short_history()
    for entry, time_us in zip(device.entries, [7, 9, 8, 2**60, "noon", 10, 11, 12], strict=True):
        entry["time_us"] = time_us
    assert list(program_of(write(tmp_path / "dump", device)).time_us) == [9, 9, 9, 11, 12]


# -- The command -------------------------------------------------------------------------------------------------------


def test_the_command_shows_text_and_a_picture(tmp_path: Path) -> None:
    first, third = short_history(), History(device=2)
    third.segment(BASE, 2 * MIB)
    third.alloc(BASE, 300 * KIB)
    third.out_of_memory(4 * GIB)
    path = write(tmp_path / "a<b>&.pickle", first, third)
    picture = tmp_path / "picture.svg"
    done = cli("replay", str(path), "--rows", "2", "--out", str(picture))
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^device 0: 5 allocations and frees$", done.stdout, re.MULTILINE)
    assert re.search(r"^device 2: 1 allocations and frees$", done.stdout, re.MULTILINE)
    assert re.search(r"^ +5 +20\.0 MiB +22 MiB +22 MiB$", done.stdout, re.MULTILINE)
    assert re.search(r"^peak reserved +22 MiB +22 MiB$", done.stdout, re.MULTILINE)
    assert "out of memory then: 4 GiB asked after step 1" in done.stdout

    root = ElementTree.parse(picture).getroot()
    svg_name = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{svg_name}svg"
    assert root.findtext(f"{svg_name}title") == "a<b>&.pickle"
    assert len(root.findall(f"{svg_name}g")) == 2
    assert len(root.findall(f".//{svg_name}polyline")) == 4
    assert len(root.findall(f".//{svg_name}circle")) == 1
    for line in root.iter(f"{svg_name}polyline"):
        for point in line.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= 1000
            assert 0 <= y <= 400


def test_the_command_as_json_and_of_one_device(tmp_path: Path, command: Command) -> None:
    other = History(device=1)
    other.segment(BASE, 2 * MIB)
    other.alloc(BASE, MIB)
    path = write(tmp_path / "dump", short_history(), other)
    done = command(str(path), "--json", "--device", "1")
    assert (done.status, done.err) == (0, "")
    (told,) = json.loads(done.out)
    assert (told["device"], told["steps"], told["allocated_peak"]) == (1, 1, MIB)
    assert told["recorded"]["reserved_peak"] == 2 * MIB
    assert told["series"][-1]["up_to_step"] == 1
    assert set(told["torch_vmm"]["calls"]) == {"create", "release", "map", "unmap", "set_access"}


# -- What cannot be read -----------------------------------------------------------------------------------------------


def refused(done: Done) -> str:
    """The one line that the command said."""
    assert (done.status, done.out) == (1, "")
    assert done.err.count("\n") == 1
    assert done.err.startswith("torch-vmm: ")
    return done.err.removeprefix("torch-vmm: ").rstrip("\n")


class Malicious:
    """Makes a file when it is unpickled by whoever trusts it."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.trace,)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path, command: Command) -> None:
    evil, harmed = tmp_path / "evil", tmp_path / "harmed"
    evil.write_bytes(pickle.dumps({"segments": [], "device_traces": [[{"action": Malicious(harmed)}]]}))
    assert "which no memory snapshot needs; nothing of it was run" in refused(command(str(evil)))
    assert not harmed.exists()
    pickle.loads(evil.read_bytes())
    assert harmed.exists(), "this pickle would have harmed nobody"


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_that_torch_may_write(tmp_path: Path, protocol: int) -> None:
    path = write(tmp_path / "dump", short_history())
    path.write_bytes(pickle.dumps(pickle.loads(path.read_bytes()), protocol=protocol))
    assert program_of(path).steps == 5


def read_error(path: Path) -> str:
    with pytest.raises(torch_vmm.InvalidArgumentError) as caught:
        program_of(path)
    assert str(caught.value).startswith(str(path))
    return str(caught.value).removeprefix(str(path))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a zip", b"{'segments': []}"])
def test_what_is_no_pickle(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "dump"
    path.write_bytes(content)
    assert read_error(path).startswith(
        ": not a pickle. To make a dump, call torch.cuda.memory._record_memory_history()"
    )


def test_what_was_cut_short(tmp_path: Path) -> None:
    whole = write(tmp_path / "dump", short_history()).read_bytes()
    for length in range(2, len(whole), 97):
        path = tmp_path / "short"
        path.write_bytes(whole[:length] if whole[length - 1 : length] != b"." else whole[: length - 1])
        assert "cut short" in read_error(path), length


def test_what_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "dump"
    path.write_bytes(b"\x80\x04\xff\xff\xff.")
    assert "a damaged pickle (" in read_error(path)


@pytest.mark.parametrize("value", [[], {"a": 1}, {"segments": 3, "device_traces": [[{}]]}, None])
def test_another_pickle(tmp_path: Path, value: object) -> None:
    path = tmp_path / "dump"
    path.write_bytes(pickle.dumps(value))
    assert read_error(path).startswith(": a pickle, but no memory snapshot: no 'segments' in it.")


@pytest.mark.parametrize("traces", [{}, {"device_traces": []}, {"device_traces": [[], []]}, {"device_traces": [3]}])
def test_a_snapshot_without_a_history(tmp_path: Path, traces: dict[str, object]) -> None:
    path = tmp_path / "dump"
    path.write_bytes(pickle.dumps({"segments": []} | traces))
    assert read_error(path) == f": a snapshot without a history. To record one, {dumps.HOW_TO_RECORD}"


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (3, ": device 0: entry 0 is 3, not a dict"),
        ({"action": "alloc", "size": 3}, ": device 0: entry 0: 'addr' is None, not a number of bytes"),
        ({"action": "alloc", "addr": 1, "size": -3}, ": device 0: entry 0: 'size' is -3, not a number of bytes"),
        ({"action": "alloc", "addr": 1, "size": 2**63}, "not a number of bytes"),
        ({"action": "alloc", "addr": 1, "size": 1, "stream": "x"}, "'stream' is 'x', not a number"),
        ({"action": ["alloc"]}, ": device 0: entry 0: 'action' is ['alloc'], not text"),
        ({"action": "alloc", "addr": 1, "size": 2**62}, "which no device has"),
        ({"action": "snapshot", "addr": 1, "size": 1}, ": device 0: its history has neither an allocation nor a free"),
    ],
)
def test_an_entry_that_cannot_be(tmp_path: Path, entry: object, words: str) -> None:
    path = tmp_path / "dump"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[entry]]}))
    assert words in read_error(path)


def test_a_device_that_was_only_looked_at_stands_in_nobodys_way(tmp_path: Path) -> None:
    looked_at = History()
    looked_at.entries.append({"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "time_us": 1})
    path = write(tmp_path / "dump", short_history(), looked_at)
    assert dumps.read(path).devices() == [0]


def test_a_program_whose_models_slept(tmp_path: Path) -> None:
    device = History()
    device.segment(BASE, 20 * MIB)
    device.alloc(BASE, 20 * MIB)
    device.drop_segment(BASE, how="segment_unmap")
    device.segment(BASE + GIB, 20 * MIB)
    device.alloc(BASE + GIB, 20 * MIB)
    program = program_of(write(tmp_path / "dump", device))
    assert program.reserved is None
    assert "a model slept" in program.notes[0]


def test_a_refused_replay_has_no_second_half(tmp_path: Path) -> None:
    device = History()
    for k in range(8):
        device.alloc(BASE + k * GIB, 10 * MIB)
    path = write(tmp_path / "dump", device)
    assert outcome_of(path).late_calls() is not None
    odd = outcome_of(write(tmp_path / "odd", short_history()))
    assert odd.late_events() == 0
    assert odd.late_calls() == odd.driver_calls[5] - odd.driver_calls[3]
    refused_early = outcome_of(path, 30 * MIB)
    assert refused_early.refused is not None
    assert refused_early.late_calls() is None


@pytest.mark.parametrize("limit", ["1", "1023 KiB", "9223372036854775807"])
def test_limits_that_no_device_has(tmp_path: Path, command: Command, limit: str) -> None:
    done = command(str(write(tmp_path / "dump", short_history())), "--limit", limit)
    assert done.status == 2
    assert f"argument --limit: {limit!r}: a device has 2 MiB at least and 16 TiB at most" in done.err


def test_files_that_cannot_be_read_twice(tmp_path: Path, command: Command) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(b"\x80 and more"))
    writer.start()
    assert refused(command(str(pipe))) == f"{pipe}: a pipe, which cannot be read twice: give a file"
    writer.join()


def test_names_of_files_that_are_no_text(tmp_path: Path, command: Command) -> None:
    path = write(tmp_path / "a\x01\udcff.pickle", short_history())
    picture = tmp_path / "picture.svg"
    assert command(str(path), "--out", str(picture)).status == 0
    ElementTree.parse(picture)


def test_memory_that_runs_out_while_reading_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(_self: object) -> None:
        raise MemoryError

    path = write(tmp_path / "dump", short_history())
    monkeypatch.setattr(dumps._PlainValues, "load", load)
    assert "not enough memory here" in read_error(path)


def test_what_the_command_refuses(tmp_path: Path, command: Command) -> None:
    path = write(tmp_path / "dump", short_history())
    unknown = command(str(path), "--device", "3")
    assert refused(unknown) == f"{path}: no history of device 3; there is one of 0"
    nowhere = tmp_path / "nowhere" / "a.svg"
    assert refused(command(str(path), "--out", str(nowhere))) == f"--out={nowhere}: No such file or directory"
    missing = tmp_path / "missing"
    assert refused(command(str(missing))) == f"{missing}: No such file or directory"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rows", "0"], "'0': give a number, from 1"),
        (["--rows", "-1"], "'-1': give a number, from 1"),
        (["--device", "cuda"], "'cuda': give a number, from 0"),
        (["--out", "o.txt"], "'o.txt': a picture is an .svg file"),
    ],
)
def test_arguments_that_cannot_be(tmp_path: Path, command: Command, arguments: list[str], said: str) -> None:
    done = command(str(write(tmp_path / "dump", short_history())), *arguments)
    assert done.status == 2
    assert f"argument {arguments[0]}: {said}" in done.err
