"""The demo from start to end: measure each model alone, set the limit, let them take turns, judge."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

import torch_vmm
from torch_vmm import SharedMemoryPool

from .digits import DigitsModel, MissingPackageError
from .display import Progress, choose, size_text
from .encoder import EncoderModel
from .monitor import Monitor
from .text import TextModel
from .workload import Workload

ROUNDS = 5
LIMIT_SHARE = 0.6  # of the sum of the models' peaks
DEFAULT_SECONDS = {"cpu": 36.0, "cuda": 25.0}
_MIB = 2**20


@dataclass(frozen=True)
class Settings:
    device: str  # "cpu" or "cuda"
    seconds: float  # of work, start-up and measuring excluded
    least_steps: bool = False  # go on beyond that until each model has had its least number of steps
    limit: int | None = None  # bytes; None: LIMIT_SHARE of the sum of the peaks
    plain: bool = False
    learning_rate_scale: float = 1.0  # tests break the training with 0


@dataclass(frozen=True)
class Demand:
    """What one model needs, in bytes."""

    peak: int
    resting: int  # between its turns


@dataclass(frozen=True)
class Outcome:
    """What the summary is made of; sizes in bytes."""

    peaks: dict[str, int]
    limit: int
    most_mapped: int
    handed_over: int
    exceeded_by: int
    complaints: dict[str, str]

    def failures(self) -> list[str]:
        """What went wrong, in words; empty when all is well."""
        failures = [f"{model}: {complaint}" for model, complaint in self.complaints.items()]
        if self.exceeded_by > 0:
            failures.append(f"the limit of {size_text(self.limit)} was exceeded by {self.exceeded_by} bytes")
        if self.handed_over == 0 and self.limit < sum(self.peaks.values()):
            failures.append("no memory changed hands, though the limit is below the sum of the peaks")
        return failures


def choose_device(wanted: str | None) -> str:
    """``wanted``, or the GPU where there is one."""
    return wanted or ("cuda" if torch.cuda.is_available() else "cpu")


def run(settings: Settings) -> int:
    """Run the demo.

    Returns:
        0 when the models learned and the limit held, 1 when not, 2 when the demo could not run.
    Raises:
        KeyboardInterrupt: with the display closed and no thread left behind.
    """
    began = time.monotonic()
    torch.manual_seed(0)
    if settings.device == "cuda":
        torch.set_float32_matmul_precision("high")
    else:
        torch.set_num_threads(_free_cores())
    try:
        torch_vmm.enable(device=settings.device)
        outcome = _run(settings, began)
    except (MissingPackageError, FileNotFoundError, torch_vmm.NotAvailableError) as error:
        return _fail(2, f"the demo cannot run here: {error}")
    except torch.OutOfMemoryError as error:
        return _fail(1, f"out of memory: {error}")
    failures = outcome.failures()
    if outcome.complaints and not settings.least_steps:
        failures.append(
            f"{settings.seconds:g} s may be too short to learn on this machine; without --seconds the demo takes "
            "as long as that needs"
        )
    if failures:
        return _fail(1, *failures)
    print("all models learned, and the limit held")
    return 0


def _fail(code: int, *lines: str) -> int:
    sys.stdout.flush()
    for line in lines:
        print(f"demo failed: {line}", file=sys.stderr)
    return code


def _run(settings: Settings, began: float) -> Outcome:
    # While each model is measured alone, memory is not the question.
    shared = SharedMemoryPool(physical_limit="1TiB", device=settings.device)
    workloads: list[Workload] = []
    print(f"three models on {_device_name(settings.device)}; measuring what each needs alone ...", flush=True)
    makers: dict[str, Callable[[], Workload]] = {
        TextModel.name: lambda: TextModel(settings.device, settings.learning_rate_scale),
        DigitsModel.name: lambda: DigitsModel(settings.device, settings.learning_rate_scale),
        EncoderModel.name: lambda: EncoderModel(settings.device),
    }
    demands = {}
    for name, make in makers.items():
        with shared.register_model(name):
            workloads.append(make())
        demands[name] = _measure(shared, workloads[-1])
        print(f"  {name:8} peak {size_text(demands[name].peak):>9}, at rest {size_text(demands[name].resting):>9}")

    shared.physical_limit = limit = _choose_limit(settings, demands)
    print(f"limit {size_text(limit)}, the sum of their peaks {size_text(sum(d.peak for d in demands.values()))}\n")
    for pool in shared.models.values():
        pool.reset_peak_memory_stats()
    with Monitor(shared) as monitor:
        worked_s = _take_turns(shared, workloads, monitor, settings)
    outcome = Outcome(
        peaks={name: pool.max_memory_allocated() for name, pool in shared.models.items()},
        limit=limit,
        most_mapped=monitor.most_mapped,
        handed_over=sum(monitor.handed_over_to.values()),
        exceeded_by=monitor.over_limit.total.mapped - limit if monitor.over_limit else 0,
        complaints={work.name: complaint for work in workloads if (complaint := work.complaint())},
    )
    _summarise(outcome, workloads, shared, monitor.samples, worked_s, began)
    workloads.clear()
    gc.collect()
    shared.close(force=True)  # cuBLAS keeps its workspace
    return outcome


def _measure(shared: SharedMemoryPool, workload: Workload) -> Demand:
    """Two of its largest steps (the first makes the optimiser's state), then back to rest."""
    pool = shared[workload.name]
    pool.reset_peak_memory_stats()
    with pool:
        for _ in range(2):
            workload.step(0)
    pool.empty_cache()
    return Demand(peak=pool.max_memory_allocated(), resting=pool.memory_reserved())


def _choose_limit(settings: Settings, demands: dict[str, Demand]) -> int:
    peaks = sum(demand.peak for demand in demands.values())
    limit = settings.limit or int(LIMIT_SHARE * peaks) // (2 * _MIB) * (2 * _MIB)
    at_rest = sum(demand.resting for demand in demands.values())
    least = max(at_rest - demand.resting + demand.peak for demand in demands.values())
    if limit < least:
        raise torch.OutOfMemoryError(
            f"a limit of {size_text(limit)} is too small: one model at work and two at rest need {size_text(least)}"
        )
    return limit


def _take_turns(shared: SharedMemoryPool, workloads: list[Workload], monitor: Monitor, settings: Settings) -> float:
    """Rounds of turns: each model works for its share of the time, then keeps only what it needs to exist.

    A turn is a step at least, and ends when its time is over by the clock that
    all turns share; so the whole takes ``settings.seconds``, and a round at least.
    Where the least steps are asked for, turns and rounds are as long as those need.

    Returns:
        The seconds that it took.
    """
    progress = Progress(workloads, lambda: monitor.latest, total_s=settings.seconds)
    began, planned_s = time.monotonic(), 0.0

    def spent_s() -> float:
        return time.monotonic() - began

    with choose(progress, settings.plain) as display:
        for number in range(ROUNDS):
            if number > 0 and spent_s() >= settings.seconds and not settings.least_steps:
                break
            for workload in workloads:
                progress.now, progress.active = f"round {number + 1} of {ROUNDS}", workload.name
                planned_s += settings.seconds * workload.share / ROUNDS
                with monitor.turn(workload.name), shared[workload.name]:
                    step, least = 0, workload.least_steps if settings.least_steps else 1
                    while step < least or spent_s() < planned_s:
                        workload.step(step)
                        step += 1
                        progress.done_s = min(spent_s(), planned_s)
                        display.tick()
                    workload.finish_turn()
                progress.done_s = min(spent_s(), planned_s)
                display.end_turn()
    return spent_s()


def _summarise(
    outcome: Outcome, workloads: list[Workload], shared: SharedMemoryPool, samples: int, worked_s: float, began: float
) -> None:
    print()
    for work in workloads:
        with shared[work.name]:
            first, *more = work.report()
        print(f"{work.name}: {first}")
        for line in more:
            print(line)
    total = sum(outcome.peaks.values())
    own = " + ".join(size_text(peak) for peak in outcome.peaks.values())
    rows = [
        ("sum of peaks", f"{size_text(total)} ({own})"),
        ("limit", f"{size_text(outcome.limit)}, {outcome.limit / total:.0%} of that"),
        ("most mapped at once", f"{size_text(outcome.most_mapped)} in {samples} samples"),
        ("handed over", f"{size_text(outcome.handed_over)} from model to model"),
        ("static partitions", f"would need {size_text(total)} or more: {total / outcome.limit:.2f} x the limit"),
        ("worked", f"{worked_s:.1f} s"),
        ("time", f"{time.monotonic() - began:.1f} s, with start-up and measuring"),
    ]
    print()
    for name, text in rows:
        print(f"{name:20} {text}")


def _free_cores() -> int:
    # Threads wait for one another at every operation: on a busy machine two are
    # slower than one, by four times when all cores are taken.
    return max(1, len(os.sched_getaffinity(0)) - round(os.getloadavg()[0]))


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else f"host memory, threads: {torch.get_num_threads()}"
