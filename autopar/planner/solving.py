"""Solves the problems of one search."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from autopar.core.problem import Problem
from autopar.core.solution import FractionalGroups, Solution
from autopar.core.streams import COMPUTE_BOUND, OverlapWeights
from autopar.errors import InfeasibleError
from autopar.planner.pipeline.stage_cache import Effort, StageCache
from autopar.request import PlanOptions
from autopar.solve import (
    Cases,
    Common,
    Least,
    SearchRequest,
    SmallerProblem,
    choices_or_least,
    within,
)

_LEAST_WORK = (
    3e9  # simplex steps times columns, some seconds: the work limit of a search for the bound
)
# Relative gap from which a problem is divided into cases. Below it, cases take several times as
# long as the search before, and may find plans that are slower as emitted.
_LEAST_GAP = 0.05
_WORK_SHARE = 0.25  # share of the work of all earlier searches, if that is more


@dataclass
class ProblemSolver:
    """Calls the solver, or reuses its result for an equal stage.

    Attributes:
        options: the options of planning.
        stage_cache: the results of earlier stages.
        likely: the balance of the last problem whose bound has multipliers.
        has_plan: whether there is a plan, so that the time limit may end a search.
        common: what all searches share.
        cases: the cases of the last divided problem.
    """

    options: PlanOptions
    stage_cache: StageCache
    likely: OverlapWeights = COMPUTE_BOUND
    has_plan: bool = False
    common: Common = field(default_factory=Common)
    cases: Cases | None = None

    def answer(
        self,
        problem: Problem,
        effort: Effort,
        *,
        learnt: bool,
        regions: frozenset[int] | None,
        met: Solution | None = None,
    ) -> Solution | Least | FractionalGroups:
        """Solve a problem.

        Args:
            problem: the problem.
            effort: the effort of the search.
            learnt: whether the problem has learned moments. They are approximate, so the requested
                gap is halved.
            regions: the memory that kernels may share with their peers
                (`autopar.core.problem.Solution`).
            met: as in `autopar.solve.SearchRequest`.
        """
        spent = self.common.work.spent
        self.common.work.most = (
            spent + max(_WORK_SHARE * spent, _LEAST_WORK) if effort is Effort.END else math.inf
        )
        result = self._ask_solver(within(problem, regions), effort, met, learnt=learnt)
        if regions is None or isinstance(result, FractionalGroups):
            return result
        if isinstance(result, Solution):
            return replace(result, regions=regions)
        return (
            result
            if result.choices is None
            else replace(result, choices=replace(result.choices, regions=regions))
        )

    def _ask_solver(
        self, problem: Problem, effort: Effort, met: Solution | None, *, learnt: bool
    ) -> Solution | Least | FractionalGroups:
        known = None if learnt else self.stage_cache.known(problem, effort)
        if known is not None:
            return known
        divided = self._from_cases(problem, learnt=learnt)
        if divided is not None:
            return divided
        gap = self.options.gap / 2 if learnt else self.options.gap
        result = self._choices(problem, gap, effort, met, self.common)
        self.has_plan = self.has_plan or isinstance(result, Solution)
        if isinstance(result, Solution) and result.multipliers is not None:
            self.likely = result.multipliers.balance
        if not learnt and isinstance(result, Solution):
            result = self._divide(problem, result)
        if not isinstance(result, Least) and not learnt:
            self.stage_cache.learn(problem, result, effort)
        return result

    def _choices(
        self, problem: Problem, gap: float, effort: Effort, met: Solution | None, common: Common
    ) -> Solution | Least | FractionalGroups:
        request = SearchRequest(
            problem,
            gap,
            time_limit_s=self.options.solve_s,
            whole=effort is not Effort.MIXED,
            likely=COMPUTE_BOUND if problem.conditions else self.likely,
            only_plan=effort is not Effort.END,
            waits=not self.has_plan,
            common=common,
            met=met,
        )
        return choices_or_least(request, solver=self.options.solver, bound_only=True)

    def _divide(self, problem: Problem, solution: Solution) -> Solution:
        """Divide a problem into cases (`autopar.solve.cases`), if the gap of its solution is large.

        Returns:
            The solution, with the bound of all cases.
        """
        least = max(self.options.gap, _LEAST_GAP)
        if solution.split is None or solution.gap <= least or self.options.is_late:
            return solution
        self.cases = Cases.of(problem, solution, self.options.gap, self.common, self._ask_case)
        return self.cases.answer

    def _from_cases(self, problem: Problem, *, learnt: bool) -> Solution | None:
        """Solve a problem that was divided into cases before, with other moments."""
        if self.cases is None or not self.cases.are_of(problem):
            return None
        return self.cases.solve(problem) if learnt else self.cases.answer

    def without(
        self, smaller: SmallerProblem, limit_s: float, common: Common | None = None
    ) -> Solution | None:
        """Solve a problem without some strategies, and without dividing it into cases.

        Args:
            smaller: the problem without the strategies.
            limit_s: exclusive upper limit of the step, in seconds.
            common: what searches for the same problem with other moments have found.

        Returns:
            The solution, in terms of the whole problem; None if there is none below the limit.
        """
        solution = self._ask_case(smaller.problem, None, common or Common())
        if not isinstance(solution, Solution) or solution.objective_s >= limit_s:
            return None
        return smaller.restore(solution)

    def _ask_case(
        self, problem: Problem, met: Solution | None, common: Common
    ) -> Solution | Least | FractionalGroups | None:
        """Solve one case; None if the case is infeasible."""
        try:
            return self._choices(problem, self.options.gap, Effort.WHOLE, met, common)
        except InfeasibleError:
            return None
