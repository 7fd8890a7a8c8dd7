"""What the figures were measured on, and with which code."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def facts(kind: str) -> dict[str, str | int]:
    """Device, driver, versions, processor. Initialises CUDA when ``kind`` is ``"cuda"``."""
    import torch

    on_gpu = kind == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "driver": _driver() if on_gpu else "none",
        "cuda": torch.version.cuda or "none",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)),
    }


@contextmanager
def one_cpu() -> Iterator[None]:
    """The calling thread, and those that it starts, stay on one CPU: unpinned, times differ by half between runs.

    It is the one that counts quickest at the moment: of a rented machine's, some share their core with a neighbour.
    """
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {quickest_cpu()})
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def rounds_ns(a_round: Callable[[], float], count: int) -> list[float]:
    """What ``count`` rounds say, each on the CPU that is the quickest when it begins: neighbours come and go."""
    times = []
    for _ in range(count):
        with one_cpu():
            times.append(a_round())
    return times


def quickest_cpu() -> int:
    """Of those that the calling thread may use."""
    allowed = os.sched_getaffinity(0)
    try:
        return min(allowed, key=_counting_time)
    finally:
        os.sched_setaffinity(0, allowed)


def _counting_time(cpu: int) -> float:
    """Of counting on that CPU, on which the thread then is: the best of three, 1 ms each. Any unit."""
    os.sched_setaffinity(0, {cpu})
    return min(timeit.repeat("for _ in range(50_000): pass", number=1, repeat=3))


def device_tag(device: str) -> str:
    """A short name for files: ``h100`` for ``NVIDIA H100 80GB HBM3``."""
    model = re.search(r"\b[A-Z]{0,3}\d{2,4}[A-Z]*\b", device)
    return re.sub(r"[^a-z0-9]+", "-", (model.group() if model else device).lower()).strip("-")


def commit() -> str:
    """What BENCHMARK_COMMIT says, for a copy of a checkout; else the checkout's, ``+changes`` when it was edited."""
    if said := os.environ.get("BENCHMARK_COMMIT"):
        return said
    try:
        head = _git("rev-parse", "HEAD")
        edited = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}+changes" if edited else head


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def _processor() -> str:
    try:
        named = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        named = None
    return named.group(1) if named else platform.machine()
