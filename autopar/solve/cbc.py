"""The same program solved by CBC, which comes with PuLP: for machines without HiGHS, and as its oracle."""

from __future__ import annotations

import warnings

import pulp

from autopar.problem import Choices, Problem
from autopar.solve.evaluate import evaluate
from autopar.solve.formulation import SCALE, Formulation
from autopar.solve.hiding import Excess
from autopar.solve.memory import budget_rows

_ROUNDS = 8


def solve_with_cbc(problem: Problem, gap: float, max_nodes: int, time_limit_s: float) -> Choices | None:
    """The best plan, or None where none fits; budget rows come in as plans break them, then the excess of a phase as one has any."""
    program = Formulation(problem)
    excess = Excess(program)
    rows = budget_rows(problem)
    with warnings.catch_warnings():  # it is to leave PuLP in version 4; until then this fallback needs no further package
        warnings.simplefilter("ignore", DeprecationWarning)
        engine = pulp.PULP_CBC_CMD(msg=False, threads=1, gapRel=gap, timeLimit=time_limit_s, maxNodes=max(max_nodes, 1))
    active: set[int] = set()
    outlasted: set[int] = set()
    for _ in range(_ROUNDS):
        program.model.solve(engine)
        if program.model.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
            return None
        strategies, recomputed, kept = program.chosen({v.name: v.value() or 0.0 for v in program.model.variables()})
        evaluation = evaluate(problem, strategies, recomputed, kept)
        broken = {r for r, size in enumerate(evaluation.resting_bytes) if size > problem.budget_bytes}
        exceeds = {phase for phase, said in enumerate(evaluation.load.unbalanced(evaluation.slowdown)) if said} - outlasted
        if not broken and exceeds:
            for phase in sorted(exceeds):
                excess.add(phase, evaluation.objective_s)
            outlasted |= exceeds
            continue
        if not broken:
            # CBC through PuLP does not report its bound: what it proved is the gap it stopped at
            bound = min(pulp.value(program.model.objective) / SCALE * (1.0 - gap), evaluation.objective_s)
            free = bound if not any(rows[r].reserve_bytes for r in active) else 0.0
            return Choices(
                strategies, recomputed, evaluation.kept, evaluation.objective_s, bound, free, program.num_variables,
                program.num_constraints, "cbc",
            )  # fmt: skip
        for r in sorted(broken - active):
            program.add_budget(rows[r])
        active |= broken
    return None
