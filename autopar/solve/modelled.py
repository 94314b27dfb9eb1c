"""The whole program as a PuLP model, solved by any solver that PuLP finds (`autopar.solve.named`).

Budget rows, and those of early communication (`autopar.solve.hiding`), come in as plans break them: solve, look at what the plan breaks,
add those rows, solve again, until nothing is broken. So every solve is of a relaxation of the problem, and what is proven of it holds for
the problem. A solver that says "optimal" has proven its gap; of one that a limit has ended, PuLP does not tell the bound, and the bound of
the relaxation is taken, which HiGHS' duals prove (`autopar.solve.engine`).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pulp

from autopar.choices import Choices
from autopar.errors import AutoparError
from autopar.problem import Problem
from autopar.solve.engine import Engine
from autopar.solve.evaluate import Evaluation, evaluate
from autopar.solve.formulation import SCALE, Formulation
from autopar.solve.hiding import Excess
from autopar.solve.illegal import refusal
from autopar.solve.memory import budget_rows, unsure_bytes
from autopar.solve.model import Model
from autopar.solve.named import PulpSolver, pulp_solver
from autopar.streams import PHASES

_TOLERANCE = 1e-5  # share of the budget: what solvers take for feasible is over it by less
_GRAIN = 1e-6  # relative, of objectives: what a solver with a gap of 0 takes for equal


@dataclass(frozen=True, slots=True)
class _Answer:
    """Values of columns by name; the proven bound in seconds."""

    values: Mapping[str, float]
    bound_s: float


def solve_modelled(problem: Problem, solver: str, gap: float, time_limit_s: float) -> Choices | None:
    """The best plan by one of PuLP's solvers; None where none fits, or none was found in time.

    Args:
        solver: its name. time_limit_s: of all solves together.

    Raises:
        InfeasibleError: where no assignment of layouts is legal, whatever the memory.
        AutoparError: where the solver is not there, or fails.
    """
    used, ends = pulp_solver(solver), time.monotonic() + time_limit_s
    program = Formulation(problem)
    excess, rows = Excess(program), list(budget_rows(problem))
    active, outlasted, tightened = set[int](), set[int](), 0
    bound_s = free_s = 0.0
    while True:
        found = _solved(program.model, used, gap, ends - time.monotonic(), problem if not active else None)
        if found is None:
            return None
        strategies, recomputed, kept, regions = program.chosen(found.values)
        evaluation = evaluate(problem, strategies, recomputed, kept, regions if active else None)  # else regions cost nothing yet
        if not tightened:  # under a row that was made tighter, what is proven is not of all plans
            bound_s = max(bound_s, found.bound_s)
            free_s = bound_s if not any(unsure_bytes(problem, rows[r]) for r in active) else free_s
        broken = {r for r, size in enumerate(evaluation.resting_bytes) if size > problem.budget_bytes}
        exceeds = _exceeding(evaluation) - outlasted
        if not broken and not exceeds:
            bound_s, free_s = min(bound_s, evaluation.objective_s), min(free_s, evaluation.objective_s)
            return Choices(
                strategies, recomputed, evaluation.kept, evaluation.objective_s, bound_s, free_s, program.num_variables,
                program.num_constraints, solver.lower(), regions=regions if active else None,
            )  # fmt: skip
        if not broken:
            for phase in sorted(exceeds):
                excess.add(phase, evaluation.objective_s)
            outlasted |= exceeds
        if broken and broken <= active:  # by the solver's tolerance
            tightened += 1
            margin = math.ceil(problem.budget_bytes * _TOLERANCE * 2**tightened)
            for r in sorted(broken):
                program.add_budget(replace(rows[r], reserve_bytes=rows[r].reserve_bytes + margin))
        for r in sorted(broken - active):
            program.add_budget(rows[r])
        active |= broken


def _exceeding(evaluation: Evaluation) -> set[int]:
    return set(range(len(PHASES))) if evaluation.outlasted else set()


def _solved(model: Model, solver: PulpSolver, gap: float, left_s: float, free: Problem | None) -> _Answer | None:
    """One solve; None where nothing was found.

    Args:
        free: the problem, where no budget row is in, so that without a solution no layouts are legal.
    """
    made = to_pulp(model)
    try:
        made.solve(solver.made(gap, left_s))
    except pulp.PulpSolverError as error:
        what = f"solver {solver.name} failed through PuLP: {error}"
        raise AutoparError(what, remedy="check its installation and licence, or pass another solver") from error
    if made.status == pulp.LpStatusInfeasible and free is not None:
        raise refusal(free)
    if made.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return None
    values = {v.name: v.value() or 0.0 for v in made.variables()}
    if made.sol_status == pulp.LpSolutionOptimal and solver.keeps_gap:
        objective = sum(cost * values[column.name] for column, cost in zip(model.columns, model.costs, strict=True))
        return _Answer(values, (objective - max(gap, _GRAIN) * abs(objective)) / SCALE)
    relaxation = Engine(model).relax()
    return _Answer(values, 0.0 if relaxation is None else relaxation.bound / SCALE)


def to_pulp(model: Model, columns: Mapping[str, str] | None = None, rows: list[str] | None = None) -> pulp.LpProblem:
    """The same program in PuLP's words; each row has one side, or two that are equal.

    Args:
        columns: names to use in place of those of the model, for each. rows: names of the rows, which have none by themselves.
    """
    made = pulp.LpProblem("autopar", pulp.LpMinimize)
    names = [c.name if columns is None else columns[c.name] for c in model.columns]
    kinds = [pulp.LpBinary if c.integer else pulp.LpContinuous for c in model.columns]
    variables = [made.add_variable(name, 0, 1, kind) for name, kind in zip(names, kinds, strict=True)]
    made += pulp.LpAffineExpression([(variable, cost) for variable, cost in zip(variables, model.costs, strict=True) if cost])
    sides = zip(itertools.pairwise(model.starts), model.lower, model.upper, strict=True)
    for i, ((start, end), lower, upper) in enumerate(sides):
        entries = zip(model.numbers[start:end], model.values[start:end], strict=True)
        terms = pulp.LpAffineExpression([(variables[number], value) for number, value in entries])
        sense = pulp.LpConstraintEQ if lower == upper else pulp.LpConstraintLE if math.isinf(lower) else pulp.LpConstraintGE
        side = lower if math.isinf(upper) else upper
        made.addConstraint(pulp.LpConstraint(terms, sense, None if rows is None else rows[i], side))
    return made
