"""What a process that is killed leaves of its sleeping models in files, and who comes after it."""

from __future__ import annotations

import os
import signal
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.api.sleeping import is_numbered, numbered
from tests.helpers import MIB, Forked, python
from torch_vmm import SharedMemoryPool, VirtualMemoryPool

_BEGIN = """
import os, signal, time, torch, torch_vmm
torch_vmm.enable({device!r})
pool = torch_vmm.VirtualMemoryPool("1GiB", device={device!r})
with pool:
    tensors = [torch.ones(20 << 20, dtype=torch.uint8, device={device!r}) for _ in range(5)]

def die(done=1, total=2):
    if 0 < done < total:
        os.kill(os.getpid(), signal.SIGKILL)

"""

MOMENTS = {
    "as it goes": "pool.sleep({place!r}, progress=die)",
    "asleep": "pool.sleep({place!r})\ndie()",
    "as it comes": "pool.sleep({place!r})\npool.wake(progress=die)",
}
SIZE = 100 * MIB  # of its model


def program(device: str, code: str) -> str:
    return _BEGIN.format(device=device) + textwrap.dedent(code)


def killed(device: str, code: str) -> None:
    """Runs it until it kills itself."""
    done = python(program(device, code))
    assert done.returncode == -signal.SIGKILL, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.stderr == ""


def sizes(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in folder.iterdir()}


def sleeps_and_wakes(model: VirtualMemoryPool, tensor: torch.Tensor, place: Path, folder: Path) -> None:
    """Nothing but its own file is in the folder meanwhile, and nothing at all afterwards."""
    for _ in range(2):
        model.sleep(place)
        (file,) = folder.iterdir()
        assert model.asleep == {"": str(file)}
        model.wake()
        assert is_numbered(tensor)
        assert list(folder.iterdir()) == []


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", ["llama", ""], ids=["path", "folder"])
def test_what_it_leaves_is_in_nobodys_way(
    device: str, model: VirtualMemoryPool, tmp_path: Path, moment: str, name: str
) -> None:
    tensor = numbered(model, 10 * MIB)
    place = tmp_path / name
    for _ in range(2):  # the second process finds what the first one left
        killed(device, MOMENTS[moment].format(place=str(place)))
        ((left, size),) = sizes(tmp_path).items()
        assert size >= SIZE, "it stays"
        assert name in ("", left)
    sleeps_and_wakes(model, tensor, place, tmp_path)


@pytest.mark.parametrize("name", ["llama", ""], ids=["path", "folder"])
def test_one_that_is_killed_while_it_takes_the_room_is_in_nobodys_way(
    device: str, model: VirtualMemoryPool, tmp_path: Path, name: str
) -> None:
    tensor = numbered(model, MIB)
    killed(
        device,
        f"""
        import threading

        def die_with_its_file():
            while not os.listdir({str(tmp_path)!r}):
                pass
            die()

        threading.Thread(target=die_with_its_file).start()
        pool.sleep({str(tmp_path / name)!r})
        """,
    )
    assert len(sizes(tmp_path)) == 1
    sleeps_and_wakes(model, tensor, tmp_path / name, tmp_path)


@pytest.mark.parametrize("moment", ["as it goes", "asleep"])
def test_it_stays_until_a_model_sleeps_there(
    device: str, model: VirtualMemoryPool, tmp_path: Path, moment: str
) -> None:
    tensor = numbered(model, MIB)
    named, folder, elsewhere = (tmp_path / name for name in ("named", "folder", "elsewhere"))
    for made in (named, folder, elsewhere):
        made.mkdir()
    killed(device, MOMENTS[moment].format(place=str(named / "llama")))
    killed(device, MOMENTS[moment].format(place=str(folder)))
    before = sizes(named), sizes(folder)
    for place in (elsewhere, elsewhere / "llama", named / "qwen", named, folder / "qwen"):
        model.sleep(place)
        model.wake()
    assert (sizes(named), sizes(folder)) == before
    sleeps_and_wakes(model, tensor, named / "llama", named)
    sleeps_and_wakes(model, tensor, folder, folder)


def test_all_that_it_leaves_under_a_name_goes(device: str, model: VirtualMemoryPool, tmp_path: Path) -> None:
    tensor = numbered(model, MIB)
    place = tmp_path / "llama"
    killed(
        device,
        f"""
        for name in "abc":
            with pool.tag(name):
                tensors.append(torch.ones(1000, device={device!r}))
        for name in "abc":
            pool.sleep({{name: {str(place)!r}}})
        pool.wake("a")
        die()
        """,
    )
    assert set(sizes(tmp_path)) == {"llama.2", "llama.3"}
    sleeps_and_wakes(model, tensor, place, tmp_path)


def test_what_is_somebodys_stays(device: str, model: VirtualMemoryPool, tmp_path: Path) -> None:
    tensor = numbered(model, MIB)
    killed(device, MOMENTS["asleep"].format(place=str(tmp_path)))
    mine = ["llama", "torch_vmm-1-2-3.sleep", "torch_vmm-1.sleep.txt"]
    for name in mine:
        (tmp_path / name).write_text("mine")
    model.sleep(tmp_path)
    assert len(sizes(tmp_path)) == len(mine) + 1
    model.wake()
    assert is_numbered(tensor)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == dict.fromkeys(mine, "mine")


# -- Beside processes that live ----------------------------------------------------------------------------------------


@pytest.fixture
def living() -> Iterator[Callable[[str], Forked]]:
    """Starts a program and waits until it prints something; it ends with the test."""
    started: list[Forked] = []

    def start(code: str) -> Forked:
        process = Forked(code, {})
        started.append(process)
        for _ in range(1200):
            if process.out.exists() and process.out.read_text().endswith("\n"):
                return process
            time.sleep(0.05)
        raise AssertionError(process.err.read_text())

    yield start
    for process in started:
        process.wait(0)


def test_a_living_process_keeps_its_file(
    device: str, limited: SharedMemoryPool, tmp_path: Path, living: Callable[[str], Forked]
) -> None:
    model = limited.register_model("model")
    tensor = numbered(model, MIB)
    goes_on = tmp_path / "goes on"
    folder = tmp_path / "folder"
    folder.mkdir()
    other = living(
        program(
            device,
            f"""
            pool.sleep({str(folder)!r})
            print("asleep", flush=True)
            while not os.path.exists({str(goes_on)!r}):
                time.sleep(0.01)
            pool.wake()
            print(all(bool(tensor.all()) for tensor in tensors))
            """,
        )
    )
    theirs = set(sizes(folder))
    killed(device, MOMENTS["as it goes"].format(place=str(folder)))
    assert len(sizes(folder)) == 2
    model.sleep(folder)
    assert theirs < set(sizes(folder))
    assert len(sizes(folder)) == 2, "what was left has gone"
    model.wake()
    assert is_numbered(tensor)
    assert set(sizes(folder)) == theirs
    goes_on.touch()
    done = other.wait(60)
    assert (done.returncode, done.stdout) == (0, "asleep\nTrue\n"), done.stderr
    assert sizes(folder) == {}


@pytest.mark.parametrize("name", ["llama", ""], ids=["path", "folder"])
def test_a_child_that_outlives_it_does_not_keep_its_file(model: VirtualMemoryPool, tmp_path: Path, name: str) -> None:
    tensor = numbered(model, MIB)
    folder, pid = tmp_path / "folder", tmp_path / "pid"
    folder.mkdir()
    killed(
        "cpu",
        f"""
        pool.sleep({str(folder / name)!r})
        reads, writes = os.pipe()
        if os.fork() == 0:
            open({str(pid)!r}, "w").write(str(os.getpid()))
            os.write(writes, b".")
            time.sleep(60)
            os._exit(0)
        os.read(reads, 1)
        die()
        """,
    )
    try:
        os.kill(int(pid.read_text()), 0)  # it lives
        assert len(sizes(folder)) == 1
        sleeps_and_wakes(model, tensor, folder / name, folder)
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)
