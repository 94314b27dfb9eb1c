"""The search over pipelines: a microbatch's trace, cut into stages, each planned as a whole model is.

1. The model is planned once without stages on the mesh that is left, with memory as if there were no limit. That says what each part
   costs and in which layout values cross most cheaply, and its relaxation bounds all cuts and layouts (`autopar.planning.parted`).
2. Cuts that balance the parts (`autopar.planning.units`); then each stage's own problem, with its microbatches in flight. Stages that
   are alike are solved once.
3. With what the stages really take, parts are weighed anew and cut again, as long as that is faster.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.analysis.microbatches import Microbatching
from autopar.capture.trace import Trace
from autopar.constraints import INTERLEAVED, Pipelined, check
from autopar.cost.price import price
from autopar.cost.priced import Crossing, Priced
from autopar.emit import emit_staged
from autopar.errors import ConstraintError, InfeasibleError
from autopar.hardware import HardwareProfile
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.planning.alike import Alike
from autopar.planning.assembly import Draft, fingerprint
from autopar.planning.conflicts import with_conflict_of_stages
from autopar.planning.job import Clock, Job, Progress, TooSlow
from autopar.planning.multipliers import with_multipliers
from autopar.planning.options import PlanOptions
from autopar.planning.over_cuts import Least
from autopar.planning.proving import Pipelines, parted, proven
from autopar.planning.schedules import least_time
from autopar.planning.search import Planned, finished
from autopar.planning.sharing import Sharing, neediest
from autopar.planning.steps import check_order, simulated_step_of, slowest_rank, step_of
from autopar.planning.units import Unit, balanced, one_stage, reweighed, units_of
from autopar.plans import Crossed, Fingerprint, Pipeline, Plan, Prediction, Proof
from autopar.problem import Choices, Multipliers
from autopar.redistribute import local_bytes
from autopar.run.orders import num_in_flight
from autopar.solve import Evaluation, evaluate, solve
from autopar.stages import Cut, CutPoint, cut, seams, usable_points
from autopar.strategies import Forced, Starts, apart, classes_of, resolve
from autopar.version import VERSION

_ROUNDS = 3  # of cutting anew
_CLOSER = 4  # times closer than asked for the whole is solved, since its bound is that of all cuts
_NO_LIMIT = 2**60
COVERS: tuple[str, ...] = (
    "every cut between layers, for this axis, number of microbatches and schedule, and every layout in which tensors cross",
    "per stage, every layout of every op, storage of every parameter, recomputation and kept versions (see the stages' proofs); memory "
    "counts for the stages' plans, not for the bound",
    "{} for times τ of a microbatch, forward and backward, per stage; the optimizer shared among microbatches; what a stage's "
    "communication takes beside its compute is in its proof",
    "equal nodes of repeated layers take one decision in a stage's plan; the bound lets each decide for itself",
)
_COVERS_ASKED: tuple[str, ...] = (
    "the cuts that are asked for, with this axis, schedule and number of microbatches, and every layout in which tensors cross",
)
_COVERS_INTERLEAVED: tuple[str, ...] = (
    "every cut between layers, for this axis, number of microbatches and schedule; memory counts for the stages' plans, not for the bound, "
    "which leaves out what devices wait for each other",
    "per stage, every layout of every op, storage of every parameter, recomputation and kept versions (see the stages' proofs)",
    COVERS[2],
    "equal nodes of repeated layers take one decision in a stage; the bound takes one for all stages",
)
_COVERS_ONE: tuple[str, ...] = (
    "one stage, for this number of microbatches; every layout of every op, storage of every parameter, recomputation and kept versions, "
    "within the memory (see the stage's proof)",
    COVERS[2],
    "equal nodes of repeated layers take one decision",
)


@dataclass(frozen=True, slots=True)
class _Whole:
    """The plan of one microbatch without stages and without a limit of memory."""

    priced: Priced
    choices: Choices
    evaluation: Evaluation
    points: tuple[CutPoint, ...]
    units: tuple[Unit, ...]
    least: Least
    multipliers: Multipliers | None


@dataclass
class StagedSearch:
    """The search for one axis and one number of microbatches.

    Attributes:
        part: the trace of one microbatch. how: how microbatches make the batch. batch_bytes: of the whole batch.
    """

    part: Trace
    how: Microbatching
    batch_bytes: int
    mesh: Mesh
    profile: HardwareProfile
    options: PlanOptions
    wish: Pipelined
    model_name: str
    model_fingerprint: str
    clock: Clock
    limit_s: float = math.inf
    axis: str = field(init=False)
    left: Mesh = field(init=False)
    num_stages: int = field(init=False)
    forced: Forced = field(init=False)
    crossing: Crossing = field(init=False)
    sharing: Sharing = field(init=False)
    alike: Alike = field(default_factory=Alike)

    def __post_init__(self) -> None:
        self.axis = self.wish.axis or ""
        self.left = self.mesh.without(self.axis) if self.axis else self.mesh
        self.num_stages = self.wish.chunks * (self.mesh.shape[self.mesh.names.index(self.axis)] if self.axis else 1)
        self.forced = resolve(self.part, [c for c in self.options.constraints if not isinstance(c, Pipelined)], self.left)
        self.crossing = Crossing.along(self.axis, self.mesh, self.profile)

    def run(self) -> Planned:
        """The best plan found.

        Raises:
            ConstraintError: where the model cannot be cut. InfeasibleError: where a stage does not fit.
            TooSlow: where no plan beats `limit_s`.
        """
        flying = num_in_flight(self.wish.schedule, self.num_stages, self.how.num, self.wish.chunks)
        budget = self.options.budget(self.profile) // self.wish.chunks
        whole = self._whole()
        asked = self.wish.cuts is not None
        first = self._asked(whole.points) if asked else balanced(whole.units, flying, budget)
        best = self._planned(whole, first, flying)
        for _ in range(_ROUNDS if not asked and self.num_stages > 1 else 0):
            again = balanced(reweighed(whole.units, first, best[1]), flying, budget)
            if again == first:
                break
            try:
                other = self._planned(whole, again, flying)
            except InfeasibleError:
                break
            if self._step_s(other[0]) >= self._step_s(best[0]):
                break
            first, best = again, other
        return self._assembled(whole, first, flying, *best)

    def _whole(self) -> _Whole:
        """Step 1.

        Raises:
            ConstraintError: where the model cannot be cut. TooSlow: where no plan beats `limit_s`.
        """
        with self.clock.phase("cut"):
            points, placing = usable_points(self.part) if self.num_stages > 1 else ((), one_stage(self.part))
            sewn = seams(self.part, placing)
            forced = parted(self.forced, sewn)
        with self.clock.phase("enumerate"):
            classes = classes_of(self.part, self.left.shape, forced)
        with self.clock.phase("price"):
            priced = price(
                self.part, classes, self.left, self.profile, budget_bytes=_NO_LIMIT, optimizer=self.options.optimizer,
                forced=forced, num_microbatches=self.how.num, exposed=sewn.exposed,
            )  # fmt: skip
        with self.clock.phase("solve"):
            gap = self.options.gap / _CLOSER
            choices = solve(priced.problem, gap=gap, time_limit_s=self.options.time_limit_s, solver=self.options.solver)
            evaluation = evaluate(priced.problem, choices.strategies, choices.recomputed, choices.kept)
        if self.num_stages == 1 or self.wish.schedule == INTERLEAVED:
            least, multipliers = Least(self._least_s(choices.bound_s), ()), None
        else:
            with self.clock.phase("bound"):
                ways = Pipelines(
                    self.part, self.left.shape, placing, len(points) + 1, self.crossing, self.num_stages, self.how.num,
                    None if self.wish.cuts is None else self._asked(points),
                )  # fmt: skip
                least, multipliers = proven(priced, forced, sewn, ways, self.options.time_limit_s)
        if self.limit_s <= least.step_s < math.inf:  # infinite where there are fewer parts than stages
            raise TooSlow(least.step_s)
        units = units_of(placing, len(points) + 1, priced, choices, evaluation)
        return _Whole(priced, choices, evaluation, points, units, least, multipliers)

    def _asked(self, points: Sequence[CutPoint]) -> tuple[int, ...]:
        """The cuts that the user asks for, as indices of units."""
        modules = {point.module: index + 1 for index, point in enumerate(points)}
        wanted = self.wish.cuts or ()
        unknown = [name for name in wanted if name not in modules]
        if unknown or len(wanted) != self.num_stages - 1:
            what = (
                f"{self.wish}: no cut at {unknown[0]!r}" if unknown else f"{self.wish} has {len(wanted)} cuts for {self.num_stages} stages"
            )
            raise ConstraintError(what, remedy=f"the model can be cut at {', '.join(modules)}")
        return tuple(sorted(modules[name] for name in wanted))

    def _planned(self, whole: _Whole, cuts: Sequence[int], flying: Sequence[int]) -> tuple[tuple[Planned, ...], tuple[float, ...], Cut]:
        """Every stage's plan for these cuts, and its time."""
        positions = [whole.points[index - 1].position for index in cuts]
        with self.clock.phase("cut"):
            made = cut(self.part, positions) if positions else Cut((self.part,), (), {})
        crossing = replace(self.crossing, layouts=self._crossing_layouts(whole, made))
        self.sharing = self._sharing(flying)
        found = self._all_stages(made, crossing, flying)
        while not self.sharing.fits(found):
            found = self._all_stages(made, crossing, flying, found)
        return found, tuple(planned.plan.proof.objective_s for planned in found), made

    def _all_stages(self, made: Cut, crossing: Crossing, flying: Sequence[int], before: Sequence[Planned] = ()) -> tuple[Planned, ...]:
        """Plans within the stages' budgets; of those `before`, the ones whose budget has not changed and that share no parameter stay."""
        storage: dict[str, Layout] = dict(self.forced.storage)
        found: list[Planned] = []
        refused: list[InfeasibleError] = []
        for number, stage in enumerate(made.stages):
            again = not before or made.shared or number in self.sharing.lowered
            here = replace(self.forced, storage=storage)
            try:
                planned = self._stage(stage, crossing, here, flying[number], number) if again else before[number]
            except InfeasibleError as error:
                refused.append(error)
                if self.wish.chunks > 1 or any(isinstance(c, Pipelined) and c.axis is None for c in self.options.constraints):
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
        with self.clock.phase("enumerate"):
            classes = classes_of(stage, self.left.shape, forced)
        budget = self.sharing.budgets[number]

        def pricing(starts: Starts) -> Priced:
            return price(
                stage, apart(classes, starts), self.left, self.profile, budget_bytes=budget, optimizer=self.options.optimizer,
                forced=replace(forced, starts=starts), crossing=crossing, num_microbatches=self.how.num, num_in_flight=flying,
            )  # fmt: skip

        mark = self._mark(stage.fingerprint)
        schedule = self.sharing.schedule(self.wish.schedule, number)
        job = Job(stage, self.left, pricing, self.options, self.clock, mark, {}, budget, schedule, alike=self.alike)
        try:
            return finished(job.best_tried(), self.clock, self.options)
        except InfeasibleError as error:
            raise self.sharing.refusal(number, error) from error

    def _sharing(self, flying: Sequence[int]) -> Sharing:
        budget = self.options.budget(self.profile)
        return Sharing(self.num_stages, self.wish.chunks, flying, self.how.num, self.batch_bytes, budget, self.options, self.alike)

    def _step_s(self, stages: Sequence[Planned]) -> float:
        return step_of(self.wish.schedule, [planned.plan for planned in stages], self.how.num, self.wish.chunks)

    def _least_s(self, whole_s: float) -> float:
        return least_time(self.wish.schedule, whole_s, self.num_stages, self.how.num, self.wish.chunks)

    def _crossing_layouts(self, whole: _Whole, made: Cut) -> Mapping[str, Layout]:
        """Per crossing value the layout of the fewest bytes among those that the plan of the whole makes of it."""
        variants = {name: v for v, refs in enumerate(whole.priced.refs) for name, _ in refs}
        keys = {n.name: n.meta["key"] for n in self.part.graph.nodes if n.op == "call_function"}
        found: dict[str, Layout] = {}
        for boundary in made.boundaries:
            for name in boundary.values:
                v = variants.get(name)
                if v is None:  # inside a cluster of the whole
                    continue
                graph = whole.priced.problem.values[whole.priced.problem.variants[v].value].graph
                moves = whole.evaluation.forward[v]
                plain = [n for n in (*moves.sources, *moves.wanted) if not graph.layouts[n].has_partial and not graph.layouts[n].halos]
                if plain:
                    found[keys[name]] = graph.layouts[min(plain, key=lambda n: graph.bytes[n])]
        return found

    def _crossed(self, stage: Trace, planned: Planned) -> tuple[Crossed, ...]:
        """What leaves a stage."""
        layouts = {t.name: t.layout for t in planned.stage_program().outputs if t.crosses}
        return tuple(
            Crossed(o.path, layouts[o.path], local_bytes(o.shape, o.dtype, layouts[o.path], self.left.shape), bool(o.tangent))
            for o in stage.outputs
            if o.crosses
        )

    def _mark(self, model: str) -> Fingerprint:
        return replace(fingerprint(self.part, self.model_name, self.profile.name, self.profile.hash, VERSION), model=model)

    def _assembled(
        self, whole: _Whole, cuts: Sequence[int], flying: Sequence[int], stages: tuple[Planned, ...], times: tuple[float, ...], made: Cut
    ) -> Planned:
        """The plan of all stages."""
        plans = tuple(planned.plan for planned in stages)
        objective = self._step_s(stages)
        slowest = slowest_rank(plans, self.wish.chunks)
        ranks = self.sharing.ranks(stages)
        fullest = max(ranks, key=lambda memory: memory.peak_bytes)
        shared = self.wish.chunks > 1
        points = [whole.points[index - 1] for index in cuts]
        named = ", ".join(self.how.promised)
        promised = (f"samples are independent by the user's promise, which rules do not show at {named}",) if named else ()
        pipeline = Pipeline(
            self.axis, tuple(p.position for p in points), tuple(p.module for p in points), self.how.num, self.wish.schedule,
            tuple(flying), self.wish.independent, plans, tuple(map(self._crossed, made.stages[:-1], stages)),
            whole.priced.problem.accumulates,
            *((tuple(memory.peak_bytes for memory in ranks), tuple(self.sharing.budgets)) if shared else ()),
        )  # fmt: skip
        prediction = Prediction(
            objective, sum(p.compute_s for p in slowest) * self.how.num, sum(p.communication_s for p in slowest) * self.how.num,
            fullest.peak_bytes, fullest.memory_bytes, (), sum(p.hidden_s for p in slowest) * self.how.num,
            simulated_step_of(self.wish.schedule, plans, self.how.num, self.wish.chunks),
        )  # fmt: skip
        proof = self._proof(whole, objective, plans, promised)
        plan = Plan(
            self.mesh, self._mark(self.model_fingerprint), self.options.to_json(self.profile), (), (), (), prediction, proof,
            str(self.part.folding), pipeline,
        )  # fmt: skip
        with self.clock.phase("emit"):
            program = emit_staged(self.part, made, self.how, plan)
        return Planned(plan, program, self.clock.seconds)

    def _proof(self, whole: _Whole, objective: float, plans: Sequence[Plan], promised: tuple[str, ...]) -> Proof:
        """Of all cuts; of one stage, its own."""
        own = plans[0].proof if len(plans) == 1 else None
        bound, certified = (own.bound_s * self.how.num, own.certified_bound_s * self.how.num) if own else (whole.least.step_s,) * 2
        covers = _covers(self.wish, one=own is not None)
        bound = min(bound, objective)
        proof = Proof(
            objective, bound, (objective - bound) / objective if objective else 0.0,
            whole.choices.num_variables + sum(p.proof.num_variables for p in plans),
            whole.choices.num_constraints + sum(p.proof.num_constraints for p in plans),
            whole.choices.solver, max(p.proof.memory_price_s_per_gib for p in plans), covers + promised,
            0.0 if self.wish.schedule == INTERLEAVED and not own else min(certified, bound),
        )  # fmt: skip
        draft = Draft(self.part, self.left, whole.priced, whole.choices, whole.evaluation, {})
        return proof if whole.multipliers is None else with_multipliers(proof, draft, whole.multipliers)


def _covers(wish: Pipelined, *, one: bool) -> tuple[str, ...]:
    interleaved = wish.schedule == INTERLEAVED
    taken = "the end of the simulated schedule" if interleaved else "(M − 1) · max τ + Σ τ"
    if one:
        covers = _COVERS_ONE
    elif interleaved:
        covers = _COVERS_INTERLEAVED
    else:
        covers = COVERS if wish.cuts is None else _COVERS_ASKED + COVERS[1:]
    return tuple(line.format(taken) for line in covers)


def make_staged_plan(
    whole: Trace,
    part: Trace,
    how: Microbatching,
    mesh: Mesh,
    profile: HardwareProfile,
    options: PlanOptions,
    wish: Pipelined,
    *,
    model_name: str = "",
    progress: Progress = lambda _: None,
    limit_s: float = math.inf,
) -> Planned:
    """Plan a pipeline, or one stage that works through microbatches.

    Args:
        whole, part: the traces of the batch and of one microbatch. how: how the one makes the other. wish: the pipeline's axis,
            ``""`` for one stage on the whole mesh. limit_s: a plan that is no faster is not wanted.

    Raises:
        ConstraintError: where a constraint cannot hold, or the model cannot be cut. InfeasibleError: where a stage does not fit.
        TooSlow: where the bound shows that no plan beats the limit.
    """
    try:
        return _searched(whole, part, how, mesh, profile, options, wish, model_name, progress, limit_s)
    except ConstraintError as error:
        here = replace(wish, microbatches=how.num)
        raise with_conflict_of_stages(error, whole, part, mesh, here, options.constraints) from error


def _searched(
    whole: Trace, part: Trace, how: Microbatching, mesh: Mesh, profile: HardwareProfile, options: PlanOptions, wish: Pipelined,
    model_name: str, progress: Progress, limit_s: float,
) -> Planned:  # fmt: skip
    if wish.axis:
        check(wish, mesh)
    left = mesh.without(wish.axis) if wish.axis else mesh
    for constraint in options.constraints:  # all but the pipeline speak of what a stage runs on
        if not isinstance(constraint, Pipelined):
            check(constraint, left)
    check_order(wish, mesh, how.num)
    if wish.schedule == "1f1b" and wish.axis and how.num < mesh.shape[mesh.names.index(wish.axis)]:
        what = f"{how.num} microbatches are fewer than the stages along {wish.axis!r}, which 1F1B does not run"
        raise ConstraintError(what, remedy='use more microbatches, or schedule="gpipe"')
    batch_bytes = sum(math.prod(i.shape) * i.dtype.itemsize for i in whole.inputs)
    clock = Clock(progress)
    return StagedSearch(part, how, batch_bytes, mesh, profile, options, wish, model_name, whole.fingerprint, clock, limit_s).run()
