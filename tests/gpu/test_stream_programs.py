"""Random programs over streams and models, right under torch's own allocator by construction, run under both."""

from __future__ import annotations

import random

import pytest

from tests.gpu.native import begin_on_native
from tests.gpu.workloads import stream_programs
from tests.standin.control import less

SECONDS = less(12, by=4)


@pytest.mark.no_memcheck  # the worker is another process
@pytest.mark.parametrize("models", [0, 1, 3], ids=["no model", "one model", "three models"])
def test_readers_see_what_was_written(models: int) -> None:
    seed = random.randrange(2**31)
    native = begin_on_native(stream_programs.run, seed=seed, seconds=SECONDS / 2)
    ours = stream_programs.run(seed, SECONDS, models)
    theirs = native.result()
    print(f"seed {seed}: here {ours}, natively {theirs}")
    assert theirs["wrong"] == 0, f"seed {seed}: the program itself is wrong"
    assert ours["wrong"] == 0, f"seed {seed}"
    assert ours["reads"] > less(500, by=50)
