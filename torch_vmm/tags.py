"""Names for a pool's memory: what is made under one lies together, apart from all else."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from torch_vmm import _decorate
from torch_vmm._guarded import Guarded
from torch_vmm.contexts import Stays
from torch_vmm.sizes import to_name

if TYPE_CHECKING:
    from torch_vmm.pools import VirtualMemoryPool

Function = TypeVar("Function", bound=Callable[..., Any])


class Tag(Guarded, guarded=True):
    """What ``pool.tag(name)`` returns: a context manager and decorator.

    A decorated generator or coroutine is under the tag only while it runs.
    """

    _instead_of_a_copy = "it is open on threads of this process; make another one, pool.tag(...) costs nothing"
    _pool: VirtualMemoryPool
    _name: str
    _stays: Stays

    def __init__(self, pool: VirtualMemoryPool, name: str) -> None:
        self._pool = pool
        self._name = to_name(name, "tag")
        self._stays = Stays()

    def __enter__(self) -> VirtualMemoryPool:
        self._stays.enter(self._pool._handle.tagged(self._name))
        return self._pool

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stays.leave()

    def __call__(self, function: Function) -> Function:
        return _decorate.inside(lambda: self, function)

    def __repr__(self) -> str:
        return f"{self._pool!r}.tag({self._name!r})"
