"""Names for a pool's memory: what is made under one lies together, apart from all else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_vmm import _C
from torch_vmm._guarded import Guarded
from torch_vmm.contexts import ContextDecorator
from torch_vmm.sizes import to_name

if TYPE_CHECKING:
    from torch_vmm.pools import VirtualMemoryPool


class Tag(ContextDecorator, Guarded, guarded=True):
    """What ``pool.tag(name)`` returns: a context manager and decorator.

    A decorated generator or coroutine is under the tag only while it runs.
    """

    _instead_of_a_copy = "it is open on threads of this process; make another one, pool.tag(...) costs nothing"
    _pool: VirtualMemoryPool
    _name: str

    def __init__(self, pool: VirtualMemoryPool, name: str) -> None:
        self._pool = pool
        self._name = to_name(name, "tag")
        self._stays = _C.Stays()

    if TYPE_CHECKING:

        def __enter__(self) -> VirtualMemoryPool: ...

    def _opens(self) -> tuple[list[_C.Pool], VirtualMemoryPool]:
        return [self._pool._handle.tagged(self._name)], self._pool

    def __repr__(self) -> str:
        return f"{self._pool!r}.tag({self._name!r})"
