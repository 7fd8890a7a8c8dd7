"""Beside many streams nothing is missing that nobody uses.

A fence on each of 64 streams costs so much that former addresses are dropped only when many have gathered. Whoever
needs what waits for that must get it all the same, before a model is evicted or a request refused. In processes of
their own, as a device never forgets a stream.
"""

from __future__ import annotations

import textwrap

import pytest

from tests.helpers import run

PRELUDE = """
import torch
import torch_vmm
from torch_vmm import SharedMemoryPool

MIB = 1 << 20
torch_vmm.enable("cpu")
with torch_vmm.MemoryPool("cpu") as buffers:
    for number in range(1, 65):
        buffers.alloc(256, stream=number).free()
asked = []


def pool(limit):
    shared = SharedMemoryPool(limit, "cpu")
    shared.on_pressure(lambda requested, asker: asked.append(requested))
    return shared


def tensor(model, mib):
    with torch_vmm.use_model(model):
        return torch.empty(mib * MIB, dtype=torch.uint8)


def leave_on_the_shelf(model, mib):
    model.allocate(0, mib * MIB)
    model.deallocate(0, mib * MIB)


"""

PROGRAMS = {
    "a model wakes": """
        shared = pool("128MiB")
        a, b = shared.register_model("a"), shared.register_model("b")
        kept = tensor(b, 68).fill_(3)
        b.sleep()
        leave_on_the_shelf(a, 120)
        b.wake()
        assert not asked and bool((kept == 3).all())
    """,
    **{
        f"a {size} request": f"""
        shared = pool("128MiB")
        a, b = shared.register_model("a"), shared.register_model("b")
        leave_on_the_shelf(a, 126)
        kept = tensor(b, {mib})
        assert not asked
    """
        for size, mib in {"small": 5, "large": 40}.items()
    },
    "what a model left that was unregistered by force": """
        shared = pool("128MiB")
        a, b = shared.register_model("a"), shared.register_model("b")
        large, small = tensor(a, 120), torch_vmm.use_model(a)(lambda: torch.empty(9))()
        del large
        shared.unregister_model("a", force=True)
        kept = tensor(b, 20)
        assert not asked
    """,
    "a spilled tensor": """
        shared = pool("512MiB")
        a, b = (shared.register_model(name, "1GiB", physical_limit="16MiB", spill="host") for name in "ab")
        shared.spill_limit = "128MiB"
        gone = tensor(a, 120)
        del gone
        kept = tensor(b, 48)
        assert shared.global_stats().spilled_bytes <= 128 * MIB
    """,
    "a lowered limit": """
        shared = pool("1GiB")
        a = shared.register_model("a")
        tensors = [tensor(a, 32) for _ in range(8)]
        shared.physical_limit = "64MiB"
        tensors.clear()
        assert shared.global_stats().physical_usage <= 64 * MIB
        kept = tensor(a, 1)
    """,
    "addresses of freed pages": """
        shared = pool("256MiB")
        a = shared.register_model("a", virtual_capacity="32MiB")
        shared.allocate_for_model("a", "32MiB")
        shared.deallocate_for_model("a", "4MiB", "8MiB")
        shared.allocate_for_model("a", "8MiB")
        assert not asked
    """,
    "a shelf's bound": """
        a = torch_vmm.VirtualMemoryPool("1GiB", device="cpu", page_size="128MiB")
        leave_on_the_shelf(a, 1024)
        for _ in range(3):
            torch_vmm.use_model(a)(lambda: torch.empty(9))()
        assert a.stats().physical_usage <= 256 * MIB
        assert torch_vmm._C.device("cpu", 0).committed_bytes <= 512 * MIB
    """,
    "numbers": """
        shared = pool("256MiB")
        leave_on_the_shelf(shared.register_model("a"), 100)
        shared.global_stats()
        stats = shared.global_stats()
        assert stats.quarantined_bytes == 0 and stats.store_bytes == 100 * MIB
    """,
}


@pytest.mark.parametrize("what", PROGRAMS)
def test_what_nobody_uses_is_there(what: str) -> None:
    run(PRELUDE + textwrap.dedent(PROGRAMS[what]))


def test_what_nothing_could_place_takes_no_idle_memory() -> None:
    run("""
        import torch
        import torch_vmm

        MIB = 1 << 20
        torch_vmm.enable("cpu")
        pool = torch_vmm.VirtualMemoryPool("1GiB", device="cpu")
        pool.allocate(500 * MIB, 2 * MIB)
        with pool:
            torch.empty(320 * MIB, dtype=torch.uint8)
            try:
                torch.empty(600 * MIB, dtype=torch.uint8)
            except torch.OutOfMemoryError:
                assert pool.stats().idle_bytes == 320 * MIB
            else:
                raise AssertionError("a page lies in between")
    """)


def test_a_free_pool_has_addresses_for_what_lies_across_its_idle_memory() -> None:
    """On either side of it none is mapped, and it begins and ends nowhere that a search begins."""
    run("""
        import torch
        import torch_vmm

        MIB = 1 << 20
        torch_vmm.enable("cpu")
        shared = torch_vmm.SharedMemoryPool("64MiB", "cpu")
        a, b = shared.register_model("a", "64MiB"), shared.register_model("b")
        for model, mib in ((a, 60), (b, 40), (a, 60)):  # the second takes what lies around 14 MiB of the first's
            with model:
                torch.empty(mib * MIB, dtype=torch.uint8)
    """)
