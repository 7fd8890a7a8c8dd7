"""The suite of the stand-in: ``make adapter-test`` runs it with tests/gpu, which runs in both places.

Without the stand-in every test is skipped.
"""

from __future__ import annotations

from pathlib import Path

import pytest

# The fixtures of the GPU suite.
from tests.gpu.conftest import (  # noqa: F401
    _cycles_per_ms,
    _enabled,
    _gpu_is_idle_afterwards,
    busy,
)
from tests.standin import control

_HERE = Path(__file__).resolve().parent


def pytest_configure(config: pytest.Config) -> None:
    config.option.device = "cuda"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents and not control.is_here():
            item.add_marker(pytest.mark.skip(reason="not the CUDA stand-in: python -m tests.standin"))
