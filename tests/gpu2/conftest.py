"""The suite for two GPUs of one machine: ``pytest tests/gpu2``. With fewer every test is skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

# The fixtures of the GPU suite.
from tests.gpu.conftest import (  # noqa: F401
    _cycles_per_ms,
    _enabled,
    _gpu_is_idle_afterwards,
    _why_not,
    busy,
)

_HERE = Path(__file__).resolve().parent


def pytest_configure(config: pytest.Config) -> None:
    config.option.device = "cuda"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why = _why_not()
    if not why and torch.cuda.device_count() < 2:
        why = "one GPU only"
    for item in items:
        if why and _HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=why))
