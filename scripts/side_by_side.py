#!/usr/bin/env python3
"""Run the GPU suite in several processes side by side, then what needs the GPU alone.

Each test file is a pytest of its own, started as one of the processes comes
free; tests marked ``alone`` (they look at the whole GPU's memory, or measure
time) are left out there and run afterwards, in one process. Prints a line for
each file and the output of those that fail; exits with 1 when any does.

    python3 scripts/side_by_side.py                      # six processes
    python3 scripts/side_by_side.py --processes 3 -k streams
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.util
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SUITE = "tests/gpu"  # its conftest adds tests/api where the folder is named
BESIDE = ("tests/gpu", "tests/api")
COUNTED = ("passed", "failed", "errors", "error", "skipped", "xfailed", "xpassed")
NOTHING_COLLECTED = 5  # pytest's exit code where every test is deselected


class Run(NamedTuple):
    """How one pytest ended."""

    name: str
    code: int
    seconds: float
    output: str

    @property
    def failed(self) -> bool:
        return self.code not in (0, NOTHING_COLLECTED)

    @property
    def counts(self) -> Counter[str]:
        """``{"passed": 12, "skipped": 1}``, from pytest's last line."""
        last = self.output.rstrip().rpartition("\n")[2]
        return Counter({word: int(number) for number, word in re.findall(r"(\d+) (\w+)", last) if word in COUNTED})


def test_files() -> list[str]:
    """Largest first, since it is about the longest."""
    files = [file for folder in BESIDE for file in (ROOT / folder).glob("test_*.py")]
    return [str(file.relative_to(ROOT)) for file in sorted(files, key=lambda file: -file.stat().st_size)]


def pytest(name: str, *arguments: str) -> Run:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--device", "cuda", *arguments]
    if importlib.util.find_spec("pytest_timeout") is not None:
        command.append("--timeout=600")
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return Run(name, done.returncode, time.monotonic() - began, done.stdout)


def report(run: Run) -> None:
    words = ", ".join(f"{number} {word}" for word, number in run.counts.items()) or "nothing"
    print(f"{run.name}: {words} in {run.seconds:.0f} s", flush=True)
    if run.failed:
        print(run.output, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=6, help="how many at once (6)")
    arguments, for_pytest = parser.parse_known_args()
    began = time.monotonic()
    runs: list[Run] = []
    with concurrent.futures.ThreadPoolExecutor(arguments.processes) as pool:
        pending = [pool.submit(pytest, file, file, "-m", "not alone", *for_pytest) for file in test_files()]
        for future in concurrent.futures.as_completed(pending):
            runs.append(future.result())
            report(runs[-1])
    runs.append(pytest("alone", SUITE, "-m", "alone", *for_pytest))
    report(runs[-1])
    total: Counter[str] = sum((run.counts for run in runs), Counter())
    failed = [run.name for run in runs if run.failed]
    print(", ".join(f"{number} {word}" for word, number in total.items()), f"in {time.monotonic() - began:.0f} s")
    if failed:
        print("failed:", ", ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
