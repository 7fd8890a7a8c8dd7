"""refuse_asleep(): operations of torch that would use memory of a sleeping model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_vmm import _C
from torch_vmm.dense import span_bytes
from torch_vmm.errors import AsleepError

# What takes a tensor for its shape and type, or for whose it is, and looks at none of its bytes.
_ASKS_FOR_NO_CONTENTS = frozenset(
    {"is_pinned", "is_same_size", "is_set_to", "record_stream", "set_", "_has_same_storage_numel", "lift_fresh"}
)
_TORCH = "aten"
_OF_TRACING = "torch._subclasses."  # tensors without memory, whose modes do as they like with them


# What reads contents with no operation that torch dispatches; printing sets modes of dispatch aside.
_READS_BY_ITSELF = frozenset(
    {
        torch.Tensor.__array__,
        torch.Tensor.__dlpack__,
        torch.Tensor.__format__,
        torch.Tensor.__repr__,
        torch.Tensor.numpy,
        torch.Tensor.tolist,
    }
)


@contextlib.contextmanager
def refuse_asleep() -> Iterator[None]:
    """Within it, an operation of torch on memory that is asleep raises
    ``AsleepError`` before it begins, where else it would fault.

    For this thread, and for what autograd runs on others for it. It looks at
    every operation that torch dispatches, which costs tens of microseconds
    each: it is for finding who touches a sleeping model, not for production. It
    does not see what torch does not dispatch: a CUDA graph that is replayed,
    the kernels of a function that was compiled before, other libraries', and
    pickling of host memory.

    Views, shapes and what is made ``like`` a tensor need no memory of it, and
    are not refused. A function can be decorated with it too.
    """
    with _Functions(), _Operations():  # type: ignore[no-untyped-call]
        yield


class _Functions(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _READS_BY_ITSELF:
            _require_all_there(func, args, kwargs)
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(_dispatches_itself(each) for each in types):
            return NotImplemented  # it will do this to the tensors that it is made of
        if _reads_or_writes(func):
            _require_all_there(func, args, kwargs)
        return func(*args, **(kwargs or {}))


def _dispatches_itself(tensor_class: type) -> bool:
    if tensor_class.__module__.startswith(_OF_TRACING):
        return False
    own = getattr(tensor_class, "__torch_dispatch__", None)
    return own not in (None, torch.Tensor.__torch_dispatch__, torch._C._disabled_torch_dispatch_impl)


def _reads_or_writes(func: Any) -> bool:
    if not isinstance(func, torch._ops.OpOverload):
        return True
    if func.is_view or torch.Tag.inplace_view in func.tags:
        return False
    name = func._schema.name.partition("::")[2]
    if func.namespace != _TORCH:
        return True
    return not (name.startswith("new_") or name.endswith("_like") or name in _ASKS_FOR_NO_CONTENTS)


def _require_all_there(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
    try:
        for argument in tree_leaves((args, kwargs)):
            if isinstance(argument, torch.Tensor):
                for address, size in _stretches(argument):
                    _C.require_there(address, size)
    except AsleepError as error:
        raise AsleepError(f"{_name_of(func)}: {error}", model_id=error.model_id) from None


def _name_of(func: Any) -> str:
    return str(func) if isinstance(func, torch._ops.OpOverload) else getattr(func, "__name__", str(func))


def _stretches(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Address and bytes of what its elements lie in; none of what has no memory."""
    if tensor.device.type not in ("cuda", "cpu"):
        return
    if tensor.is_nested:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            yield storage.data_ptr(), storage.nbytes()
    elif tensor.layout == torch.strided:
        if tensor.numel() != 0:
            # data_ptr() would copy what is to be copied on write.
            yield torch._C._data_address(tensor), span_bytes(tensor)  # type: ignore[attr-defined]
    else:
        for part in _parts(tensor):
            yield from _stretches(part)


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of a sparse one; of another layout torch has no public name."""
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()
