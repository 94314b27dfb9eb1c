"""The same program solved by CBC, which comes with PuLP: for machines without HiGHS, and as its oracle.

The program is a PuLP model here, made of the arrays that HiGHS takes (`autopar.solve.model`).
"""

from __future__ import annotations

import itertools
import math
import warnings

import pulp

from autopar.choices import Choices
from autopar.problem import Problem
from autopar.solve.evaluate import evaluate
from autopar.solve.formulation import SCALE, Formulation
from autopar.solve.hiding import Excess
from autopar.solve.illegal import refusal
from autopar.solve.memory import budget_rows, unsure_bytes
from autopar.solve.model import Model
from autopar.streams import PHASES

_ROUNDS = 8


def solve_with_cbc(problem: Problem, gap: float, max_nodes: int, time_limit_s: float) -> Choices | None:
    """The best plan, or None where none fits; budget rows come in as plans break them, then the excess of a phase as one has any.

    Raises:
        InfeasibleError: where no assignment of layouts is legal, whatever the memory.
    """
    program = Formulation(problem)
    excess = Excess(program)
    rows = budget_rows(problem)
    with warnings.catch_warnings():  # it is to leave PuLP in version 4; until then this fallback needs no further package
        warnings.simplefilter("ignore", DeprecationWarning)
        limit_s = None if math.isinf(time_limit_s) else time_limit_s
        engine = pulp.PULP_CBC_CMD(msg=False, threads=1, gapRel=gap, timeLimit=limit_s, maxNodes=max(max_nodes, 1))
    active: set[int] = set()
    outlasted: set[int] = set()
    for _ in range(_ROUNDS):
        model = to_pulp(program.model)
        model.solve(engine)
        if model.sol_status == pulp.LpSolutionInfeasible and not active:
            raise refusal(problem)
        if model.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
            return None
        strategies, recomputed, kept, regions = program.chosen({v.name: v.value() or 0.0 for v in model.variables()})
        allowed = regions if active else None  # else they cost nothing yet
        evaluation = evaluate(problem, strategies, recomputed, kept, allowed)
        broken = {r for r, size in enumerate(evaluation.resting_bytes) if size > problem.budget_bytes}
        exceeds = ({*range(len(PHASES))} if evaluation.outlasted else set()) - outlasted
        if not broken and exceeds:
            for phase in sorted(exceeds):
                excess.add(phase, evaluation.objective_s)
            outlasted |= exceeds
            continue
        if not broken:
            # CBC through PuLP does not report its bound: what it proved is the gap it stopped at
            bound = min(pulp.value(model.objective) / SCALE * (1.0 - gap), evaluation.objective_s)
            free = bound if not any(unsure_bytes(problem, rows[r]) for r in active) else 0.0
            return Choices(
                strategies, recomputed, evaluation.kept, evaluation.objective_s, bound, free, program.num_variables,
                program.num_constraints, "cbc", regions=allowed,
            )  # fmt: skip
        for r in sorted(broken - active):
            program.add_budget(rows[r])
        active |= broken
    return None


def to_pulp(model: Model) -> pulp.LpProblem:
    """The same program in PuLP's words; each row has one side, or two that are equal."""
    made = pulp.LpProblem("autopar", pulp.LpMinimize)
    variables = [made.add_variable(c.name, 0, 1, pulp.LpBinary if c.integer else pulp.LpContinuous) for c in model.columns]
    made += pulp.LpAffineExpression([(variable, cost) for variable, cost in zip(variables, model.costs, strict=True) if cost])
    for (start, end), lower, upper in zip(itertools.pairwise(model.starts), model.lower, model.upper, strict=True):
        entries = zip(model.numbers[start:end], model.values[start:end], strict=True)
        terms = pulp.LpAffineExpression([(variables[number], value) for number, value in entries])
        sense = pulp.LpConstraintEQ if lower == upper else pulp.LpConstraintLE if math.isinf(lower) else pulp.LpConstraintGE
        made.addConstraint(pulp.LpConstraint(terms, sense, None, lower if math.isinf(upper) else upper))
    return made
