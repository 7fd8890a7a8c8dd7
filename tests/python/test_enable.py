"""Becoming torch's allocator, in processes that have not: and where there is no GPU, saying so."""

from __future__ import annotations

import os

import pytest
import torch

import torch_vmm
from tests.helpers import python, run

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU")


def test_enabling_the_host_twice() -> None:
    run(
        """
        import torch, torch_vmm
        old = torch.ones(1000)
        assert not torch_vmm.is_enabled("cpu")
        assert torch_vmm.pool_of(old) is None
        torch_vmm.enable(device="cpu")
        torch_vmm.enable(device=torch.device("cpu"))
        assert torch_vmm.is_enabled("cpu") and not torch_vmm.is_enabled("cuda")
        new = torch.ones(1000)
        assert torch_vmm.pool_of(new) is torch_vmm.current_pool("cpu")
        assert torch.equal(old, new)
        del old
        """
    )


def test_pools_work_without_enabling() -> None:
    run(
        """
        import torch, torch_vmm
        pool = torch_vmm.VirtualMemoryPool("64MiB", device="cpu")
        pool.allocate(0, "2MiB")
        pool.tensor(0, 16).fill_(3)
        with pool:
            tensor = torch.ones(1000)
        assert torch_vmm.pool_of(tensor) is None
        assert pool.memory_allocated() == 2 << 20
        """
    )


def test_tensors_from_before_are_freed_by_who_made_them() -> None:
    run(
        """
        import torch, torch_vmm, gc
        old = [torch.randn(size) for size in (1, 1000, 1000000)]
        torch_vmm.enable("cpu")
        pool = torch_vmm.VirtualMemoryPool("1GiB", device="cpu")
        with pool:
            both = [tensor * 2 for tensor in old]
            old.clear(); gc.collect()
            both.append(torch.cat([tensor.view(-1) for tensor in both]))
        assert all(torch_vmm.pool_of(tensor) is pool for tensor in both)
        """
    )


def test_numpy_and_storages_from_elsewhere() -> None:
    run(
        """
        import numpy as np, torch, torch_vmm
        torch_vmm.enable("cpu")
        array = np.arange(10.0)
        shared = torch.from_numpy(array)
        shared[0] = 7
        assert array[0] == 7 and torch_vmm.pool_of(shared) is None
        ours = torch.arange(10.0)
        assert ours.numpy().sum() == 45.0
        view = ours.numpy(); del ours
        assert view.sum() == 45.0
        grown = torch.empty(4); grown.resize_(100000); grown.fill_(1)
        assert grown.sum().item() == 100000 and torch_vmm.pool_of(grown) is not None
        """
    )


def test_saving_and_loading() -> None:
    run(
        """
        import io, torch, torch_vmm
        torch_vmm.enable("cpu")
        pool = torch_vmm.VirtualMemoryPool("1GiB", device="cpu")
        with pool:
            net = torch.nn.Linear(100, 100)
            file = io.BytesIO(); torch.save(net.state_dict(), file); file.seek(0)
            state = torch.load(file)
        assert all(torch_vmm.pool_of(tensor) is pool for tensor in state.values())
        assert all(torch.equal(state[name], value) for name, value in net.state_dict().items())
        """
    )


def test_the_library_has_plain_entry_points() -> None:
    import ctypes

    assert os.path.isfile(torch_vmm.library_path())
    library = ctypes.CDLL(torch_vmm.library_path())
    assert library.torch_vmm_malloc
    assert library.torch_vmm_free


def test_the_allocator_is_what_torch_takes() -> None:
    allocator = torch_vmm.allocator()
    assert isinstance(allocator, torch._C._cuda_CUDAAllocator)
    assert allocator is torch_vmm.allocator()
    assert isinstance(allocator.allocator(), torch._C._cuda_CUDAAllocator)


@no_gpu
@pytest.mark.parametrize(
    "act",
    [
        lambda: torch_vmm.enable(),
        lambda: torch_vmm.enable("cuda:0"),
        lambda: torch_vmm.current_pool(),
        lambda: torch_vmm.VirtualMemoryPool("2MiB"),
        lambda: torch_vmm.SharedMemoryPool("2MiB"),
        lambda: torch_vmm.VirtualMemoryManager(),
    ],
)
def test_without_a_gpu_everything_says_why(act) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(torch_vmm.NotAvailableError) as raised:
        act()
    assert "driver" in raised.value.reason or "GPU" in raised.value.reason
    assert raised.value.reason in str(raised.value)


@no_gpu
def test_without_a_gpu_torch_goes_on_as_before() -> None:
    run(
        """
        import torch, torch_vmm
        try:
            torch_vmm.enable()
        except torch_vmm.NotAvailableError:
            pass
        assert not torch_vmm.is_enabled("cuda")
        assert torch.ones(3).sum().item() == 3
        assert torch_vmm.pool_of(torch.ones(3)) is None
        """
    )


@no_gpu
def test_torchs_own_way_to_change_the_allocator() -> None:
    run(
        """
        import torch, torch_vmm
        torch.cuda.memory.change_current_allocator(torch_vmm.allocator())
        assert torch_vmm.is_enabled("cuda")
        assert torch.cuda.memory.get_allocator_backend() == "torch_vmm"
        """
    )


def test_an_extension_that_is_missing_says_how_to_build_it(tmp_path: os.PathLike[str]) -> None:
    import shutil

    from tests.helpers import ROOT

    shutil.copytree(ROOT / "torch_vmm", f"{tmp_path}/torch_vmm", ignore=shutil.ignore_patterns("_C.*", "__pycache__"))
    done = python(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import torch_vmm", fresh=True)
    assert done.returncode == 1
    assert "has not been built" in done.stderr
    assert "python setup.py build_ext --inplace" in done.stderr
