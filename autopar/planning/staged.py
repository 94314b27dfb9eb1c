"""The search over pipelines: a microbatch's trace, cut into stages, each planned as a whole model is.

1. The model is planned once without stages on the mesh that is left, with memory as if there were no limit. That says what each part
   costs and in which layout values cross most cheaply, and its relaxation bounds all cuts and layouts (`autopar.planning.parted`).
2. Cuts that balance the parts (`autopar.planning.units`); then each stage's own problem, with its microbatches in flight. Stages that
   are alike are solved once.
3. With what the stages really take, parts are weighed anew and cut again, as long as that is faster.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.analysis.microbatches import Microbatching
from autopar.capture.trace import Trace
from autopar.constraints import INTERLEAVED, Pipelined, check
from autopar.cost.hosts import shared_by
from autopar.cost.price import price
from autopar.cost.priced import Crossing, Priced
from autopar.errors import ConstraintError, InfeasibleError
from autopar.hardware import Hardware
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.planning.alike import Alike
from autopar.planning.asked import Asked, OnKind, Whole, crossing_layouts
from autopar.planning.clock import Clock, Progress
from autopar.planning.conflicts import with_conflict_of_stages
from autopar.planning.job import Job
from autopar.planning.joining import joined
from autopar.planning.options import UNLIMITED, PlanOptions
from autopar.planning.over_cuts import Least
from autopar.planning.proving import Pipelines, Proven, parted, proven
from autopar.planning.schedules import least_time
from autopar.planning.search import Planned, finished, needs
from autopar.planning.sharing import Sharing, neediest
from autopar.planning.smallest import Need, preferred
from autopar.planning.stage_sizes import StageSizes, light_cuts
from autopar.planning.steps import in_order, step_of
from autopar.planning.tried import TooSlow
from autopar.planning.units import Unit, balanced, fastest, one_stage, reweighed, units_of
from autopar.run.orders import num_in_flight
from autopar.solve import REMEDY, evaluated, solve
from autopar.stages import Cut, Seams, cut, seams, usable_points
from autopar.strategies import Forced, Starts, apart, classes_of, frozen_starts, resolve, together

log = logging.getLogger("autopar")
_ROUNDS = 3  # of cutting anew
_CLOSER = 4  # times closer than asked for the whole is solved, since its bound is that of all cuts


@dataclass
class StagedSearch:
    """The search for one axis and one number of microbatches."""

    asked: Asked
    clock: Clock
    limit_s: float = math.inf
    forced: tuple[Forced, ...] = field(init=False)  # per stage
    sharing: Sharing = field(init=False)
    alike: Alike = field(default_factory=Alike)
    is_light: bool = False  # stages are to need little memory

    def __post_init__(self) -> None:
        constraints = [c for c in self.asked.options.constraints if not isinstance(c, Pipelined)]
        forced = resolve(self.asked.part, constraints, self.asked.left)
        chunks, stages = self.asked.wish.chunks, range(self.asked.num_stages)
        self.forced = tuple(shared_by(forced, self.asked.profile_of(stage), chunks) for stage in stages)

    def run(self) -> Planned:
        """The best plan found.

        Raises:
            ConstraintError: where the model cannot be cut. InfeasibleError: where a stage does not fit.
            TooSlow: where no plan beats `limit_s`.
        """
        asked = self.asked
        flying = num_in_flight(asked.wish.schedule, asked.num_stages, asked.how.num, asked.wish.chunks)
        whole = self._whole()
        fixed = asked.wish.cuts is not None
        first = asked.cuts(whole.points) if fixed else self._cuts(whole.units, flying)
        best = self._planned(whole, first, flying)
        for _ in range(_ROUNDS if not fixed and asked.num_stages > 1 else 0):
            again = self._cuts(reweighed(whole.units, first, best[1]), flying)
            if again == first:
                break
            try:
                other = self._planned(whole, again, flying)
            except InfeasibleError:
                break
            if self._step_s(other[0]) >= self._step_s(best[0]):
                break
            first, best = again, other
        return joined(asked, whole, first, flying, best[0], best[2], self.sharing, self.clock)

    def _cuts(self, units: Sequence[Sequence[Unit]], flying: Sequence[int]) -> tuple[int, ...]:
        """Step 2, for what units take on the devices of each stage."""
        chunks = self.asked.wish.chunks
        budgets = [budget // chunks for budget in self.asked.budgets] * chunks
        if len(self.asked.profiles) == 1 or chunks > 1:
            return balanced(units, flying, budgets)
        return fastest(units, flying, budgets, self.asked.how.num)

    def proven(self) -> Need:
        """No pipeline that is asked for needs less."""
        return self._proven()[0]

    def _proven(self) -> tuple[Need, tuple[int, ...] | None]:
        points = usable_points(self.asked.part)[0] if self.asked.num_stages > 1 else ()
        cuts = None if self.asked.wish.cuts is None else self.asked.cuts(points)
        return StageSizes(self.asked, self.forced, points).proven(cuts)

    def lightest(self) -> Planned | None:
        """A pipeline whose stages need little memory, whatever they take: the fastest that fits, else the one that needs least; None where
        none was found."""
        asked = self.asked
        flying = num_in_flight(asked.wish.schedule, asked.num_stages, asked.how.num, asked.wish.chunks)
        self.is_light, self.limit_s = True, math.inf
        whole = self._whole()
        with self.clock.phase("least"):
            least = self._proven()[1]
        ways = [] if least is None else [least]
        ways += [light_cuts(whole.units, flying, asked.budgets * asked.wish.chunks)] if asked.wish.cuts is None else []
        found = []
        for cuts in dict.fromkeys(ways):
            try:
                stages, _, made = self._planned(whole, cuts, flying)
            except InfeasibleError as error:
                log.info("no plan of little memory cut before units %s: %s", cuts, error.what)
                continue
            found.append(joined(asked, whole, cuts, flying, stages, made, self.sharing, self.clock))
        return preferred(found, needs)

    def _whole(self) -> Whole:
        """Step 1.

        Raises:
            ConstraintError: where the model cannot be cut. TooSlow: where no plan beats `limit_s`.
        """
        asked = self.asked
        with self.clock.phase("cut"):
            points, placing = usable_points(asked.part) if asked.num_stages > 1 else ((), one_stage(asked.part))
            sewn = seams(asked.part, placing)
            forced = parted(self.forced[0], sewn)
        on = [self._alone(number, parted(self.forced[asked.kinds.index(number)], sewn), sewn) for number in range(len(asked.profiles))]
        least, closer = Least(self._least_s(on[0].choices.bound_s), ()), None
        if asked.num_stages > 1:
            with self.clock.phase("bound"):
                ways = Pipelines(
                    asked.part, asked.left.shape, placing, len(points) + 1, asked.kinds,
                    tuple(map(asked.crossing, range(asked.num_stages))), asked.how.num,
                    None if asked.wish.cuts is None else asked.cuts(points),
                )  # fmt: skip
                found = self._over_cuts([each.priced for each in on], forced, sewn, ways)
                on = [replace(each, multipliers=multipliers) for each, multipliers in zip(on, found.multipliers, strict=True)]
                least, closer = found.least, found.closer
        if self.limit_s <= least.step_s < math.inf:  # infinite where there are fewer parts than stages
            raise TooSlow(least.step_s)
        units = [units_of(placing, len(points) + 1, each.priced, each.choices, each.evaluation) for each in on]
        on = [replace(each, units=mine) for each, mine in zip(on, units, strict=True)]
        return Whole(tuple(on), asked.kinds, points, least, closer)

    def _alone(self, kind: int, forced: Forced, sewn: Seams) -> OnKind:
        """The whole on one kind of device."""
        asked = self.asked
        with self.clock.phase("enumerate"):
            classes = classes_of(asked.part, asked.left.shape, forced)
        with self.clock.phase("price"):
            priced = price(
                asked.part, classes, asked.left, asked.profiles[kind], budget_bytes=UNLIMITED, optimizer=asked.options.optimizer,
                forced=forced, num_microbatches=asked.how.num, exposed=sewn.exposed,
            )  # fmt: skip
        with self.clock.phase("solve"):
            gap = asked.options.gap / _CLOSER
            choices = solve(priced.problem, gap=gap, time_limit_s=asked.options.time_limit_s, solver=asked.options.solver)
            return OnKind(priced, choices, evaluated(priced.problem, choices), ())

    def _over_cuts(self, priced: Sequence[Priced], forced: Forced, sewn: Seams, ways: Pipelines) -> Proven:
        """What is proven over all cuts: of one microbatch through all stages, and from that of the step, where stages are interleaved."""
        limit_s = self.asked.options.time_limit_s
        if self.asked.wish.schedule != INTERLEAVED:
            return proven(priced, forced, sewn, ways, limit_s)
        one = proven(priced, forced, sewn, replace(ways, num_microbatches=1), limit_s)

        def interleaved(least: Least) -> Least:
            return replace(least, step_s=self._least_s(least.step_s))

        return Proven(interleaved(one.least), one.multipliers, lambda factor: interleaved(one.closer(factor)))

    def _planned(self, whole: Whole, cuts: Sequence[int], flying: Sequence[int]) -> tuple[tuple[Planned, ...], tuple[float, ...], Cut]:
        """Every stage's plan for these cuts, and its time."""
        asked = self.asked
        positions = [whole.points[index - 1].position for index in cuts]
        with self.clock.phase("cut"):
            made = cut(asked.part, positions) if positions else Cut((asked.part,), (), {})
        layouts = crossing_layouts(whole, asked.part, made)
        self.sharing = self._sharing(flying)
        found = self._all_stages(made, layouts, flying)
        while not (self.is_light or self.sharing.fits(found)):
            found = self._all_stages(made, layouts, flying, found)
        return found, tuple(planned.plan.proof.objective_s for planned in found), made

    def _all_stages(
        self, made: Cut, layouts: Mapping[str, Layout], flying: Sequence[int], before: Sequence[Planned] = ()
    ) -> tuple[Planned, ...]:
        """Plans within the stages' budgets; of those `before`, the ones whose budget has not changed and that share no parameter stay.

        Args:
            layouts: in which values cross.
        """
        storage: dict[str, Layout] = dict(self.forced[0].storage)
        found: list[Planned] = []
        refused: list[tuple[InfeasibleError, int]] = []
        for number, stage in enumerate(made.stages):
            again = not before or made.shared or number in self.sharing.lowered
            here, crossing = replace(self.forced[number], storage=storage), replace(self.asked.crossing(number), layouts=layouts)
            try:
                planned = self._stage(stage, crossing, here, flying[number], number) if again else before[number]
            except InfeasibleError as error:
                refused.append((error, self.sharing.budgets[number]))
                if self.asked.wish.chunks > 1 or any(isinstance(c, Pipelined) and c.axis is None for c in self.asked.options.constraints):
                    raise  # ranks share what there is; another pipeline may do
                continue
            found.append(planned)
            for tensor in planned.stage_program().parameters:
                if tensor.name in made.shared:  # its copies are updated alike, so they rest alike
                    storage[tensor.name] = tensor.layout
        if refused:
            raise neediest(refused)
        return tuple(found)

    def _stage(self, stage: Trace, crossing: Crossing, forced: Forced, flying: int, number: int) -> Planned:
        asked = self.asked
        with self.clock.phase("enumerate"):
            classes = classes_of(stage, asked.left.shape, forced)
        budget, profile = self.sharing.budgets[number], asked.profile_of(number)

        ends = frozen_starts(stage)

        def pricing(starts: Starts) -> Priced:
            starts = together(ends, starts)
            return price(
                stage, apart(classes, starts), asked.left, profile, budget_bytes=budget, optimizer=asked.options.optimizer,
                forced=replace(forced, starts=starts), crossing=crossing, num_microbatches=asked.how.num, num_in_flight=flying,
            )  # fmt: skip

        mark = asked.mark(stage.fingerprint, profile)
        schedule = self.sharing.schedule(asked.wish.schedule, number)
        job = Job(stage, asked.left, pricing, asked.options, self.clock, mark, {}, budget, schedule, alike=self.alike)
        try:
            tried = job.lightest() if self.is_light else job.best_tried()
            if tried is None:
                raise InfeasibleError("no plan of little memory was found", remedy=REMEDY)
            return finished(tried, self.clock, asked.options)
        except InfeasibleError as error:
            raise self.sharing.refusal(number, error) from error

    def _sharing(self, flying: Sequence[int]) -> Sharing:
        asked = self.asked
        devices = [asked.profile_of(rank).name for rank in range(len(asked.budgets))] if len(asked.profiles) > 1 else ()
        return Sharing(
            asked.num_stages, asked.wish.chunks, flying, asked.how.num, asked.batch_bytes, asked.budgets, asked.options, self.alike, devices
        )  # fmt: skip

    def _step_s(self, stages: Sequence[Planned]) -> float:
        return step_of(self.asked.wish.schedule, [planned.plan for planned in stages], self.asked.how.num, self.asked.wish.chunks)

    def _least_s(self, whole_s: float) -> float:
        return least_time(self.asked.wish.schedule, whole_s, self.asked.num_stages, self.asked.how.num, self.asked.wish.chunks)


def make_staged_plan(
    whole: Trace,
    part: Trace,
    how: Microbatching,
    mesh: Mesh,
    hardware: Hardware,
    options: PlanOptions,
    wish: Pipelined,
    *,
    model_name: str = "",
    progress: Progress = lambda _: None,
    limit_s: float = math.inf,
) -> Planned:
    """Plan a pipeline, or one stage that works through microbatches.

    Args:
        whole, part: the traces of the batch and of one microbatch. how: how the one makes the other. hardware: where it is of
            unequal devices along the pipeline's axis, each stage is planned for its own. wish: the pipeline's axis, ``""`` for one stage on
            the whole mesh. limit_s: a plan that is no faster is not wanted.

    Raises:
        ConstraintError: where a constraint cannot hold, or the model cannot be cut. InfeasibleError: where a stage does not fit.
        TooSlow: where the bound shows that no plan beats the limit.
    """
    try:
        return staged_search(whole, part, how, mesh, hardware, options, wish, Clock(progress), model_name=model_name, limit_s=limit_s).run()
    except ConstraintError as error:
        here = replace(wish, microbatches=how.num)
        raise with_conflict_of_stages(error, whole, part, mesh, here, options.constraints) from error


def staged_search(
    whole: Trace, part: Trace, how: Microbatching, mesh: Mesh, hardware: Hardware, options: PlanOptions, wish: Pipelined,
    clock: Clock, *, model_name: str = "", limit_s: float = math.inf,
) -> StagedSearch:  # fmt: skip
    """The search of `make_staged_plan`, about to begin.

    Raises:
        ConstraintError: where a constraint does not speak of this mesh, or the schedule does not run.
    """
    if wish.axis:
        check(wish, mesh)
    left = mesh.without(wish.axis) if wish.axis else mesh
    for constraint in options.constraints:  # all but the pipeline speak of what a stage runs on
        if not isinstance(constraint, Pipelined):
            check(constraint, left)
    wish = in_order(wish, mesh, how.num)
    batch_bytes = sum(math.prod(i.shape) * i.dtype.itemsize for i in whole.inputs)
    asked = Asked(part, how, batch_bytes, mesh, hardware, options, wish, model_name, whole.fingerprint)
    return StagedSearch(asked, clock, limit_s)
