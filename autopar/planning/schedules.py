"""When each piece of a pipeline's work runs, and how long a step takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.run.orders import Action, orders
from autopar.schedules import GPIPE, INTERLEAVED


@dataclass(frozen=True, slots=True)
class Bar:
    """A stage's work on one microbatch."""

    stage: int
    phase: str
    microbatch: int
    start_s: float
    duration_s: float

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


def step_time(stage_s: Sequence[float], num_microbatches: int) -> float:
    """(M − 1) · max τ + Σ τ for times τ of one microbatch, forward and backward, per stage; each on a rank of its own."""
    return (num_microbatches - 1) * max(stage_s) + sum(stage_s)


def scheduled_time(
    schedule: str, forward_s: Sequence[float], backward_s: Sequence[float], num_microbatches: int, num_chunks: int = 1
) -> float:
    """Seconds of a step under a schedule; per stage those of one microbatch.

    With one stage a rank `step_time`'s formula; under GPipe, which turns round once, that of forward and that of backward; interleaved the
    end of the simulated schedule. That is, with v equal chunks of time τ/v each and M a multiple of the P ranks, M · τ + (P − 1) · τ / v
    (Narayanan et al., 2021, section 2.2).
    """
    if schedule == GPIPE and num_microbatches > 1:
        return step_time(forward_s, num_microbatches) + step_time(backward_s, num_microbatches)
    if schedule != INTERLEAVED:
        return step_time([f + b for f, b in zip(forward_s, backward_s, strict=True)], num_microbatches)
    return max(bar.end_s for bar in simulate(schedule, forward_s, backward_s, num_microbatches, num_chunks))


def least_time(schedule: str, least_s: float, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> float:
    """What a step takes at least, however the model is cut, where a microbatch takes at least `least_s` through all stages.

    With one stage a rank the slowest takes at least an S-th of it. Interleaved, the rank that does most takes at least a P-th for each
    microbatch; how long it waits for the first, and the others for it at the end, can be next to nothing for some cuts.
    """
    if schedule != INTERLEAVED:
        return least_s + (num_microbatches - 1) * least_s / num_stages
    return least_s * max(1.0, num_microbatches / (num_stages // num_chunks))


def simulate(
    schedule: str, forward_s: Sequence[float], backward_s: Sequence[float], num_microbatches: int, num_chunks: int = 1
) -> tuple[Bar, ...]:
    """When each piece of work runs, if each begins as soon as its rank is free and what it reads is there."""
    num_stages = len(forward_s)
    waiting = [list(reversed(order)) for order in orders(schedule, num_stages, num_microbatches, num_chunks)]
    done: dict[Action, float] = {}
    free = [0.0] * len(waiting)
    bars: list[Bar] = []
    while any(waiting):
        for rank, left in enumerate(waiting):
            while left:
                work = left[-1]
                before = Action(work.kind, work.stage + (-1 if work.kind == "forward" else 1), work.microbatch)
                at_end = before.stage in (-1, num_stages)
                if not at_end and before not in done:
                    break
                start = max(free[rank], 0.0 if at_end else done[before])
                duration = (forward_s if work.kind == "forward" else backward_s)[work.stage]
                free[rank] = done[work] = start + duration
                bars.append(Bar(work.stage, work.kind, work.microbatch, start, duration))
                left.pop()
    return tuple(sorted(bars, key=lambda bar: (bar.start_s, bar.stage)))
