"""Worked examples: each runs as it stands, ``python -m examples.<name>``, on a GPU or, in small, on host memory."""
