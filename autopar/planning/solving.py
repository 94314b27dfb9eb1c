"""The solver's answers to the problems of one search."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from autopar.choices import Apart, Choices
from autopar.planning.alike import Alike, Effort
from autopar.problem import Problem
from autopar.request import PlanOptions
from autopar.solve import Common, Least, choices_or_least, within
from autopar.streams import ON_COMPUTE, Balance

_LEAST_WORK = 3e9  # simplex steps by columns, about some seconds: what a search for the bound may do
_WORK_SHARE = 0.25  # of what all searches before have done, if that is more


@dataclass
class Solving:
    """Asks the solver, or what it said of a stage that is alike.

    Attributes:
        likely: the balance of the last problem whose bound has multipliers. has_plan: whether there is any, so that time may end a search.
        common: what its searches share.
    """

    options: PlanOptions
    alike: Alike
    likely: Balance = ON_COMPUTE
    has_plan: bool = False
    common: Common = field(default_factory=Common)

    def answer(
        self, problem: Problem, effort: Effort, *, learnt: bool, regions: frozenset[int] | None, met: Choices | None = None
    ) -> Choices | Least | Apart:
        """The answer to a problem.

        Args:
            learnt: whether it has moments that were learnt, which leave a part of the gap to what they do not know.
            regions: what kernels may share with their peers (`autopar.problem.Choices`). met: as in `autopar.solve.choices_or_least`.
        """
        spent = self.common.work.spent
        self.common.work.most = spent + max(_WORK_SHARE * spent, _LEAST_WORK) if effort is Effort.END else math.inf
        found = self._found(within(problem, regions), effort, met, learnt=learnt)
        if regions is None or isinstance(found, Apart):
            return found
        if isinstance(found, Choices):
            return replace(found, regions=regions)
        return found if found.choices is None else replace(found, choices=replace(found.choices, regions=regions))

    def _found(self, problem: Problem, effort: Effort, met: Choices | None, *, learnt: bool) -> Choices | Least | Apart:
        known = None if learnt else self.alike.known(problem, effort)
        if known is not None:
            return known
        found = choices_or_least(
            problem, gap=self.options.gap / 2 if learnt else self.options.gap, time_limit_s=self.options.solve_s,
            solver=self.options.solver, bound_only=True, whole=effort is not Effort.MIXED, likely=self.likely,
            only_plan=effort is not Effort.END, waits=not self.has_plan, common=self.common, met=met,
        )  # fmt: skip
        self.has_plan = self.has_plan or isinstance(found, Choices)
        if isinstance(found, Choices) and found.multipliers is not None:
            self.likely = found.multipliers.balance
        if not isinstance(found, Least) and not learnt:
            self.alike.learn(problem, found, effort)
        return found
