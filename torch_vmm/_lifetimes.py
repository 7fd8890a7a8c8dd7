"""What lives as long as the memory of a tensor."""

from __future__ import annotations

import weakref

import torch


def hold_while(tensor: torch.Tensor, what: object) -> None:
    """Holds ``what`` until the storage of ``tensor`` ends, whoever has a view of it.

    The storage's Python object lives as long as the storage: torch sees to that.
    """
    weakref.finalize(tensor.untyped_storage(), _let_go, what).atexit = False


def _let_go(_: object) -> None:
    """Only its argument matters: it was held until now."""
