"""The adapter's CUDA code on the stand-in: what no GPU lets a test do (tests/standin/README.md)."""
