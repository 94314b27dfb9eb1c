"""From stages' plans to a pipeline's step, and whether its schedule can be run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.constraints import Pipelined
from autopar.errors import ConstraintError
from autopar.mesh import Mesh
from autopar.planning.schedules import scheduled_time
from autopar.plans import Plan, Prediction, forward_load
from autopar.run.orders import num_rounds
from autopar.schedules import INTERLEAVED


def phases_s(stage: Plan) -> tuple[float, float]:
    """Seconds of a microbatch's forward, and of the rest of it: backward, and its share of what is done once per step."""
    forward_s = forward_load(stage).least_s(stage.overlap.slowdown)
    return forward_s, stage.prediction.step_s - forward_s


def simulated_phases_s(stage: Plan) -> tuple[float, float]:
    """The same with communication beside compute."""
    whole_s = stage.prediction.simulated_s
    forward_s = min((bar[3] for bar in stage.prediction.timeline if bar[1] == "backward"), default=whole_s)
    return forward_s, whole_s - forward_s


def step_of(schedule: str, stages: Sequence[Plan], num_microbatches: int, num_chunks: int) -> float:
    """Seconds of a step, from what each stage takes for a microbatch."""
    return _step(schedule, [phases_s(stage) for stage in stages], num_microbatches, num_chunks)


def simulated_step_of(schedule: str, stages: Sequence[Plan], num_microbatches: int, num_chunks: int) -> float:
    """The same with communication beside compute."""
    return _step(schedule, [simulated_phases_s(stage) for stage in stages], num_microbatches, num_chunks)


def _step(schedule: str, phases: Sequence[tuple[float, float]], num_microbatches: int, num_chunks: int) -> float:
    return scheduled_time(schedule, [f for f, _ in phases], [b for _, b in phases], num_microbatches, num_chunks)


def slowest_rank(stages: Sequence[Plan], num_chunks: int) -> tuple[Prediction, ...]:
    """Of the stages of the rank that does most."""
    num_ranks = len(stages) // num_chunks
    ranks = [tuple(stage.prediction for stage in stages[rank::num_ranks]) for rank in range(num_ranks)]
    return max(ranks, key=lambda chunks: sum(p.step_s for p in chunks))


def in_order(wish: Pipelined, mesh: Mesh, num: int, *, waits: bool = False, trained: bool = True) -> Pipelined:
    """The pipeline with the schedule that runs: 1F1B of one microbatch is GPipe of one, and only so does torch run it in several stages.

    Args:
        waits: whether backward waits for a loss that is computed outside of the model, of all microbatches, or does not come: then all
            forwards run first. trained: whether it comes.

    Raises:
        ConstraintError: where the schedule has no order for so many microbatches, or does not wait.
    """
    ranks = mesh.shape[mesh.names.index(wish.axis)] if wish.axis else 1
    if waits:
        return _all_forwards_first(wish, ranks, num, trained)
    if wish.schedule == INTERLEAVED:
        _check_rounds(wish, ranks, num)
    if wish.schedule != "1f1b" or num >= ranks:
        return wish
    if num == 1:
        return replace(wish, schedule="gpipe")
    what = f"{num} microbatches are fewer than the stages along {wish.axis!r}, which 1F1B does not run"
    raise ConstraintError(what, remedy='use more microbatches, or schedule="gpipe", which runs any number')


def _all_forwards_first(wish: Pipelined, ranks: int, num: int, trained: bool) -> Pipelined:
    if wish.schedule == INTERLEAVED and not trained:
        _check_rounds(wish, ranks, num)
        return wish
    if wish.schedule == INTERLEAVED:
        what = f"{wish}: the model returns no loss that is differentiated, so that no backward runs among forwards"
        raise ConstraintError(what, remedy="let forward compute and return the loss, or leave out the schedule")
    if trained and not wish.axis and num > 1:
        what = "the model returns no loss: backward waits for one that is computed outside of it, from the whole batch"
        raise ConstraintError(what, remedy="let forward compute and return the loss, or plan one microbatch, or pipeline stages")
    return replace(wish, schedule="gpipe")


def _check_rounds(wish: Pipelined, ranks: int, num: int) -> None:
    if ranks < 2:
        raise ConstraintError(f"{wish}: one rank has nothing to interleave with", remedy="name an axis of two devices or more")
    if not num_rounds(ranks, num):
        what = f"{num} microbatches are not equal rounds over {ranks} ranks of {wish.axis!r}, which interleaved 1F1B runs"
        raise ConstraintError(what, remedy=f"use a multiple of {ranks} microbatches")
