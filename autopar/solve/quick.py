"""What is known of a huge program before it is written down: a plan, a bound, and potentials that prove it.

Where a model's ops take little but their launches, the plan that has every tensor whole on every device is among the best, and what takes
time is to prove that: the relaxation of some hundred thousand columns. So that plan is looked at first, with the bound that takes the
quickest strategy of each op. Where they are near, dual ascent (`autopar.solve.ascent`) brings the bound nearer, for as long as what
it still gains could do; plans from its potentials are looked at on the way. Where they are far apart communication decides: some dozens
of sweeps then bring the bound within a thousandth of the relaxation's, and plans from such potentials are often optimal. What that leaves
open the search begins with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from autopar.choices import Choices, Multipliers
from autopar.errors import LayoutError
from autopar.problem import Problem
from autopar.solve.ascent import Ascent
from autopar.solve.decided import decided
from autopar.solve.evaluate import evaluate, fits
from autopar.solve.multipliers import quickest

_HUGE = 100_000  # columns, about: from here on
_NEAR = 0.5  # relative distance: beyond, communication decides, and plans are poor before potentials are nearly optimal
_SWEEPS = (8, 8, 16, 32, 64)  # at a time
_CONVERGED = (8, 8, 16, 32)  # where communication decides: for as long as the bound hardly rises any more
_HOPE = 3.0  # as often as last time's gain may be gained still; not after the first time, when plans are poor


@dataclass
class Quick:
    """The best plan that fits, if any, and what is proven of all.

    Attributes:
        multipliers: of the bound; none where the quickest strategies prove nothing. ascent: if there was one.
    """

    problem: Problem
    gap: float
    bound_s: float = 0.0
    best: Choices | None = None
    multipliers: Multipliers | None = None
    ascent: Ascent | None = None

    @property
    def close(self) -> bool:
        return self.best is not None and self.best.objective_s * (1 - self.gap) <= self.bound_s

    @property
    def answer(self) -> Choices | None:
        """The plan, with what is proven of it."""
        if self.best is None:
            return None
        bound = min(self.bound_s, self.best.objective_s)
        none = {"timed_out": 0.0, "budget_rows": 0.0, "outlasted": 0.0}
        return replace(self.best, bound_s=bound, free_bound_s=bound, stats=none, multipliers=self.multipliers, solver="dual ascent")

    def look(self) -> None:
        """Look for a plan that is close enough."""
        self._prove(quickest(self.problem))
        self._offer(_whole(self.problem))
        if self.best is None or self.close:
            return
        self.ascent = ascent = Ascent(self.problem)
        self.best = replace(self.best, num_variables=ascent.num_strategies + ascent.num_flows, num_constraints=ascent.num_potentials)
        if self.best.objective_s * (1 - _NEAR) > self.bound_s:
            self._converge(ascent)
            return
        for i, num in enumerate(_SWEEPS):
            before = ascent.bound_s
            for _ in range(num):
                ascent.sweep()
            self._offer(decided(ascent))
            missing = self.best.objective_s * (1 - self.gap) - ascent.bound_s
            if missing <= 0.0:
                self._prove(ascent.multipliers())
            if self.close or (i and missing > _HOPE * (ascent.bound_s - before)):
                break
        if not self.close:
            self._prove(ascent.multipliers())

    def _converge(self, ascent: Ascent) -> None:
        """Bring the bound near the relaxation's, whatever the plans on the way; those of nearly optimal potentials are often optimal."""
        for i, num in enumerate(_CONVERGED):
            before = ascent.bound_s
            for _ in range(num):
                ascent.sweep()
            self._offer(decided(ascent))
            near = self.best is not None and self.best.objective_s * (1 - self.gap) <= ascent.bound_s
            if near or (i and ascent.bound_s - before > self.gap * ascent.bound_s):
                break
        self._prove(ascent.multipliers())

    def _prove(self, multipliers: Multipliers | None) -> None:
        if multipliers is not None and multipliers.bound_s > self.bound_s:
            self.bound_s, self.multipliers = multipliers.bound_s, multipliers

    def _offer(self, strategies: tuple[int, ...]) -> None:
        """Take a plan if there is one, it fits and is the best."""
        if min(strategies) < 0:
            return
        try:
            evaluation = evaluate(self.problem, strategies)
        except LayoutError:  # what one op makes another may have no use for
            return
        if fits(self.problem, evaluation) and evaluation.objective_s < (np.inf if self.best is None else self.best.objective_s):
            plan = Choices(strategies, {}, evaluation.kept, evaluation.objective_s, 0.0)
            self.best = plan if self.best is None else replace(
                plan, num_variables=self.best.num_variables, num_constraints=self.best.num_constraints
            )  # fmt: skip


def quick(problem: Problem, gap: float) -> Quick | None:
    """What is known of a huge program; None where it is not huge."""
    if _columns(problem) < _HUGE:
        return None
    found = Quick(problem, gap)
    found.look()
    return found


def _columns(problem: Problem) -> int:
    """About as many as there are: each reader, in each phase in which it may read, has the collectives of its tensor."""
    flows = 0
    for variant in problem.variants:
        value = problem.values[variant.value]
        readers = [1 + (use.phase == value.phase and problem.ops[use.op].recomputable) for use in variant.uses]
        flows += sum(readers) * len(value.graph.arcs)
    return flows + sum(len(op.strategies) for op in problem.ops)


def _whole(problem: Problem) -> tuple[int, ...]:
    """The strategies that have every tensor whole on every device; −1 where an op has none."""
    found = []
    for op in problem.ops:
        layouts = [(*s.layouts.inputs, *s.layouts.outputs) for s in op.strategies]
        found.append(next((i for i, each in enumerate(layouts) if all(x.is_replicated for x in each)), -1))
    return tuple(found)
