"""A PyTorch CUDA allocator: an elastic pool of virtual memory for each model.

All of them are under one physical limit.

    import torch, torch_vmm

    torch_vmm.enable()  # torch's CUDA allocator; before CUDA is initialised
    gpu = torch_vmm.SharedMemoryPool(physical_limit="40GiB")
    llama = gpu.register_model("llama-7b")
    with llama:  # weights, activations, gradients: llama's pool
        ...

Everything but the GPU itself also works with ``device="cpu"``.
"""

from torch_vmm import _build_check

_build_check.check()

# torch first: it loads the libraries and registers the types that the extension builds on.
import torch as _torch  # noqa: F401

from torch_vmm import debug
from torch_vmm._C import AccessFlags, MappingRecord, PhysicalAllocation, VirtualAddressRange
from torch_vmm.aliases import alias, aligned, concat_views, sealed
from torch_vmm.buffers import MemoryPool, NativeMemoryPool, PooledBuffer
from torch_vmm.elastic_tensor import ElasticTensor, elastic
from torch_vmm.errors import (
    AlreadyMappedError,
    AsleepError,
    DriverError,
    InvalidArgumentError,
    InvalidPageSizeError,
    InvalidRangeError,
    MemoryDamageError,
    ModelExistsError,
    ModelNotFoundError,
    NotAvailableError,
    NotCopyableError,
    NotEnabledError,
    NotMappedError,
    OutOfMemoryError,
    StillInUseError,
    VmmError,
)
from torch_vmm.kv_cache import ElasticKVCache
from torch_vmm.low_level import VirtualMemoryManager
from torch_vmm.overview import report
from torch_vmm.placed import seen_from
from torch_vmm.pools import VirtualMemoryPool
from torch_vmm.reclaiming import ReclaimReport
from torch_vmm.refusals import Holder, Refusal, last_out_of_memory
from torch_vmm.routing import (
    allocator,
    carry,
    current_pool,
    enable,
    is_enabled,
    library_path,
    pool_of,
    reset_default_model,
    set_default_model,
    use_model,
)
from torch_vmm.shared_pools import SharedMemoryPool
from torch_vmm.sleeping import Transfer, swap
from torch_vmm.sparse_tensor import SparseTensor, sparse
from torch_vmm.stats import GlobalMemoryStats, MemoryStats, NativePoolStats, PoolStats
from torch_vmm.strictness import strict
from torch_vmm.timelines import Timeline, TimelineSample
from torch_vmm.version import __version__

__all__ = [
    "AccessFlags",
    "AlreadyMappedError",
    "AsleepError",
    "DriverError",
    "ElasticKVCache",
    "ElasticTensor",
    "GlobalMemoryStats",
    "Holder",
    "InvalidArgumentError",
    "InvalidPageSizeError",
    "InvalidRangeError",
    "MappingRecord",
    "MemoryDamageError",
    "MemoryPool",
    "MemoryStats",
    "ModelExistsError",
    "ModelNotFoundError",
    "NativeMemoryPool",
    "NativePoolStats",
    "NotAvailableError",
    "NotCopyableError",
    "NotEnabledError",
    "NotMappedError",
    "OutOfMemoryError",
    "PhysicalAllocation",
    "PoolStats",
    "PooledBuffer",
    "ReclaimReport",
    "Refusal",
    "SharedMemoryPool",
    "SparseTensor",
    "StillInUseError",
    "Timeline",
    "TimelineSample",
    "Transfer",
    "VirtualAddressRange",
    "VirtualMemoryManager",
    "VirtualMemoryPool",
    "VmmError",
    "__version__",
    "alias",
    "aligned",
    "allocator",
    "carry",
    "concat_views",
    "current_pool",
    "debug",
    "elastic",
    "enable",
    "is_enabled",
    "last_out_of_memory",
    "library_path",
    "pool_of",
    "report",
    "reset_default_model",
    "sealed",
    "seen_from",
    "set_default_model",
    "sparse",
    "strict",
    "swap",
    "use_model",
]


def __dir__() -> list[str]:
    """What a prompt completes: the public names, not the modules that they stand in."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
