"""A program as it is written down, for either solver: columns that lie in [0, 1], their costs, and rows.

Some hundred thousand columns are usual, so that an object of PuLP's for each, and an expression for each row, took longer than the solver
did. Here a row goes straight into arrays, which HiGHS takes as they are (`autopar.solve.engine`); of the same arrays a PuLP model is made
for its solvers (`autopar.solve.modelled`).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """A variable in [0, 1]; `number` counts them in the order in which they were made."""

    number: int
    name: str
    integer: bool


Terms = list[tuple[Column, float]]
Costs = tuple[NDArray[np.int32], NDArray[np.float64]]
"""Numbers of columns, and the cost of each."""
EQUAL, AT_MOST, AT_LEAST = "=", "≤", "≥"


@dataclass(slots=True)
class Model:
    """Minimise Σ cost·column, within the rows.

    Attributes:
        costs: by the column's number.
        starts, numbers, values: row i has entries starts[i]:starts[i+1]; an entry is a column's number and a value.
        lower, upper: sides of the rows.
    """

    columns: list[Column] = field(default_factory=list)
    costs: array[float] = field(default_factory=lambda: array("d"))
    starts: array[int] = field(default_factory=lambda: array("i", [0]))
    numbers: array[int] = field(default_factory=lambda: array("i"))
    values: array[float] = field(default_factory=lambda: array("d"))
    lower: array[float] = field(default_factory=lambda: array("d"))
    upper: array[float] = field(default_factory=lambda: array("d"))

    def add_column(self, name: str, *, integer: bool = False) -> Column:
        """A further column; names differ."""
        column = Column(len(self.columns), name, integer)
        self.columns.append(column)
        self.costs.append(0.0)
        return column

    def add_row(self, terms: Sequence[tuple[Column, float]], sense: str, right: float) -> None:
        """Σ value·column against the right side; no column stands in it twice."""
        self.numbers.extend([column.number for column, _ in terms])
        self.values.extend([value for _, value in terms])
        self.starts.append(len(self.numbers))
        self.lower.append(-math.inf if sense == AT_MOST else right)
        self.upper.append(math.inf if sense == AT_LEAST else right)

    def minimise(self, costs: Costs) -> None:
        """These costs, instead of those so far; others are 0."""
        found = np.zeros(len(self.columns))
        found[costs[0]] = costs[1]
        self.costs = array("d", found.tobytes())
