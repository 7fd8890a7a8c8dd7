"""Text that others have chosen, as lines of a terminal show it: in columns, of which a wide character takes two.

It knows nothing of what the text names.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator


def one_line(text: str) -> str:
    """The text, with what would move the cursor, colour the terminal or not be seen as ``repr()`` writes it."""
    return text if text.isprintable() else "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def columns(text: str) -> int:
    """That a terminal shows it in."""
    return sum(map(_width, text))


def _width(each: str) -> int:
    return 0 if unicodedata.combining(each) else 1 + (unicodedata.east_asian_width(each) in "WF")


def cut(text: str, most: int) -> str:
    """The text, or its beginning and an ellipsis, in no more columns."""
    if columns(text) <= most:
        return text
    dots = "..."[: max(most, 0)]
    return _beginning(text, most - len(dots)) + dots


def without_middle(text: str, most: int) -> str:
    """The text, or its beginning, an ellipsis and its end, in no more columns."""
    if columns(text) <= most:
        return text
    tail = (most - 3) // 2
    end = _beginning(text[::-1], tail)[::-1]
    return f"{_beginning(text, most - 3 - tail)}...{end}"


def _beginning(text: str, most: int) -> str:
    taken = 0
    for at, each in enumerate(text):
        taken += _width(each)
        if taken > most:
            return text[:at]
    return text


def _pieces(text: str, most: int) -> Iterator[str]:
    while text:
        piece = _beginning(text, most) or text[0]
        yield piece
        text = text[len(piece) :]


def padded(text: str, width: int, *, at_the_left: bool = False) -> str:
    """In so many columns at least, by spaces behind it or at its left."""
    spaces = " " * (width - columns(text))
    return spaces + text if at_the_left else text + spaces


def centred(text: str, width: int) -> str:
    """In the middle of so many columns."""
    return padded(" " * ((width - columns(text)) // 2) + text, width)


def wrapped(text: str, width: int, indent: int = 0, *, breaks_words: bool = False) -> list[str]:
    """Lines of so many columns at most; all but the first are indented. A word that alone is longer stays whole, or is
    broken.
    """
    lines: list[str] = []
    line = gap = ""
    chunks = re.split(r"( +)", text)
    if breaks_words:
        chunks = [piece for chunk in chunks for piece in _pieces(chunk, width - indent)]
    for chunk in chunks:
        if not chunk.strip(" "):
            gap += chunk
            continue
        if line and columns(line + gap + chunk) > width:
            lines.append(line)
            line, gap = " " * indent, ""
        line += gap + chunk
        gap = ""
    return [*lines, line] if line else lines
