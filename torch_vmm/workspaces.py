"""Memory that torch's libraries keep of their own accord in whatever pool was open when they first needed it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_vmm.errors import StillInUseError


def end_with_workspaces_freed(kind: str, end: Callable[[], None]) -> None:
    """Calls ``end()``; where it finds the pool still in use, once more without cuBLAS's workspaces.

    The first matrix product on a stream leaves a workspace of up to 32 MiB in
    the model that made it (torch keeps it until the process ends), which no
    user can free by name. torch makes a new one when it next needs one.
    """
    try:
        end()
    except StillInUseError:
        if kind != "cuda":
            raise
        torch._C._cuda_clearCublasWorkspaces()
        end()
