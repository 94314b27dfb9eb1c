"""A linear program as arrays: columns in [0, 1] with costs, and rows.

A program usually has some hundred thousand columns. One PuLP object per column and one expression
per row took longer than the solver. Rows are appended to arrays instead, which HiGHS takes without
conversion (`autopar.solve.highs`). PuLP models for other solvers are built from these arrays
(`autopar.solve.pulp_models`).
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
    """A variable in [0, 1]. `number` is its position in the order of creation."""

    number: int
    name: str
    integer: bool


Terms = list[tuple[Column, float]]
Costs = tuple[NDArray[np.int32], NDArray[np.float64]]
"""Numbers of columns, and their costs."""
EQUAL, AT_MOST, AT_LEAST = "=", "≤", "≥"


@dataclass(slots=True)
class Model:
    """Minimise Σ cost·column subject to the rows.

    Attributes:
        columns: the columns, in order.
        costs: cost of each column.
        starts: row i has entries starts[i]:starts[i+1].
        numbers: number of the column of each entry.
        values: coefficient of each entry.
        lower, upper: bounds of each row.
    """

    columns: list[Column] = field(default_factory=list)
    costs: array[float] = field(default_factory=lambda: array("d"))
    starts: array[int] = field(default_factory=lambda: array("i", [0]))
    numbers: array[int] = field(default_factory=lambda: array("i"))
    values: array[float] = field(default_factory=lambda: array("d"))
    lower: array[float] = field(default_factory=lambda: array("d"))
    upper: array[float] = field(default_factory=lambda: array("d"))

    def add_column(self, name: str, *, integer: bool = False) -> Column:
        """Append a column in [0, 1] without cost.

        Args:
            name: name of the column; must be unique.
            integer: whether its values must be integers.
        """
        column = Column(len(self.columns), name, integer)
        self.columns.append(column)
        self.costs.append(0.0)
        return column

    def add_row(self, terms: Sequence[tuple[Column, float]], sense: str, right: float) -> None:
        """Append the row Σ coefficient·column, compared with the right side.

        Args:
            terms: columns and coefficients; no column occurs twice.
            sense: `EQUAL`, `AT_MOST` or `AT_LEAST`.
            right: the right side.
        """
        self.numbers.extend([column.number for column, _ in terms])
        self.values.extend([value for _, value in terms])
        self.starts.append(len(self.numbers))
        self.lower.append(-math.inf if sense == AT_MOST else right)
        self.upper.append(math.inf if sense == AT_LEAST else right)

    def minimise(self, costs: Costs) -> None:
        """Replace the costs of all columns. The cost of columns that are not listed is 0."""
        column_costs = np.zeros(len(self.columns))
        column_costs[costs[0]] = costs[1]
        self.costs = array("d", column_costs.tobytes())


# --------------------------------------------------------------------------------------------------
# Constraint rows as arrays.

Floats = NDArray[np.float64]
Columns = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Rows:
    """Constraint rows in compressed form: row i has entries starts[i]:starts[i+1]."""

    starts: NDArray[np.int32]
    indices: NDArray[np.int32]
    values: Floats
    lower: Floats
    upper: Floats

    @staticmethod
    def of(rows: Sequence[tuple[Sequence[int], Sequence[float], float, float]]) -> Rows:
        """Return rows from (indices, values, lower, upper) of each row."""
        starts = np.cumsum([0, *(len(r[0]) for r in rows)]).astype(np.int32)
        indices = np.fromiter((i for r in rows for i in r[0]), np.int32, int(starts[-1]))
        values = np.fromiter((c for r in rows for c in r[1]), np.float64, int(starts[-1]))
        return Rows(
            starts,
            indices,
            values,
            np.array([r[2] for r in rows], float),
            np.array([r[3] for r in rows], float),
        )

    def plus(self, other: Rows) -> Rows:
        """Return these rows followed by the other ones."""
        starts = np.concatenate([self.starts, other.starts[1:] + self.starts[-1]]).astype(np.int32)
        pairs = (
            (getattr(self, name), getattr(other, name))
            for name in ("indices", "values", "lower", "upper")
        )
        return Rows(starts, *map(np.concatenate, pairs))

    def most(self, num_columns: int) -> Floats:
        """Return the largest entry of each column; 0 if there is none."""
        largest = np.zeros(num_columns)
        np.maximum.at(largest, self.indices, self.values)
        return largest

    def activities(self, values: Floats) -> Floats:
        """Return the left side of each row, given the values of the columns."""
        sums = np.concatenate([[0.0], np.cumsum(self.values * values[self.indices])])
        return sums[self.starts[1:]] - sums[self.starts[:-1]]

    def only(self, columns: Columns) -> Rows:
        """Return the rows restricted to some columns, which are renumbered. The other columns are
        0."""
        here = columns[self.indices]
        starts = np.concatenate([[0], np.cumsum(here)])[self.starts].astype(np.int32)
        number = np.cumsum(columns) - 1
        return Rows(
            starts,
            number[self.indices[here]].astype(np.int32),
            self.values[here],
            self.lower,
            self.upper,
        )

    def drop_wrong_signs(self, duals: Floats) -> Floats:
        """Return the duals with those of a wrong sign set to 0."""
        duals = np.where(np.isinf(self.lower), np.minimum(duals, 0.0), duals)
        return np.where(np.isinf(self.upper), np.maximum(duals, 0.0), duals)

    def times(self, duals: Floats, num_columns: int) -> Floats:
        """Return Aᵀy, by column."""
        weights = self.values * np.repeat(duals, np.diff(self.starts))
        return np.bincount(self.indices, weights=weights, minlength=num_columns).astype(
            np.float64
        )  # without rows bincount returns integers
