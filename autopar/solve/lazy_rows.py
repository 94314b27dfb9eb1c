"""Rows that are added to the program only after a plan breaks them: budget rows, and the excess of
a phase.

Rows are numbered: budget rows in their order, then one per phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.core.streams import PHASES
from autopar.solve.evaluate import Evaluation
from autopar.solve.formulation import Formulation
from autopar.solve.highs import Engine
from autopar.solve.lp import Columns, Floats, Rows
from autopar.solve.memory_rows import BudgetRow, budget_rows, unsure_bytes
from autopar.solve.overlap_rows import Excess

_NEW = 3  # budget rows at a time


def budget_matrix(engine: Engine, program: Formulation, rows: Sequence[BudgetRow]) -> Rows:
    """Build budget rows over the engine's columns, in shares of the budget.

    Args:
        engine, program: the program, and its arrays.
        rows: those to build, in their order.
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
class Incoming:
    """All such rows of a problem, and which of them are in, in the order in which they came."""

    program: Formulation
    engine: Engine
    excess: Excess
    rows: tuple[BudgetRow, ...] = field(init=False)
    active: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows = budget_rows(self.program.problem)

    @property
    def budget(self) -> list[int]:
        """Budget rows that are in."""
        return [r for r in self.active if r < len(self.rows)]

    @property
    def phases(self) -> list[int]:
        """Those whose excess is in."""
        return [r - len(self.rows) for r in self.active if r >= len(self.rows)]

    @property
    def reserves(self) -> bool:
        """Whether a row that is in holds something back."""
        return any(unsure_bytes(self.program.problem, self.rows[r]) for r in self.budget)

    def over(self, evaluation: Evaluation) -> list[int] | None:
        """List the rows to add after a plan exceeds the budget, the worst first.

        Returns:
            The rows; none if one that the plan breaks is in already. None if the plan fits.
        """
        over = {
            r: size - self.program.problem.budget_bytes
            for r, size in enumerate(evaluation.resting_bytes)
        }
        broken = [r for r, size in over.items() if size > 0]
        if not broken:
            return (
                None if evaluation.host_bytes <= self.program.problem.host_budget_bytes else []
            )  # row (19) is in from the start
        return (
            [] if set(broken) & set(self.active) else sorted(broken, key=lambda r: -over[r])[:_NEW]
        )

    def rows_if_outlasted(self, evaluation: Evaluation) -> list[int]:
        """List the rows to add after a plan whose communication outlasts compute: both phases'."""
        return self.excesses() if evaluation.outlasted else []

    def excesses(self) -> list[int]:
        """List both phases' rows, if they are not in yet."""
        return [] if self.phases else [len(self.rows) + phase for phase in range(len(PHASES))]

    def matrix(self, rows: Sequence[int]) -> Rows:
        """Build these rows over the engine's columns, budget rows first."""
        budget = budget_matrix(
            self.engine, self.program, [self.rows[r] for r in rows if r < len(self.rows)]
        )
        phases = [r - len(self.rows) for r in rows if r >= len(self.rows)]
        return budget.plus(Rows.of([self.excess.line(self.engine, phase) for phase in phases]))

    def with_excess(self, columns: Columns) -> Columns:
        """Add the columns of the excess, without which its rows do not hold, to a mask."""
        columns[self.excess.columns(self.engine)] = True
        return columns

    def sizes(self) -> Floats:
        """Per column its largest share of a budget in the rows that are in."""
        return self.matrix(self.budget).most(len(self.engine.names))
