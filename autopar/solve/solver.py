"""Running the program: HiGHS through PuLP, PuLP's own CBC as fallback.

Where memory is ample the program without (5, 6, 7) is solved first: it is a relaxation, so its bound holds, and if its
answer fits the budget it is the answer. Otherwise the whole program is solved; its relaxation gives the price of memory.
Limits count nodes of the search tree, not seconds, so the same problem gives the same choices.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import pulp

from autopar.errors import InfeasibleError, size_text
from autopar.problem import Choices, Problem
from autopar.solve.evaluate import Evaluation, evaluate
from autopar.solve.formulation import GRADIENT_ROW, KEPT_ROW, SCALE, Formulation

log = logging.getLogger("autopar")
GIB = 2**30


def solve(problem: Problem, *, gap: float = 0.01, max_nodes: int = 200, time_limit_s: float = 60.0, solver: str = "highs") -> Choices:
    """Choose strategies, recomputation and kept versions.

    Args:
        gap: stop when incumbent and bound are this close (relative).
        max_nodes: limit of the search tree. time_limit_s: a safety net; where it strikes, the answer may differ between
            machines and `Choices.stats["timed_out"]` is 1.
        solver: ``highs`` or ``cbc``.

    Raises:
        InfeasibleError: with the smallest budget that would do.
    """
    ample = _run(Formulation(problem, with_memory=False), gap, max_nodes, time_limit_s, solver)
    if ample is None:
        raise InfeasibleError("no assignment of layouts is legal", remedy="relax the constraints; each op needs one strategy that meets them")
    evaluation = evaluate(problem, ample.strategies)
    ample = replace(ample, kept=evaluation.kept, objective_s=evaluation.objective_s)
    if fits(problem, evaluation):
        return ample
    tight = _with_memory(problem, gap, max_nodes, time_limit_s, solver)
    return replace(tight, bound_s=max(tight.bound_s, ample.bound_s))


def fits(problem: Problem, evaluation: Evaluation) -> bool:
    """Whether rows (6) and (7) hold."""
    rest = evaluation.static_bytes + problem.reserve_bytes
    return max(rest + evaluation.kept_bytes, rest + evaluation.gradient_bytes) <= problem.budget_bytes


def _with_memory(problem: Problem, gap: float, max_nodes: int, time_limit_s: float, solver: str) -> Choices:
    relaxed = Formulation(problem, with_memory=True, relaxed=True)
    price = 0.0
    if _optimise(relaxed.model, gap, max_nodes, time_limit_s, solver) is not None:
        rows = [relaxed.model.get_constraint_by_name(name).pi or 0.0 for name in (KEPT_ROW, GRADIENT_ROW)]
        price = sum(max(-pi, 0.0) for pi in rows) / SCALE / problem.budget_bytes
    found = _run(Formulation(problem, with_memory=True), gap, max_nodes, time_limit_s, solver)
    if found is None:
        least = smallest_budget(problem, time_limit_s, solver) + problem.reserve_bytes
        raise InfeasibleError(
            f"no plan fits into {size_text(problem.budget_bytes)} per device; at least {size_text(least)} is needed"
            f" ({size_text(problem.reserve_bytes)} of it for the transient peak)",
            remedy="use more devices, a smaller batch or shorter sequence, or pass a larger memory_bytes",
        )
    evaluation = evaluate(problem, found.strategies, found.recomputed, found.kept)
    return replace(found, kept=evaluation.kept, objective_s=evaluation.objective_s, memory_price_s_per_byte=price)


def smallest_budget(problem: Problem, time_limit_s: float = 60.0, solver: str = "highs") -> int:
    """The least that static and kept bytes, or static and gradient bytes, can come to (by the relaxation, a lower bound)."""
    program = Formulation(problem, with_memory=True, relaxed=True, bounded=False)
    peak = program.model.add_variable("peak", 0)
    for name, terms in program.resting(1.0 / GIB).items():
        program.model.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression([*terms, (peak, -1)]), pulp.LpConstraintLE, name, 0))
    program.model.setObjective(pulp.LpAffineExpression([(peak, 1.0)]))
    value = _optimise(program.model, 0.0, 0, time_limit_s, solver)
    return int(value * GIB) if value is not None else 0


def _run(program: Formulation, gap: float, max_nodes: int, time_limit_s: float, solver: str) -> Choices | None:
    bound = _optimise(program.model, gap, max_nodes, time_limit_s, solver)
    if bound is None:
        return None
    strategies = tuple(_chosen(row) for row in program.x)
    recomputed = {n: _chosen(row) for n, row in program.again.items() if sum(v.value() or 0.0 for v in row) > 0.5}
    kept: dict[int, tuple[int, ...]] = {}
    for (v, layout), variable in program.keep.items():
        if (variable.value() or 0.0) > 0.5:
            kept[v] = (*kept.get(v, ()), layout)
    return Choices(
        strategies, recomputed, kept, pulp.value(program.model.objective) / SCALE, bound / SCALE,
        program.num_variables, program.num_constraints, solver,
    )  # fmt: skip


def _chosen(row: list[pulp.LpVariable]) -> int:
    return max(range(len(row)), key=lambda s: (row[s].value() or 0.0, -s))


def _optimise(model: pulp.LpProblem, gap: float, max_nodes: int, time_limit_s: float, solver: str) -> float | None:
    """Solve; the proven lower bound, or None where infeasible."""
    if solver == "highs":
        engine = pulp.HiGHS(msg=False, threads=1, gapRel=gap, timeLimit=time_limit_s, mip_max_nodes=max(max_nodes, 1))
    else:
        engine = pulp.PULP_CBC_CMD(msg=False, threads=1, gapRel=gap, timeLimit=time_limit_s, maxNodes=max(max_nodes, 1))
    model.solve(engine)
    if model.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return None
    value = pulp.value(model.objective)
    if solver != "highs":  # CBC through PuLP does not report its bound: what it proved is the gap it stopped at
        return value * (1.0 - gap) if model.isMIP() else value
    info = model.solverModel.getInfo()
    return info.mip_dual_bound if model.isMIP() else value
