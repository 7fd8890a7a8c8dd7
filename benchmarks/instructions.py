"""Instructions of an allocation and its free, in the core, on host memory: counted by callgrind.

Unlike times they do not depend on what else the machine does, so a test can hold them to a bound. Each program runs
twice, with two counts of steps; the difference is what the further steps cost, without start and warm-up.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from .loops import compiler
from .machine import ROOT
from .measurement import Measurement

KIND = "cpu"
ALLOCATORS = ("torch_vmm",)  # torch's own come with all of torch
# Linked from the objects that the extension is made of: what is counted is what ships.
_BUILD = ROOT / "build" / f"py{sys.version_info.major}.{sys.version_info.minor}"
_PROGRAM = _BUILD / "instructions"
_BELOW_TORCH = ("base_", "core_", "driver_")  # of setup.py's groups


class Case(NamedTuple):
    """What ``csrc/instructions.cpp`` is told to do."""

    program: str
    steps: int  # that are counted


CASES = {
    "pair 512 B": Case("pair", 2000),
    "pair 20 MiB, after small ones": Case("pair_of_both", 2000),
    "churn 512 B - 1 MiB, 1000 live": Case("churn", 5000),
    "churn 2 MiB - 32 MiB, 200 live": Case("large_churn", 5000),
    "buffers 2 MiB - 32 MiB, 200 live": Case("buffers", 5000),
    "miss 24 MiB": Case("miss", 100),
    "miss 32 MiB in the margin, nobody idle": Case("miss_in_margin", 20),
    "hand-over, of 1000 chunks of 2 MiB": Case("gather", 1000),
}


def prepare() -> str | None:
    """Builds the program; where that cannot be, or there is no valgrind, says why."""
    if shutil.which("valgrind") is None:
        return "valgrind must be installed (on Debian and Ubuntu: apt-get install valgrind)"
    temporary = _BUILD / "temp"
    names = [file.stem for file in (temporary / "groups").glob("*.cpp") if file.name.startswith(_BELOW_TORCH)]
    objects = [file for name in sorted(names) for file in temporary.rglob(f"{name}.o")]
    if not objects:
        return f"the extension's objects are not in {temporary}: run make build"
    source = ROOT / "benchmarks" / "csrc" / "instructions.cpp"
    command: list[str | Path] = [compiler(), "-std=c++20", "-O2", f"-I{ROOT / 'csrc'}", source]
    linked = subprocess.run([*command, *objects, "-pthread", "-ldl", "-o", _PROGRAM], capture_output=True, text=True)
    return None if linked.returncode == 0 else f"its program cannot be built:\n{linked.stdout}{linked.stderr}"


def measure(allocator: str, quick: bool) -> list[Measurement]:
    """Instructions a step. ``quick`` changes nothing: the counts are the same every time."""
    del allocator, quick
    return [Measurement(case, "a step", a_step(each), "instructions") for case, each in CASES.items()]


def a_step(case: Case) -> float:
    """Instructions that one further step takes. REQUIRES: ``prepare()`` was content."""
    return (_counted(case.program, 1 + case.steps) - _counted(case.program, 1)) / case.steps


def _counted(program: str, steps: int) -> int:
    done = subprocess.run(
        ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", _PROGRAM, program, str(steps)],
        # Whatever is set for the allocator changes what it does.
        env={name: value for name, value in os.environ.items() if not name.startswith("TORCH_VMM_")},
        capture_output=True,
        text=True,
    )
    found = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode != 0 or found is None:
        raise RuntimeError(f"callgrind of {program}, {steps} steps: exit status {done.returncode}\n{done.stderr}")
    return int(found.group(1))
