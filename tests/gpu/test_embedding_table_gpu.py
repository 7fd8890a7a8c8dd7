"""examples/embedding_table.py as it is: a table of 1 TiB, larger than any GPU, with a few GiB in use."""

from __future__ import annotations

import pytest
import torch

from examples.embedding_table import PLANS, commit_rows, table_of, train


@pytest.mark.needs_gpu("memory and speed")
def test_a_table_of_a_tebibyte_is_trained() -> None:
    plan = PLANS["full"]
    assert plan.table_bytes == 2**40
    table, ids = table_of(plan, "cuda"), plan.ids()
    losses = train(table, plan, ids, lambda step: commit_rows(table, step))
    assert sum(losses[-10:]) < sum(losses[:10])
    used = torch.unique(ids // 4096)
    assert table.committed_bytes == len(used) * table.page_size
    assert 2**31 < table.committed_bytes < 2**33
    assert not table[int(used[0]) * 4096 + 4096 : int(used[1]) * 4096].any()  # reads as zero where nothing is
