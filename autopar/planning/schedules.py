"""Pipeline schedules: the order of work of every stage, how many microbatches it holds, and when each piece of work runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Work = tuple[str, int]  # "forward" or "backward", microbatch


@dataclass(frozen=True, slots=True)
class Bar:
    """A stage's work on one microbatch."""

    stage: int
    phase: str
    microbatch: int
    start_s: float
    duration_s: float


def num_in_flight(schedule: str, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """Per stage, of how many microbatches it holds kept values at most.

    GPipe runs all forwards first; 1F1B at stage s as many as there are stages from s to the last.
    """
    if schedule == "gpipe":
        return (num_microbatches,) * num_stages
    return tuple(min(num_microbatches, num_stages - stage) for stage in range(num_stages))


def order(schedule: str, stage: int, num_stages: int, num_microbatches: int) -> tuple[Work, ...]:
    """What a stage does, in order."""
    ahead = num_in_flight(schedule, num_stages, num_microbatches)[stage]
    work: list[Work] = [("forward", m) for m in range(ahead)]
    for m in range(num_microbatches):
        work.append(("backward", m))
        if ahead + m < num_microbatches:
            work.append(("forward", ahead + m))
    return tuple(work)


def step_time(stage_s: Sequence[float], num_microbatches: int) -> float:
    """(M − 1) · max τ + Σ τ for times τ of one microbatch, forward and backward, per stage."""
    return (num_microbatches - 1) * max(stage_s) + sum(stage_s)


def simulate(schedule: str, forward_s: Sequence[float], backward_s: Sequence[float], num_microbatches: int) -> tuple[Bar, ...]:
    """When each piece of work runs, if each begins as soon as its stage is free and what it reads is there."""
    num_stages = len(forward_s)
    waiting = [list(order(schedule, s, num_stages, num_microbatches)) for s in range(num_stages)]
    done: dict[tuple[str, int, int], float] = {}
    free = [0.0] * num_stages
    bars: list[Bar] = []
    while any(waiting):
        for stage in range(num_stages):
            while waiting[stage]:
                phase, m = waiting[stage][0]
                before = ("forward", stage - 1, m) if phase == "forward" else ("backward", stage + 1, m)
                at_end = before[1] in (-1, num_stages)
                if not at_end and before not in done:
                    break
                start = max(free[stage], 0.0 if at_end else done[before])
                duration = (forward_s if phase == "forward" else backward_s)[stage]
                free[stage] = done[phase, stage, m] = start + duration
                bars.append(Bar(stage, phase, m, start, duration))
                waiting[stage].pop(0)
    return tuple(sorted(bars, key=lambda bar: (bar.start_s, bar.stage)))
