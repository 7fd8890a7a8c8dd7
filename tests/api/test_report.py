"""report() and str() of a SharedMemoryPool: the tables say what the numbers say."""

from __future__ import annotations

import gc
import re
import threading
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import torch_vmm
from tests.helpers import MIB, tensor_in
from torch_vmm import _C, SharedMemoryPool, VirtualMemoryPool

MakeShared = Callable[..., SharedMemoryPool]
MakePool = Callable[..., VirtualMemoryPool]

SIZES = {
    "allocated": "allocated_bytes",
    "idle": "idle_bytes",
    "stranded": "stranded_bytes",
    "quarantined": "quarantined_bytes",
    "physical": "physical_usage",
}


LEFT_OUT = {"stranded": "0 B", "quarantined": "0 B", "limit": "none", "floor": "0 B", "priority": "0"}


def rows_of(text: str) -> dict[str, dict[str, str]]:
    """Cells by model and head, of lines that have a cell under every head; the total has none under the last.

    Of what has no column it is told that there is nothing.
    """
    _, heads_line, *lines = text.splitlines()
    heads = heads_line.split()
    sizes = heads.index("physical") + 1
    found = {}
    for line in lines:
        cells = re.split(r"\s{2,}", line.strip())
        if len(cells) >= sizes:
            found[cells[0]] = LEFT_OUT | dict(zip(heads, cells, strict=False))
    return found


def last_line(text: str) -> str:
    """With what does not fit into it, and stands below."""
    *_, last = re.split(r"\n(?! )", text)
    return re.sub(r"\n +", " ", last)


def test_a_row_says_what_the_pool_says(shared: SharedMemoryPool) -> None:
    llama = shared.register_model("llama", floor="8MiB", priority=-3)
    qwen = shared.register_model("qwen", physical_limit="32MiB")
    kept = [tensor_in(llama, 3 * MIB), tensor_in(llama, 16 * MIB), tensor_in(qwen, 5000)]
    del kept[1]
    rows = rows_of(str(shared))
    assert list(rows) == ["llama", "qwen", "total"]
    for pool in (llama, qwen):
        stats, row = pool.stats(), rows[pool.name]
        assert {head: row[head] for head in SIZES} == {
            head: _C.format_bytes(getattr(stats, field)) for head, field in SIZES.items()
        }
    assert llama.stats().idle_bytes > 0
    assert [rows["llama"][head] for head in ("state", "limit", "floor", "priority")] == ["awake", "none", "8 MiB", "-3"]
    assert [rows["qwen"][head] for head in ("state", "limit", "floor", "priority")] == ["awake", "32 MiB", "0 B", "0"]


def test_the_total_and_the_limit_are_those_of_all_models(shared: SharedMemoryPool) -> None:
    kept = [tensor_in(shared.register_model(f"model {k}"), (k + 1) * 2 * MIB) for k in range(3)]
    tensor_in(shared["model 1"], 8 * MIB)
    stats = shared.global_stats()
    total = rows_of(str(shared))["total"]
    assert total["state"] == "3"
    assert total["allocated"] == _C.format_bytes(stats.allocated_bytes) == "12 MiB"
    assert total["idle"] == _C.format_bytes(stats.idle_bytes)
    assert last_line(str(shared)) == (
        f"limit 64 MiB, held {_C.format_bytes(stats.physical_usage)}: {_C.format_bytes(stats.store_bytes)} of it in "
        "the store; reserved by floors 0 B"
    )
    del kept


def test_what_rests_in_the_store_is_told(shared: SharedMemoryPool) -> None:
    going, staying = shared.register_model("going"), shared.register_model("staying")
    kept = tensor_in(staying, 4 * MIB)
    tensor_in(going, 16 * MIB)
    shared.unregister_model("going")
    stats = shared.global_stats()
    assert stats.store_bytes > 0
    assert f"held {_C.format_bytes(stats.physical_usage)}: {_C.format_bytes(stats.store_bytes)} of" in str(shared)
    del kept


def test_what_is_left_of_floors_is_reserved(shared: SharedMemoryPool) -> None:
    llama = shared.register_model("llama", floor="20MiB")
    shared.register_model("qwen", floor="8MiB")
    kept = tensor_in(llama, 16 * MIB)
    assert last_line(str(shared)).endswith("reserved by floors 12 MiB")
    llama.physical_limit = "18MiB"  # more than that its floor cannot be
    assert last_line(str(shared)).endswith("reserved by floors 10 MiB")
    more = tensor_in(shared["qwen"], 12 * MIB)  # above its floor: that takes nothing off what llama has left
    assert last_line(str(shared)).endswith("reserved by floors 2 MiB")
    del kept, more


def test_a_floor_of_all_models_counts_on_the_device(shared: SharedMemoryPool, device: str) -> None:
    before = last_line(torch_vmm.report(device))
    llama = shared.register_model("llama", floor="4MiB")
    shared.floor = "24MiB"
    kept = tensor_in(llama, 16 * MIB)
    assert last_line(str(shared)).endswith("reserved by floors 0 B; floor of all 24 MiB")
    assert "reserved by floors 0 B;" in before
    assert "reserved by floors 8 MiB;" in last_line(torch_vmm.report(device))
    del kept


@pytest.mark.parametrize("how", ["unregister_model", "close"])
def test_one_that_was_ended_by_force_is_there_until_its_last_tensor(shared: SharedMemoryPool, how: str) -> None:
    kept = tensor_in(shared.register_model("llama"), 4 * MIB)
    if how == "close":
        shared.close(force=True)
    else:
        shared.unregister_model("llama", force=True)
    gc.collect()  # nobody has its pool
    row = rows_of(str(shared))["llama"]
    assert (row["state"], row["allocated"]) == ("closed", "4 MiB")
    assert ("closed" in str(shared).splitlines()[0]) == (how == "close")
    del kept
    assert list(rows_of(str(shared))) == ["total"]
    assert shared._leaving == {}


def test_what_has_ended_is_not_kept(shared: SharedMemoryPool) -> None:
    for _ in range(5):  # nobody looks at a table meanwhile
        kept = tensor_in(shared.register_model("llama"), 4 * MIB)
        shared.unregister_model("llama", force=True)
        del kept
    assert len(shared._leaving) <= 1


def test_the_id_of_one_that_lives_on_may_be_another_ones(shared: SharedMemoryPool) -> None:
    kept = tensor_in(shared.register_model("llama"), 4 * MIB)
    shared["llama"].close(force=True)
    second = shared.register_model("llama")
    states = [line.split()[:3] for line in str(shared).splitlines() if line.startswith("llama")]
    assert states == [["llama", "awake", "0"], ["llama", "closed", "4"]]
    del kept, second


def test_what_could_not_be_unregistered_is_there_once(shared: SharedMemoryPool) -> None:
    kept = tensor_in(shared.register_model("llama"), 4 * MIB)
    with pytest.raises(torch_vmm.StillInUseError):
        shared.unregister_model("llama")
    assert [line.split()[1] for line in str(shared).splitlines() if line.startswith("llama")] == ["awake"]
    del kept


def test_one_that_is_just_being_unregistered_is_there_once(shared: SharedMemoryPool) -> None:
    kept = tensor_in(shared.register_model("llama"), 4 * MIB)
    with shared._seen_leaving([shared["llama"]._handle]):
        assert [line.split()[1] for line in str(shared).splitlines() if line.startswith("llama")] == ["awake"]
    assert shared._leaving == {}
    del kept


def sleepers(text: str) -> str:
    """The lines below the totals that tell who sleeps, as one."""
    _, _, below = text.partition("\ntotal")
    *lines, _ = re.split(r"\n(?! )", below)[1:]
    return " ".join(re.sub(r"\n +", " ", line) for line in lines)


def test_one_that_is_asleep_says_how_much_and_where(shared: SharedMemoryPool, device: str) -> None:
    llama, qwen = shared.register_model("llama"), shared.register_model("qwen")
    kept = tensor_in(llama, 3 * MIB)
    with qwen.tag("cache"):
        cache = torch.ones(2 * MIB, dtype=torch.uint8, device=device)
    rest = tensor_in(qwen, MIB)
    assert sleepers(str(shared)) == ""
    llama.sleep()
    qwen.sleep({"cache": "discard"})
    for text in (str(shared), torch_vmm.report(device)):
        assert rows_of(text)["llama"]["state"] == rows_of(text)["qwen"]["state"] == "asleep"
        assert (rows_of(text)["llama"]["allocated"], rows_of(text)["qwen"]["allocated"]) == ("0 B", "1 MiB")
        assert sleepers(text) == "asleep 5 MiB: llama 3 MiB (host); qwen 2 MiB (cache: discarded)"
    qwen.sleep({"": "host"})
    assert sleepers(str(shared)).endswith("qwen 3 MiB (cache: discarded, the rest: host)")
    llama.wake()
    assert rows_of(str(shared))["llama"]["state"] == "awake"
    assert sleepers(str(shared)).startswith("asleep 3 MiB: qwen")
    qwen.wake()
    assert sleepers(str(shared)) == ""
    del kept, cache, rest


def test_who_sleeps_is_told_within_80_columns(shared: SharedMemoryPool) -> None:
    kept = [tensor_in(shared.register_model(f"a model, the {k}th of eight"), 1000) for k in range(8)]
    before = str(shared).splitlines()
    for model in shared.models.values():
        model.sleep()
    after = str(shared).splitlines()
    assert len(after) > len(before)
    assert all(len(line) <= 80 for line in before + after)
    del kept


def test_of_a_long_path_the_ends_are_told(shared: SharedMemoryPool, device: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / ("of the last weeks " * 6).strip().replace(" ", "-")
    folder.mkdir(parents=True)
    llama = shared.register_model("llama")
    kept = tensor_in(llama, 3 * MIB)
    llama.sleep(folder / "llama.sleep")
    for text in (str(shared), torch_vmm.report(device)):
        assert all(len(line) <= 80 for line in text.splitlines())
        assert re.search(r"\(/\S+\.\.\.\S+-weeks/llama\.sleep\)", text)
    del kept


def test_a_table_that_is_too_wide_leaves_out_what_is_nowhere(shared: SharedMemoryPool) -> None:
    names = [f"a model, the {k}th" for k in range(2)]
    kept = [tensor_in(shared.register_model(name, physical_limit="32MiB"), MIB) for name in names]
    heads = str(shared).splitlines()[1].split()
    assert heads == ["model", "state", "allocated", "idle", "stranded", "physical", "limit", "floor"]
    assert set(rows_of(str(shared))) == {*names, "total"}
    assert rows_of(str(shared))[names[0]]["limit"] == "32 MiB"
    del kept


def test_limits_that_have_no_room_stand_below(shared: SharedMemoryPool, device: str) -> None:
    first = shared.register_model("a model of a long name", floor="8MiB", priority=-3)
    shared.register_model("a model of another one", physical_limit="32MiB")
    kept = tensor_in(first, 1000)
    text = str(shared)
    assert "limit" not in text.splitlines()[1]
    words = "a model of a long name floor 8 MiB, priority -3; a model of another one limit 32 MiB"
    for each in (text, torch_vmm.report(device)):
        assert words in re.sub(r"\n +", " ", each)
        assert all(len(line) <= 80 for line in each.splitlines())
        assert rows_of(each)["a model of a long name"]["allocated"] == "1 KiB"
    del kept


def test_names_are_shortened_last_of_all(shared: SharedMemoryPool, device: str) -> None:
    names = [f"meta-llama/{'Llama' * 20}-8B-{end}" for end in ("Instruct", "Base")]
    kept = [tensor_in(shared.register_model(name, floor="8MiB"), MIB) for name in names]
    rows = rows_of(str(shared))
    assert len(rows) == 3
    for name, short in zip(names, rows, strict=False):
        head, tail = short.split("...")
        assert name.startswith(head)
        assert name.endswith(tail)
        assert len(short) >= 15
    for text in (str(shared), torch_vmm.report(device)):
        table = text[text.index("model") :].partition("limits:")[0]
        assert all(len(line) <= 80 for line in table.splitlines())
        assert all(name in text for name in names), "whole where a line of words tells of it"
    del kept


def test_a_name_may_be_as_long_as_it_likes(shared: SharedMemoryPool) -> None:
    shared.register_model("long " * 40_000)  # by the length squared, a table took 10 s of one of 6000
    assert all(len(line) <= 80 for line in str(shared).splitlines())


def test_a_repr_says_what_is_asleep(shared: SharedMemoryPool, tmp_path: Path) -> None:
    llama = shared.register_model("llama", "64MiB")
    kept = tensor_in(llama, 3 * MIB)
    assert "asleep" not in repr(llama) + repr(shared)
    llama.sleep(tmp_path / "backup")
    where = f"asleep 3 MiB ({tmp_path / 'backup'})"
    assert repr(llama) == f"VirtualMemoryPool('llama', {llama.device}: 0 B mapped, {where}, capacity 64 MiB)"
    assert ", asleep 3 MiB, models: llama)" in repr(shared)
    llama.wake()
    assert "asleep" not in repr(llama) + repr(shared)
    del kept


def columns_of(text: str) -> int:
    return sum(1 + (unicodedata.east_asian_width(each) in "WF") for each in text)


STRANGE = ["two\nlines", "a\ttab", "\x1b[31mred", "back\rwards", "next\x85line", "a\u2028b"]


def test_a_name_is_one_line_wherever_it_is_shown(shared: SharedMemoryPool, device: str, tmp_path: Path) -> None:
    for name in STRANGE:
        shared.register_model(name, floor="1MiB")
    first = shared[STRANGE[0]]
    with first.tag("weights\n\x1b[2J"):
        kept = torch.ones(MIB, dtype=torch.uint8, device=device)
    told = first.sleep(tmp_path / "a\nfile")
    texts = [str(shared), torch_vmm.report(device), first.memory_summary()]
    for text in [*(line for each in texts for line in each.split("\n")), repr(shared), repr(told), repr(first)]:
        assert text.isprintable(), text
    for text in (*texts[:2], repr(shared)):
        assert all(repr(name)[1:-1] in text for name in STRANGE), "as repr() writes it"
    with pytest.raises(KeyError) as refused, torch_vmm.use_model("unknown"):
        pass
    assert str(refused.value).isprintable()
    assert repr(STRANGE[0])[1:-1] in str(refused.value)
    first.wake()
    assert kept.all()


def test_a_summary_says_what_is_asleep(shared: SharedMemoryPool, tmp_path: Path) -> None:
    llama = shared.register_model("llama")
    kept = tensor_in(llama, 3 * MIB)
    awake = llama.memory_summary().splitlines()
    llama.sleep("discard")
    asleep = llama.memory_summary().splitlines()
    (told,) = (line for line in asleep if "asleep" in line)
    assert told == f"|{'asleep 3 MiB (discarded)':^75}|"
    assert len(asleep) == len(awake) + 1
    assert {len(line) for line in asleep} == {77}
    llama.wake()
    file = tmp_path / ("模型" * 30)
    llama.sleep(file)
    asleep = llama.memory_summary().splitlines()
    assert {columns_of(line) for line in asleep} == {77}
    assert str(file) in "".join(line.strip("| ") for line in asleep), "broken, and whole"
    llama.wake()
    del kept


def test_what_is_seen_while_it_is_on_its_way(shared: SharedMemoryPool, device: str) -> None:
    llama = shared.register_model("llama")
    kept, seen = tensor_in(llama, 8 * MIB), []

    def look(done: int, total: int) -> None:
        seen.append(rows_of(str(shared))["llama"]["state"])
        assert "asleep" in repr(llama)
        assert "llama" in torch_vmm.report(device)
        assert "asleep" in llama.memory_summary()

    llama.sleep(progress=look)
    llama.wake(progress=look)
    assert set(seen) == {"asleep"}
    assert rows_of(str(shared))["llama"]["state"] == "awake"
    del kept


def test_one_that_was_closed_while_it_sleeps_says_so(shared: SharedMemoryPool) -> None:
    llama = shared.register_model("llama")
    kept = tensor_in(llama, 3 * MIB)
    llama.sleep()
    llama.close(force=True)
    assert rows_of(str(shared))["llama"]["state"] == "closed"
    assert sleepers(str(shared)) == "asleep 3 MiB: llama 3 MiB (host)"
    del kept
    assert sleepers(str(shared)) == ""


def test_wide_characters_take_two_columns(shared: SharedMemoryPool, device: str) -> None:
    names = ["模型" * 20, "ü模型🦙", "x" * 60, "a name of 模型 with gaps " * 3]
    floors = {names[0]: "1MiB", names[3]: "2MiB"}
    kept = [tensor_in(shared.register_model(each, floor=floors.get(each, 0), priority=-(2**31)), MIB) for each in names]
    for each in names[:2]:
        shared[each].sleep()
    for text in (str(shared), torch_vmm.report(device)):
        heads = next(line for line in text.splitlines() if line.startswith("model"))
        rows = [line for line in text.splitlines() if re.search(r"  (awake|asleep)  ", line)]
        assert {columns_of(re.split("awake|asleep", row)[0]) for row in rows[-4:]} == {heads.index("state")}
        assert {columns_of(row) for row in rows} == {columns_of(heads)}
        # A word alone may be longer: a name that is whole.
        assert all(columns_of(line) <= 80 or line.strip() == names[0] for line in text.splitlines()), text
        assert names[0] in text
        assert any(line.startswith("模") and "..." in line and line.endswith("B") for line in map(str.strip, rows))
        assert " ".join(text.split()).count("a name of 模型 with gaps a name of 模型 with gaps") == 1
    assert {columns_of(line) for line in shared[names[1]].memory_summary().splitlines()} == {77}
    del kept


def test_columns_stand_below_their_heads(shared: SharedMemoryPool) -> None:
    shared.register_model("a model of a long name", physical_limit="2MiB")
    kept = tensor_in(shared.register_model("b", floor="62MiB"), 1000)
    _, heads, *rows = str(shared).splitlines()
    assert len(heads) <= 80
    ends = [heads.index(head) + len(head) for head in heads.split()[2:]]
    assert rows[2].startswith("total")
    for row in rows[:2]:
        assert all(row[end - 1] != " " and row[end : end + 2].strip() == "" for end in ends)
        assert row == row.rstrip()
    del kept


def test_a_repr_is_one_line_and_no_table(shared: SharedMemoryPool) -> None:
    shared.register_model("llama")
    assert repr(shared) == f"SharedMemoryPool({shared.name!r}, {shared.device}: 0 B of 64 MiB, models: llama)"
    assert repr(shared["llama"]).count("\n") == 0
    assert str(shared["llama"]) == repr(shared["llama"])


# -- A device ----------------------------------------------------------------------------------------------------------


def section(text: str, head: str) -> list[str]:
    """Names of the indented rows below the line that begins so."""
    lines = text.splitlines()
    (at,) = (place for place, line in enumerate(lines) if line.startswith(head))
    names = []
    for line in lines[at + 1 :]:
        if line.startswith(" " * 6):  # the rest of that line
            continue
        if not line.startswith("  "):
            break
        names.append(line.split()[0])
    return names


def test_a_device_shows_all_its_models_in_order(device: str, make_shared: MakeShared, make_pool: MakePool) -> None:
    scratch = make_pool(name="scratch", physical_limit="32MiB")
    first, second = make_shared("48MiB"), make_shared("80MiB")
    for shared in (second, first):
        shared.register_model("llama")
    first.register_model("qwen")
    kept = [tensor_in(scratch, 2 * MIB), tensor_in(second["llama"], 6 * MIB)]
    text = torch_vmm.report(device)
    assert text.startswith(f"{scratch.device}, {_C.device(*scratch._device).name}\n")
    names = [line.split("  ")[0] for line in text.splitlines()[2:]]
    assert names[0] == "default"
    assert names.count("scratch") == 1
    assert section(text, f"{first.name}: limit 48 MiB, held 0 B:") == ["llama", "qwen"]
    assert section(text, f"{second.name}: limit 80 MiB, held 6 MiB:") == ["llama"]
    assert text.index("limit 48 MiB") < text.index("limit 80 MiB")  # in order of creation
    assert rows_of(text)["scratch"]["physical"] == "2 MiB"
    del kept


def test_the_devices_totals_are_those_of_its_pools(
    device: str, memory: _C.Device, shared: SharedMemoryPool, pool: VirtualMemoryPool
) -> None:
    pool.floor = "6MiB"
    kept = [tensor_in(shared.register_model("llama"), 4 * MIB), tensor_in(pool, 2 * MIB)]
    text = torch_vmm.report(device)
    models = memory.pools()
    physical = sum(each.physical_bytes for each in models)
    total = rows_of(text)["total"]
    assert total["state"] == str(len(models))
    assert total["allocated"] == _C.format_bytes(sum(each.live_bytes for each in models))
    assert total["physical"] == _C.format_bytes(physical)
    held = memory.committed_bytes
    line = last_line(text)
    assert line.startswith(
        f"limit none, held {_C.format_bytes(held)}: {_C.format_bytes(held - physical)} of it no model's (in the store, "
        "made by hand, or what sparse tensors show as zero); reserved by floors 4 MiB; the device has "
    )
    assert line.endswith(f" of {_C.format_bytes(memory.memory_info()[1])} free")
    del kept


def test_a_limit_of_the_device_is_told(device: str, memory: _C.Device, shared: SharedMemoryPool) -> None:
    memory.set_limit(512 * MIB)
    try:
        assert last_line(torch_vmm.report(device)).startswith("limit 512 MiB, held ")
    finally:
        memory.set_limit(None)


def test_what_a_closed_shared_pool_left_is_there_once(device: str, shared: SharedMemoryPool) -> None:
    kept = tensor_in(shared.register_model("a model that was left"), 4 * MIB)
    shared.close(force=True)
    lines = [line for line in torch_vmm.report(device).splitlines() if "a model that was left" in line]
    assert [re.split(r"\s{2,}", line)[:3] for line in lines] == [["a model that was left", "closed", "4 MiB"]]
    del kept


@pytest.mark.parametrize("wrong", ["meta", "tpu", 3.5, "cuda:999"])
def test_what_is_no_device_is_refused(wrong: object) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError):
        torch_vmm.report(wrong)  # type: ignore[arg-type]


def test_a_device_that_is_not_there_is_not_available() -> None:
    with pytest.raises(torch_vmm.NotAvailableError):
        torch_vmm.report("cuda:99")


def test_tables_can_be_had_while_models_come_and_go(device: str, shared: SharedMemoryPool) -> None:
    failures: list[BaseException] = []
    ended = threading.Event()

    def come_and_go() -> None:
        try:
            for k in range(150):
                model = shared.register_model(f"model {k % 3}")
                with model:
                    kept = torch.empty(MIB, dtype=torch.uint8, device=device)
                shared.unregister_model(f"model {k % 3}", force=True)
                del kept
        except BaseException as error:
            failures.append(error)
        finally:
            ended.set()

    thread = threading.Thread(target=come_and_go)
    thread.start()
    seen = 0
    while not ended.is_set():
        text = str(shared)
        assert last_line(text).startswith("limit 64 MiB, held ")
        assert "total" in torch_vmm.report(device)
        seen += text.count("model ")
    thread.join()
    assert failures == []
    assert seen > 0
    assert list(rows_of(str(shared))) == ["total"]
