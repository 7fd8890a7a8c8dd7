"""How each allocator is chosen: its environment, its installation, and where its work runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

GPU_ALLOCATORS = ("torch_vmm", "native", "expandable", "cudaMallocAsync")
HOST_ALLOCATORS = ("torch_vmm", "native")
TUNED = "native-tuned"  # by the usual advice
UNSCRUBBED = "torch_vmm-unscrubbed"  # memory that changes its model is not zeroed
FLOOR = "floor"  # only bumps a pointer; measured where nothing is computed
# Of benchmarks that ask for memory by themselves: torch's allocator is its own in their processes.
NATIVE_POOL = "NativeMemoryPool"
DRIVER = "driver"  # its calls and nothing else
RMM_POOL, RMM_ASYNC = "rmm-pool", "rmm-async"
RESERVED = "torch_vmm-reserved"  # a MemoryPool that has taken its memory beforehand, as RMM's pool has

_SETTINGS = ("TORCH_VMM_", "PYTORCH_", "CUDA_")
_CONFIGURATIONS = {
    "expandable": "expandable_segments:True",
    "cudaMallocAsync": "backend:cudaMallocAsync",
    TUNED: "max_split_size_mb:128,roundup_power2_divisions:8",
}


def environment(allocator: str) -> dict[str, str]:
    """The environment of a process that is to use ``allocator``: torch reads its part when it is loaded."""
    ours = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    variables = {name: value for name, value in os.environ.items() if name not in ours}
    if allocator in _CONFIGURATIONS:
        variables["PYTORCH_CUDA_ALLOC_CONF"] = _CONFIGURATIONS[allocator]
    if allocator == UNSCRUBBED:
        variables["TORCH_VMM_SCRUB"] = "0"
    return variables


def settings() -> dict[str, str]:
    """Variables of ours and of torch's that every process has, whatever its allocator."""
    return {name: value for name, value in sorted(environment("native").items()) if name.startswith(_SETTINGS)}


def install(allocator: str, kind: str) -> None:
    """Makes ``allocator`` torch's, for ``"cuda"`` before CUDA is initialised."""
    if allocator == "torch_vmm":
        import torch_vmm

        torch_vmm.enable(device=kind)
    elif allocator == FLOOR:
        from . import loops

        loops.load().install_floor()


@contextmanager
def work(allocator: str, kind: str) -> Iterator[None]:
    """Where the work runs: for torch_vmm inside a model, as its users have it."""
    if allocator != "torch_vmm":
        yield
        return
    import torch_vmm

    # No limit but the device's own: this is about speed, not about sharing.
    with torch_vmm.SharedMemoryPool(physical_limit="1TiB", device=kind).register_model("benchmark"):
        yield
