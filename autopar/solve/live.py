"""One relaxation kept alive: HiGHS keeps its basis, so that after a change of bounds, or with further rows, the dual simplex method
goes on from where it was. That takes a hundredth of solving anew.
"""

from __future__ import annotations

from dataclasses import dataclass

import highspy
import numpy as np

from autopar.solve.begun import Begun
from autopar.solve.engine import Engine, Options, reduced_costs
from autopar.solve.rows import Floats, Rows

_STATUS = highspy.HighsModelStatus


@dataclass(frozen=True, slots=True)
class Point:
    """A relaxation's answer under bounds of the columns.

    Attributes:
        bound: what the duals prove of every solution within these bounds, however exactly they were found.
        values: the columns. duals: y per row. reduced: cost − Aᵀy.
    """

    bound: float
    values: Floats
    duals: Floats
    reduced: Floats


class Live:
    """The relaxation of an engine's program, with some rows more; it starts where the engine's own has ended, or at duals of all rows.

    Attributes:
        num_iterations: of the simplex method so far, the engine's own among them.
    """

    def __init__(self, engine: Engine, extra: Rows, duals: Floats | None = None) -> None:
        self.cost, self.rows = engine.cost, engine.rows if duals is None else engine.rows.plus(extra)
        self._begun = engine.begun if duals is None else Begun(self.rows, duals)
        self.num_iterations, self._engine = engine.num_iterations, engine
        self._numbers = np.arange(len(self.cost), dtype=np.int32)
        self._bounds = np.zeros(len(self.cost)), np.ones(len(self.cost))
        self._highs = highspy.Highs()
        options: Options = {"output_flag": False, "threads": 1, "solver": "simplex"}
        for name, value in options.items():
            self._highs.setOptionValue(name, value)
        self._highs.passModel(self._begun.lp(self.cost, self.rows))
        if duals is None:
            if engine.basis is not None:
                self._highs.setBasis(engine.basis)
            self.add(extra)

    @property
    def is_over(self) -> bool:
        """Whether the engine's time ran out, or its work is done."""
        return self._engine.timed_out or self._engine.work.is_over

    def add(self, rows: Rows) -> None:
        """Further rows."""
        self.rows = self.rows.plus(rows)
        num, entries = len(rows.lower), len(rows.indices)
        self._highs.addRows(num, rows.lower, rows.upper, entries, rows.starts[:-1], rows.indices, rows.values)

    def reprice(self, cost: Floats) -> None:
        """Other costs of the columns."""
        self.cost = cost
        self._highs.changeColsCost(len(self._numbers), self._numbers, self._begun.costs(cost))

    def solve(self, lower: Floats, upper: Floats, most: int = highspy.kHighsIInf) -> Point | None:
        """Solve within bounds of the columns.

        Args:
            most: simplex steps, if the work that is left allows for as many. Bounds between which next to nothing is left can lead round
                in circles.

        Returns:
            None where nothing is within these bounds. Where the time or the steps ran out, what the duals of the moment prove, and after
            the steps no values.
        """
        changed = self._numbers[(lower != self._bounds[0]) | (upper != self._bounds[1])]
        self._highs.changeColsBounds(len(changed), changed, lower[changed], upper[changed])
        self._bounds = lower.copy(), upper.copy()
        self._highs.setOptionValue("simplex_iteration_limit", min(most, self._engine.work.steps_left(len(self.cost))))
        self._highs.setOptionValue("time_limit", self._highs.getRunTime() + self._engine.left_s())
        self._highs.run()
        status, solution = self._highs.getModelStatus(), self._highs.getSolution()
        steps = max(self._highs.getInfo().simplex_iteration_count, 0)
        self.num_iterations += steps
        self._engine.work.add(len(self.cost), steps)
        self._engine.note(status)
        if status == _STATUS.kInfeasible:
            return None
        found = self._begun.duals(np.array(solution.row_dual))
        bound, reduced, duals = reduced_costs(self.cost, self.rows, found, lower, upper)
        ended = status == _STATUS.kIterationLimit
        return Point(bound, np.array([] if ended else solution.col_value, float)[: len(self.cost)], duals, reduced)
