"""refuse_asleep(): operations of torch that would use memory of a sleeping model."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_vmm import _C
from torch_vmm.dense import span_bytes
from torch_vmm.errors import AsleepError, NotAvailableError

_TORCH = "aten"
_OF_TRACING = "torch._subclasses."  # tensors without memory, whose modes do as they like with them
# What takes a tensor for its shape and type, or for whose it is, and looks at none of its bytes.
_ASKS_FOR_NO_CONTENTS = frozenset(
    {
        "_has_same_storage_numel",
        "_lazy_clone",
        "_nested_tensor_size",
        "_nnz",
        "dense_dim",
        "dim",
        "is_coalesced",
        "is_contiguous",
        "is_pinned",
        "is_same_size",
        "is_set_to",
        "lift_fresh",
        "numel",
        "q_per_channel_axis",
        "record_stream",
        "set_",
        "size",
        "sparse_dim",
        "storage_offset",
        "stride",
        "sym_is_contiguous",
        "sym_numel",
        "sym_size",
        "sym_storage_offset",
        "sym_stride",
    }
)
# They move what there is, though they only change shapes by their tags.
_MOVES_CONTENTS = frozenset({"resize_", "resize_as_"})
# What reads contents with no operation that torch dispatches; printing sets modes of dispatch aside.
_READS_BY_ITSELF = frozenset(
    {
        torch.Tensor.__array__,
        torch.Tensor.__dlpack__,
        torch.Tensor.__format__,
        torch.Tensor.__repr__,
        torch.Tensor.apply_,
        torch.Tensor.map2_,
        torch.Tensor.map_,
        torch.Tensor.new,
        torch.Tensor.new_tensor,
        torch.Tensor.numpy,
        torch.Tensor.tensor_split,
        torch.Tensor.tolist,
        torch.as_tensor,
        torch.asarray,
        torch.sparse_coo_tensor,
        torch.tensor,
        torch.tensor_split,
    }
)
# They read the tensors in lists of their index.
_INDEXES = frozenset({torch.Tensor.__getitem__, torch.Tensor.__setitem__})


class refuse_asleep:  # noqa: N801  in lower case, as torch.no_grad is
    """Within it, an operation of torch on memory that is asleep raises
    ``AsleepError`` before it begins, where else it would fault.

    For this thread, and for what autograd runs on others for it. It looks at
    every operation that torch dispatches, which costs tens of microseconds
    each: it is for finding who touches a sleeping model, not for production.
    Compiled functions run eagerly meanwhile, so that they are seen too.

    Views, shapes and what is made ``like`` a tensor need no memory of it, and
    are not refused. While a model wakes, memory that has come counts as there,
    its contents or not: ``wait_for()`` waits for these.

    It does not see what torch does not dispatch to it: a CUDA graph that is
    replayed, a compiled function's backward that was recorded before, what
    custom operators, ``cond`` and their like call within, TorchScript and
    quantized modules, nested and MKL-DNN tensors' own bookkeeping, other
    libraries, and host memory that is pickled or read by its storage.
    """

    def __init__(self) -> None:
        self._entered: list[contextlib.ExitStack] = []

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            # Else whatever compiled function is called within stays eager for ever.
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(_Functions())
            stack.enter_context(_Operations())  # type: ignore[no-untyped-call]
            self._entered.append(stack.pop_all())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.pop().__exit__(kind, error, trace)


class _Functions(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _READS_BY_ITSELF:
            _require_all_there(func, (args, kwargs))
        elif func in _INDEXES:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            _require_all_there(func, [each for each in index if isinstance(each, list)])
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Inference mode leaves whole what is made of other operations, which are looked at one by one.
        if _is_made_of_others(func):
            with self:
                return func.decompose(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if _reads_or_writes(func, tensors):
            _require_all_there(func, tensors)
        if any(_dispatches_itself(each) for each in types):
            return NotImplemented  # it will do this to the tensors that it is made of
        return func(*args, **(kwargs or {}))


def _is_made_of_others(func: Any) -> bool:
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != _TORCH:
        return False
    try:
        return func._can_decompose()
    except RuntimeError:  # what asks for shapes is TorchScript's alone
        return False


def _dispatches_itself(tensor_class: type) -> bool:
    if tensor_class.__module__.startswith(_OF_TRACING):
        return False
    own = getattr(tensor_class, "__torch_dispatch__", None)
    return own not in (None, torch.Tensor.__torch_dispatch__, torch._C._disabled_torch_dispatch_impl)


def _reads_or_writes(func: Any, tensors: Sequence[torch.Tensor]) -> bool:
    if not isinstance(func, torch._ops.OpOverload):
        return True
    name = func._schema.name.partition("::")[2]
    if func.namespace == _TORCH and name in _ASKS_FOR_NO_CONTENTS:
        return False
    if not all(_is_plain(each) for each in tensors):
        return True  # their shapes are tensors
    if func.is_view or (torch.Tag.inplace_view in func.tags and name not in _MOVES_CONTENTS):
        return False
    is_made_like_one = func.namespace == _TORCH and (name.startswith("new_") or name.endswith("_like"))
    return not (is_made_like_one and len(tensors) == 1)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized


def _require_all_there(func: Any, arguments: object) -> None:
    try:
        for argument in tree_leaves(arguments):
            if isinstance(argument, torch.Tensor):
                for address, size in _stretches(argument):
                    _C.require_there(address, size)
    except AsleepError as error:
        raise AsleepError(f"{_name_of(func)}: {error}", model_id=error.model_id) from None
    except NotAvailableError:
        return  # in a forked child no pool can be asked


def _name_of(func: Any) -> str:
    return str(func) if isinstance(func, torch._ops.OpOverload) else getattr(func, "__name__", str(func))


def _stretches(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Address and bytes of what its elements lie in; none of what has no memory."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    if tensor.device.type not in ("cuda", "cpu"):
        return
    if tensor.is_nested:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            yield storage.data_ptr(), storage.nbytes()
    elif tensor.layout == torch.strided:
        if tensor.numel() != 0:
            # Of its storage; data_ptr() would copy what is to be copied on write.
            base = torch._C._data_address(tensor)  # type: ignore[attr-defined]
            yield base + tensor.storage_offset() * tensor.element_size(), span_bytes(tensor)
        if tensor.is_quantized and tensor.qscheme() == torch.per_channel_affine:
            yield from _stretches(tensor.q_per_channel_scales())
            yield from _stretches(tensor.q_per_channel_zero_points())
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
