"""Rows that are added to the program only after a plan violates them: budget rows, and the excess
of a phase.

The rows are numbered: budget rows in their order, then one row per phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.core.streams import COMPUTE_BOUND, PHASES, OverlapWeights
from autopar.solve.evaluate import Evaluation
from autopar.solve.formulation import SCALE, Formulation
from autopar.solve.highs import Engine
from autopar.solve.lp import AT_LEAST, Column, Columns, Floats, Rows, Terms
from autopar.solve.memory_rows import BudgetRow, budget_rows, unsure_bytes

# --------------------------------------------------------------------------------------------------
# Early communication that compute cannot hide, in the program: one column and one row per phase.
#
# A phase takes max(C + s·P, P) + K (`autopar.core.streams`). The objective has C + s·P + K, and in
# addition the *excess* of the phase
#
#     e ≥ (1 − s)·P − C        0 ≤ e ≤ u, at a price of 1
#
# The row is dense, and e is 0 in most plans. So it is added like budget rows, when a plan violates
# it. Let y in [0, 1] be the dual of the row. The program without the row proves the same bound at
# the prices of λ = 1 − y (`autopar.solve.prices`). The unit u is the time of a known plan: a plan
# with a larger excess is slower than that plan.

Line = tuple[
    list[int], list[float], float, float
]  # (columns, coefficients, lower bound, upper bound)
_DIGITS = 6  # digits of λ


@dataclass
class Excess:
    """The excess of each phase. Its columns are shares of the unit.

    Attributes:
        program: the program.
        variables: the column of each phase.
        unit: the unit in the program's unit; 0 until a row is added.
    """

    program: Formulation
    variables: tuple[Column, ...] = ()
    unit: float = 0.0

    def __post_init__(self) -> None:
        if self.variables:  # the same program, copied for another problem's moments
            return
        self.variables = tuple(self.program.model.add_column(f"excess_{phase}") for phase in PHASES)
        for variable in self.variables:  # their price has no effect: without a row they are 0
            self.program.model.costs[variable.number] = 1.0

    def columns(self, engine: Engine) -> list[int]:
        """Return the engine's columns of the excess, one per phase."""
        return [engine.column[variable.name] for variable in self.variables]

    def price(self, engine: Engine, step_s: float) -> Floats:
        """Return the engine's costs including those of the excess. The first call sets the unit to
        the time of a step."""
        self.unit = self.unit or step_s * SCALE
        engine.cost[self.columns(engine)] = self.unit
        return engine.cost

    def line(self, engine: Engine, phase: int) -> Line:
        """Return the row of a phase, in units."""
        terms = self._terms(phase)
        return (
            [engine.column[variable.name] for variable, _ in terms],
            [c for _, c in terms],
            0.0,
            np.inf,
        )

    def add(self, phase: int, step_s: float) -> None:
        """Add a row to the model itself."""
        self.unit = self.unit or step_s * SCALE
        self.program.model.add_row(self._terms(phase), AT_LEAST, 0.0)
        self.program.model.costs[self.variables[phase].number] = self.unit

    def _terms(self, phase: int) -> Terms:
        """Return the terms of (C − (1 − s)·P)/u + e, which must be at least 0."""
        slowdown = self.program.problem.overlap_slowdown
        numbers, _, compute_s, early_s = self.program.parts()
        parts = (compute_s[:, phase] - (1.0 - slowdown) * early_s[:, phase]) * SCALE / self.unit
        columns, some = self.program.model.columns, np.flatnonzero(parts)
        return [
            *zip([columns[n] for n in numbers[some]], parts[some].tolist(), strict=True),
            (self.variables[phase], 1.0),
        ]

    def balance(self, duals: dict[int, float]) -> OverlapWeights:
        """Return λ of each phase from the duals of the added rows."""
        if not self.unit:
            return COMPUTE_BOUND
        forward, backward = (
            round(1.0 - min(max(duals.get(phase, 0.0) / self.unit, 0.0), 1.0), _DIGITS)
            for phase in range(2)
        )
        return forward, backward


# --------------------------------------------------------------------------------------------------
# Budget rows, and the rows that were added.

_NEW = 3  # budget rows that are added at a time
_VIOLATION = 1e-4  # share of the budget by which a vertex has to exceed it


def budget_matrix(engine: Engine, program: Formulation, rows: Sequence[BudgetRow]) -> Rows:
    """Return budget rows over the engine's columns, in shares of the budget.

    Args:
        engine: the arrays of the program.
        program: the program.
        rows: the rows, in order.
    """
    unit = 1.0 / max(program.problem.budget_bytes, 1)
    lines = []
    for row in rows:
        terms = program.budget_terms(row)
        room = (program.problem.budget_bytes - row.reserve_bytes) * unit
        lines.append(
            (
                [engine.column[v.name] for v, _ in terms],
                [size * unit for _, size in terms],
                -np.inf,
                room,
            )
        )
    return Rows.of(lines)


@dataclass
class IncomingRows:
    """All such rows of a problem, and the numbers of the added rows in the order of their
    addition."""

    program: Formulation
    engine: Engine
    excess: Excess
    rows: tuple[BudgetRow, ...] = field(init=False)
    active: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows = budget_rows(self.program.problem)

    @property
    def budget(self) -> list[int]:
        """The budget rows that were added."""
        return [r for r in self.active if r < len(self.rows)]

    @property
    def phases(self) -> list[int]:
        """The phases whose excess was added."""
        return [r - len(self.rows) for r in self.active if r >= len(self.rows)]

    @property
    def reserves(self) -> bool:
        """Whether an added row has a reserve."""
        return any(unsure_bytes(self.program.problem, self.rows[r]) for r in self.budget)

    def over(self, evaluation: Evaluation) -> list[int] | None:
        """Return the rows to add after a plan exceeds the budget, the worst first.

        Returns:
            The rows; empty if a violated row was already added. None if the plan fits.
        """
        over = {
            r: size - self.program.problem.budget_bytes
            for r, size in enumerate(evaluation.resting_bytes)
        }
        broken = [r for r, size in over.items() if size > 0]
        if not broken:
            return (
                None if evaluation.host_bytes <= self.program.problem.host_budget_bytes else []
            )  # row (19) is in the program from the start
        return (
            [] if set(broken) & set(self.active) else sorted(broken, key=lambda r: -over[r])[:_NEW]
        )

    def violated(self, values: Floats) -> list[int]:
        """Return the budget rows to add because they cut off a vertex of the relaxation, the most
        violated first.

        Args:
            values: the values of the columns; empty if they are not known.
        """
        waiting = [r for r in range(len(self.rows)) if r not in self.active] if len(values) else []
        if not waiting:
            return []
        matrix = self.matrix(waiting)
        excess = matrix.activities(values) - matrix.upper
        worst = np.argsort(-excess, kind="stable")[:_NEW]
        return [waiting[i] for i in worst.tolist() if excess[i] > _VIOLATION]

    def rows_if_outlasted(self, evaluation: Evaluation) -> list[int]:
        """Return the rows to add after a plan whose communication outlasts compute: those of both
        phases."""
        return self.excesses() if evaluation.outlasted else []

    def excesses(self) -> list[int]:
        """Return the rows of both phases, if they were not added yet."""
        return [] if self.phases else [len(self.rows) + phase for phase in range(len(PHASES))]

    def matrix(self, rows: Sequence[int]) -> Rows:
        """Return these rows over the engine's columns, budget rows first."""
        budget = budget_matrix(
            self.engine, self.program, [self.rows[r] for r in rows if r < len(self.rows)]
        )
        phases = [r - len(self.rows) for r in rows if r >= len(self.rows)]
        return budget.plus(Rows.of([self.excess.line(self.engine, phase) for phase in phases]))

    def with_excess(self, columns: Columns) -> Columns:
        """Add the columns of the excess to a mask, since its rows need them."""
        columns[self.excess.columns(self.engine)] = True
        return columns

    def sizes(self) -> Floats:
        """Return the largest share of a budget that each column has in the added rows."""
        return self.matrix(self.budget).most(len(self.engine.names))
