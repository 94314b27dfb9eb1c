"""The minimum memory of pipelines over all cuts: lower bounds of each possible stage, the cuts that
minimize the largest need of a stage, and the choice of cuts."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.capture.trace import Trace
from autopar.cost.price import price
from autopar.errors import ConstraintError
from autopar.planner.min_memory import Need, proven_bytes
from autopar.planner.pipeline.pipeline_request import PipelineRequest
from autopar.planner.pipeline.stage_units import Unit, balance_cuts, fastest
from autopar.request import UNLIMITED
from autopar.sharding import Forced, classes_of
from autopar.stages import NO_PIPELINE, CutPoint, cut_trace, find_refusal

_MOST = 40  # stages to bound; beyond this number, the parameters at rest bound all cuts


def light_cuts(
    units: Sequence[Sequence[Unit]], in_flight: Sequence[int], budgets: Sequence[int]
) -> tuple[int, ...]:
    """Find cuts whose neediest stage needs a small share of its budget, as indices of units.

    Args:
        units, in_flight, budgets: as in `autopar.planner.pipeline.stage_units.balance_cuts`.
    """
    shares = [max(budgets) / budget for budget in budgets]
    sizes = [
        [replace(u, time_s=(u.static_bytes + max(in_flight) * u.kept_bytes) * share) for u in each]
        for each, share in zip(units, shares, strict=True)
    ]
    return balance_cuts(sizes, in_flight, [UNLIMITED] * len(budgets))


@dataclass
class StageSizes:
    """Bounds the memory of the stages of one pipeline.

    Args:
        request: the request.
        forced: per stage, the resolved constraints on its devices.
        points: the cut points.
    """

    request: PipelineRequest
    forced: Sequence[Forced]
    points: Sequence[CutPoint]
    _known: dict[tuple[int, int, int, int], int] = field(default_factory=dict)

    def prove_need(self, cuts: Sequence[int] | None) -> tuple[Need, tuple[int, ...] | None]:
        """Prove a lower bound of the need of any pipeline on its neediest device.

        Args:
            cuts: the requested cuts, as indices of units; None for all cuts.

        Returns:
            The bound, and the cuts that attain it; None if cuts were not compared.
        """
        num, num_stages = len(self.points) + 1, self.request.num_stages
        if cuts is not None or num_stages == 1:
            edges = [0, *(cuts or ()), num]
            return self._neediest(
                self._stage(*edge, stage) for stage, edge in enumerate(itertools.pairwise(edges))
            ), tuple(cuts or ())
        spare = num - num_stages  # units beyond one per stage
        if 2 * (spare + 1) + (num_stages - 2) * (spare + 1) * (spare + 2) // 2 > _MOST:
            return self._need_at_rest(), None
        least: dict[int, tuple[float, tuple[int, ...], Need | None]] = {0: (0.0, (), None)}
        for stage in range(num_stages):
            ends = (
                [num]
                if stage == num_stages - 1
                else range(stage + 1, num - (num_stages - stage - 1) + 1)
            )
            least = {
                end: min(
                    (self._with(i, end, stage, before) for i, before in least.items() if i < end),
                    key=_order,
                )
                for end in ends
            }
        _, stage_ends, need = least[num]
        assert need is not None, "there is a stage"
        return need, stage_ends[:-1]

    def _with(
        self, first: int, end: int, number: int, before: tuple[float, tuple[int, ...], Need | None]
    ) -> tuple[float, tuple[int, ...], Need]:
        """Append a stage to the preceding stages."""
        share, stage_ends, need = before
        here = self._stage(first, end, number)
        if need is None or here.share > share:
            return here.share, (*stage_ends, end), here
        return share, (*stage_ends, end), need

    def _neediest(self, needs: Iterable[Need]) -> Need:
        return max(needs, key=lambda need: need.share)

    def _stage(self, first: int, end: int, number: int) -> Need:
        """Prove a lower bound of the need of a stage of these units, for all layouts of crossing
        values."""
        request, budgets = self.request, self.request.budgets
        flying, profile, forced = (
            request.in_flight[number],
            request.profile_of(number),
            self.forced[number],
        )
        key = first, end, flying, number % len(budgets) if len(request.profiles) > 1 else 0
        if key not in self._known:
            positions = [
                self.points[border - 1].position
                for border in (first, end)
                if 0 < border <= len(self.points)
            ]
            stage = (
                cut_trace(request.part, positions).stages[1 if first else 0]
                if positions
                else request.part
            )
            classes = classes_of(stage, request.stage_mesh.shape, forced)
            priced = price(
                stage,
                classes,
                request.stage_mesh,
                profile,
                budget_bytes=UNLIMITED,
                optimizer=request.options.optimizer,
                forced=forced,
                crossing=request.crossing_of(number),
                num_microbatches=request.microbatching.num,
                num_in_flight=flying,
            )
            self._known[key] = proven_bytes(stage, priced, request.options.solve_s)
        unequal = len(set(budgets)) > 1
        text = f"stage {number} of {request.num_stages} ({profile.name})" if unequal else ""
        return Need(self._known[key], budgets[number % len(budgets)], text)

    def _need_at_rest(self) -> Need:
        """Return a lower bound of the need of a rank from its share of the parameters, since all
        ranks together must hold them."""
        request, forced, budgets = self.request, self.forced[0], self.request.budgets
        classes = classes_of(request.part, request.stage_mesh.shape, forced)
        priced = price(
            request.part,
            classes,
            request.stage_mesh,
            request.profile_of(0),
            budget_bytes=UNLIMITED,
            optimizer=request.options.optimizer,
            forced=forced,
            num_microbatches=request.microbatching.num,
        )
        parameters = [
            op
            for op, source in zip(priced.problem.ops, priced.sources, strict=True)
            if source.kind == "parameter"
        ]
        total = sum(op.count * min(s.static_bytes for s in op.strategies) for op in parameters)
        text = "each stage, on average" if len(set(budgets)) > 1 else ""
        return Need(
            total * request.pipelined.chunks // request.num_stages,
            sum(budgets) // len(budgets),
            text,
        )


def _order(found: tuple[float, tuple[int, ...], Need | None]) -> tuple[float, tuple[int, ...]]:
    return found[:2]


# --------------------------------------------------------------------------------------------------
# The choice of cuts to plan, by estimated time and memory of units on each stage's devices.

_LACKS = 16  # a stage that does not fit lacks at least 1 / 16 of its memory

_MOST_TRIED = 64  # cuts to try; each places all nodes of a trace

Units = Sequence[Sequence[Unit]]
"""Per stage, the costs of all units on its devices."""


@dataclass
class CutChoice:
    """The choice of the cuts of one pipeline, as indices of the first units of all stages but the
    first.

    Attributes:
        request: the request.
        room: per stage, the bytes that the estimates assume.
    """

    request: PipelineRequest
    room: list[int] = field(init=False)

    def __post_init__(self) -> None:
        chunks = self.request.pipelined.chunks
        self.room = [budget // chunks for budget in self.request.budgets] * chunks

    def best(self, units: Units, *, ample: bool = False) -> tuple[int, ...]:
        """Find the cuts of the fastest step. If `ample`, memory is assumed to suffice."""
        request, room = self.request, [UNLIMITED] * len(self.room) if ample else self.room
        if len(request.profiles) == 1 or request.pipelined.chunks > 1:
            return balance_cuts(units, request.in_flight, room)
        return fastest(units, request.in_flight, room, request.microbatching.num)

    def ways(self, units: Units) -> Iterator[tuple[int, ...]]:
        """Generate the best cuts. If devices have unequal memory, also generate the best cuts with
        ample memory, since the estimates of memory are not exact."""
        yield self.best(units)
        if self._unequal:
            yield self.best(units, ample=True)

    def others(self, units: Units, lacking: Mapping[int, int]) -> tuple[int, ...] | None:
        """Find the best cuts after reducing the room of stages that did not fit by what they
        lacked. Return None if all devices have the same memory, or the cuts were requested.

        Args:
            units: per stage, the costs of units.
            lacking: the bytes needed, by stage that did not fit.
        """
        if not self._unequal or self.request.pipelined.cuts is not None:
            return None
        budgets = self.request.budgets
        for stage, needed in lacking.items():
            budget = budgets[stage % len(budgets)]
            self.room[stage] = self.room[stage] * budget // max(needed, budget + budget // _LACKS)
        return self.best(units)

    @property
    def _unequal(self) -> bool:
        """Whether devices have unequal memory."""
        return len(set(self.request.budgets)) > 1


def nearest_legal(
    part: Trace, points: Sequence[CutPoint], wanted: Sequence[int]
) -> tuple[int, ...]:
    """Find the legal cuts that are nearest to the given cuts, possibly these cuts themselves.

    The distance is the number of units by which cuts are moved. Cuts are tried in the order of
    their distance.

    Args:
        part: the trace of one microbatch.
        points: the cut points.
        wanted: indices of the first units of all stages but the first.

    Raises:
        ConstraintError: if no tried cuts are legal.
    """
    first = tuple(wanted)
    waiting, known_cuts, refusal = [(0, first)], {first}, None
    for _ in range(_MOST_TRIED):
        if not waiting:
            break
        _, cuts = heapq.heappop(waiting)
        problem = find_refusal(part, [points[index - 1].position for index in cuts])
        if problem is None:
            return cuts
        refusal = refusal or problem
        for moved in _moved_by_one(cuts, len(points)):
            if moved not in known_cuts:
                known_cuts.add(moved)
                distance = sum(abs(a - b) for a, b in zip(moved, first, strict=True))
                heapq.heappush(waiting, (distance, moved))
    assert refusal is not None, "the wanted cuts were tried"
    message = f"no cut of the model into {len(first) + 1} stages found: {refusal.what}"
    remedy = f"use a shorter pipeline axis, or {NO_PIPELINE}"
    raise ConstraintError(message, where=refusal.where, remedy=remedy) from refusal


def _moved_by_one(cuts: tuple[int, ...], num_points: int) -> Iterator[tuple[int, ...]]:
    """Generate the cuts with one of them moved by one unit; no two cuts coincide."""
    for place, index in enumerate(cuts):
        for other in (index - 1, index + 1):
            if 1 <= other <= num_points and other not in cuts:
                yield (*cuts[:place], other, *cuts[place + 1 :])
