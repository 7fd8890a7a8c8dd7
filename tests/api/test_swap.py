"""Models that change places: swap(), and what both are where it is refused or stopped."""

from __future__ import annotations

import threading

import pytest
import torch

import torch_vmm
from tests.api.sleeping import is_numbered, numbered
from tests.helpers import MIB
from torch_vmm import SharedMemoryPool


def test_a_swap(limited: SharedMemoryPool) -> None:
    first, second = limited.register_model("first"), limited.register_model("second")
    tensors = [numbered(first, 40 * MIB)]
    first.sleep()
    tensors.append(numbered(second, 40 * MIB, 1))
    handle = torch_vmm.swap(out=second, into=first)
    assert (first.is_asleep, second.is_asleep) == (False, True)
    assert handle.progress == (320 * MIB, 320 * MIB)
    assert is_numbered(tensors[0])
    torch_vmm.swap(first, second)
    assert is_numbered(tensors[1], 1)
    assert limited.global_stats().physical_usage <= 256 * MIB
    with pytest.raises(torch_vmm.InvalidArgumentError, match="two models"):
        torch_vmm.swap(first, first)


def test_a_swap_without_room_is_refused_at_the_call(limited: SharedMemoryPool) -> None:
    out, into, third = (limited.register_model(name) for name in ("out", "into", "third"))
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

    def __init__(self, limited: SharedMemoryPool) -> None:
        self.out, self.into = limited.register_model("out"), limited.register_model("into")
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
def test_a_swap_that_is_stopped(limited: SharedMemoryPool, error: type[BaseException], at: float) -> None:
    swapping = Swapping(limited)

    def stop(done: int, total: int) -> None:
        if done >= total * at:
            raise error("stop")

    with pytest.raises(error, match="stop"):
        torch_vmm.swap(swapping.out, swapping.into, progress=stop)
    assert swapping.are_as_before()
    assert limited.global_stats().physical_usage <= 256 * MIB


def test_whoever_waits_in_a_swap_that_is_stopped_is_told(limited: SharedMemoryPool) -> None:
    swapping, waits = Swapping(limited), threading.Event()

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


def test_a_swap_that_is_stopped_when_there_is_no_room_to_go_back_to(limited: SharedMemoryPool) -> None:
    swapping = Swapping(limited)

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            limited.physical_limit = "100MiB"  # type: ignore[assignment]
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        torch_vmm.swap(swapping.out, swapping.into, progress=stop)
    # What has gone of `out` sleeps, and nothing is lost.
    assert swapping.out.is_asleep
    assert swapping.into.is_asleep
    limited.physical_limit = "256MiB"  # type: ignore[assignment]
    swapping.out.wake()
    assert swapping.are_as_before()


def test_room_that_the_parts_of_another_model_have_counts_together(limited: SharedMemoryPool) -> None:
    third, out, into = (limited.register_model(name) for name in ("third", "out", "into"))
    coming = numbered(into, 40 * MIB)  # 160 MiB
    into.sleep(release=True)
    with third.tag("little"):
        little = torch.empty(10 * MIB, dtype=torch.uint8, device=third.device)
    with third.tag("much"):
        much = torch.empty(120 * MIB, dtype=torch.uint8, device=third.device)
    assert third.tags == {"little": 10 * MIB, "much": 120 * MIB}
    del little, much
    going = numbered(out, 10 * MIB, 1)  # 40 MiB
    torch_vmm.swap(out=out, into=into)
    assert is_numbered(coming)
    del going


def test_above_a_lowered_limit_what_leaves_pays_for_the_excess_first(limited: SharedMemoryPool) -> None:
    out, into, other = (limited.register_model(name) for name in ("out", "into", "other"))
    coming = numbered(into, 36 * MIB // 4)
    into.sleep()
    leaving, beside = numbered(out, 40 * MIB // 4), numbered(other, 16 * MIB // 4)
    with out.tag("cache"):
        cache = torch.ones(2 * MIB, dtype=torch.uint8, device=out.device)
    limited.physical_limit = "48MiB"  # 58 MiB are in use, and stay
    with pytest.raises(torch_vmm.OutOfMemoryError, match="there would be 32 MiB"):
        torch_vmm.swap(out, into, keep={"": "host", "cache": "discard"})
    assert out.asleep == {}
    assert is_numbered(leaving)
    assert is_numbered(beside)
    assert bool((cache == 1).all())
    limited.physical_limit = "64MiB"
    torch_vmm.swap(out, into)
    assert is_numbered(coming)
