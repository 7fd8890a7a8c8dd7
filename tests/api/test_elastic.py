"""Tensors whose first dimension grows and shrinks in place: address, views, limits, books."""

from __future__ import annotations

import copy
import gc
import io
import random
import shutil
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

import torch_vmm
from tests.helpers import MIB, PAGE, holds, is_zero, stamp
from torch_vmm import _C

Pool = torch_vmm.VirtualMemoryPool
Shared = torch_vmm.SharedMemoryPool
ROW = PAGE // 4
"""Bytes: four rows a page."""


def rows(device: str, n: int, most: int = 256) -> torch_vmm.ElasticTensor:
    """``n`` rows of 512 KiB."""
    return torch_vmm.elastic((n, ROW), torch.uint8, device, (most, ROW))


@pytest.mark.parametrize("kind", ["elastic", "aligned", "sparse"])
def test_a_limit_that_was_lowered_is_kept_once_it_ends(
    kind: str, make_shared: Callable[..., Shared], device: str
) -> None:
    shared = make_shared("512MiB")
    model = shared.register_model("model")
    with model:
        kept = torch.ones(4 * MIB, dtype=torch.uint8, device=device)
        if kind == "elastic":
            large: object = torch_vmm.elastic((128, MIB), torch.uint8, device, (256, MIB))
        elif kind == "aligned":
            large = torch_vmm.aligned((128 * MIB,), torch.uint8, device)
        else:
            large = torch_vmm.sparse((256, MIB), torch.uint8, device)
            large.commit(slice(0, 128))  # type: ignore[attr-defined]
    shared.physical_limit = 16 * MIB
    assert shared.global_stats().physical_usage > 16 * MIB
    del large
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.ones(1, device=device)  # whoever comes by
    assert shared.global_stats().physical_usage <= 16 * MIB
    assert bool(kept.all())


# -- Growing and shrinking ---------------------------------------------------------------------------------------------


def test_it_grows_in_place_and_views_stay(device: str) -> None:
    tensor = rows(device, 4)
    address = tensor.data_ptr()
    stamp(tensor, 1)
    view = tensor[1:3]
    assert tensor.resize_(100) is tensor
    assert tensor.shape == (100, ROW)
    assert tensor.data_ptr() == address == view.data_ptr() - ROW
    assert is_zero(tensor[4:])
    stamp(tensor[4:], 2)
    assert holds(tensor[:4], 1)
    view.zero_()
    assert is_zero(tensor[1:3])
    tensor.resize_(256)
    assert holds(tensor[4:100], 2)


def test_its_pages_are_counted_by_the_model_that_is_open(shared: Shared, device: str) -> None:
    llama, qwen = (shared.register_model(name, "64MiB") for name in ("llama", "qwen"))
    with llama:
        tensor = rows(device, 6)
    assert torch_vmm.pool_of(tensor) is torch_vmm.pool_of(tensor[3:]) is llama
    assert llama.memory_allocated() == llama.memory_reserved() == llama.physical_memory_usage == 2 * PAGE
    assert qwen.memory_reserved() == 0
    with qwen:  # it stays the other's
        tensor.resize_(20)
    assert (llama.memory_allocated(), qwen.memory_allocated()) == (5 * PAGE, 0)
    assert sum(segment["total_size"] for segment in llama.memory_snapshot()) == 5 * PAGE
    assert llama.stats().allocated_bytes == shared.global_stats().allocated_bytes == 5 * PAGE
    del tensor
    gc.collect()
    llama.empty_cache()
    assert llama.memory_allocated() == llama.physical_memory_usage == 0


def test_the_last_pages_go_back(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("64MiB")
    with pool:
        tensor = rows(device, 64)
    stamp(tensor, 3)
    tensor.resize_(6)
    assert (tensor.shape[0], tensor.reserved_rows) == (6, 64)
    assert pool.memory_allocated() == 16 * PAGE  # kept, as torch's resize_ keeps it
    assert tensor.shrink_to_fit() == 14 * PAGE
    assert tensor.shrink_to_fit() == 0
    assert pool.memory_allocated() == 2 * PAGE
    pool.empty_cache()
    assert pool.memory_reserved() == 2 * PAGE
    assert tensor.reserved_rows == 8
    tensor.resize_(8)
    assert (tensor[:6] != 0).all()
    tensor.resize_(0)
    assert tensor.shrink_to_fit() == 2 * PAGE
    assert tensor.numel() == 0
    tensor.resize_(64)
    assert is_zero(tensor)  # fresh pages


def test_shrinking_leaves_what_a_twin_shows(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("64MiB")
    with pool:
        table = rows(device, 8)
    weight = torch.nn.Parameter(table.detach(), requires_grad=False)
    stamp(table.resize_(64), 5)
    assert weight.shape[0] == 8
    assert weight.shrink_to_fit() == 0
    assert holds(table, 5)
    table.resize_(4)
    assert table.shrink_to_fit() == 14 * PAGE  # the 8 rows of weight are there
    assert holds(weight, 5)
    del weight
    assert table.shrink_to_fit() == PAGE
    state = torch.nn.ParameterList([torch.nn.Parameter(table, requires_grad=False)]).state_dict()
    table.resize_(32)
    assert state["0"].shrink_to_fit() == 0
    assert is_zero(table[8:])


def test_reserve_takes_memory_and_leaves_the_shape(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("64MiB", physical_limit=16 * PAGE)
    with pool:
        tensor = rows(device, 1)
    tensor.reserve(64)
    assert (tensor.shape[0], tensor.reserved_rows) == (1, 64)
    assert pool.memory_allocated() == 16 * PAGE
    pool.physical_limit = 0
    tensor.resize_(64)  # cannot fail any more
    tensor.reserve(3)  # nothing to do


def test_beyond_its_shape_or_a_limit_it_stays_as_it_was(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("64MiB", physical_limit=8 * PAGE)
    with pool:
        tensor = rows(device, 4)
    stamp(tensor, 4)
    books = pool.memory_allocated(), pool.memory_reserved()
    for wrong in (257, -1, 1.5, "4", True, None, 2**80):
        for change in (tensor.resize_, tensor.reserve):
            with pytest.raises(torch_vmm.InvalidArgumentError, match="from 0 to 256"):
                change(wrong)  # type: ignore[arg-type]
    for change in (tensor.resize_, tensor.reserve):
        with pytest.raises(torch_vmm.OutOfMemoryError) as raised:
            change(256)
        assert isinstance(raised.value, torch.OutOfMemoryError)
        assert raised.value.limit == 8 * PAGE
        assert raised.value.pool == pool.name
        assert (tensor.shape, tensor.reserved_rows) == ((4, ROW), 4)
        assert (pool.memory_allocated(), pool.memory_reserved()) == books
    assert holds(tensor, 4)
    tensor.resize_(32)
    assert holds(tensor[:4], 4)


def test_at_the_limit_it_takes_what_others_have_idle(shared: Shared, device: str) -> None:
    llama, qwen = (shared.register_model(name, "64MiB") for name in ("llama", "qwen"))
    with qwen:
        stamp(torch.empty(60 * MIB, dtype=torch.uint8, device=device), 9)
    with llama:
        tensor = rows(device, 100)
    assert is_zero(tensor)  # nothing of the other model's
    assert qwen.memory_reserved() < 20 * MIB


def test_a_random_program(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("256MiB", physical_limit=20 * PAGE)
    pick = random.Random(5)
    with pool:
        tensor = torch_vmm.elastic((1, 1000), torch.int32, device, (20000, 1000))
    address = tensor.data_ptr()
    plain = [0]  # what each row holds
    for step in range(300):
        choice = pick.randrange(4)
        if choice == 0:
            kept = tensor.shape[0]
            tensor.shrink_to_fit()
            assert pool.memory_allocated() == -(-kept * 4000 // PAGE) * PAGE
        elif choice == 1:
            n = pick.randrange(12000)
            try:
                tensor.reserve(n)
            except torch_vmm.OutOfMemoryError:
                assert n * 4000 > 18 * PAGE  # at least the room of what stays mapped for nothing
        else:
            n = pick.randrange(1, 12000)
            try:
                tensor.resize_(n)
            except torch_vmm.OutOfMemoryError:
                assert n * 4000 > 18 * PAGE
            else:
                fresh = range(len(plain), n)
                tensor[len(plain) :] = torch.tensor([step * 20000 + row for row in fresh], dtype=torch.int32)[:, None]
                plain = plain[:n] + [step * 20000 + row for row in fresh]
        assert tensor.shape == (len(plain), 1000)
        assert tensor[:, 0].tolist() == tensor[:, 999].tolist() == plain
    assert tensor.data_ptr() == address


# -- As a tensor -------------------------------------------------------------------------------------------------------


def test_torch_takes_it_and_gives_plain_tensors(device: str) -> None:
    tensor = torch_vmm.elastic((3, 4), torch.float32, device, (1000, 4))
    tensor.copy_(torch.arange(12).view(3, 4))
    assert isinstance(tensor, torch.Tensor)
    assert tensor.device == torch.empty(0, device=device).device
    for result in (tensor + 1, tensor[1], tensor.view(12), torch.cat([tensor, tensor]), tensor.clone(), tensor.t()):
        assert type(result) is torch.Tensor
    assert torch.equal(tensor @ tensor.t(), tensor.clone() @ tensor.clone().t())
    assert type(tensor.mul_(2)) is torch_vmm.ElasticTensor
    out = torch_vmm.elastic((3, 4), torch.float32, device)
    torch.add(tensor, 1, out=out)
    assert torch.equal(out, tensor + 1)
    assert "ElasticTensor" in repr(tensor)


def test_it_trains_as_a_parameter_that_grows(device: str) -> None:
    table = torch_vmm.elastic((10, 4), torch.float32, device, (1000, 4))
    with torch.no_grad():
        table.fill_(1)
    parameter = torch.nn.Parameter(table)
    assert isinstance(parameter, torch_vmm.ElasticTensor)
    assert isinstance(parameter, torch.nn.Parameter)
    for n in (10, 20):
        with torch.no_grad():
            parameter.resize_(n)
            parameter.fill_(1)
        parameter.grad = None
        (parameter * 3).sum().backward()
        torch.optim.SGD([parameter], lr=1.0).step()
        assert torch.equal(parameter.detach().clone(), torch.full((n, 4), -2.0, device=device))
    assert parameter.data_ptr() == table.data_ptr()
    table.resize_(5)
    table.resize_(20)
    assert torch.equal(parameter.detach().clone(), table.clone())


def test_what_autograd_recorded_keeps_its_shape(device: str) -> None:
    tensor = torch_vmm.elastic((4, 8), torch.float32, device, (64, 8)).fill_(2)
    factor = torch.ones(4, 8, device=device, requires_grad=True)
    tensor.mul_(factor)
    for change in (lambda: tensor.resize_(6), lambda: tensor.resize_as_(torch.empty(6, 8)), lambda: tensor.resize_(2)):
        with pytest.raises(torch_vmm.InvalidArgumentError, match=r"autograd.*MulBackward0.*4 rows.*detach_"):
            change()
        with torch.no_grad(), pytest.raises(torch_vmm.InvalidArgumentError, match="autograd"):
            change()
    tensor.reserve(64)
    tensor.sum().backward()
    assert torch.equal(factor.grad, torch.full((4, 8), 2.0, device=device))
    tensor.detach_()
    assert tensor.resize_(6).shape == (6, 8)


def test_autograd_notices_another_length(device: str) -> None:
    # With the new rows in it cdist's gradient would be another one, of the right shape, silently.
    for n in (6, 2):
        for saves_a_view in (False, True):
            tensor = torch_vmm.elastic((4, 8), torch.float32, device, (64, 8)).fill_(2)
            query = torch.ones(3, 8, device=device, requires_grad=True)
            distance = torch.cdist(query, tensor[:] if saves_a_view else tensor).sum()
            tensor.resize_(n)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                distance.backward()


def test_of_its_data_autograd_saves_rows_that_stay(device: str) -> None:
    tensor = torch_vmm.elastic((4, 8), torch.float32, device, (64, 8)).fill_(2)
    query = torch.ones(3, 8, device=device, requires_grad=True)
    expected = torch.autograd.grad(torch.cdist(query, tensor.clone()).sum(), query)[0]
    distance = torch.cdist(query, tensor.data[:4]).sum()
    tensor.resize_(60)[4:] = 100
    distance.backward()
    assert torch.equal(query.grad, expected)


def test_a_copy_is_a_plain_tensor_of_its_rows(device: str) -> None:
    tensor = stamp(rows(device, 5), 7)
    view = tensor[1:]
    assert tensor.untyped_storage().nbytes() == 5 * ROW
    copied = copy.deepcopy(tensor)
    assert type(copied) is torch.Tensor
    assert holds(copied, 7)
    file = io.BytesIO()
    torch.save({"tensor": tensor, "view": view}, file)
    assert file.tell() < 6 * ROW
    file.seek(0)
    loaded = torch.load(file)
    assert holds(loaded["tensor"], 7)
    assert torch.equal(loaded["view"], view)


def test_a_copy_keeps_what_torch_keeps_of_a_tensor(device: str) -> None:
    tensor = torch_vmm.elastic((2, 100), torch.float32, device, (9, 100)).zero_().requires_grad_()
    tensor.named = [1]
    (tensor * 2).sum().backward()
    copied = copy.deepcopy(tensor)
    assert copied.named == [1]
    assert copied.named is not tensor.named
    assert torch.equal(copied.grad, tensor.grad)
    assert copied.grad is not tensor.grad
    assert not {"_backing", "_max_shape"} & set(copied.__dict__)
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    assert torch.load(file, weights_only=False).named == [1]
    written = torch_vmm.elastic((2, 100), torch.float32, device)
    written[0] = torch.ones(100, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="detach"):
        copy.deepcopy(written)


def test_a_view_keeps_it_when_all_else_has_gone(make_pool: Callable[..., Pool], memory: _C.Device, device: str) -> None:
    pool = make_pool("64MiB")
    with pool:
        tensor = stamp(rows(device, 8), 8)
    view = tensor[2:]
    expected = view.clone()
    del tensor
    gc.collect()
    with pytest.raises(torch_vmm.StillInUseError, match="1 live block,"):
        pool.close()
    pool.close(force=True)
    assert torch.equal(view, expected)
    del view
    gc.collect()
    assert not [each for each in memory.pools() if each.name == pool.name]


def test_a_closed_pool_lets_nothing_grow(make_pool: Callable[..., Pool], device: str) -> None:
    pool = make_pool("64MiB")
    with pool:
        tensor = stamp(rows(device, 4), 1)
    pool.close(force=True)
    with pytest.raises(torch_vmm.InvalidArgumentError, match="closed"):
        tensor.resize_(64)
    assert holds(tensor, 1)
    tensor.resize_(2)
    tensor.shrink_to_fit()


@pytest.mark.parametrize("shape", [(0,), (0, 3), (5, 0), (7,), (1, 2, 3, 4)])
def test_every_shape(shape: tuple[int, ...], device: str) -> None:
    tensor = torch_vmm.elastic(shape, torch.float16, device, (100, *shape[1:]))
    assert tensor.shape == shape
    tensor.resize_(100)
    tensor.fill_(2)
    assert tensor.shape == (100, *shape[1:]) == tensor.max_shape
    assert tensor.is_contiguous()


def test_what_cannot_be_is_refused(device: str) -> None:
    for shape, most in (((), ()), ((4, 4), (8, 5)), ((4, 4), (3, 4)), ((4,), (8, 1)), ((-1,), (3,))):
        with pytest.raises(torch_vmm.InvalidArgumentError, match="shape"):
            torch_vmm.elastic(shape, torch.float32, device, most)
    with pytest.raises(torch_vmm.InvalidArgumentError, match="dtype"):
        torch_vmm.elastic((4,), "float", device)  # type: ignore[arg-type]
    with pytest.raises(torch_vmm.InvalidArgumentError, match="no scale"):
        torch_vmm.elastic((4,), torch.qint8, device)
    with pytest.raises(torch_vmm.InvalidArgumentError):
        torch_vmm.elastic((4,), torch.float32, device, (2**60,))
    with pytest.raises(torch_vmm.InvalidArgumentError, match="device"):
        torch_vmm.elastic((4,), torch.float32, "meta")
    with pytest.raises(torch_vmm.InvalidArgumentError, match=r"torch_vmm.elastic\(\) makes it"):
        torch_vmm.ElasticTensor(4)
    fixed = torch_vmm.elastic((4,), torch.float32, device)
    with pytest.raises(torch_vmm.InvalidArgumentError):
        fixed.resize_(5)


SWAPS: dict[str, Callable[[torch.Tensor], object]] = {
    "data": lambda tensor: setattr(tensor, "data", torch.ones(4, 4, device=tensor.device)),
    "half": lambda tensor: setattr(tensor, "data", tensor.data.half()),
    "set_": lambda tensor: tensor.set_(torch.ones(4, 4, device=tensor.device)),
    "offset": lambda tensor: tensor.set_(tensor.untyped_storage(), 4, (3, 4)),
    "share_memory_": lambda tensor: tensor.share_memory_(),
}


@pytest.mark.parametrize("swap", SWAPS)
def test_on_other_memory_it_changes_nothing(swap: str, device: str) -> None:
    if swap == "share_memory_" and device != "cpu":
        pytest.skip("on a GPU it does nothing")
    tensor = torch_vmm.elastic((4, 4), torch.float32, device, (1000, 4)).fill_(1)
    view = tensor[:]
    SWAPS[swap](tensor)
    before, stored = tensor.clone(), tensor.untyped_storage().nbytes()
    for change in (lambda: tensor.resize_(800), lambda: tensor.reserve(900), tensor.shrink_to_fit):
        with pytest.raises(torch_vmm.InvalidArgumentError, match="no longer stands"):
            change()
    with pytest.raises(torch_vmm.InvalidArgumentError, match="no longer stands"):
        _ = tensor.reserved_rows
    assert torch.equal(tensor.clone(), before)
    assert tensor.untyped_storage().nbytes() == stored
    if swap != "share_memory_":
        assert (view == 1).all()


def test_a_module_that_changes_its_dtype_has_plain_memory(device: str) -> None:
    module = torch.nn.Linear(4, 4, bias=False).to(device)
    module.weight = torch.nn.Parameter(torch_vmm.elastic((4, 4), torch.float32, device, (1000, 4)).fill_(1))
    module.half()
    with pytest.raises(torch_vmm.InvalidArgumentError, match=r"torch.float16 at .*module.to\(\)"):
        module.weight.resize_(900)
    assert (module(torch.ones(2, 4, dtype=torch.float16, device=device)) == 4).all()


@pytest.mark.parametrize("how", ["data", "half", "share_memory_"])
@pytest.mark.parametrize("kind", ["elastic", "sparse"])
def test_memory_that_a_parameter_has_left_is_free(pool: torch_vmm.VirtualMemoryPool, kind: str, how: str) -> None:
    if how == "share_memory_" and pool.device.type != "cpu":
        pytest.skip("on a GPU it does nothing")
    with pool:
        if kind == "elastic":
            made = torch_vmm.elastic((1024, 1024), torch.float32, pool.device, (4096, 1024))
        else:
            made = torch_vmm.sparse((1024, 1024), torch.float32, pool.device)
            made.commit(())
    module = torch.nn.Linear(1024, 1024, bias=False)
    module.weight = torch.nn.Parameter(made)
    del made
    assert pool.memory_allocated() >= 4 * MIB
    if how == "half":
        module.half()
    else:
        SWAPS[how](module.weight)
    assert pool.memory_allocated() == 0
    with pytest.raises(torch_vmm.InvalidArgumentError, match="no longer stands"):
        _ = module.weight.page_size if kind == "sparse" else module.weight.reserved_rows
    pool.close()


def test_rows_that_another_function_changed_are_not_given_back(device: str) -> None:
    tensor = torch_vmm.elastic((10, PAGE // 4), torch.float32, device).fill_(1)
    view = tensor[:]
    tensor.t_()
    tensor.unsqueeze_(0)
    with pytest.raises(torch_vmm.InvalidArgumentError, match="resize_"):
        tensor.shrink_to_fit()
    assert tensor.resize_(10).shrink_to_fit() == 0
    assert (view[-1] == 1).all()


def test_a_cast_makes_none(device: str) -> None:
    cast = torch.zeros(3, 4, device=device).as_subclass(torch_vmm.ElasticTensor)
    for use in (lambda: cast.resize_(2), lambda: cast.reserve(2), cast.shrink_to_fit, cast.detach):
        with pytest.raises(torch_vmm.InvalidArgumentError, match=r"torch_vmm.elastic\(\) makes"):
            use()
    with pytest.raises(torch_vmm.InvalidArgumentError, match=r"torch_vmm.elastic\(\) makes"):
        _ = cast.max_shape
    assert cast.shape == (3, 4)


def test_made_in_inference_mode_it_works_outside(device: str) -> None:
    with torch.inference_mode():
        tensor = torch_vmm.elastic((2, 4), torch.float32, device, (1000, 4)).fill_(1)
        tensor.resize_(3)[2:] = 1
    tensor.resize_(900)[3:] = 1
    assert not tensor.is_inference()
    parameter = torch.nn.Parameter(tensor)
    (parameter * 2).sum().backward()
    assert (parameter.grad == 2).all()
    with torch.inference_mode():
        tensor.resize_(5)
        assert tensor.shrink_to_fit() == 0
        assert tensor.sum() == 20
    tensor.mul_(2)


@pytest.mark.parametrize("trains", [True, False])
def test_a_parameters_copy_is_a_parameter(trains: bool, device: str) -> None:
    module = torch.nn.Linear(4, 3, bias=False)
    module.weight = torch.nn.Parameter(torch_vmm.elastic((3, 4), torch.float32, device, (1000, 4)).fill_(2), trains)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for made in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        assert type(made.weight) is torch.nn.Parameter
        assert dict(made.named_parameters()).keys() == {"weight"}
        assert made.weight.requires_grad == trains
        assert made.weight.data_ptr() != module.weight.data_ptr()
        assert torch.equal(made.weight, module.weight)


def test_it_takes_the_rows_of_another_tensor(device: str) -> None:
    tensor = torch_vmm.elastic((2, 4), torch.float32, device, (1000, 4)).fill_(1)
    address = tensor.data_ptr()
    assert tensor.resize_as_(torch.empty(900, 4)) is tensor
    assert (tensor.shape, tensor.data_ptr()) == ((900, 4), address)
    for wrong in (torch.empty(3, 5), torch.empty(3), torch.tensor(1), torch.empty(1001, 4), None):
        with pytest.raises(torch_vmm.InvalidArgumentError, match="resize_"):
            tensor.resize_as_(wrong)  # type: ignore[arg-type]
        assert tensor.shape == (900, 4)
    assert (tensor.resize_as_(torch.empty(2, 4)) == 1).all()


@pytest.mark.parametrize("wrong", ["many", (-2, 3), (2.5, 3)])
def test_a_max_shape_that_is_none_is_called_so(device: str, wrong: object) -> None:
    with pytest.raises(torch_vmm.InvalidArgumentError, match=r"^max_shape=.* is not a shape"):
        torch_vmm.elastic((1, 3), torch.float32, device, wrong)  # type: ignore[arg-type]


# -- Compiled ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["aot_eager", "inductor"])
def compiled(request: pytest.FixtureRequest, device: str) -> Iterator[Callable[..., Callable[..., torch.Tensor]]]:
    """``torch.compile`` with a backend that calls torch's own kernels with what is given."""
    if request.param == "inductor" and (device != "cpu" or not shutil.which("g++")):
        pytest.skip("on a GPU it needs triton" if device != "cpu" else "no compiler")
    torch.compiler.reset()
    yield lambda function: torch.compile(function, backend=request.param)
    torch.compiler.reset()


def test_compiled_code_takes_it(compiled: Callable[..., Callable[..., torch.Tensor]], device: str) -> None:
    tensor = torch_vmm.elastic((4, 8), torch.float32, device, (1000, 8)).fill_(2)
    query = torch.ones(8, 3, device=device)
    product = compiled(lambda rows, query: rows @ query)
    for n in (4, 6, 600):  # the second is compiled for any number
        tensor.resize_(n).fill_(2)
        result = product(tensor, query)
        assert type(result) is torch.Tensor
        assert torch.equal(result, torch.full((n, 3), 16.0, device=device))
    sparse = torch_vmm.sparse((1 << 30, 8), torch.float32, device)
    sparse.commit(slice(0, 4))
    sparse[:4] = 1
    assert torch.equal(compiled(lambda rows, query: rows[:4] @ query)(sparse, query), query.new_full((4, 3), 8))


def test_a_compiled_module_takes_it(compiled: Callable[..., Callable[..., torch.Tensor]], device: str) -> None:
    module = torch.nn.Linear(8, 4, bias=False, device=device)
    module.weight = torch.nn.Parameter(torch_vmm.elastic((4, 8), torch.float32, device).fill_(2))
    given = torch.ones(3, 8, device=device)
    result = compiled(module)(given)
    result.sum().backward()
    assert torch.equal(result, module(given))
    assert torch.equal(module.weight.grad, torch.full((4, 8), 3.0, device=device))


def test_compiled_code_makes_it_grow(compiled: Callable[..., Callable[..., torch.Tensor]], device: str) -> None:
    def grow(rows: torch.Tensor) -> torch.Tensor:
        rows.resize_(len(rows) + 1000)
        return rows @ rows[:2].t()

    tensor = torch_vmm.elastic((4, 1024), torch.float32, device, (100_000, 1024))
    for n in (1004, 2004):
        assert compiled(grow)(tensor).shape == (n, 2)
        assert tensor.shape[0] == n <= tensor.reserved_rows


def test_a_shape_that_a_refused_function_left_makes_no_memory(device: str) -> None:
    """torch writes the shape before it refuses to grow the storage."""
    tensor = torch_vmm.elastic((4, 1024), device=device, max_shape=(100_000, 1024))
    with pytest.raises(RuntimeError):
        torch.add(torch.ones(4000, 1024, device=device), 1, out=tensor)
    assert tensor.shape == (4000, 1024)
    with pytest.raises(torch_vmm.InvalidArgumentError, match="resize_"):
        tensor.shrink_to_fit()
    tensor.resize_(4)
    assert tensor.reserved_rows == PAGE // 4096
    tensor.resize_(4000)
    tensor.fill_(1)
    assert bool((tensor == 1).all())


def test_a_copy_of_one_that_leads_back_to_itself(device: str) -> None:
    tensor = torch_vmm.elastic((3,), device=device)
    tensor.zero_()
    tensor.me = tensor  # type: ignore[attr-defined]
    tensor.more = {"names": ["a"]}  # type: ignore[attr-defined]
    made = copy.deepcopy(tensor)
    assert type(made) is torch.Tensor
    assert made.me is made  # type: ignore[attr-defined]
    assert made.more == {"names": ["a"]}  # type: ignore[attr-defined]
    assert made.more is not tensor.more  # type: ignore[attr-defined]
    del tensor.me, made.me  # type: ignore[attr-defined]


def test_twins_that_have_gone_are_forgotten(device: str) -> None:
    tensor = torch_vmm.elastic((3,), device=device)
    kept = [tensor.detach() for _ in range(20)]
    for _ in range(1000):
        tensor.detach()
    assert len(tensor._backing.twins()) == len(tensor._backing._twins) == len(kept) + 1


def test_a_copy_of_a_parameter_has_none_of_its_attributes(device: str) -> None:
    """As torch has it: they may be what nobody can copy."""
    parameter = torch.nn.Parameter(torch_vmm.elastic((3,), device=device).zero_())
    parameter.lock = threading.Lock()  # type: ignore[attr-defined]
    made = copy.deepcopy(parameter)
    assert isinstance(made, torch.nn.Parameter)
    assert not hasattr(made, "lock")
