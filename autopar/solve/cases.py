"""The search of a problem divided into cases.

If communication outlasts compute, the relaxation mixes plans: a small share of a plan that computes
everything whole on every node, with little communication and much compute, and a large share of a
plan that splits everything between the nodes. No solution can do so, since layers that change
between the two plans communicate their activations. A search tree hardly closes the resulting gap:
its relaxations have a fixed balance of compute and communication
(`autopar.core.streams.Load.priced_s`), at which both plans cost the same.

A condition (`autopar.core.problem.Condition`) separates the two plans. Every solution satisfies the
condition or its opposite, so the problem is divided into two cases with separate relaxations,
balances and multipliers. The least of their bounds is a bound of the problem. The case with the
least bound is divided again, until that bound is close to the best plan. A case is done if its
bound is close to the plan: it has no plan that is better by more than the gap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.core.problem import Condition, Problem
from autopar.core.solution import CaseMultipliers, FractionalGroups, Multipliers, Solution
from autopar.solve.common import Common
from autopar.solve.highs import SimplexWork
from autopar.solve.lp import Floats
from autopar.solve.min_budget import Least

_LEAST_SHARE = 0.01  # least share of either side of a condition in the mixture
_MOST_CASES = 12
_FLAT = 0.05  # a division is flat if it raises the bound by a smaller share of the gap
_MOST_FLAT = 2  # consecutive flat divisions after which a case is not divided again
_WORK = 1.5e9  # work limit of one case, in simplex steps times columns
_ALL_WORK = 5e9  # work of all cases of a problem after which no case is divided
_FAR = 0.05  # relative gap from which equal layers may still be grouped

Ask = Callable[[Problem, Solution | None, Common], Solution | Least | FractionalGroups | None]
"""Solves a case, given its problem, the best plan so far, if any, and the state that its searches
share. It returns None if the case is infeasible."""


def find_split(problem: Problem, shares: Sequence[Floats]) -> Condition | None:
    """Find the condition that divides a mixture of plans best. It is the condition on the op whose
    time differs most between the strategies on its two sides, weighted by both shares.

    Args:
        problem: the relaxed problem.
        shares: per op, the share of each strategy in the mixture.

    Returns:
        The condition that an op runs whole along an axis; None if no condition divides the mixture.
    """
    best_s, best = 0.0, None
    for n, op in enumerate(problem.ops):
        used = np.flatnonzero(shares[n] > 1e-6)
        if len(used) < 2:
            continue
        share = shares[n][used]
        times_s = op.count * np.array([op.strategies[s].time_s for s in used])
        for axis in range(_num_axes(problem, n)):
            condition = Condition(n, axis, is_whole=True)
            admitted = np.array([condition.admits(op.strategies[s].layouts) for s in used])
            admitted_share, split = float(share[admitted].sum()), float(share[~admitted].sum())
            if min(admitted_share, split) < _LEAST_SHARE:
                continue
            means = [float(share[some] @ times_s[some]) for some in (admitted, ~admitted)]
            divided_s = admitted_share * split * abs(means[0] / admitted_share - means[1] / split)
            if divided_s > best_s * (1.0 + 1e-9):
                best_s, best = divided_s, condition
    return best


def _num_axes(problem: Problem, n: int) -> int:
    layouts = problem.ops[n].strategies[0].layouts
    return next((len(each.placements) for each in (*layouts.outputs, *layouts.inputs)), 0)


@dataclass
class Case:
    """The solutions of a problem that satisfy some conditions.

    Attributes:
        conditions: the conditions; none for the whole problem.
        bound_s: lower bound of these solutions in seconds; infinite if none fits.
        free_bound_s: as in `autopar.core.solution.Solution`.
        multipliers: multipliers that prove a bound by arithmetic alone, possibly a lower one.
        split: the condition that divides the case; None if it cannot be divided.
        num_flat: consecutive divisions that hardly raised the bound.
    """

    conditions: tuple[Condition, ...]
    bound_s: float
    free_bound_s: float
    multipliers: Multipliers | None
    split: Condition | None
    num_flat: int = 0


@dataclass
class Cases:
    """The cases of one problem, and its result.

    Attributes:
        problem: the problem without learned moments.
        work: counts the work of all searches.
        leaves: the cases. Each solution is in exactly one of them.
        answer: the best plan, with the bound of all cases.
    """

    problem: Problem
    gap: float
    ask: Ask
    work: SimplexWork
    answer: Solution
    leaves: list[Case] = field(default_factory=list)

    @staticmethod
    def of(problem: Problem, found: Solution, gap: float, common: Common, ask: Ask) -> Cases:
        """Divide a problem into cases as long as that helps.

        Args:
            problem: the solved problem.
            found: its solution, with a condition that divides it (`Solution.split`).
            gap: the requested relative gap between plan and bound.
            common: the shared state of the searches for the problem, which counts their work.
            ask: solves a case.
        """
        root = Case((), found.bound_s, found.free_bound_s, found.multipliers, found.split)
        cases = Cases(problem, gap, ask, common.work, found, [root])
        cases._divide()
        return cases

    def are_of(self, problem: Problem) -> bool:
        """Return whether a problem equals the divided problem except for its moments."""
        same = (problem.ops is self.problem.ops, problem.variants is self.problem.variants)
        return all(same) and problem.regions == self.problem.regions

    def solve(self, problem: Problem) -> Solution | None:
        """Solve the problem with other moments, case by case, in the order of their bounds.

        Returns:
            The best plan, whose bound is that of all cases; None if no case has a plan.
        """
        best: Solution | None = None
        bounds = [case.bound_s for case in self.leaves]
        for place in np.argsort(bounds, kind="stable").tolist():
            case = self.leaves[place]
            if best is not None and bounds[place] >= best.objective_s * (1.0 - self.gap):
                continue
            answer = self._ask(problem, case, best)
            if isinstance(answer, Solution):
                bounds[place] = max(bounds[place], answer.bound_s)
                best = answer if best is None or answer.objective_s < best.objective_s else best
            elif answer is None or isinstance(answer, Least):
                bounds[place] = math.inf
        if best is None:
            return None
        bound_s = min(best.objective_s, *bounds)
        free_s = min(best.objective_s, *(case.free_bound_s for case in self.leaves))
        return replace(best, bound_s=bound_s, free_bound_s=free_s, multipliers=None, split=None)

    def _divide(self) -> None:
        root, most = self.answer, self.work.spent + _ALL_WORK
        while True:
            self.leaves.sort(key=lambda case: (case.bound_s, case.conditions))
            case = self.leaves[0]
            is_close = case.bound_s >= self.answer.objective_s * (1.0 - self.gap)
            is_over = len(self.leaves) >= _MOST_CASES or self.work.spent >= most
            if is_close or case.split is None or is_over:
                break
            self.leaves.pop(0)
            for condition in (case.split, case.split.opposite):
                self.leaves.append(self._solve_part(case, condition))
        self._conclude(root)

    def _solve_part(self, case: Case, condition: Condition) -> Case:
        """Solve the part of a case that meets one more condition."""
        part = replace(case, conditions=(*case.conditions, condition), split=None)
        answer = self._ask(self.problem, part, replace(self.answer, bound_s=0.0))
        if answer is None or isinstance(answer, Least):
            return replace(part, bound_s=math.inf, free_bound_s=math.inf)
        if isinstance(answer, FractionalGroups):
            return replace(part, bound_s=max(case.bound_s, answer.bound_s))
        if answer.objective_s < self.answer.objective_s:
            self.answer = answer
        proven = [m for m in (case.multipliers, answer.multipliers) if m is not None]
        missing_s = self.answer.objective_s - case.bound_s
        is_flat = answer.bound_s - case.bound_s < _FLAT * missing_s
        num_flat = case.num_flat + 1 if is_flat else 0
        return replace(
            part,
            bound_s=max(case.bound_s, answer.bound_s),
            free_bound_s=max(case.free_bound_s, answer.free_bound_s),
            multipliers=max(proven, key=lambda m: m.bound_s, default=None),
            split=answer.split if num_flat < _MOST_FLAT else None,
            num_flat=num_flat,
        )

    def _conclude(self, root: Solution) -> None:
        """Complete the result with the bound of all cases."""
        best_s = self.answer.objective_s
        bound_s = min(best_s, *(case.bound_s for case in self.leaves))
        is_far = best_s * (1.0 - max(self.gap, _FAR)) > bound_s
        self.answer = replace(
            self.answer,
            bound_s=bound_s,
            free_bound_s=min(best_s, *(case.free_bound_s for case in self.leaves)),
            multipliers=self._multipliers(root.multipliers),
            mixed=root.mixed if is_far else {},
            num_variables=root.num_variables,
            num_constraints=root.num_constraints,
            unfinished=False,
            split=None,
        )

    def _multipliers(self, before: Multipliers | None) -> Multipliers | None:
        """Return the multipliers of all cases, if they prove more than those of the problem."""
        proofs = [
            CaseMultipliers(case.conditions, case.multipliers)
            for case in self.leaves
            if case.multipliers is not None
        ]
        bound_s = min((case.multipliers.bound_s for case in proofs), default=0.0)
        if len(proofs) < len(self.leaves) or (before is not None and before.bound_s >= bound_s):
            return before
        return Multipliers(bound_s, {}, {}, cases=tuple(proofs))

    def _ask(
        self, problem: Problem, case: Case, met: Solution | None
    ) -> Solution | Least | FractionalGroups | None:
        """Solve a case within its work limit."""
        most, self.work.most = self.work.most, min(self.work.most, self.work.spent + _WORK)
        answer = self.ask(replace(problem, conditions=case.conditions), met, Common(self.work))
        self.work.most = most
        return answer
