"""Budget rows at prices: the Lagrangian relaxation of memory.

With λ[r] ≥ 0 seconds per byte of row r, rows (6) to (8) of `autopar.solve.memory_rows` become costs
of the choices that take bytes, less what the budget itself is worth:

    Σ_r λ[r] · (static·x + held·bytes(l)·k + live·x + again·rc + reserve − budget)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.core.problem import Problem
from autopar.solve.memory_rows import budget_rows

Floats = NDArray[np.float64]


@dataclass
class MemoryPrices:
    """What bytes cost a problem's choices.

    Attributes:
        worths_s: budget row → what the whole budget is worth there.
        of_ops, of_again: seconds by strategy of each op, and where backward runs it again, all
            instances together.
        of_kept: per variant, seconds per byte of the version of one instance.
        given_s: what the budget is worth, less what is reserved. reserved_s: of that, what is.
    """

    problem: Problem
    worths_s: Mapping[str, float] = field(default_factory=dict)
    of_ops: list[Floats] = field(init=False)
    of_again: dict[int, Floats] = field(default_factory=dict)
    of_kept: Floats = field(init=False)
    given_s: float = 0.0
    reserved_s: float = 0.0

    def __post_init__(self) -> None:
        ops = self.problem.ops
        self.of_ops, self.of_kept = (
            [np.zeros(len(op.strategies)) for op in ops],
            np.zeros(len(self.problem.variants)),
        )
        rows = [row for row in budget_rows(self.problem) if self.worths_s.get(row.name, 0.0) > 0.0]
        for row in rows:
            per_byte = self.worths_s[row.name] / max(self.problem.budget_bytes, 1)
            self.reserved_s += per_byte * row.reserve_bytes
            for v, num in row.held:
                self.of_kept[v] += per_byte * num
            for n, sizes in row.live:
                self.of_ops[n] += per_byte * np.array(sizes, float)
            for n, sizes in row.again:
                self.of_again[n] = self.of_again.get(n, 0.0) + per_byte * np.array(sizes, float)
        whole = sum(self.worths_s[row.name] for row in rows)
        per_byte = whole / max(self.problem.budget_bytes, 1)
        for n, op in enumerate(ops):
            self.of_ops[n] += (
                per_byte * op.count * np.array([s.static_bytes for s in op.strategies], float)
            )
        self.given_s = whole - self.reserved_s
