"""The public names are these, and no others; they are typed and documented."""

from __future__ import annotations

import inspect
import types

import pytest

import torch_vmm

ERRORS = {
    "AlreadyMappedError",
    "AsleepError",
    "DriverError",
    "InvalidArgumentError",
    "InvalidPageSizeError",
    "InvalidRangeError",
    "MemoryDamageError",
    "ModelExistsError",
    "ModelNotFoundError",
    "NotAvailableError",
    "NotCopyableError",
    "NotEnabledError",
    "NotMappedError",
    "OutOfMemoryError",
    "StillInUseError",
    "Transfer",
    "VmmError",
}
CLASSES = {
    "AccessFlags",
    "ElasticKVCache",
    "ElasticTensor",
    "GlobalMemoryStats",
    "Holder",
    "MappingRecord",
    "MemoryPool",
    "MemoryStats",
    "NativeMemoryPool",
    "NativePoolStats",
    "PhysicalAllocation",
    "PoolStats",
    "PooledBuffer",
    "ReclaimReport",
    "Refusal",
    "SharedMemoryPool",
    "SparseTensor",
    "Timeline",
    "TimelineSample",
    "VirtualAddressRange",
    "VirtualMemoryManager",
    "VirtualMemoryPool",
    "strict",
    "swap",
    "use_model",
}
FUNCTIONS = {
    "alias",
    "aligned",
    "allocator",
    "carry",
    "concat_views",
    "current_pool",
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
}

SIGNATURES = {
    "debug.mode": "()",
    "debug.explain": "(tensor_or_address)",
    "debug.report": "(device='cuda')",
    "debug.check": "(device='cuda')",
    "debug.refuse_asleep": "()",
    "enable": "(device='cuda')",
    "is_enabled": "(device='cuda')",
    "carry": "(function)",
    "strict": "(device='cuda', action='raise')",
    "last_out_of_memory": "(device='cuda')",
    "report": "(device='cuda')",
    "use_model": "(model_id_or_pool, device=None)",
    "current_pool": "(device='cuda')",
    "pool_of": "(tensor_or_address)",
    "elastic": "(shape, dtype=torch.float32, device='cuda', max_shape=None)",
    "alias": "(tensor, copies=1, read_only=False)",
    "aligned": "(shape, dtype=torch.float32, device=None, placement=None)",
    "seen_from": "(tensor, device)",
    "concat_views": "(tensors)",
    "sealed": "(tensor)",
    "VirtualMemoryPool.seal": "(self, tensors)",
    "VirtualMemoryPool.unseal": "(self, tensors)",
    "VirtualMemoryPool.tag": "(self, name)",
    "sparse": "(shape, dtype=torch.float32, device='cuda', zeros=True, page_size=None)",
    "SparseTensor.commit": "(self, index)",
    "SparseTensor.decommit": "(self, index)",
    "SparseTensor.is_committed": "(self, index)",
    "SparseTensor.committed_spans": "(self)",
    "ElasticTensor.resize_": "(self, n)",
    "ElasticTensor.reserve": "(self, n)",
    "ElasticTensor.shrink_to_fit": "(self)",
    "VirtualMemoryManager": "(device='cuda')",
    "VirtualMemoryManager.reserve": "(self, size, alignment=None)",
    "VirtualMemoryManager.release": "(self, range)",
    "VirtualMemoryManager.alloc_physical": "(self, size, device=None, exportable=False)",
    "VirtualMemoryManager.free_physical": "(self, phys)",
    "VirtualMemoryManager.map": "(self, range, phys, offset=0)",
    "VirtualMemoryManager.unmap": "(self, range, offset, size)",
    "VirtualMemoryManager.set_access": "(self, range, flags, device=None, offset=0, size=None)",
    "VirtualMemoryManager.mappings": "(self, range)",
    "VirtualMemoryManager.tensor": "(self, range, offset, shape, dtype)",
    "VirtualMemoryPool": "(capacity, page_size=None, device='cuda', physical_limit=None, *, name=None)",
    "VirtualMemoryPool.allocate": "(self, offset, size)",
    "VirtualMemoryPool.deallocate": "(self, offset, size)",
    "VirtualMemoryPool.is_mapped": "(self, offset, size)",
    "VirtualMemoryPool.trim": "(self, keep_bytes=0)",
    "MemoryPool": "(device='cuda')",
    "MemoryPool.alloc": "(self, n, dtype=torch.float32, stream=None)",
    "MemoryPool.stats": "(self)",
    "MemoryPool.trim": "(self, min_bytes)",
    "MemoryPool.set_threshold": "(self, bytes)",
    "MemoryPool.close": "(self, force=False)",
    "PooledBuffer.record_stream": "(self, stream)",
    "PooledBuffer.tensor": "(self)",
    "PooledBuffer.free": "(self, force=False)",
    "PoolStats": "(allocated_bytes, peak_bytes, allocation_count, free_count, cached_bytes)",
    "NativeMemoryPool": "(device='cuda', max_size_bytes=0)",
    "NativeMemoryPool.alloc_async": "(self, bytes, stream=None)",
    "NativeMemoryPool.free_async": "(self, address, stream=None)",
    "NativeMemoryPool.destroy": "(self, force=False)",
    "NativeMemoryPool.stats": "(self)",
    "SharedMemoryPool": "(physical_limit, device='cuda')",
    "SharedMemoryPool.register_model": (
        "(self, model_id, virtual_capacity=None, *, physical_limit=None, floor=0, priority=0, page_size=None, "
        "spill=None)"
    ),
    "SharedMemoryPool.unregister_model": "(self, model_id, force=False)",
    "SharedMemoryPool.allocate_for_model": "(self, model_id, size)",
    "SharedMemoryPool.deallocate_for_model": "(self, model_id, offset, size)",
    "SharedMemoryPool.get_model_stats": "(self, model_id)",
    "SharedMemoryPool.on_pressure": "(self, function)",
    "SharedMemoryPool.record_timeline": "(self, interval=0.01)",
    "Timeline.stop": "(self)",
    "Timeline.save": "(self, path)",
    "TimelineSample": "(seconds, allocated_bytes, physical_bytes, store_bytes, physical_limit)",
}


def find(path: str) -> object:
    found: object = torch_vmm
    for name in path.split("."):
        found = getattr(found, name)
    return found


def test_the_names() -> None:
    assert set(torch_vmm.__all__) == ERRORS | CLASSES | FUNCTIONS | {"__version__", "debug"}
    assert list(torch_vmm.__all__) == sorted(torch_vmm.__all__)


@pytest.mark.parametrize("module", [torch_vmm, torch_vmm.debug])
def test_a_prompt_completes_the_public_names(module: types.ModuleType) -> None:
    assert {name for name in dir(module) if not name.startswith("__")} == set(module.__all__) - {"__version__"}
    assert {"__all__", "__doc__", "__name__"} <= set(dir(module))


@pytest.mark.parametrize("path", SIGNATURES)
def test_the_signatures(path: str) -> None:
    signature = inspect.signature(find(path))  # type: ignore[arg-type]
    bare = signature.replace(
        parameters=[
            parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()
        ],
        return_annotation=inspect.Signature.empty,
    )
    assert str(bare) == SIGNATURES[path]


@pytest.mark.parametrize("name", sorted(ERRORS | CLASSES | FUNCTIONS))
def test_everything_is_documented(name: str) -> None:
    found = getattr(torch_vmm, name)
    if getattr(found, "__module__", "") == "torch_vmm._C":
        return  # its documentation is in _C.pyi
    assert inspect.getdoc(found)
    if inspect.isclass(found):
        for member, value in vars(found).items():
            if not member.startswith("_") and (callable(value) or isinstance(value, property)):
                assert inspect.getdoc(value), f"{name}.{member}"


def documented(owner: object, names: list[str]) -> dict[str, tuple[object, int]]:
    """What ``help()`` shows under these names of ours, and by how far it indents the text."""
    found: dict[str, tuple[object, int]] = {}
    for name in names:
        value = getattr(owner, name)
        found[name] = (value, 4)
        if not inspect.isclass(value):
            continue
        for cls in value.__mro__:
            if not cls.__module__.startswith("torch_vmm."):
                continue
            for member, each in vars(cls).items():
                if not member.startswith("_") and (callable(each) or isinstance(each, property | staticmethod)):
                    found[f"{name}.{member}"] = (each, 8)
    return found


def test_help_fits_a_terminal() -> None:
    everything = documented(torch_vmm, torch_vmm.__all__) | documented(torch_vmm.debug, torch_vmm.debug.__all__)
    everything["torch_vmm"] = (torch_vmm, 4)
    assert {"alias", "debug", "explain", "SparseTensor.commit", "MemoryPool.device"} <= set(everything)
    too_long = [
        f"{name}: {line}"
        for name, (value, indent) in everything.items()
        if not isinstance(value, str)
        for line in (inspect.getdoc(value) or "").splitlines()
        # pybind11 writes a signature above what it documents.
        if indent + len(line) > 80 and "(self: torch_vmm._C." not in line
    ]
    assert too_long == []


def test_the_version_is_one_string() -> None:
    from torch_vmm import _C, version

    assert torch_vmm.__version__ == version.__version__ == _C.__version__
