"""The two-stream simulation matches a brute-force simulation in small time steps, and closed
forms."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.core.streams import COMPUTE_BOUND, PHASES, Load, Streams, work

Event = tuple[
    str, int, int
]  # "compute" or "block" with its ticks, "start" with step and ticks, "finish" with step

_TICK_S = 1.0


def programs(rng: random.Random, num: int) -> list[Event]:
    """Draw random events. Early steps are started once and finished once after their start."""
    events: list[Event] = []
    flying: list[int] = []
    for step in range(num):
        for kind in rng.choices(("compute", "block", "start", "finish"), k=3):
            if kind in ("compute", "block"):
                events.append((kind, rng.randint(0, 6), 0))
            elif kind == "finish" and flying:
                events.append((kind, flying.pop(rng.randrange(len(flying))), 0))
        flying.append(step)
        events.append(("start", step, rng.randint(0, 6)))
    return [*events, *(("finish", step, 0) for step in flying)]


def run(events: list[Event], slowdown: float) -> Streams:
    streams = Streams(slowdown)
    for kind, what, ticks in events:
        if kind == "compute":
            streams.compute(what * _TICK_S)
        elif kind == "block":
            streams.block(what * _TICK_S)
        elif kind == "start":
            streams.start(what, ticks * _TICK_S)
        else:
            streams.finish(what)
    return streams


def brute_force(events: list[Event], slowdown: float, per_tick: int = 20) -> tuple[float, float]:
    """Return the time and the hidden time, simulated in steps of 1 / `per_tick` of a tick. s is a
    multiple of 1 / `per_tick`, so nothing is rounded."""
    rate = round(
        (1 - slowdown) * per_tick
    )  # parts of compute that get done in a small step beside communication; per_tick alone
    left: dict[int, int] = {}
    now = hidden = 0
    for kind, what, ticks in events:
        if kind == "block":
            now += what * per_tick
        elif kind == "start":
            left[what] = ticks * per_tick
        elif kind == "finish":
            for step in list(left):
                if what in left:
                    now += left.pop(step)
        else:
            todo = what * per_tick * per_tick
            while todo > 0:
                left = {step: n for step, n in left.items() if n}
                if left and todo < rate:  # the last part of a step: no multiple of a small step
                    return float("nan"), float("nan")
                todo -= rate if left else per_tick
                if left:
                    left[next(iter(left))] -= 1
                    hidden += 1
                now += 1
            if todo < 0:
                return float("nan"), float("nan")
    return now / per_tick, hidden / per_tick


@pytest.mark.parametrize("slowdown", [0.0, 0.5, 0.75, 1.0])
def test_random_programs_take_the_time_of_the_brute_force_simulation(slowdown: float) -> None:
    compared = 0
    for seed in range(300):
        events = programs(random.Random(seed), 1 + seed % 5)
        time_s, hidden_s = brute_force(events, slowdown, per_tick=20)
        if time_s == time_s:
            compared += 1
            streams = run(events, slowdown)
            assert streams.now_s == pytest.approx(time_s)
            assert streams.hidden_s == pytest.approx(hidden_s)
    assert compared >= 100


@given(seed=st.integers(0, 10_000), slowdown=st.floats(0.0, 1.0))
def test_the_time_is_between_the_bound_and_the_sequential_time(seed: int, slowdown: float) -> None:
    events = programs(random.Random(seed), 6)
    compute, block, early = (
        sum(e[2 if kind == "start" else 1] for e in events if e[0] == kind)
        for kind in ("compute", "block", "start")
    )
    streams = run(events, slowdown)
    serial = compute + block + early
    assert max(compute + slowdown * early, early) + block - 1e-9 <= streams.now_s <= serial + 1e-9
    assert streams.now_s == pytest.approx(serial - (1 - slowdown) * streams.hidden_s)
    assert streams.hidden_s + streams.waited_s == pytest.approx(early)
    assert sum(end - start for _, start, end in streams.ran) == pytest.approx(early)
    assert all(
        before <= after + 1e-9
        for (_, _, before), (_, after, _) in zip(streams.ran, streams.ran[1:], strict=False)
    )


PIECES = st.lists(
    st.tuples(
        st.sampled_from(PHASES),
        st.floats(0.0, 9.0),
        st.sampled_from(("compute", "early", "critical")),
    ),
    max_size=9,
)


SHARE = st.floats(0.0, 1.0)


@given(pieces=PIECES, slowdown=SHARE, shares=st.tuples(SHARE, SHARE), outside_s=st.floats(0.0, 9.0))
def test_a_load_takes_the_time_of_its_longer_stream_and_no_balance_gives_a_higher_bound(
    pieces: list[tuple[str, float, str]],
    slowdown: float,
    shares: tuple[float, float],
    outside_s: float,
) -> None:
    load = Load(outside_s)
    for phase, time_s, kind in pieces:
        load += work(phase, time_s, compute=kind == "compute", early=kind == "early")
    total = {
        (phase, kind): sum(t for p, t, k in pieces if (p, k) == (phase, kind))
        for phase in PHASES
        for kind in ("compute", "early")
    }
    expected = outside_s + sum(t for _, t, kind in pieces if kind == "critical")
    for phase in PHASES:
        compute, early = total[phase, "compute"], total[phase, "early"]
        expected += max(compute + slowdown * early, early)
    assert load.least_s(slowdown) == pytest.approx(expected, abs=1e-9)
    assert load.priced_s(slowdown, shares) <= load.least_s(slowdown) + 1e-9
    corners = [(float(a), float(b)) for a in (0, 1) for b in (0, 1)]
    assert max(load.priced_s(slowdown, corner) for corner in corners) == pytest.approx(
        load.least_s(slowdown), abs=1e-9
    )
    assert any(load.outlasts_compute(slowdown)) or load.priced_s(
        slowdown, COMPUTE_BOUND
    ) == pytest.approx(load.least_s(slowdown), abs=1e-9)
    twice = (load + load).scale(0.5)
    assert twice.least_s(slowdown) == pytest.approx(load.least_s(slowdown), abs=1e-9)
    if slowdown == 1.0:
        assert load.least_s(slowdown) == load.priced_s(slowdown, COMPUTE_BOUND) == load.serial_s


@given(seed=st.integers(0, 10_000), slowdown=st.floats(0.0, 1.0))
def test_no_order_of_a_phase_is_faster_than_its_load(seed: int, slowdown: float) -> None:
    events = programs(random.Random(seed), 6)
    load = Load()
    for kind, what, ticks in events:
        if kind != "finish":
            load += work(
                "backward",
                ticks if kind == "start" else what,
                compute=kind == "compute",
                early=kind == "start",
            )
    assert load.least_s(slowdown) - 1e-9 <= run(events, slowdown).now_s <= load.serial_s + 1e-9


def test_without_overlap_times_add_up() -> None:
    streams = run([("start", 0, 5), ("compute", 3, 0), ("block", 2, 0), ("finish", 0, 0)], 1.0)
    assert streams.now_s == 10.0


def test_overlap_slows_compute_as_in_the_profile_and_blocking_steps_go_first() -> None:
    free = run([("start", 0, 4), ("compute", 10, 0), ("finish", 0, 0)], 0.25)
    assert free.now_s == pytest.approx(10 + 0.25 * 4)
    assert free.waited_s == 0.0
    paused = run([("start", 0, 4), ("block", 3, 0), ("compute", 1, 0), ("finish", 0, 0)], 0.0)
    assert paused.now_s == pytest.approx(
        3 + 1 + 3
    )  # 1 of 4 is overlapped with compute, the rest is exposed
    assert paused.done_s[0] == paused.now_s
