"""Tensors of which only committed pages exist: what reads as zero, who pays, and a table of 1 TiB that trains."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import random
from collections.abc import Callable

import pytest
import torch

import torch_vmm
from tests.helpers import GIB, MIB, PAGE, faults, holds, is_zero, stamp
from tests.standin import control
from torch_vmm import _C

Pool = torch_vmm.VirtualMemoryPool
Shared = torch_vmm.SharedMemoryPool
ROW = PAGE // 4
"""Bytes: four rows a page."""


def test_only_what_is_committed_has_memory(make_pool: Callable[..., Pool], memory: _C.Device, device: str) -> None:
    pool = make_pool("64MiB", physical_limit="16MiB")
    with pool:
        tensor = torch_vmm.sparse((1 << 21, ROW), torch.uint8, device)  # 1 TiB
    assert tensor.shape == (1 << 21, ROW)
    assert pool.memory_reserved() == pool.physical_memory_usage == tensor.committed_bytes == 0
    assert is_zero(tensor[12345:12350])
    assert is_zero(tensor[-1])
    tensor.commit(slice(1_000_001, 1_000_003))
    assert pool.memory_allocated() == pool.memory_reserved() == tensor.committed_bytes == PAGE
    assert torch_vmm.pool_of(tensor) is torch_vmm.pool_of(tensor[5]) is pool
    assert is_zero(tensor[999_990:1_000_010])
    stamp(tensor[1_000_000:1_000_004], 1)
    tensor.commit(slice(1_000_002, 1_000_006))
    assert tensor.committed_spans() == [slice(1_000_000, 1_000_008)]
    assert holds(tensor[1_000_000:1_000_004], 1)
    assert is_zero(tensor[1_000_004:1_000_020])
    assert tensor.decommit(slice(1_000_000, 1_000_001)) == PAGE
    assert tensor.decommit(slice(1_000_000, 1_000_001)) == 0
    assert is_zero(tensor[999_990:1_000_020])
    assert tensor.committed_spans() == [slice(1_000_004, 1_000_008)]
    tensor.commit(slice(999_999, 1_000_001))
    assert is_zero(tensor[999_990:1_000_020])  # committing changes nothing that is read
    del tensor
    gc.collect()
    memory.empty_cache()
    assert pool.physical_memory_usage == 0
    assert not [each for each in memory.pools() if "sparse" in each.name]


def test_beyond_a_limit_it_is_as_it_was(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("64MiB", physical_limit=4 * PAGE)
    with pool:
        tensor = torch_vmm.sparse((1 << 12, ROW), torch.uint8, device)
    tensor.commit(slice(8, 16))
    stamp(tensor[8:16], 3)
    with pytest.raises(torch_vmm.OutOfMemoryError) as raised:
        tensor.commit(slice(0, 40))
    assert isinstance(raised.value, torch.OutOfMemoryError)
    assert raised.value.limit == 4 * PAGE
    assert tensor.committed_spans() == [slice(8, 16)]
    assert holds(tensor[8:16], 3)
    assert is_zero(tensor[:8])
    assert is_zero(tensor[16:60])
    tensor.commit(slice(0, 16))


@pytest.mark.parametrize(
    "index",
    [
        0,
        -1,
        slice(None),
        slice(3, 3),
        slice(5, 2),
        slice(-2, None),
        (slice(2, 4), slice(10, 20)),
        (slice(None), slice(0, 1)),
        (slice(1, 3), 7, slice(100, 200)),
        (slice(2, 5), slice(None), slice(1000, 3000)),
        (slice(None), slice(None), slice(None)),
        (4, slice(20, 40), slice(4000, None)),
        (),
    ],
)
@pytest.mark.parametrize("shape", [(6, 50, 5000), (2000, 50, 30), (8, 600, 4096)])
def test_an_index_is_widened_to_whole_pages(
    index: int | slice | tuple[int | slice, ...], shape: tuple[int, ...], device: str
) -> None:
    plain = torch.zeros(shape, dtype=torch.bool)
    plain[index if index != () else slice(None)] = True
    flat = plain.view(-1)
    pages = -(-flat.numel() * 4 // PAGE)
    wanted = {page for page in range(pages) if flat[page * PAGE // 4 : (page + 1) * PAGE // 4].any()}
    tensor = torch_vmm.sparse(shape, torch.float32, device)
    tensor.commit(index if index != () else slice(None))
    found = {
        page for offset, size in tensor._backing.handle.committed(0, pages * PAGE)
        for page in range(offset // PAGE, (offset + size) // PAGE)
    }  # fmt: skip
    assert found == wanted
    assert tensor.is_committed(index if index != () else slice(None))
    assert tensor.decommit(slice(None)) == len(wanted) * PAGE
    assert tensor.is_committed(slice(0, 0))
    assert not tensor.is_committed(slice(None))


def test_gaps_that_do_not_fit_together_take_nothing_from_anybody(
    make_shared: Callable[..., Shared], device: str
) -> None:
    shared = make_shared("64MiB")
    owner, other = shared.register_model("owner"), shared.register_model("other")
    with other:
        torch.empty(40 * MIB, dtype=torch.uint8, device=device)
    idle = other.memory_stats()
    with owner:
        tensor = torch_vmm.sparse((1 << 10, MIB), torch.uint8, device)
    tensor.commit(slice(30, 32))
    with pytest.raises(torch_vmm.OutOfMemoryError) as raised:
        tensor.commit(slice(0, 72))
    assert raised.value.requested == 70 * MIB, "both of the gaps"
    assert other.memory_stats() == idle
    assert tensor.committed_bytes == 2 * MIB
    shared.physical_limit = "72MiB"  # type: ignore[assignment]
    tensor.commit(slice(0, 72))
    assert tensor.committed_bytes == 72 * MIB


def test_a_random_program(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("64MiB", physical_limit=30 * PAGE)
    pick = random.Random(7)
    count = 1000  # rows of half a page
    with pool:
        tensor = torch_vmm.sparse((count, PAGE // 8), torch.int32, device)
    pages = [False] * (count // 2)
    rows = [0] * count
    for step in range(1, 200):
        first = pick.randrange(count)
        last = min(count, first + pick.randrange(1, 40))
        touched = range(first // 2, (last + 1) // 2)
        if pick.randrange(3):
            wanted = sum(pages) + sum(not pages[page] for page in touched)
            if wanted > 30:
                with pytest.raises(torch_vmm.OutOfMemoryError):
                    tensor.commit(slice(first, last))
                continue
            tensor.commit(slice(first, last))
            tensor[first:last] = step
            rows[first:last] = [step] * (last - first)
            for page in touched:
                pages[page] = True
        else:
            freed = sum(pages[page] for page in touched)
            assert tensor.decommit(slice(first, last)) == freed * PAGE
            for page in touched:
                pages[page] = False
                rows[2 * page : 2 * page + 2] = [0, 0]
        assert pool.memory_allocated() == sum(pages) * PAGE
        assert tensor[:, 0].tolist() == tensor[:, -1].tolist() == rows
        spans = [row for span in tensor.committed_spans() for row in range(span.start, span.stop)]
        assert spans == [row for row in range(count) if pages[row // 2]]


# -- Training ----------------------------------------------------------------------------------------------------------


def test_a_table_of_a_tebibyte_trains_as_a_dense_one(make_pool: Callable[..., Pool], device: str) -> None:
    if device == "cuda" and control.is_here():
        pytest.skip("the stand-in takes an operator that writes some rows for one that writes all")
    rows, size = 1 << 31, 128  # 1 TiB of float32
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(0, rows, (6,), generator=generator)
    ids = (places[:, None] + torch.arange(8)).clamp(max=rows - 1).view(-1)  # runs of eight
    pool = make_pool("64MiB", physical_limit="32MiB")
    with pool:
        table = torch_vmm.sparse((rows, size), torch.float32, device)
    start = torch.randn(len(ids), size, generator=generator).to(device)
    for place, row in zip(ids.tolist(), start, strict=True):
        table.commit(slice(place, place + 1))
        table[place] = row
    sparse = torch.nn.Embedding.from_pretrained(table, freeze=False, sparse=True)
    dense = torch.nn.Embedding.from_pretrained(start.clone(), freeze=False, sparse=True)
    assert isinstance(sparse.weight, torch_vmm.SparseTensor)
    assert isinstance(sparse.weight, torch.nn.Parameter)
    assert sparse.weight.data_ptr() == table.data_ptr()
    ours = torch.optim.SGD(sparse.parameters(), lr=0.1)
    theirs = torch.optim.SGD(dense.parameters(), lr=0.1)
    target = torch.randn(16, size, generator=generator).to(device)
    for _ in range(5):
        chosen = torch.randperm(len(ids), generator=generator)[:16]  # each once: atomics add in any order
        for model, optimizer, index in ((sparse, ours, ids[chosen]), (dense, theirs, chosen)):
            optimizer.zero_grad()
            (model(index.to(device)) - target).square().mean().backward()
            assert model.weight.grad.is_sparse
            optimizer.step()
    assert torch.equal(table[ids.to(device)], dense.weight.detach())
    assert not torch.equal(dense.weight.detach(), start)
    assert pool.memory_allocated() == table.committed_bytes <= 12 * PAGE
    assert is_zero(table[places[0].item() - 20000 : places[0].item() - 10000])  # type: ignore[misc]


# -- What is not there -------------------------------------------------------------------------------------------------

PROGRAM = """
import torch, torch_vmm
tensor = torch_vmm.sparse((1 << 30,), torch.uint8, "cpu", zeros={zeros})
tensor.commit(slice(0, 1))
tensor[0] = 1
print(int(tensor[0]))
"""


@pytest.mark.parametrize(
    ("zeros", "touch", "is_fault"),
    [
        (True, "int(tensor[-1])", False),
        (True, "tensor[-1] = 1", True),
        (False, "int(tensor[-1])", True),
        (False, "tensor[-1] = 1", True),
        (False, "tensor.commit(slice(-1, None)); tensor[-1] = 1", False),
    ],
)
def test_what_is_not_committed_faults_by_choice(zeros: bool, touch: str, is_fault: bool) -> None:
    assert faults(PROGRAM.format(zeros=zeros), touch, printed="1\n") is is_fault


def test_zeros_can_be_left_out(make_pool: Callable[..., Pool], memory: _C.Device, device: str) -> None:
    gc.collect()
    memory.empty_cache()
    before = memory.committed_bytes
    with make_pool("64MiB"):
        tensor = torch_vmm.sparse((1 << 40,), torch.uint8, device, zeros=False)
    assert memory.committed_bytes == before
    tensor.commit(slice(GIB, GIB + MIB))
    assert memory.committed_bytes == before + PAGE
    assert is_zero(tensor[GIB : GIB + MIB])


def test_pages_of_another_size(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("64MiB")
    with pool:
        tensor = torch_vmm.sparse((1 << 32,), torch.uint8, device, page_size="8MiB")
    assert tensor.page_size == 8 * MIB
    tensor.commit(slice(0, 1))
    assert pool.memory_reserved() == 8 * MIB
    tensor[: 8 * MIB].fill_(1)
    assert is_zero(tensor[8 * MIB : 40 * MIB])
    tensor.decommit(slice(0, 1))
    assert is_zero(tensor[: 40 * MIB])


def test_it_is_a_tensor_that_is_not_copied(device: str) -> None:
    tensor = torch_vmm.sparse((1 << 20, 1 << 10), torch.float32, device)
    assert type(tensor[3:5] + 1) is torch.Tensor
    assert "4 GiB" not in repr(tensor)
    assert "0 B committed, the rest reads as zero" in repr(tensor)
    for copied in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(torch_vmm.NotCopyableError, match="committed_spans"):
            copied(tensor)
    assert "faults" in str(torch_vmm.sparse(1, torch.float32, device, zeros=False))


def test_what_cannot_be_is_refused(device: str) -> None:
    for wrong in ((), (2**62,), (2**40, 2**40), "many", (-1,)):
        with pytest.raises(torch_vmm.InvalidArgumentError):
            torch_vmm.sparse(wrong, torch.float32, device)  # type: ignore[arg-type]
    with pytest.raises(torch_vmm.InvalidPageSizeError):
        torch_vmm.sparse((4,), torch.float32, device, page_size=3 * MIB)
    with pytest.raises(torch_vmm.InvalidArgumentError, match="zeros"):
        torch_vmm.sparse((4,), torch.float32, device, zeros="no")  # type: ignore[arg-type]
    with pytest.raises(torch_vmm.InvalidArgumentError, match=r"torch_vmm.sparse\(\)"):
        torch_vmm.SparseTensor(4)
    tensor = torch_vmm.sparse((10, 4), torch.float32, device)
    for index in (10, -11, 1.5, "a", None, slice(0, 4, 2), slice("a"), (0, 0, 0), (slice(0, 1), 4), [0, 1]):
        for method in (tensor.commit, tensor.decommit, tensor.is_committed):
            with pytest.raises(torch_vmm.InvalidArgumentError, match=method.__name__):
                method(index)  # type: ignore[arg-type]
    assert tensor.committed_bytes == 0


def test_a_closed_pool_commits_nothing_more(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("64MiB")
    with pool:
        tensor = torch_vmm.sparse((1 << 12, ROW), torch.uint8, device)
    tensor.commit(slice(0, 4))
    stamp(tensor[:4], 9)
    with pytest.raises(torch_vmm.StillInUseError, match="1 live block,"):
        pool.close()
    pool.close(force=True)
    with pytest.raises(torch_vmm.InvalidArgumentError, match="closed"):
        tensor.commit(slice(4, 8))
    assert holds(tensor[:4], 9)
    assert is_zero(tensor[4:100])
    tensor.decommit(slice(None))
    assert is_zero(tensor[:100])


@pytest.mark.parametrize("zeros", [True, False])
def test_of_a_model_asleep_no_page_comes_or_goes(make_pool: Callable[..., Pool], device: str, zeros: bool) -> None:
    pool = make_pool("64MiB")
    with pool:
        tensor = torch_vmm.sparse((64, ROW), torch.uint8, device, zeros)
    tensor.commit(slice(0, 4))
    stamp(tensor[0:4], 1)
    pool.sleep()
    for change, rows in ((tensor.commit, slice(4, 8)), (tensor.decommit, slice(0, 4))):
        with pytest.raises(torch_vmm.AsleepError):
            change(rows)
    tensor.commit(slice(0, 4))  # they have memory
    assert tensor.decommit(slice(4, 8)) == 0
    pool.wake()
    assert tensor.committed_spans() == [slice(0, 4)]
    assert holds(tensor[0:4], 1)


def test_on_other_memory_it_commits_nothing(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("64MiB")
    with pool:
        tensor = torch_vmm.sparse((1000, ROW), torch.uint8, device)
    tensor.commit(slice(0, 4))
    tensor.data = torch.ones(3, 4, dtype=torch.float16, device=device)
    for use in (
        lambda: tensor.commit(0),
        lambda: tensor.decommit(0),
        lambda: tensor.is_committed(0),
        tensor.committed_spans,
        lambda: tensor.committed_bytes,
    ):
        with pytest.raises(torch_vmm.InvalidArgumentError, match="no longer stands"):
            use()
    assert "not on memory of its own" in repr(tensor)
    assert pool.memory_allocated() == 0  # nobody shows it any more
    cast = torch.zeros(3, 4, device=device).as_subclass(torch_vmm.SparseTensor)
    for use in (lambda: cast.commit(0), cast.committed_spans, lambda: cast.page_size, cast.detach):
        with pytest.raises(torch_vmm.InvalidArgumentError, match=r"torch_vmm.sparse\(\) makes"):
            use()
    assert "not on memory of its own" in repr(cast)


def test_made_in_inference_mode_it_works_outside(device: str) -> None:
    with torch.inference_mode():
        tensor = torch_vmm.sparse((1000, ROW), torch.uint8, device)
        tensor.commit(0)
        tensor[0] = 1
    tensor.commit(10)
    tensor[10] = 2
    assert not tensor.is_inference()
    assert tensor[10].sum() == 2 * ROW


def test_what_autograd_saved_is_told_when_it_goes(device: str) -> None:
    table = torch_vmm.sparse((8, PAGE // 4), torch.float32, device)
    table.commit(slice(0, 4))
    table[:4].fill_(3)
    x = torch.ones(PAGE // 4, device=device, requires_grad=True)
    loss = (x * table[0]).sum()
    assert table.decommit(slice(4, 8)) == 0  # nothing went
    loss.backward()
    assert bool((x.grad == 3).all())
    for comes_back in (False, True):
        loss = (x * table[0]).sum()
        assert table.decommit(slice(0, 1)) == PAGE
        if comes_back:
            table.commit(slice(0, 1))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        table.commit(slice(0, 1))
    loss = (x * table.data[1]).sum()  # whose rows are the caller's to keep
    table.decommit(slice(0, 1))
    loss.backward()


def test_the_empty_index_is_all_and_a_step_of_0_none(device: str) -> None:
    tensor = torch_vmm.sparse((16, ROW), torch.uint8, device)
    assert not tensor.is_committed(())
    tensor.commit(())
    assert tensor.is_committed(())
    assert tensor.committed_spans() == [slice(0, 16)]
    assert tensor.decommit(()) == 4 * PAGE
    for use in (tensor.commit, tensor.decommit, tensor.is_committed):
        with pytest.raises(torch_vmm.InvalidArgumentError, match="step cannot be zero"):
            use(slice(0, 4, 0))


def test_a_forked_child_can_show_it(device: str) -> None:
    if device != "cpu":
        pytest.skip("CUDA's tensors do not survive a fork")
    tensor = torch_vmm.sparse((16, ROW), torch.uint8, device)
    ends, begins = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(begins, repr(tensor).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(begins)
    with os.fdopen(ends) as told:
        assert "shape=(16, 524288), dtype=torch.uint8, device='cpu': its memory is the process's" in told.read()


def test_commit_is_right_or_refused_after_changes_in_place(device: str) -> None:
    def fresh() -> torch_vmm.SparseTensor:
        return torch_vmm.sparse((8, 1, ROW), torch.uint8, device)

    row = ROW
    for change in ("squeeze_(1)", "unsqueeze_(0).squeeze_(0)", "transpose_(0, 1)", "swapdims_(0, 1)"):
        tensor = fresh()
        eval(f"tensor.{change}")
        # The rows still follow each other: what is committed is what the index shows.
        where = (slice(None), slice(2, 3)) if tensor.shape[0] == 1 else (slice(2, 3),)
        tensor.commit(where)
        assert tensor.is_committed(where)
        at = tensor[where].data_ptr() - tensor.data_ptr()
        assert tensor._backing.handle.is_committed([(at, row)])
        tensor[where] = 1
        assert tensor.decommit(where) == tensor.page_size
    for change in ("t_()", "transpose_(0, 1)", "as_strided_((2, 3), (1, 2))", "as_strided_((4, 4), (0, 1))"):
        tensor = torch_vmm.sparse((8, ROW), torch.uint8, device)
        eval(f"tensor.{change}")
        for call in (
            lambda it: it.commit(slice(0, 1)),
            lambda it: it.decommit(slice(0, 1)),
            lambda it: it.is_committed(slice(0, 1)),
            lambda it: it.committed_spans(),
        ):
            with pytest.raises(torch_vmm.InvalidArgumentError, match="do not follow each other"):
                call(tensor)
        assert tensor.committed_bytes == 0
        assert "committed" in repr(tensor)
    tensor = torch_vmm.sparse((8, ROW), torch.uint8, device)
    tensor.t_().t_()  # back again
    tensor.commit(slice(0, 1))
    assert tensor.committed_bytes == tensor.page_size


def test_a_number_beyond_its_dimension_is_told_what_would_be_right(device: str) -> None:
    tensor = torch_vmm.sparse((1024, 1024), torch.float32, device)
    for wrong in (4096, -1025, (0, 1024)):
        with pytest.raises(torch_vmm.InvalidArgumentError, match=r"which has 1024; .* slice\(0, n\) is the first n"):
            tensor.commit(wrong)  # type: ignore[arg-type]


def test_spans_of_one_that_lost_its_shape_in_place(device: str) -> None:
    squeezed = torch_vmm.sparse((1,), device=device)
    squeezed.commit(0)
    squeezed.squeeze_()
    with pytest.raises(torch_vmm.InvalidArgumentError, match="no dimension"):
        squeezed.committed_spans()
    empty = torch_vmm.sparse((1, 4), device=device)
    empty.commit(())
    empty.resize_(0, 0)
    assert empty.committed_spans() == []
