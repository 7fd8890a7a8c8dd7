"""Processes that measure pass by pass, in turn, on one CPU.

Two processes one after the other meet different neighbours: where the CPU is the limit, the same program under the same
allocator took up to half as long again. In lockstep a pass of one is beside the same pass of the other in time, and on
the same CPU, which is chosen anew for each round; all that wait are idle. Their memory is held at the same time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from . import machine
from .measurement import Part

_WAITS = "BENCHMARK WAITS"


def measured(part: Part) -> tuple[AbstractContextManager[object], Callable[[], None]]:
    """Where a process that measures ``part`` runs, and what it calls before each pass: where it is told, once it is its
    turn, or on one CPU and at once.
    """
    if "lockstep" in part:
        return nullcontext(), wait_for_turn
    return machine.one_cpu(), lambda: None


def wait_for_turn() -> None:
    """In a measuring process: returns when its next pass may begin, all its threads on the CPU that it was told."""
    print(_WAITS, flush=True)
    told = sys.stdin.readline()
    if not told:
        raise EOFError("whoever gave the turns has ended")
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it ended meanwhile
            os.sched_setaffinity(int(thread), {int(told)})


class Worker:
    """A measuring process and what it has said."""

    def __init__(self, command: list[str], folder: Path, environment: dict[str, str], timeout_s: float) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._lines: list[str] = []
        self._end = threading.Timer(timeout_s, self._process.kill)
        self._end.daemon = True
        self._end.start()

    def goes_on(self) -> bool:
        """Returns once it waits for its turn; ``False``: it has ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == _WAITS:
                return True
            self._lines.append(line)
        return False

    def take_turn(self, cpu: int) -> None:
        """REQUIRES: it waits."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it ended, and goes_on() will say so
            self._process.stdin.write(f"{cpu}\n")
            self._process.stdin.flush()

    def done(self) -> subprocess.CompletedProcess[str]:
        """What it left. REQUIRES: it has ended."""
        status = self._process.wait()
        self._end.cancel()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        self._errors.seek(0)
        with self._errors:
            return subprocess.CompletedProcess(self._process.args, status, "".join(self._lines), self._errors.read())


def run(
    workers: Sequence[Worker], cpu: Callable[[], int] = machine.quickest_cpu
) -> list[subprocess.CompletedProcess[str]]:
    """Gives turns until all have ended, another one first in each round; what they left, in the same order."""
    waiting = [worker for worker in workers if worker.goes_on()]
    first = 0
    while waiting:
        chosen = cpu()
        first = (first + 1) % len(waiting)
        ended = []
        for worker in [*waiting[first:], *waiting[:first]]:
            worker.take_turn(chosen)
            if not worker.goes_on():
                ended.append(worker)
        waiting = [worker for worker in waiting if worker not in ended]
    return [worker.done() for worker in workers]
