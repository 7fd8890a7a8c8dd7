"""Real programs: the same results as under torch's own allocator; two at once, each as it is alone; nothing left."""

from __future__ import annotations

import functools
import gc
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_vmm
from tests.gpu.native import begin_on_native
from tests.gpu.workloads import generation, other_libraries, programs, training
from tests.gpu.workloads.programs import NEEDS, PROGRAMS, settle
from tests.helpers import MIB
from torch_vmm import pool_of

MakeShared = Callable[..., torch_vmm.SharedMemoryPool]

pytestmark = [
    pytest.mark.no_memcheck,  # minutes each
    pytest.mark.needs_gpu("real programs, and libraries with kernels of their own"),
]

_TURNS = [
    ("gpt2 in float16", "gpt2 in bfloat16"),
    ("llama, dynamic cache", "qwen3, static cache"),
    ("llama, static cache", "qwen2, dynamic cache"),
    ("resnet", "another resnet"),
    ("cupy", "another cupy"),
    ("numba", "another numba"),
    ("gpt2 in float16", "resnet", "llama, dynamic cache"),
]


def need(*names: str) -> None:
    """Skips where a package is missing that one of the programs uses."""
    for name in names:
        for word, package in NEEDS.items():
            if word in name:
                module = pytest.importorskip(package)
                if word == "numba" and not module.is_available():
                    pytest.skip("Numba finds no GPU, or nothing to compile kernels with")


@functools.cache
def alone(program: str) -> dict[str, list[Any]]:
    """The program outside every model, once for all tests."""
    done: dict[str, list[Any]] = json.loads(json.dumps(programs.alone(program)))
    return done


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_gives_what_it_gives_natively(device: str, program: str) -> None:
    need(program)
    pending = begin_on_native(programs.alone, program=program)
    ours = alone(program)
    native = pending.result()
    if "resnet" in program:
        # cuDNN chooses by time, so two processes round differently, and training widens that.
        for step, (one, other) in enumerate(zip(ours["results"], native["results"], strict=True)):
            assert one == pytest.approx(other, rel=1e-4 if step == 0 else 2e-2)
    else:
        assert ours["results"] == native["results"]
        assert ours["asked"] == native["asked"]
    assert ours["left"] == native["left"] == [0, 0, 0]


@pytest.mark.parametrize("program", ["gpt2 in float16", "gpt2 in bfloat16", "resnet", "another resnet"])
def test_training_learns(device: str, program: str) -> None:
    need(program)
    losses = [step[0] for step in alone(program)["results"] if isinstance(step[0], float)]
    assert losses[-1] < losses[0] * 0.97


@pytest.mark.parametrize("names", _TURNS, ids=" + ".join)
def test_programs_that_take_turns_give_what_they_give_alone(make_shared: MakeShared, names: tuple[str, ...]) -> None:
    need(*names)
    expected = {name: alone(name)["results"] for name in names}
    settle()
    outside = torch_vmm.current_pool("cuda").memory_allocated()
    shared = make_shared("12GiB")
    pools = {name: shared.register_model(name, physical_limit="6GiB") for name in names}
    running = {name: PROGRAMS[name]() for name in names}
    found: dict[str, list[Any]] = {name: [] for name in names}
    while running:
        for name in list(running):
            with pools[name]:
                result = next(running[name], None)
            if result is None:
                del running[name]
                gc.collect()
                continue
            found[name].append(json.loads(json.dumps(result)))
            assert pools[name].memory_allocated() > 0
    assert found == expected
    settle()
    for pool in pools.values():
        assert pool.memory_stats()["allocation.all.allocated"] > 0
        assert pool.memory_allocated() == 0
        assert pool.memory_stats()["active_bytes.all.current"] == 0
    assert torch_vmm.current_pool("cuda").memory_allocated() == outside
    shared.close()  # not by force: raises where anything is left


def test_cudnn_makes_do_with_what_a_model_may_have(make_shared: MakeShared) -> None:
    """An algorithm whose workspace the model's limit forbids is passed over, and nothing of the try is left."""
    need("resnet")
    pending = begin_on_native(training.train_resnet_quickly)
    settle()
    model = make_shared("4GiB").register_model("small", physical_limit="512MiB")
    with model:
        found = training.train_resnet_quickly()
    assert found == pytest.approx(pending.result(), rel=1e-2)
    assert 128 * MIB < model.max_memory_reserved() <= 512 * MIB
    settle()
    assert model.memory_allocated() == 0


def test_generation_compiled_into_cuda_graphs_gives_what_it_gives_natively(make_shared: MakeShared) -> None:
    need("llama")
    pending = begin_on_native(generation.generate_compiled, seed=14)
    settle()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    outside = generation.generate_compiled(seed=14)
    shared = make_shared("8GiB")
    model = shared.register_model("compiled")
    with model:
        inside = generation.generate_compiled(seed=14)
    assert outside == inside == pending.result()
    assert len(outside) == 2 * 2 * 24
    settle()
    assert model.max_memory_allocated() > 20 * MIB
    assert model.memory_allocated() == 0
    assert torch.cuda.memory_stats()["requested_bytes.all.current"] == before
    shared.close()


# -- Other libraries through torch's hooks -----------------------------------------------------------------------------


def address_of(array: Any) -> int:
    return int(array.__cuda_array_interface__["data"][0])


def test_arrays_of_cupy_are_memory_of_the_open_model(make_shared: MakeShared) -> None:
    need("cupy")
    import cupy

    pool = make_shared("1GiB").register_model("arrays")
    before = torch.cuda.memory_allocated()
    with pool, other_libraries.cupy_through_torch():
        array = cupy.full(4 * MIB, 7, dtype=cupy.int64)
    assert pool_of(address_of(array)) is pool
    assert pool.memory_allocated() == torch.cuda.memory_allocated() - before == 32 * MIB
    view = torch.as_tensor(array, device="cuda")
    assert view.data_ptr() == address_of(array)
    view[3] = 8
    assert cupy.asnumpy(array[2:5]).tolist() == [7, 8, 7]
    del array
    assert pool.memory_allocated() == 32 * MIB, "the view holds it"
    assert int((view == 7).sum()) == 4 * MIB - 1
    del view
    assert pool.memory_allocated() == 0
    assert torch.cuda.memory_allocated() == before


def test_cupy_on_a_stream_of_torchs(make_shared: MakeShared) -> None:
    need("cupy")
    import cupy

    pool = make_shared("1GiB").register_model("arrays")
    stream = torch.cuda.Stream()
    with pool, other_libraries.cupy_through_torch(), cupy.cuda.ExternalStream(stream.cuda_stream):
        for turn in range(20):
            array = cupy.full(MIB, turn, dtype=cupy.int64)
            address = address_of(array)
            del array  # its fill may still run: whoever gets the memory next on this stream comes after it
            array = cupy.full(MIB, turn + 1000, dtype=cupy.int64)
            assert address_of(array) == address
            assert int(array.sum()) == MIB * (turn + 1000)
            del array
    assert pool.memory_allocated() == 0


def test_an_array_beyond_the_limit_is_torchs_error_and_nothing_is_left(make_shared: MakeShared) -> None:
    need("cupy")
    import cupy

    pool = make_shared("1GiB").register_model("arrays", physical_limit="64MiB")
    with pool, other_libraries.cupy_through_torch():
        with pytest.raises(torch.OutOfMemoryError, match="arrays"):
            cupy.empty(65 * MIB, dtype=cupy.uint8)
        assert pool.memory_allocated() == 0
        assert int(cupy.full(60 * MIB, 1, dtype=cupy.uint8).sum()) == 60 * MIB
    assert pool.memory_allocated() == 0


def test_arrays_of_numba_are_memory_of_the_open_model(make_shared: MakeShared) -> None:
    need("numba")
    from numba import cuda

    other_libraries.numba_through_torch()
    pool = make_shared("1GiB").register_model("arrays")
    before = torch.cuda.memory_allocated()
    with pool:
        array = cuda.device_array(4 * MIB, dtype="int64")
    assert pool_of(address_of(array)) is pool
    assert pool.memory_allocated() == torch.cuda.memory_allocated() - before == 32 * MIB
    view = torch.as_tensor(array, device="cuda")
    assert view.data_ptr() == address_of(array)
    view.fill_(7)
    assert bool((array.copy_to_host() == 7).all())
    del array
    assert pool.memory_allocated() == 32 * MIB, "the view holds it"
    del view
    assert pool.memory_allocated() == 0
    assert torch.cuda.memory_allocated() == before
