"""Models that sleep and wake, beside the bus alone and torch_memory_saver.

- ``torch_vmm``: ``pool.sleep()``, ``pool.wake()``, ``swap()``;
- ``torch_memory_saver`` (its wheel, 0.0.10): ``pause()`` and ``resume()`` with
  its pinned copy retained, which is its best;
- ``bus``: the same bytes copied between one pinned and one device tensor: what
  there is to reach.

16 GiB of a model in 64 blocks of 256 MiB, and in 3000 tensors from 1 KiB to
500 MiB. What comes back is compared with what went, outside the time. Where
there are two GPUs they also sleep in the other one's memory; `bus` is then the
link between the two.

The same bytes as bf16 weights, normally distributed, sleep packed as well
(``packed=True``); and random bits, of which nothing gets smaller.

A transformer of half the size (``examples/wake_layer_by_layer.py``) tells how
long its first output takes: where all of it wakes first, and where each layer
runs as soon as it is there. Both outputs are the same.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from examples import wake_layer_by_layer as example

from .measurement import Measurement, Row

if TYPE_CHECKING:
    from torch_vmm import VirtualMemoryPool

KIND = "cuda"
ALLOCATORS = ("torch_vmm", "torch_memory_saver", "bus")
RUNS = 2
NEEDS_LOOPS = False
_KIB, _MIB, _GIB = 2**10, 2**20, 2**30
_AGAIN = 3  # later times: their median
_TO_OTHER, _FROM_OTHER = "to another GPU", "from another GPU"


def missing(allocator: str) -> str | None:
    """Why it cannot be measured here."""
    if allocator == "torch_memory_saver" and importlib.util.find_spec("torch_memory_saver") is None:
        return "it is not installed (pip install torch_memory_saver)"
    return None


def _sizes(total: int) -> dict[str, list[int]]:
    """Two models of ``total`` bytes each, by name."""
    name = f"{total // _GIB} GiB"
    draw = random.Random(16)
    few_large = [256 * _MIB] * (total // (256 * _MIB))
    many: list[int] = []
    while sum(many) < total and len(many) < 2970:
        many.append(int(_KIB * 2 ** (draw.random() ** 0.9 * 10)))
    left = total - sum(many)
    large: list[int] = []
    while left > 0:
        large.append(min(left, int(_MIB * 2 ** (draw.random() * 8.96))))
        left -= large[-1]
    both = many + large
    draw.shuffle(both)
    return {f"{name} in {len(few_large)} blocks": few_large, f"{name} in {len(both)} tensors": both}


def _made(sizes: list[int]) -> list[torch.Tensor]:
    tensors = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number % 251 + 1)
    torch.cuda.synchronize()
    return tensors


def _require_whole(tensors: list[torch.Tensor]) -> None:
    for number, tensor in enumerate(tensors):
        if int(tensor[0]) != number % 251 + 1 or int(tensor[-1]) != number % 251 + 1:
            raise RuntimeError(f"tensor {number} is not what it was")
    if not all(bool((tensor == number % 251 + 1).all()) for number, tensor in list(enumerate(tensors))[::97]):
        raise RuntimeError("a tensor is not what it was")


def _timed(action: Callable[..., object], *arguments: object) -> float:
    """Milliseconds, from an idle GPU to an idle GPU."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    action(*arguments)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e3


def _untouched_sleep(total: int) -> float:
    """Milliseconds of a first sleep in host memory that nothing has used since the machine began, perhaps.

    A virtual machine gets each page from its host when it is first touched: 16 GiB took 0.5 to 1.7 s more. What was
    pinned goes back to the kernel in the end, so that the next first sleep finds pages that are there.
    """
    import torch_vmm

    shared = torch_vmm.SharedMemoryPool(total + _GIB)
    model = shared.register_model("untouched")
    with model:
        tensors = _made(next(iter(_sizes(total).values())))
    took = _timed(model.sleep)
    model.wake()
    tensors.clear()
    shared.release_host_backups()
    shared.close(force=True)
    return took


def _median(times: list[float]) -> float:
    return sorted(times)[len(times) // 2]


def _ours(total: int) -> list[Measurement]:
    import torch_vmm

    torch_vmm.enable()
    rows = [Measurement(next(iter(_sizes(total))), "to sleep, first, untouched pages", _untouched_sleep(total), "ms")]
    shared = torch_vmm.SharedMemoryPool(2 * total + 2 * _GIB)
    for case, sizes in _sizes(total).items():
        shared.release_host_backups()
        model = shared.register_model(case)
        with model:
            tensors = _made(sizes)
        rows.append(Measurement(case, "to sleep, first", _timed(model.sleep), "ms"))
        times: dict[str, list[float]] = {"to wake": [_timed(model.wake)], "to sleep again": []}
        _require_whole(tensors)
        for _ in range(_AGAIN):
            times["to sleep again"].append(_timed(model.sleep))
            times["to wake"].append(_timed(model.wake))
        _require_whole(tensors)
        rows += [Measurement(case, metric, _median(found), "ms") for metric, found in times.items()]
        dropped: list[float] = []
        returned: list[float] = []
        for _ in range(_AGAIN):
            dropped.append(_timed(model.sleep, "discard"))
            returned.append(_timed(model.wake))
        rows.append(Measurement(case, "discard: to sleep", _median(dropped), "ms"))
        rows.append(Measurement(case, "discard: to wake", _median(returned), "ms"))
        del tensors[::2]
        rows.append(Measurement(case, "half freed: to sleep", _timed(model.sleep), "ms"))
        rows.append(Measurement(case, "half freed: to wake", _timed(model.wake), "ms"))
        tensors.clear()
        shared.unregister_model(case)
    shared.close()
    return (
        rows + _packed(total) + _sealed(total) + _swapped(total) + _on_another_gpu(total) + _layer_by_layer(total // 2)
    )


def _packed(total: int) -> list[Measurement]:
    """Weights whose exponents repeat, and what does not repeat."""
    import torch_vmm

    rows = []
    weights = f"{total // _GIB} GiB of bf16 weights (normal), packed"
    for case, normal in ((weights, True), (f"{total // _GIB} GiB of random bits, packed", False)):
        shared = torch_vmm.SharedMemoryPool(total + _GIB)
        model = shared.register_model("packed")
        with model:
            blocks = [
                torch.empty(128 * _MIB, dtype=torch.bfloat16, device="cuda") for _ in range(total // (256 * _MIB))
            ]
        for block in blocks:
            block.normal_(std=0.02) if normal else block.view(torch.int64).random_()
        sums = [block.view(torch.int64).sum() for block in blocks]
        rows.append(Measurement(case, "to sleep, first", _timed(_to_sleep_packed, model), "ms"))
        rows.append(Measurement(case, "host memory", shared.host_backup_bytes / total, "of the weights"))
        times: dict[str, list[float]] = {"to wake": [_timed(model.wake)], "to sleep again": []}
        for _ in range(_AGAIN):
            times["to sleep again"].append(_timed(_to_sleep_packed, model))
            times["to wake"].append(_timed(model.wake))
        if any(bool(block.view(torch.int64).sum() != was) for block, was in zip(blocks, sums, strict=True)):
            raise RuntimeError(f"{case}: other bits than before")
        rows += [Measurement(case, metric, _median(found), "ms") for metric, found in times.items()]
        blocks.clear()
        shared.close(force=True)
    return rows


def _to_sleep_packed(model: VirtualMemoryPool) -> None:
    model.sleep(packed=True)


def _sealed(total: int) -> list[Measurement]:
    """Weights that nobody writes to."""
    import torch_vmm

    shared = torch_vmm.SharedMemoryPool(total + 512 * _MIB)
    model = shared.register_model("sealed")
    case, sizes = next(iter(_sizes(total).items()))
    with model.tag("weights"):
        tensors = _made(sizes)
    model.seal(tensors)
    model.sleep()
    times: dict[str, list[float]] = {"sealed: to wake": [_timed(model.wake)], "sealed: to sleep again": []}
    for _ in range(_AGAIN):
        times["sealed: to sleep again"].append(_timed(model.sleep))
        times["sealed: to wake"].append(_timed(model.wake))
    _require_whole(tensors)
    model.unseal(tensors)
    rows = [Measurement(case, metric, _median(found), "ms") for metric, found in times.items()]
    tensors.clear()
    shared.close(force=True)
    return rows


def _swapped(total: int) -> list[Measurement]:
    """Two models that share memory for one."""
    import torch_vmm

    shared = torch_vmm.SharedMemoryPool(total + 512 * _MIB)
    models = [shared.register_model(f"swapped-{number}") for number in range(2)]
    case, sizes = next(iter(_sizes(total).items()))
    tensors = []
    for number, model in enumerate(models):
        if number:
            models[0].sleep()
        with model:
            tensors.append(_made(sizes))
    torch_vmm.swap(out=models[1], into=models[0])
    times = [_timed(torch_vmm.swap, models[n % 2], models[(n + 1) % 2]) for n in range(2 * _AGAIN)]
    awake = next(number for number, model in enumerate(models) if not model.is_asleep)
    _require_whole(tensors[awake])
    rows = [Measurement(case, "swap", _median(times), "ms")]
    tensors.clear()
    shared.close(force=True)
    return rows


def _on_another_gpu(total: int) -> list[Measurement]:
    """In another GPU's memory, over the link between the two; nothing where there is one only."""
    import torch_vmm

    if torch.cuda.device_count() < 2:
        return []
    other = torch_vmm.SharedMemoryPool(total + 512 * _MIB, "cuda:1")
    shared = torch_vmm.SharedMemoryPool(total + 512 * _MIB)
    rows = []
    for case, sizes in _sizes(total).items():
        model = shared.register_model(case)
        with model:
            tensors = _made(sizes)
        times: dict[str, list[float]] = {_TO_OTHER: [], _FROM_OTHER: []}
        for _ in range(_AGAIN + 1):
            times[_TO_OTHER].append(_timed(model.sleep, "device:1"))
            times[_FROM_OTHER].append(_timed(model.wake))
        _require_whole(tensors)
        rows.append(Measurement(case, f"{_TO_OTHER}, first", times[_TO_OTHER].pop(0), "ms"))
        rows += [Measurement(case, metric, _median(found), "ms") for metric, found in times.items()]
        tensors.clear()
        shared.unregister_model(case)
    shared.close()
    other.close()
    return rows


def _layer_by_layer(total: int) -> list[Measurement]:
    """A transformer of some ``total`` bytes, from asleep to its first output."""
    full = example.SCALES["full"]
    layers = max(2, total // (12 * full.width**2 * full.dtype.itemsize))
    sleeper = example.Sleeper(replace(full, layers=layers), "cuda")
    case = f"{sleeper.weights.memory_allocated() / _GIB:.1f} GiB in {layers} layers"
    expected = sleeper.run()
    rows = [Measurement(case, "awake: an output", _median([_timed(sleeper.run) for _ in range(_AGAIN)]), "ms")]
    sleeper.timed(sleeper.wake_layer_by_layer)  # the first sleep pins memory
    for metric, wake in (
        ("woken whole: to the first output", sleeper.wake_whole),
        ("layer by layer: to the first output", sleeper.wake_layer_by_layer),
    ):
        times = []
        for _ in range(_AGAIN):
            seconds, output = sleeper.timed(wake)
            times.append(seconds * 1e3)
            if not torch.equal(output, expected):
                raise RuntimeError(f"{case}, {metric}: another output than awake")
        rows.append(Measurement(case, metric, _median(times), "ms"))
    sleeper.shared.close(force=True)
    return rows


def _end_at_once() -> None:
    sys.stdout.flush()
    os._exit(0)


def _saver(total: int) -> list[Measurement]:
    from torch_memory_saver import torch_memory_saver  # type: ignore[import-not-found]

    atexit.register(_end_at_once)  # its pools end outside its regions, which it answers with exit status 1
    torch_memory_saver.hook_mode = "torch"
    torch_memory_saver.retain_cpu_backup = True
    rows = []
    for case, sizes in _sizes(total).items():
        with torch_memory_saver.region(tag=case, enable_cpu_backup=True):
            tensors = _made(sizes)
        rows.append(Measurement(case, "to sleep, first", _timed(torch_memory_saver.pause, case), "ms"))
        times: dict[str, list[float]] = {"to wake": [_timed(torch_memory_saver.resume, case)]}
        times["to sleep again"] = []
        for _ in range(_AGAIN):
            times["to sleep again"].append(_timed(torch_memory_saver.pause, case))
            times["to wake"].append(_timed(torch_memory_saver.resume, case))
        _require_whole(tensors)
        rows += [Measurement(case, metric, _median(found), "ms") for metric, found in times.items()]
        with torch_memory_saver.region(tag="thrown away"):
            gone = _made(sizes)
        dropped, returned = [], []
        for _ in range(1 + _AGAIN):
            dropped.append(_timed(torch_memory_saver.pause, "thrown away"))
            returned.append(_timed(torch_memory_saver.resume, "thrown away"))
        # Neither allocator's first time, which costs more.
        rows.append(Measurement(case, "discard: to sleep", _median(dropped[1:]), "ms"))
        rows.append(Measurement(case, "discard: to wake", _median(returned[1:]), "ms"))
        with torch_memory_saver.region(tag=case, enable_cpu_backup=True):  # it frees nowhere else
            gone.clear()
            tensors.clear()
    return rows


def _bus(total: int) -> list[Measurement]:
    size = min(total, 4 * _GIB)
    times = total // size
    host = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def out() -> None:
        with torch.cuda.stream(streams[0]):
            for _ in range(times):
                host[0].copy_(device[0], non_blocking=True)

    def back() -> None:
        with torch.cuda.stream(streams[1]):
            for _ in range(times):
                device[1].copy_(host[1], non_blocking=True)

    def both() -> None:
        out()
        back()

    rows = []
    for case in _sizes(total):
        for metric, action in (("to sleep again", out), ("to wake", back), ("swap", both)):
            action()
            rows.append(Measurement(case, metric, _median([_timed(action) for _ in range(_AGAIN)]), "ms"))
    return rows + _link(total)


def _link(total: int) -> list[Measurement]:
    """The same bytes between two GPUs, in one copy."""
    if torch.cuda.device_count() < 2:
        return []
    here, there = (torch.empty(total, dtype=torch.uint8, device=f"cuda:{number}") for number in range(2))
    rows = []
    for case in _sizes(total):
        for metric, to, source in ((_TO_OTHER, there, here), (_FROM_OTHER, here, there)):
            to.copy_(source)
            rows.append(Measurement(case, metric, _median([_timed(to.copy_, source) for _ in range(_AGAIN)]), "ms"))
    return rows


def measure(allocator: str, quick: bool) -> list[Measurement]:
    """Wall time; each begins and ends with an idle GPU."""
    total = (1 if quick else 16) * _GIB
    return {"torch_vmm": _ours, "torch_memory_saver": _saver, "bus": _bus}[allocator](total)


def remarks(rows: list[Row]) -> list[str]:
    """How near the bus it is, and what the goals are."""
    found = {(row["case"], row["metric"], row["allocator"]): row["value"] for row in rows}
    said = []
    whole, early = (
        next((value for (_, metric, _), value in found.items() if metric == f"{how}: to the first output"), None)
        for how in ("woken whole", "layer by layer")
    )
    if whole is not None and early is not None:
        said.append(f"layer by layer the first output takes {early / whole:.2f} of what it takes where all wakes first")
    buses = {metric: value for (_, metric, allocator), value in found.items() if allocator == "bus"}
    for (case, metric, allocator), value in found.items():
        if allocator == "torch_vmm" and case.endswith("packed"):
            bus = buses.get(metric)
            if bus is not None:
                goal = " (goal 1.25 for weights)" if metric == "to wake" else ""
                said.append(f"{case}, {metric}: {bus / value:.2f} times the rate of the bus{goal}")
            continue
        bus = found.get((case, metric, "bus"))
        out = found.get((case, "to sleep again", "bus"))
        if allocator != "torch_vmm":
            continue
        if bus is not None:
            way = "link" if metric in (_TO_OTHER, _FROM_OTHER) else "bus"
            said.append(f"{case}, {metric}: {100 * bus / value:.1f} % of the {way}")
        elif out is not None and metric == "to sleep, first":
            said.append(f"{case}, {metric}: {value / out:.2f} times the bus (goal 2.5)")
    return said
