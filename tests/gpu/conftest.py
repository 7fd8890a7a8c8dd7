"""The GPU suite: what only a GPU has, and all of tests/api on it.

``pytest tests/gpu`` runs both.
"""

from __future__ import annotations

from pathlib import Path

import pytest

_HERE = Path(__file__).resolve().parent


def pytest_configure(config: pytest.Config) -> None:
    config.option.device = "cuda"
    if any(Path(argument).resolve() == _HERE for argument in config.args):
        config.args.append(str(_HERE.parent / "api"))
