"""strict(): tensors that are made outside every model raise, or warn."""

from __future__ import annotations

import contextlib
import threading
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Literal

import torch

from torch_vmm import _C
from torch_vmm._guarded import Guarded
from torch_vmm.devices import Device, DeviceKey, to_device
from torch_vmm.errors import InvalidArgumentError, NotAvailableError, VmmError

if TYPE_CHECKING:
    from torch_vmm.pools import VirtualMemoryPool

Action = Literal["raise", "warn", "off"]


# In lower case, as torch.no_grad is.
class strict(Guarded, guarded=True):  # noqa: N801
    """From now on a tensor made on this device outside every model raises, or
    warns.

    A function and a context manager: ``torch_vmm.strict()`` stays on until a
    later call says otherwise; ``with torch_vmm.strict():`` ends with its block,
    and what was in force before is in force again. It holds for all threads.

    Warnings are Python's: one for each line of code, by Python's own rule. They
    come when the call into torch has come back, so they name the Python line
    that made the call.

    A model of :func:`torch_vmm.set_default_model` is set aside meanwhile,
    whichever was called first: what is made outside every model raises all the
    same. With ``"warn"`` it is the device's own default pool's.

    Args:
        device: which; ``"cuda"`` is the current one.
        action: ``"raise"`` (a ``RuntimeError`` out of the operation that needed
            memory), ``"warn"`` (a ``UserWarning``), or ``"off"``.
    Raises:
        NotEnabledError: torch_vmm is not that device's allocator.
        NotAvailableError: no such device.
        InvalidArgumentError: no device, or another action.
    """

    _instead_of_a_copy = "it holds for this process; make another one, strict(...) costs nothing"
    _device: DeviceKey
    _action: Action
    _depth: int

    def __init__(self, device: Device = "cuda", action: Action = "raise") -> None:
        if action not in ("raise", "warn", "off"):
            raise InvalidArgumentError(f'action={action!r}: give "raise", "warn" or "off"')
        self._device = to_device(device)
        self._action = action
        self._depth = 0
        if action != "off" and self._device.kind == "cuda" and _C.is_enabled("cuda"):
            count = torch.cuda.device_count()
            if self._device.ordinal >= count:
                raise NotAvailableError(f"there is no device {self._device}; visible of its kind: {count}")
        _wishes_for(self._device).add(self)

    def __enter__(self) -> None:
        if self._depth == 0:
            _wishes_for(self._device).add(self)
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            _wishes_for(self._device).remove(self)

    def __repr__(self) -> str:
        return f"strict({str(self._device)!r}, {self._action!r})"


class _Wishes:
    """What strict() was asked for on one device. The latest that stands is in force.

    And whose tensors are that are made outside every model, while nothing is in force.
    """

    def __init__(self, device: DeviceKey) -> None:
        self._device = device
        # One whose object is gone is never taken back: a later such one covers it.
        self._standing: list[tuple[weakref.ref[strict], Action]] = []
        self._default_model: VirtualMemoryPool | None = None  # held: dropped, it would be closed

    def add(self, wish: strict) -> None:
        """``wish`` is the latest. Raises where it cannot be met, and is none then."""
        with _lock:
            before = list(self._standing)
            self._take_out(wish)
            self._standing.append((weakref.ref(wish), wish._action))
            try:
                self._obey()
            except BaseException:
                self._standing = before
                raise

    def remove(self, wish: strict) -> None:
        with _lock:
            self._take_out(wish)
            self._obey()

    def set_default_model(self, pool: VirtualMemoryPool | None) -> None:
        with _lock:
            if pool is None or self._action() == "off":
                self._tell(pool)
            self._default_model = pool

    def _action(self) -> Action:
        return self._standing[-1][1] if self._standing else "off"

    def _take_out(self, wish: strict) -> None:
        self._standing = [each for each in self._standing if each[0]() is not wish]

    def _obey(self) -> None:
        lasting = [each for each in self._standing if each[0]() is None]
        self._standing = [each for each in self._standing if each[0]() is not None or each is lasting[-1]]
        action = self._action()
        if action == "off":
            self._put_default_model(self._default_model)
            _C.set_strict(*self._device, action)
        else:
            _C.set_strict(*self._device, action)
            self._put_default_model(None)

    def _put_default_model(self, pool: VirtualMemoryPool | None) -> None:
        if self._default_model is not None:
            with contextlib.suppress(VmmError):  # it was closed meanwhile
                self._tell(pool)

    def _tell(self, pool: VirtualMemoryPool | None) -> None:
        _C.set_default_model(*self._device, None if pool is None else pool._handle)


# Re-entrant, because a collection inside the lock may run someone's __del__.
_lock = threading.RLock()
_wishes: dict[DeviceKey, _Wishes] = {}


def set_default_model(device: DeviceKey, pool: VirtualMemoryPool | None) -> None:
    """Whose tensors are that are made outside every model of the device, wherever strict() lets any be made."""
    _wishes_for(device).set_default_model(pool)


def _wishes_for(device: DeviceKey) -> _Wishes:
    with _lock:
        return _wishes.setdefault(device, _Wishes(device))
