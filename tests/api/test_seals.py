"""Pages that nobody may write to until they are unsealed, and what cannot be sealed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import torch_vmm
from tests.api.rows import ROW, rows
from tests.helpers import MIB, PAGE, faults, holds, stamp
from torch_vmm import aligned, sealed

Pool = torch_vmm.VirtualMemoryPool


def test_a_seal_holds_and_is_lifted(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("64MiB")
    with pool:
        tensors = [stamp(aligned((1000, 300), torch.float32, device), seed) for seed in range(3)]
        table = torch_vmm.elastic((10, 4), torch.float32, device, (1000, 4))
        loose = torch.ones(1000, device=device)
    assert not any(map(sealed, [*tensors, table, loose]))
    pool.seal(tensors[:2])
    pool.seal(table)
    pool.seal(tensors[0])  # again is fine
    assert [sealed(each) for each in (*tensors, table, table[1], tensors[1][5, 7:], loose)] == [
        *(True, True, False),
        *(True, True, True, False),
    ]
    assert holds(tensors[0], 0)
    assert torch.equal(tensors[0] + 1, tensors[0].clone() + 1)
    with pytest.raises(torch_vmm.InvalidArgumentError, match="sealed"):
        table.shrink_to_fit()
    pool.unseal([*tensors, table])
    assert not any(map(sealed, tensors))
    stamp(tensors[1], 9)
    assert table.shrink_to_fit() == 0
    pool.seal([])
    assert not sealed(torch.empty(0))


def test_dimensions_may_be_in_any_order(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("64MiB")
    with pool.tag("weights"):
        module = torch.nn.Conv2d(8, 6, 3, device=device).to(memory_format=torch.channels_last)
        single = torch.empty(1, 5, 1, 7, device=device).permute(3, 0, 2, 1)
        others = [torch.empty(5, 4, device=device).t(), torch.empty(2, 3, 4, device=device).permute(2, 0, 1), single]
    parts = [*module.parameters(), *others]
    assert not parts[0].is_contiguous()
    pool.seal(parts)
    assert all(map(sealed, parts))
    pool.unseal(parts)
    assert not any(map(sealed, parts))
    whole = aligned((8, ROW), torch.uint8, device).t()
    torch_vmm.pool_of(whole).seal(whole)
    assert sealed(whole)


def test_all_that_a_tensor_wraps_is_sealed(model: Pool) -> None:
    with model.tag("weights"):
        inner = [torch.ones(1000, device=model.device) for _ in range(2)]
    model.seal(TwoTensor(*inner))
    assert all(map(torch_vmm.sealed, inner))
    model.unseal([TwoTensor(*inner)])
    assert not any(map(torch_vmm.sealed, inner))


def test_an_elastic_tensor_is_sealed_with_all_that_it_holds(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("64MiB")
    with pool:
        table = torch_vmm.elastic((8, 100), torch.uint8, device, (1000, 100))
    with pytest.raises(torch_vmm.InvalidArgumentError, match=r"300 B.* of the same tensor"):
        pool.seal([table[:2], table[5:]])
    table.resize_(3)
    pool.seal(table)
    assert sealed(table)
    table.resize_(8)  # it has these pages still
    assert sealed(table)


def test_the_memory_of_a_sealed_tensor_serves_again(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("64MiB", physical_limit="16MiB")
    with pool:
        for seed in range(3):
            tensor = stamp(rows(device, 32), seed)
            pool.seal(tensor)
            assert holds(tensor, seed)
            del tensor
        plain = torch.empty(16 * MIB, dtype=torch.uint8, device=device)
    assert holds(stamp(plain, 5), 5)


def test_what_cannot_be_sealed_is_refused(make_pool: Callable[..., Pool], device: str) -> None:
    pool, other = make_pool("64MiB"), make_pool("64MiB")
    with pool:
        tensor = rows(device, 8)
        loose = torch.ones(1000, device=device)
    with other:
        foreign = rows(device, 4)
    for wrong, match in (
        ([tensor, loose], "aligned"),
        ([tensor, foreign], f"are of pool {other.name!r}, not of {pool.name!r}"),
        ([tensor, torch.empty(3, device="meta")], "none of torch_vmm's pools"),
        ([tensor[1:]], "aligned"),
        ([tensor, tensor[:, ::2]], "contiguous"),
        ([tensor, tensor[:, :5].t()], "contiguous"),
        ([tensor, tensor[0].expand(8, ROW)], "contiguous"),
        ([tensor, tensor[:1, :4].as_strided((2, 2), (3, 0))], "contiguous"),
        ([tensor, torch.eye(3).to_sparse()], "strided and dense"),
        ([tensor, 3], "give"),
        (3, "give tensors"),
    ):
        for change in (pool.seal, pool.unseal):
            with pytest.raises(torch_vmm.InvalidArgumentError, match=match):
                change(wrong)  # type: ignore[arg-type]
        assert not sealed(tensor)
    with pytest.raises(torch_vmm.InvalidArgumentError, match="give a tensor"):
        sealed(3)  # type: ignore[arg-type]


def test_a_module_and_its_state_are_told_what_to_give(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("64MiB")
    with pool:
        net = torch.nn.Sequential(torch.nn.Linear(8, 8, device=device))
        kept = torch.nn.ParameterList([torch_vmm.aligned((1 << 19,), torch.float32, device)])
    for wrong, hint in (
        (net, r"Sequential.*module\.parameters\(\)"),
        (net[0], r"Linear.*module\.parameters\(\)"),
        (net.state_dict(), r"OrderedDict.*\.values\(\)"),
    ):
        for change in (pool.seal, pool.unseal):
            with pytest.raises(torch_vmm.InvalidArgumentError, match=hint):
                change(wrong)  # type: ignore[arg-type]
    pool.seal(kept)  # a module that is a list of tensors
    assert sealed(kept[0])
    pool.unseal({kept[0]: "a name"})  # and so is a mapping from them
    assert not sealed(kept[0])


def test_no_neighbour_is_sealed_with_a_slice(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("64MiB")
    with pool:
        tensor = rows(device, 11)  # four a chunk; the last one has three and a part that is nobody's
    for part in (tensor[:1], tensor[:3], tensor[1:2], tensor[:5], tensor[3:], tensor[4:10]):
        with pytest.raises(
            torch_vmm.InvalidArgumentError, match=r"of the same tensor, share a chunk.*aligned.*pool\.tag\(name\)"
        ):
            pool.seal(part)
        assert not any(map(sealed, tensor))
    pool.seal(tensor[4:8])  # a chunk
    pool.seal([tensor[8:9], tensor[9:]])  # one together, to the tensor's end
    assert [sealed(row) for row in tensor] == [False] * 4 + [True] * 7
    pool.seal(tensor[5])  # again is fine
    with pytest.raises(torch_vmm.InvalidArgumentError, match="share a chunk"):
        pool.unseal(tensor[5])
    pool.unseal(tensor[4:])
    assert not any(map(sealed, tensor))


def test_a_slice_of_what_is_under_a_tag_seals_no_more(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("64MiB")
    with pool.tag("weights"):
        large = torch.empty(6 * PAGE, dtype=torch.uint8, device=device)
        small, other = torch.zeros(100, device=device), torch.zeros(1000, device=device)
    for part, whose in (
        ([large[:100], small, other], "the same"),
        ([large, small[:50], other], "the same"),
        ([large, other], "another"),
    ):
        with pytest.raises(torch_vmm.InvalidArgumentError, match=f"of {whose} tensor, share a chunk.*pool.tag"):
            pool.seal(part)
        assert not sealed(large[:1])
        assert not sealed(small[60:])
    pool.seal([large[:1000], large[1000:], small[:30], small[30:], other])
    assert sealed(large)
    assert sealed(small)


def test_a_closed_pool_seals_nothing(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("64MiB")
    with pool:
        tensor = rows(device, 4)
    pool.close(force=True)
    for change in (pool.seal, pool.unseal):
        for given in (tensor, []):
            with pytest.raises(torch_vmm.InvalidArgumentError, match="is closed"):
                change(given)
    assert not sealed(tensor)


PROGRAM = """
import torch, torch_vmm
pool = torch_vmm.current_pool("cpu")
weight = torch_vmm.aligned((1024, 1024), torch.float32, "cpu").fill_(2)
reader = torch_vmm.alias(weight, read_only=True)
pool.seal(weight)
print(float(weight.sum()), float(reader[7, 7]))
"""


@pytest.mark.parametrize(
    ("touch", "is_fault"),
    [
        ("weight[5, 5] = 1", True),
        ("weight[3:].zero_()", True),
        ("torch_vmm.alias(weight)[5, 5] = 1; assert weight[5, 5] == 1", False),
        ("pool.unseal(weight); weight[5, 5] = 1; assert reader[5, 5] == 1", False),
        ("pool.unseal(weight); reader[5, 5] = 1", True),
    ],
)
def test_a_write_to_a_sealed_page_faults(touch: str, is_fault: bool) -> None:
    assert faults(PROGRAM, touch, printed="2097152.0 2.0\n") is is_fault
