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

SOURCES = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "csrc").rglob("*.cpp"))

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

    Most of what a file costs is the headers that it shares with the others: a name of a file's own
    is no other file's of its folder. What torch's headers make large are fewer in a group.
    """
    by_folder: dict[str, list[str]] = {}
    for source in sources:
        by_folder.setdefault(str(Path(source).parent), []).append(source)
    groups = []
    for named, files in by_folder.items():
        size = {"csrc/bindings": 3, "csrc/torch_adapter": 4}.get(named, 10)
        for at in range(0, len(files), size):
            text = "".join(f'#include "{ROOT / file}"\n' for file in files[at : at + size])
            group = folder / f"{named.removeprefix('csrc/').replace('/', '_')}_{at // size}.cpp"
            if not group.is_file() or group.read_text() != text:
                group.parent.mkdir(parents=True, exist_ok=True)
                group.write_text(text)
            groups.append(str(group))
    for group in folder.glob("*.cpp"):
        if str(group) not in groups:
            group.unlink()  # of sources that are others by now
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
