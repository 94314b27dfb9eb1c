"""The smallest budget that would do: minimise the largest budget row over all choices."""

from __future__ import annotations

import numpy as np
import pulp

from autopar.problem import Problem
from autopar.solve.engine import Engine, Relaxation, Rows
from autopar.solve.evaluate import evaluate
from autopar.solve.formulation import Formulation
from autopar.solve.memory import BudgetRow, budget_rows

_SHARES = (1e-6, 1e-3, 1e-2)  # restricted programs: largest reduced cost, as a share of the bound
_ROUNDS, _NODES = 6, 50


def least_budget(problem: Problem, time_limit_s: float = 60.0) -> tuple[int, int]:
    """(no budget below this suffices, one that does suffice or 0 where none was found), in bytes, reserves included."""
    program = Formulation(problem)
    peak = program.model.add_variable("peak", 0, 1)
    program.model.setObjective(pulp.LpAffineExpression([(peak, 1.0)]))
    engine = Engine(program.model, time_limit_s)
    rows = budget_rows(problem)
    unit = _most(problem, rows)
    active, bound, enough = [0, 1], 0.0, 0
    for _ in range(_ROUNDS):
        matrix = _matrix(program, engine, [rows[r] for r in active], unit)
        relaxation = engine.relax(matrix)
        if relaxation is None:
            break
        bound = max(bound, relaxation.bound)
        sizes = _plan(problem, program, engine, matrix, relaxation)
        broken = [r for r, size in enumerate(sizes) if size == max(sizes) and r not in active]
        enough = min(enough or max(sizes), max(sizes)) if sizes else enough
        if not broken:
            break
        active += broken
    return int(np.ceil(bound * unit * (1 - 1e-9))), enough


def _most(problem: Problem, rows: tuple[BudgetRow, ...]) -> float:
    """More bytes than any row can come to: the unit of the peak."""
    kept = sum(variant.count * sum(problem.values[variant.value].graph.bytes) for variant in problem.variants)
    per_op = [max(op.count * (s.static_bytes + s.gradient_bytes) for s in op.strategies) for op in problem.ops]
    live = sum(max(sizes) for row in rows for _, sizes in row.live)
    return float(max(kept + sum(per_op) + live + max(row.reserve_bytes for row in rows), 1))


def _matrix(program: Formulation, engine: Engine, rows: list[BudgetRow], unit: float) -> Rows:
    """row ≤ peak, in shares of `unit`."""
    lines = []
    for row in rows:
        terms = program.budget_terms(row)
        columns = [*(engine.column[v.name] for v, _ in terms), engine.column["peak"]]
        lines.append((columns, [*(size / unit for _, size in terms), -1.0], -np.inf, -row.reserve_bytes / unit))
    return Rows.of(lines)


def _plan(problem: Problem, program: Formulation, engine: Engine, matrix: Rows, relaxation: Relaxation) -> tuple[int, ...]:
    """The budget rows of a plan with a small peak, or nothing."""
    for share in _SHARES:
        columns = relaxation.reduced <= share * relaxation.bound
        columns[engine.column["peak"]] = True
        found = engine.restricted(columns, matrix, gap=1e-3, target=-np.inf, max_nodes=_NODES)
        if found.values is not None:
            values = dict(zip(engine.names, found.values.tolist(), strict=True))
            return evaluate(problem, *program.chosen(values)).resting_bytes
    return ()
