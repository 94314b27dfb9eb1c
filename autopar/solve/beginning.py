"""Where the relaxation of a large program begins: at the potentials of dual ascent (`autopar.solve.ascent`), and at a price of memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.solve.ascent import Ascent
from autopar.solve.engine import Engine
from autopar.solve.formulation import FLOW, SCALE, Formulation
from autopar.solve.multipliers import completed
from autopar.solve.rows import Floats, Rows

_SWEEPS = 8  # fewer leave the simplex method more to do than they take, more take longer than they save
_SWEEPS_PER_PRICE = 3
_FIRST, _MOST = 0.01, 16.0  # prices of memory that are tried, of the whole budget, as shares of the bound


@dataclass
class Beginning:
    """Dual ascent on a program's problem, as duals of its rows."""

    program: Formulation
    engine: Engine
    ascent: Ascent

    def free(self) -> Floats:
        """Duals of the program's own rows."""
        for _ in range(_SWEEPS if self.ascent.num_sweeps < _SWEEPS else 0):
            self.ascent.sweep()
        return self._duals(Rows.of([]), np.zeros(0))

    def priced(self, further: Rows, budget_row: str, position: int) -> Floats:
        """Duals of the program's and of further rows, where one is a budget row with a price that proves much.

        Args:
            position: of that row, among the further ones.
        """
        best_s, found, worth_s = -np.inf, 0.0, _FIRST * self.ascent.bound_s
        most_s = _MOST * self.ascent.bound_s
        while worth_s <= most_s:
            self._go_on(budget_row, worth_s)
            if self.ascent.bound_s <= best_s:
                break
            best_s, found, worth_s = self.ascent.bound_s, worth_s, 2.0 * worth_s
        self._go_on(budget_row, found)
        theirs = np.zeros(len(further.lower))
        theirs[position] = -found * SCALE
        return np.concatenate([self._duals(further, theirs), theirs])

    def _go_on(self, budget_row: str, worth_s: float) -> None:
        self.ascent.reprice({budget_row: worth_s})
        for _ in range(_SWEEPS_PER_PRICE):
            self.ascent.sweep()

    def _duals(self, further: Rows, theirs: Floats) -> Floats:
        potentials: dict[tuple[int, ...], float] = {}
        for group in self.ascent.groups:
            lowest = 0.0 if group.late else min(float(reader.worth.min()) for reader in group.readers)
            useful = np.flatnonzero(group.useful[: group.num])
            for reader in group.readers:
                key = FLOW, group.variant, int(group.late), reader.use
                potentials |= zip(((*key, i) for i in useful.tolist()), (reader.worth[useful] - lowest).tolist(), strict=True)
        known = np.array([potentials.get(key, 0.0) for key in self.program.keys]) * SCALE
        return completed(self.program, self.engine, self.engine.cost, known, further, theirs)
