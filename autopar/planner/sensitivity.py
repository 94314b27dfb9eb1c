"""Runner-ups of a plan's choices: per op, the best other strategy with all else fixed, what it
would cost, and the change of the hardware at which it would be chosen.

The price of a change is exact: compute of the op, and the cheapest trees of every variant that it
makes or reads, in a step that takes as long as `autopar.solve.evaluate` says. Candidates are ranked
first by shortest distances between layouts, and only the most promising are priced exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.capture.trace import Parameter, Trace
from autopar.core.collective import with_faster
from autopar.core.hardware import Hardware, HardwareProfile
from autopar.core.layout_graph import Arc
from autopar.core.mesh import Mesh
from autopar.core.problem import Kernels, OpStrategy, OverlapKernel, OverlapOption, Problem
from autopar.core.solution import Solution
from autopar.core.streams import Load, OverlapWeights
from autopar.cost.op_times import CollectivePrices, own_collectives
from autopar.cost.priced import Priced
from autopar.cost.zero_stages import StepMoves, parameter_layouts
from autopar.planner.reprice import decisions, problems_of
from autopar.plans import (
    COMPUTE,
    FARTHEST,
    NO_CHOICE,
    NO_DEARER,
    NO_FLIP,
    NO_OTHER,
    Flip,
    Flips,
    Plan,
    RunnerUp,
    load_of,
)
from autopar.request import PlanOptions
from autopar.solve import evaluate_choices, op_load, routed_load, variant_load, within

_EXACT = 3  # candidates priced exactly per op


def runner_ups(problem: Problem, choices: Solution) -> Mapping[int, RunnerUp]:
    """Find the best other strategy of each op that has one."""
    touching = variants_by_op(problem)
    step = evaluate_choices(problem, choices).load
    problem = within(problem, choices.regions)
    others: dict[int, RunnerUp] = {}
    for index, op in enumerate(problem.ops):
        if len(op.strategies) > 1:
            best = _best_other(problem, choices, index, touching.get(index, []), step)
            if best is not None:
                others[index] = best
    return others


def variants_by_op(problem: Problem) -> Mapping[int, list[int]]:
    """Map each op to the variants that it makes or reads, or whose kernels depend on its
    strategy."""
    touching: dict[int, list[int]] = {}
    for v, variant in enumerate(problem.variants):
        kernels = [
            kernel for late in (False, True) for kernel in problem.kernels.get((v, late), ())
        ]
        needed = {op for kernel in kernels for op, _ in (kernel.product, *kernel.also)}
        for index in {problem.values[variant.value].op, *(u.op for u in variant.uses), *needed}:
            touching.setdefault(index, []).append(v)
    return touching


def _best_other(
    problem: Problem, choices: Solution, index: int, touched: Sequence[int], step: Load
) -> RunnerUp | None:
    op, current = problem.ops[index], choices.strategies[index]
    now = local_load(problem, choices, index, current, touched)
    assert now is not None, "the plan's own layouts can be reached"
    others = [
        s
        for s in range(len(op.strategies))
        if s != current and op.strategies[s].layouts != op.strategies[current].layouts
    ]
    chosen = op.strategies[current].layouts

    def promise(s: int) -> tuple[int, float, int]:
        """Sort key: strategies that change few layouts first, then faster strategies."""
        layouts = op.strategies[s].layouts
        pairs = zip(
            (*layouts.inputs, *layouts.outputs), (*chosen.inputs, *chosen.outputs), strict=True
        )
        return sum(a != b for a, b in pairs), op.strategies[s].time_s, s

    loads = [
        (local_load(problem, choices, index, s, touched), s)
        for s in sorted(others, key=promise)[:_EXACT]
    ]
    exact = [
        (_longer(step, now, load, problem.overlap_slowdown), s)
        for load, s in loads
        if load is not None
    ]
    if not exact:
        return None
    delta, s = min(exact)
    return RunnerUp(str(op.strategies[s].layouts), delta)


def local_load(
    problem: Problem, choices: Solution, index: int, strategy: int, touched: Sequence[int]
) -> Load | None:
    """Compute the load that depends on one op's strategy.

    Args:
        problem: the problem.
        choices: the solution for all other ops.
        index: the index of the op.
        strategy: the index of the op's strategy.
        touched: the variants that it makes or reads, as from `variants_by_op`.

    Returns:
        The compute of the op, with its route, and the communication of the variants; None if some
        layout cannot be reached.
    """
    strategies = list(choices.strategies)
    strategies[index] = strategy
    total, route = op_load(problem, index, strategy), problem.routes.get((index, strategy))
    if route is not None:
        total += routed_load(problem, index, route.saved_s, again=False)
    for v in touched:
        moves = variant_load(problem, v, strategies, choices.recomputed)
        if moves is None:
            return None
        total += moves
    return total


def _longer(step: Load, now: Load, other: Load, slowdown: float) -> float:
    """Compute the seconds by which a step is longer if one part of its load is replaced."""
    change = other + now.scale(-1.0)
    return change.serial_s - ((step + change).saved_s(slowdown) - step.saved_s(slowdown))


# --------------------------------------------------------------------------------------------------
# The change of the hardware at which a runner-up becomes the better choice: the factor by which the
# bandwidth of a link, or the speed of compute, has to change.
#
# The chosen strategy of an op and its runner-up are priced exactly on changed hardware, with all
# else fixed. Compute and early communication have the prices of the plan's step, so the longer of
# its two streams stays the longer. Bisection finds the factor nearest to 1 at which both cost the
# same. Only this choice is compared: a plan made for the changed hardware may change other choices
# sooner.
#
# Each stage of a pipeline is compared separately, by the time of one microbatch. The step grows
# with it under every schedule with one stage per rank. Decisions of several stages together are
# left out: the layouts of crossing tensors, and the storage of shared parameters.

_STEP = 2**0.5  # factor of the outward search for a sign change
_PRECISION = 1e-4  # relative precision of the factor


def all_flips(
    plan: Plan, trace: Trace, mesh: Mesh, hardware: Hardware, options: PlanOptions, *, most: int
) -> Flips:
    """Find the flips of each stage of a plan, the least change first, or the reason if there are
    none.

    Args:
        plan, trace, mesh, hardware, options: as in `autopar.planner.reprice.reprice_plan`.
        most: closest runner-ups per stage to price.
    """
    flips_of_stages: list[Flip] = []
    could_turn = False
    for number, part in enumerate(problems_of(plan, trace, mesh, hardware, options)):
        could_turn = could_turn or bool(_closest(part.plan, part.priced, part.shared))
        turning = flips(
            part.plan,
            part.trace,
            part.priced,
            part.mesh,
            part.priced.profile,
            most=most,
            shared=part.shared,
        )
        flips_of_stages += (
            replace(flip, stage=number if plan.pipeline else None) for flip in turning
        )
    return Flips(
        sorted(flips_of_stages, key=lambda flip: abs(math.log(flip.factor))),
        NO_FLIP if could_turn else _why_none(plan),
    )


def _why_none(plan: Plan) -> str:
    """Return the reason why no choice of a plan has a runner-up that could become better."""
    if any(entry.runner_up for stage in plan.stages for entry in stage.entries):
        return NO_DEARER
    return NO_CHOICE if plan.options.get("constraints") else NO_OTHER


def flips(
    plan: Plan,
    trace: Trace,
    priced: Priced,
    mesh: Mesh,
    profile: HardwareProfile,
    *,
    most: int,
    shared: Collection[str] = (),
) -> tuple[Flip, ...]:
    """Find, for each of the `most` closest runner-ups, the least change of the hardware that makes
    it the better choice. The least change is first; ops without one are left out.

    Args:
        plan: a plan without stages, or the plan of a stage.
        trace: its trace.
        priced: its problem, on `profile`.
        mesh: its mesh.
        profile: the hardware profile.
        most: runner-ups to price.
        shared: parameters that other stages hold, too.
    """
    strategies, again = decisions(priced, plan)
    choices = Solution(strategies, again, {}, 0.0, 0.0)
    links = dict.fromkeys(mesh.link(axis) for axis, size in enumerate(mesh.shape) if size > 1)
    touching = variants_by_op(priced.problem)
    forward, backward = load_of(plan).outlasts_compute(profile.overlap_slowdown)
    balance = (float(not forward), float(not backward))
    parameters = {p.name: p for p in trace.parameters}
    close_flips: list[Flip] = []
    assert len(plan.entries) == len(priced.sources), "an entry per op"
    for delta_s, index in _closest(plan, priced, shared)[:most]:
        entry = plan.entries[index]
        assert entry.runner_up is not None, "it is among the closest"
        named = tuple(
            i
            for i, s in enumerate(priced.problem.ops[index].strategies)
            if str(s.layouts) == entry.runner_up.strategy
        )
        changes: list[tuple[float, float, str]] = []
        for resource in (COMPUTE, *links):
            local = _Local(
                priced,
                parameters,
                choices,
                index,
                named,
                touching.get(index, ()),
                mesh,
                profile,
                resource,
                balance,
            )
            factor = nearest_root(local.delta_s)
            if factor is not None:
                changes.append((abs(math.log(factor)), factor, resource))
        if changes:
            _, factor, resource = min(changes)
            close_flips.append(Flip(entry.key, entry.runner_up.strategy, delta_s, resource, factor))
    return tuple(sorted(close_flips, key=lambda flip: abs(math.log(flip.factor))))


def _closest(plan: Plan, priced: Priced, shared: Collection[str]) -> list[tuple[float, int]]:
    """Sort ops by the extra cost of their runner-ups, without ops that a stage does not decide
    alone."""
    alone = [
        not source.crosses and set(shared).isdisjoint(source.names) for source in priced.sources
    ]
    return sorted(
        (e.runner_up.delta_s, i)
        for i, e in enumerate(plan.entries)
        if alone[i] and e.runner_up and e.runner_up.delta_s > 0
    )


@dataclass(frozen=True, slots=True)
class _Local:
    """The cost of one op's choice on hardware that is faster by a factor in `what`, at the prices
    of a balance.

    Attributes:
        others: strategies with the runner-up's layouts; they differ in the storage of a parameter.
    """

    priced: Priced
    parameters: Mapping[str, Parameter]
    choices: Solution
    index: int
    others: Sequence[int]
    touched: Sequence[int]
    mesh: Mesh
    profile: HardwareProfile
    what: str
    balance: OverlapWeights

    def delta_s(self, factor: float) -> float:
        """Compute the extra cost of the runner-up, in seconds."""
        problem = self._change_hardware(factor)
        return min(self._cost(problem, s) for s in self.others) - self._cost(
            problem, self.choices.strategies[self.index]
        )

    def _cost(self, problem: Problem, strategy: int) -> float:
        load = local_load(problem, self.choices, self.index, strategy, self.touched)
        return math.inf if load is None else load.priced_s(problem.overlap_slowdown, self.balance)

    def _change_hardware(self, factor: float) -> Problem:
        problem = self.priced.problem
        if self.what == COMPUTE:
            faster_s = self._with_strategies(
                lambda _, s: replace(
                    s, time_s=(s.time_s - s.communication_s) / factor + s.communication_s
                )
            )
            return replace(
                faster_s, kernels=self._kernels_saving(lambda h, _: h.saved_s / max(factor, 1.0))
            )
        price = CollectivePrices(self.mesh, with_faster(self.profile, self.what, factor - 1))
        moves = replace(self.priced.moves, price=price)
        values = list(problem.values)
        for v in {problem.variants[v].value for v in self.touched}:
            graph = values[v].graph
            arcs = tuple(_price_arc(arc, price) for arc in graph.arcs)
            values[v] = replace(values[v], graph=replace(graph, arcs=arcs))
        kernels = self._kernels_saving(
            lambda h, v: min(h.saved_s, values[problem.variants[v].value].graph.arcs[h.arc].time_s)
        )
        return replace(
            self._with_strategies(lambda i, s: self._reprice_moves(i, s, moves)),
            values=tuple(values),
            kernels=kernels,
        )

    def _kernels_saving(self, saved_s: Callable[[OverlapOption, int], float]) -> Kernels:
        """Change the savings of the kernels of the op's variants. A kernel saves as much as before,
        but at most the shorter of its collective and its product."""
        changed = dict[tuple[int, bool], tuple[OverlapKernel, ...]]()
        for (v, late), kernels in self.priced.problem.kernels.items():
            if v in self.touched:
                hides = [tuple(replace(h, saved_s=saved_s(h, v)) for h in k.hides) for k in kernels]
                changed[v, late] = tuple(
                    replace(k, hides=options) for k, options in zip(kernels, hides, strict=True)
                )
        return changed

    def _with_strategies(self, changed: Callable[[int, OpStrategy], OpStrategy]) -> Problem:
        """Change the prices of the compared strategies of the op."""
        ops = list(self.priced.problem.ops)
        op, compared = ops[self.index], {*self.others, self.choices.strategies[self.index]}
        ops[self.index] = replace(
            op,
            strategies=tuple(
                changed(i, s) if i in compared else s for i, s in enumerate(op.strategies)
            ),
        )
        return replace(self.priced.problem, ops=tuple(ops))

    def _reprice_moves(self, index: int, strategy: OpStrategy, moves: StepMoves) -> OpStrategy:
        """Reprice the collectives inside an op, or of a parameter at the begin and the end of a
        step, with `moves`."""
        source = self.priced.sources[self.index]
        if source.cluster is not None:
            members = zip(
                source.cluster.first.members, source.cluster.strategies[index].members, strict=True
            )
            moved_s: float | None = sum(map(moves.price, own_collectives(members, self.mesh.shape)))
        elif self.priced.problem.accumulates and source.kind == "parameter":
            moved_s = moves.seconds(self.parameters[source.names[0]], parameter_layouts(strategy))
        else:
            return strategy
        assert moved_s is not None, "the strategy is offered"
        return replace(
            strategy,
            time_s=strategy.time_s - strategy.communication_s + moved_s,
            communication_s=moved_s,
        )


def _price_arc(arc: Arc, price: CollectivePrices) -> Arc:
    share_s = None if arc.share_s is None else price.share(arc.collective)
    return replace(arc, time_s=price(arc.collective), share_s=share_s)


def nearest_root(delta: Callable[[float], float]) -> float | None:
    """Find the factor nearest to 1, on a logarithmic scale, at which `delta` is at most 0; None if
    there is none up to `FARTHEST`.

    The search steps outward on both sides, then bisects the first step with a sign change.
    """
    inner = 1.0
    while inner < FARTHEST:
        outer = inner * _STEP
        for side in (1, -1):
            if delta(outer**side) <= 0:
                low, high = inner, outer
                while high / low - 1 > _PRECISION:
                    middle = math.sqrt(low * high)
                    low, high = (middle, high) if delta(middle**side) > 0 else (low, middle)
                return high**side
        inner = outer
    return None
