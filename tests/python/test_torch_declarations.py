"""What the adapter declares of torch by itself is what torch's own header says."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from tests.helpers import ROOT


def _normal(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("TORCH_CUDA_CPP_API ", "")).strip()


def test_cublas_workspaces() -> None:
    ours = (ROOT / "csrc/torch_adapter/shared_by_all.cpp").read_text()
    declared = re.search(r"namespace at::cuda \{\n(.*?)\}  // namespace at::cuda", ours, re.S)
    assert declared is not None
    header = Path(torch.__file__).parent / "include/ATen/cuda/CUDAContextLight.h"
    theirs = _normal(header.read_text())
    with_sizes, without, functions = re.split(r"#else\n|#endif\n", declared.group(1))
    has_sizes = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
    struct = with_sizes.partition("\n")[2] if has_sizes else without
    assert _normal(struct) in theirs
    assert len(functions.splitlines()) == 6
    for function in functions.splitlines():
        assert _normal(function) in theirs
