"""Builds the extension ``torch_vmm._C`` with torch's own helpers.

It needs torch, a C++20 compiler and Python's headers; no CUDA Toolkit, GPU or
driver. The extension is good for the torch minor that it was built with only:
the virtual functions of torch's allocator change with every minor, so the
minor is recorded beside the extension and checked before it is loaded
(``torch_vmm/_build_check.py``). Metadata is in pyproject.toml.

VMM_DEBUG_BUILD=1 in the environment builds without optimisation, with symbols.
"""

from __future__ import annotations

import json
import os
import re
import sys
import sysconfig
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "scripts"))
# A ninja installed beside this Python counts, whatever PATH says.
os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])

import cuda_include  # noqa: E402

try:
    import torch
    from torch.utils import cpp_extension
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    sys.exit(
        "torch_vmm is built against the torch that it will run with, and this Python has none. Install torch "
        "(2.11 to 2.15), then: pip install --no-build-isolation ."
    )

# Every source of the extension, sorted. A new file is added here.
SOURCES = [
    "csrc/base/check.cpp",
    "csrc/base/errors.cpp",
    "csrc/base/host_pages.cpp",
    "csrc/base/status.cpp",
    "csrc/base/units.cpp",
    "csrc/bindings/convert.cpp",
    "csrc/bindings/debug.cpp",
    "csrc/bindings/device.cpp",
    "csrc/bindings/errors.cpp",
    "csrc/bindings/install.cpp",
    "csrc/bindings/memory_pool.cpp",
    "csrc/bindings/module.cpp",
    "csrc/bindings/native_memory_pool.cpp",
    "csrc/bindings/numbers.cpp",
    "csrc/bindings/options.cpp",
    "csrc/bindings/placed_memory.cpp",
    "csrc/bindings/pool.cpp",
    "csrc/bindings/replay.cpp",
    "csrc/bindings/routing.cpp",
    "csrc/bindings/shared_memory_pool.cpp",
    "csrc/bindings/sleep.cpp",
    "csrc/bindings/stays.cpp",
    "csrc/bindings/tensor_alias.cpp",
    "csrc/bindings/tensor_range.cpp",
    "csrc/bindings/tensor_view.cpp",
    "csrc/bindings/virtual_memory_manager.cpp",
    "csrc/core/backing/backed_space.cpp",
    "csrc/core/backing/backing.cpp",
    "csrc/core/backing/choosing.cpp",
    "csrc/core/backing/idle.cpp",
    "csrc/core/backing/idle_chunks.cpp",
    "csrc/core/backing/placing.cpp",
    "csrc/core/backing/stream_table.cpp",
    "csrc/core/backing/whole_chunks.cpp",
    "csrc/core/blocks/block.cpp",
    "csrc/core/blocks/block_arena.cpp",
    "csrc/core/blocks/block_directory.cpp",
    "csrc/core/blocks/block_heap.cpp",
    "csrc/core/blocks/block_space.cpp",
    "csrc/core/blocks/free_by_offset.cpp",
    "csrc/core/blocks/growth_policy.cpp",
    "csrc/core/blocks/move_debt.cpp",
    "csrc/core/blocks/placement.cpp",
    "csrc/core/blocks/slabs.cpp",
    "csrc/core/blocks/small_heap.cpp",
    "csrc/core/cache/biased_lock.cpp",
    "csrc/core/cache/block_caches.cpp",
    "csrc/core/cache/depot.cpp",
    "csrc/core/cache/thread_cache.cpp",
    "csrc/core/debug/watch_log.cpp",
    "csrc/core/device/allocating.cpp",
    "csrc/core/device/debugging.cpp",
    "csrc/core/device/device_memory.cpp",
    "csrc/core/device/ending.cpp",
    "csrc/core/device/freeing.cpp",
    "csrc/core/device/giving_back.cpp",
    "csrc/core/device/group_figures.cpp",
    "csrc/core/device/ladder.cpp",
    "csrc/core/device/margin.cpp",
    "csrc/core/device/numbers.cpp",
    "csrc/core/device/pool_registry.cpp",
    "csrc/core/device/private_pools.cpp",
    "csrc/core/device/provided_memory.cpp",
    "csrc/core/device/provided_segments.cpp",
    "csrc/core/device/reclaim_log.cpp",
    "csrc/core/device/refusal.cpp",
    "csrc/core/device/refusing.cpp",
    "csrc/core/device/spilling.cpp",
    "csrc/core/faces/memory_pool.cpp",
    "csrc/core/faces/native_memory_pool.cpp",
    "csrc/core/faces/placed_memory.cpp",
    "csrc/core/faces/replay.cpp",
    "csrc/core/faces/seals.cpp",
    "csrc/core/faces/shared_memory_pool.cpp",
    "csrc/core/faces/tensor_alias.cpp",
    "csrc/core/faces/tensor_range.cpp",
    "csrc/core/faces/virtual_memory_manager.cpp",
    "csrc/core/limits/budget.cpp",
    "csrc/core/memory/address_space.cpp",
    "csrc/core/memory/alias_range.cpp",
    "csrc/core/memory/chunk_store.cpp",
    "csrc/core/memory/dormant_mappings.cpp",
    "csrc/core/memory/file_backup.cpp",
    "csrc/core/memory/grant.cpp",
    "csrc/core/memory/guest_memory.cpp",
    "csrc/core/memory/host_backup.cpp",
    "csrc/core/memory/mapped_range.cpp",
    "csrc/core/memory/own_file.cpp",
    "csrc/core/memory/packed_backup.cpp",
    "csrc/core/memory/pinned_memory.cpp",
    "csrc/core/memory/pinned_slabs.cpp",
    "csrc/core/memory/zero_cover.cpp",
    "csrc/core/numbers/peaks.cpp",
    "csrc/core/numbers/pool_counters.cpp",
    "csrc/core/numbers/stats.cpp",
    "csrc/core/options.cpp",
    "csrc/core/pool/asleep.cpp",
    "csrc/core/pool/cached.cpp",
    "csrc/core/pool/checking.cpp",
    "csrc/core/pool/checkpoint.cpp",
    "csrc/core/pool/free_space.cpp",
    "csrc/core/pool/giving.cpp",
    "csrc/core/pool/going_to_sleep.cpp",
    "csrc/core/pool/idle_look.cpp",
    "csrc/core/pool/kept_ranges.cpp",
    "csrc/core/pool/lifetime.cpp",
    "csrc/core/pool/locking.cpp",
    "csrc/core/pool/numbers.cpp",
    "csrc/core/pool/pages.cpp",
    "csrc/core/pool/pool.cpp",
    "csrc/core/pool/seal_rule.cpp",
    "csrc/core/pool/seals.cpp",
    "csrc/core/pool/sharing.cpp",
    "csrc/core/pool/snapshot.cpp",
    "csrc/core/pool/waking.cpp",
    "csrc/core/pool/waking_plan.cpp",
    "csrc/core/pool/watched.cpp",
    "csrc/core/pool/watched_blocks.cpp",
    "csrc/core/sleep/arrival.cpp",
    "csrc/core/sleep/chunk_backup.cpp",
    "csrc/core/sleep/departure.cpp",
    "csrc/core/sleep/pieces.cpp",
    "csrc/core/sleep/sleeper.cpp",
    "csrc/core/sleep/transfer.cpp",
    "csrc/core/streams/clock.cpp",
    "csrc/core/streams/device_streams.cpp",
    "csrc/core/streams/pending_frees.cpp",
    "csrc/core/streams/recorded_uses.cpp",
    "csrc/core/streams/stream_point.cpp",
    "csrc/driver/address_book.cpp",
    "csrc/driver/cuda_api.cpp",
    "csrc/driver/cuda_driver.cpp",
    "csrc/driver/cuda_native_pools.cpp",
    "csrc/driver/cuda_packing.cpp",
    "csrc/driver/cuda_streams.cpp",
    "csrc/driver/fence_table.cpp",
    "csrc/driver/fork_watch.cpp",
    "csrc/driver/host_arena.cpp",
    "csrc/driver/host_driver.cpp",
    "csrc/driver/host_memory.cpp",
    "csrc/driver/nvrtc.cpp",
    "csrc/driver/packing.cpp",
    "csrc/ipc/imported_range.cpp",
    "csrc/ipc/ipc_descriptors.cpp",
    "csrc/ipc/ipc_exports.cpp",
    "csrc/ipc/ipc_handle.cpp",
    "csrc/process/device_kind.cpp",
    "csrc/process/fault_report.cpp",
    "csrc/process/runtime.cpp",
    "csrc/torch_adapter/cuda_allocator.cpp",
    "csrc/torch_adapter/cuda_callbacks.cpp",
    "csrc/torch_adapter/cuda_graphs.cpp",
    "csrc/torch_adapter/cuda_history.cpp",
    "csrc/torch_adapter/cuda_install.cpp",
    "csrc/torch_adapter/cuda_limits.cpp",
    "csrc/torch_adapter/cuda_sharing.cpp",
    "csrc/torch_adapter/cuda_stream_census.cpp",
    "csrc/torch_adapter/debug_info_chain.cpp",
    "csrc/torch_adapter/enabled.cpp",
    "csrc/torch_adapter/entry_points.cpp",
    "csrc/torch_adapter/errors.cpp",
    "csrc/torch_adapter/history.cpp",
    "csrc/torch_adapter/host_allocator.cpp",
    "csrc/torch_adapter/mempool_provider.cpp",
    "csrc/torch_adapter/out_of_memory.cpp",
    "csrc/torch_adapter/routing.cpp",
    "csrc/torch_adapter/statistics.cpp",
    "csrc/torch_adapter/shared_by_all.cpp",
    "csrc/torch_adapter/strict.cpp",
]

unlisted = {str(file.relative_to(ROOT)) for file in (ROOT / "csrc").rglob("*.cpp")} - set(SOURCES)
if unlisted:
    print(f"setup.py: not in SOURCES, so not built: {', '.join(sorted(unlisted))}", file=sys.stderr)

SUPPORTED_MINORS = range(11, 16)  # of torch 2

TORCH_MAJOR, TORCH_MINOR = (int(part) for part in torch.__version__.split(".")[:2])
if TORCH_MAJOR != 2 or TORCH_MINOR not in SUPPORTED_MINORS:
    sys.exit(f"torch_vmm supports torch 2.11 to 2.15; this Python has torch {torch.__version__}")
if torch.version.cuda is None:
    sys.exit(f"torch_vmm needs a torch built for CUDA (it may run without a GPU); this is torch {torch.__version__}")


def version() -> str:
    text = (ROOT / "torch_vmm" / "version.py").read_text()
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    assert found, "torch_vmm/version.py has no __version__"
    return found.group(1)


def distribution_version() -> str:
    """Of a wheel it names the torch minor that it is good for; sources are good for all."""
    return version() if "sdist" in sys.argv else f"{version()}+torch{TORCH_MAJOR}.{TORCH_MINOR}"


# Read where the package is installed: <prefix>/share/doc/torch_vmm.
DOCS = {
    "Guide": "docs/guide.md",
    "Functions of torch": "docs/torch.md",
    "Design": "docs/design.md",
    "Performance": "docs/performance.md",
    "Contributing": "CONTRIBUTING.md",
}


def doc_files() -> list[tuple[str, list[str]]]:
    """Where the docs are installed to, in the same folders as here, so that their links hold."""
    folders: dict[str, list[str]] = {}
    for path in ["README.md", "LICENSE", *DOCS.values()]:
        folders.setdefault(str(Path("share/doc/torch_vmm") / Path(path).parent), []).append(path)
    return list(folders.items())


def compile_flags() -> list[str]:
    flags = ["-std=c++20", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
    flags += ["-O0", "-g", "-UNDEBUG"] if os.environ.get("VMM_DEBUG_BUILD") == "1" else ["-O2", "-g0"]
    flags += [f"-DVMM_TORCH_MAJOR={TORCH_MAJOR}", f"-DVMM_TORCH_MINOR={TORCH_MINOR}", f'-DVMM_VERSION="{version()}"']
    # The helpers name the same folders with -I; -isystem wins, so that
    # warnings are errors in our own files only.
    for folder in [*cpp_extension.include_paths(), sysconfig.get_path("include")]:
        flags += ["-isystem", folder]
    return flags + cuda_include.include_flags()


def in_groups(sources: list[str], folder: Path) -> list[str]:
    """Files there that include some of a folder's sources each.

    Most of what a file costs is the headers that it shares with the others. What torch's headers
    make large are fewer in a group. Each of bindings/ and driver/ stands alone: their files name
    their own functions alike.
    """
    by_folder: dict[str, list[str]] = {}
    for source in sources:
        by_folder.setdefault(str(Path(source).parent), []).append(source)
    groups = []
    for named, files in by_folder.items():
        size = {"csrc/bindings": 1, "csrc/driver": 1, "csrc/torch_adapter": 4}.get(named, 10)
        for at in range(0, len(files), size):
            text = "".join(f'#include "{ROOT / file}"\n' for file in files[at : at + size])
            group = folder / f"{named.removeprefix('csrc/').replace('/', '_')}_{at // size}.cpp"
            if not group.is_file() or group.read_text() != text:
                group.parent.mkdir(parents=True, exist_ok=True)
                group.write_text(text)
            groups.append(str(group))
    return groups


def extension() -> object:
    return cpp_extension.CppExtension(
        name="torch_vmm._C",
        sources=SOURCES,
        include_dirs=[str(ROOT / "csrc")],
        # Whatever, when newer than the extension, asks for a rebuild.
        depends=[str(file) for file in sorted((ROOT / "csrc").rglob("*.h"))] + ["setup.py", "torch_vmm/version.py"],
        # c10, torch, torch_cpu and torch_python are the helper's; torch's wheel
        # holds these two as well, and they load without a driver.
        libraries=["c10_cuda", "torch_cuda"],
        extra_compile_args=compile_flags(),
        # Beside an installed package lies torch; a build in place finds
        # torch's libraries loaded already, since torch is imported first.
        extra_link_args=["-Wl,-rpath,$ORIGIN/../torch/lib"],
        language="c++",
    )


class BuildExtension(cpp_extension.BuildExtension):
    """Writes ``_C.<abi>.json`` beside the extension: what it was built for.

    A file of its own, since reading it must not load the extension, and named
    like the extension, so that two Pythons' builds in one checkout keep apart.
    """

    def build_extensions(self) -> None:
        listed = [each.sources for each in self.extensions]
        for each in self.extensions:
            each.depends += each.sources
            each.sources = in_groups(each.sources, Path(self.build_temp).resolve() / "groups")
        try:
            super().build_extensions()
        finally:
            for each, sources in zip(self.extensions, listed, strict=True):
                each.sources = sources  # as a list of a wheel's sources has them

    def run(self) -> None:
        super().run()
        in_place, self.inplace = self.inplace, False
        self._write_record()
        self.inplace = in_place
        if in_place:
            self._write_record()

    def _write_record(self) -> None:
        record = {"torch": torch.__version__, "minor": f"{TORCH_MAJOR}.{TORCH_MINOR}", "version": version()}
        for path in self._record_paths():
            path.write_text(json.dumps(record) + "\n")

    def _record_paths(self) -> list[Path]:
        return [Path(self.get_ext_fullpath(extension.name)).with_suffix(".json") for extension in self.extensions]

    def get_outputs(self) -> list[str]:
        return [*super().get_outputs(), *(str(path) for path in self._record_paths())]


setup(
    version=distribution_version(),
    project_urls=DOCS,
    data_files=doc_files(),
    ext_modules=[extension()],
    cmdclass={"build_ext": BuildExtension},
    install_requires=[f"torch=={TORCH_MAJOR}.{TORCH_MINOR}.*"],
)
