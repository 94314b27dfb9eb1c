"""A plan, a bound and its potentials for a huge program, before the program is built.

If a model's ops take little more than their launches, the plan that keeps every tensor whole on
every device is among the best. The expensive part is its proof, by a relaxation of some hundred
thousand columns. So that plan is tried first, with the bound from the fastest strategy of each op.
If they are close, dual ascent (`autopar.solve.dual_ascent`) raises the bound as long as its
progress may still close the gap, and plans from its potentials are tried on the way. If they are
far apart, communication decides. Some dozens of sweeps then bring the bound within a thousandth of
the relaxation's, and plans from such potentials are often optimal. The search starts from the
remaining gap.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from autopar.core.problem import Problem
from autopar.core.solution import Multipliers, Solution
from autopar.errors import LayoutError
from autopar.solve.dual_ascent import Ascent
from autopar.solve.evaluate import evaluate, fits
from autopar.solve.multipliers import quickest
from autopar.solve.potentials import Decision, Floats, PricedReader, ReaderGroup

# --------------------------------------------------------------------------------------------------
# A plan from potentials: decisions are fixed one after the other. Each is the cheapest, given the
# fixed decisions and the potentials of the others.
#
# If a tensor is available already, or its reader is fixed, the cost of the collectives between
# them replaces the reader's potentials. A layout in which one reader has the tensor is available
# to the others. All versions are kept, and nothing is recomputed.

_NEVER = 1e30  # seconds: the cost of an unreachable layout


@dataclass
class _Settled:
    """The fixed layouts of each group.

    Attributes:
        at_hand: available layouts of the tensor.
        read: readers and the layouts in which they read it.
    """

    ascent: Ascent
    at_hand: dict[int, list[int]] = field(default_factory=dict)
    read: dict[int, list[tuple[PricedReader, int]]] = field(default_factory=dict)

    def costs(self, decision: Decision, groups: list[int]) -> Floats:
        """Compute the cost of each strategy in seconds, given the fixed decisions."""
        costs_left = decision.costs.copy()
        for g in groups:
            group = self.ascent.groups[g]
            there = self._costs_from(group, self.at_hand[g]) if g in self.at_hand else None
            for reader in group.readers:
                if there is not None and reader.side.decision is decision:
                    costs_left += (there - reader.worth)[reader.side.at]
            for source in group.sources:
                if source.decision is decision:
                    for reader, layout in self.read.get(g, ()):
                        costs = self._costs_to(group, layout)
                        costs = costs if there is None else np.minimum(costs, there[layout])
                        costs_left += source.times * (reader.worth + costs)[source.at]
        return costs_left

    def settle(self, decision: Decision, strategy: int, groups: list[int]) -> None:
        """Record the layouts that a strategy computes and reads.

        Args:
            decision: the decision of the op.
            strategy: its chosen strategy.
            groups: indices of the ascent's groups whose tensor the decision computes or reads.
        """
        for g in groups:
            group = self.ascent.groups[g]
            for source in group.sources:
                if source.decision is decision and source.times[strategy]:
                    self.at_hand.setdefault(g, []).append(int(source.at[strategy]))
            for reader in group.readers:
                if reader.side.decision is decision:
                    layout = int(reader.side.at[strategy])
                    self.read.setdefault(g, []).append((reader, layout))
                    if g in self.at_hand:
                        self.at_hand[g].append(layout)

    def _costs_from(self, group: ReaderGroup, layouts: list[int]) -> Floats:
        """Compute the least cost of collectives from any of these layouts to each layout."""
        costs = np.full(len(group.useful), np.inf)
        costs[layouts] = 0.0
        return np.minimum(group.arcs.spread(costs, group.costs), _NEVER)

    def _costs_to(self, group: ReaderGroup, layout: int) -> Floats:
        """Compute the least cost of collectives from each layout to this one."""
        costs = np.full(len(group.useful), -np.inf)
        costs[layout] = 0.0
        return np.minimum(-group.arcs.draw(costs, group.costs), _NEVER)


def decide_greedily(ascent: Ascent, *, back: bool = False) -> tuple[int, ...]:
    """Choose a strategy per op.

    Args:
        ascent: the ascent with its potentials.
        back: whether to decide in reverse order.
    """
    groups: dict[int, list[int]] = {}
    for g, group in enumerate(ascent.groups):
        places = {
            side.decision.place
            for side in (*group.sources, *(reader.side for reader in group.readers))
        }
        for place in sorted(places):
            groups.setdefault(place, []).append(g)
    settled, decided = _Settled(ascent), dict[int, int]()
    recomputation_places = {decision.place for decision in ascent.again.values()}
    for decision in ascent.order[::-1] if back else ascent.order:
        if decision.place not in recomputation_places:
            here = groups.get(decision.place, [])
            decided[decision.place] = strategy = int(np.argmin(settled.costs(decision, here)))
            settled.settle(decision, strategy, here)
    return tuple(decided[decision.place] for decision in ascent.x)


_HUGE = 100_000  # approximate number of columns from which a program is huge
# relative distance of plan and bound above which communication decides, and plans are poor until
# potentials are nearly optimal
_NEAR = 0.5
_SWEEPS = (8, 8, 16, 32, 64)  # sweeps between plans
_CONVERGED = (
    8,
    8,
    16,
    32,
)  # sweeps if communication decides, until the bound hardly rises
# the ascent ends if the gap exceeds this multiple of the last gain; not after the first sweeps,
# when plans are poor
_HOPE = 3.0


@dataclass
class Quick:
    """The best plan that fits, if any, and the proven bound of all plans.

    Attributes:
        multipliers: the multipliers of the bound; None if the fastest strategies prove nothing.
        ascent: the ascent, if there was one.
    """

    problem: Problem
    gap: float
    bound_s: float = 0.0
    best: Solution | None = None
    multipliers: Multipliers | None = None
    ascent: Ascent | None = None

    @property
    def close(self) -> bool:
        """Whether the gap of the best plan is at most the requested gap."""
        return self.best is not None and self.best.objective_s * (1 - self.gap) <= self.bound_s

    @property
    def answer(self) -> Solution | None:
        """The plan, with the proven bound."""
        if self.best is None:
            return None
        bound = min(self.bound_s, self.best.objective_s)
        none = {"timed_out": 0.0, "budget_rows": 0.0, "outlasted": 0.0}
        return replace(
            self.best,
            bound_s=bound,
            free_bound_s=bound,
            stats=none,
            multipliers=self.multipliers,
            solver="dual ascent",
        )

    def look(self) -> None:
        """Search for a plan that is close enough."""
        self._prove(quickest(self.problem))
        self._offer(_find_replicated(self.problem))
        if self.best is None or self.close:
            return
        self.ascent = ascent = Ascent(self.problem)
        self.best = replace(
            self.best,
            num_variables=ascent.num_strategies + ascent.num_flows,
            num_constraints=ascent.num_potentials,
        )
        if self.best.objective_s * (1 - _NEAR) > self.bound_s:
            self._converge(ascent)
            return
        for i, num in enumerate(_SWEEPS):
            before = ascent.bound_s
            for _ in range(num):
                ascent.sweep()
            self._offer(decide_greedily(ascent))
            missing = self.best.objective_s * (1 - self.gap) - ascent.bound_s
            if missing <= 0.0:
                self._prove(ascent.multipliers())
            if self.close or (i and missing > _HOPE * (ascent.bound_s - before)):
                break
        if not self.close:
            self._prove(ascent.multipliers())

    def _converge(self, ascent: Ascent) -> None:
        """Raise the bound close to that of the relaxation, regardless of the plans on the way;
        plans from nearly optimal potentials are often optimal."""
        for i, num in enumerate(_CONVERGED):
            before = ascent.bound_s
            for _ in range(num):
                ascent.sweep()
            self._offer(decide_greedily(ascent))
            near = (
                self.best is not None and self.best.objective_s * (1 - self.gap) <= ascent.bound_s
            )
            if near or (i and ascent.bound_s - before > self.gap * ascent.bound_s):
                break
        self._prove(ascent.multipliers())

    def _prove(self, multipliers: Multipliers | None) -> None:
        if multipliers is not None and multipliers.bound_s > self.bound_s:
            self.bound_s, self.multipliers = multipliers.bound_s, multipliers

    def _offer(self, strategies: tuple[int, ...]) -> None:
        """Record a plan if it is legal, fits and is the best."""
        if min(strategies) < 0:
            return
        try:
            evaluation = evaluate(self.problem, strategies)
        except LayoutError:  # a reader may not be able to use the layout of a result
            return
        if fits(self.problem, evaluation) and evaluation.objective_s < (
            np.inf if self.best is None else self.best.objective_s
        ):
            plan = Solution(strategies, {}, evaluation.kept, evaluation.objective_s, 0.0)
            self.best = (
                plan
                if self.best is None
                else replace(
                    plan,
                    num_variables=self.best.num_variables,
                    num_constraints=self.best.num_constraints,
                )
            )


def quick(problem: Problem, gap: float) -> Quick | None:
    """Search for a plan and a bound of a huge program; None if the program is not huge."""
    if _columns(problem) < _HUGE:
        return None
    search = Quick(problem, gap)
    search.look()
    return search


def _columns(problem: Problem) -> int:
    """Estimate the number of columns: each reader has the collectives of its tensor, once for each
    phase in which it may read."""
    flows = 0
    for variant in problem.variants:
        value = problem.values[variant.value]
        readers = [
            1 + (use.phase == value.phase and problem.ops[use.op].recomputable)
            for use in variant.uses
        ]
        flows += sum(readers) * len(value.graph.arcs)
    return flows + sum(len(op.strategies) for op in problem.ops)


def _find_replicated(problem: Problem) -> tuple[int, ...]:
    """Return the strategies that keep every tensor whole on every device; −1 if an op has none."""
    choices = []
    for op in problem.ops:
        layouts = [(*s.layouts.inputs, *s.layouts.outputs) for s in op.strategies]
        choices.append(
            next((i for i, each in enumerate(layouts) if all(x.is_replicated for x in each)), -1)
        )
    return tuple(choices)
