"""The same pages at several addresses, and pieces stitched together."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import torch_vmm
from tests.api.rows import ROW, rows
from tests.helpers import PAGE, holds, is_zero, stamp
from torch_vmm import _C, alias, aliases, aligned, concat_views, sealed

Pool = torch_vmm.VirtualMemoryPool
Shared = torch_vmm.SharedMemoryPool


# -- Aliases -----------------------------------------------------------------------------------------------------------


def test_a_rings_end_continues_at_its_beginning(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("64MiB")
    with pool:
        ring = aligned((4 * PAGE // 8,), torch.int64, device)
        twice = alias(ring, 2)
    assert twice.shape == (2 * len(ring),)
    assert pool.memory_allocated() == pool.memory_reserved() == 4 * PAGE
    assert pool.shared_bytes == 0
    pick = random.Random(1)
    plain = torch.zeros(len(ring), dtype=torch.int64)
    for step in range(1, 40):
        first, count = pick.randrange(len(ring)), pick.randrange(1, len(ring))
        twice[first : first + count] = step
        for k in range(first, first + count, max(1, count // 50)):
            assert ring[k % len(ring)] == step
        plain[torch.arange(first, first + count) % len(ring)] = step
    for shown in (ring, twice[: len(ring)], twice[len(ring) :]):
        assert torch.equal(shown.cpu(), plain)


def test_weights_that_models_share_are_counted_once(shared: Shared, device: str) -> None:
    owner, other = (shared.register_model(name, "64MiB") for name in ("owner", "other"))
    with owner:
        weight = stamp(rows(device, 16), 1)
    with other:
        same = alias(weight, 1, read_only=True)
    assert holds(same, 1)
    assert (owner.memory_allocated(), other.memory_allocated()) == (4 * PAGE, 0)
    assert (owner.shared_bytes, other.shared_bytes) == (0, 4 * PAGE)
    assert shared.global_stats().allocated_bytes == 4 * PAGE
    stamp(weight, 2)  # the owner writes
    assert holds(same, 2)
    address = weight.data_ptr()
    del weight
    gc.collect()
    assert holds(same, 2)  # it keeps the memory
    assert owner.memory_allocated() == 4 * PAGE
    assert torch_vmm.pool_of(address) is owner
    view = same[3:]
    del same
    gc.collect()
    expected = view.clone()
    owner.close(force=True)
    assert torch.equal(view, expected)
    del view
    gc.collect()
    assert other.shared_bytes == shared.global_stats().allocated_bytes == 0


def test_what_an_alias_held_does_not_gather(make_shared: Callable[..., Shared], device: str) -> None:
    """A shelf keeps no more than ever of what the alias still mapped when it was put there."""
    shared = make_shared("1GiB")
    with shared.register_model("model"):
        pieces = [aligned((160 << 20,), torch.uint8, device) for _ in range(2)]
        whole = concat_views(pieces)
        del pieces, whole
        gc.collect()
        if device == "cuda":
            torch.cuda.synchronize()
        torch.ones(1, device=device)  # whoever comes by
    assert shared.global_stats().store_bytes <= 256 << 20


def test_pages_that_an_alias_shows_stay(device: str) -> None:
    tensor = torch_vmm.elastic((64, ROW), torch.uint8, device)
    stamp(tensor, 3)
    both = alias(tensor[:8], 2)
    tensor.resize_(4)
    with pytest.raises(torch_vmm.StillInUseError):
        tensor.shrink_to_fit()
    assert tensor.reserved_rows == 64
    assert torch.equal(both[:8], both[8:])
    tensor.resize_(8)
    assert torch.equal(both[:8], tensor)
    del both
    assert tensor.shrink_to_fit() == 14 * PAGE


def test_pages_of_a_sparse_tensor_that_an_alias_shows_stay(device: str) -> None:
    tensor = torch_vmm.sparse((1000, ROW), torch.uint8, device)
    tensor.commit(slice(0, 4))
    tensor.commit(slice(8, 16))
    stamp(tensor[8:16], 5)
    twice = alias(tensor[8:16], 2)
    with pytest.raises(torch_vmm.StillInUseError):
        tensor.decommit(slice(None))
    assert is_zero(tensor[:8])
    assert is_zero(tensor[16:])
    assert holds(tensor[8:16], 5)
    tensor.decommit(slice(0, 4))
    del tensor
    gc.collect()
    assert holds(twice[8:], 5)


def test_torchs_own_tensors_may_stand_on_whole_chunks(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("64MiB", page_size=PAGE)
    with pool:
        pages = torch.empty(4 * PAGE, dtype=torch.uint8, device=device)
    assert pages.data_ptr() % PAGE == 0
    stamp(pages, 4)
    both = alias(pages, 2)
    del pages
    gc.collect()
    with pool:
        others = [torch.full((4 * PAGE,), 9, dtype=torch.uint8, device=device) for _ in range(4)]
    assert holds(both[: 4 * PAGE], 4)
    assert holds(both[4 * PAGE :], 4)
    del others


@pytest.mark.parametrize("shown", [lambda ring: alias(ring, 2), lambda ring: concat_views([ring, ring])])
@pytest.mark.parametrize("through", ["alias", "tensor"])
def test_autograd_notices_what_is_written(
    through: str, shown: Callable[[torch.Tensor], torch.Tensor], device: str
) -> None:
    ring = aligned((PAGE // 4,), torch.float32, device).fill_(2)
    made = shown(ring)
    both = [made[: len(ring)], ring]
    saved, written = both if through == "tensor" else reversed(both)
    factor = torch.ones_like(ring).requires_grad_()
    loss = (saved * factor).sum()
    written[5:].fill_(7)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    loss = (saved * factor).sum()
    loss.backward()
    assert torch.equal(factor.grad, saved)


def test_an_alias_of_what_inference_made_is_none_of_inference(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("64MiB", page_size=PAGE)
    with pool, torch.inference_mode():
        pages = torch.zeros(4 * PAGE, dtype=torch.uint8, device=device)
    made = alias(pages, 2)
    made[5] = 3
    assert made[4 * PAGE + 5] == pages[5] == 3
    assert not made.is_inference()


def test_of_stitched_pieces_autograd_is_told(device: str) -> None:
    pieces = [aligned((PAGE // 4,), torch.float32, device).fill_(2) for _ in range(2)]
    whole = concat_views(pieces)
    factor = torch.ones_like(pieces[0]).requires_grad_()
    loss = (pieces[0] * factor).sum()
    whole.fill_(7)
    torch.autograd.graph.increment_version(pieces[0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_does_not_stand_on_whole_chunks_is_refused(make_pool: Callable[..., Pool], device: str) -> None:
    with make_pool("64MiB"):
        small = torch.empty(1000, device=device)
        tensor = rows(device, 8)
        odd = aligned((1000,), torch.float32, device)
    foreign = torch.from_numpy(torch.zeros(PAGE, dtype=torch.uint8).numpy().copy())
    named = r"aligned|give a tensor|none of torch_vmm's pools|nothing in it|no first dimension"
    for wrong in (small, odd, tensor[1:], tensor[:3], tensor.t(), tensor[:0], foreign, "tensor", tensor.sum()):
        with pytest.raises(torch_vmm.InvalidArgumentError, match=named):
            alias(wrong, 2)  # type: ignore[arg-type]
        with pytest.raises(torch_vmm.InvalidArgumentError, match=named):
            concat_views([wrong])  # type: ignore[list-item]
    for copies in (0, -1, 1.5, "two", None, True):
        with pytest.raises(torch_vmm.InvalidArgumentError, match="copies"):
            alias(tensor, copies)  # type: ignore[arg-type]
    with pytest.raises(torch_vmm.OutOfMemoryError):
        alias(tensor, 1 << 40)
    with pytest.raises(torch_vmm.InvalidArgumentError, match="read_only"):
        alias(tensor, 1, "no")  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (1 << 20,), (2, PAGE)])
def test_aligned_tensors_share_no_chunk(shape: tuple[int, ...], make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("64MiB")
    with pool:
        tensor = aligned(shape, torch.int16, device)
    assert tensor.shape == shape
    assert type(tensor) is torch.Tensor
    assert tensor.data_ptr() % PAGE == 0
    assert is_zero(tensor)
    assert pool.memory_allocated() == -(-tensor.numel() * 2 // PAGE) * PAGE
    assert tensor.untyped_storage().nbytes() == tensor.numel() * 2


# -- Stitching ---------------------------------------------------------------------------------------------------------


def test_pieces_are_stitched_without_a_copy(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("64MiB")
    with pool:
        pieces = [stamp(rows(device, n), n) for n in (4, 12, 8)]
        whole = concat_views(pieces)
    assert torch.equal(whole, torch.cat(pieces))
    assert pool.memory_allocated() == 6 * PAGE
    whole[2:20] = 7
    assert bool((pieces[1] == 7).all())
    assert torch.equal(whole, torch.cat(pieces))
    expected = whole.clone()
    pieces.clear()
    gc.collect()
    assert torch.equal(whole, expected)
    again = concat_views([rows(device, 4), rows(device, 4)])
    assert is_zero(again)


def test_pieces_that_are_not_alike_are_refused(device: str) -> None:
    tensor = rows(device, 4)
    for wrong in ([], tensor, "tensors", [tensor, tensor.view(torch.int8)], [tensor, tensor.view(8, -1)]):
        with pytest.raises(torch_vmm.InvalidArgumentError, match="tensors"):
            concat_views(wrong)  # type: ignore[arg-type]


def test_many_that_come_and_go(make_pool: Callable[..., Pool], memory: _C.Device, device: str) -> None:
    pool = make_pool("256MiB", physical_limit="32MiB")
    pick = random.Random(3)
    alive: list[tuple[torch.Tensor, int]] = []
    with pool:
        for step in range(120):
            if len(alive) > 5:
                del alive[pick.randrange(len(alive))]
            tensor = stamp(rows(device, 4), step)
            kind = pick.randrange(3)
            if kind == 0:
                alive.append((alias(tensor, 2)[4:], step))
            elif kind == 1:
                alive.append((concat_views([tensor, tensor])[:4], step))
            else:
                alive.append((tensor, step))
            del tensor
            assert all(holds(each, seed) for each, seed in alive)
    alive.clear()
    gc.collect()
    memory.empty_cache()
    assert pool.physical_memory_usage == 0


# -- Aliases and stitched pieces alike ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)]), "a nested tensor"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged),
            "a nested tensor",
        ),
        (lambda: torch.eye(3).to_sparse(), "a tensor of layout torch.sparse_coo"),
        (lambda: torch.eye(3).to_sparse_csr(), "a tensor of layout torch.sparse_csr"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning", "ignore:Sparse CSR:UserWarning")
def test_what_is_made_of_other_tensors_is_refused(
    make: Callable[[], torch.Tensor], kind: str, pool: Pool, device: str
) -> None:
    tensor = make()
    for act in (
        sealed,
        alias,
        pool.seal,
        lambda each: concat_views([each]),
        lambda each: torch_vmm.seen_from(each, device),
        torch_vmm.debug.explain,
    ):
        with pytest.raises(torch_vmm.InvalidArgumentError, match=f"{kind} is .* give a tensor that is strided and"):
            act(tensor)
    if kind != "a nested tensor" or tensor.layout == torch.jagged:  # else it has one storage, which is in a pool
        with pytest.raises(torch_vmm.InvalidArgumentError, match=f"{kind} is .* give a tensor that is strided and"):
            torch_vmm.pool_of(tensor)


def test_what_wraps_other_tensors_is_refused(device: str) -> None:
    inner = [rows(device, 4), rows(device, 4)]
    for wrapping in (TwoTensor(*inner), torch.nn.Parameter(TwoTensor(*inner), requires_grad=False)):
        for name, act in (
            (r"sealed\(\)", sealed),
            ("tensor", alias),
            (r"tensors\[1\]", lambda each: concat_views([inner[0], each])),
            (r"seen_from\(\)", lambda each: torch_vmm.seen_from(each, device)),
            (r"pool_of\(\)", torch_vmm.pool_of),
            (r"explain\(\)", torch_vmm.debug.explain),
        ):
            with pytest.raises(
                torch_vmm.InvalidArgumentError, match=f"^{name}: a tensor of class TwoTensor is .* that it wraps"
            ):
                act(wrapping)
        assert [sealed(each) for each in inner] == [False, False]


def test_made_in_inference_mode_they_work_outside(device: str) -> None:
    with torch.inference_mode():
        ring = rows(device, 4)
        twice, both = alias(ring, 2), concat_views([ring, rows(device, 4)])
    twice.fill_(3)
    both[4:].fill_(4)
    ring[0] = 5
    assert (both[0] == 5).all()
    assert (twice[1:4] == 3).all()


def test_shapes_beyond_all_addresses_are_named(device: str) -> None:
    for shape in ((2**40, 2**40), (0, 2**62, 2**62), (2**62, 1), (2**62, 0, 2**62)):
        for make in (torch_vmm.elastic, torch_vmm.sparse, aligned):
            with pytest.raises(torch_vmm.InvalidArgumentError, match=rf"shape=\({shape[0]}, .*addresses"):
                make(shape, torch.float32, device)
    with pytest.raises(torch_vmm.InvalidArgumentError, match=r"max_shape=\(4611686018427387904, 4\)"):
        torch_vmm.elastic((1, 4), torch.float32, device, (2**62, 4))
    ring = rows(device, 4)
    for copies in (2**62, 2**80):
        with pytest.raises(torch_vmm.InvalidArgumentError, match=rf"shape of the result=\({4 * copies}, {ROW}\)"):
            alias(ring, copies)
    for copies in (2**27, 2**41):  # these a tensor could have, were there addresses
        with pytest.raises(torch_vmm.OutOfMemoryError, match=rf"{copies} copies of 2 MiB .* virtual addresses"):
            alias(ring, copies)


def test_more_addresses_than_one_tensor_has_are_named(device: str) -> None:
    for make in (torch_vmm.elastic, torch_vmm.sparse, aligned):
        with pytest.raises(torch_vmm.InvalidArgumentError, match=r"^shape=\(70368744177665,\).* tensor, 64 TiB"):
            make((2**46 + 1,), torch.uint8, device)
    with pytest.raises(torch_vmm.InvalidArgumentError, match=r"^max_shape=\(17592186044417, 4\).* tensor, 64 TiB"):
        torch_vmm.elastic((1, 4), torch.uint8, device, (2**44 + 1, 4))
    # As many as there are for the extension too.
    assert torch_vmm.elastic((1, 4), torch.uint8, device, (2**44, 4)).max_shape == (2**44, 4)


def test_who_holds_pages_is_named(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("64MiB")
    with pool:
        table = torch_vmm.elastic((8, ROW), torch.uint8, device)
        grid = torch_vmm.sparse((64, ROW), torch.uint8, device)
    shown = [alias(table)]
    table.resize_(0)
    with pytest.raises(
        torch_vmm.StillInUseError, match=r"4 MiB cannot be given back: 1 alias still shows 4 MiB.* that"
    ):
        table.shrink_to_fit()
    table.resize_(8)
    shown.append(alias(table[:4]))
    table.resize_(0)
    with pytest.raises(torch_vmm.StillInUseError, match=r": 2 aliases still show .* drop them"):
        table.shrink_to_fit()
    with pytest.raises(torch_vmm.InvalidArgumentError, match=r"not all is there: commit\(\) what is not"):
        alias(grid)
    grid.commit(slice(0, 4))
    assert alias(grid[:4]).shape == (4, ROW)
    pool.allocate(0, 100)
    view = pool.tensor(0, (10,))
    with pytest.raises(torch_vmm.StillInUseError, match=r"deallocate\(0, 100\): 1 tensor of tensor\(\).* drop that"):
        pool.deallocate(0, 100)
    assert view.shape == (10,)


def test_a_capacity_bounds_no_tensor_with_addresses_of_its_own(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool(PAGE, physical_limit=8 * PAGE)
    with pool:
        tensors = [rows(device, 16), torch_vmm.elastic((12, ROW), torch.uint8, device)]
        grid = torch_vmm.sparse((1000, ROW), torch.uint8, device)
        with pytest.raises(torch_vmm.OutOfMemoryError) as refused:
            grid.commit(slice(0, 8))
        grid.commit(slice(0, 4))
    assert pool.memory_allocated() == refused.value.limit == 8 * PAGE > pool.capacity
    assert all(torch_vmm.pool_of(each) is pool for each in (*tensors, grid))


def test_the_default_device_is_one(device: str) -> None:
    makers = (torch_vmm.elastic, torch_vmm.sparse, aligned)
    if device == "cuda":
        assert {make((4,)).device for make in makers} == {torch.device("cuda", torch.cuda.current_device())}
        return
    for make in makers:
        with pytest.raises(torch_vmm.NotAvailableError, match=r"GPU|CUDA|driver"):
            make((4,))


def test_an_alias_is_not_aliased(device: str) -> None:
    ring = rows(device, 4)
    twice = alias(ring, 2)
    for wrong in (twice, twice[4:]):
        with pytest.raises(torch_vmm.InvalidArgumentError, match=r"tensor: it is an alias.* that it was made of"):
            alias(wrong)
    with pytest.raises(torch_vmm.InvalidArgumentError, match=r"tensors\[1\]: it is an alias"):
        concat_views([ring, twice])
    at = twice.data_ptr()
    del twice, wrong
    gc.collect()
    assert at not in aliases._by_address


def test_what_is_in_no_pool_is_told_how_to_be(device: str) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError, match=r"in none of .* pools; make it with torch_vmm.aligned"):
        alias(torch.from_numpy(np.zeros(PAGE, np.uint8)))


def test_what_torch_changes_as_it_reads_is_told_to_be_resolved(device: str) -> None:
    values = aligned((PAGE // 8,), torch.complex64, device).fill_(1 + 2j)
    for lazy, match in ((values.conj(), r"resolve_conj\(\)"), (torch._neg_view(values), r"resolve_neg\(\)")):
        for make in (lambda lazy=lazy: alias(lazy), lambda lazy=lazy: concat_views([values, lazy])):
            with pytest.raises(torch_vmm.InvalidArgumentError, match=match):
                make()


def test_gradients_are_not_lost_silently(device: str) -> None:
    weight = aligned((4, ROW), torch.float32, device).requires_grad_()
    for make in (lambda: alias(weight), lambda: concat_views([weight, weight])):
        with pytest.raises(torch_vmm.InvalidArgumentError, match=r"requires grad.*\.detach\(\)"):
            make()
    with torch.no_grad():
        assert not alias(weight).requires_grad
    assert alias(weight.detach(), 2).shape == (8, ROW)


# -- Its memory is the tensor's as it was ------------------------------------------------------------------------------


def take_other_memory(how: str, tensor: torch.Tensor) -> None:
    if how == "resize_":
        tensor.resize_(3 * tensor.numel() // 2)
    elif how == "storage":
        tensor.untyped_storage().resize_(0)
    else:
        tensor.share_memory_()


@pytest.mark.parametrize("how", ["resize_", "storage", "share_memory_"])
@pytest.mark.parametrize("made", ["alias", "twice", "concat_views"])
def test_it_keeps_the_memory_of_a_tensor_that_takes_other(
    make_pool: Callable[..., Pool], device: str, how: str, made: str
) -> None:
    if how == "share_memory_" and device != "cpu":
        pytest.skip("a GPU's tensors are shared as they are")
    pool = make_pool("256MiB")
    with pool:
        tensor = torch.full((1 << 21,), 7, dtype=torch.uint8, device=device)
        if made == "concat_views":
            shown = concat_views([tensor, aligned(tensor.shape, torch.uint8, device)])
        else:
            shown = alias(tensor)
        if made == "twice":
            shown = alias(tensor)
        held = pool.memory_allocated()
        take_other_memory(how, tensor)
        others = [torch.full((1 << 21,), 1, dtype=torch.uint8, device=device) for _ in range(4)]
    assert (shown[: 1 << 21] == 7).all()
    del tensor, others
    gc.collect()
    assert pool.memory_allocated() == held
    del shown
    gc.collect()
    assert pool.memory_allocated() == 0
