"""The plans of one microbatch without stages and without a limit of memory, on each kind of device that stages have; and what their
relaxations prove of all cuts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autopar.cost.price import price
from autopar.cost.priced import Priced
from autopar.planning.asked import Asked, OnKind, Whole
from autopar.planning.clock import Clock
from autopar.planning.over_cuts import Least
from autopar.planning.proving import Pipelines, Proven, parted, proven
from autopar.planning.schedules import least_time
from autopar.planning.tried import TooSlow
from autopar.planning.units import one_stage, units_of
from autopar.request import UNLIMITED
from autopar.schedules import INTERLEAVED
from autopar.solve import evaluated, solve
from autopar.stages import Seams, seams, usable_points
from autopar.strategies import Forced, classes_of

_CLOSER = 4  # times closer than asked for the whole is solved, since its bound is that of all cuts


def unstaged(asked: Asked, forced: Sequence[Forced], clock: Clock, limit_s: float) -> Whole:
    """Of a pipeline that is asked for.

    Args:
        forced: per stage, what is forced on its devices.

    Raises:
        ConstraintError: where the model cannot be cut. TooSlow: where no plan beats `limit_s`.
    """
    with clock.phase("cut"):
        points, placing = usable_points(asked.part, asked.num_stages - 1) if asked.num_stages > 1 else ((), one_stage(asked.part))
        sewn = seams(asked.part, placing)
        each = [parted(forced[asked.kinds.index(kind)], sewn) for kind in range(len(asked.profiles))]
    on = [_alone(asked, kind, alone, sewn, clock) for kind, alone in enumerate(each)]
    least, closer = Least(_least_s(asked, on[0].choices.bound_s), ()), None
    if asked.num_stages > 1:
        with clock.phase("bound"):
            crossings = tuple(map(asked.crossing, range(asked.num_stages)))
            ways = Pipelines(
                asked.part, asked.left.shape, placing, len(points) + 1, asked.kinds, crossings, asked.how.num,
                None if asked.wish.cuts is None else asked.cuts(points),
            )  # fmt: skip
            found = _over_cuts(asked, [alone.priced for alone in on], each[0], sewn, ways)
        on = [replace(alone, multipliers=multipliers) for alone, multipliers in zip(on, found.multipliers, strict=True)]
        least, closer = _handing(found.least, asked.handing_s), lambda factor: _handing(found.closer(factor), asked.handing_s)
    if limit_s <= least.step_s < math.inf:  # infinite where there are fewer parts than stages
        raise TooSlow(least.step_s)
    units = [units_of(placing, len(points) + 1, alone.priced, alone.choices, alone.evaluation) for alone in on]
    on = [replace(alone, units=mine) for alone, mine in zip(on, units, strict=True)]
    return Whole(tuple(on), asked.kinds, points, least, closer)


def _alone(asked: Asked, kind: int, forced: Forced, sewn: Seams, clock: Clock) -> OnKind:
    """The whole on one kind of device; its units are not known yet."""
    with clock.phase("enumerate"):
        classes = classes_of(asked.part, asked.left.shape, forced)
    with clock.phase("price"):
        priced = price(
            asked.part, classes, asked.left, asked.profiles[kind], budget_bytes=UNLIMITED, optimizer=asked.options.optimizer,
            forced=forced, num_microbatches=asked.how.num, exposed=sewn.exposed,
        )  # fmt: skip
    with clock.phase("solve"):
        gap = asked.options.gap / _CLOSER
        choices = solve(priced.problem, gap=gap, time_limit_s=asked.options.solve_s, solver=asked.options.solver)
        return OnKind(priced, choices, evaluated(priced.problem, choices), ())


def _over_cuts(asked: Asked, priced: Sequence[Priced], forced: Forced, sewn: Seams, ways: Pipelines) -> Proven:
    """What is proven over all cuts: of one microbatch through all stages, and from that of the step, where stages are interleaved."""
    time_limit_s = asked.options.solve_s
    if asked.wish.schedule != INTERLEAVED:
        return proven(priced, forced, sewn, ways, time_limit_s)
    one = proven(priced, forced, sewn, replace(ways, num_microbatches=1), time_limit_s)

    def interleaved(least: Least) -> Least:
        return replace(least, step_s=_least_s(asked, least.step_s))

    return Proven(interleaved(one.least), one.multipliers, lambda factor: interleaved(one.closer(factor)))


def _handing(least: Least, seconds: float) -> Least:
    """With what no cut changes."""
    return replace(least, step_s=least.step_s + seconds)


def _least_s(asked: Asked, whole_s: float) -> float:
    """Of a step, where a microbatch takes so much through all stages."""
    return least_time(asked.wish.schedule, whole_s, asked.num_stages, asked.how.num, asked.wish.chunks)
