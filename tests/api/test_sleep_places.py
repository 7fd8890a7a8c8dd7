"""Where models sleep: places that cannot be, files and how they end, host memory and its bound."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import torch_vmm
from tests.api.sleeping import is_numbered, numbered
from tests.helpers import MIB, python
from torch_vmm import SharedMemoryPool, VirtualMemoryPool

# -- Places that cannot be ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "words"),
    [
        ("hots", "keep='hots'"),
        (7, "keep=7"),
        ([], "no place"),
        ({"nope": "host"}, "no tag 'nope'"),
        ({3: "host"}, "a tag is text"),
        ({"": []}, r"^keep\[''\]=\[\]: no place"),
        ({"": {"": "host"}}, r"^keep\[''\]=\{'': 'host'\}: give"),
        ("/nowhere/llama", "^keep='/nowhere/llama': there is no folder '/nowhere'"),
        (["/nowhere/llama", "host"], "there is no folder '/nowhere'"),
        ({"": Path("/nowhere/llama")}, "there is no folder '/nowhere'"),
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
        with pytest.raises(torch_vmm.InvalidArgumentError, match=f"^keep.*: ?{why}|^keep.* is {why}"):
            model.sleep(named)
    assert is_numbered(tensor)


@pytest.mark.parametrize("keep", ["cuda", torch.device("cuda"), torch.device("cpu")])
def test_no_place(model: VirtualMemoryPool, keep: str | torch.device) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError, match=r'^keep=.*: give "host", "discard"'):
        model.sleep(keep)


# -- Files -------------------------------------------------------------------------------------------------------------


def test_a_file_is_never_overwritten(model: VirtualMemoryPool, tmp_path: Path) -> None:
    tensor = numbered(model, 1000)
    file = tmp_path / "thesis"
    file.write_text("mine")
    with pytest.raises(torch_vmm.InvalidArgumentError, match="exists"):
        model.sleep(file)
    assert file.read_text() == "mine"
    assert is_numbered(tensor)


def test_a_file_of_its_name_is_not_its_own(model: VirtualMemoryPool, tmp_path: Path) -> None:
    tensor = numbered(model, 1000)
    file = tmp_path / "llama"
    model.sleep(file)
    file.rename(tmp_path / "moved")
    file.write_text("mine")
    model.wake()
    assert is_numbered(tensor)
    assert file.read_text() == "mine"


def test_a_link_is_no_place(model: VirtualMemoryPool, tmp_path: Path) -> None:
    tensor = numbered(model, 1000)
    file = tmp_path / "link"
    file.symlink_to(tmp_path / "nowhere")
    with pytest.raises(torch_vmm.InvalidArgumentError, match="exists, and is a symbolic link"):
        model.sleep(file)
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


def test_all_files_of_a_sleep_that_was_stopped_go_when_the_program_ends(device: str, tmp_path: Path) -> None:
    done = python(
        f"""
        import os, sys, torch, torch_vmm
        torch_vmm.enable({device!r})
        shared = torch_vmm.SharedMemoryPool("300MiB", device={device!r})
        pool, other = shared.register_model("llama"), shared.register_model("other")
        with pool:
            tensors = [torch.ones(40 << 20, dtype=torch.uint8, device={device!r}) for _ in range(6)]

        def stop(done, total):
            if done > 100 << 20:
                with other:  # what has gone is another's, and cannot come back
                    sys.held = [torch.empty(100 << 20, dtype=torch.uint8, device={device!r})]
                raise InterruptedError

        try:
            pool.sleep({str(tmp_path / "first")!r}, progress=stop)
        except InterruptedError:
            pool.sleep({str(tmp_path / "second")!r})
        sys.circle = [pool, shared, tensors]
        sys.circle.append(sys.circle)
        print(len(os.listdir({str(tmp_path)!r})))
        """
    )
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
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


# -- Host memory -------------------------------------------------------------------------------------------------------


def test_pinned_memory_is_bounded_and_shared(limited: SharedMemoryPool, tmp_path: Path) -> None:
    first, second = limited.register_model("first"), limited.register_model("second")
    tensors = [numbered(first, 10 * MIB), numbered(second, 10 * MIB, 1)]
    limited.host_backup_limit = "64MiB"  # type: ignore[assignment]
    first.sleep()
    with pytest.raises(torch_vmm.OutOfMemoryError, match="host_backup_limit is 64 MiB") as caught:
        second.sleep()
    assert caught.value.limit == 64 * MIB
    assert not second.is_asleep
    second.sleep(["host", tmp_path / "second"])
    assert second.asleep == {"": str(tmp_path / "second")}
    first.wake()
    assert limited.host_backup_bytes == 64 * MIB, "kept for the next one"
    assert limited.release_host_backups() == 64 * MIB
    second.wake()
    assert [is_numbered(tensor, first) for first, tensor in enumerate(tensors)] == [True, True]
    limited.host_backup_limit = None
    assert limited.host_backup_limit is None


def test_a_process_with_few_addresses_sleeps_in_host_memory() -> None:
    done = python(
        """
        import resource, torch, torch_vmm
        torch_vmm.enable("cpu")
        pool = torch_vmm.VirtualMemoryPool("64MiB", device="cpu")
        with pool:
            x = torch.ones(1000)
        pages = int(open("/proc/self/statm").read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (700 << 20), resource.RLIM_INFINITY))
        pool.sleep()
        pool.wake()
        print(int(x.sum()))
        """
    )
    assert (done.returncode, done.stdout) == (0, "1000\n"), done.stderr


def tagged(model: VirtualMemoryPool, tag: str, count: int) -> torch.Tensor:
    with model.tag(tag):
        return torch.arange(count, dtype=torch.int32, device=model.device)


def test_a_file_that_took_the_name_stays_at_the_programs_end(device: str, tmp_path: Path) -> None:
    done = python(
        f"""
        import os, torch, torch_vmm
        torch_vmm.enable({device!r})
        pool = torch_vmm.VirtualMemoryPool("64MiB", device={device!r})
        with pool:
            x = torch.ones(1000, device={device!r})
        pool.sleep({str(tmp_path / "m")!r})
        os.rename({str(tmp_path / "m")!r}, {str(tmp_path / "elsewhere")!r})
        open({str(tmp_path / "m")!r}, "w").write("mine")
        """
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "m").read_text() == "mine"


def test_a_pipe_with_a_backups_name_is_left_alone(limited: SharedMemoryPool, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "torch_vmm-1.sleep")
    model = limited.register_model("model")
    tensor = numbered(model, 1000)
    model.sleep(str(tmp_path) + os.sep)
    model.wake()
    assert is_numbered(tensor)
    assert os.listdir(tmp_path) == ["torch_vmm-1.sleep"]


def test_a_path_that_is_named_twice_is_two_files(limited: SharedMemoryPool, tmp_path: Path) -> None:
    model = limited.register_model("model")
    tensors = [tagged(model, "a", 1000), tagged(model, "b", 1000)]
    path = str(tmp_path / "m")
    model.sleep({"a": path, "b": [path, "host"]})
    assert model.asleep == {"a": path, "b": path + ".2"}
    model.wake()
    assert all(is_numbered(tensor) for tensor in tensors)


def test_two_threads_that_name_one_path_have_a_file_each(limited: SharedMemoryPool, tmp_path: Path) -> None:
    model = limited.register_model("model")
    tensors = [tagged(model, "a", 4 * MIB), tagged(model, "b", 4 * MIB)]
    path = str(tmp_path / "m")
    for _ in range(10):
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda tag: model.sleep({tag: path}), "ab"))
        assert sorted(model.asleep.values()) == [path, path + ".2"]
        model.wake()
    assert all(is_numbered(tensor) for tensor in tensors)


@pytest.mark.parametrize("is_last", [False, True])
def test_what_is_thrown_away_goes_last(limited: SharedMemoryPool, is_last: bool) -> None:
    model = limited.register_model("model")
    tensors = [numbered(model, 10 * MIB), tagged(model, "w", 10 * MIB)]

    def stop(moved: int, total: int) -> None:
        if moved == total if is_last else moved:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        model.sleep({"": "discard", "w": "host"}, progress=stop)
    assert not model.is_asleep
    assert all(is_numbered(tensor) for tensor in tensors)


def test_a_closed_pool_pins_nothing(make_shared: Callable[[str], SharedMemoryPool], device: str) -> None:
    shared = make_shared("256MiB")
    model = shared.register_model("model")
    tensor = numbered(model, 10 * MIB)
    model.sleep()
    model.wake()
    assert shared.host_backup_bytes != 0, "for the next sleep"
    del tensor
    shared.close()
    assert shared.host_backup_bytes == 0
    shared = make_shared("256MiB")
    model = shared.register_model("model")
    tensor = numbered(model, 10 * MIB)
    model.sleep()
    shared.close(force=True)
    assert shared.host_backup_bytes != 0, "what lives is there"
    del tensor
    gc.collect()
    assert shared.host_backup_bytes == 0


def test_whole_slabs_of_others_make_room(limited: SharedMemoryPool) -> None:
    limited.host_backup_limit = "90MB"  # type: ignore[assignment]  # two slabs of 32 MiB, and 21.8 MiB
    first, second = limited.register_model("first"), limited.register_model("second")
    weights = tagged(first, "weights", 15 * MIB)
    first.seal(weights)
    first.sleep()
    first.wake()
    assert limited.host_backup_bytes == 64 * MIB, "it is unchanged, and may go again"
    tensor = numbered(second, 5 * MIB)
    second.sleep()
    second.wake()
    assert is_numbered(tensor)
    assert is_numbered(weights)
