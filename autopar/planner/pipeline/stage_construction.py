"""The search over pipelines. The trace of a microbatch is cut into stages, and each stage is
planned like a whole model.

1. The model is planned without stages and without a memory limit on the mesh without the pipeline
   axis. The plan gives the cost of each unit and the cheapest layouts of crossing values. Its
   relaxation bounds all cuts and layouts (`autopar.planner.pipeline.lagrangian`).
2. Cuts that balance the units are chosen (`autopar.planner.pipeline.stage_units`), and each stage's
   problem is solved with its microbatches in flight. Equal stages are solved once.
3. The costs of units are scaled to the times of the planned stages, and the model is cut again, as
   long as the step becomes shorter.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from autopar.capture.trace import Trace
from autopar.constraints import Pipelined
from autopar.core.layout import Layout
from autopar.core.schedules import INTERLEAVED
from autopar.cost.offload import shared_by
from autopar.cost.price import price
from autopar.cost.priced import Crossing, Priced
from autopar.errors import ConstraintError, InfeasibleError
from autopar.planner.candidates import TooSlow
from autopar.planner.clock import Clock, Progress
from autopar.planner.comm_schedule import Peaks
from autopar.planner.emitter import Emitter
from autopar.planner.min_memory import Need, prefer_fastest
from autopar.planner.pipeline.assemble import RankBudgets, join_stages, neediest
from autopar.planner.pipeline.cuts import LeastStep
from autopar.planner.pipeline.pipeline_bound import (
    Pipelines,
    ProvenPipelines,
    part_constraints,
    prove_bound,
)
from autopar.planner.pipeline.pipeline_request import (
    OnKind,
    PipelineRequest,
    UncutSolution,
    crossing_layouts,
)
from autopar.planner.pipeline.stage_cache import StageCache
from autopar.planner.pipeline.stage_memory_bound import (
    CutChoice,
    StageSizes,
    light_cuts,
    nearest_legal,
)
from autopar.planner.pipeline.stage_units import one_stage, reweigh_units, units_of
from autopar.planner.pipeline.step_schedule import least_time, step_of
from autopar.planner.report_infeasible import with_conflict_of_stages
from autopar.planner.rounds import PlannerLoop, price_by_groups
from autopar.planner.search import Planned, finish_search, needs
from autopar.request import UNLIMITED
from autopar.sharding import (
    Forced,
    classes_of,
    resolve,
)
from autopar.solve import evaluate_choices, shortage, solve
from autopar.stages import Cut, Seams, cut_trace, seams, usable_points

# --------------------------------------------------------------------------------------------------
# The plans of one microbatch without stages and without a memory limit, on each kind of device, and
# the bound over all cuts that their relaxations prove.

_CLOSER = 4  # factor by which the gap of the whole model is smaller, since it bounds all cuts


def solve_uncut(
    request: PipelineRequest, forced: Sequence[Forced], clock: Clock, limit_s: float
) -> UncutSolution:
    """Plan one microbatch without stages and without a memory limit, and bound all cuts.

    Args:
        request: the request.
        forced: per stage, the resolved constraints on its devices.
        clock: measures phases.
        limit_s: exclusive upper limit of the step, in seconds.

    Raises:
        ConstraintError: if the model cannot be cut.
        TooSlow: if no plan beats `limit_s`.
    """
    with clock.phase("cut"):
        points, placing = (
            usable_points(request.part, request.num_stages - 1)
            if request.num_stages > 1
            else ((), one_stage(request.part))
        )
        sewn = seams(request.part, placing)
        without_stages = [
            part_constraints(forced[request.kinds.index(kind)], sewn)
            for kind in range(len(request.profiles))
        ]
    on = [_alone(request, kind, alone, sewn, clock) for kind, alone in enumerate(without_stages)]
    least, closer = LeastStep(_least_s(request, on[0].choices.bound_s), ()), None
    if request.num_stages > 1:
        with clock.phase("bound"):
            crossings = tuple(map(request.crossing_of, range(request.num_stages)))
            ways = Pipelines(
                request.part,
                request.stage_mesh.shape,
                placing,
                len(points) + 1,
                request.kinds,
                crossings,
                request.microbatching.num,
                None if request.pipelined.cuts is None else request.cuts(points),
            )
            proof = _over_cuts(
                request, [alone.priced for alone in on], without_stages[0], sewn, ways
            )
        on = [
            replace(alone, multipliers=multipliers)
            for alone, multipliers in zip(on, proof.multipliers, strict=True)
        ]
        least, closer = (
            _add_output_broadcast(proof.least, request.output_broadcast_s),
            lambda factor: _add_output_broadcast(proof.closer(factor), request.output_broadcast_s),
        )
    if limit_s <= least.step_s < math.inf:  # infinite if there are fewer units than stages
        raise TooSlow(least.step_s)
    units = [
        units_of(placing, len(points) + 1, alone.priced, alone.choices, alone.evaluation)
        for alone in on
    ]
    on = [replace(alone, units=mine) for alone, mine in zip(on, units, strict=True)]
    return UncutSolution(tuple(on), request.kinds, points, least, closer)


def _alone(
    request: PipelineRequest, kind: int, forced: Forced, sewn: Seams, clock: Clock
) -> OnKind:
    """Plan the whole model on one kind of device, without its units."""
    with clock.phase("enumerate"):
        classes = classes_of(request.part, request.stage_mesh.shape, forced)
    with clock.phase("price"):
        priced = price(
            request.part,
            classes,
            request.stage_mesh,
            request.profiles[kind],
            budget_bytes=UNLIMITED,
            optimizer=request.options.optimizer,
            forced=forced,
            num_microbatches=request.microbatching.num,
            exposed=sewn.exposed,
        )
    with clock.phase("solve"):
        gap = request.options.gap / _CLOSER
        choices = solve(
            priced.problem,
            gap=gap,
            time_limit_s=request.options.solve_s,
            solver=request.options.solver,
        )
        return OnKind(priced, choices, evaluate_choices(priced.problem, choices), ())


def _over_cuts(
    request: PipelineRequest, priced: Sequence[Priced], forced: Forced, sewn: Seams, ways: Pipelines
) -> ProvenPipelines:
    """Prove a bound over all cuts. If stages are interleaved, the bound of the step follows from
    the bound of one microbatch through all stages."""
    time_limit_s = request.options.solve_s
    if request.pipelined.schedule != INTERLEAVED:
        return prove_bound(priced, forced, sewn, ways, time_limit_s)
    one = prove_bound(priced, forced, sewn, replace(ways, num_microbatches=1), time_limit_s)

    def of_step(least: LeastStep) -> LeastStep:
        """Compute the bound of the step from that of one microbatch."""
        return replace(least, step_s=_least_s(request, least.step_s))

    return ProvenPipelines(
        of_step(one.least), one.multipliers, lambda factor: of_step(one.closer(factor))
    )


def _add_output_broadcast(least: LeastStep, seconds: float) -> LeastStep:
    """Add the seconds of sending outputs to all stages, which do not depend on cuts."""
    return replace(least, step_s=least.step_s + seconds)


def _least_s(request: PipelineRequest, whole_s: float) -> float:
    """Return a lower bound of the step, given the seconds of one microbatch through all stages."""
    return least_time(
        request.pipelined.schedule,
        whole_s,
        request.num_stages,
        request.microbatching.num,
        request.pipelined.chunks,
    )


log = logging.getLogger("autopar")
_ROUNDS = 3  # attempts with scaled costs of units


@dataclass(frozen=True, slots=True)
class Stages:
    """The plans of all stages, their cut, and the memory of their ranks."""

    plans: tuple[Planned, ...]
    cut: Cut
    sharing: RankBudgets

    @property
    def times(self) -> tuple[float, ...]:
        """Seconds of a microbatch, per stage."""
        return tuple(planned.plan.proof.objective_s for planned in self.plans)


@dataclass
class StagedSearch:
    """The search for one axis and one number of microbatches."""

    request: PipelineRequest
    clock: Clock
    limit_s: float = math.inf
    forced: tuple[Forced, ...] = field(init=False)  # per stage
    sharing: RankBudgets = field(init=False)
    stage_cache: StageCache = field(default_factory=StageCache)
    is_light: bool = False  # whether stages should need little memory
    _lacking: dict[int, int] = field(
        default_factory=dict
    )  # the bytes needed, by stage that did not fit in the last attempt

    def __post_init__(self) -> None:
        constraints = [c for c in self.request.options.constraints if not isinstance(c, Pipelined)]
        forced = resolve(self.request.part, constraints, self.request.stage_mesh)
        chunks, stages = self.request.pipelined.chunks, range(self.request.num_stages)
        self.forced = tuple(
            shared_by(forced, self.request.profile_of(stage), chunks) for stage in stages
        )

    def run(self) -> Planned:
        """Search for the best plan.

        Raises:
            ConstraintError: if the model cannot be cut.
            InfeasibleError: if a stage does not fit.
            TooSlow: if no plan beats `limit_s`.
        """
        request, choice, uncut = self.request, CutChoice(self.request), self._solve_uncut()
        first, best = self._first(uncut, choice)
        tried = {first}
        for _ in range(_ROUNDS if request.pipelined.cuts is None and request.num_stages > 1 else 0):
            ways = choice.ways(reweigh_units(uncut.units, first, best.times))
            further = next(
                (cuts for cuts in self._legal_among(uncut, ways) if cuts not in tried), None
            )
            if further is None or request.options.is_late:
                break
            tried.add(further)
            try:
                other = self._plan_stages(uncut, further)
            except InfeasibleError:
                continue
            if self._step_s(other.plans) < self._step_s(best.plans):
                first, best = further, other
        return join_stages(request, uncut, first, best.plans, best.cut, best.sharing, self.clock)

    def _first(self, whole: UncutSolution, choice: CutChoice) -> tuple[tuple[int, ...], Stages]:
        """Plan the requested cuts, or the best cuts whose stages fit.

        Raises:
            InfeasibleError: if a stage does not fit.
        """
        tried = set[tuple[int, ...]]()
        cuts = self._legal(
            whole,
            (
                self.request.cuts(whole.points)
                if self.request.pipelined.cuts is not None
                else choice.best(whole.units)
            ),
        )
        while True:
            try:
                return cuts, self._plan_stages(whole, cuts)
            except InfeasibleError:
                tried.add(cuts)
                further = choice.others(whole.units, self._lacking)
                further = (
                    None if further is None else next(self._legal_among(whole, [further]), None)
                )
                if further is None or further in tried:
                    raise
                cuts = further

    def _legal(self, whole: UncutSolution, cuts: tuple[int, ...]) -> tuple[int, ...]:
        """Return these cuts, or the nearest legal cuts if the user requested none.

        Raises:
            ConstraintError: if the requested cuts are not legal, or no legal cuts were found.
        """
        legal = nearest_legal(self.request.part, whole.points, cuts) if cuts else cuts
        if legal == cuts or self.request.pipelined.cuts is None:
            return legal
        names = ", ".join(whole.points[index - 1].module for index in legal)
        raise ConstraintError(
            f"{self.request.pipelined}: the model cannot be cut there", remedy=f"cut before {names}"
        )

    def _legal_among(
        self, whole: UncutSolution, ways: Iterable[tuple[int, ...]]
    ) -> Iterator[tuple[int, ...]]:
        """Generate `_legal` of several sets of cuts, without those that have no legal cuts
        nearby."""
        for cuts in ways:
            try:
                yield self._legal(whole, cuts)
            except ConstraintError as error:
                log.info("no plan with cuts before units %s: %s", cuts, error.what)

    def proven_need(self) -> Need:
        """Prove a lower bound of the memory that any pipeline of the request needs."""
        return self._prove_need()[0]

    def _prove_need(self) -> tuple[Need, tuple[int, ...] | None]:
        points = (
            usable_points(self.request.part, self.request.num_stages - 1)[0]
            if self.request.num_stages > 1
            else ()
        )
        cuts = None if self.request.pipelined.cuts is None else self.request.cuts(points)
        return StageSizes(self.request, self.forced, points).prove_need(cuts)

    def lightest(self) -> Planned | None:
        """Search for a pipeline whose stages need little memory: the fastest that fits, or, if none
        fits, the one that needs least; None if none was found."""
        request = self.request
        self.is_light, self.limit_s = True, math.inf
        uncut = self._solve_uncut()
        with self.clock.phase("least"):
            least = self._prove_need()[1]
        ways = [] if least is None else [least]
        ways += (
            [light_cuts(uncut.units, request.in_flight, request.budgets * request.pipelined.chunks)]
            if request.pipelined.cuts is None
            else []
        )
        plans = []
        for cuts in dict.fromkeys(self._legal_among(uncut, ways)):
            try:
                stages = self._plan_stages(uncut, cuts)
            except InfeasibleError as error:
                log.info("no low-memory plan with cuts before units %s: %s", cuts, error.what)
                continue
            plans.append(
                join_stages(
                    request, uncut, cuts, stages.plans, stages.cut, stages.sharing, self.clock
                )
            )
        return prefer_fastest(plans, needs)

    def _solve_uncut(self) -> UncutSolution:
        """Plan the whole model without stages (step 1)."""
        return solve_uncut(self.request, self.forced, self.clock, self.limit_s)

    def _plan_stages(self, whole: UncutSolution, cuts: Sequence[int]) -> Stages:
        """Plan every stage for these cuts."""
        request = self.request
        positions = [whole.points[index - 1].position for index in cuts]
        with self.clock.phase("cut"):
            cut = cut_trace(request.part, positions)
        layouts = crossing_layouts(whole, request.part, cut)
        self.sharing = self._new_sharing()
        plans = self._all_stages(cut, layouts)
        while not (self.is_light or self.sharing.fits(plans)):
            plans = self._all_stages(cut, layouts, plans)
        return Stages(plans, cut, self.sharing)

    def _all_stages(
        self, cut: Cut, layouts: Mapping[str, Layout], before: Sequence[Planned] = ()
    ) -> tuple[Planned, ...]:
        """Plan every stage within its budget.

        Args:
            cut: the stages.
            layouts: the layouts of crossing values.
            before: earlier plans. A plan is kept if the stage's budget has not changed, unless
                stages share a parameter.
        """
        storage: dict[str, Layout] = dict(self.forced[0].storage)
        plans: list[Planned] = []
        refused: list[tuple[InfeasibleError, int]] = []
        self._lacking.clear()
        for number, stage in enumerate(cut.stages):
            is_changed = not before or cut.shared or number in self.sharing.lowered
            here, crossing = (
                replace(self.forced[number], storage=storage),
                replace(self.request.crossing_of(number), layouts=layouts),
            )
            try:
                planned = (
                    self._stage(stage, crossing, here, number) if is_changed else before[number]
                )
            except InfeasibleError as error:
                refused.append((error, self.sharing.budgets[number]))
                self._lacking[number] = error.needed_bytes
                if self.request.pipelined.chunks > 1 or any(
                    isinstance(c, Pipelined) and c.axis is None
                    for c in self.request.options.constraints
                ):
                    raise  # ranks share their memory, or another pipeline may fit
                continue
            plans.append(planned)
            for tensor in planned.stage_program().parameters:
                if tensor.name in cut.shared:  # copies need equal storage for equal updates
                    storage[tensor.name] = tensor.layout
        if refused:
            raise neediest(refused)
        return tuple(plans)

    def _stage(self, stage: Trace, crossing: Crossing, forced: Forced, number: int) -> Planned:
        request = self.request
        with self.clock.phase("enumerate"):
            classes = classes_of(stage, request.stage_mesh.shape, forced)
        budget, profile, flying = (
            self.sharing.budgets[number],
            request.profile_of(number),
            request.in_flight[number],
        )

        price_classes = partial(
            price,
            stage,
            mesh=request.stage_mesh,
            profile=profile,
            budget_bytes=budget,
            optimizer=request.options.optimizer,
            crossing=crossing,
            num_microbatches=request.microbatching.num,
            num_in_flight=flying,
        )
        mark = request.mark(stage, profile)
        schedule = self.sharing.schedule(request.pipelined.schedule, number)
        peaks = Peaks(request.options, schedule, flying, self.stage_cache)
        emitter = Emitter(
            stage, request.stage_mesh, request.options, self.clock, mark, {}, budget, peaks
        )
        pricing = price_by_groups(stage, classes, forced, price_classes)
        search = PlannerLoop(emitter, pricing, limit_s=self._stage_limit_s)
        try:
            candidate = search.find_lightest() if self.is_light else search.find_best()
            if candidate is None:
                raise shortage("no low-memory plan found")
            return finish_search(candidate, self.clock, request.options)
        except InfeasibleError as error:
            raise self.sharing.refusal(number, error) from error
        except TooSlow as error:
            raise TooSlow(_least_s(request, error.args[0]) + request.output_broadcast_s) from error

    @property
    def _stage_limit_s(self) -> float:
        """The exclusive upper limit of a stage's microbatch, in seconds. It is infinite for several
        stages, since other cuts may make a slow stage faster."""
        request = self.request
        if request.num_stages > 1:
            return math.inf
        return (self.limit_s - request.output_broadcast_s) / _least_s(request, 1.0)

    def _new_sharing(self) -> RankBudgets:
        request = self.request
        devices = (
            [request.profile_of(rank).name for rank in range(len(request.budgets))]
            if len(request.profiles) > 1
            else ()
        )
        num, chunks = request.num_stages, request.pipelined.chunks
        budgets, options = request.budgets, request.options
        call = request.batch_bytes, request.returned
        return RankBudgets(
            num,
            chunks,
            request.in_flight,
            request.microbatching.num,
            *call,
            budgets,
            options,
            self.stage_cache,
            devices,
        )

    def _step_s(self, stages: Sequence[Planned]) -> float:
        return step_of(
            self.request.pipelined.schedule,
            [planned.plan for planned in stages],
            self.request.microbatching.num,
            self.request.pipelined.chunks,
        )


def make_staged_plan(
    request: PipelineRequest,
    *,
    progress: Progress = lambda _: None,
    limit_s: float = math.inf,
) -> Planned:
    """Plan a pipeline, or one stage that processes microbatches.

    Args:
        request: the request.
        progress: called with the name of each phase.
        limit_s: exclusive upper limit of the step, in seconds.

    Raises:
        ConstraintError: if a constraint cannot hold, or the model cannot be cut.
        InfeasibleError: if a stage does not fit.
        TooSlow: if the bound shows that no plan beats the limit.
    """
    try:
        return StagedSearch(request.resolve(), Clock(progress), limit_s).run()
    except ConstraintError as error:
        here = replace(request.pipelined, microbatches=request.microbatching.num)
        raise with_conflict_of_stages(
            error, request.whole, request.part, request.mesh, here, request.options.constraints
        ) from error
