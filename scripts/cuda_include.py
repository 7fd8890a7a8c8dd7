#!/usr/bin/env python3
"""Where the CUDA runtime's headers are; no CUDA Toolkit is needed.

torch's own requirements carry them: ``cuda.h`` and ``cuda_runtime_api.h`` come
with nvidia-cuda-runtime. From CUDA 13 on that package lacks the folder
``crt/`` that they include, and triton, which torch requires too, ships it. A
Toolkit named by CUDA_HOME is the second choice. Run as a script it prints the
compiler flags, for make and CMake.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path


def _package_folders(name: str) -> list[Path]:
    """Folders of an installed package, found without importing it."""
    spec = importlib.util.find_spec(name)
    return [Path(folder) for folder in spec.submodule_search_locations or []] if spec else []


def _torch_cuda_major() -> str:
    """'13' when the installed torch was built for CUDA 13.x; '' when there is none."""
    for folder in _package_folders("torch"):
        found = re.search(r"^cuda\b.*?'(\d+)\.", (folder / "version.py").read_text(), re.MULTILINE)
        if found:
            return found.group(1)
    return ""


def _runtime_folders() -> list[Path]:
    """Folders that may hold cuda_runtime_api.h, best first."""
    folders: list[Path] = []
    for nvidia in _package_folders("nvidia"):
        folders += [nvidia / f"cu{_torch_cuda_major()}" / "include", nvidia / "cuda_runtime" / "include"]
    folders += [Path(os.environ[name]) / "include" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    return [*folders, Path("/usr/local/cuda/include")]


def include_flags() -> list[str]:
    """Compiler flags for the CUDA headers.

    Raises:
        FileNotFoundError: they are nowhere; the text says what to install.
    """
    for runtime in _runtime_folders():
        if (runtime / "cuda.h").is_file() and (runtime / "cuda_runtime_api.h").is_file():
            break
    else:
        looked = "\n  ".join(str(folder) for folder in _runtime_folders())
        raise FileNotFoundError(
            "no CUDA headers (cuda.h, cuda_runtime_api.h). Install torch for CUDA, which brings them, or "
            f"nvidia-cuda-runtime, or set CUDA_HOME to a CUDA Toolkit. Looked in:\n  {looked}"
        )
    flags = ["-isystem", str(runtime)]
    if not (runtime / "crt" / "host_defines.h").is_file():
        for triton in _package_folders("triton"):
            spare = triton / "backends" / "nvidia" / "include"
            if (spare / "crt" / "host_defines.h").is_file():
                # After everything else: only what is found nowhere else comes from there.
                flags += ["-idirafter", str(spare)]
    return flags


if __name__ == "__main__":
    try:
        print(" ".join(include_flags()))
    except FileNotFoundError as error:
        sys.exit(str(error))
