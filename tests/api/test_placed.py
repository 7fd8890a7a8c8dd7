"""A tensor over several devices' memory: what one device alone shows of it (the rest is in tests/gpu2)."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

import torch_vmm
from tests.helpers import MIB, PAGE, holds, is_zero, stamp
from torch_vmm import aligned, seen_from

Pool = torch_vmm.VirtualMemoryPool
ROW = PAGE // 4


def test_shares_of_one_device_make_one_tensor(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("64MiB", physical_limit="16MiB")
    with pool:
        tensor = aligned((10, ROW), torch.uint8, placement=[(device, 4), (device, 4), (device, 2)])
    assert tensor.device.type == device
    assert tensor.shape == (10, ROW)
    assert is_zero(tensor)
    assert holds(stamp(tensor, 1), 1)
    assert pool.memory_allocated() == 3 * PAGE
    assert torch_vmm.pool_of(tensor) is None
    assert float((tensor[3:5].float() + 1).sum()) > 0
    with pytest.raises(torch_vmm.InvalidArgumentError):
        torch_vmm.alias(tensor)
    with pytest.raises(torch_vmm.InvalidArgumentError):
        pool.seal(tensor)
    view = tensor[1:]
    del tensor
    gc.collect()
    assert pool.memory_allocated() == 3 * PAGE
    del view
    gc.collect()
    assert pool.memory_allocated() == 0
    with pool:  # its memory serves again
        torch.empty(16 * MIB, dtype=torch.uint8, device=device)


def test_it_is_of_the_tag_that_is_open(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("64MiB")
    with pool.tag("weights"):
        tensor = aligned((8, ROW), torch.uint8, placement=[(device, 4), (device, 4)])
    assert pool.tags == {"weights": 2 * PAGE}
    del tensor


def test_another_devices_view_is_the_same_memory(device: str) -> None:
    tensor = aligned((8, ROW), torch.uint8, placement=[(device, 4), (device, 4)])
    stamp(tensor, 3)
    again = seen_from(tensor, device)
    assert again.data_ptr() == tensor.data_ptr()
    assert holds(again, 3)
    part = seen_from(tensor.view(torch.float32)[2:6, ::3], device)
    assert part.shape == (4, -(-ROW // 4 // 3))
    assert torch.equal(part, tensor.view(torch.float32)[2:6, ::3])
    del tensor, again
    gc.collect()
    part += 0
    plain = torch.empty(3, device=device)
    for wrong in (plain, 3, aligned((8,), torch.uint8, device)):
        with pytest.raises(torch_vmm.InvalidArgumentError, match="seen_from"):
            seen_from(wrong, device)  # type: ignore[arg-type]
    numbers = aligned((8, ROW), torch.complex64, placement=[(device, 4), (device, 4)])
    for wrong, match in (
        (numbers.conj(), r"resolve_conj\(\)"),
        (torch._neg_view(numbers), r"resolve_neg\(\)"),
        (numbers.detach().requires_grad_(), r"requires grad.*\.detach\(\)"),
    ):
        with pytest.raises(torch_vmm.InvalidArgumentError, match=match):
            seen_from(wrong, device)
    with pytest.raises(torch_vmm.InvalidArgumentError, match="holds nothing"):
        seen_from(part, "cpu" if device == "cuda" else "cuda:0")


def test_autograd_notices_what_is_written_through_another_devices_view(device: str) -> None:
    saved = aligned((8, ROW), torch.float32, placement=[(device, 4), (device, 4)]).fill_(2)
    weight = torch.ones(8, ROW, device=device, requires_grad=True)
    loss = (weight * saved).sum()
    seen_from(saved, device).fill_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([(3, 5)], "give a multiple of 4 rows: 4$"),
        ([(5, 3)], "give a multiple of 4 rows: 4 or 8$"),
        ([(4, 3)], "it places 7 rows"),
        ([(0, 8)], "at least 1"),
        ([(-4, 12)], "at least 1"),
        ([("4", 4)], "at least 1"),
    ],
)
def test_bad_counts_name_the_right_ones(device: str, rows: list[tuple[int, int]], match: str) -> None:
    (first, second) = rows[0]
    with pytest.raises(torch_vmm.InvalidArgumentError, match=match):
        aligned((8, ROW), torch.uint8, placement=[(device, first), (device, second)])


def test_what_cannot_be_placed_is_refused(device: str) -> None:
    for wrong in ([], None, "cpu", [device], [(device,)], [(device, 4, 4)], {device: 8}, [("meta", 8)]):
        if wrong is not None:
            with pytest.raises(torch_vmm.InvalidArgumentError):
                aligned((8, ROW), torch.uint8, placement=wrong)  # type: ignore[arg-type]
    with pytest.raises(torch_vmm.InvalidArgumentError, match="one of them"):
        aligned((8, ROW), torch.uint8, device, placement=[(device, 8)])
    with pytest.raises(torch_vmm.InvalidArgumentError, match="different kinds"):
        aligned((8, ROW), torch.uint8, placement=[("cpu", 4), ("cuda:0", 4)])
    with pytest.raises(torch_vmm.InvalidArgumentError, match="nothing to place"):
        aligned((8, 0), torch.uint8, placement=[(device, 8)])
    with pytest.raises(torch_vmm.InvalidArgumentError, match="has none"):
        aligned((), torch.uint8, placement=[(device, 8)])
    with pytest.raises(torch_vmm.InvalidArgumentError, match="it places a number of 16610 bits"):
        aligned((8, ROW), torch.uint8, placement=[(device, 10**5000)])
    with pytest.raises(torch_vmm.InvalidArgumentError, match=r"^placement: 1000 rows .* cannot be parted"):
        aligned((1000, 1000), torch.float32, placement=[(device, 500), (device, 500)])
    odd = aligned((5, 3), torch.float64, placement=[(device, 5)])  # one share ends where it likes
    assert odd.sum() == 0


def test_a_limit_undoes_all(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("64MiB", physical_limit="8MiB")
    with pool:
        kept = aligned((8, ROW), torch.uint8, device)
        with pytest.raises(torch_vmm.OutOfMemoryError) as caught:
            aligned((12, ROW), torch.uint8, placement=[(device, 8), (device, 4)])
        assert caught.value.limit == 8 * MIB
        assert pool.memory_allocated() == 2 * PAGE
        fits = aligned((8, ROW), torch.uint8, placement=[(device, 4), (device, 4)])
    assert holds(stamp(fits, 2), 2)
    assert is_zero(kept)
