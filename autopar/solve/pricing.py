"""Memory by its price: the budget rows moved into the objective, and the price searched for.

    L(λ) = min Σ cost + λ₁·(static + kept) + λ₂·(static + gradient)      over (1–5)
    bound(λ) = L(λ) − (λ₁ + λ₂)·room     ≤ every plan that fits, for any λ ≥ 0 (Lagrangian relaxation; Geoffrion 1974)

With hard budget rows the relaxation is slow and fractional; with prices it is as integral as without memory at all. So
each λ gives a bound and a plan; plans shrink as λ grows. The price is doubled until a plan fits, then bisected (in its
logarithm) until plan and bound are close or no further plan appears. The best fitting plan is the answer, the best bound
its proof, and the last price what a byte is worth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pulp

from autopar.problem import Choices, Problem
from autopar.solve.evaluate import Evaluation, evaluate
from autopar.solve.formulation import GRADIENT_ROW, KEPT_ROW, SCALE, Formulation
from autopar.solve.running import Limits, chosen, dive, optimise

_DOUBLINGS = 5
_BISECTIONS = 5
_GROWTH = 8.0


@dataclass(frozen=True, slots=True)
class Trial:
    """What one price gave: choices, what they cost and hold, and the bound it proves."""

    price_s_per_byte: float
    choices: Choices
    evaluation: Evaluation
    bound_s: float


def resting(problem: Problem, evaluation: Evaluation) -> Mapping[str, int]:
    """Left sides of the budget rows (6) and (7), the reserve included, by row name."""
    rest = evaluation.static_bytes + problem.reserve_bytes
    return {KEPT_ROW: rest + evaluation.kept_bytes, GRADIENT_ROW: rest + evaluation.gradient_bytes}


def fits(problem: Problem, evaluation: Evaluation) -> bool:
    """Whether rows (6) and (7) hold."""
    return max(resting(problem, evaluation).values()) <= problem.budget_bytes


class PricedProgram:
    """The program without budget rows, solved again under new prices."""

    def __init__(self, problem: Problem, limits: Limits, solver: str) -> None:
        self.problem, self.limits, self.solver = problem, limits, solver
        self.program = Formulation(problem, with_memory=True, bounded=False)
        self._cost = dict(self.program.model.objective.items())
        self._rows = self.program.resting(1.0)

    def at(self, price_s_per_byte: float, rows: tuple[str, ...]) -> Trial:
        """Solve with this price on each of `rows`."""
        objective = dict(self._cost)
        for row in rows:
            for variable, size in self._rows[row]:
                objective[variable] = objective.get(variable, 0.0) + size * price_s_per_byte * SCALE
        bound = self._solve(objective)
        found = chosen(self.program)
        evaluation = evaluate(self.problem, found.strategies, found.recomputed, found.kept)
        room = self.problem.budget_bytes - self.problem.reserve_bytes
        choices = replace(found, kept=evaluation.kept, objective_s=evaluation.objective_s, solver=self.solver)
        return Trial(price_s_per_byte, choices, evaluation, bound / SCALE - len(rows) * price_s_per_byte * room)

    def least(self) -> int:
        """The least budget (without reserve) that some choice of the program fits into, proven by the solver's bound."""
        peak = self.program.model.add_variable("peak", 0)
        for name, terms in self._rows.items():
            scaled = [*((variable, size / 2**30) for variable, size in terms), (peak, -1)]
            row = pulp.LpConstraint(pulp.LpAffineExpression(scaled), pulp.LpConstraintLE, f"{name}_least", 0)
            self.program.model.addConstraint(row)
        return int(self._solve({peak: 1.0}) * 2**30)

    def _solve(self, objective: Mapping[pulp.LpVariable, float]) -> float:
        self.program.model.setObjective(pulp.LpAffineExpression(list(objective.items())))
        model = self.program.model
        bound = dive(model, self.limits, self.solver)
        if bound is None:  # what the relaxation fixed leaves no solution: search the whole
            bound = optimise(model, self.limits, self.solver)
        assert bound is not None, "without budget rows the program has the solution of the ample one"
        return bound


def search(problem: Problem, first: Evaluation, limits: Limits, gap: float, solver: str) -> tuple[Choices | None, PricedProgram]:
    """The best plan found that fits, or None.

    Args:
        first: what the plan without regard to memory costs and holds; it does not fit.
        gap: stop when plan and bound are this close.
    """
    program = PricedProgram(problem, limits, solver)
    over = resting(problem, first)
    rows = tuple(row for row, size in over.items() if size > problem.budget_bytes)
    price = 0.01 * first.objective_s / max(over.values())  # a hundredth of the step for all that rests
    low, best, bound = 0.0, None, 0.0
    for _ in range(_DOUBLINGS):
        trial = program.at(price, rows)
        bound = max(bound, trial.bound_s)
        if fits(problem, trial.evaluation):
            best = trial
            break
        rows = tuple(dict.fromkeys([*rows, *(r for r, size in resting(problem, trial.evaluation).items() if size > problem.budget_bytes)]))
        low, price = price, price * _GROWTH
    if best is None:
        return None, program
    high = price
    for _ in range(_BISECTIONS):
        if best.evaluation.objective_s - bound <= gap * best.evaluation.objective_s:
            break
        middle = (low * high) ** 0.5 if low else high / _GROWTH
        trial = program.at(middle, rows)
        bound = max(bound, trial.bound_s)
        if fits(problem, trial.evaluation):
            high = middle
            best = trial if trial.evaluation.objective_s < best.evaluation.objective_s else best
        else:
            low = middle
    return replace(best.choices, bound_s=bound, memory_price_s_per_byte=high), program
