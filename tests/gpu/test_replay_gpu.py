"""torch-vmm replay of real dumps, of torch's native allocator and of ours: it counts back what torch had counted."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest

from tests.gpu.native import both
from tests.gpu.workloads import history as work
from tests.helpers import GIB
from torch_vmm.replay import dump as dumps
from torch_vmm.replay.outcome import replay
from torch_vmm.replay.trace import FREE, programs


@pytest.mark.parametrize("seed", range(3))
def test_a_dump_says_what_torch_had_counted(tmp_path: Path, seed: int) -> None:
    for counted in both(work.dumped, folder=str(tmp_path), steps=400, seed=seed):
        dump = dumps.read(Path(counted["path"]))
        (program,) = programs(dump, dump.devices())
        changes = [-size if op == FREE else size for op, size in zip(program.op, program.size, strict=True)]
        requested = list(accumulate(changes))[program.opening - 1 :]
        assert program.opening > 0
        assert program.notes == []
        assert [refusal.size >= 2**50 for refusal in program.refusals] == [True]
        assert (requested[-1], max(requested)) == (counted["requested_current"], counted["requested_peak"])
        assert program.reserved is not None
        assert (program.reserved[-1], program.reserved_peak) == (counted["reserved_current"], counted["reserved_peak"])
        outcome = replay(program)
        assert outcome.refused is None
        assert program.allocated_peak <= outcome.reserved_peak <= program.allocated_peak + GIB
