"""Becoming torch's allocator, in processes that have not: and where there is no GPU, saying so."""

from __future__ import annotations

import os

import pytest
import torch

import torch_vmm
from tests.helpers import python, run

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU")


def test_the_profilers_bytes_on_the_host_add_up() -> None:
    done = python(  # the profiler says on stderr that there is no GPU
        """
        import torch, torch_vmm
        from torch.profiler import ProfilerActivity, profile
        torch_vmm.enable("cpu")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as told:
            x = torch.empty(100, dtype=torch.uint8)
            del x
        bytes = [event.self_cpu_memory_usage for event in told.key_averages() if event.self_cpu_memory_usage]
        assert sorted(bytes) == [-512, 512], bytes
        """
    )
    assert done.returncode == 0, done.stderr


def test_a_host_with_more_memory_than_a_pool_can_hold() -> None:
    run(
        """
        import torch, torch_vmm
        torch_vmm.enable("cpu")
        assert torch_vmm.pool_of(torch.ones(3)).capacity == 64 << 40
        """,
        TORCH_VMM_HOST_BYTES="17TiB",
    )


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
        assert torch_vmm.pool_of(torch.ones(1000)) is None
        assert pool.memory_allocated() == 2 << 20
        """
    )


# -- Entering a model that torch would not use -------------------------------------------------------------------------

NOT_ENABLED = """
import asyncio, torch, torch_vmm
shared = torch_vmm.SharedMemoryPool("64MiB", device="cpu")
llama = shared.register_model("llama", "64MiB")
@torch_vmm.use_model("llama")
def work(): return torch.ones(3)
@torch_vmm.use_model(llama)
async def task(): return torch.ones(3)
def refused(act):
    try:
        act()
    except torch_vmm.NotEnabledError as error:
        assert isinstance(error, torch_vmm.NotAvailableError)
        assert error.reason == str(error)
        return str(error)
    raise AssertionError("entered")
"""


def test_a_model_is_not_entered_where_torch_makes_the_tensors_itself() -> None:
    out = run(
        NOT_ENABLED
        + """
for act in (
    llama.__enter__, torch_vmm.use_model(llama).__enter__, torch_vmm.use_model("llama").__enter__, work,
    lambda: asyncio.run(task()), torch_vmm.current_pool("cpu").__enter__, lambda: torch_vmm.strict("cpu"),
):
    text = refused(act)
    assert 'torch_vmm.enable("cpu")' in text, text
print(refused(llama.__enter__))
torch_vmm.enable("cpu")
assert torch_vmm.pool_of(work()) is torch_vmm.pool_of(asyncio.run(task())) is llama
with llama, torch_vmm.strict("cpu"):
    assert torch_vmm.pool_of(torch.ones(3)) is llama
"""
    )
    assert "'llama' would hold no tensor: torch_vmm is not torch's allocator on cpu. " in out


def test_a_closed_pool_is_closed_first_of_all() -> None:
    run(
        NOT_ENABLED
        + """
llama.close()
try:
    with llama: pass
except torch_vmm.NotAvailableError:
    raise
except torch_vmm.InvalidArgumentError as error:
    assert "closed" in str(error)
"""
    )


def test_a_forked_child_cannot_enter_a_model() -> None:
    run(
        NOT_ENABLED
        + """
import os
torch_vmm.enable("cpu")
child = os.fork()
if child == 0:
    code = 1
    try:
        with llama: pass
    except torch_vmm.NotAvailableError as error:
        code = 0 if "fork" in str(error) else 2
    os._exit(code)
assert os.waitpid(child, 0)[1] == 0
"""
    )


def test_becoming_the_cpus_allocator_is_not_the_gpus() -> None:
    run(
        """
        import torch, torch_vmm
        torch_vmm.enable("cpu")
        try:
            torch_vmm.strict("cuda")
        except torch_vmm.NotEnabledError as error:
            assert "torch_vmm.enable()" in str(error), error
        else:
            raise AssertionError("strict where nothing is seen")
        """
    )


# What torch was given may be allocating, though we are not the allocator in place.
WAYS = {
    "change_current_allocator": "torch.cuda.memory.change_current_allocator(torch_vmm.allocator())",
    "an object that is held": "kept = torch_vmm.allocator()",
    "a pluggable allocator": (
        "kept = torch.cuda.memory.CUDAPluggableAllocator("
        "torch_vmm.library_path(), 'torch_vmm_malloc', 'torch_vmm_free')"
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_other_ways_to_be_enabled_count(way: str) -> None:
    # A driver is not needed to ask: strict() looks at the same thing as entering a model does.
    run(
        f"""
        import torch, torch_vmm
        def allowed():
            try:
                torch_vmm.strict("cuda", "raise")
            except torch_vmm.NotEnabledError:
                return False
            except torch_vmm.NotAvailableError:
                return True  # enabled, and there is no GPU
            torch_vmm.strict("cuda", "off")
            return True
        assert not allowed()
        {WAYS[way]}
        assert allowed()
        """
    )


def test_an_object_that_was_let_go_counts_no_more() -> None:
    run(
        """
        import gc, torch, torch_vmm
        kept = torch_vmm.allocator()
        torch_vmm.strict("cuda", "warn")
        torch_vmm.strict("cuda", "off")
        del kept; gc.collect()
        try:
            torch_vmm.strict("cuda", "warn")
        except torch_vmm.NotEnabledError:
            pass
        else:
            raise AssertionError("nobody holds it")
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
