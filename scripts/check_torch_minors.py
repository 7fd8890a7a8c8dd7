#!/usr/bin/env python3
"""Compile the torch adapter and the bindings against every supported torch.

For each minor release the torch wheel and the CUDA runtime headers it was
built with are downloaded, their ``include`` folders are unpacked into a cache
outside the repository, and every file of ``csrc/torch_adapter`` and
``csrc/bindings`` is parsed and type-checked against them
(``g++ -fsyntax-only``). Nothing is installed. Prints one row per file and
exits with 1 when any of them fails.

    python3 scripts/check_torch_minors.py                 # all minors, all files
    python3 scripts/check_torch_minors.py --minor 2.15 csrc/bindings/module.cpp
    python3 scripts/check_torch_minors.py --fetch-only    # fill the cache, compile nothing
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHECKED_FOLDERS = ("csrc/torch_adapter", "csrc/bindings")

CUDA_13_0 = ("nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88")
CUDA_13_2 = ("nvidia-cuda-runtime==13.2.75", "nvidia-cuda-crt==13.2.78")

# Newest patch release of each minor, and the CUDA headers it was built with.
MINORS: dict[str, tuple[str, tuple[str, ...]]] = {
    "2.11": ("torch==2.11.0", CUDA_13_0),
    "2.12": ("torch==2.12.1", CUDA_13_0),
    "2.13": ("torch==2.13.0", CUDA_13_0),
    "2.14": ("torch==2.14.1", CUDA_13_0),
    "2.15": ("torch==2.15.0", CUDA_13_2),
}

# The headers do not depend on the Python they were packed for, so one that
# every minor has wheels for serves them all.
WHEEL_PYTHON = "3.12"


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "torch_vmm" / "minors"


def download(requirement: str, into: Path) -> Path:
    """Fetch one wheel, without what it depends on; returns its path."""
    machine = platform.machine()
    platforms = [f"manylinux_2_{n}_{machine}" for n in (28, 27, 17)] + [f"manylinux2014_{machine}"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", WHEEL_PYTHON]
    for name in platforms:
        command += ["--platform", name]
    subprocess.run([*command, "--dest", str(into), requirement], check=True)
    return next(into.glob("*.whl"))


def unpack_includes(wheel: Path, into: Path) -> None:
    """Unpack only what lies in an ``include`` folder."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if "include" in Path(name).parts and not name.endswith("/"):
                archive.extract(name, into)


def headers_of(requirement: str) -> Path:
    """The folder with this wheel's headers, fetched unless it is there already."""
    target = cache_folder() / requirement.replace("==", "-")
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"fetching {requirement}", file=sys.stderr, flush=True)
    # Unpacked beside its final place and renamed, so an interrupted run leaves
    # no half-filled folder that looks complete.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".part-") as scratch:
        wheels, headers = Path(scratch) / "wheel", Path(scratch) / "headers"
        wheels.mkdir()
        headers.mkdir()
        wheel = download(requirement, wheels)
        unpack_includes(wheel, headers)
        wheel.unlink()
        headers.rename(target)
    return target


def include_flags(minor: str) -> list[str]:
    """Compiler flags for one minor's headers; REQUIRES that they are in the cache."""
    torch, cuda = MINORS[minor]
    torch_include = headers_of(torch) / "torch" / "include"
    folders = [torch_include, torch_include / "torch" / "csrc" / "api" / "include"]
    folders += [folder for wheel in cuda for folder in headers_of(wheel).glob("nvidia/*/include")]
    folders += [Path(sysconfig.get_path("include"))]
    flags = ["-I", str(ROOT / "csrc")]
    for folder in folders:
        if not folder.is_dir():
            raise SystemExit(f"torch {minor}: no folder {folder}")
        flags += ["-isystem", str(folder)]
    return flags


def compile_file(source: Path, minor: str, compiler: str) -> tuple[bool, str]:
    command = [compiler, "-fsyntax-only", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden"]
    major_number, minor_number = minor.split(".")
    command += ["-DTORCH_EXTENSION_NAME=_C", "-DTORCH_API_INCLUDE_EXTENSION_H", '-DVMM_VERSION="0"']
    command += [f"-DVMM_TORCH_MAJOR={major_number}", f"-DVMM_TORCH_MINOR={minor_number}"]
    done = subprocess.run([*command, *include_flags(minor), str(source)], capture_output=True, text=True)
    return done.returncode == 0, done.stderr


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="sources to check (default: all of the two folders)")
    parser.add_argument("--minor", action="append", choices=list(MINORS), help="only this minor (may be repeated)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at once")
    parser.add_argument("--fetch-only", action="store_true", help="download the headers and stop")
    parser.add_argument("--compiler", default="g++")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    minors: list[str] = arguments.minor or list(MINORS)
    for minor in minors:
        torch, cuda = MINORS[minor]
        for requirement in (torch, *cuda):
            headers_of(requirement)
    if arguments.fetch_only:
        return 0

    sources: list[Path] = [file.resolve() for file in arguments.files] or sorted(
        file for folder in CHECKED_FOLDERS for file in (ROOT / folder).glob("*.cpp")
    )
    if not sources:
        print(f"no sources in {' or '.join(CHECKED_FOLDERS)}", file=sys.stderr)
        return 1
    if shutil.which(arguments.compiler) is None:
        print(f"no compiler {arguments.compiler}", file=sys.stderr)
        return 1

    started = time.monotonic()
    failures: list[tuple[str, str, str]] = []
    width = max(len(str(source.relative_to(ROOT))) for source in sources)
    print(f"| {'file':<{width}} | " + " | ".join(f"{minor:<4}" for minor in minors) + " |")
    print(f"|{'-' * (width + 2)}|" + "------|" * len(minors))
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        pending = {
            source: [pool.submit(compile_file, source, minor, arguments.compiler) for minor in minors]
            for source in sources
        }
        for source, futures in pending.items():
            name = str(source.relative_to(ROOT))
            cells = []
            for minor, future in zip(minors, futures, strict=True):
                ok, errors = future.result()
                cells.append("ok" if ok else "FAIL")
                if not ok:
                    failures.append((name, minor, errors))
            print(f"| {name:<{width}} | " + " | ".join(f"{cell:<4}" for cell in cells) + " |", flush=True)

    for name, minor, errors in failures:
        print(f"\n--- {name} against torch {minor}\n{errors}", file=sys.stderr)
    seconds = time.monotonic() - started
    versions = ", ".join(MINORS[minor][0].removeprefix("torch==") for minor in minors)
    verdict = f"{len(failures)} of {len(sources) * len(minors)} FAILED" if failures else "all compile"
    print(f"\n{len(sources)} files against torch {versions}: {verdict} ({seconds:.0f} s)")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
