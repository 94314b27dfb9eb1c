"""Garbage is collected seldom for a while, and then as before."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from autopar.core.garbage import collected_seldom


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def num_young_collections() -> int:
    """While a hundred thousand objects are made that stay."""
    before = gc.get_stats()[0]["collections"]
    kept = [[i] for i in range(100_000)]
    after = gc.get_stats()[0]["collections"]
    del kept
    return after - before


def test_it_is_collected_seldom_within_and_as_before_after() -> None:
    gc.set_threshold(700, 10, 10)
    assert num_young_collections() > 50
    with collected_seldom():
        assert num_young_collections() <= 1
        with collected_seldom():
            pass
        assert num_young_collections() <= 1
    assert gc.get_threshold() == (700, 10, 10)
    assert num_young_collections() > 50


def test_an_error_brings_it_back_too() -> None:
    gc.set_threshold(700, 10, 10)
    with pytest.raises(ValueError, match="within"), collected_seldom():
        raise ValueError("within")
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("asked", [(10**6, 50, 5), (0, 10, 10)])
def test_what_is_seldomer_still_stays(asked: tuple[int, int, int]) -> None:
    gc.set_threshold(*asked)
    with collected_seldom():
        assert gc.get_threshold() == asked
