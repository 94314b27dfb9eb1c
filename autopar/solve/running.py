"""Running a program: HiGHS through PuLP, PuLP's own CBC as fallback. Limits count nodes of the search tree, not seconds."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pulp

from autopar.problem import Choices
from autopar.solve.formulation import SCALE, Formulation

_INTEGRAL = 1e-6


@dataclass(frozen=True, slots=True)
class Limits:
    """When a single solve stops: relative gap, nodes of the tree, and seconds as a safety net."""

    gap: float
    max_nodes: int
    time_limit_s: float


def dive(model: pulp.LpProblem, limits: Limits, solver: str) -> float | None:
    """Solve by its relaxation: what is integral there is fixed, and the small rest is searched.

    Returns the relaxation's value, a proven lower bound, or None where the rest has no solution. Where the relaxation is
    nearly integral this costs little more than the relaxation itself, and loses little.
    """
    bound = optimise(model, limits, solver, relaxed=True)
    if bound is None:
        return None
    binaries = [v for v in model.variables() if v.cat == pulp.LpInteger]
    fixed = [(v, round(v.value())) for v in binaries if abs(v.value() - round(v.value())) < _INTEGRAL]
    if len(fixed) == len(binaries):
        return bound
    for variable, value in fixed:
        variable.bounds(value, value)
    found = optimise(model, limits, solver)
    for variable, _ in fixed:
        variable.bounds(0, 1)
    return None if found is None else bound


def optimise(model: pulp.LpProblem, limits: Limits, solver: str, *, relaxed: bool = False) -> float | None:
    """Solve; the proven lower bound, or None where there is no solution within the limits."""
    shared = {"msg": False, "threads": 1, "gapRel": limits.gap, "timeLimit": limits.time_limit_s, "mip": not relaxed}
    nodes = max(limits.max_nodes, 1)
    engine = pulp.HiGHS(**shared, mip_max_nodes=nodes) if solver == "highs" else _cbc(shared, nodes)
    model.solve(engine)
    if model.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return None
    value = pulp.value(model.objective)
    if relaxed or not model.isMIP():
        return float(value)
    if solver != "highs":  # CBC through PuLP does not report its bound: what it proved is the gap it stopped at
        return float(value) * (1.0 - limits.gap)
    return float(model.solverModel.getInfo().mip_dual_bound)


def _cbc(shared: Mapping[str, Any], nodes: int) -> pulp.LpSolver:
    """PuLP's own CBC. It is to leave PuLP in version 4; until then the fallback needs no further package."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return pulp.PULP_CBC_CMD(**shared, maxNodes=nodes)


def chosen(program: Formulation) -> Choices:
    """The solved program's choices, without a bound."""
    strategies = tuple(_largest(row) for row in program.x)
    recomputed = {n: _largest(row) for n, row in program.again.items() if sum(v.value() or 0.0 for v in row) > 0.5}
    kept: dict[int, tuple[int, ...]] = {}
    for (v, layout), variable in program.keep.items():
        if (variable.value() or 0.0) > 0.5:
            kept[v] = (*kept.get(v, ()), layout)
    objective = pulp.value(program.model.objective) / SCALE
    return Choices(strategies, recomputed, kept, objective, 0.0, program.num_variables, program.num_constraints)


def _largest(row: list[pulp.LpVariable]) -> int:
    return max(range(len(row)), key=lambda s: (row[s].value() or 0.0, -s))
