"""What the public interface promises, for any device: run on host memory, and on a GPU with ``--device cuda``."""
