"""A relaxation that begins at given duals.

The simplex method begins at duals of 0, which prove next to nothing: of Llama-3 8B on three axes it takes 35,000 steps to the optimum, as
long as all else together. Dual ascent (`autopar.solve.ascent`) comes near the optimum in a fraction of that, but at no vertex, so no basis
says where it is. So the program is written with costs that are left at these duals y0, where each row has a column of its own for what it
has beyond its side:

    minimise (c − Aᵀy0)·x + |y0|·s        A x − sign(y0) s = b where y0 ≠ 0,  s ≥ 0

It is the same program: A x = b + sign(y0) s gives c·x − y0·b. Its duals are y − y0, and 0 is where they begin. From there some thousand
steps are left.
"""

from __future__ import annotations

import highspy
import numpy as np

from autopar.solve.rows import Floats, Rows


class Begun:
    """Where relaxations of a program begin.

    Args:
        rows: those that there are duals of, each with one side, or both the same. duals: y0; of a wrong sign they count as 0. None is 0.

    Attributes:
        knows: whether some dual is not 0.
    """

    def __init__(self, rows: Rows, duals: Floats | None = None) -> None:
        duals = np.zeros(len(rows.lower)) if duals is None else rows.signed(duals)
        self._rows, self._duals = rows, duals
        self._beyond = np.flatnonzero((duals != 0.0) & (rows.lower != rows.upper))
        self.knows = bool(duals.any())

    def costs(self, cost: Floats) -> Floats:
        """What is left of the costs of columns."""
        return cost - self._rows.times(self._duals, len(cost)) if self.knows else cost

    def duals(self, found: Floats) -> Floats:
        """y of rows, these and further ones, from what a solver found."""
        return found + np.pad(self._duals, (0, len(found) - len(self._duals))) if self.knows and len(found) else found

    def lp(self, cost: Floats, rows: Rows) -> highspy.HighsLp:
        """The program for the solver, its columns first.

        Args:
            rows: these, and perhaps further ones behind them.
        """
        num, at, y = len(cost), self._beyond, self._duals[self._beyond]
        lower, upper, ends = rows.lower.copy(), rows.upper.copy(), rows.starts[at + 1]
        lower[at] = upper[at] = np.where(y > 0.0, rows.lower[at], rows.upper[at])
        more = np.zeros(len(lower), np.int32)
        more[at] = 1
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = num + len(at), len(lower)
        lp.col_cost_ = np.concatenate([self.costs(cost), np.abs(y)])
        lp.col_lower_ = np.zeros(num + len(at))
        lp.col_upper_ = np.concatenate([np.ones(num), np.full(len(at), highspy.kHighsInf)])
        lp.row_lower_, lp.row_upper_ = lower, upper
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.concatenate([[0], np.cumsum(np.diff(rows.starts) + more)]).astype(np.int32)
        lp.a_matrix_.index_ = np.insert(rows.indices, ends, np.arange(num, num + len(at), dtype=np.int32))
        lp.a_matrix_.value_ = np.insert(rows.values, ends, -np.sign(y))
        return lp
