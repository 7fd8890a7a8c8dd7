"""Whose memory a tensor is, where autograd, streams and libraries are at work on the GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_vmm
from tests.helpers import MIB
from torch_vmm import pool_of, use_model

MakeShared = Callable[..., torch_vmm.SharedMemoryPool]
Models = tuple[torch_vmm.VirtualMemoryPool, torch_vmm.VirtualMemoryPool]


@pytest.fixture
def models(make_shared: MakeShared) -> Models:
    """Two models under 2 GiB."""
    shared = make_shared("2GiB")
    return shared.register_model("one"), shared.register_model("other")


@pytest.fixture
def default() -> torch_vmm.VirtualMemoryPool:
    """The pool outside every model; cuBLAS has its workspace for this stream by now."""
    torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
    return torch_vmm.current_pool("cuda")


def net() -> nn.Sequential:
    layers = [layer for _ in range(3) for layer in (nn.Linear(512, 512), nn.GELU())]
    return nn.Sequential(*layers).cuda()


def test_a_whole_training_step_stays_in_its_model(models: Models, default: torch_vmm.VirtualMemoryPool) -> None:
    one, other = models
    with one:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):  # at first cuBLAS makes its workspaces, which are everybody's
            before = default.memory_allocated()
            loss = model(torch.randn(256, 512, device="cuda")).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    state = [value for state in optimizer.state.values() for value in state.values() if value.is_cuda]
    gradients = [parameter.grad for parameter in model.parameters()]
    assert state
    assert all(pool_of(tensor) is one for tensor in [*model.parameters(), *gradients, *state, loss])
    assert other.memory_allocated() == 0
    assert default.memory_allocated() == before


def test_backward_belongs_to_whoever_calls_it(models: Models) -> None:
    one, other = models
    with one:
        model = net()
        loss = model(torch.randn(64, 512, device="cuda")).sum()
    with other:
        loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(pool_of(gradient) is other for gradient in gradients)
    assert all(pool_of(parameter) is one for parameter in model.parameters())


def test_backward_outside_every_model_goes_to_the_default_pool(
    models: Models, default: torch_vmm.VirtualMemoryPool
) -> None:
    with models[0]:
        model = net()
        loss = model(torch.randn(64, 512, device="cuda")).sum()
    loss.backward()
    assert all(pool_of(parameter.grad) is default for parameter in model.parameters() if parameter.grad is not None)


def test_what_autograd_allocates_and_drops_is_counted_in_the_model(
    models: Models, default: torch_vmm.VirtualMemoryPool
) -> None:
    one, _ = models
    with one:
        x = torch.randn(4 * MIB, device="cuda", requires_grad=True)  # 16 MiB
        loss = x.sin().cos().exp().sum()
        one.reset_peak_memory_stats()
        default.reset_peak_memory_stats()
        held, default_held = one.memory_allocated(), default.memory_allocated()
        loss.backward()
    assert one.max_memory_allocated() - held >= 32 * MIB
    assert default.max_memory_allocated() - default_held < MIB


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_in_backward_stays_in_the_model(
    models: Models, default: torch_vmm.VirtualMemoryPool, reentrant: bool
) -> None:
    one, _ = models
    with one:
        model = net()
        x = torch.randn(2048, 512, device="cuda", requires_grad=True)
        for _ in range(2):  # at first cuBLAS makes autograd's thread a workspace, which is everybody's
            loss = checkpoint(model, x, use_reentrant=reentrant).sum()
            default.reset_peak_memory_stats()
            held = default.memory_allocated()
            loss.backward()
    assert pool_of(x.grad) is one
    assert default.max_memory_allocated() - held < MIB


def test_two_models_trained_in_turns_do_not_mix(models: Models) -> None:
    nets, optimizers = [], []
    for pool in models:
        with pool:
            nets.append(net())
            optimizers.append(torch.optim.SGD(nets[-1].parameters(), lr=0.01, momentum=0.9))
    for _ in range(4):
        for pool, model, optimizer in zip(models, nets, optimizers, strict=True):
            with pool:
                model(torch.randn(128, 512, device="cuda")).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    for pool, model, optimizer in zip(models, nets, optimizers, strict=True):
        buffers = [state["momentum_buffer"] for state in optimizer.state.values()]
        assert all(pool_of(tensor) is pool for tensor in [*model.parameters(), *buffers])


def test_two_models_trained_at_once_on_two_threads_do_not_mix(models: Models) -> None:
    wrong: list[str] = []

    def train(pool: torch_vmm.VirtualMemoryPool) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()), pool:
                model = net()
                for _ in range(20):
                    model.zero_grad()
                    model(torch.randn(128, 512, device="cuda")).square().mean().backward()
                torch.cuda.current_stream().synchronize()
            tensors = [*model.parameters(), *(parameter.grad for parameter in model.parameters())]
            wrong.extend(f"{pool_of(tensor)}" for tensor in tensors if pool_of(tensor) is not pool)
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=train, args=(pool,)) for pool in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_new_thread_starts_outside_every_model(models: Models, default: torch_vmm.VirtualMemoryPool) -> None:
    found = []
    with models[0]:
        thread = threading.Thread(target=lambda: found.append(pool_of(torch.ones(8, device="cuda"))))
        thread.start()
        thread.join()
    assert found == [default]


def test_the_inner_model_wins_and_the_outer_returns(models: Models, default: torch_vmm.VirtualMemoryPool) -> None:
    one, other = models
    found = [pool_of(torch.ones(8, device="cuda"))]
    with one:
        found.append(pool_of(torch.ones(8, device="cuda")))
        with use_model("other"):
            found.append(pool_of(torch.ones(8, device="cuda")))
        found.append(pool_of(torch.ones(8, device="cuda")))
    found.append(pool_of(torch.ones(8, device="cuda")))
    assert found == [default, one, other, one, default]


def test_a_decorated_function_works_in_its_model(models: Models) -> None:
    one, _ = models

    @use_model(one)
    def step(x: torch.Tensor) -> torch.Tensor:
        y = (x * 2).sum()
        y.backward()
        return y

    x = torch.randn(MIB, device="cuda", requires_grad=True)
    assert pool_of(step(x)) is one
    assert pool_of(x.grad) is one


def test_a_stream_does_not_change_whose_memory_it_is(models: Models) -> None:
    with models[0], torch.cuda.stream(torch.cuda.Stream()):
        x = torch.ones(MIB, device="cuda")
    assert pool_of(x) is models[0]


def test_freed_in_another_context_it_goes_back_to_its_own(models: Models) -> None:
    one, other = models
    with one:
        x = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
    held = one.memory_allocated()
    with other:
        del x
    assert one.memory_allocated() == held - 8 * MIB
    assert other.memory_allocated() == 0


def test_mixed_precision_stays_in_the_model(models: Models, default: torch_vmm.VirtualMemoryPool) -> None:
    with models[0]:
        model = net()
        for _ in range(2):  # at first cuBLAS makes its workspaces, which are everybody's
            before = default.memory_allocated()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(torch.randn(256, 512, device="cuda")).float().square().mean()
            loss.backward()
    assert default.memory_allocated() == before


@pytest.mark.needs_gpu("cuDNN")
def test_a_convolution_in_a_model_gives_what_it_gives_outside(models: Models) -> None:
    torch.manual_seed(1)
    layer = nn.Conv2d(16, 32, 3).cuda()
    images = torch.randn(8, 16, 64, 64, device="cuda")
    outside = layer(images)
    with models[0]:
        inside = layer(images)
    torch.testing.assert_close(inside, outside)


def test_tensors_move_between_models(models: Models) -> None:
    one, other = models
    with one:
        x = torch.randn(3, 1000, 1000, device="cuda")
    with other:
        y = x.clone()
        z = x.cpu().cuda()
    assert (pool_of(x), pool_of(y), pool_of(z)) == (one, other, other)
    assert torch.equal(x, y)
    assert torch.equal(x, z)


@pytest.mark.needs_gpu("cuBLAS")
def test_a_librarys_workspace_is_no_models(make_shared: MakeShared) -> None:
    shared = make_shared("256MiB")
    model = shared.register_model("multiplier")
    torch._C._cuda_clearCublasWorkspaces()  # so that the next product makes one
    with model:
        matrix = torch.randn(512, 512, device="cuda")
        product = matrix @ matrix
    del matrix, product
    assert model.memory_allocated() == 0
    shared.unregister_model("multiplier")
    assert "multiplier" not in shared.models


def test_a_tensor_of_a_workspaces_size_is_its_models() -> None:
    """cuBLAS's workspaces (32 MiB, or 8.1) are everybody's; operators of the same library make tensors as large."""
    pool = torch_vmm.VirtualMemoryPool("1GiB")
    with pool:
        for size in (32 * 2**20, 4096 * 1024 * 2 + 16 * 1024 * 8):
            made = [
                torch.arange(size // 4, dtype=torch.int32, device="cuda"),
                torch.empty(size, dtype=torch.uint8, device="cuda"),
                torch.zeros(size // 4, device="cuda").cumsum(0),
            ]
            assert all(torch_vmm.pool_of(tensor) is pool for tensor in made)
