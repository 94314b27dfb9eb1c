"""A linear program as arrays, for either solver: columns in [0, 1], their costs, and rows.

Some hundred thousand columns are usual, so that an object of PuLP's for each, and an expression for
each row, took longer than the solver did. Here a row goes straight into arrays, which HiGHS takes
as they are (`autopar.solve.highs`); of the same arrays a PuLP model is made for its solvers
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
        starts, numbers, values: row i has entries starts[i]:starts[i+1]; an entry is a column's
            number and a value.
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
        """Append a column in [0, 1], at no cost; each name occurs once."""
        column = Column(len(self.columns), name, integer)
        self.columns.append(column)
        self.costs.append(0.0)
        return column

    def add_row(self, terms: Sequence[tuple[Column, float]], sense: str, right: float) -> None:
        """Append the row Σ value·column, compared with the right side.

        Args:
            terms: columns and values; no column occurs twice.
            sense: `EQUAL`, `AT_MOST` or `AT_LEAST`.
            right: the right side.
        """
        self.numbers.extend([column.number for column, _ in terms])
        self.values.extend([value for _, value in terms])
        self.starts.append(len(self.numbers))
        self.lower.append(-math.inf if sense == AT_MOST else right)
        self.upper.append(math.inf if sense == AT_LEAST else right)

    def minimise(self, costs: Costs) -> None:
        """Replace the costs of all columns; those that are not given are 0."""
        found = np.zeros(len(self.columns))
        found[costs[0]] = costs[1]
        self.costs = array("d", found.tobytes())


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
        """From (indices, values, lower, upper) per row."""
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
        """These rows, then the other ones."""
        starts = np.concatenate([self.starts, other.starts[1:] + self.starts[-1]]).astype(np.int32)
        pairs = (
            (getattr(self, name), getattr(other, name))
            for name in ("indices", "values", "lower", "upper")
        )
        return Rows(starts, *map(np.concatenate, pairs))

    def most(self, num_columns: int) -> Floats:
        """Per column its largest entry; 0 if there is none."""
        found = np.zeros(num_columns)
        np.maximum.at(found, self.indices, self.values)
        return found

    def only(self, columns: Columns) -> Rows:
        """The rows over some columns, which are renumbered; the others are 0."""
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
        """Set duals of a wrong sign to 0."""
        duals = np.where(np.isinf(self.lower), np.minimum(duals, 0.0), duals)
        return np.where(np.isinf(self.upper), np.maximum(duals, 0.0), duals)

    def times(self, duals: Floats, num_columns: int) -> Floats:
        """Aᵀy, by column."""
        weights = self.values * np.repeat(duals, np.diff(self.starts))
        return np.bincount(self.indices, weights=weights, minlength=num_columns).astype(
            np.float64
        )  # of nothing, whole numbers
