"""Seconds, bytes and shares as text for people."""

from __future__ import annotations

_LEAST_S = 0.005e-6  # anything below would be written as 0.00 µs


def seconds(value: float, *, signed: bool = False) -> str:
    """Write seconds with three significant digits, in s, ms or µs: ``24.4 ms``."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(value) >= factor * 0.9995:
            return f"{_three(value / factor, signed)} {unit}"
    return f"{_three(value / 1e-6, signed)} µs" if abs(value) >= _LEAST_S else "0 ms"


def size(value: float, *, signed: bool = False) -> str:
    """Write bytes with three significant digits, in GiB, MiB, KiB or bytes: ``2.27 GiB``."""
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(value) >= factor * 0.9995:
            return f"{_three(value / factor, signed)} {unit}"
    return f"{value:{'+' if signed else ''}.0f} B" if value else "0 B"


def share(value: float, *, signed: bool = False) -> str:
    """Write a share in per cent: ``12.3 %``."""
    return (
        f"{value * 100:{'+' if signed else ''}.{1 if abs(value) >= 0.0005 or not value else 3}f} %"
    )


def microbatches(num: int) -> str:
    """Write a number of microbatches: ``4 microbatches``."""
    return "1 microbatch" if num == 1 else f"{num} microbatches"


def _three(value: float, signed: bool) -> str:
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:{'+' if signed else ''}.{digits}f}"
