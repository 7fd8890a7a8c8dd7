"""Models that sleep and wake, as a user sees them."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import torch_vmm
from tests.helpers import MIB, python, tensor_in
from torch_vmm import SharedMemoryPool, VirtualMemoryPool, sleeping

MakeShared = Callable[..., SharedMemoryPool]


def numbered(pool: VirtualMemoryPool, count: int, first: int = 0) -> torch.Tensor:
    with pool:
        return torch.arange(first, first + count, dtype=torch.int32, device=pool.device)


def is_numbered(tensor: torch.Tensor, first: int = 0) -> bool:
    expected = torch.arange(first, first + tensor.numel(), dtype=torch.int32)
    return torch.equal(tensor.cpu(), expected)


@pytest.fixture
def shared(make_shared: MakeShared) -> SharedMemoryPool:
    return make_shared("256MiB")


@pytest.fixture
def model(shared: SharedMemoryPool) -> VirtualMemoryPool:
    return shared.register_model("llama")


@pytest.fixture(params=["host", "file", "folder"])
def keep(request: pytest.FixtureRequest, tmp_path: Path) -> str | Path:
    return {"host": "host", "file": tmp_path / "llama.sleep", "folder": f"{tmp_path}{os.sep}"}[request.param]


def test_it_is_as_before(model: VirtualMemoryPool, keep: str | Path) -> None:
    tensors = [numbered(model, count, first) for first, count in enumerate((3, 1000, MIB, 5 * MIB))]
    addresses = [tensor.data_ptr() for tensor in tensors]
    handle = model.sleep(keep)
    assert handle.done
    assert handle.progress[0] == handle.progress[1] >= 24 * MIB
    assert model.is_asleep
    assert model.physical_memory_usage == 0
    stats = model.stats()
    assert stats.physical_usage == stats.allocated_bytes == 0
    assert stats.asleep_bytes == model.memory_allocated()
    model.wake()
    assert not model.is_asleep
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    assert all(is_numbered(tensor, first) for first, tensor in enumerate(tensors))
    assert model.stats().asleep_bytes == 0


def test_others_have_its_memory_meanwhile(shared: SharedMemoryPool, model: VirtualMemoryPool) -> None:
    other = shared.register_model("qwen")
    held = numbered(model, 50 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        tensor_in(other, 150 * MIB)
    model.sleep()
    taken = tensor_in(other, 150 * MIB)
    assert not taken.any()
    assert shared.global_stats().asleep_bytes == 200 * MIB
    with pytest.raises(torch_vmm.OutOfMemoryError, match="llama"):
        model.wake()
    assert model.is_asleep
    del taken
    model.wake()
    assert is_numbered(held)


def test_what_is_discarded_is_zero(model: VirtualMemoryPool) -> None:
    tensor = numbered(model, MIB)
    model.sleep("discard")
    assert model.asleep == {"": "discarded"}
    model.wake()
    assert not tensor.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e5m2])
def test_what_is_discarded_can_be_poisoned(model: VirtualMemoryPool, dtype: torch.dtype) -> None:
    with model:
        tensor = torch.ones(MIB, dtype=dtype, device=model.device)
        indices = torch.ones(3, dtype=torch.int64, device=model.device)
        flags = torch.zeros(5, dtype=torch.uint8, device=model.device)
    model.sleep("discard", poison=True)
    assert model.asleep == {"": "discarded"}
    model.wake()
    assert tensor.float().isnan().all()
    assert indices.tolist() == [-1, -1, -1]
    assert flags.tolist() == [255] * 5


def test_what_is_kept_is_never_poisoned(model: VirtualMemoryPool, shared: SharedMemoryPool) -> None:
    with model.tag("weights"):
        weights = torch.arange(MIB, dtype=torch.int32, device=model.device)
    with model.tag("kv_cache"):
        cache = torch.ones(MIB, device=model.device)
    model.sleep({"weights": "host", "kv_cache": ["discard"]}, poison=True)
    model.wake()
    assert is_numbered(weights)
    assert cache.isnan().all()
    cache.fill_(1)
    other = shared.register_model("other")
    torch_vmm.swap(model, other, keep={"kv_cache": "discard"}, poison=True)
    model.wake()
    assert is_numbered(weights)
    assert cache.isnan().all()
    with pytest.raises(torch_vmm.InvalidArgumentError, match="poison=True is for what is discarded"):
        model.sleep("host", poison=True)
    with pytest.raises(torch_vmm.InvalidArgumentError, match="poison="):
        model.sleep("discard", poison="yes")  # type: ignore[arg-type]
    assert not model.is_asleep


def test_nothing_is_made_in_it_while_it_sleeps(model: VirtualMemoryPool) -> None:
    tensor = numbered(model, 1000)
    model.sleep()
    with pytest.raises(RuntimeError, match="model 'llama' is asleep; wake"):
        tensor_in(model, 512)
    with pytest.raises(torch_vmm.AsleepError) as caught:
        model.allocate(0, 2 * MIB)
    assert caught.value.model_id == "llama"
    model.wake()
    assert is_numbered(tensor)


def test_what_is_freed_meanwhile_stays_free(model: VirtualMemoryPool) -> None:
    kept, dropped = numbered(model, MIB), numbered(model, 8 * MIB)
    model.sleep()
    del dropped
    handle = model.wake()
    assert handle.progress[1] < 8 * MIB
    assert is_numbered(kept)
    assert model.physical_memory_usage < 32 * MIB


def test_tags_go_where_they_are_sent(model: VirtualMemoryPool) -> None:
    with model.tag("weights"):
        weights = torch.arange(MIB, dtype=torch.int32, device=model.device)
    with model.tag("kv_cache"):
        cache = torch.ones(MIB, dtype=torch.int32, device=model.device)
    rest = numbered(model, 1000)
    model.sleep({"weights": "host", "kv_cache": "discard"})
    assert model.asleep == {"weights": "host", "kv_cache": "discarded"}
    assert is_numbered(rest)
    tensor_in(model, 3 * MIB)  # what has no tag is awake
    model.wake("weights")
    assert is_numbered(weights)
    assert model.asleep == {"kv_cache": "discarded"}
    model.wake()
    assert not cache.any()


@pytest.mark.parametrize(
    ("keep", "words"),
    [
        ("hots", "keep='hots'"),
        (7, "keep=7"),
        ([], "no place"),
        ({"nope": "host"}, "no tag 'nope'"),
        ({3: "host"}, "a tag is text"),
    ],
)
def test_a_place_that_cannot_be(model: VirtualMemoryPool, keep: object, words: str) -> None:
    tensor = numbered(model, 1000)
    with pytest.raises(torch_vmm.InvalidArgumentError, match=words):
        model.sleep(keep)  # type: ignore[arg-type]
    assert not model.is_asleep
    assert is_numbered(tensor)


@pytest.mark.parametrize("keep", ["device:0", "cuda:0", torch.device("cuda", 0), "cuda:99", torch.device("cuda", 99)])
def test_a_device_that_it_cannot_go_to(model: VirtualMemoryPool, keep: str | torch.device) -> None:
    tensor = numbered(model, 1000)
    why = "a model in host memory does not go to a GPU"
    if model.device.type == "cuda":
        why = "there is no such device" if "99" in str(keep) else "the model's own device"
    for named in (keep, ["host", keep], {"": keep}):
        with pytest.raises(torch_vmm.InvalidArgumentError, match=f"^keep=.*: ?{why}|^keep=.* is {why}"):
            model.sleep(named)
    assert is_numbered(tensor)


@pytest.mark.parametrize("keep", ["cuda", torch.device("cuda"), torch.device("cpu")])
def test_no_place(model: VirtualMemoryPool, keep: str | torch.device) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError, match=r'^keep=.*: give "host", "discard"'):
        model.sleep(keep)


def test_a_file_is_never_overwritten(model: VirtualMemoryPool, tmp_path: Path) -> None:
    tensor = numbered(model, 1000)
    file = tmp_path / "thesis"
    file.write_text("mine")
    with pytest.raises(torch_vmm.InvalidArgumentError, match="exists"):
        model.sleep(file)
    assert file.read_text() == "mine"
    assert is_numbered(tensor)


def test_a_file_goes_when_it_is_awake(model: VirtualMemoryPool, tmp_path: Path) -> None:
    tensor = numbered(model, MIB)
    file = tmp_path / "llama"
    model.sleep(file)
    assert file.exists()
    assert model.asleep == {"": str(file)}
    model.wake()
    assert not file.exists()
    assert is_numbered(tensor)


@pytest.mark.parametrize("makes", ["VirtualMemoryPool('64MiB', {0})", "SharedMemoryPool('64MiB', {0})"])
@pytest.mark.parametrize("holds", ["", "sys.circle = [pool, x]; sys.circle.append(sys.circle)"])
def test_a_file_goes_when_the_program_ends(device: str, tmp_path: Path, makes: str, holds: str) -> None:
    done = python(
        f"""
        import os, sys, torch, torch_vmm
        torch_vmm.enable({device!r})
        made = torch_vmm.{makes.format(f"device={device!r}")}
        pool = made.register_model("llama") if isinstance(made, torch_vmm.SharedMemoryPool) else made
        with pool:
            x = torch.ones(1000, device={device!r})
        pool.sleep({str(tmp_path) + os.sep!r})
        {holds}
        print(len(os.listdir({str(tmp_path)!r})))
        """
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert os.listdir(tmp_path) == []


def test_what_wakes_at_the_programs_end_finds_its_file(device: str, tmp_path: Path) -> None:
    done = python(
        f"""
        import atexit, os, torch
        atexit.register(lambda: (pool.wake(), print(int(x.sum()))))  # is called after torch_vmm's own
        import torch_vmm
        torch_vmm.enable({device!r})
        pool = torch_vmm.VirtualMemoryPool("64MiB", device={device!r})
        with pool:
            x = torch.ones(1000, device={device!r})
        pool.sleep({str(tmp_path) + os.sep!r})
        """
    )
    assert (done.returncode, done.stdout) == (0, "1000\n"), done.stderr
    assert os.listdir(tmp_path) == []


def test_a_forked_child_leaves_its_parents_file(tmp_path: Path) -> None:
    done = python(
        f"""
        import os, sys, torch, torch_vmm
        torch_vmm.enable("cpu")
        pool = torch_vmm.VirtualMemoryPool("64MiB", device="cpu")
        with pool:
            x = torch.ones(1000)
        pool.sleep({str(tmp_path) + os.sep!r})
        if (child := os.fork()) == 0:
            sys.exit()
        os.waitpid(child, 0)
        print(len(os.listdir({str(tmp_path)!r})))
        """
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_a_tag_goes_back_to_its_models_file(model: VirtualMemoryPool, tmp_path: Path) -> None:
    with model.tag("kv_cache"):
        cache = torch.arange(MIB, dtype=torch.int32, device=model.device)
    weights = numbered(model, MIB)
    file, beside = tmp_path / "llama", tmp_path / "llama.2"
    model.sleep(file)
    for _ in range(2):
        model.wake("kv_cache")
        assert is_numbered(cache)
        model.sleep({"kv_cache": file})
        assert model.asleep == {"": str(file), "kv_cache": str(beside)}
    model.wake()
    assert is_numbered(weights)
    assert is_numbered(cache)
    assert not list(tmp_path.iterdir())


def test_pinned_memory_is_bounded_and_shared(shared: SharedMemoryPool, tmp_path: Path) -> None:
    first, second = shared.register_model("first"), shared.register_model("second")
    tensors = [numbered(first, 10 * MIB), numbered(second, 10 * MIB, 1)]
    shared.host_backup_limit = "64MiB"  # type: ignore[assignment]
    first.sleep()
    with pytest.raises(torch_vmm.OutOfMemoryError, match="host_backup_limit is 64 MiB") as caught:
        second.sleep()
    assert caught.value.limit == 64 * MIB
    assert not second.is_asleep
    second.sleep(["host", tmp_path / "second"])
    assert second.asleep == {"": str(tmp_path / "second")}
    first.wake()
    assert shared.host_backup_bytes == 64 * MIB, "kept for the next one"
    assert shared.release_host_backups() == 64 * MIB
    second.wake()
    assert [is_numbered(tensor, first) for first, tensor in enumerate(tensors)] == [True, True]
    shared.host_backup_limit = None
    assert shared.host_backup_limit is None


def test_a_swap(shared: SharedMemoryPool) -> None:
    first, second = shared.register_model("first"), shared.register_model("second")
    tensors = [numbered(first, 40 * MIB)]
    first.sleep()
    tensors.append(numbered(second, 40 * MIB, 1))
    handle = torch_vmm.swap(out=second, into=first)
    assert (first.is_asleep, second.is_asleep) == (False, True)
    assert handle.progress == (320 * MIB, 320 * MIB)
    assert is_numbered(tensors[0])
    torch_vmm.swap(first, second)
    assert is_numbered(tensors[1], 1)
    assert shared.global_stats().physical_usage <= 256 * MIB
    with pytest.raises(torch_vmm.InvalidArgumentError, match="two models"):
        torch_vmm.swap(first, first)


def test_a_swap_without_room_is_refused_at_the_call(shared: SharedMemoryPool) -> None:
    out, into, third = (shared.register_model(name) for name in ("out", "into", "third"))
    coming = numbered(into, 40 * MIB)
    into.sleep()
    going, taken = numbered(out, 10 * MIB, 1), numbered(third, 30 * MIB, 2)
    with pytest.raises(torch_vmm.OutOfMemoryError, match="'into': 160 MiB asked to wake in, and with all of 'out'"):
        torch_vmm.swap(out, into, blocking=False)
    assert (out.is_asleep, into.is_asleep) == (False, True)
    assert is_numbered(going, 1)
    assert is_numbered(taken, 2)
    del taken
    torch_vmm.swap(out, into, blocking=False).wait()
    assert is_numbered(coming)


class Swapping:
    """Two models of 160 MiB each, in 32 MiB pieces, of which one sleeps; 256 MiB for both."""

    def __init__(self, shared: SharedMemoryPool) -> None:
        self.out, self.into = shared.register_model("out"), shared.register_model("into")
        self.coming = [numbered(self.into, 8 * MIB, first) for first in range(5)]
        self.into.sleep()
        self.going = [numbered(self.out, 8 * MIB, first) for first in range(10, 15)]

    def are_as_before(self) -> bool:
        assert (self.out.is_asleep, self.into.is_asleep) == (False, True)
        assert all(is_numbered(tensor, first) for first, tensor in enumerate(self.going, 10))
        torch_vmm.swap(out=self.out, into=self.into)
        return all(is_numbered(tensor, first) for first, tensor in enumerate(self.coming))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("at", [0.0, 0.4, 0.9])
def test_a_swap_that_is_stopped(shared: SharedMemoryPool, error: type[BaseException], at: float) -> None:
    swapping = Swapping(shared)

    def stop(done: int, total: int) -> None:
        if done >= total * at:
            raise error("stop")

    with pytest.raises(error, match="stop"):
        torch_vmm.swap(swapping.out, swapping.into, progress=stop)
    assert swapping.are_as_before()
    assert shared.global_stats().physical_usage <= 256 * MIB


def test_whoever_waits_in_a_swap_that_is_stopped_is_told(shared: SharedMemoryPool) -> None:
    swapping, waits = Swapping(shared), threading.Event()

    def stop(done: int, total: int) -> None:
        assert waits.wait(10)
        if done > total // 2:
            raise RuntimeError("stop")

    handle = torch_vmm.swap(swapping.out, swapping.into, blocking=False, progress=stop)
    told: list[str] = []

    def wait() -> None:
        try:
            handle.wait_for(swapping.coming[-1])
        except RuntimeError as raised:
            told.append(str(raised))

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    waits.set()
    for thread in threads:
        thread.join(60)
    assert told == ["stop"] * 3
    with pytest.raises(RuntimeError, match="stop"):
        handle.wait()
    assert swapping.are_as_before()


def test_a_swap_that_is_stopped_when_there_is_no_room_to_go_back_to(shared: SharedMemoryPool) -> None:
    swapping = Swapping(shared)

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            shared.physical_limit = "100MiB"  # type: ignore[assignment]
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        torch_vmm.swap(swapping.out, swapping.into, progress=stop)
    # What has gone of `out` sleeps, and nothing is lost.
    assert swapping.out.is_asleep
    assert swapping.into.is_asleep
    shared.physical_limit = "256MiB"  # type: ignore[assignment]
    swapping.out.wake()
    assert swapping.are_as_before()


def test_beside_the_program(model: VirtualMemoryPool) -> None:
    tensors = [numbered(model, 4 * MIB, first) for first in range(8)]
    handle = model.sleep(blocking=False)
    handle.wait()
    assert handle.done
    handle = model.wake(blocking=False)
    for first, tensor in enumerate(tensors):
        handle.wait_for(tensor)
        assert is_numbered(tensor, first)
    handle.wait()
    assert not model.is_asleep
    assert is_numbered(numbered(model, 1000))


def test_beside_a_program_that_never_lets_go_of_python(model: VirtualMemoryPool) -> None:
    tensor = numbered(model, 40 * MIB)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # whoever waits for Python's lock waits until this thread waits for something
    try:
        handle = model.sleep(blocking=False)
        deadline = time.monotonic() + 60
        while handle.progress[0] < 160 * MIB:
            assert time.monotonic() < deadline
    finally:
        sys.setswitchinterval(before)
    handle.wait()
    model.wake()
    assert is_numbered(tensor)


def test_progress_is_told_and_may_stop_it(model: VirtualMemoryPool) -> None:
    tensor = numbered(model, 40 * MIB)
    told: list[tuple[int, int]] = []
    model.sleep(progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (160 * MIB, 160 * MIB)
    assert told == sorted(told)
    model.wake()

    def stop(done: int, total: int) -> None:
        if done > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.sleep(progress=stop)
    assert not model.is_asleep
    assert is_numbered(tensor)
    model.sleep()
    with pytest.raises(KeyboardInterrupt):
        model.wake(progress=stop)
    assert model.is_asleep
    model.wake()
    assert is_numbered(tensor)


@pytest.mark.parametrize("tags", [b"w", bytearray(b"w"), 3])
def test_tags_are_text(model: VirtualMemoryPool, tags: object) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError, match=r"^tags=.*w?.*: give a tag's name, or several$"):
        model.wake(tags)  # type: ignore[arg-type]


class Waits:
    """In the place of the extension's transfer: what was waited for."""

    done = total = 0

    def __init__(self) -> None:
        self.addresses: list[int] = []

    def wait_for(self, address: int, size: int) -> bool:
        self.addresses.append(address)
        return size > 0


def test_all_that_a_tensor_wraps_is_waited_for(model: VirtualMemoryPool) -> None:
    first, second, third = (numbered(model, 1000) for _ in range(3))
    model.sleep()
    handle = model.wake(blocking=False)
    handle.wait_for(TwoTensor(TwoTensor(first, second), TwoTensor(second, third)))
    handle.wait()
    waits = Waits()
    handle._moving = waits  # type: ignore[assignment]
    handle.wait_for(TwoTensor(TwoTensor(first, second), TwoTensor(second, third)))
    assert waits.addresses == [each.data_ptr() for each in (first, second, second, third)]
    with pytest.raises(torch_vmm.InvalidArgumentError, match="made of other tensors"):
        handle.wait_for(torch.eye(3).to_sparse())


def test_all_that_a_tensor_wraps_is_sealed(model: VirtualMemoryPool) -> None:
    with model.tag("weights"):
        inner = [torch.ones(1000, device=model.device) for _ in range(2)]
    model.seal(TwoTensor(*inner))
    assert all(map(torch_vmm.sealed, inner))
    model.unseal([TwoTensor(*inner)])
    assert not any(map(torch_vmm.sealed, inner))


def columns_of(line: str) -> int:
    return sum(1 + (unicodedata.east_asian_width(each) in "WF") for each in line)


@pytest.mark.parametrize("name", ["llama", "a" * 100, "\u8a71\u3059" * 20, "two\nlines\tand\x1b[2J"])
@pytest.mark.parametrize("columns", [0, 3, 10, 20, 40, 80, 200])
def test_a_bar_is_one_line_of_whole_numbers(name: str, columns: int) -> None:
    bar = sleeping._Bar(name)
    for moved, seconds in ((0, 0.0), (0, 0.1), (640 * MIB, 0.1), (2048 * MIB, 2.0)):
        line = bar._line(moved, 2048 * MIB, seconds, columns)
        assert columns_of(line) == columns
        assert line.isprintable()
        numbers = re.sub(r"^.*?(\[[# ]*\])?(?=( \d|$))", "", line.rstrip(), count=1) if columns >= 20 else ""
        assert re.fullmatch(r"( \S+ (B|MiB|GiB) of 2 GiB(, \S+ GiB/s(, \d+\.\d s left)?)?| \d+ %)?", numbers), line
        assert ("left" in line) == (columns >= 80 and moved > 0)
        assert moved or "/s" not in line


def test_a_bar_is_drawn_in_a_terminal(
    model: VirtualMemoryPool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tensor = numbered(model, 10 * MIB)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    model.sleep(progress=True)
    first, *_, last = capsys.readouterr().err.split("\r")[1:]
    assert "0 B of 40 MiB " in first + " "
    assert "/s" not in first
    assert last.endswith(" s left\n")
    model.wake()
    assert is_numbered(tensor)


def test_whoever_knows_the_memory_is_told(model: VirtualMemoryPool) -> None:
    numbered(model, 1000)
    told: list[str] = []
    model.on_remap(lambda: told.append("goes"), lambda: told.append("is back"))
    model.sleep()
    assert told == ["goes"]
    model.sleep()
    model.wake()
    model.wake()
    assert told == ["goes", "is back"]
    with pytest.raises(torch_vmm.InvalidArgumentError, match="before=3"):
        model.on_remap(3)  # type: ignore[arg-type]


def test_where_one_of_them_refuses_those_before_it_are_told(model: VirtualMemoryPool) -> None:
    tensor = numbered(model, 1000)
    told: list[str] = []

    def refuse() -> None:
        told.append("refuses")
        raise ValueError("no")

    model.on_remap(lambda: told.append("first goes"), lambda: told.append("first is back"))
    model.on_remap(refuse, lambda: told.append("refuser is back"))
    model.on_remap(lambda: told.append("third goes"), lambda: told.append("third is back"))
    with pytest.raises(ValueError, match="no"):
        model.sleep()
    assert told == ["first goes", "refuses", "first is back"]
    assert not model.is_asleep
    assert is_numbered(tensor)


def test_where_nothing_goes_nobody_is_told(model: VirtualMemoryPool) -> None:
    tensor = numbered(model, 1000)
    told: list[str] = []
    model.on_remap(lambda: told.append("goes"), lambda: told.append("is back"))
    assert model.sleep({}).progress == (0, 0)
    assert told == []
    assert is_numbered(tensor)


def test_training_goes_on_where_it_was(model: VirtualMemoryPool) -> None:
    def losses(sleeps: bool) -> list[float]:
        torch.manual_seed(0)
        with model:
            net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)).to(
                model.device
            )
            optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
            found = []
            for _ in range(4):
                batch = torch.randn(32, 64, device=model.device)
                loss = net(batch).square().mean()
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
                found.append(float(loss.detach()))
                if sleeps:
                    model.sleep()
                    model.wake()
        return found

    assert losses(sleeps=True) == losses(sleeps=False)


def test_two_threads_do_not_move_one_model_at_once(model: VirtualMemoryPool) -> None:
    tensor = numbered(model, 40 * MIB)
    inside, go_on = threading.Event(), threading.Event()

    def hold(done: int, total: int) -> None:
        inside.set()
        go_on.wait(10)

    thread = threading.Thread(target=lambda: model.sleep(progress=hold))
    thread.start()
    assert inside.wait(10)
    try:
        with pytest.raises(torch_vmm.VmmError, match="on its way"):
            model.wake()
        with pytest.raises(torch_vmm.VmmError, match="on its way"):
            model.sleep()
    finally:
        go_on.set()
        thread.join()
    assert model.is_asleep
    model.wake()
    assert is_numbered(tensor)


def test_a_closed_one_says_so(make_shared: MakeShared) -> None:
    shared = make_shared("64MiB")
    model = shared.register_model("gone")
    model.close()
    with pytest.raises(torch_vmm.InvalidArgumentError, match="closed"):
        model.sleep()


def test_one_closed_by_force_while_it_sleeps_keeps_its_tensors(shared: SharedMemoryPool) -> None:
    model = shared.register_model("leaving")
    tensor = numbered(model, MIB)
    model.sleep()
    model.close(force=True)
    model.wake()
    assert is_numbered(tensor)


def test_one_that_is_dropped_asleep_leaves_nothing(shared: SharedMemoryPool, tmp_path: Path) -> None:
    model = shared.register_model("dropped")
    tensor = numbered(model, MIB)
    model.sleep(tmp_path / "backup")
    del tensor
    shared.unregister_model("dropped")
    assert list(tmp_path.iterdir()) == []
    assert shared.global_stats().allocated_bytes == 0


def test_seals_are_there_again(model: VirtualMemoryPool) -> None:
    with model:
        weights = torch_vmm.aligned((2 * MIB,), torch.uint8, model.device)
    weights.fill_(7)
    model.seal(weights)
    model.sleep()
    assert torch_vmm.sealed(weights)
    model.wake()
    assert torch_vmm.sealed(weights)
    assert bool((weights == 7).all())
    model.unseal(weights)


def test_waiting_for_what_does_not_come_says_so(model: VirtualMemoryPool) -> None:
    with model.tag("weights"):
        weights = torch.ones(4 * MIB, dtype=torch.uint8, device=model.device)
    with model.tag("cache"):
        cache = torch.ones(4 * MIB, dtype=torch.uint8, device=model.device)
    model.sleep()
    handle = model.wake("weights", blocking=False)
    handle.wait_for(weights)
    with pytest.raises(torch_vmm.AsleepError):
        handle.wait_for(cache)
    handle.wait()
    model.wake()
    handle.wait_for(cache)
    assert int(cache[-1]) == int(weights[-1]) == 1


def test_what_is_sealed_is_copied_once(shared: SharedMemoryPool, model: VirtualMemoryPool) -> None:
    with model.tag("weights"):
        weights = torch.arange(4 * MIB, dtype=torch.int32, device=shared.device)
    model.seal(weights)
    copied = []
    for _ in range(3):
        handle = model.sleep(blocking=False)
        handle.wait()
        copied.append(handle.progress[0])
        model.wake()
        assert torch_vmm.sealed(weights)
        assert int(weights[-1]) == 4 * MIB - 1
    assert copied == [16 * MIB, 0, 0]
    model.unseal(weights)
    weights.add_(1)
    model.seal(weights)
    model.sleep()
    assert shared.host_backup_bytes >= 16 * MIB
    model.wake()
    assert int(weights[-1]) == 4 * MIB
    assert shared.release_host_backups() >= 16 * MIB
    assert shared.host_backup_bytes == 0
    model.unseal(weights)


def test_elastic_and_sparse_tensors_sleep_too(model: VirtualMemoryPool) -> None:
    with model:
        grown = torch_vmm.elastic((4, MIB), torch.int32, model.device, max_shape=(64, MIB))
        table = torch_vmm.sparse((64, MIB), torch.int32, model.device)
    grown.fill_(3)
    table.commit(slice(2, 4))
    table[2:4] = 5
    model.sleep()
    assert model.physical_memory_usage == 0
    with pytest.raises(torch_vmm.AsleepError):
        grown.resize_(8)
    model.wake()
    assert bool((grown == 3).all())
    assert bool((table[2:4] == 5).all())
    grown.resize_(8)
    grown[4:] = 4
    assert bool((grown[:4] == 3).all())


def test_what_an_alias_shows_stays(model: VirtualMemoryPool) -> None:
    with model:
        ring = torch_vmm.aligned((2 * MIB,), torch.uint8, model.device)
        twice = torch_vmm.alias(ring, 2)
    ring.fill_(9)
    other = numbered(model, MIB)
    model.sleep()
    assert bool((twice == 9).all())
    model.wake()
    ring.fill_(8)
    assert bool((twice == 8).all())
    assert is_numbered(other)


def test_the_default_model(shared: SharedMemoryPool, model: VirtualMemoryPool) -> None:
    device = model.device
    torch_vmm.set_default_model(model)
    try:
        tensor = torch.empty(MIB, dtype=torch.uint8, device=device)
        assert torch_vmm.pool_of(tensor) is model
        assert torch_vmm.current_pool(device) is model
        other = shared.register_model("other")
        with other:
            assert torch_vmm.current_pool(device) is other
    finally:
        torch_vmm.reset_default_model(device)
    assert torch_vmm.current_pool(device) is not model
    del tensor
    with pytest.raises(torch_vmm.InvalidArgumentError, match="give a pool"):
        torch_vmm.set_default_model("llama")  # type: ignore[arg-type]
    torch_vmm.set_default_model(model)
    model.close()
    assert torch_vmm.current_pool(device) is not model, "as long as it is open"
