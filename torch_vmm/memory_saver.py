"""The names of torch_memory_saver (0.0.10), over models that sleep.

    from torch_vmm.memory_saver import torch_memory_saver

instead of ``from torch_memory_saver import torch_memory_saver``. What is made in
a ``region`` lies under a tag of a model of the saver's own; ``pause`` puts it to
sleep, ``resume`` wakes it. Importing this makes torch_vmm the allocator of CUDA,
where there is a GPU and CUDA is not initialised yet.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from torch_vmm import _C
from torch_vmm._guarded import Guarded
from torch_vmm.contexts import Carried, ContextDecorator
from torch_vmm.devices import DeviceKey, to_device
from torch_vmm.errors import InvalidArgumentError, NotAvailableError
from torch_vmm.pools import VirtualMemoryPool
from torch_vmm.routing import enable, is_enabled
from torch_vmm.shared_pools import SharedMemoryPool, wrap
from torch_vmm.sizes import Size, show, to_bytes, to_flag, to_name, to_path
from torch_vmm.tags import Tag

CpuBackupBackend = Literal["mmap", "pinned"]

_NAME = "torch_memory_saver"


class _Region(NamedTuple):
    """What a tag of the model stands for."""

    tag: str
    backup: Literal["", "cpu", "disk"]

    @property
    def name(self) -> str:
        """Of the model's tag: no two regions have one."""
        is_plain = not self.backup and not self.tag.endswith(" backup)")
        return self.tag if is_plain else f"{self.tag} ({self.backup or 'no'} backup)"


class _Saved:
    """The saver's model on one device, and the regions that there were."""

    def __init__(self, key: DeviceKey) -> None:
        self.device = _C.device(key.kind, key.ordinal)
        self.shared = SharedMemoryPool(self.device.total_bytes, key.torch_device)
        self.model = self.shared.register_model(_NAME)
        self.regions: set[_Region] = set()
        self.resuming = 0  # threads that bring some of it back

    def leave(self, margin: int) -> bool:
        """From now on it grows by what the device has free beyond the margin, and by no more; whether that lets it grow
        further than before.
        """
        before = self.shared.physical_limit
        limit = self.device.total_bytes
        if margin != 0 and not self.resuming:
            stats = self.shared.global_stats()
            held = stats.physical_usage
            stays = held - stats.idle_bytes - stats.store_bytes  # is in use: below it nothing would be handed out
            limit = max(held + self.device.memory_info()[0] - margin, stays, 1)
        if limit != before:
            self.shared._handle.set_physical_limit(limit)  # the property tells the log, and nobody has set it
        return limit > before


class _Open(Tag, guarded=True):
    """A region: a tag that leaves the margin."""

    _saver: TorchMemorySaver
    _key: DeviceKey

    def __init__(self, saver: TorchMemorySaver, key: DeviceKey, pool: VirtualMemoryPool, name: str) -> None:
        super().__init__(pool, name)
        self._saver = saver
        self._key = key

    def _opens(self) -> tuple[list[_C.Pool], VirtualMemoryPool]:
        self._saver._leave_margin(self._key)
        return super()._opens()


class _Disabled(ContextDecorator, Guarded, guarded=True):
    """What :meth:`TorchMemorySaver.disable` returns."""

    _instead_of_a_copy = "it is open on threads of this process; make another one, disable() costs nothing"
    _saver: TorchMemorySaver
    _key: DeviceKey

    def __init__(self, saver: TorchMemorySaver, key: DeviceKey) -> None:
        self._saver = saver
        self._key = key
        self._stays = _C.Stays()

    if TYPE_CHECKING:

        def __enter__(self) -> VirtualMemoryPool: ...

    def _opens(self) -> tuple[list[_C.Pool], VirtualMemoryPool]:
        space = self._saver._outside(self._key)
        return [space], wrap(space.model)

    def __repr__(self) -> str:
        return f"{self._saver!r}.disable()"


class TorchMemorySaver(Guarded, guarded=True):
    """What ``torch_memory_saver`` is an object of: that project's public names and
    meanings. There is one for the process: ``TorchMemorySaver()`` is it.
    """

    _instead_of_a_copy = "there is one for the process"
    _lock: threading.RLock
    _saved: dict[DeviceKey, _Saved]
    _disk_dir: str
    _retains: bool
    _margin: int
    _hook_mode: str | None

    # Another one would pause nothing of the first one's regions, and its model would have the same name. The module
    # makes the first when it is imported, so no two threads do.
    def __new__(cls) -> TorchMemorySaver:
        global _only
        if _only is None:
            _only = super().__new__(cls)
            _only._begin()
        return _only

    def _begin(self) -> None:
        self._lock = threading.RLock()
        self._saved = {}
        self._disk_dir = os.environ.get("TMS_DISK_BACKUP_DIR", "")
        self._retains = False
        self._margin = 0
        self._hook_mode = None

    def __repr__(self) -> str:
        with self._lock:
            models = [f"{key}: {saved.model!r}" for key, saved in self._saved.items()]
        return f"TorchMemorySaver({', '.join(models) or 'no region yet'})"

    # -- Regions -------------------------------------------------------------------------------------------------------

    def region(
        self,
        tag: str = "default",
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: CpuBackupBackend | None = None,
    ) -> Tag:
        """Tensors made inside can be paused by this tag. Can be entered again.

        Args:
            tag: any text that is not empty.
            enable_cpu_backup: keeps contents in pinned host memory while paused;
                without it, and without the next, they are gone, and zero after.
            enable_disk_backup: keeps them in a file of
                :meth:`set_disk_backup_dir`; not both.
            cpu_backup_backend: accepted; the memory is pinned.
        Raises:
            InvalidArgumentError: both backups, or a backend without the first.
            NotAvailableError: CUDA was initialised before torch_vmm was its
                allocator.
        """
        return self._open(self._region(tag, enable_cpu_backup, enable_disk_backup, cpu_backup_backend))

    @contextlib.contextmanager
    def cuda_graph(
        self,
        cuda_graph: torch.cuda.CUDAGraph,
        pool: Any = None,
        stream: torch.cuda.Stream | None = None,
        capture_error_mode: str = "global",
        tag: str = "default",
        enable_cpu_backup: bool = False,
        cpu_backup_backend: CpuBackupBackend | None = None,
    ) -> Iterator[None]:
        """``torch.cuda.graph`` whose memory can be paused; not replayed meanwhile."""
        region = self._region(tag, enable_cpu_backup, False, cpu_backup_backend)
        capture = torch.cuda.graph(cuda_graph, pool=pool, stream=stream, capture_error_mode=capture_error_mode)
        opened = self._open(region)
        if self._margin != 0:  # in a capture nobody gives anything up, so what is idle is to be free before it
            self._saved[opened._key].device.empty_cache()
        with opened, capture:
            yield

    def disable(self) -> _Disabled:
        """Inside a region: tensors made here are of none, and stay.

        They are of the model that is open around the regions, as if there were
        none, with its tag; else the one of :func:`torch_vmm.set_default_model`,
        else the device's default pool's.
        """
        return _Disabled(self, self._key())

    def pause(self, tag: str | None = None) -> None:
        """Gives the memory of a tag's tensors back to the driver, or of all; twice is
        once.

        Waits for queued work. Raises as :meth:`VirtualMemoryPool.sleep`.
        """
        for saved, regions in self._tagged(tag):
            keep = {region.name: self._place(region) for region in regions}
            if keep:
                saved.model.sleep(keep, release=True)

    def resume(self, tag: str | None = None) -> None:
        """Brings it back, to the same addresses; it may take of the margin.

        Raises:
            OutOfMemoryError: no room; it is paused as before.
        """
        for saved, regions in self._tagged(tag):
            if regions:
                with self._without_margin(saved):
                    saved.model.wake([region.name for region in regions])
            if not self._retains:
                saved.shared.release_host_backups()

    # -- What is kept --------------------------------------------------------------------------------------------------

    def get_cpu_backup(self, tensor: torch.Tensor, zero_copy: bool = False) -> torch.Tensor | None:
        """What a paused tensor holds, in plain memory; ``None`` where nothing of it
        is kept.

        Args:
            tensor: contiguous, of a region.
            zero_copy: accepted: it is a copy, as a backup may lie in pieces.
        """
        to_flag(zero_copy, "zero_copy")
        if not isinstance(tensor, torch.Tensor) or not tensor.is_contiguous():
            raise InvalidArgumentError(f"tensor={show(tensor)}: give a contiguous tensor")
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        size = tensor.numel() * tensor.element_size()
        if size != 0 and not _C.read_backup(tensor.data_ptr(), size, copy.data_ptr()):
            return None
        # What is kept is what stood in memory, which torch changes as it reads such a tensor.
        if tensor.is_conj():
            copy.conj_physical_()
        return copy.neg_() if tensor.is_neg() else copy

    def set_disk_backup_dir(self, path: str | os.PathLike[str]) -> None:
        """The folder for ``enable_disk_backup``, made where there is none.

        Raises:
            InvalidArgumentError: no path.
            OSError: it cannot be made.
        """
        folder = to_path(path, "path")
        os.makedirs(folder, exist_ok=True)
        self._disk_dir = os.path.abspath(folder)

    @property
    def retain_cpu_backup(self) -> bool:
        """Pinned host memory stays after :meth:`resume`, for the next pause."""
        return self._retains

    @retain_cpu_backup.setter
    def retain_cpu_backup(self, value: bool) -> None:
        self._retains = to_flag(value, "retain_cpu_backup")

    @property
    def memory_margin_bytes(self) -> int:
        """Bytes of the device that what is made in regions leaves free, as
        ``torch.cuda.mem_get_info`` tells it; set as any size (``"1GiB"``). 0, as
        at first: they may take all.

        What is free is looked at when this is set, at each entry of a region,
        and where a region finds no memory: then what pools have idle goes to
        the driver, and what is free beyond the margin the region can have. What
        others take between two looks (other pools, tensors outside of regions,
        other processes) is not seen before the second, and regions may take as
        much of the margin. Where they find it short, what they have idle goes
        to the driver, what is in use stays, and they grow no more.
        :meth:`resume` may take of the margin, and so may regions meanwhile.
        """
        return self._margin

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, value: Size) -> None:
        with self._lock:
            self._margin = to_bytes(value, "memory_margin_bytes")
            for saved in self._saved.values():
                saved.leave(self._margin)

    @property
    def hook_mode(self) -> str | None:
        """Accepted, of no effect."""
        return self._hook_mode

    @hook_mode.setter
    def hook_mode(self, value: str) -> None:
        self._hook_mode = value

    @property
    def enabled(self) -> bool:
        """Always."""
        return True

    # ------------------------------------------------------------------------------------------------------------------

    def _region(self, tag: str, cpu: bool, disk: bool, backend: str | None) -> _Region:
        cpu, disk = to_flag(cpu, "enable_cpu_backup"), to_flag(disk, "enable_disk_backup")
        if cpu and disk:
            raise InvalidArgumentError("enable_cpu_backup and enable_disk_backup: give one of them")
        if backend is not None and (not cpu or backend not in ("mmap", "pinned")):
            raise InvalidArgumentError(
                f"cpu_backup_backend={show(backend)}: give 'pinned' or 'mmap', with enable_cpu_backup=True"
            )
        return _Region(to_name(tag, "tag"), "cpu" if cpu else "disk" if disk else "")

    def _key(self) -> DeviceKey:
        try:
            key = to_device("cuda")
            _C.device(key.kind, key.ordinal)
        except NotAvailableError:
            key = to_device("cpu")
        return key

    def _open(self, region: _Region) -> _Open:
        key = self._key()
        with self._lock:
            if not is_enabled(key.torch_device):
                enable(key.torch_device)
            saved = self._saved.get(key)
            if saved is None:
                saved = self._saved[key] = _Saved(key)
                saved.shared.on_pressure(lambda requested, pool: self._find_more(key))
            saved.regions.add(region)
        return _Open(self, key, saved.model, region.name)

    def _leave_margin(self, key: DeviceKey) -> None:
        if self._margin != 0:
            with self._lock:
                self._saved[key].leave(self._margin)

    def _outside(self, key: DeviceKey) -> _C.Pool:
        """What is open here but for regions."""
        saved = self._saved.get(key)
        for space in _C.open_on(*key):
            if saved is None or space.model.key != saved.model._handle.key:
                return space
        with Carried([]):  # outside every model
            return _C.current_pool(*key)

    def _find_more(self, key: DeviceKey) -> bool:
        """Whether a region that finds no memory can have more by now, and what is idle elsewhere."""
        with self._lock:
            saved, margin = self._saved[key], self._margin
            if margin == 0:
                return False
            if saved.leave(margin):
                return True
        saved.device.empty_cache()
        with self._lock:
            return saved.leave(self._margin)

    @contextlib.contextmanager
    def _without_margin(self, saved: _Saved) -> Iterator[None]:
        """What is resumed was there before: the margin may be in use by those that it is left to."""
        with self._lock:
            saved.resuming += 1
        try:
            with self._lock:
                saved.leave(self._margin)
            yield
        finally:
            with self._lock:
                saved.resuming -= 1
                saved.leave(self._margin)

    def _tagged(self, tag: str | None) -> list[tuple[_Saved, list[_Region]]]:
        """Of each device, what is under the tag, or all."""
        if tag is not None:
            to_name(tag, "tag")
        with self._lock:
            devices = [(saved, list(saved.regions)) for saved in self._saved.values()]
        found = []
        for saved, regions in devices:
            opened = saved.model.tags  # a region that was made and never entered is no tag of the model yet
            chosen = [each for each in regions if tag in (None, each.tag) and each.name in opened]
            found.append((saved, sorted(chosen)))
        return found

    def _place(self, region: _Region) -> str:
        if region.backup == "cpu":
            return "host"
        if region.backup == "":
            return "discard"
        if not self._disk_dir:
            self._disk_dir = tempfile.gettempdir()
        os.makedirs(self._disk_dir, exist_ok=True)
        return os.path.join(self._disk_dir, "")


def _enable_cuda() -> None:
    """As early as can be: later than CUDA's initialisation is too late."""
    with contextlib.suppress(NotAvailableError):
        if not torch.cuda.is_initialized():
            enable("cuda")


@contextlib.contextmanager
def configure_subprocess() -> Iterator[None]:
    """For processes that are started inside, as torch_memory_saver has it.

    There it preloads a library into them. Here nothing has to be set: a process
    that imports this module has torch_vmm as its allocator. Start them inside
    or outside.
    """
    yield


_enable_cuda()
_only: TorchMemorySaver | None = None
torch_memory_saver = TorchMemorySaver()

__all__ = ["TorchMemorySaver", "configure_subprocess", "torch_memory_saver"]


def __dir__() -> list[str]:
    """What a prompt completes: the public names, and not what they are made of."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
