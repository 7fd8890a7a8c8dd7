"""The CUDA suites on the stand-in, in several processes: what ``make adapter-test`` runs.

    python -m tests.standin -m tests.standin.suite [arguments for pytest]

Starting a process and importing torch takes as long as many a test file, so
files share processes. Two things keep them apart: memory waits for more once a
process has seen a stream that torch does not know, so files that make such
streams are among themselves; and what is left goes by folder, for order matters
least within one. Prints a line for each process and the output of those that
fail; exits with 1 when any does.
"""

from __future__ import annotations

import concurrent.futures
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed)")


class Done(NamedTuple):
    """How one pytest ended."""

    name: str
    code: int
    seconds: float
    output: str

    @property
    def counts(self) -> Counter[str]:
        return Counter({word: int(number) for number, word in _COUNT.findall(self.output.rstrip().rpartition("\n")[2])})

    def __str__(self) -> str:
        return f"{self.name}: {', '.join(f'{n} {word}' for word, n in self.counts.items())} in {self.seconds:.0f} s"


def groups() -> dict[str, list[Path]]:
    """Files that share a process, what takes longest first."""
    gpu = sorted((ROOT / "tests" / "gpu").glob("test_*.py"), key=lambda file: -file.stat().st_size)
    foreign = [file for file in gpu if "ExternalStream" in file.read_text()]
    known = [file for file in gpu if file not in foreign]
    api = sorted((ROOT / "tests" / "api").glob("test_*.py"))
    adapter = sorted((ROOT / "tests" / "adapter").glob("test_*.py"))
    return {
        **{f"tests/api and tests/adapter, part {k + 1} of 3": [*api, *adapter][k::3] for k in range(3)},
        **{f"tests/gpu, part {k + 1} of 4": known[k::4] for k in range(4)},
        "tests/gpu with foreign streams": foreign,
    }


def run(name: str, files: list[Path], arguments: list[str]) -> Done:
    command = [sys.executable, "-m", "pytest", "-q", "--device=cuda", "--timeout=600", "-p", "no:cacheprovider"]
    began = time.monotonic()
    done = subprocess.run(
        [*command, *(str(file.relative_to(ROOT)) for file in files), *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return Done(name, done.returncode, time.monotonic() - began, done.stdout)


def main() -> int:
    began = time.monotonic()
    total: Counter[str] = Counter()
    failed = []
    # Two more than there are cores: a process waits a third of its time for those that it starts.
    with concurrent.futures.ThreadPoolExecutor(int(os.environ.get("JOBS") or os.cpu_count() or 1) + 2) as pool:
        pending = [pool.submit(run, name, files, sys.argv[1:]) for name, files in groups().items()]
        for future in concurrent.futures.as_completed(pending):
            done = future.result()
            total += done.counts
            print(done, flush=True)
            if done.code not in (0, 5):  # 5: every test was deselected
                failed.append(done.name)
                print(done.output, flush=True)
    counts = ", ".join(f"{number} {word}" for word, number in total.items())
    print(f"adapter: {counts} in {time.monotonic() - began:.0f} s" + (f"; failed: {failed}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
