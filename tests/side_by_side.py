"""Run the GPU suite in several processes side by side, then what needs the GPU alone.

Each test file is a pytest of its own, started as one of the processes comes
free; tests marked ``alone`` (they look at the whole GPU's memory, or measure
time) are left out there and run afterwards, in one process. Prints a line for
each process and the output of those that fail; exits with 1 when any does.

    python3 -m tests.side_by_side                      # six processes
    python3 -m tests.side_by_side --processes 3 -k streams

tests/standin/suite.py runs what there is for the stand-in in the same way, in
other parts.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SUITE = "tests/gpu"  # its conftest adds tests/api where the folder is named
BESIDE = ("tests/gpu", "tests/api")
SECONDS = 600  # that a test may take
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed)")
_NOTHING_COLLECTED = 5  # pytest's exit code where every test is deselected


class Run(NamedTuple):
    """How one pytest ended."""

    name: str
    code: int
    seconds: float
    output: str

    @property
    def failed(self) -> bool:
        return self.code not in (0, _NOTHING_COLLECTED)

    @property
    def counts(self) -> Counter[str]:
        """``{"passed": 12, "skipped": 1}``, from pytest's last line."""
        last = self.output.rstrip().rpartition("\n")[2]
        return Counter({word: int(number) for number, word in _COUNT.findall(last)})

    def __str__(self) -> str:
        return f"{self.name}: {_in_words(self.counts) or 'nothing'} in {self.seconds:.0f} s"


def _in_words(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {word}" for word, number in counts.items())


def pytest(name: str, *arguments: str) -> Run:
    """One process, on the GPU; prints how it ended."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--device=cuda", *arguments]
    if importlib.util.find_spec("pytest_timeout") is not None:
        command.append(f"--timeout={SECONDS}")
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    run = Run(name, done.returncode, time.monotonic() - began, done.stdout)
    print(f"{run}\n{run.output}" if run.failed else run, flush=True)
    return run


def in_parts(parts: Mapping[str, Sequence[str]], processes: int) -> list[Run]:
    """A pytest for each part, begun in this order, so many at once. ``parts``: arguments for pytest, by name."""
    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        return list(pool.map(lambda part: pytest(part[0], *part[1]), parts.items()))


def summary(runs: Sequence[Run], began: float) -> int:
    """Prints what came of all; the exit code."""
    total: Counter[str] = sum((run.counts for run in runs), Counter())
    print(f"{_in_words(total)} in {time.monotonic() - began:.0f} s")
    failed = [run.name for run in runs if run.failed]
    if failed:
        print("failed:", ", ".join(failed))
    return 1 if failed else 0


def _test_files() -> list[str]:
    """Largest first, since it is about the longest."""
    files = [file for folder in BESIDE for file in (ROOT / folder).glob("test_*.py")]
    return [str(file.relative_to(ROOT)) for file in sorted(files, key=lambda file: -file.stat().st_size)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=6, help="how many at once (6)")
    arguments, for_pytest = parser.parse_known_args()
    began = time.monotonic()
    runs = in_parts({file: [file, "-m", "not alone", *for_pytest] for file in _test_files()}, arguments.processes)
    runs.append(pytest("alone", SUITE, "-m", "alone", *for_pytest))
    return summary(runs, began)


if __name__ == "__main__":
    sys.exit(main())
