"""What only a GPU has: kernels in flight, streams, the driver's own numbers, torch's CUDA interface."""
