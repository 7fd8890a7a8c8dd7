"""debug.refuse_asleep(): what torch does to a sleeping model's memory raises before it begins."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_vmm
from tests.api.sleeping import is_numbered, numbered
from tests.helpers import MIB
from torch_vmm import AsleepError, VirtualMemoryPool
from torch_vmm.debug import refuse_asleep

USES: dict[str, Callable[[torch.Tensor], object]] = {
    "read": lambda t: t + 1,
    "written": lambda t: t.zero_(),
    "written to a part": lambda t: t[3:5].fill_(0),
    "an item": lambda t: t[7].item(),
    "printed": lambda t: str(t),
    "in a text": lambda t: f"{t} {t[3]:.2f}",
    "a list": lambda t: t.tolist(),
    "copied deeply": lambda t: copy.deepcopy(t),
    "compared": lambda t: torch.equal(t, t),
    "cloned": lambda t: t.clone(),
    "copied out": lambda t: t.to("cpu", copy=True),
    "copied into": lambda t: t.copy_(torch.ones(1000, dtype=t.dtype, device=t.device)),
    "out": lambda t: torch.add(torch.ones_like(t), 1, out=t),
    "in a list": lambda t: torch._foreach_add_([t], 1),
    "among others": lambda t: torch.cat([torch.ones(3, dtype=t.dtype, device=t.device), t]),
    "an index": lambda t: torch.ones(4, device=t.device).index_select(0, t[:2]),
    "resized": lambda t: t.resize_(2000),
    "made like it, into it": lambda t: torch.ops.aten.zeros_like.out(t, out=t),
    "in a list of numbers": lambda t: torch.tensor([t[0], t[1]]),
    "in a list as an index": lambda t: torch.ones(4, 2000, device=t.device)[:, [t[0], 2]],
    "a view of a view, copied": lambda t: t.view(10, 100).t()[3:].contiguous(),
    "conjugated": lambda t: torch.view_as_complex(t.view(torch.float32).view(-1, 2)).conj().clone(),
}


@pytest.mark.parametrize("use", USES)
def test_who_uses_it_is_told(model: VirtualMemoryPool, use: str) -> None:
    tensor = numbered(model, 1000)
    model.sleep()
    with refuse_asleep(), pytest.raises(AsleepError, match=r"^[\w.]+: model '\w+' is asleep; wake\(\)") as raised:
        USES[use](tensor)
    assert raised.value.model_id == model.name
    model.wake()
    with refuse_asleep():
        assert is_numbered(tensor)


def test_what_needs_no_memory_is_answered(model: VirtualMemoryPool, device: str) -> None:
    tensor = numbered(model, 1000)
    model.sleep("discard")
    with refuse_asleep():
        assert tensor.shape == (1000,)
        assert tensor[3:].view(-1).unsqueeze(0).detach().shape == (1, 997)
        assert tensor.t_().stride() == (1,)
        assert torch.zeros_like(tensor).sum().item() == 0
        assert tensor.new_ones(3).sum().item() == 3
        assert torch_vmm.pool_of(tensor) is model
        assert tensor[:0].clone().numel() == 0
        tensor.data = torch.ones(3, dtype=tensor.dtype, device=device)
        assert tensor.sum().item() == 3
    model.wake()


INFERENCE: dict[str, Callable[[torch.Tensor], object]] = {
    "contiguous": lambda t: t.view(10, 100).t().contiguous(),
    "another type": lambda t: t.half(),
    "copied": lambda t: t.to(t.device, copy=True),
    "reshaped": lambda t: t.view(10, 100).t().reshape(1000),
    "multiplied": lambda t: torch.matmul(t.view(torch.float32).view(10, 100), torch.ones(100, 3, device=t.device)),
}


@pytest.mark.parametrize("made_so", [False, True])
@pytest.mark.parametrize("use", INFERENCE)
def test_under_inference_mode(model: VirtualMemoryPool, device: str, use: str, made_so: bool) -> None:
    with torch.inference_mode(made_so):
        tensor = numbered(model, 1000)
    model.sleep()
    with refuse_asleep(), torch.inference_mode():
        assert tensor.reshape(10, 100).shape == (10, 100)
        assert torch.atleast_2d(tensor).shape == (1, 1000)
        assert len(torch.broadcast_tensors(tensor, torch.ones(3, 1000, device=device))) == 2
        with pytest.raises(AsleepError, match="is asleep"):
            INFERENCE[use](tensor)
    model.wake()
    with refuse_asleep(), torch.inference_mode():
        INFERENCE[use](tensor)


def test_what_counts_is_where_a_view_lies(model: VirtualMemoryPool, device: str) -> None:
    rows = 1 << 16
    with model:
        table = torch_vmm.sparse((rows, 128), torch.float32, device, zeros=True)
    table.commit(slice(0, 512))
    table.commit(slice(10000, 11000))
    table[10000] = 1
    model.sleep()
    with refuse_asleep():
        for row in (10000, 0):
            with pytest.raises(AsleepError):
                table[row].sum()
        assert table[40000:].sum().item() == 0, "zeros, which sleep nowhere"
    model.wake()


def test_only_what_sleeps_is_refused(model: VirtualMemoryPool) -> None:
    with model:
        weights = torch.ones(2 * MIB, device=model.device)
    with model.tag("cache"):
        cache = torch.ones(2 * MIB, device=model.device)
    outside = torch.ones(2 * MIB, device=model.device)
    model.sleep({"cache": "host"})
    with refuse_asleep():
        weights.add_(outside)
        with pytest.raises(AsleepError, match=r"tag 'cache' of model '\w+' is asleep; wake\('cache'\) first"):
            weights.add_(cache)
        model.wake(["cache"])
        assert bool(weights.add_(cache).eq(3).all())


def test_what_has_come_can_be_used_while_the_rest_is_on_its_way(model: VirtualMemoryPool) -> None:
    first, last = (numbered(model, 4 * MIB) for _ in range(2))
    model.sleep()
    with refuse_asleep():
        handle = model.wake(blocking=False, order="as allocated")
        handle.wait_for(first)
        assert is_numbered(first)
        handle.wait()
        assert is_numbered(last)


def test_backward_is_refused_too(model: VirtualMemoryPool, device: str) -> None:
    with model:
        weights = torch.ones(1000, device=device, requires_grad=True)
    x = torch.ones(1000, device=device, requires_grad=True)
    loss = (weights * x).sum()
    model.sleep()
    with refuse_asleep(), pytest.raises(AsleepError, match=r"aten\.mul\.Tensor: model"):
        loss.backward()
    model.wake()
    with refuse_asleep():
        loss.backward()
    assert x.grad is not None
    assert x.grad.sum().item() == 1000


@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "sparse_csc", "nested", "jagged"])
def test_what_is_made_of_others(model: VirtualMemoryPool, device: str, layout: str) -> None:
    with model:
        dense = torch.eye(64, device=device)
        made: torch.Tensor = (
            torch.nested.nested_tensor(
                [dense[:3], dense], device=device, layout=torch.jagged if layout == "jagged" else torch.strided
            )
            if layout in ("nested", "jagged")
            else dense.to_sparse(layout=getattr(torch, layout))
        )
    model.sleep()
    with refuse_asleep(), pytest.raises(AsleepError, match="is asleep"):
        made * 2
    model.wake()
    with refuse_asleep():
        made * 2


@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr"])
def test_views_of_what_is_made_of_others_read_it(model: VirtualMemoryPool, device: str, layout: str) -> None:
    with model:
        made = torch.eye(64, device=device).to_sparse(layout=getattr(torch, layout))
    model.sleep()
    with refuse_asleep():
        with pytest.raises(AsleepError):
            made[0]
        assert made.shape == (64, 64)
        assert made._nnz() == 64
    model.wake()


class Passing(torch.Tensor):
    """Does as every tensor does, with no mode left."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs or {})


def test_a_tensor_that_dispatches_itself_is_looked_at_first(model: VirtualMemoryPool, device: str) -> None:
    own = numbered(model, 10).as_subclass(Passing)
    others = torch.ones(10, device=device).as_subclass(Passing)
    plain = numbered(model, 10)
    model.sleep()
    with refuse_asleep():
        for use in (lambda: own + 1, lambda: others + plain):
            with pytest.raises(AsleepError):
                use()
        others + 1
    model.wake()


class Wrapper(torch.Tensor):
    """Two tensors, or operations on each."""

    a: torch.Tensor
    b: torch.Tensor

    @staticmethod
    def __new__(cls, a: torch.Tensor, b: torch.Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype, device=a.device)  # type: ignore[attr-defined]
        made.a, made.b = a, b
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def each(name: str) -> Any:
            return func(*(getattr(x, name) if isinstance(x, Wrapper) else x for x in args), **(kwargs or {}))

        return Wrapper(each("a"), each("b"))


def test_of_a_tensor_that_wraps_others_each_is_looked_at(model: VirtualMemoryPool, device: str) -> None:
    pair = Wrapper(torch.ones(10, device=device), numbered(model, 10))
    model.sleep()
    with refuse_asleep(), pytest.raises(AsleepError, match="is asleep"):
        pair + 1
    model.wake()
    with refuse_asleep():
        assert (pair + 1).a.sum().item() == 20


def test_under_a_fake_mode(model: VirtualMemoryPool, device: str) -> None:
    numbered(model, 10)
    model.sleep("discard")
    with refuse_asleep(), FakeTensorMode():
        assert (torch.ones(3, device=device) + 1).shape == (3,)
    with FakeTensorMode(), refuse_asleep():
        assert (torch.ones(3, device=device) + 1).shape == (3,)
    model.wake()


def test_compiled_functions_are_seen_and_stay_compiled(model: VirtualMemoryPool, device: str) -> None:
    ran = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        def run(*args: Any) -> Any:
            ran.append(1)
            return graph.forward(*args)

        return run

    compiled = torch.compile(lambda x: (x * 3).sum(), backend=backend)
    awake = torch.ones(9, device=device)
    asleep = numbered(model, 9)
    compiled(awake)
    assert len(ran) == 1
    model.sleep()
    with refuse_asleep():
        assert compiled(awake).item() == 27
        with pytest.raises(AsleepError):
            compiled(asleep)
    assert len(ran) == 1, "eagerly"
    compiled(awake)
    assert len(ran) == 2
    model.wake()


def test_what_is_awake_can_be_printed_under_vmap(device: str) -> None:
    with refuse_asleep():
        texts: list[str] = []
        torch.func.vmap(lambda x: (texts.append(str(x)), x + 1)[1])(torch.ones(3, device=device))
        torch.func.grad(lambda x: (texts.append(f"{x}"), x.sum())[1])(torch.ones(3, device=device))
        assert len(texts) == 2


def test_it_is_no_decorator() -> None:
    with pytest.raises(TypeError, match="not callable"):
        refuse_asleep()(lambda: None)  # type: ignore[operator]


def test_it_ends_with_its_block(model: VirtualMemoryPool) -> None:
    tensor = numbered(model, 10)
    with refuse_asleep():
        assert is_numbered(tensor)
    with refuse_asleep(), refuse_asleep():
        assert is_numbered(tensor + 0)
    model.sleep()
    model.wake()
    assert is_numbered(tensor)
