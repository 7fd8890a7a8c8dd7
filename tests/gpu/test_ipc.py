"""Tensors that several processes share: torch_vmm to torch_vmm, and to and from torch's own allocator."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

import torch_vmm
from tests.gpu.conftest import Busy
from tests.gpu.patterns import intact, queue_stamp
from tests.gpu.workloads import ipc
from tests.gpu.workloads.ipc import Other, OtherError
from tests.helpers import GIB, KIB, MIB
from tests.standin.control import less

MakePool = Callable[..., torch_vmm.VirtualMemoryPool]
MakeShared = Callable[..., torch_vmm.SharedMemoryPool]


@pytest.fixture(scope="module")
def others(_enabled: None) -> Iterator[dict[str, Other]]:
    """Processes under both allocators, and one to be killed: all are started at once."""
    names = {"torch_vmm": "torch_vmm", "native": "native", "mortal": "torch_vmm"}
    made = {name: Other(allocator) for name, allocator in names.items()}
    try:
        for name, other in made.items():
            assert other.ask(ipc.allocator_name) == names[name]
        yield made
    finally:
        for other in made.values():
            other.end()


@pytest.fixture
def ours(others: dict[str, Other]) -> Other:
    return others["torch_vmm"]


@pytest.fixture
def native(others: dict[str, Other]) -> Other:
    """The process under torch's own allocator, where it may open what we share."""
    if not others["native"].ask(ipc.may_take_descriptors, os.getpid()):
        pytest.skip("the kernel forbids pidfd_getfd, and torch's own allocator has no other way")
    return others["native"]


@pytest.fixture(autouse=True)
def _nothing_stays_shared() -> Iterator[None]:
    yield
    ipc.collect()


def bytes_of(size: int, seed: int) -> torch.Tensor:
    return queue_stamp(torch.empty(size, dtype=torch.uint8, device="cuda"), seed)


def handle_of(shared: tuple[Any, ...]) -> bytes:
    return bytes(shared[1])


def forget(shared: tuple[Any, ...]) -> None:
    """As the receiver does when it has no use for it any more."""
    torch.UntypedStorage._release_ipc_counter_cuda(shared[4], shared[5])


def open_here(shared: tuple[Any, ...]) -> torch.Tensor:
    storage = torch.UntypedStorage._new_shared_cuda(*shared)
    return torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)


def with_handle(shared: tuple[Any, ...], handle: bytes) -> tuple[Any, ...]:
    return (shared[0], handle, *shared[2:])


def of_another_start(handle: bytes) -> bytes:
    """The handle as if the sender had started at another time: its number is then taken for another process's."""
    at = handle.index(b"torchvmm") + 8
    return handle[:at] + bytes([handle[at] ^ 1]) + handle[at + 1 :]


# -- Between two processes under torch_vmm -----------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["default", "model", "pages", "mempool"])
def test_tensors_of_every_pool_arrive(ours: Other, make_pool: MakePool, make_shared: MakeShared, where: str) -> None:
    inside: AbstractContextManager[object] = nullcontext()
    if where == "model":
        inside = make_shared("1GiB").register_model("sender")
    elif where == "pages":
        inside = make_pool("1GiB", page_size="2MiB")
    elif where == "mempool":
        inside = torch.cuda.use_mem_pool(torch.cuda.MemPool())
    with inside:
        tensors = [bytes_of(size, seed) for seed, size in enumerate((1, 1000, MIB, 3 * MIB, 22 * MIB + 512, 100 * MIB))]
    for seed, tensor in enumerate(tensors):
        assert ours.ask(ipc.is_intact, tensor, seed)
        assert intact(tensor, seed)


def test_views_keep_their_place(ours: Other) -> None:
    whole = torch.arange(3 * MIB, device="cuda")
    for view in (whole[777_777:], whole[1:2], whole.view(3, MIB)[1]):
        address = ours.ask(ipc.keep, "view", view)
        assert address % 512 == view.data_ptr() % 512
        ours.ask(ipc.stamp_kept, "view", 5)
        assert intact(view, 5)
        ours.ask(ipc.drop, "view")
    assert int(whole[0]) == 0, "what lies beside the views is untouched"


def test_chunks_of_several_sizes_have_a_form_of_their_own(ours: Other, make_pool: MakePool) -> None:
    with make_pool("1GiB"):
        mixed = bytes_of(22 * MIB, 1)
    shared = ipc.share(mixed)
    assert handle_of(shared)[1:2] == b"v"
    assert ours.ask(ipc.open_storage, shared, 1)


def test_both_write_one_memory(ours: Other) -> None:
    tensor = bytes_of(10 * MIB, 1)
    ours.ask(ipc.keep, "shared", tensor)
    ours.ask(ipc.stamp_kept, "shared", 2)
    assert intact(tensor, 2)
    queue_stamp(tensor, 3)
    torch.cuda.synchronize()
    assert ours.ask(ipc.kept_is_intact, "shared", 3)
    ours.ask(ipc.drop, "shared")


def test_memory_is_opened_once(ours: Other) -> None:
    first, second = bytes_of(KIB, 1), bytes_of(KIB, 2)
    here = second.data_ptr() - first.data_ptr()
    there = [ours.ask(ipc.keep, name, tensor) for name, tensor in (("a", first), ("b", second), ("c", first))]
    assert there[0] == there[2]
    assert there[1] - there[0] == here, "blocks of one chunk lie in one mapping"
    ours.ask(ipc.drop, "a")
    assert ours.ask(ipc.kept_is_intact, "b", 2)
    assert ours.ask(ipc.kept_is_intact, "c", 1)
    ours.ask(ipc.drop, "b", "c")


def test_work_that_is_queued_by_the_sender_comes_first(ours: Other, busy: Busy) -> None:
    tensor = bytes_of(4 * MIB, 1)
    torch.cuda.synchronize()
    busy(less(200, by=20))  # 40 s on the stand-in, whose clock stands still for a receiver
    queue_stamp(tensor, 2)
    assert ours.ask(ipc.is_intact, tensor, 2)


def test_receivers_own_numbers_do_not_change(ours: Other) -> None:
    tensor = bytes_of(50 * MIB, 1)
    before = ours.ask(ipc.allocated)
    ours.ask(ipc.keep, "guest", tensor)
    assert ours.ask(ipc.allocated) == before
    ours.ask(ipc.drop, "guest")


@pytest.mark.alone  # it looks at the GPU's free memory
@pytest.mark.no_memcheck
def test_memory_returns_when_the_receiver_has_dropped_it(ours: Other, make_pool: MakePool) -> None:
    ipc.collect()
    ours.ask(ipc.collect)
    free, descriptors = torch.cuda.mem_get_info()[0], ipc.open_descriptors()
    pool = make_pool("4GiB")
    with pool:
        tensor = bytes_of(GIB, 1)
    ours.ask(ipc.keep, "large", tensor)
    del tensor
    ipc.collect()
    assert pool.memory_allocated() == GIB, "the receiver still has it"
    assert ours.ask(ipc.kept_is_intact, "large", 1)
    ours.ask(ipc.drop, "large")
    ipc.collect()
    ours.ask(ipc.collect)
    assert pool.memory_allocated() == 0
    assert torch.cuda.mem_get_info()[0] > free - GIB // 4, "an open descriptor holds the memory"
    assert ipc.open_descriptors() <= descriptors + 4, "torch's counters and the server's socket may have come"


def test_buffers_that_were_shared_leave_nothing_open(ours: Other) -> None:
    assert ours.ask(ipc.is_intact, bytes_of(KIB, 1), 1)  # what torch and the server open once
    ipc.collect()
    before = ipc.open_descriptors()
    pool = torch_vmm.MemoryPool()
    for seed in range(6):
        buffer = pool.alloc(30 * MIB, torch.uint8)
        assert ours.ask(ipc.is_intact, queue_stamp(buffer.tensor(), seed), seed), "another block's memory arrived"
        ours.ask(ipc.collect)
        ipc.collect()
        buffer.free()
        pool.trim(0)
    assert ipc.open_descriptors() <= before + 2


def test_thousands_of_shares_leave_nothing_open() -> None:
    forget(ipc.share(bytes_of(KIB, 1)))
    ipc.collect()
    before = ipc.open_descriptors()
    for turn in range(2000):
        tensor = torch.empty(KIB, dtype=torch.uint8, device="cuda")
        shared = ipc.share(tensor)
        if turn % 100 == 0:
            queue_stamp(tensor, turn)
            assert intact(open_here(shared), turn)
        else:
            forget(shared)
        del tensor, shared
    ipc.collect()
    assert ipc.open_descriptors() <= before + 2


def test_a_sender_may_die(others: dict[str, Other]) -> None:
    mortal = others["mortal"]
    received = mortal.ask(ipc.make, "last", 30 * MIB, 7)
    small = mortal.ask(ipc.make, "little", KIB, 8)
    late = mortal.ask(ipc.share_kept, "little")
    mortal.process.kill()
    mortal.process.join()
    assert intact(received, 7)
    assert intact(small, 8)
    queue_stamp(received, 9)
    assert intact(received, 9)
    received.record_stream(torch.cuda.Stream())  # no block of ours: nothing to do
    assert torch_vmm.pool_of(received) is None
    del received, small
    ipc.collect()
    with pytest.raises(RuntimeError, match=r"process \d+ cannot be opened here: .*(has ended|no process).*") as raised:
        open_here(late)
    assert "network namespace" in str(raised.value)


# -- To and from torch's own allocator ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [KIB, MIB, 20 * MIB])
def test_torchs_own_allocator_opens_chunks_of_one_size(native: Other, make_pool: MakePool, size: int) -> None:
    with make_pool("1GiB", page_size="2MiB"):
        tensor = bytes_of(size, 1)
    shared = ipc.share(tensor)
    assert handle_of(shared)[1:2] == b"e"
    forget(shared)
    view = tensor[104:]
    native.ask(ipc.keep, "whole", tensor)
    native.ask(ipc.keep, "view", view)
    assert native.ask(ipc.kept_is_intact, "whole", 1)
    native.ask(ipc.stamp_kept, "view", 2)
    assert intact(view, 2)
    native.ask(ipc.drop, "whole", "view")


def test_torchs_own_allocator_refuses_chunks_of_several_sizes_by_its_own_error(
    native: Other, make_pool: MakePool
) -> None:
    with make_pool("1GiB"):
        mixed = bytes_of(22 * MIB, 1)
    shared = ipc.share(mixed)
    with pytest.raises(OtherError, match="unexpected or illformed shareable handle type"):
        native.ask(ipc.open_storage, shared, 1)
    forget(shared)


def test_memory_returns_when_torchs_own_allocator_has_dropped_it(native: Other, make_pool: MakePool) -> None:
    pool = make_pool("1GiB", page_size="2MiB")
    with pool:
        tensor = bytes_of(20 * MIB, 1)
    native.ask(ipc.keep, "guest", tensor)
    del tensor
    ipc.collect()
    assert pool.memory_allocated() == 20 * MIB
    native.ask(ipc.drop, "guest")
    ipc.collect()
    assert pool.memory_allocated() == 0


@pytest.mark.parametrize("expandable", [False, True], ids=["cudaMalloc", "expandable"])
@pytest.mark.parametrize("size", [KIB, 50 * MIB])
def test_memory_of_torchs_own_allocator_is_opened(others: dict[str, Other], size: int, expandable: bool) -> None:
    sender = others["native"]
    before = torch.cuda.memory_allocated()
    try:
        received = sender.ask(ipc.make, "theirs", size, 3, expandable)
        again = sender.ask(ipc.send_kept, "theirs")
    except RuntimeError as error:
        if expandable and ("SYS_PTRACE" in str(error) or "fabric" in str(error)):
            pytest.skip(str(error))
        raise
    assert again.data_ptr() == received.data_ptr()
    assert torch.cuda.memory_allocated() == before
    assert intact(received, 3)
    queue_stamp(received, 4)
    torch.cuda.synchronize()
    assert sender.ask(ipc.kept_is_intact, "theirs", 4)
    del received, again
    sender.ask(ipc.drop, "theirs")
    sender.ask(ipc.collect)
    assert sender.ask(ipc.allocated) == 0, "our storages have let go"


# -- Within one process ------------------------------------------------------------------------------------------------


def test_a_process_opens_its_own(make_pool: MakePool) -> None:
    with make_pool("1GiB"):
        tensor = bytes_of(22 * MIB, 1)
    first, second = (open_here(ipc.share(tensor)) for _ in range(2))
    assert first.data_ptr() == second.data_ptr() != tensor.data_ptr()
    del first
    queue_stamp(second, 2)
    assert intact(tensor, 2)
    address = second.data_ptr()
    del second
    assert torch_vmm.pool_of(address) is None


@pytest.mark.parametrize("size", [KIB, 300 * MIB])  # 150 chunks are more than go into one message
def test_descriptors_are_asked_for_where_they_cannot_be_taken(ours: Other, make_pool: MakePool, size: int) -> None:
    with make_pool("1GiB", page_size="2MiB"):
        tensor = bytes_of(size, 1)
    for opens in (lambda shared: intact(open_here(shared), 1), lambda shared: ours.ask(ipc.open_storage, shared, 1)):
        shared = ipc.share(tensor)
        assert opens(with_handle(shared, of_another_start(handle_of(shared))))


def test_a_wrong_password_opens_nothing() -> None:
    tensor = bytes_of(KIB, 1)
    shared = ipc.share(tensor)
    handle = bytearray(of_another_start(handle_of(shared)))
    handle[handle.index(b"torchvmm") + 30] ^= 1
    with pytest.raises(RuntimeError, match="did not hand its descriptors over"):
        open_here(with_handle(shared, bytes(handle)))
    forget(shared)


def test_errors_name_what_is_wrong() -> None:
    tensor = bytes_of(KIB, 1)
    shared = ipc.share(tensor)
    for handle, why in (
        (b"\x02x" + bytes(100), "their form is 120"),
        (b"\x63c" + bytes(64), "of a newer torch"),
        (handle_of(shared)[:20], "they end too early"),
    ):
        with pytest.raises(RuntimeError, match=f"name no memory of another process: .*{why}"):
            open_here(with_handle(shared, handle))
    forget(shared)


def test_what_cannot_be_sent_says_what_can(make_pool: MakePool) -> None:
    pool = make_pool("1GiB")
    pool.allocate(0, 4 * MIB)
    aligned = torch_vmm.aligned((MIB,))
    sparse = torch_vmm.sparse((MIB,))
    sparse.commit(())
    over_pages = [aligned, torch_vmm.elastic((MIB,))[:], sparse[:], pool.tensor(0, (MIB,), torch.float32)]
    for tensor in over_pages:
        with pytest.raises(RuntimeError, match=r"explicit pages .*cannot be sent.*tensor\.clone\(\)"):
            tensor.untyped_storage()._share_cuda_()
    with pytest.raises(RuntimeError, match=r"invalid device pointer.*alias\(\).*tensor\.clone\(\)"):
        torch_vmm.alias(aligned).untyped_storage()._share_cuda_()
    forget(ipc.share(aligned.clone()))


def test_what_was_received_is_not_shared_on() -> None:
    tensor = bytes_of(KIB, 1)
    received = open_here(ipc.share(tensor))
    with pytest.raises(RuntimeError, match="received from another process"):
        ipc.share(received)
    assert intact(received, 1)
