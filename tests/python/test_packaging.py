"""What is shipped: the sources are complete and build a wheel that works and says which torch it is for."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest
import torch

import torch_vmm
from tests.helpers import ROOT
from torch_vmm import _build_check
from torch_vmm.version import __version__

MINOR = ".".join(torch.__version__.split(".")[:2])


def command(*words: str | Path, cwd: Path) -> str:
    # Not as a part of the `make test` that runs this.
    ours = ("PYTHONPATH", "MAKELEVEL", "MAKEFLAGS", "MFLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run([str(word) for word in words], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    setup = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", folder, "sdist", "--dist-dir", folder]
    command(*setup, cwd=ROOT)
    (archive,) = folder.glob("*.tar.gz")
    assert archive.name == f"torch_vmm-{__version__}.tar.gz"
    with tarfile.open(archive) as tar:
        # Python 3.11.2, which Debian 12 has, knows no filter.
        tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
        tar.extractall(folder)
    return folder / archive.name.removesuffix(".tar.gz")


# What `pip wheel --no-build-isolation` runs, with the extension that is built already in place of minutes of compiling.
BUILD_WHEEL = """
import pathlib, shutil, sys
from torch.utils import cpp_extension
prebuilt, out = sys.argv[1:]
def build_extensions(self):
    for extension in self.extensions:
        path = pathlib.Path(self.get_ext_fullpath(extension.name))
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(prebuilt, path)
cpp_extension.BuildExtension.build_extensions = build_extensions
import setuptools.build_meta
setuptools.build_meta.build_wheel(out)
"""


@pytest.fixture(scope="module")
def wheel(unpacked: Path) -> Path:
    """A wheel from it; VMM_COMPILE_SDIST=1 compiles the unpacked sources."""
    out = unpacked.parent / "wheel"
    out.mkdir()
    if os.environ.get("VMM_COMPILE_SDIST") == "1":
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "wheel"]
        command(*pip, "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", out, ".", cwd=unpacked)
    else:
        extension = _build_check.extension_path()
        assert extension is not None
        command(sys.executable, "-c", BUILD_WHEEL, extension, out, cwd=unpacked)
    (made,) = out.iterdir()
    return made


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_the_sources_are_all_there(unpacked: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    tracked = set(command("git", "ls-files", cwd=ROOT).splitlines())
    tracked = {name for name in tracked if (ROOT / name).exists()}
    shipped = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    assert sorted(tracked - shipped) == []
    made = {
        name for name in shipped if name in ("PKG-INFO", "setup.cfg") or name.startswith(("torch_vmm.egg", "build/"))
    }
    untracked = set(command("git", "ls-files", "--others", "--exclude-standard", cwd=ROOT).splitlines())
    assert sorted(shipped - tracked - made - untracked) == []


def test_scripts_can_still_be_run(unpacked: Path) -> None:
    for script in (ROOT / "scripts").iterdir():
        if script.is_file():
            assert os.access(unpacked / "scripts" / script.name, os.X_OK) == os.access(script, os.X_OK), script.name


def test_every_file_that_a_target_runs_is_there(unpacked: Path) -> None:
    named = set(re.findall(r"\b((?:scripts|tests)/[\w./]+)", (unpacked / "Makefile").read_text()))
    assert {"scripts/cpp_tests", "tests/gpu", "scripts/at_hand"} <= named
    assert [name for name in sorted(named) if not (unpacked / name).exists()] == []
    assert command("make", "help", cwd=unpacked) == command("make", "help", cwd=ROOT)


def test_the_wheel_names_the_torch_it_is_for(wheel: Path) -> None:
    assert wheel.name.startswith(f"torch_vmm-{__version__}+torch{MINOR}-cp")
    about = metadata(wheel)
    assert about["Version"] == f"{__version__}+torch{MINOR}"
    assert f"torch=={MINOR}.*" in (about.get_all("Requires-Dist") or [])


def test_the_metadata_has_links_to_what_the_wheel_brings(wheel: Path) -> None:
    links = dict(link.split(", ") for link in metadata(wheel).get_all("Project-URL") or [])
    assert {"Guide", "Design"} <= set(links)
    with zipfile.ZipFile(wheel) as archive:
        docs = {
            name.split("/share/doc/torch_vmm/")[1] for name in archive.namelist() if "/share/doc/torch_vmm/" in name
        }
    assert set(links.values()) <= docs
    for link in re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text()):
        assert link in docs or not link.endswith(".md"), f"README.md links {link}, which the wheel has not"


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name and ".data/" not in name]
    assert {name.split("/")[0] for name in names} == {"torch_vmm"}
    assert {"torch_vmm/py.typed", "torch_vmm/_C.pyi"} <= set(names)
    extension = _build_check.extension_path()
    assert extension is not None
    assert {f"torch_vmm/{extension.name}", f"torch_vmm/{extension.with_suffix('.json').name}"} <= set(names)


def test_the_wheel_works(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    command(*pip, "--no-deps", "--no-index", "--target", site, wheel, cwd=tmp_path)
    program = f"""
import sys; sys.path.insert(0, {str(site)!r})
import torch, torch_vmm, importlib.metadata
assert torch_vmm.__file__.startswith({str(site)!r}), torch_vmm.__file__
assert importlib.metadata.version("torch_vmm") == "{__version__}+torch{MINOR}"
torch_vmm.enable("cpu")
with torch_vmm.VirtualMemoryPool("64MiB", device="cpu") as pool:
    assert torch_vmm.pool_of(torch.ones(1000)) is pool
from torch_vmm.__main__ import main
sys.argv = ["torch-vmm", "--version"]
main()
"""
    told = command(sys.executable, "-c", program, cwd=tmp_path)
    assert told.startswith(f"torch_vmm {__version__}, built for torch {MINOR}.")
    assert (site / "bin" / "torch-vmm").is_file()


def test_make_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^\.PHONY: (\S+)$", makefile, re.MULTILINE)
    assert len(targets) >= 18
    listed = [line.split()[0] for line in command("make", "help", cwd=ROOT).splitlines()]
    assert listed == targets


def test_another_torch_is_refused_by_what_both_kinds_of_handlers_catch() -> None:
    with pytest.raises(torch_vmm.NotAvailableError, match=r"built for torch .* and torch 9.9.0 is running") as raised:
        _build_check.require_fitting(running="9.9.0")
    assert isinstance(raised.value, ImportError)
    assert "pip install" in raised.value.reason
