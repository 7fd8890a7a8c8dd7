"""What torch's installed headers say of its CUDA allocators."""

from __future__ import annotations

import re
from pathlib import Path

import torch

INCLUDE = Path(torch.__file__).parent / "include"

CLASSES = {
    "Allocator": "c10/core/Allocator.h",
    "DeviceAllocator": "c10/core/CachingDeviceAllocator.h",
    "CUDAAllocator": "c10/cuda/CUDACachingAllocator.h",
}
"""A CUDA allocator's class and those that it derives from, by header."""

PLUGGABLE = "torch/csrc/cuda/CUDAPluggableAllocator.h"


def without_comments(code: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", code, flags=re.DOTALL)


def _body_of(name: str, code: str) -> str:
    """The class's braces and what is between them."""
    begin = re.search(rf"\b(?:class|struct)\s+(?:\w+\s+)?{name}\b[^;{{]*{{", code)
    assert begin is not None, f"no class {name}"
    depth = 0
    for at in range(begin.end() - 1, len(code)):
        depth += {"{": 1, "}": -1}.get(code[at], 0)
        if depth == 0:
            return code[begin.end() - 1 : at + 1]
    raise AssertionError(f"class {name} does not end")


def virtual_methods() -> set[str]:
    """The names of the virtual functions of torch's CUDA allocator, those of its bases included."""
    found: set[str] = set()
    for name, header in CLASSES.items():
        body = _body_of(name, without_comments((INCLUDE / header).read_text()))
        found |= set(re.findall(r"\bvirtual\b[^(;]*?(~?\w+)\s*\(", body))
    return {method for method in found if not method.startswith("~")}


def final_methods() -> set[str]:
    """Those that CUDAPluggableAllocator does not let its subclasses override."""
    code = without_comments((INCLUDE / PLUGGABLE).read_text())
    return set(re.findall(r"(\w+)\s*\([^;{}]*\)\s*(?:const\s*)?final\s*;", code))


def overridden_methods(code: str) -> set[str]:
    """The names that a header of ours declares with ``override``."""
    found = set()
    code = re.sub(r"\bVMM_SINCE_TORCH_\d+_\d+\(", "", without_comments(code))
    for end in re.finditer(r"\boverride\b", code):
        declaration = re.split(r"[;{}:](?!:)(?<!::)", code[: end.start()])[-1]
        # std::pair<..> name(std::function<void(int)> f): the name stands before the first parenthesis outside of <>.
        flat = re.sub(r"<[^<>]*>", "", re.sub(r"<[^<>]*>", "", re.sub(r"<[^<>]*>", "", declaration)))
        name = re.search(r"(\w+)\s*\(", flat)
        assert name is not None, declaration
        found.add(name[1])
    return found
