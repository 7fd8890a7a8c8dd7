"""Where a strided tensor's elements are: the stretch of memory from its first to its last.

It knows nothing of pools.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_vmm.errors import InvalidArgumentError
from torch_vmm.sizes import show


def require_strided(tensor: object, doing: str) -> torch.Tensor:
    """``tensor``, if its elements stand in one storage by strides.

    Args:
        doing: begins the message.
    Raises:
        InvalidArgumentError: no tensor, or one that is made of other tensors: a nested one, one of another layout, or
            one that wraps others (a ``DTensor``).
    """
    strided = _require_layout(tensor, doing)
    wraps_others: bool = is_traceable_wrapper_subclass(strided)  # by itself: mypy holds that no tensor does
    if wraps_others:
        raise InvalidArgumentError(
            f"{doing}: a tensor of class {type(strided).__name__} is made of other tensors: give a tensor that is "
            f"strided and dense, one of those that it wraps for example (a DTensor's to_local())"
        )
    return strided


def _require_layout(tensor: object, doing: str) -> torch.Tensor:
    """As :func:`require_strided`, but one that wraps others may do so."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgumentError(f"{doing}: {show(tensor)} is no tensor: give a tensor that is strided and dense")
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "a nested tensor" if tensor.is_nested else f"a tensor of layout {tensor.layout}"
        raise InvalidArgumentError(
            f"{doing}: {kind} is made of other tensors: give a tensor that is strided and dense, one of its parts for "
            f"example"
        )
    return tensor


def require_values(tensor: torch.Tensor, name: str) -> None:
    """Raises InvalidArgumentError for what is not what stands in memory: a conjugate or negative that torch computes as
    it is read.
    """
    for is_lazy, resolve in ((tensor.is_conj(), "resolve_conj"), (tensor.is_neg(), "resolve_neg")):
        if is_lazy:
            raise InvalidArgumentError(
                f"{name}: its memory holds other values, which torch changes as it reads; give {name}.{resolve}(), "
                f"a copy"
            )


def require_no_grad(tensor: torch.Tensor, name: str, what: str) -> None:
    """Raises InvalidArgumentError where autograd would lose a tensor at what is made of it."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise InvalidArgumentError(
            f"{name}: it requires grad, and autograd does not follow {what}; give {name}.detach(), or do it under "
            f"torch.no_grad()"
        )


def plain_tensors(tensor: object, doing: str) -> Iterator[torch.Tensor]:
    """``tensor``, or those that it wraps: a ``DTensor`` has no memory but theirs.

    Args:
        doing: begins the message.
    Raises:
        InvalidArgumentError: it, or one within, is no tensor, a nested one or one of another layout.
    """
    strided: Any = _require_layout(tensor, doing)
    if is_traceable_wrapper_subclass(strided):
        names, _ = strided.__tensor_flatten__()
        for name in names:
            yield from plain_tensors(getattr(strided, name), doing)
    else:
        yield strided


def span_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the last, of a tensor that has any."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Are there neither gaps nor overlaps from its first element to its last?"""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _reaches_the_end(tensor: torch.Tensor) -> bool:
    """Does the storage end where the tensor does?"""
    behind = tensor.storage_offset() * tensor.element_size() + span_bytes(tensor)
    return bool(behind >= tensor.untyped_storage().nbytes())  # torch 2.15 types a size as an int or a symbol


def covered_pieces(tensors: torch.Tensor | Iterable[torch.Tensor]) -> list[tuple[int, int, bool]]:
    """Address and bytes of what each tensor covers, and whether its memory ends there."""
    asked: object = tensors  # which may be anything, whatever is declared
    # Some modules can be iterated over: ParameterList over tensors, Sequential over further modules.
    if isinstance(asked, torch.nn.Module) and not isinstance(asked, torch.nn.ParameterList):
        raise InvalidArgumentError(f"tensors=<module {type(asked).__name__}>: give module.parameters(), or tensors")
    if isinstance(asked, Mapping) and not all(isinstance(key, torch.Tensor) for key in asked):
        raise InvalidArgumentError(f"tensors={show(asked)}: give its .values(), or tensors")
    if not isinstance(asked, torch.Tensor | Iterable):
        raise InvalidArgumentError(f"tensors={show(asked)}: give tensors")
    found = []
    given = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    for tensor in itertools.chain.from_iterable(plain_tensors(each, "tensors") for each in given):
        if not _is_dense(tensor):
            raise InvalidArgumentError(
                "give tensors that are contiguous in some order of their dimensions, channels_last for example: pages "
                "are sealed from the first element to the last"
            )
        if tensor.numel() == 0:
            continue
        size = tensor.numel() * tensor.element_size()
        # An elastic tensor's rows may be fewer than it holds memory for, and that is its alone.
        held: int = getattr(tensor, "_held_bytes", lambda: 0)()
        found.append((tensor.data_ptr(), max(size, held), held >= size or _reaches_the_end(tensor)))
    return found
