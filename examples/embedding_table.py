"""An embedding table that is larger than the device, trained with sparse gradients.

``python -m examples.embedding_table [--device cpu]``

The table has addresses for all of its rows (1 TiB) and memory for those that a batch has named so far. Gradients are
sparse and touch the rows that were used; so do ``torch.optim.SGD`` and the table's pages. ``train`` takes any table of
the same rows: a dense one, which the test compares it with, row by row.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import torch_vmm


@dataclass(frozen=True)
class Plan:
    """What is trained: ``steps`` batches of ``batch`` bags of ``bag`` ids, of ``groups`` stretches of 4096 ids each."""

    rows: int
    width: int
    steps: int
    batch: int
    bag: int
    groups: int
    seed: int = 0

    @property
    def table_bytes(self) -> int:
        """Of addresses, in float32."""
        return self.rows * self.width * 4

    def ids(self) -> Tensor:
        """(steps, batch, bag), on the host: as real ids do, they come in stretches, all over the table."""
        generator = torch.Generator().manual_seed(self.seed)
        starts = torch.randint(0, self.rows // _STRETCH, (self.groups,), generator=generator) * _STRETCH
        shape = (self.steps, self.batch, self.bag)
        which = torch.randint(0, self.groups, shape, generator=generator)
        return starts[which] + torch.randint(0, _STRETCH, shape, generator=generator)


_STRETCH = 4096  # ids: 2 MiB of rows of 128 floats

PLANS = {
    # A small one holds few pages of a table of 8 GiB; a test trains a dense one of its rows beside it.
    "small": Plan(rows=1 << 24, width=128, steps=6, batch=32, bag=4, groups=12),
    "full": Plan(rows=1 << 31, width=128, steps=200, batch=65536, bag=4, groups=2048),
}


def table_of(plan: Plan, device: str) -> torch_vmm.SparseTensor:
    """All rows' addresses, none of their memory. Rows without it read as zero, as those that have it begin."""
    return torch_vmm.sparse((plan.rows, plan.width), torch.float32, device)


def commit_rows(table: torch_vmm.SparseTensor, ids: Tensor) -> None:
    """Memory for the rows that a batch names, before a step writes to them. ``ids`` are on the host."""
    rows_a_page = table.page_size // (table.shape[1] * table.element_size())
    for page in torch.unique(ids // rows_a_page).tolist():
        rows = slice(page * rows_a_page, (page + 1) * rows_a_page)
        if not table.is_committed(rows):
            table.commit(rows)


def train(
    table: Tensor,
    plan: Plan,
    ids: Tensor,
    before_step: Callable[[Tensor], None] = lambda ids: None,
    labels: Tensor | None = None,
) -> list[float]:
    """Learns to say a number from a bag of ids, by SGD; the loss of each step.

    Args:
        table: (rows, width), changed in place.
        ids: (steps, batch, bag), on the host, rows of ``table``.
        before_step: is told the ids of each step first.
        labels: of whose sums it learns whether they are odd; ``None``: of the ids.
    """
    device = table.device
    bags = nn.EmbeddingBag.from_pretrained(table, freeze=False, mode="sum", sparse=True)
    assert bags.weight.data_ptr() == table.data_ptr()
    torch.manual_seed(plan.seed)
    head = nn.Linear(plan.width, 1).to(device)
    optimizer = torch.optim.SGD([*bags.parameters(), *head.parameters()], lr=0.1)
    losses = []
    for step, said in zip(ids, ids if labels is None else labels, strict=True):
        before_step(step)
        wanted = (said.sum(1) % 2).to(device, torch.float32)
        loss = nn.functional.binary_cross_entropy_with_logits(head(bags(step.to(device))).squeeze(1), wanted)
        optimizer.zero_grad()
        loss.backward()
        assert bags.weight.grad is not None
        assert bags.weight.grad.is_sparse
        optimizer.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def main() -> None:
    """Trains the table that fits the device's kind, and prints what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    try:
        torch_vmm.current_pool(device)  # there is such a device
    except torch_vmm.VmmError as error:
        parser.exit(2, f"{error}\n")
    plan = PLANS["small" if torch.device(device).type == "cpu" else "full"]
    table, ids = table_of(plan, device), plan.ids()
    began = time.perf_counter()
    losses = train(table, plan, ids, lambda step: commit_rows(table, step))
    seconds = time.perf_counter() - began
    print(
        f"a table of {plan.table_bytes / 2**30:.0f} GiB with {table.committed_bytes / 2**30:.2f} GiB in use: "
        f"{plan.steps} steps in {seconds:.2f} s, loss from {losses[0]:.4f} to {losses[-1]:.4f}"
    )


if __name__ == "__main__":
    main()
