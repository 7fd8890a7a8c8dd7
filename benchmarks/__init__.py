"""Benchmarks: torch_vmm beside torch's own allocators, the same work in one run.

``python -m benchmarks [NAME...]`` runs them, each (benchmark, allocator) in a
process of its own, and writes ``results/<benchmark>-<device>.json``.
"""
