"""A context collects garbage rarely, and restores the thresholds afterwards."""

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
    """Return the number of young collections while 100,000 objects are created and kept."""
    before = gc.get_stats()[0]["collections"]
    kept = [[i] for i in range(100_000)]
    after = gc.get_stats()[0]["collections"]
    del kept
    return after - before


def test_garbage_is_collected_rarely_within_the_context_and_as_before_afterwards() -> None:
    gc.set_threshold(700, 10, 10)
    assert num_young_collections() > 50
    with collected_seldom():
        assert num_young_collections() <= 1
        with collected_seldom():
            pass
        assert num_young_collections() <= 1
    assert gc.get_threshold() == (700, 10, 10)
    assert num_young_collections() > 50


def test_an_error_restores_the_collection() -> None:
    gc.set_threshold(700, 10, 10)
    with pytest.raises(ValueError, match="within"), collected_seldom():
        raise ValueError("within")
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("asked", [(10**6, 50, 5), (0, 10, 10)])
def test_a_higher_threshold_is_kept(asked: tuple[int, int, int]) -> None:
    gc.set_threshold(*asked)
    with collected_seldom():
        assert gc.get_threshold() == asked
