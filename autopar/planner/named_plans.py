"""The comparison of the best plan with named plans, by the simulated step.

The search minimizes the objective, which counts the best overlap and the fullest buckets that a
solution admits. The simulated step of the emitted program is slightly longer, by a different share
for each plan. A named plan whose objective is slightly above the minimum may therefore have the
shorter simulated step. Since users compare plans by that step, the planner emits the named plans
whose objective is close to the minimum, and chooses the fastest. No simulated step is shorter than
its objective. With ``effort="thorough"``, every objective below the simulated step of the best plan
counts as close, so no named plan is faster than the result.

A named plan excludes strategies of the same problem. Its solution is a solution of that problem, so
the proven bound of the problem is also the bound of the plan. The reduced costs that follow from
the multipliers of the bound rule out most named plans without another solve.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.capture.trace import Trace
from autopar.constraints import Parallelism, context_parallel, ddp, fsdp, tensor_parallel
from autopar.core.layout import Strategy
from autopar.core.mesh import Mesh
from autopar.core.solution import Solution
from autopar.cost.priced import Priced
from autopar.errors import ConstraintError
from autopar.planner.candidates import Candidate
from autopar.planner.emitter import Emitter
from autopar.planner.learned_moments import LayerGroups
from autopar.planner.solving import ProblemSolver
from autopar.planner.timeline import simulated_s
from autopar.plans import Plan
from autopar.sharding import ClusterClass, Forced, LabelRow, Named, Walks, resolve_named
from autopar.solve import Common, SmallerProblem

Excluded = Mapping[int, frozenset[int]]
"""Op → the strategies that a named plan does not admit."""

_ROUNDS = 4  # solves of a named plan; each adds the moments at which it exceeds the budget
# Share of the distance from the objective to the simulated step of the best plan, within which the
# objective of another plan is close.
_CLOSE = {"normal": 0.25, "thorough": 1.0}


def _plans_on(axis: str, *, is_thorough: bool) -> tuple[Parallelism, ...]:
    """Return the named plans on one axis, those that are most often close to the best first. Plans
    that split the sequence take by far the longest to resolve."""
    plans = fsdp(axis), ddp(axis), tensor_parallel("1d", axes=axis)
    split_sequence = tensor_parallel("1d", axes=axis, sequence=True), context_parallel(axis)
    return (*plans, *split_sequence) if is_thorough else plans


@dataclass(frozen=True)
class NamedPlans:
    """The named plans of a trace on a mesh: one of `_plans_on` on each axis.

    Attributes:
        trace: the trace.
        mesh: its mesh.
        is_thorough: whether plans that split the sequence are included.
    """

    trace: Trace
    mesh: Mesh
    is_thorough: bool = False

    @cached_property
    def _walks(self) -> Walks:
        return Walks(self.trace)

    def search(
        self, priced: Priced, is_close: Callable[[Excluded], bool]
    ) -> Iterator[tuple[str, Excluded]]:
        """Yield the named plans that are close to the best plan.

        A plan on one axis is checked first, with the other axes free. If it is not close, it is not
        close in combination with any plan on the other axes.

        Args:
            priced: the problem whose strategies the plans exclude.
            is_close: whether a solution without these strategies may be close.

        Returns:
            The description of the plan, and the strategies that it excludes.
        """
        pairs = zip(self.mesh.names, self.mesh.shape, strict=True)
        on_axes = [
            [
                plan
                for plan in _plans_on(axis, is_thorough=self.is_thorough)
                if self._exclude(priced, (plan,), is_close)
            ]
            for axis, size in pairs
            if size > 1
        ]
        for plans in itertools.product(*on_axes):
            excluded = self._exclude(priced, plans, is_close)
            if excluded:
                yield " + ".join(map(str, plans)), excluded

    def _exclude(
        self, priced: Priced, plans: Sequence[Parallelism], is_close: Callable[[Excluded], bool]
    ) -> Excluded:
        """Return the strategies that named plans exclude; none if the plans cannot be applied, are
        not close, or decide separately about nodes that share a decision in this problem."""
        try:
            with _without_warnings():  # the user did not request these plans
                named = resolve_named(self.trace, plans, self.mesh, self._walks)
        except ConstraintError:  # the plans do not apply to this model
            return {}
        if named.separate:
            return {}
        excluded = excluded_by(priced, named)
        holds = all(len(out) < len(priced.problem.ops[n].strategies) for n, out in excluded.items())
        return excluded if holds and is_close(excluded) else {}


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Suppress the warnings of autopar."""
    log = logging.getLogger("autopar")

    def is_less(record: logging.LogRecord) -> bool:
        return record.levelno < logging.WARNING

    log.addFilter(is_less)
    try:
        yield
    finally:
        log.removeFilter(is_less)


def excluded_by(priced: Priced, named: Named) -> Excluded:
    """Return the strategies that named plans do not admit.

    Equal layers share a decision. A strategy is excluded if one of the layers does not admit it.

    Args:
        priced: the problem.
        named: the resolved plans.
    """
    forced = Forced({}, {}, named)
    excluded: dict[int, frozenset[int]] = {}
    for n, (op, source) in enumerate(zip(priced.problem.ops, priced.sources, strict=True)):
        if source.cluster is not None:
            excluded[n] = _excluded_of_cluster(source.cluster, named)
        elif op.kind == "parameter":
            layouts = [strategy.layouts.outputs[0] for strategy in op.strategies]
            rests = [forced.filter_storage(name, layouts) for name in source.names]
            excluded[n] = frozenset(
                s for s, at in enumerate(layouts) if not all(at in each for each in rests)
            )
    return {n: out for n, out in excluded.items() if out}


def _excluded_of_cluster(cluster_class: ClusterClass, named: Named) -> frozenset[int]:
    """Return the strategies that the rows of at least one of several equal clusters do not
    admit."""
    rows = {
        (i, axis, row)
        for cluster in cluster_class.instances
        for i, member in enumerate(cluster.members)
        for axis, row in named.rows.get(member.node, ())
    }
    return frozenset(
        s
        for s, strategy in enumerate(cluster_class.strategies)
        if not all(_admits(row, axis, strategy.members[i]) for i, axis, row in rows)
    )


def _admits(row: LabelRow, axis: int, strategy: Strategy) -> bool:
    """Whether a row admits a node's strategy on an axis."""
    return row.admits(
        tuple(layout.placements[axis] for layout in strategy.inputs),
        tuple(layout.placements[axis] for layout in strategy.outputs),
    )


@dataclass(frozen=True, slots=True)
class NamedComparison:
    """Compares the best plan of a search with named plans.

    Attributes:
        emitter: emits and measures plans.
        solving: solves problems.
        groups: the groups of layers of the best plan, with its bound.
        best: the best plan, with ordered communications.
    """

    emitter: Emitter
    solving: ProblemSolver
    groups: LayerGroups
    best: Candidate

    def fastest(self, named: NamedPlans) -> Candidate:
        """Return the plan with the shortest simulated step among the best plan and named plans.

        Args:
            named: the plans to compare with.
        """
        fastest, fastest_name, seconds = (
            self.best,
            "",
            simulated_s(self.best.program, self.best.plan),
        )
        objective_s = self.best.time_s
        limit_s = objective_s + _CLOSE[self.emitter.options.effort] * (seconds - objective_s)
        with self.emitter.clock.phase("named plans"):
            close = [
                *named.search(
                    self.groups.priced, lambda excluded: self._least_s(excluded) < limit_s
                )
            ]
        for name, excluded in close:
            candidate = self._emit(excluded, limit_s, seconds)
            if candidate is not None:
                its_s = simulated_s(candidate.program, candidate.plan)
                if its_s < seconds:
                    fastest, fastest_name, seconds = candidate, name, its_s
        return _note(fastest, fastest_name) if fastest_name else fastest

    def _least_s(self, excluded: Excluded) -> float:
        """Return a lower bound of the objective without some strategies, in seconds."""
        proven = self.groups.multipliers
        return 0.0 if proven is None else proven.bound_without(excluded)

    def _emit(self, excluded: Excluded, limit_s: float, fastest_s: float) -> Candidate | None:
        """Emit the best plan without some strategies.

        Args:
            excluded: op → excluded strategies.
            limit_s: exclusive upper limit of the objective, in seconds.
            fastest_s: exclusive upper limit of the simulated step, in seconds.

        Returns:
            The plan with ordered communications; None if it equals the best plan, is too slow, or
            does not fit.
        """
        groups = replace(self.groups, bound_s=self.best.bound_s).forget()
        smaller, common = SmallerProblem.of(groups.problem, excluded), Common()
        for _ in range(_ROUNDS):
            with self.emitter.clock.phase("solve"):
                solution = self.solving.without(smaller.at_moments(groups.problem), limit_s, common)
            if solution is None or _decisions(solution) == _decisions(self.best.draft.choices):
                return None
            candidate = self.emitter.emit(groups, solution)
            if self.emitter.fits(candidate):
                candidate = replace(candidate, plan=self._with_proof(candidate))
                return self.emitter.order_within(candidate, fastest_s)
            groups = replace(groups, learnt=self.emitter.learn(groups.learnt, candidate))
        return None

    def _with_proof(self, candidate: Candidate) -> Plan:
        """Return the plan of a candidate with the proof of the best plan, whose bound holds for all
        plans."""
        own_proof, proof = candidate.plan.proof, self.best.plan.proof
        gap = max(1.0 - proof.bound_s / own_proof.objective_s, 0.0)
        proof = replace(proof, objective_s=own_proof.objective_s, gap=gap, covers=own_proof.covers)
        return replace(candidate.plan, proof=proof)


def _decisions(choices: Solution) -> tuple[object, ...]:
    return choices.strategies, choices.recomputed, choices.kept, choices.regions


def _note(fastest: Candidate, name: str) -> Candidate:
    """Record in the proof that a named plan was chosen."""
    line = (
        "chosen because its simulated step is shorter than that of the plan with the least"
        f" objective: {name}"
    )
    proof = replace(fastest.plan.proof, covers=(*fastest.plan.proof.covers, line))
    return replace(fastest, plan=replace(fastest.plan, proof=proof))
