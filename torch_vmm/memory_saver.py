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
from typing import Any, Literal, NamedTuple

import torch

from torch_vmm import _C
from torch_vmm._guarded import Guarded
from torch_vmm.devices import DeviceKey, to_device
from torch_vmm.errors import InvalidArgumentError, NotAvailableError
from torch_vmm.pools import wrap
from torch_vmm.routing import enable, is_enabled, use_model
from torch_vmm.shared_pools import SharedMemoryPool
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
        device = _C.device(key.kind, key.ordinal)
        self.shared = SharedMemoryPool(device.total_bytes, key.torch_device)
        self.model = self.shared.register_model(_NAME)
        self.regions: set[_Region] = set()


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
        region = self._region(tag, enable_cpu_backup, enable_disk_backup, cpu_backup_backend)
        return self._here(region).model.tag(region.name)

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
        with self._here(region).model.tag(region.name), capture:
            yield

    def disable(self) -> use_model:
        """Inside a region: tensors made here are of none, and stay."""
        key = self._key()
        return use_model(wrap(_C.default_pool(key.kind, key.ordinal)))

    def pause(self, tag: str | None = None) -> None:
        """Gives the memory of a tag's tensors away, or of all; twice is once.

        Waits for queued work. Raises as :meth:`VirtualMemoryPool.sleep`.
        """
        for saved, regions in self._tagged(tag):
            keep = {region.name: self._place(region) for region in regions}
            if keep:
                saved.model.sleep(keep)

    def resume(self, tag: str | None = None) -> None:
        """Brings it back, to the same addresses.

        Raises:
            OutOfMemoryError: no room; it is paused as before.
        """
        for saved, regions in self._tagged(tag):
            if regions:
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
        """Bytes of the device that regions leave to others; set as any size (``"1GiB"``)."""
        return self._margin

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, value: Size) -> None:
        with self._lock:
            self._margin = to_bytes(value, "memory_margin_bytes")
            for key, saved in self._saved.items():
                self._leave_margin(key, saved)

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

    def _here(self, region: _Region) -> _Saved:
        key = self._key()
        with self._lock:
            if not is_enabled(key.torch_device):
                enable(key.torch_device)
            saved = self._saved.get(key)
            if saved is None:
                saved = self._saved[key] = _Saved(key)
                self._leave_margin(key, saved)
            saved.regions.add(region)
            return saved

    def _leave_margin(self, key: DeviceKey, saved: _Saved) -> None:
        total = _C.device(key.kind, key.ordinal).total_bytes
        saved.shared.physical_limit = max(total - self._margin, 1)

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
