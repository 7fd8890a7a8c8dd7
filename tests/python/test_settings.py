"""docs/torch.md has a row for every setting that the installed torch knows."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from tests.helpers import ROOT

INCLUDE = Path(torch.__file__).resolve().parent / "include"
HEADERS = ("c10/core/AllocatorConfig.h", "c10/cuda/CUDAAllocatorConfig.h")


def keys() -> set[str]:
    """What the parsers of PYTORCH_CUDA_ALLOC_CONF accept, as far as headers show it; neighbouring literals are one."""
    found: set[str] = set()
    for header in HEADERS:
        text = re.sub(r"//[^\n]*", "", (INCLUDE / header).read_text())
        for listed in re.findall(r"unordered_set<std::string>\s*keys\s*\{(.*?)\}", text, re.DOTALL):
            found |= set(re.findall(r'"(\w+)"', re.sub(r'"\s+"', "", listed)))
    return found


def test_every_setting_has_a_row() -> None:
    assert {"backend", "release_lock_on_cudamalloc", "per_process_memory_fraction"} <= keys()
    settings = (ROOT / "docs" / "torch.md").read_text().partition("## Settings")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", settings))
    assert keys() - named == set()
