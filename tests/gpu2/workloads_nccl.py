"""What a rank of tests/gpu2/test_nccl.py does, under torch_vmm or under torch's own allocator.

torchrun starts it: ``python -m tests.gpu2.workloads_nccl ours|native check ...``.
Each check looks at its own results, and answers what only the test can judge.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import gc
import hashlib
import os
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

import torch_vmm
from tests.gpu2.launch import hand_back
from tests.helpers import MIB

SMALL, MIDDLE, LARGE = 1_000, 1_000_002, 5_000_002
"""Elements of 4 bytes: within a slab, so within one chunk; some chunks; many."""

Answer = dict[str, Any]


@functools.cache
def rank() -> int:
    return int(os.environ["RANK"])


@functools.cache
def device() -> torch.device:
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def meet() -> None:
    """All work of both ranks is done."""
    torch.cuda.synchronize()
    dist.barrier(device_ids=[device().index])


# -- Collectives -------------------------------------------------------------------------------------------------------


def pattern(elements: int, of_rank: int, seed: int) -> torch.Tensor:
    return torch.arange(elements, dtype=torch.int32, device=device()) % 1009 * 7 + 1000 * of_rank + seed


def expect(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    if not torch.equal(found, wanted):
        wrong = (found != wanted).nonzero().flatten()
        raise AssertionError(f"{what}: {wrong.numel()} of {found.numel()} elements, the first at {int(wrong[0])}")


def exchange(elements: int, seed: int) -> int:
    """Each kind of collective on fresh tensors of whatever is open here; returns an address that it used."""
    peer = 1 - rank()
    both = [pattern(elements, of_rank, seed) for of_rank in range(2)]
    mine = both[rank()].clone()
    what = f"of {elements} elements, seed {seed}"

    summed = mine.clone()
    dist.all_reduce(summed)
    expect(summed, both[0] + both[1], f"all_reduce {what}")

    gathered = torch.empty(2 * elements, dtype=torch.int32, device=device())
    dist.all_gather_into_tensor(gathered, mine)
    expect(gathered, torch.cat(both), f"all_gather {what}")

    part = torch.empty_like(mine)
    dist.reduce_scatter_tensor(part, torch.cat([mine, 3 * mine]))
    expect(part, (both[0] + both[1]) * (1, 3)[rank()], f"reduce_scatter {what}")

    told = mine.clone()
    dist.broadcast(told, src=1)
    expect(told, both[1], f"broadcast {what}")

    received = torch.empty_like(mine)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, received, peer)]):
        work.wait()
    expect(received, both[peer], f"send and receive {what}")

    swapped = torch.empty_like(mine)
    dist.all_to_all_single(swapped, mine)
    half = slice(rank() * elements // 2, (rank() + 1) * elements // 2)
    expect(swapped, torch.cat([both[0][half], both[1][half]]), f"all_to_all {what}")

    later = mine.clone()
    work = dist.all_reduce(later, async_op=True)
    crowd = [torch.zeros(elements, dtype=torch.int32, device=device()) for _ in range(3)]  # none of them may be later's
    work.wait()
    expect(later, both[0] + both[1], f"all_reduce with async_op {what}")
    del crowd
    return mine.data_ptr()


def collectives() -> Answer:
    """In the default pool, in pools of models and in one of its own, memory being given back in between."""
    shared = torch_vmm.SharedMemoryPool("2GiB", device=device())
    alone = torch_vmm.VirtualMemoryPool("8GiB", device=device())
    pools = [shared.register_model("one"), shared.register_model("other"), alone]
    given_back = 0
    for seed, elements in enumerate([SMALL, MIDDLE, LARGE, LARGE]):
        for pool in (None, *pools):
            with pool or nullcontext():
                exchange(elements, seed)
        meet()
        before = torch.cuda.memory_reserved()
        if seed % 2:
            torch.cuda.empty_cache()
        else:
            for pool in pools:
                pool.trim()
        given_back += before - torch.cuda.memory_reserved()
    for model in ("one", "other"):
        shared.unregister_model(model)
    alone.close()
    return {"given_back": given_back}


def hand_over() -> Answer:
    """Two models by turns, under a limit too small for both: the same addresses get other memory, again and again."""
    shared = torch_vmm.SharedMemoryPool("512MiB", device=device())
    models = [shared.register_model("one"), shared.register_model("other")]
    addresses: list[int] = []
    taken = 0
    for seed in range(8):
        turn, waiting = models[seed % 2], models[1 - seed % 2]
        held = waiting.memory_reserved()
        with turn:
            addresses.append(exchange(LARGE, 10 + seed))
            exchange(SMALL, 10 + seed)
        taken += held - waiting.memory_reserved()
        if seed % 4 == 3:
            meet()
            torch.cuda.empty_cache()
    meet()
    for model in ("one", "other"):
        shared.unregister_model(model)
    return {"taken": taken, "addresses": addresses}


# -- Memory that is registered with NCCL -------------------------------------------------------------------------------


def _inside(pool: torch.cuda.MemPool, elements: int, seed: int) -> None:
    with torch.cuda.use_mem_pool(pool):
        exchange(elements, seed)


def _in_mem_pool(*provider: Any, model: torch_vmm.VirtualMemoryPool | None = None) -> Answer:
    """Collectives in a MemPool that is registered, as memory enters and leaves it, and after it was taken back."""
    backend = dist.distributed_c10d._get_default_group()._get_backend(device())
    with model or nullcontext():
        pool = torch.cuda.MemPool(*provider)
        with torch.cuda.use_mem_pool(pool):
            early = pattern(LARGE, rank(), 3)
            gathered = torch.empty(2 * LARGE, dtype=torch.int32, device=device())
        owned = model is not None and torch_vmm.pool_of(early) is model
        backend.register_mem_pool(pool)
        dist.all_gather_into_tensor(gathered, early)
        expect(gathered, torch.cat([pattern(LARGE, of_rank, 3) for of_rank in range(2)]), "all_gather of the first")
        for seed, elements in enumerate([SMALL, MIDDLE, LARGE]):
            _inside(pool, elements, 20 + seed)
        del early, gathered
        meet()
        reserved = torch.cuda.memory_reserved()
        torch.cuda.empty_cache()
        given_back = reserved - torch.cuda.memory_reserved()
        for seed, elements in enumerate([SMALL, MIDDLE, LARGE, SMALL]):
            _inside(pool, elements, 30 + seed)
            meet()
            torch.cuda.empty_cache()
        backend.deregister_mem_pool(pool)
        _inside(pool, LARGE, 40)
        backend.register_mem_pool(pool)  # a second time, with what is in it now
        _inside(pool, LARGE, 41)
        backend.deregister_mem_pool(pool)
        meet()
    return {"given_back": given_back, "owned": owned}


def mem_pool() -> Answer:
    """torch.cuda.MemPool() without a provider."""
    return _in_mem_pool()


def mem_pool_of_ours() -> Answer:
    """torch.cuda.MemPool with torch_vmm as its provider."""
    return _in_mem_pool(torch_vmm.allocator())


def mem_pool_in_a_model() -> Answer:
    """A MemPool in a model: the MemPool's memory, the model's bill."""
    shared = torch_vmm.SharedMemoryPool("2GiB", device=device())
    model = shared.register_model("model")
    answer = _in_mem_pool(model=model)
    # NCCL's process group keeps a small tensor of its own, made while the model was open.
    shared.unregister_model("model", force=True)
    return answer


# -- Training ----------------------------------------------------------------------------------------------------------

WORDS, WIDTH, HEADS, LENGTH, BATCH, STEPS = 97, 256, 4, 32, 8, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.between = nn.LayerNorm(WIDTH)
        self.think = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.mix(self.before(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        with sdpa_kernel(SDPBackend.MATH):
            seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(-2))
        return x + self.think(self.between(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def fresh() -> Transformer:
    """The same weights at each call, on each rank and under each allocator."""
    torch.manual_seed(1)
    return Transformer().to(device())


class Training:
    """Some steps of one model over one batch, each rank its own."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.batch = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(rank()))
        self.losses: list[float] = []

    def step(self) -> None:
        words = self.batch.to(device())
        loss = nn.functional.cross_entropy(self.model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights, gradients and the optimizer's state, this rank's shards of them."""
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self.model.named_parameters():
            found[name] = parameter.detach()
            if parameter.grad is not None:
                found[f"{name}, its gradient"] = parameter.grad
            for kind, value in self.optimizer.state[parameter].items():
                found[f"{name}, its {kind}"] = value
        local = {name: getattr(tensor, "_local_tensor", tensor) for name, tensor in found.items()}
        return {name: tensor for name, tensor in local.items() if tensor.is_cuda}

    def digest(self) -> str:
        """Of every bit that training leaves."""
        whole = hashlib.sha256()
        for name, tensor in sorted(self.tensors().items()):
            whole.update(name.encode())
            whole.update(tensor.contiguous().cpu().numpy().tobytes())
        return whole.hexdigest()

    def answer(self) -> Answer:
        return {"losses": self.losses, "digest": self.digest()}


def in_ddp() -> nn.Module:
    # Buckets of 1 MiB, so that there are several; gradients are views of them.
    return DistributedDataParallel(fresh(), device_ids=[device().index], bucket_cap_mb=1, gradient_as_bucket_view=True)


def in_fsdp() -> nn.Module:
    mesh = init_device_mesh("cuda", (2,))
    model = fresh()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _train(wrap: Callable[[], nn.Module]) -> Answer:
    training = Training(wrap())
    for _ in range(STEPS):
        training.step()
    return training.answer()


def _train_two_models(wrap: Callable[[], nn.Module]) -> Answer:
    """Two models by turns, each in its pool, memory being given back in between."""
    shared = torch_vmm.SharedMemoryPool("4GiB", device=device())
    pools = [shared.register_model("one"), shared.register_model("other")]
    default = torch_vmm.current_pool(device())
    default.reset_peak_memory_stats()
    held = default.memory_allocated()
    trainings: list[Training] = []
    for pool in pools:
        with pool:
            trainings.append(Training(wrap()))
    for _ in range(STEPS):
        for pool, training in zip(pools, trainings, strict=True):
            with pool:
                training.step()
            meet()
            torch.cuda.empty_cache()
    default_grew = default.max_memory_allocated() - held
    strays = [
        f"{name}: {torch_vmm.pool_of(tensor)!r}"
        for pool, training in zip(pools, trainings, strict=True)
        for name, tensor in training.tensors().items()
        if torch_vmm.pool_of(tensor) is not pool
    ]
    return {"models": [training.answer() for training in trainings], "strays": strays, "default_grew": default_grew}


def ddp() -> Answer:
    return _train(in_ddp)


def fsdp() -> Answer:
    return _train(in_fsdp)


def ddp_in_models() -> Answer:
    return _train_two_models(in_ddp)


def fsdp_in_models() -> Answer:
    return _train_two_models(in_fsdp)


# -- The rank ----------------------------------------------------------------------------------------------------------

CHECKS: dict[str, Callable[[], Answer]] = {
    check.__name__: check
    for check in (
        collectives,
        hand_over,
        mem_pool,
        mem_pool_of_ours,
        mem_pool_in_a_model,
        ddp,
        fsdp,
        ddp_in_models,
        fsdp_in_models,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("allocator", choices=["ours", "native"])
    parser.add_argument("checks", nargs="+", choices=list(CHECKS))
    options = parser.parse_args()

    # A rank that hangs says where, and ends.
    faulthandler.dump_traceback_later(120, exit=True)
    if options.allocator == "ours":
        torch_vmm.enable("cuda")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # memory is as the allocator leaves it
    torch.cuda.set_device(device())
    # With a device the communicator is there at once, as registering needs. A rank that fails must not keep its peer.
    dist.init_process_group("nccl", device_id=device(), timeout=timedelta(seconds=60))
    answers: dict[str, Any] = {"backend": torch.cuda.get_allocator_backend()}
    try:
        for name in options.checks:
            answers[name] = CHECKS[name]()
            hand_back(answers)
            gc.collect()
            meet()
            torch.cuda.empty_cache()
        # After the group is gone torch's hooks answer with errors; memory comes and goes all the same.
        meet()
        dist.destroy_process_group()
        if options.allocator == "ours":
            block = torch.ones(64 * MIB, dtype=torch.uint8, device=device())
            assert int(block.sum(dtype=torch.int64)) == 64 * MIB
            del block
            torch.cuda.empty_cache()
    except BaseException:
        hand_back({**answers, "error": traceback.format_exc()})
        raise


if __name__ == "__main__":
    main()
