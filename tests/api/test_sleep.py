"""Models that sleep and wake, as a user sees them: what they hold is as before, and others have their memory."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import torch_vmm
from tests.api.sleeping import is_numbered, numbered
from tests.helpers import MIB, tensor_in
from torch_vmm import SharedMemoryPool, VirtualMemoryPool

MakeShared = Callable[..., SharedMemoryPool]


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


def test_others_have_its_memory_meanwhile(limited: SharedMemoryPool, model: VirtualMemoryPool) -> None:
    other = limited.register_model("qwen")
    held = numbered(model, 50 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        tensor_in(other, 150 * MIB)
    model.sleep()
    taken = tensor_in(other, 150 * MIB)
    assert not taken.any()
    assert limited.global_stats().asleep_bytes == 200 * MIB
    with pytest.raises(torch_vmm.OutOfMemoryError, match="llama"):
        model.wake()
    assert model.is_asleep
    del taken
    model.wake()
    assert is_numbered(held)


def test_nothing_is_made_in_it_while_it_sleeps(model: VirtualMemoryPool) -> None:
    tensor = numbered(model, 1000)
    model.sleep()
    with pytest.raises(RuntimeError, match="model 'llama' is asleep; wake") as by_torch:
        tensor_in(model, 512)
    with pytest.raises(torch_vmm.AsleepError) as caught:
        model.allocate(0, 2 * MIB)
    assert caught.value.model_id == "llama"
    assert str(by_torch.value) == str(caught.value)
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


def test_one_that_another_thread_is_in_is_not_put_to_sleep(make_shared: MakeShared) -> None:
    shared = make_shared("64MiB")
    model, other = shared.register_model("model"), shared.register_model("other")
    kept = tensor_in(model, 4 * MIB).fill_(1)
    with model.tag("cache"):
        cache = tensor_in(model, 4 * MIB)
    entered, leaves = threading.Event(), threading.Event()

    def work() -> None:
        with model:
            entered.set()
            leaves.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    entered.wait(30)
    for attempt in (model.sleep, lambda: torch_vmm.swap(out=model, into=other)):
        with pytest.raises(torch_vmm.VmmError, match=r"model 'model' cannot go to sleep: .* on another thread, 1 time"):
            attempt()
        assert not model.is_asleep
    model.sleep(keep={"cache": "discard"})  # nobody is in that
    model.wake()
    leaves.set()
    thread.join()
    with model:  # the calling thread's own, which knows what it does
        model.sleep()
        model.wake()
    assert bool((kept == 1).all())
    del cache


def test_one_that_a_thread_enters_meanwhile_is_not_put_to_sleep_under_it(model: VirtualMemoryPool) -> None:
    # The thread comes between the first look at who is in it and the mark that it takes no more.
    ends = threading.Event()
    under_it: list[int] = []
    met = 0

    def work() -> None:
        nonlocal met
        while not ends.is_set():
            with contextlib.suppress(RuntimeError), model:
                taken = torch.empty(1000, device=model.device)  # it was awake, and this thread is in it
                met += 1
                under_it.extend(1 for _ in range(20) if model.is_asleep)
                del taken
            sum(range(2000))  # out of it for a moment

    thread = threading.Thread(target=work)
    thread.start()
    slept = 0
    try:
        for _ in range(300):
            with contextlib.suppress(torch_vmm.VmmError):
                model.sleep()
                slept += 1
            with contextlib.suppress(torch_vmm.VmmError):
                model.wake()
    finally:
        ends.set()
        thread.join()
    assert met > 0
    assert not under_it, f"{len(under_it)} of {slept} sleeps"


def test_a_thread_that_ends_within_has_left(model: VirtualMemoryPool) -> None:
    for _ in range(20):
        thread = threading.Thread(target=model.__enter__)
        thread.start()
        thread.join()
        model.sleep()
        model.wake()


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


# -- Tags --------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("tags", [b"w", bytearray(b"w"), 3])
def test_tags_are_text(model: VirtualMemoryPool, tags: object) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError, match=r"^tags=.*w?.*: give a tag's name, or several$"):
        model.wake(tags)  # type: ignore[arg-type]


# -- What is thrown away -----------------------------------------------------------------------------------------------


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


def test_what_is_kept_is_never_poisoned(model: VirtualMemoryPool, limited: SharedMemoryPool) -> None:
    with model.tag("weights"):
        weights = torch.arange(MIB, dtype=torch.int32, device=model.device)
    with model.tag("kv_cache"):
        cache = torch.ones(MIB, device=model.device)
    model.sleep({"weights": "host", "kv_cache": ["discard"]}, poison=True)
    model.wake()
    assert is_numbered(weights)
    assert cache.isnan().all()
    cache.fill_(1)
    other = limited.register_model("other")
    torch_vmm.swap(model, other, keep={"kv_cache": "discard"}, poison=True)
    model.wake()
    assert is_numbered(weights)
    assert cache.isnan().all()
    with pytest.raises(torch_vmm.InvalidArgumentError, match="poison=True is for what is discarded"):
        model.sleep("host", poison=True)
    with pytest.raises(torch_vmm.InvalidArgumentError, match="poison="):
        model.sleep("discard", poison="yes")  # type: ignore[arg-type]
    assert not model.is_asleep


# -- Seals -------------------------------------------------------------------------------------------------------------


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


def test_what_is_sealed_is_copied_once(limited: SharedMemoryPool, model: VirtualMemoryPool) -> None:
    with model.tag("weights"):
        weights = torch.arange(4 * MIB, dtype=torch.int32, device=limited.device)
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
    assert limited.host_backup_bytes >= 16 * MIB
    model.wake()
    assert int(weights[-1]) == 4 * MIB
    assert limited.release_host_backups() >= 16 * MIB
    assert limited.host_backup_bytes == 0
    model.unseal(weights)


# -- The end -----------------------------------------------------------------------------------------------------------


def test_a_closed_one_says_so(make_shared: Callable[..., SharedMemoryPool]) -> None:
    shared = make_shared("64MiB")
    model = shared.register_model("gone")
    model.close()
    with pytest.raises(torch_vmm.InvalidArgumentError, match="closed"):
        model.sleep()


def test_one_closed_by_force_while_it_sleeps_keeps_its_tensors(limited: SharedMemoryPool) -> None:
    model = limited.register_model("leaving")
    tensor = numbered(model, MIB)
    model.sleep()
    model.close(force=True)
    model.wake()
    assert is_numbered(tensor)


def test_one_that_is_dropped_asleep_leaves_nothing(limited: SharedMemoryPool, tmp_path: Path) -> None:
    model = limited.register_model("dropped")
    tensor = numbered(model, MIB)
    model.sleep(tmp_path / "backup")
    del tensor
    limited.unregister_model("dropped")
    assert list(tmp_path.iterdir()) == []
    assert limited.global_stats().allocated_bytes == 0


def test_above_a_lowered_limit_nothing_of_what_sleeps_stays(limited: SharedMemoryPool) -> None:
    sleeper, other = limited.register_model("sleeper"), limited.register_model("other")
    tensor, beside = numbered(sleeper, 100 * MIB // 4), numbered(other, 50 * MIB // 4)
    limited.physical_limit = "64MiB"
    sleeper.sleep()
    assert limited.global_stats().physical_usage <= 64 * MIB
    del beside
    sleeper.close(force=True)
    with pytest.raises(torch_vmm.OutOfMemoryError):
        sleeper.wake()
    limited.physical_limit = "128MiB"
    sleeper.wake()
    assert is_numbered(tensor)


def test_one_whose_tag_sleeps_can_have_another_limit_once_it_is_closed(limited: SharedMemoryPool) -> None:
    model = limited.register_model("llama")
    with model.tag("weights"):
        tensor = torch.full((40 * MIB,), 7, dtype=torch.uint8, device=model.device)
    model.sleep()
    model.physical_limit = "8MiB"
    model.close(force=True)
    with pytest.raises(torch_vmm.OutOfMemoryError):
        model.wake()
    model.physical_limit = "64MiB"
    model.wake()
    assert bool((tensor == 7).all())


def test_one_that_was_closed_asleep_can_have_another_limit_to_wake_in(limited: SharedMemoryPool) -> None:
    model = limited.register_model("llama")
    tensor = numbered(model, 40 * MIB // 4)
    model.sleep()
    model.physical_limit = "8MiB"
    model.close(force=True)
    with pytest.raises(torch_vmm.OutOfMemoryError, match="raise the limit of pool 'llama' by 32 MiB"):
        model.wake()
    model.physical_limit = None
    model.wake()
    assert is_numbered(tensor)
    with pytest.raises(torch_vmm.InvalidArgumentError, match="closed"):
        model.physical_limit = None
