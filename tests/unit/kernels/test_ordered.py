"""Sums in one fixed order."""

from __future__ import annotations

import math

import pytest
import torch

from autopar.kernels.packing import GROUP, LANES, add_all, ordered_sum


def by_hand(values: list[float], group: int) -> float:
    """Add the values in the order documented in `sums.h`, one by one, in float64."""
    lanes = [0.0] * LANES
    for index, value in enumerate(values):
        lanes[index // group % LANES] += value
    half = LANES // 2
    while half:
        for lane in range(half):
            lanes[lane] += lanes[lane + half]
        half //= 2
    return lanes[0]


@pytest.mark.parametrize("size", (0, 1, 7, 8, 2047, 2048, 2049, 5000))
def test_sum_has_the_documented_order(size: int) -> None:
    x = torch.randn(2, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    assert ordered_sum(x).tolist() == [by_hand(row.tolist(), GROUP) for row in x]
    assert add_all(x).tolist() == [by_hand(row.tolist(), 1) for row in x]
    assert ordered_sum(x)[0].item() == pytest.approx(math.fsum(x[0].tolist()), abs=1e-12)


def test_another_order_gives_a_different_sum() -> None:
    x = torch.randn(5000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert ordered_sum(x) != add_all(x)
