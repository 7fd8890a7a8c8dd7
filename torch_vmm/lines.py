"""Text that others have chosen, as a line of a terminal shows it. It knows nothing of what the text names."""

from __future__ import annotations


def one_line(text: str) -> str:
    """The text, with what would move the cursor, colour the terminal or not be seen as ``repr()`` writes it."""
    return text if text.isprintable() else "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
