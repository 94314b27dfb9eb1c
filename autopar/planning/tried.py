"""A plan on trial, and that none need be tried."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from autopar.choices import Apart, Choices
from autopar.planning.draft import PlanDraft
from autopar.plans import Plan
from autopar.problem import Problem
from autopar.run.program import Program


class TooSlow(Exception):
    """No plan is as fast as is asked for; its argument is the bound in seconds."""


Elsewhere = Callable[[float, float], float]
"""Plans of another kind, given the seconds of a step that was found and what any computes at least; what one of this kind may take beside
them."""


def beside(look: Elsewhere, problem: Problem, found: Choices | Apart) -> float:
    """Seconds that a plan may take beside those of another kind, which are looked for now."""
    return look(math.inf if isinstance(found, Apart) else found.objective_s, problem.computing_s)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that was emitted: its peak, all that rests included, and the bound that holds for all plans."""

    draft: PlanDraft
    plan: Plan
    program: Program
    peak_bytes: int
    bound_s: float

    @property
    def time_s(self) -> float:
        return self.draft.evaluation.objective_s

    @property
    def gap(self) -> float:
        return (self.time_s - self.bound_s) / self.time_s if self.time_s else 0.0
