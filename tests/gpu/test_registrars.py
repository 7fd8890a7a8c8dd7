"""Libraries that register torch's segments, one registration each: first they look what there is, then they follow.

Each in a process of its own, as it follows for good.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.loops import compiler
from tests.gpu.programs import expect_done, running
from tests.helpers import ROOT

_BEGIN = """
    import ctypes, torch, torch_vmm
    torch_vmm.enable("cuda")
    MIB = 2**20
    library = ctypes.CDLL({library!r})

    def registered():
        address, size = ctypes.c_size_t(), ctypes.c_size_t()
        found = []
        for which in range(library.registrations()):
            library.registration(which, ctypes.byref(address), ctypes.byref(size))
            found.append((address.value, address.value + size.value))
        return found

    def holders(tensor):
        first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return [each for each in registered() if each[0] < last and first < each[1]]

    def is_whole(tensor):
        over = holders(tensor)
        return len(over) == 1 and over[0][0] <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= over[0][1]

    def require_no_overlap():
        places = registered()
        assert all(a[1] <= b[0] for a, b in zip(places, places[1:])), places

    def mapped():
        return [(each["address"], each["address"] + each["total_size"]) for each in torch.cuda.memory_snapshot()]

    def require_mapped():
        for begin, end in registered():
            assert any(a <= begin and end <= b for a, b in mapped()), (begin, end, mapped())

    def many(bytes_each):
        return [torch.ones(k * bytes_each, dtype=torch.uint8, device="cuda") for k in range(1, 6)]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("registrar")


def built(folder: Path, name: str) -> str:
    """The library, by that name: whose a caller is, its library's says."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import cuda_include

    place = Path(torch.__file__).parent
    library = folder / name
    command = [
        compiler(), "-std=c++20", "-O1", "-shared", "-fPIC", str(ROOT / "tests" / "gpu" / "registrar.cpp"),
        f"-I{place / 'include'}", *cuda_include.include_flags(), f"-L{place / 'lib'}", "-lc10_cuda", "-lc10",
        f"-Wl,-rpath,{place / 'lib'}", "-o", str(library),
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return str(library)


def run(program: str, library: str) -> None:
    with running({"registrar": _BEGIN.format(library=library) + program}) as processes:
        expect_done(processes["registrar"])


def test_a_library_finds_chunks_and_hears_of_each_that_goes(folder: Path) -> None:
    program = """
    before = many(12 * MIB)  # over several chunks, some of them
    library.look_and_follow()
    assert all(is_whole(tensor) or not holders(tensor) for tensor in before), "registered in part"
    first = registered()
    del before
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    assert not set(first) & set(registered()), "what went is registered still"
    after = many(10 * MIB)
    assert all(is_whole(tensor) for tensor in after)
    require_no_overlap()
    require_mapped()
    assert library.mistakes() == 0
    assert library.told_of_blocks() >= len(after)
    print("done")
    """
    run(program, built(folder, "libregistrar.so"))


def test_torchs_own_registers_mem_pools_alone(folder: Path) -> None:
    """As where torch's own segments are of many handles: what torch 2.15's process group would else do with all."""
    program = """
    before = many(12 * MIB)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = many(12 * MIB)
    library.look_and_follow()
    assert all(is_whole(tensor) for tensor in inside)
    assert not any(holders(tensor) for tensor in before)
    del before
    torch.cuda.empty_cache()
    after = many(10 * MIB)
    assert not any(holders(tensor) for tensor in after)
    with torch.cuda.use_mem_pool(pool):
        inside += many(7 * MIB)
    assert all(is_whole(tensor) for tensor in inside)
    del inside[2:7]
    torch.cuda.empty_cache()
    assert all(is_whole(tensor) for tensor in inside)
    require_no_overlap()
    require_mapped()
    assert library.mistakes() == 0
    assert library.told_of_blocks() == 0, "threads go on keeping blocks"
    print("done")
    """
    run(program, built(folder, "libtorch_cuda_registrar.so"))


def test_torchs_own_registers_all_where_the_environment_asks(folder: Path) -> None:
    program = """
    before = many(12 * MIB)
    library.look_and_follow()
    assert all(is_whole(tensor) for tensor in before), "from the first block on"
    del before[1:4]
    torch.cuda.empty_cache()
    after = many(10 * MIB)
    assert all(is_whole(tensor) for tensor in before + after)
    require_no_overlap()
    require_mapped()
    assert library.mistakes() == 0
    print("done")
    """
    set_first = """
    import os
    os.environ["TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"] = "1"
    """
    library = built(folder, "libtorch_cuda_registrar_of_all.so")
    with running({"registrar": set_first + _BEGIN.format(library=library) + program}) as processes:
        expect_done(processes["registrar"])
