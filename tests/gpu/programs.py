"""Programs in processes of their own, many at once, each from a torch that is imported but has used nothing."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tests.helpers import Forked

Process = Forked


def start(code: str) -> Process:
    """Starts ``code`` where torch_vmm's options are the default ones."""
    return Process(textwrap.dedent(code), {})


@contextmanager
def running(programs: Mapping[str, str]) -> Iterator[dict[str, Process]]:
    """All of them, by name, started at once; none is left over."""
    processes = {name: start(code) for name, code in programs.items()}
    try:
        yield processes
    finally:
        for process in processes.values():
            process.wait(0)


def expect_done(process: Process) -> None:
    """It ends well, prints "done" alone, and torch_vmm has nothing to complain about."""
    done = process.wait(180)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.stdout.strip() == "done"
    assert "torch_vmm:" not in done.stderr
    assert "Traceback" not in done.stderr
