"""Constraint rows as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
        return Rows(starts, indices, values, np.array([r[2] for r in rows], float), np.array([r[3] for r in rows], float))

    def plus(self, other: Rows) -> Rows:
        """These rows, then the other ones."""
        starts = np.concatenate([self.starts, other.starts[1:] + self.starts[-1]]).astype(np.int32)
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("indices", "values", "lower", "upper"))
        return Rows(starts, *map(np.concatenate, pairs))

    def most(self, num_columns: int) -> Floats:
        """Per column its largest entry; 0 where there is none."""
        found = np.zeros(num_columns)
        np.maximum.at(found, self.indices, self.values)
        return found

    def only(self, columns: Columns) -> Rows:
        """The rows over some columns, which are renumbered; the others are 0."""
        here = columns[self.indices]
        starts = np.concatenate([[0], np.cumsum(here)])[self.starts].astype(np.int32)
        number = np.cumsum(columns) - 1
        return Rows(starts, number[self.indices[here]].astype(np.int32), self.values[here], self.lower, self.upper)

    def signed(self, duals: Floats) -> Floats:
        """Duals, those of a wrong sign 0."""
        duals = np.where(np.isinf(self.lower), np.minimum(duals, 0.0), duals)
        return np.where(np.isinf(self.upper), np.maximum(duals, 0.0), duals)

    def times(self, duals: Floats, num_columns: int) -> Floats:
        """Aᵀy, by column."""
        weights = self.values * np.repeat(duals, np.diff(self.starts))
        return np.bincount(self.indices, weights=weights, minlength=num_columns).astype(np.float64)  # of nothing, whole numbers
