"""The least step over all cuts equals enumeration, with the arithmetic of the search and of the
certificate."""

from __future__ import annotations

import itertools
import math

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from autopar.certificate.over_cuts import least_over_cuts
from autopar.planner.pipeline.cuts import Pair, Parts, join_pairs, least_step, pareto_front
from autopar.planner.pipeline.step_schedule import step_time

SECONDS = st.integers(0, 8).map(float)
PAIRS = st.lists(
    st.tuples(st.integers(-3, 6).map(float), st.integers(-3, 6).map(float)), min_size=1, max_size=3
)


@st.composite
def parts(draw: st.DrawFn) -> Parts:
    units = draw(st.lists(SECONDS, min_size=2, max_size=6))
    return Parts(tuple(units), tuple(tuple(draw(PAIRS)) for _ in units[1:]))


def enumerated(given: Parts, num_stages: int, num_microbatches: int, allowed: set[int]) -> float:
    """Return the least step over every cut and every pair by enumeration, in seconds."""
    best = math.inf
    for cuts in itertools.combinations(sorted(allowed), num_stages - 1):
        edges = [0, *cuts, len(given.units)]
        for chosen in itertools.product(*(given.borders[c - 1] for c in cuts)):
            behind, before = [0.0, *(b for _, b in chosen)], [*(a for a, _ in chosen), 0.0]
            times = [
                max(0.0, behind[s] + sum(given.units[edges[s] : edges[s + 1]]) + before[s])
                for s in range(num_stages)
            ]
            best = min(best, step_time(times, num_microbatches))
    return best


@examples(300)
@given(parts(), st.integers(1, 4), st.integers(1, 6), st.data())
def test_the_least_step_is_that_of_the_best_cut(
    given: Parts, num_stages: int, num_microbatches: int, data: st.DataObject
) -> None:
    num = len(given.units)
    num_stages = min(num_stages, num)
    kept = (
        data.draw(st.sets(st.integers(1, num - 1), min_size=num_stages - 1))
        if num_stages > 1
        else set(range(1, num))
    )
    expected = enumerated(given, num_stages, num_microbatches, kept)
    found = least_step(given, num_stages, num_microbatches, kept)
    assert found.step_s == pytest.approx(expected)
    assert len(found.cuts) == num_stages - 1 and set(found.cuts) <= kept
    borders = [list(pairs) for pairs in given.borders]
    assert least_over_cuts(
        [given.units] * num_stages, [borders] * (num_stages - 1), num_microbatches, kept
    ) == pytest.approx(expected)


@given(st.lists(st.tuples(st.floats(-1, 1), st.floats(-1, 1)), min_size=1, max_size=60))
def test_a_front_of_few_pairs_is_a_lower_bound_of_all_pairs(pairs: list[Pair]) -> None:
    few = pareto_front(pairs)
    assert 0 < len(few) <= 8
    assert all(any(a <= before and b <= behind for a, b in few) for before, behind in pairs)
    assert len(pairs) > 8 or set(few) <= set(pairs)


@given(PAIRS, PAIRS)
def test_joined_pairs_have_the_sum_of_the_costs(one: list[Pair], other: list[Pair]) -> None:
    both = join_pairs(one, other)
    assert all(any(x <= a + c and y <= b + d for x, y in both) for a, b in one for c, d in other)
    assert (
        set(both) <= {(a + c, b + d) for a, b in one for c, d in other} or len(one) * len(other) > 8
    )


def test_the_best_cut_depends_on_unit_times_transfer_costs_and_microbatches() -> None:
    chain = Parts((4.0, 4.0, 4.0, 10.0), (((0.0, 0.0),),) * 3)
    assert least_step(chain, 2, 8).cuts == (3,) and least_step(chain, 2, 8).step_s == 7 * 12 + 22
    dear = Parts(chain.units, (((0.0, 0.0),), ((0.0, 0.0),), ((9.0, 9.0),)))
    assert least_step(dear, 2, 8).cuts == (2,)
    assert least_step(chain, 2, 1).step_s == 22
