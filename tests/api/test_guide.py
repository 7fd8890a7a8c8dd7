"""docs/guide.md: its code runs and prints what it says, and it leaves nothing public out."""

from __future__ import annotations

import ast
import inspect
import re
import shlex

import pytest

import torch_vmm
from tests.helpers import ROOT, run
from torch_vmm import _C
from torch_vmm import __main__ as command_line

GUIDE = (ROOT / "docs" / "guide.md").read_text()
CHOICE = '"cuda" if torch.cuda.is_available() else "cpu"'


def blocks(text: str) -> list[tuple[str, str]]:
    """Language and content of each fenced block, in order."""
    found: list[tuple[str, str]] = re.findall(r"^```([\w ]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return found


def sections() -> dict[str, str]:
    """Text by title; what stands before the first title is under ``""``."""
    first, *others = re.split(r"^## ", GUIDE, flags=re.MULTILINE)
    return {"": first, **{text.split("\n")[0]: text for text in others}}


SECTIONS = sections()
((_, OPENING),) = blocks(SECTIONS[""])
PROGRAMS = [title for title, text in SECTIONS.items() if title and "```python" in text]
CODE = "".join(code for language, code in blocks(GUIDE) if language.startswith("python"))


def test_there_is_a_program_in_every_section_but_two() -> None:
    assert {title for title in SECTIONS if title} - set(PROGRAMS) == {"Environment variables", "The command line"}
    assert {language for language, _ in blocks(GUIDE)} == {"python", "python gpu", "", "sh"}


@pytest.mark.parametrize("title", PROGRAMS)
def test_the_code_prints_what_it_says(title: str, device: str) -> None:
    found = blocks(SECTIONS[title])
    languages = ("python", "python gpu") if device == "cuda" else ("python",)
    program = OPENING.replace(CHOICE, repr(device)) + "\n".join(code for name, code in found if name in languages)
    assert run(program, timeout=300) == "".join(output for name, output in found if name == "")


def test_all_code_is_python() -> None:
    assert CHOICE in OPENING
    ast.parse(CODE)


# -- Nothing is left out -----------------------------------------------------------------------------------------------


def used_in_code() -> set[str]:
    """Every attribute, name and keyword that the code has."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(OPENING + CODE)):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg is not None:
            names.add(node.arg)
    return names


def public(cls: type) -> set[str]:
    return {name for name in vars(cls) if not name.startswith("_")}


BUFFERS = ["MemoryPool", "PooledBuffer", "NativeMemoryPool"]


@pytest.mark.parametrize("cls", ["VirtualMemoryPool", "SharedMemoryPool", "VirtualMemoryManager", "Timeline", *BUFFERS])
def test_every_method_and_property_is_shown(cls: str) -> None:
    assert public(getattr(torch_vmm, cls)) - used_in_code() == set()


def test_every_function_and_class_is_shown() -> None:
    values = {"Holder", "Refusal", "MemoryStats", "GlobalMemoryStats", "MappingRecord", "PhysicalAllocation"}
    values |= {"VirtualAddressRange", "PoolStats", "NativePoolStats", "PooledBuffer", "__version__"}
    values |= {"Timeline", "TimelineSample"}
    # results, shown by their fields
    errors = {name for name in torch_vmm.__all__ if name.endswith("Error")}
    assert set(torch_vmm.__all__) - values - errors - used_in_code() == set()


@pytest.mark.parametrize(
    "value", ["Holder", "Refusal", "MemoryStats", "GlobalMemoryStats", "PoolStats", "NativePoolStats", "TimelineSample"]
)
def test_every_field_of_a_result_is_named(value: str) -> None:
    fields = set(getattr(torch_vmm, value).__dataclass_fields__)
    assert {name for name in fields if not re.search(rf"\b{name}\b", GUIDE)} == set()


@pytest.mark.parametrize("value", ["MappingRecord", "PhysicalAllocation", "VirtualAddressRange"])
def test_every_value_of_what_a_manager_gives_out_is_named(value: str) -> None:
    names = {name for name in dir(getattr(torch_vmm, value)) if not name.startswith("_")}
    assert len(names) >= 3
    assert {name for name in names if not re.search(rf"\b{name}\b", SECTIONS["Addresses and memory by hand"])} == set()


@pytest.mark.parametrize("value", ["WatchedBlock", "Damage", "Finding", "Report"])
def test_every_field_of_what_debug_mode_tells_is_named(value: str) -> None:
    fields = set(getattr(torch_vmm.debug, value).__dataclass_fields__)
    section = SECTIONS["Finding memory errors"]
    assert {name for name in fields if not re.search(rf"\b{name}\b", section)} == set()


def test_every_function_of_debug_mode_is_shown() -> None:
    functions = {name for name in torch_vmm.debug.__all__ if inspect.isfunction(getattr(torch_vmm.debug, name))}
    assert functions == {"check", "explain", "mode", "report"}
    assert functions - used_in_code() == set()


def test_every_argument_is_named() -> None:
    callables = [getattr(torch_vmm, name) for name in torch_vmm.__all__ if not name.endswith(("Error", "__"))]
    callables = [each for each in callables if not inspect.ismodule(each)]
    callables = [each for each in callables if each.__module__ != "torch_vmm._C"]
    classes = [torch_vmm.VirtualMemoryPool, torch_vmm.SharedMemoryPool, torch_vmm.VirtualMemoryManager]
    for cls in [*classes, *(getattr(torch_vmm, name) for name in BUFFERS)]:
        callables += [getattr(cls, name) for name in public(cls) if callable(getattr(cls, name))]
    optional = {
        name
        for each in callables
        for name, parameter in inspect.signature(each).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    assert {"physical_limit", "exportable", "abbreviated", "force"} <= optional
    assert {name for name in optional if not re.search(rf"\b{name}\b", GUIDE)} == set()


def test_the_errors_are_those_that_there_are() -> None:
    table = {}
    for line in SECTIONS["Errors"].splitlines():
        if line.startswith("| `"):
            names, _, attributes, _ = (cell.strip() for cell in line[1:-1].split("|"))
            for name in re.findall(r"`(\w+)`", names):
                table[name] = set(re.findall(r"`(\w+)`", attributes))
    errors = {name for name in torch_vmm.__all__ if name.endswith("Error")} - {"VmmError"}
    assert set(table) == errors
    for name, attributes in table.items():
        declared = set(inspect.signature(getattr(torch_vmm, name).__init__).parameters) - {"self", "message"}
        assert attributes == declared, name


def test_the_variables_are_those_that_there_are() -> None:
    rows = [line for line in SECTIONS["Environment variables"].splitlines() if line.startswith("| `")]
    assert rows == [f"| `{variable}` | {default} | {does} |" for _, variable, default, _, does in _C.option_table()]


def test_the_commands_are_those_that_there_are() -> None:
    ((_, commands),) = blocks(SECTIONS["The command line"])
    parser = command_line._parser()
    shown: set[str] = set()
    for line in commands.splitlines():
        program, *words = shlex.split(line)
        assert program == "torch-vmm"
        shown |= {word for word in words if word.startswith("-")} | {words[0]}
        if words != ["--version"]:
            parser.parse_args(words)
    assert shown == {"--version", "info", "--json", "demo", "--seconds", "--limit", "--device", "--plain"} | {
        "replay",
        "--out",
        "--rows",
    }
    options = set(re.findall(r"(?<![\w-])--[a-z]+[a-z-]*", help_texts()))
    assert options - {"--help"} <= shown


def help_texts() -> str:
    parser = command_line._parser()
    (commands,) = (action for action in parser._actions if action.dest == "command")
    assert isinstance(commands.choices, dict)
    return parser.format_help() + "".join(each.format_help() for each in commands.choices.values())
