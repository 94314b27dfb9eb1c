"""Benchmarks of autopar. Each module runs as ``python -m benchmarks.NAME`` and writes JSON."""
