"""Simulates pipeline schedules, and computes the time of a step from the times of stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.constraints import Pipelined
from autopar.core.mesh import Mesh
from autopar.core.schedules import GPIPE, INTERLEAVED
from autopar.errors import ConstraintError
from autopar.plans import Plan, Prediction, forward_load
from autopar.program.schedule import Action, num_rounds, orders


@dataclass(frozen=True, slots=True)
class Bar:
    """The work of a stage on one microbatch."""

    stage: int
    phase: str
    microbatch: int
    start_s: float
    duration_s: float

    @property
    def end_s(self) -> float:
        """Seconds from the begin of the step to the end of the work."""
        return self.start_s + self.duration_s


def step_time(stage_s: Sequence[float], num_microbatches: int) -> float:
    """Compute (M − 1) · max τ + Σ τ for the times τ of one microbatch, forward and backward, per
    stage. Each stage is on a separate rank."""
    return (num_microbatches - 1) * max(stage_s) + sum(stage_s)


def scheduled_time(
    schedule: str,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    num_microbatches: int,
    num_chunks: int = 1,
) -> float:
    """Compute the seconds of a step under a schedule.

    With one stage per rank, it is the formula of `step_time`; under GPipe, the sum of the formula
    for forward and the formula for backward. If stages are interleaved, it is the end of the
    simulated schedule: M · τ + (P − 1) · τ / v for v equal chunks of time τ / v each and M a
    multiple of the P ranks (Narayanan et al., 2021, section 2.2).

    Args:
        schedule: the name of the schedule.
        forward_s, backward_s: seconds of one microbatch, per stage.
        num_microbatches: M.
        num_chunks: stages per rank.
    """
    if schedule == GPIPE and num_microbatches > 1:
        return step_time(forward_s, num_microbatches) + step_time(backward_s, num_microbatches)
    if schedule != INTERLEAVED:
        return step_time(
            [f + b for f, b in zip(forward_s, backward_s, strict=True)], num_microbatches
        )
    return max(
        bar.end_s for bar in simulate(schedule, forward_s, backward_s, num_microbatches, num_chunks)
    )


def least_time(
    schedule: str, least_s: float, num_stages: int, num_microbatches: int, num_chunks: int = 1
) -> float:
    """Return a lower bound of the step for all cuts, in seconds.

    With one stage per rank, the slowest stage takes at least 1 / S of `least_s`. If stages are
    interleaved, the rank with the most work takes at least 1 / P of it for each microbatch. Its
    wait for the first microbatch, and the wait of the other ranks at the end, can be close to zero
    for some cuts.

    Args:
        schedule: the name of the schedule.
        least_s: lower bound of one microbatch through all stages, in seconds.
        num_stages: S.
        num_microbatches: the number of microbatches per step.
        num_chunks: stages per rank.
    """
    if schedule != INTERLEAVED:
        return least_s + (num_microbatches - 1) * least_s / num_stages
    return least_s * max(1.0, num_microbatches / (num_stages // num_chunks))


def simulate(
    schedule: str,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    num_microbatches: int,
    num_chunks: int = 1,
) -> tuple[Bar, ...]:
    """Simulate a schedule in which each piece of work begins as soon as its rank is free and its
    operand is ready.

    Args:
        schedule: the name of the schedule.
        forward_s, backward_s: seconds of one microbatch, per stage.
        num_microbatches: the number of microbatches per step.
        num_chunks: stages per rank.

    Returns:
        The bars, sorted by time and stage.
    """
    num_stages = len(forward_s)
    waiting = [
        list(reversed(order))
        for order in orders(schedule, num_stages, num_microbatches, num_chunks)
    ]
    end_times: dict[Action, float] = {}
    free = [0.0] * len(waiting)
    bars: list[Bar] = []
    while any(waiting):
        for rank, rank_work in enumerate(waiting):
            while rank_work:
                work = rank_work[-1]
                before = Action(
                    work.kind, work.stage + (-1 if work.kind == "forward" else 1), work.microbatch
                )
                at_end = before.stage in (-1, num_stages)
                if not at_end and before not in end_times:
                    break
                start = max(free[rank], 0.0 if at_end else end_times[before])
                duration = (forward_s if work.kind == "forward" else backward_s)[work.stage]
                free[rank] = end_times[work] = start + duration
                bars.append(Bar(work.stage, work.kind, work.microbatch, start, duration))
                rank_work.pop()
    return tuple(sorted(bars, key=lambda bar: (bar.start_s, bar.stage)))


# --------------------------------------------------------------------------------------------------
# The step of a pipeline from the plans of its stages, and the check that its schedule can run.


def phases_s(stage: Plan) -> tuple[float, float]:
    """Compute the seconds of a microbatch's forward, and of the rest: backward and its share of the
    work that runs once per step."""
    forward_s = forward_load(stage).least_s(stage.overlap.slowdown)
    return forward_s, stage.prediction.step_s - forward_s


def simulated_phases_s(stage: Plan) -> tuple[float, float]:
    """Compute the seconds of `phases_s` with overlap of communication and compute."""
    whole_s = stage.prediction.simulated_s
    forward_s = min(
        (bar[3] for bar in stage.prediction.timeline if bar[1] == "backward"), default=whole_s
    )
    return forward_s, whole_s - forward_s


def step_of(schedule: str, stages: Sequence[Plan], num_microbatches: int, num_chunks: int) -> float:
    """Compute the seconds of a step from the plans of its stages.

    Args:
        schedule: the name of the schedule.
        stages: plans, one per stage.
        num_microbatches: the number of microbatches per step.
        num_chunks: stages per rank.
    """
    return _step(schedule, [phases_s(stage) for stage in stages], num_microbatches, num_chunks)


def simulated_step_of(
    schedule: str, stages: Sequence[Plan], num_microbatches: int, num_chunks: int
) -> float:
    """Compute the seconds of a step with overlap of communication and compute.

    Args:
        schedule, stages, num_microbatches, num_chunks: as in `step_of`.
    """
    return _step(
        schedule, [simulated_phases_s(stage) for stage in stages], num_microbatches, num_chunks
    )


def _step(
    schedule: str, phases: Sequence[tuple[float, float]], num_microbatches: int, num_chunks: int
) -> float:
    return scheduled_time(
        schedule, [f for f, _ in phases], [b for _, b in phases], num_microbatches, num_chunks
    )


def slowest_rank(stages: Sequence[Plan], num_chunks: int) -> tuple[Prediction, ...]:
    """Return the predictions of the stages on the slowest rank."""
    num_ranks = len(stages) // num_chunks
    ranks = [
        tuple(stage.prediction for stage in stages[rank::num_ranks]) for rank in range(num_ranks)
    ]
    return max(ranks, key=lambda chunks: sum(p.step_s for p in chunks))


def in_order(
    pipelined: Pipelined, mesh: Mesh, num: int, *, waits: bool = False, trained: bool = True
) -> Pipelined:
    """Choose the schedule to run. 1F1B of one microbatch runs as GPipe, since torch does not run
    it in several stages otherwise.

    Args:
        pipelined: the requested pipeline.
        mesh: the mesh with its axis.
        num: microbatches per step.
        waits: whether all forwards run first, since the loss is computed outside the model from all
            microbatches, or backward does not run.
        trained: whether backward runs.

    Raises:
        ConstraintError: if the schedule does not support the number of microbatches, or cannot run
            all forwards first.
    """
    ranks = mesh.shape[mesh.names.index(pipelined.axis)] if pipelined.axis else 1
    if waits:
        return _all_forwards_first(pipelined, ranks, num, trained)
    if pipelined.schedule == INTERLEAVED:
        _check_rounds(pipelined, ranks, num)
    if pipelined.schedule != "1f1b" or num >= ranks:
        return pipelined
    if num == 1:
        return replace(pipelined, schedule="gpipe")
    message = (
        f"{num} microbatches are fewer than the stages along {pipelined.axis!r}, which 1F1B does"
        " not support"
    )
    raise ConstraintError(
        message, remedy='use more microbatches, or schedule="gpipe", which supports any number'
    )


def _all_forwards_first(pipelined: Pipelined, ranks: int, num: int, trained: bool) -> Pipelined:
    if pipelined.schedule == INTERLEAVED and not trained:
        _check_rounds(pipelined, ranks, num)
        return pipelined
    if pipelined.schedule == INTERLEAVED:
        message = (
            f"{pipelined}: the model returns no differentiable loss, so no backward can run between"
            " forwards"
        )
        raise ConstraintError(
            message, remedy="let forward compute and return the loss, or remove the schedule"
        )
    if trained and not pipelined.axis and num > 1:
        message = (
            "the model returns no loss: backward waits for a loss that is computed outside the"
            " model, from the whole batch"
        )
        raise ConstraintError(
            message,
            remedy=(
                "let forward compute and return the loss, or use one microbatch, or use pipeline"
                " stages"
            ),
        )
    return replace(pipelined, schedule="gpipe")


def _check_rounds(pipelined: Pipelined, ranks: int, num: int) -> None:
    if ranks < 2:
        raise ConstraintError(
            f"{pipelined}: one rank cannot interleave stages",
            remedy="use an axis of two or more devices",
        )
    if not num_rounds(ranks, num):
        message = (
            f"{num} microbatches is not a multiple of the {ranks} ranks along {pipelined.axis!r},"
            " which interleaved 1F1B requires"
        )
        raise ConstraintError(message, remedy=f"use a multiple of {ranks} microbatches")
