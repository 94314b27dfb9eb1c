"""Schedules: their order, the microbatches in flight, and their time by formula and by
simulation."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autopar.certificate.rank_schedules import (
    held_by_chunks,
    least_of_ranks,
    order_of,
    step_by_longest_path,
)
from autopar.planner.pipeline.step_schedule import least_time, scheduled_time, simulate, step_time
from autopar.program.schedule import interleaved_schedule, num_in_flight, num_rounds, orders

sizes = st.integers(1, 5)
INTERLEAVED = "interleaved_1f1b"
SHAPES = [
    (p, v, m) for p in (2, 3, 4) for v in (2, 3) for m in range(p, 4 * p + 1) if num_rounds(p, m)
]  # ranks, chunks, microbatches


@given(st.sampled_from(["1f1b", "gpipe"]), sizes, st.integers(1, 9))
def test_every_stage_runs_each_microbatch_once_with_the_predicted_number_in_flight(
    schedule: str, num_stages: int, num: int
) -> None:
    for stage, work in enumerate(orders(schedule, num_stages, num)):
        held = most = 0
        assert sorted(work) == sorted(
            (phase, stage, m) for phase in ("forward", "backward") for m in range(num)
        )
        for phase, _, _ in work:
            held += 1 if phase == "forward" else -1
            most = max(most, held)
        assert (
            most
            == num_in_flight(schedule, num_stages, num)[stage]
            == (num if schedule == "gpipe" else min(num, num_stages - stage))
        )


@pytest.mark.parametrize(("ranks", "chunks", "num"), SHAPES)
def test_the_interleaved_schedule_of_torch_has_the_order_and_in_flight_counts_of_the_formulas(
    ranks: int, chunks: int, num: int
) -> None:
    letters = {"F": "forward", "B": "backward"}
    for rank, work in enumerate(orders(INTERLEAVED, ranks * chunks, num, chunks)):
        assert [
            (letters[phase], stage, m) for phase, stage, m in order_of(rank, ranks, chunks, num)
        ] == list(work)
        held: Counter[int] = Counter()
        most: Counter[int] = Counter()
        for phase, stage, _ in work:
            assert stage % ranks == rank
            held[stage] += 1 if phase == "forward" else -1
            most[stage] = max(most[stage], held[stage])
        assert not any(held.values())
        assert {stage: held_by_chunks(stage, ranks, chunks, num) for stage in most} == most
        assert all(
            num_in_flight(INTERLEAVED, ranks * chunks, num, chunks)[stage] == count
            for stage, count in most.items()
        )


@pytest.mark.parametrize(("ranks", "chunks", "num"), SHAPES)
def test_transfers_between_two_ranks_start_in_the_same_order_and_do_not_deadlock(
    ranks: int, chunks: int, num: int
) -> None:
    """Assume the strictest semantics: a send waits until its receive has started. All ranks
    finish."""
    left = [list(actions) for actions in interleaved_schedule(ranks, chunks, num)]
    started: set[tuple[str, int, int]] = set()
    while any(left):
        before = sum(map(len, left))
        for actions in left:
            while actions:
                kind, stage, m = actions[0]
                what, _, phase = kind.rpartition(" ")
                step = 1 if phase == "forward" else -1
                if what == "send" and (phase, stage + step, m) not in started:
                    break
                if what == "receive":
                    started.add((phase, stage, m))
                actions.pop(0)
        assert sum(map(len, left)) < before
    for here, there in itertools.permutations(range(ranks), 2):
        sent, received = [], []
        for kind, stage, m in interleaved_schedule(ranks, chunks, num)[here]:
            what, _, phase = kind.rpartition(" ")
            to = stage + (1 if phase == "forward" else -1)
            sent += [(phase, to, m)] if what == "send" and to % ranks == there else []
        for kind, stage, m in interleaved_schedule(ranks, chunks, num)[there]:
            what, _, phase = kind.rpartition(" ")
            received += (
                [(phase, stage, m)]
                if what == "receive" and (stage - (1 if phase == "forward" else -1)) % ranks == here
                else []
            )
        assert sent == received


@given(st.sampled_from(["1f1b", "gpipe"]), sizes, sizes, st.integers(1, 9), st.integers(1, 9))
def test_with_equal_stages_the_simulated_time_equals_the_formula(
    schedule: str, stages: int, more: int, forward: int, backward: int
) -> None:
    num = stages + more
    bars = simulate(schedule, [forward] * stages, [backward] * stages, num)
    assert max(bar.end_s for bar in bars) == step_time([forward + backward] * stages, num)


@pytest.mark.parametrize(("ranks", "chunks", "num"), SHAPES)
def test_with_equal_chunks_interleaving_divides_the_bubble_by_the_number_of_chunks(
    ranks: int, chunks: int, num: int
) -> None:
    stages = ranks * chunks
    assert (
        scheduled_time(INTERLEAVED, [2] * stages, [3] * stages, num, chunks)
        == num * chunks * 5 + (ranks - 1) * 5
    )
    assert step_time([chunks * 5] * ranks, num) == num * chunks * 5 + (ranks - 1) * chunks * 5


@given(st.sampled_from(SHAPES), st.data())
def test_with_unequal_chunks_the_certificate_agrees_and_the_time_is_above_every_bound(
    shape: tuple[int, int, int], data: st.DataObject
) -> None:
    ranks, chunks, num = shape
    times = st.lists(st.integers(0, 9), min_size=ranks * chunks, max_size=ranks * chunks)
    forward, backward = data.draw(times), data.draw(times)
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    end = scheduled_time(INTERLEAVED, forward, backward, num, chunks)
    assert end == step_by_longest_path(list(zip(forward, backward, strict=True)), ranks, num)
    assert end >= least_of_ranks(both, ranks, num)
    assert end >= least_time(INTERLEAVED, sum(both), ranks * chunks, num, chunks) - 1e-9
    alone = scheduled_time(INTERLEAVED, [1.1 * f for f in forward], backward, num, chunks)
    assert alone >= end - 1e-9


@given(st.data(), st.integers(1, 5), st.integers(1, 9))
def test_the_gpipe_formula_equals_its_simulation_for_unequal_stages(
    data: st.DataObject, stages: int, num: int
) -> None:
    times = st.lists(st.integers(0, 9), min_size=stages, max_size=stages)
    forward, backward = data.draw(times), data.draw(times)
    ends = max(bar.end_s for bar in simulate("gpipe", forward, backward, num))
    step = scheduled_time("gpipe", forward, backward, num)
    assert step == ends
    assert step >= step_time([f + b for f, b in zip(forward, backward, strict=True)], num)


@given(
    st.sampled_from(["1f1b", "gpipe"]),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.integers(1, 9),
)
def test_with_one_stage_per_rank_the_formula_is_at_least_the_lower_bound(
    schedule: str, times: list[int], num: int
) -> None:
    step = scheduled_time(schedule, times, [2 * t for t in times], num)
    assert step == step_time([3 * t for t in times], num)
    assert step >= least_time(schedule, 3 * sum(times), len(times), num) - 1e-9


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), sizes)
def test_with_unequal_stages_the_formula_is_a_close_upper_bound(
    times: list[int], more: int
) -> None:
    """Forward and backward have a constant ratio. A slow stage does not wait for the time that
    the formula adds for the other stages."""
    num = len(times) + more
    bars = simulate("1f1b", times, [2 * t for t in times], num)
    ends = max(bar.end_s for bar in bars)
    assert num * 3 * max(times) <= ends <= 1.3 * step_time([3 * t for t in times], num)


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), (INTERLEAVED, 3)])
def test_bars_of_a_rank_do_not_overlap(schedule: str, chunks: int) -> None:
    times = [1.0, 3.0, 2.0] * chunks
    bars = simulate(schedule, times, [t + 1 for t in times], 6, chunks)
    for rank in range(3):
        mine = [bar for bar in bars if bar.stage % 3 == rank]
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(mine))


def test_one_stage_has_no_bubble() -> None:
    assert step_time([3.0], 4) == pytest.approx(12.0)


@given(st.integers(2, 6), st.integers(1, 30))
def test_torch_accepts_numbers_of_microbatches_that_give_equal_rounds(ranks: int, num: int) -> None:
    assume(num >= ranks)
    if num_rounds(ranks, num):
        assert interleaved_schedule(ranks, 2, num)
    else:
        with pytest.raises(ValueError, match="multiple of the number of rounds"):
            interleaved_schedule(ranks, 2, num)
