"""Schedules: their order, what they hold, and their time by formula and by simulation."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.planning.schedules import num_in_flight, order, simulate, step_time

sizes = st.integers(1, 5)


@given(st.sampled_from(["1f1b", "gpipe"]), sizes, st.integers(1, 9))
def test_every_stage_runs_each_microbatch_once_and_holds_what_is_said(schedule: str, num_stages: int, num: int) -> None:
    for stage in range(num_stages):
        held = most = 0
        work = order(schedule, stage, num_stages, num)
        assert sorted(work) == sorted([("forward", m) for m in range(num)] + [("backward", m) for m in range(num)])
        for phase, _ in work:
            held += 1 if phase == "forward" else -1
            most = max(most, held)
        assert most == num_in_flight(schedule, num_stages, num)[stage]


@given(st.sampled_from(["1f1b", "gpipe"]), sizes, sizes, st.integers(1, 9), st.integers(1, 9))
def test_with_equal_stages_the_simulation_takes_what_the_formula_says(
    schedule: str, stages: int, more: int, forward: int, backward: int
) -> None:
    num = stages + more
    bars = simulate(schedule, [forward] * stages, [backward] * stages, num)
    assert max(bar.start_s + bar.duration_s for bar in bars) == step_time([forward + backward] * stages, num)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), sizes)
def test_with_unequal_stages_the_formula_is_close_from_above(times: list[int], more: int) -> None:
    """Forward and backward in one proportion. A slow stage does not wait for what the formula adds for the others."""
    num = len(times) + more
    bars = simulate("1f1b", times, [2 * t for t in times], num)
    ends = max(bar.start_s + bar.duration_s for bar in bars)
    assert num * 3 * max(times) <= ends <= 1.3 * step_time([3 * t for t in times], num)


def test_bars_of_a_stage_do_not_overlap() -> None:
    bars = simulate("1f1b", [1.0, 3.0, 2.0], [2.0, 5.0, 4.0], 6)
    for stage in range(3):
        mine = [bar for bar in bars if bar.stage == stage]
        assert all(a.start_s + a.duration_s <= b.start_s for a, b in itertools.pairwise(mine))


def test_the_bubble_of_one_stage_is_nothing() -> None:
    assert step_time([3.0], 4) == pytest.approx(12.0)
