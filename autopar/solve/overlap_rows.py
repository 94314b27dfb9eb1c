"""Early communication that compute cannot hide, in the program: one column and one row per phase.

A phase takes max(C + s·P, P) + K (`autopar.core.streams`). The program pays C + s·P + K, and with
it the *excess* of the phase

    e ≥ (1 − s)·P − C        0 ≤ e ≤ u, at a price of 1

The row is dense, and in most plans e is 0. So it comes in as budget rows do: when a plan is found
of which it speaks. With y, from 0 to 1, the dual of the row, the program without it proves the same
at the prices of λ = 1 − y (`autopar.solve.prices`). The unit u is what a plan takes that is known
then: what has a larger excess is slower anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.core.streams import COMPUTE_BOUND, PHASES, OverlapWeights
from autopar.solve.formulation import SCALE, Formulation
from autopar.solve.highs import Engine
from autopar.solve.lp import AT_LEAST, Column, Floats, Terms

Line = tuple[list[int], list[float], float, float]  # columns, coefficients, lower and upper side
_DIGITS = 6  # of λ


@dataclass
class Excess:
    """The excess of each phase; columns are shares of the unit.

    Attributes:
        unit: of the program; 0 until a row comes in.
    """

    program: Formulation
    variables: tuple[Column, ...] = ()
    unit: float = 0.0

    def __post_init__(self) -> None:
        if self.variables:  # of the same program, for another problem's moments
            return
        self.variables = tuple(self.program.model.add_column(f"excess_{phase}") for phase in PHASES)
        for variable in self.variables:  # at any price: without a row it is 0
            self.program.model.costs[variable.number] = 1.0

    def columns(self, engine: Engine) -> list[int]:
        """The engine's columns of the excess, one per phase."""
        return [engine.column[variable.name] for variable in self.variables]

    def price(self, engine: Engine, step_s: float) -> Floats:
        """The engine's costs with those of the excess, the first time in the unit of a step."""
        self.unit = self.unit or step_s * SCALE
        engine.cost[self.columns(engine)] = self.unit
        return engine.cost

    def line(self, engine: Engine, phase: int) -> Line:
        """The row of a phase, in units."""
        terms = self._terms(phase)
        return (
            [engine.column[variable.name] for variable, _ in terms],
            [c for _, c in terms],
            0.0,
            np.inf,
        )

    def add(self, phase: int, step_s: float) -> None:
        """Bring a row into the model itself."""
        self.unit = self.unit or step_s * SCALE
        self.program.model.add_row(self._terms(phase), AT_LEAST, 0.0)
        self.program.model.costs[self.variables[phase].number] = self.unit

    def _terms(self, phase: int) -> Terms:
        """(C − (1 − s)·P)/u + e, which is at least 0."""
        slowdown = self.program.problem.overlap_slowdown
        numbers, _, compute_s, early_s = self.program.parts()
        parts = (compute_s[:, phase] - (1.0 - slowdown) * early_s[:, phase]) * SCALE / self.unit
        columns, some = self.program.model.columns, np.flatnonzero(parts)
        return [
            *zip([columns[n] for n in numbers[some]], parts[some].tolist(), strict=True),
            (self.variables[phase], 1.0),
        ]

    def balance(self, duals: dict[int, float]) -> OverlapWeights:
        """λ per phase from the duals of the rows that are in."""
        if not self.unit:
            return COMPUTE_BOUND
        forward, backward = (
            round(1.0 - min(max(duals.get(phase, 0.0) / self.unit, 0.0), 1.0), _DIGITS)
            for phase in range(2)
        )
        return forward, backward
