"""CUDA without a GPU: a stand-in for the driver and the runtime, over host memory. README.md says what it is."""
