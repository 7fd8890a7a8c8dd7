"""Real text that is on every machine: the Python standard library's own sources."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

# Tab and everything beyond ASCII become a space.
_ALPHABET = "\n" + "".join(chr(code) for code in range(32, 127))
VOCABULARY = len(_ALPHABET)
_SPACE = _ALPHABET.index(" ")


def load(most_bytes: int = 4_000_000) -> torch.Tensor:
    """The sources as one sequence of character numbers below ``VOCABULARY``.

    Args:
        most_bytes: stop reading files beyond this.
    Returns:
        uint8 host tensor of shape [characters].
    Raises:
        FileNotFoundError: this Python has no sources (it is a frozen build).
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for file in sorted(folder.glob("*.py")):
        text += file.read_bytes()
        if len(text) >= most_bytes:
            break
    if len(text) < 100_000:
        raise FileNotFoundError(f"the demo trains on Python's own sources, and {folder} has none")
    number_of = torch.full((256,), _SPACE, dtype=torch.uint8)
    for number, character in enumerate(_ALPHABET):
        number_of[ord(character)] = number
    return number_of[torch.frombuffer(text, dtype=torch.uint8).int()]


def encode(text: str) -> list[int]:
    """Character numbers of ``text``, which is plain ASCII."""
    return [_ALPHABET.index(character) for character in text]


def decode(numbers: list[int]) -> str:
    """The text of character numbers."""
    return "".join(_ALPHABET[number] for number in numbers)
