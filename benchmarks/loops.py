"""The C++ loops of ``csrc``: built once by the runner, loaded by the processes that measure."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Protocol, cast

ROOT = Path(__file__).resolve().parent.parent
_HERE = Path(__file__).resolve().parent

LongOperation = tuple[int, int, int, int, int]
"""Its number, bytes (0: a free), and what came with it: chunks mapped, unmapped, climbs."""
Latencies = tuple[list[float], list[LongOperation]]
"""Of one round: each operation's time, and those that took long."""


class Rounds(Protocol):
    """A program whose rounds are the same; what one leaves is there when the next begins."""

    def round_ns(self) -> float: ...


class Loops(Protocol):
    """What the extension has; times in ns, sizes in bytes."""

    def Opened(self) -> object: ...  # noqa: N802
    def gpu_pair_ns(self, size: int, count: int) -> float: ...
    def gpu_crew_pair_ns(self, size: int, count: int, opened: list[object]) -> float: ...
    def gpu_crew_hand_on_ns(self, size: int, count: int, opened: list[object]) -> float: ...
    def gpu_switched_pair_ns(self, size: int, count: int, opened: list[object]) -> float: ...
    def GpuReplacing(self, size: int, live: int, count: int) -> Rounds: ...  # noqa: N802
    def GpuChurn(self, lowest: int, highest: int, live: int, count: int, seed: int) -> Rounds: ...  # noqa: N802
    def gpu_latencies_ns(self, count: int, seed: int, rounds: int, counts: bool) -> list[Latencies]: ...
    def host_pair_ns(self, size: int, count: int) -> float: ...
    def host_crew_pair_ns(self, size: int, count: int, opened: list[object]) -> float: ...
    def HostChurn(self, lowest: int, highest: int, live: int, count: int, seed: int) -> Rounds: ...  # noqa: N802
    def empty_ns(self, device: str, count: int) -> float: ...
    def install_floor(self) -> None: ...


def compiler() -> str:
    """As scripts/build_extension chooses it: CXX of a conda or stand-alone Python may link libstdc++ statically, and
    two copies of it do not get on.
    """
    system = "/usr/bin/g++"
    return os.environ.get("VMM_CXX") or (system if os.path.exists(system) else "g++")


def build(source: str = "hot_path", flags: tuple[str, ...] = (), link_flags: tuple[str, ...] = ()) -> None:
    """Compiles ``csrc/<source>.cpp`` where it is not up to date. Imports torch; initialises nothing of CUDA."""
    from torch.utils import cpp_extension

    sys.path.insert(0, str(ROOT / "scripts"))
    import cuda_include

    os.environ["CXX"] = compiler()
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    _folder(source).mkdir(parents=True, exist_ok=True)
    cpp_extension.load(
        name=_name(source),
        sources=[str(_HERE / "csrc" / f"{source}.cpp")],
        extra_cflags=["-O2", "-std=c++20", *flags, *cuda_include.include_flags()],
        extra_ldflags=["-lc10_cuda", "-ltorch_cuda", *link_flags],
        build_directory=str(_folder(source)),
        with_cuda=False,  # no kernels, so no Toolkit
    )


def load() -> Loops:
    """The built loops of ``csrc/hot_path.cpp``."""
    return cast(Loops, load_module("hot_path"))


def load_module(source: str) -> ModuleType:
    """What was built of ``csrc/<source>.cpp``."""
    import torch  # noqa: F401 (whose libraries it is linked with)

    path = _folder(source) / f"{_name(source)}.so"
    spec = importlib.util.spec_from_file_location(
        _name(source), path, loader=importlib.machinery.ExtensionFileLoader(_name(source), str(path))
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _name(source: str) -> str:
    return f"benchmark_{source}"


def _folder(source: str) -> Path:
    return _HERE / "scratch" / f"{source}-{sys.implementation.cache_tag}"
