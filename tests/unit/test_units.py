"""Seconds, bytes and shares as readable text."""

from __future__ import annotations

import pytest

from autopar.core.units import seconds, share, size


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.2, "1.20 s"),
        (0.0244, "24.4 ms"),
        (0.9999, "1.00 s"),
        (3.2e-6, "3.20 µs"),
        (3.2e-8, "0.03 µs"),
        (4e-9, "0 ms"),
        (-4e-9, "0 ms"),
        (0, "0 ms"),
    ],
)
def test_seconds_have_three_significant_digits(value: float, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(72e9, "67.1 GiB"), (2**20, "1.00 MiB"), (1536, "1.50 KiB"), (4, "4 B"), (0, "0 B")],
)
def test_bytes_are_written_in_powers_of_1024(value: float, text: str) -> None:
    assert size(value) == text


def test_differences_have_a_sign() -> None:
    assert (seconds(1e-3, signed=True), size(-(2**20), signed=True), share(0.1, signed=True)) == (
        "+1.00 ms",
        "-1.00 MiB",
        "+10.0 %",
    )


def test_small_shares_are_not_rounded_to_zero() -> None:
    assert (share(0.00004), share(0.0), share(0.123)) == ("0.004 %", "0.0 %", "12.3 %")
