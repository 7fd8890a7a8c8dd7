"""Another process to share tensors with: it does what it is asked, and answers through a queue.

It is started by torch.multiprocessing, under torch_vmm or under torch's own
allocator, and keeps what it is told to keep by name.
"""

from __future__ import annotations

import ctypes
import gc
import os
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import multiprocessing

from tests.gpu.patterns import intact, queue_stamp

_PATIENCE_S = 120.0
_kept: dict[str, torch.Tensor] = {}


class OtherError(RuntimeError):
    """What was asked for raised over there."""


class Other:
    """A process under one of the allocators."""

    def __init__(self, allocator: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._requests, self._answers = context.Queue(), context.Queue()
        self.process = context.Process(target=_serve, args=(allocator, self._requests, self._answers), daemon=True)
        self.process.start()

    def ask(self, what: Callable[..., Any], *args: Any) -> Any:
        """What ``what(*args)``, a function below, returns over there.

        Raises:
            OtherError: it raised, or its arguments could not be opened.
        """
        self._requests.put((what.__name__, args))
        answer, error = self._answers.get(timeout=_PATIENCE_S)
        if error:
            raise OtherError(error)
        return answer

    def end(self) -> None:
        if self.process.is_alive():
            self._requests.put(("", ()))
        self.process.join(20)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _serve(allocator: str, requests: Any, answers: Any) -> None:
    if allocator == "torch_vmm":
        import torch_vmm

        torch_vmm.enable("cuda")
    while True:
        try:
            name, args = requests.get()
            if not name:
                _kept.clear()
                return
            answer = globals()[name](*args)
            torch.cuda.synchronize()
            answers.put((answer, ""))
        except Exception:
            answers.put((None, traceback.format_exc()))
        # Nothing of the request may outlive it unless it is kept.
        name = args = answer = None


# -- What can be asked -------------------------------------------------------------------------------------------------


def allocator_name() -> str:
    """Makes a tensor, so that everything is loaded."""
    torch.ones(1, device="cuda")
    return torch.cuda.memory.get_allocator_backend()


def is_intact(tensor: torch.Tensor, seed: int) -> bool:
    return intact(tensor, seed)


def keep(name: str, tensor: torch.Tensor) -> int:
    """Keeps a tensor that was sent; returns its address."""
    _kept[name] = tensor
    return tensor.data_ptr()


def kept_is_intact(name: str, seed: int) -> bool:
    return intact(_kept[name], seed)


def stamp_kept(name: str, seed: int) -> None:
    queue_stamp(_kept[name], seed)


def drop(*names: str) -> None:
    for name in names:
        del _kept[name]
    gc.collect()


def make(name: str, size: int, seed: int, expandable: bool = False) -> torch.Tensor:
    """Makes a tensor of ``size`` bytes, keeps it and sends it."""
    if expandable:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        _kept[name] = queue_stamp(torch.empty(size, dtype=torch.uint8, device="cuda"), seed)
    finally:
        if expandable:
            torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    return _kept[name]


def allocated() -> int:
    """Bytes of this process's own tensors."""
    return torch.cuda.memory_allocated()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def collect() -> None:
    """Lets go of what others have dropped, and of cached memory."""
    gc.collect()
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()


def send_kept(name: str) -> torch.Tensor:
    return _kept[name]


def share(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What goes to another process, without the event: a process cannot open its own.

    Whoever gets it opens it once, or releases the counter that it names.
    """
    return (*tensor.untyped_storage()._share_cuda_()[:7], False)


def share_kept(name: str) -> tuple[Any, ...]:
    return share(_kept[name])


def open_storage(shared: tuple[Any, ...], seed: int) -> bool:
    """Opens what ``UntypedStorage._share_cuda_()`` gave, and looks at all of it."""
    storage = torch.UntypedStorage._new_shared_cuda(*shared)
    return intact(torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage), seed)


def may_take_descriptors(pid: int) -> bool:
    """Does the kernel let this process take descriptors out of that one? torch's own allocator has no other way."""
    libc = ctypes.CDLL(None, use_errno=True)
    process = libc.syscall(434, pid, 0)  # pidfd_open
    if process < 0:
        return False
    taken = libc.syscall(438, process, 0, 0)  # pidfd_getfd, of its stdin
    os.close(process)
    if taken >= 0:
        os.close(taken)
    return taken >= 0
