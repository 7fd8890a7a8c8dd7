"""Random programs over streams that are right under torch's own allocator: every reader checks each word it reads.

What makes them right: whoever reads waits for what wrote; a block that was read
on other streams is freed after record_stream() for each, or, without it, its
own stream waits for the readers before the next thing that it does. Nothing
else orders anything. An allocator that lets memory leave its stream any sooner
makes a reader see another's words.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

MIB = 2**20
_LIMIT = 1536 * MIB
_NON_BLOCKING = 1


@dataclass
class Block:
    """A tensor full of one number, and who still reads it."""

    words: torch.Tensor
    value: int
    home: int  # number of its stream
    written: torch.cuda.Event
    readers: list[tuple[int, torch.cuda.Event]] = field(default_factory=list)


class Program:
    """One program: streams, models where there are any, blocks, and a count of wrong words for each stream."""

    def __init__(self, seed: int, models: list[AbstractContextManager[object]]) -> None:
        self.chance = random.Random(seed)
        self.models = models or [contextlib.nullcontext()]
        self.streams: list[torch.cuda.Stream] = [torch.cuda.default_stream()]
        self.streams += [torch.cuda.Stream() for _ in range(3)]
        driver = ctypes.CDLL("libcuda.so.1")
        handle = ctypes.c_void_p()
        assert driver.cuStreamCreate(ctypes.byref(handle), _NON_BLOCKING) == 0
        assert handle.value is not None
        self.streams.append(torch.cuda.ExternalStream(handle.value))
        self.blocks: list[Block] = []
        # Of each stream: what it has to wait for before it does anything more.
        self.debts: list[list[torch.cuda.Event]] = [[] for _ in self.streams]
        with self.on(0):
            self.wrong = [torch.zeros(1, dtype=torch.int64, device="cuda") for _ in self.streams]
        torch.cuda.synchronize()
        self.value = 0
        self.reads = 0

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[torch.cuda.Stream]:
        with self.chance.choice(self.models), torch.cuda.stream(self.streams[stream]):
            yield self.streams[stream]

    def pay(self, stream: int) -> None:
        for event in self.debts[stream]:
            self.streams[stream].wait_event(event)
        self.debts[stream].clear()

    def linger(self) -> None:
        """Sometimes a long kernel: what follows on the stream comes late."""
        if self.chance.random() < 0.3:
            torch.cuda._sleep(self.chance.choice((100_000, 2_000_000, 20_000_000)))

    def write(self) -> None:
        home = self.chance.randrange(len(self.streams))
        size = self.chance.choice((300, 40_000, 700_000, 3 * MIB, 9 * MIB, 21 * MIB, 50 * MIB))
        self.value += 1
        with self.on(home) as stream:
            words = torch.empty(size // 4, dtype=torch.int32, device="cuda")  # before it pays: memory alone is no use
            self.pay(home)
            words.fill_(self.value)
            self.blocks.append(Block(words, self.value, home, stream.record_event()))

    def read(self) -> None:
        block = self.chance.choice(self.blocks)
        reader = self.chance.randrange(len(self.streams))
        with self.on(reader) as stream:
            self.pay(reader)
            if reader != block.home:
                stream.wait_event(block.written)
            self.linger()
            self.wrong[reader] += (block.words != block.value).sum()
            self.reads += 1
            if reader != block.home:
                block.readers.append((reader, stream.record_event()))

    def free(self) -> None:
        block = self.blocks.pop(self.chance.randrange(len(self.blocks)))
        if self.chance.random() < 0.5:
            for reader in {reader for reader, _ in block.readers}:
                block.words.record_stream(self.streams[reader])
        else:
            self.debts[block.home] += [event for _, event in block.readers]

    def step(self) -> None:
        held = sum(block.words.nbytes for block in self.blocks)
        what = self.chance.random()
        if what < 0.012:
            torch.cuda.empty_cache()
        elif what < 0.02:
            torch.cuda.synchronize()
        elif what < 0.03 and hasattr(self.models[0], "trim"):
            self.chance.choice(self.models).trim()  # type: ignore[attr-defined]
        elif not self.blocks or (what < 0.35 and held < _LIMIT // 3):
            self.write()
        elif what < 0.75:
            self.read()
        else:
            self.free()


def run(seed: int, seconds: float, models: int = 0) -> dict[str, int]:
    """A program of that long, under ``models`` models of torch_vmm with one limit. Steps, reads, wrong words."""
    entered: list[AbstractContextManager[object]] = []
    if models:
        import torch_vmm

        shared = torch_vmm.SharedMemoryPool(physical_limit=_LIMIT)
        entered = [shared.register_model(f"random-{number}") for number in range(models)]
    program = Program(seed, entered)
    steps = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        program.step()
        steps += 1
        if steps % 500 == 0:
            torch.cuda.synchronize()  # bounds what is queued
    torch.cuda.synchronize()
    return {"steps": steps, "reads": program.reads, "wrong": sum(int(count) for count in program.wrong)}
