"""What autopar promises, measured: each module runs as ``python -m benchmarks.NAME`` and writes
JSON."""
